"""The route of a newcomer, from `pip install` to a tuned policy, goes today as docs/evidence/route has it."""

import importlib.util
import re
import shlex

import pytest
import typer.main

import ampx
from ampx.cli.app import app
from routes import ROUTES, go, read
from strangers import Stranger, packed

FRAMEWORKS = ("torch", "tensorflow", "jax", "paddle", "mxnet")
WAY = ["pip install", "ampx --version", "ampx doctor", "ampx demo", "python", "ampx lint", "ampx run", "ampx compare"]
WAY += ["ampx diagnose", "ampx tune"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_typed_is_what_the_commands_take(framework):
    commands = [shlex.split(step.command) for step in read(framework)]
    kinds = [" ".join(words[:1] if words[0] == "python" else words[:2]) for words in commands]
    assert [kind for kind in dict.fromkeys(kinds) if kind in WAY] == WAY
    parser = typer.main.get_command(app)
    for program, *arguments in commands:
        if program == "ampx" and arguments != ["--version"]:
            command = parser.commands[arguments[0]]
            assert command.make_context(arguments[0], arguments[1:]) is not None
        for name in arguments:
            if name.endswith(".py"):
                assert (ROUTES / name).exists()


# MXNet computes all but products in float32 on a CPU, so that its policy names no module; PaddlePaddle all.
@pytest.mark.parametrize(("framework", "modules"), [("torch", 1), ("tensorflow", 1), ("jax", 1), ("mxnet", 0)])
def test_it_ends_with_a_script_that_trains_by_the_policy(framework, modules):
    *_, tuned, policy, trained = read(framework)
    assert (tuned.code, policy.code, trained.code) == (0, 0, 0)
    assert policy.printed.count('"module:') == modules
    assert trained.command.startswith("ampx run --policy ampx.toml")
    assert "nan" not in trained.printed


# What does not depend on the machine: kinds of failures, names of modules, numbers of steps, problems and exit codes.
FACT = r"loss:? nan|overflow|module '[^']+'|\"module:[^\"]+\"|\d+ problems?|\d+ steps, \d+ skipped|Nothing failed"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings("ignore:No ccache found")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_newcomer_gets_from_pip_install_to_a_policy(framework, tmp_path):
    for name in (framework, "pip"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    index = tmp_path / "index"
    index.mkdir()
    packed("ampx-precision", index, alone=True)
    stranger = Stranger(tmp_path / "home", index, has_framework=True)
    for then, now in go(framework, stranger):
        if now.code and "UnsupportedDtypeError" in now.printed and not then.code:
            pytest.skip(f"this CPU computes less than the one of the file: {now.printed}")
        assert (now.code, {*re.findall(FACT, now.printed)}) == (then.code, {*re.findall(FACT, then.printed)}), (
            f"{now}\ninstead of\n{then}"
        )
    assert f"ampx {ampx.__version__}\n" == read(framework)[1].printed
