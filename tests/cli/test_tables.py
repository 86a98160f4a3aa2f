"""The generated tables: what a cell says, that README and manual show it, and that it is backed by a test."""

import ast
import json
import shutil
from pathlib import Path

import pytest

from ampx.plugins import VersionRange
from evidence import ASPECTS, COMBINATIONS, Evidence
from tested_table import compact_table, make_rows, read_gpu, reasons_table
from update_tables import render, update
from version_records import (
    FOLDER,
    FRAMEWORKS,
    Record,
    RecordPlugin,
    ranges as version_ranges,
    to_markdown as versions_table,
)

ROOT = Path(__file__).parents[2]
DECLARED = {
    "devices": ["gpu", "cpu"],
    "dtypes": ["float16"],
    "levels": ["O0", "O1"],
    "master_weights": False,
}
REFUSED = {
    "distributed": "one process only.",
    "cpu/float16/O1": "the CPU casts nothing.",
    **{f"cpu/float16/{level}": f"{level} is not there." for level in ("O2", "O3")},
    **{f"cpu/bfloat16/{level}": "bfloat16 is not there." for level in ("O1", "O2", "O3")},
    "gpu, compiled/float16/O1": "nothing casts compiled code.",
}
EVIDENCE = Evidence(
    DECLARED,
    REFUSED,
    {
        "tested": {"cpu/float32/O0/scaling": {"tests/a.py::b"}, "cpu, compiled/float16/O1/casting": {"tests/a.py::c"}},
        "lowered for CUDA": {"gpu/float16/O1/casting": {"tests/a.py::d"}, "gpu/float16/O1/state": {"tests/a.py::d"}},
        "simulated": {"gpu/float16/O1/state": {"tests/a.py::e"}},
    },
)


def cells(rows):
    return {
        f"{row.device}/{row.dtype}/{row.level}/{aspect}": (row.statuses[aspect], row.reasons.get(aspect))
        for row in rows
        for aspect in ASPECTS
    }


def test_a_cell_is_tested_declared_or_not_supported_with_its_reason():
    statuses = cells(make_rows("mine", EVIDENCE, ["gpu/float16/O1/casting"]))
    assert statuses["cpu/float32/O0/scaling"] == ("tested", None)
    assert statuses["cpu/float32/O0/state"] == ("declared", None)
    assert statuses["cpu/float32/O0/distributed"] == ("not supported", "one process only.")
    assert statuses["cpu/float32/O0/casting"] == ("not supported", "O0 computes in float32.")
    assert statuses["cpu/float16/O1/state"] == ("not supported", "the CPU casts nothing.")
    assert statuses["gpu/float16/O1/casting"] == ("tested on GPU", None)
    assert statuses["gpu/float16/O1/state"] == ("simulated", None)
    assert statuses["gpu/float16/O1/scaling"] == ("declared", None)
    assert statuses["gpu/float16/O2/scaling"] == ("not supported", "O2 is not there.")
    assert statuses["gpu/bfloat16/O1/casting"] == ("not supported", "bfloat16 is not there.")
    assert statuses["cpu, compiled/float16/O1/casting"] == ("tested", None)
    assert statuses["cpu, compiled/float16/O1/state"][0] == "not supported"
    assert "cpu, compiled/float32/O0/state" not in statuses
    assert {statuses[f"gpu, compiled/float16/O1/{aspect}"] for aspect in ASPECTS} == {
        ("not supported", "nothing casts compiled code.")
    }
    assert len(statuses) == (2 * len(COMBINATIONS) + 2) * len(ASPECTS)


def test_what_is_shown_without_the_device_is_never_said_to_be_tested():
    statuses = cells(make_rows("mine", EVIDENCE))
    assert statuses["gpu/float16/O1/casting"] == ("lowered for CUDA", None)
    on_device = {status for cell, (status, _) in statuses.items() if cell.startswith("gpu/")}
    assert on_device == {"lowered for CUDA", "simulated", "declared", "not supported"}


def test_what_is_not_supported_stands_beside_its_reason():
    text = reasons_table(make_rows("mine", EVIDENCE))
    assert "| mine | cpu | float16 O1 | the CPU casts nothing. |" in text
    assert "| mine | gpu | bfloat16 O1–O3 | bfloat16 is not there. |" in text
    assert "| mine | cpu | float32 O0, distributed | one process only. |" in text
    assert "| mine | gpu, compiled | float16 O1 | nothing casts compiled code. |" in text
    assert "O0 computes in float32." not in text


def test_the_compact_table_has_a_line_for_each_device():
    text = compact_table(make_rows("mine", EVIDENCE, ["gpu/float16/O1/casting"]))
    assert "| mine | gpu | float16 | declared | tested on GPU: O1 | O0, O1 | no | no | simulated: O1; O0 |" in text
    assert "| mine | cpu | none | tested | no | O0 | no | no | declared: O0 |" in text
    assert "| mine | cpu, compiled | float16 | tested | O1 |" in text


def test_only_checks_that_passed_on_a_cuda_device_count(tmp_path):
    def write(name, device, **statuses):
        checks = [
            {"framework": "mine", "check": check, "status": status, "covers": [f"gpu/{check}/O1/casting"]}
            for check, status in statuses.items()
        ]
        (tmp_path / name).write_text(json.dumps({"device": device, "checks": checks}))

    write("gpu-a.json", "cuda", float16="pass", bfloat16="FAIL")
    write("gpu-b.json", "cpu", float32="pass")
    (tmp_path / "other.json").write_text('{"steps": []}')
    assert read_gpu(tmp_path) == {"mine": {"gpu/float16/O1/casting"}}


@pytest.fixture
def checkout(tmp_path):
    """Return a function that makes what the table of versions is made from: constraints, extras and records."""

    def make(**records):
        extras = "\n".join(f"{framework} = ['{framework}>=1', 'helper']" for framework in FRAMEWORKS)
        (tmp_path / "pyproject.toml").write_text(f"[project.optional-dependencies]\n{extras}\n")
        (tmp_path / "constraints").mkdir()
        for framework in FRAMEWORKS:
            (tmp_path / "constraints" / f"{framework}.txt").write_text(f"{framework}==2.9.0\nhelper==0.3\nother==7\n")
            (tmp_path / "constraints" / f"{framework}-lowest.txt").write_text(f"{framework}==1.0.0\n")
        for name, (versions, *outcome) in records.items():
            environment = name.replace("_", "-")
            Record(environment, versions, "3.13.0", *outcome).write(tmp_path / FOLDER / f"{environment}.json")
        return tmp_path

    return make


def line_of(root, label):
    (line,) = (line for line in versions_table(root).splitlines() if line.startswith(f"| {label} |"))
    return line.strip("| ").split(" | ")[1:]


def test_the_table_of_versions_shows_what_ran(checkout):
    newest = {"jax": "2.10.0", "helper": "0.4", "other": "8"}
    root = checkout(
        jax_lowest=({"jax": "1.0.0", "helper": "0.2"}, 20, [], "2026-01-31"), jax_newest=(newest, 21, [], "2026-02-01")
    )
    assert line_of(root, "JAX") == [
        "jax 1.0.0; Python 3.13.0: 20 passed (2026-01-31)",
        "jax 2.9.0, helper 0.3",
        "jax 2.10.0, helper 0.4; Python 3.13.0: 21 passed (2026-02-01)",
    ]
    assert version_ranges(root)["jax"] == {"jax": VersionRange("1.0.0", "2.10.0")}


def test_a_newest_release_that_fails_is_no_part_of_the_tested_range(checkout):
    root = checkout(jax_newest=({"jax": "2.10.0"}, 19, ["a", "b"], "2026-02-01"))
    assert line_of(root, "JAX")[-1] == "jax 2.10.0; Python 3.13.0: **2 failed**, 19 passed (2026-02-01)"
    assert version_ranges(root)["jax"] == {"jax": VersionRange("1.0.0", "2.9.0", "2.10.0")}


def test_no_release_is_blamed_for_tests_that_fail_with_the_versions_of_every_change(checkout):
    root = checkout(jax_newest=({"jax": "2.9.0"}, 19, ["a"], "2026-02-01"))
    assert version_ranges(root)["jax"] == {"jax": VersionRange("1.0.0", "2.9.0")}


def test_the_table_of_versions_says_what_did_not_run(checkout):
    root = checkout(paddle_lowest=({"paddle": "0.9.0"}, 20, [], "2026-01-31"))
    assert line_of(root, "PyTorch")[::2] == ["torch 1.0.0: not run yet", "the newest release: not run yet"]
    # It ran with another version than the one that is the oldest now.
    assert line_of(root, "PaddlePaddle")[0] == "paddle 1.0.0: not run yet"


def test_a_run_is_put_on_file_with_its_versions_and_outcome(checkout, monkeypatch):
    monkeypatch.setattr("version_records.installed_version", {"jax": "2.10.0"}.get)
    root = checkout()
    plugin = RecordPlugin(root, "jax-newest")
    for test, when, outcome in (
        ("a", "setup", "passed"), ("a", "call", "passed"), ("b", "call", "failed"), ("c", "setup", "skipped"),
        ("d", "call", "passed"), ("d", "teardown", "failed"),
    ):  # fmt: skip
        plugin.pytest_runtest_logreport(pytest.TestReport(test, ("", 0, ""), {}, outcome, None, when))
    path = root / FOLDER / "jax-newest.json"
    plugin.pytest_sessionfinish(pytest.ExitCode.INTERRUPTED)
    assert Record.read(path) is None
    plugin.pytest_sessionfinish(pytest.ExitCode.TESTS_FAILED)
    record = Record.read(path)
    assert (record.versions, record.passed, record.failed) == ({"jax": "2.10.0"}, 1, ["b", "d"])


# -- this repository ------------------------------------------------------------------------------------


def test_readme_and_manual_show_the_tables():
    stale = [path.name for path, text in render(ROOT).items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make table`"


def test_update_writes_what_has_changed_and_nothing_else(tmp_path):
    files = ("README.md", "pyproject.toml", "ampx/tested_versions.json")
    for name in (*files, "docs/reference/capabilities.md", "docs/reference/versions.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("constraints", "docs/evidence", "benchmarks/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    assert update(tmp_path) == []
    page = tmp_path / "docs" / "reference" / "capabilities.md"
    before = page.read_text(encoding="utf-8")
    page.write_text(before.replace("| tested | O", "| tasted | O"), encoding="utf-8")
    assert update(tmp_path) == [page]
    assert page.read_text(encoding="utf-8") == before


def test_update_of_something_else_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="accepted: the root of a checkout"):
        update(tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "evidence").glob("*.json")), ids=lambda path: path.stem)
def test_every_tested_cell_names_tests_of_this_repository(path):
    """That they pass and show the cell is checked where they run; that they exist can be seen everywhere."""
    evidence = Evidence.read(path)
    for word, cell in evidence.cells():
        device, dtype, level, aspect = cell.split("/")
        assert (dtype, level) in COMBINATIONS
        assert aspect in ASPECTS
        assert (word == "tested") == device.startswith("cpu")
        for test in evidence.tests(word, cell):
            file, *_, name = test.partition("[")[0].split("::")
            source = (ROOT / file).read_text(encoding="utf-8")
            assert f"def {name}(" in source or "MatrixSuite" in source, test


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("_gpu_*.py")), ids=lambda path: path.stem)
def test_every_gpu_check_that_covers_a_cell_exists(path):
    assigned = {
        target.id: node.value
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    if "CHECKS" not in assigned:
        return
    checks = {element.id for element in assigned["CHECKS"].elts}
    covers = ast.literal_eval(assigned["COVERS"])
    assert set(covers) <= checks
    for cell in (cell for cells in covers.values() for cell in cells):
        _, dtype, level, aspect = cell.split("/")
        assert (dtype, level) in COMBINATIONS
        assert aspect in ASPECTS
