"""Modules with state of their own, of flax nnx and equinox, keep it through `ampx_jax.autocast`."""

import json
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx
import ampx_jax

X = jnp.asarray(np.linspace(-1, 2, 24, dtype=np.float32).reshape(8, 3))


@pytest.fixture(autouse=True)
def end():
    yield
    ampx.shutdown()


def start(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)
        return ampx.init("jax", **{"dtype": "bfloat16", "device": "cpu", **options})


# -- flax nnx -------------------------------------------------------------------------------------------------


@pytest.fixture
def nnx():
    return pytest.importorskip("flax.nnx")


def make_module(nnx):
    class Module(nnx.Module):
        """Its statistics and masks are made before anything computes in low precision."""

        def __init__(self, rngs):
            self.norm, self.dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
            self.linear = nnx.Linear(3, 2, rngs=rngs)
            self.calls = 0

        def __call__(self, x):
            self.calls += 1
            return self.linear(self.dropout(self.norm(x)))

        @ampx_jax.autocast
        def decorated(self, x):
            return self(x)

    return Module(nnx.Rngs(0))


def total(module, x):
    return jnp.sum(module(x))


def split_and_merged(nnx, transform):
    """A pure function of the module's state, as users of `jax.jit` write it."""

    def pure(graph, state, x):
        module = nnx.merge(graph, state)
        return module(x), nnx.state(module)

    def call(module, x):
        result, state = jax.jit(transform(pure))(*nnx.split(module), x)
        nnx.update(module, state)
        return result

    return call


WAYS = {
    "argument": lambda nnx, t: t(lambda module, x: module(x)),
    "named argument": lambda nnx, t: lambda module, x: t(lambda x, *, tree: tree["m"](x))(x, tree={"m": module}),
    "the module itself": lambda nnx, t: lambda module, x: t(module)(x),
    "method": lambda nnx, t: lambda module, x: t(module.__call__)(x),
    "decorated method": lambda nnx, t: lambda module, x: module.decorated(x),
    "jit around": lambda nnx, t: nnx.jit(t(lambda module, x: module(x))),
    "jit inside": lambda nnx, t: t(nnx.jit(lambda module, x: module(x))),
    "jit of trees around": lambda nnx, t: nnx.jit(t(lambda module, x: module(x)), graph=False),
    "gradient around": lambda nnx, t: lambda module, x: nnx.grad(t(total))(module, x)["linear"]["kernel"][...],
    "gradient inside": lambda nnx, t: lambda module, x: t(nnx.grad(total))(module, x)["linear"]["kernel"][...],
    "value and gradient": lambda nnx, t: nnx.jit(lambda module, x: nnx.value_and_grad(t(total))(module, x)[0]),
    "rematerialised": lambda nnx, t: t(nnx.remat(lambda module, x: module(x))),
    "twice, by two names": lambda nnx, t: lambda module, x: t(lambda a, b, x: a(x) + b(x))(module, module, x),
    "functional": split_and_merged,
}


@pytest.mark.parametrize("way", WAYS)
def test_statistics_and_random_streams_are_those_without_autocast(nnx, way):
    plain, module = make_module(nnx), make_module(nnx)
    exact = WAYS[way](nnx, lambda function: function)(plain, X)
    start()
    result = WAYS[way](nnx, ampx_jax.autocast)(module, X)
    np.testing.assert_allclose(module.norm.mean[...], plain.norm.mean[...], rtol=1e-6)
    np.testing.assert_allclose(module.norm.var[...], plain.norm.var[...], rtol=1e-6)
    assert np.asarray(plain.norm.mean[...]).any()
    assert module.dropout.rngs.count[...] == plain.dropout.rngs.count[...] > 0
    assert module.calls == plain.calls
    # With another mask the products would differ by more than their 8 bits; two of 3 or 8 terms below 2 are added.
    np.testing.assert_allclose(result, exact, rtol=0, atol=2 * 8 * 2 * 2.0**-8)
    assert not np.array_equal(result, exact), "float32 gives the same: nothing was cast"


def test_dropout_draws_a_new_mask_in_each_call(nnx):
    start()
    plain, module = make_module(nnx), make_module(nnx)
    call = nnx.jit(ampx_jax.autocast(lambda module, x: module.dropout(x) == 0))
    masks = [call(module, X) for _ in range(3)]
    assert all(np.array_equal(mask, plain.dropout(X) == 0) for mask in masks)
    assert not np.array_equal(masks[0], masks[1])


def test_results_are_the_objects_that_were_passed_and_new_variables_stay(nnx):
    start()
    module, rngs = make_module(nnx), nnx.Rngs(3)

    def function(module, rngs, x):
        module.seen = nnx.Intermediate(x)
        return module, module.linear, jax.random.normal(rngs.noise(), (2,)), "text", nnx.Param(x)

    same, linear, noise, text, drawn = ampx_jax.autocast(function)(module, rngs, X)
    assert same is module
    assert linear is module.linear
    assert np.array_equal(noise, jax.random.normal(nnx.Rngs(3).noise(), (2,)))
    assert rngs.noise.count[...] == 1
    assert text == "text"
    assert np.array_equal(drawn[...], X)
    assert np.array_equal(module.seen[...], X)


def test_an_object_that_is_no_argument_may_be_read_and_not_changed(nnx):
    start()
    module = make_module(nnx)
    read = ampx_jax.autocast(lambda x: module.linear(x))(X)
    assert np.array_equal(read, ampx_jax.autocast(lambda module, x: module.linear(x))(module, X))
    with pytest.raises(ampx.ProtocolError, match="Pass the module"):
        ampx_jax.autocast(lambda x: module.norm(x))(X)
    assert not np.asarray(module.norm.mean[...]).any()
    ampx_jax.autocast(module)(X)
    assert np.asarray(module.norm.mean[...]).any()


def test_nothing_of_flax_is_needed(monkeypatch):
    monkeypatch.delitem(sys.modules, "flax.nnx", raising=False)
    start()
    assert ampx_jax.autocast(lambda x: x @ x.T)(X).shape == (8, 8)


def train_step(nnx):
    @nnx.jit
    def step(module, optimizer, x, factor):
        def scaled_loss(module):
            outputs = ampx_jax.autocast(lambda module, x: module(x))(module, x)
            loss = jnp.mean((outputs - 1.0) ** 2) * factor
            with ampx.scale_loss(loss, optimizer) as scaled:
                return scaled, loss

        gradients, loss = nnx.grad(scaled_loss, has_aux=True)(module)
        optimizer.update(module, gradients)
        return loss, ampx.last_step(optimizer)

    return step


def test_an_optimizer_object_carries_the_loss_scale(nnx):
    amp = start(dtype="float16", loss_scale=ampx.LossScale(init_scale=2.0**10, growth_interval=3))
    module = make_module(nnx)
    optimizer = nnx.Optimizer(module, ampx.wrap_optimizer(optax.sgd(0.1)), wrt=nnx.Param)
    step = train_step(nnx)
    assert ampx.loss_scale(optimizer) == ampx.loss_scale(optimizer.opt_state) == 2.0**10
    seen, kernels = [], []
    for factor in (1.0, np.inf, 1.0, 1.0, 1.0):
        seen.append(step(module, optimizer, X, factor)[1])
        kernels.append(np.asarray(module.linear.kernel[...]))
    assert [bool(result.applied) for result in seen] == [True, False, True, True, True]
    assert [float(result.next_scale) for result in seen] == [2.0**10, 2.0**9, 2.0**9, 2.0**9, 2.0**10]
    assert np.array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[1], kernels[2])
    assert ampx.observe(optimizer) == ampx.last_step(optimizer.opt_state)
    saved = json.loads(json.dumps(amp.state_dict(optimizer)))
    saved["groups"][0]["losses"][0]["scale"] = 64.0
    loaded = amp.load_state_dict(saved, optimizer)
    assert (ampx.loss_scale(loaded), ampx.loss_scale(optimizer)) == (64.0, 2.0**10)
    assert step(module, loaded, X, 1.0)[1].scale == 64.0


def make_classifier(nnx):
    class Classifier(nnx.Module):
        def __init__(self, rngs):
            self.first, self.last = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)
            self.norm, self.dropout = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

        def __call__(self, x):
            return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))

    return Classifier(nnx.Rngs(0))


def train_on_digits(nnx, images, labels):
    model = make_classifier(nnx)
    optimizer = nnx.Optimizer(model, ampx.wrap_optimizer(optax.sgd(0.3, momentum=0.9)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, rows, targets):
        def scaled_loss(model):
            logits = ampx_jax.autocast(lambda model, rows: model(rows))(model, rows)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
            with ampx.scale_loss(loss, optimizer) as scaled:
                return scaled, loss

        gradients, loss = nnx.grad(scaled_loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        return loss

    losses = [step(model, optimizer, *batch) for _ in range(6) for batch in zip(images, labels, strict=True)]
    assert ampx.last_step(optimizer).applied
    model.eval()  # running statistics in place of those of the batch
    return model, np.asarray(jax.device_get(losses))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_digits_with_nnx_is_as_good_as_in_float32(nnx, dtype):
    """453 images: the standard error of a share of 0.96 is 0.01, that of a difference of two 0.013; twice that.

    The masks are the same in all runs. The losses of the last epoch are means of 1344 cross entropies; one of these
    errs by no more than the products' rounding, 2**-8 of logits of about 10.
    """
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(labels[order])
    shares, ends = {}, {}
    for name, options in (("float32", {"enabled": False}), (dtype, {"dtype": dtype})):
        start(**options)
        model, losses = train_on_digits(nnx, images[:1344].reshape(21, 64, 64), labels[:1344].reshape(21, 64))
        ampx.shutdown()
        shares[name] = float(jnp.mean(model(images[1344:]).argmax(1) == labels[1344:]))
        ends[name] = losses[-21:].mean()
    assert shares["float32"] > 0.95
    assert abs(shares[dtype] - shares["float32"]) < 0.026
    assert ends[dtype] != ends["float32"]
    assert abs(ends[dtype] - ends["float32"]) < 10 * 2.0**-8


# -- equinox --------------------------------------------------------------------------------------------------


def make_equinox(equinox):
    class Network(equinox.Module):
        norm: equinox.nn.BatchNorm
        dropout: equinox.nn.Dropout
        linear: equinox.nn.Linear
        name: str = equinox.field(static=True)

        def __init__(self, key):
            self.norm, self.dropout = equinox.nn.BatchNorm(3, "batch", mode="batch"), equinox.nn.Dropout(0.5)
            self.linear, self.name = equinox.nn.Linear(3, 2, key=key), "network"

        def __call__(self, x, state, key):
            x, state = self.norm(x, state)
            return self.linear(self.dropout(x, key=key)), state

    return equinox.nn.make_with_state(Network)(jax.random.key(0))


def forward(model, state, x, key):
    keys = jax.random.split(key, len(x))
    return jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))(x, state, keys)


@pytest.mark.parametrize("way", ["alone", "jit around", "jit inside"])
def test_equinox_modules_keep_their_state(way):
    equinox = pytest.importorskip("equinox")
    model, state = make_equinox(equinox)
    exact, expected = forward(model, state, X, jax.random.key(1))
    model, state = make_equinox(equinox)
    start()
    cast = {
        "alone": lambda: ampx_jax.autocast(forward),
        "jit around": lambda: equinox.filter_jit(ampx_jax.autocast(forward)),
        "jit inside": lambda: ampx_jax.autocast(equinox.filter_jit(forward)),
    }[way]()
    result, state = cast(model, state, X, jax.random.key(1))
    for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-6)
    np.testing.assert_allclose(result, exact, rtol=0, atol=2 * 3 * 2 * 2.0**-8)
    assert not np.array_equal(result, exact), "float32 gives the same: nothing was cast"


def test_equinox_modules_train_with_has_aux():
    equinox = pytest.importorskip("equinox")
    start(dtype="float16", loss_scale=2.0**10)
    model, state = make_equinox(equinox)
    tx = ampx.wrap_optimizer(optax.sgd(0.1))
    opt_state = tx.init(equinox.filter(model, equinox.is_inexact_array))

    @equinox.filter_jit
    def step(model, state, opt_state, factor, key):
        @equinox.filter_value_and_grad(has_aux=True)
        def scaled_loss(model):
            outputs, after = ampx_jax.autocast(forward)(model, state, X, key)
            loss = jnp.mean((outputs - 1.0) ** 2) * factor
            with ampx.scale_loss(loss, opt_state) as scaled:
                return scaled, (loss, after)

        (_, (loss, after)), gradients = scaled_loss(model)
        updates, opt_state = tx.update(gradients, opt_state)
        return equinox.apply_updates(model, updates), after, opt_state, loss

    before, losses = model.linear.weight, []
    for number, factor in enumerate((np.inf, *(1.0,) * 20)):
        model, state, opt_state, loss = step(model, state, opt_state, factor, jax.random.key(number))
        losses.append(float(loss))
        if number == 0:
            assert np.array_equal(model.linear.weight, before)
            assert not ampx.last_step(opt_state).applied
    assert ampx.last_step(opt_state).applied
    assert np.mean(losses[-5:]) < np.mean(losses[1:6])
    assert int(jax.tree.leaves(state)[0]) == 21
