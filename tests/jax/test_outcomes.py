"""Outcomes without callbacks under `ampx run`: steps, skips and the scale are those that callbacks tell."""

import functools
import gc
import inspect
import itertools
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import ampx
import ampx_jax
from ampx.backend import offer
from ampx.run import Automation, LossCurve, Run, RunSettings
from ampx.testing.kit.automation import Rates
from ampx_jax.run import outcomes
from processes import run_python

B = jnp.asarray(np.linspace(0.1, 0.9, 12, dtype=np.float32).reshape(3, 4))
INFINITE = float("inf")
# More steps than the host leaves unseen, and three of them overflow: the last, and two in a row.
PATTERN = [INFINITE if number in (20, 50, 51, 99) else 1.0 + number / 100 for number in range(100)]

pytestmark = pytest.mark.usefixtures("nothing_of_its_own", "quiet_end")


def automate(dtype="bfloat16"):
    run = Run("jax", RunSettings(dtype=dtype, device="cpu"))
    return run, offer(ampx_jax.load(), Automation).automate(run)


def loss_of(weights, factor):
    return jnp.sum(weights**2) * factor * 2.0**-8


def make():
    """Return a step as scripts have it, the weights and the state."""
    tx = optax.adam(0.1)

    def step(weights, state, factor):
        loss, grads = jax.value_and_grad(loss_of)(weights, factor)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    return step, B, tx.init(B)


def train(step, weights, state, factors):
    for factor in factors:
        weights, state, _ = step(weights, state, factor)
    return weights, state


def callbacks(step, *args):
    return str(jax.make_jaxpr(step)(*args)).count("callback")


def record(run):
    (record,) = run.recorder.optimizers.values()
    return record.steps, record.skipped, record.scales


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_skips_and_the_scale_are_those_that_callbacks_tell(dtype, monkeypatch):
    reported, values = [], []
    for by_callback in (False, True):
        run, region = automate(dtype)
        with region, monkeypatch.context() as patched:
            if by_callback:
                patched.setattr(jax, "jit", inspect.unwrap(jax.jit))
            step, weights, state = make()
            step = jax.jit(step)
            if by_callback:
                assert callbacks(step, weights, state, 1.0) > 0
                for factor in PATTERN:  # callbacks of several steps may come in any order
                    weights, state = train(step, weights, state, [factor])
                    jax.effects_barrier()
            else:
                weights, state = train(step, weights, state, PATTERN)
        reported.append(record(run))
        values.append((weights, state))
    assert reported[0] == reported[1]
    assert reported[0][:2] == (100, [21, 51, 52, 100])
    assert reported[0][2] == (
        [(21, 2.0**15), (51, 2.0**14), (52, 2.0**13), (100, 2.0**12)] if dtype == "float16" else []
    )
    for own, other in zip(*map(jax.tree.leaves, values), strict=True):
        # Compiled apart: weights below one, each of 100 updates rounded once to the spacing of 2**-24.
        np.testing.assert_allclose(own, other, rtol=0, atol=100 * 2.0**-24)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_compiled_step_has_no_callback(dtype, monkeypatch):
    compiled = []
    native = jax.jit

    def noting(*args, **kwargs):
        compiled.append(native(*args, **kwargs))
        return compiled[-1]

    monkeypatch.setattr(jax, "jit", noting)
    run, region = automate(dtype)
    with region:
        step, weights, state = make()
        step = jax.jit(step)
        train(step, weights, state, [1.0])
        plain, hiding = compiled[-2:]  # JAX may compile something of its own first
        assert plain._cache_size() == 0, "the function was compiled as the script made it, with callbacks"
        scale = ampx_jax.state.as_arrays(ampx.LossScale().initial_state()).values()
        assert "callback" not in str(hiding.trace(weights, state, 1.0, ampx_loss_scale=tuple(scale)).jaxpr)
        if dtype == "bfloat16":
            hiding(weights, state, 1.0, ampx_loss_scale=None)
            assert hiding._cache_size() == 1, "a scale that stays 1 was an input"
    assert run.recorder.steps == 1


def test_the_scale_moves_between_functions():
    run, region = automate("float16")
    with region:
        tx = optax.sgd(0.1)
        state = tx.init(B)
        gradient, update = jax.jit(jax.grad(loss_of)), jax.jit(tx.update)
        for factor in (1.0, INFINITE, 1.0):
            updates, state = update(gradient(B, factor), state)
    assert record(run) == (3, [2], [(2, 2.0**15)])
    np.testing.assert_allclose(updates, -0.1 * 2 * B * 2.0**-8, rtol=2.0**-10)


@pytest.mark.parametrize("apart", [False, True])
def test_a_scale_that_is_too_large_falls_on_the_device(apart):
    """The factor of the product's derivative is the scale: 2**16 is no float16, 2**15 is one."""
    run, region = automate("float16")
    with region:
        tx = optax.sgd(1.0)
        weights, state = B, tx.init(B)
        gradient = jax.grad(lambda weights: jnp.sum(jnp.eye(3) / 4 @ weights))
        parts = (jax.jit, lambda function: function) if apart else (lambda function: function, jax.jit)
        gradient, update = parts[0](gradient), parts[0](tx.update)
        step = parts[1](lambda weights, state: update(gradient(weights), state))
        for _ in range(3):
            updates, state = step(weights, state)
    assert record(run) == (3, [1], [(1, 2.0**15)])
    assert jnp.all(updates == -0.25)


def test_a_scale_that_fell_by_a_callback_is_what_compiled_functions_read():
    run, region = automate("float16")
    with region:
        tx = optax.sgd(1.0)
        state = tx.init(B)
        gradient = jax.grad(lambda weights, factor: jnp.sum(jnp.eye(3) / 4 @ weights) * factor)
        step = jax.jit(lambda factor: tx.update(gradient(B, factor), state))
        step(0.25)
        tx.update(gradient(B, 1.0), state)
        jax.effects_barrier()
        updates, _ = step(1.0)
    assert record(run) == (3, [2], [(2, 2.0**15)])
    assert jnp.all(updates == -0.25)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_data_on_several_devices_do_not_meet_in_the_scale(dtype):
    if jax.device_count() < 2:
        pytest.skip("JAX has one device here")
    run, region = automate(dtype)
    with region:
        step, weights, state = make()
        step = jax.jit(step)
        for device, factor in ((1, 1.0), (0, INFINITE), (1, 1.0)):
            weights, state, _ = step(*jax.device_put((weights, state), jax.devices()[device]), factor)
            jax.effects_barrier()
    assert record(run) == (3, [2], [(2, 2.0**15)] if dtype == "float16" else [])


def test_updates_in_one_function_are_told_in_order():
    run, region = automate("float16")
    with region:
        step, weights, state = make()
        jax.jit(lambda *arguments: train(step, *arguments, [1.0, INFINITE, 1.0, INFINITE]))(weights, state)
    assert record(run) == (4, [2, 4], [(2, 2.0**15), (4, 2.0**14)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", ["scan", "cond", "inner", "vmap", "eager", "lowered", "shardings"])
def test_what_is_traced_elsewhere_is_told_by_callbacks(way, dtype):
    run, region = automate(dtype)
    with region:
        step, weights, state = make()
        direct = jax.jit(step)
        weights, state = train(direct, weights, state, [1.0, INFINITE, 1.0])

        def loop(weights, state, factors):
            def body(carry, factor):
                return step(*carry, factor)[:2], None

            return jax.lax.scan(body, (weights, state), factors)[0]

        calls = {
            "scan": jax.jit(lambda w, s, factor: loop(w, s, factor[None])),
            "cond": jax.jit(lambda w, s, factor: jax.lax.cond(w[0, 0] < 99, step, step, w, s, factor)),
            "inner": jax.jit(lambda w, s, factor: direct(w, s, factor)),
            "vmap": lambda w, s, factor: jax.tree.map(
                lambda leaf: leaf[0], jax.vmap(direct, (None, None, 0))(w, s, factor[None])
            ),
            "eager": step,
            "lowered": lambda *arguments: direct.lower(*arguments).compile()(*arguments),
            "shardings": jax.jit(step, out_shardings=None),
        }[way]
        for factor in (INFINITE, 1.0):
            weights, state = calls(weights, state, jnp.float32(factor))[:2]
            jax.effects_barrier()
        for factor in (1.0, 1.0, INFINITE):
            weights, state = train(direct, weights, state, [factor])
            jax.effects_barrier()
    skipped = [2, 4, 8]
    scales = [(step, 2.0 ** (16 - number)) for number, step in enumerate(skipped, 1)]
    assert record(run) == (8, skipped, scales if dtype == "float16" else [])
    assert jnp.all(jnp.isfinite(weights))
    assert state[0].count == 5


def on_two(way, step):
    """Return a step of two devices, or elements, each with weights, a state and a factor of its own."""
    if way == "vmap":
        return jax.jit(jax.vmap(step))
    if way == "pmap":
        return jax.pmap(step)
    if way == "lowered":
        whole = on_two("shard_map", step)
        return lambda *arrays: whole.lower(*arrays).compile()(*arrays)
    mesh = jax.make_mesh((2, 1), ("data", "other"), axis_types=(AxisType.Auto,) * 2)
    rows = PartitionSpec("data")

    def local(*arrays):
        arrays = jax.tree.map(lambda array: array[0], arrays)
        if way == "scan in shard_map":
            *arrays, factor = arrays
            _, results = jax.lax.scan(lambda carry, _: ((step(*carry, factor)),) * 2, tuple(arrays), None, 1)
            return results
        return jax.tree.map(lambda array: array[None], step(*arrays))

    axes = {"data"} if way == "shard_map of one axis" else {"data", "other"}
    checked = way == "checked shard_map"
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, axis_names=axes, check_vma=checked))


WAYS = ["shard_map", "checked shard_map", "scan in shard_map", "pmap", "vmap", "lowered"]


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_several_devices_counts_once_and_halves_the_scale_once(way, observed):
    if jax.device_count() < 2:
        pytest.skip("JAX has one device here")
    run, region = automate("float16")
    losses = []
    if observed:
        run.recorder.observer = mock.Mock(loss=lambda read: losses.append(read()))
    with region:
        step, weights, state = make()
        weights, state = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (weights, state))
        both = on_two(way, lambda *arrays: step(*arrays)[:2])
        seen = [weights]
        for factors in ([1.0, 3.0], [1.0, INFINITE], [INFINITE, INFINITE], [1.0, 1.0]):
            weights, state = both(weights, state, jnp.asarray(factors))
            seen.append(weights)
    assert record(run) == (4, [2, 3], [(2, 2.0**15), (3, 2.0**14)])
    # An element of a batch may be a network of its own, and only that skips; what a device has may be part of one.
    alone = way == "vmap"
    for device, applied in ((0, [True, alone, False, True]), (1, [True, False, False, True])):
        pairs = itertools.pairwise(weights[device] for weights in seen)
        assert [bool((after != before).any()) for before, after in pairs] == applied
    if observed:
        mean = float(jnp.mean(loss_of(B, 1.0) * jnp.array([1.0, 3.0])))
        assert losses[0] == pytest.approx(mean, rel=2.0**-10)
        assert len(losses) == 4


def test_a_step_from_which_jax_calls_nobody_back_is_refused_with_what_to_write():
    if jax.device_count() < 2:
        pytest.skip("JAX has one device here")
    _, region = automate("bfloat16")
    with region:
        step, weights, state = make()
        weights, state = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (weights, state))
        both = on_two("shard_map of one axis", lambda *arrays: step(*arrays)[:2])
        with pytest.raises(ampx.RunRefusedError, match=r"axis_name=\('data',\)"):
            both(weights, state, jnp.ones(2))


def test_a_whole_training_in_one_function_counts_every_step():
    run, region = automate("float16")
    with region:
        step, weights, state = make()

        @jax.jit
        def epoch(weights, state, factors):
            def body(carry, factor):
                return step(*carry, factor)[:2], None

            return jax.lax.scan(body, (weights, state), factors)[0]

        for _ in range(3):
            weights, state = epoch(weights, state, jnp.array([1.0, INFINITE]))
            jax.effects_barrier()
    assert run.recorder.steps == 6
    assert record(run)[1] == [2, 4, 6]


@pytest.mark.parametrize(
    ("learning_rate", "expected"),
    [(0.5, [(0.5,), (0.5,), (0.25,), (0.25,)]), (lambda count: 0.5, [()] * 4)],
    ids=["set by the script", "of a schedule"],
)
def test_learning_rates_in_the_state_come_along_where_updates_call_back(learning_rate, expected):
    run, region = automate()
    run.recorder.observer = seen = Rates(run.recorder)
    with region:
        tx = optax.inject_hyperparams(optax.sgd)(learning_rate)
        weights, state = jnp.array(1.0), tx.init(jnp.array(1.0))

        @jax.jit
        def two_steps(weights, state):
            def step(carry, _):
                weights, state = carry
                updates, state = tx.update(jax.grad(lambda weights: weights)(weights), state, weights)
                return (optax.apply_updates(weights, updates), state), None

            return jax.lax.scan(step, (weights, state), length=2)[0]

        for rate in (0.5, 0.25):
            state.hyperparams["learning_rate"] = jnp.array(rate)
            weights, state = two_steps(weights, state)
    assert seen.rates == expected


def test_options_methods_and_attributes_of_compiled_functions_are_kept():
    run, region = automate()
    with region:
        step, weights, state = make()
        weights, state = jax.tree.map(jnp.copy, (weights, state))

        @functools.partial(jax.jit, static_argnames=("times",), donate_argnums=(0, 1))
        def some(weights, state, factor, times=1):
            """Take some steps."""
            assert isinstance(times, int)
            for _ in range(times):
                weights, state, _ = step(weights, state, factor)
            return weights, state

        before = weights
        weights, state = some(weights, state, 1.0, 2)
        assert before.is_deleted()
        weights, state = some(weights, state, factor=1.0, times=3)
        assert (some.__name__, some.__doc__) == ("some", "Take some steps.")
        assert list(inspect.signature(some).parameters) == ["weights", "state", "factor", "times"]
        assert isinstance(some, jax.stages.Wrapped)
        some.clear_cache()
        assert some.eval_shape(weights, state, 1.0)[0].shape == (3, 4)

        class Trainer:
            def __init__(self):
                self.compiled = jax.jit(self.take)

            def take(self, weights, state):
                return step(weights, state, 1.0)[:2]

            @functools.partial(jax.jit, static_argnums=0)
            def method(self, weights, state):
                return self.take(weights, state)

        trainer = Trainer()
        weights, state = trainer.compiled(weights, state)
        weights, state = trainer.method(weights, state)
    assert run.recorder.steps == 7


def test_a_function_given_to_jit_again_is_not_compiled_again_and_not_kept():
    run, region = automate()
    traces = []
    with region:
        step, weights, state = make()

        def noting(weights, state, factor):
            traces.append(factor)
            return step(weights, state, factor)

        for _ in range(3):
            weights, state, _ = jax.jit(noting)(weights, state, 1.0)
        assert len(traces) == 1
        alive = weakref.ref(noting)
        del noting
        gc.collect()
        assert alive() is None
    assert run.recorder.steps == 3


def test_an_optimizer_that_is_started_in_a_compiled_function_and_errors_of_the_script():
    run, region = automate("float16")
    with region:
        tx = optax.adam(0.1)
        state = jax.jit(tx.init)(B)

        @jax.jit
        def failing(state):
            tx.update(B, state)
            raise KeyError("the script's")

        with pytest.raises(KeyError, match="the script's"):
            failing(state)
        _, state = jax.jit(tx.update)(B, state)
    assert run.recorder.steps == 1


def test_on_leaving_jit_is_restored_and_compiled_functions_are_the_scripts():
    before = jax.jit
    run, region = automate()
    with region:
        assert jax.jit is not before
        step, weights, state = make()
        step = jax.jit(step)
        train(step, weights, state, [1.0])
    assert jax.jit is before
    train(step, weights, state, [1.0])
    jax.effects_barrier()
    assert run.recorder.steps == 1
    step.clear_cache()
    assert step._cache_size() == 0


def test_without_a_way_to_know_the_present_trace_all_is_told_by_callbacks(monkeypatch):
    monkeypatch.setattr(outcomes, "_present_trace", None)
    run, region = automate("float16")
    with region:
        step, weights, state = make()
        train(jax.jit(step), weights, state, [1.0, INFINITE])
    assert record(run) == (2, [2], [(2, 2.0**15)])


def epoch_of(step):
    """Return what trains by one call for several steps."""

    @jax.jit
    def epoch(weights, state, factors):
        def body(carry, factor):
            weights, state, loss = step(*carry, factor)
            return (weights, state), loss

        (weights, state), losses = jax.lax.scan(body, (weights, state), factors)
        return weights, state, losses

    return epoch


def split(weights, state, factor, gradient, update):
    loss, grads = gradient(weights, factor)
    updates, state = update(grads, state, weights)
    return optax.apply_updates(weights, updates), state, loss


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("style", ["compiled", "eager", "scan", "two functions", "eager update"])
def test_the_curve_of_a_report_has_the_losses_that_the_script_sees(style, dtype):
    run, region = automate(dtype)
    curve = run.recorder.curve = LossCurve()
    factors = [1.0 + number / 8 for number in range(12)]
    with region:
        step, weights, state = make()
        if style == "scan":
            losses = list(map(float, epoch_of(step)(weights, state, jnp.asarray(factors))[2]))
        else:
            if style == "compiled":
                step = jax.jit(step)
            elif style != "eager":
                tx = optax.adam(0.1)
                state = tx.init(weights)
                update = jax.jit(tx.update) if style == "two functions" else tx.update
                step = functools.partial(split, gradient=jax.jit(jax.value_and_grad(loss_of)), update=update)
            losses = []
            for factor in factors:
                weights, state, loss = step(weights, state, factor)
                losses.append(float(loss))
    points = [point[:2] for point in curve.points()]
    if (style, dtype) == ("eager update", "float16"):  # its gradient reads the scale by a callback, and tells nothing
        points += [(number, loss) for number, loss in enumerate(losses[1:], 2)]
    assert points == [(number, pytest.approx(loss)) for number, loss in enumerate(losses, 1)]
    assert record(run)[0] == len(losses)


def test_a_compiled_gradient_that_reads_the_scale_does_not_wait_for_an_update_that_waits_for_it(tmp_path):
    """The update outside of compiled code reads its outcome, which the gradient's callback has to come before."""
    code = f"""
import functools, jax, optax, numpy as np, jax.numpy as jnp
tx = optax.adam(0.1)
weights = jnp.asarray({np.asarray(B).tolist()})
state = tx.init(weights)
gradient = jax.jit(jax.grad(lambda weights, factor: jnp.sum((weights @ weights.T) ** 2) * factor))
for factor in np.linspace(1.0, 2.0, 4):
    updates, state = tx.update(gradient(weights, factor), state, weights)
    weights = optax.apply_updates(weights, updates)
print("done")
"""
    (tmp_path / "train.py").write_text(code)
    done = run_python("-m", "ampx", "run", "--dtype", "float16", tmp_path / "train.py")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert " 4 steps, " in done.stderr


def test_an_update_outside_of_compiled_code_compiles_nothing_anew(caplog):
    run, region = automate("bfloat16")
    with region:
        step, weights, state = make()
        weights, state = train(step, weights, state, [1.0, INFINITE])
        caplog.clear()
        with jax.log_compiles():
            weights, state = train(step, weights, state, [1.0, INFINITE])
            assert not [entry for entry in caplog.messages if "XLA compilation" in entry]
            jax.jit(lambda x: x - 7)(1.0)
            assert [entry for entry in caplog.messages if "XLA compilation" in entry]  # that is what JAX would say
        jax.effects_barrier()
    assert record(run)[:2] == (4, [2, 4])
