"""Logs of steps that Python does not see: each row is exact, however many steps a function makes."""

import importlib.util
import math
from dataclasses import asdict

import keras
import numpy as np
import pytest
import tensorflow as tf

import ampx
from ampx.testing.oracle import Oracle
from ampx_tensorflow.callbacks import LossScaleMonitor

NEEDS_TENSORBOARD = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tf.summary needs tensorboard, which is not installed"
)
CONFIG = ampx.LossScale(init_scale=256.0, growth_interval=4)
PATTERN = [step in (2, 3, 11) for step in range(1, 21)]


def rows_due(every):
    """Step, scale and skipped steps of every so many steps, by the specification."""
    oracle, rows = Oracle(asdict(CONFIG)), []
    for step, overflow in enumerate(PATTERN, start=1):
        scale = oracle.step(overflow).scale
        if step % every == 0:
            rows.append((step, scale, sum(PATTERN[:step])))
    return rows


def numbers_of(drawn):
    return [
        (step, row["ampx/loss_scale"], row["ampx/skipped_steps"]) for step, row in drawn if "ampx/skipped_steps" in row
    ]


def stepping(opt, variable):
    def step(slope):
        with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(variable) * slope, opt) as scaled:
            pass
        opt.apply_gradients([(tape.gradient(scaled, variable), variable)])

    return step


@pytest.mark.parametrize(
    ("compiled", "steps_a_call"),
    [(False, 1), (False, 5), pytest.param(True, 1, marks=pytest.mark.nightly), (True, 5)],
)
def test_steps_of_a_function_are_logged_one_by_one(amp, compiled, steps_a_call):
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.01), loss_scale=CONFIG, max_grad_norm=math.inf)
    variable = tf.Variable([1.0, 1.0])
    step, drawn = stepping(opt, variable), []
    opt.build([variable])

    @tf.function(jit_compile=compiled)
    def train(slopes):
        for number in range(steps_a_call):
            step(slopes[number])

    with ampx.log_to(lambda values, step: drawn.append((step, values)), every=2):
        for first in range(0, len(PATTERN), steps_a_call):
            bad = PATTERN[first : first + steps_a_call]
            train(tf.constant([math.inf if overflow else 3.0 for overflow in bad]))
    assert numbers_of(drawn) == rows_due(2)
    norms = {step: row["ampx/grad_norm"] for step, row in drawn if "ampx/grad_norm" in row}
    assert list(norms.values()) == pytest.approx([3.0 * math.sqrt(2)] * len(norms))
    # The host looks before every second call, and knows the norm of the last step before it.
    assert 20 in norms
    assert 2 not in norms  # it was skipped


def test_the_host_looks_as_often_as_the_log_asks(amp):
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.01))
    variable = tf.Variable([1.0])
    opt.build([variable])
    train, steps = tf.function(stepping(opt, variable)), []
    log = ampx.log_to(lambda values, step: steps.append(step), every=10)
    for _ in range(45):
        train(tf.constant(1.0))
    assert steps == [10, 20, 30, 40]  # though the host looks every 256th step elsewhere
    log.close()


def test_fit_is_logged(amp, tmp_path):
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.01), loss_scale=CONFIG)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="float32")])
    model.compile(opt, "mse")
    inputs = np.ones((2 * len(PATTERN), 3), "float32")
    inputs[::2][PATTERN] = np.inf
    drawn = []
    with ampx.log_to(lambda values, step: drawn.append((step, values)), every=5):
        model.fit(inputs, np.ones((len(inputs), 1)), batch_size=2, shuffle=False, verbose=0)
    assert numbers_of(drawn) == rows_due(5)


def scalars_in(folder):
    """Read the event files below a folder by TensorFlow."""
    points = {}
    for path in sorted(folder.rglob("*.tfevents.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                number = tf.make_ndarray(value.tensor) if value.HasField("tensor") else value.simple_value
                if np.ndim(number) == 0 and np.issubdtype(np.asarray(number).dtype, np.floating):
                    points.setdefault(value.tag, {})[event.step] = float(number)
    return points


@NEEDS_TENSORBOARD
def test_a_writer_of_tf_summary_gets_the_curves(amp, tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.01), loss_scale=CONFIG)
    variable = tf.Variable([1.0])
    step = stepping(opt, variable)
    with ampx.log_to(writer, every=5):
        for overflow in PATTERN:
            step(math.inf if overflow else 1.0)
    points = scalars_in(tmp_path)
    assert points["ampx/skipped_steps"] == {step: skipped for step, _, skipped in rows_due(5)}
    assert {step: points["ampx/loss_scale"][step] for step in (5, 10, 15, 20)} == {
        step: scale for step, scale, _ in rows_due(5)
    }
    with writer.as_default():  # it is the script's own, and still open
        tf.summary.scalar("mine", 1.0, step=1)
    writer.flush()
    assert scalars_in(tmp_path)["mine"] == {1: 1.0}


@NEEDS_TENSORBOARD
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own, with numpy 2
def test_kerass_own_tensorboard_callback_draws_what_the_monitor_adds(amp, tmp_path):
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.01), loss_scale=CONFIG)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="float32")])
    model.compile(opt, "mse")
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    model.fit(
        np.ones((4, 3)), np.ones((4, 1)), batch_size=2, epochs=2, verbose=0, callbacks=[LossScaleMonitor(), board]
    )
    assert scalars_in(tmp_path)["epoch_loss_scale"] == {0: 256.0, 1: 512.0}
