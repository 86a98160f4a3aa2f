"""A disabled session compiles what the script compiles without ampx."""

import pickle
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import ampx
import ampx_jax
from ampx_jax.state import find_all

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}


def lowered(tx, casting=lambda function: function, scaling=lambda loss, state: loss):
    """Return the program of a training step without the names of its results, and its state."""

    @casting
    def predict(params, x):
        return jnp.tanh(x @ params["w"] + params["b"])

    def step(params, state, x):
        gradients = jax.grad(lambda params: scaling(predict(params, x).mean(), state))(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(PARAMS)
    text = jax.jit(step, donate_argnums=(0, 1)).lower(PARAMS, state, jnp.ones((4, 3))).as_text()
    return re.sub(r'jax\.result_info = ".*?"', "", text), state


def scale(loss, state):
    with ampx.scale_loss(loss, state) as scaled:
        return scaled


OPTIMIZERS = {
    "sgd": lambda wrap: wrap(optax.sgd(0.1)),
    "adamw": lambda wrap: wrap(optax.adamw(0.1)),
    "a schedule": lambda wrap: wrap(optax.adam(optax.cosine_decay_schedule(0.1, 10))),
    "a chain": lambda wrap: optax.chain(optax.clip(1.0), wrap(optax.adam(0.1)), optax.scale(0.5)),
    "accumulation": lambda wrap: optax.MultiSteps(wrap(optax.adam(0.1)), 2).gradient_transformation(),
    "hyperparameters": lambda wrap: wrap(optax.inject_hyperparams(optax.adam)(learning_rate=0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_program_is_that_of_the_script_without_ampx(name):
    plain, state = lowered(OPTIMIZERS[name](lambda tx: tx))
    with ampx.init("jax", enabled=False):
        program, wrapped = lowered(OPTIMIZERS[name](ampx.wrap_optimizer), ampx_jax.autocast, scale)
    assert program == plain
    assert len(jax.tree.leaves(wrapped)) == len(jax.tree.leaves(state))


def test_whether_there_was_a_step_is_known_and_nothing_is_compiled_anew_for_it():
    with ampx.init("jax", enabled=False) as amp:
        tx = ampx.wrap_optimizer(optax.adam(0.1))
        state, update = tx.init(PARAMS), jax.jit(tx.update)
        assert amp.last_step(state) is None
        for _ in range(3):
            _, state = update(PARAMS, state, PARAMS)
            assert amp.last_step(state) == ampx.StepResult(True, None, 1.0, 1.0, 0)
        assert update._cache_size() == 1
        first = tx.init(PARAMS)
        looped, _ = jax.lax.scan(lambda state, _: (tx.update(PARAMS, state, PARAMS)[1], None), first, None, length=2)
        assert amp.last_step(looped) == amp.last_step(state)


def test_what_keeps_the_structure_of_a_state_counts_its_updates():
    """flax nnx writes arrays into the old structure, and the branches of MultiSteps have one structure."""
    nnx = pytest.importorskip("flax.nnx")
    stepped = ampx.StepResult(True, None, 1.0, 1.0, 0)
    with ampx.init("jax", enabled=False) as amp:
        network = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(network, ampx.wrap_optimizer(optax.adam(0.1)), wrt=nnx.Param)
        assert amp.last_step(optimizer) is None
        gradients = nnx.grad(lambda network: network(jnp.ones((4, 3))).sum())(network)
        nnx.jit(lambda network, optimizer: optimizer.update(network, gradients))(network, optimizer)
        assert amp.last_step(optimizer) == amp.observe(optimizer) == stepped
        around = optax.MultiSteps(ampx.wrap_optimizer(optax.adam(0.1)), 2)
        state = around.init(PARAMS)
        for expected in (None, stepped, stepped):  # the first micro batch updates nothing
            _, state = jax.jit(around.update)(PARAMS, state, PARAMS)
            assert amp.last_step(state) == expected


def test_checkpoints_of_a_script_without_ampx_load_into_a_disabled_state_and_into_the_inner_of_an_enabled_one(session):
    serialization = pytest.importorskip("flax.serialization")
    raw = optax.adam(0.1)
    _, state = raw.update(PARAMS, raw.init(PARAMS), PARAMS)
    saved, names = serialization.to_state_dict(state), [str(leaf) for leaf in jax.tree.leaves(state)]
    on = ampx.wrap_optimizer(raw).init(PARAMS)
    with ampx.init("jax", enabled=False):
        off = serialization.from_state_dict(ampx.wrap_optimizer(raw).init(PARAMS), saved)
    for inner in (find_all(off)[0].inner, on._replace(inner=serialization.from_state_dict(on.inner, saved)).inner):
        assert [str(leaf) for leaf in jax.tree.leaves(inner)] == names


def test_checkpoints_go_from_disabled_to_enabled_sessions_and_back(session):
    """As flax restores arrays by the names of fields: a scale that is not there starts, one too many is left alone."""
    serialization = pytest.importorskip("flax.serialization")
    tx = ampx.wrap_optimizer(optax.adam(0.1))
    on = tx.init(PARAMS)
    gradients = jax.tree.map(lambda leaf: ampx.loss_scale(on) * jnp.ones_like(leaf), PARAMS)
    expected, after = jax.jit(tx.update)(gradients, on, PARAMS)
    with ampx.init("jax", enabled=False) as disabled:
        raw = ampx.wrap_optimizer(optax.adam(0.1))
        off = raw.init(PARAMS)
        ones = jax.tree.map(jnp.ones_like, PARAMS)
        restored = serialization.from_state_dict(off, serialization.to_state_dict(after))
        updates, restored = jax.jit(raw.update)(ones, restored, PARAMS)
        assert disabled.last_step(restored) == ampx.StepResult(True, None, 1.0, 1.0, 0)
    assert find_all(restored)[0].inner[0].count == 2
    with ampx.init("jax", dtype="float16", device="cpu", loss_scale=ampx.LossScale(growth_interval=3)) as amp:
        tx = ampx.wrap_optimizer(optax.adam(0.1))
        state = serialization.from_state_dict(tx.init(PARAMS), serialization.to_state_dict(off))
        assert ampx.loss_scale(state) == 65536.0
        assert amp.last_step(state) is None
        updates, state = jax.jit(tx.update)(gradients, state, PARAMS)
        assert amp.last_step(state) == ampx.StepResult(True, True, 65536.0, 65536.0, 0)
        assert amp.state_dict(state) == amp.state_dict(after)
        for leaf, other in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            assert leaf.tolist() == other.tolist()


@pytest.mark.parametrize("saving", [True, False])
def test_checkpoints_of_orbax_go_from_disabled_to_enabled_sessions_and_back(session, saving, tmp_path):
    """It restores by names of fields, too, and refuses a structure with other names."""
    checkpoints = pytest.importorskip("orbax.checkpoint")
    gradients = jax.tree.map(jnp.ones_like, PARAMS)

    def begin(enabled):
        options = {} if enabled else {"enabled": False}
        amp = ampx.init("jax", dtype="float16", device="cpu", **options)
        tx = ampx.wrap_optimizer(optax.adam(0.1))
        return amp, tx, tx.init(PARAMS)

    with checkpoints.StandardCheckpointer() as checkpointer:
        amp, tx, state = begin(saving)
        ampx.loss_scale(state)
        _, state = tx.update(gradients, state, PARAMS)
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        amp, tx, state = begin(not saving)
        state = checkpointer.restore(tmp_path / "state", state)
    assert state.inner[0].count == 1
    assert ampx.loss_scale(state) == (1.0 if saving else 65536.0)
    _, state = tx.update(gradients, state, PARAMS)
    assert state.inner[0].count == 2
    assert amp.last_step(state).applied


def test_a_state_of_the_other_kind_is_refused(session):
    """An enabled session's `update` would divide what nobody multiplied, a disabled one's would not divide."""
    wrapped = {True: ampx.wrap_optimizer(optax.sgd(0.1))}
    with ampx.init("jax", enabled=False):
        wrapped[False] = ampx.wrap_optimizer(optax.sgd(0.1))
    for enabled, tx in wrapped.items():
        with pytest.raises(ampx.ProtocolError, match="disabled"):
            jax.jit(tx.update)(PARAMS, wrapped[not enabled].init(PARAMS), PARAMS)


def test_the_tools_for_trees_and_files_keep_the_state():
    with ampx.init("jax", enabled=False) as amp:
        tx = ampx.wrap_optimizer(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
        first = tx.init(PARAMS)
        _, state = tx.update(PARAMS, first, PARAMS)
        for kept in (
            jax.tree.map(lambda leaf: leaf, state),
            jax.tree_util.tree_map_with_path(lambda path, leaf: leaf, state),
            pickle.loads(pickle.dumps(state)),
            optax.tree_utils.tree_set(state, learning_rate=jnp.float32(0.5)),
            jax.jit(lambda state: state)(state),
        ):
            assert amp.last_step(kept) == ampx.StepResult(True, None, 1.0, 1.0, 0)
            assert jax.tree.structure(kept) == jax.tree.structure(state)
        assert amp.last_step(jax.tree.map(lambda leaf: leaf, first)) is None
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
        assert all(path.startswith(".inner") for path in paths)


def test_no_loss_scale_is_in_force():
    """Gradients that a script multiplies by it are those that nothing divides again."""
    with ampx.init("jax", enabled=False):
        tx = ampx.wrap_optimizer(optax.sgd(0.1), loss_scale=1024.0)
        assert ampx.loss_scale(tx.init(PARAMS)) == 1.0
