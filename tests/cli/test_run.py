"""`ampx run` runs a script as `python` does. No framework is needed here; what each trains is in its own tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

AMPX = str(Path(sys.executable).with_name("ampx"))
SPY = """
import json, sys
print(json.dumps([sys.argv, __name__, __file__, sys.path[0], __spec__ and __spec__.name, __package__]))
"""


@pytest.fixture
def outcome(tmp_path):
    """Give a function that runs a command in a fresh folder."""

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
        (("--framework", "fortran", "script.py"), "'fortran'"),
    ],
)
def test_what_cannot_be_run_is_told_before_anything_runs(tmp_path, outcome, arguments, passed):
    (tmp_path / "script.py").write_text("print('ran')")
    done = outcome(AMPX, "run", *arguments)
    assert done.returncode == 2
    assert passed in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_options_after_the_script_are_not_those_of_ampx(tmp_path, outcome):
    assert outcome(AMPX, "run", "--unknown", "script.py").returncode == 2
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv[1:])")
    assert outcome(AMPX, "run", "script.py", "--unknown").stdout == "['--unknown']\n"


def test_the_report_is_written_even_if_the_script_fails(tmp_path, outcome):
    (tmp_path / "script.py").write_text("1 / 0")
    assert outcome(AMPX, "run", "--report", "out.json", "script.py", "-x").returncode == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["schema"], found["steps"], found["framework"]) == ("ampx.run/1", 0, None)
    assert (found["script"], found["arguments"]) == ("script.py", ["-x"])


def test_the_page_holds_its_pictures_and_nothing_from_elsewhere():
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra demo")
    from ampx.cli.run_page import page

    text = page(
        {
            "script": "<script>.py",
            "framework": "toy",
            "device": "cpu",
            "dtype": "float16",
            "level": "O1",
            "reason": "it can",
            "steps": 9,
            "skipped": 1,
            "seconds": {"forward": 2.0, "backward": 3.0, "step": 1.0},
            "optimizers": [{"kind": "SGD", "initial_scale": 8.0, "steps": 9, "skipped": [2], "scales": [[2, 4.0]]}],
            "ops": [{"op": "mm", "dtype": "float16", "count": 4}, {"op": "sum", "dtype": "float32", "count": 2}],
            "sampled_steps": 3,
            "lines": ["a < b"],
            "notes": ["mind & look"],
        }
    )
    assert text.count("<svg") == 3
    assert "http-equiv" not in text
    assert "src=" not in text
    assert "<script>" not in text
    assert "a &lt; b" in text
    assert "mind &amp; look" in text
