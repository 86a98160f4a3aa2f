"""`ampx_jax.autocast` casts by the lists and composes with JAX's own transforms."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ampx
import ampx_jax

A = jnp.asarray(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
B = jnp.asarray(np.linspace(0.1, 0.9, 12, dtype=np.float32).reshape(3, 4))


def start(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)
        return ampx.init("jax", **{"dtype": "bfloat16", "device": "cpu", **options})


@pytest.fixture(autouse=True)
def end():
    yield
    ampx.shutdown()


def low_product(a, b, dtype="bfloat16"):
    """The oracle: both inputs rounded, multiplied exactly, the result rounded."""
    exact = np.asarray(a.astype(dtype), np.float64) @ np.asarray(b.astype(dtype), np.float64)
    return jnp.asarray(exact).astype(dtype).astype(jnp.float32)


def dtypes_of(function, *args):
    """Each primitive with the dtypes that it computes, products with those that they multiply, nested ones too."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            shown = equation.invars if name == "dot_general" else equation.outvars
            if name == "ampx_product":  # dot_general in bfloat16 for a CPU, which compiles it in a way of its own
                yield "dot_general", str(equation.params["dtype"])
            else:
                yield name, str(shown[0].aval.dtype)
            for value in equation.params.values():
                for inner in value if isinstance(value, tuple) else (value,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        yield from walk(inner)

    return set(walk(jax.make_jaxpr(function)(*args).jaxpr))


def products_in(function, *args):
    text = jax.jit(function).lower(*args).as_text()
    return re.findall(r"dot_general .*: \((.*)\) -> (.*)", text)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_compute_in_low_precision_and_results_keep_their_dtype(dtype):
    start(dtype=dtype)
    product = ampx_jax.autocast(jnp.matmul)(A, B)
    assert product.dtype == jnp.float32
    np.testing.assert_allclose(product, low_product(A, B, dtype), rtol=2**-7, atol=1e-3)
    assert not np.array_equal(product, A @ B)
    assert ("dot_general", dtype) in dtypes_of(ampx_jax.autocast(jnp.matmul), A, B)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_float32_factors_are_products_of_low_factors_with_float32_sums(dtype):
    """The oracle: both factors rounded, multiplied exactly; float32 sums of four terms err by a few units of 2**-24."""
    start(dtype=dtype)
    upstream = (A @ B) ** 2

    def loss(a, b):
        return jnp.sum(ampx_jax.autocast(jnp.matmul)(a, b) * upstream)

    def exact(a, b):
        return np.asarray(a.astype(dtype), np.float64) @ np.asarray(b.astype(dtype), np.float64)

    for_a, for_b = jax.grad(loss, (0, 1))(A, B)
    assert for_a.dtype == for_b.dtype == jnp.float32
    np.testing.assert_allclose(for_a, exact(upstream, B.T), rtol=0, atol=8 * 2.0**-24 * 4)
    np.testing.assert_allclose(for_b, exact(A.T, upstream), rtol=0, atol=8 * 2.0**-24 * 4)
    assert not np.array_equal(for_a, for_a.astype(dtype).astype(jnp.float32)), "rounded to the session's dtype"


def test_gradients_of_what_arrives_in_low_precision_stay_in_it():
    start(dtype="float16")
    model = ampx_jax.autocast(lambda a, b: (a @ b) @ A)
    products = products_in(jax.value_and_grad(lambda a, b: jnp.sum(model(a, b)), (0, 1)), A, B)
    types = [(factors.count("f16"), sums.rpartition("x")[2]) for factors, sums in products]
    # One of the three derivatives, for what arrives at the second product, is low as that; those of a and b are not.
    assert sorted(types) == [(2, "f16>"), (2, "f16>"), (2, "f16>"), (2, "f32>"), (2, "f32>")]


def test_bfloat16_products_on_a_cpu_have_bfloat16_factors_where_its_compiler_multiplies_these():
    """XLA's CPU compiler would convert factors to float32 first where one is float32 or the result is bfloat16."""
    start()
    value = ampx_jax.autocast(jnp.matmul)(A, B)
    assert np.array_equal(value, value.astype("bfloat16").astype(jnp.float32)), "rounded once, after the product"
    model = ampx_jax.autocast(lambda a, b: jnp.tanh(a @ b) @ A)
    products = products_in(jax.value_and_grad(lambda a, b: jnp.sum(model(a, b)), (0, 1)), A, B)
    assert {sums.rpartition("x")[2] for _, sums in products} == {"f32>"}
    # All but the gradient of b, which sums over the first dimension of `a`.
    assert sorted(factors.count("bf16") for factors, _ in products) == [0, 2, 2, 2, 2]


@pytest.mark.parametrize(
    "shapes", [((5, 3), (8, 5, 8)), ((3, 5), (8, 5, 8)), ((5,), (8, 5, 2)), ((4, 5, 3), (4, 2, 5))]
)
def test_bfloat16_products_of_every_layout_run_on_a_cpu(shapes):
    """XLA's CPU compiler accepts some products of bfloat16 factors with float32 sums that fail when they run."""
    left, right = (jnp.arange(float(np.prod(shape))).reshape(shape) % 7 for shape in shapes)
    sums = ((shapes[0].index(5),), (shapes[1].index(5),))
    batch = ((0,), (0,)) if len(shapes[0]) == 3 else ((), ())

    def multiply(left, right):
        return jax.lax.dot_general(left, right, (sums, batch))

    exact = multiply(left, right)
    start()
    np.testing.assert_array_equal(jax.jit(ampx_jax.autocast(multiply))(left, right), exact)


def test_a_transpose_that_makes_the_left_factor_is_no_part_of_a_bfloat16_product_on_a_cpu():
    """XLA's CPU compiler takes it into the product otherwise, and what comes out fails when it runs."""
    start()
    random = np.random.default_rng(0)
    # Small integers: all of this is exact in bfloat16, and the sums in float32.
    first, last, inputs, targets = (
        jnp.asarray(random.integers(-2, 3, size=shape), jnp.float32) for shape in ((32, 8), (1, 32), (64, 8), (64, 1))
    )

    def loss(first, last):
        return jnp.sum(jax.vmap(lambda values: last @ jax.nn.relu(first @ values))(inputs) * targets)

    gradients = jax.jit(jax.grad(ampx_jax.autocast(loss), (0, 1)))(first, last)
    for gradient, exact in zip(gradients, jax.grad(loss, (0, 1))(first, last), strict=True):
        np.testing.assert_array_equal(gradient, exact)


def squares(f):
    return lambda *args: jnp.sum(f(*args) ** 2)


DERIVATIVES = {
    "forward": lambda f, a: jax.jvp(f, (a,), (a,)),
    "linearized": lambda f, a: jax.linearize(f, a)[1](a),
    "forward over forward": lambda f, a: jax.jvp(lambda a: jax.jvp(f, (a,), (a,))[1], (a,), (a,)),
    "forward over reverse": lambda f, a: jax.jvp(jax.grad(squares(f)), (a,), (a,)),
    "reverse over forward": lambda f, a: jax.grad(lambda a: jnp.sum(jax.jvp(f, (a,), (a,))[1]))(a),
    "reverse over reverse": lambda f, a: jax.grad(squares(jax.grad(lambda a: jnp.sum(f(a)))))(a),
    "of a batch": lambda f, a: jax.grad(squares(jax.vmap(f)))(jnp.stack([a, -a])),
    "of each of a batch": lambda f, a: jax.vmap(jax.grad(squares(f)))(jnp.stack([a, -a])),
    "forward of a batch": lambda f, a: jax.jvp(jax.vmap(f, 2, 1), *[(jnp.stack([a, -a], 2),)] * 2),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_products_have_derivatives_of_every_kind(name, dtype):
    """Whole numbers below 2**8 are exact in both dtypes, and so are their products and sums: float32's derivatives."""
    a, b = jnp.array([[1.0, 0.0, -1.0], [2.0, 1.0, 0.0]]), jnp.array([[1.0, 0.0], [1.0, -1.0], [0.0, 1.0]])

    def function(a):
        return jnp.einsum("ij,jk->ki", a, b) @ a  # the first gives its result in another order than its factors

    exact = DERIVATIVES[name](function, a)
    start(dtype=dtype)
    derivative = DERIVATIVES[name](ampx_jax.autocast(function), a)
    for leaf, other in zip(jax.tree.leaves(derivative), jax.tree.leaves(exact), strict=True):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, other)


def test_policies_of_checkpoint_see_the_products():
    start(dtype="float16")

    def products(policy):
        model = jax.checkpoint(ampx_jax.autocast(lambda a, b: jnp.sum(jnp.sin(a @ b))), policy=policy)
        return len(products_in(jax.value_and_grad(model), A, B))

    assert products(jax.checkpoint_policies.dots_saveable) == products(jax.checkpoint_policies.everything_saveable) == 2
    assert products(jax.checkpoint_policies.nothing_saveable) == 3


def test_without_a_session_nothing_is_cast():
    assert np.array_equal(ampx_jax.autocast(jnp.matmul)(A, B), A @ B)


def test_softmax_sums_in_float32_and_comparisons_follow():
    start()
    dtypes = dtypes_of(ampx_jax.autocast(lambda a, b: jax.nn.softmax(jnp.maximum(a @ b, 0.0))), A, B)
    assert ("exp", "float32") in dtypes
    assert ("reduce_sum", "float32") in dtypes
    assert ("max", "bfloat16") in dtypes


def test_a_number_that_float16_cannot_hold_stays_float32():
    start(dtype="float16")
    masked = ampx_jax.autocast(lambda a, b: jnp.maximum(a @ b, -1e9) + -1e9)(A, B)
    assert np.isfinite(masked).all()


def test_the_exponential_of_a_matrix_is_float32():
    """It multiplies by constants of millions, which float16 cannot hold."""
    start(dtype="float16")
    turn = jnp.array([[0.0, -1.0], [1.0, 0.0]])  # by one radian
    turned = ampx_jax.autocast(jax.scipy.linalg.expm)(turn)
    np.testing.assert_allclose(turned, [[np.cos(1), -np.sin(1)], [np.sin(1), np.cos(1)]], rtol=2.0**-20)


def body(carry, row):
    return jnp.tanh(carry @ row), jnp.sum(carry)


NESTED = {
    "jit": lambda a, b: jax.jit(lambda a: a @ b)(a),
    "checkpoint": lambda a, b: jax.checkpoint(lambda a: jnp.sin(a @ b))(a),
    "scan": lambda a, b: jax.lax.scan(body, a, jnp.stack([b @ a] * 2))[0],
    "cond": lambda a, b: jax.lax.cond(jnp.sum(a) < 9, lambda a: a @ b, lambda a: -(a @ b), a),
    "fori_loop": lambda a, b: jax.lax.fori_loop(0, 3, lambda i, a: jnp.tanh(a @ (b @ A)), a),
    "custom_jvp": lambda a, b: jax.nn.relu(a @ b),
    "vmap": lambda a, b: jax.vmap(lambda row: row @ b)(a),
    "grad": lambda a, b: jax.grad(lambda a: jnp.sum(jnp.sin(a @ b)))(a),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_functions_are_cast_and_close_to_float32(name):
    function = NESTED[name]
    exact = function(A, B)
    start()
    cast = ampx_jax.autocast(function)
    assert ("dot_general", "bfloat16") in dtypes_of(cast, A, B)
    assert ("dot_general", "float32") not in dtypes_of(cast, A, B)
    for result in (cast(A, B), jax.jit(cast)(A, B), ampx_jax.autocast(jax.jit(function))(A, B)):
        assert result.dtype == exact.dtype
        np.testing.assert_allclose(result, exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", [name for name in NESTED if name not in ("fori_loop", "grad")])
def test_gradients_flow_in_float32_and_batch(name):
    def loss(function):
        return lambda a: jnp.sum(function(a, B) ** 2)

    exact = jax.grad(loss(NESTED[name]))(A)
    start()
    cast = loss(ampx_jax.autocast(NESTED[name]))
    for result in (jax.grad(cast)(A), jax.jit(jax.grad(jax.checkpoint(cast)))(A), jax.vmap(jax.grad(cast))(A[None])[0]):
        assert result.dtype == jnp.float32
        np.testing.assert_allclose(result, exact, rtol=0.1, atol=0.1)


@jax.custom_vjp
def odd(a, b):
    return a @ b


odd.defvjp(lambda a, b: (a @ b, (a, b)), lambda saved, up: (3 * up @ saved[1].T, saved[0].T @ up))


def test_derivatives_of_ones_own_are_kept_and_cast():
    start()
    gradient = jax.grad(lambda a: jnp.sum(ampx_jax.autocast(odd)(a, B)))
    np.testing.assert_allclose(gradient(A), 3 * jnp.ones((4, 4)) @ B.T, rtol=0.02)
    assert ("dot_general", "float32") not in dtypes_of(gradient, A)


@jax.custom_vjp
def product_of_a_constant(a, b):
    return a @ b


def forward_of_a_constant(a, b):
    assert (a.perturbed, b.perturbed) == (True, False)  # as the loops of Equinox have it
    return a.value @ b.value, b.value


product_of_a_constant.defvjp(forward_of_a_constant, lambda b, up: (3 * up @ b.T, None), symbolic_zeros=True)


@pytest.mark.parametrize("nested", [False, True])
def test_a_derivative_of_ones_own_is_told_what_is_not_differentiated(nested):
    start()
    cast = ampx_jax.autocast(jax.jit(product_of_a_constant) if nested else product_of_a_constant)
    gradient = jax.grad(lambda a: jnp.sum(cast(a, B)))
    np.testing.assert_allclose(gradient(A), 3 * jnp.ones((4, 4)) @ B.T, rtol=0.02)
    assert ("dot_general", "float32") not in dtypes_of(gradient, A)


@jax.custom_jvp
def root(x):
    return jnp.sqrt(x)


root.defjvp(lambda primals, tangents: (root(*primals), 7.0 * jnp.exp(0.0 * primals[0]) * tangents[0]))


@jax.custom_vjp
def other_root(x):
    return jnp.sqrt(x)


other_root.defvjp(lambda x: (jnp.sqrt(x), x), lambda x, up: (7.0 * jnp.exp(0.0 * x) * up,))


def test_what_the_script_compiles_is_compiled_once_in_loops_that_nobody_compiles(caplog):
    start(dtype="float16")
    cast = ampx_jax.autocast(lambda a, b: jax.nn.gelu(jnp.where(a @ b > 0, a @ b, 0.1)).sum())

    def compiled(function):
        caplog.clear()
        with jax.log_compiles():
            jax.grad(function)(A, B)
        return [record.message for record in caplog.records if record.message.startswith("Compiling")]

    assert compiled(cast)
    assert not compiled(cast)
    # By another plan it is compiled anew.
    with ampx.autocast(dtype="bfloat16"):
        assert compiled(cast)


@pytest.mark.parametrize("option", ["allow", "deny", "promote", "neither"])
@pytest.mark.parametrize("own", [root, other_root], ids=["custom_jvp", "custom_vjp"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_function_keeps_its_own_derivative_on_every_list(option, own, nested):
    """The derivative of the function's body is infinite at 0."""
    function = jax.jit(lambda x: own(x) * 1.0) if nested else own
    amp = start(**{option: [function]} if option in ("allow", "deny") else {})
    called = amp.promote_function(function) if option == "promote" else function
    x = jnp.array([0.0, 1.0, 4.0])
    gradient = jax.grad(lambda x: jnp.sum(ampx_jax.autocast(lambda x: called(x))(x)))
    assert gradient(x).tolist() == [7.0, 7.0, 7.0]
    low = option == "allow"
    assert (("exp", "bfloat16") in dtypes_of(gradient, x)) is low, "the rule computes as the function does"
    rounded = jnp.sqrt(jnp.float32(1.01).astype("bfloat16")).astype(jnp.float32) if low else jnp.sqrt(1.01)
    assert ampx_jax.autocast(lambda x: called(x))(jnp.float32(1.01)) == rounded


def test_derivatives_of_ones_own_may_close_over_values():
    ode = pytest.importorskip("jax.experimental.ode")

    def loss(b):
        return jnp.sum(ode.odeint(lambda y, t: jnp.tanh(y @ (b @ A)), A, jnp.array([0.0, 1.0]))[-1])

    exact = jax.grad(loss)(B)
    start()
    np.testing.assert_allclose(jax.grad(ampx_jax.autocast(loss))(B), exact, rtol=0.1, atol=0.1)


def test_stale_traces_are_never_used():
    function = jax.jit(ampx_jax.autocast(jnp.matmul))
    exact = function(A, B)
    assert np.array_equal(exact, A @ B)
    start()
    low = function(A, B)
    assert not np.array_equal(low, exact)
    start(dtype="float16")
    assert not np.array_equal(function(A, B), low)
    ampx.shutdown()
    assert np.array_equal(function(A, B), exact)


def test_denied_and_allowed_names():
    start(deny=["dot_general"])
    assert np.array_equal(ampx_jax.autocast(jnp.matmul)(A, B), A @ B)
    start(deny=[jax.nn.relu], allow=["exp"])
    dtypes = dtypes_of(ampx_jax.autocast(lambda a, b: jnp.exp(jax.nn.relu(a @ b))), A, B)
    assert ("exp", "bfloat16") in dtypes
    assert ("max", "float32") in dtypes
    with pytest.raises(ampx.UnsupportedOpError, match=r"'mat_mull'.* Did you mean 'matmul'\?$"):
        start(deny=["mat_mull"])
    with pytest.raises(ampx.UnsupportedOpError, match=r"under jax\.jit"):
        start(deny=[lambda a: a])


def test_a_denied_function_of_ones_own_computes_in_float32():
    @jax.jit
    def precise(a, b):
        return a @ b

    start(deny=[precise])
    assert np.array_equal(ampx_jax.autocast(lambda a, b: precise(a, b))(A, B), A @ B)
    start(allow=[precise])
    assert ("sin", "bfloat16") not in dtypes_of(ampx_jax.autocast(lambda a: jnp.sin(a)), A)


def test_regions_inside_the_function_are_obeyed():
    amp = start()

    def function(a, b):
        with amp.autocast(enabled=False):
            exact = a @ b
        with amp.autocast(dtype="float16"):
            half = a @ b
        return exact, half, a @ b

    exact, half, low = ampx_jax.autocast(function)(A, B)
    assert np.array_equal(exact, A @ B)
    np.testing.assert_allclose(half, low_product(A, B, "float16"), rtol=2e-3)
    assert not np.array_equal(low, half)


def test_float_functions_inside_the_function_compute_in_float32():
    amp = start()
    precise = amp.float_function(jnp.matmul)
    assert np.array_equal(ampx_jax.autocast(lambda a, b: precise(a, b))(A, B), A @ B)


def test_unknown_primitives_run_in_the_dtypes_of_their_trace():
    start()
    result = ampx_jax.autocast(lambda a, b: jnp.linalg.cholesky(a @ a.T + 4 * jnp.eye(4)))(A, B)
    assert result.dtype == jnp.float32
    assert np.isfinite(result).all()


def test_integers_strings_and_other_leaves_pass_through():
    start()
    result = ampx_jax.autocast(lambda tree, scale, name: {"sum": tree["a"] + tree["n"], "name": name, "scale": scale})(
        {"a": A, "n": jnp.arange(3)}, 2, name="text"
    )
    assert result["name"] == "text"
    assert result["scale"] == 2
    assert np.array_equal(result["sum"], A + jnp.arange(3))


def test_convolutions_compute_in_low_precision():
    start()
    images, kernels = jnp.ones((1, 1, 5, 5)), jnp.ones((2, 1, 3, 3))
    function = ampx_jax.autocast(lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"))
    assert ("conv_general_dilated", "bfloat16") in dtypes_of(function, images, kernels)
    gradient = jax.grad(lambda k: jnp.sum(function(images, k)))(kernels)
    assert gradient.dtype == jnp.float32
    assert gradient[0, 0, 1, 1] == 25.0


def test_flax_modules_need_no_change():
    linen = pytest.importorskip("flax.linen")
    model = linen.Sequential([linen.Dense(8), linen.relu, linen.LayerNorm(), linen.Dense(2)])
    variables = model.init(jax.random.key(0), A)
    exact = model.apply(variables, A)
    start()
    result = ampx_jax.autocast(model.apply)(variables, A)
    assert ("dot_general", "float32") not in dtypes_of(ampx_jax.autocast(model.apply), variables, A)
    np.testing.assert_allclose(result, exact, rtol=0.05, atol=0.05)


def test_equinox_modules_need_no_change():
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.MLP(3, 2, 8, 2, key=jax.random.key(0))
    exact = jax.vmap(model)(A)
    start()
    result = ampx_jax.autocast(lambda model, rows: jax.vmap(model)(rows))(model, A)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, exact, rtol=0.05, atol=0.05)
    assert not np.array_equal(result, exact)


def test_strict_promotion_of_the_script_does_not_refuse_what_casting_mixes(session):
    weights = jnp.asarray(np.linspace(0.1, 0.9, 6, dtype=np.float32).reshape(2, 3))

    def mixed(x):  # a float16 product meets a float32 bias, each float32 in the script
        return x @ weights + jnp.float32(1.0) * jnp.ones(3, jnp.float32)

    x = jnp.asarray([[0.5, 0.25]], jnp.float32)
    with jax.numpy_dtype_promotion("strict"):
        result, gradient = ampx_jax.autocast(mixed)(x), jax.grad(lambda x: jnp.sum(ampx_jax.autocast(mixed)(x)))(x)
    np.testing.assert_allclose(result, np.asarray(x) @ np.asarray(weights) + 1, rtol=2.0**-10)
    np.testing.assert_allclose(gradient, np.asarray(weights).sum(1)[None], rtol=2.0**-9)


def test_a_product_that_is_differentiated_by_one_factor_has_no_derivative_by_the_other():
    start(dtype="float16")
    product = ampx_jax.autocast(lambda a: a @ B)
    tangent = jax.make_jaxpr(lambda a: jax.jvp(product, (a,), (a,)))(A)
    assert str(tangent).count("= ampx_product[") == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_tracer_leaves_its_trace(dtype):
    start(dtype=dtype)

    @ampx_jax.autocast
    def network(a, b):
        hidden = jax.checkpoint(lambda a: jax.nn.relu(a @ b))(a)
        return {"hidden": hidden, "name": "network"}

    def loss(a, b):
        out = network(a, b)
        assert out["name"] == "network"
        return out["hidden"].sum()

    with jax.checking_leaks():
        gradient = jax.jit(jax.grad(loss))(A, B)
    assert gradient.shape == A.shape
