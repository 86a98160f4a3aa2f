"""Score tools on the corpus: `python tests/corpus/score.py torch [--only CASE ...] [--tool diagnose ...] [--out DIR]`.

It runs in the environment that has the framework's libraries, writes `FRAMEWORK.json` into the folder (by default
`docs/evidence/corpus`), and then, from the files of all frameworks, `docs/reference/debugger-scores.md`. See
`corpus.py` for what is judged, and how.
"""

import argparse
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
from processes import QUIET, run_python  # noqa: E402

RESULTS = ROOT / "docs" / "evidence" / "corpus"
PAGE = ROOT / "docs" / "reference" / "debugger-scores.md"
VERDICTS = ("right and curing", "right without cure", "silent", "wrong", "accused")
SIMULATED = ("paddle", "mxnet")  # of which the CPU computes no float16: see simulated/sitecustomize.py
QUIET.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")


class Runner:
    """Runs a case in processes, in a folder of its own."""

    def __init__(self, case: Case, folder: Path):
        self.case, self.folder = case, folder

    def ampx(self, command, *options):
        device = "gpu" if self.case.framework in SIMULATED else "cpu"
        options = ("--framework", self.case.framework, "--device", device, *options)
        return run_python("-m", "ampx", command, *options, cwd=self.folder, nests=True, timeout=600)

    def plain(self, *options):
        return losses_of(run_python(self.case.script, *options, cwd=self.folder, check=True).stdout)

    def is_cured_by(self, policy):
        """Return whether the script, run by the policy, is healthy, at a scale at which no step is lost to settling."""
        lines = [line for line in policy.splitlines() if not line.startswith("loss_scale")]
        scale = f"loss_scale = {self.case.scale}"
        (self.folder / "cure.toml").write_text("\n".join([*lines[:2], scale, *lines[2:], ""]))
        done = self.ampx("run", "--policy", "cure.toml", self.case.script)
        try:
            losses = losses_of(done.stdout)
        except (IndexError, ValueError):
            return False
        return is_healthy(losses, self.plain(), self.case.tolerance)


def policy_of(case, deny):
    listed = ", ".join(f'"{entry}"' for entry in deny)
    facts = {"schema": "ampx.policy/1", "framework": case.framework, "dtype": case.dtype, "level": "O1"}
    return "\n".join([*(f'{key} = "{value}"' for key, value in facts.items()), f"deny = [{listed}]", ""])


def holds_the_code(case, place):
    """Return whether a place such as `train.py:12` is the line that the truth quotes."""
    number = re.search(rf"{case.name}\.py:(\d+)", place or "")
    return bool(case.code and number and case.code in case.script.read_text().splitlines()[int(number[1]) - 1])


def is_true_place(case, module, place):
    """Return whether a module is one of those at fault, or where no module is, a place the line."""
    if case.modules:
        return module.rpartition(":")[2] in case.modules  # of a second model, the name begins with its class
    return holds_the_code(case, place) if case.code else True


def diagnosed(runner, case, twin):
    """Return the verdict on `ampx diagnose`, and what it said."""
    done = runner.ampx("diagnose", "--dtype", case.dtype, "--json", case.script, *(["--twin"] if twin else []))
    if not done.stdout.lstrip().startswith("{"):
        assert "Traceback" not in done.stderr, done.stderr[-3000:]  # a crash is no verdict
        said = " ".join((done.stdout + done.stderr).split())[-600:]
        innocent = "precision is innocent" in said and case.float32 == "healthy"
        return ("wrong" if innocent else "silent"), said
    report = json.loads(done.stdout)
    diagnosis, said = report["diagnosis"], report["verdict"]
    beside = " ".join([*report["mistakes"], *report["notes"], *(risk["text"] for risk in report["risks"])])
    kind = "healthy" if diagnosis is None else diagnosis["kind"]
    if twin:
        return ("accused" if kind not in ("healthy", "loss scale") else "right"), said
    if "updates" in case.kinds and re.search(
        r"updates?\b.*\b(lost|round)|bfloat16 weights|weights in bfloat16", beside
    ):
        return "right and curing", f"{said} {beside}"
    if kind == "healthy":
        claimed = "every module agrees" in said and "updates" not in case.kinds
        return ("wrong" if claimed else "silent"), said
    place = diagnosis["first_nonfinite"] or {"module": "", "place": ""}
    said += f" [{place['module']!r}, {place['place']}] advice: {diagnosis['advice']}"
    innocent = diagnosis["float32_fails"] and case.float32 == "healthy"
    if innocent or kind not in case.kinds or not is_true_place(case, place["module"], place["place"]):
        return "wrong", said
    untried = re.search(r"deny=(\[.*?\])", diagnosis["advice"])
    deny = diagnosis["deny"] or (json.loads(untried[1].replace("'", '"')) if untried else [])
    edited = bool(case.edit) and bool(diagnosis["advice"])
    cured = runner.is_cured_by(policy_of(case, deny)) if deny else edited
    if case.no_cure and case.no_cure in diagnosis["advice"]:
        cured = False
    return ("right and curing" if cured else "right without cure"), said


def tuned(runner, case, twin):
    """Return the verdict on `ampx tune`, and what it said."""
    options = ("--dtype", case.dtype, "--repeats", "0", "-o", "tuned.toml", "--force", "--report", "tuned.json")
    done = runner.ampx("tune", *options, case.script, *(["--twin"] if twin else []))
    report = runner.folder / "tuned.json"
    if not report.exists():
        said = " ".join((done.stdout + done.stderr).split())[-600:]
        return ("right" if twin else "right without cure" if _blames_float32(said, case) else "silent"), said
    facts = json.loads(report.read_text())
    policy, said = facts["policy"], facts["verdict"]
    deny = [choice["entry"] for choice in policy["deny"]]
    said += f" deny: {deny} runs: {facts['runs']}"
    if twin:
        return ("accused" if deny or not policy["enabled"] else "right"), said
    if _blames_float32(said, case):
        return "right and curing", said
    if not policy["enabled"]:
        return "silent", said
    true = {f"module:{name}" for name in case.modules if name} | {*case.deny, *case.operations}
    cured = runner.is_cured_by(Path(runner.folder, "tuned.toml").read_text())
    if not cured or not true.issuperset(deny):
        return "wrong", said + ("" if cured else " [its policy does not make the run healthy]")
    return "right and curing", said


def _blames_float32(said, case):
    return case.float32 == "fails" and bool(re.search(r"float32 (itself )?fails|fails in float32|innocent", said))


def told_by(tool):
    """Return the judge of another tool: it gives no advice, and a place that it names is true or not."""

    def judge(runner, case, twin):
        script = HERE / f"others_{case.framework}.py"
        done = run_python(script, tool, case.dtype, case.script, *(["--twin"] if twin else []), timeout=600, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
        said = " ".join(answer["said"].split())[-500:]
        if twin:
            return ("accused" if answer["blamed"] else "right"), said
        if not answer["blamed"]:
            return "silent", said
        named = answer["module"] in case.modules if answer["module"] else holds_the_code(case, answer["line"])
        return ("right without cure" if named else "wrong"), said

    return judge


OTHERS = {"torch": ("DebugUnderflowOverflow", "set_detect_anomaly")}
JUDGES = {
    "diagnose": diagnosed,
    "tune": tuned,
    **{tool: told_by(tool) for tools in OTHERS.values() for tool in tools},
}


def score(framework, only, tools):
    """Yield a row for each case, twin and tool."""
    for case in cases(framework):
        if only and case.name not in only:
            continue
        for tool in tools:
            for twin in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    verdict, said = JUDGES[tool](Runner(case, Path(folder)), case, twin)
                said = re.sub(r"/(?:[\w.+-]+/)+", "", said)  # folders of this machine
                row = {"case": case.name, "twin": twin, "tool": tool, "verdict": verdict, "said": said}
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
        result = json.loads(file.read_text())
        tools = list(dict.fromkeys(row["tool"] for row in result["rows"]))
        verdicts = {(row["case"], row["tool"], row["twin"]): row["verdict"] for row in result["rows"]}
        for tool in tools:
            failing = [verdict for (_, name, twin), verdict in verdicts.items() if name == tool and not twin]
            twins = [verdict for (_, name, twin), verdict in verdicts.items() if name == tool and twin]
            counts = [str(failing.count(verdict)) for verdict in VERDICTS[:4]]
            accused = f"{twins.count('accused')} of {len(twins)}"
            sums.append([framework, tool, str(len(failing)), *counts, accused, result["commit"]])
        names = list(dict.fromkeys(row["case"] for row in result["rows"]))
        rows = [
            [
                name,
                *(
                    f"{verdicts.get((name, tool, False), '')}{TWIN.get(verdicts.get((name, tool, True)), '')}"
                    for tool in tools
                ),
            ]
            for name in names
        ]
        parts.append(f"## {framework}\n\n{table(['case', *tools], rows)}\n")
    head = ["framework", "tool", "cases", *VERDICTS[:4], "twins accused", "at"]
    PAGE.write_text("\n".join([INTRODUCTION, table(head, sums), "", *parts]))


TWIN = {"accused": ", twin accused"}
INTRODUCTION = """# How often the debugger is right

`tests/corpus` holds training scripts with models of libraries that fail of their precision, and a healthy twin of each.
What is true of a case (its kind, its place, what cures it) was measured with the framework alone. A tool is *right and
curing* if kind and place are true and its advice, carried out, makes the run healthy; *right without cure* if they are
true and the advice does not help; *silent* if it says nothing of the fault, nor anything false; *wrong* if it names
another kind or place, or says that all is well. Twins must not be accused. `python tests/corpus/score.py FRAMEWORK`
makes the table, and `docs/evidence/corpus` holds each sentence.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--only", nargs="*", default=[], help="these cases; their rows replace those in the file")
    parser.add_argument("--tool", nargs="*", default=["diagnose"], choices=JUDGES)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    framework = arguments.framework
    if framework in SIMULATED:
        QUIET["PYTHONPATH"] = os.pathsep.join([str(HERE / "simulated"), os.environ["PYTHONPATH"]])
        QUIET["AMPX_CORPUS_SIMULATES"] = framework
    chosen = [case.script for case in cases(framework) if not arguments.only or case.name in arguments.only]
    forks.FRAMEWORKS[framework] = tuple(dict.fromkeys([*forks.FRAMEWORKS[framework], *imported(chosen)]))
    file = arguments.out / f"{framework}.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    arguments.out.mkdir(parents=True, exist_ok=True)
    order = {case.name: position for position, case in enumerate(cases(framework))}
    for row in score(framework, arguments.only, arguments.tool):
        before = [other for other in before if any(other[key] != row[key] for key in ("case", "twin", "tool"))] + [row]
        before.sort(key=lambda row: (order[row["case"]], row["tool"], row["twin"]))
        file.write_text(json.dumps({"schema": "ampx.corpus/1", "commit": commit(), "rows": before}, indent=1) + "\n")
    if arguments.out == RESULTS:
        write_page()


if __name__ == "__main__":
    main()
