"""`ampx lint`: each rule finds what the manual calls wrong, and nothing in what it calls right."""

import io
import json
import os
import re
from pathlib import Path

import pytest

import ampx
from ampx.cli import lint_command
from ampx.lint.engine import lint, selected
from ampx.lint.rules import BY_CODE, RULES
from ampx.syntax.files import find

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "lint.md").read_text()
FURTHER = Path(__file__).with_name("lint_cases.md").read_text()
CLIPPED = """\
import torch

scaler = torch.amp.GradScaler("cuda")
for x, y in data:
    scaler.scale(loss_fn(model(x), y)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0){comment}
    scaler.step(optimizer)
    scaler.update()
"""


def codes(folder, text, name="train.py", rules=None):
    (folder / name).write_text(text)
    return [problem.code for problem in lint([folder / name], rules).problems]


def section(code):
    return PAGE.partition(f"\n({code.lower()})=\n")[2].partition("\n(amp")[0]


def blocks(code, kind):
    """Return the programs of a kind, "wrong" or "right": a diff of the manual takes the one to the other."""
    other = {"wrong": "+", "right": "-"}[kind]
    diffs = re.findall(r"^```diff\n(.*?)^```$", section(code), flags=re.M | re.S)
    further = FURTHER.partition(f"\n## {code}: {kind}\n")[2].partition("\n## ")[0]
    return [
        *("".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith(other)) for diff in diffs),
        *re.findall(r"^```py\n(.*?)^```$", further, flags=re.M | re.S),
    ]


def looked_for(code):
    """Return the rules of a case: those that are looked for by default, and its own."""
    return [rule for rule in RULES if rule.default or rule.code == code]


def cases(kind):
    return [(rule.code, number) for rule in RULES for number in range(len(blocks(rule.code, kind)))]


# -- the manual and lint_cases.md are the cases ------------------------------------------------------------------


@pytest.mark.parametrize(("code", "number"), cases("wrong"))
def test_what_the_manual_calls_wrong_is_found_once_and_nothing_else(code, number, tmp_path):
    assert codes(tmp_path, blocks(code, "wrong")[number], rules=looked_for(code)) == [code]


@pytest.mark.parametrize(("code", "number"), cases("right"))
def test_in_what_the_manual_calls_right_nothing_is_found(code, number, tmp_path):
    assert codes(tmp_path, blocks(code, "right")[number], rules=looked_for(code)) == []


def test_the_manual_says_of_every_rule_what_the_rule_says():
    assert re.findall(r"^\((amp\d+)\)=$", PAGE, flags=re.M) == [rule.code.lower() for rule in RULES]
    for rule in RULES:
        assert section(rule.code).startswith(f"## {rule.code}: {rule.name}\n\n*{rule.severity}*\n")
        assert rule.why in section(rule.code).replace("\n", " ")
        assert rule.advice in section(rule.code).replace("\n", " ")
        assert f"| [{rule.code}](#{rule.code.lower()}) | {rule.name} | {rule.severity} |\n" in PAGE
        assert section(rule.code).count("```diff\n") == 1


def test_no_further_case_is_of_an_unknown_rule():
    assert len(re.findall("^```py$", FURTHER, flags=re.M)) == len(cases("wrong")) + len(cases("right")) - 2 * len(RULES)


# -- correct programs ------------------------------------------------------------------------------------------


def test_correct_programs_raise_no_alarm():
    folders = [ROOT / name for name in ("tests/programs", "docs", "benchmarks")]
    assert [str(problem) for problem in lint(list(find(folders))).problems] == []


def test_faults_that_tests_plant_are_all_that_is_found_in_tests():
    places = {(problem.path.name, problem.code) for problem in lint(list(find([ROOT / "tests"]))).problems}
    # A native scaler that is updated between two steps, what refuses a second unscale_, a whole step in a region, and
    # masks of -1e9 that `ampx diagnose` must name.
    assert places <= {
        ("test_defects.py", "AMP102"),
        ("test_casting.py", "AMP201"),
        *((name, "AMP106") for name in ("test_automatic_scaler.py", "test_defects.py")),
        *((name, "AMP302") for name in ("planted_jax.py", "planted_torch.py")),
    }
    assert {code for _, code in places} == {"AMP102", "AMP106", "AMP201", "AMP302"}


@pytest.mark.parametrize(
    "text",
    [
        # A helper divides first.
        CLIPPED.format(comment="").replace("    torch.nn", "    unscale_gradients(optimizer)\n    torch.nn"),
        # The scaler is somebody else's word: a scaler of features.
        "from sklearn.preprocessing import StandardScaler\nscaler = StandardScaler()\nscaler.scale(x)\nscaler.step(1)",
        # Clipping in the branch that does not scale.
        """\
import torch
scaler = torch.amp.GradScaler("cuda", enabled=amp)
for x, y in data:
    loss = loss_fn(model(x), y)
    if amp:
        scaler.scale(loss).backward()
    else:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        # Nanoseconds are no mask.
        'import torch\nscaler = torch.amp.GradScaler("cuda")\nelapsed = (end - start) * 1e9\n',
        # The epsilon of float32 code.
        "def safe(x):\n    return x / (x.norm() + 1e-12)\n",
        # bfloat16 has the range of float32.
        'import torch\nwith torch.autocast("cpu", dtype=torch.bfloat16):\n    y = (a @ b) + 1e-12\n',
        # Python multiplies two numbers by itself.
        'import torch\nscaler = torch.amp.GradScaler("cuda")\nlowest = -1e6 * 3.0\n',
        # Each seed has an optimizer, and so a loss scale, of its own.
        """\
import torch
for seed in range(3):
    model, optimizer = build(seed)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in data:
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    ],
    ids=["helper", "features", "branch", "nanoseconds", "float32", "bfloat16", "numbers", "seeds"],
)
def test_what_looks_alike_and_is_right_raises_no_alarm(text, tmp_path):
    assert codes(tmp_path, text) == []


def test_a_test_may_ask_whether_bfloat16_can_be_computed_at_all(tmp_path):
    text = "import torch\n\ncomputed = torch.cuda.is_bf16_supported()\n"
    assert codes(tmp_path, text) == ["AMP203"]
    assert codes(tmp_path, text, name="test_train.py") == []


def test_a_constant_counts_where_a_file_that_imports_it_computes_in_float16(tmp_path):
    (tmp_path / "layers.py").write_text("def mask(scores, hidden):\n    return scores.masked_fill(hidden, -1e9)\n")
    (tmp_path / "train.py").write_text("import torch\nimport layers\nscaler = torch.amp.GradScaler('cuda')\n")
    (problem,) = lint(list(find([tmp_path]))).problems
    assert (problem.path.name, problem.line, problem.code) == ("layers.py", 2, "AMP302")
    (tmp_path / "train.py").write_text("import layers\n")
    assert lint(list(find([tmp_path]))).problems == []


# -- the command -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("", ["AMP101"]),
        ("  # ampx: ignore[AMP101]", []),
        ("  # ampx: ignore", []),
        ("  # noqa: AMP101", []),
        ("  # noqa: E501, AMP101", []),
        ("  # ampx: ignore[AMP102]", ["AMP101"]),
        ("  # noqa: E501", ["AMP101"]),
    ],
)
def test_a_comment_opts_out_of_the_rules_that_it_names(comment, expected, tmp_path):
    assert codes(tmp_path, CLIPPED.format(comment=comment)) == expected


def run(*paths, **options):
    printed = []
    code = lint_command.run(list(paths), **options, echo=printed.append)
    return code, "\n".join(printed)


def test_text_names_place_rule_and_advice(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(CLIPPED.format(comment=""))
    code, text = run(file)
    assert code == 1
    assert text.splitlines() == [
        f"{file}:6:5: AMP101 `torch.nn.utils.clip_grad_norm_` bounds gradients that still carry the loss scale of "
        "`scaler`; call `scaler.unscale_(optimizer)` before it.",
        "1 problem in 1 file.",
        "`ampx lint --explain AMP101` says why, and what to do.",
    ]
    assert run(file, ignore="AMP1") == (0, "0 problems in 1 file.")


def test_rules_are_chosen_by_codes_and_what_they_begin_with():
    assert {rule.code[:4] for rule in selected(["amp2"], [])} == {"AMP2"}
    assert [rule.code for rule in selected(["AMP2"], ["AMP201", "AMP203", "AMP204"])] == ["AMP202"]
    assert selected([""], [""]) == tuple(rule for rule in RULES if rule.code != "AMP205")
    assert selected([], [], fix=True) == RULES
    assert [rule.code for rule in selected(["AMP205"], [])] == ["AMP205"]
    with pytest.raises(ampx.InvalidOptionError, match="'E501' is no rule; accepted: AMP101"):
        selected(["E501"], [])


def test_a_file_that_cannot_be_parsed_is_named_and_the_others_are_read(tmp_path):
    (tmp_path / "a.py").write_text("import torch.cuda.amp\ndef broken(:\n")
    (tmp_path / "b.py").write_text(CLIPPED.format(comment=""))
    code, text = run(tmp_path)
    assert code == 2
    assert "a.py: cannot be parsed: line 2: " in text
    assert "1 problem in 1 file; 1 file could not be read." in text
    assert "b.py:6:5: AMP101" in text
    assert json.loads(run(tmp_path, style="json")[1])["unreadable"].keys() == {(tmp_path / "a.py").as_posix()}


def test_a_file_in_which_no_rule_could_find_anything_is_parsed_too(tmp_path):
    (tmp_path / "a.py").write_text("import numpy\n\nx = (1,\n")
    code, text = run(tmp_path)
    assert code == 2
    assert text.splitlines()[0].startswith(f"{tmp_path / 'a.py'}: cannot be parsed: line 3: ")
    assert text.splitlines()[1:] == ["0 problems in 0 files; 1 file could not be read."]


def test_json_github_and_sarif_hold_the_same_problem(tmp_path):
    file = tmp_path / "a,b.py"
    file.write_text(CLIPPED.format(comment=""))
    (problem,) = json.loads(run(file, style="json")[1])["problems"]
    assert (problem["line"], problem["column"], problem["code"], problem["severity"]) == (6, 5, "AMP101", "error")
    github = run(file, style="github")[1]
    assert github.startswith(
        f"::error file={file.as_posix().replace(',', '%2C')},line=6,endLine=6,col=5,title=AMP101::"
    )
    document = json.loads(run(file, style="sarif")[1])
    assert document["version"] == "2.1.0"
    (sarif,) = document["runs"]
    assert [rule["id"] for rule in sarif["tool"]["driver"]["rules"]] == [rule.code for rule in selected()]
    (result,) = sarif["results"]
    location = result["locations"][0]["physicalLocation"]
    assert (result["ruleId"], result["level"]) == ("AMP101", "error")
    assert location["artifactLocation"]["uri"] == file.as_posix()
    assert location["region"]["startLine"] == 6


def test_wrong_use_of_the_command_is_refused():
    with pytest.raises(ampx.InvalidOptionError, match="accepted: text, json, github, sarif"):
        run(ROOT / "docs", style="xml")
    with pytest.raises(ampx.InvalidOptionError, match="'AMP999' is no rule"):
        run(explain="AMP999")


def test_what_holds_no_python_is_refused_and_not_called_clean(tmp_path):
    (tmp_path / "train.ipynb").write_text('{"cells": []}')
    with pytest.raises(ampx.InvalidOptionError, match=r"train\.ipynb is a notebook; accepted: .*nbconvert"):
        run(tmp_path / "train.ipynb")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ampx.InvalidOptionError, match="pipe is neither a file nor a folder"):
        run(tmp_path / "pipe")


def test_explain_says_why_and_what_to_do():
    code, text = run(explain="amp302")
    rule = BY_CODE["AMP302"]
    assert code == 0
    assert text == f"AMP302: {rule.name} (error)\n\n{rule.why}\n\n{rule.advice}"


def test_the_command_runs_and_needs_no_framework(ampx_command):
    (ampx_command.folder / "train.py").write_text(CLIPPED.format(comment=""))
    for name in ("torch", "tensorflow", "paddle", "mxnet", "jax"):
        ampx_command.add_module(name, "raise RuntimeError('imported')")
    done = ampx_command("lint", "train.py", "--format", "github", code=1)
    assert "title=AMP101" in done.stdout


def test_the_hook_for_pre_commit_runs_the_command():
    hook = (ROOT / ".pre-commit-hooks.yaml").read_text()
    assert re.search(r"^  entry: ampx lint$", hook, flags=re.M)
    assert re.search(r"^  types_or: \[python\]$", hook, flags=re.M)


# -- fixes -----------------------------------------------------------------------------------------------------


def fixed(folder, text, **options):
    (folder / "train.py").write_text(text)
    run(folder, fix=True, **options)
    return (folder / "train.py").read_text()


@pytest.mark.parametrize("code", ["AMP101", "AMP205"])
def test_a_fix_makes_of_what_the_manual_calls_wrong_what_it_calls_right(code, tmp_path):
    (wrong, *_), (right, *_) = blocks(code, "wrong"), blocks(code, "right")
    assert fixed(tmp_path, wrong) == right


def test_fixes_of_old_names_bring_the_device_and_name_what_came_by_position(tmp_path):
    old = """\
import torch
from torch.cuda.amp import autocast, GradScaler as Scaler
from torch.cuda import amp

scaler: Scaler = Scaler(65536.0, growth_interval=100)
with autocast(True, torch.float16, cache_enabled=False), amp.autocast():
    pass
with torch.cpu.amp.autocast(
    enabled=isinstance(scaler, torch.cuda.amp.GradScaler)
):
    pass


@torch.cuda.amp.custom_fwd
@torch.cuda.amp.custom_bwd
def forward(x):
    return torch.cuda.amp.custom_fwd(forward)
"""
    assert (
        fixed(tmp_path, old)
        == """\
import torch
from torch.amp import autocast, GradScaler as Scaler
from torch.cuda import amp

scaler: Scaler = Scaler("cuda", 65536.0, growth_interval=100)
with autocast("cuda", enabled=True, dtype=torch.float16, cache_enabled=False), torch.amp.autocast("cuda"):
    pass
with torch.amp.autocast("cpu",
    enabled=isinstance(scaler, torch.amp.GradScaler)
):
    pass


@torch.amp.custom_fwd(device_type="cuda")
@torch.amp.custom_bwd(device_type="cuda")
def forward(x):
    return torch.cuda.amp.custom_fwd(forward)
"""
    )


@pytest.mark.parametrize(
    "text",
    [
        # Other files may import the name, and call it without a device.
        "from torch.cuda.amp import autocast, GradScaler\nscaler = GradScaler()\n",
        "from torch.cuda.amp import autocast\nregion = autocast if amp else nullcontext\n",
        "from torch.cuda.amp import autocast\nautocast = functools.partial(autocast, enabled=amp)\n",
        "from torch.cuda.amp import autocast\nwith autocast(*options):\n    pass\n",
        # The old one computes in float16 whatever this says.
        "import torch\ntorch.set_autocast_gpu_dtype(torch.bfloat16)\nwith torch.cuda.amp.autocast():\n    pass\n",
        "import mylib as torch\nfrom torch.cuda import amp\nwith amp.autocast():\n    pass\n",
        # Two optimizers, another model's optimizer, an optimizer from elsewhere, a clip in some passes only.
        CLIPPED.format(comment="").replace("scaler.step(optimizer)", "scaler.step(optimizer)\n    scaler.step(other)"),
        "import torch\noptimizer = torch.optim.SGD(head.parameters())\n" + CLIPPED.format(comment=""),
        CLIPPED.format(comment=""),
        "import torch\noptimizer = torch.optim.SGD(model.parameters())\n"
        + CLIPPED.format(comment="").replace("    torch.nn", "    if clip: torch.nn"),
    ],
    ids=[
        "reexported",
        "passed-on",
        "bound-anew",
        "starred",
        "set",
        "other-torch",
        *("two", "other", "unknown", "some"),
    ],
)
def test_what_is_not_shown_to_be_safe_is_left_as_it_is(text, tmp_path):
    assert fixed(tmp_path, text) == text


def test_a_comment_and_the_choice_of_rules_keep_a_fix_away(tmp_path):
    text = "import torch\nscaler = torch.cuda.amp.GradScaler()  # ampx: ignore[AMP205]\n"
    assert fixed(tmp_path, text) == text
    text = text.partition("  #")[0] + "\n"
    assert fixed(tmp_path, text, select="AMP1") == text
    assert fixed(tmp_path, text, ignore="AMP205") == text
    assert fixed(tmp_path, text) == 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'


def test_bytes_that_are_not_meant_stay(tmp_path):
    file = tmp_path / "train.py"
    before = "# -*- coding: latin-1 -*-\r\nimport torch\r\nname = 'é'\r\nscaler = torch.cuda.amp.GradScaler()\r\n"
    file.write_bytes(before.encode("latin-1"))
    file.chmod(0o755)
    assert run(tmp_path, fix=True) == (0, "0 problems in 1 file, 1 fixed.")
    assert file.read_bytes() == before.replace("cuda.amp.GradScaler(", 'amp.GradScaler("cuda"').encode("latin-1")
    assert file.stat().st_mode & 0o777 == 0o755


def test_a_file_that_cannot_be_written_is_named_and_its_problem_stays(tmp_path, monkeypatch):
    text = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
    (tmp_path / "train.py").write_text(text)
    read, waiting = Path.read_bytes, [b"somebody writes it meanwhile"]
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) if waiting.append(0) or len(waiting) < 3 else b"")
    code, printed = run(tmp_path, fix=True)
    assert code == 2
    assert "train.py: cannot be written: it has changed since it was read" in printed
    assert "1 problem in 0 files" in printed


# -- where it reads --------------------------------------------------------------------------------------------


def test_without_a_path_it_reads_this_folder_and_excluded_files_are_left_out(ampx_command):
    for name in ("a", "b/c", "b/d"):
        path = ampx_command.folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(CLIPPED.format(comment=""))
    places = ampx_command("lint", "-q", code=1).stdout
    assert [line.partition(":")[0] for line in places.splitlines()] == ["a.py", "b/c.py", "b/d.py"]
    places = ampx_command("lint", "-q", "--exclude", "a.py, b/d*", code=1).stdout
    assert [line.partition(":")[0] for line in places.splitlines()] == ["b/c.py"]
    assert ampx_command("lint", "-q", "--exclude", "b,a.py").stdout == ""


def test_the_standard_input_is_read_and_what_is_fixed_goes_out_again(tmp_path, monkeypatch, capfdbinary):
    wrong, right = blocks("AMP101", "wrong")[0], blocks("AMP101", "right")[0]

    def stdin():
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(wrong.encode())))
        return Path("-")

    code, printed = run(stdin())
    assert code == 1
    assert printed.startswith("<stdin>:11:5: AMP101 ")
    assert run(stdin(), fix=True) == (0, "")
    out, err = capfdbinary.readouterr()
    assert (out.decode(), err.decode()) == (right, "0 problems in 1 file, 1 fixed.\n")


def test_json_says_what_can_be_fixed_and_what_was(tmp_path):
    (tmp_path / "train.py").write_text(blocks("AMP101", "wrong")[0])
    (problem,) = json.loads(run(tmp_path, style="json")[1])["problems"]
    assert problem["fix"] is True
    assert "`ampx lint --fix` fixes 1 of them." in run(tmp_path)[1]
    document = json.loads(run(tmp_path, style="json", fix=True)[1])
    assert (document["fixed"], document["problems"]) == (1, [])
