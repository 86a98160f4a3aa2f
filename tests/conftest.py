"""What tests showed goes on file, and the files are compared with what the tests of this run showed."""

import gc
import importlib.util
import json
import os
import pathlib
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# The toy framework, its plugin and its mutants, for the tests and for the processes that they start.
KIT = str(ROOT / "tests" / "kit")
sys.path.insert(0, KIT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), KIT]))

# `make weakest` lets oneDNN pretend to have a weaker CPU. TensorFlow asks the real one, and ends the process where
# oneDNN then has no kernel; on a CPU that is so weak it does without oneDNN, as it is told here before it is imported.
if os.environ.get("ONEDNN_MAX_CPU_ISA") in ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"):
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

# Many tests compile the same programs. JAX keeps what it compiled in this run, for processes that tests start, too.
_compiled = tempfile.TemporaryDirectory(prefix="ampx-compiled-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

pytest.register_assert_rewrite("interrupted_steps", "matrix", "transfer")

import processes  # noqa: E402 -- after the path on which it is, and the environment that it hands on
import products  # noqa: E402
import simulated_cuda  # noqa: E402
import simulated_mxnet  # noqa: E402
import simulated_paddle  # noqa: E402
from compiled import CannotSimulateError  # noqa: E402
from evidence import ASPECTS, COMBINATIONS, WORDS, EvidencePlugin  # noqa: E402
from version_records import RecordPlugin  # noqa: E402

# Frameworks look for devices when they are imported, which some conftest.py of a folder does.
SIMULATED = bool(os.environ.get("AMPX_SIMULATE_CUDA"))
not_simulated = None
if SIMULATED:
    installed = {"paddle": simulated_paddle, "mxnet": simulated_mxnet}
    simulated = next((device for name, device in installed.items() if importlib.util.find_spec(name)), simulated_cuda)
    try:
        simulated.start(ROOT / ".pytest_cache" / "simulated-cuda")
    except CannotSimulateError as reason:
        not_simulated = str(reason)


def pytest_addoption(parser):
    parser.addoption(
        "--record-versions",
        metavar="ENVIRONMENT",
        help="write docs/evidence/versions/ENVIRONMENT.json: which versions the tests of this run passed with",
    )
    parser.addoption(
        "--regenerate",
        action="store_true",
        help="write tests/states and docs/evidence anew from what the tests of this run show",
    )


def pytest_configure(config):
    if SIMULATED and "not gpu" in config.option.markexpr:  # as in `make weakest`
        pytest.exit("no test marked gpu is asked for, and no other is simulated", returncode=0)
    simulated = SIMULATED and not_simulated is None
    plugin = EvidencePlugin(ROOT / "docs" / "evidence", config.getoption("--regenerate"), simulated)
    config.pluginmanager.register(plugin, "ampx evidence")
    environment = config.getoption("--record-versions")
    if environment:
        config.pluginmanager.register(RecordPlugin(ROOT, environment), "ampx versions")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Say where to begin when a test of the kit fails."""
    report = yield
    package, _, subject = getattr(item, "function", item).__module__.rpartition(".")
    if report.failed and package == "ampx.testing.kit":
        page = "docs/explanation/architecture.md, 'When a test of the kit fails'"
        report.sections.append(("where to begin", f"{page}: {subject}"))
    return report


def pytest_sessionfinish(session, exitstatus):
    """Let runs end well that chose none of the tests that are simulated, such as `tox -e torch -- tests/cli`."""
    if SIMULATED and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def choose_for_simulation(config, items):
    """Keep the tests marked `gpu`."""
    others = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item.get_closest_marker("gpu")]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip what cannot be simulated, and say why before a test says that there is no device."""
    if not SIMULATED:
        return
    if not_simulated is not None:
        pytest.skip(not_simulated)
    for mark in item.iter_markers("gpu"):
        if "needs" in mark.kwargs:
            pytest.skip(f"{mark.kwargs['needs']} needs a GPU")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave tests marked `nightly`, and most of products, to `make test-all`, unless asked for; see to simulation."""
    if SIMULATED:
        choose_for_simulation(config, items)
    asked_for = "nightly" in config.option.markexpr or any("::" in argument for argument in config.args)
    if os.environ.get("AMPX_TEST_ALL") or asked_for:
        return
    nightly = {item for item in items if item.get_closest_marker("nightly")}
    nightly |= products.left_out([item for item in items if item not in nightly])
    config.hook.pytest_deselected(items=list(nightly))
    items[:] = [item for item in items if item not in nightly]


def pytest_collection_finish():
    """Keep frameworks and tests, millions of objects that stay, out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def covers(record_property):
    """Put on record what a test shows, at its end; `where` is device/dtype/level as `ampx.init` takes them.

    A test that shows it without the device says with which word: "lowered for CUDA".
    """

    def record(aspect, framework, where, word="tested"):
        assert aspect in ASPECTS
        assert tuple(where.split("/")[1:]) in COMBINATIONS
        assert word in WORDS
        if word == "tested":
            record_property("ampx.tested", [framework, f"{where}/{aspect}"])
        else:
            record_property("ampx.shown", [framework, f"{where}/{aspect}", word])

    return record


@pytest.fixture
def gpu_script_on_cpu(tmp_path):
    """Run what `make gpu` runs of one framework on a CPU; give its report, and how each of its checks ended."""

    def run(framework, device="cpu"):
        report = tmp_path / "gpu.json"
        arguments = ("--device", device, "--framework", framework, "--quick", "--out", report)
        path = f"{ROOT}{os.pathsep}{ROOT / 'backends'}"
        done = processes.run_python(
            ROOT / "benchmarks" / "gpu.py", *arguments, timeout=280, check=True, PYTHONPATH=path
        )
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith(f"{framework} ")]
        return json.loads(report.read_text()), [words[1] for words in lines]

    return run


UNDER_OLD_NAMES = """
import importlib, runpy, sys
importlib.import_module(sys.argv[1]).install()
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def train_program():
    """Run a program in a Python of its own, under the old names that a module installs; give its last line's JSON."""

    def train(program, *arguments, install=None):
        start = [] if install is None else ["-c", UNDER_OLD_NAMES, install]
        return processes.last_json(*start, program, *arguments)

    return train


@pytest.fixture
def migrate_program(tmp_path):
    """Write what `ampx migrate` makes of a program; give its path. Code 1: a human has to look at something, too."""

    def migrate(program, codes=(0,)):
        migrated = tmp_path / "migrated" / program.name
        migrated.parent.mkdir(exist_ok=True)
        migrated.write_bytes(program.read_bytes())
        done = processes.run_python("-m", "ampx.cli", "migrate", "--write", migrated)
        assert done.returncode in codes, done.stderr
        assert "import ampx" in migrated.read_text()
        return migrated

    return migrate
