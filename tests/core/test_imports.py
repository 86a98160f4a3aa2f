"""What `import ampx` costs, which names it has, and in which direction its modules import each other."""

import ast
import graphlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ampx
from import_graphs import at_import, imported_anywhere, modules_in, names_imported, with_parents

ROOT = Path(ampx.__file__).parent
FRAMEWORKS = {"torch", "tensorflow", "keras", "tf_keras", "mxnet", "paddle", "jax", "jaxlib", "numpy", "cupy"}
CORE = sorted(ROOT.glob("*.py"))
CHECKOUT = Path(__file__).parents[2]
PACKAGES = [CHECKOUT / "ampx", *sorted((CHECKOUT / "backends").glob("ampx_*"))]


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_framework_and_no_machinery():
    loaded = set(run("import ampx, sys; print(*sys.modules)").split())
    assert not {name.partition(".")[0] for name in loaded} & FRAMEWORKS
    assert not loaded & {"pluggy", "importlib.metadata", "inspect", "typing_extensions", "ampx.plugins"}


def test_every_module_of_core_loads_no_framework():
    modules = [f"ampx.{path.stem}" for path in CORE if path.stem != "__init__"]
    loaded = run(f"import sys, {', '.join(modules)}; print(*sys.modules)").split()
    assert not {name.partition(".")[0] for name in loaded} & FRAMEWORKS


def test_import_adds_less_than_30_ms():
    # Time of the processor, and the least of some: what else the machine does is not the import's.
    program = "from time import process_time; t = process_time(); import ampx; print(process_time() - t)"
    assert any(float(run(program)) < 0.030 for _ in range(7))


def test_every_name_of_the_stub_can_be_imported_and_is_no_submodule_that_hides_it():
    for path in CORE:  # importing a submodule sets an attribute of the package
        importlib.import_module(f"ampx.{path.stem}")
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    listed = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert dir(ampx) == sorted(listed)
    for name, module in listed.items():
        home = importlib.import_module(f"ampx.{module or name}")
        assert getattr(ampx, name) is (home if module is None else getattr(home, name)), name


def test_names_survive_the_import_of_every_submodule():
    modules = [f"ampx.{path.stem}" for path in CORE if path.stem != "__init__"]
    listing = "[n for n in dir(ampx) if isinstance(getattr(ampx, n), types.ModuleType)]"
    program = f"import types, ampx, {', '.join(modules)}; print(*{listing})"
    assert run(program).split() == ["debug"]


def test_unknown_names_are_refused_as_python_does():
    with pytest.raises(AttributeError, match="module 'ampx' has no attribute 'initialise'"):
        ampx.initialise  # noqa: B018


def import_graph(package):
    """Return which modules of a package each one imports, with the packages that they bring, when it is the first."""
    files, graph = modules_in(package), {}
    for module, path in files.items():
        names = names_imported(module, path, at_import(ast.parse(path.read_text()).body))
        needed = {parent for name in names for parent in with_parents(name)} & set(files)
        graph[module] = needed - set(with_parents(module))  # those are imported already
    return graph


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_module_can_be_the_first_that_is_imported(package):
    graph = import_graph(package)
    assert len(graph) > 15
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules of the cycle


def test_a_cycle_by_way_of_a_package_would_be_found(tmp_path):
    for name, text in {"__init__": "", "a": "from .sub.leaf import x", "sub/__init__": "from .. import a"}.items():
        path = tmp_path / "package" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (path.parent / "leaf.py").write_text("x = 1")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(import_graph(tmp_path / "package")).prepare()


def test_core_knows_none_of_its_sub_packages():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert {"cli", "testing"} <= packages
    for path in CORE:
        if path.stem not in ("__init__", "__main__"):
            used = {name.split(".")[1] for name in imported_anywhere(f"ampx.{path.stem}", path) if name[:5] == "ampx."}
            assert not used & packages, path.stem


def test_core_is_small_enough_to_be_known():
    assert len([path for path in CORE if path.stem != "__init__"]) <= 21


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_core_imports_the_standard_library_pluggy_and_tomlkit_only(path):
    module = "ampx" if path.stem == "__init__" else f"ampx.{path.stem}"
    tops = {name.partition(".")[0] for name in imported_anywhere(module, path)}
    # tomlkit keeps the comments of a policy file.
    assert tops <= {*sys.stdlib_module_names, "ampx", "pluggy", "tomlkit"}


def test_the_environment_is_left_alone():
    program = "import os, sys, ampx; ampx.init; print(sorted(os.environ) == sorted(before), len(sys.path) == paths)"
    done = run(f"import os, sys\nbefore, paths = dict(os.environ), len(sys.path)\n{program}")
    assert done.split() == ["True", "True"]
    assert os.environ.get("AMPX_DISABLE_PLUGINS") is None


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_name_of_a_module_is_bound_twice(path):
    bound = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if "overload" not in map(ast.unparse, node.decorator_list):  # a signature of the function that follows
                bound.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound += [target.id for target in targets if isinstance(target, ast.Name)]
    assert sorted(bound) == sorted(set(bound))


def test_every_package_says_that_it_is_typed():
    assert len(PACKAGES) == 8
    assert [package.name for package in PACKAGES if not (package / "py.typed").is_file()] == []


def reaches_for_the_sessions(source):
    """Whether code takes the table of sessions, by an import or as an attribute of its module."""
    return any(
        (isinstance(node, ast.ImportFrom) and node.module == "ampx.session" and "sessions" in names_of(node))
        or (isinstance(node, ast.Attribute) and node.attr == "sessions" and ast.unparse(node.value).endswith("session"))
        for node in ast.walk(ast.parse(source))
    )


def names_of(node):
    return [alias.name for alias in node.names]


def test_a_backend_is_handed_its_session_and_does_not_look_it_up():
    assert reaches_for_the_sessions("def f():\n    from ampx.session import sessions as table")
    assert reaches_for_the_sessions("ampx.session.sessions.get('torch')")
    backends = sorted((Path(__file__).parents[2] / "backends").rglob("*.py"))
    assert backends
    assert [path.as_posix() for path in backends if reaches_for_the_sessions(path.read_text())] == []
