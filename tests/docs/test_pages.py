"""The Python of README and manual runs, in each environment what its framework can run."""

import ast
import importlib.util
import inspect
import json
import pkgutil
import re
from pathlib import Path

import pytest

import ampx
from processes import run_python

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks(path):
    blocks = re.finditer(r"^```python\n(.*?)^```$", path.read_text(), flags=re.M | re.S)
    text = path.read_text()
    return [(text.count("\n", 0, match.start()) + 2, match[1]) for match in blocks]


# What the Python of the manual may need beyond ampx.
OTHERS = {
    *("torch", "accelerate", "pytorch_lightning", "lightning", "lightning_fabric", "transformers"),
    *("tensorflow", "keras", "mxnet", "paddle", "jax", "optax", "flax", "equinox", "numpy", "autograd"),
}
MIGRATE = ROOT / "docs" / "how-to" / "migrate.md"


def frameworks_needed(blocks):
    source = "\n".join(block for _, block in blocks)
    imported = set(re.findall(r"^\s*(?:import|from) (?:ampx_)?(\w+)", source, flags=re.M))
    return sorted(imported & OTHERS)


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if python_blocks(path)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_python_of_a_page_runs(path, tmp_path):
    blocks = python_blocks(path)
    absent = [name for name in frameworks_needed(blocks) if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)}")
    # Blank lines in between, so that a traceback shows the line of the page.
    program = ""
    for line, block in blocks:
        program += "\n" * (line - 1 - program.count("\n")) + block
    script = tmp_path / f"{path.stem}.py"
    script.write_text(program)
    done = run_python(script, cwd=tmp_path)
    lacking = re.search(r"UnsupportedDtypeError: (dtype='bfloat16' is not supported by .* on 'cpu'[^.]*)", done.stderr)
    if lacking:
        pytest.skip(f"of this page runs what comes before: {lacking[1]}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent / "migrated").glob("loop_*.py")), ids=lambda path: path.stem
)
def test_a_loop_that_was_migrated_by_the_table_trains(path, tmp_path):
    absent = [name for name in frameworks_needed([(1, path.read_text())]) if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)}")
    run_python(path, cwd=tmp_path, check=True)


TABLE = [row.strip("| ").split(" | ") for row in MIGRATE.read_text().splitlines() if re.match(r"\| [^*-]", row)]


@pytest.mark.filterwarnings("ignore:No ccache found")  # Paddle's, while it is imported
@pytest.mark.parametrize("row", TABLE[1:], ids=lambda row: row[0].replace("`", "")[:40])
def test_what_a_row_of_the_table_says_to_write_exists(row):
    old, new, *not_rewritten = row
    assert "`" in old
    assert not_rewritten in ([], ["left"], ["sometimes left"], ["reported"], ["unknown"])
    for code in re.findall(r"`([^`]+)`", new):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("ampx"):
                framework = ast.unparse(node).partition(".")[0].removeprefix("ampx_")
                if framework == "ampx" or importlib.util.find_spec(framework) is not None:
                    assert pkgutil.resolve_name(ast.unparse(node)) is not None
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("init", "ampx.init"):
                inspect.signature(ampx.init).bind(*node.args, **{word.arg: word.value for word in node.keywords})


LESSONS = {
    "torch": "float16-pytorch.md",
    "tensorflow": "float16-keras.md",
    "jax": "float16-jax.md",
    "paddle": "float16-paddle.md",
    "mxnet": "float16-mxnet.md",
}


def without_numbers(text):
    """Return the lines of an output, without steps, losses and times, which differ from run to run."""
    return {re.sub(r"(^|step|loss:?|-) ?[\d.]+\S*", r"\1 #", line) for line in text.splitlines()}


@pytest.mark.filterwarnings("ignore:No ccache found")
@pytest.mark.parametrize("framework", LESSONS)
def test_the_programs_of_a_lesson_print_what_it_shows_and_reach_the_same_loss(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    folder = ROOT / "docs" / "tutorial"
    page = (folder / LESSONS[framework]).read_text()
    shown = re.findall(r"```sh\npython ([^\n]+)\n```\n\n```text\n(.*?)```", page, flags=re.S)
    losses = {}
    for command, output in shown:
        name, *options = command.split()
        if name.endswith("_ampx.py") and "--dtype" not in options:
            options += ["--dtype", "bfloat16"]  # what `auto` chooses depends on the machine
        done = run_python(folder / name, *options, "--steps", "11", "--width", "64", check=True)
        assert without_numbers(done.stdout) == without_numbers(output), command
        losses[command] = [float(number) for number in re.findall(r"loss:? ([\d.]+)", done.stdout)]
    in_float32, *in_low_precision = losses.values()
    assert len(in_low_precision) >= 1
    # A loss is a mean of logarithms of outputs that are off by some roundings of bfloat16 (2^-9), as are the weights.
    assert in_low_precision == [pytest.approx(in_float32, rel=4 * 2**-9)] * len(in_low_precision)


NOTEBOOKS = {
    "torch": "first-steps-pytorch.ipynb",
    "tensorflow": "first-steps-keras.ipynb",
    "jax": "first-steps-jax.ipynb",
}
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=200, resources={"metadata": {"path": "."}}).execute()
for cell in notebook.cells:  # what differs from machine to machine is left out: times, warnings
    cell.metadata.clear()
    if cell.cell_type == "code":
        cell.outputs = [output for output in cell.outputs if output.get("name") == "stdout"]
nbformat.write(notebook, sys.argv[2])
"""


def printed_in(notebook):
    """Return the words that a notebook printed, without numbers and places, which differ from run to run."""
    outputs = [output for cell in json.loads(notebook.read_text())["cells"] for output in cell.get("outputs", ())]
    text = "".join(line for output in outputs for line in output["text"])
    return re.sub(r"\d[\d.e+-]*", "#", re.sub(r"\(\S+\.py:\d+\)", "(a line)", text)).split()


# Notebooks are one text in three frameworks; what is of the framework in it, lessons and pages run everywhere.
@pytest.mark.parametrize(
    "framework", ["torch", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tensorflow", "jax"))]
)
def test_a_notebook_runs_and_prints_what_it_shows(framework, tmp_path, request):
    absent = [name for name in (framework, "nbclient", "ipykernel") if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)}")
    notebook, executed = ROOT / "docs" / "tutorial" / NOTEBOOKS[framework], tmp_path / "executed.ipynb"
    run_python("-c", EXECUTE, notebook, executed, cwd=tmp_path, fresh=True, check=True)
    if request.config.getoption("--regenerate"):
        notebook.write_text(executed.read_text())
    assert printed_in(executed) == printed_in(notebook)
    assert "overflow" in printed_in(notebook)
