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
    """Return the active session, or that of a framework where several are active.

    Args:
        framework: Name of the framework; needed where several sessions are active.

    Raises:
        NotInitializedError: There is no such session, or there are several and `framework` names none.

    Example:
        >>> ampx.current().effective.dtype  # what is computed in
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
def wrap_optimizer(
    opt: Any,
    *,
    loss_scale: types.ScaleOption | None = None,
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    **options: Any,
) -> Any:
    """Return an optimizer that unscales gradients, checks them, skips steps that overflow, and keeps its loss scale.

    Args:
        opt: An optimizer of the framework, or a list of them, which then share one loss scale.
        loss_scale: As in `init`; by default the session's.
        max_grad_norm: Clip the unscaled gradients to this global L2 norm in every step.
        max_grad_value: Clip every element of the unscaled gradients to ± this value, before the norm.
        **options: Further options of the backend. PyTorch: `process_group`, `device_scale`, `fused`, `capturable`.
            MXNet: `in_place`, with which the trainer itself becomes the wrapped one.

    Returns:
        The wrapped optimizer, or the list. The framework accepts it wherever it accepts the raw one.

    Raises:
        NotAnOptimizerError: It is no optimizer of this framework.
        AlreadyWrappedError: It is wrapped already, or twice in the list.
        LowPrecisionParametersError: It holds float16 or bfloat16 parameters without master weights.
        InvalidOptionError: An option is unknown or has a value that is not accepted.
        UnsupportedByBackendError: The backend does not clip gradients.

    Example:
        >>> optimizer = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0)
    """
    return sessions.find("wrap_optimizer", opt).wrap_optimizer(
        opt, loss_scale=loss_scale, max_grad_norm=max_grad_norm, max_grad_value=max_grad_value, **options
    )


def scale_loss(loss: LossT, opt: Any, *, loss_id: int = 0) -> ScaleLoss[LossT]:
    """Return a region that yields the scaled loss; casting is off inside.

    Args:
        loss: A floating scalar tensor of any dtype, or a list, tuple or dict of such, which comes back in the same
            shape.
        opt: The wrapped optimizer whose gradients this backward pass computes, or a list of them. Of different scales
            the smallest is used.
        loss_id: Which of the optimizer's loss scales to use; each number has its own.

    Returns:
        A context manager that yields the loss in float32, times the loss scale.

    Raises:
        NotWrappedError: `opt` does not come from `wrap_optimizer`.
        LossShapeError: The loss is not a scalar.
        LossDtypeError: It is not a floating tensor.
        DetachedLossError: No gradient can flow from it.
        AlreadyScaledError: It was scaled before.
        NonFiniteLossError: It is NaN: see `nan_loss` of `init`.
        NestedScaleError: A block for the same optimizer is open.
        ProtocolError: The gradients were unscaled, and no step has come since.

    Sync: only with `init(nan_loss="raise")`, and a loss on an accelerator.

    Example:
        >>> with ampx.scale_loss(loss_fn(model(x), y), optimizer) as scaled:
        ...     scaled.backward()
    """
    return sessions.find("scale_loss", opt, loss).scale_loss(loss, opt, loss_id=loss_id)


def unscale(opt: Any) -> None:
    """Divide the pending gradients of a wrapped optimizer by its loss scale, before its step does; once is enough.

    Args:
        opt: The wrapped optimizer, or a list of them.

    Raises:
        NotScaledError: No `scale_loss` came since the last step.

    Sync: at most one.

    Example:
        >>> ampx.unscale(optimizer)  # from here on gradients have their real size
    """
    sessions.find("unscale", opt).unscale(opt)


def clip_grad_norm(opt: Any, max_norm: float) -> Any:
    """Clip the unscaled gradients by their global L2 norm; unscale them first where that is not done.

    Args:
        opt: The wrapped optimizer.
        max_norm: Largest norm that is left as it is; positive.

    Returns:
        The norm of the unscaled gradients before clipping, as the framework's scalar.

    Raises:
        NotScaledError: No `scale_loss` came since the last step.
        UnsupportedByBackendError: The backend does not clip gradients.

    Sync: at most one.

    Example:
        >>> norm = ampx.clip_grad_norm(optimizer, max_norm=1.0)
    """
    return sessions.find("clip_grad_norm", opt).clip_grad_norm(opt, max_norm)


def gate(scheduler: Any, opt: Any) -> Gate:
    """Return a scheduler, or an average of weights, that moves only when the optimizer's last step was applied.

    Args:
        scheduler: Anything with a method `step`, `update` or `update_parameters`. After a skipped step these do
            nothing. They return whether they did something; every other attribute is the object's own.
        opt: The wrapped optimizer, or a list of which all must have stepped. Where optimizer states are values (JAX): a
            function that returns the present state, or a list of such functions.

    Raises:
        InvalidOptionError: The object has none of these methods, or the list is empty.
        NotWrappedError: `opt` is neither a wrapped optimizer nor such a function.

    Sync: one per step where the scale lives on the device.

    Example:
        >>> scheduler = ampx.gate(scheduler, optimizer)
    """
    followed = opt if type(opt) in (list, tuple) else [opt]
    if any(map(is_state_getter, followed)) and len(sessions.all_sessions()) > 1:
        # What a function gives tells whose it is, once there is a step.
        return Gate(scheduler, [partial(_last_step_of, item) for item in followed])
    return sessions.find("gate", opt).gate(scheduler, opt)


def _last_step_of(followed: Any) -> StepResult | None:
    return last_step(followed() if is_state_getter(followed) else followed)


def prepare(model: Any, opt: Any = None) -> Any:
    """Prepare a model for levels O2 and O3, and resolve the names of modules in `deny` and `allow`.

    Args:
        model: The framework's model; changed in place where the framework can.
        opt: Its optimizer, raw or wrapped. At O2 it then updates float32 master weights.

    Returns:
        The model, or (model, opt) where an optimizer was passed.

    Raises:
        InvalidOptionError: The model or the optimizer is something else.
        UnsupportedOpError: A name matches no module.
        UnsupportedByBackendError: The backend has no such level.

    Example:
        >>> model, optimizer = ampx.prepare(model, optimizer)
    """
    return sessions.find("prepare", model, opt).prepare(model, opt)


def autocast(enabled: bool = True, dtype: types.DtypeName | types.DtypeObject | None = None) -> Region:
    """Return a region in which casting is on or off. It nests, survives exceptions, and is also a decorator.

    The session is the one that is active when the region is entered.

    Args:
        enabled: False computes in float32 inside.
        dtype: Compute dtype inside; by default the session's.

    Raises:
        InvalidOptionError: `enabled` is neither True nor False.
        UnsupportedDtypeError: The device cannot compute in this dtype.

    Example:
        >>> with ampx.autocast(enabled=False):
        ...     loss = loss_fn(model(x), y)
    """
    wanted = region_dtype(enabled, dtype)
    return Region(lambda: sessions.only("autocast").autocast_now(enabled, wanted))


def float_function(function: annotate.Function) -> annotate.Function:
    """Return a function that is computed in float32: floating arguments are cast, casting is off inside.

    Without a session it runs as it is.

    Args:
        function: The function.

    Example:
        >>> loss_fn = ampx.float_function(loss_fn)  # or @ampx.float_function above its definition
    """
    return annotate.annotate(function, "float", casting_of)


def half_function(function: annotate.Function) -> annotate.Function:
    """Return a function that is computed in the compute dtype: floating arguments are cast, casting is off inside.

    Without a session it runs as it is.

    Args:
        function: The function.

    Example:
        >>> matmul = ampx.half_function(torch.matmul)
    """
    return annotate.annotate(function, "half", casting_of)


def promote_function(function: annotate.Function) -> annotate.Function:
    """Return a function that is computed in the widest dtype of its floating arguments; casting is off inside.

    Without a session it runs as it is.

    Args:
        function: The function.

    Example:
        >>> add = ampx.promote_function(torch.add)
    """
    return annotate.annotate(function, "promote", casting_of)


def casting_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> annotate.Casting | None:
    """Return backend and plan by which a call with these arguments is cast; None where nothing is."""
    active = sessions.all_sessions()
    session = active[0] if len(active) == 1 else sessions.search((args, kwargs))
    return None if session is None else session.casting_now


def enter_thread() -> None:
    """Switch casting on in the calling thread, too; call it first in a new thread.

    Frameworks keep the switch by thread. It does nothing where a session casts nothing or was shut down. A thread pool
    takes it as `initializer=ampx.enter_thread`.

    Raises:
        NotInitializedError: No session is active.
        ProtocolError: Of the method: another session has replaced this one.

    Example:
        >>> pool = concurrent.futures.ThreadPoolExecutor(initializer=ampx.enter_thread)
    """
    for session in sessions.all_sessions() or [sessions.only("enter_thread")]:
        session.enter_thread()


def state_dict(opt: Any = None) -> dict[str, Any]:
    """Return the loss scales of all wrapped optimizers, in order of wrapping, as plain JSON types.

    Args:
        opt: Only the loss scale of this optimizer. Where optimizer states are values (JAX): the state, which is
            required.

    Raises:
        NotInitializedError: No session is active.

    Sync: where the scale lives on the device.

    Example:
        >>> checkpoint = {"model": model.state_dict(), "ampx": ampx.state_dict()}
    """
    return _session_for("state_dict", opt).state_dict(opt)


def load_state_dict(state: object, opt: Any = None) -> Any:
    """Load saved loss scales, before or after the first step; they may come from any framework.

    Args:
        state: What `state_dict` or `import_state` returned.
        opt: Load only the loss scale of this optimizer; the state must then hold one. Where optimizer states are values
            (JAX): the state, which is required.

    Returns:
        `opt`, or a new state with the loaded loss scale where optimizer states are values.

    Raises:
        UnknownSchemaError: The state is of another schema.
        InvalidStateError: A value is missing or not acceptable, or the number of loss scales differs.

    Sync: where the scale lives on the device.

    Example:
        >>> ampx.load_state_dict(checkpoint["ampx"])
    """
    return _session_for("load_state_dict", opt).load_state_dict(state, opt)


def last_step(opt: Any) -> StepResult | None:
    """Return what the last step of an optimizer did; None before the first.

    Args:
        opt: A wrapped optimizer, or an optimizer state (JAX), or anything that holds one. Where the state is traced,
            the fields of the result are tensors, and before the first step its `scale` is 0.

    Raises:
        NotWrappedError: It is neither.

    Sync: where the scale lives on the device, unless traced.

    Example:
        >>> result = ampx.last_step(optimizer)
    """
    return sessions.find("last_step", opt).last_step(opt)


def loss_scale(opt: Any) -> Any:
    """Return the current loss scale of an optimizer.

    Args:
        opt: As in `last_step`.

    Raises:
        NotWrappedError: It is neither.

    Sync: where the scale lives on the device, unless traced.

    Example:
        >>> ampx.loss_scale(optimizer)
    """
    return sessions.find("loss_scale", opt).loss_scale(opt)


def meter(opt: Any) -> Any:
    """Return what the last update that was measured did to the weights: one update in a hundred is measured.

    Args:
        opt: A wrapped optimizer, or an optimizer state outside traced code.

    Returns:
        An `ampx.numerics.meter.Meter`; None before the first such update, and where the backend does not measure.

        In JAX, and in functions of TensorFlow, updates of float32 parameters are measured only where
        `amp.meter_every = 100` was set before `wrap_optimizer`, because the smallest compiled steps would take more
        than 1 % longer.

    Raises:
        NotWrappedError: It is neither.
        ProtocolError: The state is traced.

    Sync: where the scale lives on the device.

    Example:
        >>> meter = ampx.meter(optimizer)
    """
    return sessions.find("meter", opt).meter(opt)


def observe(opt: Any) -> StepResult | None:
    """Send the events of the last step that were not sent yet, and return its result.

    A wrapped optimizer sends its events by itself. A state that is a value (JAX) cannot: its steps run in compiled
    code, and events are sent when the host looks. Call this after every step to get every event; of several steps since
    the last call only the last one's events are sent.

    Args:
        opt: A wrapped optimizer, or an optimizer state outside traced code.

    Raises:
        NotWrappedError: It is neither.
        ProtocolError: The state is traced.

    Sync: one.

    Example:
        >>> result = ampx.observe(optimizer)
    """
    return sessions.find("observe", opt).observe(opt)


def _session_for(call: str, opt: Any) -> Amp:
    return sessions.only(call) if opt is None else sessions.find(call, opt)


def on_event(listener: Listener) -> Callable[[], None]:
    """Call a function for every event of every active session.

    Args:
        listener: A function of an `Event`.

    Returns:
        A function that removes the listener.

    Raises:
        NotInitializedError: No session is active.
        InvalidOptionError: The listener cannot be called.

    Example:
        >>> remove = ampx.on_event(print)
    """
    active = sessions.all_sessions() or [sessions.only("on_event")]
    with ExitStack() as stack:
        for session in active:
            stack.callback(session.on_event(listener))
        return stack.pop_all().close


def shutdown(framework: str | None = None) -> None:
    """End the session of a framework, or all sessions: each framework is left as it was before `init`.

    Wrapped optimizers keep their loss scales, but `scale_loss` needs a session.

    Args:
        framework: Name of the framework; by default all.

    Raises:
        UnknownFrameworkError: No plugin registers the framework.

    Sync: where the scale lives on the device; events still due are sent.

    Example:
        >>> ampx.shutdown()
    """
    if framework is not None:
        default_registry().registration(framework)  # a misspelt name would end nothing
    with ExitStack() as stack:  # all are shut down, whatever one of them raises
        for session in sessions.all_sessions():
            if framework is None or session.framework == framework:
                stack.callback(session.shutdown)


def backends() -> dict[str, str]:
    """Return every framework with its state: `"registered"`, or why its plugin is broken. Imports no framework.

    Example:
        >>> ampx.backends()["torch"]
    """
    registry = default_registry()
    registered = dict.fromkeys(registry.names(), "registered")
    return {**{name: f"broken: {error}" for name, error in registry.broken.items()}, **registered}


def register_plugin(plugin: Any, name: str | None = None) -> None:
    """Register a plugin by hand, as entry points do by themselves.

    Args:
        plugin: An object, usually a module, with functions marked by `ampx.hookimpl`.
        name: Its name; by default that of the module.

    Raises:
        PluginError: It implements a hook that does not exist, or registering raises.
        DuplicateBackendError: It claims a framework that another plugin has.

    Example:
        >>> ampx.register_plugin(ampx_myframework)
    """
    default_registry().register_plugin(plugin, name)
