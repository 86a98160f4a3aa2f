"""The step of a wrapped trainer, and what may be asked of it between two steps.

MXNet's own trainer steps: it adds up the contexts' gradients, asks its loss scaler whether they overflow, and updates.
The wrapper answers, by `hook.py`: in between it collects, unscales, checks and clips.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ampx.backend import GenericBackend, Unscaled
from ampx.errors import ProtocolError
from ampx.events import UNCHECKED
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import Member, NotCopied
from ampx.provenance import UNKNOWN, Provenance
from ampx.rooms import make_meter
from ampx.saved_state import dump_session, load_session
from ampx.scale_state import FLOAT32_MAX, is_one

from . import casting, gradients
from .accumulation import Accumulation, check_adds
from .casting import switch
from .compat import mx
from .delegation import DelegatingTrainer, move_back
from .hook import OverflowHook
from .losses_by_id import LossMixer
from .low_precision import low_parameters
from .pending import PendingGradients
from .slots import ParameterSlots

if TYPE_CHECKING:
    from ampx.numerics.meter import Meter

# In a file of states, the optimizer's attribute that holds the loss scale; plain MXNet takes it along.
_SAVED: Final = "ampx_loss_scale"
_SLOTS: Final = ParameterSlots()
_living: Final[weakref.WeakSet[AmpTrainer]] = weakref.WeakSet()  # some may share parameters


# Gluon's class comes first: a gluon trainer can then become one of these in place.
class AmpTrainer(DelegatingTrainer, WrappedOptimizer):
    """A gluon trainer with its own loss scale.

    Unscaled gradients are those on the parameters, divided by the loss scale. The batch size divides later, in `step`,
    as in MXNet: bounds of clipping are compared before that.
    """

    _hook: OverflowHook
    _mixer: LossMixer
    _layout: gradients.Layout
    _provenance: Provenance

    def __init__(self, backend: GenericBackend, trainer: Any, member: Member, options: Mapping[str, Any]) -> None:
        plan = options.get("plan")
        self.ampx_member = member
        self._backend = backend
        self._max_grad_norm: float | None = options.get("max_grad_norm")
        self._max_grad_value: float | None = options.get("max_grad_value")
        self._clips = self._max_grad_norm is not None or self._max_grad_value is not None
        self._compute = "float32" if plan is None else plan.dtype
        # Checked at the first scale_loss, because prepare may come after wrap_optimizer.
        self._must_be_prepared = plan is not None and plan.level in ("O2", "O3")
        self._in_place = bool(options.get("in_place"))
        self._kvstore_before = dict(trainer._kvstore_params)
        self._accumulation = Accumulation()
        self._pending = PendingGradients()
        self.trainer = trainer  # last: from here on, all other names are set on the raw trainer
        self._attach()

    def _attach(self) -> None:
        """Make what belongs to this process and cannot be copied."""
        member = self.ampx_member
        member.belong_to(self)
        meter = make_meter(self._compute, gradients.meter_samples)
        member.observers = (meter,)
        hook = OverflowHook(member, weakref.WeakMethod(self._drop))
        mixer = LossMixer(self.trainer, member, self._pending)
        self.__dict__.update(_meter=meter, _hook=hook, _mixer=mixer)
        self.__dict__.update(_layout=gradients.Layout(), _provenance=Provenance(_SLOTS))
        if member.group.enabled:
            hook.watch(self.trainer)
            _living.add(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "trainer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is not the wrapper's own on the raw trainer."""
        if name in self.__dict__ or name.startswith("ampx_") or "trainer" not in self.__dict__:
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

    def _step(self, step: Any, batch_size: float, ignore_stale_grad: bool) -> None:
        """Run the raw trainer's step, which asks `_is_ready` before it updates."""
        member, pending = self.ampx_member, self._pending
        if member.observers:
            member.begin_step(self)
        if callable(batch_size):
            self._backend.refuse("arguments of step beyond MXNet's (closures)")
        if not member.group.enabled:
            self._step_unchecked(step, batch_size, ignore_stale_grad)
            return
        fresh = gradients.any_fresh(self.trainer)
        if fresh or member.stage != "idle" or (pending.left is not None and not ignore_stale_grad):
            member.check_step()
        if not fresh:
            self._close_empty()
            return
        self._check_divided_once()
        self._start_store()
        self._accumulation.reset()
        divisor = self._divisor()
        member.begin_change()  # nobody can tell how far an update came that raised
        finite = self._apply(step, batch_size, ignore_stale_grad, divisor)
        if not finite:
            self._skip()
        self._close(finite, divisor)

    def _is_ready(self, only_fresh: bool, divides_later: bool) -> bool:
        """Collect, unscale, check and clip; return whether the gradients are finite, so that MXNet may update.

        Sync: one, for the flag and the norm together.
        """
        member, pending = self.ampx_member, self._pending
        pending.reduced = True  # should the update fail, a second try must not add up again
        grads = self._collect(only_fresh, divides_later)
        flag: Any = None
        if divides_later:
            flag = gradients.all_finite(grads)
        elif pending.unscaled is not None:
            flag = self._look_again(grads)
        elif member.group.enabled:
            flag = self._unscale(grads)
            if only_fresh:  # what is left alone carries the same as what is stepped with
                gradients.rescale(self._adding(), 1.0 / member.factor, only_stale=True)
            member.begin_change("unscaled")
        if not self._clips:
            return bool(flag.asnumpy())
        finite, norm = gradients.clip(grads, self._max_grad_norm, self._max_grad_value, flag)
        pending.note_norm(norm)
        return finite

    def _divisor(self) -> float | None:
        """Return what MXNet's update shall divide gradients by on its way; None where they must be unscaled before.

        Its factor does that where nothing needs the unscaled gradients. Optimizers of others may look at a gradient
        before they multiply it, or never do.
        """
        folds = type(self.trainer._optimizer).__module__.startswith("mxnet.")
        factor = self.ampx_member.factor
        return float(factor) if folds and self._pending.unscaled is None and not self._clips and factor >= 1 else None

    def _collect(self, only_fresh: bool, divides_later: bool) -> gradients.Batches:
        """List the gradients; those that are to be unscaled here, in float32."""
        if self._pending.unscaled is None and not divides_later:
            self._pending.widen(gradients.parameters(self.trainer))
        return self._backend.gradients(self.trainer) if only_fresh else self._layout.collect(self.trainer)

    def _unscale(self, grads: gradients.Batches) -> Any:
        """Divide pending gradients by their scale, in place, and return their flag; the caller notes it."""
        unscaled = self._pending.unscaled = self._backend.unscale(grads, self.ampx_member.factor)
        return unscaled.finite

    def _look_again(self, grads: gradients.Batches) -> Any:
        """Test unscaled gradients once more, which may have been written to since; return their flag."""
        before, flag = self._pending.unscaled.finite, gradients.all_finite(grads)
        if before is not None:
            flag = before * flag
        self._pending.unscaled = Unscaled(grads, flag)
        return flag

    def _apply(self, step: Any, batch_size: float, ignore_stale_grad: bool, divisor: float | None) -> bool:
        """Run MXNet's own step; return what `_is_ready` answered it."""
        raw = self.trainer
        is_ready = partial(self._is_ready, ignore_stale_grad, divisor is not None)
        try:
            return self._hook.run(
                raw, raw.update if self._pending.reduced else step, batch_size, ignore_stale_grad, is_ready, divisor
            )
        except UserWarning:
            self.ampx_member.end_change()  # MXNet raises it before it updates
            raise

    def _skip(self) -> None:
        """Forget that gradients were written: one that the next loss does not write would overflow again."""
        self._pending.skipped = True
        gradients.mark_stale(self.trainer)

    def _close(self, finite: bool, divisor: float | None) -> None:
        """Note the outcome and move the loss scale."""
        member, norm = self.ampx_member, self._pending.norm
        self._pending.left = 1.0 if divisor is None else divisor
        if len(_living) > 1:
            self._note_used()
        # Workers of a distributed store know of their own losses only, and must move their scales alike.
        by_loss = dict.fromkeys(member.factors, finite)
        if member.mixes and not self.trainer._distributed:
            by_loss = self._mixer.finite_by_loss(finite)
        self._forget_pending()
        member.finish(by_loss, norm)

    def _note_used(self) -> None:
        """Have other trainers refuse to add to gradients that this step has used, unless no scale is involved."""
        used = {id(parameter) for parameter in self._adding()}
        for other in _living if used else ():
            scaled = not (is_one(self.ampx_member.group.config) and is_one(other.ampx_member.group.config))
            if other is not self and scaled:
                other._provenance.note([entry for entry in other._adding() if id(entry) in used], UNKNOWN)

    def _close_empty(self) -> None:
        """End a step that found no gradients: it counts for nothing."""
        self._forget_pending()
        self.ampx_member.finish_empty()

    def _step_unchecked(self, step: Any, batch_size: float, ignore_stale_grad: bool) -> None:
        """Step where the session is off: as the raw trainer, with clipping where that was asked for."""
        raw, pending = self.trainer, self._pending
        if self._clips:
            self._apply(step, batch_size, ignore_stale_grad, None)
            self._hook.leave(raw)
        else:
            try:
                with switch.Region(None):
                    (raw.update if pending.reduced else step)(batch_size, ignore_stale_grad)
            except UserWarning as error:
                gradients.restore_fresh(raw, str(error))
                pending.reduced = not raw._update_on_kvstore  # a second try must not add up again
                raise
        self._forget_pending()
        self.ampx_member.note_result(UNCHECKED)

    def allreduce_grads(self) -> None:
        """Add up the contexts' gradients, for `update` or `step`. Sync: as the trainer's store."""
        member = self.ampx_member
        changes = member.stage in ("scaled", "unscaled")
        if changes:
            self._start_store()
            member.begin_change()
        self.trainer.allreduce_grads()
        self._pending.reduced = True
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

    def _check_divided_once(self) -> None:
        """Raise where another trainer has made unscaled gradients that this one would divide by their scale again."""
        if len(_living) < 2 or self.ampx_member.stage != "scaled" or self.ampx_member.factor == 1:
            return
        unscaled = {
            id(parameter)
            for other in list(_living)
            if other is not self and other.ampx_member.stage == "unscaled"
            for parameter in gradients.parameters(other.trainer)
        }
        shared = [entry.name for entry in self.trainer._params if id(entry) in unscaled and gradients.is_fresh(entry)]
        if shared:
            raise ProtocolError(
                f"another trainer holds parameters of this one ({', '.join(shared[:5])}), and its unscale or "
                f"clip_grad_norm unscaled their gradients, which would be divided again; accepted: after its step, "
                f"which uses them up. Step that trainer first."
            )

    # -- clearing ------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Set all gradients to zero, pending ones included; with `grad_req='add'` after every step."""
        self.ampx_member.begin_clear()
        self._hook.restore_scale(self.trainer)
        self._accumulation.reset()
        self._backend.zero_gradients(self.trainer)
        self._provenance.notes = {}
        self._pending.left, self._pending.skipped = None, False
        self._drop()

    def _drop(self) -> None:
        self.ampx_member.begin_clear()
        self._forget_pending()
        self.ampx_member.end_clear()

    def _forget_pending(self) -> None:
        self._pending.forget()
        if self.ampx_member.mixes:
            self._mixer.reset()

    # -- unscaled gradients --------------------------------------------------------------------------

    def ampx_unscale(self) -> None:
        """Add up the contexts' gradients and divide by the scale, in place."""
        member, pending = self.ampx_member, self._pending
        if member.stage == "unscaled" and member.mixes and not pending.reduced:
            self.allreduce_grads()
        if member.stage == "unscaled" or not member.group.enabled:
            return
        member.check_step()
        self._accumulation.reset()
        if gradients.any_fresh(self.trainer):
            self._check_divided_once()
            if not pending.reduced:
                self.allreduce_grads()
            member.begin_change()
            with switch.Region(None):
                self._unscale(self._collect(False, False))
        member.note_unscaled()

    def ampx_clip_grad_norm(self, max_norm: float) -> Any:
        """Clip the unscaled gradients; the norm before is float64 where float32 does not reach. Sync: one."""
        self.ampx_unscale()
        member, unscaled = self.ampx_member, self._pending.unscaled
        member.begin_change()
        with switch.Region(None):
            grads, flag = gradients.collect(self.trainer, False), None if unscaled is None else unscaled.finite
            _, norm = gradients.clip(grads, max_norm, None, flag)
        norm = 0.0 if norm is None else norm
        self._pending.note_norm(norm)
        member.end_change()
        return mx.np.array(norm, dtype="float64" if norm > FLOAT32_MAX else "float32")

    def rescale(self, factor: float) -> None:
        """Multiply unscaled gradients, so that they carry this loss scale again and further ones may be added."""
        pending = self._pending
        self.ampx_member.begin_change()
        gradients.rescale(gradients.parameters(self.trainer), factor)
        pending.narrow()
        pending.unscaled = pending.norm = None
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
        return not self.ampx_member.mixes and not gradients.any_nonzero(self._adding())

    def ampx_notice_cleared(self) -> None:
        """Forget them: a step skipped by hand."""
        gradients.mark_stale(self.trainer)
        self._drop()

    def ampx_check_backward(self, loss_id: int) -> None:
        """Raise where parameters that add have gradients which cannot be added to.

        Sync: none; after a skipped step that left gradients which add, some.
        """
        adding = self._check_body(loss_id)
        if self.ampx_member.stage == "idle":
            self._accumulation.reset()
            left = self._left(adding, gradients.any_fresh(self.trainer), 1.0)
            self._provenance.plan(adding, 1.0, left)  # whatever the scale: it raises or not

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Bring gradients left from the last step to this scale, and keep what MXNet would forget to add to.

        Raises:
            ProtocolError: Parameters that add have gradients which cannot be added to.

        Sync: none; after a skipped step that left gradients which add, some.
        """
        adding = self._check_body(loss_id)
        if self.ampx_member.stage == "idle":
            self._bring_to(adding, float(scale))
        elif self._mixer.mixes(loss_id):
            self._mixer.begin(adding)
        self._pending.reduced = False
        self._accumulation.begin()

    def _check_body(self, loss_id: int) -> list[Any]:
        """Raise where a body must not begin whatever its scale; return the parameters that add."""
        if self._must_be_prepared:
            self._check_prepared()
        adding, member = self._adding(), self.ampx_member
        session = casting.running_session() if adding else None
        if session is not None and session.casting is not None and session.casting.dtype == "bfloat16":
            check_adds(self.trainer._params)
        if self._pending.reduced and self.trainer._kvstore:
            self._check_reduced(adding, member.stage != "idle" and self._mixer.mixes(loss_id))
        return adding

    def _check_prepared(self) -> None:
        """Raise where the level asks for low-precision parameters and `prepare` never made any."""
        if not low_parameters(self.trainer._params):
            raise ProtocolError(
                "the level asks for low-precision parameters, but the trainer holds none: the network would train in "
                "float32. Call net, trainer = ampx.prepare(net, trainer) first, or use level='O1'."
            )
        self._must_be_prepared = False

    @staticmethod
    def _check_reduced(adding: list[Any], mixes: bool) -> None:
        """Raise where new gradients would be added to those of all contexts; overwritten, they are not added up yet."""
        if mixes or adding:
            reason = "another loss_id" if mixes else "grad_req='add'"
            raise ProtocolError(
                f"scale_loss was called after allreduce_grads and before the step, with {reason}; the contexts' or "
                f"workers' sum would be added up again. Call allreduce_grads after the last backward."
            )

    def _left(self, adding: list[Any], fresh: bool, scale: float) -> float | None:
        """Return what gradients carry that a step's first body finds; a scale where there are none."""
        pending = self._pending
        if fresh:  # of a loss of another trainer, or of none
            self._provenance.note(adding, UNKNOWN)
        return UNKNOWN if pending.skipped else scale if pending.left is None else pending.left

    def _bring_to(self, adding: list[Any], scale: float) -> None:
        """Bring gradients that are there before the first backward of a step to its scale."""
        pending = self._pending
        self._accumulation.reset()
        fresh = gradients.any_fresh(self.trainer)
        if adding:
            left = self._left(adding, fresh, scale)
            self._provenance.bring_to(self.ampx_member, adding, scale, left)  # the body ends the change
        pending.skipped = False
        if pending.left is not None:
            pending.left = scale  # they carry it as well where the body raises before its backward
        if fresh:
            # This loss overwrites the others where it reaches, and where it does not, MXNet tells of a stale gradient.
            gradients.mark_stale(self.trainer, kept=adding)

    def ampx_after_backward(self, loss_id: int) -> None:
        """Add it; where there are several losses, to the unscaled gradients.

        Raises:
            ProtocolError: MXNet has overwritten gradients of another loss; all are cleared.
        """
        self._accumulation.end()
        if self.ampx_member.mixes:
            try:
                self._mixer.end(loss_id, self._adding())
            except ProtocolError:
                with mx.autograd.pause():
                    self.zero_grad()
                raise

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Add it to what was written before the exception; where there are several losses, drop that."""
        self._accumulation.end()
        if self.ampx_member.mixes:
            self._mixer.abandon()

    def _adding(self) -> list[Any]:
        """List the parameters whose gradients add up."""
        adding = gradients.adding(self.trainer)
        if not self._accumulation.parameters:
            return adding
        return [*adding, *(parameter for parameter in self._accumulation.parameters if parameter._grad is not None)]

    # -- life ----------------------------------------------------------------------------------------

    def ampx_meter(self) -> Meter | None:
        """Return what the last update that was looked at did."""
        return self._meter.last()

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

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, NotCopied)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back from a copy; what is pending stays behind."""
        self.__dict__.update(state)
        self._attach()
        self._drop()

    def __repr__(self) -> str:
        return f"AmpTrainer({self.trainer!r})"
