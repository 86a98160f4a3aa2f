"""Real sizes on random data: ResNet-50 and an encoder as large as BERT-base, in every precision.

What is random does not change what a step costs; shapes do. Training to an accuracy is a check of its own.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from _gpu_checks import Figure, Setup, require
from _gpu_torch_cost import LIMIT, casting, count_kernels, count_syncs, whole
from _paired import paired
from torch import nn
from torch.nn import functional

import ampx

Step = Callable[[], object]
# Batches are doubled for so long, in seconds, for each model.
GROWING = 150.0


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with batch norms and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            *_convolution(inputs, width, 1, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, outputs, 1, 1),
        )  # fmt: skip
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)


def resnet(blocks: tuple[int, ...], width: int, classes: int) -> nn.Module:
    """Build a residual network; blocks (3, 4, 6, 3) and width 64 are ResNet-50."""
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(inputs, width * 2**stage, 2 if stage and not block else 1))
            inputs = 4 * width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Encoder(nn.Module):
    """Symbols to symbols through bidirectional transformer layers; 12 layers of 768 are as large as BERT-base."""

    def __init__(self, symbols: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(layers))
        self.head = nn.Linear(width, symbols)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.symbols(x) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


@dataclass(frozen=True)
class Model:
    """What to train: a maker, one batch, and how many images or tokens the batch holds."""

    make: Callable[[], nn.Module]
    inputs: torch.Tensor
    labels: torch.Tensor
    count: int
    unit: str


def images(setup: Setup, batch: int | None = None) -> Model:
    """Return ResNet-50 and 128 images of 224×224, or another number; a tiny one where only the script is tried out."""
    tiny = setup.is_tiny
    usual, size, classes = (4, 32, 10) if tiny else (128, 224, 1000)
    batch = batch or usual
    return Model(
        (lambda: resnet((1, 1), 8, classes)) if tiny else (lambda: resnet((3, 4, 6, 3), 64, classes)),
        torch.randn(batch, 3, size, size, device=setup.device).to(memory_format=torch.channels_last),
        torch.randint(0, classes, (batch,), device=setup.device),
        batch,
        "images",
    )


def tokens(setup: Setup, batch: int | None = None) -> Model:
    """Return an encoder as large as BERT-base and 32 sequences of 512, or another number; tiny as in `images`."""
    tiny = setup.is_tiny
    usual, length, symbols = (2, 16, 64) if tiny else (32, 512, 30522)
    batch = batch or usual
    shape = (symbols, 32, 2, 1, length) if tiny else (symbols, 768, 12, 12, length)
    return Model(
        lambda: Encoder(*shape),
        torch.randint(0, symbols, (batch, length), device=setup.device),
        torch.randint(0, symbols, (batch * length,), device=setup.device),
        batch * length,
        "tokens",
    )


def resnet50_is_as_fast_as_by_hand(setup: Setup) -> Figure:
    """ResNet-50: images per second in every precision, against torch's own recipe and against float32."""
    return _compare(setup, images(setup))


def bert_base_is_as_fast_as_by_hand(setup: Setup) -> Figure:
    """An encoder as large as BERT-base: tokens per second, against torch's own recipe and against float32."""
    return _compare(setup, tokens(setup))


def resnet50_grows_to_what_fits(setup: Setup) -> Figure:
    """ResNet-50 in batches of 32, 64, 128 and so on, until the memory is full: images per second, and memory."""
    return _grow(setup, images)


def bert_base_grows_to_what_fits(setup: Setup) -> Figure:
    """An encoder as large as BERT-base in batches of 8, 16, 32 and so on: tokens per second, and memory."""
    return _grow(setup, tokens)


def _compare(setup: Setup, model: Model) -> Figure:
    judged = not setup.is_tiny
    pairs, repeat = (20, 5) if judged else (4, 1)
    rows: dict[str, dict[str, Any]] = {}
    for name, tf32 in (("float32", False), ("float32, TF32", True)):
        with _tf32(tf32), _float32(setup, model) as step:
            rows[name] = _alone(setup, model, step, 2 * pairs, repeat)
    dtypes = ("float16", "bfloat16") if setup.on_gpu else ("bfloat16",)
    for dtype, scaler in (*((dtype, True) for dtype in dtypes), ("bfloat16", False)):
        with _tf32(False), _both(setup, model, dtype, scaler) as (ours, theirs, on, off):
            _agree(setup, ours, theirs, on, off, dtype)
            measured = paired(
                whole(setup, ours, repeat), whole(setup, theirs, repeat), pairs=pairs, before_a=on, before_b=off
            )
            on()
            row: dict[str, Any] = {**measured.to_json(), **_alone(setup, model, ours, 3, repeat)}
            row["per_second"] = model.count * repeat / measured.median_a
            row["against"] = "GradScaler" if scaler else "steps that nobody checks"
            if setup.on_gpu:
                row["syncs_in_10_steps"] = [count_syncs(ours), (off(), count_syncs(theirs))[1]]
                row["kernels_a_step"] = [(on(), count_kernels(ours))[1], (off(), count_kernels(theirs))[1]]
        rows[dtype if scaler else f"{dtype}, not scaled"] = row
    base = rows["float32"]["per_second"]
    parts = []
    for name, row in rows.items():
        row["times_float32"] = row["per_second"] / base
        part = f"{name} {row['per_second']:.0f}/s, {row['times_float32']:.2f} of float32"
        if "ratio" in row:
            part += f", ampx/torch {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        parts.append(part)
    line = f"{model.unit}: {'; '.join(parts)}"
    if judged:
        scaled = [row for row in rows.values() if row.get("against") == "GradScaler"]
        require(all(row["ratio"] <= LIMIT for row in scaled), line)
        require(all(mine <= native for row in scaled for mine, native in _syncs(row)), f"syncs: {rows}")
    return Figure(line, rows)


def _grow(setup: Setup, model_of: Callable[[Setup, int], Model]) -> Figure:
    first, last = (2, 4) if setup.is_tiny else (32 if model_of is images else 8, 8192)
    dtypes = ("float16", "bfloat16") if setup.on_gpu else ("bfloat16",)
    runs = {"float32": None, **{dtype: dtype for dtype in dtypes}}
    rows: dict[str, dict[str, Any]] = {name: {} for name in runs}
    full: set[str] = set()
    end, batch = time.monotonic() + GROWING, first
    # By batches, so that all precisions have got as far where time runs out.
    while batch <= last and len(full) < len(runs) and time.monotonic() < end:
        for name, dtype in runs.items():
            if name not in full:
                try:
                    rows[name][str(batch)] = _fitting(setup, model_of(setup, batch), dtype)
                except torch.OutOfMemoryError:
                    full.add(name)
                gc.collect()
                if setup.on_gpu:
                    torch.cuda.empty_cache()
        batch *= 2
    require(all(rows.values()), f"no batch of {first} fits: {rows}")
    best = {name: max(row["per_second"] for row in by_batch.values()) for name, by_batch in rows.items()}
    parts = []
    for name, by_batch in rows.items():
        largest = f"{'fits' if name in full else 'was tried'} up to {max(map(int, by_batch))}"
        parts.append(f"{name} {largest}, at best {best[name]:.0f}/s, {best[name] / best['float32']:.2f} of float32")
    return Figure(f"{model_of.__name__}: {'; '.join(parts)}", rows)


def _fitting(setup: Setup, model: Model, dtype: str | None) -> dict[str, Any]:
    """Time a batch in float32, as None and with TF32, or through ampx in a dtype."""
    if dtype is None:
        with _tf32(True), _float32(setup, model) as step:
            return _alone(setup, model, step, 3, 1)
    with _tf32(False), _ampx(setup, model, dtype, scaler=True) as step:
        return _alone(setup, model, step, 3, 1)


def _syncs(row: dict[str, Any]) -> list[list[int]]:
    return [row["syncs_in_10_steps"]] if "syncs_in_10_steps" in row else []


@contextlib.contextmanager
def _tf32(on: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _made(setup: Setup, model: Model) -> nn.Module:
    torch.manual_seed(0)
    return model.make().to(setup.device, memory_format=torch.channels_last)


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, fused=True)


@contextlib.contextmanager
def _float32(setup: Setup, model: Model) -> Iterator[Step]:
    module = _made(setup, model)
    raw = _sgd(module)

    def step() -> torch.Tensor:
        raw.zero_grad()
        loss = functional.cross_entropy(module(model.inputs), model.labels)
        loss.backward()
        raw.step()
        return loss

    yield step


@contextlib.contextmanager
def _ampx(setup: Setup, model: Model, dtype: str, scaler: bool) -> Iterator[Step]:
    module = _made(setup, model)
    options: Any = {"loss_scale": "dynamic"} if scaler else {}  # bfloat16 is not scaled, and checked all the same
    with ampx.init("torch", device=setup.device, dtype=dtype, **options) as amp:
        opt = amp.wrap_optimizer(_sgd(module))

        def step() -> torch.Tensor:
            opt.zero_grad()
            loss = functional.cross_entropy(module(model.inputs).float(), model.labels)
            with ampx.scale_loss(loss, opt) as scaled:
                scaled.backward()
            opt.step()
            return loss

        yield step


def _native(setup: Setup, model: Model, dtype: str, scaler: bool) -> Step:
    module = _made(setup, model)
    raw, native = _sgd(module), torch.amp.GradScaler(setup.device, enabled=scaler)

    def step() -> torch.Tensor:
        raw.zero_grad()
        with torch.autocast(setup.device, dtype=getattr(torch, dtype)):
            loss = functional.cross_entropy(module(model.inputs).float(), model.labels)
        native.scale(loss).backward()
        native.step(raw)
        native.update()
        return loss

    return step


@contextlib.contextmanager
def _both(setup: Setup, model: Model, dtype: str, scaler: bool) -> Iterator[tuple[Step, Step, Step, Step]]:
    """Return one step through ampx, the native one, and for each what switches casting as it needs."""
    on, off = casting(setup, True), casting(setup, False)
    with _ampx(setup, model, dtype, scaler) as ours:
        yield ours, _native(setup, model, dtype, scaler), on, off
        on()


def _agree(setup: Setup, ours: Step, theirs: Step, on: Step, off: Step, dtype: str) -> None:
    """Refuse to compare what does not train alike: the first losses are equal, or nearly on a GPU.

    There the sums of a convolution's or an embedding's gradients may be taken in another order each time, so weights
    differ by roundings after the first step; the first loss is before any.
    """
    on()
    first = float(ours())  # type: ignore[arg-type]
    off()
    native = float(theirs())  # type: ignore[arg-type]
    epsilon = torch.finfo(getattr(torch, dtype)).eps
    require(abs(first - native) <= epsilon * abs(native), f"{dtype}: first loss {first} through ampx, {native} by hand")


def _alone(setup: Setup, model: Model, step: Step, times: int, repeat: int) -> dict[str, Any]:
    """Time one step by itself and find the most memory that was allocated during it, in MiB."""
    steps = whole(setup, step, repeat)
    steps()
    if setup.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ratio = paired(steps, lambda: None, pairs=max(times, 3), warmup=1)
    row: dict[str, Any] = {"per_second": model.count * repeat / ratio.median_a}
    if setup.on_gpu:
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return row
