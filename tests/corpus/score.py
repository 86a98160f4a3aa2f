"""Score tools on the corpus: `python tests/corpus/score.py torch [--only CASE ...] [--tool diagnose ...] [--out DIR]`.

It runs in the environment that has the framework's libraries, writes `FRAMEWORK.json` into the folder (by default
`docs/evidence/corpus`), and then, from the files of all frameworks, `docs/reference/debugger-scores.md`. See
`corpus.py` for what is judged, and how. With `--device cuda` the scripts of PyTorch and JAX run on a GPU.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "kit")]
if __name__ == "__main__":  # what is scored is the tree of this file, whatever is installed
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "backends"), *([before] if before else [])])

import forks  # noqa: E402 -- behind the path on which they are

from corpus import FRAMEWORKS, Case, cases, imported, is_healthy, losses_of  # noqa: E402
from processes import QUIET, Started  # noqa: E402

RESULTS = ROOT / "docs" / "evidence" / "corpus"
PAGE = ROOT / "docs" / "reference" / "debugger-scores.md"
VERDICTS = ("right and curing", "right without cure", "silent", "wrong", "accused")
MARKS = {"right and curing": "✓", "right without cure": "○", "silent": "**–**", "wrong": "**✗**", "accused": "**!**"}
UPDATES = re.compile(r"updates?\b.*\b(lost|round)|bfloat16 weights|weights in bfloat16")
SIMULATED = ("paddle", "mxnet")  # of which the CPU computes no float16: see simulated/sitecustomize.py
QUIET.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")


def environment_of(framework, device):
    """Return what the environment holds for a framework's GPU, and where it is simulated."""
    path = [str(HERE / "simulated"), *filter(None, [os.environ.get("PYTHONPATH")])]
    if framework in SIMULATED:
        return {"PYTHONPATH": os.pathsep.join(path), "CORPUS_SIMULATES": framework}
    if device == "cuda":  # as users run the commands: in new processes, that make their own copies
        return {"PYTHONPATH": os.pathsep.join(path), "CORPUS_DEVICE": framework, "AMPX_FRESH_RUNS": "", "fresh": True}
    return {}


class TookTooLongError(Exception):
    """A run was stopped: there is no verdict."""


class Runner:
    """Runs a case in processes, in a folder of its own, each for so many seconds at most."""

    def __init__(self, case: Case, folder: Path, options=(), limit: float = 600, device: str = "cpu"):
        self.case, self.folder, self.options, self.limit = case, folder, options, limit
        self.device = "gpu" if case.framework in SIMULATED else device

    def ampx(self, command, *options):
        options = ("--framework", self.case.framework, "--device", self.device, *options)
        return self.python("-m", "ampx", command, *options, nests=True)

    def python(self, *command, **options):
        environment = environment_of(self.case.framework, self.device)
        done = Started(command, cwd=self.folder, **options, **environment).wait(self.limit)
        if done.returncode is None:
            raise TookTooLongError(f"stopped after {self.limit:g} s")
        return done

    def plain(self, *options):
        return losses_of(self.python(self.case.script, *options).stdout)

    def is_cured_by(self, policy):
        """Return whether the script, run by the policy, is healthy, at a scale at which no step is lost to settling."""
        lines = [line for line in policy.splitlines() if not line.startswith("loss_scale")]
        scale = f"loss_scale = {self.case.scale}"
        (self.folder / "cure.toml").write_text("\n".join([*lines[:2], scale, *lines[2:], ""]))
        done = self.ampx("run", "--policy", "cure.toml", self.case.script)
        try:
            losses = losses_of(done.stdout)
        except (IndexError, ValueError):
            print(f"{self.case.name} printed no losses by this policy: {done.stderr[-1000:]}", file=sys.stderr)
            return False
        return is_healthy(losses, self.plain(), self.case.tolerance)

    def is_healthy_there(self):
        """Return whether the truth, which was measured on a CPU, does not hold: a GPU's autocast has other lists."""
        return self.device == "cuda" and self.case.float32 != "fails" and self.is_cured_by(policy_of(self.case))


def policy_of(case, deny=(), dtype=None):
    listed = ", ".join(f'"{entry}"' for entry in deny)
    facts = {"schema": "ampx.policy/1", "framework": case.framework, "dtype": dtype or case.dtype, "level": "O1"}
    return "\n".join([*(f'{key} = "{value}"' for key, value in facts.items()), f"deny = [{listed}]", ""])


def holds_the_code(case, place):
    """Return whether a place such as `train.py:12` is the line that the truth quotes."""
    number = re.search(rf"{case.name}\.py:(\d+)", place or "")
    return bool(case.code and number and case.code in case.script.read_text().splitlines()[int(number[1]) - 1])


def is_true_line(case, place):
    return not case.code or holds_the_code(case, place)


def within_model(name):
    """Return the name of a module without the class that it begins with where a script has several models."""
    return re.sub(r"^\w+:(?=.)", "", name)


def is_true_place(case, module, place):
    """Return whether a module is one of those at fault, or where no module is, a place the line."""
    if case.modules:
        return within_model(module) in case.modules
    return is_true_line(case, place)


def diagnosed(runner, case, healthy):
    """Return the verdict on `ampx diagnose`, and what it said."""
    done = runner.ampx("diagnose", "--dtype", case.dtype, "--json", case.script, *runner.options)
    if not done.stdout.lstrip().startswith("{"):
        assert "Traceback" not in done.stderr, done.stderr[-3000:]  # a crash is no verdict
        said = " ".join((done.stdout + done.stderr).split())[-600:]
        loses = "updates" in case.kinds and not healthy
        if "precision is innocent" in said and (loses or case.float32 == "healthy"):
            return "wrong", said
        return ("accused" if healthy else "right and curing" if loses and UPDATES.search(said) else "silent"), said
    report = json.loads(done.stdout)
    diagnosis, said = report["diagnosis"], report["verdict"]
    beside = " ".join([*report["mistakes"], *report["notes"], *(risk["text"] for risk in report["risks"])])
    kind = "healthy" if diagnosis is None else diagnosis["kind"]
    if healthy:
        return ("accused" if kind not in ("healthy", "loss scale") else "right"), said
    if "updates" in case.kinds and UPDATES.search(beside):
        return "right and curing", f"{said} {beside}"
    if kind == "healthy":
        claimed = "every module agrees" in said and "updates" not in case.kinds
        return ("wrong" if claimed else "silent"), said
    place = diagnosis["first_nonfinite"] or {"module": "", "place": ""}
    said += f" [{place['module']!r}, {place['place']}] advice: {diagnosis['advice']}"
    innocent = diagnosis["float32_fails"] and case.float32 == "healthy"
    if innocent or kind not in case.kinds or not is_true_place(case, place["module"], place["place"]):
        return "wrong", said
    return ("right and curing" if _cures(runner, case, diagnosis) else "right without cure"), said


def _cures(runner, case, diagnosis):
    """Return whether advice helps: a setting is carried out, and an edit is the one that `--cure` makes."""
    advice = diagnosis["advice"]
    if case.no_cure and case.no_cure in advice:
        return False
    untried = re.search(r"deny=(\[.*?\])", advice)
    deny = diagnosis["deny"] or (json.loads(untried[1].replace("'", '"')) if untried else [])
    first = next((line for line in advice.splitlines() if not line.startswith("#")), "")
    dtype = re.search(r"init\(dtype=.(\w+).\)", first)
    if deny or dtype:
        return runner.is_cured_by(policy_of(case, deny, None if deny else dtype[1]))
    return bool(case.edit) and bool(advice)


def tuned(runner, case, healthy):
    """Return the verdict on `ampx tune`, and what it said."""
    options = ("--dtype", case.dtype, "--repeats", "0", "-o", "tuned.toml", "--force", "--report", "tuned.json")
    done = runner.ampx("tune", *options, case.script, *runner.options)
    report = runner.folder / "tuned.json"
    if not report.exists():
        said = " ".join(done.stderr.split())[-600:]
        assert "Traceback" not in said, done.stderr[-3000:]  # a crash is no verdict
        if "updates" in case.kinds and not healthy and UPDATES.search(said):
            return "right and curing", said
        if "fails in float32 itself" not in said:
            return ("right" if healthy else "silent"), said
        return ("accused" if healthy else "right and curing" if case.float32 == "fails" else "wrong"), said
    facts = json.loads(report.read_text())
    policy, said = facts["policy"], facts["verdict"]
    deny = [choice["entry"] for choice in policy["deny"]]
    reasons = [f"{choice['entry']}: {choice['reason']}" for choice in policy["deny"]]
    said += f" deny: {reasons} runs: {facts['runs']}"
    if healthy:
        return ("accused" if deny or policy["dtype"] != case.dtype else "right"), said
    if policy["dtype"] != case.dtype:
        return names_what_fails(case, said), said
    if case.float32 == "fails":
        return "silent", said
    if not runner.is_cured_by((runner.folder / "tuned.toml").read_text()):
        return "wrong", f"{said} [its policy does not make the run healthy]"
    true = (is_true_entry(case, entry["entry"]) or names_the_fault(case, entry["reason"]) for entry in policy["deny"])
    return ("right and curing" if all(true) else "wrong"), said


def names_what_fails(case, said):
    """Judge advice to stay in float32 by what it says fails in the dtype: a module, a line of the script, nothing."""
    module = re.search(r"in module '([^']*)'", said)
    if not module and f"{case.name}.py:" not in said:
        return "silent"
    return "right without cure" if is_true_place(case, module[1] if module else "", said) else "wrong"


def names_the_fault(case, reason):
    """Return whether a reason says that an entry is kept for what fails behind it, and that is at fault."""
    what = reason.partition("it is kept for ")[2]
    module = re.search(r"in module '([^']*)'", what)
    return bool(what) and (holds_the_code(case, what) or bool(module and within_model(module[1]) in case.modules))


def compared(runner, case, healthy):
    """Return the verdict on `ampx compare`, and what it said: a dtype that it does not rely on has a fault."""
    options = ("--dtype", case.dtype, "--repeats", "1", "--json")
    done = runner.ampx("compare", *options, case.script, *runner.options)
    if not done.stdout.lstrip().startswith("{"):
        return _refused(case, healthy, done.stderr)
    report = json.loads(done.stdout)
    facts = report["dtypes"][case.dtype]
    said, first = facts["verdict"], facts["modules"] and facts["modules"]["first"]
    blames = facts["doubt"] in ("fault", "differs")
    if first is not None:
        said += f" [first: {first['direction']} of {first['module']!r}, off by {first['error']}]"
    if healthy:
        return ("accused" if blames else "right"), said
    if "updates" in case.kinds:
        return (
            "right without cure" if re.search(r"updates (round to nothing|are rounded away)", said) else "wrong"
        ), said
    if case.float32 == "fails":
        return ("right without cure" if "float32 itself" in said else "wrong" if blames else "silent"), said
    if first is None and not blames:
        return "wrong", said
    right = "right and curing" if facts["fault"] and _cures(runner, case, facts["fault"]) else "right without cure"
    if first is None:
        place = facts["fault"] and facts["fault"]["place"]  # of an operation outside of all modules, say
        named = any(name in parameter for name in case.modules if name for parameter in facts["flushed"])
        if named or not any(case.modules):
            return right, said
        if place is None:
            return "silent", said
        return (right if is_true_place(case, place["module"], place["place"]) else "wrong"), said
    return (right if _is_true_first(case, first) else "wrong"), said


def _is_true_first(case, first):
    """Return whether a value of a module may be the first that is wrong."""
    name = within_model(first["module"])
    if not any(case.modules):
        return first["direction"] == "backward"
    inside = any(module and name.startswith(f"{module}.") for module in case.modules)
    return inside or name in (case.modules if first["direction"] == "forward" else (*case.gradient, *case.modules))


def _refused(case, healthy, stderr):
    """Judge what `compare` says of a script that raises, or that it refuses: its last words, which hold the line."""
    said = " ".join(stderr.split())[-600:]
    if healthy:
        return "accused", said
    raises = "error" in case.kinds and case.code and case.code in stderr
    loses = "updates" in case.kinds and UPDATES.search(said)
    return ("right without cure" if raises or loses else "silent"), said


def is_true_entry(case, entry):
    """Return whether an entry of `deny` is one that the truth has, or is inside a module that is at fault."""
    kind, colon, name = entry.partition(":")
    entry = f"{kind}{colon}{within_model(name)}"
    inside = any(name and entry.startswith(f"module:{name}.") for name in case.modules)
    return inside or entry in (*case.deny, *case.operations, *(f"module:{name}" for name in case.modules if name))


def told_by(tool):
    """Return the judge of another tool: it gives no advice, and a place that it names is true or not."""

    def judge(runner, case, healthy):
        script = HERE / f"others_{case.framework}.py"
        done = runner.python(script, tool, case.dtype, case.script, *runner.options)
        assert done.returncode == 0, done.stderr[-3000:]
        answer = json.loads(done.stdout.splitlines()[-1])
        said = " ".join(answer["said"].split())[-500:]
        if healthy:
            return ("accused" if answer["blamed"] else "right"), said
        if not answer["blamed"]:
            return "silent", said
        module, line = answer["module"], answer["line"]
        named = is_true_place(case, module, line) if module else is_true_line(case, line)
        return ("right without cure" if named else "wrong"), said

    return judge


OTHERS = {
    "torch": ("DebugUnderflowOverflow", "set_detect_anomaly"),
    "jax": ("jax_debug_nans", "jax_debug_infs"),
    "tensorflow": ("enable_check_numerics",),
    "paddle": ("enable_tensor_checker",),
}
JUDGES = {
    "diagnose": diagnosed,
    "tune": tuned,
    "compare": compared,
    **{tool: told_by(tool) for tools in OTHERS.values() for tool in tools},
}


def score(framework, only, tools, limit, device):
    """Yield a row for each case, twin and tool that ends in time."""
    for case in cases(framework):
        if only and case.name not in only:
            continue
        for tool in tools:
            for twin in (False, True):
                try:
                    with tempfile.TemporaryDirectory() as folder:
                        runner = Runner(case, Path(folder), ["--twin"] if twin else [], limit, device)
                        healthy = twin or case.healthy_by_run or runner.is_healthy_there()
                        verdict, said = JUDGES[tool](runner, case, healthy)
                except TookTooLongError as error:
                    print(f"{case.name}{' (twin)' if twin else ''}, {tool}: {error}", flush=True)
                    continue
                said = re.sub(r"/(?:[\w.+-]+/)+", "", said)  # folders of this machine
                row = {"case": case.name, "twin": twin, "tool": tool, "verdict": verdict, "said": said, "at": commit()}
                print(f"{case.name}{' (twin)' if twin else ''}, {tool}: {verdict}: {said}", flush=True)
                yield row


def commit():
    line = subprocess.run(["git", "log", "-1", "--format=%h"], cwd=ROOT, capture_output=True, text=True, check=True)
    return line.stdout.strip()


def table(head, rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def write_page():
    """Write the tables of the manual from the files of all frameworks."""
    sums, parts = [], []
    for framework in FRAMEWORKS:
        file = RESULTS / f"{framework}.json"
        if not file.exists():
            continue
        rows = json.loads(file.read_text())["rows"]
        verdicts = {(row["case"], row["tool"], row["twin"]): row["verdict"] for row in rows}
        parts.append(f"## {NAMES[framework]}\n")
        for held_out in (False, True):
            chosen = [case for case in cases(framework) if case.held_out is held_out]
            tools = [tool for tool in JUDGES if any((case.name, tool, False) in verdicts for case in chosen)]
            sums += [_sum(framework, held_out, tool, chosen, verdicts) for tool in tools]
            if tools:
                parts += ["Written after the tools:\n"] * held_out + [_table_of_cases(chosen, tools, verdicts) + "\n"]
    head = ["framework", "tool", "scripts", *(f"{MARKS[verdict]} {verdict}" for verdict in VERDICTS[:4])]
    head.append(f"{MARKS['accused']} twins accused")
    PAGE.write_text("\n".join([INTRODUCTION, table(head, sums), "", *parts]))


def _sum(framework, held_out, tool, chosen, verdicts):
    """Return a tool's row of the summary: how often it reached each verdict on these cases."""
    cells = [verdicts.get((case.name, tool, twin)) for case in chosen for twin in (False, True)]
    healthy = [verdict for verdict in cells if verdict in ("right", "accused")]
    failing = [verdict for verdict in cells if verdict in VERDICTS[:4]]
    name = f"{NAMES[framework]}, written after the tools" if held_out else NAMES[framework]
    counts = [str(failing.count(verdict)) for verdict in VERDICTS[:4]]
    return [name, f"`{tool}`", str(len(failing)), *counts, f"{healthy.count('accused')} of {len(healthy)}"]


def _table_of_cases(chosen, tools, verdicts):
    rows = [[f"`{case.name}`", _what_fails(case), *(_cell(verdicts, case, tool) for tool in tools)] for case in chosen]
    return table(["script", "what fails in it", *(f"`{tool}`" for tool in tools)], rows)


def _what_fails(case):
    """Return the first line of a script's docstring, without what would end the cell of a table."""
    fails = ast.get_docstring(ast.parse(case.script.read_text())).splitlines()[0].replace("|", "\\|")
    return f"{fails} `ampx run` casts less, and trains as in float32." if case.healthy_by_run else fails


def _cell(verdicts, case, tool):
    """Return the mark of a tool's verdict on a case, and one more if it accused the twin; none where it did not run."""
    both = [verdicts.get((case.name, tool, twin)) for twin in (False, True)]
    return " ".join(MARKS[verdict] for verdict in both if verdict in MARKS)


NAMES = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow", "paddle": "PaddlePaddle", "mxnet": "MXNet"}
INTRODUCTION = """# How often the debugger is right

These training scripts fail of their precision, or of something else that looks like it. The tables show what `ampx
diagnose`, `ampx tune`, `ampx compare` and the frameworks' own tools say of each. What fails, where, and what cures it
was measured with the framework alone, and written down before a tool saw the script. Models are those of libraries
where these have one. Every script has a healthy twin, which differs by its data, its weights or a formula.

The rules of the debugger were found on the first scripts of each framework. Those *written after the tools*, in four
sets, come from authors who had not read the rules. At the **first** run over each set, with the rules found so far:

| set | scripts | tool | right | silent | wrong | twins accused |
| --- | --- | --- | --- | --- | --- | --- |
| first | 24 | `diagnose` | 17 | 2 | 5 | 0 |
| | | `tune` | 16 | 3 | 5 | 1 |
| | | `compare` | 20 | 1 | 3 | 0 |
| second | 27 | `diagnose` | 15 | 5 | 7 | 0 |
| | | `tune` | 18 | 1 | 8 | 1 |
| | | `compare` | 16 | 10 | 1 | 4 |
| third | 20 | `diagnose` | 11 | 1 | 8 | 0 |
| | | `tune` | 19 | 0 | 1 | 1 |
| | | `compare` | 17 | 0 | 3 | 0 |
| fourth | 21 | `diagnose` | 16 | 2 | 3 | 0 |
| | | `tune` | 18 | 0 | 3 | 0 |
| | | `compare` | 18 | 2 | 1 | 0 |

The last of them is what to expect of a script of your own: `diagnose` is right in 76 %, `tune` and `compare` in 86 %.
The authors of the fourth set had the [table of kinds](../how-to/loss-is-nan.md#what-it-may-say) before them, and named
every kind that is true by it. In the second set, three scripts of TensorFlow and their twins were refused on a CPU, and
one of MXNet failed by a fault of the test kit. In six of the eight wrong diagnoses of the third set, the values are
described truly, but the kind of the fault or the module is another than on record. The rows below show the rules as
mended since.

| mark | verdict | meaning |
| --- | --- | --- |
| ✓ | right and curing | kind and place are true, and by the advice, carried out, the script trains as in float32 |
| ○ | right without cure | kind and place are true; the advice does not help, or there is none |
| **–** | silent | nothing is said of the fault, nor anything false |
| **✗** | wrong | a kind or a place is not true, or all is said to be well |
| **!** | twin accused | a fault is named in the healthy twin |

No mark: not run. ○ is the best that other tools reach, which give no advice.

- `tune` is right, too, where float32 itself fails and it says so. It is wrong if the script does not train by its
  policy as in float32, or if the policy keeps in float32 what is not at fault, unless its reason there names what is.
  Where it advises to stay in float32, it is right without cure if the fault that it names is true.
- `compare` is right if the module that it says is at fault is; where none is, if it names none; where float32 fails,
  if it says so.
- Other tools are judged by the module or the line that they name; where only a module of a library is at fault, any
  line of the script is true. They run in the framework's own mixed precision. MXNet has no such tool.

PaddlePaddle and MXNet compute on a simulated GPU, because their CPU builds compute no float16; all else on a CPU.

The scripts are in `tests/corpus/scripts`, the truth in the `truth.toml` beside them, every sentence that a tool said in
`docs/evidence/corpus`. `python tests/corpus/score.py FRAMEWORK` runs the tools and writes this page.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=FRAMEWORKS, nargs="?", help="without it the page is written anew")
    parser.add_argument("--only", nargs="*", default=[], help="these cases; their rows replace those in the file")
    parser.add_argument("--tool", nargs="*", default=["diagnose"], choices=JUDGES)
    parser.add_argument("--limit", type=float, default=600, help="stop a run of a tool after so many seconds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    framework = arguments.framework
    if framework is None:
        write_page()
        return
    chosen = [case.script for case in cases(framework) if not arguments.only or case.name in arguments.only]
    forks.FRAMEWORKS[framework] = tuple(dict.fromkeys([*forks.FRAMEWORKS[framework], *imported(chosen)]))
    file = arguments.out / f"{framework}.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    arguments.out.mkdir(parents=True, exist_ok=True)
    order = {case.name: position for position, case in enumerate(cases(framework))}
    for row in score(framework, arguments.only, arguments.tool, arguments.limit, arguments.device):
        before = [other for other in before if any(other[key] != row[key] for key in ("case", "twin", "tool"))] + [row]
        before.sort(key=lambda row: (order[row["case"]], row["tool"], row["twin"]))
        file.write_text(json.dumps({"schema": "ampx.corpus/1", "rows": before}, indent=1) + "\n")
    if arguments.out == RESULTS:
        write_page()


if __name__ == "__main__":
    main()
