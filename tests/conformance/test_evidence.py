"""What is on file as tested is backed by tests that exist, passed and showed it; else the run fails."""

import json
from types import SimpleNamespace

import pytest

from evidence import EvidencePlugin

DECLARED = ("ampx.declared", ["mine", {"devices": ["cpu"]}])
REFUSED = ("ampx.refused", ["mine", "cpu/float16/O3", "no."])
SCALING = ("ampx.tested", ["mine", "cpu/float32/O0/scaling"])
NO_LONGER_REFUSED = ("ampx.tested", ["mine", "cpu/float16/O3/state"])
STATE = ("ampx.tested", ["mine", "cpu/float32/O0/state"])
ON_GPU = ("ampx.tested", ["mine", "gpu/float32/O0/state"])
TESTS = {
    "test_a.py::test_declared": [DECLARED, REFUSED],
    "test_a.py::test_scaling": [SCALING],
    "test_a.py::test_state": [STATE],
    "test_a.py::test_on_gpu": [ON_GPU],
}


class Item(SimpleNamespace):
    """A collected test, as far as the plugin asks."""

    def get_closest_marker(self, name):
        return self.nodeid.endswith(f"on_{name}")


class Project:
    """A folder with a file of what tests showed; pytest's calls of the plugin are made by hand."""

    def __init__(self, folder):
        self.folder = folder
        self.tests = {}
        self.outcomes = {}
        self.replace(TESTS)

    def replace(self, tests, **outcomes):
        """Say what each test puts on record; `outcomes` are those of tests that do not pass, by name."""
        self.tests = tests
        self.outcomes = outcomes
        for path in self.folder.glob("*.py"):
            path.unlink()
        for test in tests:
            (self.folder / test.partition("::")[0]).touch()

    def run(self, *arguments, regenerate=False, simulated=False, chosen=lambda test: True):
        """Run the tests that `arguments` and `chosen` leave; give the exit status and the problems."""
        plugin = EvidencePlugin(self.folder / "evidence", regenerate, simulated)
        collected = [test for test in self.tests if not arguments or test.startswith(arguments)]
        plugin.pytest_collection_modifyitems([Item(nodeid=test) for test in collected])
        status = pytest.ExitCode.OK
        for test in filter(chosen, collected):
            outcome = self.outcomes.get(test.partition("::")[2], "passed")
            if outcome == "failed":
                status = pytest.ExitCode.TESTS_FAILED
            report = SimpleNamespace(
                nodeid=test,
                when="call",
                passed=outcome == "passed",
                skipped=outcome == "skipped",
                user_properties=self.tests[test],
            )
            plugin.pytest_runtest_logreport(report)
        config = SimpleNamespace(rootpath=self.folder, args=arguments or (str(self.folder),))
        session = SimpleNamespace(config=config, exitstatus=status)
        plugin.pytest_sessionfinish(session)
        return session.exitstatus, plugin.problems

    def on_file(self):
        return json.loads((self.folder / "evidence" / "mine.json").read_text())


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    assert project.run(regenerate=True) == (pytest.ExitCode.OK, [])
    return project


def test_what_passed_is_on_file_and_a_second_run_agrees(project):
    assert project.on_file() == {
        "schema": "ampx.evidence/1",
        "framework": "mine",
        "declared": {"devices": ["cpu"]},
        "refused": {"cpu/float16/O3": "no."},
        "tested": {
            "cpu/float32/O0/scaling": ["test_a.py::test_scaling"],
            "cpu/float32/O0/state": ["test_a.py::test_state"],
        },
    }
    assert project.run() == (pytest.ExitCode.OK, [])


@pytest.mark.parametrize(
    ("test", "becomes", "problem"),
    [
        ("test_state", {"test_other": [STATE]}, "cpu/float32/O0/state: test_a.py::test_state does not exist"),
        ("test_state", {"test_other": [STATE]}, "O0/state is not on file as tested by test_a.py::test_other"),
        (
            "test_state",
            {"test_state": [("ampx.tested", ["mine", "cpu/float32/O0/casting"])]},
            "cpu/float32/O0/state: test_a.py::test_state no longer shows it",
        ),
        (
            "test_declared",
            {"test_declared": [DECLARED, ("ampx.refused", ["mine", "cpu/float16/O3", "never."])]},
            "cpu/float16/O3 is refused with another message: never.",
        ),
        (
            "test_declared",
            {"test_declared": [("ampx.declared", ["mine", {"devices": ["cpu", "gpu"]}]), REFUSED]},
            "what the backend declares has changed",
        ),
        (
            "test_state",
            {"test_state": [STATE, NO_LONGER_REFUSED]},
            "cpu/float16/O3 is on file as refused, and tests show it",
        ),
    ],
)
def test_a_stale_file_fails_the_run_and_says_why(project, test, becomes, problem):
    tests = dict(TESTS)
    del tests[f"test_a.py::{test}"]
    project.replace({**tests, **{f"test_a.py::{name}": records for name, records in becomes.items()}})
    status, problems = project.run()
    assert status == pytest.ExitCode.TESTS_FAILED
    assert any(problem in line for line in problems)


def test_what_tests_show_is_refused_no_longer(project):
    """Also where a test that is skipped on this CPU might have said so."""
    tests = {**TESTS, "test_a.py::test_on_bfloat16": [STATE]}
    project.replace(tests)
    project.run(regenerate=True)
    assert set(project.on_file()["refused"]) == {"cpu/float16/O3"}
    tests = {**tests, "test_a.py::test_declared": [DECLARED, NO_LONGER_REFUSED]}
    project.replace(tests, test_on_bfloat16="skipped")
    project.run(regenerate=True)
    assert project.on_file()["refused"] == {}
    assert project.run() == (pytest.ExitCode.OK, [])


def test_the_problems_are_printed_with_what_to_do(project):
    lines = []
    plugin = EvidencePlugin(project.folder / "evidence", regenerate=False)
    plugin.problems = ["mine.json: what the backend declares has changed"]
    plugin.pytest_terminal_summary(SimpleNamespace(section=lambda title, **_: lines.append(title), line=lines.append))
    assert lines[:2] == ["stale: evidence", "mine.json: what the backend declares has changed"]
    assert "pytest --regenerate" in lines[2]


def test_a_test_that_was_skipped_shows_nothing(project):
    project.replace(TESTS, test_state="skipped")
    status, problems = project.run()
    assert status == pytest.ExitCode.TESTS_FAILED
    assert problems == ["mine.json: cpu/float32/O0/state: test_a.py::test_state did not pass"]


def test_what_a_test_showed_stays_on_file_where_the_cpu_is_too_weak_for_it(project):
    refused = ("ampx.refused", ["mine", "cpu/float16/O2", "no."])
    tests = {**TESTS, "test_a.py::test_on_bfloat16": [STATE, refused]}
    project.replace(tests)
    project.run(regenerate=True)
    before = project.on_file()
    assert set(before["refused"]) == {"cpu/float16/O2", "cpu/float16/O3"}
    project.replace(tests, test_on_bfloat16="skipped")
    for regenerate in (False, True):
        assert project.run(regenerate=regenerate) == (pytest.ExitCode.OK, [])
    assert project.on_file() == before
    project.replace(tests, test_on_bfloat16="failed")
    assert project.run()[0] == pytest.ExitCode.TESTS_FAILED


def test_what_gpu_tests_show_on_a_simulated_device_is_on_file_as_simulated(project):
    before = project.on_file()
    gpu = {"simulated": True, "chosen": lambda test: "gpu" in test}
    status, problems = project.run(**gpu)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert problems == ["mine.json: gpu/float32/O0/state is not on file as simulated by test_a.py::test_on_gpu"]
    project.run(regenerate=True, **gpu)
    assert project.on_file() == {**before, "simulated": {"gpu/float32/O0/state": ["test_a.py::test_on_gpu"]}}
    assert project.run(**gpu) == (pytest.ExitCode.OK, [])
    assert project.run(chosen=lambda test: "gpu" not in test) == (pytest.ExitCode.OK, [])
    project.replace({**TESTS, "test_a.py::test_on_gpu": []})
    assert project.run(**gpu)[1] == ["mine.json: gpu/float32/O0/state: test_a.py::test_on_gpu no longer shows it"]


def test_a_test_can_show_a_cell_with_another_word(project):
    lowered = ("ampx.shown", ["mine", "gpu/float32/O0/scaling", "lowered for CUDA"])
    project.replace({**TESTS, "test_a.py::test_lowered": [lowered]})
    before = project.on_file()
    project.run(regenerate=True)
    shown = {"gpu/float32/O0/scaling": ["test_a.py::test_lowered"]}
    assert project.on_file() == {**before, "lowered for CUDA": shown}
    project.replace(TESTS)
    assert project.run()[1] == ["mine.json: gpu/float32/O0/scaling: test_a.py::test_lowered does not exist"]


def test_a_framework_of_which_nothing_is_shown_any_more_is_stale_too(project):
    project.replace(TESTS, test_declared="skipped", test_scaling="skipped", test_state="skipped")
    status, problems = project.run()
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "mine.json: cpu/float32/O0/state: test_a.py::test_state did not pass" in problems


def test_a_test_that_fails_shows_nothing(project):
    project.replace(TESTS, test_state="failed")
    status, _ = project.run(regenerate=True)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert list(project.on_file()["tested"]) == ["cpu/float32/O0/scaling"]


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ((), lambda test: "scaling" in test),  # -k scaling
        (("test_a.py::test_scaling",), lambda test: True),
        ((), lambda test: "gpu" not in test),  # -m "not gpu"
    ],
)
def test_what_was_not_run_is_not_judged(project, arguments, chosen):
    assert project.run(*arguments, chosen=chosen) == (pytest.ExitCode.OK, [])


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ((), lambda test: "state" in test or "declared" in test),
        (("test_a.py::test_state",), lambda test: True),
    ],
)
def test_regenerating_some_tests_keeps_what_the_others_showed(project, arguments, chosen):
    before = project.on_file()
    assert project.run(*arguments, regenerate=True, chosen=chosen) == (pytest.ExitCode.OK, [])
    assert project.on_file() == before


@pytest.mark.parametrize(
    ("arguments", "chosen"), [(("test_a.py",), lambda test: True), ((), lambda test: "elsewhere" not in test)]
)
def test_regenerating_some_tests_keeps_what_was_refused_to_the_others(project, arguments, chosen):
    refused = ("ampx.refused", ["mine", "gpu/bfloat16/O1", "no."])
    project.replace({**TESTS, "test_b.py::test_elsewhere": [refused, STATE]})
    project.run(regenerate=True)
    before = project.on_file()
    assert set(before["refused"]) == {"cpu/float16/O3", "gpu/bfloat16/O1"}
    assert project.run(*arguments, regenerate=True, chosen=chosen) == (pytest.ExitCode.OK, [])
    assert project.on_file() == before
    project.replace({**TESTS, "test_b.py::test_elsewhere": [STATE]})
    project.run(regenerate=True)
    assert set(project.on_file()["refused"]) == {"cpu/float16/O3"}


def test_regenerating_one_file_keeps_what_others_showed(project):
    project.replace({**TESTS, "test_b.py::test_scale": [SCALING], "test_b.py::test_state": [STATE]})
    assert project.run("test_b.py", regenerate=True) == (pytest.ExitCode.OK, [])
    assert project.on_file()["tested"]["cpu/float32/O0/scaling"] == ["test_a.py::test_scaling", "test_b.py::test_scale"]
    project.replace(TESTS)
    status, problems = project.run()
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "mine.json: cpu/float32/O0/state: test_b.py::test_state does not exist" in problems
    project.run(regenerate=True)
    assert project.on_file()["tested"]["cpu/float32/O0/scaling"] == ["test_a.py::test_scaling"]
