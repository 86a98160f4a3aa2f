"""`import apex` in a script that `ampx run` runs: ampx's own, from the moment the script asks for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final
from unittest import mock

from ampx.run import ImportAlias, spec_of
from ampx_torch.run.manager import Recipe, TorchManager

from .apex import ApexPresentError, install, uninstall
from .apex.aliases import PARTS

_IN_PLACE: Final = "ampx_apex.apex.amp.opt"
_BY_HAND: Final = "ampx_apex.apex.fp16_utils.loss_scaler"
_AMP: Final = "apex.amp"
_OURS: Final = "ampx_apex.apex.amp"
# With parts that an installed apex may miss: a library may have imported that before.
_NAMES: Final = ("apex", "amp_C", "apex_C", *(f"apex.{part}" for part in PARTS))
_THROUGH: Final = ("torch.serialization",)  # torch.load imports what the file names


class _ApexAlias(ImportAlias):
    """Provides the old names when the script imports the first of them; an apex that still has amp is left alone.

    `apex.amp` stays hidden until the script asks for it, because that tells who decides what is cast.
    """

    def __init__(self, provided: Callable[[str], None], amp_asked: Callable[[], None]) -> None:
        super().__init__(_NAMES, self._put_in, self._take_away, through=_THROUGH)
        self._tell = provided
        self._amp_asked = amp_asked
        self._hidden: ModuleType | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _AMP and self._hidden is not None and self.asked_by_script():
            return spec_of(fullname, self._show)
        if fullname == _OURS and not self.provided:
            self._amp_asked()
        return super().find_spec(fullname, path, target)

    def _put_in(self, name: str) -> None:
        try:
            install()
        except ApexPresentError:
            return
        self._tell(name)
        self._hide()

    def _take_away(self) -> None:
        self._put_back()
        uninstall()

    def _hide(self) -> None:
        package = sys.modules["apex"]
        self._hidden = sys.modules.pop(_AMP)
        del package.amp

        def look_up(name: str) -> ModuleType:
            if name == "amp" and self._hidden is not None and self.asked_by_script():
                return self._show()
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")

        package.__getattr__ = look_up  # type: ignore[method-assign]

    def _show(self) -> ModuleType:
        amp = self._put_back()
        assert amp is not None
        self._amp_asked()
        return amp

    def _put_back(self) -> ModuleType | None:
        """Put `apex.amp` back where it was."""
        amp, self._hidden = self._hidden, None
        if amp is not None:
            package = sys.modules["apex"]
            sys.modules[_AMP], package.amp = amp, amp  # type: ignore[attr-defined]
            del package.__getattr__
        return amp


@contextmanager
def old_names(manager: TorchManager) -> Iterator[None]:
    """Let the script import apex. Nothing is cast in a script that imports apex.amp until it has had its say."""
    patches = ExitStack()

    def provided(name: str) -> None:
        manager.run.provided.append(name)
        if manager.run.settings.automates:
            _watch_scales(manager, patches)

    with _ApexAlias(provided, lambda: manager.hold(_RECIPE)).installed(), patches:
        yield


def _is_off() -> bool:
    amp = sys.modules.get(f"{_OURS}._amp_state")
    return amp is not None and bool(amp._amp_state.switched_off)


_RECIPE: Final = Recipe(_AMP, "amp.initialize", _is_off)


def _watch_scales(manager: TorchManager, patches: ExitStack) -> None:
    """Record the steps of apex.amp; stand down at a loss scale of fp16_utils, as its optimizer does."""
    opt = importlib.import_module(_IN_PLACE).ApexOptimizer
    patches.enter_context(mock.patch.object(opt, "step", manager.recorded(opt.step)))
    module = importlib.import_module(_BY_HAND)
    for kind in (module.LossScaler, module.DynamicLossScaler):
        patches.enter_context(mock.patch.object(kind, "__init__", _standing_down(manager, kind.__init__)))


def _standing_down(manager: TorchManager, make: Callable[..., None]) -> Callable[..., None]:
    def make_watched(self: object, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)
        manager.stand_down("a loss scale of apex.fp16_utils")

    return make_watched
