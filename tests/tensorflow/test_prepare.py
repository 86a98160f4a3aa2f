"""Levels O2 and O3: low-precision Keras models, float32 norms, master weights, what is saved and how it goes on."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ampx

pytestmark = [
    pytest.mark.filterwarnings("ignore::ampx.errors.PrecisionWarning"),
    # Keras' own, when it saves with numpy 2.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
DTYPES = ["bfloat16", "float16"]
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def init(level="O2", dtype="bfloat16", **options):
    return ampx.init("tensorflow", dtype=dtype, device="cpu", level=level, **options)


def net(**options):
    """Has a norm, a shared layer, a frozen one and a table."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    shared = keras.layers.Dense(4, name="shared")
    x = keras.layers.LayerNormalization(name="norm")(shared(keras.layers.BatchNormalization(name="batch")(inputs)))
    x = keras.layers.Dense(4, name="frozen", trainable=False)(shared(x))
    return keras.Model(inputs, keras.layers.Dense(1, name="last", **options)(x))


def dtypes(model):
    return {layer.name: {variable.value.dtype.name for variable in layer.variables} for layer in model.layers}


def dense(value=1.0, units=1):
    ones = keras.initializers.Constant(value)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(units, use_bias=False, kernel_initializer=ones, name="only")]
    )


def step(opt, model, x=X, y=None, factor=1.0, fixed=False):
    """One step of a loop of one's own, on the square of the error or on the sum of the outputs."""
    with tf.GradientTape() as tape:
        outputs = tf.cast(model(x), tf.float32)
        loss = tf.reduce_sum(outputs) if fixed else tf.reduce_mean(tf.square(outputs - (Y if y is None else y)))
        with ampx.scale_loss(loss * factor, opt) as scaled:
            pass
    opt.apply_gradients(zip(tape.gradient(scaled, model.trainable_variables), model.trainable_variables, strict=True))
    return loss


def everything(model, opt):
    """What training changes, bit for bit: what layers read, what is saved, and the optimizer's state."""
    low = [variable.value.numpy() for variable in model.variables]
    return [*low, *model.get_weights(), *(variable.numpy() for variable in opt.inner_optimizer.variables)]


def assert_same(values, others):
    assert len(values) == len(others)
    for a, b in zip(values, others, strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_o2_lowers_everything_but_norms(dtype):
    model, before = net(), net().get_weights()
    assert init(dtype=dtype).prepare(model) is model
    low, high = {dtype}, {"float32"}
    assert {k: v for k, v in dtypes(model).items() if v} == {
        "shared": low,
        "frozen": low,
        "last": low,
        "norm": high,
        "batch": high,
    }
    assert model(X).dtype.name == dtype
    frozen = {id(variable) for variable in model.get_layer("frozen").weights}
    for variable, value in zip(model.weights, before, strict=True):
        rounded = tf.cast(value, dtype).numpy()
        np.testing.assert_array_equal(variable.value.numpy(), value if variable.dtype == "float32" else rounded)
        np.testing.assert_array_equal(np.asarray(variable), rounded if id(variable) in frozen else value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_o3_lowers_everything(dtype):
    model = init("O3", dtype=dtype).prepare(net())
    assert set.union(*dtypes(model).values()) == {dtype}
    assert model(X).dtype.name == dtype


NORMS = [
    (keras.layers.BatchNormalization, (8, 4), {}),
    (keras.layers.LayerNormalization, (8, 4), {}),
    (keras.layers.GroupNormalization, (8, 3, 4), {"groups": 2}),
    (keras.layers.RMSNormalization, (8, 4), {}),
    (keras.layers.UnitNormalization, (8, 4), {}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("norm", "shape", "options"), NORMS, ids=lambda value: getattr(value, "__name__", ""))
def test_norms_compute_in_float32_on_low_precision_inputs(norm, shape, options, dtype):
    x = tf.cast(np.random.default_rng(1).normal(size=shape), dtype)
    layers = [norm(**options) for _ in range(2)]
    for layer in layers:
        layer.build(shape)
        layer.set_weights(
            [np.linspace(0.3, 1.7, w.size, dtype="float32").reshape(w.shape) for w in layer.get_weights()]
        )
    init(dtype=dtype).prepare(layers[1])
    expected, output = (
        layer(value, training=True) for layer, value in zip(layers, (tf.cast(x, "float32"), x), strict=True)
    )
    np.testing.assert_array_equal(tf.cast(output, dtype), tf.cast(expected, dtype))
    assert_same(layers[1].get_weights(), layers[0].get_weights())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_denied_layers_stay_in_float32(level):
    model = net()
    init(level, deny=["module:last"]).prepare(model)
    assert dtypes(model)["last"] == {"float32"}
    assert dtypes(model)["shared"] == {"bfloat16"}
    assert model(X).dtype == tf.float32


def test_allowed_norms_are_lowered():
    model = init(allow=["module:norm"]).prepare(net())
    assert (dtypes(model)["norm"], dtypes(model)["batch"]) == ({"bfloat16"}, {"float32"})


def test_layers_that_compute_no_floats_or_in_a_dtype_of_their_own_stay():
    lookup = keras.layers.IntegerLookup(vocabulary=[1, 2])
    own = keras.layers.Dense(1, dtype="float64")
    own.build((None, 4))
    init().prepare([lookup, own])
    assert lookup.compute_dtype == "int64"
    assert own.kernel.dtype == "float64"


# -- master weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["prepare", "wrap"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
def test_small_updates_add_up_in_the_masters(dtype, first, built):
    amp, model, raw = init(dtype=dtype, loss_scale=1024.0), dense(), keras.optimizers.SGD(2.0**-14)
    if built:
        raw.build(model.trainable_variables)
    opt = amp.wrap_optimizer(raw) if first == "wrap" else raw
    model, opt = amp.prepare(model, opt)
    if first == "prepare":
        opt = amp.wrap_optimizer(opt)
    for _ in range(16):
        step(opt, model, np.ones((1, 4), "float32"), fixed=True)
    # 16 steps of 2**-14: each is lost in either dtype, the sum is exact.
    assert model.get_weights()[0].ravel().tolist() == [1 - 2.0**-10] * 4
    low = model.trainable_variables[0].value
    assert low.dtype.name == dtype
    assert tf.reduce_all(low == tf.cast(1 - 2.0**-10, dtype))


WRITES = {
    "set_weights": lambda model, path: model.set_weights([np.full((4, 1), 0.3, "float32")]),
    "assign": lambda model, path: model.weights[0].assign(np.full((4, 1), 0.3, "float32")),
    "assign_add": lambda model, path: (
        model.weights[0].assign(np.zeros((4, 1))),
        model.weights[0].assign_add(np.full((4, 1), 0.3, "float32")),
    ),
    "load_weights": lambda model, path: (dense(0.3).save_weights(path), model.load_weights(path)),
}


@pytest.mark.parametrize("when", ["before the first step", "later"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_weights_written_after_prepare_count_exactly(write, when, tmp_path):
    amp, model = init(loss_scale=1024.0), dense()
    model, opt = amp.prepare(model, amp.wrap_optimizer(keras.optimizers.SGD(0.5)))
    if when == "later":
        step(opt, model, fixed=True)
    write(model, tmp_path / "w.weights.h5")
    written = np.full((4, 1), 0.3, "float32")
    np.testing.assert_array_equal(model.get_weights()[0], written)
    np.testing.assert_array_equal(model.weights[0].value.numpy(), tf.cast(written, "bfloat16").numpy())
    for _ in range(2):
        step(opt, model, np.full((1, 4), 0.25, "float32"), fixed=True)
    np.testing.assert_array_equal(model.get_weights()[0], written - np.float32(0.125) - np.float32(0.125))


def test_what_somebody_writes_to_the_value_itself_is_what_is_read():
    model = init().prepare(dense())
    model.weights[0].value.assign(tf.fill((4, 1), tf.cast(3.0, tf.bfloat16)))
    assert model.get_weights()[0].ravel().tolist() == [3.0] * 4


def by_hand(steps, make):
    """A low-precision layer with masters, written out in plain Keras."""
    plain, low = dense(0.3, 2), dense(0.3, 2)
    policy = keras.DTypePolicy("bfloat16")
    low = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, use_bias=False, dtype=policy)])
    low.set_weights(plain.get_weights())
    opt = make()
    for number in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(low(X * (1 + number)), tf.float32)))
        gradient = tape.gradient(loss, low.trainable_variables[0])
        opt.apply_gradients([(tf.cast(gradient, tf.float32), plain.trainable_variables[0])])
        low.set_weights(plain.get_weights())
    return plain.get_weights(), [variable.numpy() for variable in opt.variables]


OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "AdamW, clipped": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1, global_clipnorm=0.5),
    "average": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "accumulates": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


PLACES = [(name, where) for name in OPTIMIZERS for where in ("eager", "function")]


@pytest.mark.parametrize(("name", "where"), [*PLACES, ("Adam", "compiled")])
def test_training_equals_masters_written_by_hand(name, where):
    make = OPTIMIZERS[name]
    expected, state = by_hand(4, make)
    amp, model = init(loss_scale=128.0), dense(0.3, 2)
    model, opt = amp.prepare(model, amp.wrap_optimizer(make()))
    opt.build(model.trainable_variables)

    def train(x):
        return step(opt, model, x, tf.zeros((8, 2)))

    run = train if where == "eager" else tf.function(train, jit_compile=where == "compiled")
    for number in range(4):
        run(tf.constant(X * (1 + number)))
    weights, slots = model.get_weights(), [variable.numpy() for variable in opt.inner_optimizer.variables]
    for a, b in zip([*weights, *slots], [*expected, *state], strict=True):
        # XLA keeps bfloat16 values in float32 between operations: a gradient may differ by a rounding of bfloat16. In
        # graphs TensorFlow orders the few float32 operations of an update differently.
        tolerance = {"eager": 0.0, "function": 2.0**-20, "compiled": 2.0**-6}[where]
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    low = model.weights[0].value.numpy()
    np.testing.assert_array_equal(low, model.get_weights()[0].astype(low.dtype))


def test_an_optimizer_that_has_trained_keeps_its_state():
    model, raw = net(), keras.optimizers.Adam(0.1)
    model.compile(raw, "mse", run_eagerly=True)
    model.fit(X, Y, verbose=0)
    before = [variable.numpy() for variable in raw.variables]
    amp = init(loss_scale=64.0)
    amp.prepare(model, raw)
    assert_same([variable.numpy() for variable in raw.variables], before)
    opt = amp.wrap_optimizer(raw)
    step(opt, model)
    assert int(opt.iterations) == 2


def test_variables_that_are_excluded_from_weight_decay_stay_so():
    amp, model = init(loss_scale=1.0), dense(1.0)
    amp.prepare(model)
    raw = keras.optimizers.AdamW(0.0, weight_decay=0.5)
    raw.learning_rate = 1.0
    raw.exclude_from_weight_decay(var_list=model.trainable_variables)
    opt = amp.wrap_optimizer(raw)
    step(opt, model, np.zeros((1, 4), "float32"), fixed=True)
    assert model.get_weights()[0].ravel().tolist() == [1.0] * 4


def test_regularizers_and_constraints_hold():
    options = {"kernel_regularizer": keras.regularizers.L2(0.5), "kernel_constraint": keras.constraints.MaxNorm(0.25)}
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", **options)
    model = keras.Sequential([keras.Input((4,)), layer])
    amp = init(loss_scale=64.0)
    model, opt = amp.prepare(model, amp.wrap_optimizer(keras.optimizers.SGD(0.0)))
    model.compile(opt, "mse")
    history = model.fit(np.zeros((2, 4), "float32"), np.zeros((2, 1), "float32"), verbose=0)
    assert history.history["loss"] == [0.5 * 4]
    assert np.linalg.norm(model.get_weights()[0]) == pytest.approx(0.25)


def test_sparse_gradients_reach_the_masters():
    amp = init(loss_scale=8.0)
    model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(4, 2)])
    model, opt = amp.prepare(model, amp.wrap_optimizer(keras.optimizers.SGD(2.0**-14)))
    before = model.get_weights()[0]
    step(opt, model, np.array([[1], [1]]), fixed=True)
    expected = before.copy()
    expected[1] -= 2 * np.float32(2.0**-14)
    np.testing.assert_array_equal(model.get_weights()[0], expected)


def test_one_model_with_two_optimizers():
    amp, model = init(loss_scale=1.0), net()
    opts = amp.wrap_optimizer([keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)])
    model, opts = amp.prepare(model, opts)
    layers = [model.get_layer(name).trainable_variables for name in ("shared", "last")]
    with (
        tf.GradientTape(persistent=True) as tape,
        ampx.scale_loss(tf.reduce_sum(tf.cast(model(X), "float32")), opts) as scaled,
    ):
        pass
    gradients = [tape.gradient(scaled, variables) for variables in layers]
    before = [[np.asarray(variable) for variable in variables] for variables in layers]
    for opt, variables, grads, values, rate in zip(opts, layers, gradients, before, (0.1, 0.2), strict=True):
        opt.apply(grads, variables)
        for variable, gradient, value in zip(variables, grads, values, strict=True):
            np.testing.assert_array_equal(np.asarray(variable), value - np.float32(rate) * tf.cast(gradient, "float32"))


def test_a_layer_that_is_unfrozen_later_trains_like_any_other():
    amp, model = init(loss_scale=1.0), dense(1.0)
    layer = model.get_layer("only")
    layer.trainable = False
    amp.prepare(model)
    layer.trainable = True
    opt = amp.wrap_optimizer(keras.optimizers.SGD(2.0**-12))
    for _ in range(3):
        step(opt, model, np.ones((1, 4), "float32"), fixed=True)
    # Each slope is 1; bfloat16 has no number between 1 and 1 - 2**-8.
    assert model.get_weights()[0].ravel().tolist() == [1.0 - 3 * 2.0**-12] * 4
    assert set(layer.kernel.value.numpy().astype("float32").flat) == {1.0}


@pytest.mark.parametrize("where", ["eager", "function", "fit"])
def test_a_skipped_step_leaves_everything_bit_identical(where):
    amp, model = init(dtype="float16", nan_loss="skip"), net()
    model, opt = amp.prepare(model, amp.wrap_optimizer(keras.optimizers.Adam(0.1), loss_scale=64.0))
    step(opt, model)
    model.get_layer("batch").trainable = False  # its statistics move in a skipped step, too, as natively
    before, bad = everything(model, opt), X * np.float32("inf")
    if where == "fit":
        model.compile(opt, "mse")
        model.fit(bad, Y, verbose=0)
    else:
        run = tf.function(lambda: step(opt, model, bad)) if where == "function" else lambda: step(opt, model, bad)
        run()
    assert opt.last_step.applied is False
    assert_same(everything(model, opt), before)


def test_the_scale_is_dynamic_in_float16():
    amp, model = init(dtype="float16"), dense(1.0)
    model, opt = amp.prepare(model, amp.wrap_optimizer(keras.optimizers.SGD(0.0)))
    results = []
    for factor in (1.0, 0.25):
        step(opt, model, np.ones((1, 4), "float32"), factor=factor, fixed=True)
        results.append((opt.last_step.applied, opt.last_step.scale, opt.loss_scale))
    # The gradient is the scale itself: 2**16 is infinite in float16.
    assert results == [(False, 2.0**16, 2.0**15), (True, 2.0**15, 2.0**15)]


def test_gradients_that_float16_would_flush_after_unscaling_reach_the_masters():
    amp, model = init(dtype="float16", loss_scale=2.0**12), dense(1.0)
    model, opt = amp.prepare(model, amp.wrap_optimizer(keras.optimizers.SGD(2.0**10)))
    step(opt, model, np.ones((1, 4), "float32"), factor=2.0**-30, fixed=True)
    assert model.get_weights()[0].ravel().tolist() == [1 - 2.0**-20] * 4


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_meter_reads_nothing_lost_under_o2_and_all_under_o3(level, traced):
    amp, model = init(level), dense(1.0)
    amp.meter_every = 2
    model, opt = amp.prepare(model, amp.wrap_optimizer(keras.optimizers.SGD(2.0**-14)))
    opt.build(model.trainable_variables)

    def run(x):
        return step(opt, model, x, fixed=True)

    train = tf.function(run) if traced else run
    for _ in range(2):
        train(tf.ones((1, 4)))
    assert opt.meter.lost == (0.0 if level == "O2" else 1.0)
    assert opt.meter.parameters[0].dtype == ("float32" if level == "O2" else "bfloat16")


# -- models that are not built ---------------------------------------------------------------------


class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = (
            keras.layers.Dense(4),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(1),
        )
        self.attention = keras.layers.MultiHeadAttention(1, 2)

    def call(self, x):
        x = self.norm(self.first(x))[:, None]
        return self.last(self.attention(x, x)[:, 0])


def assert_lowered_when_built(model, dtype):
    kinds = {variable.path: variable.value.dtype.name for variable in model.trainable_variables}
    assert {path for path, kind in kinds.items() if kind != dtype} == {p for p in kinds if "layer_normalization" in p}
    for variable in model.trainable_variables:
        master = np.asarray(variable)
        assert master.dtype == np.float32
        np.testing.assert_array_equal(variable.value.numpy(), master.astype(variable.value.dtype.as_numpy_dtype))


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        *(("loop", dtype) for dtype in DTYPES),
        *((how, "bfloat16") for how in ("fit", "function")),
        *(pytest.param(how, "float16", marks=pytest.mark.nightly) for how in ("fit", "function")),
    ],
)
def test_models_that_are_not_built_are_lowered_when_they_are(how, dtype):
    keras.utils.set_random_seed(5)
    plain = Model()
    plain(X)
    keras.utils.set_random_seed(5)
    amp, model = init(dtype=dtype, loss_scale=8.0), Model()
    model, opt = amp.prepare(model, amp.wrap_optimizer(keras.optimizers.SGD(0.0)))
    if how == "function":
        tf.function(lambda: step(opt, model))()
    elif how == "fit":
        model.compile(opt, "mse")
        model.fit(X, Y, verbose=0)
    else:
        step(opt, model)
    assert_lowered_when_built(model, dtype)
    assert sum(isinstance(layer, keras.layers.Layer) for layer in model._flatten_layers()) > 5
    # Drawn in float32, as those of a float32 model are.
    assert_same(model.get_weights(), plain.get_weights())
    model.set_weights([weight + 1 for weight in plain.get_weights()])
    assert_lowered_when_built(model, dtype)


def test_functions_that_were_traced_before_are_traced_anew():
    amp, model = init(loss_scale=1.0), dense(1.0)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(2.0**-14))
    seen = []

    @tf.function
    def train():
        seen.append(model.weights[0].value.dtype.name)
        step(opt, model, np.ones((1, 4), "float32"), fixed=True)

    with pytest.raises(ampx.ProtocolError, match="prepare"):
        train()
    amp.prepare(model, opt)
    train()
    assert seen == ["float32", "bfloat16"]
    assert model.get_weights()[0].ravel().tolist() == [1 - 2.0**-14] * 4


# -- saving ----------------------------------------------------------------------------------------


def trained(amp, **options):
    model = net(**options)
    model, opt = amp.prepare(model, amp.wrap_optimizer(keras.optimizers.Adam(0.01)))
    model.compile(opt, "mse", run_eagerly=True)
    model.fit(X, Y, batch_size=4, verbose=0, shuffle=False)
    return model, opt


def through_file(model, plain, path):
    model.save_weights(path / "w.weights.h5")
    plain.load_weights(path / "w.weights.h5", skip_mismatch=True)


def through_checkpoint(model, plain, path):
    tf.train.Checkpoint(plain).restore(tf.train.Checkpoint(model).save(str(path / "c"))).expect_partial()


SAVED = {
    "get_weights": lambda model, plain, path: plain.set_weights(model.get_weights()),
    "save_weights": through_file,
    "checkpoint": through_checkpoint,
}


@pytest.mark.filterwarnings("ignore:Skipping variable loading:UserWarning")
@pytest.mark.parametrize("way", SAVED.values(), ids=SAVED)
def test_saved_weights_are_the_masters_and_load_in_a_plain_float32_model(way, tmp_path):
    model, _ = trained(init(loss_scale=64.0))
    ampx.shutdown()
    plain = net()
    way(model, plain, tmp_path)
    assert {variable.value.dtype.name for variable in plain.weights} == {"float32"}
    for variable, other in zip(model.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_array_equal(np.asarray(variable), other.numpy())
    kernel = plain.get_layer("shared").kernel.numpy()
    assert not np.array_equal(kernel, tf.cast(tf.cast(kernel, "bfloat16"), "float32").numpy())


def test_a_saved_model_loads_without_ampx(tmp_path):
    model, _ = trained(init(loss_scale=64.0))
    outputs = model(X)
    ampx.shutdown()
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras", compile=False)
    assert {type(variable) for variable in loaded.weights} == {keras.Variable}
    np.testing.assert_array_equal(loaded(X), outputs)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_an_exported_model_computes_in_low_precision_and_checkpoints_after_it_are_float32(level, tmp_path):
    model = init(level).prepare(dense(0.3))
    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_array_equal(loaded.serve(X), model(X))
    plain = dense()
    through_checkpoint(model, plain, tmp_path)
    np.testing.assert_array_equal(plain.get_weights()[0], model.get_weights()[0])


def resume_from_model(amp, model, opt, path):
    model.save(path / "m.keras")
    loaded = keras.models.load_model(path / "m.keras")
    return amp.prepare(loaded, loaded.optimizer)


def fresh(amp):
    model, opt = amp.prepare(net(), amp.wrap_optimizer(keras.optimizers.Adam(0.01)))
    opt.build(model.trainable_variables)
    model.compile(opt, "mse", run_eagerly=True)
    return model, opt


def resume_from_checkpoint(amp, model, opt, path):
    saved = tf.train.Checkpoint(model=model, opt=opt).save(str(path / "c"))
    other, other_opt = fresh(amp)
    tf.train.Checkpoint(model=other, opt=other_opt).restore(saved).assert_existing_objects_matched()
    return other, other_opt


def resume_from_weights(amp, model, opt, path):
    model.save_weights(path / "w.weights.h5")
    other, other_opt = fresh(amp)
    other.load_weights(path / "w.weights.h5")
    return other, other_opt


@pytest.mark.parametrize("way", [resume_from_model, resume_from_checkpoint, resume_from_weights])
def test_resuming_continues_bit_identically(way, tmp_path):
    amp = init(loss_scale=ampx.LossScale(init_scale=64.0, growth_interval=3))
    model, opt = trained(amp)
    other, other_opt = way(amp, model, opt, tmp_path)
    assert_same(everything(other, other_opt), everything(model, opt))
    for network in (model, other):
        network.fit(X, Y, batch_size=4, epochs=2, verbose=0, shuffle=False)
    assert_same(everything(other, other_opt), everything(model, opt))
    assert other_opt.loss_scale == opt.loss_scale


# -- calls -----------------------------------------------------------------------------------------


def test_an_optimizer_that_was_built_on_low_precision_is_refused():
    amp, model, raw = init(), net(), keras.optimizers.Adam(0.1)
    amp.prepare(model)
    raw.build(model.trainable_variables)
    with pytest.raises(ampx.LowPrecisionParametersError, match="before prepare"):
        amp.wrap_optimizer(raw)


@pytest.mark.parametrize(("level", "dtype"), [("O2", "float16"), ("O3", "bfloat16")])
def test_preparing_again_for_something_else_is_refused(level, dtype):
    model = init().prepare(dense())
    with pytest.raises(ampx.ProtocolError, match="prepared before"):
        init(level, dtype=dtype).prepare(model)
    opt = init("O1").wrap_optimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ampx.LowPrecisionParametersError, match="masters"):
        step(opt, model)


def test_preparing_while_gradients_of_a_function_are_pending_is_refused():
    amp, model = init(loss_scale=2.0), net()
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1))

    @tf.function
    def scale():
        with tf.GradientTape(), ampx.scale_loss(tf.reduce_sum(model(X)), opt):
            pass

    scale()
    with pytest.raises(ampx.ProtocolError, match="pending"):
        amp.prepare(model, opt)
    assert model.get_layer("last").kernel.value.dtype == tf.float32


REFUSED = {
    "a function": (tf.function(tf.identity), ampx.InvalidOptionError, "Keras"),
    "a map of policies": (
        keras.layers.Dense(1, dtype=keras.dtype_policies.DTypePolicyMap()),
        ampx.UnsupportedByBackendError,
        "DTypePolicyMap",
    ),
}


@pytest.mark.parametrize(("model", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_become_low_precision_is_refused(model, error, text):
    with pytest.raises(error, match=text):
        init().prepare(model)


def test_optimizers_of_old_are_refused():
    amp, model = init(), net()
    with pytest.raises(ampx.UnsupportedByBackendError, match="Keras 3"):
        amp.prepare(model, tf.compat.v1.train.GradientDescentOptimizer(0.1))
    with pytest.raises(ampx.UnsupportedByBackendError, match="Keras 3"):
        amp.wrap_optimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))


def test_tf_keras_is_refused():
    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed")
    amp = init()
    with pytest.raises(ampx.UnsupportedByBackendError, match="tf_keras"):
        amp.prepare(tf_keras.Sequential([tf_keras.layers.Dense(1)]))
    with pytest.raises(ampx.UnsupportedByBackendError, match="Keras 3"):
        amp.wrap_optimizer(tf_keras.optimizers.SGD(0.1))


def test_regions_leave_layers_alone_where_variables_are_low_precision():
    amp = init()
    model = amp.prepare(net())
    for region in (amp.autocast(), amp.autocast(enabled=False)):
        with region:
            assert model(X).dtype == tf.bfloat16
            assert keras.layers.Dense(1)(X).dtype == tf.float32


def test_state_of_an_o3_optimizer_follows_the_variables():
    amp, model, raw = init("O3"), net(), keras.optimizers.Adam(0.1)
    model.compile(raw, "mse", run_eagerly=True)
    model.fit(X, Y, verbose=0)
    amp.prepare(model, raw)
    opt = amp.wrap_optimizer(raw)
    assert {variable.value.dtype.name for variable in raw.variables} == {"int64", "float32", "bfloat16"}
    assert raw.learning_rate.dtype == "float32"
    step(opt, model)
    assert opt.last_step.applied
