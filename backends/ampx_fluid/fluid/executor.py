"""Run programs, and feed them, by the names of `fluid`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from ampx.errors import UnsupportedByBackendError

from .layers.learning_rate import Schedule
from .missing import refuse_missing
from .programs import Program, raw, widened
from .script import check_callers

__all__ = ["DataFeeder", "Executor", "LoDTensor"]


class _Fetched(np.ndarray):
    """What is fetched: scripts write `float(loss)`, also of a row, which NumPy allows no more for shape (1,)."""

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __repr__(self) -> str:
        return repr(np.asarray(self))


class LoDTensor:
    """What is fetched with `return_numpy=False`: Paddle's tensor, and the calls of fluid's that it has no more."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def recursive_sequence_lengths(self) -> list[list[int]]:
        """Return the lengths of sequences: none, because Paddle 3 has no such tensors."""
        return []

    lod = recursive_sequence_lengths

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the values as a NumPy array. Sync: waits for the device."""
        return np.array(self._tensor, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_tensor" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._tensor, name)


class Executor:
    """Runs programs on a device."""

    def __init__(self, place: Any = None) -> None:
        """Make an executor; None is the device that Paddle prefers."""
        self.place = place
        self._executor = paddle.static.Executor(place)

    def run(
        self,
        program: Any = None,
        feed: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        fetch_list: Sequence[Any] | None = None,
        feed_var_name: str = "feed",
        fetch_var_name: str = "fetch",
        scope: Any = None,
        return_numpy: bool = True,
        use_program_cache: bool = True,
    ) -> list[Any]:
        """Run a program once; None is the default main program.

        Args:
            program: A program.
            feed: Arrays by the names of the program's inputs; or what a reader yields, a list of one such dict.
            fetch_list: Values to return: those of layers, or names of parameters. A clone finds those of the program it
                was made from.
            feed_var_name: As in Paddle.
            fetch_var_name: As in Paddle.
            scope: Holds the variables; None is the global scope.
            return_numpy: Return NumPy arrays.
            use_program_cache: Not looked at: programs are always kept.

        Raises:
            FluidNameError: Before anything is run: the script uses a name of fluid later that is not in the alias.

        Sync: waits for the device.
        """
        check_callers()
        if feed is not None and not isinstance(feed, Mapping):
            if len(feed) != 1:
                raise UnsupportedByBackendError(
                    f"Executor.run got a list of {len(feed)} feeds; accepted: one, for one device. Feed a dict."
                )
            feed = feed[0]
        chosen = Program(paddle.static.default_main_program()) if program is None else program
        fetched = [_find(chosen, value) for value in fetch_list or ()]
        results: list[Any] = self._executor.run(
            raw(chosen),
            feed={name: getattr(value, "_tensor", value) for name, value in dict(feed or {}).items()},
            fetch_list=fetched,
            feed_var_name=feed_var_name,
            fetch_var_name=fetch_var_name,
            scope=scope,
            return_numpy=return_numpy,
        )
        schedule = getattr(raw(chosen), "lr_scheduler", None)
        if isinstance(schedule, Schedule):
            schedule.step()  # in fluid a schedule was part of the program
        return [_as_fetched(result) if return_numpy else LoDTensor(result) for result in results]

    def close(self) -> None:
        """Release what the executor holds."""
        self._executor.close()


def _as_fetched(result: Any) -> Any:
    return result.view(_Fetched) if isinstance(result, np.ndarray) else result


def _find(program: Any, wanted: Any) -> Any:
    if not isinstance(wanted, str):
        return widened(program.find(wanted) if isinstance(program, Program) else wanted)
    value = raw(program).get_parameter_value_by_name(wanted)
    if not value.initialized():
        raise UnsupportedByBackendError(
            f"fetch_list names {wanted!r}, which is no parameter of the program; accepted: values, as layers return "
            f"them, and names of parameters. Pass the value itself: other values have no names in Paddle 3."
        )
    return value


class DataFeeder:
    """Turns a batch, a list of tuples, into arrays by the names of inputs."""

    def __init__(self, feed_list: Sequence[Any], place: Any = None, program: Any = None) -> None:
        """Remember the inputs, or their names in a program, in the order of each tuple."""
        block = (Program(paddle.static.default_main_program()) if program is None else program).global_block()
        inputs = [block.var(item) if isinstance(item, str) else item for item in feed_list]
        self._inputs = [(value.name, value.shape, str(value.dtype).rpartition(".")[2].lower()) for value in inputs]

    def feed(self, iterable: Iterable[Sequence[Any]]) -> dict[str, Any]:
        """Return arrays of shape (batch, ...) by name, for samples with an entry for every input."""
        columns = zip(*iterable, strict=True)
        return {
            name: np.stack([np.asarray(value, dtype).reshape(shape[1:]) for value in column])
            for (name, shape, dtype), column in zip(self._inputs, columns, strict=True)
        }


__getattr__ = refuse_missing(__name__)
