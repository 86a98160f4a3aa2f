"""The manual's tables of measurements are those of the committed runs."""

import importlib.util
import pathlib
import re
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
