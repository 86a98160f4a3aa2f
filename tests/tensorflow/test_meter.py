"""The meter: updates that round to nothing and gradients that flush, counted again by NumPy."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from metering import count

import ampx
from ampx.formats import FORMATS
from ampx.numerics.meter import Meter
from ampx.numerics.rounding import sample
from ampx.rooms import METER_EVERY

EVERY = 4


@pytest.fixture
def amp():
    with pytest.warns(ampx.PrecisionWarning, match="emulated"):
        amp = ampx.init("tensorflow", dtype="float16", loss_scale=1024.0)
    amp.meter_every = EVERY
    yield amp
    amp.shutdown()


def parameters():
    start = np.random.default_rng(0).normal(size=(3, 3000)).astype("float32")
    weight = tf.Variable(start, name="weight")
    return weight, tf.Variable([1.0, 2.0], name="row")


SLOPES = (np.random.default_rng(1).normal(size=(3, 3000)) ** 9 * 2.0**-30).astype("float32")
RATE = 2.0**10


def step_of(opt, weight, row):
    def step(factor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * SLOPES) * factor + tf.reduce_sum(tf.gather(row, [1]))
            with ampx.scale_loss(loss, opt) as scaled:
                pass
        grads = scaled.gradient(tape, [weight, row])
        opt.apply_gradients(zip(grads, [weight, row], strict=True))
        return grads[0]

    return step


def assert_counted_in_the_last_step(opt, weight, step, steps):
    """Take so many steps, and one of which nothing is seen; NumPy counts again what the last of those many did."""
    for _ in range(steps):
        before = weight.numpy()
        gradient = step(tf.constant(1.0))
    after = weight.numpy()
    step(tf.constant(1.0))
    values = sample(before, 4096), sample(after, 4096), sample(gradient.numpy(), 4096)
    expected = (
        count("weight:0", "float32", *values, "float16"),
        count("row:0", "float32", range(2), range(2), None, "float16"),
    )
    assert opt.meter == Meter(steps, "float16", 1024.0, expected)


def test_the_numbers_equal_a_count_in_numpy(amp):
    weight, row = parameters()
    opt = amp.wrap_optimizer(keras.optimizers.SGD(RATE))
    opt.build([weight, row])
    step = step_of(opt, weight, row)
    assert opt.meter is None
    assert_counted_in_the_last_step(opt, weight, step, EVERY)
    assert 0 < opt.meter.lost < 1
    assert 0 < opt.meter.flushed < 1


def test_updates_of_fit_that_round_to_nothing_are_told_where_it_runs_eagerly(amp):
    """Of Adam every update has the size of the learning rate, which is nothing to a weight of 1."""
    events = []
    amp.on_event(events.append)
    ones = keras.initializers.Ones()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, use_bias=False, kernel_initializer=ones)])
    opt = amp.wrap_optimizer(keras.optimizers.Adam(1e-9))
    model.compile(opt, "mse", run_eagerly=True)
    model.fit(np.ones((5, 2), "float32"), np.zeros((5, 3), "float32"), batch_size=1, verbose=0)
    (entry,) = opt.meter.parameters
    assert (opt.meter.step, entry.name, entry.moved, entry.unchanged) == (EVERY, model.weights[0].path, 6, 6)
    assert [event.lost for event in events if isinstance(event, ampx.PrecisionLost)] == [1.0]


def test_steps_of_a_function_are_not_metered_unless_somebody_asks(amp):
    amp.meter_every = None
    weight, row = parameters()
    opt = amp.wrap_optimizer(keras.optimizers.SGD(RATE))
    opt.build([weight, row])
    step = tf.function(step_of(opt, weight, row))
    for _ in range(METER_EVERY):
        step(tf.constant(1.0))
    assert opt.meter is None


@pytest.mark.filterwarnings("ignore:.*emulated:ampx.errors.PrecisionWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lost_updates_of_low_precision_variables_are_told_in_functions_unasked(dtype):
    """At O3 there is no float32 copy: of weights of 1, either dtype loses every update of 2**-13."""
    amp = ampx.init("tensorflow", dtype=dtype, device="cpu", level="O3", loss_scale=2.0**8)
    events = []
    amp.on_event(events.append)
    ones = keras.initializers.Ones()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, use_bias=False, kernel_initializer=ones)])
    model, opt = amp.prepare(model, amp.wrap_optimizer(keras.optimizers.SGD(2.0**-13)))
    variables = model.trainable_variables

    @tf.function
    def step():
        with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(model(tf.ones((1, 2)))), opt) as scaled:
            pass
        opt.apply(tape.gradient(scaled, variables), variables)

    for _ in range(METER_EVERY):
        step()
    (entry,) = opt.meter.parameters
    assert (opt.meter.step, entry.dtype, entry.moved, entry.unchanged) == (METER_EVERY, dtype, 6, 6)
    assert entry.headroom == pytest.approx(math.log2(FORMATS[dtype].largest) - 8)
    assert [event.lost for event in events if isinstance(event, ampx.PrecisionLost)] == [1.0]
    assert model.get_weights()[0].tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("compiled", "clip"),
    [(False, {"max_grad_value": 2.0**-30}), (True, {})],
    ids=["function, clipped", "jit_compile"],
)
def test_the_numbers_of_a_function_equal_a_count_in_numpy(amp, compiled, clip):
    events = []
    amp.on_event(events.append)
    weight, row = parameters()
    opt = amp.wrap_optimizer(keras.optimizers.SGD(RATE), **clip)
    opt.build([weight, row])
    step = tf.function(step_of(opt, weight, row), jit_compile=compiled)
    assert_counted_in_the_last_step(opt, weight, step, 2 * EVERY)
    assert 0 < opt.meter.lost < 1
    (lost,) = (event for event in events if isinstance(event, ampx.PrecisionLost))
    assert (lost.lost, lost.flushed) == (opt.meter.lost, opt.meter.flushed)


def test_every_parameter_of_a_function_has_its_own_elements(amp):
    """The first loses its updates, the second and last do not; the third has a sparse gradient."""
    values = [1.0] * 3, [0.0] * 2, [0.0, 0.0], [0.0] * 4
    variables = [tf.Variable(each, name=f"v{number}") for number, each in enumerate(values)]
    opt = amp.wrap_optimizer(keras.optimizers.SGD(2.0**-30))
    opt.build(variables)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(each) * (2.0**power) for power, each in enumerate(variables)])
            with ampx.scale_loss(loss, opt) as scaled:
                pass
        slopes = tape.gradient(scaled, variables)
        slopes[2] = tf.IndexedSlices(slopes[2], tf.constant([0, 1]))
        opt.apply_gradients(zip(slopes, variables, strict=True))

    for _ in range(EVERY + 1):
        step()
    counted = [(entry.sampled, entry.moved, entry.unchanged) for entry in opt.meter.parameters]
    assert counted == [(3, 3, 3), (2, 2, 0), (2, 0, 0), (4, 4, 0)]
    rooms = [entry.headroom for entry in opt.meter.parameters]
    assert rooms[2] is None
    assert (rooms[0] - rooms[1], rooms[0] - rooms[3]) == (1.0, 3.0)  # slopes of 1, 2 and 8


def test_a_step_of_a_function_that_is_skipped_is_not_metered(amp):
    weight, row = parameters()
    opt = amp.wrap_optimizer(keras.optimizers.SGD(RATE))
    opt.build([weight, row])
    step = tf.function(step_of(opt, weight, row))
    for number in range(1, EVERY + 1):
        step(tf.constant(float("inf") if number == EVERY else 1.0))
    assert opt.last_step.applied is False
    assert opt.meter is None


@pytest.mark.parametrize("compiled", [False, True], ids=["function", "jit_compile"])
def test_updates_of_fit_that_round_to_nothing_are_told(amp, compiled):
    events = []
    amp.on_event(events.append)
    ones = keras.initializers.Ones()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, use_bias=False, kernel_initializer=ones)])
    opt = amp.wrap_optimizer(keras.optimizers.Adam(1e-9))
    model.compile(opt, "mse", jit_compile=compiled)
    model.fit(np.ones((5, 2), "float32"), np.zeros((5, 3), "float32"), batch_size=1, verbose=0)
    assert [event.lost for event in events if isinstance(event, ampx.PrecisionLost)] == [1.0]
    (entry,) = opt.meter.parameters
    assert (opt.meter.step, entry.name, entry.moved, entry.unchanged) == (EVERY, model.weights[0].path, 6, 6)


def test_a_step_that_does_not_update_is_not_metered(amp):
    weight, row = parameters()
    opt = amp.wrap_optimizer(keras.optimizers.SGD(RATE))
    opt.build([weight, row])
    step = step_of(opt, weight, row)
    for number in range(1, EVERY + 1):
        step(tf.constant(float("inf") if number == EVERY else 1.0))
    assert opt.last_step.applied is False
    assert opt.meter is None


@pytest.mark.parametrize("optimizers", ["optimizers", "optimizers.legacy"])
def test_the_numbers_of_tf_keras_in_a_function_equal_a_count_in_numpy(optimizers):
    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed")
    with pytest.warns(ampx.PrecisionWarning, match="emulated"):
        amp = ampx.init("tensorflow", dtype="float16", loss_scale=1024.0)
    amp.meter_every = EVERY
    weight, row = parameters()
    kind = tf_keras.optimizers.legacy if "legacy" in optimizers else tf_keras.optimizers
    opt = amp.wrap_optimizer(kind.SGD(RATE))
    step = tf.function(step_of(opt, weight, row))
    assert_counted_in_the_last_step(opt, weight, step, 2 * EVERY)
    assert 0 < opt.meter.lost < 1


@pytest.mark.parametrize("run", [lambda step: step, tf.function], ids=["eager", "function"])
def test_a_meter_that_was_asked_for_refuses_accumulating_optimizers(amp, run):
    weight, row = parameters()
    opt = amp.wrap_optimizer(keras.optimizers.SGD(RATE, gradient_accumulation_steps=3))
    before = weight.numpy()
    with pytest.raises(ampx.UnsupportedByBackendError, match=r"amp.meter_every is 4.*micro-batches.*meter_every = 0"):
        run(step_of(opt, weight, row))(tf.constant(1.0))
    np.testing.assert_array_equal(weight.numpy(), before)
    assert (opt.loss_scale, opt.last_step) == (1024.0, None)


def test_a_meter_that_nobody_asked_for_leaves_accumulating_optimizers_alone(amp):
    amp.meter_every = None
    weight, row = parameters()
    opt = amp.wrap_optimizer(keras.optimizers.SGD(RATE, gradient_accumulation_steps=3))
    step_of(opt, weight, row)(tf.constant(1.0))
    assert opt.last_step.applied
    assert opt.meter is None


def test_a_meter_that_was_asked_for_refuses_a_shared_loss_scale_in_functions(amp):
    weight, row = parameters()
    first, second = amp.wrap_optimizer([keras.optimizers.SGD(RATE), keras.optimizers.SGD(RATE)])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight) + tf.reduce_sum(row)
            with ampx.scale_loss(loss, [first, second]) as scaled:
                pass
        slopes = tape.gradient(scaled, [weight, row])
        first.apply(slopes[:1], [weight])
        second.apply(slopes[1:], [row])

    with pytest.raises(ampx.UnsupportedByBackendError, match="share its loss scale"):
        step()
