"""The Keras 3 optimizer in loops of one's own: eager, in tf.function, compiled; whole, split, sparse, clipped."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import ampx
from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE
from ampx_tensorflow import gradients

MODES = {
    "eager": lambda function: function,
    "function": tf.function,
    "compiled": tf.function(jit_compile=True),
}


@pytest.fixture(params=MODES)
def mode(request):
    """What a training step is decorated with."""
    return MODES[request.param]


# What a trace decides it decides alike where XLA compiles it: `make test-all` compiles these, too.
decided_in_traces = pytest.mark.parametrize(
    "mode", ["eager", "function", pytest.param("compiled", marks=pytest.mark.nightly)], indirect=True
)


def trainer(opt, variables, mode, outside=False):
    """A step whose gradients are `slopes`, whatever they are."""

    @mode
    def step(*slopes):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * slope) for v, slope in zip(variables, slopes, strict=True)])
            if not outside:
                with ampx.scale_loss(loss, opt) as scaled:
                    pass
        if outside:
            with ampx.scale_loss(loss, opt) as scaled:
                grads = scaled.gradient(tape, variables)
        else:
            grads = tape.gradient(scaled, variables)
        opt.apply_gradients(zip(grads, variables, strict=True))

    return step


@pytest.mark.parametrize("outside", [False, True])
def test_the_reference_trace_and_its_events(amp, mode, outside):
    seen = []
    amp.on_event(seen.append)
    variable = tf.Variable([1.0, 2.0])
    opt = amp.wrap_optimizer(keras.optimizers.Adam(0.1), loss_scale=ampx.LossScale(growth_interval=3))
    step = trainer(opt, [variable], mode, outside)
    carried, trace, iterations = [], [], []
    for overflow in REFERENCE_PATTERN:
        step(tf.constant(math.inf if overflow else 1.0))
        carried.append(opt.last_step.scale)
        trace.append(opt.last_step.next_scale)
        iterations.append(int(opt.iterations))
    assert trace == list(REFERENCE_TRACE)
    assert carried == [2.0**16, *REFERENCE_TRACE[:-1]]
    assert iterations[-1] == REFERENCE_PATTERN.count(0)
    assert [event.step for event in seen if isinstance(event, ampx.StepSkipped)] == [4, 7, 8]
    changes = [a != b for a, b in zip((65536.0, *REFERENCE_TRACE), REFERENCE_TRACE, strict=False)]
    assert sum(isinstance(event, ampx.ScaleChanged) for event in seen) == sum(changes)


@pytest.mark.parametrize("bad", range(5))
def test_an_overflow_in_any_gradient_is_found(amp, bad):
    """Small ones are tested together, large ones and those of other dtypes alone."""
    shapes = [(3,), (2, 2), (5000,), (7,), (1,)]
    dtypes = [tf.float32, tf.float32, tf.float32, tf.float64, tf.float32]
    variables = [tf.Variable(tf.ones(shape, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1))
    grads = [tf.ones(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    for spoiled in (False, True):
        if spoiled:
            last = tf.reshape(grads[bad], [-1])[:-1]
            grads[bad] = tf.reshape(tf.concat([last, tf.constant([math.inf], last.dtype)], 0), shapes[bad])
        opt.scale_loss(tf.constant(1.0))
        opt.apply(grads, variables)
        assert opt.last_step.applied is not spoiled


@decided_in_traces
def test_every_number_of_the_configuration_reaches_traces(amp, mode):
    config = ampx.LossScale(
        init_scale=96.0,
        growth_factor=3.0,
        backoff_factor=0.75,
        growth_interval=2,
        hysteresis=2,
        min_scale=60.0,
        max_scale=300.0,
    )
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1), loss_scale=config)
    step, trace = trainer(opt, [tf.Variable([1.0])], mode), []
    for overflow in (0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1):
        step(tf.constant(math.inf if overflow else 1.0))
        trace.append(float(opt.dynamic_scale.numpy()))
    # Worked out by hand: 96 * 3 = 288, then 300 at the bound; two overflows back off by 0.75; a finite one refills.
    backed = [300 * 0.75**n for n in range(1, 7)]
    expected = [96, 288, 288, 300, 300, backed[0], backed[0], backed[0], backed[1], backed[1], backed[2], backed[2]]
    expected += [backed[3], backed[3], backed[4], backed[4], 60, 60, 60]
    assert trace == [float(np.float32(scale)) for scale in expected]


def test_a_skip_leaves_variables_slots_iterations_and_schedules(amp, mode):
    variables = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    raw = keras.optimizers.AdamW(schedule, weight_decay=0.1, use_ema=True, ema_momentum=0.5)
    opt = amp.wrap_optimizer(raw)
    step = trainer(opt, variables, mode)
    step(tf.constant(1.0), tf.constant(1.0))
    before = [variable.numpy().tolist() for variable in (*variables, *raw.variables)]
    step(tf.constant(1.0), tf.constant(math.nan))
    assert [variable.numpy().tolist() for variable in (*variables, *raw.variables)] == before
    assert float(raw.learning_rate) == 0.25
    step(tf.constant(1.0), tf.constant(1.0))
    assert float(raw.learning_rate) == 0.125
    assert int(opt.iterations) == 2


def test_steps_equal_plain_keras_bit_for_bit(amp, mode):
    start, slopes = np.array([0.3, -1.7, 2.2], "float32"), np.array([0.25, -0.5, 1.0], "float32")
    plain, scaled = tf.Variable(start), tf.Variable(start)
    raw, opt = keras.optimizers.Adam(0.1), amp.wrap_optimizer(keras.optimizers.Adam(0.1))
    raw.build([plain])
    step = trainer(opt, [scaled], mode)
    update = mode(lambda grad: raw.apply([grad]))
    for _ in range(4):
        step(tf.constant(slopes))
        update(tf.constant(slopes))
    assert scaled.numpy().tolist() == plain.numpy().tolist()


def test_results_inside_a_function_are_tensors(amp):
    variable = tf.Variable([1.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1), max_grad_norm=1.0)

    @tf.function
    def step(slope):
        with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(variable * slope), opt) as scaled:
            pass
        opt.apply_gradients([(tape.gradient(scaled, variable), variable)])
        seen = opt.last_step
        return seen.applied, seen.scale, seen.next_scale, seen.consecutive_skips, seen.grad_norm, opt.loss_scale

    assert [number.numpy() for number in step(tf.constant(3.0))] == [True, 65536.0, 65536.0, 0, 3.0, 65536.0]
    assert [number.numpy() for number in step(tf.constant(math.inf))][:4] == [False, 65536.0, 32768.0, 1]


def test_forgetting_scale_loss_is_refused_wherever_it_can_be_seen(amp):
    variable = tf.Variable([1.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(ampx.NotScaledError, match=r"self.optimizer.scale_loss.*tape.gradient\(scaled, variables\)"):
        opt.apply([tf.constant([1.0])], [variable])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        opt.apply_gradients([(tape.gradient(loss, variable), variable)])

    with pytest.raises(ampx.NotScaledError):
        step()
    assert variable.numpy().tolist() == [1.0]
    assert opt.last_step is None


def test_functions_may_share_the_work(amp):
    """Backward in one function and the step outside, or in another; what was not scaled is found at run time."""
    variable = tf.Variable([8.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0), loss_scale=ampx.LossScale(growth_interval=2))

    @tf.function
    def backward():
        with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(variable), opt) as scaled:
            pass
        return tape.gradient(scaled, [variable])

    @tf.function
    def update(grads):
        opt.apply(grads, [variable])

    for number in range(1, 3):
        opt.apply(backward(), [variable])
        assert variable.numpy().tolist() == [8.0 - number]
    with pytest.raises(ampx.NotScaledError):
        opt.apply([tf.constant([1.0])], [variable])
    assert opt.loss_scale == 2.0**17
    for number in range(3, 5):
        update(backward())
        assert variable.numpy().tolist() == [8.0 - number]
    assert opt.loss_scale == 2.0**18
    with pytest.raises(tf.errors.InvalidArgumentError, match="did not go through scale_loss"):
        update([tf.constant([1.0])])
    assert variable.numpy().tolist() == [4.0]
    with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(variable), opt) as scaled:
        pass
    update(tape.gradient(scaled, [variable]))
    assert variable.numpy().tolist() == [3.0]
    assert opt.last_step.scale == 2.0**18


def test_accumulation_over_calls_of_a_function_keeps_the_scale(amp):
    """A scale that is loaded between two micro-batches holds from the next window on."""
    variable, total = tf.Variable([8.0]), tf.Variable([0.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))

    @tf.function
    def micro_batch():
        with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(variable), opt) as scaled:
            pass
        total.assign_add(tape.gradient(scaled, variable))

    micro_batch()
    state = amp.state_dict()
    state["groups"][0]["losses"][0]["scale"] = 4.0
    amp.load_state_dict(state)
    micro_batch()
    opt.apply([total.value()], [variable])
    assert variable.numpy().tolist() == [6.0]
    assert (opt.last_step.scale, opt.loss_scale) == (2.0**16, 4.0)


def test_a_function_traced_before_the_first_step_follows_the_scale(native):
    """Keras' own optimizer writes its first scale into such a function for ever."""
    script = """
o = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
f = tf.function(lambda: o.scale_loss(tf.constant(1.0)), autograph=False)
f(); o.build([tf.Variable([1.0])]); o.dynamic_scale.assign(2.0)
print(float(f()))
"""
    code, out, error = native(script)
    assert (code, out.strip()) == (0, "4.0"), error
    amp = ampx.init("tensorflow", level="O0", loss_scale=4.0)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))
    run = tf.function(lambda: opt.scale_loss(tf.constant(1.0)), autograph=False)
    run()
    opt.build([tf.Variable([1.0])])
    opt.zero_grad()
    opt.dynamic_scale.assign(2.0)
    assert float(run()) == 2.0


def test_gradients_that_are_all_none_are_refused(amp):
    variable = tf.Variable([1.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable)
    with ampx.scale_loss(loss, opt) as scaled:
        grads = tape.gradient(scaled, [variable])
    with pytest.raises(ampx.ProtocolError, match=r"scaled\.gradient"):
        opt.apply(grads, [variable])


def test_a_float16_loss_is_scaled_in_float32_and_refused_where_it_cannot_be(amp):
    variable = tf.Variable([1.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.cast(tf.reduce_sum(variable), tf.float16)
        with ampx.scale_loss(loss, opt) as scaled:
            pass
    assert (scaled.dtype, float(scaled)) == (tf.float32, 65536.0)
    with pytest.raises(ampx.LossDtypeError, match="float16"):
        scaled.gradient(tape, [variable])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sparse_gradients(amp, mode, momentum):
    start = np.arange(8, dtype="float32").reshape(4, 2)
    plain, scaled = tf.Variable(start), tf.Variable(start)
    raw = keras.optimizers.SGD(0.5, momentum=momentum)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.5, momentum=momentum))
    raw.build([plain])
    opt.build([scaled])

    def gradient(value, scale):
        values = tf.stack([value, 2 * value]) * scale * tf.ones((2, 2))
        return tf.IndexedSlices(values, tf.constant([1, 3], tf.int64), tf.constant([4, 2], tf.int64))

    @mode
    def step(value):
        opt.scale_loss(tf.constant(1.0))
        opt.apply([gradient(value, 65536.0)], [scaled])

    @mode
    def update(value):
        raw.apply([gradient(value, 1.0)], [plain])

    for _ in range(2):
        step(tf.constant(0.25))
        update(tf.constant(0.25))
    before = scaled.numpy().tolist()
    assert before == plain.numpy().tolist()
    step(tf.constant(math.inf))
    assert scaled.numpy().tolist() == before
    assert not opt.last_step.applied


@pytest.mark.parametrize("bound", [{"max_grad_norm": 1.0}, {"max_grad_value": 2.0}])
def test_clipping_adds_up_rows_that_are_named_twice(mode, bound):
    """Rows 3 + 3 and 8 of one column: the true gradient is (6, 8), of norm 10."""
    amp = ampx.init("tensorflow", level="O0", loss_scale=4.0)
    variable = tf.Variable([[10.0], [10.0], [10.0]])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0), **bound)
    opt.build([variable])

    @mode
    def step():
        opt.scale_loss(tf.constant(1.0))
        values = tf.constant([[3.0], [8.0], [3.0]]) * 4.0
        opt.apply([tf.IndexedSlices(values, tf.constant([1, 0, 1]), tf.constant([3, 1]))], [variable])

    step()
    expected = [10 - 0.8, 10 - 0.6, 10.0] if "max_grad_norm" in bound else [8.0, 8.0, 10.0]
    assert variable.numpy().ravel().tolist() == pytest.approx(expected, rel=1e-6)
    assert opt.last_step.grad_norm == (pytest.approx(10.0) if "max_grad_norm" in bound else None)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("slopes", "norm"), [((3e25, 4e25), 5e25), ((3e38, 3e38), math.inf)])
def test_a_norm_whose_square_overflows_clips_rightly(mode, slopes, norm, sparse):
    """The direction is that of the gradient, the length the bound; float32 cannot hold the second norm."""
    amp = ampx.init("tensorflow", level="O0", loss_scale=1.0)
    variable = tf.Variable([[0.0], [0.0]])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0), max_grad_norm=2.0)
    opt.build([variable])

    @mode
    def step(gradient):
        opt.scale_loss(tf.constant(1.0))
        if sparse:
            gradient = tf.IndexedSlices(gradient, tf.constant([0, 1]), tf.constant([2, 1]))
        opt.apply([gradient], [variable])

    step(tf.reshape(tf.constant(slopes), [2, 1]))
    expected = 2.0 * np.array(slopes) / np.linalg.norm(np.array(slopes, "float64"))
    np.testing.assert_allclose(-variable.numpy().ravel(), expected, rtol=1e-6)
    assert opt.last_step.applied
    assert opt.last_step.grad_norm == pytest.approx(norm, rel=1e-6)


@decided_in_traces
@pytest.mark.parametrize(
    ("option", "expected"),
    [({"clipnorm": 1.0}, (0.6, 0.8)), ({"global_clipnorm": 1.0}, (0.6, 0.8)), ({"clipvalue": 3.5}, (3.0, 3.5))],
)
def test_keras_own_clipping_sees_true_gradients(amp, mode, option, expected):
    variable = tf.Variable([0.0, 0.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0, **option))
    trainer(opt, [variable], mode)(tf.constant([3.0, 4.0]))
    assert (-variable.numpy()).tolist() == pytest.approx(expected, rel=1e-6)


@decided_in_traces
def test_keras_own_accumulation_leaves_an_overflow_out(amp, mode):
    """A micro-batch that overflows is no part of the mean; the next finite one takes its place."""
    variable = tf.Variable([0.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
    step, seen = trainer(opt, [variable], mode), []
    for slope in (1.0, 3.0, math.inf, 1.0, 3.0):
        step(tf.constant(slope))
        seen.append((float(variable[0]), opt.loss_scale))
    assert seen == [(0, 2.0**16), (-2, 2.0**16), (-2, 2.0**15), (-2, 2.0**15), (-4, 2.0**15)]
    with pytest.raises(ampx.InvalidOptionError, match="global_clipnorm"):
        amp.wrap_optimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), max_grad_norm=1.0)


def test_a_scale_below_one_never_writes_inf(mode):
    """Dividing by it can overflow where the scaled gradient was finite."""
    amp = ampx.init("tensorflow", level="O0", loss_scale=2.0**-4)
    variable = tf.Variable([1.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))
    opt.build([variable])

    @mode
    def step():
        opt.scale_loss(tf.constant(1.0))
        opt.apply([tf.constant([2.0**126])], [variable])

    step()
    assert not opt.last_step.applied
    assert variable.numpy().tolist() == [1.0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_gradients_are_divided_in_float32_or_wider_and_keep_their_dtype(dtype):
    """float16 has no 2**16, and float32 none of the two numbers next to 1 that float64 has."""
    values = tf.constant([1.0, -1.5 * 2.0**14, 1.0 + 2.0**-40], dtype)
    (divided,) = gradients.unscale([values], tf.constant(2.0**16))
    assert divided.dtype == values.dtype
    assert divided.numpy().astype("float64").tolist() == (values.numpy().astype("float64") / 2.0**16).tolist()


def test_a_scale_that_is_one_neither_multiplies_nor_divides(mode):
    amp = ampx.init("tensorflow", dtype="bfloat16")
    variable = tf.Variable([1.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))
    step = trainer(opt, [variable], mode)
    step(tf.constant(0.5))
    step(tf.constant(math.inf))
    assert variable.numpy().tolist() == [0.5]
    assert opt.last_step == ampx.StepResult(False, False, 1.0, 1.0, 1)
    if mode is tf.function:
        graph = step.get_concrete_function(tf.constant(1.0)).graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        kinds = {node.op for node in nodes}
        assert "AssignSubVariableOp" in kinds  # the update is among them
        assert "RealDiv" not in kinds


@decided_in_traces
def test_a_group_in_one_function(amp, mode):
    """Two optimizers share one scale; it moves once a step, and each skips for itself."""
    variables = [tf.Variable([0.0]), tf.Variable([0.0])]
    first, second = amp.wrap_optimizer([keras.optimizers.SGD(1.0), keras.optimizers.SGD(1.0)])
    first.build(variables[:1])
    second.build(variables[1:])

    @mode
    def step(slopes):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * slopes[i]) for i, v in enumerate(variables)])
            with ampx.scale_loss(loss, [first, second]) as scaled:
                pass
        grads = tape.gradient(scaled, variables)
        first.apply(grads[:1], variables[:1])
        second.apply(grads[1:], variables[1:])

    step(tf.constant([1.0, math.inf]))
    assert [variable.numpy().tolist() for variable in variables] == [[-1.0], [0.0]]
    assert (first.loss_scale, second.loss_scale) == (2.0**15, 2.0**15)
    assert [optimizer.last_step.applied for optimizer in (first, second)] == [True, False]
    step(tf.constant([1.0, 1.0]))
    assert [variable.numpy().tolist() for variable in variables] == [[-2.0], [-1.0]]
    assert len(amp.state_dict()["groups"]) == 1


def test_a_group_split_over_functions_is_refused(amp):
    variables = [tf.Variable([0.0]), tf.Variable([0.0])]
    first, second = amp.wrap_optimizer([keras.optimizers.SGD(1.0), keras.optimizers.SGD(1.0)])

    @tf.function
    def backward():
        with tf.GradientTape() as tape, ampx.scale_loss(tf.add_n(variables)[0], [first, second]) as scaled:
            pass
        return tape.gradient(scaled, variables)

    grads = backward()
    with pytest.raises(ampx.ProtocolError, match="share a loss scale"):
        first.apply(grads[:1], variables[:1])


def test_optimizers_that_scale_by_themselves_are_refused(amp):
    for raw in (
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)),
        keras.optimizers.SGD(1.0, loss_scale_factor=8.0),
    ):
        with pytest.raises(ampx.AlreadyWrappedError, match="unscaled twice"):
            amp.wrap_optimizer(raw)
    low = keras.optimizers.SGD(1.0)
    low.build([keras.Variable([1.0], dtype="float16")])
    with pytest.raises(ampx.LowPrecisionParametersError, match="low-precision variables"):
        amp.wrap_optimizer(low)


def test_low_precision_variables_are_refused_where_the_first_step_shows_them(amp):
    """The optimizer was not built when it was wrapped."""
    variable, opt = tf.Variable([1.0], dtype="float16"), amp.wrap_optimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(ampx.LowPrecisionParametersError, match="low-precision variables"):
        trainer(opt, [variable], lambda step: step)(tf.constant(1.0, tf.float16))
    assert (variable.numpy().tolist(), opt.last_step) == ([1.0], None)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="bfloat16")])
    model.compile(amp.wrap_optimizer(keras.optimizers.SGD(1.0)), "mse")
    with pytest.raises(ampx.LowPrecisionParametersError, match="low-precision variables"):
        model.fit(np.ones((2, 2), "float32"), np.ones((2, 1), "float32"), verbose=0)


@decided_in_traces
def test_disabled_is_transparent(mode):
    amp = ampx.init("tensorflow", enabled=False)
    variable = tf.Variable([1.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.5))
    trainer(opt, [variable], mode, outside=False)(tf.constant(math.inf))
    assert variable.numpy().tolist() == [-math.inf]
    assert opt.scale_loss(tf.constant(3.0)).numpy() == 3.0


@decided_in_traces
def test_a_disabled_optimizer_clips_as_asked(mode):
    amp = ampx.init("tensorflow", enabled=False)
    variables = [tf.Variable([0.0]), tf.Variable([0.0])]
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0), max_grad_norm=1.0)
    trainer(opt, variables, mode)(tf.constant(3.0), tf.constant(4.0))
    np.testing.assert_allclose([float(variable[0]) for variable in variables], [-0.6, -0.8], rtol=1e-6)


def test_optimizers_of_a_list_take_the_loss_scale_that_was_loaded_though_another_is_in_mid_window(amp):
    a, b = tf.Variable([1.0]), tf.Variable([1.0])
    first, second = amp.wrap_optimizer([keras.optimizers.SGD(0.5), keras.optimizers.SGD(0.5)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(a) * 2.0
    with ampx.scale_loss(loss, first) as scaled:
        carries = scaled.gradient(tape, [a])
    amp.load_state_dict(
        ampx.import_state(
            {"scale": 2.0**4, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2, "_growth_tracker": 0}
        ),
        first,
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(b) * 2.0
    with ampx.scale_loss(loss, second) as scaled:
        (gradient,) = scaled.gradient(tape, [b])
    assert (float(carries[0][0]), float(gradient[0])) == (2.0**17, 2.0**5)
    first.apply(carries, [a])
    second.apply([gradient], [b])
    assert (float(a[0]), float(b[0])) == (0.0, 0.0)


def test_layers_of_an_exception_in_a_trace_leave_nothing(amp):
    variable = tf.Variable([1.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))

    @tf.function
    def fails():
        with tf.GradientTape(), ampx.scale_loss(tf.reduce_sum(variable), opt):
            raise KeyError("body")

    with pytest.raises(KeyError):
        fails()
    trainer(opt, [variable], tf.function)(tf.constant(1.0))
    trainer(opt, [variable], lambda function: function)(tf.constant(1.0))
    assert variable.numpy().tolist() == [-1.0]


def test_stateless_apply_is_refused(amp):
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(ampx.UnsupportedByBackendError, match="JAX engine"):
        opt.stateless_apply([], [], [])


@decided_in_traces
@pytest.mark.parametrize("former", [False, True])
def test_gradients_of_the_loss_itself_are_refused(amp, mode, former):
    """They would be divided by the scale. In each trace it is found, on the host until a step showed it right."""
    variable = tf.Variable([8.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))

    @mode
    def step(rightly):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
            if former:
                scaled = opt.get_scaled_loss(loss)
            else:
                with ampx.scale_loss(loss, opt) as scaled:
                    pass
        gradient = tape.gradient(scaled if rightly else loss, variable)
        opt.apply_gradients([(gradient, variable)])

    with pytest.raises(ampx.NotScaledError, match="that was passed to scale_loss"):
        step(False)
    assert (variable.numpy().tolist(), opt.loss_scale) == ([8.0], 65536.0)
    opt.zero_grad()
    step(True)
    assert variable.numpy().tolist() == [7.0]
    assert opt.last_step.applied


def test_gradients_of_a_body_for_two_optimizers_are_seen_though_one_was_trained_alone_before(amp):
    """A later body that raises before it differentiates says nothing of gradients that came before it."""
    first, second = tf.Variable([8.0]), tf.Variable([4.0])
    single, other = amp.wrap_optimizer([keras.optimizers.SGD(1.0), keras.optimizers.SGD(1.0)])

    def differentiate(opts, variables, raises=False):
        with tf.GradientTape() as tape:
            loss = tf.add_n(variables)
        with ampx.scale_loss(loss, opts) as scaled:
            if raises:
                raise KeyError("a batch that is missing")
            return scaled.gradient(tape, variables)

    single.apply_gradients(zip(differentiate(single, [first]), [first], strict=True))
    _, gradient = differentiate([single, other], [first, second])
    with pytest.raises(KeyError):
        differentiate(other, [second], raises=True)
    other.apply_gradients([(gradient, second)])
    assert second.numpy().tolist() == [3.0]


@decided_in_traces
def test_gradients_of_the_loss_itself_are_right_where_nothing_is_divided(amp, mode):
    variable = tf.Variable([8.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0), loss_scale=1.0)

    @mode
    def step():
        with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(variable), opt):
            loss = tf.reduce_sum(variable)
        opt.apply_gradients([(tape.gradient(loss, variable), variable)])

    step()
    step()
    assert variable.numpy().tolist() == [6.0]


@pytest.mark.parametrize("times", [1, 2])
def test_higher_derivatives_of_a_scaled_loss(amp, times):
    """What sees the first derivative on the host is itself differentiated."""
    variable = tf.Variable(3.0)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0), loss_scale=ampx.LossScale(init_scale=8.0))
    for _ in range(times):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner, ampx.scale_loss(variable**3, opt) as scaled:
                pass
            slope = inner.gradient(scaled, variable)
        assert outer.gradient(slope, variable).numpy() == 8.0 * 6.0 * 3.0
        opt.zero_grad()


def in_a_loop(opt, variable, factor):
    """Scale and differentiate in the body of a loop, step after it."""

    def body(count, total):
        with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(variable) * factor, opt) as scaled:
            pass
        return count + 1, total + tape.gradient(scaled, variable)

    return tf.while_loop(lambda count, _: count < 2, body, [tf.constant(0), tf.zeros([1])])[1]


def in_an_inner_function(opt, variable, factor):
    @tf.function
    def scaled_loss():
        with ampx.scale_loss(2.0 * tf.reduce_sum(variable) * factor, opt) as scaled:
            return scaled

    with tf.GradientTape() as tape:
        scaled = scaled_loss()
    return tape.gradient(scaled, variable)


def of_two_losses(opt, variable, factor):
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(variable) * factor
        with ampx.scale_loss(loss, opt) as first:
            pass
        with ampx.scale_loss([loss, loss], opt) as (second, _):
            pass
    return tape.gradient(first, variable) + tape.gradient(second, variable)


def computed_again(opt, variable, factor):
    product = tf.recompute_grad(lambda x: 2.0 * tf.reduce_sum(x * variable))
    with tf.GradientTape() as tape, ampx.scale_loss(product(factor), opt) as scaled:
        pass
    return tape.gradient(scaled, variable)


def of_several_elements(opt, variable, factor):
    with tf.GradientTape() as tape:
        loss = variable * factor * tf.ones([2])
    with ampx.scale_loss(loss, opt) as scaled:
        return scaled.gradient(tape, variable)


@decided_in_traces
@pytest.mark.parametrize(
    "gradient", [in_a_loop, in_an_inner_function, of_two_losses, computed_again, of_several_elements]
)
def test_scaled_gradients_are_known_wherever_they_are_made(amp, mode, gradient):
    """None of them is taken for one of the loss itself; the derivative of each loss is 2."""
    variable = tf.Variable([8.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))

    @mode
    def step(factor):
        opt.apply_gradients([(gradient(opt, variable, factor), variable)])

    for factor, weight in ((1.0, 6.0), (math.inf, 6.0), (1.0, 4.0)):
        step(tf.constant(factor))
        assert variable.numpy().tolist() == [weight]
        assert opt.last_step.applied is (factor == 1.0)


def test_xla_tests_gradients_without_putting_them_together(amp):
    """A kernel that puts gradients together looks up for every element which gradient it is of; there are none here."""
    variables = [tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])]
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.125))
    opt.build(variables)
    slopes = [tf.ones(2), tf.fill([1, 1], math.inf)]
    step = trainer(opt, variables, MODES["compiled"])
    assert 'op_type="ConcatV2"' not in step.experimental_get_compiler_ir(*slopes)(stage="optimized_hlo")
    step(*slopes)  # the last gradient counts as much as the first
    assert opt.last_step.applied is False
    assert [variable.numpy().tolist() for variable in variables] == [[1.0, 2.0], [[3.0]]]
