"""`ampx demo`: its runs, its files, its errors. That it trains well is tested beside the backends."""

from __future__ import annotations

import json

import pytest

import ampx
from ampx.cli import demo, plot
from ampx.cli.demo import Run, RunResult


def make_result(dtype="float16", seed=0, **changes):
    values = {
        "dtype": dtype,
        "seed": seed,
        "device": "cpu",
        "native": True,
        "reason": "the test says so",
        "accuracy": 0.98,
        "final_loss": 0.1,
        "seconds": 2.0,
        "steps_per_second": 100.0,
        "losses": [2.0, 1.0, 0.5, 0.1],
        "scales": [1.0] * 4 if dtype != "float16" else [65536.0, 65536.0, 32768.0, 32768.0],
        "skipped": [] if dtype == "float32" else [1],
        "final_scale": 1.0,
    }
    return RunResult(**{**values, **changes})


class Backend:
    name = "fake"

    def __init__(self, native=("bfloat16",), emulated=("float16",)):
        self._device = ampx.Device("cpu", frozenset(native), frozenset(emulated))

    def device(self, name):
        return self._device


REAL = "torch,tensorflow,mxnet,paddle,jax"
PLUGIN = """
import ampx
@ampx.hookimpl
def ampx_register_backends(register):
    register("{name}", load, roots=("{name}",), requires="{name}>=1")
def load():
    from {name} import {name}
    return {name}()
"""
# A framework whose training takes no time, in two versions: with a demo and without.
FRAMEWORK = """
import ampx
from ampx.cli.demo import Demo, RunResult
from toy.implicit import ImplicitToy

class Base(ImplicitToy):
    name = "{name}"
    def device(self, name):
        return ampx.Device("cpu", frozenset({{"float16"}}))

class Trainer(Demo):
    def train(self, data, run, on_step):
        losses, skipped = [2.0, 1.0], [] if run.overflow_at is None else [1]
        return RunResult(run.dtype, run.seed, "cpu", True, "", 0.9, 0.5, 1.0, 100.0, losses, [4.0, 4.0], skipped, 4.0)

class Backend(Base):
    offers = {{**Base.offers, "demo": Trainer}}

{name} = {cls}
"""


@pytest.fixture
def _extra():
    for module in ("matplotlib", "sklearn"):
        pytest.importorskip(module, reason=f"needs {module}, of the extra demo")


def test_digits_are_split_for_good_and_by_class():
    pytest.importorskip("sklearn")
    data = demo.load_digits()
    assert data.train_images.shape == (1347, 1, 8, 8)
    assert data.test_images.shape == (450, 1, 8, 8)
    assert data.train_images.dtype == data.test_images.dtype == "float32"
    assert (data.train_images.min(), data.train_images.max()) == (0, 1)
    assert all(abs((data.test_labels == digit).sum() - 45) <= 2 for digit in range(10))
    assert (demo.load_digits().test_labels == data.test_labels).all()


def test_all_dtypes_of_the_device_are_compared_with_float32():
    assert demo.choose_dtypes(Backend()) == ["float32", "float16", "bfloat16"]
    assert demo.choose_dtypes(Backend(emulated=())) == ["float32", "bfloat16"]
    assert demo.choose_dtypes(Backend(), ["bf16"]) == ["float32", "bfloat16"]
    assert demo.choose_dtypes(Backend(), ["float32"]) == ["float32"]


def test_dtype_that_the_device_lacks_is_refused():
    with pytest.raises(ampx.UnsupportedDtypeError, match="accepted: bfloat16"):
        demo.choose_dtypes(Backend(emulated=()), ["float16"])


def test_every_mixed_run_gets_one_overflow_and_float32_none():
    runs = demo.plan_runs(["float32", "float16", "bfloat16"], [0, 1, 1], epochs=2, batch_size=10, images=105)
    assert [(run.dtype, run.seed) for run in runs] == [
        (dtype, seed) for seed in (0, 1) for dtype in ("float32", "float16", "bfloat16")
    ]
    assert {run.overflow_at for run in runs if run.dtype == "float32"} == {None}
    assert {run.overflow_at for run in runs if run.dtype != "float32"} == {8}


@pytest.mark.parametrize(("seeds", "epochs", "batch_size"), [([], 1, 10), ([0], 0, 10), ([0], 1, 0), ([0], 1, 106)])
def test_runs_without_steps_are_refused(seeds, epochs, batch_size):
    with pytest.raises(ampx.InvalidOptionError, match="accepted: at least one epoch"):
        demo.plan_runs(["float32"], seeds, epochs, batch_size, images=105)


def test_precision_warnings_become_notes_and_others_pass():
    import warnings

    class Trainer:
        def train(self, data, run, on_step):
            warnings.warn("float16 is emulated", ampx.PrecisionWarning, stacklevel=2)
            on_step()
            return make_result()

    steps = []
    run = Run("float16", 0, 1, 10)
    ((result, notes),) = demo.train_all(Trainer(), None, [run], lambda run: lambda: steps.append(run.dtype))
    assert (result.dtype, notes, steps) == ("float16", ["float16 is emulated"], ["float16"])


def test_runs_are_compared_with_the_float32_run_of_the_same_seed():
    plan = demo.plan_runs(["float32"], [0, 1], 4, 10, images=10, scaled=True)
    results = [make_result("float32", run.seed, losses=[1.0 + run.seed]) for run in plan]
    runs = demo.report("fake", plan, results)["runs"]
    assert [(run["label"], run["seed"]) for run in runs] == [
        (label, seed) for seed in (0, 1) for label in ("float32", "float32, scaled")
    ]
    assert demo.plain_run(runs[3], runs) is runs[2]
    assert demo.equals_float32(runs[3], runs)
    assert not demo.equals_float32({**runs[3], "losses": [1.0]}, runs)
    assert not demo.equals_float32({**runs[3], "accuracy": 0.5}, runs)
    assert demo.plain_run(runs[3], runs[:2]) is None


def test_where_nothing_is_cast_scaling_alone_is_compared_with_float32():
    """It gets no overflow: a skipped step would be a difference, and there must be none."""
    assert demo.casts_nothing(Backend((), ()))
    assert not demo.casts_nothing(Backend((), ("float16",)))
    plain, scaled = demo.plan_runs(["float32"], [0], 2, 10, images=105, scaled=True)
    assert (plain.label, plain.loss_scale, plain.overflow_at) == ("float32", None, None)
    assert (scaled.label, scaled.loss_scale, scaled.overflow_at) == ("float32, scaled", demo.DEMO_SCALE, None)


@pytest.mark.parametrize("dtypes", [("float32", "float16", "bfloat16"), ("float32", "bfloat16"), ("float32",)])
def test_picture_is_a_png_of_the_right_size(dtypes, tmp_path, png_size):
    pytest.importorskip("matplotlib")
    runs = demo.plan_runs(dtypes, [0], epochs=4, batch_size=10, images=10)
    results = demo.report("fake", runs, [make_result(dtype) for dtype in dtypes])
    demo.write(tmp_path, results)
    assert png_size(tmp_path / "demo.png") == tuple(round(side * plot.DPI) for side in plot.SIZE)
    assert json.loads((tmp_path / "results.json").read_text()) == results


@pytest.mark.usefixtures("_extra")
def test_demo_prints_one_row_a_run_and_says_where_the_picture_is(ampx_command, tmp_path):
    pytest.importorskip("torch")
    arguments = ("--epochs", "1", "--dtype", "bfloat16", "--seeds", "3,4", "--out", str(tmp_path / "out"))
    text = ampx_command("demo", "--framework", "torch", *arguments).stdout
    for run in ("float32, seed 3", "bfloat16, seed 3", "float32, seed 4", "bfloat16, seed 4"):
        assert text.count(run) == 1
    assert str(tmp_path / "out" / "demo.png") in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--framework", "nope"], "framework='nope' is registered by no plugin"),
        (["--seeds", "one"], "--seeds 'one' is no list of seeds"),
        (["--seeds=-1"], "--seeds '-1' is no list of seeds"),
        (["--epochs", "0"], "Invalid value for '--epochs'"),
        (["--all", "--framework", "toy"], "--all and --framework toy were both given"),
    ],
)
def test_wrong_option_is_a_usage_error_told_before_anything_is_computed(ampx_command, arguments, message):
    assert message in ampx_command("demo", *arguments, code=2, AMPX_DISABLE_PLUGINS="").stderr
    assert not (ampx_command.folder / "ampx-demo").exists()


@pytest.mark.usefixtures("_extra")
def test_folder_that_cannot_be_made_is_a_usage_error(ampx_command):
    (ampx_command.folder / "taken").write_text("a file, not a folder")
    arguments = ("--framework", "torch", "--out", "taken/inside")
    assert "cannot be made" in ampx_command("demo", *arguments, code=2).stderr


@pytest.mark.usefixtures("_extra")
def test_the_only_framework_whose_backend_has_a_demo_needs_no_name(ampx_command):
    """A stranger's backend that has none is no reason to ask."""
    for name, cls in (("mylib", "Backend"), ("other", "Base")):
        ampx_command.add_plugin(name, f"{name}_plugin")
        ampx_command.add_module(f"{name}_plugin", PLUGIN.format(name=name))
        ampx_command.add_module(name, FRAMEWORK.format(name=name, cls=cls))
    done = ampx_command("demo", "--epochs", "1", "--json", AMPX_DISABLE_PLUGINS=REAL)
    assert json.loads(done.stdout)["framework"] == "mylib"


def test_no_framework_is_chosen_among_several_with_a_demo(ampx_command):
    for name in ("mylib", "other"):
        ampx_command.add_plugin(name, f"{name}_plugin")
        ampx_command.add_module(f"{name}_plugin", PLUGIN.format(name=name))
        ampx_command.add_module(name, FRAMEWORK.format(name=name, cls="Backend"))
    done = ampx_command("demo", code=1, AMPX_DISABLE_PLUGINS=REAL)
    assert "no framework was named, and mylib, other are installed" in done.stderr


@pytest.mark.usefixtures("_extra")
def test_backend_without_a_trainer_says_so(ampx_command):
    ampx_command.add_plugin("toy", "toy.plugin")
    assert "does not support ampx demo" in ampx_command("demo", "--framework", "toy", code=1).stderr
