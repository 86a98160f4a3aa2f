"""A wrapped transformation works wherever optax and JAX take the raw one."""

import json
import pickle
import subprocess
import sys
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ampx
import ampx_jax
from ampx.plugins import Registration, default_registry
from ampx.session import sessions
from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE, Oracle
from ampx_jax.gradients import all_finite, count_nonfinite
from ampx_jax.state import find_all

START = np.array([1.0, -2.0, 0.5], np.float32)
FINITE = np.array([0.25, -0.5, 1.5], np.float32)


def slopes(overflow):
    return jnp.asarray(np.where([False, bool(overflow), False], np.inf, FINITE))


def train_step(tx, params, state, slope):
    def scaled_loss(params):
        with ampx.scale_loss(jnp.sum(params * slope), state) as scaled:
            return scaled

    updates, state = tx.update(jax.grad(scaled_loss)(params), state, params)
    return optax.apply_updates(params, updates), state


def plain(tx, rows):
    params, state = jnp.asarray(START), tx.init(jnp.asarray(START))
    for row in rows:
        updates, state = tx.update(jnp.asarray(row), state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params), state


def same(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)


def test_trace_under_jit_is_the_reference_trace_and_compiles_once(session):
    tx = ampx.wrap_optimizer(optax.sgd(0.5))
    compiled = jax.jit(lambda params, state, slope: train_step(tx, params, state, slope))
    params, trace = jnp.asarray(START), []
    state = tx.init(params)
    for overflow in REFERENCE_PATTERN:
        params, state = compiled(params, state, slopes(overflow))
        trace.append(ampx.loss_scale(state))
    assert trace == list(REFERENCE_TRACE)
    assert compiled._cache_size() == 1
    assert same(params, plain(optax.sgd(0.5), [FINITE] * REFERENCE_PATTERN.count(0))[0])


def test_trace_under_scan_is_the_reference_trace_and_results_stack(session):
    tx = ampx.wrap_optimizer(optax.adam(0.1))

    def body(carry, slope):
        carry = train_step(tx, *carry, slope)
        return carry, ampx.last_step(carry[1])

    params = jnp.asarray(START)
    rows = jnp.stack([slopes(overflow) for overflow in REFERENCE_PATTERN])
    (params, state), results = jax.jit(lambda carry, rows: jax.lax.scan(body, carry, rows))(
        (params, tx.init(params)), rows
    )
    assert results.next_scale.tolist() == list(REFERENCE_TRACE)
    assert results.applied.tolist() == [not overflow for overflow in REFERENCE_PATTERN]
    assert results.scale.tolist() == [65536.0, *REFERENCE_TRACE[:-1]]
    expected, inner = plain(optax.adam(0.1), [FINITE] * REFERENCE_PATTERN.count(0))
    np.testing.assert_allclose(params, expected, rtol=1e-6)
    assert int(find_all(state)[0].inner[0].count) == int(inner[0].count) == 11


def test_vmap_gives_every_member_its_own_scale(session):
    tx = ampx.wrap_optimizer(optax.sgd(0.5, momentum=0.5))
    members = jnp.stack([jnp.asarray(START)] * 2)
    states = jax.vmap(tx.init)(members)
    for overflows in ((0, 1), (0, 0)):
        rows = jnp.stack([slopes(overflow) for overflow in overflows])
        members, states = jax.jit(jax.vmap(lambda p, s, x: train_step(tx, p, s, x)))(members, states, rows)
    assert ampx.loss_scale(states).tolist() == [65536.0, 32768.0]
    assert same(members[0], plain(optax.sgd(0.5, momentum=0.5), [FINITE] * 2)[0])
    assert same(members[1], plain(optax.sgd(0.5, momentum=0.5), [FINITE])[0])


def test_overflow_on_one_of_two_devices_skips_on_both_under_jit(session, covers):
    if jax.device_count() < 2:
        pytest.skip("one device only")
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,))
    tx = ampx.wrap_optimizer(optax.sgd(0.5))
    params = jax.device_put(jnp.asarray(START), NamedSharding(mesh, P()))
    state = jax.device_put(tx.init(params), NamedSharding(mesh, P()))

    @jax.jit
    def step(params, state, rows):
        def scaled_loss(params):
            with ampx.scale_loss(jnp.mean(rows @ params), state) as scaled:
                return scaled

        updates, state2 = tx.update(jax.grad(scaled_loss)(params), state, params)
        return optax.apply_updates(params, updates), state2

    rows = jax.device_put(jnp.stack([slopes(0), slopes(1)]), NamedSharding(mesh, P("batch")))
    after, state = step(params, state, rows)
    assert [shard.data.tolist() for shard in after.addressable_shards] == [START.tolist()] * 2
    assert ampx.last_step(state) == ampx.StepResult(False, False, 65536.0, 32768.0, 1)
    covers("distributed", "jax", "cpu/float16/O1")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("overflow", [0, 1])
def test_shard_map_agrees_over_the_axis(session, check_vma, overflow):
    if jax.device_count() < 2:
        pytest.skip("one device only")
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,))
    tx = ampx.wrap_optimizer(optax.sgd(0.5, momentum=0.5), axis_name="batch")

    def local(params, rows):  # parameters of their own on each device; only finiteness is shared
        state = tx.init(params)
        params, state = train_step(tx, params, state, rows[0])
        return params, ampx.last_step(state).applied[None], ampx.loss_scale(state)[None]

    split = P("batch")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(split, split), out_specs=split, check_vma=check_vma)
    rows = jnp.stack([slopes(0), slopes(overflow)])
    after, applied, scales = jax.jit(mapped)(jnp.concatenate([jnp.asarray(START)] * 2), rows)
    assert applied.tolist() == [not overflow] * 2
    assert scales.tolist() == [32768.0 if overflow else 65536.0] * 2
    expected = START if overflow else START - 0.5 * FINITE
    assert after.tolist() == [*expected, *expected]


def test_donated_states_are_not_used_again(session):
    tx = ampx.wrap_optimizer(optax.adam(0.1), max_grad_norm=1.0)
    step = jax.jit(lambda params, state, slope: train_step(tx, params, state, slope), donate_argnums=(0, 1))
    params = jnp.asarray(START)
    state = tx.init(params)
    for overflow in (0, 1, 0):
        params, state = step(params, state, slopes(overflow))
    assert ampx.last_step(state).applied
    assert np.isfinite(np.asarray(params)).all()


@pytest.mark.parametrize("overflow", [np.inf, -np.inf, np.nan])
def test_skipped_steps_leave_every_bit_of_parameters_and_inner_state(session, overflow):
    tx = ampx.wrap_optimizer(optax.adamw(0.1))
    params = {"w": jnp.array([-0.0, 0.0, 1e-40]), "b": jnp.ones(())}
    state = tx.init(params)
    scale = ampx.loss_scale(state)
    _, state = tx.update(jax.tree.map(lambda leaf: jnp.full_like(leaf, scale), params), state, params)
    bad = {"w": jnp.zeros(3), "b": jnp.float32(overflow)}
    updates, after = tx.update(bad, state, params)
    signs = np.signbit(optax.apply_updates(params, updates)["w"][:2]).tolist()
    assert signs == [True, False]
    assert same(after.inner, state.inner)


def test_chain_inside_clips_true_gradients(session):
    tx = ampx.wrap_optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    params = jnp.zeros(2)
    state = tx.init(params)
    updates, _ = tx.update(jnp.array([3.0, 4.0]) * ampx.loss_scale(state), state, params)
    np.testing.assert_allclose(updates, [-0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize("gradient", [[3.0, 4.0], [3e30, 4e30], [3e38, -3e38], [1e25, 1.0], [0.0, 0.0]])
def test_norms_that_overflow_float32_clip_rightly(session, gradient):
    """The oracle is NumPy in float64; float32 sums, roots and quotients of two numbers err by a few units of 2**-24."""
    tx = ampx.wrap_optimizer(optax.sgd(1.0), loss_scale=1.0, max_grad_norm=1.0)
    gradients = {"w": jnp.array(gradient[:1]), "b": jnp.array(gradient[1:])}
    updates, state = jax.jit(tx.update)(gradients, tx.init(gradients))
    exact = np.float32(gradient).astype(np.float64)
    norm = np.sqrt((exact**2).sum())
    clipped = exact / max(norm, 1.0)
    np.testing.assert_allclose([-updates["w"][0], -updates["b"][0]], clipped, rtol=8 * 2.0**-24, atol=0)
    result = ampx.last_step(state)
    assert result.applied
    with np.errstate(over="ignore"):  # the norm of two times 3e38 is no float32
        np.testing.assert_allclose(result.grad_norm, np.float32(norm), rtol=8 * 2.0**-24)


def test_complex_gradients_are_clipped_by_their_magnitude(session):
    tx = ampx.wrap_optimizer(optax.sgd(1.0), loss_scale=1.0, max_grad_norm=1.0)
    updates, state = tx.update(jnp.array([3.0 + 4.0j]), tx.init(jnp.array([0.0j])))
    np.testing.assert_allclose(updates, [-0.6 - 0.8j], rtol=1e-6)
    assert ampx.last_step(state).grad_norm == 5.0


def test_chain_around_transforms_true_updates(session):
    tx = optax.chain(ampx.wrap_optimizer(optax.scale_by_adam()), optax.scale(-0.1))
    params = jnp.asarray(START)
    state = tx.init(params)
    assert ampx.loss_scale(state) == 65536.0
    params, state = train_step(tx, params, state, slopes(0))
    np.testing.assert_allclose(params, START - 0.1 * np.sign(FINITE), rtol=1e-5)
    assert ampx.last_step(state).applied


@pytest.mark.parametrize("overflow", [np.inf, -np.inf, np.nan, 1e38])
@pytest.mark.parametrize("nesting", ["around", "inside"])
def test_multi_steps_go_on_after_overflows(session, nesting, overflow):
    """Around the wrapper a window with an overflow is dropped, inside it the micro batch that overflowed."""
    if nesting == "around":
        tx = optax.MultiSteps(ampx.wrap_optimizer(optax.sgd(0.5)), every_k_schedule=2)
    else:
        tx = ampx.wrap_optimizer(optax.MultiSteps(optax.sgd(0.5), every_k_schedule=2).gradient_transformation())
    micro_batches = [float(number in (2, 7, 8, 9, 25, 39)) for number in range(40)]  # windows 1, 3, 4, 12, 19
    counted, size = micro_batches, 1  # what counts as one step, and how many micro batches it has
    if nesting == "around":
        counted, size = [max(pair) for pair in zip(micro_batches[::2], micro_batches[1::2], strict=True)], 2
    oracle = Oracle({**vars(ampx.LossScale(growth_interval=3)), "dynamic": True})
    scales = [oracle.step(bool(bad)).scale for bad in counted]
    params = jnp.asarray(START)
    state = tx.init(params)
    step = jax.jit(lambda params, state, slope: train_step(tx, params, state, slope))
    for number, bad in enumerate(micro_batches):
        slope = jnp.asarray(np.where([False, bool(bad), False], overflow, FINITE))
        params, state = step(params, state, slope)
        if (number + 1) % size == 0:
            assert ampx.loss_scale(state) == scales[number // size]
            assert ampx.last_step(state).applied is not bool(counted[number // size])
    applied = counted.count(0) * size // 2
    assert params.tolist() == (START - 0.5 * applied * FINITE).tolist()


@pytest.mark.parametrize("nesting", ["around", "inside"])
def test_multi_steps_find_their_scale_from_the_default_one(nesting):
    """The factor of the product's derivative is the scale: 2**16 is no float16, 2**15 is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)
        amp = ampx.init("jax", dtype="float16", device="cpu")
    with amp:
        if nesting == "around":
            tx = optax.MultiSteps(ampx.wrap_optimizer(optax.sgd(0.5)), every_k_schedule=2)
        else:
            tx = ampx.wrap_optimizer(optax.MultiSteps(optax.sgd(0.5), every_k_schedule=2).gradient_transformation())
        model = ampx_jax.autocast(lambda params, x: x @ params)

        @jax.jit
        def step(params, state):
            def scaled_loss(params):
                with ampx.scale_loss(jnp.sum(model(params, jnp.eye(2) / 4)), state) as scaled:
                    return scaled

            updates, state = tx.update(jax.grad(scaled_loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        params = jnp.zeros(2)
        state = tx.init(params)
        for _ in range(8):
            params, state = step(params, state)
        assert ampx.loss_scale(state) == 2.0**15
        assert params.tolist() == [-3 / 8, -3 / 8]


def test_multi_steps_without_ampx_stay_as_they_are(session):
    ampx.wrap_optimizer(optax.sgd(0.5))
    tx = optax.MultiSteps(optax.sgd(0.5), every_k_schedule=2)
    state = tx.init(jnp.zeros(1))
    for slope in (np.inf, 1.0, 1.0):
        _, state = tx.update(jnp.array([slope]), state)
    assert np.isnan(state.acc_grads[0])


IN_FRONT_OR_AROUND = {
    "apply_if_finite": (lambda tx: optax.apply_if_finite(tx, 3), "Leave apply_if_finite out"),
    "MultiSteps that skips": (
        lambda tx: optax.MultiSteps(tx, 2, should_skip_update_fn=optax.skip_not_finite),
        "keeps overflows from it",
    ),
    "trace in front": (lambda tx: optax.chain(optax.trace(0.9), tx), "TraceState"),
    "accumulation in front": (lambda tx: optax.chain(optax.clip(1.0), optax.apply_every(2), tx), "ApplyEvery"),
    "chain in front": (lambda tx: optax.chain(optax.chain(optax.ema(0.9), optax.clip(1.0)), tx), "tuple"),
    "partition": (lambda tx: optax.partition({"x": tx, "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}), "partition"),
    "masked": (
        lambda tx: optax.chain(
            optax.masked(tx, {"a": True, "b": False}), optax.masked(optax.sgd(0.1), {"a": False, "b": True})
        ),
        "masked",
    ),
}


@pytest.mark.parametrize("name", IN_FRONT_OR_AROUND)
def test_what_would_store_or_hide_an_overflow_is_refused_by_scale_loss(session, name):
    around, message = IN_FRONT_OR_AROUND[name]
    state = around(ampx.wrap_optimizer(optax.adam(0.1))).init({"a": jnp.zeros(1), "b": jnp.zeros(1)})
    with pytest.raises(ampx.UnsupportedByBackendError, match=message):
        ampx.scale_loss(jnp.ones(()), (jnp.ones(1), state))
    with ampx.init("jax", enabled=False):
        state = around(ampx.wrap_optimizer(optax.adam(0.1))).init({"a": jnp.zeros(1), "b": jnp.zeros(1)})
        ampx.scale_loss(jnp.ones(()), state)


SOUND = {
    "trace behind": lambda tx: optax.chain(tx, optax.trace(0.5)),
    "accumulation behind": lambda tx: optax.chain(tx, optax.apply_every(1)),
    "frozen rest by partition": lambda tx: optax.partition({"x": tx, "y": optax.set_to_zero()}, {"a": "x", "b": "y"}),
    "frozen rest by masks": lambda tx: optax.chain(
        optax.masked(tx, {"a": True, "b": False}), optax.masked(optax.set_to_zero(), {"a": False, "b": True})
    ),
    "hyperparameters around": lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(1.0),
    "apply_if_finite inside": lambda _: ampx.wrap_optimizer(optax.apply_if_finite(optax.sgd(1.0), 3)),
}
SOUND_ALONE = {"apply_if_finite inside": lambda tx: tx}


MAPPED = {
    "alone": lambda wrap: wrap(optax.adam(0.1)),
    "chain": lambda wrap: optax.chain(optax.clip(1.0), wrap(optax.adam(0.1))),
    "masked around": lambda wrap: optax.masked(wrap(optax.adam(0.1)), {"a": True, "b": False}),
    "masked inside": lambda wrap: wrap(optax.masked(optax.adam(0.1), {"a": True, "b": False})),
    "multi_transform": lambda wrap: wrap(
        optax.multi_transform({"x": optax.adam(0.1), "y": optax.sgd(0.1)}, {"a": "x", "b": "y"})
    ),
    "hyperparameters inside": lambda wrap: wrap(optax.inject_hyperparams(optax.adam)(learning_rate=0.1)),
    "hyperparameters around": lambda wrap: optax.inject_hyperparams(
        lambda learning_rate: wrap(optax.adam(learning_rate))
    )(learning_rate=0.1),
    "MultiSteps": lambda wrap: optax.MultiSteps(wrap(optax.adam(0.1)), 2).gradient_transformation(),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", MAPPED)
def test_tree_map_params_reaches_the_copies_of_parameters_that_it_reaches_without_the_wrapper(name, level):
    """The oracle is optax alone, on a state in which every array is its own."""
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    places = {"a": "at a", "b": "at b"}
    mapped = []
    with ampx.init("jax", level=level, dtype="bfloat16"):
        for wrap in (ampx.wrap_optimizer, lambda tx: tx):
            tx = MAPPED[name](wrap)
            tree = optax.tree_map_params(
                tx,
                lambda leaf, place: place,
                tx.init(params),
                places,
                transform_non_params=lambda leaf: "other",
                is_leaf=lambda leaf: leaf is None or isinstance(leaf, optax.MaskedNode),
            )
            mapped.append(sorted(leaf for leaf in jax.tree.leaves(tree) if leaf != "other"))
    masters = ["at a", "at b"] if level == "O2" else []
    assert mapped[0] == sorted([*mapped[1], *masters])
    assert "at a" in mapped[1]


def test_a_state_that_tree_map_params_placed_trains_on_and_names_its_parameters_again(session):
    """Sharding a state is what it is for; the oracle is the run that was not mapped."""
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    tx = ampx.wrap_optimizer(optax.adam(0.1))
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,))
    placed = NamedSharding(mesh, P())
    update = jax.jit(tx.update)
    state = tx.init(params)
    bad = {"a": jnp.full(3, np.inf), "b": jnp.full(2, ampx.loss_scale(state))}
    _, state = update(bad, state, params)
    mapped = optax.tree_map_params(
        tx,
        jax.device_put,
        state,
        jax.tree.map(lambda _: placed, params),
        transform_non_params=lambda leaf: jax.device_put(leaf, placed),
    )
    assert same(state, mapped)
    assert ampx.loss_scale(mapped) == 2.0**15
    [row] = ampx.debug.nonfinite_parameters(mapped)
    assert (row.name, row.nonfinite) == ("parameter 0", 3)
    assert ampx.meter(mapped) is None
    for gradients in (jax.tree.map(jnp.ones_like, bad), bad):
        _, state = update(gradients, state, params)
        _, mapped = update(gradients, mapped, params)
        assert same(state, mapped)
    [row] = ampx.debug.nonfinite_parameters(mapped)
    assert (row.name, row.nonfinite, row.elements) == ("a", 3, 3)
    assert find_all(mapped)[0].settings.parameters == find_all(state)[0].settings.parameters


def test_a_state_without_names_goes_through_loops(session):
    params = {"a": jnp.ones(3)}
    tx = ampx.wrap_optimizer(optax.adam(0.1))
    state = optax.tree_map_params(tx, lambda leaf: leaf, tx.init(params))
    rows = jnp.full((4, 3), ampx.loss_scale(state))
    state, _ = jax.lax.scan(lambda state, slope: (tx.update({"a": slope}, state, params)[1], None), state, rows)
    assert find_all(state)[0].numbers.steps == 4
    assert find_all(tx.update({"a": jnp.full(3, jnp.nan)}, state, params)[1])[0].settings.parameters[0][0] == "a"


def test_states_of_other_parameters_have_another_structure(session):
    """Else a compiled function that has seen one would return the other with the first one's names."""
    tx = ampx.wrap_optimizer(optax.sgd(0.1))
    carry = jax.jit(lambda state: state)
    for name in ("a", "b"):
        assert find_all(carry(tx.init({name: jnp.ones(3)})))[0].settings.parameters[0][0] == name


def test_the_tools_for_trees_read_and_write_the_state(session):
    """Its leaves have paths of their own, `tree_get` and `tree_set` find fields, flattened it comes back the same."""
    params = {"a": jnp.ones(3)}
    tx = ampx.wrap_optimizer(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
    state = tx.init(params)
    assert optax.tree_utils.tree_get(state, "learning_rate") == jnp.float32(0.1)
    assert same(optax.tree_utils.tree_get(state, "packed"), find_all(state)[0].packed)
    changed = optax.tree_utils.tree_set(state, learning_rate=jnp.float32(0.0))
    updates, changed = tx.update({"a": jnp.full(3, ampx.loss_scale(changed))}, changed, params)
    assert not jnp.any(updates["a"])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(changed)]
    assert len(set(paths)) == len(paths) == len(jax.tree.leaves(changed))
    by_path = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf, changed)
    assert jax.tree.structure(by_path) == jax.tree.structure(changed)
    assert same(by_path, changed)


@pytest.mark.parametrize("name", SOUND)
def test_what_stands_around_goes_on_after_an_overflow(session, name):
    """To what stands around, a skipped step is one of zeros; the oracle is optax alone with gradients of zero there."""
    slopes = {"a": jnp.float32(0.5), "b": jnp.float32(0.25)}
    around, results = SOUND[name], []
    for tx in (around(ampx.wrap_optimizer(optax.sgd(1.0))), SOUND_ALONE.get(name, around)(optax.sgd(1.0))):
        params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
        state = tx.init(params)
        wrapped, update = bool(find_all(state)), jax.jit(tx.update)
        for overflow in (0, 1, 1, 0, 1, 0):
            factor = ampx.loss_scale(state) * (np.inf if overflow else 1.0) if wrapped else 1.0 - overflow
            updates, state = update(jax.tree.map(lambda slope, factor=factor: slope * factor, slopes), state, params)
            params = optax.apply_updates(params, updates)
        results.append(jax.tree.map(float, params))
        assert not wrapped or ampx.loss_scale(state) == 2.0**13
    assert results[0] == results[1]


def test_inject_hyperparams_inside_and_around(session):
    inside = ampx.wrap_optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    around = optax.inject_hyperparams(lambda learning_rate: ampx.wrap_optimizer(optax.sgd(learning_rate)))(0.5)
    for tx in (inside, around):
        params = jnp.asarray(START)
        state = tx.init(params)
        params, state = jax.jit(lambda p, s, x, tx=tx: train_step(tx, p, s, x))(params, state, slopes(0))
        assert params.tolist() == (START - 0.5 * FINITE).tolist()
        params, state = train_step(tx, params, state, slopes(1))
        assert params.tolist() == (START - 0.5 * FINITE).tolist()


def test_schedules_do_not_count_skipped_steps(session):
    tx = ampx.wrap_optimizer(optax.sgd(optax.piecewise_constant_schedule(1.0, {1: 0.5})))
    params = jnp.zeros(3)
    state = tx.init(params)
    moved = []
    for overflow in (1, 0, 1, 0):
        before = params
        params, state = train_step(tx, params, state, slopes(overflow))
        moved.append(((before - params) / FINITE)[0].item())
    assert moved == [0.0, 1.0, 0.0, 0.5]


def test_extra_arguments_reach_the_inner_transformation(session):
    tx = ampx.wrap_optimizer(optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    params = jnp.zeros(3)
    state = tx.init(params)
    for _ in range(4):
        gradients = slopes(0) * ampx.loss_scale(state)
        updates, state = jax.jit(lambda g, s: tx.update(g, s, params, value=1.0))(gradients, state)
    assert np.asarray(updates / FINITE)[0] < 1.0


def test_flax_train_state_applies_gradients(session):
    train_state = pytest.importorskip("flax.training.train_state")
    serialization = pytest.importorskip("flax.serialization")
    tx = ampx.wrap_optimizer(optax.adam(0.1))
    state = train_state.TrainState.create(apply_fn=lambda p, x: p["w"] * x, params={"w": jnp.asarray(START)}, tx=tx)

    @jax.jit
    def step(state, slope):
        def scaled_loss(params):
            with ampx.scale_loss(jnp.sum(state.apply_fn(params, slope)), state.opt_state) as scaled:
                return scaled

        return state.apply_gradients(grads=jax.grad(scaled_loss)(state.params))

    for overflow in (0, 1):
        state = step(state, slopes(overflow))
    assert ampx.last_step(state) == ampx.StepResult(False, False, 65536.0, 32768.0, 1)
    np.testing.assert_allclose(state.params["w"], plain(optax.adam(0.1), [FINITE])[0], rtol=1e-6)
    again = serialization.from_bytes(state, serialization.to_bytes(state))
    assert same(again.params, state.params)
    assert ampx.last_step(again) == ampx.last_step(state)
    assert ampx.last_step(step(again, slopes(1))).next_scale == 16384.0


def test_what_is_no_state_of_a_wrapped_optimizer_is_refused(session):
    """What a raw optimizer made, or what a checkpoint gave that was restored without a state to restore into."""
    tx = ampx.wrap_optimizer(optax.sgd(0.1))
    params = jnp.asarray(START)
    for other in (optax.sgd(0.1).init(params), {"packed": jnp.zeros(3), "inner": ()}, None):
        with pytest.raises(ampx.NotWrappedError, match=type(other).__name__):
            jax.jit(lambda grads, other=other: tx.update(grads, other, params))(params)


@pytest.mark.parametrize(
    "cast",
    [lambda leaf: leaf.astype(jnp.bfloat16), lambda leaf: leaf[..., :3], lambda leaf: leaf[..., 0], lambda leaf: "a"],
)
def test_a_state_whose_counts_are_no_counts_any_more_is_refused(session, cast):
    """A whole state cast to low precision, those whose arrays were cut, and one with something else in their places."""
    tx = ampx.wrap_optimizer(optax.sgd(0.1))
    state = jax.tree.map(cast, tx.init(jnp.asarray(START)))
    with pytest.raises(ampx.InvalidStateError, match="int32"):
        tx.update(jnp.asarray(START), state, jnp.asarray(START))
    with pytest.raises(ampx.InvalidStateError, match="int32"):
        ampx.last_step(state)


def test_states_survive_pickle(session):
    tx = ampx.wrap_optimizer(optax.adam(0.1))
    _, state = train_step(tx, jnp.asarray(START), tx.init(jnp.asarray(START)), slopes(1))
    again = pickle.loads(pickle.dumps(state))
    assert same(again, state)
    assert session.state_dict(again) == session.state_dict(state)


def test_a_state_saved_by_torch_goes_on_exactly(session):
    saved = {
        "schema": "ampx.loss_scale/1",
        "framework": "torch",
        "groups": [
            {
                "config": {
                    "init_scale": 1024.0,
                    "growth_factor": 3.0,
                    "backoff_factor": 0.75,
                    "growth_interval": 4,
                    "hysteresis": 2,
                    "min_scale": 5.0,
                    "max_scale": 2000.0,
                    "dynamic": True,
                    "max_consecutive_skips": 40,
                },
                "losses": [
                    {"loss_id": 0, "scale": 77.25, "growth_tracker": 2, "hysteresis_tracker": 1, "consecutive_skips": 5}
                ],
            }
        ],
    }
    tx = ampx.wrap_optimizer(optax.sgd(0.5))
    params = jnp.asarray(START)
    state = session.load_state_dict(json.loads(json.dumps(saved)), tx.init(params))
    assert session.state_dict(state)["groups"] == saved["groups"]
    (group,) = saved["groups"]
    oracle = Oracle(group["config"], group["losses"][0])
    step = jax.jit(lambda p, s, x: train_step(tx, p, s, x))
    for overflow in (0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1):
        params, state = step(params, state, slopes(overflow))
        after = oracle.step(bool(overflow))
        (row,) = session.state_dict(state)["groups"][0]["losses"]
        assert row == {"loss_id": 0, **vars(after)}


def test_wrapping_what_holds_a_wrapped_part_is_refused(session):
    tx = ampx.wrap_optimizer(optax.chain(optax.clip(1.0), ampx.wrap_optimizer(optax.sgd(0.1))))
    with pytest.raises(ampx.AlreadyWrappedError, match="part that is wrapped"):
        tx.init(jnp.zeros(1))


def test_host_calls_inside_a_trace_say_so(session):
    tx = ampx.wrap_optimizer(optax.sgd(0.1))
    state = tx.init(jnp.zeros(1))
    for call in (session.observe, session.state_dict):
        with pytest.raises(ampx.ProtocolError, match="inside traced code"):
            jax.jit(lambda state, call=call: call(state) and 0)(state)


def test_beside_a_session_of_another_framework_the_functions_find_jax(session, monkeypatch):
    registry = default_registry()
    other = Registration("other", lambda: None, ("other",), "other", "other", "other")
    monkeypatch.setitem(registry._registrations, "other", other)
    backend = SimpleNamespace(capabilities=ampx.Capabilities())
    monkeypatch.setitem(sessions._active, "other", SimpleNamespace(backend=backend))
    for raw in (
        optax.sgd(0.5),
        optax.chain(optax.clip(1.0), optax.adam(0.1)),
        optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    ):
        state = ampx.wrap_optimizer(raw).init(jnp.asarray(START))
        assert ampx.loss_scale(state) == session.loss_scale(state) == 65536.0
        assert ampx.last_step(state) is None
    calls = []
    scheduler = SimpleNamespace(step=lambda: calls.append(1))
    tx = ampx.wrap_optimizer(optax.sgd(0.5))
    _, state = train_step(tx, jnp.asarray(START), tx.init(jnp.asarray(START)), slopes(0))
    assert ampx.gate(scheduler, lambda: state).step() is True
    assert calls == [1]


def test_the_tests_see_two_devices():
    done = subprocess.run(
        [sys.executable, "-c", "import jax; assert jax.device_count() >= 2"], capture_output=True, check=False
    )
    assert done.returncode == 0


def test_a_loaded_state_goes_where_the_parameters_are_and_compiles_nothing_anew(session):
    tx = ampx.wrap_optimizer(optax.sgd(0.5))
    step = jax.jit(lambda params, state, slope: train_step(tx, params, state, slope))
    last = jax.devices()[-1]
    params = jax.device_put(jnp.asarray(START), last)
    _, state = step(params, tx.init(jnp.asarray(START)), slopes(1))
    compiled = step._cache_size()
    loaded = session.load_state_dict(session.state_dict(state), tx.init(jnp.asarray(START)))
    assert ampx.loss_scale(loaded) == 32768.0
    step(params, loaded, slopes(0))
    assert step._cache_size() == compiled
    assert session.load_state_dict(session.state_dict(state), state).packed.devices() == {last}


def test_parameters_in_float64_which_nothing_casts_are_told_of(session):
    tx = ampx.wrap_optimizer(optax.sgd(0.5))
    with jax.enable_x64(True), pytest.warns(ampx.PrecisionWarning, match="1 of 2 parameters are float64"):
        tx.init({"a": jnp.ones(2, jnp.float64), "b": jnp.ones(2, jnp.float32)})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_one_element_that_is_not_finite_is_found_wherever_it_is(dtype):
    """The oracle is NumPy's `isfinite`; the largest numbers of either sign, and subnormal ones, are finite."""
    with jax.enable_x64(True):
        kind = jnp.dtype(dtype)
        real = jnp.dtype("float32" if dtype == "complex64" else "float64" if dtype == "complex128" else dtype)
        limits = jnp.finfo(real)
        plain = np.array([[0.0, -0.0, limits.max, limits.min, limits.smallest_subnormal, -1.0]] * 7).astype(kind)
        look = jax.jit(lambda leaf: (all_finite([leaf, leaf[:0]]), count_nonfinite([leaf])))
        assert [np.asarray(value).tolist() for value in look(plain)] == [True, [0]]
        for bad in (np.inf, -np.inf, np.nan, -np.nan):
            for place in ((0, 0), (3, 2), (6, 5)):
                spoiled = plain.copy()
                spoiled[place] = 1j * bad if kind.kind == "c" else bad
                assert not np.isfinite(spoiled.astype(np.complex128)).all()
                assert [np.asarray(value).tolist() for value in look(spoiled)] == [False, [1]]
