"""Every trainer that a script makes becomes one with a loss scale, in place."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from ampx.modules import distinct_names
from ampx.run import GRADIENT_SAMPLES, Managed, Manager, Run, script_line
from ampx_mxnet import gradients
from ampx_mxnet.calls import in_backward
from ampx_mxnet.compat import mx
from ampx_mxnet.gradients import sample
from ampx_mxnet.losses import scale_loss
from ampx_mxnet.step import AmpTrainer
from ampx_mxnet.wrapping import is_on_cpu


class _Attached(threading.local):
    """What code of the script attached gradients to, inside a backward that runs in this thread of MXNet."""

    arrays: Sequence[Any] = ()


def wait_for(gradients: Sequence[Any]) -> None:
    """Wait in a thread of MXNet for what an inner backward gives, before the thread runs another custom function.

    Native defect: such a thread has four spaces for temporary results, which operators take in turns, products with a
    number too. An operator of the inner backward that waits for a custom function keeps its space until then. If the
    same thread ran that function, and an operator in there was to take that space, both would wait for ever.
    """
    for gradient in gradients:
        gradient.wait_to_read()


def _multiply(gradients: Sequence[Any], factor: float) -> None:
    with mx.autograd.pause():
        for gradient in gradients:
            gradient[:] = gradient * factor


class TrainerManager(Manager[Managed]):
    """What is managed in one run: the trainers themselves, which become wrappers in place.

    Attributes:
        attached: The script asked for gradients of arrays.
        multiplied: Some backward was multiplied by a loss scale.
        kept: The script has got gradients, whose arrays it may have kept: every backward writes to the same.
        waits: There are backwards of the script's own, which MXNet runs in threads: each is waited for.
        own_gradient: An operator that was recorded and makes its own gradient; "" for none.
        attached_inside: What code of the script attached gradients to, inside a backward.
    """

    def __init__(self, run: Run) -> None:
        self.attached = self.multiplied = self.kept = self.waits = False
        self.own_gradient = ""
        self.attached_inside = _Attached()
        self._waiting = False
        self._trainers: list[ManagedTrainer] = []
        self._owned: set[int] = set()
        self._places: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # the lines that made trainers
        run.noun = "trainer"
        super().__init__(run)

    def adopt(self, trainer: Any) -> None:
        """Take over a trainer that the script has just made; casting starts with the first."""
        if self.stood_down:
            return
        # Where the machine has a GPU, and the script does without.
        on_cpu = self.run.amp is None and self.run.settings.device == "auto" and is_on_cpu(trainer)
        self.begin(**{"device": "cpu"} if on_cpu else {})
        self._places[trainer] = script_line()
        self.remember(trainer)
        self._waiting = True

    def trainers(self) -> list[ManagedTrainer]:
        """List what is managed, in order of creation; what was only made so far is wrapped now."""
        if self.stood_down:
            return []
        if self._waiting:
            # Not when they are made: a script may set `grad_req` afterwards. Not later than its first recording,
            # which gradients that add up in bfloat16 on the CPU must not have begun without ampx.
            self._waiting = False
            for trainer in self.alive():
                if not isinstance(trainer, AmpTrainer):
                    self._wrap_in_place(trainer)
            self._owned = {id(parameter) for trainer in self._managed_trainers() for parameter in trainer._params}
        self._trainers = self._managed_trainers()
        return self._trainers

    def _managed_trainers(self) -> list[ManagedTrainer]:
        return [trainer for trainer in self.alive() if isinstance(trainer, ManagedTrainer)]

    def _wrap_in_place(self, trainer: Any) -> None:
        kind, optimizer = type(trainer).__name__, type(trainer.optimizer).__name__
        with self.working():
            self.run.session().wrap_optimizer(trainer, in_place=ManagedTrainer)
        trainer.ampx_manager, trainer.ampx_shown = self, 1.0
        shown = optimizer if kind == "Trainer" else f"{kind}({optimizer})"
        group = trainer.ampx_member.group.index
        self.run.recorder.add_optimizer(shown, trainer.loss_scale, group, self._places[trainer])

    def sharing(self, group: int) -> list[Any]:
        """List the trainers that share a loss scale, by its position in the recorder."""
        return [trainer for trainer in self._trainers if trainer.ampx_member.group.index == group]

    def rates_of(self, trainer: ManagedTrainer) -> Iterable[float]:
        """Return its only one."""
        optimizer = trainer.optimizer
        if optimizer.lr_scheduler is None:
            return (float(optimizer.lr),)
        skipped = trainer.last_step is not None and not trainer.last_step.applied  # which MXNet does not count
        return (float(optimizer.lr_scheduler(optimizer.num_update + int(skipped))),)

    def end(self) -> None:
        """End the session: that of the run, or the script's own, which nothing outside of the run can go on with."""
        self._note_uncast()
        self.run.close()
        if self.stood_down and self.run.amp is not None:
            self.run.amp.shutdown()

    def _note_uncast(self) -> None:
        """Say it where nothing that was looked at computed in the session's dtype."""
        plan, operations = self.run.amp and self.run.amp.casting, self.run.recorder.ops
        if plan and operations and not self.stood_down and all(dtype != plan.dtype for _, dtype in operations):
            self.run.recorder.note(
                f"no operation of the first steps computed in {plan.dtype}: MXNet casts those of its op lists, and of "
                f"the mx.np interface the layers alone"
            )

    def look(self, owns: Any, array: Any = None) -> None:
        """Unscale gradients where the script looks at one, of this array or of a trainer that `owns` says yes to."""
        if self.quiet or self.stood_down:
            return
        if not in_backward():
            self.kept = True
            self.reveal(owns)
        elif self.shows and not any(array is attached for attached in self.attached_inside.arrays):
            self.run.refuse(
                "the script reads a gradient while a backward runs, which carries the loss scale; accepted: those of "
                "arrays that this backward has attached gradients to, reading them after backward, or --dtype "
                "bfloat16, which needs no loss scale"
            )

    def reveal(self, owns: Any) -> None:
        """Make the scaled gradients true of every trainer that this says yes to."""
        for trainer in self._trainers if self.scales else ():
            if trainer.ampx_member.stage == "scaled" and owns(trainer):
                with self.working():
                    trainer.ampx_reveal()

    def wait(self) -> None:
        """Wait for backwards of the script's own that run in other threads. Sync: one, where there are any."""
        if self.waits:
            mx.nd.waitall()

    def scaled(self, heads: Any, factor: float) -> Any:
        """Return heads of a backward times a loss scale."""
        if isinstance(heads, (list, tuple)):
            return [scale_loss(head, factor) for head in heads]
        return scale_loss(heads, factor)

    def call_unscaled(self, function: Callable[..., Any], gradients: Sequence[Any], *change: Any) -> Any:
        """Call code of the script as every manager does, and forget what it attached gradients to."""
        try:
            return super().call_unscaled(function, gradients, *change)
        finally:
            self.attached_inside.arrays = []

    def run_inner(self, heads: Any, true: Callable[[Any], None]) -> None:
        """Run a backward inside of a backward: parameters get gradients that carry the scale of the outer one."""
        if not self.shows:
            true(heads)
            return
        factor = self.factor
        with self.working():
            held = [gradient for array in self.attached_inside.arrays if (gradient := array.grad) is not None]
        _multiply(held, factor)
        with self.script_code.switched(False):
            true(self.scaled(heads, factor))
        wait_for(held)
        _multiply(held, 1.0 / factor)

    def check_backward(self, factor: float) -> None:
        """Refuse gradients that a loss scale would be left in, or would not reach."""
        if self.multiplied and self.attached:
            self.refuse_unowned()
        if factor != 1 and self.own_gradient:
            self.run.refuse(
                f"the script uses {self.own_gradient}, which makes its own gradient, and no loss scale reaches it; "
                f"accepted: losses of mxnet.gluon.loss, or --dtype bfloat16, which needs no loss scale"
            )

    def owns(self, parameter: Any) -> bool:
        """Return whether a managed trainer holds a parameter."""
        return id(parameter) in self._owned

    def refuse_unowned(self) -> None:
        """Refuse gradients that carry a loss scale which no step takes off again."""
        self.run.refuse(
            "the script computes gradients of arrays or parameters that no trainer holds, which carry the loss scale; "
            "accepted: gradients of what trainers hold, autograd.grad, or --dtype bfloat16, which needs no loss scale"
        )

    def step(self, trainer: ManagedTrainer, call: Any) -> None:
        """Run a step of the script's."""

        def step() -> None:
            trainer.ampx_hide()
            call()

        self.take_step(trainer, step, lambda: sample(trainer, GRADIENT_SAMPLES, self._names()))

    def _names(self) -> dict[int, str]:
        every = (parameter for trainer in self._trainers for parameter in trainer._params)
        return distinct_names((parameter.name, parameter) for parameter in every)


class ManagedTrainer(AmpTrainer):
    """What a script's trainer becomes."""

    ampx_manager: TrainerManager
    ampx_shown: float  # the loss scale that gradients were divided by to be looked at; 1 for none

    def ampx_reveal(self) -> None:
        """Make scaled gradients true; those of several contexts, which are not added up yet, until `ampx_hide`."""
        if len(self._contexts) == 1 or self._pending.reduced:
            self.ampx_unscale()
        elif self.ampx_shown == 1.0:
            gradients.rescale(gradients.parameters(self.trainer), 1.0 / self.ampx_member.factor)
            self.ampx_shown = float(self.ampx_member.factor)

    def ampx_hide(self) -> None:
        """Have gradients carry the loss scale again that were only shown without it."""
        if self.ampx_shown != 1.0:
            gradients.rescale(gradients.parameters(self.trainer), self.ampx_shown)
            self.ampx_shown = 1.0

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Step, as the script asked."""
        self.ampx_manager.step(self, lambda: AmpTrainer.step(self, batch_size, ignore_stale_grad))

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Step after `allreduce_grads`, as the script asked."""
        self.ampx_manager.step(self, lambda: AmpTrainer.update(self, batch_size, ignore_stale_grad))

    def allreduce_grads(self) -> None:
        """Add up the contexts' gradients."""
        inside = self.ampx_manager.quiet
        with self.ampx_manager.working():
            self.ampx_hide()
            AmpTrainer.allreduce_grads(self)
            if self.ampx_manager.kept and not inside and self.ampx_member.stage == "scaled":
                self.ampx_reveal()


@contextmanager
def trainers_managed(manager: TrainerManager) -> Iterator[None]:
    """Patch how trainers are made."""
    make, record = mx.gluon.Trainer.__init__, mx.autograd.record

    def make_managed(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        manager.adopt(self)

    def recording(train_mode: bool = True) -> Any:
        manager.trainers()
        return record(train_mode)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(mx.gluon.Trainer, "__init__", make_managed))
        stack.enter_context(mock.patch.object(mx.autograd, "record", recording))
        for name in ("step", "update"):
            recorded = manager.recorded(getattr(AmpTrainer, name))
            stack.enter_context(mock.patch.object(AmpTrainer, name, recorded))
            stack.enter_context(mock.patch.object(mx.gluon.Trainer, name, _wrapped_first(manager, name)))
        yield


def _wrapped_first(manager: TrainerManager, name: str) -> Any:
    """Return a method of trainers that wraps those which are used before any backward ran."""
    native = getattr(mx.gluon.Trainer, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if manager.quiet or isinstance(self, AmpTrainer) or not any(self is each for each in manager.trainers()):
            return native(self, *args, **kwargs)
        return getattr(self, name)(*args, **kwargs)

    return call
