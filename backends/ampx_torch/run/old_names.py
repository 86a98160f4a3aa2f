"""`import apex` in a script that `ampx run` runs: ampx's own, from the moment the script asks for it."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final
from unittest import mock

from ampx_torch.old.apex import ApexPresentError, install, uninstall

from .manager import Manager, own_steps_recorded

_IN_PLACE: Final = "ampx_torch.old.apex.amp.opt"
_BY_HAND: Final = "ampx_torch.old.apex.fp16_utils.loss_scaler"
_AMP: Final = "apex.amp"
_OURS: Final = "ampx_torch.old.apex.amp"
_NAMES: Final = ("apex", "amp_C", "apex_C")


class _Finder(importlib.abc.MetaPathFinder):
    """Installs the old names when the first of them is asked for; an apex that still has amp is left alone.

    `apex.amp` stays hidden until the script asks for it, because that tells who decides what is cast.
    """

    def __init__(self, provided: Callable[[str], None], amp_asked: Callable[[], None]) -> None:
        self.asked = False
        self._provided = provided
        self._amp_asked = amp_asked
        self._hidden: ModuleType | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _AMP and self._hidden is not None:
            self._show()
            return _spec_of(fullname)
        if fullname == _OURS and not self.asked:
            self._amp_asked()
        if fullname not in _NAMES or self.asked:
            return None
        self.asked = True
        try:
            install()
        except ApexPresentError:
            return None
        self._provided(fullname)
        self._hide()
        return _spec_of(fullname)

    def _hide(self) -> None:
        package = sys.modules["apex"]
        self._hidden = sys.modules.pop(_AMP)
        del package.amp  # type: ignore[attr-defined]

        def look_up(name: str) -> ModuleType:
            if name == "amp" and self._hidden is not None:
                return self._show()
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")

        package.__getattr__ = look_up  # type: ignore[method-assign]

    def _show(self) -> ModuleType:
        amp = self._hidden
        assert amp is not None
        self.close()
        self._amp_asked()
        return amp

    def close(self) -> None:
        """Put `apex.amp` back where it was."""
        if self._hidden is not None:
            package = sys.modules["apex"]
            sys.modules[_AMP], package.amp = self._hidden, self._hidden  # type: ignore[attr-defined]
            del package.__getattr__
            self._hidden = None


def _spec_of(name: str) -> ModuleSpec | None:
    """Return the spec of a module that is there, and take the module out: else Python would load by its own spec."""
    module = sys.modules.pop(name, None)
    return None if module is None else ModuleSpec(name, _Provided(module), is_package=True)


class _Provided(importlib.abc.Loader):
    """Gives a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # it ran when it was made


@contextmanager
def old_names(manager: Manager) -> Iterator[None]:
    """Let the script import apex. Nothing is cast in a script that imports apex.amp until it has had its say."""
    patches = ExitStack()

    def provided(name: str) -> None:
        manager.run.provided.append(name)
        if not manager.run.settings.stand_ins_only:
            _watch_scales(manager, patches)

    finder = _Finder(provided, manager.hold)
    sys.meta_path.insert(0, finder)
    try:
        with patches:
            yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        finder.close()
        if finder.asked:
            uninstall()


def _watch_scales(manager: Manager, patches: ExitStack) -> None:
    """Record the steps of apex.amp; stand down at a loss scale of fp16_utils, as its optimizer does."""
    opt = importlib.import_module(_IN_PLACE)
    patches.enter_context(own_steps_recorded(manager, opt.ApexOptimizer))
    module = importlib.import_module(_BY_HAND)
    for kind in (module.LossScaler, module.DynamicLossScaler):
        patches.enter_context(mock.patch.object(kind, "__init__", _standing_down(manager, kind.__init__)))


def _standing_down(manager: Manager, make: Callable[..., None]) -> Callable[..., None]:
    def make_watched(self: object, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)
        manager.stand_down("a loss scale of apex.fp16_utils")

    return make_watched
