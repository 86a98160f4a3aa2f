"""`ampx doctor` tells the truth about what is there, and survives what is broken."""

from __future__ import annotations

import importlib.util
import json

import pytest

from ampx.run.machine import describe_cpu, tensor_core_dtypes


def examine(ampx_command, *arguments, code=None, **environment):
    return json.loads(ampx_command("doctor", "--json", *arguments, code=code, **environment).stdout)


def only(report):
    (framework,) = report["frameworks"]
    return framework


def test_report_has_every_known_framework_and_what_the_backend_says_of_an_installed_one(ampx_command):
    torch = pytest.importorskip("torch")
    report = examine(ampx_command, code=0)
    assert report["schema"] == "ampx.doctor/1"
    assert {framework["name"] for framework in report["frameworks"]} >= {
        "torch",
        "tensorflow",
        "mxnet",
        "paddle",
        "jax",
    }
    assert set(report) == {"schema", "ampx", "others", "machine", "plugins", "frameworks", "mixed_precision"}
    assert set(report["machine"]) == {"python", "executable", "platform", "cpu", "gpus"}
    for framework in report["frameworks"]:
        assert framework["state"] in {"ready", "no backend", "broken", "not installed"}
        assert (framework["problem"] is None) == (framework["state"] != "broken")
    # Those of PyTorch are what its backend says.
    (framework,) = (framework for framework in report["frameworks"] if framework["name"] == "torch")
    assert framework["state"] == "ready"
    assert framework["version"] == torch.__version__
    assert framework["mixed_precision"] in {"native", "emulated"}
    assert {device["name"] for device in framework["devices"]} | set(framework["absent_devices"]) == {"cpu", "cuda"}
    assert ("cuda" in framework["absent_devices"]) == (not torch.cuda.is_available())
    assert framework["init"]["reason"]


def add_distribution(ampx_command, summary, points=""):
    """Install a distribution called `ampx`, with entry points."""
    info = ampx_command.folder / "ampx-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: AMPX\nVersion: 0.0.1\nSummary: {summary}\n")
    (info / "entry_points.txt").write_text(points)


def test_the_other_distribution_called_ampx_is_told_with_what_to_do(ampx_command):
    add_distribution(ampx_command, "Peptides [beta]")
    (other,) = examine(ampx_command, "--framework", "mxnet")["others"]
    folder = str(ampx_command.folder.resolve())
    assert other == {"name": "ampx", "version": "0.0.1", "summary": "Peptides [beta]", "folder": folder}
    text = ampx_command("doctor", "--framework", "mxnet", code=None).stdout
    assert f"In the way: ampx 0.0.1 (Peptides [beta]) in {folder} has nothing to do with ampx-precision" in text
    assert "Run `pip uninstall ampx`, then `pip install --force-reinstall --no-deps ampx-precision`." in text


def test_a_distribution_of_that_name_that_registers_backends_is_our_own_from_before_it_was_renamed(ampx_command):
    add_distribution(ampx_command, "Mixed precision", "[ampx]\ntoy = toy.plugin\n")
    assert examine(ampx_command, "--framework", "mxnet")["others"] == []
    assert "In the way" not in ampx_command("doctor", "--framework", "mxnet", code=None).stdout


def test_plugin_framework_that_computes_low_precision_gives_exit_code_0(ampx_command):
    ampx_command.add_plugin("toy", "toy.plugin")
    report = examine(ampx_command, "--framework", "toy", code=0)
    framework = only(report)
    assert (framework["state"], framework["mixed_precision"]) == ("ready", "native")
    assert framework["init"]["dtype"] == "float16"
    assert report["plugins"]["found"].count("toy") == 1


def test_framework_that_is_not_installed_gives_exit_code_1(ampx_command):
    ampx_command.add_plugin("ghost", "ghost_plugin")
    ampx_command.add_module(
        "ghost_plugin",
        "import ampx\n"
        "@ampx.hookimpl\n"
        "def ampx_register_backends(register):\n"
        "    register('ghost', lambda: None, roots=('ghost_framework',), requires='ghost-framework>=1')\n",
    )
    report = examine(ampx_command, "--framework", "ghost", code=1)
    assert only(report)["state"] == "not installed"
    assert report["mixed_precision"] is False


def test_installed_framework_without_backend_is_listed_as_such(ampx_command):
    ampx_command.add_module("mxnet", "__version__ = '1.9.1'")
    framework = only(examine(ampx_command, "--framework", "mxnet", code=1, AMPX_DISABLE_PLUGINS="mxnet"))
    assert (framework["state"], framework["version"]) == ("no backend", "1.9.1")
    text = ampx_command("doctor", "--framework", "mxnet", code=1, AMPX_DISABLE_PLUGINS="mxnet").stdout
    assert "no ampx backend installed" in text


def test_framework_that_only_its_backend_can_import_is_ready(ampx_command):
    """As MXNet, which needs names that NumPy dropped."""
    ampx_command.add_module("picky", "import builtins\nbuiltins.picky_may_come\n__version__ = '1.0'")
    ampx_command.add_plugin("picky", "picky_plugin")
    ampx_command.add_module(
        "picky_plugin",
        "import ampx\n"
        "from toy.implicit import ImplicitToy\n"
        "class Backend(ImplicitToy):\n"
        "    name = 'picky'\n"
        "def load():\n"
        "    import builtins\n"
        "    builtins.picky_may_come = True\n"
        "    import picky\n"
        "    return Backend()\n"
        "@ampx.hookimpl\n"
        "def ampx_register_backends(register):\n"
        "    register('picky', load, roots=('picky',), requires='picky')\n",
    )
    framework = only(examine(ampx_command, "--framework", "picky", code=0))
    assert (framework["state"], framework["version"]) == ("ready", "1.0")


def add_feeble(ampx_command, body):
    """Install the framework `feeble`, made of `body`, and a backend that imports it."""
    ampx_command.add_module("feeble", body)
    ampx_command.add_plugin("feeble", "feeble_plugin")
    ampx_command.add_module(
        "feeble_plugin",
        "import ampx\n"
        "def load():\n"
        "    import feeble\n"
        "    return feeble.Backend()\n"
        "@ampx.hookimpl\n"
        "def ampx_register_backends(register):\n"
        "    register('feeble', load, roots=('feeble',), requires='feeble')\n",
    )


def test_framework_that_imports_while_its_backend_fails_is_broken(ampx_command):
    add_feeble(ampx_command, "__version__ = '1.9.1'")  # it has nothing that its backend needs
    framework = only(examine(ampx_command, "--framework", "feeble", code=1))
    assert (framework["state"], framework["version"]) == ("broken", "1.9.1")
    assert framework["problem"].startswith("its ampx backend failed: BackendLoadError")


def test_an_offer_that_cannot_be_loaded_is_named_and_training_is_ready(ampx_command):
    add_feeble(
        ampx_command,
        "from toy.implicit import ImplicitToy\n"
        "class Backend(ImplicitToy):\n"
        "    name = 'feeble'\n"
        "    offers = {**ImplicitToy.offers, 'converter': 'toy.inference:Missing', 'demo': 'feeble.nowhere:Demo'}\n",
    )
    framework = only(examine(ampx_command, "--framework", "feeble", code=0))
    assert (framework["state"], framework["problem"], list(framework["unusable_offers"])) == (
        "ready",
        None,
        ["converter", "demo"],
    )
    assert framework["unusable_offers"]["demo"] == "feeble.nowhere:Demo is not in this installation"
    text = ampx_command("doctor", "--framework", "feeble", code=0).stdout
    assert (
        "feeble: what its backend offers as 'converter' cannot be loaded: BackendLoadError: backend 'feeble' offers "
        "'toy.inference:Missing' as 'converter'; accepted: 'module:class'" in text
    )


def test_a_backend_that_casts_nothing_is_ready_and_trains_in_float32(ampx_command):
    """As one that has just been written: it passes the kit, and declares level O0 only."""
    add_feeble(
        ampx_command,
        "import dataclasses\n"
        "from toy.implicit import ImplicitToy\n"
        "class Backend(ImplicitToy):\n"
        "    name = 'feeble'\n"
        "    capabilities = dataclasses.replace(ImplicitToy.capabilities, levels=frozenset({'O0'}))\n",
    )
    framework = only(examine(ampx_command, "--framework", "feeble", code=1))
    assert (framework["state"], framework["problem"]) == ("ready", None)
    assert (framework["mixed_precision"], framework["init"]["level"], framework["init"]["dtype"]) == (
        "none",
        "O0",
        None,
    )
    text = ampx_command("doctor", "--framework", "feeble", code=1).stdout
    assert "ampx.init(framework='feeble', level='O0') chooses float32: mixed precision stays off" in text
    assert "Why: its backend declares level O0 only, which casts nothing.\n" in text


@pytest.mark.parametrize("name", ["ghost", "mxnet"])
def test_a_framework_that_is_not_installed_is_named_with_what_to_install(ampx_command, name):
    """Others may be installed beside it: nothing is said of them."""
    ampx_command.add_plugin("ghost", "ghost_plugin")
    ampx_command.add_module(
        "ghost_plugin",
        "import ampx\n"
        "@ampx.hookimpl\n"
        "def ampx_register_backends(register):\n"
        "    register('ghost', lambda: None, roots=('ghost_framework',), requires='ghost-framework>=1')\n",
    )
    if importlib.util.find_spec("mxnet") is not None and name == "mxnet":
        pytest.skip("MXNet is installed here")
    text = ampx_command("doctor", "--framework", name, code=1).stdout
    what = {"ghost": "'ghost-framework>=1'", "mxnet": "'ampx-precision[mxnet]'"}[name]
    assert f"{name} is not installed in this Python. Install it with `pip install {what}`.\n" in text
    assert "No framework" not in text


def test_empty_folder_of_a_framework_name_is_not_an_installation(ampx_command):
    ampx_command.add_plugin("hollow", "empty_plugin")
    ampx_command.add_module(
        "empty_plugin",
        "import ampx\n"
        "@ampx.hookimpl\n"
        "def ampx_register_backends(register):\n"
        "    register('hollow', lambda: None, roots=('hollow',), requires='hollow')\n",
    )
    (ampx_command.folder / "hollow").mkdir()
    assert only(examine(ampx_command, "--framework", "hollow"))["state"] == "not installed"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "raise ImportError('libcudart.so.9 is missing')",
            "importing feeble raised ImportError: libcudart.so.9 is missing",
        ),
        ("raise SystemExit(7)", "importing feeble raised SystemExit: 7"),
        ("import os; os._exit(3)", "the import ended the interpreter with exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the import crashed with SIGSEGV"),
        (
            "import sys, os; print('noise'); sys.stderr.write('first\\nlast words\\n'); sys.stderr.flush(); os.abort()",
            "the import crashed with SIGABRT: last words",
        ),
    ],
)
def test_framework_whose_import_fails_is_broken_and_doctor_survives(ampx_command, body, problem):
    add_feeble(ampx_command, body)
    framework = only(examine(ampx_command, "--framework", "feeble", code=1))
    assert (framework["state"], framework["problem"]) == ("broken", problem)


def test_framework_whose_import_hangs_is_broken_after_the_time_limit(ampx_command):
    add_feeble(ampx_command, "import time; time.sleep(600)")
    framework = only(examine(ampx_command, "--framework", "feeble", "--time-limit", "3", code=1))
    assert (framework["state"], framework["problem"]) == ("broken", "no answer within 3 s; the process was ended")


def test_broken_plugin_is_named_with_its_error(ampx_command):
    ampx_command.add_plugin("shaky", "shaky_plugin")
    ampx_command.add_module("shaky_plugin", "raise RuntimeError('the plugin is shaky')")
    broken = examine(ampx_command, "--framework", "mxnet")["plugins"]["broken"]
    assert list(broken) == ["shaky"]
    assert "the plugin is shaky" in broken["shaky"]
    text = ampx_command("doctor", "--framework", "mxnet", code=None).stdout
    assert "Plugin shaky is broken" in text
    assert "the plugin is shaky" in text


def test_plugin_that_kills_the_interpreter_leaves_doctor_alive(ampx_command):
    ampx_command.add_plugin("deadly", "deadly_plugin")
    ampx_command.add_module("deadly_plugin", "import os; os._exit(5)")
    report = examine(ampx_command, "--framework", "mxnet", code=1)
    assert "exit code 5" in report["plugins"]["error"]


def test_disabled_plugin_is_named(ampx_command):
    ampx_command.add_module("mxnet", "")
    arguments = ("doctor", "--framework", "mxnet")
    text = ampx_command(*arguments, code=1, AMPX_DISABLE_PLUGINS=" mxnet ,").stdout
    assert "Switched off by AMPX_DISABLE_PLUGINS: mxnet\n" in text


def test_unknown_framework_is_a_usage_error(ampx_command):
    assert "framework='nope' is not known" in ampx_command("doctor", "--framework", "nope", code=2).stderr


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        ("6.1", []),
        ("7.0", ["float16"]),
        ("7.5", ["float16"]),
        ("8.0", ["float16", "bfloat16", "TF32"]),
        ("8.6", ["float16", "bfloat16", "TF32"]),
        ("8.9", ["float16", "bfloat16", "TF32", "FP8"]),
        ("9.0", ["float16", "bfloat16", "TF32", "FP8"]),
        ("[N/A]", []),
    ],
)
def test_tensor_core_dtypes_follow_the_compute_capability(capability, dtypes):
    assert tensor_core_dtypes(capability) == dtypes


def test_cpu_instructions_are_read_from_the_first_processor(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text(
        "model name\t: Some CPU\nflags\t\t: fpu amx_bf16 avx512_fp16\n\nmodel name\t: Other\nflags\t: fpu\n"
    )
    assert describe_cpu(info) == {
        "name": "Some CPU",
        "instructions": {"avx512_fp16": "float16", "amx_bf16": "bfloat16 (AMX)"},
    }
    assert describe_cpu(tmp_path / "none")["instructions"] is None
