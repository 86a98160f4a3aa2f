"""`ampx migrate` and files: what is read, what is written, and that everything else stays byte for byte."""

import json
import os
import re
import stat
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from ampx.migrate import files
from ampx.migrate.engine import migrate as migrate_bytes
from ampx.syntax.files import find

RECIPE = textwrap.dedent(
    """\
    import torch
    from torch.cuda.amp import GradScaler

    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = GradScaler()
    if True:
        scaler.scale(loss).backward()  # é
        scaler.step(optimizer)
        scaler.update()
    """
)
MIGRATED = textwrap.dedent(
    """\
    import ampx
    import torch

    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = ampx.init("torch", dtype="float16", process_wide=False, enabled=torch.cuda.is_available())
    optimizer = ampx.wrap_optimizer(optimizer)
    if True:
        with ampx.scale_loss(loss, optimizer) as scaled_loss:  # é
            scaled_loss.backward()
        optimizer.step()
    """
)
BLOCKED = RECIPE + "helper(scaler)\n"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text(RECIPE, encoding="utf-8")
    (folder / "other.py").write_text("x = 1\n")
    return folder


# -- the command ----------------------------------------------------------------------------------------


def test_without_options_it_tells_and_writes_nothing(folder, ampx_command):
    done = ampx_command("migrate", str(folder))
    assert done.stdout.splitlines() == [
        f"{folder / 'train.py'}: can be migrated",
        "2 files read, 1 to migrate, 0 left as they are, 0 that cannot be read or written, 0 places for a human.",
        "Nothing was written; --diff shows the changes, --write makes them.",
    ]
    assert (folder / "train.py").read_text(encoding="utf-8") == RECIPE


def test_diff_is_one_that_patch_understands(folder, ampx_command):
    lines = ampx_command("migrate", "--diff", str(folder)).stdout.splitlines()
    assert lines[1] == f"+++ b/{folder.as_posix()}/train.py"
    added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert set(added) == set(MIGRATED.splitlines()) - set(RECIPE.splitlines())
    assert (folder / "train.py").read_text(encoding="utf-8") == RECIPE


def test_write_writes_and_a_second_run_finds_nothing(folder, ampx_command):
    first = ampx_command("migrate", "--write", str(folder))
    assert f"{folder / 'train.py'}: migrated" in first.stdout
    assert (folder / "train.py").read_text(encoding="utf-8") == MIGRATED
    assert sorted(os.listdir(folder)) == ["other.py", "train.py"]
    second = ampx_command("migrate", "--write", "--check", str(folder), code=2)
    assert "--check and --write exclude each other" in second.stderr
    ampx_command("migrate", "--check", str(folder))


def test_exit_code_is_1_where_a_human_is_needed_and_the_line_is_named(folder, ampx_command):
    (folder / "blocked.py").write_text(BLOCKED, encoding="utf-8")
    done = ampx_command("migrate", "--write", str(folder), code=1)
    what = "the scaler is passed to `helper`, which is no function of the files that are migrated. "
    assert f"{folder / 'blocked.py'}:10: todo: {what}" in done.stdout
    assert (folder / "blocked.py").read_text(encoding="utf-8") == BLOCKED
    assert (folder / "train.py").read_text(encoding="utf-8") == MIGRATED


def test_files_that_a_test_holds_up_are_told_how_to_go_on_without_it(tmp_path, ampx_command):
    (tmp_path / "lib.py").write_text(
        "def train(scaler, optimizer, loss):\n"
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
    )
    make = "import torch\nfrom lib import train\nopt = torch.optim.SGD(ps, lr=0.1)\nscaler = torch.amp.GradScaler()\n"
    (tmp_path / "test_lib.py").write_text(f"{make}train(scaler, opt, loss)\nhelper(scaler)\n")
    text = ampx_command("migrate", ".", code=1).stdout
    assert "test_lib.py:6: todo: " in text
    (note,) = [line for line in text.splitlines() if line.startswith("lib.py:1: note: ")]
    assert note.endswith("or migrate the others without test_lib.py, which none of them imports.")


def test_check_ends_with_1_where_a_file_would_change(folder, ampx_command):
    ampx_command("migrate", "--check", str(folder), code=1)
    ampx_command("migrate", "--check", str(folder / "other.py"))


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("from apex import amp\ndef f(:\n", 2, "it cannot be parsed"),
        ("from apex import amp\nprint 'loss'\n", 2, "this is Python 2"),
        ("from apex import amp\ntry:\n    f()\nexcept ValueError, error:\n    g()\n", 4, "this is Python 2"),
        ("# coding: nonsense\nfrom apex import amp\n", 1, "it cannot be parsed"),
        ("x = '\udcff'  # amp\n", 1, "it cannot be parsed"),
    ],
)
def test_what_cannot_be_read_ends_with_2_and_stays(text, line, what, folder, ampx_command):
    bad = folder / "bad.py"
    bad.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    done = ampx_command("migrate", "--write", str(folder), code=2)
    assert f"{bad}:{line}: todo: {what}" in done.stdout
    assert bad.read_bytes() == text.encode("utf-8", errors="surrogateescape")
    assert (folder / "train.py").read_text(encoding="utf-8") == MIGRATED


def test_json_holds_findings_and_differences(folder, ampx_command):
    (folder / "blocked.py").write_text(BLOCKED, encoding="utf-8")
    report = json.loads(ampx_command("migrate", "--json", str(folder), code=1).stdout)
    assert (report["schema"], report["read"], report["written"]) == ("ampx.migrate/1", 3, False)
    by_name = {Path(entry["path"]).name: entry for entry in report["files"]}
    assert by_name["train.py"]["status"] == "changed"
    assert "+    with ampx.scale_loss(loss, optimizer) as scaled_loss:  # é" in by_name["train.py"]["diff"]
    assert by_name["blocked.py"]["findings"][0].keys() == {"line", "kind", "what", "advice"}


def test_a_path_that_is_not_there_is_a_usage_error(tmp_path, ampx_command):
    assert "is not there" in ampx_command("migrate", str(tmp_path / "nothing"), code=2).stderr


# -- which files ----------------------------------------------------------------------------------------


def test_symbolic_links_are_not_followed(folder, tmp_path, ampx_command):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "far.py").write_text(RECIPE, encoding="utf-8")
    (folder / "linked").symlink_to(outside)
    (folder / "link.py").symlink_to(outside / "far.py")
    ampx_command("migrate", "--write", str(folder))
    assert (outside / "far.py").read_text(encoding="utf-8") == RECIPE
    assert "is a symbolic link" in ampx_command("migrate", str(folder / "link.py"), code=2).stderr


def test_hidden_folders_and_environments_are_passed_over(folder):
    for name in (".git", "venv", "__pycache__", "env"):
        (folder / name).mkdir()
        (folder / name / "train.py").write_text(RECIPE, encoding="utf-8")
    (folder / "env" / "pyvenv.cfg").write_text("")
    assert [path.name for path in find([folder, folder / "train.py"])] == ["other.py", "train.py"]


# -- how they are written -------------------------------------------------------------------------------


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("indent", ["    ", "\t", "  "])
@pytest.mark.parametrize(
    ("encoding", "head"),
    [("utf-8", ""), ("utf-8-sig", ""), ("latin-1", "# -*- coding: latin-1 -*-\n"), ("cp1252", "# coding: cp1252\n")],
)
def test_encoding_newlines_and_indentation_are_kept(newline, indent, encoding, head):
    def written(text):
        lines = [line.replace("    ", indent) for line in (head + text).split("\n")]
        return newline.join(lines).encode(encoding)

    report = migrate_bytes(Path("script.py"), written(RECIPE))
    assert report.status == "changed", report.findings
    assert report.after == written(MIGRATED)


def test_a_last_line_without_its_end_stays_so():
    report = migrate_bytes(Path("script.py"), RECIPE.encode() + b"print(1)")
    assert report.after == MIGRATED.encode() + b"print(1)"


def test_the_mode_of_a_file_is_kept(folder):
    (folder / "train.py").chmod(0o754)
    files.write(*files.examine([folder / "train.py"]))
    assert (folder / "train.py").read_text(encoding="utf-8") == MIGRATED
    assert stat.S_IMODE((folder / "train.py").stat().st_mode) == 0o754


def test_a_file_that_changed_after_it_was_read_is_not_overwritten(folder):
    (report,) = files.examine([folder / "train.py"])
    (folder / "train.py").write_text("x = 2\n")
    files.write(report)
    assert report.status == "error"
    assert (folder / "train.py").read_text() == "x = 2\n"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(folder, monkeypatch):
    def fail(*_):
        raise OSError("no space")

    (report,) = files.examine([folder / "train.py"])
    monkeypatch.setattr(os, "replace", fail)
    files.write(report)
    assert report.status == "error"
    assert "no space" in report.findings[-1].what
    assert (folder / "train.py").read_text(encoding="utf-8") == RECIPE
    assert sorted(os.listdir(folder)) == ["other.py", "train.py"]


def test_what_would_not_compile_is_not_written(monkeypatch):
    monkeypatch.setattr("ampx.migrate.imports._at_top", lambda source, name, comment="": "def f(:\n")
    report = migrate_bytes(Path("script.py"), RECIPE.encode())
    assert report.status == "blocked"
    assert report.after == report.before == RECIPE.encode()
    assert "would not be valid" in report.findings[0].what


def test_what_the_manual_shows_is_what_it_does(migrate):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "migrate-a-code-base.md").read_text(encoding="utf-8")
    shown = re.search(r"```diff\n(.*?)```", page, flags=re.DOTALL)[1].splitlines()
    before, after = ("".join(f"{line[1:]}\n" for line in shown if not line.startswith(other)) for other in ("+", "-"))
    assert migrate(before)[1] == after


@pytest.fixture
def usual_recursion():
    """What compiles programs in other tests may have raised the limit."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion")
def test_a_file_that_cannot_be_analysed_does_not_stop_the_others():
    deep = "x = " + "-" * 3000 + "1\n"
    report = migrate_bytes(Path("script.py"), (RECIPE + deep).encode())
    assert report.status == "error"
    assert report.after == report.before


# -- properties -----------------------------------------------------------------------------------------


def test_code_without_mixed_precision_stays_byte_for_byte():
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(library.glob("*.py")) if path.stat().st_size < 12_000][:25]
    assert len(paths) == 25
    for path in paths:
        # The words make the file worth parsing; without them it would not be looked at.
        data = path.read_bytes().rstrip(b"\n") + b"\n# amp, autocast, GradScaler\n"
        report = migrate_bytes(path, data)
        assert (report.status, report.after) == ("unchanged", data)


LINES = st.lists(
    st.sampled_from(
        [
            "",
            "# a comment",
            "x = 1  # one",
            "print( 'a',  \"b\" )",
            "if x: y = 2",
            "f(\n  1,\n\n  2 )",
            "s = '''\n  é\n'''",
        ]
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(st.lists(LINES, min_size=6, max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_lines_around_are_kept_whatever_they_are(noise, newline):
    recipe = [line for line in RECIPE.splitlines() if line and line != "if True:"]
    lines = [*recipe[:2], *noise[0]]
    for line, extra in zip(recipe[2:], noise[1:], strict=True):
        lines += [line.strip(), *extra]
    text = newline.join([*lines, ""]).replace("\r\n", "\n").replace("\n", newline)
    report = migrate_bytes(Path("script.py"), text.encode())
    assert report.status == "changed"
    after = report.after.decode()
    assert newline == "\n" or after.count("\n") == after.count("\r\n")
    kept = [line for extra in noise for lines in extra for line in lines.split("\n") if line]
    position = 0
    for line in kept:  # in the same order
        position = after.index(line, position) + len(line)
    assert migrate_bytes(Path("script.py"), report.after).after == report.after
