"""Every trainer that a script makes becomes one with a loss scale, in place."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ampx.errors import AmpxError
from ampx.run import Run
from ampx_mxnet.compat import mx
from ampx_mxnet.optimizer import AmpTrainer


class Manager:
    """What is managed in one run.

    Attributes:
        run: The run.
        quiet: Code of ampx or of MXNet's trainer is at work, which reads gradients as they are.
        attached: The script asked for gradients of arrays.
        multiplied: Some backward was multiplied by a loss scale.
    """

    def __init__(self, run: Run) -> None:
        """Start with nothing managed."""
        self.run = run
        self.quiet = False
        self.attached = False
        self.multiplied = False
        self._made: list[weakref.ref[Any]] = []
        self._waiting = False
        self._wrapped: list[ManagedTrainer] = []
        self._owned: set[int] = set()
        run.record_own_sessions(lambda: None)

    @property
    def stood_down(self) -> bool:
        """Whether the script has mixed precision of its own, by MXNet's amp or by ampx itself, which is recorded."""
        return bool(self.run.stood_down)

    @contextmanager
    def records_only(self, phase: str) -> Iterator[None]:
        """Note what the script's own session did in a backward or a step."""
        with self.run.recorder.phase(phase):
            yield
        self.run.look()

    def adopt(self, trainer: Any) -> None:
        """Take over a trainer that the script has just made; casting starts with the first."""
        if self.stood_down:
            return
        amp = self.run.session()
        self.run.lines = (
            f"amp = ampx.init('mxnet', dtype={amp.effective.dtype or 'float32'!r}, level={amp.effective.level!r})",
            "trainer = ampx.wrap_optimizer(trainer)",
            "with ampx.scale_loss(loss, trainer) as scaled: scaled.backward()",
        )
        self._made.append(weakref.ref(trainer))
        self._waiting = True

    def all(self) -> list[ManagedTrainer]:
        """List what is managed, in order of creation; what was only made so far is wrapped now."""
        if not self._made or self.stood_down:
            return []
        if self._waiting:
            # Not when they are made: a script may set `grad_req` afterwards. Not later than its first recording,
            # which gradients that add up in bfloat16 on the CPU must not have begun without ampx.
            self._waiting = False
            for reference in self._made:
                trainer = reference()
                if trainer is not None and not isinstance(trainer, AmpTrainer):
                    self._wrap(trainer)
            self._owned = {id(one) for trainer in self._alive() for one in trainer._params}
        self._wrapped = self._alive()
        return self._wrapped

    def _alive(self) -> list[ManagedTrainer]:
        return [one for one in (reference() for reference in self._made) if isinstance(one, ManagedTrainer)]

    def _wrap(self, trainer: Any) -> None:
        kind = type(trainer).__name__
        amp = self.run.session()
        try:
            amp.wrap_optimizer(trainer, in_place=ManagedTrainer)
        except AmpxError as error:
            self.run.refuse_for(error)
        group = trainer.ampx_member.group
        trainer.ampx_manager = self
        optimizer = type(trainer.optimizer).__name__
        self.run.recorder.add_optimizer(
            optimizer if kind == "Trainer" else f"{kind}({optimizer})", trainer.loss_scale, group.index
        )

    @property
    def scales(self) -> bool:
        """Whether losses are multiplied at all: with bfloat16 they are not, unless asked."""
        amp = self.run.amp
        return amp is not None and (amp.effective.loss_scale.dynamic or amp.effective.loss_scale.init_scale != 1.0)

    def reveal(self, owns: Any) -> None:
        """Make the scaled gradients true of every trainer that this says yes to, because the script looks at one."""
        if self.quiet or self.stood_down or not self.scales:
            return
        for one in self._wrapped:
            if one.ampx_member.stage == "scaled" and owns(one):
                if len(one._contexts) > 1:
                    self.run.refuse(
                        "the script reads gradients of several contexts between backward and step, which carry a loss "
                        "scale until they are added up; accepted: reading them with one context, or --dtype bfloat16"
                    )
                self._quietly(one.ampx_unscale)

    def owns(self, parameter: Any) -> bool:
        """Return whether a managed trainer holds a parameter."""
        return id(parameter) in self._owned

    def refuse_unowned(self) -> None:
        """Refuse gradients that carry a loss scale which no step takes off again."""
        self.run.refuse(
            "the script computes gradients of arrays or parameters that no trainer holds, which carry the loss scale; "
            "accepted: gradients of what trainers hold, autograd.grad, or --dtype bfloat16, which needs no loss scale"
        )

    def _quietly(self, call: Any) -> Any:
        before, self.quiet = self.quiet, True
        try:
            return call()
        except AmpxError as error:
            self.run.refuse_for(error)
        finally:
            self.quiet = before

    def step(self, trainer: ManagedTrainer, call: Any) -> None:
        """Run a step of the script's, and note whether it counted."""
        group = trainer.ampx_member.group
        before = group.steps
        with self.run.recorder.phase("step"):
            self._quietly(call)
        if group.steps != before:
            self.run.recorder.stepped(group.index)


class ManagedTrainer(AmpTrainer):
    """What a script's trainer becomes.

    Attributes:
        ampx_manager: Who manages it.
    """

    ampx_manager: Manager

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Step, as the script asked."""
        self.ampx_manager.step(self, lambda: AmpTrainer.step(self, batch_size, ignore_stale_grad))

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Step after `allreduce_grads`, as the script asked."""
        self.ampx_manager.step(self, lambda: AmpTrainer.update(self, batch_size, ignore_stale_grad))

    def allreduce_grads(self) -> None:
        """Add up the contexts' gradients."""
        self.ampx_manager._quietly(lambda: AmpTrainer.allreduce_grads(self))


@contextmanager
def trainers_managed(manager: Manager) -> Iterator[None]:
    """Patch how trainers are made."""
    true = mx.gluon.Trainer.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        true(self, *args, **kwargs)
        manager.adopt(self)

    # A trainer that is used before any backward ran is not wrapped yet.
    def waiting(name: str) -> Any:
        native = getattr(mx.gluon.Trainer, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if manager.quiet or isinstance(self, AmpTrainer):
                return native(self, *args, **kwargs)
            if not any(one is self for one in manager.all()):
                return native(self, *args, **kwargs)
            return getattr(self, name)(*args, **kwargs)

        return mock.patch.object(mx.gluon.Trainer, name, call)

    record = mx.autograd.record

    def recording(train_mode: bool = True) -> Any:
        manager.all()
        return record(train_mode)

    def recorded(name: str) -> Any:
        native = getattr(AmpTrainer, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, ManagedTrainer):  # whose own method has a phase
                return native(self, *args, **kwargs)
            with manager.records_only("step"):
                return native(self, *args, **kwargs)

        return mock.patch.object(AmpTrainer, name, call)

    with (
        mock.patch.object(mx.gluon.Trainer, "__init__", make),
        recorded("step"),
        recorded("update"),
        mock.patch.object(mx.autograd, "record", recording),
        waiting("step"),
        waiting("update"),
    ):
        yield
