"""Every optimizer that a script makes: it stays as it is, and has a wrapper of ampx."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import paddle

from ampx.protocol import ScaleGroup
from ampx.run import GRADIENT_SAMPLES, Managed, Manager, Run, script_line
from ampx_paddle.gradients import collect, gradient_of, names_in_models, parameters, sample
from ampx_paddle.sot import untranslated
from ampx_paddle.static import GraphLedger, StaticOptimizer
from ampx_paddle.step import AmpOptimizer

from .operations import PaddleSampler

_CLEARS: Final = ("clear_grad", "clear_gradients")
_HALVES: Final = ("backward", "apply_gradients")  # of `minimize`
_SHADOWED: Final = ("step", "minimize", *_HALVES, *_CLEARS)


class PaddleManaged(Managed):
    """One optimizer of the script; some of its methods are shadowed on the instance.

    Attributes:
        zero: Its gradients were cleared, and no backward has come since.
        kept: The script has got its gradients, and may have kept the tensors, which the next backward adds to.
    """

    zero = True
    kept = False


class PaddleManager(Manager[PaddleManaged]):
    """What is managed in one run.

    Attributes:
        multiplied: Some backward was multiplied by a loss scale.
        hooked: The script has hooks on gradients.
        compiled_backward: A backward of the script's own became part of a program.
        prints: What prints gradients of programs and operators, each once.
        decorated: The script gave an optimizer to fluid's `decorate`, which uses the session of this run.
    """

    def __init__(self, run: Run) -> None:
        self.multiplied = self.hooked = self.compiled_backward = self.decorated = False
        self.prints: dict[str, None] = {}
        self._owners: dict[int, PaddleManaged] = {}
        self._runs = 0
        super().__init__(run, PaddleSampler(run.recorder))

    def follow(self) -> None:
        """Only record from now on: the script has started a session by itself."""
        self._runs = 0
        super().follow()

    @untranslated
    def adopt(self, raw: Any) -> None:
        """Take over an optimizer that the script has just made; casting starts with the first."""
        if isinstance(raw, (AmpOptimizer, StaticOptimizer)) or self.stood_down:
            return
        # In a static graph nothing is cast by region: the program is, as a whole, once it is built.
        self.begin(process_wide=paddle.in_dynamic_mode())
        managed = PaddleManaged(raw, script_line())
        for name in _SHADOWED:
            # Native defect: Paddle's bytecode translator fails at bound methods that are attributes of an object.
            setattr(raw, name, functools.partial(self._shadow(managed, name), raw))
        self.keep(managed)

    def wrap(self, managed: PaddleManaged, **options: Any) -> None:
        """Make the wrapper of an optimizer."""
        super().wrap(managed, **options)
        if isinstance(managed.wrapped, AmpOptimizer):
            self._owners.update((id(parameter), managed) for parameter in parameters(managed.raw))

    def rates_of(self, raw: Any) -> Iterable[float]:
        """Return its only one."""
        return (float(raw.get_lr()),)

    def owner(self, tensor: Any) -> PaddleManaged | None:
        """Return which optimizer holds a parameter."""
        return self._owners.get(id(tensor))

    def let_go(self, managed: PaddleManaged) -> None:
        """Put the own methods of an optimizer back."""
        for name in _SHADOWED:
            managed.raw.__dict__.pop(name, None)
        if isinstance(managed.wrapped, AmpOptimizer):
            managed.wrapped.ampx_unwrap()

    # -- programs ------------------------------------------------------------------------------------

    def ran(self) -> None:
        """Note that a program ran: operators are looked at in the first runs."""
        self._runs += 1
        if self._runs > self.run.recorder.sampled_steps:
            self.sampler.stop()

    def look(self) -> None:
        """Note what the programs have done so far: they count their steps. Sync: some on an accelerator."""
        amp, recorder = self.run.amp, self.run.recorder
        programs: list[tuple[ScaleGroup, GraphLedger]] = []
        for group in () if amp is None else amp.live_groups():
            if isinstance(group.ledger, GraphLedger):
                programs.append((group, group.ledger))
                for event in group.ledger.events(group):
                    group.send(event)
        self.run.look()
        for group, ledger in programs if not self.stood_down else ():
            if group.index not in recorder.optimizers:  # by another way than the script's own minimize
                self.decorated = True
                for wrapped in self.run.session().optimizers_of(group):
                    recorder.add_optimizer(type(wrapped.optimizer).__name__, group.config.init_scale, group.index)
            steps = group.steps - recorder.optimizers[group.index].steps
            if steps and recorder.wants_losses and (loss := ledger.value("loss")) is not None:
                recorder.saw_loss(functools.partial(float, loss))
            recorder.stepped(group.index, steps)

    # -- what the script calls -----------------------------------------------------------------------

    def _shadow(self, managed: PaddleManaged, name: str) -> Callable[..., Any]:
        @untranslated
        def call(raw: Any, *args: Any, **kwargs: Any) -> Any:
            native = (name in _CLEARS and managed.wrapped is None) or (name in _HALVES and not paddle.in_dynamic_mode())
            if managed.busy or self.stood_down or native:
                return getattr(type(raw), name)(raw, *args, **kwargs)
            if name in _CLEARS:
                managed.zero, managed.kept = True, False
                with self.working(managed):
                    return managed.wrapped.clear_grad(*args, **kwargs)
            self.all()
            if isinstance(managed.wrapped, StaticOptimizer):
                from .static import minimize  # which imports this module

                return minimize(self, managed, name, args, kwargs)
            if name in _HALVES:
                return self._half_a_step(managed, name, args, kwargs)
            return self._step(managed, name, args, kwargs)

        return call

    def _half_a_step(self, managed: PaddleManaged, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what the first half of `minimize` does, which hands gradients out; refuse the second."""
        if self.scales and name == "apply_gradients":
            self.run.refuse(
                "the script steps with apply_gradients, by which gradients reach the optimizer that no loss scale is "
                "known of; accepted: writing them to parameter.grad and calling step(), or --dtype bfloat16, which "
                "needs no loss scale"
            )
        if name == "backward" and self.multiplied:
            managed.kept = True
            self.reveal(managed)
        with self.working(managed):
            return getattr(managed.raw, name)(*args, **kwargs)

    def _step(self, managed: PaddleManaged, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wrapped = managed.wrapped
        if args and callable(args[0]):
            closure = self.seen_through(args[0], lambda: self._note_unscaled(managed), managed)
            args = (closure, *args[1:])
        else:
            self._note_unscaled(managed, applies_zeros=True)
        step = functools.partial(getattr(wrapped, name), *args, **kwargs)
        return self.take_step(wrapped, step, lambda: sample(managed.raw, GRADIENT_SAMPLES, self._names()), managed)

    def _names(self) -> dict[str, str]:
        """Return the names of all parameters that are trained, which tell those of several models apart."""
        return names_in_models([parameter for managed in self.managed() for parameter in parameters(managed.raw)])

    def _note_unscaled(self, managed: PaddleManaged, applies_zeros: bool = False) -> None:
        """Note gradients that did not come through a scaled backward; zeros may be applied, as the script would."""
        member = managed.wrapped.ampx_member
        if member.stage == "idle" and ((applies_zeros and not managed.zero) or collect(managed.raw)):
            member.note_scaled(1.0)

    # -- gradients -----------------------------------------------------------------------------------

    def check_programs(self) -> None:
        """Refuse backwards of the script's own in programs whose loss is scaled; name what prints their gradients."""
        if self.compiled_backward:
            self.run.refuse(
                "the backward of a PyLayer is part of a program, and would get gradients multiplied by the loss scale "
                "there; accepted: PyLayers outside of static graphs and of to_static(full_graph=True), or --dtype "
                "bfloat16, which needs no loss scale"
            )
        while self.prints:
            self.run.recorder.note_scaled(self.prints.popitem()[0])

    def check_main_grads(self, managed: PaddleManaged) -> None:
        """Refuse gradients that a hook of the script keeps for the optimizer: unscaled ones, while others are not."""
        if self.hooked and any(getattr(parameter, "main_grad", None) is not None for parameter in collect(managed.raw)):
            self.run.refuse(
                "a hook of the script puts gradients into main_grad, from which the optimizer takes them; accepted: "
                "gradients in parameter.grad, or --dtype bfloat16, which needs no loss scale"
            )

    def reveal(self, managed: PaddleManaged) -> None:
        """Unscale an optimizer's gradients, because the script looks at one of them."""
        if managed.wrapped.ampx_member.stage == "scaled":
            with self.working(managed):
                managed.wrapped.ampx_unscale()

    @paddle.no_grad()
    def rescale(self, managed: PaddleManaged, factor: float) -> None:
        """Have an optimizer's pending gradients carry this loss scale, so that further ones may be added."""
        member = managed.wrapped.ampx_member
        if member.stage == "idle":
            return
        carried = float(member.factor) if member.stage == "scaled" else 1.0
        if carried != factor and not managed.zero:
            for parameter in collect(managed.raw):
                gradient = gradient_of(parameter)
                if not gradient.is_dense():
                    self.run.refuse(
                        "sparse gradients are accumulated after the script has read them, or with several loss scales; "
                        "accepted: dense gradients, or --dtype bfloat16, which needs no loss scale"
                    )
                gradient.scale_(factor / carried)
        if member.stage == "unscaled":
            managed.wrapped.drop_pending()
        elif carried != factor:
            managed.wrapped.note_rescaled(factor)


@contextmanager
def optimizers_managed(manager: PaddleManager) -> Iterator[None]:
    """Patch how optimizers are made: every class's own constructor, because not all of them call the base class's."""
    with ExitStack() as stack:
        for kind in {kind for kind in vars(paddle.optimizer).values() if isinstance(kind, type)}:
            if issubclass(kind, paddle.optimizer.Optimizer) and "__init__" in vars(kind):
                stack.enter_context(mock.patch.object(kind, "__init__", _adopting(manager, vars(kind)["__init__"])))
        stack.enter_context(mock.patch.object(AmpOptimizer, "step", manager.recorded(AmpOptimizer.step)))
        yield


def _adopting(manager: PaddleManager, native: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(native)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        native(self, *args, **kwargs)
        if manager.find(self) is None:
            manager.adopt(self)

    return make
