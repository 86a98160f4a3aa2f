"""What `ampx.tune` decides for each workload in PyTorch, and a step under it, against float32 and plain O1.

The policy file that `tune` would write is read by `init`, as a user's is. Float32 is the loop without ampx, which looks
at no gradient; a policy that is off (`enabled = false`) looks at none, either. Plain O1 is bfloat16 by the op lists. A
policy that casts by the op lists alone is plain O1, and is not compared with it.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from _paired import Ratio, paired
from workloads import Batch, Workload, chosen

import ampx

DTYPE = "bfloat16"
EACH_MODEL = chosen(quick=True)
# Steps of a session that are not timed: memory of the wrapper, and what is decided in its first step.
UNTIMED = 4


class Side:
    """One way to train; made anew before every timing, because a framework has one session at a time."""

    def __init__(self, workload: Workload, settings: dict[str, object] | None) -> None:
        torch.manual_seed(0)
        self.workload, self.settings = workload, settings
        self.batch: Batch = workload.batch()
        self.model = workload.model()
        self.raw = workload.optimizer(list(self.model.parameters()))

    def begin(self) -> None:
        """Start the session, and do some steps."""
        ampx.shutdown()
        self.optimizer = None
        if self.settings is not None:
            amp = ampx.init("torch", device="cpu", **self.settings)  # type: ignore[arg-type]
            model, raw = self.model, self.raw
            if "policy" in self.settings:
                amp.prepare(model)
            self.optimizer = amp.wrap_optimizer(raw, max_grad_norm=self.workload.max_grad_norm)
        for _ in range(UNTIMED):
            self.step()

    def step(self) -> None:
        """Train on the batch."""
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
    ampx.shutdown()
    torch.manual_seed(0)
    inputs, labels = workload.batch()
    return ampx.tune(
        lambda model: workload.loss(model(inputs), labels),
        workload.model(),
        dtype=DTYPE,
        framework="torch",
        device="cpu",
    )


def described(policy: ampx.TunedPolicy) -> str:
    """Return a policy in a few words."""
    if policy.deny:
        return f"{policy.dtype}, {len(policy.deny)} of {len(policy.modules)} modules in float32"
    if policy.dtype == "float32":
        return "float32" if policy.enabled else "float32, off"
    return f"{policy.dtype}, plain O1"


def measure(side: Side, other: Side, quick: bool) -> Ratio:
    """Time two ways."""
    short = side.workload.pairs > 100
    pairs = 12 if quick or not short else 40
    try:
        return paired(
            side.step,
            other.step,
            pairs=pairs,
            repeat=50 if short else 2,
            warmup=1,
            before_a=side.begin,
            before_b=other.begin,
        )
    finally:
        ampx.shutdown()


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Tune each model, and time it.

    Args:
        quick: Fewer pairs.
        advance: Called after each workload, for a progress bar.
    """
    rows: list[dict[str, object]] = []
    for workload in EACH_MODEL:
        policy = tuned(workload)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "ampx.toml")
            policy.write(file)
            ours = Side(workload, {"policy": str(file)})
            others = {"float32, without ampx": Side(workload, None)}
            if not policy.enabled:
                others["float32, gradients checked"] = Side(workload, {"dtype": "float32"})
            if policy.deny or policy.dtype == "float32":
                others["plain O1"] = Side(workload, {"dtype": DTYPE})
            if not policy.deny:  # nothing is put on the model: both train the same, where it lies in memory
                for other in others.values():
                    other.model, other.raw = ours.model, ours.raw
            for name, other in others.items():
                start = copy.deepcopy((ours.model.state_dict(), ours.raw.state_dict()))
                ratio = measure(ours, other, quick)
                ours.model.load_state_dict(start[0])
                ours.raw.load_state_dict(start[1])
                rows.append({"against": name, "workload": workload.name, "tuned": described(policy), **ratio.to_json()})
        advance()
    return rows


STEPS = len(EACH_MODEL)
"""How often `run` advances."""


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for row in run("--quick" in sys.argv):
        spread = f"[{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        print(f"{row['workload']:58} {row['tuned']:36} / {row['against']:21} {row['ratio']:.3f} {spread}")
