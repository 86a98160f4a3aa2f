"""`ampx backends` shows what is declared."""

from __future__ import annotations

import dataclasses
import json

import pytest

import ampx

GHOST = """
import ampx

@ampx.hookimpl
def ampx_register_backends(register):
    register("ghost", lambda: __import__("ghost_framework"), roots=("ghost_framework",), requires="ghost-framework>=1")
"""


@pytest.fixture(autouse=True)
def without_frameworks(monkeypatch):
    """What is tested here is said of any framework, and importing a real one takes seconds: see test_smoke.py."""
    monkeypatch.setenv("AMPX_DISABLE_PLUGINS", "torch,tensorflow,mxnet,paddle,jax")


def test_json_holds_every_declared_capability(ampx_command):
    ampx_command.add_plugin("toy", "toy.plugin")
    from toy.implicit import ImplicitToy

    report = json.loads(ampx_command("backends", "--json").stdout)
    assert report["schema"] == "ampx.backends/1"
    (toy,) = (backend for backend in report["backends"] if backend["framework"] == "toy")
    assert toy["available"]
    declared = dataclasses.asdict(ImplicitToy.capabilities)
    assert list(toy["capabilities"]) == list(declared)
    for name, value in declared.items():
        expected = sorted(value) if isinstance(value, frozenset) else list(value) if isinstance(value, tuple) else value
        assert toy["capabilities"][name] == expected


def test_table_has_a_column_for_each_framework_and_a_row_for_each_capability(ampx_command):
    ampx_command.add_plugin("toy", "toy.plugin")
    text = ampx_command("backends").stdout
    assert "toy-explicit" in text
    for field in dataclasses.fields(ampx.Capabilities):
        assert field.name.replace("_", " ") in text


def test_registered_framework_that_is_not_installed_is_unavailable_with_the_reason(ampx_command):
    ampx_command.add_plugin("ghost", "ghost_plugin")
    ampx_command.add_module("ghost_plugin", GHOST)
    text = ampx_command("backends").stdout
    assert "ghost is unavailable: ghost_framework is not installed" in text
    assert len([line for line in text.splitlines() if "ghost" in line]) == 1
    markdown = ampx_command("backends", "--markdown").stdout
    assert "| ghost | unavailable (ghost_framework is not installed) |" in markdown
    (ghost,) = (
        backend
        for backend in json.loads(ampx_command("backends", "--json").stdout)["backends"]
        if backend["framework"] == "ghost"
    )
    assert (ghost["available"], ghost["problem"]) == (False, "ghost_framework is not installed")


def test_table_has_columns_only_for_what_can_be_loaded(ampx_command):
    ampx_command.add_plugin("ghost", "ghost_plugin")
    ampx_command.add_module("ghost_plugin", GHOST)
    only = ampx_command("backends").stdout
    assert only.splitlines() == ["ghost is unavailable: ghost_framework is not installed"]
    ampx_command.add_plugin("toy", "toy.plugin")
    text = ampx_command("backends").stdout
    (heading,) = [line for line in text.splitlines() if line.strip().startswith("capability")]
    assert heading.split() == ["capability", "toy", "toy-bare", "toy-explicit"]


def test_framework_that_crashes_is_unavailable_and_the_others_are_shown(ampx_command):
    ampx_command.add_plugin("ghost", "ghost_plugin")
    ampx_command.add_module("ghost_plugin", GHOST)
    ampx_command.add_module("ghost_framework", "import os; os._exit(9)")
    ampx_command.add_plugin("toy", "toy.plugin")
    markdown = ampx_command("backends", "--markdown").stdout
    assert "| ghost | unavailable (the import ended the interpreter with exit code 9) |" in markdown
    assert "| toy | cpu |" in markdown


def test_broken_plugin_is_named(ampx_command):
    ampx_command.add_plugin("shaky", "shaky_plugin")
    ampx_command.add_module("shaky_plugin", "raise RuntimeError('the plugin is shaky')")
    assert "Plugin shaky is broken" in ampx_command("backends").stdout
