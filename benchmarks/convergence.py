"""Train to the same quality in float32, float16 and bfloat16 through ampx, on real data, and report the time it took.

Digits: scikit-learn's 1797 scanned digits, a small CNN, until the accuracy on held-out images reaches `ACCURACY`.
Text: a causal transformer over the characters of Python's own reference texts, until the loss on held-out text is at
most `LOSS` nats per character. A dtype that the CPU only emulates is left out, and the rows say so.

Every seed trains once in each dtype, in turn, from the same weights on the same batches; the ratio of the times is
taken seed by seed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import _paired
import torch
from torch import nn
from torch.nn import functional
from whole_step import native_dtypes
from workloads import Transformer

import ampx

ACCURACY = 0.97
LOSS = 2.05
EVERY = 20
"""Steps between two looks at the held-out data; their time is not counted."""
STEPS = 6
"""How often `run` advances, where the CPU computes both 16-bit dtypes."""


class Digits:
    """Batches and the quality measure of scikit-learn's digits."""

    name = f"digits, CNN, to {ACCURACY:.0%} accuracy"
    most_steps = 2000

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(data.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.train, self.test = ((images[part], labels[part]) for part in (order[:1437], order[1437:]))

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10),
        )  # fmt: skip

    def batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            for part in torch.randperm(len(self.train[1]), generator=generator).split(64):
                yield self.train[0][part], self.train[1][part]

    def quality(self, model: nn.Module) -> tuple[float, bool]:
        """Return the accuracy on held-out images and whether it is reached."""
        accuracy = (model(self.test[0]).argmax(-1) == self.test[1]).float().mean().item()
        return accuracy, accuracy >= ACCURACY


class Text:
    """Batches and the quality measure of the text that Python ships as its own help topics."""

    name = f"characters, transformer, to {LOSS} nats"
    most_steps = 600
    length = 64

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "".join(topics[name] for name in sorted(topics))
        symbols = sorted(set(text))
        index = {symbol: number for number, symbol in enumerate(symbols)}
        data = torch.tensor([index[symbol] for symbol in text])
        self.symbols = len(symbols)
        held_out = len(data) // 20
        self.train, self.test = data[:-held_out], data[-held_out:]

    def model(self) -> nn.Module:
        return Transformer(self.symbols, 128, 2, self.length)

    def batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self._windows(self.train, torch.randint(len(self.train) - self.length, (16,), generator=generator))

    def quality(self, model: nn.Module) -> tuple[float, bool]:
        """Return the loss on held-out text, in nats per character, and whether it is reached."""
        starts = torch.arange(0, len(self.test) - self.length - 1, (len(self.test) - self.length) // 64)
        inputs, labels = self._windows(self.test, starts)
        loss = functional.cross_entropy(model(inputs).float().flatten(0, 1), labels.flatten()).item()
        return loss, loss <= LOSS

    def _windows(self, data: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = starts[:, None] + torch.arange(self.length)
        return data[places], data[places + 1]


def train(task: Digits | Text, dtype: str, seed: int) -> dict[str, float]:
    """Train one model until the task's quality is reached.

    Returns:
        `seconds` of training (held-out evaluation not counted), `steps`, `skipped` steps and the `quality` at the end.

    Raises:
        AssertionError: It was not reached within the task's most steps.
    """
    torch.manual_seed(seed)
    model = task.model()
    seconds = quality = 0.0
    skipped = 0
    with ampx.init("torch", device="cpu", dtype=dtype, loss_scale="dynamic" if dtype == "float16" else "auto") as amp:
        opt = amp.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True))
        for step, (inputs, labels) in enumerate(task.batches(seed), start=1):
            start = time.perf_counter()
            opt.zero_grad()
            loss = functional.cross_entropy(model(inputs).float().flatten(0, -2), labels.flatten())
            with ampx.scale_loss(loss, opt) as scaled:
                scaled.backward()
            opt.step()
            seconds += time.perf_counter() - start
            skipped += not opt.last_step.applied
            if step % EVERY == 0:
                with torch.no_grad():
                    quality, reached = task.quality(model)
                if reached or _paired.shortest:
                    return {"seconds": seconds, "steps": step, "skipped": skipped, "quality": quality}
                assert step < task.most_steps, (task.name, dtype, seed, quality)
    raise AssertionError("batches do not end")


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Train every task in every dtype that this CPU computes, over one seed (quick) or three."""
    native = native_dtypes()
    dtypes = ["float32", *(dtype for dtype in ("float16", "bfloat16") if dtype in native)]
    rows: list[dict[str, object]] = []
    for make in (Digits,) if quick else (Digits, Text):
        task = make()
        train(task, dtypes[-1], 0)  # kernels are chosen and caches filled on first use
        runs: dict[str, list[dict[str, float]]] = {dtype: [] for dtype in dtypes}
        for seed in range(1 if quick else 3):
            for dtype in dtypes if seed % 2 else reversed(dtypes):
                runs[dtype].append(train(task, dtype, seed))
        for dtype in dtypes:
            ratios = [
                mine["seconds"] / base["seconds"] for mine, base in zip(runs[dtype], runs["float32"], strict=True)
            ]
            middle = {key: statistics.median(run[key] for run in runs[dtype]) for key in runs[dtype][0]}
            rows.append(
                {
                    "task": task.name,
                    "dtype": dtype,
                    **middle,
                    "ratio": statistics.median(ratios),
                    "ratio_low": min(ratios),
                    "ratio_high": max(ratios),
                    "seeds": len(ratios),
                }
            )
            advance()
    rows += [
        {"dtype": dtype, "left_out": "emulated by this CPU"} for dtype in ("float16", "bfloat16") if dtype not in native
    ]
    return rows


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for row in run("--quick" in sys.argv):
        print(row)
