"""The trainer that MXNet sees: it delegates to the raw one, which updates only with finite gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ampx.errors import ProtocolError
from ampx.events import UNCHECKED
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import Member
from ampx.scale_state import FLOAT32_MAX
from ampx.session import sessions

from . import checkpoints, gradients, switch
from .accumulation import Accumulation, check_adds
from .clipping import clip
from .compat import mx
from .delegation import DelegatingTrainer
from .hook import OverflowHook
from .in_place import move_back

if TYPE_CHECKING:
    from .backend import MXNetBackend

# What is the wrapper's own; everything else is read and set on the raw trainer.
_OWN: Final = frozenset(
    (
        *("trainer", "ampx_member", "ampx_manager", "_backend", "_max_grad_norm", "_max_grad_value", "_accumulation"),
        *("_true", "_finite", "_norm", "_reduced", "_kvstore_before", "_used", "_in_place", "_layout", "_hook"),
        *("_left", "_own_scale", "__class__", "__weakref__"),
    )
)

_NOTHING_PENDING: Final = {
    "_true": False,  # the gradients are divided by the scale already
    "_finite": None,  # what was found then, on their device
    "_norm": None,
    "_reduced": False,  # the contexts' gradients are added up already
}


# Gluon's class comes first: a gluon trainer can then become one of these in place.
class AmpTrainer(DelegatingTrainer, WrappedOptimizer):
    """A gluon trainer with its own loss scale.

    True gradients are what hangs on the parameters, divided by the loss scale. The batch size divides later, in `step`,
    as in MXNet: bounds of clipping are compared before that.

    Attributes:
        trainer: The raw trainer.
        ampx_member: Its place in the protocol.
    """

    _finite: Any
    _norm: Any
    _reduced: bool
    _true: bool
    # The scale that gradients carry which the last step used and nobody cleared; infinity where nobody can tell.
    _left: float | None
    # The raw trainer's own factor, while a step has another in its place; None at other times.
    _own_scale: float | None

    def __init__(self, backend: MXNetBackend, trainer: Any, member: Member, options: Mapping[str, Any]) -> None:
        """Made by `ampx.wrap_optimizer`."""
        self.trainer = trainer
        self.ampx_member = member
        self._backend = backend
        self._max_grad_norm: float | None = options.get("max_grad_norm")
        self._max_grad_value: float | None = options.get("max_grad_value")
        self._in_place = bool(options.get("in_place"))
        self._accumulation = Accumulation()
        self._layout = gradients.Layout()
        self._kvstore_before = dict(trainer._kvstore_params)
        # Whether the gradients on the parameters, if no backward wrote them since, were stepped with already.
        self._used = False
        self._left = self._own_scale = None
        self._forget_pending()
        self._attach()

    def _forget_pending(self) -> None:
        self.__dict__.update(_NOTHING_PENDING)  # at once: setting an attribute of a delegating object is slow

    def _attach(self) -> None:
        """Make what belongs to this process and cannot be copied."""
        self.ampx_member.belong_to(self)
        group = self.ampx_member.group
        self._hook = OverflowHook(self.ampx_member, weakref.WeakMethod(self._drop))
        if group.enabled:
            self._hook.watch(self.trainer)

    def ampx_culprits(self) -> tuple[str, ...]:
        """Name the parameters whose gradients are not finite. Sync: one."""
        return tuple(name for name, _, _ in gradients.name_nonfinite(self.trainer, None))

    def __getattr__(self, name: str) -> Any:
        """Look the rest up on the raw trainer."""
        if name.startswith("__") or "trainer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set on the raw trainer what is not the wrapper's own."""
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
            member.begin_change()
        self.trainer.allreduce_grads()
        self._reduced = True
        if changes:
            member.end_change()

    def _step(self, run: Any, batch_size: float, ignore_stale_grad: bool) -> None:
        raw, member = self.trainer, self.ampx_member
        if callable(batch_size):
            self._backend.refuse("arguments of step beyond MXNet's (closures)")
        if member.group.enabled:
            fresh = gradients.any_fresh(raw)
            if fresh or member.stage != "idle" or (self._used and not ignore_stale_grad):
                member.check_step()
            if not fresh:
                self._nothing_to_do()
                return
        if member.group.enabled:
            self._accumulation.reset()
            member.begin_change()  # nobody can tell how far an update came that raised
        finite, carried = self._run(raw.update if self._reduced else run, batch_size, ignore_stale_grad)
        norm, self._used, self._left = self._norm, True, carried if finite else math.inf
        self._forget_pending()
        if not member.group.enabled:
            self._hook.leave(raw)
            member.note_result(UNCHECKED)
            return
        if not finite:
            gradients.mark_stale(raw)  # or a parameter that the next loss does not use would overflow again
        member.finish(dict.fromkeys(member.factors, finite), norm)

    def _run(self, run: Any, batch_size: float, ignore_stale_grad: bool) -> tuple[bool, float]:
        """Run the raw trainer's own step; tell whether it updated, and what the gradients carry now."""
        raw, member = self.trainer, self.ampx_member
        enabled = member.group.enabled
        clips = self._max_grad_norm is not None or self._max_grad_value is not None
        scaled = enabled and not self._true
        # The optimizer's own factor divides on the way, where nothing needs the true gradients themselves.
        factor = member.factor
        folds = scaled and not clips and factor >= 1

        def check() -> bool:
            self._reduced = True  # should the update fail, a second try must not add up again
            found = gradients.collect(raw, True) if ignore_stale_grad else self._layout.collect(raw)
            if folds:
                return bool(gradients.all_finite(found).asnumpy())
            if scaled:
                self._unscale(found)
                if ignore_stale_grad:  # what is left alone carries the same as what is stepped with
                    gradients.rescale(self._adding(), 1.0 / factor, only_stale=True)
                member.begin_change("unscaled")
            elif enabled:  # somebody may have written to them since they were made true
                again = gradients.all_finite(found)
                self._finite = again if self._finite is None else self._finite * again
            if not clips:
                return not enabled or bool(self._finite.asnumpy())
            finite, norm = clip(found, self._max_grad_norm, self._max_grad_value, self._finite if enabled else None)
            self._norm = norm if self._norm is None else self._norm
            return finite

        self._restore_scale()
        before = self._own_scale = raw._scale
        try:
            if folds:
                raw._scale = before / factor
            with switch.Region(None):
                finite = self._hook.run(raw, run, batch_size, ignore_stale_grad, check)
        except UserWarning as error:
            gradients.restore_fresh(raw, str(error))
            member.end_change()  # MXNet raises it before it updates
            raise
        finally:
            # Native defect: left as it is, the factor would shrink the next step that was not scaled.
            self._restore_scale()
            if folds:
                raw._optimizer.rescale_grad = before / batch_size
        return finite, float(factor) if folds else 1.0

    def _unscale(self, found: Any) -> None:
        """Divide pending gradients by their scale, in place; the caller notes it."""
        self._finite = gradients.unscale(found, self.ampx_member.factor)
        self._true = True

    def _restore_scale(self) -> None:
        """Put the raw trainer's own factor back, where a step had put another there."""
        if self._own_scale is not None:
            self.trainer._scale, self._own_scale = self._own_scale, None

    def _nothing_to_do(self) -> None:
        self._forget_pending()
        self.ampx_member.finish_empty()

    def zero_grad(self) -> None:
        """Set all gradients to zero, pending ones included; with `grad_req='add'` after every step."""
        self._begin_drop()
        self._restore_scale()
        self._accumulation.reset()
        gradients.clear(self.trainer)
        self._used, self._left = False, None
        self._drop()

    def _drop(self) -> None:
        self._begin_drop()
        self._forget_pending()
        if self.ampx_member.stage != "idle":
            self.ampx_member.forget()

    def _begin_drop(self) -> None:
        if self.ampx_member.stage not in ("idle", "inside"):
            self.ampx_member.begin_change()

    # -- true gradients ------------------------------------------------------------------------------

    def ampx_unscale(self) -> None:
        """Add up the contexts' gradients and divide by the scale, in place."""
        member = self.ampx_member
        if member.stage == "unscaled" or not member.group.enabled:
            return
        member.check_step()
        self._accumulation.reset()
        if gradients.any_fresh(self.trainer):
            if not self._reduced:
                self.allreduce_grads()
            member.begin_change()
            with switch.Region(None):
                self._unscale(gradients.collect(self.trainer, False))
        member.note_unscaled()

    def ampx_clip_grad_norm(self, max_norm: float) -> Any:
        """Clip the true gradients; the norm before is float64 where float32 does not reach. Sync: one."""
        self.ampx_unscale()
        self.ampx_member.begin_change()
        with switch.Region(None):
            _, norm = clip(gradients.collect(self.trainer, False), max_norm, None, self._finite)
        self._norm = norm = 0.0 if norm is None else norm
        self.ampx_member.end_change()
        return mx.np.array(norm, dtype="float64" if norm > FLOAT32_MAX else "float32")

    def rescale(self, factor: float) -> None:
        """Multiply true gradients, so that they carry this loss scale again and further ones may be added.

        Args:
            factor: The loss scale.
        """
        self.ampx_member.begin_change()
        gradients.rescale(gradients.parameters(self.trainer), factor)
        self._finite, self._norm, self._true = None, None, False
        self.ampx_member.note_scaled(factor)

    def ampx_adopt_adding(self) -> None:
        """Accumulate here where parameters have `grad_req='add'` and MXNet would not."""
        self._accumulation.adopt(self.trainer._params)

    def ampx_notice_cleared(self) -> None:
        """Forget true gradients that the next backward overwrites: a step skipped by hand."""
        if not self._adding():
            gradients.mark_stale(self.trainer)
            self._drop()

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Bring gradients left from the last step to this scale, and keep what MXNet would forget to add to.

        Raises:
            ProtocolError: Parameters that add have gradients which cannot be added to.

        Sync: none; after a skipped step that left gradients which add, some.
        """
        if self.ampx_member.stage == "idle":
            self._take_up(float(scale))
        session = sessions.get("mxnet")
        if session is not None and session.casting is not None and session.casting.dtype == "bfloat16":
            check_adds(self.trainer._params)
        if self._reduced:
            self._check_reduced()
        self._accumulation.begin()

    def ampx_after_backward(self, loss_id: int) -> None:
        """Add it."""
        self._accumulation.end()

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Add it to what was written before the exception."""
        self._accumulation.end()

    def _adding(self) -> list[Any]:
        """List the parameters whose gradients add up."""
        adding = [one for one in gradients.parameters(self.trainer) if one._grad_req == "add"]
        return [*adding, *(one for one in self._accumulation.parameters if one._grad is not None)]

    def _take_up(self, scale: float) -> None:
        """See to gradients that are there before the first backward of a step."""
        self._accumulation.reset()
        adding, fresh, left = self._adding(), gradients.any_fresh(self.trainer), self._left
        if adding and (fresh or left == math.inf):
            # Of a loss of another trainer, or of none, or of a skipped step: nobody can tell what they carry.
            if gradients.any_nonzero(adding):
                raise ProtocolError(
                    f"scale_loss was called while {'another backward' if fresh else 'a skipped step'} had left "
                    f"gradients on parameters with grad_req='add' ({', '.join(one.name for one in adding[:5])}); they "
                    f"cannot be added to scaled ones; accepted: cleared gradients. Call trainer.zero_grad() first, or "
                    f"give scale_loss all trainers that a loss has parameters of."
                )
        elif left is not None and left != scale:
            self._left = math.inf
            gradients.rescale(adding, scale / left)
        self._left = None
        if fresh:
            # This loss overwrites the others where it reaches, and where it does not, MXNet tells of a stale gradient.
            gradients.mark_stale(self.trainer, kept=adding)

    def _check_reduced(self) -> None:
        """Raise where new gradients would be added to those of all contexts; overwritten, they are not added up yet."""
        if len(self.trainer._contexts) > 1 and self._adding():
            raise ProtocolError(
                "scale_loss was called after allreduce_grads and before the step, with grad_req='add'; the contexts' "
                "sum would be added up again. Call allreduce_grads after the last backward."
            )
        self._reduced = False

    # -- life ----------------------------------------------------------------------------------------

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
        checkpoints.save(self.trainer, self.ampx_member.group, fname)

    def load_states(self, fname: str) -> None:
        """Load the optimizer's state, and the loss scale where the file has one.

        Args:
            fname: Path of a file that this or plain MXNet's `save_states` wrote.

        Raises:
            UnknownSchemaError, InvalidStateError: The loss scale in it cannot be read.

        Sync: as MXNet's.
        """
        checkpoints.load(self.trainer, self.ampx_member.group, fname)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back from a copy; what is pending stays behind."""
        self.__dict__.update(state)
        self._attach()
        self._drop()

    def __repr__(self) -> str:
        """Return the raw trainer."""
        return f"AmpTrainer({self.trainer!r})"
