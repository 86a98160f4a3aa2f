"""Primitives that hold functions: each is cast inside, or refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.interpreters import mlir

import ampx
import ampx_jax

X = jnp.linspace(0.1, 1.0, 12, dtype=jnp.float32).reshape(3, 4)
W = jnp.linspace(-1.0, 1.0, 16, dtype=jnp.float32).reshape(4, 4)


def product(x):
    return x @ W


@pytest.fixture(autouse=True)
def session():
    ampx.init("jax", dtype="bfloat16", device="cpu", on_unsupported="warn")
    yield
    ampx.shutdown()


def rounded(x):
    """Return the product of factors that NumPy's library of dtypes rounds."""
    factors = [np.asarray(array).astype(jnp.bfloat16).astype(np.float64) for array in (x, W)]
    return (factors[0] @ factors[1]).astype(jnp.bfloat16).astype(np.float32)


def holding(name, evaluate, **others):
    """Return a function that calls `product` in a primitive that JAX does not have."""
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals, the_code, **_: the_code.out_avals)
    primitive.def_impl(lambda *values, the_code, **_: evaluate(the_code)(*values))
    mlir.register_lowering(
        primitive, mlir.lower_fun(lambda *values, the_code, **_: evaluate(the_code)(*values), multiple_results=True)
    )
    code = jax.make_jaxpr(product)(X)
    return lambda x: primitive.bind(x, the_code=code, **others)[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_primitive_that_jax_does_not_have_is_cast_inside_where_it_holds_nothing_but_a_jaxpr(compiled):
    function = ampx_jax.autocast(holding("eval_anything", core.jaxpr_as_fun, factor=3, word="a"))
    result = (jax.jit(function) if compiled else function)(X)
    np.testing.assert_array_equal(np.asarray(result), rounded(X))
    assert np.abs(np.asarray(result) - np.asarray(X @ W)).max() > 0


def test_a_primitive_that_holds_a_rule_beside_its_jaxpr_is_refused_by_name():
    function = holding("custom_anything", core.jaxpr_as_fun, rule=lambda x: x)
    with pytest.raises(ampx.UnsupportedByBackendError, match=r"'custom_anything'.*report"):
        ampx_jax.autocast(function)(X)
    with ampx.autocast(enabled=False):  # what the message advises
        np.testing.assert_array_equal(np.asarray(ampx_jax.autocast(function)(X)), np.asarray(function(X)))


def test_a_primitive_that_hides_its_jaxpr_in_an_object_is_refused_by_name():
    class Hidden:
        def __init__(self):
            self.params = {"deep": [jax.make_jaxpr(product)(X)]}

        def expand(self):
            """Make this look like a primitive of JAX that is an object."""

    function = holding("call_something", core.jaxpr_as_fun, prim=Hidden())
    with pytest.raises(ampx.UnsupportedByBackendError, match=r"'Hidden'.*report"):
        ampx_jax.autocast(function)(X)


@jax.custom_batching.custom_vmap
def with_own_batching(x):
    return product(x)


with_own_batching.def_vmap(lambda size, batched, x: (2.0 * product(x), batched[0]))


def with_own_transpose(x):
    return jax.custom_derivatives.linear_call(lambda _, x: product(x), lambda _, g: 2.0 * (g @ W.T), (), x)


@pytest.mark.parametrize("function", [with_own_batching, with_own_transpose])
def test_what_holds_a_function_and_a_rule_is_cast_in_the_function(function):
    np.testing.assert_array_equal(np.asarray(ampx_jax.autocast(function)(X)), rounded(X))


def test_a_rule_for_batches_is_kept_and_cast():
    result = jax.vmap(ampx_jax.autocast(with_own_batching))(X[None])[0]
    np.testing.assert_array_equal(np.asarray(result), 2.0 * rounded(X))


def test_a_transpose_of_the_scripts_own_is_kept_and_cast():
    gradient = jax.grad(lambda x: ampx_jax.autocast(with_own_transpose)(x).sum())(X)
    plain = jax.grad(lambda x: with_own_transpose(x).sum())(X)
    assert 0 < np.abs(np.asarray(gradient - plain)).max() < 0.02 * np.abs(plain).max()


def test_a_linear_solve_computes_as_it_does_without_casting():
    def solve(x):
        return jnp.linalg.solve(W + 3.0 * jnp.eye(4), x[0])

    np.testing.assert_array_equal(np.asarray(jax.jit(ampx_jax.autocast(solve))(X)), np.asarray(jax.jit(solve)(X)))


def test_a_root_is_found_to_its_tolerance():
    def root(x):
        def solve(f, guess):
            return jax.lax.while_loop(lambda y: jnp.abs(f(y)) > 1e-6, lambda y: y - f(y) / (2 * y), guess)

        return jax.lax.custom_root(lambda y: y * y - x, x, solve, lambda g, y: y / g(1.0))

    value, slope = jax.value_and_grad(ampx_jax.autocast(root))(jnp.float32(2.0))
    np.testing.assert_allclose([float(value), float(slope)], [2**0.5, 0.5 / 2**0.5], rtol=1e-5)


def test_a_loop_has_the_parts_that_its_body_was_written_with():
    weights = jnp.stack([W, 2 * W])

    def loop(x):
        return jax.lax.scan(lambda carry, row: (carry @ row, (carry @ W).sum()), x, weights, reverse=True)

    assert ampx_jax.equations.scan_parts(jax.make_jaxpr(loop)(X).eqns[-1]) == (1, 1)
    cast, plain = ampx_jax.autocast(loop)(X), loop(X)
    for low, other in zip(cast, plain, strict=True):
        assert low.shape == other.shape
        assert 0 < np.abs(np.asarray(low - other)).max() < 0.02 * np.abs(np.asarray(other)).max()
