"""The distribution: its name wherever somebody is told to install it, what it holds, and that it works."""

import json
import os
import re
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import ampx
from ampx.cli.frameworks import KNOWN
from strangers import Stranger, packed, write_wheel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FOLDERS = ("ampx", "backends", "benchmarks", "docs", "integrations", "tests", ".ci", ".github")
KINDS = {
    *(".cff", ".cfg", ".css", ".html", ".ipynb", ".js", ".json", ".md", ".py", ".pyi", ".rst", ".sh", ".toml", ".txt"),
    *(".yaml", ".yml", ""),
}
# A command that installs, with its arguments, and an argument that asks for the wrong distribution.
ARGUMENT = r"""(?:'[^'\n]*'|"[^"\n]*"|[^\s`'"#&;]+)"""
INSTALLS = re.compile(rf"\b(?:install|uvx|(?:pipx|uv) (?:run|add))((?: +{ARGUMENT})+)")
WRONG = re.compile(r"""['"]?ampx(?:\[[^\]]*\])?(?:[=<>~!][^'"]*)?['"]?[.,;:)]*""")
# What is in the wheel, by folder: for users, and for authors of backends.
PACKAGES = {
    "ampx",
    "ampx_apex",
    "ampx_fluid",
    "ampx_jax",
    "ampx_mxnet",
    "ampx_paddle",
    "ampx_tensorflow",
    "ampx_torch",
}
PARTS = {
    "cli",
    "cli/new_backend_template",
    "lint",
    "loggers",
    "migrate",
    "numerics",
    "run",
    "shipping",
    "syntax",
    "testing",
    "testing/kit",
}


def texts():
    """Return every text of the repository, by path."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    kept = [path for path in files if path.suffix in KINDS and not {"_build", "__pycache__"} & set(path.parts)]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8", errors="replace") for path in kept}


def wrong_names(text):
    """Return where a text tells somebody to install the distribution `ampx`, which is another project's."""
    commands = [match[1] for match in INSTALLS.finditer(text)]
    words = [word for command in commands for word in command.split() if WRONG.fullmatch(word)]
    return words + re.findall(r"\bampx\[[a-z,{}]+\]", text)


def test_every_text_names_the_distribution_of_this_project():
    name = "ampx"
    assert wrong_names(f"`pip install {name}`") == [name]
    assert wrong_names(f"Run `pip install --upgrade '{name}>=1'`.") == [f"'{name}>=1'"]
    assert wrong_names(f"needs {name}[torch]") == [f"{name}[torch]"]
    assert wrong_names(f"pip install '{name}-precision[torch]' {name}-autograd\n{name} doctor") == []
    everything = texts()
    assert {"README.md", "pyproject.toml", "ampx/cli/new_backend_template/pyproject.toml.txt"} <= set(everything)
    assert {path: wrong for path, text in everything.items() if (wrong := wrong_names(text))} == {}


@pytest.mark.parametrize(
    "path", ["docs/example_backend/pyproject.toml", "ampx/cli/new_backend_template/pyproject.toml.txt"]
)
def test_packages_of_backends_depend_on_the_distribution_of_this_project(path):
    (dependencies,) = re.findall(r"^dependencies = \[(.*)\]", (ROOT / path).read_text(), flags=re.M)
    assert dependencies.startswith('"ampx-precision"')


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the sdist, and the wheel from it."""
    backend = pytest.importorskip("hatchling.build", reason="hatchling is not installed: it builds the distribution")
    folder, before = tmp_path_factory.mktemp("dist"), Path.cwd()
    try:
        os.chdir(ROOT)
        sdist = folder / backend.build_sdist(str(folder))
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "source", filter="data")
        os.chdir(folder / "source" / sdist.name.removesuffix(".tar.gz"))
        return sdist, folder / backend.build_wheel(str(folder))
    finally:
        os.chdir(before)


def test_sdist_and_wheel_have_name_version_and_what_an_index_shows(built):
    release = f"ampx_precision-{ampx.__version__}"
    assert [path.name for path in built] == [f"{release}.tar.gz", f"{release}-py3-none-any.whl"]
    with zipfile.ZipFile(built[1]) as wheel:
        shown = message_from_bytes(wheel.read(f"{release}.dist-info/METADATA"))
        points = wheel.read(f"{release}.dist-info/entry_points.txt").decode()
    assert (shown["Name"], shown["Version"]) == ("ampx-precision", ampx.__version__)
    assert shown.get_all("Project-URL") is None  # until the project has an address
    assert "Typing :: Typed" in shown.get_all("Classifier")
    assert set(KNOWN) <= set(shown.get_all("Provides-Extra"))
    needed = {re.match(r"[\w-]+", line)[0] for line in shown.get_all("Requires-Dist") if "extra ==" not in line}
    assert needed == {"pluggy", "rich", "tomlkit", "typer"}
    assert "ampx = ampx.cli:main" in points


def test_the_wheel_holds_nothing_for_maintainers_only(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = [name for name in wheel.namelist() if not name.startswith("ampx_precision-")]
    assert {name.partition("/")[0] for name in names} == PACKAGES
    folders = {name.rpartition("/")[0] for name in names}
    assert {folder.removeprefix("ampx/") for folder in folders if folder.startswith("ampx/")} == PARTS
    assert not {part for folder in folders for part in folder.split("/")} & {"tests", "benchmarks", "docs"}
    kinds = {Path(name).suffix for name in names if not name.endswith("py.typed")}
    assert kinds == {".py", ".pyi", ".txt", ".json"}
    assert [name for name in names if name.endswith(".json")] == ["ampx/tested_versions.json"]
    testing = {Path(name).stem for name in names if name.startswith("ampx/testing/") and name.count("/") == 2}
    assert not testing & {path.stem for path in (ROOT / "tests" / "kit").glob("*.py")}


@pytest.fixture(scope="module")
def stranger(built, tmp_path_factory):
    """Install the distribution by its name from an index."""
    pytest.importorskip("pip", reason="pip is not installed: it installs the distribution")
    index = tmp_path_factory.mktemp("index")
    (index / built[1].name).write_bytes(built[1].read_bytes())
    for name in ("pluggy", "rich", "tomlkit", "typer"):
        packed(name, index)
    stranger = Stranger(tmp_path_factory.mktemp("venv"), index)
    stranger.install("ampx-precision")
    return stranger


def test_the_command_works_after_a_plain_install(stranger):
    assert "No broken requirements" in stranger.pip("check")
    assert stranger.ampx("--version") == f"ampx {ampx.__version__}\n"
    report = json.loads(stranger.ampx("doctor", "--json", code=1))  # no framework, so no mixed precision
    assert (report["ampx"], report["others"]) == (ampx.__version__, [])
    assert {framework["name"] for framework in report["frameworks"]} == set(KNOWN)
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["ampx"]
    assert set(report["plugins"]["found"]) == set(plugins) > set(KNOWN)  # those of old names are no frameworks
    assert "Install one, such as with `pip install 'ampx-precision[torch]'`" in stranger.ampx("doctor", code=1)
    (stranger.home / "train.py").write_text("from torch.cuda import amp\nscaler = amp.GradScaler()\n")
    assert "train.py" in stranger.ampx("migrate", "train.py", code=1)
    assert "0 problems in 1 file" in stranger.ampx("lint", "train.py")
    assert "ampx-mine" in stranger.ampx("new-backend", "mine")
    for command in ("compare", "diagnose", "tune"):  # PyTorch does not bring NumPy by itself, and its extra does
        assert "needs numpy, which is not installed. Install it with `pip install 'ampx-precision[torch]'`" in (
            stranger.ampx(command, "train.py", code=2)
        )
    assert "numpy" in next(
        line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line[:8] == "torch = "
    )


def test_the_other_package_in_the_way_is_told_and_the_advice_helps(stranger):
    info = "ampx-0.0.1.dist-info"
    contents = {
        "ampx/__init__.py": b"",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: ampx\nVersion: 0.0.1\nSummary: Peptides\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    write_wheel(stranger.index / "ampx-0.0.1-py3-none-any.whl", info, contents)
    stranger.install("ampx")  # writes an empty file over ours
    assert "__init__.py is of another package; accepted: what ampx-precision installs" in stranger.ampx(
        "doctor", code=1
    )
    stranger.pip("uninstall", "--yes", "ampx")  # takes the file away
    message = stranger.ampx("run", "train.py", code=1)
    assert "the __init__.py of" in message
    advice = re.search(r"then `pip install ([^`]+)`", message)[1]
    stranger.install(*advice.split())
    assert stranger.ampx("--version") == f"ampx {ampx.__version__}\n"
