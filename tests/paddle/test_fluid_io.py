"""`fluid.io`: what a script has trained is saved and loaded; what it could not save is results before it trains."""

import numpy as np
import paddle
import pytest

import ampx
import ampx_paddle.fluid
from ampx_fluid.fluid import script
from processes import run_python

# Paddle says so of its own optimizers while they build a program.
pytestmark = pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface:UserWarning")

IMAGES = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
LABELS = np.arange(8).reshape(8, 1) % 3


class Training:
    """A network with all that is kept from step to step, in programs and a scope of its own."""

    def __init__(self, fluid, optimizer="AdamOptimizer", width=8, **options):
        self.fluid, self.scope = fluid, fluid.Scope()
        self.main, self.startup = fluid.Program(), fluid.Program()
        with fluid.program_guard(self.main, self.startup), fluid.unique_name.guard():
            x = fluid.data("x", [None, 4])
            y = fluid.data("y", [None, 1], "int64")
            hidden = fluid.layers.dropout(fluid.layers.batch_norm(fluid.layers.fc(x, width)), 0.0)
            self.predict = fluid.layers.fc(hidden, 3, act="softmax")
            self.loss = fluid.layers.mean(fluid.layers.cross_entropy(self.predict, y))
            self.test = self.main.clone(for_test=True)
            raw = getattr(fluid.optimizer, optimizer)(0.05, **options)
            scaling = {"init_loss_scaling": 4.0, "incr_every_n_steps": 2}
            self.optimizer = fluid.contrib.mixed_precision.decorate(raw, **scaling)
            self.optimizer.minimize(self.loss)
        self.executor = fluid.Executor(fluid.CPUPlace())
        paddle.seed(0)
        with fluid.scope_guard(self.scope):
            self.executor.run(self.startup)

    def step(self, count):
        with self.fluid.scope_guard(self.scope):
            feed = {"x": IMAGES, "y": LABELS}
            scale = self.optimizer.get_loss_scaling()
            results = [self.executor.run(self.main, feed=feed, fetch_list=[self.loss, scale]) for _ in range(count)]
        return [(float(loss), float(scale)) for loss, scale in results]

    def predictions(self):
        with self.fluid.scope_guard(self.scope):
            return self.executor.run(self.test, feed={"x": IMAGES, "y": LABELS}, fetch_list=[self.predict])[0]

    def io(self, name, *arguments, **options):
        with self.fluid.scope_guard(self.scope):
            return getattr(self.fluid.io, name)(*arguments, **options)

    def values(self):
        with self.fluid.scope_guard(self.scope):
            names = [value.name for value in self.main.list_vars() if value.has_name and value.persistable]
            return {name: np.array(self.fluid.global_scope().find_var(name).get_tensor()) for name in names}


OPTIMIZERS = {"AdamOptimizer": {}, "MomentumOptimizer": {"momentum": 0.9}, "SGD": {}}


@pytest.mark.parametrize("filename", [None, "all"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_where_it_was_saved(fluid, tmp_path, optimizer, filename):
    """Bit for bit, optimizer state and loss scale included: else the losses would part."""
    saved, loaded = (Training(fluid, optimizer, **OPTIMIZERS[optimizer]) for _ in range(2))
    saved.step(5)
    saved.io("save_persistables", saved.executor, str(tmp_path / "new"), saved.main, filename)
    assert len(list((tmp_path / "new").iterdir())) == (1 if filename else len(saved.values()))
    loaded.io("load_persistables", loaded.executor, str(tmp_path / "new"), loaded.main, filename)
    assert loaded.step(5) == saved.step(5)


@pytest.mark.parametrize("place", ["fluid", "fluid.io"])
def test_save_and_load_by_paddles_names_keep_everything_too(fluid, tmp_path, place):
    saved, loaded = Training(fluid), Training(fluid)
    saved.step(5)
    module = fluid if place == "fluid" else fluid.io
    with fluid.scope_guard(saved.scope):
        module.save(saved.main, str(tmp_path / "model"))
    with fluid.scope_guard(loaded.scope):
        module.load(loaded.main, str(tmp_path / "model"), loaded.executor)
    assert loaded.step(3) == saved.step(3)
    state = fluid.io.load_program_state(str(tmp_path / "model"))
    third = Training(fluid)
    third.io("set_program_state", third.main, state)
    assert (third.predictions() != saved.predictions()).any()  # those of five steps, not of eight
    assert all((third.values()[name] == state[name]).all() for name in state)


def test_parameters_are_saved_without_the_optimizers_state(fluid, tmp_path):
    saved, loaded = Training(fluid), Training(fluid)
    start = loaded.values()
    saved.step(5)
    saved.io("save_params", saved.executor, str(tmp_path), saved.main)
    loaded.io("load_params", loaded.executor, str(tmp_path), loaded.main)
    assert (loaded.predictions() == saved.predictions()).all()
    changed = {name for name, value in loaded.values().items() if (value != start[name]).any()}
    assert changed <= {path.name for path in tmp_path.iterdir()}
    assert not any("moment" in name or "ampx" in name for name in changed)


def test_variables_are_chosen_by_list_by_name_or_by_predicate(fluid, tmp_path):
    training = Training(fluid)
    training.step(1)
    weight = training.main.global_block().var("fc_0.w_0")
    training.io("save_vars", training.executor, str(tmp_path / "a"), training.main, vars=[weight, "fc_0.b_0"])
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["fc_0.b_0", "fc_0.w_0"]
    training.io(
        "save_vars",
        training.executor,
        str(tmp_path / "b"),
        training.main,
        predicate=lambda value: value.name == "fc_1.b_0",
    )
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["fc_1.b_0"]
    before = training.values()
    training.step(1)
    training.io("load_vars", training.executor, str(tmp_path / "a"), training.main, vars=["fc_0.w_0"])
    after = training.values()
    assert (after["fc_0.w_0"] == before["fc_0.w_0"]).all()
    assert (after["fc_0.b_0"] != before["fc_0.b_0"]).any()
    got = training.io("get_parameter_value", weight, training.executor)
    assert (got == after["fc_0.w_0"]).all()
    assert fluid.io.is_parameter(weight)
    assert fluid.io.is_persistable(weight)
    with pytest.raises(ampx.InvalidOptionError, match="Call save_params or save_persistables"):
        training.io("save_vars", training.executor, str(tmp_path / "c"), training.main)


# -- inference models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [{}, {"model_filename": "m", "params_filename": "p"}, {"model_filename": "m"}])
def test_an_inference_model_computes_what_the_trained_program_does_in_tests(fluid, tmp_path, names):
    """Batch normalisation and dropout included; in a scope of its own.

    The program for tests was cloned before `decorate` cast the other: bfloat16 keeps 8 bits, so a rounding moves a
    number by at most 2^-9 of it, and a probability by a few of these.
    """
    training = Training(fluid)
    training.step(5)
    with fluid.program_guard(training.main):
        training.io("save_inference_model", str(tmp_path), ["x"], [training.predict], training.executor, **names)
    expected = training.predictions()
    with fluid.scope_guard(fluid.Scope()):
        executor = fluid.Executor(fluid.CPUPlace())
        program, inputs, targets = fluid.io.load_inference_model(str(tmp_path), executor, **names)
        assert inputs == ["x"]
        (results,) = executor.run(program, feed={"x": IMAGES}, fetch_list=targets)
        (tensor,) = executor.run(program, feed={"x": IMAGES}, fetch_list=targets, return_numpy=False)
    np.testing.assert_allclose(results, expected, atol=2**-6)
    assert (np.array(tensor) == results).all()
    assert tensor.recursive_sequence_lengths() == []


def test_the_inference_model_of_a_clone_for_tests_is_the_same(fluid, tmp_path):
    training = Training(fluid)
    training.step(2)
    saved = training.io(
        "save_inference_model", str(tmp_path), "x", training.predict, training.executor, main_program=training.test
    )
    assert saved == ["0"]
    with fluid.scope_guard(fluid.Scope()):
        program, _, targets = fluid.io.load_inference_model(str(tmp_path), training.executor)
        results = training.executor.run(fluid.CompiledProgram(program), feed=[{"x": IMAGES}], fetch_list=targets)[0]
    assert (results == training.predictions()).all()


# -- refusals ----------------------------------------------------------------------------------------------------


def test_files_that_do_not_fit_are_refused_and_change_nothing(fluid, tmp_path):
    narrow, wide = Training(fluid), Training(fluid, width=16)
    narrow.step(1)
    narrow.io("save_params", narrow.executor, str(tmp_path / "each"), narrow.main)
    narrow.io("save_params", narrow.executor, str(tmp_path), narrow.main, "one")
    before = wide.values()
    for folder, filename in ((tmp_path / "each", None), (tmp_path, "one")):
        with pytest.raises(ampx.InvalidOptionError, match=r"shape \[.*Nothing was loaded"):
            wide.io("load_params", wide.executor, str(folder), wide.main, filename)
    with pytest.raises(ampx.InvalidOptionError, match="cannot be loaded"):
        wide.io("load_persistables", wide.executor, str(tmp_path), wide.main, "one")  # fewer variables
    with pytest.raises(ampx.InvalidOptionError, match="cannot be loaded"):
        wide.io("load_params", wide.executor, str(tmp_path / "nowhere"), wide.main)
    after = wide.values()
    assert all((after[name] == before[name]).all() for name in before)


def test_what_cannot_be_saved_or_loaded_is_refused(fluid, tmp_path):
    training = Training(fluid)
    (tmp_path / "__model__").write_bytes(b"a program of fluid")
    with pytest.raises(ampx.UnsupportedByBackendError, match="of a Paddle before 3"):
        fluid.io.load_inference_model(str(tmp_path), training.executor)
    with pytest.raises(ampx.InvalidOptionError, match="there is no inference model"):
        fluid.io.load_inference_model(str(tmp_path / "nowhere"), training.executor)
    with pytest.raises(ampx.UnsupportedByBackendError, match="pserver_endpoints"):
        fluid.io.load_inference_model(str(tmp_path), training.executor, pserver_endpoints=["here"])
    save = ("save_inference_model", str(tmp_path), ["z"], [training.predict], training.executor, training.main)
    with pytest.raises(ampx.InvalidOptionError, match="no input or parameter"):
        training.io(*save)
    with pytest.raises(ampx.UnsupportedByBackendError, match="export_for_deployment=False"):
        training.io(*save, export_for_deployment=False)
    with (
        fluid.scope_guard(fluid.Scope()),
        pytest.raises(ampx.UnsupportedByBackendError, match="startup program ran in it"),
    ):
        fluid.io.save_params(training.executor, str(tmp_path), training.main)


def test_readers_are_paddles():
    reader = ampx_paddle.fluid.io.batch(ampx_paddle.fluid.io.firstn(lambda: iter(range(10)), 5), 2)
    assert list(reader()) == [[0, 1], [2, 3], [4]]


def test_a_data_loader_feeds_an_executor(fluid):
    training = Training(fluid)
    with fluid.program_guard(training.main):
        block = training.main.global_block()
        inputs = [block.var("x"), block.var("y")]
        loader = fluid.io.DataLoader.from_generator(inputs, capacity=2, iterable=True)
    loader.set_sample_list_generator(lambda: iter([list(zip(IMAGES, LABELS, strict=True))] * 3), fluid.CPUPlace())
    with fluid.scope_guard(training.scope):
        losses = [
            float(training.executor.run(training.main, feed=feed, fetch_list=[training.loss])[0]) for feed in loader()
        ]
    assert losses == [loss for loss, _ in Training(fluid).step(3)]


# -- names that a script would come to after its training -----------------------------------------------------------

SCRIPT = """
import numpy as np
import paddle.fluid as fluid

x = fluid.data("x", [None, 2])
loss = fluid.layers.mean(fluid.layers.fc(x, 1))
fluid.optimizer.SGD(0.1).minimize(loss)
exe = fluid.Executor(fluid.CPUPlace())


def train():
    exe.run(fluid.default_startup_program())
    for _ in range(3):
        exe.run(feed={"x": np.ones([2, 2], "float32")}, fetch_list=[loss])
        print("trained a step", flush=True)


def save():
    SAVE


train()
save()
print("saved")
"""


def ran(tmp_path, save, *command):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("SAVE", save))
    return run_python(*command, path, cwd=tmp_path)


def test_an_unedited_script_saves_its_model_under_ampx_run(tmp_path):
    pytest.importorskip("typer", reason="the command line is not installed")
    save = 'fluid.io.save_inference_model("model", ["x"], [loss], exe)'
    done = ran(tmp_path, save, "-W", "ignore", "-m", "ampx", "run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[:4] == ["trained a step"] * 3 + ["saved"]
    assert (tmp_path / "model" / "__model__.json").exists()


@pytest.mark.parametrize("save", ["fluid.io.no_such_call(exe)", "fluid.dygraph.no_such_call(exe)"])
def test_a_name_that_is_missing_is_found_before_anything_is_trained(tmp_path, save):
    pytest.importorskip("typer", reason="the command line is not installed")
    done = ran(tmp_path, save, "-W", "ignore", "-m", "ampx", "run")
    assert done.returncode != 0
    assert "trained a step" not in done.stdout
    missing = "fluid.io.no_such_call" if ".io." in save else "fluid.dygraph"
    assert f"{missing} (train.py:19)" in done.stderr
    assert "Nothing has run yet" in " ".join(done.stderr.split())


def test_where_a_condition_decides_the_script_is_warned_and_runs(tmp_path):
    pytest.importorskip("typer", reason="the command line is not installed")
    done = ran(tmp_path, "x.name == 'other' and fluid.io.no_such_call(exe)", "-m", "ampx", "run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "saved" in done.stdout
    assert "fluid.io.no_such_call (train.py:19)" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import paddle.fluid as F\nF.io.nothing", [("fluid.io.nothing", 2, True)]),
        ("import paddle\npaddle.fluid.layers.nothing(1)", [("fluid.layers.nothing", 2, True)]),
        ("from paddle.fluid import layers as L\nL.nothing", [("fluid.layers.nothing", 2, True)]),
        ("def f():\n    from paddle.fluid.io import nothing\nf()", [("fluid.io.nothing", 2, True)]),
        ("from paddle import fluid\nfluid.io.DataLoader.nothing", []),
        ("from paddle import fluid\nfluid.core.nothing", []),
        ("import paddle\npaddle.nothing", []),
        ("import paddle.fluid as fluid\ndef never():\n    fluid.nothing", []),
        ("import paddle.fluid as fluid\nif x:\n    fluid.nothing", [("fluid.nothing", 3, False)]),
        ("import paddle.fluid as fluid\nif x:\n    pass\nelse:\n    fluid.nothing", [("fluid.nothing", 5, False)]),
        ("import paddle.fluid as fluid\nif __name__ == '__main__':\n    fluid.nothing", [("fluid.nothing", 3, True)]),
        ("import paddle.fluid as fluid\nif hasattr(fluid, 'nothing'):\n    fluid.nothing", []),
        ("import paddle.fluid as fluid\ntry:\n    fluid.nothing\nexcept AttributeError:\n    pass", []),
        ("import paddle.fluid as fluid\ntry:\n    fluid.nothing\nexcept:\n    pass", []),
        (
            "import paddle.fluid as fluid\ntry:\n    fluid.nothing\nexcept ValueError:\n    pass",
            [("fluid.nothing", 3, True)],
        ),
        ("import paddle.fluid as fluid\na = 1 if x else fluid.nothing", [("fluid.nothing", 2, False)]),
        ("import paddle.fluid as fluid\na = 1 if fluid.nothing else 2", [("fluid.nothing", 2, True)]),
        (
            "import paddle.fluid as fluid\nclass N:\n    def f(self):\n        fluid.nothing\nfor _ in x:\n    N().f()",
            [("fluid.nothing", 4, True)],
        ),
        ("import paddle.fluid as fluid\ndef f():\n    return 1\n    fluid.nothing\nf()", []),
        ("import paddle.fluid as fluid\nwith fluid.nothing():\n    pass", [("fluid.nothing", 2, True)]),
        ("not python at all", []),
    ],
)
def test_names_are_read_as_the_script_would_come_to_them(tmp_path, source, expected):
    path = tmp_path / "script.py"
    path.write_text(source)
    results = script.missing_names([path])
    assert [(use.name, use.line, use.certain) for use in results] == expected


def test_modules_beside_the_script_are_read_too_and_functions_are_entered_across_them(tmp_path):
    (tmp_path / "main.py").write_text("import saving\nsaving.save()")
    (tmp_path / "saving.py").write_text("import paddle.fluid as fluid\ndef save():\n    fluid.io.nothing()\n")
    results = script.missing_names([tmp_path / "main.py", tmp_path / "saving.py"])
    assert [(use.file, use.name, use.certain) for use in results] == [
        (str(tmp_path / "saving.py"), "fluid.io.nothing", True)
    ]
