"""`ampx run` in JAX: an unedited script is cast and checked, and what it carries has the structure that it expects."""

import json
import math
import pathlib
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx
import ampx_jax
from ampx.backend import offer
from ampx.numerics.probe import Probe, Watching
from ampx.run import Automation, Run, RunSettings
from ampx_jax import casting
from processes import last_json, run_python

PROGRAM = pathlib.Path(__file__).parents[1] / "programs" / "plain" / "jax_plain.py"
A = jnp.asarray(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
B = jnp.asarray(np.linspace(0.1, 0.9, 12, dtype=np.float32).reshape(3, 4))

pytestmark = pytest.mark.usefixtures("nothing_of_its_own", "quiet_end")


def automate(dtype="bfloat16"):
    run = Run("jax", RunSettings(dtype=dtype, device="cpu"))
    return run, offer(ampx_jax.load(), Automation).automate(run)


def loss_of(weights, x):
    return jnp.sum((x @ weights) ** 2) * 2.0**-8  # so that the gradients of the largest product fit float16, scaled


def train(steps, tx=None, derivative=None):
    """What a script does; `steps` are the numbers that its data are multiplied by."""
    tx = optax.adam(0.1) if tx is None else tx
    derivative = derivative or jax.value_and_grad
    weights, state = B, tx.init(B)

    @jax.jit
    def step(weights, state, x):
        loss, grads = derivative(loss_of)(weights, x)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    for factor in steps:
        weights, state, _ = step(weights, state, A * factor)
    return weights, state


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_script_computes_as_its_hand_edited_version(dtype):
    run, region = automate(dtype)
    with region:
        weights, state = train([1.0, 2.0, 3.0])
    assert run.recorder.steps == 3
    assert run.recorder.ops[("dot_general", dtype)] > 0
    with ampx.init("jax", dtype=dtype, device="cpu", loss_scale=1.0):
        by_hand = train([1.0, 2.0, 3.0], derivative=lambda f: jax.value_and_grad(ampx_jax.autocast(f)))
    # The loss scale is a power of two, but the steps are compiled apart: weights below one, each update rounded once
    # to the spacing of 2**-24, which the next steps carry on.
    np.testing.assert_allclose(weights, by_hand[0], rtol=0, atol=3 * 2.0**-23)
    assert jax.tree.structure(state) == jax.tree.structure(by_hand[1])
    assert np.abs(weights - train([1.0, 2.0, 3.0])[0]).max() > 2.0**-18, "float32 gives the same: nothing was cast"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_that_is_not_finite_changes_neither_weights_nor_state(dtype):
    run, region = automate(dtype)
    with region:
        clean, skipping = train([1.0, 2.0]), train([1.0, float("inf"), 2.0])
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, clean, skipping)))
    (record,) = run.recorder.optimizers.values()
    assert (record.steps, record.skipped) == (5, [4])
    assert record.scales == ([(4, 2.0**15)] if dtype == "float16" else [])
    assert record.initial_scale == (2.0**16 if dtype == "float16" else 1.0)


def test_gradients_too_small_for_float16_survive():
    def tiny(weights):
        return jnp.sum(weights @ jnp.full((4, 1), 2.0**-20)) * 2.0**-10

    _, region = automate("float16")
    with region:
        optax.sgd(0.1).init(B)
        assert jnp.all(jax.grad(tiny)(B) == 2.0**-30)
        assert jnp.all(jax.grad(lambda w: jnp.sum(tiny(w)))(B) == 2.0**-30)
        assert jnp.all(jax.vmap(jax.grad(tiny))(jnp.stack([B, B])) == 2.0**-30)


def test_a_gradient_inside_of_a_loss_is_true_and_not_scaled():
    """Scaled by the default scale, 16 would be infinite in float16, and the loss with it."""

    def penalized(weights):
        for_inputs = jax.grad(lambda x: jnp.sum(x @ weights) * 16.0)(A)
        return jnp.sum(for_inputs**2) * 2.0**-14

    rows = np.asarray(B.sum(1, dtype="float32"))
    _, region = automate("float16")
    with region:
        optax.sgd(0.1).init(B)
        for derivative in (jax.value_and_grad(penalized), jax.jit(jax.value_and_grad(penalized))):
            loss, gradients = derivative(B)
            # Each row of A has the gradient 16 * rows; the sums are rounded to float16's 11 bits, the weights before.
            np.testing.assert_allclose(loss, len(A) * 256 * (rows**2).sum() * 2.0**-14, rtol=3 * 2.0**-11)
            expected = np.repeat(2 * len(A) * 256 * 2.0**-14 * rows[:, None], 4, axis=1)
            np.testing.assert_allclose(gradients, expected, rtol=3 * 2.0**-11)
        assert jnp.all(jax.grad(lambda w: jnp.sum(w @ jnp.full((4, 1), 2.0**-20)) * 2.0**-10)(B) == 2.0**-30), (
            "what is differentiated afterwards is scaled"
        )


def test_options_of_the_derivative_are_kept():
    def pair(a, b, *, factor):
        return factor * jnp.sum(a @ b), (a + 1, "text")

    for dtype in ("bfloat16", "float16"):
        _, region = automate(dtype)
        with region:
            optax.sgd(0.1).init(B)
            (value, (aux, text)), (for_a, for_b) = jax.value_and_grad(pair, argnums=(0, 1), has_aux=True)(
                A, B, factor=0.25
            )
            alone, whole = jax.grad(pair, 1, True)(A, B, factor=0.25)
        np.testing.assert_allclose(value, jnp.sum(A @ B) / 4, rtol=0.02, atol=0.02)
        assert np.array_equal(aux, A + 1)
        assert text == whole[1] == "text"
        np.testing.assert_allclose(for_a, jnp.ones((4, 4)) @ B.T / 4, rtol=0.02)
        np.testing.assert_array_equal(alone, for_b)


def test_combined_transformations_are_one_optimizer():
    run, region = automate()
    with region:
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
        _, state = train([1.0, float("nan"), 1.0], tx)
    assert run.recorder.steps == 3
    assert state[1].hyperparams["learning_rate"] == jnp.float32(0.1)
    assert state[1].inner_state[0].count == 2


def test_flax_train_states_need_no_change():
    train_state = pytest.importorskip("flax.training.train_state")
    run, region = automate()
    with region:
        state = train_state.TrainState.create(apply_fn=None, params={"w": B}, tx=optax.adam(0.1))
        gradient = jax.grad(lambda params: loss_of(params["w"], A))
        state = jax.jit(lambda state: state.apply_gradients(grads=gradient(state.params)))(state)
    assert run.recorder.steps == 1
    assert state.step == 1


def test_nothing_is_cast_before_the_script_has_an_optimizer():
    exact = jax.grad(loss_of)(B, A)
    run, region = automate()
    with region:
        assert np.array_equal(jax.grad(loss_of)(B, A), exact)
        assert run.amp is None
        optax.sgd(0.1).init(B)
        assert not np.array_equal(jax.grad(loss_of)(B, A), exact)


def test_what_was_compiled_inside_is_as_before_outside():
    before = jax.grad, jax.value_and_grad, optax.GradientTransformation.__new__
    run, region = automate()
    exact = jax.grad(loss_of)(B, A)
    with region:
        tx = optax.sgd(0.1)
        state = tx.init(B)
        gradient = jax.jit(jax.grad(loss_of))
        update = jax.jit(tx.update)
        update(gradient(B, A), state)
    assert (jax.grad, jax.value_and_grad, optax.GradientTransformation.__new__) == before
    assert casting.active.value is None
    np.testing.assert_array_equal(gradient(B, A), exact)
    updates, _ = update(exact, state)
    np.testing.assert_allclose(updates, -0.1 * exact, rtol=1e-6)
    jax.effects_barrier()
    assert run.recorder.steps == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_lines_by_hand_are_what_ran(dtype):
    run, region = automate(dtype)
    with region:
        weights, _ = train([1.0, 2.0, 3.0])
    lines = run.explain()
    names = {"ampx": ampx, "ampx_jax": ampx_jax, "loss_of": loss_of, "tx": optax.adam(0.1)}
    exec("\n".join(lines[:3]), names)
    source = ["def differentiated(weights, x, opt_state):", "    loss = loss_of(weights, x)"]
    exec("\n".join([*source, *(f"    {line}" for line in lines[3:] or ("return loss",))]), names)
    by_hand, state = B, names["tx"].init(B)
    for factor in (1.0, 2.0, 3.0):
        grads = jax.jit(jax.grad(names["differentiated"]))(by_hand, A * factor, state)
        updates, state = names["tx"].update(grads, state, by_hand)
        by_hand = optax.apply_updates(by_hand, updates)
    assert ampx.last_step(state).scale == (65536.0 if dtype == "float16" else 1.0)
    # Weights below one, each update rounded once to the spacing of 2**-24, which the next steps carry on.
    np.testing.assert_allclose(weights, by_hand, rtol=0, atol=3 * 2.0**-23)


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"level": "O0"}, {}])
def test_there_are_no_lines_by_hand_where_nothing_was_cast(settings):
    run = Run("jax", RunSettings(device="cpu", **settings))
    with offer(ampx_jax.load(), Automation).automate(run):
        train([1.0])
    assert run.recorder.steps == 1
    assert run.explain() == ()


def test_gradients_that_come_by_another_way_are_told_of():
    run, region = automate()
    with region:
        tx = optax.sgd(0.1)
        state = tx.init(B)
        _, pullback = jax.vjp(loss_of, B, A)
        tx.update(pullback(jnp.float32(1.0))[0], state)
    (note,) = run.recorder.notes
    assert "jax.vjp" in note
    assert run.explain() == ()


def test_mixed_precision_of_the_scripts_own_is_refused(monkeypatch):
    run, region = automate()
    with region, pytest.raises(ampx.RunRefusedError, match=r"keeps parameters in bfloat16, .* updates .* are lost"):
        optax.sgd(0.1).init(B.astype(jnp.bfloat16))
    assert run.refusal is not None
    monkeypatch.setitem(sys.modules, "jmp", object())
    _, region = automate()
    with region, pytest.raises(ampx.RunRefusedError, match="imports jmp"):
        optax.sgd(0.1).init(B)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dynamic_scale_of_flax_is_refused_before_the_first_step_wherever_it_is_imported(dtype):
    def step(weights, state, tx):
        from flax.training.dynamic_scale import DynamicScale

        _, _, _, grads = DynamicScale().value_and_grad(loss_of)(weights, A)
        return tx.update(grads, state, weights)

    pytest.importorskip("flax", reason="flax is not installed")
    run, region = automate(dtype)
    with region:
        tx = optax.sgd(0.1)
        state = tx.init(B)
        with pytest.raises(ampx.RunRefusedError, match=r"imports flax\.training\.dynamic_scale"):
            step(B, state, tx)
    assert run.recorder.steps == 0


def test_functions_that_look_at_values_are_refused_and_errors_of_the_script_are_its_own():
    def looking(weights):
        return jnp.sum(weights) if weights[0, 0] > 0 else jnp.sum(-weights)

    _, region = automate()
    with region:
        optax.sgd(0.1).init(B)
        with pytest.raises(ampx.RunRefusedError, match="depends on the values"):
            jax.grad(looking)(B)
        with pytest.raises(jax.errors.TracerBoolConversionError):
            jax.jit(jax.grad(looking))(B)


OWN = """
import jax, jax.numpy as jnp, optax, ampx, ampx_jax

def train(compiled, first="session"):
    weights, scales = jnp.ones((4, 4)), []
    tx = optax.sgd(2.0**-6)
    if first == "optimizer":
        tx.init(weights)
    amp = ampx.init("jax", dtype="bfloat16", device="cpu", loss_scale="dynamic")
    tx = ampx.wrap_optimizer(tx)
    state = tx.init(weights)

    def loss_of(weights, state, factor):
        with ampx.scale_loss(jnp.sum(weights @ weights) * factor, state) as scaled:
            return scaled

    def step(weights, state, factor):
        grads = jax.grad(ampx_jax.autocast(loss_of))(weights, state, factor)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    step = jax.jit(step, donate_argnums=(0, 1)) if compiled else step
    for factor in (1.0, float("inf"), 1.0):
        weights, state = step(weights, state, factor)
        scales.append(float(amp.loss_scale(state)))
    return weights.tolist(), scales, amp

if __name__ == "__main__":
    print(*train(compiled=True)[:2], sep="\\n")
"""


@pytest.mark.parametrize("first", ["session", "optimizer"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_script_that_is_written_for_ampx_keeps_its_own_session(first, compiled):
    """All numbers of the script are exact in bfloat16, so that its weights are the same to the bit."""
    script = {"__name__": "script"}
    exec(OWN, script)
    weights, scales, _ = script["train"](compiled)
    assert scales == [65536.0, 32768.0, 32768.0]
    run, region = automate("float16")
    with region:
        under_run, scales, amp = script["train"](compiled, first)
        assert ampx.current("jax") is amp
    assert under_run == weights
    assert weights[0][0] == 1 - 15 / 64, "two steps of slopes 8 and 7, by arithmetic"
    assert scales == [65536.0, 32768.0, 32768.0]
    assert run.amp is amp
    record = list(run.recorder.optimizers.values())[-1]
    assert (record.kind, record.initial_scale, record.steps, record.skipped) == ("chain", 65536.0, 3, [2])
    assert record.scales == [(2, 32768.0)]
    assert run.recorder.steps == 3
    assert run.recorder.ops["dot_general", "bfloat16"] > 0
    assert "by itself, with ampx;" in run.recorder.notes[-1]
    assert run.explain() == ("the script has it by hand: its own calls decide",)


def test_the_summary_tells_what_the_session_of_the_script_did(tmp_path):
    pytest.importorskip("typer", reason="the command line is not installed")
    program = tmp_path / "own.py"
    program.write_text(OWN)
    plain = run_python(program, check=True)
    under = run_python("-m", "ampx", "run", "--dtype", "float16", program, check=True)
    assert under.stdout == plain.stdout
    assert "ampx run: jax in bfloat16 on cpu, level O1" in under.stderr
    assert "3 steps, 1 skipped; loss scale 65536 → 32768 (step 2)" in under.stderr


def test_steps_before_a_session_of_the_script_and_a_scale_that_it_loads_are_told():
    run, region = automate("float16")
    with region:
        train([1.0, float("inf"), 1.0])
        amp = ampx.init("jax", dtype="float16", device="cpu")
        heard = []
        amp.on_event(heard.append)
        tx = ampx.wrap_optimizer(optax.sgd(0.5))
        state = tx.init(B)
        saved = amp.state_dict(state)
        saved["groups"][0]["losses"][0]["scale"] = 256.0
        state = amp.load_state_dict(saved, state)
        update = jax.jit(tx.update)
        for slope in (1.0, float("inf")):
            _, state = update(jnp.full_like(B, slope * ampx.loss_scale(state)), state)
    before, own = run.recorder.optimizers.values()
    assert (before.steps, before.skipped, before.scales) == (3, [2], [(2, 32768.0)])
    assert (own.initial_scale, own.steps, own.skipped, own.scales) == (256.0, 2, [2], [(2, 128.0)])
    assert heard == [], "the script did not call observe"


def metric(*command):
    return last_json("-W", "ignore", *command, XLA_FLAGS="--xla_cpu_multi_thread_eigen=false")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.nightly)])
def test_an_unedited_script_reaches_the_accuracy_of_float32(tmp_path, dtype):
    """397 images: the standard error of a share of 0.98 is 0.007, that of a difference of two 0.01; twice that."""
    pytest.importorskip("typer", reason="the command line is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    report = tmp_path / "out.json"
    plain = metric(str(PROGRAM))
    mixed = metric("-m", "ampx", "run", "--dtype", dtype, "--report", str(report), str(PROGRAM))
    assert plain["metric"] > 0.95
    assert abs(mixed["metric"] - plain["metric"]) < 0.02
    assert mixed["losses"] != plain["losses"]
    facts = json.loads(report.read_text())
    assert (facts["steps"], facts["skipped"]) == (len(mixed["losses"]), 0)
    assert {operation["dtype"] for operation in facts["ops"] if operation["op"] == "dot_general"} == {dtype}


def test_parameters_in_float64_which_nothing_casts_are_told_of():
    run = Run("jax", RunSettings(dtype="bfloat16", device="cpu"))
    with offer(ampx_jax.load(), Automation).automate(run), jax.enable_x64(True):
        optax.sgd(0.5).init(jnp.ones(2, jnp.float64))
    assert [note for note in run.recorder.notes if "1 of 1 parameters are float64" in note]


def test_what_is_differentiated_by_in_a_watched_step_is_sampled_as_weights_are():
    """By name, which is that in an update: the weights of a step may be others than those that it updates."""
    (run, automated), sampled = automate(), []
    run.recorder.observer = mock.Mock()
    with automated, offer(ampx_jax.load(), Probe).watch(None, Watching()):
        tx = optax.sgd(0.5)
        params = {"w": jnp.array([1.0, 2.0])}
        state = tx.init(params)
        run.recorder.takes_gradients = sampled.extend
        perturbed = {"w": params["w"] / 0.0}
        _, grads = jax.value_and_grad(lambda x, params: (params["w"] * x).sum(), argnums=1)(3.0, perturbed)
        jax.grad(lambda x, y: x * y, argnums=(0, 1))(jnp.float32(3.0), jnp.float32(4.0))
        tx.update(grads, state, params)
    rows = [(entry.name, entry.shape, entry.values, entry.weights.tolist()) for entry in sampled[:-1]]
    assert rows == [("w", (2,), None, [math.inf, math.inf]), ("", (), None, [3.0]), ("", (), None, [4.0])]
    last = sampled[-1]
    assert (last.name, last.values.tolist(), last.weights.tolist()) == ("w", [3.0, 3.0], [1.0, 2.0])
