"""The module-level functions: each finds the session for what it is given and calls its method."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from . import annotate
from .annotate import Region
from .events import Listener, StepResult
from .plugins import default_registry
from .scaling import LossT, ScaleLoss
from .session import Amp, Gate, is_state_getter, region_dtype, sessions

if TYPE_CHECKING:
    from . import framework_types as types


def current(framework: str | None = None) -> Amp:
    """Return the active session (of a framework, where several are active).

    Raises:
        NotInitializedError: There is none.
    """
    return sessions.only("current", framework)


@overload
def wrap_optimizer(opt: types.TorchRaw, **options: Any) -> types.TorchOptimizer: ...
@overload
def wrap_optimizer(opt: types.KerasRaw, **options: Any) -> types.KerasOptimizer: ...
@overload
def wrap_optimizer(opt: types.MXNetRaw, **options: Any) -> types.MXNetTrainer: ...
@overload
def wrap_optimizer(opt: types.PaddleRaw, **options: Any) -> types.PaddleOptimizer: ...
@overload
def wrap_optimizer(opt: types.OptaxRaw, **options: Any) -> types.OptaxTransformation: ...
@overload
def wrap_optimizer(opt: list[Any] | tuple[Any, ...], **options: Any) -> list[types.OtherOptimizer]: ...
@overload
def wrap_optimizer(opt: types.OtherRaw, **options: Any) -> types.OtherOptimizer: ...
def wrap_optimizer(opt: Any, **options: Any) -> Any:
    """Return an optimizer that unscales, checks, skips and keeps its own loss scale: see `Amp.wrap_optimizer`."""
    return sessions.find("wrap_optimizer", opt).wrap_optimizer(opt, **options)


def scale_loss(loss: LossT, opt: Any, *, loss_id: int = 0) -> ScaleLoss[LossT]:
    """Return a region that yields the scaled loss: see `Amp.scale_loss`."""
    return sessions.find("scale_loss", opt, loss).scale_loss(loss, opt, loss_id=loss_id)


def unscale(opt: Any) -> None:
    """Make pending gradients true: see `Amp.unscale`."""
    sessions.find("unscale", opt).unscale(opt)


def clip_grad_norm(opt: Any, max_norm: float) -> Any:
    """Clip the unscaled gradients: see `Amp.clip_grad_norm`."""
    return sessions.find("clip_grad_norm", opt).clip_grad_norm(opt, max_norm)


def gate(scheduler: Any, opt: Any) -> Gate:
    """Return a scheduler that waits for skipped steps: see `Amp.gate`."""
    followed = opt if type(opt) in (list, tuple) else [opt]
    if any(map(is_state_getter, followed)) and len(sessions.all_sessions()) > 1:
        # What a function gives tells whose it is, once there is a step.
        return Gate(scheduler, [partial(_last_step_of, item) for item in followed])
    return sessions.find("gate", opt).gate(scheduler, opt)


def _last_step_of(followed: Any) -> StepResult | None:
    return last_step(followed() if is_state_getter(followed) else followed)


def prepare(model: Any, opt: Any = None) -> Any:
    """Do to a model what the level needs: see `Amp.prepare`."""
    return sessions.find("prepare", model, opt).prepare(model, opt)


def autocast(enabled: bool = True, dtype: types.DtypeName | types.DtypeObject | None = None) -> Region:
    """Return a casting region, also a decorator: see `Amp.autocast`. The session is looked up on entry."""
    wanted = region_dtype(enabled, dtype)
    return Region(lambda: sessions.only("autocast").autocast_now(enabled, wanted))


def float_function(function: annotate.Function) -> annotate.Function:
    """Compute a function in float32; without a session it runs as it is: see `Amp.float_function`."""
    return annotate.annotate(function, "float", casting_of)


def half_function(function: annotate.Function) -> annotate.Function:
    """Compute a function in the compute dtype: see `Amp.half_function`."""
    return annotate.annotate(function, "half", casting_of)


def promote_function(function: annotate.Function) -> annotate.Function:
    """Compute a function in the widest dtype of its arguments: see `Amp.promote_function`."""
    return annotate.annotate(function, "promote", casting_of)


def casting_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> annotate.Casting | None:
    """Return backend and plan by which a call with these arguments is cast; None where nothing is."""
    active = sessions.all_sessions()
    session = active[0] if len(active) == 1 else sessions.search((args, kwargs))
    return None if session is None else session.casting_now


def enter_thread() -> None:
    """Switch process-wide casting on in the calling thread too, for every session: see `Amp.enter_thread`.

    Raises:
        NotInitializedError: No session is active, so that there is nothing to switch on.
    """
    for session in sessions.all_sessions() or [sessions.only("enter_thread")]:
        session.enter_thread()


def state_dict(opt: Any = None) -> dict[str, Any]:
    """Return the loss scales as plain JSON types: see `Amp.state_dict`."""
    return _session_for("state_dict", opt).state_dict(opt)


def load_state_dict(state: object, opt: Any = None) -> Any:
    """Take over loss scales; return `opt`, or the new optimizer state: see `Amp.load_state_dict`."""
    return _session_for("load_state_dict", opt).load_state_dict(state, opt)


def last_step(opt: Any) -> StepResult | None:
    """Return what the last step of an optimizer, or of an optimizer state, did: see `Amp.last_step`."""
    return sessions.find("last_step", opt).last_step(opt)


def loss_scale(opt: Any) -> Any:
    """Return the current loss scale of an optimizer, or of an optimizer state: see `Amp.loss_scale`."""
    return sessions.find("loss_scale", opt).loss_scale(opt)


def meter(opt: Any) -> Any:
    """Return what the last metered update of an optimizer, or of an optimizer state, did: see `Amp.meter`."""
    return sessions.find("meter", opt).meter(opt)


def observe(opt: Any) -> StepResult | None:
    """Send the events of the last step that are due, and return its result: see `Amp.observe`."""
    return sessions.find("observe", opt).observe(opt)


def _session_for(call: str, opt: Any) -> Amp:
    return sessions.only(call) if opt is None else sessions.find(call, opt)


def on_event(listener: Listener) -> Callable[[], None]:
    """Call a listener for every event of every active session; return a function that removes it again.

    Raises:
        NotInitializedError: No session is active.
    """
    active = sessions.all_sessions() or [sessions.only("on_event")]
    with ExitStack() as stack:
        for session in active:
            stack.callback(session.on_event(listener))
        return stack.pop_all().close


def shutdown(framework: str | None = None) -> None:
    """End the session of a framework, or all sessions: each framework is left as it was before `init`.

    Raises:
        UnknownFrameworkError: No plugin registers the framework.
    """
    if framework is not None:
        default_registry().registration(framework)  # a misspelt name would end nothing
    with ExitStack() as stack:  # all are shut down, whatever one of them raises
        for session in sessions.all_sessions():
            if framework is None or session.framework == framework:
                stack.callback(session.shutdown)


def backends() -> dict[str, str]:
    """List every framework with its state: `"registered"`, or why its plugin is broken. Imports no framework."""
    registry = default_registry()
    registered = dict.fromkeys(registry.names(), "registered")
    return {**{name: f"broken: {error}" for name, error in registry.broken.items()}, **registered}


def register_plugin(plugin: Any, name: str | None = None) -> None:
    """Register a plugin object by hand, as entry points do: see `Registry.register_plugin`."""
    default_registry().register_plugin(plugin, name)
