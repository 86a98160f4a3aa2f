"""Every optimizer that a script makes: it stays what it is, and a wrapper of ampx stands beside it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, Final
from unittest import mock

import paddle

from ampx.errors import AmpxError
from ampx.run import Run
from ampx_paddle.gradients import collect, gradient_of, parameters
from ampx_paddle.static import GraphLedger, StaticOptimizer
from ampx_paddle.step import AmpOptimizer

from .operations import Sampler

_SHADOWED: Final = ("step", "minimize", "clear_grad", "clear_gradients")


class Managed:
    """One optimizer of the script.

    Attributes:
        raw: The script's own object; some of its methods are shadowed on the instance.
        wrapped: What `wrap_optimizer` made of it; None until the first backward or step.
        group: Where the recorder counts its steps.
        busy: The wrapper is at work, so that the raw optimizer's own methods must run.
        zero: Its gradients were cleared, and no backward has come since.
    """

    def __init__(self, raw: Any) -> None:
        """Remember the raw optimizer."""
        self.raw = raw
        self.wrapped: Any = None
        self.group = -1
        self.busy = False
        self.zero = True


class Manager:
    """What is managed in one run.

    Attributes:
        run: The run.
        quiet: Code of ampx is at work, which reads gradients as they are.
        multiplied: Some backward was multiplied by a loss scale.
        decorated: The script gave an optimizer to fluid's `decorate`, which uses the session of this run.
    """

    def __init__(self, run: Run) -> None:
        """Start with nothing managed."""
        self.run = run
        self.quiet = False
        self.multiplied = False
        self.decorated = False
        self._made: list[weakref.ref[Any]] = []
        self._owners: dict[int, Managed] = {}
        self._sampler = Sampler(run.recorder)
        self._runs = 0
        run.record_own_sessions(self._began)

    def _began(self) -> None:
        self._runs = 0
        self._sampler.restart()

    @property
    def stood_down(self) -> bool:
        """Whether the script has a session of its own, which is recorded."""
        return bool(self.run.stood_down)

    @contextmanager
    def records_only(self, phase: str) -> Iterator[None]:
        """Note what the script's own session did in a backward or a step."""
        with self.run.recorder.phase(phase):
            yield
        self.run.look()
        if phase == "step":
            self._sampler.after_step()

    def adopt(self, raw: Any) -> None:
        """Take over an optimizer that the script has just made; casting starts with the first."""
        if isinstance(raw, (AmpOptimizer, StaticOptimizer)) or self.stood_down:
            return
        if self.run.amp is None:
            # In a static graph nothing is cast by region: the program is, as a whole, once it is built.
            self.run.session(process_wide=paddle.in_dynamic_mode())
            self._sampler.start()
        managed = Managed(raw)
        raw.__dict__["_ampx_managed"] = managed
        for name in _SHADOWED:
            setattr(raw, name, MethodType(self._shadow(managed, name), raw))
        self._made.append(weakref.ref(raw))

    def all(self) -> list[Managed]:
        """List what is managed, each with its wrapper, in order of creation."""
        if not self._made or self.stood_down:
            return []
        found = []
        for reference in self._made:
            raw = reference()
            managed = None if raw is None else raw.__dict__.get("_ampx_managed")
            if managed is not None:
                if managed.wrapped is None:
                    self.wrap(managed)
                found.append(managed)
        return found

    def wrapped(self) -> list[Managed]:
        """List what has a wrapper."""
        raws = [reference() for reference in self._made]
        found = [raw.__dict__.get("_ampx_managed") for raw in raws if raw is not None]
        return [one for one in found if one is not None and one.wrapped is not None]

    def ran(self) -> None:
        """Note that a program ran: operators are looked at in the first runs."""
        self._runs += 1
        if self._runs > self.run.recorder.sampled_steps:
            self._sampler.stop()

    def look(self) -> None:
        """Note what the programs have done so far: they count their steps. Sync: some on an accelerator."""
        amp = self.run.amp
        for group in () if amp is None else amp.live_groups():
            if isinstance(group.ledger, GraphLedger):
                for event in group.ledger.events(group):
                    group.send(event)
        self.run.look()
        recorder = self.run.recorder
        for group in () if amp is None or self.stood_down else amp.live_groups():
            if isinstance(group.ledger, GraphLedger):
                if group.index not in recorder.optimizers:  # by another way than the script's own minimize
                    self._note_decorated(amp, group)
                recorder.stepped(group.index, group.steps - recorder.optimizers[group.index].steps)

    def _note_decorated(self, amp: Any, group: Any) -> None:
        for wrapped in amp.optimizers_of(group):
            kind = type(wrapped.optimizer).__name__
            self.run.recorder.add_optimizer(kind, group.config.init_scale, group.index)
        self.decorated = True

    def wrap(self, managed: Managed) -> None:
        """Make the wrapper of an optimizer."""
        try:
            managed.wrapped = self.run.session().wrap_optimizer(managed.raw)
        except AmpxError as error:
            self.run.refuse_for(error)
        group = managed.wrapped.ampx_member.group
        kind = type(managed.raw).__name__
        managed.group = self.run.recorder.add_optimizer(kind, managed.wrapped.loss_scale, group.index)
        if isinstance(managed.wrapped, AmpOptimizer):
            self._owners.update((id(one), managed) for one in parameters(managed.raw))

    def owner(self, tensor: Any) -> Managed | None:
        """Return which optimizer holds a parameter."""
        return self._owners.get(id(tensor))

    # -- what the script calls -----------------------------------------------------------------------

    def _shadow(self, managed: Managed, name: str) -> Callable[..., Any]:
        def call(raw: Any, *args: Any, **kwargs: Any) -> Any:
            if managed.busy or self.stood_down:
                return getattr(type(raw), name)(raw, *args, **kwargs)
            if name in ("clear_grad", "clear_gradients"):
                if managed.wrapped is None:
                    return getattr(type(raw), name)(raw, *args, **kwargs)
                managed.zero = True
                return self.work(managed, lambda: managed.wrapped.clear_grad(*args, **kwargs))
            self.all()
            if isinstance(managed.wrapped, StaticOptimizer):
                from .static import minimize  # which imports this module

                return minimize(self, managed, name, args, kwargs)
            return self._step(managed, name, args, kwargs)

        return call

    def _step(self, managed: Managed, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wrapped = managed.wrapped
        member, group = wrapped.ampx_member, wrapped.ampx_member.group
        if args and callable(args[0]):
            args = (self._seen_through(managed, args[0]), *args[1:])
        elif member.stage == "idle" and (not managed.zero or collect(managed.raw)):
            # What did not come through a scaled backward is true; zeros are applied, as the script would.
            member.note_scaled(1.0)
        before = group.steps
        with self.run.recorder.phase("step"):
            result = self.work(managed, lambda: getattr(wrapped, name)(*args, **kwargs))
        if group.steps != before:
            self.run.recorder.stepped(managed.group)
            self._sampler.after_step()
        return result

    def work(self, managed: Managed, call: Callable[[], Any]) -> Any:
        """Have the wrapper do something; its errors are refusals."""
        before = managed.busy, self.quiet
        managed.busy = self.quiet = True
        try:
            return call()
        except AmpxError as error:
            self.run.refuse_for(error)
        finally:
            managed.busy, self.quiet = before

    def _seen_through(self, managed: Managed, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure as the script would call it."""

        def evaluate() -> Any:
            before = managed.busy, self.quiet
            managed.busy = self.quiet = False
            try:
                loss = closure()
                member = managed.wrapped.ampx_member
                if member.stage == "idle" and collect(managed.raw):
                    member.note_scaled(1.0)
                return loss
            finally:
                managed.busy, self.quiet = before

        return evaluate

    # -- gradients -------------------------------------------------------------------------------------

    @property
    def scales(self) -> bool:
        """Whether losses are multiplied at all: with bfloat16 they are not, unless asked."""
        amp = self.run.amp
        return amp is not None and (amp.effective.loss_scale.dynamic or amp.effective.loss_scale.init_scale != 1.0)

    def reveal(self, managed: Managed) -> None:
        """Make an optimizer's gradients true, because the script looks at one of them."""
        if managed.wrapped.ampx_member.stage == "scaled":
            self.work(managed, managed.wrapped.ampx_unscale)

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def rescale(self, managed: Managed, factor: float) -> None:
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

    def release(self) -> None:
        """Put the own methods of every optimizer back."""
        self._sampler.stop()
        for reference in self._made:
            raw = reference()
            managed = None if raw is None else raw.__dict__.pop("_ampx_managed", None)
            if managed is None:
                continue
            for name in _SHADOWED:
                raw.__dict__.pop(name, None)
            if isinstance(managed.wrapped, AmpOptimizer):
                managed.wrapped.ampx_unwrap()


@contextmanager
def optimizers_managed(manager: Manager) -> Iterator[None]:
    """Patch how optimizers are made: every class's own constructor, because not all of them call the base class's."""
    with ExitStack() as stack:
        for kind in {one for one in vars(paddle.optimizer).values() if isinstance(one, type)}:
            if issubclass(kind, paddle.optimizer.Optimizer) and "__init__" in vars(kind):
                stack.enter_context(mock.patch.object(kind, "__init__", _adopting(manager, vars(kind)["__init__"])))
        stack.enter_context(mock.patch.object(AmpOptimizer, "step", _recording(manager, AmpOptimizer.step)))
        yield


def _recording(manager: Manager, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not manager.stood_down:
            return native(self, *args, **kwargs)
        with manager.records_only("step"):
            return native(self, *args, **kwargs)

    return step


def _adopting(manager: Manager, native: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(native)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        native(self, *args, **kwargs)
        if "_ampx_managed" not in self.__dict__:
            manager.adopt(self)

    return make
