"""One framework's session, the table of sessions, and `ampx.init`, which starts one.

`Amp` holds one framework's policy and everything that its calls need; it knows no framework itself, and computes
nothing: the backend does.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from inspect import isroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from . import annotate, callers
from .backend import Backend, CastPlan, Device, Forcing, GenericBackend, offer
from .errors import (
    AlreadyWrappedError,
    AmpxWarning,
    InvalidOptionError,
    NotAnOptimizerError,
    NotInitializedError,
    NotWrappedError,
    PluginError,
    PrecisionWarning,
    ProtocolError,
    ScaleCollapsedWarning,
    UnsupportedByBackendError,
    UnsupportedDtypeError,
    shown,
)
from .events import Event, Listener, ScaleCollapsed, StepResult
from .optimizer import GenericOptimizer, WrappedOptimizer, check_bound, check_clipping, wrapped_optimizers
from .plugins import Registry, default_registry, known_failure
from .policy import Dtype, Effective, Level, OptLevel, PolicyFile, find_level, normalise_dtype
from .protocol import Handle, Member, ScaleGroup
from .rooms import default_meter_every, import_part
from .saved_state import dump_session, load_session
from .scale_state import LossScale, is_one
from .scaling import LossT, ScaleLoss

if TYPE_CHECKING:
    from . import framework_types as types


class Amp:
    """The session of one framework, which `init` returns. As a context manager it is shut down when it is left.

    Attributes:
        effective: What was chosen, and why.
        backend: The framework's backend.
        recipe: The old recipe that started it, such as `"apex.amp"`, where one did; for reports.
        meter_every: Steps between two measured updates of optimizers that are wrapped from now on; 0 measures none,
            None leaves it to the backend.

    Example:
        >>> with ampx.init("torch", dtype="bfloat16") as amp:
        ...     optimizer = amp.wrap_optimizer(optimizer)
    """

    recipe: str = ""

    def __init__(
        self,
        backend: Backend,
        plan: CastPlan | None,
        level: Level,
        effective: Effective,
        nan_loss: str,
    ) -> None:
        """Made by `ampx.init`, not by hand."""
        self.backend = backend
        self.effective = effective
        self.plan = plan
        self.level = level
        # Whether calls do anything. Plain attributes, like the two below: every training step reads them.
        self.enabled = effective.enabled
        # The plan for regions and functions; None where nothing is cast.
        self.casting = plan if effective.enabled else None
        # Whether a loss is tested for NaN: yes, no, or (None) where that is free.
        self.check_nan: bool | None = {"auto": None, "raise": True, "skip": False}[nan_loss]
        self._groups: list[tuple[ScaleGroup, list[weakref.ref[Any]]]] = []
        self._wrapped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._listeners: list[list[Listener]] = []
        self._transformations = 0  # so many optimizers were wrapped whose states carry the loss scale
        self.wrapped_optimizers = 0  # at least so many may be reached by a backward
        self._sent: dict[int, int] = {}  # the last step of each transformation whose events were sent
        # Of the optimizers that are wrapped from now on: every so many steps the meter looks at an update. None: every
        # METER_EVERY, where the backend meters without being asked.
        self.meter_every: int | None = None
        self._active = True
        self._endings: list[Callable[[], None]] = []  # called when the session ends
        # Losses that came out of scale_loss, by id; an entry goes with its object.
        self.scaled: dict[int, Callable[[], Any]] = {}

    def __repr__(self) -> str:
        effective = self.effective
        state = effective.reason if effective.enabled else "enabled=False"
        if not self._active:
            state = "shut down"
        dtype = effective.dtype or "float32"
        return f"<ampx.Amp: {self.framework} in {dtype} on {effective.device}, {effective.level}; {state}>"

    @property
    def framework(self) -> str:
        """Name of the framework."""
        return self.backend.name

    # -- optimizers --------------------------------------------------------------------------------

    @overload
    def wrap_optimizer(self, opt: types.TorchRaw, **options: Any) -> types.TorchOptimizer: ...
    @overload
    def wrap_optimizer(self, opt: types.KerasRaw, **options: Any) -> types.KerasOptimizer: ...
    @overload
    def wrap_optimizer(self, opt: types.MXNetRaw, **options: Any) -> types.MXNetTrainer: ...
    @overload
    def wrap_optimizer(self, opt: types.PaddleRaw, **options: Any) -> types.PaddleOptimizer: ...
    @overload
    def wrap_optimizer(self, opt: types.OptaxRaw, **options: Any) -> types.OptaxTransformation: ...
    @overload
    def wrap_optimizer(self, opt: list[Any] | tuple[Any, ...], **options: Any) -> list[types.OtherOptimizer]: ...
    @overload
    def wrap_optimizer(self, opt: types.OtherRaw, **options: Any) -> types.OtherOptimizer: ...
    def wrap_optimizer(
        self,
        opt: Any,
        *,
        loss_scale: types.ScaleOption | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        **options: Any,
    ) -> Any:
        """As `ampx.wrap_optimizer`, for this session."""
        self._check_active()
        several = type(opt) in (list, tuple)  # an optimizer may be a named tuple
        optimizers = list(opt) if several else [opt]
        self._check_all_raw(optimizers)
        bounds = {"max_grad_norm": max_grad_norm, "max_grad_value": max_grad_value}
        self._check_bounds(bounds)
        if reserved := options.keys() & {"plan", "level", "session"}:
            raise InvalidOptionError(
                f"wrap_optimizer got {', '.join(sorted(reserved))}, which init decides; accepted: loss_scale, "
                f"max_grad_norm, max_grad_value and what the backend adds. Pass it to ampx.init."
            )
        config = self.effective.loss_scale if loss_scale is None else LossScale.parse(loss_scale)
        settings = {
            "plan": self.plan,
            "level": self.level,
            "session": self,
            **{name: None if bound is None else float(bound) for name, bound in bounds.items()},
            **options,
        }
        group = self._new_group(config)
        wrapped = self._wrap_all(optimizers, group, settings)
        if not isinstance(wrapped[0], WrappedOptimizer):
            self._transformations += 1
        else:
            self._groups.append((group, [weakref.ref(optimizer) for optimizer in wrapped]))
            self.wrapped_optimizers += len(wrapped)
            sessions.note_wrapped(self.framework, wrapped)
        for optimizer in optimizers:
            self._remember(optimizer)
        return wrapped if several else wrapped[0]

    def _check_all_raw(self, optimizers: list[Any]) -> None:
        if not optimizers:
            raise NotAnOptimizerError(
                "wrap_optimizer got an empty list; accepted: an optimizer or a list of some. Pass yours."
            )
        for position, raw in enumerate(optimizers):
            self._check_raw(raw, optimizers[:position])

    def _check_bounds(self, bounds: Mapping[str, float | None]) -> None:
        for name, bound in bounds.items():
            check_bound(name, bound)
        if any(bound is not None for bound in bounds.values()):
            check_clipping(self.backend)

    def _new_group(self, config: LossScale) -> ScaleGroup:
        """Make the loss scale of the next optimizers."""
        group = new_group(self.framework, config, self.enabled)
        group.index = len(self.live_groups()) + self._transformations
        if self.meter_every is not None:
            if self.meter_every:
                import_part("ampx.numerics.meter", "amp.meter_every")
            group.meter_every, group.meter_asked = self.meter_every, True
        return group

    def _wrap_all(self, optimizers: Sequence[Any], group: ScaleGroup, settings: Mapping[str, Any]) -> list[Any]:
        """Wrap all optimizers or none."""
        wrapped: list[Any] = []
        try:
            for optimizer in optimizers:
                wrapped.append(self._wrap(optimizer, group.add_member(), settings))
        except BaseException:
            for optimizer in reversed(wrapped):
                if isinstance(optimizer, WrappedOptimizer):
                    optimizer.ampx_unwrap()
            raise
        return wrapped

    def _wrap(self, opt: Any, member: Member, settings: Mapping[str, Any]) -> Any:
        wrapped = self.backend.wrap_optimizer(opt, member, settings)
        if wrapped is not None:
            return wrapped
        if not isinstance(self.backend, GenericBackend):
            raise PluginError(
                f"wrap_optimizer of backend {self.framework!r} returned None; accepted: a WrappedOptimizer, or None of "
                f"an ampx.GenericBackend. Derive the backend from that."
            )
        return GenericOptimizer(self.backend, opt, member, settings)

    def scale_loss(self, loss: LossT, opt: Any, *, loss_id: int = 0) -> ScaleLoss[LossT]:
        """As `ampx.scale_loss`, for this session."""
        if isinstance(opt, WrappedOptimizer):
            return ScaleLoss(self, loss, (opt.ampx_member.owner_of(opt),), loss_id)
        state = self.backend.state_handle(opt, "scale_loss")
        if state is not None:
            return ScaleLoss(self, loss, (), loss_id, state.loss_scale if state.ampx_enabled else None)
        optimizers = wrapped_optimizers(opt, "scale_loss")
        if len(set(map(id, optimizers))) < len(optimizers):
            raise InvalidOptionError(
                f"scale_loss got {len(optimizers)} optimizers, one of them twice; accepted: one or several different "
                f"ones. Pass those whose gradients this backward makes."
            )
        return ScaleLoss(self, loss, optimizers, loss_id)

    def others(self, optimizers: Sequence[WrappedOptimizer]) -> list[WrappedOptimizer]:
        """List the living wrapped optimizers of the framework but these."""
        own = set(map(id, optimizers))
        return [optimizer for optimizer in sessions.living_optimizers(self.framework) if id(optimizer) not in own]

    def unscale(self, opt: Any) -> None:
        """As `ampx.unscale`, for this session."""
        for handle in self._handles(opt, "unscale"):
            handle.ampx_unscale()

    def clip_grad_norm(self, opt: Any, max_norm: float) -> Any:
        """As `ampx.clip_grad_norm`, for this session."""
        check_bound("max_norm", max_norm, optional=False)
        handle = self.handle(opt, "clip_grad_norm")
        check_clipping(self.backend)
        return handle.ampx_clip_grad_norm(float(max_norm))

    def gate(self, scheduler: Any, opt: Any) -> Gate:
        """As `ampx.gate`, for this session."""
        followed = opt if type(opt) in (list, tuple) else [opt]  # an optimizer may be a named tuple
        return Gate(scheduler, [self._follow(item) for item in followed])

    def _follow(self, opt: Any) -> Callable[[], StepResult | None]:
        """Return what returns the last step of a wrapped optimizer, or of the state that a function gives."""
        if is_state_getter(opt):
            return lambda: self.last_step(opt())
        if isinstance(opt, WrappedOptimizer):
            return partial(getattr, opt, "last_step")  # unlike a function, copied with its optimizer
        if self.backend.state_handle(opt, "gate") is None:
            wrapped_optimizers(opt, "gate")
        raise NotWrappedError(
            f"gate got a {type(opt).__name__}, a state that the next step replaces; accepted: a function that gives "
            f"the present state. Pass lambda: opt_state."
        )

    # -- casting --------------------------------------------------------------------------------------------------

    def prepare(self, model: Any, opt: Any = None) -> Any:
        """As `ampx.prepare`, for this session."""
        if self.casting is None:
            return model if opt is None else (model, opt)
        if model is None:
            raise InvalidOptionError(
                "prepare got None as the model; accepted: a model of the framework, and its optimizer behind it. Pass "
                "the model first."
            )
        return self.backend.prepare(model, opt, self.casting)

    def autocast(
        self, enabled: bool = True, dtype: types.DtypeName | types.DtypeObject | None = None
    ) -> annotate.Region:
        """As `ampx.autocast`, for this session."""
        wanted = region_dtype(enabled, dtype)
        return annotate.Region(lambda: self.autocast_now(enabled, wanted))

    def autocast_now(self, enabled: bool, dtype: Dtype | None = None) -> AbstractContextManager[Any]:
        """Return the backend's own region, to be entered at once."""
        plan = self.casting
        if plan is None:
            return nullcontext()
        if dtype == "float32":
            enabled = False
        elif dtype is not None and dtype != plan.dtype:
            device = self.backend.device(plan.device)
            supported = device.native | device.emulated
            if dtype not in supported:
                raise UnsupportedDtypeError(
                    f"autocast(dtype={dtype!r}) is not supported by backend {self.backend.name!r} on {plan.device!r}; "
                    f"supported: {', '.join(sorted(supported))}. Choose one of these."
                )
            plan = self.backend.check_plan(CastPlan(plan.device, dtype, plan.level, plan.allow, plan.deny))
        return _SessionRegion(self, self.backend.autocast(plan, enabled))

    def restore_casting(self) -> None:
        """Switch casting once more as the last `init` or `shutdown` left it, at the end of a region that began before.

        The region has put back what was before it, which was this session's.
        """
        later = sessions.get(self.framework)
        if later is not None and later.casting is not None:
            if later.effective.process_wide:
                later.backend.enter_thread(later.casting)
        elif self.plan is not None and self.effective.process_wide:
            self.backend.deactivate(self.plan)

    @property
    def casting_now(self) -> annotate.Casting | None:
        """The backend and the plan for regions and functions; None where nothing is cast."""
        return None if self.casting is None else (self.backend, self.casting)

    def enter_thread(self) -> None:
        """As `ampx.enter_thread`, for this session."""
        if sessions.get(self.framework) is not None:
            self._check_active()
        if self.casting is not None and self.effective.process_wide:
            self.backend.enter_thread(self.casting)

    def float_function(self, function: annotate.Function) -> annotate.Function:
        """As `ampx.float_function`, for this session."""
        return annotate.annotate(function, "float", lambda *_: self.casting_now)

    def half_function(self, function: annotate.Function) -> annotate.Function:
        """As `ampx.half_function`, for this session."""
        return annotate.annotate(function, "half", lambda *_: self.casting_now)

    def promote_function(self, function: annotate.Function) -> annotate.Function:
        """As `ampx.promote_function`, for this session."""
        return annotate.annotate(function, "promote", lambda *_: self.casting_now)

    # -- what a step did; states and events -----------------------------------------------------------------------

    def last_step(self, opt: Any) -> StepResult | None:
        """As `ampx.last_step`, for this session."""
        return self.handle(opt, "last_step").last_step

    def loss_scale(self, opt: Any) -> Any:
        """As `ampx.loss_scale`, for this session."""
        return self.handle(opt, "loss_scale").loss_scale

    def meter(self, opt: Any) -> Any:
        """As `ampx.meter`, for this session."""
        return self.handle(opt, "meter").meter

    def observe(self, opt: Any) -> StepResult | None:
        """As `ampx.observe`, for this session."""
        return self.handle(opt, "observe").ampx_observe(self._sent)

    # -- for the rest of the session -----------------------------------------------------------------

    def _handles(self, opt: Any, call: str) -> Sequence[Handle]:
        state = None if isinstance(opt, WrappedOptimizer) else self.backend.state_handle(opt, call)
        return wrapped_optimizers(opt, call) if state is None else [state]

    def handle(self, opt: Any, call: str) -> Handle:
        """Return the handle of what a call takes one of: a wrapped optimizer, or an optimizer state.

        Raises:
            NotWrappedError: It is neither.
            InvalidOptionError: It is a list of none or several.
        """
        handles = self._handles(opt, call)
        if len(handles) != 1:
            raise InvalidOptionError(
                f"{call} got a list of {len(handles)} optimizers; accepted: one optimizer. Call it for each."
            )
        return handles[0]

    def live_groups(self) -> list[ScaleGroup]:
        """List the loss scales whose optimizers are alive, in order of wrapping."""
        self._groups = [entry for entry in self._groups if any(wrapped() is not None for wrapped in entry[1])]
        groups = [group for group, _ in self._groups]
        for position, group in enumerate(groups):
            group.index = position
        return groups

    def optimizers_of(self, group: ScaleGroup) -> list[Any]:
        """List the wrapped optimizers that a loss scale was made for and that are alive."""
        references = next((references for entry, references in self._groups if entry is group), [])
        return [optimizer for reference in references if (optimizer := reference()) is not None]

    def state_dict(self, opt: Any = None) -> dict[str, Any]:
        """As `ampx.state_dict`, for this session."""
        state = self.backend.state_handle(opt, "state_dict")
        groups = self._groups_of(opt, "state_dict") if state is None else [state.ampx_group]
        return dump_session(self.effective.framework, groups)

    def load_state_dict(self, state: object, opt: Any = None) -> Any:
        """As `ampx.load_state_dict`, for this session."""
        if not self.effective.enabled:
            return opt
        handle = self.backend.state_handle(opt, "load_state_dict")
        load_session(state, self._groups_of(opt, "load_state_dict") if handle is None else [handle.ampx_group])
        return opt if handle is None else handle.ampx_reloaded()

    def on_event(self, listener: Listener) -> Callable[[], None]:
        """As `ampx.on_event`, for this session."""
        if not callable(listener):
            raise InvalidOptionError(
                f"on_event got the listener {listener!r}; accepted: a function of one event. Pass one."
            )
        entry = [listener]  # an identity of its own: a listener may be registered twice
        self._listeners.append(entry)

        def remove() -> None:
            self._listeners[:] = [listening for listening in self._listeners if listening is not entry]

        return remove

    def emit(self, event: Event) -> None:
        """Hand an event to the listeners: to all of them, whatever one raises."""
        with ExitStack() as stack:
            for (listener,) in reversed(self._listeners):
                stack.callback(listener, event)

    def _groups_of(self, opt: Any, call: str) -> list[ScaleGroup]:
        """List the loss scales of some wrapped optimizers; of all for None."""
        if opt is None:
            return self.live_groups()
        return list(dict.fromkeys(optimizer.ampx_group for optimizer in wrapped_optimizers(opt, call)))

    # -- life --------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Become the framework's session and switch process-wide casting on, as `init` does."""
        # The session is known first, and forgotten last: whatever interrupts either, `shutdown` does the rest.
        self._active = True
        sessions.add(self)
        self.wrapped_optimizers = len(sessions.living_optimizers(self.framework))
        self.casting = self.plan if self.enabled else None
        if self.casting is not None and self.casting.float32_modules:
            forced = ExitStack()
            forced.enter_context(
                offer(self.backend, Forcing).force(None, dict.fromkeys(self.casting.float32_modules, "float32"))
            )
            self.at_shutdown(forced.close)
        if self.plan is not None and self.enabled and self.effective.process_wide:
            self.backend.activate(self.plan)

    def shutdown(self) -> None:
        """Leave the framework as it was before `init`; repeated calls do nothing.

        Optimizers wrapped here keep their loss scales, but `scale_loss` needs a session of the framework.

        Sync: where the scale lives on the device (events still due are sent).
        """
        if not self._active:
            sessions.remove(self)  # where the first call was interrupted before it did
            return
        with ExitStack() as stack:  # a listener may raise: the others hear their events, and the framework is restored
            stack.callback(self._end)
            for group in reversed(self.live_groups()):
                stack.callback(group.ledger.close, group)

    def _end(self) -> None:
        """Restore the framework, and forget the session; what was interrupted is done again by the next `shutdown`."""
        self.casting = None
        try:
            try:
                if self.plan is not None and self.enabled and self.effective.process_wide:
                    self.backend.deactivate(self.plan)
            finally:
                with ExitStack() as stack:  # the last first, and all, whatever one of them raises
                    while self._endings:
                        stack.callback(self._endings.pop(0))
        except Exception:  # the backend would fail again
            self._forget()
            raise
        self._forget()

    def at_shutdown(self, undo: Callable[[], None]) -> Callable[[], None]:
        """Have `shutdown` call a function, after the last events; the result of this forgets it.

        For backends, whose other verbs changed the framework, too, and for those who follow the session.
        """
        self._endings.append(undo)

        def forget() -> None:
            if undo in self._endings:
                self._endings.remove(undo)

        return forget

    def _forget(self) -> None:
        self._active = False
        sessions.remove(self)

    def __enter__(self) -> Amp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- checks ------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether the session was neither shut down nor replaced by another `init`."""
        return self._active

    def _check_active(self) -> None:
        if not self._active:
            raise ProtocolError(
                f"this session for {self.framework!r} was shut down, or replaced by a later ampx.init; accepted: an "
                f"active session. Call ampx.init again, or use what it returned last."
            )

    def _check_raw(self, opt: Any, before: Sequence[Any]) -> None:
        twice = isinstance(opt, WrappedOptimizer) or any(opt is other for other in before)
        if isinstance(opt, WrappedOptimizer) and all(opt.ampx_group is not group for group, _ in self._groups):
            raise AlreadyWrappedError(
                f"wrap_optimizer got an optimizer ({type(opt).__name__}) that is wrapped already, and not by this "
                f"session: ampx.init was called again, or it is a copy; its gradients would be unscaled twice. Wrap "
                f"the raw optimizer anew, the one that was passed to wrap_optimizer then."
            )
        if twice or self._is_remembered(opt):
            raise AlreadyWrappedError(
                f"wrap_optimizer got an optimizer ({type(opt).__name__}) that is wrapped already; its gradients would "
                f"be unscaled twice. Use the object that the first call returned: opt = ampx.wrap_optimizer(opt). If "
                f"nothing holds it any more, make the optimizer anew, load the state of this one, and wrap that."
            )
        if not self.backend.is_optimizer(opt):
            kind = opt if isinstance(opt, type) else type(opt)
            raise NotAnOptimizerError(
                f"wrap_optimizer got {'the class ' if kind is opt else ''}{kind.__module__}.{kind.__qualname__}, which "
                f"is no optimizer of {self.framework!r}; accepted: {self.backend.optimizers} or a list of them. "
                f"Pass that{', made with its parameters' if kind is opt else ''}."
            )

    def _is_remembered(self, opt: Any) -> bool:
        try:
            return opt in self._wrapped
        except TypeError:
            return False

    def _remember(self, opt: Any) -> None:
        try:
            self._wrapped.add(opt)
        except TypeError:
            # Values such as named tuples have no identity to remember; wrapping them again is no error.
            return


class _SessionRegion:
    """A backend's region, after which casting is that of `init` or `shutdown` if one of them was called inside."""

    __slots__ = ("_amp", "_region")

    def __init__(self, amp: Amp, region: AbstractContextManager[Any]) -> None:
        self._amp = amp
        self._region = region

    def __enter__(self) -> None:
        self._region.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._region.__exit__(kind, error, trace)
        if self._amp.casting is None:
            self._amp.restore_casting()


def init(
    framework: types.Framework | None = None,
    *,
    dtype: types.DtypeName | types.DtypeObject | Literal["auto"] = "auto",
    level: OptLevel = "O1",
    device: str = "auto",
    loss_scale: types.ScaleOption | Literal["auto"] = "auto",
    process_wide: bool = True,
    allow: Iterable[Any] = (),
    deny: Iterable[Any] = (),
    on_unsupported: Literal["raise", "warn"] = "raise",
    nan_loss: Literal["auto", "raise", "skip"] = "auto",
    enabled: bool = True,
    policy: str | os.PathLike[str] | None = None,
) -> Amp:
    """Start mixed precision for one framework. A former session of the same framework is shut down first.

    Args:
        framework: `"torch"`, `"tensorflow"`, `"jax"`, `"paddle"`, `"mxnet"`, or a name that a plugin registers; by
            default the only one of these that is imported.
        dtype: `"float16"`, `"bfloat16"`, or `"auto"`: float16 on an NVIDIA GPU with Tensor Cores, bfloat16 on a CPU
            that has instructions for it, else off, with a warning.
        level: `"O0"` float32; `"O1"` casts operations by the framework's lists; `"O2"` low-precision parameters, with
            float32 norms and master weights (needs `prepare`); `"O3"` everything in low precision.
        device: The device on which computation is cast: `"auto"`, or a name such as `"cuda"` or `"cpu"`.
        loss_scale: `"auto"`: dynamic for float16 at O1 and O2, else no scaling. Or `"dynamic"`, a positive number
            (static), or a `LossScale`.
        process_wide: True casts everywhere; False only inside `autocast` regions.
        allow: Operations to compute in low precision beyond the framework's own list.
        deny: Operations, modules or name patterns to compute in float32. Entries are checked even where nothing is
            cast.
        on_unsupported: Where the device cannot compute the dtype: `"raise"`, or `"warn"` and use what it can.
        nan_loss: Where the loss is NaN before it is scaled: `"auto"` raises if the loss is on the host, where looking
            is free, and else skips the step; `"raise"` always looks and raises; `"skip"` never looks.
        enabled: False makes every call do nothing, so that a script need not change.
        policy: A policy file, as `ampx tune` writes it. Its `framework`, `dtype`, `level` and `loss_scale` hold where
            these arguments have their defaults; its lists come before `allow` and `deny`; its `enabled = false` always
            holds.

    Returns:
        The session.

    Raises:
        UnknownFrameworkError: No plugin registers the framework.
        AmbiguousFrameworkError: None is named, and none or several are imported.
        FrameworkNotInstalledError: The framework cannot be imported.
        BackendLoadError: The framework or its backend fails while it is imported.
        PluginError: The plugin of the framework is broken.
        PolicyFileError: The policy file cannot be read, or is for another framework.
        UnsupportedDtypeError: The device cannot compute the dtype.
        UnsupportedDeviceError: There is no such device here.
        UnsupportedLevelError: There is no such level.
        UnsupportedByBackendError: The backend does not have the level, or does not take lists.
        UnsupportedOpError: An entry of `allow` or `deny` means nothing to the framework.
        InvalidOptionError: Another argument has a value that is not accepted.

    Example:
        >>> amp = ampx.init("torch", dtype="bfloat16")
    """
    if policy is not None:
        file = PolicyFile.read(policy)
        framework = file.framework if framework is None else framework
        if framework is not None:
            file.check_framework(framework)
        dtype, level, loss_scale, allow, deny = file.combined(dtype, level, loss_scale, allow, deny)
        enabled = enabled and file.enabled if isinstance(enabled, bool) else enabled
    opt_level = find_level(level)
    wanted = None if _is_auto(dtype) else normalise_dtype(dtype)
    scale = None if _is_auto(loss_scale) else LossScale.parse(loss_scale)
    allowed, denied = listed("allow", allow), listed("deny", deny)
    _check_choice("on_unsupported", on_unsupported, ("raise", "warn"))
    _check_choice("nan_loss", nan_loss, ("auto", "raise", "skip"))
    _check_choice("process_wide", process_wide, (True, False))
    _check_choice("enabled", enabled, (True, False))
    registry = default_registry()
    name = registry.guess() if framework is None else framework
    _warn_of_versions(registry, registry.registration(name).name)
    backend = registry.load(name)
    _check_level(backend, opt_level)
    target = backend.device(device)
    chosen, reason = _choose_dtype(backend, target, wanted, opt_level, on_unsupported, enabled)
    chosen = None if chosen == "float32" else chosen  # which a device may prefer
    scale = scale or _default_scale(chosen, opt_level)
    plan = None
    if chosen is not None:
        plan = backend.check_plan(CastPlan(target.name, chosen, opt_level.name, allowed, denied, not is_one(scale)))
    elif enabled:
        _check_lists(backend, target, opt_level, allowed, denied)
    effective = Effective(
        framework=backend.name,
        device=target.name,
        dtype=chosen,
        level=opt_level.name,
        policy=opt_level.policy(chosen or "float32"),
        loss_scale=scale,
        native=chosen in target.native,
        # Where only functions are cast that the script names, their operations are cast at every level.
        process_wide=process_wide and (opt_level.casts_ops or backend.capabilities.autocast == "explicit"),
        enabled=enabled,
        reason=reason,
    )
    session = Amp(backend, plan, opt_level, effective, nan_loss)
    sessions.replace(session)
    return session


def _is_auto(option: object) -> bool:
    return isinstance(option, str) and option == "auto"


def _check_lists(backend: Backend, device: Device, level: Level, allow: tuple[Any, ...], deny: tuple[Any, ...]) -> None:
    """Raise for entries that no device could honour, where nothing is cast: they are mistakes all the same."""
    if allow or deny:
        assumed: OptLevel = "O1" if level.name == "O0" else level.name
        backend.check_plan(CastPlan(device.name, "float16", assumed, allow, deny))


def _warn_of_versions(registry: Registry, framework: str) -> None:
    """Warn where tests are known to fail with the installed release, once in a process, before it is imported."""
    if framework not in registry.versions_told:
        registry.versions_told.add(framework)
        message = known_failure(framework)
        if message is not None:
            callers.warn(f"{message}.", AmpxWarning)


def region_dtype(enabled: object, dtype: object) -> Dtype | None:
    """Return the dtype that a region asks for, None for the session's, once what it was given is checked."""
    # What stands first elsewhere: a device, a dtype, or the function under a decorator without brackets.
    if enabled not in (True, False):
        raise InvalidOptionError(
            f"autocast got enabled={shown(enabled)}; accepted: True or False. Name a dtype by dtype=…, leave the "
            f"device to init, and write a decorator with brackets: @ampx.autocast()."
        )
    return None if dtype is None else normalise_dtype(dtype)


def check_settings(backend: Backend, dtype: str, level: str, device: str) -> None:
    """Raise what `init` would say of settings, as far as it can be known without disturbing the framework.

    A device that was not named is not looked for: that would wake the driver, before the script has said which
    devices it wants to see, or has forked.

    Raises:
        UnsupportedDtypeError, UnsupportedDeviceError, UnsupportedLevelError, UnsupportedByBackendError: A setting
            cannot be honoured.
    """
    opt_level = find_level(level)
    _check_level(backend, opt_level)
    wanted = None if dtype == "auto" else normalise_dtype(dtype)
    if device != "auto":
        target = backend.device(device)
        if wanted is not None and wanted != "float32" and opt_level.name != "O0":
            _check_dtype(backend, target, wanted)


def _check_level(backend: Backend, level: Level) -> None:
    if level.name not in backend.capabilities.levels:
        raise UnsupportedByBackendError(
            f"level={level.name!r} is not supported by backend {backend.name!r}; supported: "
            f"{', '.join(sorted(backend.capabilities.levels))}. Choose one of these."
        )


def _check_dtype(backend: Backend, device: Device, wanted: Dtype) -> None:
    if wanted not in device.native | device.emulated:
        raise UnsupportedDtypeError(
            f"{_unsupported(backend, device, wanted)}. Choose one of these or another device; in code, "
            f"on_unsupported='warn' falls back."
        )


def _unsupported(backend: Backend, device: Device, wanted: Dtype) -> str:
    can = ", ".join(sorted(device.native | device.emulated)) or f"none: only float32 ({device.reason})"
    return f"dtype={wanted!r} is not supported by backend {backend.name!r} on {device.name!r}; supported: {can}"


def _choose_dtype(
    backend: Backend, device: Device, wanted: Dtype | None, level: Level, on_unsupported: str, enabled: bool
) -> tuple[Dtype | None, str]:
    """Return the compute dtype (None: off) and why, warning where it is not what was hoped for."""
    if not enabled:
        return None, "disabled by enabled=False, or by the policy file"
    if level.name == "O0" or wanted == "float32":
        return None, f"float32 was asked for (level={level.name}, dtype={wanted or 'auto'})"
    if wanted is None:
        if device.preferred is None:
            advice = " Name a dtype to force it." if device.native | device.emulated else ""
            callers.warn(f"mixed precision is off on {device.name}: {device.reason}.{advice}", PrecisionWarning)
        return device.preferred, device.reason
    if wanted in device.native:
        return wanted, f"asked for; computed natively on {device.name}"
    if wanted in device.emulated:
        reason = f"asked for; {device.name} has no hardware for {wanted}, so it is emulated and slow"
        callers.warn(f"dtype={wanted!r}: {reason}.", PrecisionWarning)
        return wanted, reason
    if on_unsupported == "raise":
        _check_dtype(backend, device, wanted)
    message = _unsupported(backend, device, wanted)
    callers.warn(f"{message}; falling back to {device.preferred or 'float32'}.", PrecisionWarning)
    return device.preferred, f"{wanted} is not supported on {device.name}; fell back as asked"


def _default_scale(dtype: Dtype | None, level: Level) -> LossScale:
    # bfloat16 has the exponents of float32: nothing underflows that scaling could save.
    return LossScale() if level.scales_loss and dtype == "float16" else LossScale.static(1.0)


def listed(name: str, entries: Iterable[Any]) -> tuple[Any, ...]:
    """Return the entries of allow or deny.

    Raises:
        InvalidOptionError: It is text, or no list.
    """
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise InvalidOptionError(f"{name}={entries!r} is not a list; accepted: a list of entries. Pass [{entries!r}].")
    return tuple(entries)


def _check_choice(name: str, value: object, accepted: tuple[object, ...]) -> None:
    if value not in accepted:
        raise InvalidOptionError(
            f"{name}={value!r} is not a choice; accepted: {', '.join(map(repr, accepted))}. Pass one of these."
        )


class Sessions:
    """The active sessions of this process, one a framework: the only global state of ampx."""

    def __reduce__(self) -> str:
        """Copy and pickle to the same object."""
        return "sessions"

    def __init__(self) -> None:
        self._active: dict[str, Amp] = {}
        # The wrapped optimizers by framework, those of ended sessions too: any backward may reach their parameters.
        self._wrapped: dict[str, list[weakref.ref[Any]]] = {}
        self._watchers: list[list[Callable[[Amp], None]]] = []
        self._groups: weakref.WeakSet[ScaleGroup] = weakref.WeakSet()

    def replace(self, session: Amp) -> None:
        """Make a session the one of its framework; the former one is shut down, and stays if that fails."""
        former = self._active.get(session.framework)
        try:
            if former is not None:
                former.shutdown()
            session.activate()
        except BaseException:
            if self._active.get(session.framework) is session:
                session.shutdown()  # what it switched on before the exception goes off again
            if former is not None:
                former.activate()
            raise
        for (started,) in tuple(self._watchers):
            started(session)

    def watch(self, started: Callable[[Amp], None]) -> Callable[[], None]:
        """Call a function with every session that `init` starts from now on; the result of this ends that."""
        entry = [started]
        self._watchers.append(entry)

        def end() -> None:
            self._watchers[:] = [watching for watching in self._watchers if watching is not entry]

        return end

    def add(self, session: Amp) -> None:
        """Make a session the one of its framework."""
        self._active[session.framework] = session

    def remove(self, session: Amp) -> None:
        """Forget a session."""
        if self._active.get(session.framework) is session:
            del self._active[session.framework]

    def get(self, framework: str) -> Amp | None:
        """Return the session of a framework, if there is one."""
        return self._active.get(framework)

    def note_wrapped(self, framework: str, optimizers: Iterable[Any]) -> None:
        """Note optimizers that a session has wrapped."""
        self._wrapped.setdefault(framework, []).extend(map(weakref.ref, optimizers))

    def living_optimizers(self, framework: str) -> list[Any]:
        """List the wrapped optimizers of a framework that are alive, whichever session wrapped them."""
        references = self._wrapped.get(framework, [])
        living = [optimizer for reference in references if (optimizer := reference()) is not None]
        if len(living) < len(references):
            self._wrapped[framework] = [reference for reference in references if reference() is not None]
        return living

    def note_group(self, group: ScaleGroup) -> None:
        """Note a loss scale by a weak reference."""
        self._groups.add(group)

    def living_groups(self) -> list[ScaleGroup]:
        """List the loss scales that are alive, whichever session made them."""
        return list(self._groups)

    def all_sessions(self) -> list[Amp]:
        """List the active sessions."""
        return list(self._active.values())

    def only(self, call: str, framework: str | None = None) -> Amp:
        """Return the only active session, or that of a framework.

        Raises:
            NotInitializedError: There is none, or several.
        """
        session = self._active.get(framework) if framework is not None else None
        if framework is None and len(self._active) == 1:
            session = next(iter(self._active.values()))
        if session is None and framework is None and self._active:
            raise NotInitializedError(
                f"{call} found several sessions: {', '.join(sorted(self._active))}; accepted: one. Call the method of "
                f"the session that you mean, which ampx.init returned, as does ampx.current(framework)."
            )
        if session is None:
            raise self._not_initialized(call, "" if framework is None else f" of {framework!r}")
        return session

    def find(self, call: str, *objects: Any) -> Amp:
        """Return the session of the framework that these objects belong to, importing nothing.

        Raises:
            NotInitializedError: No session is active for it.
        """
        session: Amp | None
        member = getattr(objects[0], "ampx_member", None)
        if member is not None:
            session = self._active.get(member.group.framework)
        elif len(self._active) == 1:
            session = next(iter(self._active.values()))
        else:
            session = self.search(objects)
        if session is None:
            raise self._not_initialized(call, " for what it was given")
        return session

    def search(self, objects: Iterable[Any]) -> Amp | None:
        """Return the session whose framework owns the first recognised object, looking into containers."""
        for item in objects:
            member = getattr(item, "ampx_member", None)
            if member is not None:
                return self._active.get(member.group.framework)
            # First: a named tuple such as optax's has an owner, and functions inside that have none.
            session = self._owner(item)
            if session is None and isinstance(item, (list, tuple)):
                session = self.search(item)
            elif session is None and isinstance(item, dict):
                session = self.search(item.values())
            if session is not None:
                return session
        return None

    def _owner(self, item: Any) -> Amp | None:
        modules = {base.__module__.partition(".")[0] for base in type(item).__mro__}
        for name, session in self._active.items():
            if modules.intersection(default_registry().registration(name).roots):
                return session
        return None

    def emit(self, framework: str, event: Event) -> None:
        """Send an event to the framework's session and to the plugins; warn once a collapse."""
        session = self._active.get(framework)
        with ExitStack() as stack:  # whatever a listener raises
            if isinstance(event, ScaleCollapsed):
                stack.callback(_warn_of_collapse, framework, event)
            stack.callback(default_registry().send, event)
            if session is not None:
                session.emit(event)

    def _not_initialized(self, call: str, whose: str) -> NotInitializedError:
        active = ", ".join(sorted(self._active))
        several = ", or, with several sessions, call the method of the one you mean" if active else ""
        return NotInitializedError(
            f"{call} found no session{whose if active else ''}; active sessions: {active or 'none'}. Call "
            f"ampx.init(framework=…) first{several}."
        )


def _warn_of_collapse(framework: str, event: ScaleCollapsed) -> None:
    names = ", ".join(event.parameters) or "(the backend cannot tell)"
    callers.warn(
        f"{event.consecutive_skips} steps in a row were skipped on {framework}; the loss scale is "
        f"{event.next_scale:g}. Gradients that are not finite: {names}. The loss or a layer overflows whatever "
        f"the scale: {event.advice}",
        ScaleCollapsedWarning,
    )


sessions: Final = Sessions()


def new_group(framework: str, config: LossScale, enabled: bool = True) -> ScaleGroup:
    """Return a loss scale whose events reach the framework's session of that moment, and plugins.

    `wrap_optimizer` makes them; a backend needs it for what stands outside of a session: an optimizer that the
    framework loads from a file, say.
    """
    group = ScaleGroup(framework, config, enabled, emit=sessions.emit, meter_every=default_meter_every())
    sessions.note_group(group)
    return group


def is_state_getter(opt: Any) -> bool:
    """Return whether this is a function that gives the present state of an optimizer, as `gate` takes it."""
    return isroutine(opt) or isinstance(opt, partial)


_VERBS: Final = ("step", "update", "update_parameters")


class Gate:
    """Delegates to a scheduler or to an average of weights; its verbs do nothing after a skipped optimizer step."""

    def __init__(self, scheduler: Any, last_steps: Sequence[Callable[[], StepResult | None]]) -> None:
        """Remember whom to ask; the scheduler is not touched.

        Raises:
            InvalidOptionError: There is nothing to wait with, or nobody to wait for.
        """
        if not any(hasattr(scheduler, verb) for verb in _VERBS):
            raise InvalidOptionError(
                f"gate got {type(scheduler).__name__}, which has none of {', '.join(_VERBS)}; accepted: a scheduler, "
                f"an average of weights, or another object with one of these methods. Pass the object itself."
            )
        if not last_steps:
            raise InvalidOptionError(
                "gate got an empty list of optimizers, so that the scheduler would wait for nobody; accepted: a "
                "wrapped optimizer, or a list of some. Pass those that it is to wait for."
            )
        self._last_steps = tuple(last_steps)
        self.scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "scheduler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set on the scheduler what is its own (`gate.base_lrs = […]`), where setting it here would change nothing."""
        if "scheduler" not in self.__dict__ or hasattr(type(self), name) or not hasattr(self.scheduler, name):
            super().__setattr__(name, value)
        else:
            setattr(self.scheduler, name, value)

    def step(self, *args: Any, **kwargs: Any) -> bool:
        """Step the scheduler if every optimizer's last step was applied.

        Returns:
            Whether the scheduler stepped.

        Sync: one where the scale lives on the device, else none.
        """
        return self._pass_on(self.scheduler.step, args, kwargs)

    def update(self, *args: Any, **kwargs: Any) -> bool:
        """Call `update`, the verb of most averages, as `step` does. Sync: as `step`."""
        return self._pass_on(self.scheduler.update, args, kwargs)

    def update_parameters(self, *args: Any, **kwargs: Any) -> bool:
        """Call `update_parameters`, the verb of torch's `AveragedModel`, as `step` does. Sync: as `step`."""
        return self._pass_on(self.scheduler.update_parameters, args, kwargs)

    def _pass_on(self, verb: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        results = [last_step() for last_step in self._last_steps]
        applied = all(result is not None and result.applied for result in results)
        if applied:
            verb(*args, **kwargs)
        return applied
