"""`ampx tune`: what is said of runs of a script, which are made up here."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ampx
from ampx.numerics.compare import bound
from ampx.numerics.probe import Reading, Stats
from ampx.numerics.report import exclusion_lines
from ampx.numerics.trial import Outcome
from ampx.numerics.tune import Choice, TunedPolicy
from ampx.numerics.tune_script import check_options, exclusions, tune_script
from ampx.numerics.tune_search import most_runs
from ampx.policy import PolicyFile
from ampx.run import RunSettings
from ampx.run.program import Program

LAYERS = [f"layer{number}" for number in range(20)]


class Pretended:
    """Stands for a script whose losses agree with float32's only where some modules are kept in it."""

    def __init__(self, sensitive: tuple[str, ...], speed: float = 2.0, only_gradients: bool = False):
        self.sensitive, self.speed, self.only_gradients = sensitive, speed, only_gradients
        self.runs = 0

    def __call__(self, trial):
        self.runs += 1
        dtype = trial.settings.dtype
        low = dtype != "float32" or trial.forced
        patterns = [entry.removeprefix("module:") for entry in trial.settings.deny]
        patterns += [pattern for pattern, name in trial.forced.items() if name == "float32"]
        kept = {name for name in LAYERS if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
        fails = low and not set(self.sensitive) <= kept
        losses = [1.0, 0.5] if not fails or self.only_gradients else [1.0, 5.0]
        values = [(name, direction) for direction in ("forward", "backward") for name in [*LAYERS, ""]]
        readings = {step: tuple(self.reading(*value, low, kept) for value in values) for step in trial.watched}
        run = {"framework": "toy", "device": "cpu", "dtype": "bfloat16" if dtype == "auto" else dtype, "level": "O1"}
        run |= {"reason": "made up", "steps": 2, "optimizers": [], "meters": []}
        seconds = 1.0 / self.speed if low else 1.0
        return Outcome(run, tuple(losses), (seconds,), readings=readings, watches=True)

    def reading(self, name, direction, low, kept):
        wrong = direction == ("backward" if self.only_gradients else "forward")
        off = 0.5 if low and wrong and name in set(self.sensitive) - kept else 0.0
        sample = np.ones(4, np.float32) * (1 + off)
        dtype = "bfloat16" if low and name not in kept else "float32"
        return Reading(
            name, "Linear", "", direction, 0, dtype, Stats(4), sample=sample, seconds=0.001 / (1 + bool(low))
        )


def tuned(script, **options):
    options = {"steps": 2, "tolerance": 0.01, "repeats": 0, **options}
    return tune_script(Program("a.py"), RunSettings("bfloat16"), run=script, **options)


def into(said):
    """Return what adds each text that is told to a list."""
    return lambda text, left: said.append(text)


@pytest.mark.parametrize("sensitive", [(), ("layer3",), ("layer2", "layer7", "layer19")])
def test_exactly_the_modules_that_need_it_stay_in_float32_after_few_runs(sensitive):
    script = Pretended(sensitive)
    policy, result = tuned(script)
    assert [choice.entry for choice in policy.deny] == [f"module:{name}" for name in sorted(sensitive)]
    assert script.runs <= most_runs(len(sensitive), len(LAYERS))
    assert result["verdict"].startswith(f"bfloat16, with {len(sensitive)} of 21 modules in float32: losses of 2 steps")


def test_a_schedule_that_decides_otherwise_is_said_beside_what_is_kept_for_it():
    class Scheduled(Pretended):
        def __call__(self, trial):
            low = trial.settings.dtype != "float32"
            return replace(super().__call__(trial), rates=((0.1,), (0.01 if low else 0.1,)))

    _, result = tuned(Scheduled(("layer3",)))
    said = "From step 2 of a.py on the learning rate is 0.01, and in float32 0.1: the script's schedule may "
    assert [note for note in result["notes"] if "learning rate" in note] == [
        f"{said}decide by a number that was computed in bfloat16."
    ]
    assert not any("learning rate" in note for note in tuned(Pretended(("layer3",)))[1]["notes"])


def test_where_losses_agree_it_is_not_said_that_they_differ():
    class Incurable(Pretended):
        def reading(self, name, direction, low, kept):
            return super().reading(name, direction, low, frozenset())

        def __call__(self, trial):
            return replace(super().__call__(trial), losses=(1.0, 0.5))

    _, result = tuned(Incurable(("layer3",)))
    assert result["verdict"].startswith(
        "Stay in float32: in bfloat16 the output of 'layer3' is 50 % from float32's (tol"
    )


FAR = "without this entry the loss is 400 % from float32's (tolerance 1 %)"


def test_each_entry_says_what_happens_without_it():
    policy, _ = tuned(Pretended(("layer2", "layer7")))
    assert [choice.reason for choice in policy.deny] == [f"relative error of 0.5 in bfloat16 in step 1; {FAR}"] * 2


def test_a_search_that_was_interrupted_goes_on_and_another_one_begins_anew(tmp_path):
    journal, sensitive = tmp_path / "ampx.toml.search", ("layer2", "layer7", "layer19")
    whole, said = Pretended(sensitive), []
    answer, _ = tuned(whole)

    class Interrupted(Pretended):
        def __call__(self, trial):
            if self.runs == 12:
                raise KeyboardInterrupt
            return super().__call__(trial)

    with pytest.raises(KeyboardInterrupt):
        tuned(Interrupted(sensitive), journal=journal)
    kept = journal.read_text()
    again = Pretended(sensitive)
    assert tuned(again, journal=journal, progress=into(said))[0].deny == answer.deny
    assert again.runs < whole.runs - 4
    assert not journal.exists()
    assert [line for line in said if "interrupted" in line] == [
        "a.py: 6 runs of a search that was interrupted are known …"
    ]
    for other in ({"seed": 1}, {"steps": 1}, {"tolerance": 0.02}):
        journal.write_text(kept)
        anew, said = Pretended(sensitive), []
        tuned(anew, journal=journal, progress=into(said), **other)
        assert not any("interrupted" in line for line in said)
        assert anew.runs == whole.runs
    journal.write_text(kept[:-7])  # the power failed while it was written
    assert tuned(Pretended(sensitive), journal=journal)[0].deny == answer.deny


@pytest.mark.parametrize("folder", [False, True])
def test_a_search_goes_on_from_the_same_checkpoint_only(tmp_path, folder):
    sensitive, journal, checkpoint = ("layer2", "layer7"), tmp_path / "ampx.toml.search", tmp_path / "saved"
    written = checkpoint / "weights" if folder else checkpoint
    written.parent.mkdir(exist_ok=True)

    def runs_after(before, now):
        """Return how many runs a search takes from one checkpoint after another was interrupted."""

        def interrupted(trial):
            if script.runs == 12:
                raise KeyboardInterrupt
            return script(trial)

        script = Pretended(sensitive)
        written.write_text(before)
        with pytest.raises(KeyboardInterrupt):
            tuned(interrupted, journal=journal, checkpoint=checkpoint)
        written.write_text(now)
        script = Pretended(sensitive)
        tuned(script, journal=journal, checkpoint=checkpoint)
        return script.runs

    whole = Pretended(sensitive)
    tuned(whole)
    assert runs_after("one", "one") < whole.runs
    assert runs_after("one", "two") == whole.runs


def test_progress_says_how_many_runs_follow_at_most():
    said = []
    tuned(Pretended(("layer2",)), progress=into(said))
    assert said[0] == "a.py: run 1, float32, watched …"
    at_most = "a.py: run 2 (at most 18 more, 0 s, if 1 module is needed), "
    assert said[1] == f"{at_most}float32 rounded as bfloat16, watched …"
    assert said[3] == "a.py: run 4 (at most 16 more, 0 s, if 1 module is needed), bfloat16, watched …"
    assert len(said) <= 20


def test_modules_whose_gradients_are_wrong_stay_in_float32_though_losses_agree():
    policy, _ = tuned(Pretended(("layer3",), only_gradients=True))
    assert [choice.entry for choice in policy.deny] == ["module:layer3"]


class Unnamed(Pretended):
    """Stands for a script in which nothing has a name."""

    def __init__(self, framework: str, watches: bool):
        super().__init__(())
        self.framework, self.watches = framework, watches

    def __call__(self, trial):
        outcome = super().__call__(trial)
        run = {**outcome.run, "framework": self.framework, "notes": ["A note."]}
        return replace(outcome, run=run, readings={1: ()}, watches=self.watches)


@pytest.mark.parametrize(
    ("framework", "watches", "message"),
    [
        (
            "jax",
            True,
            r"no named module.*jax\.named_scope.*flax.*`ampx compare` and `ampx diagnose` need no names\. A note",
        ),
        ("toy", True, r"no named module.*modules of the framework"),
        ("toy", False, "backend watches"),
    ],
)
def test_a_script_without_modules_is_refused_with_how_to_name_them(framework, watches, message):
    with pytest.raises(ampx.TrialError, match=message):
        tuned(Unnamed(framework, watches))


class Operating(Unnamed):
    """Stands for a script in which nothing but operations has a name."""

    def __init__(self, sensitive=()):
        super().__init__("jax", True)
        self.sensitive = sensitive

    def __call__(self, trial):
        outcome = super().__call__(trial)
        if not trial.watching.operations:
            return outcome
        reading = Reading("", "", "dot_general", "forward", 0, "bfloat16", Stats(4), Stats(4), None, "")
        return replace(outcome, readings={1: (reading,) * 3})


def test_where_no_module_has_a_name_losses_decide_behind_as_many_roundings_as_there_are_operations():
    policy, result = tuned(Operating(), tolerance=None)
    assert (policy.dtype, policy.deny, policy.modules) == ("bfloat16", (), ())
    assert policy.tolerance == bound("bfloat16", 3)
    assert result["verdict"].startswith(
        "bfloat16, with nothing in float32: losses of 2 steps agree with float32's within "
    )
    assert "the rounding noise of this script (6.2 %)" in result["verdict"]
    assert "jax.named_scope" in result["notes"][-1]


def test_what_no_operation_cures_needs_names():
    message = (
        r"in bfloat16 losses differ from float32's by more than the tolerance \(1 %\).*no named module.*named_scope"
    )
    with pytest.raises(ampx.TrialError, match=message):
        tuned(Operating(("nobody",)))


def between(*operations):
    """Return readings of operations between modules: their names, what they make, and of what."""
    return [
        Reading("", "", name, "forward", 0, "bfloat16", value, inputs, None, "") for name, value, inputs in operations
    ]


def among(readings, *operations):
    """Return readings with operations behind the first module: before it, and behind the last backward, is no step."""
    return (readings[0], *operations, *readings[1:])


class OutsideOfModules(Pretended):
    """Stands for a script in which `mul` between the modules overflows; nobody takes `secret` in a list."""

    def __init__(self):
        super().__init__(("nobody",))

    def __call__(self, trial):
        if "secret" in trial.settings.deny:
            raise ampx.TrialError("unknown operation")
        self.sensitive = () if "mul" in trial.settings.deny else ("nobody",)
        outcome = super().__call__(trial)
        if not trial.watching.operations:
            return outcome
        finite, broken = Stats(4), Stats(4, nonfinite=1)
        operations = between(
            ("add", finite, finite), ("secret", broken, finite), ("mul", broken, finite), ("sub", broken, broken)
        )
        return replace(outcome, readings={step: among(own, *operations) for step, own in outcome.readings.items()})


def test_what_fails_outside_of_modules_is_cured_by_an_operation():
    policy, result = tuned(OutsideOfModules())
    assert [choice.entry for choice in policy.deny] == ["mul"]
    assert result["verdict"].startswith("bfloat16, with 0 of 21 modules and 1 operation in float32: ")
    assert policy.file.deny == ("mul",)


class Flushing(OutsideOfModules):
    """Stands for a script in which a `softmax` outside of modules flushes what a `log` takes: its loss is infinite."""

    def __call__(self, trial):
        self.sensitive = () if "softmax" in trial.settings.deny else ("nobody",)
        outcome = Pretended.__call__(self, trial)
        outcome = replace(outcome, losses=tuple(math.inf if loss == 5.0 else loss for loss in outcome.losses))
        if not trial.watching.operations:
            return outcome
        whole, flushed = Stats(4), Stats(4, zeros=1)
        broken = Stats(4, nonfinite=1)
        operations = between(("view", whole, whole), ("_softmax", flushed, whole), ("log", broken, flushed))
        (step,) = outcome.readings
        forward = [entry for entry in outcome.readings[step] if entry.direction == "forward"]
        return replace(outcome, readings={step: (*forward, *operations)})


def test_what_flushes_in_front_of_an_operation_that_fails_is_asked_and_no_module_is_blamed():
    script = Flushing()
    policy, _ = tuned(script)
    assert [(choice.entry, choice.reason) for choice in policy.deny] == [
        ("softmax", "fails in bfloat16, outside of modules; without this entry the loss is not finite")
    ]
    # float32, thrice rounded, bfloat16, float32 again, operations, log, softmax, and what fails first without it
    assert script.runs == 10


def test_what_flushes_elsewhere_is_not_asked_for_an_operation_that_receives_no_zero():
    """`relu` makes zeros, and what `lgamma` overflows of has none."""

    class Elsewhere(Flushing):
        denied = frozenset()

        def __call__(self, trial):
            self.denied |= {*trial.settings.deny}
            outcome = super().__call__(trial)
            renamed = {"_softmax": "relu", "log": "lgamma"}
            return replace(
                outcome,
                readings={
                    step: tuple(
                        replace(
                            entry,
                            operation=renamed.get(entry.operation, entry.operation),
                            inputs=Stats(4) if entry.operation == "log" else entry.inputs,
                        )
                        for entry in own
                    )
                    for step, own in outcome.readings.items()
                },
            )

    script = Elsewhere()
    tuned(script)
    assert "lgamma" in script.denied
    assert "relu" not in script.denied


class Breaking(Pretended):
    """Stands for a script in which `layer3` makes infinities by `mul`, from the second step on where `late`."""

    def __init__(self, late: bool):
        super().__init__(("layer3",))
        self.late = late

    def __call__(self, trial):
        self.sensitive = () if "mul" in trial.settings.deny else ("layer3",)
        outcome = super().__call__(trial)
        finite, broken = Stats(4), Stats(4, nonfinite=1)
        readings = {}
        for step, entries in outcome.readings.items():
            fails = step > self.late and outcome.losses[-1] == 5.0
            stats = {"layer3": broken} if fails else {}
            readings[step] = tuple(
                replace(entry, value=stats.get(entry.module, finite)) if entry.direction == "forward" else entry
                for entry in entries
            )
            if trial.watching.operations and fails:
                operation = Reading("layer3", "Linear", "mul", "forward", 0, "bfloat16", broken, finite, None, "")
                readings[step] = among(readings[step], operation)
        return replace(outcome, readings=readings)


def test_no_operation_is_blamed_before_modules_where_these_were_not_compared_in_the_step_that_fails():
    class OfStepFive(Pretended):
        def __call__(self, trial):
            outcome = super().__call__(trial)
            fails = trial.settings.dtype != "float32" and "module:layer3" not in trial.settings.deny
            losses = (1.0, 0.9, 0.8, 0.7, math.inf if fails else 0.6)[: trial.steps]
            mul = between(("mul", Stats(4, nonfinite=1) if fails else Stats(4), Stats(4)))
            mul = [replace(entry, module="layer3") for entry in mul] if trial.watching.operations else []
            readings = {step: among(own, *mul) for step, own in outcome.readings.items()}
            return replace(outcome, losses=losses, readings=readings)

    policy, _ = tuned(OfStepFive(()), steps=5)
    assert [choice.entry for choice in policy.deny] == ["module:layer3"]


class Late(Pretended):
    """Stands for a script in which `mul` behind `layer3` overflows in the second step, and breaks `layer4`."""

    def __init__(self):
        super().__init__(())

    def __call__(self, trial):
        outcome = super().__call__(trial)
        kept = {"mul", "module:layer3"}.intersection(trial.settings.deny)
        if trial.settings.dtype == "float32" or (kept and not trial.watching.operations):
            wide = between(("mul", Stats(4, largest=9e4), Stats(4)))
            return replace(outcome, readings={step: self.among(wide, own) for step, own in outcome.readings.items()})
        broken = Stats(4, nonfinite=1)
        mul = between(("mul", Stats(4, largest=9e4) if kept else broken, Stats(4)))
        mul = [replace(entry, dtype="float32") for entry in mul] if kept else mul
        second = [
            replace(entry, value=broken) if entry.module == "layer4" and not kept else entry
            for entry in outcome.readings.get(2, ())
        ]
        readings = {**outcome.readings, **({2: self.among(mul, second)} if second else {})}
        return replace(outcome, losses=(1.0, 0.5 if kept else math.inf)[: trial.steps], readings=readings)

    def among(self, operations, readings):
        return (*readings[:4], *operations, *readings[4:])


def test_what_fails_is_looked_for_in_the_step_that_fails():
    policy, _ = tuned(Late())
    assert [(choice.entry, choice.reason) for choice in policy.deny] == [
        ("mul", "fails in bfloat16, outside of modules; without this entry the loss is not finite")
    ]


class Scaled(Pretended):
    """Stands for a script whose gradients overflow at a loss scale above 64, unless layers stay in float32."""

    def __call__(self, trial):
        outcome = super().__call__(trial)
        low = trial.settings.dtype != "float32"
        skips = low and trial.settings.loss_scale > 64 and len(trial.settings.deny) == 1
        optimizer = {"group": 0, "skipped": [1] if skips else [], "scales": [], "initial_scale": 1.0}
        run = {**outcome.run, "optimizers": [optimizer]}
        return replace(outcome, run=run)


@pytest.mark.parametrize(
    ("script", "dtype"),
    [
        (lambda: Pretended(("layer2", "layer7")), "bfloat16"),
        (lambda: Late(), "bfloat16"),
        (lambda: OutsideOfModules(), "bfloat16"),
        (lambda: Scaled(("layer2", "layer7")), "float16"),
    ],
    ids=["modules", "in a later step", "outside of modules", "loss scale falls"],
)
def test_a_search_that_was_interrupted_makes_the_decisions_of_one_that_was_not(tmp_path, script, dtype):
    def searched(trials, ends_before=None):
        """Return the answer of a search, and note its trials."""

        def run(trial):
            if len(trials) == ends_before:
                raise KeyboardInterrupt
            trials.append(trial)
            return pretended(trial)

        pretended, journal = script(), tmp_path / "ampx.toml.search"
        options = {"steps": 2, "tolerance": 0.01, "repeats": 0, "journal": journal}
        policy, report = tune_script(Program("a.py"), RunSettings(dtype), run=run, **options)
        report["origin"].pop("date")  # a minute may end between two searches
        return policy, report

    whole = []
    answer = searched(whole)
    for runs in range(1, len(whole)):
        with pytest.raises(KeyboardInterrupt):
            searched([], ends_before=runs)
        resumed = []
        assert searched(resumed) == answer
        assert resumed[runs - len(whole) :] == whole[runs:]


def test_operations_that_would_do_in_place_of_a_module_are_named():
    policy, _ = tuned(Breaking(late=False))
    assert [(choice.entry, choice.reason) for choice in policy.deny] == [
        ("module:layer3", f"its output is not finite in bfloat16 in step 1; {FAR}")
    ]
    assert policy.operations == ("mul",)
    assert tuned(Pretended(("layer3",)))[0].operations == ()


def test_the_reason_names_the_step_in_which_a_module_first_fails():
    policy, _ = tuned(Breaking(late=True))
    assert policy.deny[0].reason.startswith("its output is not finite in bfloat16 in step 2; without this entry ")


class Raising(Pretended):
    """Stands for a script in which `block` raises, unless it is in float32, or all that it takes from inside is."""

    inside = ("block.0", "block.1", "block.2")

    def __init__(self):
        super().__init__(())

    def __call__(self, trial):
        outcome = super().__call__(trial)
        low = trial.settings.dtype != "float32"
        kept = {entry.removeprefix("module:") for entry in trial.settings.deny}
        narrow = [name for name in self.inside if low and not kept & {name, "block"}]
        names = [*self.inside, "block", "head", ""]
        reached = names[: names.index(narrow[0]) + 1] if narrow else names
        readings = tuple(self.reading(name, "forward", low, kept) for name in reached)
        if not narrow:
            readings += tuple(self.reading(name, "backward", low, kept) for name in reached[::-1])
        return replace(
            outcome,
            losses=() if narrow else outcome.losses,
            readings={step: readings for step in trial.watched},
            raised=("RuntimeError: dtypes differ", "a.py:7") if narrow else None,
        )


def test_the_module_that_raises_stays_in_float32_and_not_all_that_it_takes():
    script = Raising()
    policy, _ = tuned(script)
    assert [(choice.entry, choice.reason.rpartition("; ")[2]) for choice in policy.deny[:1]] == [
        ("module:block", "without this entry the script raises RuntimeError: dtypes differ")
    ]
    assert [choice.entry for choice in policy.deny[1:]] == ["module:block.*"]
    assert script.runs <= most_runs(1, 6)


def test_what_is_written_is_read_back(tmp_path):
    policy, result = tuned(Pretended(("layer3",)))
    (tmp_path / "ampx.toml").write_text(result["file"])
    file = PolicyFile.read(tmp_path / "ampx.toml")
    assert (file.framework, file.dtype, file.deny) == ("toy", "bfloat16", ("module:layer3",))
    assert file.deny == policy.file.deny
    assert (
        '"module:layer3", # tune: relative error of 0.5 in bfloat16 in step 1; without this entry the loss is '
        in result["file"]
    )


def write(folder, text):
    path = folder / "ampx.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_dtype_that_is_slower_is_not_chosen(tmp_path):
    policy, result = tuned(Pretended((), speed=0.5), repeats=2)
    assert (policy.dtype, policy.level, policy.speed) == ("float32", "O0", 1.0)
    assert 'level = "O0"' in result["file"]
    assert not PolicyFile.read(write(tmp_path, result["file"])).enabled
    assert "switches ampx off (enabled = false)" in result["verdict"]
    assert "Stay in float32: bfloat16 agrees, and runs at 0.50 times the speed" in result["verdict"]
    assert tuned(Pretended(()), repeats=2)[0].speed == 2.0


class CastByHand(Pretended):
    """Stands for a script that casts to float16 by hand, in front of `layer5`."""

    def __init__(self, value):
        super().__init__(())
        self.value = value

    def __call__(self, trial):
        outcome = super().__call__(trial)
        cast = Reading("layer5", "Linear", "", "forward", 1, "float16", Stats(4), Stats(4))
        operation = Reading(
            "layer5", "Linear", "pow", "forward", 0, "float16", self.value, Stats(4), None, None, "a.py:3"
        )
        more = [operation] if trial.watching.operations else []
        readings = {step: among(entries, cast, *more) for step, entries in outcome.readings.items()}
        return replace(outcome, readings=readings)


def test_what_overflows_where_the_script_casts_by_hand_fails_in_float32_itself():
    broken = Stats(4, nonfinite=4)
    message = (
        r"a\.py fails in float32 itself: the output of pow in module 'layer5' \(a\.py:3\) overflows float16 in 4 of 4 e"
    )
    script = CastByHand(broken)
    with pytest.raises(ampx.TrialError, match=message):
        tuned(script)
    assert script.runs == 2  # in float32, and again with its operations
    assert tuned(CastByHand(Stats(4)))[0].deny == ()


@pytest.mark.parametrize("unchanged", [4, 6])
def test_updates_that_are_lost_in_float32_as_well_end_the_search(unchanged):
    entry = {"dtype": "bfloat16", "moved": 10, "unchanged": unchanged}
    meter = {"optimizer": "AdamW", "last": {"step": 2, "parameters": [entry]}}

    def script(trial):
        assert trial.settings.meter_every == 2 or trial.settings.dtype != "float32"
        outcome = whole(trial)
        return replace(outcome, run={**outcome.run, "meters": [meter]})

    whole = Pretended(())
    if unchanged < 5:
        assert tuned(script)[0].deny == ()
        return
    with pytest.raises(ampx.TrialError, match=r"float32 itself: 60 % of the updates of weights in bfloat16 were .* 2,"):
        tuned(script)


def test_what_the_script_loses_by_itself_in_float32_as_well_ends_the_search():
    def script(trial):
        return replace(whole(trial), mistakes=("a.py:7: most updates round to nothing. Store it in float32.",))

    whole = Pretended(())
    with pytest.raises(
        ampx.TrialError, match=r"fails in float32 itself: a\.py:7: most updates round to nothing, which no"
    ):
        tuned(script)
    assert whole.runs == 1


@pytest.mark.parametrize(
    ("prepare_finds_modules", "sensitive", "lines"),
    [(True, ("layer3",), 2), (True, (), 1), (False, ("layer3",), 1)],
)
def test_the_lines_that_use_the_file_prepare_a_model_where_that_finds_modules(prepare_finds_modules, sensitive, lines):
    def script(trial):
        return replace(whole(trial), prepare_finds_modules=prepare_finds_modules)

    whole = Pretended(sensitive)
    _, report = tuned(script, out="mine.toml")
    assert report["lines"] == ["amp = ampx.init(policy='mine.toml')", "model = amp.prepare(model)"][:lines]
    assert tuned(script, what_if="float8_e5m2", tolerance=0.5)[1]["lines"] == []


def test_what_nothing_cures_is_said_with_the_place_where_it_fails():
    class Hopeless(Pretended):
        def __call__(self, trial):
            outcome = super().__call__(trial)
            low = trial.settings.dtype != "float32"
            value = Stats(4, nonfinite=4) if low else Stats(4, largest=1e39)
            operation = Reading("", "", "secret", "forward", 0, "bfloat16", value, Stats(4), None, None, "a.py:7")
            losses = (math.inf, math.inf) if low else outcome.losses
            return replace(outcome, losses=losses, readings={1: among(outcome.readings[1], operation)})

    policy, _ = tuned(Hopeless(("nobody",)))
    reason = (
        "whichever modules were tried in float32; the output of secret (a.py:7) overflows bfloat16: it is 1e+39 in "
    )
    assert reason in policy.reasons["dtype"]


@pytest.mark.parametrize(("speed", "runs"), [(2.0, 8), (1.1, 14)])
def test_rounds_of_timed_runs_end_when_the_fastest_is_clear(speed, runs):
    script = Pretended((), speed)
    tuned(script, repeats=5)
    assert script.runs == runs  # float32, twice rounded, and bfloat16, watched; then both, timed, in each round


def test_a_dtype_that_was_asked_for_is_not_run_for_its_name():
    scripts = [Pretended(()), Pretended(())]
    tuned(scripts[0])
    tune_script(Program("a.py"), RunSettings("auto"), run=scripts[1], steps=2, tolerance=0.01, repeats=0)
    assert [script.runs for script in scripts] == [4, 5]


def test_what_the_hardware_has_is_tuned_where_auto_is_float32():
    def careful(trial):
        if trial.settings.dtype == "auto":
            trial = replace(trial, settings=replace(trial.settings, dtype="float32"))
        return replace(script(trial), native=("bfloat16",))

    script = Pretended(("layer3",))
    policy, _ = tune_script(Program("a.py"), RunSettings("auto"), run=careful, steps=2, tolerance=0.01, repeats=0)
    assert (policy.dtype, [choice.entry for choice in policy.deny]) == ("bfloat16", ["module:layer3"])


def test_a_loss_that_explodes_in_float32_is_no_matter_of_precision():
    def explodes(trial):
        return replace(script(trial), losses=(0.5, 40000.0))

    script = Pretended(())
    with pytest.raises(ampx.TrialError, match=r"a\.py fails in float32 itself: its loss is 40000 in step 2"):
        tune_script(Program("a.py"), RunSettings("float16"), run=explodes, steps=2, repeats=0)


def test_a_gradient_that_is_off_in_one_step_only_is_chance():
    class Crossing(Pretended):
        def __call__(self, trial):
            outcome = super().__call__(trial)
            right = Pretended((), only_gradients=True)(trial)
            return replace(outcome, readings={**outcome.readings, self.step: right.readings.get(self.step, ())})

    for step in (1, 2):
        script = Crossing(("layer3",), only_gradients=True)
        script.step = step
        assert tuned(script)[0].deny == ()


def test_precision_is_not_blamed_where_runs_in_float32_differ():
    class DrawnAnew(Pretended):
        def __call__(self, trial):
            outcome = super().__call__(trial)
            return replace(outcome, losses=tuple(loss * self.runs for loss in outcome.losses))

    with pytest.raises(ampx.TrialError, match=r"Two runs of a\.py in float32 have different losses"):
        tuned(DrawnAnew(()))


@pytest.mark.parametrize(("noise", "kept"), [(0.0, ["module:layer3"]), (0.0038, [])])
def test_what_eight_times_the_noise_of_float32_explains_is_blamed_on_no_module(noise, kept):
    class Noisy(Pretended):
        def __call__(self, trial):
            outcome = super().__call__(trial)
            again = self.runs == 5  # in float32: once watched, twice rounded, and once in low precision before
            losses = [loss * (1 + noise * again) if loss < 5.0 else 0.53 for loss in outcome.losses]
            return replace(outcome, losses=tuple(losses), readings=Pretended(())(trial).readings)

    policy, report = tuned(Noisy(("layer3",)), tolerance=None)
    assert policy.tolerance == 2**-5
    assert [choice.entry for choice in policy.deny] == kept
    assert any("differ from run to run in float32, by 0.38 %" in note for note in report["notes"]) == bool(noise)


@pytest.mark.parametrize(
    ("losses", "off", "kept"),
    [
        ((1.0, 1.0, 1.0, 1.0), 0.004, []),
        ((1.0, 1.0, 1.0, 1.0), 0.005, ["module:layer3"]),  # 0.43 %
        ((4.0, 1.0, 3.0, 0.5), 0.015, []),  # 0.94 %; 0.39 % and 3.1 % of 22 % are 1.07 %
        ((4.0, 1.0, 3.0, 0.5), 0.020, ["module:layer3"]),  # 1.25 %; as one curve, it would have moved by 92 %
    ],
)
def test_losses_may_be_off_by_3_percent_of_the_way_that_training_moves_them(losses, off, kept):
    """Gradients may be off by so much, which make that way; two optimizers take turns here."""

    class Moving(Pretended):
        def __call__(self, trial):
            outcome = super().__call__(trial)
            low = trial.settings.dtype != "float32" and "module:layer3" not in trial.settings.deny
            later = tuple(loss * (1 + off * low) for loss in losses[1:])
            return replace(outcome, losses=(losses[0], *later), losses_of=("a", "b", "a", "b"))

    policy, _ = tuned(Moving(()), tolerance=None, steps=4)
    assert [choice.entry for choice in policy.deny] == kept


def test_noise_is_measured_where_rounding_does_not_break_the_run():
    """Runs that round what `layer3` takes are broken alike, whichever module rounds it: they tell nothing of noise."""

    class Broken(Pretended):
        def __call__(self, trial):
            outcome = super().__call__(trial)
            low, rounded = trial.settings.dtype != "float32", bool(trial.forced)
            off = 0.01 * (low and "module:layer7" not in trial.settings.deny) + 0.005 * rounded
            spared = {name for name, dtype in trial.forced.items() if dtype == "float32"}
            if rounded and not spared >= {"", "layer2", "layer3"}:
                return replace(outcome, losses=(1.0, 5.0))
            return replace(outcome, losses=tuple(loss if loss != 0.5 else loss + off for loss in outcome.losses))

    script = Broken(("layer3",))
    policy, _ = tuned(script, tolerance=None)
    assert [choice.entry for choice in policy.deny] == ["module:layer3"]
    assert script.runs <= most_runs(1, 21)


def test_float32_is_repeated_with_the_same_steps_watched():
    """A program that is compiled without watching may round otherwise, which is no noise."""

    class Compiled(Pretended):
        def __call__(self, trial):
            outcome = super().__call__(trial)
            return replace(outcome, losses=(1.0, 0.5 + 1e-6 * (6 in trial.watched), *outcome.losses[2:]))

    script = Compiled(("layer3",))
    _, report = tuned(script, steps=6)
    assert not any("differ from run to run" in note for note in report["notes"])


def test_a_simulated_dtype_is_forced_upon_the_modules():
    policy, report = tuned(Pretended(("layer4",)), what_if="float8_e4m3")
    assert "not between the operations inside" in report["notes"][-1]
    assert (policy.dtype, [choice.entry for choice in policy.deny]) == ("float8_e4m3", ["module:layer4"])


def test_a_tolerance_is_a_quarter_at_most_however_coarse_the_dtype():
    """Rounding to three bits behind forty values would explain anything."""
    policy, _ = tuned(Pretended(("layer3",), only_gradients=True), what_if="float8_e4m3", tolerance=None)
    assert (policy.tolerance, [choice.entry for choice in policy.deny]) == (0.25, ["module:layer3"])


@pytest.mark.parametrize(("options", "said"), [({"repeats": 1}, True), ({"repeats": 1, "for_inference": True}, False)])
def test_other_work_on_the_machine_is_said_where_speed_is_measured(monkeypatch, options, said):
    monkeypatch.setattr("ampx.numerics.tune_script.busy", lambda: ["busy"])
    assert ("busy" in tuned(Pretended(()), **options)[1]["notes"]) == said


@pytest.mark.parametrize(("framework", "words"), [("torch", "dynamo=False"), ("toy", "exporters of toy have names")])
def test_for_inference_it_is_said_whose_names_of_nodes_are_printed(framework, words):
    pretended = Pretended(("layer3",))

    def run(trial):
        outcome = pretended(trial)
        # What layer 3 computes is what the model returns.
        readings = {
            step: tuple(
                dataclasses.replace(seen[LAYERS.index("layer3")], module="")
                if (entry.module, entry.direction) == ("", "forward")
                else entry
                for entry in seen
            )
            for step, seen in outcome.readings.items()
        }
        return dataclasses.replace(outcome, run={**outcome.run, "framework": framework}, readings=readings)

    _, report = tuned(run, for_inference=True)
    assert [entry["regex"] for entry in report["exclusions"]] == ["/layer3/.*"]
    assert words in report["notes"][-1]
    for_tensorrt = report["notes"][-2]
    assert for_tensorrt.startswith("TensorRT 11 and later have no layer precisions: the graph itself says")
    assert "ampx.convert(model, 'bfloat16', batches=batches, deny=['module:layer3'])" in for_tensorrt
    assert "--low_precision_type bf16 --nodes_to_exclude '/layer3/.*'`" in for_tensorrt
    assert exclusion_lines(report["exclusions"]) == [
        "node of ONNX to keep in float32, for ModelOpt's AutoCast: /layer3/.*",
        "layer precision of TensorRT 10 and before: /layer3/*:fp32",
    ]


def test_names_for_conversion_tools_match_the_exported_nodes_of_the_module_and_no_others():
    policy = TunedPolicy("toy", "cpu", "float16", "O1", 1.0, (Choice("module:layer1", "measured"),))
    (names,) = exclusions(policy)
    nodes = ["/layer1/Gemm", "/layer1/act/Relu", "/layer10/Gemm", "/layer2/layer1/Gemm"]
    assert [bool(re.match(names["regex"], node)) for node in nodes] == [True, True, False, False]
    assert [fnmatch.fnmatchcase(node, names["wildcard"]) for node in nodes] == [True, True, False, False]
    nested = TunedPolicy("toy", "cpu", "float16", "O1", 1.0, (Choice("module:a[[]0].b", ""), Choice("module:a.*", "")))
    assert exclusions(nested) == ({"module": "a[0].b", "regex": r"/b/.*", "wildcard": "/b/*"},)


def test_a_policy_is_written_unless_its_dtype_was_simulated(tmp_path):
    path = tmp_path / "ampx.toml"
    with pytest.raises(ampx.UnsupportedDtypeError, match=r"float8_e4m3.*accepted: float16, bfloat16, float32"):
        TunedPolicy("toy", "cpu", "float8_e4m3", "O1", 1.0).write(path)
    assert not path.exists()
    TunedPolicy("toy", "cpu", "float16", "O1", "dynamic", (Choice("module:a", "measured"),)).write(path)
    file = PolicyFile.read(path)
    assert (file.dtype, file.loss_scale, file.deny) == ("float16", "dynamic", ("module:a",))


def test_that_only_the_whole_model_in_float32_agrees_is_no_policy():
    class Whole(Pretended):
        def __call__(self, trial):
            self.sensitive = () if trial.forced.get("*") == "float32" else ("nobody",)
            return super().__call__(trial)

    policy, result = tuned(Whole(()), what_if="float8_e4m3")
    assert (policy.dtype, policy.deny, policy.agrees) == ("float32", (), False)
    assert "unless the whole model is in float32" in result["verdict"]


def test_losses_and_errors_by_module_and_step_are_those_before_anything_was_kept_in_float32():
    _, result = tuned(Pretended(("layer3",)))
    assert result["losses"] == {"float32": [1.0, 0.5], "bfloat16": [1.0, 5.0]}
    assert result["map"]["steps"] == [1, 2]
    errors = dict(zip(result["map"]["modules"], result["map"]["errors"], strict=True))
    assert errors["layer3"] == [pytest.approx(0.5)] * 2
    assert errors["layer4"] == [0.0, 0.0]


def test_wrong_options_are_refused_before_anything_runs(tmp_path):
    assert check_options("training", None, tmp_path / "a.toml") is None
    (tmp_path / "there.toml").write_text("# edited\n")
    with pytest.raises(ampx.InvalidOptionError, match=r"there.toml' is there already, and is left as it is.*--force"):
        check_options("training", None, tmp_path / "there.toml")
    assert check_options("training", None, tmp_path / "there.toml", force=True) is None
    assert check_options("training", "float16", tmp_path / "there.toml") == "float16"  # which writes no file
    (tmp_path / "broken.toml").write_text("edited")
    with pytest.raises(ampx.PolicyFileError, match=r"broken.toml' is no TOML: .*Mend that line"):
        check_options("training", None, tmp_path / "broken.toml", force=True)
    assert check_options("training", None, Path("/dev/null")) is None
    assert (tmp_path / "there.toml").read_text() == "# edited\n"
    for purpose, what_if, out in (("fun", None, "a"), ("training", "int8", "a"), ("training", None, "no/where.toml")):
        with pytest.raises(ampx.InvalidOptionError, match="accepted"):
            check_options(purpose, what_if, tmp_path / out)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("fp16", "float16"), ("torch.bfloat16", "bfloat16"), ("float8_e4m3fn", "float8_e4m3")),
        *(("fp8_e5m2", "float8_e5m2"), ("E4M3", "float8_e4m3"), ("float8_e5m2", "float8_e5m2")),
    ],
)
def test_a_dtype_to_simulate_is_named_as_init_and_frameworks_name_it(tmp_path, name, dtype):
    assert check_options("training", name, tmp_path / "a.toml") == dtype
