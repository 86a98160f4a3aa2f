"""`ampx tune` and `ampx diagnose` on whole scripts with a planted overflow, which nobody edits."""

import math
import pickle
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ampx.numerics.compare_script import compare_script
from ampx.numerics.diagnose_script import diagnose_script
from ampx.numerics.probe import Watching
from ampx.numerics.trial import COMPILED, Trial
from ampx.numerics.tune_script import tune_script
from ampx.run import RunSettings
from ampx.run.program import Program
from ampx_jax import devices
from processes import run_here, run_python

pytest.importorskip("flax", reason="flax is not installed")
# Each has a layer `wide` that multiplies numbers beyond float16, and one that makes them small again.
LINEN = """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax


    class Net(nn.Module):
        def setup(self):
            ones = nn.initializers.constant
            self.first = nn.Dense(4, use_bias=False, kernel_init=ones(1.0))
            self.wide = nn.Dense(4, use_bias=False, kernel_init=ones(1e4))

        def __call__(self, x):
            return self.wide(self.first(x)) * 1e-5


    net, x = Net(), jnp.ones((4, 4))
    params = net.init(jax.random.key(0), x)
    tx = optax.sgd(1e-6)
    state = tx.init(params)


    @jax.jit
    def train(params, state):
        loss, grads = jax.value_and_grad(lambda params: net.apply(params, x).astype(jnp.float32).mean())(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss


    for _ in range(3):
        params, state, loss = train(params, state)
"""
NNX = """
    import jax.numpy as jnp
    import optax
    from flax import nnx


    class Net(nnx.Module):
        def __init__(self):
            ones, rngs = nnx.initializers.constant, nnx.Rngs(0)
            self.first = nnx.Linear(4, 4, use_bias=False, kernel_init=ones(1.0), rngs=rngs)
            self.wide = nnx.Linear(4, 4, use_bias=False, kernel_init=ones(1e4), rngs=rngs)

        def __call__(self, x):
            return self.wide(self.first(x)) * 1e-5


    net, x = Net(), jnp.ones((4, 4))
    optimizer = nnx.Optimizer(net, optax.sgd(1e-6), wrt=nnx.Param)


    @nnx.jit
    def train(net, optimizer):
        loss, grads = nnx.value_and_grad(lambda net: net(x).astype(jnp.float32).mean())(net)
        optimizer.update(net, grads)
        return loss


    for _ in range(3):
        train(net, optimizer)
"""
UNNAMED = """
    import jax
    import jax.numpy as jnp
    import optax

    x = jnp.ones((4, 4))
    params = {"first": jnp.ones((4, 4)), "wide": jnp.full((4, 4), 1e4)}
    tx = optax.sgd(1e-6)
    state = tx.init(params)


    def loss(params):
        return ((x @ params["first"]) @ params["wide"] * 1e-5).astype(jnp.float32).mean()


    for _ in range(3):
        updates, state = tx.update(jax.grad(loss)(params), state)
        params = optax.apply_updates(params, updates)
"""
FLOAT16 = RunSettings(dtype="float16")


@pytest.fixture
def script(tmp_path):
    """Return a script as a program."""

    def write(text):
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        return Program(str(tmp_path / "train.py"))

    return write


@pytest.fixture
def here(tmp_path, nothing_of_its_own):
    """Run a trial in this process."""
    return lambda trial: run_here(trial, tmp_path)


@pytest.mark.parametrize("text", [LINEN, NNX], ids=["linen", "nnx"])
def test_tune_denies_the_layer_that_overflows_and_no_other(here, script, text):
    policy, report = tune_script(script(text), FLOAT16, framework="jax", steps=2, repeats=0, run=here)
    assert [choice.entry for choice in policy.deny] == ["module:wide"]
    assert '"module:wide"' in report["file"]


# What a user changes who calls ampx by hand.
WRAPPED = {
    "tx = optax.sgd(1e-6)\n": "import ampx\nimport ampx_jax\n\nLINES\ntx = ampx.wrap_optimizer(optax.sgd(1e-6))\n",
    "loss, grads = jax.value_and_grad(lambda": "loss_of = ampx_jax.autocast(lambda",
    ".mean())(params)\n": """.mean())

    def scaled_of(params):
        loss = loss_of(params)
        with ampx.scale_loss(loss, state) as scaled:
            return scaled, loss

    grads, loss = jax.grad(scaled_of, has_aux=True)(params)
""",
}


def loss_by_hand(folder, lines):
    """Run the script, with ampx by hand and these lines where its optimizer is made; return the first loss."""
    text = textwrap.dedent(LINEN)
    for words, code in WRAPPED.items():
        assert text.count(words) == 1
        text = text.replace(words, code)
    (folder / "by_hand.py").write_text(text.replace("LINES", lines) + "    print(loss)\n    break\n")
    return float(run_python("by_hand.py", cwd=folder, check=True).stdout)


def test_what_tune_and_diagnose_say_is_pasted_and_cures(here, script, tmp_path):
    """The products are 4, and 4 * 4 * 1e4, which is beyond float16: times 1e-5 they are 1.6."""
    policy, report = tune_script(script(LINEN), FLOAT16, framework="jax", steps=2, repeats=0, run=here, out="mine.toml")
    policy.write(tmp_path / "mine.toml")
    diagnosis, _ = diagnose_script(script(LINEN), FLOAT16, framework="jax", run=here)
    assert loss_by_hand(tmp_path, "ampx.init('jax', dtype='float16', nan_loss='skip')") == math.inf
    assert loss_by_hand(tmp_path, "\n".join(report["lines"])) == pytest.approx(1.6, rel=2.0**-8)
    advised = diagnosis.advice.partition("\n# or")[0]
    assert loss_by_hand(tmp_path, advised) == pytest.approx(1.6, rel=2.0**-8)


def test_tune_of_a_script_without_names_denies_the_operation_that_overflows_and_diagnose_names_it(here, script):
    policy, report = tune_script(script(UNNAMED), FLOAT16, framework="jax", steps=2, repeats=0, run=here)
    assert [choice.entry for choice in policy.deny] == ["dot_general"]
    assert "jax.named_scope" in report["notes"][-1]
    diagnosis, _ = diagnose_script(script(UNNAMED), FLOAT16, framework="jax", at=1, run=here)
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("overflow", "")


@pytest.mark.filterwarnings("ignore::ampx.PrecisionWarning")  # auto says why it is float32
@pytest.mark.parametrize(("flags", "dtype"), [({"avx512_bf16"}, "bfloat16"), ({"avx2"}, "float32")])
def test_tune_tries_what_the_cpu_has_instructions_for_though_auto_is_float32(here, script, monkeypatch, flags, dtype):
    monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset(flags))
    policy, _ = tune_script(script(UNNAMED), RunSettings(), framework="jax", steps=2, repeats=0, run=here)
    assert policy.dtype == dtype


@pytest.mark.parametrize("text", [LINEN, NNX], ids=["linen", "nnx"])
def test_diagnose_names_the_layer_that_overflows(here, script, text):
    diagnosis, _ = diagnose_script(script(text), FLOAT16, framework="jax", run=here)
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("overflow", "wide")


MEASURES = """
    import jax
    import jax.numpy as jnp
    import optax

    params, tx = {"w": jnp.full((4, 1), 0.5)}, optax.inject_hyperparams(optax.sgd)(0.02)
    state, best = tx.init(params), float("inf")


    def loss_of(params, measured):
        return (jnp.mean(jnp.ones((8, 4)) @ params["w"]) - 3.0) ** 2, measured @ jnp.ones((1, 1))


    @jax.jit
    def train(params, state, measured):
        (loss, error), grads = jax.value_and_grad(loss_of, has_aux=True)(params, measured)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, error[0, 0]


    for step in range(8):
        params, state, error = train(params, state, jnp.full((1, 1), 262.0 - step))
        if error >= best:
            state.hyperparams["learning_rate"] *= 1e-3
        best = min(best, error)
"""


def test_a_rate_that_the_script_cuts_by_a_number_in_low_precision_is_said_in_its_step(here, script):
    """In bfloat16 261 and 260 are both 260: the third error is no smaller than the second."""
    settings = RunSettings("bfloat16", device="cpu")
    _, report = diagnose_script(script(MEASURES), settings, framework="jax", run=here)
    assert report["verdict"].startswith("In step 4, the learning rate is 2e-05, and in float32 0.02: the script's sc")


def test_gradients_are_scaled_alike_in_a_step_with_casting_off(here, script):
    """What divides them by the loss scale of the run knows nothing of the step."""
    program = script(LINEN.replace("1e4", "1.0").replace("1e-5", "0.5"))
    settings, watching = RunSettings("float16", loss_scale=16.0, watched=True), Watching("float16", samples=64)
    trial = Trial(program, settings, "jax", steps=2, watched=(2,), watching=watching)
    low, off = (here(run).unscaled_readings(2) for run in (trial, replace(trial, float32=(2,))))
    pairs = [pair for pair in zip(low, off, strict=True) if pair[0].direction == "backward"]
    assert pairs
    for entry, other in pairs:
        np.testing.assert_allclose(entry.sample, other.sample, rtol=0.01)


def test_a_watched_trial_keeps_what_it_compiles_for_the_next_one(tmp_path, script):
    request, compiled = tmp_path / "request", tmp_path / "compiled"
    trial = Trial(script(NNX), RunSettings("float32", watched=True), "jax", steps=1, watched=(1,))
    request.write_bytes(pickle.dumps((trial, tmp_path / "answer")))
    environment = {COMPILED: str(compiled), "JAX_COMPILATION_CACHE_DIR": ""}
    run_python("-m", "ampx.numerics.child", request, check=True, **environment)
    assert len(list(compiled.iterdir())) > 20


PADDED = """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    weights = {"wide": {"w": jnp.full((16, WIDTH), 0.1)}, "out": {"w": jnp.full((WIDTH, 8), 0.1), "b": jnp.zeros(8)}}
    tx = optax.sgd(0.01)
    state = tx.init(weights)


    @jax.jit
    def train(weights, state, x):
        def loss_of(weights):
            y = jax.nn.relu(x @ weights["wide"]["w"]) @ weights["out"]["w"] + weights["out"]["b"]
            return jnp.square(y.astype(jnp.float32)).mean() * FACTOR

        gradients = jax.grad(loss_of)(weights)
        updates, state = tx.update(gradients, state)
        return optax.apply_updates(weights, updates), state


    for seed in range(3):
        weights, state = train(weights, state, np.random.default_rng(seed).normal(size=(8, 16)).astype("float32"))
"""


@pytest.mark.parametrize(
    ("width", "factor", "kinds"), [("64", "1.0", []), ("1021", "1.0", []), ("64", "1e-8", ["gradient"])]
)
def test_diagnose_names_risks_by_what_a_compiled_step_trains(here, script, width, factor, kinds):
    settings = RunSettings(dtype="float16", loss_scale=1.0)
    program = script(PADDED.replace("WIDTH", width).replace("FACTOR", factor))
    diagnosis, report = diagnose_script(program, settings, framework="jax", run=here)
    assert (diagnosis, report["looked_at"], [risk["kind"] for risk in report["risks"]]) == (None, 3, kinds)
    for risk in report["risks"]:
        assert {"out.w", "wide.w"} <= set(risk["where"])


def test_compare_names_weights_that_matrix_units_pad(here, script):
    program = script(PADDED.replace("WIDTH", "1021").replace("FACTOR", "1.0"))
    options = {"framework": "jax", "steps": 3, "repeats": 1, "run": here}
    report = compare_script(program, RunSettings(), ["float16"], **options)
    (note,) = (note for note in report["notes"] if note.startswith("Dimensions of "))
    assert "wide.w (16x1021)" in note
    assert "out.w" in note


LOST = """
    import jax
    import jax.numpy as jnp
    import optax

    params = {"w": jnp.linspace(0.5, 3.0, 64), "b": jnp.float32(0.0)}
    tx = optax.sgd(3e-8)
    state = tx.init(params)


    @jax.jit
    def train(params, state):
        loss = lambda params: (params["w"] * jnp.linspace(-4.0, 4.0, 64)).sum() + params["b"]
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradients, state)  # without the parameters, as SGD needs none
        return optax.apply_updates(params, updates), state, value


    for _ in range(12):
        params, state, loss = train(params, state)
"""


def test_compare_meters_watched_updates_of_compiled_steps_and_says_why_it_lists_no_modules(here, script):
    settings, options = RunSettings(), {"framework": "jax", "steps": 12, "repeats": 1, "run": here}
    report = compare_script(script(LOST), settings, ["float16"], **options)
    weights, slopes = np.linspace(0.5, 3.0, 64, dtype=np.float32), np.linspace(-4.0, 4.0, 64, dtype=np.float32)
    lost = int((weights + np.float32(-3e-8) * slopes == weights).sum())
    assert 0 < lost < 64
    for meters in (report["float32"]["meters"], report["dtypes"]["float16"]["meters"]):
        (meter,) = meters
        assert meter["steps"] == [1, 3, 5, 7, 9]  # the last watched step ends the run before its update is applied
        assert meter["map"]["parameters"] == ["b", "w"]
        assert meter["map"]["lost"][1][0] == lost / 64
    assert sum("jax.named_scope" in note for note in report["notes"]) == 1
    assert report["dtypes"]["float16"]["modules"] is None


EQUINOX_STYLE = LOST.replace("tx.update(gradients, state)", "tx.update(gradients, state, params)").replace(
    "optax.apply_updates(params, updates)", "jax.tree.map(jnp.add, params, updates)"
)


@pytest.mark.parametrize("text", [LINEN, NNX, EQUINOX_STYLE], ids=["linen", "nnx", "added by hand"])
def test_compare_meters_the_updates_of_other_libraries(here, script, text):
    run, watching = RunSettings("bfloat16", watched=True), Watching()
    outcome = here(Trial(script(text), run, "jax", steps=3, watched=(2,), watching=watching))
    (meter,) = outcome.run["meters"]
    assert meter["steps"] == [2]
    sizes = [1, 64] if text is EQUINOX_STYLE else [16, 16]
    assert [entry["sampled"] for entry in meter["last"]["parameters"]] == sizes


PLAIN = Path(__file__).parents[1] / "programs" / "plain" / "jax_plain.py"
TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial" / "characters_jax.py"


@pytest.mark.parametrize(
    ("program", "arguments"),
    [(PLAIN, ()), pytest.param(TUTORIAL, ("--steps", "6", "--width", "32"), marks=pytest.mark.nightly)],
    ids=["plain", "tutorial"],
)
def test_compare_of_the_project_s_programs_finds_bfloat16_right_and_meters_both(here, program, arguments):
    settings, options = RunSettings(device="cpu"), {"framework": "jax", "steps": 3, "repeats": 1, "run": here}
    report = compare_script(Program(str(program), arguments=arguments), settings, ["bfloat16"], **options)
    facts = report["dtypes"]["bfloat16"]
    assert [len(run["losses"]) for run in (facts, report["float32"])] == [3, 3]
    assert facts["losses"] == pytest.approx(report["float32"]["losses"], rel=2.0**-5)  # eight roundings
    assert facts["losses"] != report["float32"]["losses"]
    assert (facts["skipped"], facts["ends_alike"], report["failed"]) == ([], True, {})
    assert all(meter["last"]["parameters"] for run in (facts, report["float32"]) for meter in run["meters"])
    assert facts["meters"]
    assert report["verdict"].startswith("bfloat16: ")
