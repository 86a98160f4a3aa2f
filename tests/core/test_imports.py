"""What `import ampx` costs, which names it has, and in which direction its modules import each other."""

import ast
import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ampx

ROOT = Path(ampx.__file__).parent
FRAMEWORKS = {"torch", "tensorflow", "keras", "tf_keras", "mxnet", "paddle", "jax", "jaxlib", "numpy", "cupy"}
CORE = sorted(ROOT.glob("*.py"))

# Imports go down, never up or sideways. A module that is missing here fails the test.
LEVELS = [
    {"errors"},
    {"policy", "scale_state", "events"},
    {"levels", "ledger", "effective", "annotate"},
    {"contract", "group", "state"},
    {"backend", "interop", "session_state"},
    {"optimizer", "hookspecs", "casting"},
    {"checks", "gating", "loading", "scaling"},
    {"registry"},
    {"sessions", "callers"},
    {"values"},
    {"reporting"},
    {"amp"},
    {"api", "starting"},
    {"debug"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_framework_and_no_machinery():
    loaded = set(run("import ampx, sys; print(*sys.modules)").split())
    assert not {name.partition(".")[0] for name in loaded} & FRAMEWORKS
    assert not loaded & {"pluggy", "importlib.metadata", "inspect", "typing_extensions", "ampx.registry"}


def test_every_module_of_core_loads_no_framework():
    modules = [f"ampx.{path.stem}" for path in CORE if path.stem != "__init__"]
    loaded = run(f"import sys, {', '.join(modules)}; print(*sys.modules)").split()
    assert not {name.partition(".")[0] for name in loaded} & FRAMEWORKS


def test_import_adds_less_than_30_ms():
    # Time of the processor, and the least of some: what else the machine does is not the import's.
    program = "from time import process_time; t = process_time(); import ampx; print(process_time() - t)"
    assert min(float(run(program)) for _ in range(7)) < 0.030


def literal(tree, name):
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise AssertionError(name)


def test_the_lazy_names_are_the_typed_names():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    typed = {(alias.asname or alias.name, node.module or alias.name) for node in imports for alias in node.names}
    lazy = {(name, module) for module, names in literal(tree, "_MODULES").items() for name in names}
    assert lazy == typed
    for node in imports:
        for alias in node.names:
            assert alias.asname == alias.name, "mypy exports only `import x as x`"


def test_type_checkers_do_not_see_the_function_that_would_give_every_name():
    (hidden,) = [
        node
        for node in ast.parse((ROOT / "__init__.py").read_text()).body
        if any(isinstance(one, ast.FunctionDef) and one.name == "__getattr__" for one in ast.walk(node))
    ]
    assert isinstance(hidden, ast.If)
    assert ast.unparse(hidden.test) == "not TYPE_CHECKING"


def test_the_version_is_that_of_the_distribution():
    assert ampx.__version__ == importlib.metadata.version("ampx")


def test_every_public_name_is_importable_and_comes_from_where_the_table_says():
    for path in CORE:  # a submodule must not hide a name: importing it sets an attribute of the package
        importlib.import_module(f"ampx.{path.stem}")
    for name in dir(ampx):
        value = getattr(ampx, name)
        home = ampx._HOMES[name]
        expected = importlib.import_module(f"ampx.{home}")
        assert value is (expected if name == home else getattr(expected, name)), name


def test_names_survive_the_import_of_every_submodule():
    modules = [f"ampx.{path.stem}" for path in CORE if path.stem != "__init__"]
    listing = "[n for n in dir(ampx) if isinstance(getattr(ampx, n), types.ModuleType)]"
    program = f"import types, ampx, {', '.join(modules)}; print(*{listing})"
    assert run(program).split() == ["debug"]


def test_unknown_names_are_refused_as_python_does():
    with pytest.raises(AttributeError, match="module 'ampx' has no attribute 'initialise'"):
        ampx.initialise  # noqa: B018


def imports_at_run_time(path):
    """Give the modules that a file imports, but for those under `if TYPE_CHECKING`."""
    found = []

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes = node.orelse
        else:
            nodes = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found.extend([f".{node.module}"] if node.module else [f".{alias.name}" for alias in node.names])
            else:
                found.append(node.module)
        for child in nodes:
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", [path for path in CORE if path.stem != "__init__"], ids=lambda path: path.stem)
def test_imports_point_down(path):
    for name in imports_at_run_time(path):
        if not name.startswith("."):
            continue
        if (path.stem, name) == ("backend", ".optimizer"):
            continue  # inside the default of one verb; it is the only upward import, and says why
        assert LEVEL[name[1:]] < LEVEL[path.stem], f"{path.stem} imports {name}"


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_core_imports_the_standard_library_and_pluggy_only(path):
    absolute = {name.partition(".")[0] for name in imports_at_run_time(path) if not name.startswith(".")}
    assert absolute <= {*sys.stdlib_module_names, "pluggy"}


def test_the_environment_is_left_alone():
    program = "import os, sys, ampx; ampx.init; print(sorted(os.environ) == sorted(before), len(sys.path) == paths)"
    done = run(f"import os, sys\nbefore, paths = dict(os.environ), len(sys.path)\n{program}")
    assert done.split() == ["True", "True"]
    assert os.environ.get("AMPX_DISABLE_PLUGINS") is None
