"""Mutants of the backends' lines: a sample that stays the same, and which of them the tests of a framework kill.

    python tests/kit/sampled_mutants.py sample                  write the list, 300 of all frameworks
    python tests/kit/sampled_mutants.py map torch TESTS...      run tests once and note which lines each of them runs
    python tests/kit/sampled_mutants.py run torch [BEFORE]      try its mutants that have no verdict at this commit
    python tests/kit/sampled_mutants.py try NAME TESTS...       try one by tests that are named, and print its verdict
    python tests/kit/sampled_mutants.py table                   print what was killed, by commit

Each runs in the environment of the framework, with pytest-cov and the checkout on PYTHONPATH (`.:backends`). A mutant
has the name of its function and the text of its line, not a line's number, so that it stays the same where code moves.
Lines that run only in processes that tests start are not seen by `map`; their mutants are listed as "not run".
`map` adds to what it found before. With BEFORE, an earlier commit, a mutant keeps the verdict that it had there, unless
the test that killed it is gone or is another one now.
"""

import argparse
import ast
import functools
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "kit" / "sampled_mutants.json"
FRAMEWORKS = ("jax", "mxnet", "paddle", "tensorflow", "torch")
SEED, COUNT = 20261124, 300
MOST_TESTS = 40  # a mutant that so many tests of its line do not notice counts as alive
SECONDS = 300

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}


def mutated(node):
    """Return name and source of each mutant of one node of the syntax tree."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        yield "comparison", ast.unparse(ast.Compare(node.left, [COMPARED[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and-or", f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        yield "arithmetic", f"({ast.unparse(ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", repr(node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return", "return None"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", "pass"
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        yield "assignment", "pass"


def candidates(path):
    """Return every mutant of a file, as what is kept of it and where it stands now."""
    source = path.read_text()
    lines, entries, seen = source.splitlines(), [], Counter()

    def visit(node, function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        for name, new in mutated(node):
            start, end = ast_span(lines, node)
            key = (function, lines[node.lineno - 1].strip(), name, source[start:end], new)
            seen[key] += 1
            kept = dict(zip(("function", "line", "kind", "before", "after"), key, strict=True), number=seen[key])
            entries.append(({**kept, "file": str(path.relative_to(ROOT))}, (start, end, node.lineno)))
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
                continue
            for child in value if isinstance(value, list) else [value]:
                guards_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                if isinstance(child, ast.AST) and not guards_types and not isinstance(child, ast.JoinedStr):
                    visit(child, function)

    visit(ast.parse(source), "")
    return entries


def ast_span(lines, node):
    """Return where a node stands in the source, in characters; columns of the syntax tree are bytes."""

    def position(line, column):
        return sum(len(text) + 1 for text in lines[: line - 1]) + len(lines[line - 1].encode()[:column].decode())

    return position(node.lineno, node.col_offset), position(node.end_lineno, node.end_col_offset)


def packages(framework):
    """Return the folders of a framework's backend: its old recipes may have one of their own."""
    others = {"torch": ["ampx_apex"], "paddle": ["ampx_fluid"]}.get(framework, [])
    return [ROOT / "backends" / name for name in (f"ampx_{framework}", *others) if (ROOT / "backends" / name).is_dir()]


def all_candidates(framework):
    """Return every mutant of a framework's backend, in an order that does not change."""
    return [
        entry for folder in packages(framework) for path in sorted(folder.rglob("*.py")) for entry in candidates(path)
    ]


def name_of(framework, kept):
    """Return a name that stays where the code moves within its function."""
    text = json.dumps([kept[key] for key in ("function", "line", "kind", "before", "number")])
    return f"{framework}-{kept['function']}-{kept['kind']}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def sample():
    """Write the list, as many of each framework as it has lines."""
    entries = {framework: all_candidates(framework) for framework in FRAMEWORKS}
    total = sum(map(len, entries.values()))
    chosen = {}
    for framework, every in entries.items():
        share = round(COUNT * len(every) / total)
        for kept, _ in random.Random(SEED).sample(every, share):
            chosen[name_of(framework, kept)] = {**kept, "framework": framework, "verdicts": {}}
    save(chosen)
    print(f"{len(chosen)} of {total}:", Counter(mutant["framework"] for mutant in chosen.values()))


def save(mutants):
    LIST.write_text(json.dumps(mutants, indent=1) + "\n")


def find(framework, mutant):
    """Return the file, and where the mutant stands in it; None where that code is gone."""
    same = ("line", "kind", "before", "number")
    entries = [entry for entry in all_candidates(framework) if all(entry[0][key] == mutant[key] for key in same)]
    exact = [entry for entry in entries if entry[0]["function"].split(".")[-1] == mutant["function"].split(".")[-1]]
    return next(iter(exact or entries), None)


def map_file(framework):
    return ROOT / ".pytest_cache" / f"lines-{framework}.json"


def recorded_lines(framework):
    """Return which tests run which line, by file, and how long each of them takes."""
    path = map_file(framework)
    return json.loads(path.read_text()) if path.exists() else {"lines": {}, "seconds": {}}


def commit_of(name="HEAD"):
    shown = subprocess.run(["git", "rev-parse", "--short=8", name], cwd=ROOT, capture_output=True, check=True)
    return shown.stdout.decode().strip()


@functools.cache
def functions(path, commit):
    """Return the source of every function of a file at a commit, by name, those of classes included."""
    shown = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, check=False)
    nodes = ast.walk(ast.parse(shown.stdout))
    return {node.name: ast.unparse(node) for node in nodes if isinstance(node, ast.FunctionDef)}


def body(test, commit):
    """Return the source of a test at a commit, which its class may have from a suite; None where there is none."""
    path, name = test.partition("::")[0], re.sub(r"\[.*", "", test).rpartition("::")[2]
    suites = [f"ampx/testing/kit/{file.name}" for file in sorted((ROOT / "ampx" / "testing" / "kit").glob("*.py"))]
    suites += [f"tests/kit/{file}.py" for file in ("interrupted_steps", "matrix", "transfer")]
    return next((shown[name] for file in (path, *suites) if name in (shown := functions(file, commit))), None)


def map_lines(framework, tests):
    """Run tests once under coverage, and keep which of them runs which line."""
    with tempfile.TemporaryDirectory() as folder:
        config, junit = Path(folder, "rc"), Path(folder, "junit.xml")
        sources = "\n  ".join(str(path) for path in packages(framework))
        config.write_text(f"[run]\nsource =\n  {sources}\ndata_file = {folder}/data\n")
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "--cov", f"--cov-config={config}", "--cov-report=",
             "--cov-context=test", f"--junitxml={junit}", "-o", "junit_family=xunit1", *tests],
            cwd=ROOT, check=False,
        )  # fmt: skip
        from coverage import CoverageData

        data = CoverageData(f"{folder}/data")
        data.read()
        recorded = recorded_lines(framework)
        for file in data.measured_files():
            own = recorded["lines"].setdefault(str(Path(file).relative_to(ROOT)), {})
            for line, contexts in data.contexts_by_lineno(file).items():
                tests = {context.partition("|")[0] for context in contexts if "|run" in context}
                own[str(line)] = sorted(tests.union(own.get(str(line), ())))
        for case in ET.parse(junit).iter("testcase"):
            name = case.get("classname").rpartition(".")[2]
            inside = f"{name}::" if name != Path(case.get("file")).stem else ""
            recorded["seconds"][f"{case.get('file')}::{inside}{case.get('name')}"] = float(case.get("time"))
        map_file(framework).parent.mkdir(exist_ok=True)
        map_file(framework).write_text(json.dumps(recorded))


def run(framework, before=None):
    """Try every mutant of a framework that has no verdict at this commit yet, each in a copy of the tree."""
    recorded, mutants, commit = recorded_lines(framework), json.loads(LIST.read_text()), commit_of()
    before = before and commit_of(before)
    waiting = {
        name: mutant
        for name, mutant in mutants.items()
        if mutant["framework"] == framework and commit not in mutant["verdicts"]
    }
    with copied_tree() as tree:
        for name, mutant in waiting.items():
            former = mutant["verdicts"].get(before, "")
            killer = former.removeprefix("killed: ") if "::" in former else None
            if former and not (killer and body(killer, before) != body(killer, commit)):
                mutant["verdicts"][commit] = former
            else:
                mutant["verdicts"][commit] = verdict(framework, mutant, tree, lambda *place: reaching(recorded, *place))
            print(f"{name}: {mutant['verdicts'][commit]}", flush=True)
            save(mutants)


@contextmanager
def copied_tree():
    """Return a region with a copy of the tree."""
    ignored = shutil.ignore_patterns(".git", ".tox", ".venv*", "_build", "__pycache__", ".mypy_cache")
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(ROOT, Path(folder, "tree"), ignore=ignored))


def reaching(recorded, file, line):
    """Return the tests to ask about a line: of those that run it the quickest of every file first.

    One file may not know what another tests.
    """
    tests, by_file = recorded["lines"].get(file, {}).get(str(line), []), defaultdict(list)
    for test in sorted(tests, key=lambda test: recorded["seconds"].get(test, SECONDS)):
        by_file[test.partition("::")[0]].append(test)
    turns = [test for turn in range(MOST_TESTS) for own in by_file.values() for test in own[turn : turn + 1]]
    return turns[:MOST_TESTS]


def verdict(framework, mutant, tree, tests_of):
    """Return what became of one mutant."""
    entry = find(framework, mutant)
    if entry is None:
        return "gone"
    kept, (start, end, line) = entry
    tests = tests_of(kept["file"], line)
    if not tests:
        return "not run"
    path = tree / kept["file"]
    source = path.read_text()
    path.write_text(source[:start] + kept["after"] + source[end:])
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'backends'}"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests]
    try:
        ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "killed: it hangs"
    finally:
        path.write_text(source)
    if ended.returncode == 0:
        return "alive"
    failed = [
        line for line in ended.stdout.decode(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    return f"killed: {failed[0].split(' - ')[0].split(' ', 1)[1] if failed else 'no test could run'}"


def try_one(name, *tests):
    """Print what becomes of one mutant by tests that are named."""
    mutant = json.loads(LIST.read_text())[name]
    with copied_tree() as tree:
        print(f"{name}: {verdict(mutant['framework'], mutant, tree, lambda *place: tests)}")


def table():
    """Print how many of each framework were killed."""
    rows = defaultdict(Counter)
    for mutant in json.loads(LIST.read_text()).values():
        for commit, verdict in (mutant["verdicts"] or {"nowhere": "not tried"}).items():
            rows[mutant["framework"], commit][verdict.partition(":")[0]] += 1
    for (framework, commit), counts in rows.items():
        print(f"{framework:<12}{commit:<10}", dict(counts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sample", "map", "run", "try", "table"))
    parser.add_argument("framework", nargs="?", help=f"{', '.join(FRAMEWORKS)}; for `try` the name of a mutant")
    asked, rest = parser.parse_known_args()
    if asked.what in ("map", "run") and asked.framework not in FRAMEWORKS:
        parser.error("name a framework")
    {
        "sample": sample,
        "map": lambda: map_lines(asked.framework, rest),
        "run": lambda: run(asked.framework, *rest),
        "try": lambda: try_one(asked.framework, *rest),
        "table": table,
    }[asked.what]()
