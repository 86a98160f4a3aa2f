"""What `ampx.tune` decides for each workload in PyTorch, and a step under it: see `tuned.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from tuned import DTYPE, Settings, Side, Task, main, measure_all
from workloads import Workload, chosen

import ampx


class TorchSide(Side):
    """One way to train in PyTorch."""

    framework = "torch"
    untimed = 4  # memory of the wrapper, and what is decided in its first step

    def __init__(self, workload: Workload, settings: Settings | None) -> None:
        super().__init__(settings)
        torch.manual_seed(0)
        self.workload = workload
        self.batch = workload.batch()
        self.model = workload.model()
        self.raw = workload.optimizer(list(self.model.parameters()))

    def join(self, other: Side) -> None:
        assert isinstance(other, TorchSide)
        self.model, self.raw = other.model, other.raw

    def start(self, amp: ampx.Amp | None) -> None:
        self.optimizer = None
        if amp is not None:
            amp.prepare(self.model)
            self.optimizer = amp.wrap_optimizer(self.raw, max_grad_norm=self.workload.max_grad_norm)

    def step(self) -> None:
        (inputs, labels), workload, optimizer = self.batch, self.workload, self.optimizer
        loss = workload.loss(self.model(inputs), labels)
        if optimizer is None:
            loss.backward()
            if workload.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), workload.max_grad_norm)
            self.raw.step()
            self.raw.zero_grad()
            return
        with ampx.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()


def tuned(workload: Workload) -> ampx.TunedPolicy:
    """Return what `tune` decides for a workload."""
    torch.manual_seed(0)
    inputs, labels = workload.batch()
    return ampx.tune(
        lambda model: workload.loss(model(inputs), labels),
        workload.model(),
        dtype=DTYPE,
        framework="torch",
        device="cpu",
    )


def task(workload: Workload) -> Task:
    """Return a workload as it is tuned and trained."""
    short = workload.pairs > 100
    return Task(
        workload.name, partial(tuned, workload), partial(TorchSide, workload), 40 if short else 12, 50 if short else 2
    )


TASKS = [task(workload) for workload in chosen(quick=True)]
STEPS = len(TASKS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Tune and time each workload."""
    return measure_all(TASKS, quick, advance)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(run)
