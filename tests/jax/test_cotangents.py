"""`ampx run` with a loss scale: what the script's own code reads of cotangents is what it reads in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.custom_derivatives import linear_call
from jax.extend import core
from jax.interpreters import ad, mlir

import ampx_jax
from ampx.backend import offer
from ampx.run import Automation, Run, RunSettings

pytestmark = pytest.mark.usefixtures("nothing_of_its_own", "quiet_end")

X = jnp.asarray(np.linspace(-1.0, 1.0, 8, dtype=np.float32))
LIMIT = 1e-3  # cotangents here are about 0.1, and 10,000 where they carry the scale


def clamp(g):
    return jnp.clip(g, -LIMIT, LIMIT)


def _vjp(rule):
    function = jax.custom_vjp(lambda x: x * 1.0)
    function.defvjp(lambda x: (x * 1.0, None), lambda _, g: (rule(g),))
    return function


def _gradient(rule):
    @jax.custom_gradient
    def function(x):
        return x * 1.0, rule

    return function


def _through_a_library(rule):
    """Return a function whose rule is a library's, as far as the code tells, and calls the script's."""
    equinox = pytest.importorskip("equinox", reason="equinox is not installed")

    @equinox.filter_custom_vjp
    def function(x):
        return x * 1.0

    function.def_fwd(lambda perturbed, x: (x * 1.0, None))
    function.def_bwd(lambda residuals, g, perturbed, x: rule(g))
    return function


def _transpose(rule):
    return lambda x: linear_call(lambda _, x: x * 1.0, lambda _, g: rule(g), (), x)


def _jvp(rule):
    """Return a function with a rule for tangents, which has to be linear: there is nothing to compare or to clip."""
    function = jax.custom_jvp(lambda x: x * 1.0)
    function.defjvp(lambda primals, tangents: (function(*primals), LIMIT * tangents[0]))
    return function


def _callback(rule):
    function = jax.custom_vjp(lambda x: x * 1.0)

    def backward(_, g):
        return (jax.pure_callback(lambda g: np.clip(g, -LIMIT, LIMIT), jax.ShapeDtypeStruct(g.shape, g.dtype), g),)

    function.defvjp(lambda x: (x * 1.0, None), backward)
    return function


RULES = {
    "custom_vjp": _vjp,
    "custom_gradient": _gradient,
    "a library's custom_vjp": _through_a_library,
    "linear_call": _transpose,
    "custom_jvp": _jvp,
    "a callback in a rule": _callback,
}


def _scan(function):
    return lambda x: jax.lax.scan(lambda carry, _: (function(carry), None), x, None, length=3)[0]


def _cond(function):
    return lambda x: jax.lax.cond(x[0] < 0, function, lambda x: x, x)


def _shard_map(function):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)


def _inner_loss(function):
    """Return what differentiates the function itself: the cotangents inside do not carry the scale."""
    return lambda x: x + jax.grad(lambda y: function(y * y).sum())(x)


PLACES = {
    "alone": lambda function: function,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": _scan,
    "cond": _cond,
    "vmap": lambda function: lambda x: jax.vmap(function)(x.reshape(4, 2)).reshape(-1),
    "shard_map": _shard_map,
    "an inner gradient": _inner_loss,
}


def train(function, compiled):
    """Train as a script does; every operation is one that computes in the dtype of what arrives, so in float32."""
    tx = optax.sgd(0.5)
    weights, state = X, tx.init(X)

    def step(weights, state, factor):
        gradients = jax.grad(lambda w: jnp.sum(jnp.sin(function(w * factor))) * 0.125)(weights)
        updates, state = tx.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    step = jax.jit(step) if compiled else step
    for factor in (1.0, 2.0, 4.0):
        weights, state = step(weights, state, factor)
    return np.asarray(weights)


def under_run(function, compiled=True, dtype="float16"):
    run = Run("jax", RunSettings(dtype=dtype, device="cpu"))
    with offer(ampx_jax.load(), Automation).automate(run):
        weights = train(function, compiled)
    (record,) = run.recorder.optimizers.values()
    assert record.initial_scale == (65536.0 if dtype == "float16" else 1.0)
    assert (record.steps, record.skipped) == (3, [])
    return weights, run.recorder.scaled


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_clips_cotangents_clips_what_it_clips_in_plain_jax(name, compiled):
    function = RULES[name](clamp)
    weights, scaled = under_run(function, compiled)
    np.testing.assert_allclose(weights, train(function, compiled), rtol=0, atol=2.0**-23)
    assert scaled == []


@pytest.mark.parametrize("place", PLACES)
def test_a_rule_clips_what_it_clips_in_plain_jax_wherever_it_is_called(place):
    function = PLACES[place](_vjp(clamp))
    weights, scaled = under_run(function)
    np.testing.assert_allclose(weights, train(function, True), rtol=0, atol=2.0**-22)
    assert scaled == []


def test_the_clipping_of_these_tests_is_one_that_a_loss_scale_would_change():
    """Cotangents that carry the scale are all beyond the limit, and the gradient is the limit by the scale: nothing."""
    clipped = train(_vjp(clamp), True)
    as_if_scaled = train(_vjp(lambda g: clamp(g * 65536.0) / 65536.0), True)
    assert np.abs(clipped - as_if_scaled).max() > 100 * 2.0**-22


def test_a_rule_whose_cotangents_carry_the_scale_is_named_in_the_headline():
    """A primitive that JAX does not have: what it holds is cast, but the scale is not known there."""
    primitive = core.Primitive("eval_anything")
    primitive.multiple_results = True
    evaluate = core.jaxpr_as_fun
    primitive.def_abstract_eval(lambda *avals, code: code.out_avals)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda *xs, code: evaluate(code)(*xs), multiple_results=True))
    ad.primitive_jvps[primitive] = lambda xs, ts, code: jax.jvp(evaluate(code), xs, ts)
    code = jax.make_jaxpr(_vjp(clamp))(X)
    _, scaled = under_run(lambda x: primitive.bind(x, code=code)[0])
    (what,) = scaled
    assert what.startswith(f"the derivative rule of a function ({__file__}:")


def test_rules_of_libraries_are_left_alone():
    """A rule of JAX's own, which is linear: it gets cotangents that carry the scale, and no operation is added."""
    seen = ampx_jax.equations.own_rules(jax.make_jaxpr(jax.nn.relu)(X).jaxpr)
    assert seen == []
    losses = jax.make_jaxpr(lambda x: optax.losses.sigmoid_focal_loss(x, x))(X)
    assert ampx_jax.equations.own_rules(losses.jaxpr) == []
    assert ampx_jax.equations.own_rules(jax.make_jaxpr(_vjp(clamp))(X).jaxpr) != []
