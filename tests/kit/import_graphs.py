"""What the modules of a package import, read from their files."""

import ast
import importlib.util


def modules_in(package):
    """Return the files of a package by the full names of their modules."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    return files


def at_import(body):
    """Yield the statements that run when a module is imported, those inside of others too."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from at_import(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from at_import(list(ast.iter_child_nodes(node)))


def names_imported(module, path, nodes):
    """Return the full names of what some nodes of a module import; of `from a import b` it is `a.b`, module or not."""
    home = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), home)
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


def imported_anywhere(module, path):
    """Return the full names of what a module imports, in functions and under `if TYPE_CHECKING` too."""
    return names_imported(module, path, ast.walk(ast.parse(path.read_text())))


def with_parents(module):
    """Yield a name and the packages that it is in, from the inside out."""
    while module:
        yield module
        module = module.rpartition(".")[0]
