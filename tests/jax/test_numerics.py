"""`watch`, `force` and `replay` in JAX, by flax linen, flax nnx and plain `jax.named_scope`; NumPy is the oracle."""

import math
import os
import runpy
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx
import ampx_jax
from ampx.backend import CastPlan, offer
from ampx.numerics.probe import Probe, Stats, Watching
from ampx.numerics.rounding import describe, round_to, sample
from ampx.numerics.watching import combined
from ampx.run import Automation, Run, RunSettings
from ampx_jax import gradients, numerics

nn = pytest.importorskip("flax.linen", reason="flax is not installed")
nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

X = np.array([[1.0, -2.0], [3e-8, 0.0], [7e4, 0.5]], np.float32)
W = np.array([[2.0, 0.25], [0.5, -1.0]], np.float32)
V = np.array([[4.0], [-8.0]], np.float32)
# By hand: the sum of (x w) v, whose products are exact.
HIDDEN = X @ W
PARAMS = {"first": jnp.asarray(W), "second": jnp.asarray(V)}


def scoped(params):
    with jax.named_scope("first"):
        hidden = jnp.asarray(X) @ params["first"]
    with jax.named_scope("rest"), jax.named_scope("second"):
        out = hidden @ params["second"]
    return out.sum()


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(2, use_bias=False, name="first")(x)
        return nn.Dense(1, use_bias=False, name="second")(x)


def linen(params):
    return Linen().apply({"params": {name: {"kernel": value} for name, value in params.items()}}, jnp.asarray(X)).sum()


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(2, 2, use_bias=False, rngs=rngs)
        self.second = nnx.Linear(2, 1, use_bias=False, rngs=rngs)
        self.first.kernel[...], self.second.kernel[...] = PARAMS["first"], PARAMS["second"]

    def __call__(self, x):
        return self.second(self.first(x))


def by_nnx(model):
    return model(jnp.asarray(X)).sum()


WAYS = {
    "named_scope": (lambda: PARAMS, scoped, "rest.second"),
    "linen": (lambda: PARAMS, linen, "second"),
    "nnx": (Nnx, by_nnx, "second"),
}


def read(model, step, watching=None, dtypes=None, plan=None):
    """Replay a step, and return the readings by module, operation and direction."""
    with numerics.watch(model, watching or Watching(samples=64)) as watch, numerics.force(model, dtypes or {}):
        replayed = numerics.replay(model, step, plan)
    return replayed, watch.readings()


def of(readings, module, direction="forward", operation=""):
    return [r for r in readings if (r.module, r.direction, r.operation) == (module, direction, operation)]


# -- what is read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_outputs_inputs_and_gradients_of_modules_equal_a_count_in_numpy(way):
    make, step, last = WAYS[way]
    replayed, readings = read(make(), step)
    expected = {
        ("first", "forward"): (HIDDEN, X),
        (last, "forward"): (HIDDEN @ V, HIDDEN),
        (last, "backward"): (np.ones((3, 1), np.float32), None),
        ("first", "backward"): (np.broadcast_to(V.T, (3, 2)), None),
    }
    for (module, direction), (value, received) in expected.items():
        (reading,) = of(readings, module, direction)
        assert reading.value == describe(value)
        assert reading.inputs == (Stats() if received is None else describe(received))
        np.testing.assert_array_equal(reading.sample, sample(value, 64))
    order = [(r.module, r.direction) for r in readings if (r.module, r.direction) in expected]
    assert order == list(expected)
    assert replayed.loss == (HIDDEN @ V).sum()
    first = next(value for name, value in replayed.gradients.items() if "first" in name)
    np.testing.assert_array_equal(first, X.T @ np.broadcast_to(V.T, (3, 2)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3", "float8_e5m2"])
def test_every_count_is_that_of_numpy_at_the_edges_of_a_dtype(dtype):
    limits = numerics.FORMATS[dtype]
    edges = [limits.largest, limits.smallest, limits.smallest / 2, limits.smallest / 2 * 1.01, 2.0**-149, 3e38, 464.0]
    edges += [limits.largest * (1 + 2.0 ** -(limits.bits + k)) for k in range(-1, 3)]
    values = np.array([*edges, 0.0, math.inf, -math.inf, math.nan], np.float64).clip(-math.inf, math.inf)
    with np.errstate(over="ignore"):
        values = np.concatenate([values, -values]).astype(np.float32)

    for value in (values, np.zeros(0, np.float32), np.full(3, -2.0, np.float32)):
        measured = jax.device_get(numerics._measure(jnp.asarray(value), dtype))
        assert combined([(value.size, numerics._numbers(measured))]) == describe(value, dtype)


def test_low_precision_values_are_counted_in_their_own_dtype():
    for dtype in ("float16", "bfloat16"):
        value = jnp.asarray([1e-7, -3.0, jnp.inf, 0.0], dtype)
        measured = jax.device_get(numerics._measure(value, "float8_e4m3", step=2))
        wide = np.asarray(value.astype("float32"))
        assert combined([(4, numerics._numbers(measured))]) == describe(wide, "float8_e4m3")
        np.testing.assert_array_equal(measured[2], wide[::2])


def test_operations_are_read_in_both_directions_with_the_line_that_called_them():
    _, readings = read(PARAMS, scoped, Watching(operations=True))
    (forward,) = of(readings, "first", "forward", "dot_general")
    assert (forward.value, forward.inputs.elements) == (describe(HIDDEN), X.size + W.size)
    assert forward.place == f"{os.path.relpath(__file__)}:{scoped.__code__.co_firstlineno + 2}"
    backward = of(readings, "rest.second", "backward", "dot_general")
    assert describe(HIDDEN.T @ np.ones((3, 1), np.float32)) in [reading.value for reading in backward]


MODEL = """
import flax.linen as nn

class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, use_bias=False, name="first")(x)
"""


@pytest.mark.parametrize("folder", ["ampx", "flax", "work"])
def test_a_line_of_the_user_is_named_whatever_the_folder_is_called(folder, tmp_path):
    file = tmp_path / folder / "train.py"
    file.parent.mkdir()
    file.write_text(MODEL)
    model = runpy.run_path(str(file))["Model"]()
    params = {"params": {"first": {"kernel": jnp.asarray(W)}}}
    _, readings = read(params, lambda p: model.apply(p, jnp.asarray(X)).sum(), Watching(operations=True))
    (product,) = of(readings, "first", "forward", "dot_general")
    assert product.place == f"{file}:{len(MODEL.splitlines())}"  # the last line calls the layer


def test_a_module_that_is_called_twice_is_read_twice():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            shared = nn.Dense(2, use_bias=False, name="shared")
            return shared(shared(x))

    params = {"params": {"shared": {"kernel": jnp.asarray(W)}}}
    _, readings = read(params, lambda p: Twice().apply(p, jnp.asarray(X)).sum())
    assert [(r.call, r.value) for r in of(readings, "shared")] == [(0, describe(HIDDEN)), (1, describe(HIDDEN @ W))]
    assert [r.call for r in of(readings, "shared", "backward")] == [0, 1]


def looped(params):
    def turn(carry, row):
        with jax.named_scope("cell"):
            carry = carry * params["w"] + row
        return carry, carry

    with jax.named_scope("loop"):
        last, _ = jax.lax.scan(turn, jnp.float32(1.0), jnp.asarray([1.0, 2.0, 3.0]))
    return last


def conditional(params):
    def left(w):
        with jax.named_scope("left"):
            return w * 2

    def right(w):
        with jax.named_scope("right"):
            return w * 3

    return jax.lax.cond(params["w"] > 0, left, right, params["w"])


def wrapped(transformation):
    def step(params):
        def inner(w):
            with jax.named_scope("inner"):
                return w * w * 3

        return transformation(inner)(params["w"])

    return step


@jax.custom_vjp
def own_derivative(w):
    return w * 5


own_derivative.defvjp(lambda w: (w * 5, None), lambda _, g: (g * 7,))


def custom(params):
    with jax.named_scope("own"):
        return own_derivative(params["w"])


def test_every_turn_of_a_loop_is_read_in_order_forward_and_backward():
    replayed, readings = read({"w": jnp.float32(2.0)}, looped)
    turns = of(readings, "loop.cell")
    assert [(r.call, float(r.sample[0])) for r in turns] == [(0, 3.0), (1, 8.0), (2, 19.0)]
    # The last turn comes first; each gradient is the next one's times w.
    assert [float(r.sample[0]) for r in of(readings, "loop.cell", "backward")] == [1.0, 2.0, 4.0]
    assert replayed.gradients["w"] == 1.0 * 4 + 3.0 * 2 + 8.0


def test_only_the_branch_that_was_taken_is_read():
    for w, name, factor in ((1.5, "left", 2.0), (-1.5, "right", 3.0)):
        replayed, readings = read({"w": jnp.float32(w)}, conditional)
        assert {r.module for r in readings} == {name}
        assert [float(r.sample[0]) for r in of(readings, name)] == [w * factor]
        assert replayed.gradients["w"] == factor


@pytest.mark.parametrize(
    "transformation",
    [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f)), lambda f: lambda w: jax.vmap(f)(w[None])[0]],
    ids=["jit", "checkpoint", "jit of checkpoint", "vmap"],
)
def test_transformations_inside_hide_no_module_and_show_none_twice(transformation):
    replayed, readings = read({"w": jnp.float32(2.0)}, wrapped(transformation))
    assert [(r.module, r.direction, r.value.largest) for r in readings] == [
        ("inner", "forward", 12.0),
        ("inner", "backward", 1.0),
    ]
    assert replayed.gradients["w"] == 12.0


def test_functions_with_derivatives_of_their_own_keep_them():
    replayed, readings = read({"w": jnp.float32(2.0)}, custom)
    assert [(r.module, r.direction, r.value.largest) for r in readings] == [
        ("own", "forward", 10.0),
        ("own", "backward", 1.0),
    ]
    assert replayed.gradients["w"] == 7.0


def test_a_loop_of_unknown_length_runs_and_is_not_read():
    def step(params):
        count = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1.0, jnp.float32(0.0))
        with jax.named_scope("after"):
            return params["w"] * count

    replayed, readings = read({"w": jnp.float32(2.0)}, step)
    assert replayed.loss == 6.0
    assert {r.module for r in readings} == {"after"}


# -- forced dtypes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_forced_module_multiplies_in_its_dtype_forward_and_backward(way, dtype):
    make, step, last = WAYS[way]
    third = 1 / 3

    def scaled(model):
        return step(jax.tree.map(lambda leaf: leaf * third, model)) if way != "nnx" else step(model)

    _, readings = read(make(), scaled, Watching(operations=True), {last: dtype})
    products = [r for r in readings if r.operation == "dot_general"]
    inside = {(r.direction, r.dtype) for r in products if r.module == last}
    assert {("forward", dtype), ("backward", dtype)} <= inside
    assert {r.dtype for r in products if r.module == "first"} == {"float32"}


def test_a_module_forced_into_float32_loses_nothing_where_the_rest_is_cast():
    w = {"first": jnp.asarray(W) / 3, "second": jnp.asarray(V) / 3}
    plan = CastPlan("cpu", "bfloat16")
    low, _ = read(w, scoped, plan=plan)
    _, readings = read(w, scoped, dtypes={"first": "float32"}, plan=plan)
    (first,), (second,) = of(readings, "first"), of(readings, "rest.second")
    assert (first.dtype, second.dtype) == ("float32", "bfloat16")
    np.testing.assert_allclose(first.sample, (X @ (W / 3)).ravel(), rtol=1e-6)
    assert low.loss != numerics.replay(w, scoped, None).loss


def test_a_module_forced_into_float32_ignores_a_dtype_of_its_own():
    def step(params):
        return nn.Dense(2, use_bias=False, dtype=jnp.bfloat16).apply({"params": params}, jnp.asarray(X)).sum()

    params = {"kernel": jnp.asarray(W) / 3}
    _, readings = read(params, step, dtypes={"": "float32"})
    np.testing.assert_allclose(of(readings, "")[0].sample, (X @ (W / 3)).ravel(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize("way", WAYS)
def test_a_simulated_dtype_rounds_what_enters_and_leaves_as_numpy_does(way, dtype):
    make, step, last = WAYS[way]
    _, readings = read(make(), step, dtypes={last: dtype})
    (reading,) = of(readings, last)
    product = round_to(HIDDEN, dtype) @ round_to(V, dtype)
    np.testing.assert_array_equal(reading.sample, round_to(product, dtype).ravel())
    assert reading.dtype == "float32"


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2"])
def test_a_module_in_a_simulated_dtype_returns_numbers_of_that_dtype(dtype):
    """Either has 1.25 and 1.5, and not the square of 1.25."""

    def step(params):
        with jax.named_scope("square"):
            product = params["w"] @ params["w"]
        return product.sum()

    replayed, readings = read({"w": jnp.full((1, 1), 1.25)}, step, dtypes={"square": dtype})
    (reading,) = of(readings, "square")
    assert (reading.sample.tolist(), replayed.loss) == ([1.5], 1.5)


def test_a_module_inside_another_obeys_its_own_entry():
    def step(params):
        with jax.named_scope("outer"):
            x = jnp.asarray(X) @ params["first"]
            with jax.named_scope("inner"):
                return (x @ params["second"]).sum()

    _, readings = read(PARAMS, step, Watching(operations=True), {"outer": "bfloat16", "outer.inner": "float32"})
    dtypes = {r.module: r.dtype for r in readings if r.operation == "dot_general"}
    assert dtypes == {"outer": "bfloat16", "outer.inner": "float32"}


def test_forcing_reaches_into_loops_and_compiled_functions():
    for step, name in ((looped, "loop.cell"), (wrapped(jax.jit), "inner")):
        _, readings = read({"w": jnp.float32(1 / 3)}, step, Watching(operations=True), {name: "bfloat16"})
        assert {r.dtype for r in of(readings, name, operation="mul")} == {"bfloat16"}


# -- replay ---------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_jax_and_parameters_that_are_not_reached_are_missing():
    params = {**PARAMS, "unused": jnp.ones(2), "stopped": jnp.ones(()), "count": jnp.arange(3)}
    replayed = numerics.replay(params, lambda p: scoped(p) + jax.lax.stop_gradient(p["stopped"]), None, 2.0**10)
    expected = jax.grad(scoped)(PARAMS)
    assert replayed.gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_array_equal(replayed.gradients[name], gradient)
    assert replayed.parameters.keys() == {"first", "second", "unused", "stopped"}
    assert replayed.parameters["first"] == describe(W)


def test_two_replays_of_a_model_with_noise_agree_and_leave_it_as_it_was():
    class Noisy(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(1)
            self.norm, self.dropout = nnx.BatchNorm(2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
            self.linear = nnx.Linear(2, 2, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    model = Noisy()
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Not(nnx.RngKey)))
    results = [read(model, lambda m: (m(jnp.asarray(X)) ** 2).sum()) for _ in range(2)]
    (first, seen), (second, again) = results
    assert first.loss == second.loss
    assert all(np.array_equal(a.sample, b.sample) for a, b in zip(seen, again, strict=True))
    assert {r.module for r in seen} == {"", "norm", "dropout", "linear"}
    after = nnx.state(model, nnx.Not(nnx.RngKey))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


@pytest.mark.parametrize("plan", [None, CastPlan("cpu", "bfloat16")])
def test_a_clock_computes_what_was_compiled_before(plan):
    traces = []

    def step(params):
        product = jnp.ones((2, 3)) @ params["w"]
        traces.append(len(traces))
        return jnp.sum(product**2)

    seconds = numerics.clock({"w": jnp.ones((3, 2))}, step, plan)
    compiled = len(traces)
    assert compiled > 0
    assert seconds() > 0
    assert len(traces) == compiled


@pytest.mark.parametrize(("plan", "looks"), [(None, 0), (CastPlan("cpu", "bfloat16"), 2)])
def test_a_clock_looks_at_gradients_where_something_is_cast_as_the_optimizer_will_do(plan, looks, monkeypatch):
    tested = []
    is_finite = gradients._is_finite
    monkeypatch.setattr(gradients, "_is_finite", lambda leaf: tested.append(leaf.shape) or is_finite(leaf))
    numerics.clock(
        {"w": jnp.ones((3, 2)), "v": jnp.ones(2)}, lambda p: jnp.sum(jnp.ones((2, 3)) @ p["w"] @ p["v"]), plan
    )
    assert tested == [(2,), (3, 2)][:looks]


def unnamed(layers):
    """Return a step of a perceptron whose layers have no names, and its parameters."""
    keys = jax.random.split(jax.random.key(0), layers + 1)
    params = [jax.random.normal(key, (64, 64)) / 8 for key in keys[1:]]
    x = jax.random.normal(keys[0], (32, 64))

    def step(params):
        hidden = x
        for weight in params:
            hidden = jnp.tanh(hidden @ weight)
        return jnp.mean(hidden**2)

    return step, params


def test_where_no_module_has_a_name_each_parameter_is_a_rounding_or_two_of_tune():
    step, params = unnamed(3)
    policy = ampx.tune(step, params, framework="jax", device="cpu", dtype="bfloat16", repeats=0)
    assert policy.tolerance == pytest.approx(8 * 2**-8 * 7**0.5)  # margin, a rounding, root of 2 * 3 + 1
    assert (policy.dtype, policy.deny) == ("bfloat16", ())


def test_tune_casts_nothing_where_nothing_would_be_left_to_cast():
    step, params = unnamed(2)
    policy = ampx.tune(step, params, framework="jax", device="cpu", dtype="bfloat16", repeats=0, tolerance=1e-5)
    assert (policy.dtype, policy.deny) == ("float32", ())
    assert policy.reasons["dtype"].startswith("nothing less than the whole model in float32")


@pytest.mark.parametrize("slow", ["bfloat16", "float32"])
def test_tune_stays_in_float32_where_a_compiled_step_is_slower_in_low_precision_and_there_only(slow, monkeypatch):
    """A step takes two seconds, and one more where the host sees a product of the slow dtype in it."""
    slowed = []
    step, params = unnamed(2)

    def look(product):
        if (product == 1.0) == (slow == "bfloat16"):  # which has seven digits
            slowed.append(product)
        return np.float32(0.0)

    def looking(params):
        product = jnp.full((1, 1), 1 + 2.0**-9) @ jnp.ones((1, 1))
        return step(params) + jax.pure_callback(look, jax.ShapeDtypeStruct((), jnp.float32), product[0, 0])

    def timed(compute):
        slowed.clear()
        compute()
        return 3.0 if slowed else 2.0

    monkeypatch.setattr(numerics, "timed", timed)
    policy = ampx.tune(looking, params, framework="jax", device="cpu", dtype="bfloat16", repeats=1)
    assert policy.deny == ()
    if slow == "bfloat16":
        assert (policy.dtype, policy.enabled, policy.speed) == ("float32", False, 1.0)
    else:
        assert (policy.dtype, policy.enabled, policy.speed) == ("bfloat16", True, 1.5)


def test_a_pattern_that_matches_no_scope_is_refused_by_the_replay():
    for region in (numerics.watch(PARAMS, Watching(modules=("nowhere",))), numerics.force(PARAMS, {"no*": "float32"})):
        with (
            region,
            pytest.raises(ampx.UnsupportedOpError, match="matches no module of the model; accepted: patterns"),
        ):
            numerics.replay(PARAMS, scoped, None)


def test_a_step_that_is_called_inside_is_read_without_a_replay():
    """Compiled functions run uncompiled, and the gradients of a plain jax.grad are seen."""
    params = {"params": {name: {"kernel": value} for name, value in PARAMS.items()}}
    with numerics.watch(None, Watching(samples=8)) as watch:
        jax.jit(jax.grad(lambda p: Linen().apply(p, jnp.asarray(X)).sum()))(params)
    readings = watch.readings()
    assert of(readings, "first")[0].value == describe(HIDDEN)
    assert of(readings, "first", "backward")[0].value == describe(np.broadcast_to(V.T, (3, 2)))


def second_model():
    """Return a model whose layer has a name that the first has, too, and its variables."""

    class Other(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, name="second")(x)

    return Other(), Other().init(jax.random.key(0), jnp.asarray(X))


def test_a_second_model_is_named_by_its_class():
    other, variables = second_model()
    with numerics.watch(None, Watching()) as watch:
        linen(PARAMS)
        other.apply(variables, jnp.asarray(X))
    assert [r.module for r in watch.readings()] == ["first", "second", "", "Other:second", "Other:"]


# -- entries "module:pattern" of allow and deny ------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_denied_modules_stay_in_float32_in_a_cast_function(way):
    make, step, last = WAYS[way]
    model = make()

    def dtypes(**options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampx.PrecisionWarning)
            with ampx.init("jax", dtype="bfloat16", device="cpu", **options) as amp:
                _, readings = read(model, step, plan=amp.plan)
                loss = ampx_jax.autocast(step)(model)
        return [of(readings, module)[0].dtype for module in ("first", last)], float(loss)

    low, low_loss = dtypes()
    mixed, _ = dtypes(deny=["module:first"])
    both, exact_loss = dtypes(deny=["module:*"])
    assert (low, mixed, both) == (["bfloat16"] * 2, ["float32", "bfloat16"], ["float32"] * 2)
    assert exact_loss == (HIDDEN @ V).sum()
    assert low_loss != exact_loss


def test_an_entry_means_the_module_in_every_model_unless_it_begins_with_a_class():
    other, variables = second_model()

    def step(params):
        traced = jnp.asarray(X) + 0 * params["first"].sum()
        return linen(params) + other.apply(variables, traced).sum()

    def dtypes(entry):
        with ampx.init("jax", dtype="bfloat16", device="cpu", deny=[entry]) as amp:
            _, readings = read(PARAMS, step, Watching(operations=True), plan=amp.plan)
        products = (of(readings, module, operation="dot_general")[0] for module in ("second", "Other:second"))
        return [entry.dtype for entry in products]

    assert dtypes("exp") == ["bfloat16", "bfloat16"]
    assert dtypes("module:second") == ["float32", "float32"]
    assert dtypes("module:Other:second") == ["bfloat16", "float32"]


# -- ampx run ------------------------------------------------------------------------------------------------


class Watcher:
    """Watches the second step from between two steps."""

    def __init__(self, watching):
        self.losses, self.steps, self.readings, self.watching = [], [], [], watching
        self.region = None

    def loss(self, read):
        self.losses.append(read)

    def stepped(self, steps):
        self.steps.append(steps)
        if self.region is not None:
            self.region.__exit__(None, None, None)
            self.readings, self.region = self.watch.readings(), None
        if steps == 1:
            self.region = offer(ampx_jax.load(), Probe).watch(None, self.watching)
            self.watch = self.region.__enter__()


def train(compiled, steps=3):
    params = {"params": {name: {"kernel": value / 8} for name, value in PARAMS.items()}}
    tx = optax.sgd(2.0**-4)
    state = tx.init(params)
    x = jnp.asarray(np.minimum(X, 4))

    def step(params, state):
        loss, gradients = jax.value_and_grad(lambda p: (Linen().apply(p, x) ** 2).mean())(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jax.jit(step) if compiled else step
    losses, seen = [], []
    for _ in range(steps):
        seen.append(params)
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses, seen


@pytest.mark.usefixtures("nothing_of_its_own")
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_observer_hears_of_losses_and_steps_and_watches_one_from_between(compiled, dtype):
    run = Run("jax", RunSettings(dtype=dtype, device="cpu", watched=True))
    run.recorder.observer = observer = Watcher(Watching(dtype, operations=True, samples=16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)
        with offer(ampx_jax.load(), Automation).automate(run):
            losses, seen = train(compiled)
    assert observer.steps == [1, 2, 3]
    assert [read() for read in observer.losses] == losses
    assert run.recorder.steps == 3
    (first,) = of(observer.readings, "first")
    assert (first.dtype, first.kind, first.call) == (dtype, "Dense", 0)
    weights = np.asarray(seen[1]["params"]["first"]["kernel"])
    product = np.minimum(X, 4) @ weights
    np.testing.assert_allclose(first.sample, product.ravel(), rtol=0, atol=8 * 2.0**-8)
    assert of(observer.readings, "first", "backward")[0].value.nonfinite == 0
    products = [r for r in observer.readings if r.operation == "dot_general"]
    assert {r.direction for r in products} == {"forward", "backward"}
    assert {r.dtype for r in products if r.direction == "forward"} == {dtype}


class Ended(SystemExit):
    """What an observer raises to end a script."""


@pytest.mark.usefixtures("nothing_of_its_own")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_observer_ends_a_script_whose_steps_are_told_by_callbacks(dtype):
    """`nnx.jit` and loops are not compiled with hidden outputs, and no exception leaves a callback as it was."""

    class Ending(Watcher):
        def stepped(self, steps):
            self.steps.append(steps)
            if steps == 4:
                raise Ended

    def script():
        @nnx.jit
        def step(model, optimizer):
            for _ in range(2):
                optimizer.update(model, nnx.grad(lambda model: model(jnp.ones((2, 2))).sum())(model))

        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
        for call in range(4):
            calls.append(call)
            step(model, optimizer)

    run, calls = Run("jax", RunSettings(dtype=dtype, device="cpu")), []
    run.recorder.observer = observer = Ending(Watching())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)
        with pytest.raises(Ended), offer(ampx_jax.load(), Automation).automate(run):
            script()
    assert (calls, observer.steps, len(observer.losses)) == ([0, 1], [1, 2, 3, 4], 4)


@pytest.mark.usefixtures("nothing_of_its_own")
def test_modules_are_forced_for_a_whole_script():
    run = Run("jax", RunSettings(dtype="bfloat16", device="cpu", watched=True, deny=("module:second",)))
    run.recorder.observer = observer = Watcher(Watching())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)
        with (
            offer(ampx_jax.load(), Probe).force(None, {"first": "float32"}),
            offer(ampx_jax.load(), Automation).automate(run),
        ):
            train(True, 2)
    assert [of(observer.readings, name)[0].dtype for name in ("first", "second")] == ["float32", "float32"]
