"""The meter: updates that round to nothing and gradients that flush, counted again by NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from metering import count

import ampx
from ampx.numerics import meter
from ampx.numerics.rounding import sample
from ampx.rooms import METER_EVERY
from ampx_jax.state import find_all

pytestmark = pytest.mark.usefixtures("quiet_end")


def init(dtype="bfloat16", level="O1", every=2, **options):
    amp = ampx.init("jax", dtype=dtype, device="cpu", level=level, **options)
    amp.meter_every = every
    return amp


def network():
    """Return parameters that are sampled, and one that gets no gradient."""
    draw = np.random.default_rng(0)
    return {
        "first": {"kernel": draw.normal(size=(3, 2000)), "bias": np.zeros(2000)},
        "idle": np.ones(2),
        "last": draw.normal(size=(2000, 2)),
    }


def params_of(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def gradients_of(params, scale, least=-40):
    """Return scaled gradients of all magnitudes from two to the power of `least`; those of `idle` are zero."""
    draw = np.random.default_rng(1)

    def make(leaf):
        values = 2.0 ** draw.uniform(least, 2, leaf.shape) * draw.choice([-1, 0, 1], leaf.shape) * scale
        return jnp.asarray(values if leaf.size != 2 else 0 * values, leaf.dtype)

    return jax.tree.map(make, params)


def sampled(leaf):
    return sample(np.asarray(leaf.astype("float32")), meter.SAMPLES)


def counted(before, after, gradients, compute, dtype):
    """Return what NumPy counts, parameter by parameter."""
    rows = zip(*(jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (before, after, gradients)), strict=True)
    return tuple(
        count(
            jax.tree_util.keystr(path, simple=True, separator="."), dtype, sampled(a), sampled(b), sampled(g), compute
        )
        for (path, a), (_, b), (_, g) in rows
    )


def step(tx, params, state, gradients):
    updates, state = jax.jit(tx.update)(gradients, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_numbers_equal_a_count_in_numpy(dtype):
    amp = init(dtype, loss_scale=ampx.LossScale(init_scale=1024.0))
    tx = amp.wrap_optimizer(optax.sgd(1e-3), max_grad_norm=1.0)
    params = params_of(network())
    state = tx.init(params)
    gradients = gradients_of(params, ampx.loss_scale(state))
    assert ampx.meter(state) is None
    before, state = step(tx, params, state, gradients)
    assert ampx.meter(state) is None
    after, state = step(tx, before, state, gradients)
    expected = meter.Meter(2, dtype, 1024.0, counted(before, after, gradients, dtype, "float32"))
    assert ampx.meter(state) == expected
    assert [entry.sampled for entry in expected.parameters] == [
        2000,
        858,
        2,
        4000,
    ]  # every 7th of 6,000, which has the factors 2, 3 and 5
    assert 0 < expected.lost < 1
    assert 0 < expected.flushed < 1 or dtype == "bfloat16"
    after, state = step(tx, after, state, gradients)
    assert ampx.meter(state) == expected


def test_pure_bfloat16_loses_updates_and_says_so_and_with_copies_it_loses_none():
    lost, events = {}, []
    for level in ("O3", "O2"):
        amp = init(level=level, loss_scale=1.0)
        amp.on_event(events.append)
        tx = amp.wrap_optimizer(optax.adam(1e-5))
        params = params_of(network())
        params, state = amp.prepare(params, tx.init(params))
        gradients = gradients_of(params, 1.0, least=-6)
        before, state = step(tx, params, state, gradients)
        masters = [before if level == "O3" else find_all(state)[0].masters]
        after, state = step(tx, before, state, gradients)
        masters.append(after if level == "O3" else find_all(state)[0].masters)
        amp.observe(state)
        amp.observe(state)
        reading = ampx.meter(state)
        assert reading.parameters == counted(
            *masters, gradients, "bfloat16", "bfloat16" if level == "O3" else "float32"
        )
        lost[level] = reading.lost
    assert lost["O3"] > 0.5
    assert lost["O2"] == 0.0
    (event,) = events
    assert isinstance(event, ampx.PrecisionLost)
    assert (event.step, event.lost) == (2, lost["O3"])


def test_unasked_it_looks_where_updates_can_be_lost():
    readings = {}
    for level in ("O1", "O2", "O3"):
        amp = init(level=level, every=None, loss_scale=1.0)
        tx = amp.wrap_optimizer(optax.sgd(1e-3))
        params = {"w": jnp.ones((2, 2))}
        state = tx.init(params)
        if level != "O1":
            params, state = amp.prepare(params, state)
        update = jax.jit(tx.update)
        for _ in range(METER_EVERY):
            updates, state = update(params, state, params)
            params = optax.apply_updates(params, updates)
        reading = ampx.meter(state)
        readings[level] = reading and reading.step
    assert readings == {"O1": None, "O2": None, "O3": METER_EVERY}


def test_gradients_that_flush_at_the_present_scale_are_told():
    events = []
    amp = init("float16", loss_scale=4.0, every=1)
    amp.on_event(events.append)
    tx = amp.wrap_optimizer(optax.sgd(1.0))
    params = {"w": jnp.ones(4)}
    # Times 4: 2**-25 is a tie, which becomes zero.
    state = tx.init(params)
    gradients = {"w": ampx.loss_scale(state) * jnp.array([2.0**-28, 2.0**-27, 2.0**-26, 1.0])}
    _, state = step(tx, params, state, gradients)
    amp.observe(state)
    (entry,) = ampx.meter(state).parameters
    assert (entry.flushed, entry.moved, entry.headroom) == (2, 4, np.log2(65504.0) - 2)
    assert [event.flushed for event in events] == [0.5]


def test_a_skipped_step_and_one_that_updates_nothing_are_not_metered():
    amp = init(every=1, loss_scale="dynamic")
    tx = amp.wrap_optimizer(optax.MultiSteps(optax.sgd(0.5), 2).gradient_transformation())
    params = {"w": jnp.ones(4)}
    state = tx.init(params)
    for number, slope in enumerate([1.0, np.inf, 1.0, 1.0]):
        params, state = step(tx, params, state, {"w": jnp.full(4, slope * ampx.loss_scale(state))})
        reading = ampx.meter(state)
        assert (None if reading is None else reading.step) == [None, None, 3, 3][number]


def test_it_counts_in_scan_and_where_states_are_stacked_there_is_none():
    amp = init(every=3, loss_scale=1.0)
    tx = amp.wrap_optimizer(optax.sgd(2.0**-30))
    params = {"w": jnp.ones(4)}

    def body(carry, gradients):
        updates, state = tx.update({"w": gradients}, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    (_, state), _ = jax.lax.scan(body, (params, tx.init(params)), jnp.ones((7, 4)))
    assert (ampx.meter(state).step, ampx.meter(state).lost) == (6, 1.0)
    stacked = jax.vmap(tx.init)({"w": jnp.ones((2, 4))})
    assert ampx.meter(stacked) is None


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_compiled_step_copies_no_parameter_for_it(level):
    first = {"first": jnp.ones((256, 256)), "last": jnp.ones((256, 512))}
    copies, held = {}, {}
    for every in (0, 2):
        amp = init(level=level, every=every)
        tx = amp.wrap_optimizer(optax.adam(1e-3))
        state = tx.init(first)
        params = amp.prepare(first)

        def step(params, state, x, amp=amp, tx=tx):
            def scaled_loss(params):
                loss = jnp.mean(jnp.tanh(x @ params["first"]) @ params["last"])
                with amp.scale_loss(loss, state) as scaled:
                    return scaled

            updates, state = tx.update(jax.grad(scaled_loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        x = jnp.ones((4, 256), params["first"].dtype)
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x).compile()
        copies[every] = re.findall(r"= \S+\[256,\d+\]\S* copy\(", compiled.as_text().partition("ENTRY")[2])
        held[every] = compiled.memory_analysis().temp_size_in_bytes
        amp.shutdown()
    assert copies == {0: [], 2: []}
    # One gradient of low precision waits for the look, too; a copy of all parameters would be twice that, or more.
    assert held[2] < held[0] + params["first"].nbytes + 4096


def test_beside_a_parameter_that_is_split_another_one_stays_the_same_on_all_devices():
    amp = init(every=1, loss_scale=1.0)
    tx = amp.wrap_optimizer(optax.sgd(0.5), axis_name="x")
    params = {"split": jnp.ones(4), "whole": jnp.ones(3)}
    state = tx.init({"split": jnp.ones(2), "whole": jnp.ones(3)})
    ampx.loss_scale(state)
    specs = {"split": P("x"), "whole": P()}

    def step(params):
        updates, _ = tx.update(params, state, params)
        return optax.apply_updates(params, updates)

    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,))
    after = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=specs))(params)
    assert jax.tree.all(jax.tree.map(lambda leaf: bool((leaf == 0.5).all()), after))


def test_nothing_in_a_step_asks_the_host():
    amp = init(every=1)
    tx = amp.wrap_optimizer(optax.sgd(0.1))
    params = {"w": jnp.ones(4)}
    text = jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
    assert "callback" not in text
