"""The reference has everything that is public, and its docstrings say all of it."""

import dataclasses
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import ampx
from ampx import errors, plugins
from ampx.backend import CONTRACTS as CONTRACT_PLACES
from ampx.protocol import Handle
from ampx.session import Amp
from version_records import FRAMEWORKS

ROOT = Path(__file__).parents[2]
PACKAGE = Path(ampx.__file__).parent
REFERENCE = {path.name: path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md"))}


# What Sphinx documents, from the docstrings: each is an entry of objects.inv.
DOCUMENTED = set(re.findall(r"^\.\. (?:auto|py:)\w+:: (ampx\.[\w.]+)", "\n".join(REFERENCE.values()), flags=re.M))
PUBLIC = {name: getattr(ampx, name) for name in dir(ampx) if name != "debug"}
FUNCTIONS = [name for name, value in PUBLIC.items() if inspect.isfunction(value)]
DATACLASSES = [name for name, value in PUBLIC.items() if dataclasses.is_dataclass(value)]
CONTRACTS = [pkgutil.resolve_name(place) for place in CONTRACT_PLACES.values()]


def section(documentation, heading):
    """Return the names that a section of a docstring explains."""
    block = re.search(rf"^{heading}:\n((?: +.*\n|\n)*)", f"{inspect.cleandoc(documentation)}\n", flags=re.M)
    return re.findall(r"^    \*{0,2}(\w+): ", block[1], flags=re.M) if block else []


def test_every_public_name_is_in_the_reference():
    assert sorted({f"ampx.{name}" for name in PUBLIC} - DOCUMENTED) == []


def test_every_error_and_warning_is_in_the_reference():
    classes = [
        value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__
    ]
    page = set(re.findall(r"^\.\. autoexception:: (\S+)$", REFERENCE["errors.md"], flags=re.M))
    assert {pkgutil.resolve_name(name) for name in page} == set(classes)
    assert len(page) == len(classes)


def test_what_a_plugin_may_implement_is_in_the_reference():
    hooks = [hook for name, hook in vars(plugins).items() if name.startswith("ampx_")]
    assert len(hooks) == 3
    documented = [pkgutil.resolve_name(name) for name in DOCUMENTED]
    assert [value for value in (*hooks, *CONTRACTS) if value not in documented] == []


@pytest.mark.parametrize(
    "verbs", [ampx.Backend, ampx.GenericBackend, Handle, *CONTRACTS], ids=lambda verbs: verbs.__name__
)
def test_every_verb_says_what_it_does(verbs):
    names = [name for name, verb in vars(verbs).items() if inspect.isfunction(verb) and not name.startswith("_")]
    assert names
    assert [name for name in names if not vars(verbs)[name].__doc__] == []


@pytest.mark.parametrize("name", DATACLASSES)
def test_every_field_is_explained(name):
    fields = [field.name for field in dataclasses.fields(PUBLIC[name])]
    inherited = [
        field
        for base in PUBLIC[name].__mro__[1:]
        if base is not object
        for field in section(base.__doc__, "Attributes")
    ]
    assert sorted({*section(PUBLIC[name].__doc__, "Attributes"), *inherited}) == sorted(fields)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_explained(name):
    arguments = list(inspect.signature(PUBLIC[name]).parameters)
    assert section(PUBLIC[name].__doc__, "Args") == arguments


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_error_that_is_named_exists(name):
    assert [
        error for error in section(PUBLIC[name].__doc__, "Raises") if not issubclass(PUBLIC[error], ampx.AmpxError)
    ] == []


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if hasattr(Amp, name) and name != "shutdown"])
def test_a_function_takes_what_the_method_of_the_session_takes(name):
    _, *arguments = inspect.signature(getattr(Amp, name)).parameters.values()
    assert list(inspect.signature(PUBLIC[name]).parameters.values()) == arguments


def test_every_environment_variable_is_listed():
    paths = [path for path in PACKAGE.rglob("*.py") if "testing" not in path.parts]
    sources = "\n".join(path.read_text() for path in [*paths, *(ROOT / "backends").rglob("*.py")])
    used = set(re.findall(r"\bAMPX_[A-Z_]+\b", sources))
    assert used == set(re.findall(r"`(AMPX_[A-Z_]+)`", REFERENCE["api.md"]))


def test_the_reference_names_every_command():
    shown = (ROOT / "docs" / "reference" / "index.md").read_text()
    commands = re.findall(r"^## ampx ([\w-]+)", (ROOT / "docs" / "reference" / "cli.md").read_text(), flags=re.M)
    assert {"run", "migrate", "new-backend"} <= set(commands)
    assert [command for command in commands if f"`{command}`" not in shown] == []


def test_no_page_keeps_the_marks_of_a_merge():
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    marked = [path.name for path in pages if re.search(r"^(<{7}|>{7}) ", path.read_text(), flags=re.M)]
    assert marked == []


def pinned(name):
    """Return the versions of a file of constraints, by package."""
    lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    return dict(line.partition(";")[0].strip().split("==") for line in lines)


def test_the_oldest_versions_that_are_accepted_are_those_that_are_tested():
    extras = re.findall(r"^(\w+) = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), flags=re.M)
    declared = {extra: dict(re.findall(r'"([\w-]+)[>=]=([\d.]+)"', needs)) for extra, needs in extras}
    checked = 0
    for framework in FRAMEWORKS:
        oldest = pinned(framework if framework == "mxnet" else f"{framework}-lowest")
        for package in declared[framework].keys() & oldest.keys():
            assert declared[framework][package].removesuffix(".0") == oldest[package].removesuffix(".0"), package
            checked += 1
    assert checked == 7


def test_the_oldest_and_the_newest_of_every_framework_run_every_night():
    wanted = {f"{framework}-{end}" for framework in FRAMEWORKS for end in ("lowest", "newest")}
    pythons = dict(
        re.findall(
            r'^\[tool\.tox\.env\.([a-z]+-(?:lowest|newest))\]\n(?:.*\n)*?base_python = \["python([\d.]+)"\]',
            (ROOT / "pyproject.toml").read_text(),
            flags=re.M,
        )
    )
    assert set(pythons) == wanted
    assert set(re.search(r"^VERSIONS \?= (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)[1].split(",")) == wanted
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert dict(re.findall(r'{ env: ([a-z]+-(?:lowest|newest)), python: "([\d.]+)" }', workflow)) == pythons
