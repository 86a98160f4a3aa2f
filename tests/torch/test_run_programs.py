"""`ampx run` trains unedited programs to the accuracy that they have in float32.

Two runs of one program that round differently are two draws from the same distribution, once training has amplified the
differences. So the tolerances are statistical: three standard errors of a difference of two such draws.
"""

import functools
import json
import math
import statistics
from pathlib import Path

import pytest

from processes import run_python

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("sklearn", reason="needs scikit-learn, of the extra demo")
pytest.importorskip("typer", reason="needs typer, of the extra cli")

PROGRAMS = Path(__file__).parents[1] / "programs"
NIGHTLY = pytest.mark.nightly
PLAIN = [
    "plain/torch_plain.py",
    *(
        pytest.param(f"plain/torch_{name}.py", marks=NIGHTLY)
        for name in ("several_optimizers", "accumulation_clipping", "compile")
    ),
]
# With the arguments for mixed precision, and those for float32.
NATIVE = {
    **{
        f"torch_cuda_amp/{name}.py": ([], ["--no-amp"])
        for name in ("image_classification", "gan", "language_model", "rnn")
    },
    "torch_amp/image_classification.py": (["--amp"], []),
    "torch_amp/gan.py": ([], ["--fp32"]),
    "torch_amp/language_model.py": (["--amp"], []),
}
EVERY_RUN = "torch_amp/image_classification.py"
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
# Four units of roundoff of the compute dtype, relative: the first loss, before training amplifies anything.
FIRST = {"bfloat16": 4 * 2.0**-8, "float16": 4 * 2.0**-11}
LAST = 20  # steps
IMAGES = 397  # that the programs keep for the test, at the least


@functools.cache
def train(*command):
    done = run_python(*command, check=True, nests=True)
    return done.stdout, done.stderr


def results(out):
    return json.loads(out.splitlines()[-1])


def assert_same_training(plain, run, dtype):
    first, last = plain["losses"][0], plain["losses"][-LAST:]
    assert run["losses"] != plain["losses"], "it ran in float32"
    assert abs(run["losses"][0] - first) <= FIRST[dtype] * max(1.0, abs(first))
    error = statistics.stdev(last) * math.sqrt(2 / LAST)
    assert abs(statistics.mean(run["losses"][-LAST:]) - statistics.mean(last)) <= 3 * error
    if plain["metric"] > 0.8 and max(last) < 1.5:  # an accuracy, and no loss
        error = math.sqrt(2 * plain["metric"] * (1 - plain["metric"]) / IMAGES)
        assert abs(run["metric"] - plain["metric"]) <= 3 * error + 1 / IMAGES


def report_of(tmp_path, program, dtype, *options, arguments=()):
    target = tmp_path / "out.json"
    out, err = train("-m", "ampx", "run", "--dtype", dtype, "--report", str(target), *options, program, *arguments)
    return results(out), err, json.loads(target.read_text())


@DTYPES
@pytest.mark.parametrize("name", PLAIN)
def test_an_unedited_program_trains_as_in_float32(name, dtype, tmp_path):
    program = str(PROGRAMS / name)
    plain = results(train(program)[0])
    run, err, report = report_of(tmp_path, program, dtype)
    assert_same_training(plain, run, dtype)
    assert f"ampx run: torch in {dtype} on " in err
    assert f"amp = ampx.init('torch', dtype='{dtype}', level='O1')" in err
    assert report["skipped"] <= (3 if dtype == "float16" else 0)  # while the loss scale finds its level
    steps = [entry["steps"] for entry in report["optimizers"]]
    assert steps == [len(run["losses"])] * len(steps)
    assert any(entry["dtype"] == dtype for entry in report["ops"])
    assert set(report["seconds"]) == {"forward", "backward", "step"}
    for ours, theirs in zip(run.get("norms", ()), plain.get("norms", ()), strict=True):
        assert ours == pytest.approx(theirs, rel=0.5)  # clipped by norms that carry no loss scale of 65536


@DTYPES
@pytest.mark.parametrize(
    "name", [EVERY_RUN, *(pytest.param(name, marks=NIGHTLY) for name in sorted(NATIVE) if name != EVERY_RUN)]
)
def test_a_program_with_mixed_precision_of_its_own_is_carried_out_by_ampx(name, dtype, tmp_path):
    program, (amp, float32) = str(PROGRAMS / name), NATIVE[name]
    plain = results(train(program, *float32)[0])
    run, _, report = report_of(tmp_path, program, dtype, "--replace-native", arguments=amp)
    assert_same_training(plain, run, dtype)
    assert report["steps"] == len(run["losses"]) * len(report["optimizers"])
    assert any(entry["dtype"] == dtype for entry in report["ops"])


@pytest.mark.filterwarnings("ignore")
def test_a_program_with_mixed_precision_of_its_own_is_refused_and_runs_unchanged_on_request():
    program = str(PROGRAMS / "torch_amp" / "gan.py")
    arguments = ("run", "--unchanged-if-refused", program, "--niter", "1")
    out, err = train("-m", "ampx", *arguments)
    assert "the script makes a GradScaler of its own" in err
    assert "starting the script again, without ampx" in err
    assert results(out) == results(train(program, "--niter", "1")[0])


@pytest.mark.parametrize(("options", "code", "printed"), [((), 3, ""), (("--unchanged-if-refused",), 0, "trained\n")])
def test_what_is_refused_before_the_script_begins_is_refused_like_all_else(options, code, printed, tmp_path):
    (tmp_path / "train.py").write_text("print('trained')\n")
    arguments = ("--framework", "torch", "--level", "O2", *options, str(tmp_path / "train.py"))
    done = run_python("-m", "ampx", "run", *arguments, nests=True)
    assert (done.returncode, done.stdout) == (code, printed)
    assert "ampx run: refused: --level O2 needs ampx.prepare" in done.stderr
