"""The optimizers of a script, each with the wrapper of ampx beside it: what is the same in every framework."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any, Generic, TypeVar, cast

from ampx.errors import AmpxError
from ampx.scale_state import is_one

from .recorder import Recorder, SampledGradient, with_weights
from .run import Run
from .script_code import ScriptCode

Function = TypeVar("Function", bound=Callable[..., Any])
_MANAGED = "_ampx_managed"


class Sampler:
    """Counts operations by dtype in the first steps; a backend overrides what its framework has a way to do."""

    counts = True  # operations are counted, or may be

    def __init__(self, recorder: Recorder) -> None:
        """Start switched off."""
        self.recorder = recorder

    def start(self) -> None:
        """Count from now on, with nothing counted so far."""

    def pause(self, paused: bool) -> None:
        """Leave out what optimizers do, which is always float32."""

    @contextmanager
    def paused(self, paused: bool = True) -> Iterator[None]:
        """Leave that out inside; with False, count what a closure of the script does in it."""
        self.pause(paused)
        try:
            yield
        finally:
            self.pause(not paused)

    def after_step(self) -> None:
        """Stop where enough was seen."""
        if not self.recorder.sampling:
            self.stop()

    def stop(self) -> None:
        """Stop for good, and hand over what was counted."""


class Managed:
    """One optimizer of the script."""

    def __init__(self, raw: Any, place: str = "") -> None:
        """Remember the optimizer, and the script's line that made it."""
        self.raw = raw  # the script's own object; some of its methods are shadowed on the instance
        self.place = place  # the script's line that made it
        # What `wrap_optimizer` made of it; None until the first backward or step, because a script may move its model,
        # or hand the optimizer to a library of its own choice, before.
        self.wrapped: Any = None
        self.group = -1  # where the recorder counts its steps
        self.busy = False  # its own methods must run: the wrapper calls them


SomeManaged = TypeVar("SomeManaged", bound=Managed)


class _Working:
    """A region in which ampx is at work. Entered in every backward and step: a generator takes four times as long."""

    __slots__ = ("_busy", "_managed", "_manager", "_quiet", "_works")

    def __init__(self, manager: Manager[Any], managed: Managed | None, works: bool = True) -> None:
        self._manager = manager
        self._managed = managed
        self._works = works

    def __enter__(self) -> None:
        manager, managed = self._manager, self._managed
        self._quiet = manager.quiet
        manager.quiet = self._works
        if managed is not None:
            self._busy = managed.busy
            managed.busy = self._works

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._manager.quiet = self._quiet
        if self._managed is not None:
            self._managed.busy = self._busy
        if isinstance(error, AmpxError):
            self._manager.run.refuse_for(error)


class Manager(Generic[SomeManaged]):
    """What is managed in one run. A backend adds how its framework makes optimizers and runs backward."""

    def __init__(self, run: Run, sampler: Sampler | None = None, kind_of: Callable[[Any], str] | None = None) -> None:
        """Start with nothing managed; `kind_of` as in `Run.record_own_sessions`."""
        self.run = run
        self.sampler = Sampler(run.recorder) if sampler is None else sampler  # counts operations
        self.quiet = False  # code of ampx is at work, which reads gradients as they are
        self.inside = False  # a backward of the script is running
        self.factor: Any = 1.0  # what its gradients are multiplied by; 1.0 outside
        self.script_code = ScriptCode()  # what that backward calls
        self._references: list[weakref.ref[Any]] = []
        run.record_own_sessions(self.follow, kind_of)
        run.recorder.learning_rates = self.learning_rates

    def follow(self) -> None:
        """Only record from now on: the script has started a session by itself."""
        self.sampler.start()

    @property
    def stood_down(self) -> bool:
        """Whether the script has mixed precision of its own, which is recorded."""
        return bool(self.run.stood_down)

    @property
    def scales(self) -> bool:
        """Whether losses are multiplied at all: with bfloat16 they are not, unless asked."""
        amp = self.run.amp
        return amp is not None and not is_one(amp.effective.loss_scale)

    def begin(self, **options: Any) -> None:
        """Start the session, with the script's first optimizer: a script may import what it does not train with."""
        if self.run.amp is None:
            self.run.session(**options)
            self.sampler.start()

    # -- optimizers --------------------------------------------------------------------------------

    def keep(self, managed: SomeManaged) -> None:
        """Manage an optimizer for as long as the script holds it."""
        managed.raw.__dict__[_MANAGED] = managed
        self.remember(managed.raw)

    def remember(self, raw: Any) -> None:
        """Remember an optimizer for as long as the script holds it."""
        self._references.append(weakref.ref(raw))

    def alive(self) -> list[Any]:
        """List the script's optimizers that are still there, in order of creation."""
        return [raw for reference in self._references if (raw := reference()) is not None]

    def managed(self) -> list[SomeManaged]:
        """List what is managed, with a wrapper or without."""
        optimizers = []
        for reference in self._references:  # in every backward and step
            raw = reference()
            if raw is not None and _MANAGED in raw.__dict__:
                optimizers.append(raw.__dict__[_MANAGED])
        return optimizers

    def all(self) -> list[SomeManaged]:
        """List what is managed, each with its wrapper."""
        run = self.run
        if run.amp is None or run.stood_down:
            return []
        optimizers = self.managed()
        for managed in optimizers:
            if managed.wrapped is None:
                self.wrap(managed)
        return optimizers

    def find(self, raw: Any) -> SomeManaged | None:
        """Return what is managed of an optimizer of the script, wrapped or not; None where nothing is."""
        return cast("SomeManaged | None", raw.__dict__.get(_MANAGED))

    def wrap(self, managed: SomeManaged, **options: Any) -> None:
        """Make the wrapper of an optimizer, and have the recorder count its steps."""
        with self.working():
            managed.wrapped = self.run.session().wrap_optimizer(managed.raw, **options)
        group = managed.wrapped.ampx_member.group
        kind = type(managed.raw).__name__
        managed.group = self.run.recorder.add_optimizer(kind, managed.wrapped.loss_scale, group.index, managed.place)

    def learning_rates(self, group: int) -> tuple[float, ...]:
        """Return those of the optimizers that share a loss scale, as `Recorder` wants it."""
        return tuple(itertools.chain.from_iterable(map(self.rates_of, self.sharing(group))))

    def sharing(self, group: int) -> list[Any]:
        """List the script's optimizers that share a loss scale, by its position in the recorder."""
        return [managed.raw for managed in self.managed() if managed.group == group]

    def rates_of(self, raw: Any) -> Iterable[float]:
        """Return the learning rates of the step that an optimizer of the script has just made or skipped.

        Asked for in runs that are watched only. None where a framework does not say. Sync: some.
        """
        return ()

    # -- backward ----------------------------------------------------------------------------------

    @property
    def factor_seen(self) -> Any:
        """What the gradients are multiplied by that code called now gets."""
        return 1.0 if self.script_code.runs else self.factor

    @property
    def shows(self) -> bool:
        """Whether code of the script runs in a backward that is scaled."""
        return self.script_code.runs and not (isinstance(self.factor, float) and self.factor == 1.0)

    @contextmanager
    def differentiating(self, factor: Any) -> Iterator[None]:
        """Note that a backward runs inside, whose gradients are multiplied by this."""
        before = self.inside, self.factor
        self.inside, self.factor = True, factor
        try:
            yield
        finally:
            self.inside, self.factor = before

    def call_unscaled(
        self,
        function: Callable[..., Any],
        gradients: Sequence[Any],
        divide: Callable[[Any, Any], Any],
        multiply: Callable[[Any, Any, Sequence[Any]], Any],
    ) -> Any:
        """Call code of the script as `ScriptCode.call` does, where the backward under way is scaled.

        Args:
            function: Takes the gradients one by one.
            gradients: What that backward hands out.
            divide: Takes a gradient and the loss scale.
            multiply: Takes a result, the loss scale, and the gradients as that backward handed them out.
        """
        factor = self.factor_seen
        if isinstance(factor, float) and factor == 1.0:
            return function(*gradients)
        return self.script_code.call(
            function,
            gradients,
            lambda gradient: divide(gradient, factor),
            lambda result, _: multiply(result, factor, gradients),
        )

    # -- steps -------------------------------------------------------------------------------------

    def take_step(
        self,
        wrapped: Any,
        step: Callable[[], Any],
        sample: Callable[[], Iterable[tuple[Any, ...]]],
        managed: SomeManaged | None = None,
    ) -> Any:
        """Run a step that the script asked for, and have it recorded where it counted; return what it returns.

        Args:
            wrapped: The wrapper that steps.
            step: Runs it.
            sample: Returns the fields of `SampledGradient` for each parameter, as it is now; called, before the step
                and after it, where they are wanted.
            managed: The script's optimizer, whose own methods run meanwhile.
        """
        group, recorder = wrapped.ampx_member.group, self.run.recorder
        steps = group.steps
        before = () if recorder.takes_gradients is None else self.sampled(sample, managed)
        with recorder.phase("step"), self.working(managed):
            result = step()
        if group.steps != steps:
            self.stepped(group.index, sample, managed, before)
        return result

    def sampled(
        self, sample: Callable[[], Iterable[tuple[Any, ...]]], managed: SomeManaged | None = None
    ) -> list[SampledGradient]:
        """Return what an optimizer trains, as it is now; the arguments are those of `take_step`."""
        with self.working(managed):
            return [SampledGradient(*row) for row in sample()]

    def stepped(
        self,
        group: int,
        sample: Callable[[], Iterable[tuple[Any, ...]]],
        managed: SomeManaged | None = None,
        before: Iterable[SampledGradient] = (),
    ) -> None:
        """Have a step that counted recorded; `before` is what was `sampled` before it, the others as in `take_step`."""
        recorder = self.run.recorder
        if recorder.takes_gradients is not None:
            recorder.takes_gradients(with_weights(self.sampled(sample, managed), before))
        recorder.stepped(group)
        if self.sampler.counts:
            self.sampler.after_step()

    def seen_through(
        self, closure: Callable[[], Any], after: Callable[[], None], managed: SomeManaged | None = None
    ) -> Callable[[], Any]:
        """Return the closure of a step as the script would call it: its own reads of gradients are watched again.

        Args:
            closure: Returns the loss.
            after: Called after it.
            managed: The script's optimizer, whose shadowed methods the closure finds.
        """

        def evaluate() -> Any:
            with _Working(self, managed, works=False), self.sampler.paused(False):
                loss = closure()
            after()
            return loss

        return evaluate

    # -- the region --------------------------------------------------------------------------------

    @contextmanager
    def region(self, *patches: Callable[[Any], AbstractContextManager[Any]]) -> Iterator[None]:
        """Patch the framework inside; at the end all is as it was, and the session is over."""
        try:
            with ExitStack() as stack:
                for patch in patches:
                    stack.enter_context(patch(self))
                yield
        finally:
            self.release()
            self.run.close()

    def release(self) -> None:
        """Leave every optimizer as it was."""
        self.sampler.stop()
        for managed in self.managed():
            del managed.raw.__dict__[_MANAGED]
            self.let_go(managed)

    def let_go(self, managed: SomeManaged) -> None:
        """Put the own methods of an optimizer back."""

    # -- who is at work ----------------------------------------------------------------------------

    def working(self, managed: SomeManaged | None = None) -> _Working:
        """Have ampx do something, with an optimizer say: gradients are read as they are, its errors are refusals."""
        return _Working(self, managed)

    @contextmanager
    def records_only(self, phase: str) -> Iterator[None]:
        """Note what the script's own session does in a backward or a step."""
        steps = phase == "step"
        with self.run.recorder.phase(phase), self.sampler.paused() if steps else nullcontext():
            yield
        self.run.look()
        if steps:
            self.sampler.after_step()

    def recorded(self, native: Function) -> Function:
        """Return the step of a wrapper of ampx that is recorded where the script started a session by itself."""

        @functools.wraps(native)
        def step(wrapped: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.stood_down:
                return native(wrapped, *args, **kwargs)
            with self.records_only("step"):
                return native(wrapped, *args, **kwargs)

        return cast("Function", step)


def asked_by_script(framework: Collection[str], through: tuple[str, ...]) -> bool:
    """Return whether the script calls the function that asks, and not the framework for itself or ampx.

    Args:
        framework: Top-level modules whose calls are not the script's.
        through: Modules, by how their names begin, that only pass a call on.
    """
    _, module = asking_code(through, 3)
    return module.partition(".")[0] not in framework


def asking_code(through: tuple[str, ...], depth: int = 2) -> tuple[str, str]:
    """Return file and module of the code that calls the function that asks; "" for both where there is none.

    Args:
        through: As in `asked_by_script`.
        depth: So many frames up it begins to look.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(through):
            return frame.f_code.co_filename, module
        frame = frame.f_back
    return "", ""
