"""A script's own `GradScaler`: refused, or PyTorch's own, with an eye on every step.

`--replace-native` leaves the scaler what it is: it multiplies, unscales, skips and moves its scale by itself, so that
whatever a script computes with the scale, with scaled losses or with their gradients has the values that it has in
PyTorch. While the script scales, ampx does not. It tests gradients again where PyTorch would not look, and records.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from ampx.errors import AmpxError
from ampx.run import SampledGradient, asked_by_script, with_weights
from ampx.scale_state import LossScale, LossScaleState
from ampx_torch.fused import makes_momentum
from ampx_torch.gradients import GradientSet, unscale_into
from ampx_torch.reach import leaves_of

from .manager import TorchManaged, TorchManager
from .native import ADVICE, ALIASES, OWN

# Scales on an accelerator are read together, because every read waits for it.
_READ_TOGETHER: Final = 64
_SMALL: Final = 2.0**10
_SCALER: Final = "_ampx_scaler"  # on a scaled loss: the scaler, as a weak reference


@contextmanager
def scaler_watched(manager: TorchManager) -> Iterator[None]:
    """Patch the methods of GradScaler that a loop calls; its older names inherit them."""
    watch = _Watch(manager)
    true = GradScaler.__init__

    def make(self: GradScaler, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        ours = asked_by_script(OWN, ALIASES) and not manager.stood_down
        absent = ours and device == "cuda" and not torch.cuda.is_available()  # where torch would switch itself off
        true(self, "cpu" if absent else device, *args, **kwargs)
        if ours and self.is_enabled():
            watch.take(self)

    manager.note_scaler = watch.note_waiting
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(GradScaler, "__init__", make))
        for name in ("scale", "unscale_", "step", "update"):
            stack.enter_context(mock.patch.object(GradScaler, name, _watched(watch, name)))
        try:
            yield
        finally:
            manager.note_scaler = lambda roots: None
            watch.close()


def _watched(watch: _Watch, name: str) -> Callable[..., Any]:
    native, seen = getattr(GradScaler, name), getattr(watch, name)

    def call(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled() or watch.manager.stood_down:
            return native(self, *args, **kwargs)
        return seen(native, self, *args, **kwargs)

    return call


@dataclass
class _Update:
    """What happened between two calls of `update`; tensors are read later."""

    # (optimizer, number of its step, what is not 0 where it was skipped).
    steps: list[tuple[TorchManaged, int, Any]] = field(default_factory=list)
    before: Any = None  # the scale of these steps
    after: Any = None  # the scale from then on


@dataclass
class _Seen:
    """What was seen of one scaler."""

    optimizers: list[TorchManaged] = field(default_factory=list)  # those that it stepped
    # Those whose gradients the script asked it to unscale since their last step.
    unscaled: set[int] = field(default_factory=set)
    # Those whose gradients carry the scale since their last step; looked for where there are several.
    waiting: weakref.WeakSet[TorchManaged] = field(default_factory=weakref.WeakSet)
    now: _Update = field(default_factory=_Update)  # what happens until `update`
    unread: list[_Update] = field(default_factory=list)  # what happened before, oldest first
    scale: float = 0.0  # the scale as far as it was read


class _Watch:
    """All scalers of the script, those that it copied or unpickled included."""

    def __init__(self, manager: TorchManager) -> None:
        self.manager = manager
        self._seen: weakref.WeakKeyDictionary[GradScaler, _Seen] = weakref.WeakKeyDictionary()

    def take(self, scaler: GradScaler) -> None:
        """Refuse a scaler, or leave scaling to it; it is switched off where the user asked for what needs no scale."""
        run = self.manager.run
        if not run.settings.replace_native:
            run.refuse(f"the script makes a GradScaler of its own; {ADVICE}")
        self.manager.start()
        if self.manager.native.needs_no_scale:
            scaler._enabled = False
            return
        self.manager.leave_scaling()
        if self.manager.native.config is None:
            with suppress(AmpxError):  # what PyTorch takes and ampx does not is not said
                self.manager.native.config = _config(scaler)
        self.manager.native.explain()
        self._seen[scaler] = _Seen()

    # -- the methods ---------------------------------------------------------------------------------

    def scale(self, native: Callable[..., Any], scaler: GradScaler, outputs: Any) -> Any:
        if scaler not in self._seen:
            self.take(scaler)
        scaled = native(scaler, outputs)
        for loss in [scaled] if isinstance(scaled, torch.Tensor) else scaled:
            if isinstance(loss, torch.Tensor):
                setattr(loss, _SCALER, weakref.ref(scaler))
        return scaled

    def note_waiting(self, roots: Any) -> None:
        """Note the optimizers that a backward of scaled losses reaches, where there are several."""
        optimizers = self.manager.managed()
        if len(optimizers) < 2:
            return
        losses = [roots] if isinstance(roots, torch.Tensor) else list(roots)
        scaler = next((getattr(loss, _SCALER)() for loss in losses if hasattr(loss, _SCALER)), None)
        seen = None if scaler is None else self._seen.get(scaler)
        if seen is None:
            return
        self.manager.owners.sort(optimizers)
        leaves, hidden = leaves_of(losses)
        reached = {id(self.manager.owners.of(key)) for key in leaves}
        seen.waiting.update(managed for managed in optimizers if hidden or id(managed) in reached)

    def unscale_(self, native: Callable[..., Any], scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Divide; from now on the script may change what was tested."""
        native(scaler, optimizer)
        seen = self._seen.get(scaler)
        managed = self.manager.find(optimizer)
        if seen is not None and managed is not None:
            seen.waiting.discard(managed)
            if not managed.busy:
                seen.unscaled.add(id(optimizer))

    def step(
        self,
        native: Callable[..., Any],
        scaler: GradScaler,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Step, or skip: also where PyTorch would write what is not finite."""
        managed = self.manager.find(optimizer)
        seen = self._seen.get(scaler)
        state = scaler._per_optimizer_states[id(optimizer)]
        errs = "closure" in kwargs or scaler._scale is None or state["stage"] is OptState.STEPPED
        if managed is None or seen is None or errs:  # PyTorch says what is wrong
            return native(scaler, optimizer, *args, **kwargs)
        seen.waiting.discard(managed)
        samples = self.manager.run.recorder.takes_gradients is not None
        before = self.manager.sampled(functools.partial(self.manager.sample, managed)) if samples else ()
        with self.manager.stepping(managed):
            skips = self._look_again(scaler, optimizer, seen, state)
            if skips:
                state["stage"] = OptState.STEPPED
                result = None
            else:
                result = native(scaler, optimizer, *args, **kwargs)
        self._note(scaler, seen, managed, state, before)
        return result

    def update(self, native: Callable[..., Any], scaler: GradScaler, new_scale: Any = None) -> None:
        """Move the scale."""
        seen = self._seen.get(scaler)
        if seen is not None and not seen.now.steps:
            seen.now.before = _held(scaler._scale)
        before = None if seen is None or not seen.waiting or scaler._scale is None else scaler._scale.clone()
        with self.manager.uncounted():
            native(scaler, new_scale)
            if seen is not None:
                if before is not None:
                    self._carry_over(seen, scaler._scale / before)
                self._turn(scaler, seen)

    def _carry_over(self, seen: _Seen, change: torch.Tensor) -> None:
        """Have gradients that wait for their step carry the new scale, by which that divides them.

        Native defect: a scaler that is updated between two optimizers, as Accelerate and Lightning do after each step,
        divides the gradients of the second by another scale than they were multiplied by.
        """
        if change.device.type == "cpu" and change.item() == 1.0:
            return
        for managed in seen.waiting:
            for bucket in GradientSet(managed.raw, accepts_half=True).collect():
                # What is not finite stays so, and is found again.
                flag = torch.zeros((), dtype=torch.float32, device=bucket[0].device)
                unscale_into(bucket, flag, change.to(flag.device))

    # -- looking and noting --------------------------------------------------------------------------

    def _look_again(
        self, scaler: GradScaler, optimizer: torch.optim.Optimizer, seen: _Seen, state: dict[str, Any]
    ) -> bool:
        """Add to what PyTorch found what it would not see; return whether the step must be skipped here.

        Native defects: gradients that the script changed after `unscale_` are not tested, nor is the quotient of a
        scale below 1, which overflows where the scaled gradient is finite; and fused SGD whose first step overflows
        leaves the momentum that it has just made uninitialised.
        """
        fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        changed = id(optimizer) in seen.unscaled
        small = not fused and self._is_below_one(scaler, seen)
        makes = fused and makes_momentum(optimizer)
        if (small or makes) and state["stage"] is OptState.READY:
            scaler.unscale_(optimizer)
        seen.unscaled.discard(id(optimizer))
        if small or changed:
            flags: dict[torch.device, torch.Tensor] = state["found_inf_per_device"]
            gradients = GradientSet(optimizer, accepts_half=True)
            for flag in gradients.unscale(gradients.collect(), 1.0, fresh=True):
                before = flags.get(flag.device)
                flags[flag.device] = flag if before is None else torch.maximum(before, flag)
        return makes and any(flag.item() for flag in state["found_inf_per_device"].values())

    def _is_below_one(self, scaler: GradScaler, seen: _Seen) -> bool:
        """Return whether the scale is below 1. Sync: where it lives on an accelerator and was small when last read."""
        scale = scaler._scale
        assert scale is not None
        return (scale.device.type == "cpu" or seen.scale < _SMALL) and scale.item() < 1.0

    def _note(
        self,
        scaler: GradScaler,
        seen: _Seen,
        managed: TorchManaged,
        state: dict[str, Any],
        before: Sequence[SampledGradient],
    ) -> None:
        recorder = self.manager.run.recorder
        record = recorder.optimizers[managed.group]
        if any(stepped is managed for stepped, _, _ in seen.now.steps):  # a class of the script's own updates otherwise
            self._turn(scaler, seen)
        if managed not in seen.optimizers:
            seen.optimizers.append(managed)
            seen.scale = scaler.get_scale()
            if not record.steps:
                record.initial_scale = seen.scale
        if not seen.now.steps:
            seen.now.before = _held(scaler._scale)
        if recorder.takes_gradients is not None:
            after = self.manager.sampled(functools.partial(self.manager.sample, managed))
            recorder.takes_gradients(with_weights(after, before))
        recorder.stepped(managed.group)
        flags = list(state["found_inf_per_device"].values())
        skipped: Any = _held(flags[0]) if len(flags) == 1 else sum(float(flag) for flag in flags)
        seen.now.steps.append((managed, record.steps, skipped))
        self.manager.sampler.after_step()

    def _turn(self, scaler: GradScaler, seen: _Seen) -> None:
        """Begin the next window."""
        done, seen.now = seen.now, _Update()
        done.after = _held(scaler._scale)
        seen.unscaled.clear()
        seen.unread.append(done)
        if not isinstance(done.after, torch.Tensor) or len(seen.unread) >= _READ_TOGETHER:
            self._read(seen)

    def _read(self, seen: _Seen) -> None:
        """Send the events of what happened. Sync: one, where the scale lives on an accelerator."""
        unread, seen.unread = seen.unread, []
        for update in unread:
            before, after = float(update.before), float(update.after)
            seen.scale = after
            outcomes = {id(managed): (step, float(flag) != 0.0) for managed, step, flag in update.steps}
            for managed in seen.optimizers:
                assert managed.wrapped is not None
                steps = self.manager.run.recorder.optimizers[managed.group].steps
                step, overflowed = outcomes.get(id(managed), (steps, False))
                skips = managed.skips
                if id(managed) in outcomes:
                    managed.skips = skips + 1 if overflowed else 0
                states = (LossScaleState(before, 0, 1, skips), LossScaleState(after, 0, 1, managed.skips))
                group = managed.wrapped.ampx_member.group
                for event in group.events_of(("torch", managed.group, 0, step), *states, not overflowed):
                    group.send(event)

    def close(self) -> None:
        """Read what is left, an update that never came included."""
        for scaler, seen in list(self._seen.items()):
            if seen.now.steps:
                self._turn(scaler, seen)
            self._read(seen)


def _config(scaler: GradScaler) -> LossScale:
    """Return the same as ampx's configuration; bounds are widened where the script starts beyond them."""
    scale, usual = float(scaler._init_scale), LossScale()
    return LossScale(
        init_scale=scale,
        growth_factor=scaler._growth_factor,
        backoff_factor=scaler._backoff_factor,
        growth_interval=scaler._growth_interval,
        min_scale=min(usual.min_scale, scale),
        max_scale=max(usual.max_scale, scale),
    )


def _held(value: Any) -> Any:
    """Return a number where it is on the host, else a copy that stays."""
    if value is None:
        return 1.0
    return value.item() if value.device.type == "cpu" else value.clone()
