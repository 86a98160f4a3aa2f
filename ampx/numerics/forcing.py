"""What computes modules in dtypes of their own, in a region of `Probe.force`, where their calls can be intercepted."""

from __future__ import annotations

import abc
import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ampx.errors import UnsupportedDtypeError
from ampx.formats import FORMATS, digits_of, find_digits
from ampx.modules import Names, last_match


class Forcer(abc.ABC):
    """Computes modules in dtypes of their own, or rounds as these would: an interceptor of their calls."""

    def __init__(self, names: Names, dtypes: Mapping[str, str]) -> None:
        """Check patterns and dtypes.

        Raises:
            UnsupportedDtypeError: There is no such dtype.
            UnsupportedOpError: A pattern matches no module.
        """
        if unknown := sorted(name for name in dtypes.values() if name not in FORMATS and find_digits(name) is None):
            raise UnsupportedDtypeError(f"force got {unknown[0]!r}; accepted: {', '.join(FORMATS)}. Pass one of these.")
        names.check(dtypes, "force")
        self._names, self._dtype_of = names, partial(last_match, dtypes=dict(dtypes))

    @abc.abstractmethod
    def rounds(self, dtype: str) -> bool:
        """Return whether values are rounded to a dtype, which the device does not compute."""

    @abc.abstractmethod
    def rounded(self, tree: Any, dtype: str, gradients: bool) -> Any:
        """Return a tree with its floating tensors rounded, and where `gradients` is true their gradients, too.

        Args:
            tree: Tensors.
            dtype: One that `rounds`, or what `ampx.formats.digits_of` names.
            gradients: Round gradients, too.
        """

    @abc.abstractmethod
    def computing(self, dtype: Any) -> AbstractContextManager[Any]:
        """Return a region that computes in a dtype."""

    @abc.abstractmethod
    def cast(self, tree: Any, dtype: Any) -> Any:
        """Return a tree with its floating tensors in a dtype."""

    def dtype(self, module: Any) -> str | None:
        """Return the dtype of a module; None where it has none of its own."""
        return self._names.dtype(module, self._dtype_of)

    def call(self, module: Any, forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Compute a module in its dtype."""
        dtype = self.dtype(module)
        if dtype is None:
            return forward(*inputs, **options)
        if find_digits(dtype) is not None or self.rounds(dtype):
            inputs, options = self.rounded((inputs, options), dtype, gradients=False)
            return self.rounded(forward(*inputs, **options), dtype, gradients=True)
        with self.computing(dtype):
            inputs, options = self.cast((inputs, options), dtype)
            return forward(*inputs, **options)


def inside(name: str, outer: str) -> bool:
    """Return whether a module stands in another."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


def is_part(name: str, outer: str) -> bool:
    """Return whether a module is another one, or stands in it."""
    return name == outer or inside(name, outer)


def kept_in_float32(names: Iterable[str], modules: Sequence[str]) -> dict[str, str]:
    """Return what `Probe.force` takes to compute modules, and all inside them, in float32."""
    forced: dict[str, str] = {}
    for name in sorted(names):
        forced[glob.escape(name)] = "float32"
        if any(inside(other, name) for other in modules):
            forced[f"{glob.escape(name)}.*" if name else "*"] = "float32"
    return forced


def rounded_alone(name: str, modules: Sequence[str], bits: int) -> dict[str, str]:
    """Return what `Probe.force` takes to round what a module, and all inside it, take and return to so many bits."""
    return dict.fromkeys(kept_in_float32([name], modules), digits_of(bits))
