"""Mixed precision of the script's own, which is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final
from unittest import mock

import paddle
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer

from ampx.run import asked_by_script

from .manager import PaddleManager

OWN: Final = ("paddle", "ampx", "ampx_paddle", "contextlib")
THROUGH: Final = ("ampx_paddle.run",)
# Why Paddle's mixed precision is not carried out as PyTorch's is.
_NOT_AS_IT_IS: Final = (
    "--replace-native would leave its GradScaler what it is, as in PyTorch, where Paddle's is not right: it stops "
    "scaling once an auto_cast of another dtype than float16 was entered, after a skipped step plain ones do nothing, "
    "and its first overflow raises with NumPy 2.4"
)
_SHOWN: Final = {
    paddle.amp.GradScaler: "paddle.amp.GradScaler",
    MixPrecisionLayer: "paddle.distributed.fleet.utils.mix_precision_utils.MixPrecisionLayer",
}
# Where `paddle.Model` stands, which switches casting off around its network unless its own mixed precision is on.
_HIGH_LEVEL: Final = "paddle.hapi.model"


@contextmanager
def native_refused(manager: PaddleManager) -> Iterator[None]:
    """Patch what switches mixed precision on. What the script calls with `enable=False` stays as it is."""
    with ExitStack() as stack:
        for place, name in (
            (paddle.amp, "auto_cast"),
            (paddle.amp, "decorate"),
            (paddle.static.amp, "decorate"),
            (paddle.amp.GradScaler, "__init__"),
            (MixPrecisionLayer, "__init__"),
        ):
            stack.enter_context(mock.patch.object(place, name, _refusing(manager, place, name)))
        yield


def _refusing(manager: PaddleManager, place: Any, name: str) -> Any:
    native = getattr(place, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        switch = args[1:2] if name == "__init__" else args[:1] if name == "auto_cast" else ()
        enabled = place is MixPrecisionLayer or kwargs.get("enable", switch[0] if switch else True)
        if enabled and not manager.stood_down and asked_by_script(OWN, THROUGH):
            shown = _SHOWN.get(place) or f"{place.__name__}.{name}"
            reason = f", and {_NOT_AS_IT_IS}" if manager.run.settings.replace_native else ""
            manager.run.refuse(
                f"the script uses {shown} by itself{reason}; accepted: a script without mixed precision of its own. "
                f"Turn it off in the script, or edit the script to use ampx and ampx_paddle.scaler.GradScaler"
            )
        if name == "auto_cast" and not (enabled or manager.stood_down) and _asked_by_model():
            manager.run.lines = (
                manager.run.init_call(),
                "optimizer = ampx.wrap_optimizer(optimizer)",
                "model.prepare(optimizer, loss, amp_configs='O1')",
                "ampx_paddle.scaler.GradScaler(optimizer).attach(model)",
            )
            return nullcontext()
        return native(*args, **kwargs)

    return call


def _asked_by_model() -> bool:
    """Return whether `paddle.Model` calls the function that asks."""
    return bool(sys._getframe(2).f_globals.get("__name__") == _HIGH_LEVEL)
