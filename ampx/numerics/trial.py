"""One run of an unedited script in a process of its own, which says how it is to run and what was seen of it."""

from __future__ import annotations

import functools
import math
import os
import pickle
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ampx.errors import InvalidOptionError, TrialError
from ampx.run import RunSettings, SampledGradient
from ampx.run.page import by_optimizer
from ampx.run.program import WRONG_OPTIONS, Program, misplaced
from ampx.run.recorder import SAMPLED_STEPS, names_by_group

from .compare import ModuleError, module_errors, unscaled
from .probe import Reading, Watching
from .template import Imported, template_of

_CHILD: Final = "ampx.numerics.child"
# Exit codes of a child whose script `ampx run` refuses, or whose options it cannot honour.
REFUSED: Final = 3
MISUSED: Final = 2
# Names the folder in which a trial may keep what it compiles for the next one, if its memory is not to be measured.
COMPILED: Final = "AMPX_COMPILED"
TIMED_STEPS: Final = SAMPLED_STEPS + 1  # of fewer, none is timed


def warm_up_of(steps: int, most: int) -> int:
    """Return how many of so many steps are not to be timed: a quarter, and those in which operations are counted.

    It is 0 where nothing would be left, and nothing is timed.
    """
    return min(most, max(steps // 4, SAMPLED_STEPS)) if steps > SAMPLED_STEPS else 0


class InvalidTrialError(TrialError, InvalidOptionError):
    """There is no such script, or an option cannot be honoured in one dtype; in another it may be."""


@dataclass(frozen=True)
class Trial:
    """How a script is to run.

    Attributes:
        program: The script and its arguments.
        settings: In what, as `ampx run` takes it; `dtype="float32"` casts nothing.
        framework: The only framework to automate, or None.
        seed: What random numbers of Python, NumPy and the framework start from.
        steps: End the script after so many steps; None to run it to its end.
        warm_up: So many steps are not timed: they compile, allocate and fill caches, and operations are counted in the
            first of them.
        block: So many steps are timed together, and the device is waited for at their end.
        watched: Steps, from 1, in which modules are watched.
        watching: What is looked at there.
        operations_in: The steps of these in which operations are looked at; empty for the last.
        float32: Steps, from 2, in which casting is off.
        forced: By pattern of names of modules, the dtype to force them into during the whole run.
        gradients: Steps in which the gradients of parameters are sampled.
        stop_at_fault: End after the first step with a loss that is not finite, in which the loss scale collapses, or
            that is skipped at a scale of 1.
        shares_compiled: What is compiled is kept for other trials of this process; its memory is not comparable then.
            So it is where steps are watched.
        may_raise: An exception of the script is part of what is seen, once it has an optimizer.
        imported: What a former run of the script has imported, with which this one may start.
    """

    program: Program
    settings: RunSettings
    framework: str | None = None
    seed: int = 0
    steps: int | None = None
    warm_up: int = 0
    block: int = 1
    watched: tuple[int, ...] = ()
    watching: Watching = field(default_factory=Watching)
    operations_in: tuple[int, ...] = ()
    float32: tuple[int, ...] = ()
    forced: Mapping[str, str] = field(default_factory=dict)
    gradients: tuple[int, ...] = ()
    stop_at_fault: bool = False
    shares_compiled: bool = False
    may_raise: bool = False
    imported: Imported | None = None


@dataclass(frozen=True)
class Outcome:
    """What was seen of a script.

    Attributes:
        run: What `ampx run --report` writes of it.
        losses: By step, the sum of the losses that it ran backward for, not scaled; None where the backend reported
            none for that step.
        times: Seconds a step of each block after the warm-up, by the wall clock.
        peak_host: Most memory that the process held, in bytes; on Linux without files that it maps, such as libraries.
        peak_device: The same on the accelerator; None without one, or where nothing counts.
        readings: By step, what the watched modules computed.
        gradients: By step in which they were sampled, what was trained, where the backend can tell.
        fault: `(step, what)` at which a run that was to stop at a fault did so: "loss", "scale" or "skipped"; None for
            none.
        watches: The backend can watch modules.
        native: The low-precision dtypes that the device computes in hardware, whatever `"auto"` chooses there.
        prepare_finds_modules: As in `ampx.Backend`.
        ended_early: The script was ended after the steps that were asked for.
        notes: What could not be observed.
        mistakes: What the script itself does wrong, with its lines.
        versions: Of Python, ampx and the framework.
        raised: The exception that ended the script in the step after the last, and the line of the script that it went
            through: `("ValueError: why", "train.py:12")`; None for none.
        rates: By step, the learning rates of the optimizer that made it; none where the backend does not know them.
        losses_of: By step, the name of the optimizer that made it; None where it is not known.
        imported: What another run may start with; None where no framework trained.
    """

    run: Mapping[str, Any]
    losses: tuple[float | None, ...] = ()
    times: tuple[float, ...] = ()
    peak_host: int | None = None
    peak_device: int | None = None
    readings: Mapping[int, tuple[Reading, ...]] = field(default_factory=dict)
    gradients: Mapping[int, tuple[SampledGradient, ...]] = field(default_factory=dict)
    fault: tuple[int, str] | None = None
    watches: bool = False
    native: tuple[str, ...] = ()
    prepare_finds_modules: bool = False
    ended_early: bool = False
    notes: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    raised: tuple[str, str] | None = None
    rates: tuple[tuple[float, ...], ...] = ()
    losses_of: tuple[str | None, ...] = ()
    imported: Imported | None = None

    @property
    def steps(self) -> int:
        """Steps that the script asked for."""
        return int(self.run["steps"])

    @property
    def dtype(self) -> str:
        """What was computed in."""
        return str(self.run["dtype"])

    @property
    def seconds_a_step(self) -> float | None:
        """Median of the blocks' seconds a step; None where none was timed."""
        return statistics.median(self.times) if self.times else None

    @property
    def peak_memory(self) -> int | None:
        """Peak on the accelerator where there is one, else of the process."""
        return self.peak_host if self.peak_device is None else self.peak_device

    @property
    def skipped(self) -> list[int]:
        """Numbers of the skipped steps, of all optimizers."""
        own = ((turns, step) for turns, optimizer in self._by_turns() for step in optimizer["skipped"])
        return sorted({turns[step - 1] if step <= len(turns) else step for turns, step in own})

    def _by_turns(self) -> list[tuple[list[int], Mapping[str, Any]]]:
        """Return each optimizer with the steps of the script that are its own, which it numbers; without if alone."""
        optimizers = self.run["optimizers"]
        if len(optimizers) == 1:
            return [([], each) for each in optimizers]
        name_of = names_by_group(optimizers)
        steps = {name: [at for at, turn in enumerate(self.losses_of, 1) if turn == name] for name in name_of.values()}
        return [(steps[name_of[each["group"]]], each) for each in optimizers]

    @property
    def last_scale(self) -> float | None:
        """Loss scale of the first optimizer at the end; None without an optimizer."""
        for optimizer in self.run["optimizers"]:
            scales = optimizer["scales"]
            return float(scales[-1][1] if scales else optimizer["initial_scale"])
        return None

    def curves(self) -> list[list[float | None]]:
        """Return the losses of each optimizer's steps; of an optimizer that steps on another's loss there are none."""
        curves = by_optimizer(range(len(self.losses)), self.losses, self.losses_of)
        return [[loss for _, loss in points] for points in curves.values()]

    def scale_at(self, step: int) -> float:
        """Return the loss scale of a step, of the optimizer that made it; of the first where that is not known."""
        by_turns = self._by_turns()
        for turns, optimizer in [each for each in by_turns if step in each[0]] or by_turns[:1]:
            own = turns.index(step) + 1 if step in turns else step
            moved = [scale for after, scale in optimizer["scales"] if after < own]
            return float(moved[-1] if moved else optimizer["initial_scale"])
        return 1.0

    def unscaled_readings(self, step: int, exact: Sequence[Reading] = ()) -> list[Reading]:
        """Return what was read in a step, gradients divided by its loss scale; for `exact` see `unscaled`."""
        return unscaled(self.readings.get(step, ()), self.scale_at(step), exact)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON types, without the readings."""
        return {
            **{name: self.run[name] for name in ("framework", "device", "dtype", "level", "reason", "steps")},
            "skipped": self.skipped,
            "scale": self.last_scale,
            "losses": [loss if loss is None or math.isfinite(loss) else str(loss) for loss in self.losses],
            "losses_of": list(self.losses_of),
            "seconds_a_step": list(self.times),
            "peak_host": self.peak_host,
            "peak_device": self.peak_device,
            "notes": list(self.notes),
        }


def step_errors(reference: Outcome, low: Outcome, step: int, dtype: str) -> tuple[ModuleError, ...]:
    """Compare what modules computed in a step with what they computed in float32."""
    exact = reference.unscaled_readings(step)
    return module_errors(exact, low.unscaled_readings(step, exact), dtype)


# A training diverges whose loss, or what a module makes of a batch of the same size, grows so many times larger.
GROWN: Final = 10.0
# What a script does whose losses differ from run to run, whatever the precision.
DIFFERS: Final = (
    "draws other numbers in every run, or goes on from what the run before has written, such as a checkpoint"
)


def not_repeatable(program: Program) -> str:
    """Return what to say of a script whose losses differ from run to run, whatever the precision."""
    return (
        f"Two runs of {program.name} in float32 have different losses: it {DIFFERS}. Seed all that it draws, or have "
        f"it start anew, by an option say; then ask again."
    )


def how_to_name(outcome: Outcome) -> str:
    """Return what to do to a script whose modules have no names; no final stop."""
    if outcome.run["framework"] == "jax":
        return (
            "Write `with jax.named_scope('encoder'):` around the parts of the model, or make them modules of flax or "
            "layers of equinox.nn, which have names"
        )
    return "Make the parts of the model modules of the framework"


@functools.cache
def _compiled() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that exists until this process ends."""
    return tempfile.TemporaryDirectory(prefix="ampx-trials-compiled-")


def _running(trial: Trial) -> str:
    """Return the command that runs the script once, where its output can be seen."""
    program = trial.program
    module = ("-m",) if program.is_module else ()
    return shlex.join(("ampx", "run", "--dtype", trial.settings.dtype, *module, program.name, *program.arguments))


def _refusal(output: str) -> str:
    """Return why `ampx run` refused the script, as a child writes it last; empty where the script ended so itself."""
    _, mark, refusal = f"\n{output}".rpartition("\nampx: ")
    return refusal if mark else ""


def _failure(trial: Trial, code: int, text: str) -> TrialError:
    """Return why a child ended with an exit code, and printed this."""
    program = trial.program
    refusal = _refusal(text) if code in (MISUSED, REFUSED) else ""
    if refusal and code == MISUSED:
        return InvalidTrialError(refusal)
    if refusal:
        return TrialError(f"{program.name} in {trial.settings.dtype} was refused: {refusal}")
    hint = misplaced(program) if code == WRONG_OPTIONS else ""
    return TrialError(
        f"{program.name} in {trial.settings.dtype} ended with exit code {code}; accepted: a script that trains to its "
        f"end and reads nothing from the standard input. Its own options follow its name. Mend what this shows: "
        f"`{_running(trial)}`." + (f" {hint}" if hint else "") + (f" Its last words:\n{text[-2000:]}" if text else "")
    )


def _run_anew(request: Path, noise: Path | None, environment: Mapping[str, str]) -> int:
    """Run what a file asks for in a new Python, which prints to another file, if any; return its exit code."""
    command = [sys.executable, "-m", _CHILD, str(request)]
    with ExitStack() as stack:
        output = None if noise is None else stack.enter_context(noise.open("wb"))
        # A script that asks a question fails here: the question would not be seen, and each run asks it.
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        return subprocess.run(command, check=False, env=environment, **streams).returncode


def run_trial(trial: Trial, *, quiet: bool = True) -> Outcome:
    """Run a script as asked, in a process of its own.

    Args:
        trial: How.
        quiet: What the script prints is not shown.

    Raises:
        InvalidOptionError: The script is the standard input, which a second run could not read again.
        TrialError: The script failed, was refused, trained nothing, or an option cannot be honoured.
    """
    if trial.program.name == "-":
        raise InvalidOptionError(
            "the script '-' is the standard input, which can be read once, and this command runs a script several "
            "times; accepted: a Python file, or -m and the name of a module. Write the script to a file."
        )
    with tempfile.TemporaryDirectory(prefix="ampx-trial-") as folder:
        request, answer, noise = (Path(folder, name) for name in ("request", "answer", "output.txt"))
        request.write_bytes(pickle.dumps((trial, answer)))
        environment = {**os.environ, "PYTHONHASHSEED": "0", COMPILED: _compiled().name}
        imported = trial.imported if quiet else None
        template = None if imported is None else template_of(imported, environment)
        if template is None:
            code = _run_anew(request, noise if quiet else None, environment)
        else:
            noise.touch()
            code = template.run(request, noise)
        text = noise.read_text(encoding="utf-8", errors="replace").strip() if quiet else ""
        if code or not answer.exists():
            raise _failure(trial, code, text)
        outcome: Outcome = pickle.loads(answer.read_bytes())
    if outcome.steps == 0 and outcome.raised is None:
        notes = " ".join(outcome.run["notes"])
        raise TrialError(
            f"{trial.program.name} made no step that ampx saw; accepted: a script that trains with a framework that "
            f"`ampx run` automates. Try `{_running(trial)}`. {notes}".rstrip()
        )
    if trial.settings.dtype == "float32" and outcome.dtype != "float32":
        raise TrialError(
            f"{trial.program.name} was to run in float32 and computed in {outcome.dtype}; accepted: a script that "
            f"leaves mixed precision to `ampx run`. Switch off its own. "
            f"{' '.join((*outcome.run['notes'], *outcome.mistakes))}".rstrip()
        )
    return outcome
