"""The command as a whole: help, version, missing extras."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import ampx
from ampx.cli import app, compare_command
from ampx.cli.terminal import Terminal, folded, terminal
from ampx.numerics.report import METER_HEAD, WORST_HEAD, worst_rows

COMMANDS = [command.name or command.callback.__name__ for command in app.app.registered_commands]


@pytest.fixture(autouse=True)
def _terminal_as_it_was():
    before = vars(terminal).copy()
    yield
    vars(terminal).update(before)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_version_is_that_of_the_distribution(ampx_command):
    assert ampx_command("--version").stdout.strip() == f"ampx {ampx.__version__}"


def test_help_names_every_command(ampx_command):
    text = ampx_command("--help").stdout
    assert all(name in text for name in ("doctor", "backends", "demo", "new-backend", "migrate", "run"))


def test_help_takes_less_than_twice_as_long_as_that_of_a_command_of_one_line(installed_command, tmp_path):
    """Of the processor's time, the best of some pairs: how fast the machine is is not the command's."""
    least = tmp_path / "least.py"
    least.write_text("import typer\napp = typer.Typer()\n@app.command()\ndef least(): ...\napp()\n")
    ratios = []
    while len(ratios) < 5 and min(ratios, default=2) >= 2:
        start = processor_seconds()
        installed_command("--help")
        between = processor_seconds()
        run_script(least, "--help")
        ratios.append((between - start) / (processor_seconds() - between))
    assert min(ratios) < 2, ratios


def run_script(*command):
    subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, timeout=60, check=True)


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_imports_neither_framework_nor_plotting():
    done = run_python(
        "import sys; sys.argv = ['ampx', '--help']\n"
        "from ampx.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'sklearn', 'ampx_torch'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("missing", "extra"),
    [(["sklearn"], "demo"), (["matplotlib"], "report"), (["sklearn", "matplotlib"], "demo")],
)
def test_missing_extra_is_named_without_a_traceback(missing, extra, tmp_path):
    """Where both are missing the extra is named that brings both."""
    if "sklearn" not in missing:
        pytest.importorskip("sklearn", reason="needs scikit-learn, of the extra demo: it is asked for first")
    arguments = ["ampx", "demo", "--framework", "torch", "--out", str(tmp_path)]
    done = run_python(
        f"import sys; sys.modules.update(dict.fromkeys({missing!r})); sys.argv = {arguments!r}\n"
        "from ampx.cli import main\n"
        "sys.exit(main())"
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == (
        f"ampx: this command needs {missing[0]}, which is not installed. Install it with "
        f"`pip install 'ampx-precision[{extra}]'`."
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [("backends",), ("doctor", "--framework", "toy")], ids=lambda command: command[0])
def test_terminal_without_unicode_gets_a_table_too(ampx_command, command):
    ampx_command.add_plugin("toy", "toy.plugin")
    real = "torch,tensorflow,mxnet,paddle,jax"
    assert "toy" in ampx_command(*command, PYTHONIOENCODING="ascii", AMPX_DISABLE_PLUGINS=real).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("dem",), "No such command 'dem'. Did you mean 'demo'? `ampx --help` lists what is accepted."),
        (("lint", "--nosuch"), "No such option: --nosuch. `ampx lint --help` lists what is accepted."),
        (("run",), "Missing argument 'SCRIPT'. `ampx run --help` lists what is accepted."),
        (("lint", "--color", "blue"), "--color 'blue' is no choice; accepted: auto, always, never. Pass one of these."),
        (("lint", "none.py"), "none.py is not there; accepted: files and folders. Check the spelling."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_errors_are_one_sentence_in_one_style(installed_command, arguments, says):
    done = installed_command(*arguments, code=2)
    assert (done.stdout, done.stderr) == ("", f"ampx: {says}\n")


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_the_same_by_three_names(ampx_command, command):
    words = [] if command is None else [command]
    text = ampx_command(*words, "--help").stdout
    assert ampx_command(*words, "-h").stdout == ampx_command("help", *words).stdout == text
    if command is not None:
        assert all(option in text for option in ("--quiet", "-q", "--color", "--json", "-h"))


def test_completion_is_offered_for_the_shell(ampx_command):
    asked = {"_AMPX_COMPLETE": "complete_bash", "COMP_WORDS": "ampx new", "COMP_CWORD": "1"}
    assert installed_words(ampx_command, asked) == ["new-backend"]
    asked = {"_AMPX_COMPLETE": "complete_bash", "COMP_WORDS": "ampx lint --out", "COMP_CWORD": "2"}
    assert installed_words(ampx_command, asked) == ["--output-format"]
    assert "--install-completion" in ampx_command("--help").stdout


def installed_words(command, environment):
    command.start, command.fresh = (str(Path(sys.executable).with_name("ampx")),), True
    return command(**environment).stdout.split()


@pytest.mark.parametrize("arguments", [("lint", "train.py"), ("migrate", "train.py"), ("new-backend", "mylib")])
def test_quiet_leaves_the_result(ampx_command, arguments):
    (ampx_command.folder / "train.py").write_text("import torch\nloss = torch.nn.functional.mse_loss\n")
    done = ampx_command(arguments[0], "--quiet", *arguments[1:])
    assert (done.stdout, done.stderr) == ("", "")


def test_color_is_as_asked_and_else_as_the_terminal_says(ampx_command, monkeypatch):
    ampx_command.add_plugin("toy", "toy.plugin")
    real = {"AMPX_DISABLE_PLUGINS": "torch,tensorflow,mxnet,paddle,jax"}
    assert "\x1b[" not in ampx_command("backends", **real).stdout
    assert "\x1b[32m" in ampx_command("backends", "--color", "always", **real).stdout  # and NO_COLOR is set
    assert "\x1b[" not in ampx_command("backends", "--color", "never", FORCE_COLOR="1", **real).stdout


def test_every_json_is_what_the_page_of_schemas_says(ampx_command, check_documented):
    ampx_command.add_plugin("toy", "toy.plugin")
    real = {"AMPX_DISABLE_PLUGINS": "torch,tensorflow,mxnet,paddle,jax"}
    (ampx_command.folder / "train.py").write_text(
        "import torch\nscaler = torch.cuda.amp.GradScaler()\nfor x in data:\n    with torch.autocast('cuda'):\n"
        "        scaler.scale(model(x)).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
    )
    for arguments, code in (
        (("doctor", "--framework", "toy"), None),
        (("backends",), 0),
        (("lint",), 1),
        (("migrate", "train.py"), None),
        (("new-backend", "mylib"), 0),
    ):
        document = json.loads(ampx_command(*arguments, "--json", code=code, **real).stdout)
        check_documented(document)
    assert document["files"][0]["path"] == os.path.join("ampx-mylib", "pyproject.toml")


# -- defaults in pyproject.toml ------------------------------------------------------------------------------------

TABLE = """
[tool.ampx]
quiet = true

[tool.ampx.lint]
select = ["AMP1", "AMP2"]
ignore = "AMP201"
"""


def test_options_have_the_defaults_of_the_nearest_table(ampx_command):
    folder = ampx_command.folder
    (folder / "pyproject.toml").write_text(TABLE)
    ampx_command.folder = folder / "src"
    ampx_command.folder.mkdir()
    (ampx_command.folder / "pyproject.toml").write_text("[project]\nname = 'of another tool'\n")
    region = (
        "import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    loss = model(x)\n    loss.backward()\n"
    )
    (ampx_command.folder / "a.py").write_text(region)
    assert ampx_command("lint").stdout == ""
    (line,) = ampx_command("lint", "--ignore", "", code=1).stdout.splitlines()
    assert line.startswith("a.py:4:5: AMP201 ")
    ampx_command("lint", "--ignore", "", "--select", "AMP3")


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("[tool.ampx]\nsetps = 3", "[tool.ampx] of {} has setps; accepted: all, at, backends, "),
        ("[tool.ampx.lint]\nsteps = 3", "[tool.ampx.lint] of {} has steps; accepted: color, exclude, explain, fix, "),
        ("[tool.ampx]\nlint = 3", "[tool.ampx.lint] of {} has 3; accepted: "),
        ("[tool.ampx.lint]\nselect = ", "{} is no TOML: "),
        ("[tool.ampx.compare]\nsteps = 'all'", "Invalid value for '--steps': "),
    ],
)
def test_a_table_that_no_command_understands_is_refused(ampx_command, table, says):
    path = ampx_command.folder / "pyproject.toml"
    path.write_text(table)
    says = says.format(path)
    assert ampx_command("compare", "train.py", code=2).stderr.startswith(f"ampx: {says}")


# -- progress ------------------------------------------------------------------------------------------------------


def test_progress_in_a_log_is_a_line_for_each_thing_and_nothing_where_it_is_not_wanted(capsys):
    for quiet, lines in ((False, ["[0 s] first", "[0 s] second"]), (True, [])):
        with Terminal(quiet=quiet).progress() as progress:
            progress("first")
            progress("second", 3)
        assert capsys.readouterr().err.splitlines() == lines


def test_progress_on_a_terminal_is_a_bar_with_the_time_that_is_left(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    now = iter(range(0, 100_000, 60))
    monkeypatch.setattr("rich.progress.Progress.get_time", lambda self: float(next(now)), raising=False)
    with Terminal().progress() as progress:
        for left in (4, 3, 2):
            progress("run", left)
    assert "━" in capsys.readouterr().err


def test_names_in_the_progress_are_shown_as_they_are(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with app._progress() as progress:
        progress("a[/b].py, run 1 …")
    assert "a[/b].py, run 1 …" in capsys.readouterr().err


def test_what_was_found_is_printed_where_the_report_cannot_be_written_any_more(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "reports"
    folder.mkdir()

    def diagnose_script(*_, **__):
        folder.rmdir()
        return None, {"verdict": "Nothing failed.", "mistakes": [], "notes": [], "risks": []}

    monkeypatch.setattr("ampx.numerics.diagnose_script.diagnose_script", diagnose_script)
    monkeypatch.setattr(sys, "argv", ["ampx", "diagnose", "--report", str(folder / "out.json"), "train.py"])
    assert app.run() == 2
    out, err = capsys.readouterr()
    assert out == "Nothing failed.\n"
    assert "out.json' cannot be written: No such file or directory; accepted: " in err


# -- sentences ---------------------------------------------------------------------------------------------------------

SENTENCE = "  last finite:      the output of module '2.qkv': values of magnitude 0.000124 to 89.1, lowest -89.1"
CODE = "    model = amp.prepare(model)  # which has that module, before wrap_optimizer"


@pytest.mark.parametrize("line", [SENTENCE, SENTENCE.replace("  last finite:      ", ""), "note: " + "word " * 30])
def test_a_sentence_is_broken_between_words_and_goes_on_where_its_text_begins(line):
    first, *further = folded(line, 50).split("\n")
    begins = line.index(": ") + 1 if line[0] in " n" else 0
    begins += len(line[begins:]) - len(line[begins:].lstrip()) if begins else 0
    assert further
    assert all(len(part) <= 50 for part in (first, *further))
    assert [len(part) - len(part.lstrip()) for part in further] == [begins] * len(further)
    assert " ".join((first, *further)).split() == line.split()


def test_a_line_of_code_and_a_line_that_fits_stay_as_they_are():
    assert folded(CODE, 40) == CODE
    assert folded(SENTENCE, 120) == SENTENCE


def test_results_are_broken_on_a_terminal_and_nowhere_else():
    code = f"from ampx.cli.terminal import terminal; terminal.say({SENTENCE!r})"
    assert run_python(code).stdout == f"{SENTENCE}\n"
    ours, its = pty.openpty()
    with os.fdopen(its, "w") as stdout:
        environment = {**os.environ, "COLUMNS": "50"}
        subprocess.run([sys.executable, "-c", code], stdout=stdout, env=environment, timeout=60, check=True)
    with os.fdopen(ours, "rb") as terminal_side:
        assert terminal_side.read1(4096).decode().splitlines() == folded(SENTENCE, 50).split("\n")


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_no_word_of_a_table_is_broken_and_a_long_name_goes_on_behind_a_dot(columns):
    parts = ("encoder", "block", "11", "layer", "1", "DenseReluDense", "intermediate_projection", "wo")
    entry = {"module": ".".join(parts), "error": 0.0123}
    rows = worst_rows({"worst_outputs": [entry], "worst_gradients": [{"module": "head", "error": 1.0}]})
    meters = [("bfloat16, AdamW", "12.3%", "0.0%", "132.8 bits", f"{entry['module']}: 99%")]
    for head, cells in ((WORST_HEAD, rows), (METER_HEAD, meters)):
        console = Console(width=columns, file=io.StringIO())
        console.print(compare_command._table("Errors", head, cells, columns), crop=False)
        words = re.split(r"[.\s:]+", console.file.getvalue())
        assert {*parts, "head"} - {*words} == ({"head"} if head is METER_HEAD else set())
        assert {word for text in head for word in text.split()} <= {*words}
