"""The step of a wrapped trainer, and what may be asked of it between two steps.

MXNet's own trainer steps: it adds up the contexts' gradients, asks its loss scaler whether they overflow, and updates.
The wrapper answers, by `hook.py`: in between it collects, unscales, checks and clips.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ampx.backend import GenericBackend
from ampx.errors import ProtocolError
from ampx.events import UNCHECKED
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import Member
from ampx.rooms import make_meter
from ampx.saved_state import dump_session, load_session
from ampx.scale_state import FLOAT32_MAX

from . import casting, gradients
from .accumulation import Accumulation, check_adds
from .casting import switch
from .compat import mx
from .delegation import DelegatingTrainer, move_back
from .hook import OverflowHook
from .losses_by_id import LossMixer
from .low_precision import low_parameters

if TYPE_CHECKING:
    from ampx.numerics.meter import Meter

# What is the wrapper's own; everything else is read and set on the raw trainer.
_OWN: Final = frozenset(
    (
        *("trainer", "ampx_member", "ampx_manager", "ampx_shown", "_backend", "_max_grad_norm", "_max_grad_value"),
        *("_true", "_finite", "_norm", "_reduced", "_kvstore_before", "_used", "_in_place", "_layout", "_hook"),
        *("_left", "_own_scale", "_meter", "_compute", "_widened", "_must_be_prepared", "__class__", "__weakref__"),
        *("_accumulation", "_mixer"),
    )
)
_NOTHING_PENDING: Final = {
    "_true": False,  # the gradients are divided by the scale already
    "_finite": None,  # what was found then, on their device
    "_norm": None,
    "_reduced": False,  # the contexts' gradients are added up already
}
# In a file of states, the optimizer's attribute that holds the loss scale; plain MXNet takes it along.
_SAVED: Final = "ampx_loss_scale"
_living: Final[weakref.WeakSet[AmpTrainer]] = weakref.WeakSet()  # some may share parameters


# Gluon's class comes first: a gluon trainer can then become one of these in place.
class AmpTrainer(DelegatingTrainer, WrappedOptimizer):
    """A gluon trainer with its own loss scale.

    Unscaled gradients are those on the parameters, divided by the loss scale. The batch size divides later, in `step`,
    as in MXNet: bounds of clipping are compared before that.
    """

    _finite: Any
    _norm: Any
    _reduced: bool
    _true: bool

    def __init__(self, backend: GenericBackend, trainer: Any, member: Member, options: Mapping[str, Any]) -> None:
        self.trainer = trainer
        self.ampx_member = member
        self._backend = backend
        self._max_grad_norm: float | None = options.get("max_grad_norm")
        self._max_grad_value: float | None = options.get("max_grad_value")
        plan = options.get("plan")
        self._compute = "float32" if plan is None else plan.dtype
        self._in_place = bool(options.get("in_place"))
        self._accumulation = Accumulation()
        self._mixer = LossMixer()
        self._layout = gradients.Layout()
        self._kvstore_before = dict(trainer._kvstore_params)
        # Whether the gradients on the parameters, if no backward wrote them since, were stepped with already.
        self._used = False
        # The scale of gradients that the last step used and that were not cleared; infinity where it is unknown.
        self._left: float | None = None
        # The raw trainer's own factor, while a step has another in its place.
        self._own_scale: float | None = None
        # Low-precision parameters have float32 gradients, from when these are divided until the step is over.
        self._widened: list[Any] = []
        # Checked at the first scale_loss, because prepare may come after wrap_optimizer.
        self._must_be_prepared = plan is not None and plan.level in ("O2", "O3")
        self._forget_pending()
        self._attach()

    def _forget_pending(self) -> None:
        self._narrow()
        if self._mixer.active:
            self.ampx_member.mixes = False
            self._mixer.reset()
        self.__dict__.update(_NOTHING_PENDING)  # at once: setting an attribute of a delegating object is slow

    def _widen(self) -> None:
        """Have low-precision gradients in float32: divided by the scale, they may be too small for less."""
        self._widened = low_parameters(gradients.parameters(self.trainer))
        with mx.autograd.pause():
            for parameter in self._widened:
                parameter.widen_gradients()

    def _narrow(self) -> None:
        """Undo `_widen`, as far as it came; what hangs on the parameters then is rounded."""
        if not self._widened:
            return
        with mx.autograd.pause():
            while self._widened:
                self._widened[-1].narrow_gradients()
                self._widened.pop()

    def _attach(self) -> None:
        """Make what belongs to this process and cannot be copied."""
        self.ampx_member.belong_to(self)
        self._meter = make_meter(self._compute, gradients.meter_samples)
        self.ampx_member.observers = (self._meter,)
        self._hook = OverflowHook(self.ampx_member, weakref.WeakMethod(self._drop))
        if self.ampx_member.group.enabled:
            self._hook.watch(self.trainer)
            _living.add(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "trainer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        elif name == "_amp_loss_scaler" and hasattr(value, "_next_loss_scale") and self.ampx_member.group.enabled:
            self._hook.take_over(value)  # as scripts resume: MXNet's amp has no other way
        else:
            setattr(self.trainer, name, value)

    # -- stepping ------------------------------------------------------------------------------------

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Add up the contexts' gradients, unscale, check, update or skip, move the loss scale.

        Args:
            batch_size: Divides the gradients; 1 where the loss is a mean.
            ignore_stale_grad: Leave parameters alone whose gradients no backward wrote since the last step.

        Raises:
            NotScaledError: There are gradients, but no `scale_loss` came since the last step.
            UserWarning: MXNet's, where a gradient is stale and that is not ignored; nothing has changed then.

        Sync: one, as with MXNet's own scaler.
        """
        self._step(self.trainer.step, batch_size, ignore_stale_grad)

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Step after `allreduce_grads`; see `step`. Sync: one."""
        self._step(self.trainer.update, batch_size, ignore_stale_grad)

    def allreduce_grads(self) -> None:
        """Add up the contexts' gradients, for `update` or `step`. Sync: as the trainer's store."""
        member = self.ampx_member
        changes = member.stage in ("scaled", "unscaled")
        if changes:
            self._start_store()
            member.begin_change()
        self.trainer.allreduce_grads()
        self._reduced = True
        if changes:
            member.end_change()

    def _start_store(self) -> None:
        """Begin to use the trainer's store as its first step would. Sync: with a distributed store, the first time.

        Native defect: that step pulls the weights and pushes gradients at once, so that a server may answer with the
        sum of the gradients where the weights were asked for.
        """
        raw = self.trainer
        if raw._kv_initialized and not raw._params_to_init:
            return
        if not raw._kv_initialized:
            raw._init_kvstore()
        started = [parameter for parameter in raw._params_to_init if not parameter._deferred_init]
        raw._init_params()
        if raw._distributed:
            for parameter in started:
                for data in parameter.list_data():
                    data.wait_to_read()

    def ampx_meter(self) -> Meter | None:
        """Return what the last update that was looked at did."""
        return self._meter.last()

    def _step(self, run: Any, batch_size: float, ignore_stale_grad: bool) -> None:
        raw, member = self.trainer, self.ampx_member
        if member.observers:
            member.begin_step(self)
        if callable(batch_size):
            self._backend.refuse("arguments of step beyond MXNet's (closures)")
        if not member.group.enabled:
            self._step_unchecked(run, batch_size, ignore_stale_grad)
            return
        fresh = gradients.any_fresh(raw)
        if fresh or member.stage != "idle" or (self._used and not ignore_stale_grad):
            member.check_step()
        if not fresh:
            self._close_empty()
            return
        self._check_divided_once()
        self._start_store()
        self._accumulation.reset()
        # The factor of MXNet's optimizers divides on the way, where nothing needs the unscaled gradients; others
        # may look at a gradient before they multiply it, or never do.
        folds = type(raw._optimizer).__module__.startswith("mxnet.")
        divides = folds and not self._true and not self._clips and member.factor >= 1
        divisor = float(member.factor) if divides else 1.0
        member.begin_change()  # nobody can tell how far an update came that raised
        finite = self._apply(run, batch_size, ignore_stale_grad, divisor if divides else None)
        if not finite:
            self._skip()
        self._close(finite, divisor)

    def _step_unchecked(self, run: Any, batch_size: float, ignore_stale_grad: bool) -> None:
        """Step where the session is off: as the raw trainer, with clipping where that was asked for."""
        raw = self.trainer
        if self._clips:
            self._apply(run, batch_size, ignore_stale_grad, None)
            self._hook.leave(raw)
        else:
            try:
                with switch.Region(None):
                    (raw.update if self._reduced else run)(batch_size, ignore_stale_grad)
            except UserWarning as error:
                gradients.restore_fresh(raw, str(error))
                self._reduced = not raw._update_on_kvstore  # a second try must not add up again
                raise
        self._forget_pending()
        self.ampx_member.note_result(UNCHECKED)

    @property
    def _clips(self) -> bool:
        return self._max_grad_norm is not None or self._max_grad_value is not None

    def _apply(self, run: Any, batch_size: float, ignore_stale_grad: bool, divisor: float | None) -> bool:
        """Run MXNet's own step, casting off; before it updates, it asks whether the gradients are ready.

        The update divides them on the way; `divisor` is None for gradients that are true by then.
        """
        raw = self.trainer
        self._restore_scale()
        before = self._own_scale = raw._scale
        try:
            if divisor is not None:
                raw._scale = before / divisor
            with switch.Region(None):
                return self._hook.run(
                    raw,
                    raw.update if self._reduced else run,
                    batch_size,
                    ignore_stale_grad,
                    lambda: self._is_ready(ignore_stale_grad, divisor is not None),
                )
        except UserWarning as error:
            gradients.restore_fresh(raw, str(error))
            self.ampx_member.end_change()  # MXNet raises it before it updates
            raise
        finally:
            # Native defect: left as it is, the factor would shrink the next step that was not scaled.
            self._restore_scale()
            if divisor is not None:
                raw._optimizer.rescale_grad = before / batch_size

    def _is_ready(self, ignore_stale_grad: bool, divides_later: bool) -> bool:
        """Collect, unscale, check and clip; return whether the gradients are finite, so that MXNet may update."""
        self._reduced = True  # should the update fail, a second try must not add up again
        if not divides_later and not self._true:
            self._widen()
        batches = self._collect(ignore_stale_grad)
        if not self.ampx_member.group.enabled:
            return self._check_and_clip(batches, None)
        if divides_later:
            return self._check_and_clip(batches, gradients.all_finite(batches))
        if self._true:
            self._look_again(batches)
        else:
            self._unscale(batches)
            if ignore_stale_grad:  # what is left alone carries the same as what is stepped with
                gradients.rescale(self._adding(), 1.0 / self.ampx_member.factor, only_stale=True)
            self.ampx_member.begin_change("unscaled")
        return self._check_and_clip(batches, self._finite)

    def _collect(self, only_fresh: bool) -> gradients.Batches:
        return self._backend.gradients(self.trainer) if only_fresh else self._layout.collect(self.trainer)

    def _unscale(self, batches: gradients.Batches) -> None:
        """Divide pending gradients by their scale, in place; the caller notes it."""
        self._finite = self._backend.unscale(batches, self.ampx_member.factor).finite
        self._true = True

    def _look_again(self, batches: gradients.Batches) -> None:
        """Test unscaled gradients once more: they may have been written to since."""
        again = gradients.all_finite(batches)
        self._finite = again if self._finite is None else self._finite * again

    def _check_and_clip(self, batches: gradients.Batches, flag: Any) -> bool:
        """Return whether gradients are finite, and clip them then. Sync: one, for the flag and the norm together."""
        if not self._clips:
            return bool(flag.asnumpy())
        finite, norm = gradients.clip(batches, self._max_grad_norm, self._max_grad_value, flag)
        self._norm = norm if self._norm is None else self._norm
        return finite

    def _skip(self) -> None:
        """Forget that gradients were written: one that the next loss does not write would overflow again."""
        gradients.mark_stale(self.trainer)

    def _close(self, finite: bool, carried: float) -> None:
        """Note the outcome and move the loss scale; `carried` is the scale that the gradients carry now."""
        member, norm = self.ampx_member, self._norm
        self._used, self._left = True, carried if finite else math.inf
        # Workers of a distributed store know of their own losses only, and must move their scales alike.
        by_loss = dict.fromkeys(member.factors, finite)
        if self._mixer.active and not self.trainer._distributed:
            by_loss = self._mixer.finite_by_loss(finite)
        self._forget_pending()
        member.finish(by_loss, norm)

    def _close_empty(self) -> None:
        """End a step that found no gradients: it counts for nothing."""
        self._forget_pending()
        self.ampx_member.finish_empty()

    def _restore_scale(self) -> None:
        """Put the raw trainer's own factor back, where a step had put another there."""
        if self._own_scale is not None:
            self.trainer._scale, self._own_scale = self._own_scale, None

    def zero_grad(self) -> None:
        """Set all gradients to zero, pending ones included; with `grad_req='add'` after every step."""
        self.ampx_member.begin_clear()
        self._restore_scale()
        self._accumulation.reset()
        self._backend.zero_gradients(self.trainer)
        self._used, self._left = False, None
        self._drop()

    def _drop(self) -> None:
        self.ampx_member.begin_clear()
        self._forget_pending()
        self.ampx_member.end_clear()

    def _check_divided_once(self) -> None:
        """Raise where another trainer has made unscaled gradients that this one would divide by their scale again."""
        if len(_living) < 2 or self.ampx_member.stage != "scaled" or self.ampx_member.factor == 1:
            return
        own = set(map(id, self.trainer._params))
        for other in list(_living):
            if other is self or other.ampx_member.stage != "unscaled":
                continue
            shared = [parameter for parameter in gradients.parameters(other.trainer) if id(parameter) in own]
            if any(data._fresh_grad for parameter in shared for data in parameter._data):
                names = ", ".join(parameter.name for parameter in shared[:5])
                raise ProtocolError(
                    f"another trainer holds parameters of this one ({names}), and its unscale or clip_grad_norm made "
                    f"their gradients true, which would be divided again; accepted: after its step, which uses them "
                    f"up. Step that trainer first."
                )

    # -- unscaled gradients --------------------------------------------------------------------------

    def ampx_unscale(self) -> None:
        """Add up the contexts' gradients and divide by the scale, in place."""
        member = self.ampx_member
        if member.stage == "unscaled" and self._mixer.active and not self._reduced:
            self.allreduce_grads()
        if member.stage == "unscaled" or not member.group.enabled:
            return
        member.check_step()
        self._accumulation.reset()
        if gradients.any_fresh(self.trainer):
            self._check_divided_once()
            if not self._reduced:
                self.allreduce_grads()
            member.begin_change()
            with switch.Region(None):
                self._widen()
                self._unscale(gradients.collect(self.trainer, False))
        member.note_unscaled()

    def ampx_clip_grad_norm(self, max_norm: float) -> Any:
        """Clip the unscaled gradients; the norm before is float64 where float32 does not reach. Sync: one."""
        self.ampx_unscale()
        self.ampx_member.begin_change()
        with switch.Region(None):
            _, norm = gradients.clip(gradients.collect(self.trainer, False), max_norm, None, self._finite)
        self._norm = norm = 0.0 if norm is None else norm
        self.ampx_member.end_change()
        return mx.np.array(norm, dtype="float64" if norm > FLOAT32_MAX else "float32")

    def rescale(self, factor: float) -> None:
        """Multiply unscaled gradients, so that they carry this loss scale again and further ones may be added."""
        self.ampx_member.begin_change()
        gradients.rescale(gradients.parameters(self.trainer), factor)
        self._narrow()
        self._finite, self._norm, self._true = None, None, False
        self.ampx_member.note_scaled(factor)

    def ampx_adopt_adding(self) -> None:
        """Accumulate here where parameters have `grad_req='add'` and MXNet would not."""
        self._accumulation.adopt(self.trainer._params)

    def ampx_is_frozen(self) -> bool:
        """Return whether no parameter asks for gradients."""
        return all(parameter.grad_req == "null" for parameter in self.trainer._params)

    def ampx_is_cleared(self) -> bool:
        """Return whether the next backward overwrites unscaled gradients, or all that add are zeros.

        Sync: one a gradient that adds, until one is not.
        """
        return not self._mixer.active and not gradients.any_nonzero(self._adding())

    def ampx_notice_cleared(self) -> None:
        """Forget them: a step skipped by hand."""
        gradients.mark_stale(self.trainer)
        self._drop()

    def ampx_check_backward(self, loss_id: int) -> None:
        """Raise where parameters that add have gradients which cannot be added to.

        Sync: none; after a skipped step that left gradients which add, some.
        """
        self._check_backward(loss_id)

    def _check_backward(self, loss_id: int) -> tuple[list[Any], bool] | None:
        """Check as `ampx_check_backward`; before the first backward, return what `_rescale_existing` needs."""
        if self._must_be_prepared:
            self._check_prepared()
        session = casting.running_session()
        if session is not None and session.casting is not None and session.casting.dtype == "bfloat16":
            check_adds(self.trainer._params)
        member = self.ampx_member
        if self._reduced:
            self._check_reduced(member.stage != "idle" and self._is_another(loss_id))
        return self._check_left() if member.stage == "idle" else None

    def _check_prepared(self) -> None:
        """Raise where the level asks for low-precision parameters and `prepare` never made any."""
        if not low_parameters(self.trainer._params):
            raise ProtocolError(
                "the level asks for low-precision parameters, but the trainer holds none: the network would train in "
                "float32. Call net, trainer = ampx.prepare(net, trainer) first, or use level='O1'."
            )
        self._must_be_prepared = False

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Bring gradients left from the last step to this scale, and keep what MXNet would forget to add to.

        Raises:
            ProtocolError: Parameters that add have gradients which cannot be added to.

        Sync: none; after a skipped step that left gradients which add, some.
        """
        left = self._check_backward(loss_id)
        if left is not None:
            self._rescale_existing(*left, float(scale))
        elif self._is_another(loss_id):
            self._put_aside()
        self._reduced = False
        self._accumulation.begin()

    def ampx_after_backward(self, loss_id: int) -> None:
        """Add it; where there are several losses, to the unscaled gradients.

        Raises:
            ProtocolError: MXNet has overwritten gradients of another loss; all are cleared.
        """
        self._accumulation.end()
        if not self._mixer.active:
            return
        with switch.Region(None), mx.autograd.pause():
            self._widen()
            if gradients.any_fresh(self.trainer):  # a backward that gave no gradient does not count for its loss
                self._unscale_fresh(loss_id)
            try:
                self._mixer.bring_back(self._adding())
            except ProtocolError:
                self.zero_grad()
                raise
        self._finite, self._true = self._mixer.all_finite(), True
        self.ampx_member.note_unscaled()

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Add it to what was written before the exception; where there are several losses, drop that."""
        self._accumulation.end()
        if self._mixer.active:
            with mx.autograd.pause():
                self._widen()
                self._mixer.put_back()

    def _is_another(self, loss_id: int) -> bool:
        """Return whether pending gradients are of other losses, or of several."""
        return self._mixer.active or loss_id not in self.ampx_member.factors

    def _put_aside(self) -> None:
        """Take the gradients of other loss ids off the parameters, as true ones."""
        member, adding = self.ampx_member, self._adding()
        member.begin_change("unscaled")  # entering the body ends it, or leaving it: until then gradients are missing
        with switch.Region(None), mx.autograd.pause():
            if not self._mixer.active:
                member.mixes = self._mixer.active = True
                self._widen()
                if gradients.any_fresh(self.trainer):
                    self._unscale_fresh(next(iter(member.factors)))
                gradients.rescale(adding, 1.0 / member.factor, only_stale=True)
                self._finite, self._true, self._left = self._mixer.all_finite(), True, 1.0
            self._mixer.put_aside(self.trainer, adding)
            self._narrow()

    def _unscale_fresh(self, loss_id: int) -> None:
        """Divide the gradients that the last backwards wrote by their scale, in place."""
        fresh = self._backend.gradients(self.trainer)
        self._mixer.note(loss_id, self._backend.unscale(fresh, self.ampx_member.factors[loss_id]).finite)

    def _adding(self) -> list[Any]:
        """List the parameters whose gradients add up."""
        adding = [
            parameter
            for parameter in self.trainer._params  # no generator: every step asks
            if parameter._grad_req == "add" and parameter._grad is not None
        ]
        return [*adding, *(parameter for parameter in self._accumulation.parameters if parameter._grad is not None)]

    def _check_left(self) -> tuple[list[Any], bool]:
        """Return which parameters add, and whether a backward has written; raise where its scale is unknown."""
        self._accumulation.reset()
        adding, fresh = self._adding(), gradients.any_fresh(self.trainer)
        # Of a loss of another trainer, or of none, or of a skipped step: their scale is unknown.
        if adding and (fresh or self._left == math.inf):
            if gradients.any_nonzero(adding):
                names = ", ".join(parameter.name for parameter in adding[:5])
                raise ProtocolError(
                    f"scale_loss was called while {'another backward' if fresh else 'a skipped step'} had left "
                    f"gradients on parameters with grad_req='add' ({names}); they cannot be added to scaled ones; "
                    f"accepted: cleared gradients. Call trainer.zero_grad() first, or "
                    f"give scale_loss all trainers that a loss has parameters of."
                )
            self._left = None
        return adding, fresh

    def _rescale_existing(self, adding: list[Any], fresh: bool, scale: float) -> None:
        """Bring gradients that are there before the first backward of a step to its scale."""
        left = self._left
        if left is not None and left != scale:
            self._left = math.inf
            gradients.rescale(adding, scale / left)
        self._left = scale  # they carry it as well where the body raises before its backward
        if fresh:
            # This loss overwrites the others where it reaches, and where it does not, MXNet tells of a stale gradient.
            gradients.mark_stale(self.trainer, kept=adding)

    def _check_reduced(self, mixes: bool) -> None:
        """Raise where new gradients would be added to those of all contexts; overwritten, they are not added up yet."""
        if self.trainer._kvstore and (mixes or self._adding()):
            reason = "another loss_id" if mixes else "grad_req='add'"
            raise ProtocolError(
                f"scale_loss was called after allreduce_grads and before the step, with {reason}; the contexts' or "
                f"workers' sum would be added up again. Call allreduce_grads after the last backward."
            )

    # -- life ----------------------------------------------------------------------------------------

    def ampx_culprits(self) -> tuple[str, ...]:
        """Name the parameters whose gradients are not finite. Sync: one a gradient."""
        return tuple(name for name, _, _ in gradients.name_nonfinite(self.trainer, None))

    def ampx_unwrap(self) -> None:
        """Put back the settings of the raw trainer's store and the `grad_req` of its parameters."""
        self.trainer._kvstore_params = self._kvstore_before
        self._hook.leave(self.trainer)
        self._accumulation.give_back()
        if self._in_place:
            move_back(self, self.trainer)

    def save_states(self, fname: str) -> None:
        """Save the optimizer's state and the loss scale; plain MXNet reads the file too.

        Args:
            fname: Path of the file.

        Sync: as MXNet's.
        """
        group, optimizer = self.ampx_member.group, self.trainer._optimizer
        if group.enabled:
            setattr(optimizer, _SAVED, dump_session("mxnet", [group]))
        try:
            self.trainer.save_states(fname)
        finally:
            vars(optimizer).pop(_SAVED, None)

    def load_states(self, fname: str) -> None:
        """Load the optimizer's state, and the loss scale where the file has one.

        Args:
            fname: Path of a file that this or plain MXNet's `save_states` wrote.

        Raises:
            UnknownSchemaError, InvalidStateError: The loss scale in it cannot be read; the states are loaded all the
                same.

        Sync: as MXNet's.
        """
        self.trainer.load_states(fname)
        saved = vars(self.trainer._optimizer).pop(_SAVED, None)
        if saved is not None and self.ampx_member.group.enabled:
            load_session(saved, [self.ampx_member.group])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back from a copy; what is pending stays behind."""
        self.__dict__.update(state)
        self._attach()
        self._drop()

    def __repr__(self) -> str:
        return f"AmpTrainer({self.trainer!r})"
