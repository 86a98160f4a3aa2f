"""Files of a package import each other in one direction, local imports and those for types counted."""

from pathlib import Path

import pytest

from import_graphs import imported_anywhere, modules_in

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
    files, graph = modules_in(package), {}
    for module, path in files.items():
        names = imported_anywhere(module, path)
        # A module, or what a module holds.
        own = {name if name in files else name.rpartition(".")[0] for name in names} & set(files)
        graph[module] = own - {module}
    return {_within(name): set(map(_within, names)) for name, names in graph.items()}


def _within(module):
    return module.partition(".")[2]


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
