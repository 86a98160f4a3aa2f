"""`ampx demo --all`: every framework in a process of its own, absent ones listed, earlier results taken in."""

from __future__ import annotations

import importlib.util
import json
import struct

import pytest

from ampx.cli.demo_command import find_earlier

PLUGIN = """
import ampx
@ampx.hookimpl
def ampx_register_backends(register):
    register("{name}", load, roots=("{name}",), requires="{name}>=1")
def load():
    from {name} import make
    return make()
"""
# A framework whose training takes no time; what it does instead stands in place of the comment.
FRAMEWORK = """
import os
import ampx
from ampx.cli.demo import Demo, RunResult
from toy.implicit import ImplicitToy

class Trainer(Demo):
    def train(self, data, run, on_step):
        # here
        losses = [2.0, 1.0, 0.5, 0.25]
        skipped = [] if run.overflow_at is None else [1]
        scales = [4.0, 4.0, 2.0, 2.0] if skipped else [1.0] * 4
        return RunResult(run.dtype, run.seed, "cpu", True, str(os.getpid()), 0.9, 0.5, 1.0, 100.0, losses, scales,
            skipped, scales[-1])

class Backend(ImplicitToy):
    name = "{name}"
    def device(self, name):
        return ampx.Device("cpu", frozenset({dtypes}))
    offers = {{"demo": Trainer}}

def make():
    return Backend()
"""
REAL = "torch,tensorflow,mxnet,paddle,jax"


@pytest.fixture
def run(ampx_command):
    """Run `ampx demo --all` with the frameworks of this environment switched off."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")

    def start(*arguments, code=0, **environment):
        settings = {"AMPX_DISABLE_PLUGINS": REAL, **environment}
        return ampx_command("demo", "--all", "--out", "out", *arguments, code=code, **settings)

    def add(name, instead="pass", dtypes=("float16",)):
        ampx_command.add_plugin(name, f"{name}_plugin")
        ampx_command.add_module(f"{name}_plugin", PLUGIN.format(name=name))
        text = FRAMEWORK.format(name=name, dtypes=set(dtypes) or "()").replace("# here", instead)
        ampx_command.add_module(name, text)

    start.add, start.out, start.command = add, ampx_command.folder / "out", ampx_command
    return start


def comparison(run):
    content = json.loads((run.out / "comparison.json").read_text())
    assert content["schema"] == "ampx.demo-comparison/1"
    return {entry["framework"]: entry for entry in content["frameworks"]}


def test_each_framework_runs_in_a_process_of_its_own_and_all_are_compared(run):
    run.add("one")
    run.add("two")
    text = run().stdout
    shown = comparison(run)
    assert (shown["one"]["state"], shown["two"]["state"]) == ("ran", "ran")
    pids = {name: {run_of_one["reason"] for run_of_one in shown[name]["runs"]} for name in ("one", "two")}
    assert len(pids["one"]) == len(pids["two"]) == 1
    assert pids["one"] != pids["two"]
    for name in ("one", "two"):
        assert f"{name}, cpu" in text
        assert json.loads((run.out / name / "results.json").read_text())["framework"] == name
        assert (run.out / name / "demo.png").exists()
    data = (run.out / "comparison.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > height > 500


def test_what_cannot_be_trained_is_listed_with_what_to_do_and_is_no_failure(run):
    run.add("one")
    run.command.add_plugin("toy", "toy.plugin")
    run.command.add_plugin("ghost", "ghost_plugin")
    run.command.add_module("ghost_plugin", PLUGIN.format(name="ghost"))
    text = run().stdout
    assert "toy no demo: backend 'toy' does not support ampx demo" in text
    assert "ghost not installed: pip install 'ghost>=1'" in text
    for name in ("torch", "paddle", "jax"):
        there = importlib.util.find_spec(name) is not None
        state = "no ampx backend:" if there else f"not installed: pip install 'ampx-precision[{name}]'"
        assert f"{name} {state}" in text


PROBLEMS = {
    "raises": ("raise RuntimeError('no more memory')", "RuntimeError: no more memory"),
    "leaves": ("os._exit(9)", "the training ended the interpreter with exit code 9"),
    "crashes": ("os.abort()", "the training crashed with SIGABRT"),
}


def test_a_failed_run_gives_exit_code_1_and_the_others_are_shown(run):
    run.add("one")
    for name, (instead, _) in PROBLEMS.items():
        run.add(name, instead)
    run.command.add_plugin("shaky", "shaky_plugin")
    run.command.add_module("shaky_plugin", "raise RuntimeError('the plugin is shaky')")
    text = run(code=1).stdout
    shown = comparison(run)
    for name, (_, problem) in PROBLEMS.items():
        assert f"{name} failed: {problem}" in text
        assert (shown[name]["state"], shown[name]["runs"]) == ("failed", [])
    assert "shaky failed: its plugin is broken" in text
    assert "the plugin is shaky" in text
    assert "one, cpu" in text
    assert shown["one"]["state"] == "ran"


def test_results_of_earlier_runs_elsewhere_are_taken_in_and_said_to_be(run):
    run.add("one")
    run.add("two")
    run("--epochs", "2", AMPX_DISABLE_PLUGINS=f"{REAL},two")
    (run.command.folder / "one" / "__init__.py").unlink()  # another environment: it has two, and not one
    text = run("--epochs", "3", AMPX_DISABLE_PLUGINS=REAL).stdout
    assert "one was not trained now: this is the result of " in text
    assert "in one/results.json, with epochs 2 instead of 3" in text
    shown = comparison(run)
    assert (shown["one"]["state"], shown["two"]["state"]) == ("earlier", "ran")
    assert [entry["label"] for entry in shown["one"]["runs"]] == ["float32", "float16"]


def test_the_latest_result_in_the_folder_or_below_counts(tmp_path):
    import os

    def write(path, framework, **changes):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"schema": "ampx.demo/1", "framework": framework, **changes}))

    write(tmp_path / "results.json", "one", epochs=1)
    write(tmp_path / "elsewhere" / "results.json", "one", epochs=2)
    write(tmp_path / "other" / "results.json", "two", schema="something else")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.json").write_text("{")
    os.utime(tmp_path / "results.json", (1, 1))
    assert {name: report["epochs"] for name, (_, report) in find_earlier(tmp_path).items()} == {"one": 2}


DIFFERS = """if run.loss_scale:
            return RunResult('float32', 0, 'cpu', True, '', 0.9, 0.5, 1.0, 1.0, [2.1], [4.0], [], 4.0)"""


def test_where_nothing_is_cast_it_says_whether_scaling_changed_anything(run):
    run.add("right", dtypes=())
    run.add("wrong", DIFFERS, dtypes=())
    equal = "right, float32, scaled: all 4 losses and the accuracy equal those of float32, bit for bit."
    differs = "wrong, float32, scaled: the losses differ from those of float32; they must not."
    text = run().stdout
    assert equal in text
    assert differs in text
    assert equal in run.command("demo", "--framework", "right", "--out", "out").stdout


def test_json_is_what_the_file_holds(run, check_documented):
    run.add("one")
    document = json.loads(run("--json").stdout)
    assert document == json.loads((run.out / "comparison.json").read_text())
    check_documented(document)


def test_without_anything_to_show_it_says_what_to_install(run):
    stderr = run(code=1).stderr
    assert "accepted: at least one of either" in stderr
    assert "pip install 'ampx-precision[" in stderr or "no plugin registers one" in stderr


def test_all_and_a_framework_are_a_usage_error(run):
    assert "--all and --framework torch were both given" in run("--framework", "torch", code=2).stderr
