"""What the commands say of the corpus: never worse than what is on file, and nothing of a healthy twin.

The oracle is the truth that stands beside the scripts, which was measured without ampx: see `corpus.py`.
"""

import ast
import json

import pytest

from corpus import FRAMEWORKS, SCRIPTS, cases, losses_of
from processes import run_python
from score import JUDGES, RESULTS, VERDICTS, Runner

HEALTHY = "right"  # of twins


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_script_has_its_truth_and_its_twin(framework):
    scripts = {script.stem: script.read_text() for script in (SCRIPTS / framework).glob("*.py")}
    named = {case.name: case for case in cases(framework)}
    assert scripts.keys() == named.keys()
    for name, text in scripts.items():
        assert "--twin" in text, name
        assert ("--cure" in text) == bool(named[name].edit), name
        assert "ampx" not in text, name
        assert ast.get_docstring(ast.parse(text)), name
        assert not named[name].code or named[name].code in text, name


def recorded(case, twin, tool):
    """Return the verdict on file."""
    file = RESULTS / f"{case.framework}.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    verdicts = [row["verdict"] for row in rows if (row["case"], row["twin"], row["tool"]) == (case.name, twin, tool)]
    if not verdicts:
        pytest.skip(f"no score is on file: python tests/corpus/score.py {case.framework} --only {case.name}")
    return verdicts[0]


@pytest.mark.parametrize("twin", [False, True], ids=["fails", "twin"])
def test_diagnose_is_no_worse_than_on_file(case, twin, tmp_path):
    before = recorded(case, twin, "diagnose")
    runner = Runner(case, tmp_path, ["--twin"] if twin else [])
    verdict, said = JUDGES["diagnose"](runner, case, twin or case.healthy_by_run)
    order = [HEALTHY, *VERDICTS]
    assert order.index(verdict) <= order.index(before), said


def test_the_twin_trains_in_plain_python(case):
    # MXNet cannot be imported without a name that NumPy 1.24 removed.
    mended = "import sys, runpy, numpy; numpy.bool = bool; sys.argv.pop(0); runpy.run_path(sys.argv[0], {}, '__main__')"
    command = ["-c", mended] if case.framework == "mxnet" else []
    losses = losses_of(run_python(*command, case.script, "--twin", check=True).stdout)
    assert all(loss == loss for loss in losses)
