"""The manual's tables of measurements are those of the committed runs."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("benchmark_report", ROOT / "benchmarks" / "report.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_tables_are_those_of_the_committed_runs(report):
    pages = report.pages(ROOT / "benchmarks" / "results")
    committed = {path.name: path.read_text() for path in report.DOCS.glob("*.md")}
    assert pages
    assert pages == committed, "run: python benchmarks/run.py --report"


def test_page_includes_every_table_and_picture(report):
    page = (ROOT / "docs" / "reference" / "benchmarks.md").read_text()
    included = set(re.findall(r"\{(?:include|image)\} benchmarks/(\S+)", page))
    assert included == {path.name for path in report.DOCS.iterdir()}


def test_a_median_in_a_table_is_the_one_in_the_json(report):
    row = {"against": "a", "workload": "w", "dtype": "float16", "median_a": 0.0015, "median_b": 2.5, "ratio": 0.6}
    run = {"whole_step": [{**row, "ratio_low": 0.5, "ratio_high": 0.75, "peak_a": 3.25, "peak_b": None}]}
    (table,) = report.tables(run)
    assert table.rows == (("a", "w", "float16", "1.50 ms", "2.5 s", "0.600", "0.500 to 0.750", "3.2 MiB", ""),)
    assert table.markdown().splitlines()[1] == "| --- | --- | --- |" + " ---: |" * 6
    (table,) = report.tables({"whole_step": [*run["whole_step"], {**run["whole_step"][0], "workload": "v"}]})
    said, _, names, rule, *rows = table.markdown().splitlines()
    assert said == "against: a; dtype: float16."
    assert names.startswith("| workload | ampx |")
    assert rule == "| --- |" + " ---: |" * 6
    assert [row[:6] for row in rows] == ["| w | ", "| v | "]


def test_a_part_that_fails_keeps_no_other_from_running_and_is_told_by_the_exit_status(tmp_path):
    (tmp_path / "absent.py").write_text("import nowhere\n")
    (tmp_path / "broken.py").write_text("STEPS = 1\ndef run(quick, advance):\n    raise ValueError('it is broken')\n")
    (tmp_path / "sound.py").write_text(
        "import _paired\nSTEPS = 1\ndef run(quick, advance):\n    print(quick, _paired.limited([3, 4]), flush=True)\n"
        "    return [] if _paired.paired(int, int, pairs=9, repeat=9).pairs == 2 else None\n"
    )

    def run(*parts):
        command = [sys.executable, ROOT / "benchmarks" / "run.py", "--framework", "jax", "--tiny", "--only", *parts]
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)

    before = sorted((ROOT / "benchmarks" / "results").iterdir())
    done = run("absent", "broken", "sound")
    assert done.returncode == 1, done.stderr
    assert "it is broken" in done.stdout
    assert "True [3]" in done.stdout
    assert "failed: absent, broken" in done.stdout
    assert run("sound").returncode == 0
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before
