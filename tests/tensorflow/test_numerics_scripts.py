"""`ampx compare`, `ampx diagnose` and `ampx tune` on whole scripts with a planted fault, which nobody edits."""

import pytest

from ampx.numerics.compare_script import compare_script
from ampx.numerics.diagnose_script import diagnose_script
from ampx.numerics.probe import Watching
from ampx.numerics.trial import Trial
from ampx.numerics.tune_script import tune_script
from ampx.run import RunSettings
from ampx.run.program import Program
from ampx_tensorflow import rewrite
from processes import run_here, run_python

FIT = """
import keras
import numpy as np
import tensorflow as tf


class Wide(keras.layers.Layer):
    def call(self, x):
        return x + tf.reduce_sum(x * 3000.0, -1, keepdims=True) / 3000.0  # beyond float16 for the sixth sample


x = np.random.RandomState(0).normal(size=(12, 8)).astype("float32")
x[5] *= 100.0
layers = [keras.layers.Dense(8, name="first"), Wide(name="wide"), keras.layers.LayerNormalization(name="norm")]
model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1, name="last")])
model.compile(keras.optimizers.SGD(0.001), "mse", jit_compile=False)
model.fit(x, x.sum(1, keepdims=True) / 100.0, batch_size=4, epochs=1, shuffle=False, verbose=0)
"""
LOOP = """
import keras
import numpy as np
import tensorflow as tf

model = keras.Sequential([keras.layers.Dense(3, name="inner"), keras.layers.Dense(1, name="outer")])
optimizer = keras.optimizers.Adam(0.001)
x = np.ones((2, 4), "float32")


@tf.function
def step(factor):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x)) * factor
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))


for factor in (1.0, 2.0, 3.0):
    step(tf.constant(factor))
"""


@pytest.fixture
def here(tmp_path):
    """Run a trial in this process."""
    return lambda trial: run_here(trial, tmp_path)


@pytest.fixture
def script(tmp_path):
    """Return a script as a program."""

    def write(text):
        (tmp_path / "train.py").write_text(text)
        return Program(str(tmp_path / "train.py"))

    return write


FLOAT16 = RunSettings(dtype="float16")


def test_diagnose_names_the_layer_of_fit_that_overflows_and_the_line(here, script):
    program = script(FIT)
    diagnosis, report = diagnose_script(program, FLOAT16, framework="tensorflow", run=here)
    assert (report["step"], report["skipped"]) == (2, [2])
    first = diagnosis.first_nonfinite
    assert (diagnosis.kind, first.module, first.operation, first.place) == (
        "overflow",
        "wide",
        "Mul",
        f"{program.name}:9",
    )


def test_compare_says_at_which_step_and_layer_fit_parts_from_float32(here, script):
    report = compare_script(script(FIT), FLOAT16, ["float16"], framework="tensorflow", steps=3, repeats=1, run=here)
    low = report["dtypes"]["float16"]
    assert (low["skipped"], low["parts_at"], low["modules"]["first"]["module"]) == ([2], 2, "wide")


def test_tune_denies_the_layer_of_fit_that_overflows_and_no_other(here, script):
    policy, report = tune_script(script(FIT), FLOAT16, framework="tensorflow", steps=3, repeats=0, run=here)
    assert [choice.entry for choice in policy.deny] == ["module:wide"]
    assert '"module:wide"' in report["file"]


COMPILE = 'model.compile(keras.optimizers.SGD(0.001), "mse", jit_compile=False)'
BY_HAND = """import ampx
{lines}
optimizer = ampx.wrap_optimizer(keras.optimizers.SGD(0.001))
model.compile(optimizer, "mse", jit_compile=False)
"""


def steps_by_hand(folder, lines):
    """Run the script, with ampx by hand and these lines; return how many of its three steps were applied."""
    assert FIT.count(COMPILE) == 1
    count = "print(int(optimizer.iterations))\n"
    (folder / "by_hand.py").write_text(FIT.replace(COMPILE, BY_HAND.format(lines=lines)) + count)
    return int(run_python("by_hand.py", cwd=folder, check=True).stdout.splitlines()[-1])


def test_what_tune_and_diagnose_say_is_pasted_and_cures(here, script, tmp_path):
    options = {"framework": "tensorflow", "run": here}
    policy, report = tune_script(script(FIT), FLOAT16, steps=3, repeats=0, out="mine.toml", **options)
    policy.write(tmp_path / "mine.toml")
    diagnosis, _ = diagnose_script(script(FIT), FLOAT16, **options)
    scale = "loss_scale=128.0"  # at which no step is lost to settling
    broken = f"amp = ampx.init('tensorflow', dtype='float16', {scale}, nan_loss='skip')\nmodel = amp.prepare(model)"
    assert steps_by_hand(tmp_path, broken) == 2
    for lines in (report["lines"], diagnosis.advice.partition("\n# or")[0].splitlines()):
        assert steps_by_hand(tmp_path, "\n".join(lines).replace("ampx.init(", f"ampx.init({scale}, ")) == 3


def test_a_watched_step_of_a_loop_holds_the_layers_and_the_loss_and_no_update(here, script):
    settings, watching = RunSettings(dtype="bfloat16", watched=True), Watching(operations=True)
    readings = here(Trial(script(LOOP), settings, "tensorflow", watched=(2,), watching=watching)).readings[2]
    layers = [(entry.module, entry.direction) for entry in readings if not entry.operation]
    assert layers == [
        *(("inner", "forward"), ("outer", "forward"), ("", "forward")),
        *(("", "backward"), ("outer", "backward"), ("inner", "backward")),
    ]
    update = 1 + LOOP.splitlines().index("    optimizer.apply_gradients(zip(gradients, model.trainable_variables))")
    assert not [entry for entry in readings if entry.place.endswith(f":{update}")]
    directions = [entry.direction for entry in readings]
    assert directions == sorted(directions, reverse=True)


@pytest.mark.parametrize("watched", [(), (2,)], ids=["not watched", "watched"])
@pytest.mark.parametrize("rewrites", [True, False], ids=["rewritten", "product by product"])
def test_a_trial_says_where_it_casts_otherwise_than_a_run_of_the_same_policy(
    here, script, monkeypatch, watched, rewrites
):
    monkeypatch.setattr(rewrite, "_works", lambda device, dtype: rewrites)
    settings = RunSettings(dtype="bfloat16", device="cpu", watched=bool(watched))
    outcome = here(Trial(script(LOOP), settings, framework="tensorflow", watched=watched))
    assert ["one by one" in note for note in outcome.notes] == [True] * bool(rewrites and watched)


PADDED = """
import keras
import numpy as np

x = np.random.RandomState(0).normal(size=(12, 16)).astype("float32")
layers = [keras.layers.Dense(WIDTH, name="wide", activation="relu"), keras.layers.Dense(8, name="out")]
model = keras.Sequential([keras.Input((16,)), *layers])
optimizer = keras.optimizers.SGD(0.01)
if FIT:
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(x, x[:, :8], batch_size=4, epochs=1, verbose=0)
else:
    import tensorflow as tf

    @tf.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(batch) - batch[:, :8]) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    for batch in np.split(x, 3):
        step(batch)
"""


@pytest.mark.parametrize(("fit", "width"), [(True, 64), (True, 1021), (False, 1021)])
def test_diagnose_names_nothing_and_compare_the_weights_that_matrix_units_pad(here, script, fit, width):
    if not fit and not rewrite._works("cpu", "bfloat16"):
        pytest.skip("TensorFlow's rewriter casts nothing to bfloat16 here: it was tried")
    text = PADDED.replace("WIDTH", str(width)).replace("FIT", str(fit))
    settings = RunSettings(dtype="bfloat16")
    diagnosis, report = diagnose_script(script(text), settings, framework="tensorflow", run=here)
    assert (diagnosis, report["looked_at"], report["risks"]) == (None, 3, [])
    options = {"framework": "tensorflow", "steps": 3, "repeats": 1, "run": here}
    report = compare_script(script(text), settings, ["bfloat16"], **options)
    notes = [note for note in report["notes"] if note.startswith("Dimensions of ")]
    assert len(notes) == (width == 1021)
    for note in notes:
        assert "wide/kernel (16x1021)" in note
        assert "out/kernel (1021x8)" in note
        assert "bias" not in note
