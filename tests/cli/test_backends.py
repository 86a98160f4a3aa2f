"""`ampx backends` shows what is declared."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import ampx
from ampx.cli.capability_table import FACTS

TESTS = Path(__file__).parents[1]

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


CLOSURE = "test_overflow_in_any_lbfgs_evaluation_puts_parameters_and_state_back"
# By framework, what shows each fact: a test, or the kit with a harness of that kind.
SHOWN = {
    "torch": {
        "closures": f"torch/test_closures.py::{CLOSURE}",
        "sparse": "torch/test_optimizer_delegation.py::"
        "test_sparse_gradients_step_as_in_plain_torch_and_their_overflow_is_seen",
        "distributed": "torch/test_distributed.py::test_ddp_overflow_on_one_rank_is_skipped_on_all",
        "device scale": "torch/test_sync.py::test_the_trace_on_the_device_is_the_specifications",
    },
    "tensorflow": {
        "sparse": "tensorflow/test_optimizer.py::test_sparse_gradients",
        "distributed": "tensorflow/test_distributed.py::test_an_overflow_on_one_replica_makes_all_skip",
        "device scale": "tensorflow/test_graph.py::test_the_trace_is_the_reference_and_a_skip_changes_nothing",
        "traceable": "tensorflow/test_optimizer.py::test_a_function_traced_before_the_first_step_follows_the_scale",
    },
    "mxnet": {
        "sparse": "mxnet/test_trainer.py::test_sparse_gradients_are_scaled_checked_and_clipped",
        "distributed": "mxnet/test_distributed.py::"
        "test_an_overflow_on_one_worker_makes_both_skip_and_the_first_step_keeps_the_weights",
    },
    "paddle": {
        "closures": f"paddle/test_closures.py::{CLOSURE}",
        "sparse": "paddle/test_writes.py::test_sparse_gradients_that_are_never_cleared_add_up_too",
        "distributed": "paddle/test_distributed.py::test_an_overflow_on_one_rank_makes_both_skip",
    },
    "jax": {
        "distributed": "jax/test_optimizer.py::test_overflow_on_one_of_two_devices_skips_on_both_under_jit",
        "device scale": "jax/test_lowered_for_cuda.py::test_each_level_computes_in_its_dtypes_and_the_host_has_no_part",
        "traceable": "jax/test_optimizer.py::test_trace_under_jit_is_the_reference_trace_and_compiles_once",
        "state values": "conformance/test_jax.py::JaxHarness(ValueHarness)",
    },
}


def test_a_test_shows_every_fact_that_no_code_asks_for():
    assert {framework: set(shown) for framework, shown in SHOWN.items()} == {
        framework: set(facts) for framework, facts in FACTS.items()
    }
    for framework, shown in SHOWN.items():
        for fact, place in shown.items():
            file, _, name = place.partition("::")
            source = (TESTS / file).read_text()
            assert framework in file
            assert f"\ndef {name}(" in source or f"\nclass {name}:" in source, (framework, fact)
        assert ("closures" in shown) == (
            "closures = True" in (TESTS / "conformance" / f"test_{framework}.py").read_text()
        )


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
