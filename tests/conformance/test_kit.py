"""The kit itself: nothing in it is dead, its oracle stands alone, and it says what it saw."""

import ast
import dataclasses
import importlib
import pathlib
import re
import subprocess
import sys
from dataclasses import replace

import pytest

import ampx
import ampx.testing.kit
from ampx.numerics.probe import Probe
from ampx.testing import BackendSuite, FuzzSuite, Harness, PluginSuite, oracle
from ampx.testing.bench import Bench
from ampx.testing.checks import refused
from judging import list_tests, suite_for
from toy.explicit import BareToy
from toy.harness import ImplicitToyHarness
from toy.mutation import verbs

FOLDER = pathlib.Path(ampx.testing.kit.__file__).parent
TOY = pathlib.Path(__file__).with_name("test_toy.py")
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("module", MODULES)
def test_every_test_is_reachable_from_the_exported_suites(module):
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    loaded = importlib.import_module(f"ampx.testing.kit.{module}")
    exported = {*BackendSuite.__mro__, *PluginSuite.__mro__, *FuzzSuite.__mro__}
    reachable = {id(function) for suite in exported for function in vars(suite).values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Tests", "Suite")):
            names = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            assert getattr(loaded, node.name) in exported
            assert len(names) == len(set(names)), "a test hides another of the same name"
            for name in names:
                assert id(vars(getattr(loaded, node.name))[name]) in reachable
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            assert node.name in dir(BackendSuite) + dir(PluginSuite) + dir(FuzzSuite)


def test_no_test_hides_another():
    names = [name for suite in (*BackendSuite.__mro__, PluginSuite) for name in vars(suite) if name.startswith("test_")]
    assert len(names) == len(set(names)) == len(list_tests(BackendSuite)) + len(list_tests(PluginSuite))


def test_every_harness_verb_is_required_or_has_a_default():
    class Incomplete(Harness):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Incomplete()
    assert len(Harness.__abstractmethods__) <= 12


def test_the_oracle_shares_nothing_with_the_core():
    tree = ast.parse(pathlib.Path(oracle.__file__).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported.add((node.module or "ampx").split(".")[0])
        elif isinstance(node, ast.Import):
            imported.update(alias.name.split(".")[0] for alias in node.names)
    assert imported == {"__future__", "array", "collections", "dataclasses", "typing"}


def test_the_oracle_gives_the_reference_trace():
    config = dataclasses.asdict(ampx.LossScale(growth_interval=3))
    rows = oracle.Oracle(config).walk(bool(overflow) for overflow in oracle.REFERENCE_PATTERN)
    assert [row.scale for row in rows] == list(oracle.REFERENCE_TRACE)


def test_failed_asserts_show_their_values():
    suite = type("Suite", (BackendSuite,), {"harness": type("Slow", (ImplicitToyHarness,), {"optimizer": _slow})})()
    suite.setup_method()
    try:
        with pytest.raises(AssertionError, match=r"assert \[\["):
            suite.test_the_harness_trains_in_float32()
    finally:
        suite.teardown_method()


def test_a_declared_ability_without_its_verb_is_told_by_name():
    claims = replace(BareToy.capabilities, sees_backward=True)
    suite = suite_for(verbs("Claims", BareToy, capabilities=claims))()
    suite.setup_method()
    message = "Claims.watch_backward: Return .* Wanted because sees_backward is declared"
    try:
        with pytest.raises(NotImplementedError, match=message):
            suite.test_the_verbs_of_what_is_declared_are_written()
    finally:
        suite.teardown_method()


@pytest.mark.parametrize(
    ("name", "offers", "error", "message"),
    [
        ("NoClass", {"probe": "toy.numerics:Nothing"}, ampx.BackendLoadError, "'toy.numerics:Nothing' as 'probe'"),
        ("Other", {"probe": "toy.inference:ToyConverter"}, ampx.BackendLoadError, "is derived from ampx.numerics"),
        ("Abstract", {"probe": Probe}, ampx.BackendLoadError, "which lacks force, replay, watch"),
        ("TakenOut", {"probe": "toy.nowhere:Probe"}, ampx.UnsupportedByBackendError, "does not support watching"),
    ],
)
def test_an_offer_that_is_none_is_told_by_name(name, offers, error, message):
    suite = suite_for(verbs(f"Offers{name}", BareToy, offers=offers))()
    suite.setup_method()
    try:
        with pytest.raises(error, match=message):
            suite.test_what_is_offered_is_there()
    finally:
        suite.teardown_method()


def test_a_refusal_that_does_not_come_says_what_was_expected():
    message = "nothing was raised; expected: LossShapeError with 'of 2' in its message. Try this."
    nothing = refused(ampx.LossShapeError, passed="of 2", accepted="", advice="", hint="Try this.")
    with pytest.raises(pytest.fail.Exception, match=re.escape(message)), nothing:
        pass


def test_the_tests_that_guide_an_author_come_first(request):
    module = pytest.Module.from_parent(request.session, path=TOY)
    suites = [suite for suite in module.collect() if issubclass(suite.obj, BackendSuite)]
    for suite in suites:
        assert [test.originalname for test in suite.collect()][:3] == [
            "test_the_verbs_of_what_is_declared_are_written",
            "test_the_harness_gives_chosen_gradients",
            "test_the_harness_trains_in_float32",
        ]
    assert suites


def _slow(self, parameters, momentum):
    return ImplicitToyHarness.optimizer(self, parameters, momentum=True).__class__(parameters, lr=0.25)


def test_importing_ampx_does_not_import_the_kit():
    names = ("pytest", "hypothesis", "ampx.testing")
    script = f"import sys, ampx; ampx.backends(); sys.exit(any(name in sys.modules for name in {names}))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_kit_acts_only_where_it_is_imported():
    metadata = importlib.import_module("importlib.metadata")
    points = metadata.entry_points(group="pytest11")
    assert not [point for point in points if point.value.startswith("ampx")]


def test_a_bench_reads_what_the_harness_reads():
    bench = Bench(ImplicitToyHarness())
    assert bench.values() == [[1.0, -2.0], [0.5]]
