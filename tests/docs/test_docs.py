"""The manual names everything that is public, with its true signature."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import ampx
from ampx import errors, plugins
from ampx.session import Amp
from version_records import FRAMEWORKS

ROOT = Path(__file__).parents[2]
PACKAGE = Path(ampx.__file__).parent
REFERENCE = {path.name: path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md"))}


def code_spans(text):
    """Return what stands between backticks, and the words of headings."""
    spans = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^#+ (.+)$", text, flags=re.M)
    return set(spans) | {span.removeprefix("ampx.").partition("(")[0] for span in spans}


def missing(names, text):
    absent = sorted(set(names) - code_spans(text))
    return f"not in docs/reference: {', '.join(absent)}" if absent else ""


def test_every_public_name_is_in_the_reference():
    names = [name for name in dir(ampx) if name != "debug"]
    assert missing(names, "\n".join(REFERENCE.values())) == ""


def test_every_error_and_warning_has_a_heading():
    classes = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
    names = [name for name, value in classes.items() if value.__module__ == errors.__name__]
    headings = re.findall(r"^### (\w+)$", REFERENCE["errors.md"], flags=re.M)
    assert sorted(headings) == sorted(names)


def test_every_hook_has_a_heading_and_its_exact_signature():
    hooks = {name: hook for name, hook in vars(plugins).items() if name.startswith("ampx_")}
    assert hooks
    for name, hook in hooks.items():
        assert f"\n## {name}\n\n`{name}{bare_signature(hook)}`\n" in REFERENCE["plugins-and-hooks.md"], name


def test_every_capability_is_explained_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", REFERENCE["capabilities.md"], flags=re.M))
    fields = dataclasses.fields(ampx.Capabilities)
    assert list(rows) == [field.name for field in fields]
    for field in fields:
        default = sorted(field.default) if isinstance(field.default, frozenset) else field.default
        assert ast.literal_eval(rows[field.name]) == default


@pytest.mark.parametrize(
    "cls",
    [ampx.StepResult, ampx.Event, ampx.ScaleCollapsed, ampx.Effective, ampx.LossScale, ampx.Device, ampx.CastPlan],
)
def test_every_field_is_explained(cls):
    assert missing([field.name for field in dataclasses.fields(cls)], "\n".join(REFERENCE.values())) == ""


def test_every_verb_of_a_backend_is_listed_with_its_signature():
    for name, verb in vars(ampx.Backend).items():
        if inspect.isfunction(verb) and not name.startswith("_"):
            assert f"`{name}{bare_signature(verb, method=True)}`" in REFERENCE["plugins-and-hooks.md"], name


def test_every_environment_variable_is_listed():
    paths = [path for path in PACKAGE.rglob("*.py") if "testing" not in path.parts]
    sources = "\n".join(path.read_text() for path in [*paths, *(ROOT / "backends").rglob("*.py")])
    used = set(re.findall(r"\bAMPX_[A-Z_]+\b", sources))
    assert used == set(re.findall(r"`(AMPX_[A-Z_]+)`", REFERENCE["environment.md"]))


def bare_signature(function, method=False):
    signature = inspect.signature(function)
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters[method:], return_annotation=inspect.Signature.empty))
    return re.sub(r"=<function .*?>", "=…", text)


FUNCTIONS = [name for name in dir(ampx) if inspect.isfunction(getattr(ampx, name))]


def typed_signature(name):
    """Return a call with the types of its arguments and of its result, an argument a line where it is long."""
    function = getattr(ampx, name)
    passes_on = any(item.kind is item.VAR_KEYWORD for item in inspect.signature(function).parameters.values())
    signature = inspect.signature(getattr(Amp, name) if passes_on else function)
    arguments = []
    for parameter in list(signature.parameters.values())[passes_on:]:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        default = parameter.default.__name__ if inspect.isfunction(parameter.default) else repr(parameter.default)
        default = "" if parameter.default is parameter.empty else f" = {default}"
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        arguments.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    line = f"ampx.{name}({', '.join(arguments)}) -> {signature.return_annotation}"
    if len(line) > 100:
        line = f"ampx.{name}(\n    " + ",\n    ".join(arguments) + f",\n) -> {signature.return_annotation}"
    return re.sub(r"\b(types|annotate|os)\.", "", line)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_signature_in_the_reference_is_the_true_one(name):
    block = rf"^### {name}\n\n```\{{code-block\}} python\n(.*?)\n```$"
    written = re.search(block, REFERENCE["api.md"], flags=re.M | re.S)
    assert written, f"docs/reference/api.md has no '### {name}' followed by a block with its signature"
    assert written[1] == typed_signature(name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_explained(name):
    section = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", REFERENCE["api.md"], flags=re.M | re.S)[1]
    arguments = [argument for argument in inspect.signature(getattr(ampx, name)).parameters if argument != "options"]
    # `autocast` and the three annotations say in a sentence what a list of one argument would repeat
    if len(arguments) > 1:
        assert [name for name in arguments if f"`{name}`" not in section and f"({name}" not in section] == []


def test_the_reference_names_every_command():
    shown = (ROOT / "docs" / "reference" / "index.md").read_text()
    commands = re.findall(r"^## ampx ([\w-]+)", (ROOT / "docs" / "reference" / "cli.md").read_text(), flags=re.M)
    assert {"run", "migrate", "new-backend"} <= set(commands)
    assert [command for command in commands if f"`{command}`" not in shown] == []


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
