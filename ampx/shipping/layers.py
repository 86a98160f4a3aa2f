"""What the converters of backends share: which modules stay in float32, how a batch is passed, names of outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

from ampx.backend import MODULE, Array, Backend, is_module
from ampx.errors import ConversionError, InvalidOptionError, UnsupportedDtypeError, UnsupportedOpError, shown
from ampx.formats import FORMATS
from ampx.modules import some_names, unmatched


def check_computed(backend: Backend, device: str, dtype: str) -> None:
    """Raise where the device of a model does not compute a dtype.

    Raises:
        UnsupportedDeviceError: The backend knows no such device.
        UnsupportedDtypeError: It does not.
    """
    place = backend.device(device)
    computed = place.native | place.emulated | {"float32"}
    if dtype not in computed:
        raise UnsupportedDtypeError(
            f"dtype={dtype!r} is not computed by backend {backend.name!r} on {device!r}, where the model is "
            f"({place.reason}); accepted: {', '.join(sorted(computed))}. Choose one of these, or move the model to a "
            f"device that computes it."
        )


def denied_names(deny: Sequence[Any], names: Iterable[str]) -> frozenset[str]:
    """Return the names that entries `"module:pattern"` match, and those of all modules inside.

    Args:
        deny: The entries, of this form only.
        names: Of the modules of the model.

    Raises:
        UnsupportedOpError: An entry is of another form, or matches none.
    """
    every = [name for name in names if name]
    some = some_names(every)
    denied: set[str] = set()
    for entry in deny:
        if not is_module(entry):
            raise UnsupportedOpError(
                f"deny got {shown(entry)}, which names no module; accepted: 'module:' and a pattern of names of the "
                f"model's modules, which are {some}. Name the module that holds the operation."
            )
        pattern = entry.removeprefix(MODULE)
        if unmatched([pattern], every):
            raise UnsupportedOpError(
                f"deny got {entry!r}, which matches no module of the model; accepted: patterns of names of its "
                f"modules, which are {some}. Correct it."
            )
        denied |= {name for name in every if fnmatchcase(name, pattern)}
    return frozenset(name for name in every if any(name == outer or name.startswith(f"{outer}.") for outer in denied))


def leaves_first(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of modules, those without others inside first; the model itself, which has none, is left out."""
    every = [name for name in dict.fromkeys(names) if name]
    holds = {name for name in every if any(other.startswith(f"{name}.") for other in every)}
    return (*(name for name in every if name not in holds), *(name for name in every[::-1] if name in holds))


def check_fits(dtype: str, largest: Mapping[str, float]) -> None:
    """Raise for finite weights that a dtype cannot hold.

    Args:
        dtype: The dtype that they are to have.
        largest: By name of the weight, its largest finite magnitude; without those of denied modules.

    Raises:
        ConversionError: There are some.
    """
    limit = FORMATS[dtype].overflows_from
    beyond = {name: value for name, value in largest.items() if value >= limit}
    if beyond:
        rows = ", ".join(f"{name} ({value:.3g})" for name, value in list(beyond.items())[:5])
        raise ConversionError(
            f"convert got weights that become infinite in {dtype}: {rows}; accepted: magnitudes below {limit:.6g}. "
            f"Keep their modules in float32 by deny=['module:…'], or convert to bfloat16."
        )


def largest(values: Array) -> float:
    """Return the largest finite magnitude, for `check_fits`; 0.0 where there is none."""
    import numpy as np

    magnitudes = np.abs(values)
    return float(magnitudes[np.isfinite(magnitudes)].max(initial=0.0))


def check_float32(low: Sequence[str]) -> None:
    """Raise for a model that has weights in low precision already, which are passed by their names."""
    if low:
        raise InvalidOptionError(
            f"convert got a model with weights in low precision ({', '.join(low[:5])}), of which nothing can be told "
            f"about float32; accepted: float32 weights. Load its checkpoint into such a model, and convert that."
        )


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the named arguments that a batch stands for."""
    if isinstance(batch, dict):
        return (), dict(batch)
    return (batch if isinstance(batch, tuple) and not hasattr(batch, "_fields") else (batch,)), {}


def positional(batch: Any, kind: type, accepted: str) -> tuple[Any, ...]:
    """Return the arguments that a batch stands for, where a framework takes them by position and all are of a kind."""
    args, kwargs = arguments(batch)
    if kwargs or not all(isinstance(value, kind) for value in args):
        raise InvalidOptionError(
            f"convert got a batch of {', '.join(type(value).__name__ for value in (*args, *kwargs.values()))}; "
            f"accepted: {accepted} by position. Pass one, or a tuple of them."
        )
    return args


def named_outputs(outputs: Any, array: Callable[[Any], Array | None]) -> dict[str, Array]:
    """Return the tensors in what a model returned, by their places: `"output"`, `"output[0]"`, `"output['logits']"`.

    Args:
        outputs: A tensor; or tuples, lists, dicts and dataclasses that hold some.
        array: Returns a tensor as a NumPy array, floating ones as float32; None for what is no tensor.
    """
    return {name: value for name, leaf in _walk(outputs, "output") if (value := array(leaf)) is not None}


def _walk(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _walk(value, f"{name}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        keys: Sequence[object] = getattr(tree, "_fields", ()) or range(len(tree))
        for key, value in zip(keys, tree, strict=True):
            yield from _walk(value, f"{name}.{key}" if isinstance(key, str) else f"{name}[{key}]")
    elif is_dataclass(tree) and not isinstance(tree, type):
        for part in fields(tree):
            yield from _walk(getattr(tree, part.name), f"{name}.{part.name}")
    else:
        yield name, tree
