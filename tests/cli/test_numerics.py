"""`ampx run`, `compare`, `diagnose` and `tune` of a script of PyTorch, which knows nothing of ampx."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from html.parser import HTMLParser

import pytest

import ampx
from ampx.numerics import report
from ampx.run.report import lost_map

torch = pytest.importorskip("torch", reason="the scripts train with PyTorch")
pytest.importorskip("matplotlib", reason="pages need matplotlib, of the extra report")

SCRIPT = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model.add_module("<script>alert(1)</script>", torch.nn.Identity())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1000):
    optimizer.zero_grad()
    loss = (model(torch.randn(4, 8)) - 1).square().mean()
    loss.backward()
    optimizer.step()
"""
FAILS = SCRIPT.replace("torch.randn(4, 8)", "torch.randn(4, 8) * (1e9 if step == 2 else 1)")
# Frameworks refuse to mix dtypes where nothing casts the operands alike.
RAISES = SCRIPT.replace("torch.nn.ReLU()", "Rows()").replace(
    "torch.manual_seed(0)",
    """
class Rows(torch.nn.Module):
    def forward(self, x):
        return torch.zeros(4, 16).index_add(0, torch.arange(4), x)
""",
)
ENDS = SCRIPT.replace("range(1000)", "range(100)")
COMMANDS = {
    "run": (ENDS, "--policy", "policy.toml"),
    "compare": (SCRIPT, "--dtype", "bfloat16", "--steps", "8", "--repeats", "1"),
    "diagnose": (FAILS, "--dtype", "float16", "--at", "3"),
    "tune": (SCRIPT, "--dtype", "bfloat16", "--steps", "2", "--repeats", "0"),
}


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


class Page(HTMLParser):
    """Notes the tags of a page, and what it reaches for."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.reached = Counter(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.reached += [value for name, value in attrs if name in ("src", "href") and not value.startswith("#")]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_writes_a_page_that_needs_nobody_and_the_json_that_the_manual_describes(
    ampx_command, tmp_path, command, check_documented
):
    text, *options = COMMANDS[command]
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "policy.toml").write_text('framework = "torch"\ndtype = "bfloat16"\ndeny = ["module:2"]\n')
    done = ampx_command(command, *options, "--report", "out.html", "train.py")
    result = json.loads((tmp_path / "out.json").read_text())
    check_documented(result)

    text = (tmp_path / "out.html").read_text()
    page = Page(text)
    assert page.reached == []
    assert not page.tags.keys() & {"script", "link", "img", "iframe"}
    if command != "run":
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert page.tags["svg"] >= 2  # curves, and layers by steps
    footer = text.partition("<footer>")[2]
    for piece in (f"torch {torch.__version__}", f"ampx {ampx.__version__}", result["origin"]["date"]):
        assert piece in footer
    said = (
        f"  report      {tmp_path / 'out.html'}\n" in done.stderr
        if command == "run"
        else "\nReport: out.html\n" in done.stdout
    )
    assert said
    globals()[f"check_{command}"](result, done, tmp_path)


def check_run(result, done, folder):
    (meter,) = result["meters"]
    assert (meter["steps"], meter["lost"]) == ([100], [meter["last"]["lost"]])
    assert len(meter["map"]["lost"]) == 4  # parameters
    assert "meter       SGD, step 100: " in done.stderr
    assert (result["dtype"], result["steps"]) == ("bfloat16", 100)
    assert [step for step, _ in result["losses"]] == list(range(1, 101))
    assert result["losses"][-1][1] < result["losses"][0][1]
    assert "<h2>Loss</h2>" in (folder / "out.html").read_text()
    dtypes = {entry["dtype"] for entry in result["ops"] if entry["op"] == "addmm"}
    assert dtypes == {"bfloat16", "float32"}  # the first layer, and the one that the policy denies
    assert "policy=" in done.stderr


def check_compare(result, done, folder):
    facts = result["dtypes"]["bfloat16"]
    assert (result["framework"], result["steps"], len(facts["losses"])) == ("torch", 8, 8)
    assert facts["verdict"] in done.stdout
    assert facts["meters"][0]["steps"] == list(range(1, 9))
    assert "updates lost" in done.stdout
    assert facts["modules"]["map"]["modules"][-2] == "<script>alert(1)</script>"
    runs = {name: {"steps_a_second": 2.0, "peak_memory": 2**20, "speed": None} for name in ("float32", "bfloat16")}
    points = [{"value": "1", "runs": runs, "failed": {}}, {"value": "2", "runs": {}, "failed": {"float32": "<b>x</b>"}}]
    swept = {**result, "sweep": {"option": "--n", "points": points}}
    assert "With --n 2 float32 failed: &lt;b&gt;x&lt;/b&gt;" in report.to_page(swept)
    report.write(folder / "swept.png", swept)
    assert (folder / "swept.png").read_bytes()[:4] == b"\x89PNG"
    for run in (result["float32"], facts):
        run["losses_of"] = ["SGD 1", "SGD 2"] * 4
    pictures = report.draw(result).subfigs[0].axes
    assert [axes.get_title() for axes in pictures] == ["Loss of SGD 1", "Loss of SGD 2"]
    assert [list(curve.get_xdata()) for axes in pictures for curve in axes.get_lines()] == [[1, 3, 5, 7]] * 2 + [
        [2, 4, 6, 8]
    ] * 2


def check_diagnose(result, done, folder):
    assert (result["step"], result["diagnosis"]["kind"]) == (3, "overflow")
    assert result["diagnosis"]["first_nonfinite"]["module"] == "0"
    assert "In step 3, the output of " in done.stdout
    assert " overflows float16: it is " in done.stdout
    assert result["map"]["steps"] == [1, 2, 3]
    first = result["map"]["largest"][result["map"]["modules"].index("0")]
    assert [value is None for value in first] == [False, False, True]
    assert "<h2>What the modules of step 3 need, and what the dtype holds</h2>" in (folder / "out.html").read_text()


def check_tune(result, done, folder):
    assert result["verdict"] in done.stdout
    assert " s] train.py: run 1, float32, watched …" in done.stderr  # no terminal: a line each
    assert set(result["losses"]) == {"float32", "bfloat16"}
    assert result["map"]["steps"] == [1, 2]


def test_a_script_that_raises_in_low_precision_is_told_which_module_to_keep_in_float32(ampx_command, tmp_path):
    (tmp_path / "train.py").write_text(RAISES)
    done = ampx_command("diagnose", "--dtype", "bfloat16", "--steps", "2", "train.py")
    assert "In step 1, the output of index_add in module '1' (" in done.stdout
    assert "deny=['module:1']" in done.stdout
    (tmp_path / "policy.toml").write_text('dtype = "bfloat16"\ndeny = ["module:1"]\n')
    ampx_command("run", "--policy", "policy.toml", "train.py")


def test_a_map_of_lost_updates_is_drawn_where_there_are_some():
    meter = {"optimizer": "SGD", "dtype": "bfloat16", "steps": [100], "map": {"parameters": ["w", "b"]}}
    assert lost_map({**meter, "map": {**meter["map"], "lost": [[0.004], [None]]}}) == ""
    assert lost_map({**meter, "map": {**meter["map"], "lost": [[0.0], [0.25]]}}).startswith("<svg")


def test_a_page_calls_a_finite_value_wrong_and_only_others_not_finite():
    finite, infinite = ({"value": {"nonfinite": count}} for count in (0, 3))
    names = {
        (kind, place["value"]["nonfinite"]): [
            name for name, _ in report._bracket({"kind": kind, "last_finite": finite, "first_nonfinite": place})
        ]
        for kind, place in (("digits", finite), ("overflow", infinite), ("error", finite))
    }
    assert names == {
        ("digits", 0): ["last right", "first wrong"],
        ("overflow", 3): ["last finite", "first non-finite"],
        ("error", 0): ["raises"],
    }


@pytest.mark.parametrize(("direction", "largest"), [("backward", 1e-9), ("forward", 20.0)])
def test_the_picture_shows_gradients_where_they_fail(direction, largest):
    entries = [
        {"module": "0", "direction": way, "float32": None, "value": {"smallest": size / 2, "largest": size}}
        for way, size in (("forward", 20.0), ("backward", 1e-9))
    ]
    diagnosis = {"first_nonfinite": {"module": "0", "direction": direction}}
    (axes,) = report._draw_ranges({"dtype": "float16", "diagnosis": diagnosis, "modules": entries}).axes
    assert [*axes.get_lines()[0].get_xdata()] == [largest / 2, largest]
    assert ("gradients" if direction == "backward" else "outputs") in axes.get_title()


def test_a_script_that_is_not_there_is_a_wrong_option_of_every_command(ampx_command):
    for command in ("compare", "diagnose", "tune"):
        done = ampx_command(command, "nothere.py", code=2)
        assert done.stderr.splitlines()[-1].startswith("ampx: the script 'nothere.py' cannot be read: No such file")
        assert "standard input" not in done.stderr  # which these commands do not take


def test_a_report_of_no_kind_is_refused_before_anything_runs(ampx_command, script):
    done = ampx_command("compare", "--report", "out.pdf", script, code=2)
    assert "ends in .json or .html or .png" in done.stderr


def test_run_refuses_a_policy_file_of_another_framework(ampx_command, script, tmp_path):
    (tmp_path / "ampx.toml").write_text('framework = "jax"\n')
    done = ampx_command("run", "--policy", "ampx.toml", script, code=2)
    assert "is for 'jax', and 'torch' is what computes" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another matter there")
def test_a_termination_ends_the_script_that_a_command_runs_too(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('half').write_text(str(os.getpid()))\n"
        "pathlib.Path('half').rename('pid')  # so that nobody reads half of it\n"
        "time.sleep(240)\n"
    )
    command = subprocess.Popen([sys.executable, "-m", "ampx", "diagnose", "train.py"], cwd=tmp_path)
    try:
        while command.poll() is None and not (tmp_path / "pid").exists():
            time.sleep(0.05)
        command.terminate()
        assert command.wait(60) == 128 + signal.SIGTERM
    finally:
        command.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
