"""Several losses with loss scales of their own on one optimizer: `scale_loss(…, loss_id=…)`."""

import math
from dataclasses import asdict, astuple

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ampx
from ampx import debug
from ampx.testing.reference import ReferenceOptimizer, ReferenceScale

CONFIG = ampx.LossScale(init_scale=2.0**8, growth_interval=2, max_consecutive_skips=3)
START = ((1.0, -2.0), (0.5,))
KINDS = {"keras3": keras.optimizers, "tf_keras": tf_keras.optimizers, "tf_keras legacy": tf_keras.optimizers.legacy}
# By step, the losses in the order in which they are scaled, with the factor of each.
INF = math.inf
STEPS = (
    ((0, 0.5), (1, 0.25)),
    ((0, 1.0), (1, INF)),
    ((0, 0.5), (1, 2.0)),
    ((1, 0.5), (0, INF)),
    ((1, 0.5), (0, 0.25)),
    ((0, -INF), (1, INF)),
    ((0, 0.5), (1, 0.5), (0, 0.25), (1, 1.5)),
    ((0, 0.5), (1, 0.5), (0, 0.25), (1, math.nan)),
    ((0, 0.5), (1, 0.25)),
)
# Some of them leave loss 0 out, or have it alone.
PARTS = (((0, 0.5),), ((1, 0.5),), ((2, INF),), ((1, 0.5), (2, 1.0)), ((0, 0.5),), ((1, INF),), ((2, 0.5), (0, 1.0)))


class Trainee:
    """Two variables and an optimizer; its losses are factors times their sum."""

    def __init__(self, amp, kind="keras3", **options):
        self.variables = [tf.Variable(values) for values in START]
        self.opt = amp.wrap_optimizer(KINDS[kind].SGD(0.5), **{"loss_scale": CONFIG, **options})

    def gradients(self, loss_id, factor, inside=False):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable) for variable in self.variables]) * factor
            if inside:
                with ampx.scale_loss(loss, self.opt, loss_id=loss_id) as scaled:
                    pass
        if inside:
            return scaled.gradient(tape, self.variables)
        with ampx.scale_loss(loss, self.opt, loss_id=loss_id) as scaled:
            return scaled.gradient(tape, self.variables)

    def step(self, losses, factors, inside=False):
        parts = [self.gradients(loss_id, factors[place], inside) for place, loss_id in enumerate(losses)]
        grads = [tf.add_n(list(each)) for each in zip(*parts, strict=True)]
        self.opt.apply_gradients(zip(grads, self.variables, strict=True))

    def numbers(self):
        return [variable.numpy().tolist() for variable in self.variables]


def rows_of(opt):
    (group,) = ampx.state_dict(opt)["groups"]
    return {row.pop("loss_id"): row for row in group["losses"]}


@pytest.mark.parametrize(
    ("kind", "traced", "steps"),
    [
        pytest.param("keras3", False, STEPS, id="keras3-eager-all"),
        pytest.param("keras3", True, STEPS, id="keras3-function-all"),
        pytest.param("keras3", True, PARTS, id="keras3-function-parts"),
        pytest.param("keras3", "xla", STEPS, id="keras3-xla-all"),
        pytest.param("tf_keras", True, PARTS, id="tf_keras-function-parts"),
        pytest.param("tf_keras legacy", False, STEPS, id="tf_keras-legacy-eager-all"),
        pytest.param("keras3", False, PARTS, id="keras3-eager-parts", marks=pytest.mark.nightly),
        pytest.param("keras3", "xla", PARTS, id="keras3-xla-parts", marks=pytest.mark.nightly),
        pytest.param("tf_keras", True, STEPS, id="tf_keras-function-all", marks=pytest.mark.nightly),
        pytest.param("tf_keras legacy", False, PARTS, id="tf_keras-legacy-eager-parts", marks=pytest.mark.nightly),
    ],
)
def test_every_loss_follows_its_own_reference(amp, kind, traced, steps):
    events, expected = [], []
    amp.on_event(lambda event: events.append((type(event).__name__, *astuple(event)[1:7])))
    trainee = Trainee(amp, kind)
    scale = ReferenceScale(asdict(CONFIG), 0, True, expected)
    reference = ReferenceOptimizer(scale, START, momentum=False)
    functions = {}
    for losses in steps:
        ids = tuple(loss_id for loss_id, _ in losses)
        if ids not in functions:
            body = lambda factors, ids=ids: trainee.step(ids, factors)  # noqa: E731 -- a function for each order
            functions[ids] = tf.function(body, jit_compile=traced == "xla") if traced else body
        functions[ids](tf.constant([factor for _, factor in losses]))
        for loss_id, factor in losses:
            reference.enter(loss_id, scale.scale(loss_id))
            reference.receive(loss_id, [[factor] * len(vector) for vector in START])
        reference.step()
        assert trainee.numbers() == reference.weights
        result = trainee.opt.last_step
        assert (result.applied, result.finite, result.scale, result.next_scale, result.consecutive_skips) == (
            scale.result_of(reference)[:5]
        )
        assert {
            loss_id: row for loss_id, row in rows_of(trainee.opt).items() if loss_id in scale.rows()
        } == scale.rows()
    amp.state_dict()
    assert events == expected


def test_a_loop_in_a_function_tells_of_every_step(amp):
    events, expected = [], []
    amp.on_event(lambda event: events.append((type(event).__name__, *astuple(event)[1:7])))
    trainee = Trainee(amp)
    scale = ReferenceScale(asdict(CONFIG), 0, True, expected)
    reference = ReferenceOptimizer(scale, START, momentum=False)
    first, second = [0.5, INF, 0.5, 0.25, -INF], [1.0, 0.5, INF, 0.25, INF]

    @tf.function
    def train(factors):
        for pair in factors:
            trainee.step((0, 1), pair)

    train(tf.constant(list(zip(first, second, strict=True))))
    for pair in zip(first, second, strict=True):
        for loss_id, factor in enumerate(pair):
            reference.enter(loss_id, scale.scale(loss_id))
            reference.receive(loss_id, [[factor] * len(vector) for vector in START])
        reference.step()
    assert rows_of(trainee.opt) == scale.rows()
    assert trainee.numbers() == reference.weights
    assert events == expected


@pytest.mark.parametrize("traced", [False, True])
def test_a_loss_scaled_inside_the_tape_is_the_same(amp, traced):
    inside, outside = Trainee(amp), Trainee(amp)
    step = tf.function(inside.step) if traced else inside.step
    for losses in STEPS[:3]:
        ids, factors = [loss_id for loss_id, _ in losses], tf.constant([factor for _, factor in losses])
        step(ids, factors, True)
        outside.step(ids, factors)
    assert inside.numbers() == outside.numbers()
    assert rows_of(inside.opt) == rows_of(outside.opt)


@pytest.mark.parametrize("traced", [False, True])
def test_a_tape_does_not_differentiate_another_loss_than_the_first(amp, traced):
    trainee = Trainee(amp)

    def differentiate(second):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(trainee.variables[0])
            with ampx.scale_loss(loss, trainee.opt) as first:
                pass
            with ampx.scale_loss(loss, trainee.opt, loss_id=1) as other:
                pass
        return tape.gradient(other if second else first, trainee.variables[0])

    run = tf.function(differentiate) if traced else differentiate
    assert run(False).numpy().tolist() == [256.0, 256.0]
    trainee.opt.zero_grad()
    with pytest.raises(ampx.ProtocolError, match=r"scaled\.gradient\(tape, variables\)"):
        run(True)


def test_gradients_of_a_step_that_is_over_are_refused(amp):
    trainee = Trainee(amp)
    grads = trainee.gradients(0, 1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(trainee.variables[0])
    with ampx.scale_loss(loss, trainee.opt, loss_id=1) as scaled:
        pass
    trainee.opt.apply_gradients(zip(grads, trainee.variables, strict=True))
    with pytest.raises(ampx.ProtocolError, match="after the step"):
        scaled.gradient(tape, trainee.variables[:1])
    assert 1 not in rows_of(trainee.opt)  # nobody differentiated it


def test_losses_of_one_step_in_several_functions_are_refused(amp):
    trainee = Trainee(amp)
    first = tf.function(lambda: trainee.gradients(0, 1.0))
    for step in (1, 2):
        grads = first()
        with pytest.raises(ampx.ProtocolError, match="several functions"):
            trainee.gradients(1, 1.0)
        trainee.opt.apply_gradients(zip(grads, trainee.variables, strict=True))
        assert trainee.numbers() == [[1.0 - 0.5 * step, -2.0 - 0.5 * step], [0.5 - 0.5 * step]]
    first()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"ProtocolError.*several functions"):
        tf.function(lambda: trainee.gradients(1, 0.5))()


def test_another_loss_that_is_stepped_in_another_function_is_refused(amp):
    trainee = Trainee(amp)
    grads = tf.function(lambda: trainee.gradients(1, 1.0))()
    with pytest.raises(ampx.ProtocolError, match="several functions"):
        trainee.opt.apply_gradients(zip(grads, trainee.variables, strict=True))


def test_a_function_may_meet_another_loss_in_a_later_trace(amp):
    trainee = Trainee(amp)

    @tf.function
    def step(loss_id):
        trainee.step((0, loss_id), tf.constant([1.0, INF if loss_id else 1.0]))

    step(0)
    step(1)  # where a function may make no variables
    assert trainee.numbers() == [[0.0, -3.0], [-0.5]]
    assert {loss_id: row["scale"] for loss_id, row in rows_of(trainee.opt).items()} == {0: 512.0, 1: 128.0}


def test_states_of_all_losses_are_saved_and_loaded(amp):
    trainee = Trainee(amp)
    step = tf.function(trainee.step)
    step((0, 1), tf.constant([1.0, INF]))
    saved = amp.state_dict()
    assert {row["loss_id"]: row["scale"] for row in saved["groups"][0]["losses"]} == {0: 256.0, 1: 128.0}
    step((0, 1), tf.constant([1.0, INF]))
    amp.load_state_dict(saved)
    step((0, 1), tf.constant([1.0, 1.0]))
    assert {loss_id: row["scale"] for loss_id, row in rows_of(trainee.opt).items()} == {0: 512.0, 1: 128.0}

    again = ampx.init("tensorflow", level="O0", loss_scale="dynamic")
    other = Trainee(again)
    again.load_state_dict(saved)
    tf.function(other.step)((0, 1), tf.constant([1.0, 1.0]))
    assert {loss_id: row["scale"] for loss_id, row in rows_of(other.opt).items()} == {0: 512.0, 1: 128.0}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras, with numpy 2
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("way", ["weights", "model", "checkpoint"])
def test_files_and_checkpoints_hold_the_scales_of_all_losses(amp, way, traced, tmp_path):
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.5), loss_scale=CONFIG)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(opt)
    opt.build(model.trainable_variables)

    def step(opt, model, factor):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(model(tf.ones((1, 1))))
            other = loss * factor
        parts = []
        for loss_id, each in enumerate((loss, other)):
            with ampx.scale_loss(each, opt, loss_id=loss_id) as scaled:
                parts.append(scaled.gradient(tape, model.trainable_variables))
        opt.apply([a + b for a, b in zip(*parts, strict=True)], model.trainable_variables)

    train = tf.function(step) if traced else step
    for factor in (1.0, INF, INF):
        train(opt, model, tf.constant(factor))
    expected = {0: 512.0, 1: 64.0}
    assert {loss_id: row["scale"] for loss_id, row in rows_of(opt).items()} == expected
    loaded, fresh = model, opt
    if way == "model":
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        fresh = loaded.optimizer
    else:
        fresh = amp.wrap_optimizer(keras.optimizers.SGD(0.5), loss_scale=CONFIG)
        loaded = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        loaded.compile(fresh)
        fresh.build(loaded.trainable_variables)
        if way == "weights":
            model.save_weights(tmp_path / "model.weights.h5")
            loaded.load_weights(tmp_path / "model.weights.h5")
        else:
            path = tf.train.Checkpoint(model=model, opt=opt).save(str(tmp_path / "checkpoint"))
            tf.train.Checkpoint(model=loaded, opt=fresh).restore(path).assert_consumed()
    assert rows_of(fresh) == rows_of(opt)
    again = tf.function(step) if traced else step
    again(fresh, loaded, tf.constant(1.0))
    train(opt, model, tf.constant(1.0))
    assert rows_of(fresh) == rows_of(opt)
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


@pytest.mark.parametrize("kind", ["tf_keras", "tf_keras legacy"])
def test_checkpoints_of_tf_keras_hold_the_scales_of_all_losses(amp, kind, tmp_path):
    trainee, fresh = Trainee(amp, kind), Trainee(amp, kind)
    for factors in ([1.0, 1.0], [1.0, INF], [1.0, INF]):
        trainee.step((0, 1), tf.constant(factors))
    assert {loss_id: row["scale"] for loss_id, row in rows_of(trainee.opt).items()} == {0: 512.0, 1: 64.0}
    path = tf.train.Checkpoint(opt=trainee.opt).save(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(opt=fresh.opt).restore(path).assert_existing_objects_matched()
    assert rows_of(fresh.opt) == rows_of(trainee.opt)


def test_lists_of_optimizers_keep_losses_apart(amp):
    trainees = [Trainee(amp), Trainee(amp)]
    for trainee in trainees:
        trainee.opt.inner_optimizer.build(trainee.variables)
    variables = [variable for trainee in trainees for variable in trainee.variables]
    with tf.GradientTape(persistent=True) as tape:
        sums = [tf.add_n([tf.reduce_sum(variable) for variable in trainee.variables]) for trainee in trainees]
        loss, broken = tf.add_n(sums), sums[0] + sums[1] * INF
    opts = [trainee.opt for trainee in trainees]
    with ampx.scale_loss(loss, opts) as scaled:
        first = scaled.gradient(tape, variables)
    with ampx.scale_loss(broken, opts, loss_id=1) as scaled:
        second = scaled.gradient(tape, variables)
    grads = [a + b for a, b in zip(first, second, strict=True)]
    for trainee, mine in zip(trainees, (grads[:2], grads[2:]), strict=True):
        trainee.opt.apply(mine, trainee.variables)
    assert trainees[0].numbers() == [[0.0, -3.0], [-0.5]]
    assert trainees[1].numbers() == [list(vector) for vector in START]
    assert [opt.last_step.applied for opt in opts] == [True, False]
    assert [rows_of(opt)[1]["scale"] for opt in opts] == [256.0, 128.0]


def test_variables_with_non_finite_gradients_of_another_loss_are_named(amp):
    trainee = Trainee(amp)
    trainee.step((0, 1), tf.constant([1.0, INF]))
    assert [entry.nonfinite for entry in debug.nonfinite_parameters(trainee.opt)] == [2, 1]


def test_float16_variables_are_refused(amp):
    trainee = Trainee(amp)
    variable = tf.Variable([1.0], dtype=tf.float16)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(tf.cast(variable, tf.float32))
    with ampx.scale_loss(loss, trainee.opt) as scaled:
        scaled.gradient(tape, [variable])
    with (
        pytest.raises(ampx.UnsupportedByBackendError, match="float16 variables"),
        ampx.scale_loss(loss, trainee.opt, loss_id=1) as scaled,
    ):
        scaled.gradient(tape, [variable])


def test_optimizers_of_graphs_take_loss_0(amp):
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", initializer=1.0)
        opt = amp.wrap_optimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5))
        with pytest.raises(ampx.UnsupportedByBackendError, match="loss_id=1"):
            ampx.scale_loss(variable * 2.0, opt, loss_id=1).__enter__()


def test_sparse_gradients_are_brought_to_the_first_scale(amp):
    variable = tf.Variable([[1.0], [2.0]])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.5), loss_scale=CONFIG)
    for second in (1.0, INF, 1.0):  # the second scale is half of the first in the last step
        with tf.GradientTape(persistent=True) as tape:
            loss, other = tf.reduce_sum(variable), tf.reduce_sum(tf.gather(variable, [1])) * second
        with ampx.scale_loss(loss, opt) as scaled:
            dense = scaled.gradient(tape, variable)
        with ampx.scale_loss(other, opt, loss_id=1) as scaled:
            sparse = scaled.gradient(tape, variable)
        assert isinstance(sparse, tf.IndexedSlices)
        opt.apply([dense + tf.convert_to_tensor(sparse)], [variable])
    assert variable.numpy().tolist() == [[0.0], [0.0]]
