"""The meter: what an update did to a sample of every parameter, looked at in every hundredth step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ampx.formats import FORMATS, stride
from ampx.protocol import NotCopied, StepObserver
from ampx.rooms import METER_SAMPLES

from .debug import name_parameters
from .trees import gradient_of, stored

if TYPE_CHECKING:
    from ampx.numerics.meter import Meter

    from .step import AmpOptimizer


@dataclass
class Sample:
    """Elements of every parameter, one after the other, where they are computed.

    Attributes:
        step: The step, counted from 1.
        scale: The loss scale of the gradients.
        parameters: Those that have a gradient, which is not sparse.
        gradients: As they are scaled.
        before: Weights before the update.
        after: Weights after it.
        skipped: Not zero where the update did not take place, if that is not known on the host.
    """

    step: int
    scale: Any
    parameters: list[torch.nn.Parameter]
    gradients: dict[torch.device, torch.Tensor]
    before: dict[torch.device, torch.Tensor]
    after: dict[torch.device, torch.Tensor] | None = None
    skipped: Any = None


class UpdateMeter(StepObserver, NotCopied):
    """The meter of one optimizer: counts its steps, and keeps the last sample."""

    def __init__(self, compute: str) -> None:
        self._compute = compute
        self._steps = 0
        self._running: Sample | None = None  # of the step that is running
        self._last: Sample | None = None
        self._ids: list[int] = []
        self._names: list[str] = []
        # Counts that are being copied to the host, and the event of their arrival.
        self._counts: list[tuple[torch.Tensor, Any]] = []

    def before(self, optimizer: AmpOptimizer) -> bool:
        """Count a step, and sample every hundredth; return whether there is something to look at after it."""
        self._steps += 1
        every = optimizer.ampx_member.group.meter_every
        self._running = self._begin(optimizer) if every and self._steps % every == 0 else None
        return self._running is not None or bool(self._counts)

    def after(self, optimizer: AmpOptimizer, finite: Mapping[int, Any]) -> None:
        """Sample the weights again if the step updated them, and report what came to the host."""
        sample, self._running = self._running, None
        if sample is not None:
            if optimizer.on_device:  # where the kernel decided whether to update
                self._end(sample, optimizer.gradients.combine(list(finite.values())))
            elif all(finite.values()):
                self._end(sample, None)
        self._tell(optimizer)

    def _begin(self, optimizer: AmpOptimizer) -> Sample | None:
        """Take a sample of gradients and weights, before anything is divided; none inside a CUDA graph capture."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        member = optimizer.ampx_member
        scale: Any = member.factor if len(member.factors) == 1 else 1.0
        parameters = [p for p in optimizer.gradients.parameters() if _is_dense(gradient_of(p))]
        gradients = _sampled([gradient_of(parameter) for parameter in parameters])
        if member.stage == "unscaled":  # the script looked at them
            gradients = {device: gradient * _on(scale, device) for device, gradient in gradients.items()}
        return Sample(self._steps, scale, parameters, gradients, _sampled(parameters))

    def _end(self, sample: Sample, overflow: torch.Tensor | None) -> None:
        """Take the sample of the weights after an update, and count on the device."""
        sample.after = _sampled(sample.parameters)
        sample.skipped = overflow
        self._last = sample
        flushes = FORMATS[self._compute].flushes_to
        self._counts = []
        for device, gradient in sample.gradients.items():
            magnitude = gradient.float().abs()
            moved = magnitude.isfinite() & (magnitude != 0)
            unchanged = moved & (sample.before[device] == sample.after[device])
            counts = [mask.sum() for mask in (moved, unchanged, moved & (magnitude <= flushes))]
            largest = magnitude.where(moved, 0.0).amax() if magnitude.numel() else magnitude.new_zeros(())
            vector = torch.stack([*counts, largest])
            if sample.skipped is not None:
                vector = vector * (sample.skipped.to(device) == 0)
            self._counts.append(_on_its_way(vector))

    def _tell(self, optimizer: AmpOptimizer) -> None:
        """Send an event where the last counts are beyond what training stands, once they are on the host."""
        if not self._counts or self._last is None:
            return
        if any(event is not None and not event.query() for _, event in self._counts):
            return
        rows = [vector.tolist() for vector, _ in self._counts]
        self._counts = []
        moved, unchanged, flushed = (sum(column) for column in list(zip(*rows, strict=True))[:3])
        if not moved:
            return
        from ampx.numerics.meter import report  # it may have been taken out; nothing is metered then

        headroom = math.log2(FORMATS[self._compute].largest) - math.log2(max(row[3] for row in rows))
        report(optimizer.ampx_member.group, self._last.step, unchanged / moved, flushed / moved, headroom)

    def reading(self, optimizer: AmpOptimizer) -> Meter | None:
        """Return what the last update that was looked at did; None before the first. Sync: one a device."""
        sample = self._last
        if sample is None or (sample.skipped is not None and bool(sample.skipped)):
            return None
        from ampx.numerics.meter import Meter, count  # as above

        assert sample.after is not None
        named = self._named(optimizer)
        columns = [_host(values) for values in (sample.gradients, sample.before, sample.after)]
        taken = {id(parameter) for parameter in sample.parameters}
        places = dict.fromkeys(sample.before, 0)
        entries = []
        for name, parameter in named:
            size = stored(parameter).numel()
            size = -(-size // stride(size, METER_SAMPLES))
            dtype = str(parameter.dtype).removeprefix("torch.")
            if id(parameter) not in taken:
                entries.append(count(name, dtype, range(size), range(size), None, self._compute))
                continue
            start = places[parameter.device]
            places[parameter.device] = end = start + size
            gradient, before, after = (column[parameter.device][start:end] for column in columns)
            entries.append(count(name, dtype, before, after, gradient, self._compute))
        return Meter(sample.step, self._compute, float(sample.scale), tuple(entries))

    def _named(self, optimizer: AmpOptimizer) -> list[tuple[str, torch.Tensor]]:
        """Return names and parameters; the names are looked up where the parameters are others than before."""
        parameters = optimizer.gradients.parameters()
        if list(map(id, parameters)) != self._ids:
            self._ids = list(map(id, parameters))
            self._names = [name for name, _ in name_parameters(optimizer.param_groups, None, [optimizer.masters])]
        return list(zip(self._names, parameters, strict=True))


def _on_its_way(vector: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return numbers that are being copied to the host, and the event of their arrival."""
    if vector.device.type != "cuda":
        return vector, None
    there = torch.empty(vector.shape, dtype=vector.dtype, device="cpu", pin_memory=True)
    there.copy_(vector, non_blocking=True)
    return there, torch.cuda.current_stream(vector.device).record_event()


def _is_dense(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout is torch.strided


def _sampled(tensors: list[Any]) -> dict[torch.device, torch.Tensor]:
    """Return elements of tensors by device, one after the other: at multiples of a stride, in row-major order."""
    parts: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            values = stored(tensor).reshape(-1)
            parts.setdefault(values.device, []).append(values[:: stride(values.numel(), METER_SAMPLES)])
        return {device: torch.cat(values) if len(values) > 1 else values[0].clone() for device, values in parts.items()}


def _on(scale: Any, device: torch.device) -> Any:
    return scale.to(device) if isinstance(scale, torch.Tensor) else scale


def _host(values: dict[torch.device, torch.Tensor]) -> dict[torch.device, Any]:
    """Return tensors as arrays, which have no bfloat16."""
    wide = {d: tensor.float() if tensor.dtype.itemsize < 4 else tensor for d, tensor in values.items()}
    return {device: tensor.cpu().numpy() for device, tensor in wide.items()}
