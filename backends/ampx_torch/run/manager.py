"""Every optimizer that a script makes: it stays as it is, and has a wrapper of ampx."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final
from unittest import mock

import torch

from ampx.run import GRADIENT_SAMPLES, Managed, Manager, Run, script_line
from ampx_torch.debug import names_in_models, sample_parameters
from ampx_torch.delegation import TakenOver
from ampx_torch.step import AmpOptimizer
from ampx_torch.trees import gradient_of

from .modules import ModuleRules
from .native import Native
from .operations import TorchSampler
from .trainers import trainer_lines

WIDE: Final = "_ampx_unscaled_gradient"  # on a tensor in low precision that is no leaf: what it shows as `.grad`
_NOTHING: Final = nullcontext()


class TorchManaged(Managed):
    """One optimizer of the script; its `step` is shadowed on the instance, where schedulers shadow it, too."""

    raw: torch.optim.Optimizer
    wrapped: AmpOptimizer

    def __init__(self, raw: torch.optim.Optimizer, place: str) -> None:
        super().__init__(raw, place)
        self.skips = 0  # steps in a row that the script's own GradScaler skipped
        # A copy that trains nothing so far: the script may only keep it.
        self.idle = False
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # what the script gave to `step` beyond a closure
        self.returned: Any = None  # what the raw `step` returned
        self.reference = weakref.ref(self)

    @property
    def carries_scale(self) -> bool:
        """Whether its gradients are multiplied by a loss scale."""
        return self.wrapped is not None and self.wrapped.ampx_member.stage == "scaled"

    def has_gradients(self) -> bool:
        """Return whether some of its parameters have gradients."""
        groups = self.raw.param_groups
        return any(gradient_of(parameter) is not None for group in groups for parameter in group["params"])

    def run_raw(self, *args: Any, **kwargs: Any) -> Any:
        """Run the script's optimizer, with the arguments that the script gave beyond a closure."""
        own_args, own_kwargs = self.call
        # Where apex.amp took the object over, its wrapper steps the twin, whose `step` is the shadow that calls this.
        raw = self.raw.optimizer if isinstance(self.raw, TakenOver) else self.raw
        self.returned = type(raw).step(raw, *(args or own_args), **(kwargs or own_kwargs))
        return self.returned


class Owners:
    """Which optimizer a parameter belongs to: the one made last that holds it."""

    def __init__(self) -> None:
        # weak, so that optimizers go when the script drops them
        self._owners: dict[int, weakref.ref[TorchManaged]] = {}
        self._sorted: list[tuple[weakref.ref[TorchManaged], list[int]]] = []  # what `_owners` was made of

    def of(self, key: int) -> TorchManaged | None:
        """Return the optimizer of a parameter, by its id."""
        reference = self._owners.get(key)
        return None if reference is None else reference()

    def reached(self, leaves: Iterable[int]) -> set[weakref.ref[TorchManaged] | None]:
        """Return `reference` of the optimizers of tensors, by their ids; None where one of these belongs to none."""
        return set(map(self._owners.get, leaves))

    def sort(self, optimizers: Sequence[TorchManaged]) -> None:
        """Look up anew whose parameters are whose, where optimizers or parameters came or went.

        Every id is compared: a script may add to a group, or replace what is in it, before any backward.
        """
        present = []
        for managed in optimizers:
            keys: list[int] = []
            for group in managed.raw.param_groups:
                keys += map(id, group["params"])
            present.append((managed.reference, keys))
        if present != self._sorted:
            self._owners = {key: reference for reference, keys in present for key in keys}
            self._sorted = present

    def shares(self, managed: TorchManaged) -> bool:
        """Return whether another optimizer owns some of its parameters; `sort` comes first."""
        return any(self.of(id(p)) is not managed for group in managed.raw.param_groups for p in group["params"])


@dataclass(frozen=True)
class Recipe:
    """A former recipe that the script has imported, and may switch on.

    Attributes:
        name: How reports call it.
        start: The call that switches it on.
        is_off: Returns whether the script has called that to switch it off.
    """

    name: str
    start: str
    is_off: Callable[[], bool]


class TorchManager(Manager[TorchManaged]):
    """What is managed in one run."""

    def __init__(self, run: Run) -> None:
        self.adding: set[int] = set()  # ids of the tensors to whose gradients that backward adds
        # Tensors, by id, to which backward adds unscaled gradients, because the script looks at them meanwhile.
        self.arriving: dict[int, weakref.ref[torch.Tensor]] = {}
        # Tensors that are no leaves, by id, whose gradients the script wants kept.
        self.retained: dict[int, weakref.ref[torch.Tensor]] = {}
        self.reached: list[TorchManaged] = []  # what that backward is scaled for
        self.pending = False  # some gradients may carry a loss scale
        self.held: Recipe | None = None  # what the script may yet switch on: nothing is cast so far
        self.native = Native(run)  # the script's own regions and GradScaler
        # Makes reads of gradients known; called where losses are multiplied.
        self.watch_gradients: Callable[[], None] = lambda: None
        # Has the steps of the script's own wrappers recorded; called where it has started a session by itself.
        self.record_steps: Callable[[], object] = lambda: None
        # Calls a function that `torch.compile` must not trace, which would lose what is made meanwhile.
        self.untraced: Callable[..., Any] = _call
        # Notes whose gradients wait for which GradScaler of the script; called after a backward of theirs.
        self.note_scaler: Callable[[Any], None] = lambda roots: None
        self.owners = Owners()  # whose parameters are whose
        self.rules = ModuleRules(run)  # about names of modules
        self.sampler: TorchSampler
        super().__init__(run, TorchSampler(run.recorder))
        self.backward_phase, self.step_phase = run.recorder.phase("backward"), run.recorder.phase("step")

    @property
    def scales(self) -> bool:
        """Whether this run multiplies the losses."""
        return not self.native.decides_scale and super().scales

    # -- optimizers --------------------------------------------------------------------------------

    def rates_of(self, raw: torch.optim.Optimizer) -> Iterable[float]:
        """Return those of its groups. Sync: one each that is a tensor on a device."""
        return (float(group["lr"]) for group in raw.param_groups if "lr" in group)

    def adopt(self, raw: torch.optim.Optimizer, copied: bool = False) -> None:
        """Take over an optimizer that the script has just made, copied or unpickled; casting starts with the first."""
        if self.stood_down or isinstance(raw, AmpOptimizer):
            return
        if not self.held:
            self.start()
        if self.untraced is _call:
            self.untraced = torch.compiler.disable(_call)
        managed = TorchManaged(raw, script_line())
        managed.idle = copied
        raw.step = MethodType(self._shadow(managed), raw)
        self.keep(managed)

    def managed(self) -> list[TorchManaged]:
        """List what is managed, but for copies that train nothing."""
        return [managed for managed in super().managed() if not managed.idle]

    def adopt_trained_copies(self, leaves: Container[int] | None = None) -> bool:
        """Manage the copies that train these leaves, by their ids, or all copies; return whether there are any."""
        employed = False
        for managed in super().managed():
            if managed.idle:
                keys = [id(p) for group in managed.raw.param_groups for p in group["params"]]
                if leaves is None or any(key in leaves and self.owners.of(key) is None for key in keys):
                    managed.idle, employed = False, True
        return employed

    def start(self) -> None:
        """Start the session with the first optimizer, region or GradScaler of the script."""
        self.held = None
        if self.run.amp is None:
            self.sampler.start()
            amp = self.run.session(**self.native.options)
            self.rules.start(amp.plan)
            self.native.begin(amp)
            if self.scales:
                self.watch_gradients()

    def follow(self) -> None:
        """Only record from now on: the script has started a session by itself."""
        self.held = None
        self.record_steps()
        super().follow()

    def wrap(self, managed: TorchManaged, **options: Any) -> None:
        """Make the wrapper of an optimizer; where the script scales, it does not."""
        super().wrap(managed, loss_scale=1.0 if self.native.scales else None)
        self.run.trainer = self.run.trainer or trainer_lines(self.native.dtype)
        self.native.explain()

    def find(self, raw: torch.optim.Optimizer) -> TorchManaged | None:
        """Return what is managed of an optimizer of the script, with its wrapper; None where nothing is."""
        managed = super().find(raw)
        if managed is None or self.run.amp is None or self.stood_down:
            return None
        if managed.wrapped is None:
            managed.idle = False
            self.all()
        return managed

    def let_go(self, managed: TorchManaged) -> None:
        """Put the raw optimizer's own `step` back."""
        if isinstance(managed.raw.__dict__.get("step"), MethodType):
            del managed.raw.step
        else:
            managed.busy = True  # a scheduler holds the shadow: from now on it runs the raw optimizer
        if managed.wrapped is not None:
            managed.wrapped.ampx_unwrap()

    def release(self) -> None:
        """Leave every optimizer as it was."""
        if self.held:
            self.stand_down(self.held.name, waits=True)
        self.adopt_trained_copies()
        super().release()

    # -- former recipes and GradScaler -------------------------------------------------------------

    def hold(self, recipe: Recipe) -> None:
        """Cast nothing, because the script has imported what it may switch on, until the first backward.

        It has to be switched on or off before that. A script that has trained already goes on as it is.
        """
        if self.stood_down or any(managed.wrapped is not None for managed in self.managed()):
            return
        self.sampler.stop()
        if self.run.amp is not None:
            self.run.amp.shutdown()
            self.run.amp = None
        self.held = recipe

    def decide(self, recipe: Recipe) -> None:
        """Begin at the first backward or step of a script that imports a former recipe, unless it switched that off."""
        if recipe.is_off():
            self.held = None
            self.stand_down(recipe.name, waits=True)
        elif self._references:
            self.start()
            self.run.recorder.note(
                f"The script imports {recipe.name} and had not called {recipe.start} when it first ran backward: "
                f"casting began there."
            )

    def stand_down(self, why: str, waits: bool = False) -> None:
        """Leave the training to what the script started, or shall start."""
        self.sampler.stop()
        self.run.stand_down(why, waits)

    def leave_scaling(self) -> None:
        """Leave the losses to a GradScaler of the script from now on; gradients that wait are unscaled."""
        if self.scales:
            for managed in self.managed():
                self.unscale(managed)
        self.native.scales, self.pending = True, False

    # -- steps -------------------------------------------------------------------------------------

    def _shadow(self, managed: TorchManaged) -> Callable[..., Any]:
        def shadow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.held:
                self.decide(self.held)
            if managed.busy or self.run.stood_down:
                return managed.run_raw(*args, **kwargs)
            return self._step(managed, args, kwargs)

        @functools.wraps(type(managed.raw).step)  # GradScaler looks at the parameters of `step`
        def step(self_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return self.untraced(self._step_uncompiled, shadow, args, kwargs)
            return shadow(args, kwargs)

        return step

    def _step_uncompiled(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.sampler.note_uncompiled()
        return step(args, kwargs)

    def _step(self, managed: TorchManaged, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inside:
            self.run.refuse(
                f"{type(managed.raw).__name__} is stepped from inside backward, where gradients are not complete; "
                f"accepted: steps after backward. Step after loss.backward()"
            )
        if managed.wrapped is None:
            managed.idle = False
            self.all()
        wrapped, recorder = managed.wrapped, self.run.recorder
        member = wrapped.ampx_member
        sample = functools.partial(self.sample, managed)
        before = () if recorder.takes_gradients is None else self.sampled(sample)
        closure = None
        if args or kwargs:
            closure, args, kwargs = self._split_closure(managed, args, kwargs)
        managed.call, managed.returned = (args, kwargs), None
        try:
            with self.uncounted(), self.working(managed), self.step_phase:
                counts = closure is not None or member.stage != "idle" or self._note_unscaled(managed)
                loss = wrapped.step(closure)
        finally:
            managed.call = ((), {})
        if self.pending:
            self.look()
        if counts and member.counted:  # else its gradients had been cleared
            self.stepped(managed.group, sample, before=before)
            if self.rules.waits:
                self.rules.check(recorder.steps)
        return managed.returned if loss is None else loss

    def sample(self, managed: TorchManaged) -> list[tuple[Any, ...]]:
        """Return what `take_step` asks of an optimizer, by names that tell parameters of several models apart."""
        names = names_in_models(other.wrapped for other in self.managed() if other.wrapped is not None)
        return sample_parameters(managed.wrapped, GRADIENT_SAMPLES, names)

    def _split_closure(
        self, managed: TorchManaged, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[[], Any] | None, tuple[Any, ...], dict[str, Any]]:
        """Return the closure that a step was called with, as ampx sees it, or None; and the other arguments."""
        kwargs = dict(kwargs)
        closure = kwargs.pop("closure", None)
        if closure is None and args and (callable(args[0]) or args[0] is None):
            closure, args = args[0], args[1:]
        if closure is not None:
            self._refuse_shared(managed)
            closure = self.seen_through(closure, lambda: self._note_closure(managed))
        return closure, args, kwargs

    def _note_unscaled(self, managed: TorchManaged) -> bool:
        """Note gradients that did not come through backward: they are unscaled. Return whether there are any."""
        if self.pending:  # but those of parameters that were another optimizer's in backward
            for parameter in managed.wrapped.gradients.parameters():
                self.reveal(parameter)
        if not managed.wrapped.gradients.collect():
            return False
        self._refuse_shared(managed)
        managed.wrapped.ampx_member.note_scaled(1.0)
        return True

    def _refuse_shared(self, managed: TorchManaged) -> None:
        """Refuse a step where losses are multiplied and another optimizer owns some of the parameters."""
        if not self.scales:
            return
        self.owners.sort(self.all())
        if self.owners.shares(managed):
            self.run.refuse(
                f"{type(managed.raw).__name__} is stepped, but another optimizer that was made later holds its "
                f"parameters, too, so it cannot be told whose loss scale the gradients carry; accepted: one "
                f"optimizer a parameter, or --dtype bfloat16, which needs no loss scale"
            )

    def _note_closure(self, managed: TorchManaged) -> None:
        """Note that gradients are unscaled where the script has a GradScaler, which takes no closures."""
        if self.native.scales:
            managed.wrapped.ampx_member.note_scaled(1.0)

    @contextmanager
    def stepping(self, managed: TorchManaged) -> Iterator[None]:
        """Let a GradScaler of the script step an optimizer: its `step` is then the raw one."""
        busy = managed.busy
        managed.busy = True
        try:
            with self.run.recorder.phase("step"), self.uncounted():
                yield
        finally:
            managed.busy = busy

    def uncounted(self) -> AbstractContextManager[Any]:
        """Return a region whose operations are left out: those of an optimizer or a scaler."""
        return self.sampler.paused() if self.sampler.counts else _NOTHING

    # -- gradients ---------------------------------------------------------------------------------

    def look(self) -> None:
        """See whether some gradients still carry a loss scale."""
        self.pending = any([managed.carries_scale for managed in self.managed()])

    def reveal(self, tensor: torch.Tensor) -> None:
        """Unscale the gradients of a parameter's optimizer, because the script looks at one of them."""
        managed = self.owners.of(id(tensor))
        if managed is not None:
            self.unscale(managed)

    def reveal_inside(self, tensor: torch.Tensor) -> None:
        """Let code of the script look at `.grad` inside backward, where that is unscaled; refuse it where it is not."""
        if id(tensor) in self.arriving or id(tensor) not in self.adding:
            self.reveal(tensor)
            return
        self.run.refuse(
            "code that backward calls reads or writes `.grad` of a tensor to which that backward adds gradients "
            "multiplied by the loss scale; accepted: the gradient that a hook is given, "
            "register_post_accumulate_grad_hook on that tensor, or --dtype bfloat16, which needs no loss scale"
        )

    def unscale(self, managed: TorchManaged) -> None:
        """Unscale an optimizer's gradients ahead of its step, which tests them again: the script may change them."""
        if managed.carries_scale:
            with self.working():
                managed.wrapped.ampx_unscale()
            self.look()


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@contextmanager
def optimizers_managed(manager: TorchManager) -> Iterator[None]:
    """Patch the base class of all optimizers: whatever is made inside is managed."""
    base = torch.optim.Optimizer
    make, restore, add = base.__init__, base.__setstate__, base.add_param_group

    def make_managed(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        manager.adopt(self)

    def restore_managed(self: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        restore(self, state)
        if Manager.find(manager, self) is None:  # else it loads a checkpoint
            manager.adopt(self, copied=True)

    def add_managed(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        managed = manager.find(self)
        if managed is not None:  # what is added has unscaled gradients, if any: they are not divided with the others
            manager.unscale(managed)
        add(self, param_group)
        if managed is not None:
            managed.wrapped.notice_groups(unscaled=True)

    with ExitStack() as stack:
        patches: dict[str, Any] = {
            "__init__": make_managed,
            "__setstate__": restore_managed,
            "add_param_group": add_managed,
        }
        stack.enter_context(mock.patch.multiple(base, **patches))
        recorded = mock.patch.object(AmpOptimizer, "step", manager.recorded(AmpOptimizer.step))
        manager.record_steps = functools.cache(lambda: stack.enter_context(recorded))  # once, where it is needed
        yield
