"""The suites of every combination, and of states between frameworks: sound backends pass, and mutants do not."""

import dataclasses
import json
import pathlib

import pytest

import ampx
from ampx.testing.oracle import Oracle
from evidence import ASPECTS, COMBINATIONS
from judging import judge, suite_for
from matrix import LOW, MatrixSuite
from toy import framework
from toy.harness import BareToyHarness, ExplicitToyHarness, ImplicitToyHarness
from toy.mutants import MUTANTS
from transfer import CONFIG, CONTINUATION, PATTERNS, TransferSuite, built_in

STATES = pathlib.Path(__file__).parents[1] / "states"
RECORDS = {
    "casting": [
        lambda suite, record, combination=combination: suite.test_casting(*combination, record) for combination in LOW
    ],
    "scaling": [
        lambda suite, record, combination=combination: suite.test_scaling(*combination, record)
        for combination in COMBINATIONS
    ],
    "state": [
        lambda suite, record, combination=combination: suite.test_state(*combination, record)
        for combination in COMBINATIONS
    ],
    "master weights": [
        lambda suite, record, dtype=dtype: suite.test_master_weights(dtype, record) for dtype in ("float16", "bfloat16")
    ],
}
MOMENTS = ("before the first step", "after steps")


class Config:
    """What the suite asks of pytest."""

    def __init__(self, regenerate):
        self.regenerate = regenerate

    def getoption(self, name, default):
        return self.regenerate


def verdicts(base, harness, tests, patches=(), **attributes):
    suite = type("Suite", (base,), {"harness": harness, **attributes})
    try:
        return [judge(suite, test, patches) for test in tests]
    finally:
        framework.set_casting(framework.CastingState())


def mutant_verdicts(base, mutant, tests, **attributes):
    return verdicts(base, suite_for(mutant).harness, tests, mutant.patches(), **attributes)


# -- the matrix -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("harness", [ImplicitToyHarness, ExplicitToyHarness, BareToyHarness])
def test_a_sound_backend_passes_and_puts_every_supported_cell_on_record(harness):
    records = []
    tests = [lambda suite: suite.test_what_is_declared(lambda *entry: records.append(entry))]
    for each in RECORDS.values():
        tests += [lambda suite, test=test: test(suite, lambda *seen: records.append(seen)) for test in each]
    assert set(verdicts(MatrixSuite, harness, tests)) == {"passed"}
    suite = type("Suite", (MatrixSuite,), {"harness": harness})()
    suite.setup_method()
    can, device = suite.backend.capabilities, suite.backend.device("auto")
    suite.teardown_method()
    supported = {
        f"{device.name}/{dtype}/{level}"
        for dtype, level in COMBINATIONS
        if level in can.levels and (dtype == "float32" or dtype in device.native | device.emulated)
    }
    tested = {value[1] for name, value in records if name == "ampx.tested"}
    refused = {value[1] for name, value in records if name == "ampx.refused"}
    assert {cell.rpartition("/")[0] for cell in tested} == supported
    assert refused == {f"{device.name}/{dtype}/{level}" for dtype, level in COMBINATIONS} - supported
    assert {cell.rpartition("/")[2] for cell in tested} <= set(ASPECTS) - {"distributed"}
    (declared,) = (value[1] for name, value in records if name == "ampx.declared")
    assert list(declared) == [*(field.name for field in dataclasses.fields(ampx.Capabilities)), "offers"]


@pytest.mark.parametrize("aspect", RECORDS)
def test_every_test_of_the_matrix_rejects_a_mutant_and_puts_nothing_on_record(aspect):
    rejected = []
    for mutant in MUTANTS:
        for test in RECORDS[aspect]:
            seen = []
            (verdict,) = mutant_verdicts(
                MatrixSuite,
                mutant,
                [lambda suite, test=test, seen=seen: test(suite, lambda *entry: seen.append(entry))],
            )
            if verdict == "failed":
                assert not any(name == "ampx.tested" for name, _ in seen)
                rejected.append(mutant.name)
    assert rejected


# -- states between frameworks --------------------------------------------------------------------------


def transfers(*sources):
    return [
        lambda suite, arguments=(source, name, moment): suite.test_a_state_of_another_framework_goes_on(*arguments)
        for source in sources
        for name in PATTERNS
        for moment in MOMENTS
    ]


def write(folder, framework_name, **changes):
    """Write the file of a framework from the specification alone."""
    states = {}
    for name, pattern in PATTERNS.items():
        config = dataclasses.asdict(CONFIG)
        row = dataclasses.asdict(Oracle(config).walk(map(bool, pattern))[-1])
        losses = [{"loss_id": 0, **row, **changes}]
        states[name] = {
            "schema": "ampx.loss_scale/1",
            "framework": framework_name,
            "groups": [{"config": config, "losses": losses}],
        }
    (folder / f"{framework_name}.json").write_text(json.dumps(states, indent=1) + "\n")


def own_file(regenerate=False):
    return [lambda suite: suite.test_the_file_is_what_this_framework_writes(Config(regenerate))]


@pytest.mark.parametrize("harness", [ImplicitToyHarness, ExplicitToyHarness])
def test_states_go_from_framework_to_framework(harness, tmp_path):
    write(tmp_path, "other")
    write(tmp_path, harness.framework)
    assert set(verdicts(TransferSuite, harness, own_file() + transfers("other"), states=tmp_path)) == {"passed"}


def test_a_missing_file_fails_for_the_one_that_writes_and_for_those_that_read(tmp_path):
    tests = own_file() + transfers("other")
    assert set(verdicts(TransferSuite, ImplicitToyHarness, tests, states=tmp_path)) == {"failed"}
    assert verdicts(TransferSuite, ImplicitToyHarness, own_file(regenerate=True), states=tmp_path) == ["passed"]
    assert verdicts(TransferSuite, ImplicitToyHarness, own_file(), states=tmp_path) == ["passed"]


@pytest.mark.parametrize(
    "changes", [{"scale": 64.0}, {"growth_tracker": 1}, {"hysteresis_tracker": 3}, {"consecutive_skips": 9}]
)
def test_every_number_of_a_file_counts(changes, tmp_path):
    write(tmp_path, "toy", **changes)
    write(tmp_path, "other", **changes)
    tests = own_file() + transfers("other")
    assert set(verdicts(TransferSuite, ImplicitToyHarness, tests, states=tmp_path)) == {"failed"}


@pytest.mark.parametrize("name", ["ForgetsTracker", "AlwaysFinite"])
def test_a_backend_that_forgets_a_number_is_rejected(name, tmp_path):
    write(tmp_path, "other")
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    assert "failed" in mutant_verdicts(TransferSuite, mutant, transfers("other"), states=tmp_path)


def test_the_continuation_reaches_both_bounds_and_every_kind_of_step():
    for pattern in PATTERNS.values():
        oracle = Oracle(dataclasses.asdict(CONFIG))
        start = oracle.walk(map(bool, pattern))[-1]
        scales = [row.scale for row in oracle.walk(map(bool, CONTINUATION))]
        assert start.growth_tracker or start.hysteresis_tracker < CONFIG.hysteresis
        assert {CONFIG.min_scale, CONFIG.max_scale} <= set(scales)


def test_every_framework_that_ampx_ships_has_a_file_of_its_own_and_no_file_is_left_over():
    assert {"torch", "paddle", "jax"} <= set(built_in())
    assert sorted(path.stem for path in STATES.glob("*.json")) == built_in()


@pytest.mark.parametrize("name", built_in())
def test_the_file_of_each_framework_holds_what_the_specification_says(name, tmp_path):
    write(tmp_path, name)
    assert json.loads((STATES / f"{name}.json").read_text()) == json.loads((tmp_path / f"{name}.json").read_text())
