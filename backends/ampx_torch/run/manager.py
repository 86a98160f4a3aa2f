"""Every optimizer that a script makes: it stays what it is, and a wrapper of ampx stands beside it."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from types import MethodType
from typing import Any
from unittest import mock

import torch

from ampx.errors import AmpxError
from ampx.run import Run, script_line
from ampx.scale_state import LossScale
from ampx_torch.optimizer import AmpOptimizer
from ampx_torch.step import Stepping

from .managed import Managed
from .operations import Sampler
from .owners import Owners


class Manager:
    """What is managed in one run.

    Attributes:
        run: The run.
        inside: A backward of the script is running.
        factor: What its gradients are multiplied by; 1.0 outside.
        pending: Some gradients may carry a loss scale.
        quiet: Code of ampx is at work, which reads gradients as they are.
        held: The script has imported apex.amp, which may be switched on: nothing is cast yet.
        script_scales: A GradScaler of the script multiplies the losses.
        config: What the script asked of its first GradScaler.
        scales: This run multiplies the losses: with bfloat16 it does not, unless asked.
        follows: The script's own regions decide the dtype.
        watch: Makes reads of gradients known; called where losses are multiplied.
        owners: Whose parameters are whose.
        options: What the session gets beyond the settings.
    """

    def __init__(self, run: Run) -> None:
        """Start with nothing managed."""
        self.run = run
        self.inside = False
        self.factor: Any = 1.0
        self.pending = False
        self.quiet = False
        self.held = False
        self.script_scales = False
        self.config: LossScale | None = None
        self.scales = False
        self.follows = False
        self.watch: Callable[[], None] = lambda: None
        self.options: dict[str, Any] = {}
        self._sampler = Sampler(run.recorder)
        self._made: list[weakref.ref[torch.optim.Optimizer]] = []
        self.owners = Owners()
        run.record_own_sessions(self._follow)

    # -- optimizers --------------------------------------------------------------------------------

    def adopt(self, raw: torch.optim.Optimizer) -> None:
        """Take over an optimizer that the script has just made; casting starts with the first."""
        if self.stood_down or isinstance(raw, AmpOptimizer):
            return
        if not self.held:
            self.start()
        managed = Managed(raw, script_line())
        raw.__dict__["_ampx_managed"] = managed
        raw.step = MethodType(self._shadow(managed), raw)  # type: ignore[method-assign]
        self._made.append(weakref.ref(raw))

    def start(self) -> None:
        """Start the session with the first optimizer, region or GradScaler of the script."""
        self.held = False
        if self.run.amp is None:
            self._sampler.start()
            amp = self.run.session(**self.options)
            if self.follows:
                reason = "as the script's own regions say, of which none has computed in low precision"
                amp.effective = replace(amp.effective, reason=reason)
            self.scales = self._scales()
            if self.scales:
                self.watch()

    def _follow(self) -> None:
        """Only record from now on: the script has started a session by itself."""
        self.held = False
        self._sampler.start()

    # -- apex.amp ----------------------------------------------------------------------------------

    def hold(self) -> None:
        """Cast nothing, because the script has imported apex.amp and may switch it on, until the first backward.

        apex.amp has to be switched on or off before that. A script that has trained already goes on as it is.
        """
        if self.stood_down or any(managed.wrapped is not None for managed in self.known()):
            return
        self._sampler.stop()
        if self.run.amp is not None:
            self.run.amp.shutdown()
            self.run.amp = None
        self.held, self.scales = True, False

    def decide(self) -> None:
        """Begin at the first backward or step of a script that imports apex.amp, unless it switched that off."""
        amp = sys.modules.get("ampx_torch.old.apex.amp._amp_state")
        if amp is not None and amp._amp_state.switched_off:
            self.held = False
            self.stand_down("apex.amp", waits=True)
        elif self._made:
            self.start()
            self.run.recorder.note(
                "The script imports apex.amp and had not called amp.initialize when it first ran backward: casting "
                "began there."
            )

    def needs_no_scale(self) -> bool:
        """Return whether the user asked for a dtype whose losses are not scaled, whatever the script does."""
        amp = self.run.amp
        return amp is not None and not self.follows and not amp.effective.loss_scale.dynamic

    def leave_scaling(self) -> None:
        """Leave the losses to a GradScaler of the script from now on; gradients that wait become true."""
        if self.scales:
            for managed in self.known():
                if managed.wrapped is not None:
                    self.unscale(managed)
        self.script_scales, self.scales, self.pending = True, False, False

    def known(self) -> list[Managed]:
        """List what is managed, wrapped or not."""
        alive = [raw for reference in self._made if (raw := reference()) is not None]
        return [managed for raw in alive if (managed := raw.__dict__.get("_ampx_managed")) is not None]

    def all(self) -> list[Managed]:
        """List what is managed, each with its wrapper, in order of creation."""
        if self.run.amp is None or self.run.stood_down:
            return []
        found = self.known()
        for managed in found:
            if managed.wrapped is None:
                self._wrap(managed)
        return found

    def _wrap(self, managed: Managed) -> None:
        amp = self.run.amp
        assert amp is not None
        try:
            wrapped = managed.wrapped = amp.wrap_optimizer(managed.raw, loss_scale=1.0 if self.script_scales else None)
        except AmpxError as error:
            self.run.refuse_for(error)
        group = wrapped.ampx_member.group
        kind = type(managed.raw).__name__
        managed.group = self.run.recorder.add_optimizer(kind, wrapped.loss_scale, group.index, managed.place)

    def find(self, raw: torch.optim.Optimizer) -> Managed | None:
        """Return what is managed of an optimizer of the script, with its wrapper; None where nothing is."""
        managed: Managed | None = raw.__dict__.get("_ampx_managed")
        if managed is None or self.run.amp is None or self.run.stood_down:
            return None
        if managed.wrapped is None:
            self.all()
        return managed

    @property
    def stood_down(self) -> bool:
        """Whether the script has mixed precision of its own, by `apex` or by ampx itself."""
        return bool(self.run.stood_down)

    def stand_down(self, why: str, waits: bool = False) -> None:
        """Leave the training to what the script started, or shall start."""
        self._sampler.stop()
        self.run.stand_down(why, waits)

    @contextmanager
    def records_only(self, phase: str) -> Iterator[None]:
        """Note what the script's own session did in a backward or a step."""
        is_step = phase == "step"
        with self.run.recorder.phase(phase):
            if is_step:
                self._sampler.pause(True)
            try:
                yield
            finally:
                if is_step:
                    self._sampler.pause(False)
        self.run.look()
        if is_step:
            self._sampler.after_step()

    # -- steps -------------------------------------------------------------------------------------

    def _shadow(self, managed: Managed) -> Callable[..., Any]:
        @functools.wraps(type(managed.raw).step)  # GradScaler looks at the parameters of `step`
        def step(self_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self.held:
                self.decide()
            if managed.busy or self.run.stood_down:
                return managed.run_raw(*args, **kwargs)
            return self._step(managed, args, kwargs)

        return step

    def _step(self, managed: Managed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inside:
            self.run.refuse(
                f"{type(managed.raw).__name__} is stepped from inside backward, where gradients are not complete; "
                f"accepted: steps after backward. Step after loss.backward()"
            )
        self.all()
        wrapped = managed.wrapped
        assert wrapped is not None
        kwargs = dict(kwargs)
        closure = kwargs.pop("closure", None)
        if closure is None and args and (callable(args[0]) or args[0] is None):
            closure, args = args[0], args[1:]
        if closure is not None:
            self._refuse_shared(managed)
            closure = self._seen_through(closure)
        managed.call, managed.returned = (args, kwargs), None
        recorder = self.run.recorder
        busy, quiet = managed.busy, self.quiet
        managed.busy = self.quiet = True
        self._sampler.pause(True)
        try:
            with recorder.phase("step"):
                counts = closure is not None or wrapped.ampx_member.stage != "idle" or self._mark(managed)
                loss = wrapped.step(closure)
        except AmpxError as error:
            self.run.refuse_for(error)
        finally:
            managed.busy, self.quiet = busy, quiet
            self._sampler.pause(False)
            managed.call = ((), {})
        if self.scales:
            self.look()
        result = wrapped.ampx_member.result
        if counts and (result is None or result.applied or not result.finite):  # else its gradients had been cleared
            recorder.stepped(managed.group)
            self._sampler.after_step()
        return managed.returned if loss is None else loss

    @contextmanager
    def stepping(self, managed: Managed) -> Iterator[None]:
        """Let a GradScaler of the script step an optimizer: its `step` is then the raw one."""
        busy = managed.busy
        managed.busy = True
        try:
            with self.run.recorder.phase("step"), self.uncounted():
                yield
        finally:
            managed.busy = busy

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave out operations of an optimizer or a scaler."""
        self._sampler.pause(True)
        try:
            yield
        finally:
            self._sampler.pause(False)

    def after_step(self) -> None:
        """Note that a step counted."""
        self._sampler.after_step()

    def _mark(self, managed: Managed) -> bool:
        """Note gradients that did not come through backward: they are true. Tell whether there are any."""
        wrapped = managed.wrapped
        assert wrapped is not None
        if not wrapped.gradients.collect():
            return False
        self._refuse_shared(managed)
        wrapped.ampx_member.note_scaled(1.0)
        return True

    def _refuse_shared(self, managed: Managed) -> None:
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

    def _seen_through(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure as the script would call it: its own reads of gradients are watched again."""

        def evaluate() -> Any:
            quiet, self.quiet = self.quiet, False
            self._sampler.pause(False)
            try:
                return closure()
            finally:
                self.quiet = quiet
                self._sampler.pause(True)

        return evaluate

    # -- gradients ---------------------------------------------------------------------------------

    def _scales(self) -> bool:
        amp = self.run.amp
        if self.follows or self.script_scales:
            return False
        return amp is not None and (amp.effective.loss_scale.dynamic or amp.effective.loss_scale.init_scale != 1.0)

    def look(self) -> None:
        """See whether some gradients still carry a loss scale."""
        self.pending = self.scales and any(
            managed.wrapped is not None and managed.wrapped.ampx_member.stage == "scaled" for managed in self.known()
        )

    def reveal(self, tensor: torch.Tensor) -> None:
        """Make the gradients of a parameter's optimizer true, because the script looks at one of them."""
        managed = self.owners.of(id(tensor))
        if managed is None or managed.wrapped is None or managed.wrapped.ampx_member.stage != "scaled":
            return
        self.unscale(managed)

    def unscale(self, managed: Managed) -> None:
        """Make an optimizer's gradients true ahead of its step, which tests them again: the script may change them."""
        assert managed.wrapped is not None
        if managed.wrapped.ampx_member.stage != "scaled":
            return
        quiet, self.quiet = self.quiet, True
        try:
            managed.wrapped.ampx_unscale()
        except AmpxError as error:
            self.run.refuse_for(error)
        finally:
            self.quiet = quiet
        self.look()

    # -- the end -----------------------------------------------------------------------------------

    def explain(self) -> None:
        """Say by hand what the script's own regions and GradScaler did."""
        amp = self.run.amp
        if not self.run.settings.replace_native or amp is None or self.run.stood_down:
            return
        usual = amp.effective.dtype == "float16"
        scale = ""
        if self.config is None:
            scale = ", loss_scale=1.0" if self.follows and usual else ""
        elif self.config != LossScale():
            scale = f", loss_scale={_shown(self.config)}"
        elif not usual:
            scale = ", loss_scale='dynamic'"
        self.run.lines = (
            f"amp = ampx.init('torch', dtype={amp.effective.dtype!r}, process_wide=False{scale})",
            "optimizer = ampx.wrap_optimizer(optimizer)",
            "with amp.autocast(): loss = …  # where torch.autocast is",
            "with ampx.scale_loss(loss, optimizer) as scaled: scaled.backward()",
            *(("optimizer.step()  # for scaler.unscale_, scaler.step and scaler.update",) if self.config else ()),
        )

    def release(self) -> None:
        """Put the own `step` of every optimizer back."""
        if self.held:
            self.stand_down("apex.amp", waits=True)
        self._sampler.stop()
        for reference in self._made:
            raw = reference()
            managed = None if raw is None else raw.__dict__.pop("_ampx_managed", None)
            if managed is not None:
                managed.release()


def _shown(config: LossScale) -> str:
    """Return the line that makes a configuration, without what is usual."""
    usual = LossScale()
    chosen = {one.name: getattr(config, one.name) for one in fields(config)}
    changed = [f"{name}={value!r}" for name, value in chosen.items() if value != getattr(usual, name)]
    return f"ampx.LossScale({', '.join(changed)})"


@contextmanager
def optimizers_managed(manager: Manager) -> Iterator[None]:
    """Patch the base class of all optimizers: whatever is made inside is managed."""
    make = torch.optim.Optimizer.__init__

    def make_managed(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        manager.adopt(self)

    with mock.patch.object(torch.optim.Optimizer, "__init__", make_managed), own_steps_recorded(manager, Stepping):
        try:
            yield
        finally:
            manager.release()


@contextmanager
def own_steps_recorded(manager: Manager, kind: type[torch.optim.Optimizer]) -> Iterator[None]:
    """Patch the step of a wrapper of ampx: where the script started a session by itself, it is only recorded."""
    true = kind.step

    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not manager.run.stood_down:
            return true(self, *args, **kwargs)
        with manager.records_only("step"):
            return true(self, *args, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # or Optimizer would wrap it once more, for profiling
    with mock.patch.object(kind, "step", step):
        yield
