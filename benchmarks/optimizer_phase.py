"""What the optimizer phase costs through ampx, against torch's GradScaler: from scaled gradients to new weights.

Native: `unscale_` and `clip_grad_norm_` (where the norm is bounded), `step`, `update`. ampx: `step`. Fused optimizers,
float32 weights, the same tensors on both sides; that both come to the same weights is checked first. Gradients are
filled anew before each timing, outside of it, as backward would.

Bytes: elements that a step must read or write, four bytes each, if no cache helps. They say what ratio is to be
expected where memory is the limit; the bandwidths of the machine, and those that both sides reach, come with them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _paired
import torch
from _paired import Ratio, machine, paired
from torch import nn

import ampx

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "plain SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, fused=True),
}
GROWING = ("SGD", "AdamW")
"""The optimizers that are measured at all sizes; the others, and those with two threads, at the sizes with a target."""
THREADS = (1, 2)
TARGETS = {  # tensors and shape: the ratio ampx / native that is aimed at, without and with clipping
    (50, (1000, 1000)): (0.60, 0.45),
    (300, (64, 64)): (0.85, 0.60),
}
GROWTH = {  # elements: numbers of tensors
    10_000: (10, 100, 1000),
    100_000: (10, 100, 1000, 10_000),
    1_000_000: (10, 100, 1000, 10_000),
    10_000_000: (10, 100, 1000, 10_000),
    100_000_000: (10, 1000),
}
SCALE = 2.0**16
MAX_NORM = 1.0

# Elements that the kernel itself reads and writes: weights and state twice, gradients once.
_KERNEL = {"SGD": 5, "AdamW": 7, "plain SGD": 3}


def bytes_moved(optimizer: str, clip: bool, elements: int) -> tuple[int, int]:
    """Return the bytes that one step must move, through ampx and natively."""
    kernel = _KERNEL[optimizer]
    # Natively the check rewrites the gradients. Where they are clipped, it unscales them; then they are read for the
    # norm and rewritten. Else the kernel unscales, which makes it write the gradients.
    native = 2 + 1 + 2 + kernel if clip else 2 + kernel + 1
    # Here they are read once, and the kernel writes them; or they are unscaled, and the kernel only reads them.
    return 4 * elements * (1 + kernel + 1), 4 * elements * native


class Phase:
    """One set of tensors, one fused optimizer, and both ways to step it."""

    def __init__(self, count: int, shape: tuple[int, ...], optimizer: str, clip: bool, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self.clip = clip
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for _ in range(count)]
        self.scaled = [torch.randn(shape, generator=generator).to(device) * SCALE for _ in range(count)]
        for parameter in self.parameters:
            parameter.grad = torch.empty_like(parameter)
        self.raw = OPTIMIZERS[optimizer](self.parameters)
        # Without limit on growth, so that the scale stays as it is.
        scale = ampx.LossScale(init_scale=SCALE, growth_interval=10**9)
        self.opt = ampx.wrap_optimizer(self.raw, loss_scale=scale, max_grad_norm=MAX_NORM if clip else None)
        self.scaler = torch.amp.GradScaler(device, init_scale=SCALE, growth_interval=10**9)
        self.loss = torch.ones((), requires_grad=True, device=device)

    def fill(self) -> None:
        """Put scaled gradients where backward would."""
        torch._foreach_copy_([parameter.grad for parameter in self.parameters], self.scaled)

    def before_ampx(self) -> None:
        with ampx.scale_loss(self.loss, self.opt):
            pass
        self.fill()

    def before_native(self) -> None:
        self.scaler.scale(self.loss)
        self.fill()

    def through_ampx(self) -> None:
        self.opt.step()

    def natively(self) -> None:
        if self.clip:
            self.scaler.unscale_(self.raw)
            nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.scaler.step(self.raw)
        self.scaler.update()

    def check(self) -> None:
        """Raise unless both ways lead to the same weights.

        Without clipping they are the same bits on a CPU. With it they may differ by what the sum of squares of a long
        gradient loses to rounding: at most the root of its length, in units of 2**-24, of each update. On a GPU they
        may so without it, too: for torch the kernel divides and for ampx it does not, and its sums of products may be
        rounded in other places. On an H200 a step of fused SGD differs by one unit in 0.2 % of the weights, and one of
        fused AdamW in none.
        """
        start = [parameter.detach().clone() for parameter in self.parameters[:3]]
        rows = []
        for before, step in ((self.before_ampx, self.through_ampx), (self.before_native, self.natively)):
            with torch.no_grad():
                torch._foreach_copy_(self.parameters[:3], start)
            self.raw.state.clear()
            for _ in range(3):
                before()
                step()
            rows.append([parameter.detach().clone() for parameter in self.parameters[:3]])
        for begin, ours, theirs in zip(start, *rows, strict=True):
            moved = (theirs - begin).abs().max().item()
            tolerance = 2.0**-24 * (len(begin.view(-1)) ** 0.5 * moved + 4 * begin.abs().max().item())
            limit = tolerance if self.clip or begin.is_cuda else 0.0
            assert moved > 0
            apart = (ours - theirs).abs().max().item()
            assert apart <= limit, f"weights of the two ways are {apart:.3g} apart, more than {limit:.3g}"


def measure(count: int, shape: tuple[int, ...], optimizer: str, clip: bool, pairs: int, device: str = "cpu") -> Ratio:
    """Time one set of tensors; on a GPU up to the moment when it has finished.

    Raises:
        AssertionError: The two recipes do not come to the same weights, so that a ratio would mean nothing.
    """
    with ampx.init("torch", device=device, dtype="bfloat16", process_wide=False):
        phase = Phase(count, shape, optimizer, clip, device)
        phase.check()
        calls = [phase.through_ampx, phase.natively, phase.before_ampx, phase.before_native]
        ours, theirs, before_ours, before_theirs = calls if device == "cpu" else map(_finished, calls)
        return paired(ours, theirs, pairs=pairs, warmup=2, before_a=before_ours, before_b=before_theirs)


def _finished(call: Callable[[], None]) -> Callable[[], None]:
    """Return a call that waits for the GPU."""

    def wait() -> None:
        call()
        torch.cuda.synchronize()

    return wait


def bandwidth(elements: int = 50_000_000, runs: int = 7) -> dict[str, float]:
    """Return the bytes a second that a plain read, and a read with a write in place, reach."""
    tensor = torch.ones(elements)

    def best(function: Callable[[], object]) -> float:
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    return {
        "read": 4 * elements / best(tensor.sum),
        "read and write": 8 * elements / best(lambda: tensor.mul_(1.0)),
    }


def sizes(quick: bool) -> list[tuple[int, tuple[int, ...]]]:
    """List number and shape of the tensors of each set."""
    if _paired.shortest:
        return [(10, (1000,))]
    if quick:
        return [*TARGETS, (10, (1000,)), (1000, (100,))]
    return [*TARGETS, *((count, (elements // count,)) for elements, counts in GROWTH.items() for count in counts)]


Case = tuple[int, int, tuple[int, ...], str]
"""Threads, number and shape of the tensors, optimizer."""


def cases(quick: bool, threads: tuple[int, ...] = THREADS) -> list[Case]:
    """List what is measured; quickly, the growing ones with the first number of threads. Never more than cores."""
    cases: list[Case] = []
    for number in [count for count in threads[: 1 if quick else None] if count <= (os.cpu_count() or 1)]:
        for count, shape in sizes(quick):
            targeted = (count, shape) in TARGETS
            names = OPTIMIZERS if targeted and not quick else GROWING if number == 1 else ()
            cases += [(number, count, shape, name) for name in names]
    return cases


STEPS = 2 * len(cases(quick=False))
"""How often `run` advances at most."""


def run(
    quick: bool, advance: Callable[[], object] = lambda: None, threads: tuple[int, ...] = THREADS
) -> list[dict[str, object]]:
    """Measure every case, without and with clipping."""
    before = torch.get_num_threads()
    rows: list[dict[str, object]] = []
    reached: dict[int, dict[str, float]] = {}
    try:
        for number, *case in cases(quick, threads):
            torch.set_num_threads(number)
            if number not in reached:
                reached[number] = bandwidth()
            for clipped in (False, True):
                rows.append(_row(*case, clipped, quick, reached[number]))
                advance()
    finally:
        torch.set_num_threads(before)
    return rows


def _row(
    count: int, shape: tuple[int, ...], optimizer: str, clipped: bool, quick: bool, reached: dict[str, float]
) -> dict[str, object]:
    elements = count * torch.Size(shape).numel()
    # About as long for each: short steps are timed more often.
    pairs = max(7, min(200, 200_000_000 // (elements + 20_000 * count)) // (4 if quick else 1))
    ratio = measure(count, shape, optimizer, clipped, pairs)
    ours, native = bytes_moved(optimizer, clipped, elements)
    target = TARGETS.get((count, shape))
    return {
        "optimizer": optimizer,
        "clipped": clipped,
        "threads": torch.get_num_threads(),
        "tensors": count,
        "elements": elements,
        **ratio.to_json(),
        "target": None if target is None else target[clipped],
        "bytes_a": ours,
        "bytes_b": native,
        "bytes_ratio": ours / native,
        # Bytes a second: of both sides, and of plain passes over memory on this machine.
        "bandwidth_a": ours / ratio.median_a,
        "bandwidth_b": native / ratio.median_b,
        "bandwidth_of": reached,
    }


def describe(row: dict[str, Any]) -> str:
    """Return one row as a line."""
    name = f"{row['threads']} x {row['tensors']:>6} of {row['elements'] // row['tensors']:<9} {row['optimizer']:9}"
    times = f"ampx {row['median_a'] * 1e3:9.3f} ms  native {row['median_b'] * 1e3:9.3f} ms"
    ratio = f"ratio {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
    limit = f"by bytes {row['bytes_ratio']:.3f}, {row['bandwidth_a'] / 1e9:.1f} and {row['bandwidth_b'] / 1e9:.1f} GB/s"
    target = "" if row["target"] is None else f"  target {row['target']:.2f}"
    return f"{name} {'clipped' if row['clipped'] else '':7} {times}  {ratio}  {limit}{target}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS, help="numbers of torch's threads")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    rows = run(arguments.quick, threads=tuple(arguments.threads))
    for row in rows:
        print(describe(row))
    if arguments.out is not None:
        results = {
            "machine": {**machine(), "torch": torch.__version__},
            "quick": arguments.quick,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "optimizer_phase": rows,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
