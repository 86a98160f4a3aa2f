"""Levels O2 and O3: low-precision parameters, float32 norms, float32 copies in the optimizer state, checkpoints."""

import equinox
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen, nnx, serialization
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ampx
import ampx_jax
from ampx_jax.state import find_all

LOW = ("bfloat16", "float16")
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

pytestmark = pytest.mark.usefixtures("quiet_end")


def init(level="O2", dtype="bfloat16", **options):
    return ampx.init("jax", dtype=dtype, device="cpu", level=level, **options)


def make_params():
    """Return a network with a norm, whose weights rounding changes."""
    first, last = jax.random.split(jax.random.key(0))
    return {
        "first": {"kernel": jax.random.normal(first, (4, 8)), "bias": jnp.full(8, 0.1)},
        "norm": {"scale": jnp.full(8, 1.1), "bias": jnp.full(8, 0.1)},
        "last": {"kernel": jax.random.normal(last, (8, 1)), "bias": jnp.full(1, 0.1)},
    }


def predict(params, x):
    x = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    x = x * params["norm"]["scale"] + params["norm"]["bias"]
    return x @ params["last"]["kernel"] + params["last"]["bias"]


def batch(seed):
    x = jax.random.normal(jax.random.key(seed), (16, 4))
    return x, x.sum(1, keepdims=True)


def make_step(tx, model=predict):
    cast = ampx_jax.autocast(model)

    def step(params, state, x, y):
        def scaled_loss(params):
            with ampx.scale_loss(jnp.mean((cast(params, x) - y) ** 2), state) as scaled:
                return scaled

        updates, state = tx.update(jax.grad(scaled_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step


def started(tx, params=None):
    """Return parameters and state; the copies are the parameters before they were rounded."""
    params = make_params() if params is None else params
    return ampx.prepare(params, tx.init(params))


def trained(tx, params, state, steps, first=0):
    step = jax.jit(make_step(tx))
    for seed in range(first, first + steps):
        params, state = step(params, state, *batch(seed))
    return params, state


def masters(state):
    return find_all(state)[0].masters


def bits(tree):
    return [(str(leaf.dtype), np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def assert_follow(params, state):
    """Expect that each parameter that has a copy is this copy, rounded, bit for bit."""

    def check(param, master):
        if master is not None:
            expected = np.asarray(master).astype(NUMPY[str(param.dtype)])
            assert np.asarray(param).tobytes() == expected.tobytes()

    jax.tree.map(check, params, masters(state))


def dtypes(tree):
    return jax.tree.map(lambda leaf: str(leaf.dtype), tree)


# -- which parameters become low -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW)
def test_o2_lowers_everything_but_norms(dtype):
    init(dtype=dtype)
    params = ampx.prepare(make_params() | {"table": jnp.arange(3)})
    low, full = {"kernel": dtype, "bias": dtype}, {"scale": "float32", "bias": "float32"}
    assert dtypes(params) == {"first": low, "norm": full, "last": low, "table": "int32"}


NAMES = [
    "LayerNorm_0",
    "BatchNorm_1",
    "norm",
    "pre_norm",
    "batch_norm",
    "layer_normalization",
    "ln_1",
    "bn2",
    "lnFinal",
]
OTHERS = ["Dense_0", "normal", "abnormal", "Conv_1", "balance", "enormous"]


@pytest.mark.parametrize("name", NAMES)
def test_norms_are_known_by_name(name):
    init()
    assert dtypes(ampx.prepare({"params": {name: {"weight": jnp.ones(2)}, "x": jnp.ones(2)}})) == {
        "params": {name: {"weight": "float32"}, "x": "bfloat16"}
    }


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_no_norms(name):
    init()
    assert dtypes(ampx.prepare({name: {"weight": jnp.ones(2)}})) == {name: {"weight": "bfloat16"}}


def test_norms_are_known_by_what_stands_in_them():
    init()
    params = {"a": {"scale": jnp.ones(2), "offset": jnp.ones(2)}, "b": {"scale": jnp.ones(2), "kernel": jnp.ones(2)}}
    assert dtypes(ampx.prepare(params)) == {
        "a": {"scale": "float32", "offset": "float32"},
        "b": {"scale": "bfloat16", "kernel": "bfloat16"},
    }


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_denied_modules_stay_in_float32_and_allowed_norms_do_not(level):
    init(level, deny=["module:last"], allow=["module:norm", "module:last.bias"])
    params = ampx.prepare({"params": make_params()})["params"]
    assert dtypes(params)["last"] == {"kernel": "float32", "bias": "bfloat16"}
    assert set(dtypes(params)["norm"].values()) == {"bfloat16"}
    ampx.init("jax", dtype="bfloat16", device="cpu", level=level, deny=["module:nowhere"])
    with pytest.raises(ampx.UnsupportedOpError, match="nowhere"):
        ampx.prepare(make_params())


# -- the copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("first", ["prepare", "wrap"])
def test_small_updates_add_up_in_the_copies(first, dtype):
    amp = init(dtype=dtype, loss_scale=1024.0)
    params = {"w": jnp.ones(3)}
    if first == "prepare":
        params = amp.prepare(params)
        tx = amp.wrap_optimizer(optax.sgd(2.0**-14))
        state = tx.init(params)
    else:
        tx = amp.wrap_optimizer(optax.sgd(2.0**-14))
        params, state = amp.prepare(params, tx.init(params))
    update = jax.jit(tx.update)
    for _ in range(64):
        updates, state = update({"w": jnp.full(3, ampx.loss_scale(state), dtype)}, state, params)
        params = optax.apply_updates(params, updates)
    # 64 steps of 2**-14: each is lost in either dtype, the sum is exact.
    assert masters(state)["w"].tolist() == [1 - 2.0**-8] * 3
    assert params["w"].astype("float32").tolist() == [float(NUMPY[dtype](1 - 2.0**-8))] * 3


@pytest.mark.parametrize("dtype", LOW)
def test_the_copies_start_as_the_parameters_before_they_are_rounded(dtype):
    init(dtype=dtype)
    tx, exact = ampx.wrap_optimizer(optax.sgd(0.1)), make_params()
    params, state = started(tx)
    assert bits(masters(state)["first"]) == bits(exact["first"])
    assert masters(state)["norm"] == {"scale": None, "bias": None}
    assert_follow(params, state)


def by_hand(steps, dtype):
    """Adam on float32 copies, their rounded values in the products, written out in plain JAX."""
    copies, tx = make_params(), optax.adam(0.05)
    state = tx.init(copies)

    def lower(copies):
        return {name: tree if name == "norm" else jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
                for name, tree in copies.items()}  # fmt: skip

    @jax.jit
    def step(copies, state, x, y):
        gradients = jax.grad(lambda low: jnp.mean((ampx_jax.autocast(predict)(low, x) - y) ** 2))(lower(copies))
        updates, state = tx.update(jax.tree.map(lambda leaf: leaf.astype("float32"), gradients), state, copies)
        return optax.apply_updates(copies, updates), state

    for seed in range(steps):
        copies, state = step(copies, state, *batch(seed))
    return copies, state


def test_training_equals_copies_written_by_hand():
    init(loss_scale=128.0)
    tx = ampx.wrap_optimizer(optax.adam(0.05))
    params, state = trained(tx, *started(tx), 5)
    expected, inner = by_hand(5, "bfloat16")
    own = jax.tree.map(lambda p, m: p if m is None else m, params, masters(state), is_leaf=lambda leaf: leaf is None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), own, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), find_all(state)[0].inner, inner)


SPECIAL = [0.0, 1.0, 1.5, 2.0**-30, 2.0**-24, 2.0**-25, 1e-30, 65504.0, 65519.0, 7e4, 3.3895e38, 3.4e38]


def pairs():
    """Return copies and what is added: special numbers with each other, and random ones of all magnitudes."""
    draw = np.random.default_rng(0)
    special = np.array([sign * value for value in SPECIAL for sign in (1, -1)], np.float32)
    old, added = (axis.ravel() for axis in np.meshgrid(special, special))
    magnitudes = 2.0 ** draw.uniform(-60, 60, (2, 100_000)) * draw.choice([-1, 1], (2, 100_000))
    near = magnitudes[0] * 2.0 ** draw.uniform(-26, 1, 100_000)  # as updates are
    old = np.concatenate([old, magnitudes[0], magnitudes[0], -near]).astype(np.float32)
    return old, np.concatenate([added, magnitudes[1], near, magnitudes[0]]).astype(np.float32)


@pytest.mark.parametrize("dtype", LOW)
def test_adding_an_update_gives_the_rounded_copy_bit_for_bit_whatever_the_numbers_are(dtype):
    """The oracle is NumPy: copy + update in float32, and its roundings to the low dtype."""
    amp = init(dtype=dtype, loss_scale=1.0)
    tx = amp.wrap_optimizer(optax.sgd(-1.0))  # adds the gradients
    low, largest = NUMPY[dtype], np.float32(ml_dtypes.finfo(NUMPY[dtype]).max)
    start, gradients = pairs()
    start = np.clip(start, -largest, largest)
    state, params = tx.init({"w": jnp.asarray(start)}), {"w": jnp.asarray(start.astype(low))}
    updates, state = jax.jit(tx.update)({"w": jnp.asarray(gradients)}, state, params)
    after = np.asarray(optax.apply_updates(params, updates)["w"])
    copy = np.asarray(masters(state)["w"])
    assert after.tobytes() == copy.astype(low).tobytes()
    with np.errstate(over="ignore"):
        exact, before = start + gradients, start.astype(low).astype(np.float32)
    held, beyond = np.abs(exact) <= largest, np.isinf(exact)
    assert (np.abs(copy[~held & ~beyond]) == largest).all()
    assert np.isinf(copy[beyond]).all()
    # Where the sum is within a factor of two of what was there, the copy is the sum; else float32 rounds either.
    near = held & (exact * np.sign(before) >= np.abs(before) / 2) & (np.abs(exact) / 2 <= np.abs(before))
    assert near.sum() > 50_000
    assert (copy == exact)[near].all()
    error, larger = copy[held].astype(float) - exact[held], np.maximum(np.abs(exact), np.abs(before))[held]
    assert (np.abs(error) <= 2.0**-23 * larger).all()


def test_several_steps_in_one_compiled_function_are_those_steps():
    """XLA may leave out a rounding between two steps that it sees together; updates must not depend on it."""
    init(loss_scale=1.0)
    tx = ampx.wrap_optimizer(optax.sgd(0.05))
    step = make_step(tx)

    @jax.jit
    def three(params, state):
        for seed in range(3):
            params, state = step(params, state, *batch(seed))
        return params, state

    params, state = three(*started(tx))
    assert_follow(params, state)
    _, other = trained(tx, *started(tx), 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), masters(state), masters(other))


@pytest.mark.parametrize("dtype", LOW)
def test_weights_written_between_two_steps_count(dtype):
    init(dtype=dtype, loss_scale=1.0)
    tx = ampx.wrap_optimizer(optax.sgd(0.5))
    params = {"w": jnp.full((2, 4), 0.3)}
    params, state = ampx.prepare(params, tx.init(params))
    gradient = {"w": jnp.full((2, 4), 2.0**-12, dtype)}
    for _ in range(2):
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    expected = np.full((2, 4), 0.3, np.float32)
    for _ in range(2):
        expected -= np.float32(2.0**-13)
    assert np.asarray(masters(state)["w"]).tobytes() == expected.tobytes()
    params["w"] = params["w"].at[0].set(0.7)
    updates, state = tx.update(gradient, state, params)
    params = optax.apply_updates(params, updates)
    expected -= np.float32(2.0**-13)
    expected[0] = np.float32(NUMPY[dtype](0.7)) - np.float32(2.0**-13)
    assert np.asarray(masters(state)["w"]).tobytes() == expected.tobytes()
    assert_follow(params, state)


@pytest.mark.parametrize("overflow", [np.inf, np.nan])
@pytest.mark.parametrize("dtype", LOW)
def test_an_overflow_leaves_every_bit_of_copies_parameters_and_state(dtype, overflow):
    init(dtype=dtype, loss_scale="dynamic")
    tx = ampx.wrap_optimizer(optax.sgd(0.1, momentum=0.5))
    values = {"w": jnp.array([-0.0, 0.0, 1e-9, -1e-9, 0.3, -7.1]), "norm": jnp.array([-0.0, 1.1])}
    params, state = started(tx, values)
    slope = ampx.loss_scale(state) / 2**16  # float16 does not hold the scale
    gradients = jax.tree.map(lambda leaf: jnp.full_like(leaf, slope), params)
    _, state = tx.update(gradients, state, params)  # so that there is a state to keep
    state = find_all(state)[0]._replace(masters=tx.init(values).masters)
    for update in (tx.update, jax.jit(tx.update)):
        updates, after = update({**gradients, "norm": jnp.array([1.0, overflow])}, state, params)
        assert not ampx.last_step(after).applied
        assert bits(optax.apply_updates(params, updates)) == bits(params)
        assert bits((after.masters, after.inner)) == bits((state.masters, state.inner))


def test_gradients_are_not_rounded_again_when_they_are_unscaled():
    """In float16 a gradient of 2**-30 flushes; scaled it does not, and the copies get it whole."""
    init(dtype="float16", loss_scale=2.0**10)
    tx = ampx.wrap_optimizer(optax.sgd(1.0))
    params, state = started(tx, {"w": jnp.zeros(2)})
    _, state = tx.update({"w": jnp.full(2, ampx.loss_scale(state) * 2.0**-30, "float16")}, state, params)
    assert masters(state)["w"].tolist() == [-(2.0**-30)] * 2


def test_clipping_sees_true_gradients_in_float32():
    init(dtype="float16", loss_scale=4.0)
    tx = ampx.wrap_optimizer(optax.sgd(1.0), max_grad_norm=1.0)
    params, state = started(tx, {"w": jnp.zeros(2)})
    _, state = tx.update({"w": ampx.loss_scale(state) * jnp.array([3.0, 4.0], "float16")}, state, params)
    np.testing.assert_allclose(masters(state)["w"], [-0.6, -0.8], rtol=1e-6)
    assert ampx.last_step(state).grad_norm == 5.0


# -- where it works --------------------------------------------------------------------------------------------------


def test_it_works_in_scan_and_with_donated_arrays():
    init(loss_scale=1.0)
    tx = ampx.wrap_optimizer(optax.sgd(0.05))
    step = make_step(tx)
    xs, ys = map(jnp.stack, zip(*map(batch, range(4)), strict=True))

    @jax.jit
    def scanned(params, state, xs, ys):
        carry, _ = jax.lax.scan(lambda carry, row: (step(*carry, *row), None), (params, state), (xs, ys))
        return carry

    params, state = scanned(*started(tx), xs, ys)
    assert_follow(params, state)
    donating = jax.jit(step, donate_argnums=(0, 1))
    other = started(tx)
    for row in zip(xs, ys, strict=True):
        other = donating(*other, *row)
    assert_follow(*other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), masters(state), masters(other[1]))
    raw = make_params()
    jax.jit(lambda params, state: (params, state), donate_argnums=(0, 1))(raw, tx.init(raw))  # no buffer is in both


@pytest.mark.parametrize("around", [False, True])
def test_multi_steps_accumulate(around):
    """Four micro batches whose gradients are exact sums: one update of their mean."""
    amp = init(loss_scale=1.0)
    inner = optax.sgd(1.0)
    if around:
        tx = optax.MultiSteps(amp.wrap_optimizer(inner), 4)
    else:
        tx = amp.wrap_optimizer(optax.MultiSteps(inner, 4).gradient_transformation())
    params, state = started(tx, {"w": jnp.array([1.0, -0.0])})
    for number in range(8):
        updates, state = tx.update({"w": jnp.array([2.0**-12, 0.0], "bfloat16")}, state, params)
        params = optax.apply_updates(params, updates)
        assert masters(state)["w"].tolist() == [1 - 2.0**-12 * ((number + 1) // 4), 0.0]
        assert_close_but_for_the_sign_of_zero(params, state)


def assert_close_but_for_the_sign_of_zero(params, state):
    rounded = np.asarray(masters(state)["w"]).astype(NUMPY["bfloat16"])
    assert (np.asarray(params["w"]) == rounded).all()


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", LOW)
def test_two_devices_have_the_same_parameters_and_copies_and_skip_together(dtype, level, overflow, covers):
    if jax.device_count() < 2:
        pytest.skip("one device only")
    init(level, dtype, loss_scale=ampx.LossScale(init_scale=2.0**8))  # at which float16 gradients are finite
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,))
    tx = ampx.wrap_optimizer(optax.sgd(0.05))
    params, state = started(tx)
    before = bits((params, masters(state)))
    params, state = jax.device_put((params, state), NamedSharding(mesh, PartitionSpec()))
    x, y = batch(0)
    x = x.at[-1, 0].set(jnp.inf) if overflow else x
    x, y = jax.device_put((x, y), NamedSharding(mesh, PartitionSpec("batch")))
    params, state = jax.jit(make_step(tx))(params, state, x, y)
    assert ampx.last_step(state).applied is not overflow
    assert (bits((params, masters(state))) == before) is overflow
    assert (masters(state) is not None) is (level == "O2")
    if level == "O2":
        assert_follow(params, state)
    for leaf in jax.tree.leaves((params, masters(state))):
        first, second = (np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards)
        assert first == second
    covers("distributed", "jax", f"cpu/{dtype}/{level}")


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_agrees_over_the_axis(check_vma):
    if jax.device_count() < 2:
        pytest.skip("one device only")
    init(loss_scale="dynamic")
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,))
    tx = ampx.wrap_optimizer(optax.sgd(0.5, momentum=0.5), axis_name="batch")
    step = make_step(tx, lambda params, x: x @ params["w"])

    def local(params, state, x, y):
        params, state = step(params, state, x, y)
        return params, state.masters, ampx.last_step(state).applied[None]

    params, state = started(tx, {"w": jnp.full(4, 0.3)})
    whole, split = PartitionSpec(), PartitionSpec("batch")
    # Each device has parameters of its own afterwards: its gradients are those of its rows.
    mapped = jax.shard_map(
        lambda params, state, x, y: jax.tree.map(
            lambda leaf: leaf[None] if leaf.ndim != 1 or leaf.size == 4 else leaf,
            local(jax.lax.pcast(params, ("batch",), to="varying") if check_vma else params, state, x, y),
        ),
        mesh=mesh, in_specs=(whole, whole, split, split), out_specs=split, check_vma=check_vma,
    )  # fmt: skip
    x, y = batch(0)
    after, copies, applied = jax.jit(mapped)(params, state, x, y[:, 0])
    assert applied.tolist() == [True, True]
    rounded = np.asarray(copies["w"]).astype(NUMPY["bfloat16"])
    assert np.asarray(after["w"]).tobytes() == rounded.tobytes()
    assert (copies["w"][0] != copies["w"][1]).any()
    applied = jax.jit(mapped)(params, state, x.at[-1, 0].set(jnp.inf), y[:, 0])[2]
    assert applied.tolist() == [False, False]


# -- checkpoints -----------------------------------------------------------------------------------------------------


def full(params, state):
    """Return the float32 parameters of a checkpoint."""
    return ampx_jax.float32_parameters(params, state)


def test_a_checkpoint_loads_in_plain_float32_jax_and_goes_on():
    init(loss_scale=64.0)
    tx = ampx.wrap_optimizer(optax.adam(0.05))
    params, state = trained(tx, *started(tx), 3)
    saved, inner = full(params, state), find_all(state)[0].inner
    assert set(jax.tree.leaves(dtypes(saved))) == {"float32"}
    assert bits(saved["first"]) == bits(masters(state)["first"])
    assert bits(saved["norm"]) == bits(params["norm"])
    assert jax.tree.structure(saved) == jax.tree.structure(make_params())
    ampx.shutdown()
    plain = optax.adam(0.05)
    x, y = batch(3)
    gradients = jax.grad(lambda params: jnp.mean((predict(params, x) - y) ** 2))(saved)
    updates, _ = plain.update(gradients, inner, saved)
    assert set(jax.tree.leaves(dtypes(optax.apply_updates(saved, updates)))) == {"float32"}


def test_resuming_from_float32_parameters_is_bit_identical():
    """From the float32 parameters, the inner state and the loss scale: what a checkpoint of any program holds."""
    amp = init(dtype="float16", loss_scale="dynamic")
    tx = amp.wrap_optimizer(optax.sgd(0.05, momentum=0.5))
    params, state = trained(tx, *started(tx), 3)
    saved, inner, scale = full(params, state), find_all(state)[0].inner, amp.state_dict(state)
    expected = trained(tx, params, state, 3, first=3)
    amp = init(dtype="float16", loss_scale="dynamic")
    tx = amp.wrap_optimizer(optax.sgd(0.05, momentum=0.5))
    params, state = amp.prepare(saved, amp.load_state_dict(scale, tx.init(saved)._replace(inner=inner)))
    resumed = trained(tx, params, state, 3, first=3)
    assert bits((resumed[0], masters(resumed[1]))) == bits((expected[0], masters(expected[1])))


def test_resuming_from_parameters_and_state_is_bit_identical():
    init(loss_scale="dynamic")
    tx = ampx.wrap_optimizer(optax.sgd(0.05, momentum=0.5))
    params, state = trained(tx, *started(tx), 3)
    saved = serialization.to_bytes({"params": params, "state": state})
    expected = trained(tx, params, state, 3, first=3)
    fresh = started(tx)
    restored = serialization.from_bytes({"params": fresh[0], "state": fresh[1]}, saved)
    assert bits(trained(tx, restored["params"], restored["state"], 3, first=3)) == bits(expected)


# -- modules ---------------------------------------------------------------------------------------------------------


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(linen.LayerNorm()(linen.Dense(8)(x)))


def test_linen_trains():
    init(loss_scale=8.0)
    model = Linen()
    variables = model.init(jax.random.key(0), batch(0)[0])
    tx = ampx.wrap_optimizer(optax.sgd(0.05))
    params, state = started(tx, variables)
    kinds = dtypes(params)["params"]
    assert kinds["LayerNorm_0"] == {"scale": "float32", "bias": "float32"}
    assert kinds["Dense_0"] == kinds["Dense_1"] == {"kernel": "bfloat16", "bias": "bfloat16"}
    step = jax.jit(make_step(tx, model.apply))
    start = float(jnp.mean((model.apply(params, batch(0)[0]) - batch(0)[1]) ** 2))
    for _ in range(30):
        params, state = step(params, state, *batch(0))
    assert dtypes(params)["params"] == kinds
    assert_follow(params, state)
    assert float(jnp.mean((model.apply(params, batch(0)[0]) - batch(0)[1]) ** 2)) < start / 2


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.usual = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.usual(self.first(x))))


@pytest.mark.parametrize("order", ["prepare", "wrap"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_nnx_trains(level, order):
    init(level, loss_scale=8.0 if level == "O2" else 1.0)
    model = Nnx()
    if order == "prepare":
        assert ampx.prepare(model) is model
    optimizer = nnx.Optimizer(model, ampx.wrap_optimizer(optax.sgd(0.02)), wrt=nnx.Param)
    if order == "wrap":
        assert ampx.prepare(model, optimizer) == (model, optimizer)

    @nnx.jit
    def step(model, optimizer, x, y):
        def scaled_loss(model):
            loss = jnp.mean((ampx_jax.autocast(lambda model, x: model(x))(model, x) - y) ** 2)
            with ampx.scale_loss(loss, optimizer) as scaled:
                return scaled, loss

        gradients, loss = nnx.grad(scaled_loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer, *batch(0))) for _ in range(30)]
    assert losses[-1] < losses[0] / 2
    norm = "float32" if level == "O2" else "bfloat16"
    assert str(model.first.kernel[...].dtype) == str(model.last.bias[...].dtype) == "bfloat16"
    assert str(model.usual.scale[...].dtype) == str(model.usual.bias[...].dtype) == norm
    assert str(model.usual.mean[...].dtype) == "float32"  # no parameter
    assert ampx.last_step(optimizer).applied
    if level == "O2":
        copy = np.asarray(jax.tree.leaves(masters(optimizer.opt_state)["first"]["kernel"])[0])
        assert np.asarray(model.first.kernel[...]).tobytes() == copy.astype(NUMPY["bfloat16"]).tobytes()


class Equinox(equinox.Module):
    usual: equinox.nn.LayerNorm
    last: equinox.nn.Linear

    def __call__(self, x):
        return self.last(self.usual(x))


def test_equinox_trains_with_optax_apply_updates_and_says_so_otherwise():
    init(loss_scale=8.0)
    tx = ampx.wrap_optimizer(optax.sgd(0.05))
    params, static = equinox.partition(
        Equinox(equinox.nn.LayerNorm(4), equinox.nn.Linear(4, 1, key=jax.random.key(0))), equinox.is_inexact_array
    )
    params, state = started(tx, params)
    assert (str(params.usual.weight.dtype), str(params.last.weight.dtype)) == ("float32", "bfloat16")
    step = jax.jit(make_step(tx, lambda params, x: jax.vmap(equinox.combine(params, static))(x)))
    for _ in range(3):
        params, state = step(params, state, *batch(0))
    assert_follow(params, state)
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    with pytest.raises(ampx.ProtocolError, match=r"equinox\.apply_updates"):
        tx.update(updates, state, equinox.apply_updates(params, updates))


# -- O3 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW)
def test_o3_computes_and_keeps_everything_in_low_precision(dtype):
    init("O3", dtype=dtype)
    tx = ampx.wrap_optimizer(optax.sgd(0.01))
    params = ampx.prepare(make_params())
    state = tx.init(params)
    assert masters(state) is None
    assert ampx.loss_scale(state) == 1.0
    jaxpr = str(jax.make_jaxpr(ampx_jax.autocast(lambda x: jnp.sum(jnp.exp(x))))(jnp.ones(3)))
    assert f"{ {'float16': 'f16', 'bfloat16': 'bf16'}[dtype] }[3] = exp" in jaxpr
    start = float(jnp.mean((predict(params, batch(0)[0]) - batch(0)[1]) ** 2))
    params, state = trained(tx, params, state, 30)
    assert set(jax.tree.leaves(dtypes(params))) == {dtype}
    assert ampx.loss_scale(state) == 1.0
    assert float(jnp.mean((predict(params, batch(0)[0]) - batch(0)[1]) ** 2)) < start


def test_o3_loses_small_updates():
    init("O3")
    tx = ampx.wrap_optimizer(optax.sgd(1.0))
    params = ampx.prepare({"w": jnp.ones(2)})
    updates, _ = tx.update({"w": jnp.full(2, 2.0**-12, "bfloat16")}, tx.init(params), params)
    assert optax.apply_updates(params, updates)["w"].tolist() == [1.0, 1.0]


# -- calls -----------------------------------------------------------------------------------------------------------


def test_update_without_parameters_is_refused():
    init()
    tx = ampx.wrap_optimizer(optax.sgd(0.1))
    params, state = started(tx)
    with pytest.raises(ampx.ProtocolError, match="params"):
        tx.update(jax.tree.map(jnp.ones_like, params), state)


def test_what_stands_behind_the_wrapped_transformation_is_refused():
    amp = init()
    tx = optax.chain(amp.wrap_optimizer(optax.sgd(0.1)), optax.scale(0.5))
    state = tx.init(ampx.prepare(make_params()))
    with pytest.raises(ampx.UnsupportedByBackendError, match="behind"):
        amp.scale_loss(jnp.float32(1.0), state).__enter__()


def test_a_tree_without_floating_arrays_is_refused():
    amp = init()
    with pytest.raises(ampx.InvalidOptionError, match="floating array"):
        amp.prepare({"table": np.arange(3)})


def test_an_optimizer_that_prepare_does_not_know_is_refused():
    amp = init()
    with pytest.raises(ampx.InvalidOptionError, match="optax transformation"):
        amp.prepare(make_params(), 3)
    amp = init("O1")
    state = amp.wrap_optimizer(optax.sgd(0.1)).init(make_params())
    amp = init()
    with pytest.raises(ampx.ProtocolError, match="level='O2'"):
        amp.prepare(make_params(), state)


def test_low_parameters_are_refused_at_o1_and_o2_is_named():
    amp = init("O1")
    tx = amp.wrap_optimizer(optax.sgd(0.1))
    with pytest.raises(ampx.LowPrecisionParametersError, match=r"bfloat16.*level='O2'"):
        tx.init({"w": jnp.ones(2, "bfloat16")})
