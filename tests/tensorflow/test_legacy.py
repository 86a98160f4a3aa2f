"""Optimizers and layers of tf_keras (Keras 2)."""

import math

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ampx
from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE

KINDS = {"keras2": tf_keras.optimizers, "legacy": tf_keras.optimizers.legacy}


@pytest.fixture(params=sorted(KINDS))
def optimizers(request):
    """The module that makes optimizers: both generations of Keras 2."""
    return KINDS[request.param]


def scaled_step(opt, variable, factor):
    with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(variable) * factor, opt) as scaled:
        pass
    opt.apply_gradients([(tape.gradient(scaled, variable), variable)])


def minimized(opt, variable, factor):
    opt.minimize(lambda: tf.reduce_sum(variable) * factor, [variable])


def by_hand(opt, variable, factor):
    with tf.GradientTape() as tape:
        scaled = opt.get_scaled_loss(tf.reduce_sum(variable) * factor)
    (gradient,) = opt.get_unscaled_gradients([tape.gradient(scaled, variable)])
    opt.apply_gradients([(gradient, variable)])


@pytest.mark.parametrize(
    ("step", "traced"),
    [
        *((step, traced) for step in (scaled_step, minimized, by_hand) for traced in (False, True)),
        (scaled_step, "xla"),
        *(pytest.param(step, "xla", marks=pytest.mark.nightly) for step in (minimized, by_hand)),
    ],
)
def test_the_trace_is_the_reference_and_a_skip_changes_nothing(amp, optimizers, step, traced):
    variable = tf.Variable([1.0, 2.0])
    opt = amp.wrap_optimizer(optimizers.Adam(0.1), loss_scale=ampx.LossScale(growth_interval=3))
    events = []
    amp.on_event(events.append)
    run = lambda factor: step(opt, variable, factor)  # noqa: E731
    if traced:
        run = tf.function(run, jit_compile=traced == "xla")
    trace = []
    for overflow in REFERENCE_PATTERN:
        before = [number.numpy() for number in (variable, opt.iterations)]
        run(tf.constant(math.inf if overflow else 1.0))
        trace.append(opt.loss_scale)
        assert opt.last_step.applied is not bool(overflow)
        assert opt.last_step.next_scale == trace[-1]
        same = all(np.array_equal(old, new) for old, new in zip(before, (variable, opt.iterations), strict=True))
        assert same == bool(overflow)
    assert trace == list(REFERENCE_TRACE)
    assert int(opt.iterations) == REFERENCE_PATTERN.count(0)  # natively 14: skipped steps count, and move schedules
    assert sum(isinstance(event, ampx.StepSkipped) for event in events) == REFERENCE_PATTERN.count(1)


def test_steps_are_those_of_the_raw_optimizer(amp, optimizers):
    plain, scaled = tf.Variable([1.0, -2.0]), tf.Variable([1.0, -2.0])
    raw, opt = optimizers.Adam(0.1), amp.wrap_optimizer(optimizers.Adam(0.1))
    for factor in (0.5, 3.0, -1.0):
        raw.minimize(lambda factor=factor: tf.reduce_sum(plain * plain) * factor, [plain])
        opt.minimize(lambda factor=factor: tf.reduce_sum(scaled * scaled) * factor, [scaled])
    assert np.array_equal(plain, scaled)  # powers of two change no bit


def test_the_whole_configuration_is_honoured(amp, optimizers):
    config = ampx.LossScale(
        init_scale=8.0,
        growth_factor=4.0,
        backoff_factor=0.25,
        growth_interval=2,
        hysteresis=2,
        min_scale=1.0,
        max_scale=64.0,
    )
    opt = amp.wrap_optimizer(optimizers.SGD(0.1), loss_scale=config)
    variable, trace = tf.Variable([1.0]), []
    step = tf.function(lambda factor: minimized(opt, variable, factor))
    for overflow in (0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1):
        step(tf.constant(math.inf if overflow else 1.0))
        trace.append(opt.loss_scale)
    assert trace == [8.0, 32.0, 32.0, 64.0, 64.0, 16.0, 16.0, 4.0, 4.0, 1.0, 1.0, 1.0]


def test_a_static_scale_skips_too(native, amp, optimizers):
    """Natively it does not: dynamic=False applies whatever comes."""
    module = "optimizers.legacy" if optimizers is KINDS["legacy"] else "optimizers"
    code, out, err = native(
        f"""
import tf_keras
v = tf.Variable(1.0)
opt = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.{module}.SGD(1.0), dynamic=False, initial_scale=8.0)
opt.minimize(lambda: v * float("inf"), [v])
print(float(v))
"""
    )
    assert code == 0, err
    assert out.split()[-1] == "-inf"

    variable = tf.Variable(1.0)
    opt = amp.wrap_optimizer(optimizers.SGD(1.0), loss_scale=8.0)
    minimized(opt, variable, math.inf)
    assert (float(variable), opt.loss_scale, opt.last_step.applied) == (1.0, 8.0, False)


def test_clipping_sees_true_gradients(amp, optimizers):
    variable = tf.Variable([0.0, 0.0])
    opt = amp.wrap_optimizer(optimizers.SGD(1.0), max_grad_norm=1.0)
    opt.minimize(lambda: 3.0 * variable[0] + 4.0 * variable[1], [variable])
    np.testing.assert_allclose(variable, [-0.6, -0.8], rtol=1e-6)
    assert opt.last_step.grad_norm == 5.0


def test_a_norm_whose_square_overflows_clips_rightly(amp, optimizers):
    variable = tf.Variable([0.0, 0.0])
    opt = amp.wrap_optimizer(optimizers.SGD(1.0), max_grad_norm=1.0)
    opt.minimize(lambda: 3e25 * variable[0] + 4e25 * variable[1], [variable])
    np.testing.assert_allclose(variable, [-0.6, -0.8], rtol=1e-6)
    assert opt.last_step.grad_norm == pytest.approx(5e25, rel=1e-6)


def test_sparse_gradients(amp, optimizers):
    table, plain = tf.Variable(tf.ones([4, 2])), tf.Variable(tf.ones([4, 2]))
    opt, raw = amp.wrap_optimizer(optimizers.SGD(0.5)), optimizers.SGD(0.5)
    for factor in (1.0, math.inf, 0.25):
        opt.minimize(lambda factor=factor: tf.reduce_sum(tf.gather(table, [1, 1, 3])) * factor, [table])
        if factor != math.inf:
            raw.minimize(lambda factor=factor: tf.reduce_sum(tf.gather(plain, [1, 1, 3])) * factor, [plain])
        assert opt.last_step.applied is (factor != math.inf)
        assert np.array_equal(table, plain)


def test_fit_scales_and_skips(amp, optimizers):
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, kernel_initializer="ones", input_shape=(3,))])
    opt = amp.wrap_optimizer(optimizers.SGD(0.01), loss_scale=ampx.LossScale(growth_interval=2))
    model.compile(optimizer=opt, loss="mse")
    assert model.optimizer is opt
    x = np.ones((8, 3), "float32")
    x[2] = np.inf
    model.fit(x, np.zeros((8, 1), "float32"), batch_size=1, shuffle=False, verbose=0)
    assert int(opt.iterations) == 7
    # 1, 1 grow; inf halves; then 2, 2 and one more pair
    assert opt.loss_scale == 2.0**16 * 2 / 2 * 2 * 2
    assert np.isfinite(model.get_weights()[0]).all()


def test_two_that_share_a_scale_move_it_once(amp, optimizers):
    variables = tf.Variable(1.0), tf.Variable(1.0)
    opts = amp.wrap_optimizer([optimizers.SGD(1.0), optimizers.SGD(1.0)])
    with (
        tf.GradientTape(persistent=True) as tape,
        ampx.scale_loss(variables[0] + variables[1] * math.inf, opts) as scaled,
    ):
        pass
    for opt, variable in zip(opts, variables, strict=True):
        opt.apply_gradients([(tape.gradient(scaled, variable), variable)])
    assert [float(variable) for variable in variables] == [0.0, 1.0]
    assert [opt.loss_scale for opt in opts] == [2.0**15] * 2


def test_state_comes_back_before_and_after_the_first_step(amp, optimizers):
    opt = amp.wrap_optimizer(optimizers.SGD(1.0))
    saved = amp.state_dict()
    saved["groups"][0]["losses"][0] |= {"scale": 1024.0, "growth_tracker": 5}
    amp.load_state_dict(saved)
    assert opt.loss_scale == 1024.0
    variable = tf.Variable(1.0)
    minimized(opt, variable, 1.0)
    assert opt.last_step.scale == 1024.0
    assert amp.state_dict()["groups"][0]["losses"][0]["growth_tracker"] == 6


def test_a_first_step_that_is_skipped_leaves_the_slots_that_a_step_makes(amp, optimizers):
    variable, raw, opt = tf.Variable(1.0), optimizers.Adam(0.1), amp.wrap_optimizer(optimizers.Adam(0.1))
    minimized(opt, variable, math.inf)
    assert not opt.last_step.applied
    raw.apply_gradients([(tf.constant(1.0), variable)])
    assert len(opt.inner_optimizer.variables()) == len(raw.variables()) > 2


def test_a_saved_model_is_wrapped_again(amp, optimizers, tmp_path):
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(3,))])
    opt = amp.wrap_optimizer(optimizers.Adam(0.25), loss_scale=ampx.LossScale(growth_interval=7), max_grad_norm=2.0)
    model.compile(optimizer=opt, loss="mse")
    model.fit(np.ones((2, 3), "float32"), np.zeros((2, 1), "float32"), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = tf_keras.models.load_model(tmp_path / "model.keras").optimizer
    assert type(loaded) is type(opt)
    assert loaded.ampx_member.group.config == ampx.LossScale(growth_interval=7)
    assert float(loaded.learning_rate) == 0.25
    with pytest.warns(UserWarning, match="HDF5 file"):
        model.save(tmp_path / "model.h5")
    assert type(tf_keras.models.load_model(tmp_path / "model.h5").optimizer) is type(opt)
    if optimizers is KINDS["keras2"]:  # natively, the older generation forgets its variables in this format
        assert int(loaded.iterations) == 1
    ampx.shutdown()
    with pytest.raises(ampx.NotInitializedError, match=r"compile=False"):
        tf_keras.models.load_model(tmp_path / "model.keras")


def test_disabled_is_transparent(optimizers):
    with ampx.init("tensorflow", enabled=False) as amp:
        variable = tf.Variable(1.0)
        opt = amp.wrap_optimizer(optimizers.SGD(1.0))
        scaled_step(opt, variable, 0.5)
        assert float(variable) == 0.5
        minimized(opt, variable, 0.5)
        assert float(variable) == 0.0
        assert opt.loss_scale == 1.0


@pytest.mark.parametrize("traced", [False, True])
def test_disabled_optimizers_clip_as_asked(optimizers, traced):
    with ampx.init("tensorflow", enabled=False) as amp:
        for bound, expected in (({"max_grad_norm": 2.0}, -2.0), ({"max_grad_value": 3.5}, -3.5)):
            variable = tf.Variable([0.0])
            opt = amp.wrap_optimizer(optimizers.SGD(1.0), **bound)
            step = lambda opt=opt, variable=variable: minimized(opt, variable, 8.0)  # noqa: E731
            (tf.function(step) if traced else step)()
            assert traced or opt.last_step.applied
            np.testing.assert_allclose(variable.numpy(), [expected], rtol=1e-6)


def test_mistakes_are_refused(amp, optimizers):
    raw, variable = optimizers.SGD(1.0), tf.Variable(1.0)
    opt = amp.wrap_optimizer(raw)
    with pytest.raises(ampx.NotScaledError):
        opt.apply_gradients([(tf.constant(1.0), variable)])
    for again in (opt, raw):
        with pytest.raises(ampx.AlreadyWrappedError):
            amp.wrap_optimizer(again)
    low = tf.Variable(tf.constant(1.0, tf.float16))
    with pytest.raises(ampx.LowPrecisionParametersError, match="low-precision"):
        opt.minimize(lambda: low * 2.0, [low])
    with tf.Graph().as_default(), pytest.raises(ampx.UnsupportedByBackendError, match=r"tf.compat.v1.train"):
        amp.wrap_optimizer(optimizers.SGD(1.0))
    assert float(variable) == 1.0


def test_layers_cast_and_are_restored():
    before = tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=(2,))])
    ones = np.ones((1, 2), "float32")
    with ampx.init("tensorflow", dtype="bfloat16", device="cpu") as amp:
        layer = tf_keras.layers.Dense(2)
        assert layer(ones).dtype == tf.bfloat16
        assert layer.kernel.dtype == tf.float32
        with amp.autocast(enabled=False):
            assert tf_keras.layers.Dense(2)(ones).dtype == tf.float32
        assert before(ones).dtype == tf.float32
        with pytest.raises(ampx.UnsupportedByBackendError, match=r"set_weights"):
            amp.prepare(before)
        assert amp.prepare(layer) is layer
    assert before(ones).dtype == tf.float32
    assert tf_keras.mixed_precision.global_policy().name == "float32"
    assert tf_keras.layers.Dense(2)(ones).dtype == tf.float32


def test_tf_keras_imported_after_init_is_noticed(native):
    code, _, err = native(
        """
import ampx
amp = ampx.init("tensorflow", dtype="bfloat16", device="cpu")
import tf_keras
amp.wrap_optimizer(tf_keras.optimizers.SGD())
"""
    )
    assert code == 1
    assert "imported after ampx.init" in err.splitlines()[-1]


def test_the_configuration_is_told_as_keras_2_tells_it(amp, optimizers):
    """Natively, `dynamic_growth_steps` of a static scale is None, and `loss_scale` a tensor."""
    native = tf_keras.mixed_precision.LossScaleOptimizer
    dynamic = amp.wrap_optimizer(optimizers.SGD(), loss_scale=ampx.LossScale(init_scale=8.0, growth_interval=7))
    static = amp.wrap_optimizer(optimizers.SGD(), loss_scale=16.0)
    theirs = native(optimizers.SGD(), initial_scale=8.0, dynamic_growth_steps=7)
    fixed = native(optimizers.SGD(), dynamic=False, initial_scale=16.0)
    for ours, other in ((dynamic, theirs), (static, fixed)):
        for name in ("dynamic", "initial_scale", "dynamic_growth_steps"):
            assert getattr(ours, name) == getattr(other, name)
        assert ours.loss_scale.numpy() == other.loss_scale.numpy()
    assert (int(dynamic.dynamic_counter), static.dynamic_counter) == (0, None)
    minimized(dynamic, tf.Variable(1.0), 1.0)
    assert int(dynamic.dynamic_counter) == 1


def test_an_optimizer_that_scales_the_loss_itself_is_refused(amp, optimizers):
    native = tf_keras.mixed_precision.LossScaleOptimizer(optimizers.SGD(1.0))
    for theirs in (native, native.inner_optimizer):
        with pytest.raises(ampx.AlreadyWrappedError, match=r"tf_keras|LossScaleOptimizer"):
            amp.wrap_optimizer(theirs)
    with pytest.raises(ampx.AlreadyWrappedError, match="loss_scale"):
        amp.wrap_optimizer(native)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_configuration_that_keras_wrote_is_read(amp, optimizers, dynamic):
    options = {"initial_scale": 8.0, **({"dynamic_growth_steps": 7} if dynamic else {"dynamic": False})}
    native = tf_keras.mixed_precision.LossScaleOptimizer(optimizers.SGD(0.25), **options)
    ours = type(amp.wrap_optimizer(optimizers.SGD())).from_config(native.get_config())
    assert (ours.dynamic, ours.initial_scale, ours.dynamic_growth_steps) == (dynamic, 8.0, 7 if dynamic else None)
    assert float(ours.learning_rate) == 0.25
    with pytest.raises(ampx.InvalidOptionError, match="inner_optimizer"):
        type(ours).from_config({"learning_rate": 0.1})
