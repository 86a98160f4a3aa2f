"""What the commands say of the corpus: never worse than what is on file, and nothing of a healthy twin.

The oracle is the truth that stands beside the scripts, which was measured without ampx: see `corpus.py`.
"""

import ast
import json

import pytest

from corpus import FRAMEWORKS, SCRIPTS, cases, losses_of
from processes import run_python
from score import JUDGES, RESULTS, VERDICTS, Runner, names_what_fails

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


@pytest.mark.parametrize(
    ("says", "verdict"),
    [
        ("the gradient computed by div (bert_distance.py:{at}) is not finite", "right without cure"),
        ("the gradient computed by div (bert_distance.py:3) is not finite", "wrong"),
        ("the output of module in module 'pooler' (activations.py:{at}) is not finite", "wrong"),
        ("whichever modules were tried in float32.", "silent"),
    ],
)
def test_advice_to_stay_in_float32_is_judged_by_the_fault_that_it_names(says, verdict):
    (case,) = (case for case in cases("torch") if case.name == "bert_distance")
    lines = case.script.read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if case.code in line)
    assert names_what_fails(case, f"Stay in float32: in float16 losses differ, {says.format(at=at)}") == verdict


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
