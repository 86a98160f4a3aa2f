"""Parts of ampx that may have been taken out, the meter among them, and modules that have a second name.

A part that is asked for and not there is named in one sentence.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, Final

from .errors import MissingPartError
from .protocol import StepObserver

METER_EVERY: Final = 100
METER_SAMPLES: Final = 4096
_METER: Final = "ampx.numerics.host_meter"  # loaded by the first optimizer that has one


@contextmanager
def parts_needed(by: str) -> Iterator[None]:
    """Return a region whose imports of parts of ampx that are not there raise an error of ampx.

    Args:
        by: What imports them, for the message.

    Raises:
        MissingPartError: A part is not there. Modules of others that are missing are reported as ever.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if isinstance(error, MissingPartError) or not _is_part(error.name):
            raise
        raise MissingPartError(
            f"{by} needs {error.name}, which has been taken out of this installation; accepted: an installation that "
            f"has it. Reinstall ampx-precision, or do without {by}.",
            name=error.name,
        ) from error


def import_part(name: str, by: str) -> ModuleType:
    """Import a module of ampx that may have been taken out.

    Args:
        name: The module.
        by: What needs it, for the message.

    Raises:
        MissingPartError: It is not there.
    """
    with parts_needed(by):
        return importlib.import_module(name)


def is_there(name: str) -> bool:
    """Return whether a module of ampx can be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its package is not there
        return False


def default_meter_every() -> int:
    """Return `METER_EVERY`; 0 where the meter was taken out."""
    return METER_EVERY if is_there(_METER) else 0


class NoMeter(StepObserver):
    """Stands for the meter where that was taken out: it looks at no step."""

    def before(self, optimizer: Any) -> bool:
        """Return that nothing looks at a step that begins."""
        return False

    def after(self, optimizer: Any, finite: Mapping[int, Any]) -> None:
        """Look at nothing."""

    def last(self, names: object = None) -> None:
        """Return that no update was looked at."""


def make_meter(compute: str, look: Callable[[Any, bool], Any]) -> Any:
    """Make the meter of an optimizer whose loss scale lives on the host, an `ampx.numerics.host_meter.HostMeter`.

    Args:
        compute: The compute dtype.
        look: As the meter takes it.
    """
    return import_part(_METER, "the meter").HostMeter(compute, look) if is_there(_METER) else NoMeter()


def forward(own: str, name: str, *former: str) -> None:
    """Make a module stand for another: importing it, or what is below it, gives that one and what is below that.

    Args:
        own: The module that stands for the other: it calls this while it is imported.
        name: The module itself.
        *former: Other names that it had.

    Raises:
        MissingPartError: The module has been taken out.
    """
    module = import_part(name, own)
    sys.meta_path.insert(0, Aliases(dict.fromkeys((own, *former), name)))
    sys.modules[own] = module


def _is_part(name: str | None) -> bool:
    top = (name or "").partition(".")[0]
    return top == "ampx" or top.startswith("ampx_")


class Aliases(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """A finder for `sys.meta_path`, before those of Python: another name gives the module itself, and no second copy.

    Args:
        names: Modules, or objects in them as `"module:object"`, by their other names. What is below a module is below
            its other name. Nothing is imported before a script asks for it.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find what a name stands for."""
        name = self.resolve(fullname)
        if name is None:
            return None
        spec = None if ":" in name else importlib.util.find_spec(name)
        if spec is None and ":" not in name:
            return None
        return ModuleSpec(fullname, self, is_package=spec is not None and spec.submodule_search_locations is not None)

    def resolve(self, fullname: str) -> str | None:
        """Return the name of the module that a name stands for; None for a name of others."""
        head, below = fullname, ""
        while head:
            if head in self.names:
                return self.names[head] + below
            head, dot, last = head.rpartition(".")
            below = f"{dot}{last}{below}"
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module itself in place of the empty one that Python has made, and likewise all that is below it.

        What is below and has been imported must not be imported again: Python would set it as an attribute of its
        package, where something else may have its name by now.
        """
        other = module.__name__
        own = sys.modules[other] = self._load(other)
        below = f"{own.__name__}."
        for name in [name for name in sys.modules if name.startswith(below)]:
            sys.modules[f"{other}.{name.removeprefix(below)}"] = sys.modules[name]
        for name in self.names:
            if name.startswith(f"{other}."):
                sys.modules[name] = self._load(name)

    def _load(self, fullname: str) -> Any:
        name = self.resolve(fullname)
        assert name is not None
        return pkgutil.resolve_name(name) if ":" in name else importlib.import_module(name)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code, for `python -m`."""
        spec = importlib.util.find_spec(self.resolve(fullname) or fullname)
        return None if spec is None else spec.loader.get_code(spec.name)  # type: ignore[union-attr]

    def get_source(self, fullname: str) -> str | None:
        """Return nothing: the source is that of the module itself."""
        return None
