"""`ampx run` runs a script as `python` does. No framework is needed here; what each trains is in its own tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ampx.cli.app import app
from ampx.run import program

RUNNING = ("run", "compare", "diagnose", "tune")
AMPX = str(Path(sys.executable).with_name("ampx"))
SPY = """
import json, sys
print(json.dumps([sys.argv, __name__, __file__, sys.path[0], __spec__ and __spec__.name, __package__]))
"""


@pytest.fixture
def outcome(tmp_path):
    """Return a function that runs a command in a fresh folder."""

    def run(*command):
        environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return run


def told(done):
    """Split stderr into the script's part and ampx's."""
    lines = done.stderr.splitlines(keepends=True)
    own = [line for line in lines if line.startswith("ampx")]
    return "".join(line for line in lines if line not in own), "".join(own)


def same_as_python(outcome, *arguments):
    """Run plainly and with ampx; code, stdout and what the script leaves on stderr must be the same."""
    plain, run = outcome(sys.executable, *arguments), outcome(AMPX, "run", *arguments)
    assert run.returncode == plain.returncode
    assert run.stdout == plain.stdout
    assert told(run)[0] == plain.stderr
    return run


def test_the_script_finds_what_python_would_give_it(tmp_path, outcome):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "script.py").write_text(SPY)
    arguments = ("inner/script.py", "--dtype", "mine", "-m", "--", "--help", "run")
    done = same_as_python(outcome, *arguments)
    assert json.loads(done.stdout)[0] == list(arguments)


def test_a_folder_with_a_main_module_runs(tmp_path, outcome):
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text("import helper\nprint(helper.x, __name__)")
    (tmp_path / "program" / "helper.py").write_text("x = 1")
    same_as_python(outcome, "program")


@pytest.mark.parametrize("name", ["package", "package.module"])
def test_a_module_runs(tmp_path, outcome, name):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    for module in ("__main__", "module"):
        (tmp_path / "package" / f"{module}.py").write_text(f"from . import other\n{SPY}")
    (tmp_path / "package" / "other.py").write_text("")
    same_as_python(outcome, "-m", name, "--report", "x")


def test_a_policy_that_is_off_leaves_the_script_as_it_is_and_says_so(tmp_path, outcome):
    (tmp_path / "script.py").write_text("print('hello')")
    (tmp_path / "ampx.toml").write_text("dtype = 'float32'\nenabled = false\n")
    done = outcome(AMPX, "run", "--policy", "ampx.toml", "script.py")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "ampx.toml' says enabled = false: the script ran as it does without ampx." in done.stderr


def test_stand_ins_alone_beside_a_policy_that_is_on_are_not_blamed_on_the_policy(tmp_path, outcome):
    (tmp_path / "script.py").write_text("print('hello')")
    (tmp_path / "ampx.toml").write_text("dtype = 'float32'\n")
    asked = (AMPX, "run", "--stand-ins-only", "--policy", "ampx.toml")
    done = outcome(*asked, "--report", "report.json", "script.py")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    (note,) = json.loads((tmp_path / "report.json").read_text())["notes"]
    assert note.startswith("Only stand-ins were asked for: ")
    assert note in done.stderr
    (tmp_path / "report.json").unlink()
    assert outcome(*asked, "script.py").stderr == ""


def test_python_m_ampx_is_the_same_command(tmp_path, outcome):
    (tmp_path / "script.py").write_text("print('hello')")
    done = outcome(sys.executable, "-m", "ampx", "run", "script.py")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "nothing to automate: the script made no optimizer" in done.stderr


@pytest.mark.parametrize("end", ["sys.exit(7)", "sys.exit('no')", "sys.exit()", "raise SystemExit(True)", "pass"])
def test_the_exit_code_is_the_script_s(tmp_path, outcome, end):
    (tmp_path / "script.py").write_text(f"import sys\nprint('out')\nprint('err', file=sys.stderr)\n{end}\n")
    same_as_python(outcome, "script.py")


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    return 1 / 0\nf()\n",
        "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('b') from error\n",
        "import nowhere_to_be_found\n",
        "def broken(:\n",
        "import sys\nsys.excepthook = lambda *error: print('mine', error[0])\n1 / 0\n",
    ],
)
def test_a_traceback_is_the_script_s(tmp_path, outcome, text):
    (tmp_path / "script.py").write_text(text)
    same_as_python(outcome, "script.py")


def test_the_standard_input_runs(tmp_path):
    for command in ([sys.executable], [AMPX, "run"]):
        done = subprocess.run(
            [*command, "-", "a"], input=SPY, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert json.loads(done.stdout) == [["-", "a"], "__main__", "<stdin>", "", None, None]


def test_the_argument_of_torch_distributed_launch_reaches_the_script(tmp_path, outcome):
    """The launcher puts it before everything else: `python -m ampx --local-rank=1 run script.py`."""
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv[1:])")
    done = outcome(sys.executable, "-m", "ampx", "--local-rank=1", "run", "script.py", "--epochs", "3")
    assert (done.returncode, done.stdout) == (0, "['--local-rank=1', '--epochs', '3']\n")


@pytest.mark.parametrize("end", ["1 / 0", "import sys; sys.exit(3)"])
def test_nothing_is_said_of_what_a_failed_script_might_have_trained(tmp_path, outcome, end):
    (tmp_path / "script.py").write_text(end)
    assert "nothing to automate" not in same_as_python(outcome, "script.py").stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_process_of_a_job_prints_and_each_writes_a_report_of_its_own(tmp_path, monkeypatch, outcome, rank):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "script.py").write_text("pass")
    done = outcome(AMPX, "run", "--report", "out.json", "script.py")
    assert ("ampx run" in done.stderr) == (rank == "0")
    written = {"0": "out.json", "1": "out.rank1.json"}[rank]
    assert [path.name for path in tmp_path.glob("*.json")] == [written]
    assert done.stderr.count(str(tmp_path / "out.json")) == (rank == "0")
    facts = json.loads((tmp_path / written).read_text())
    assert (facts["rank"], facts["world_size"]) == (int(rank), 2)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another matter there")
def test_a_termination_leaves_summary_and_report(tmp_path, outcome):
    (tmp_path / "script.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)")
    done = outcome(AMPX, "run", "--report", "out.json", "script.py")
    assert done.returncode == -signal.SIGTERM  # 143 in a shell
    assert "ampx run: nothing to automate" in done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["script"] == "script.py"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another matter there")
def test_a_script_s_own_handler_of_terminations_is_left_alone(tmp_path, outcome):
    (tmp_path / "script.py").write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    assert same_as_python(outcome, "script.py").returncode == 5


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_copy_of_the_script_says_nothing_of_ampx(tmp_path, outcome):
    (tmp_path / "script.py").write_text(
        "import os\nchild = os.fork()\nif child:\n    os.waitpid(child, 0)\nprint('ends', bool(child), flush=True)\n"
    )
    assert same_as_python(outcome, "script.py").stderr.count("ampx run") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_child_that_is_terminated_says_nothing(tmp_path, outcome):
    (tmp_path / "script.py").write_text(
        "import multiprocessing, time\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "child.start()\n"
        "child.terminate()\n"
        "child.join()\n"
        "print(child.exitcode)\n"
    )
    done = same_as_python(outcome, "script.py")
    assert done.stdout == "-15\n"
    assert done.stderr.count("ampx run") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another matter there")
def test_an_interrupt_ends_as_python_ends(tmp_path, outcome):
    (tmp_path / "script.py").write_text(
        "import atexit, os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have switched off\n"
        "atexit.register(print, 'left')\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert same_as_python(outcome, "script.py").returncode == -signal.SIGINT


def test_objects_of_the_script_are_pickled_and_atexit_still_finds_them(tmp_path, outcome):
    (tmp_path / "script.py").write_text(
        "import atexit, pickle\n"
        "class Thing: pass\n"
        "print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)\n"
        "def last(): print(Thing)\n"
        "atexit.register(last)\n"
    )
    same_as_python(outcome, "script.py")


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        (("absent.py",), "the script 'absent.py' cannot be read"),
        (("-m", "absent.module"), "-m 'absent.module' names no module to run"),
        (("--report", "out.txt", "script.py"), "--report 'out.txt' is of no known kind"),
        (("--report", "nowhere/out.json", "script.py"), "there is no folder 'nowhere'"),
        (("--report", "/proc/out.json", "script.py"), "--report '/proc/out.json' cannot be written: "),
        (("--log", "folder.jsonl", "script.py"), "log_to got 'folder.jsonl', which cannot be written: "),
        (("--framework", "fortran", "script.py"), "'fortran'"),
        (("--framework", "mxnet", "script.py"), "pip install 'mxnet==1.9.1'"),
        (("--level", "O9", "script.py"), "level='O9' is not an opt level"),
        (("--dtype", "float8", "script.py"), "dtype='float8' is not a dtype"),
        (("--device", "gpu0", "script.py"), "--device 'gpu0' is no name of a device"),
        (("notebook.ipynb",), "jupyter nbconvert --to script notebook.ipynb"),
        ((".",), "the folder '.' cannot be run: it has no __main__.py"),
    ],
)
def test_what_cannot_be_run_is_told_before_anything_runs(tmp_path, outcome, arguments, passed):
    (tmp_path / "script.py").write_text("print('ran')")
    (tmp_path / "notebook.ipynb").write_text('{"cells": []}')
    (tmp_path / "folder.jsonl").mkdir()
    done = outcome(AMPX, "run", *arguments)
    assert done.returncode == 2
    assert ".." not in done.stderr
    assert passed in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_options_after_the_script_are_not_those_of_ampx(tmp_path, outcome):
    assert outcome(AMPX, "run", "--unknown", "script.py").returncode == 2
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv[1:])")
    assert outcome(AMPX, "run", "script.py", "--unknown").stdout == "['--unknown']\n"
    (tmp_path / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    done = outcome(AMPX, "run", "script.py", "--dtype=float16")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "ampx run: What stands behind script.py is its own: if --dtype was meant for ampx, write it before script.py.",
    )
    assert "ampx run" not in outcome(AMPX, "run", "script.py", "--unknown").stderr


def test_the_options_that_a_script_may_get_by_mistake_are_those_of_the_commands():
    commands = [command for command in typer.main.get_command(app).commands.values() if command.name in RUNNING]
    assert len(commands) == len(RUNNING)
    options = {option for command in commands for parameter in command.params for option in parameter.opts}
    assert {option for option in options if option.startswith("--")} - {"--stand-ins-only"} == program.OPTIONS


def test_the_report_is_written_even_if_the_script_fails(tmp_path, outcome):
    (tmp_path / "script.py").write_text("1 / 0")
    assert outcome(AMPX, "run", "--report", "out.json", "script.py", "-x").returncode == 1
    facts = json.loads((tmp_path / "out.json").read_text())
    assert (facts["schema"], facts["steps"], facts["framework"]) == ("ampx.run/1", 0, None)
    assert (facts["script"], facts["arguments"]) == ("script.py", ["-x"])


def test_the_report_stands_where_it_was_asked_for_wherever_the_script_goes(tmp_path, outcome):
    (tmp_path / "script.py").write_text("import os\nos.mkdir('runs')\nos.chdir('runs')\n")
    done = outcome(AMPX, "run", "--report", "out.json", "script.py")
    assert done.returncode == 0
    assert f"  report      {tmp_path / 'out.json'}\n" in done.stderr
    assert (tmp_path / "out.json").exists()
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_report_that_cannot_be_written_any_more_is_told_and_the_script_ends_as_it_ended(tmp_path, outcome):
    (tmp_path / "reports").mkdir()
    (tmp_path / "script.py").write_text("import os\nos.rmdir('reports')\nraise SystemExit(7)\n")
    done = outcome(AMPX, "run", "--report", "reports/out.json", "script.py")
    assert done.returncode == 7
    assert "reports/out.json could not be written: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_python_programs_that_the_script_starts_are_named(tmp_path, outcome):
    (tmp_path / "other.py").write_text("print('other')")
    (tmp_path / "script.py").write_text(
        "import subprocess, sys\n"
        "for _ in range(2):\n"
        "    subprocess.run([sys.executable, 'other.py'], check=True)\n"
        "subprocess.run([sys.executable, '-c', 'pass'], check=True)\n"
    )
    done = outcome(AMPX, "run", "script.py")
    assert done.stderr.count("started other.py as a program of its own, which this run did not automate") == 1


def test_two_optimizers_of_one_class_have_names_of_their_own():
    from ampx.run.report import names_of

    def named(*pairs):
        return names_of([{"kind": kind, "place": place} for kind, place in pairs])

    assert named(("SGD", "a/train.py:1"), ("Adam", "a/train.py:2")) == ["SGD", "Adam"]
    assert named(("Adam", "a/train.py:1"), ("Adam", "a/train.py:2")) == ["Adam (train.py:1)", "Adam (train.py:2)"]
    assert named(("Adam", "a/train.py:1"), ("Adam", "a/train.py:1")) == ["Adam 1 (train.py:1)", "Adam 2 (train.py:1)"]
    assert named(("Adam", ""), ("SGD", ""), ("Adam", "")) == ["Adam 1", "SGD", "Adam 2"]


def test_the_page_holds_its_pictures_and_nothing_from_elsewhere():
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra report")
    from ampx.run.page import origin
    from ampx.run.report import page

    report = {
        "script": "<script>.py",
        "arguments": ["--size", "<b>"],
        "meters": [],
        "origin": origin(),
        "framework": "toy",
        "device": "cpu",
        "dtype": "float16",
        "level": "O1",
        "reason": "it can",
        "steps": 9,
        "skipped": 1,
        "seconds": {"forward": 2.0, "backward": 3.0, "step": 1.0},
        "optimizers": [
            {"kind": "SGD", "place": "", "initial_scale": 8.0, "steps": 9, "skipped": [2], "scales": [[2, 4.0]]}
        ],
        "ops": [{"op": "mm", "dtype": "float16", "count": 4}, {"op": "sum", "dtype": "float32", "count": 2}],
        "sampled_steps": 3,
        "losses": [[1, 2.0], [2, 1.5]],
        "losses_of": ["SGD", "SGD"],
        "processes": [],
        "lines": ["a < b"],
        "notes": ["mind & look"],
        "scaled": [],
    }
    text = page(report)
    assert text.count("<svg") == 4
    assert "http-equiv" not in text
    assert "src=" not in text
    assert "<script>" not in text
    assert "<b>" not in text
    assert "a &lt; b" in text
    assert "mind &amp; look" in text
    assert "No update was metered: every 100th step is, and this run made 9 steps." in text
    (optimizer,) = report["optimizers"]
    assert "No update was metered in 250 steps." in page({**report, "optimizers": [{**optimizer, "steps": 250}]})
