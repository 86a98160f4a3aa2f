"""Files of a package import each other in one direction, local imports and those for types counted."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "ampx", *sorted((ROOT / "backends").glob("ampx_*"))]
STEP_TYPES = "parts of the step name its type; the step's page is to part them"
RUN_TYPES = "parts of the automation name the manager's type, which makes them"
# The circles that there are, by the names of their files, each with the reason.
KNOWN = {
    "ampx": {
        ("run.recorder", "run.run", "run.started_sessions"): RUN_TYPES,
        ("run.children", "run.supervisor"): "a process that was started anew is supervised as its parent was",
        ("cli.demo", "cli.plot"): "the plot names the type of what it draws",
        ("testing.base", "testing.refusals"): "the base of the kit's tests has those of refusals, which derive from it",
    },
    "ampx_apex": {
        (
            "apex.amp._amp_state",
            "apex.amp.opt",
            "apex.amp.scaler",
        ): "the state of apex.amp holds its scalers, which scripts reach from both ends",
    },
    "ampx_paddle": {("run.manager", "run.static"): RUN_TYPES},
    "ampx_torch": {
        ("closures", "losses_by_id", "meter", "step"): STEP_TYPES,
        ("run.manager", "run.modules", "run.native", "run.operations"): RUN_TYPES,
    },
}


def import_graph(package):
    """Return the modules that each module of a package imports anywhere, by names within the package."""
    paths = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        paths[".".join(part for part in parts if part != "__init__")] = path
    graph = {}
    for module, path in paths.items():
        full = f"{package.name}.{module}".rstrip(".")
        home = full if path.name == "__init__.py" else full.rpartition(".")[0]
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                origin = importlib.util.resolve_name("." * node.level + (node.module or ""), home)
                for alias in node.names:  # a module in the package, or what the package itself holds
                    inside = f"{origin}.{alias.name}".partition(".")[2]
                    names.add(f"{origin}.{alias.name}" if inside in paths else origin)
        own = {name.partition(".")[2] for name in names if name.partition(".")[0] == package.name}
        graph[module] = (own & set(paths)) - {module}
    return graph


def circles(graph):
    """Return the sets of modules that can be reached from each other."""

    def reached(start):
        seen, waiting = set(), [start]
        while waiting:
            for module in graph[waiting.pop()] - seen:
                seen.add(module)
                waiting.append(module)
        return seen

    below = {module: reached(module) for module in graph}
    return {tuple(sorted(other for other in below[module] if module in below[other])) for module in graph} - {()}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_files_import_each_other_in_one_direction(package):
    assert circles(import_graph(package)) == set(KNOWN.get(package.name, ()))


def test_a_circle_by_local_imports_and_imports_for_types_is_found(tmp_path):
    texts = {
        "__init__": "def load():\n    from .a import x",
        "a": "def f():\n    from . import b",
        "b": "if TYPE_CHECKING:\n    from .c import y",
        "c": "import package.a",
        "d": "from .a import x",
    }
    for name, text in texts.items():
        (tmp_path / "package").mkdir(exist_ok=True)
        (tmp_path / "package" / f"{name}.py").write_text(text)
    assert circles(import_graph(tmp_path / "package")) == {("a", "b", "c")}
