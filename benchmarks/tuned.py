"""A step under the policy that `ampx.tune` writes, against float32 and plain O1: what is the same in all frameworks.

`tune` is called in code, on the model that is trained, and the policy file that it would write is read by `init`, as a
user's is. Float32 is the loop without ampx, which looks at no gradient; a policy that is off (`enabled = false`) looks
at none, either. Plain O1 is bfloat16 by the op lists. A policy that casts by the op lists alone is plain O1, and is not
compared with it. How a framework trains is in `tuned_torch.py`, `tuned_jax.py`, ….
"""

from __future__ import annotations

import abc
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from _paired import Ratio, limited, paired

import ampx

DTYPE = "bfloat16"
Settings = dict[str, Any]


class Side(abc.ABC):
    """One way to train a workload; its session starts anew before every timing: a framework has one at a time.

    Attributes:
        framework: Name of the framework.
        untimed: Steps of a session that are not timed: what is made or decided in its first steps.
        settings: Arguments of `init`; None trains without ampx.
    """

    framework: ClassVar[str]
    untimed: ClassVar[int] = 2

    def __init__(self, settings: Settings | None) -> None:
        self.settings = settings

    def begin(self) -> None:
        """Start the session, and do some steps."""
        ampx.shutdown()
        settings = self.settings
        self.start(None if settings is None else ampx.init(self.framework, device="cpu", **settings))
        for _ in range(self.untimed):
            self.step()

    @abc.abstractmethod
    def start(self, amp: ampx.Amp | None) -> None:
        """Make ready to train in a session, or without one."""

    @abc.abstractmethod
    def step(self) -> object:
        """Train on the batch, and wait until that is done."""

    def join(self, other: Side) -> None:
        """Train the model of another side, where it lies in memory, if the framework trains in place."""


@dataclass(frozen=True)
class Task:
    """A workload as a framework trains it.

    Attributes:
        name: Its name in the table.
        tune: Calls `ampx.tune` for its model.
        side: Makes a way to train it.
        pairs: Pairs of timings of a full run.
        repeat: Steps in one timing.
    """

    name: str
    tune: Callable[[], ampx.TunedPolicy]
    side: Callable[[Settings | None], Side]
    pairs: int = 12
    repeat: int = 2


def described(policy: ampx.TunedPolicy) -> str:
    """Return a policy in a few words."""
    if policy.deny:
        return f"{policy.dtype}, {len(policy.deny)} of {len(policy.modules)} modules in float32"
    if policy.dtype == "float32":
        return "float32" if policy.enabled else "float32, off"
    return f"{policy.dtype}, plain O1"


def measure(task: Task, quick: bool) -> list[dict[str, object]]:
    """Tune a workload, and time it; a row with `left_out` where the device does not compute the dtype."""
    ampx.shutdown()
    policy = task.tune()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ampx.toml")
        policy.write(file)
        others: dict[str, Settings | None] = {"float32, without ampx": None}
        if not policy.enabled:
            others["float32, gradients checked"] = {"dtype": "float32"}
        if policy.deny or policy.dtype == "float32":
            others["plain O1"] = {"dtype": DTYPE}
        ours = task.side({"policy": str(file)})
        facts = {"workload": task.name, "tuned": described(policy)}
        rows: list[dict[str, object]] = []
        for name, settings in others.items():
            try:
                rows.append({"against": name, **facts, **_ratio(task, ours, settings, policy, quick).to_json()})
            except ampx.UnsupportedDtypeError as error:
                return [{**facts, "left_out": str(error)}]
            finally:
                ampx.shutdown()
        return rows


def _ratio(task: Task, ours: Side, settings: Settings | None, policy: ampx.TunedPolicy, quick: bool) -> Ratio:
    other = task.side(settings)
    if not policy.deny:  # nothing is put on the model: both train the same
        other.join(ours)
    return paired(
        ours.step,
        other.step,
        pairs=min(task.pairs, 6) if quick else task.pairs,
        repeat=task.repeat,
        warmup=1,
        before_a=ours.begin,
        before_b=other.begin,
    )


def measure_all(tasks: Sequence[Task], quick: bool, advance: Callable[[], object]) -> list[dict[str, object]]:
    """Tune and time each workload; quickly, the first two.

    Args:
        tasks: The workloads: first one that is small, then one that is large.
        quick: Fewer workloads and pairs.
        advance: Called after each workload, for a progress bar.
    """
    rows: list[dict[str, object]] = []
    for task in limited(tasks[: 2 if quick else None]):
        rows += measure(task, quick)
        advance()
    return rows


def main(run: Callable[[bool], list[dict[str, Any]]]) -> None:
    """Print the rows of one framework's `run`."""
    for row in run("--quick" in sys.argv):
        named = f"{row['workload']:58} {row['tuned']:36}"
        if "left_out" in row:
            print(f"{named} left out: {row['left_out']}")
            continue
        spread = f"[{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        times = f"{1e3 * row['median_a']:9.3f} ms  {1e3 * row['median_b']:9.3f} ms"
        print(f"{named} / {row['against']:26} {times}  {row['ratio']:.3f} {spread}", flush=True)
