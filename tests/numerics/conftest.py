"""Scripts of the toy framework, as `ampx compare`, `diagnose` and `tune` run them."""

from __future__ import annotations

import textwrap

import pytest

import ampx
from ampx.numerics.trial import Outcome, Trial, run_trial
from ampx.run import RunSettings
from ampx.run.program import Program
from toy import plugin


@pytest.fixture
def toys():
    """Register the toy frameworks, and end their sessions."""
    ampx.shutdown()
    if "toy" not in ampx.backends():
        ampx.register_plugin(plugin)
    yield
    ampx.shutdown()


@pytest.fixture
def toy_script(tmp_path, monkeypatch):
    """Return a function that writes a script of the toy framework, and returns it; processes find its backend."""
    info = tmp_path / "toy_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[ampx]\ntoy = toy.plugin\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)

    def write(text: str, *arguments: str) -> Program:
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        return Program("train.py", False, arguments)

    return write


@pytest.fixture
def trial(toy_script):
    """Return a function that runs a script of the toy framework once."""

    def run(text: str, *arguments: str, dtype: str = "float32", **options) -> Outcome:
        return run_trial(Trial(toy_script(text, *arguments), RunSettings(dtype), "toy", **options))

    return run
