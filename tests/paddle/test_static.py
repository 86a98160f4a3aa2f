"""Static graphs: each program with variables and names of its own; in a process of its own where Paddle ends it."""

import contextlib
import copy
import math

import numpy as np
import paddle
import pytest
from paddle.static.pir_io import get_pir_parameters

import ampx
from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE
from ampx_paddle.static import StaticOptimizer

WHERE = {"float32": "cpu, static graphs/float32/O0", "bfloat16": "cpu, static graphs/bfloat16/O1"}
# Paddle says so of its own optimizers while they build a program.
pytestmark = pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface:UserWarning")


@contextlib.contextmanager
def graph():
    """Build a program, and run it: the main and the startup program are given."""
    paddle.enable_static()
    main, startup, static = paddle.static.Program(), paddle.static.Program(), paddle.static
    with static.program_guard(main, startup), static.scope_guard(static.Scope()), paddle.utils.unique_name.guard():
        yield main, startup


def train(
    optimizer="Momentum", dtype="float32", pattern=(0,), plain=False, stop_gradient=False, load=None, clip=None, **scale
):
    """Train a small network, with an infinity in the input where the pattern says so; return what was seen."""
    ampx.shutdown()
    with graph() as (main, startup):
        paddle.seed(7)
        if not plain:
            amp = ampx.init("paddle", dtype=dtype, loss_scale="dynamic")
        x, y = paddle.static.data("x", [4, 8], "float32"), paddle.static.data("y", [4, 1], "float32")
        x.stop_gradient = stop_gradient
        hidden, head = paddle.nn.Linear(8, 16), paddle.nn.Linear(16, 1)
        loss = (head(paddle.nn.functional.relu(hidden(x))).astype("float32") - y).square().mean()
        opt = getattr(paddle.optimizer, optimizer)(0.01)
        if not plain:
            opt = amp.wrap_optimizer(
                opt, loss_scale=ampx.LossScale(**(scale or {"growth_interval": 3})), **(clip or {})
            )
        opt.minimize(loss)
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(startup)
        if load is not None:
            amp.load_state_dict(load)
        images = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
        labels = images.sum(1, keepdims=True)
        seen = {"losses": [], "weights": [], "results": [], "before": plain or opt.last_step}
        seen["casts"] = sum(operation.name() == "pd_op.cast" for operation in main.global_block().ops)
        for overflow in pattern:
            feed = {"x": images.copy(), "y": labels}
            if overflow:
                feed["x"][0, 0] = np.inf
            value, weight = executor.run(main, feed=feed, fetch_list=[loss, hidden.weight])
            seen["losses"].append(float(value))
            seen["weights"].append(weight.ravel().tolist())
            if not plain:
                result = opt.last_step
                seen["results"].append([result.applied, result.scale, result.next_scale, result.consecutive_skips])
        if not plain:
            seen["state"] = amp.state_dict()
    return seen


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bfloat16)])
def test_reference_trace_and_untouched_weights(dtype, covers):
    seen = train(dtype=dtype, pattern=list(REFERENCE_PATTERN))
    assert seen["before"] is None
    assert [result[2] for result in seen["results"]] == list(REFERENCE_TRACE)
    assert [not result[0] for result in seen["results"]] == [bool(bad) for bad in REFERENCE_PATTERN]
    for position, overflow in enumerate(REFERENCE_PATTERN):
        assert (seen["weights"][position] == seen["weights"][position - 1]) is bool(overflow)
    assert all(math.isfinite(value) for value in seen["weights"][-1])
    covers("scaling", "paddle", WHERE[dtype])


@pytest.mark.parametrize("optimizer", ["SGD", "Momentum", "Adam", "AdamW"])
def test_scaled_training_with_skips_equals_plain_training_without_them(optimizer):
    """Bit for bit, optimizer state included: else the steps after a skip would differ."""
    scaled = train(optimizer=optimizer, pattern=[0, 0, 1, 0, 1, 1, 0])
    plain = train(optimizer=optimizer, pattern=[0, 0, 0, 0], plain=True)
    assert [scaled["weights"][position] for position in (0, 1, 3, 6)] == plain["weights"]


@pytest.mark.bfloat16
def test_bfloat16_really_casts_on_the_cpu(covers):
    """The program holds casts, and its numbers are near those of float32 but not the same."""
    low, wide = train(dtype="bfloat16", pattern=[0] * 4), train(pattern=[0] * 4)
    assert low["casts"] > wide["casts"]
    assert low["losses"] != wide["losses"]
    for near, exact in zip(low["losses"], wide["losses"], strict=True):
        assert math.isclose(near, exact, rel_tol=2e-2)
    covers("casting", "paddle", WHERE["bfloat16"])


def test_float16_is_refused_on_the_cpu(static_dtype):
    supported = {"bfloat16": "supported: bfloat16", "float32": "supported: none"}[static_dtype]
    with pytest.raises(ampx.UnsupportedDtypeError, match=supported):
        train(dtype="float16")


TRAINS = """
import contextlib
import ampx
paddle.enable_static()
SETUP
x = paddle.static.data("x", [4, 8], "float32")
x.stop_gradient = False
with CASTING:
    loss = paddle.nn.Linear(8, 1)(x).astype("float32").mean()
WRAP(paddle.optimizer.SGD(0.1)).minimize(loss)
executor = paddle.static.Executor(paddle.CPUPlace())
executor.run(paddle.static.default_startup_program())
executor.run(feed={"x": np.ones([4, 8], "float32")}, fetch_list=[loss])
print("trained")
"""


@pytest.mark.parametrize("limit", [None, "AVX2"])
def test_bfloat16_is_refused_where_paddles_own_training_fails_in_its_first_step(native, monkeypatch, limit):
    """Paddle asks the CPU what it has, and oneDNN computes with what it may use: without AVX-512 there is no kernel."""
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)

    def trained(setup, casting="contextlib.nullcontext()", wrap="ampx.wrap_optimizer"):
        return native(TRAINS.replace("SETUP", setup).replace("CASTING", casting).replace("WRAP", wrap))

    code, _, err = trained("", 'paddle.amp.auto_cast(dtype="bfloat16")', "")
    assert code == 0 or "std::exception" in err
    lines = {dtype: f"ampx.init('paddle', dtype={dtype!r}, loss_scale='dynamic')" for dtype in ("bfloat16", "auto")}
    done, out, refusal = trained(lines["bfloat16"])
    if code == 0:
        assert (done, out.split()[-1]) == (0, "trained"), refusal[-3000:]
        return
    message = refusal.strip().splitlines()[-1]
    assert message.startswith("ampx.errors.UnsupportedDtypeError")
    assert "supported: none: only float32 (static graphs compute bfloat16 with AVX-512 only" in message
    done, out, err = trained(lines["auto"])
    assert (done, out.split()[-1]) == (0, "trained"), err[-3000:]


@pytest.mark.bfloat16
def test_input_without_gradient_in_bfloat16_native_ends_the_process(native):
    code, out, _ = native(
        """
paddle.enable_static()
main, startup = paddle.static.Program(), paddle.static.Program()
with paddle.static.program_guard(main, startup):
    x = paddle.static.data("x", [4, 8], "float32")
    x.stop_gradient = True
    linear = paddle.nn.Linear(8, 1)
    with paddle.amp.auto_cast(dtype="bfloat16"):
        loss = linear(x).astype("float32").mean()
    paddle.optimizer.SGD(0.1).minimize(loss)
executor = paddle.static.Executor(paddle.CPUPlace())
executor.run(startup)
print("started", flush=True)
executor.run(main, feed={"x": np.ones([4, 8], "float32")}, fetch_list=[loss])
print("ran", flush=True)
"""
    )
    assert code < 0
    assert "started" in out
    assert "ran" not in out.splitlines()


@pytest.mark.bfloat16
def test_input_without_gradient_in_bfloat16_is_refused_by_ampx():
    with pytest.raises(ampx.UnsupportedByBackendError, match=r"Set x\.stop_gradient"):
        train(dtype="bfloat16", stop_gradient=True)
    assert train(stop_gradient=True)["results"][0][0]


DECORATED = """
paddle.enable_static()
main, startup = paddle.static.Program(), paddle.static.Program()
with paddle.static.program_guard(main, startup):
    x = paddle.static.data("x", [4, 8], "float32")
    x.stop_gradient = False
    linear = paddle.nn.Linear(8, 1)
    loss = linear(x).astype("float32").mean()
    opt = paddle.static.amp.decorate(paddle.optimizer.Momentum(0.1), level="O1", dtype={dtype!r}, **{options})
    opt.minimize(loss)
names = [operation.name() for operation in main.global_block().ops]
executor = paddle.static.Executor(paddle.CPUPlace())
executor.run(startup)
(weight,) = executor.run(main, feed={{"x": np.full([4, 8], np.inf, "float32")}}, fetch_list=[linear.weight])
print("SEEN", "pd_op.cast" in names, any("check_finite" in name for name in names), bool(np.isfinite(weight).all()))
"""


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float16", {}),
        ("float16", {"use_dynamic_loss_scaling": False, "init_loss_scaling": 8.0}),
        ("bfloat16", {"use_dynamic_loss_scaling": False, "init_loss_scaling": 8.0}),
    ],
)
def test_native_decorate_has_no_loss_scale_in_static_graphs(native, dtype, options):
    """Why the backend does not stand on it: it never makes the variable that it hands to its own check."""
    code, _, err = native(DECORATED.format(dtype=dtype, options=options))
    assert code == 1
    assert "check_finite_and_unscale_(): argument (position 2) must be Value, but got None" in err


def test_native_decorate_neither_casts_nor_checks_in_bfloat16(native):
    code, out, err = native(DECORATED.format(dtype="bfloat16", options={"use_dynamic_loss_scaling": True}))
    assert code == 0, err[-2000:]
    (seen,) = (line.split()[1:] for line in out.splitlines() if line.startswith("SEEN"))
    assert seen == ["False", "False", "False"]  # no cast, no check, and the weights are not finite


def test_what_native_decorate_gives_is_refused():
    """The same names work underneath: wrap the optimizer itself."""
    with graph():
        ampx.init("paddle", level="O0", device="cpu")
        with pytest.raises(ampx.NotAnOptimizerError):
            ampx.wrap_optimizer(paddle.static.amp.decorate(paddle.optimizer.SGD(0.1), dtype="bfloat16"))


def test_bounds_hysteresis_and_factors():
    config = {
        "init_scale": 8.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 1,
        "hysteresis": 2,
        "min_scale": 4.0,
        "max_scale": 100.0,
    }
    seen = train(**config, pattern=[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0])
    expected = [32.0, 100.0, 100.0, 100.0, 25.0, 25.0, 6.25, 6.25, 4.0, 4.0, 16.0]
    assert [result[2] for result in seen["results"]] == expected
    assert [result[3] for result in seen["results"]] == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 0]


def test_a_static_scale_stays_and_skips():
    seen = train(init_scale=4.0, dynamic=False, pattern=[0, 1, 0])
    assert [result[:3] for result in seen["results"]] == [[True, 4.0, 4.0], [False, 4.0, 4.0], [True, 4.0, 4.0]]


def test_a_saved_state_goes_on(covers):
    first = train(pattern=[0, 0, 1, 0, 0])
    state = first["state"]
    assert state["groups"][0]["losses"] == [
        {"loss_id": 0, "scale": 32768.0, "growth_tracker": 2, "hysteresis_tracker": 1, "consecutive_skips": 0}
    ]
    second = train(load=state, pattern=[0, 0])
    assert [result[1:3] for result in second["results"]] == [[32768.0, 65536.0], [65536.0, 65536.0]]
    covers("state", "paddle", WHERE["float32"])


def test_clipping_sees_true_gradients():
    """A bound far below the norm makes steps of that length: SGD at 0.01 moves by at most 0.01 * 0.5."""
    seen = train(optimizer="SGD", pattern=[0, 0], clip={"max_grad_norm": 0.5})
    moved = math.dist(seen["weights"][0], seen["weights"][1])
    assert 0 < moved <= 0.01 * 0.5 * (1 + 1e-5)
    free = train(optimizer="SGD", pattern=[0, 0])
    assert math.dist(free["weights"][0], free["weights"][1]) > moved


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda opt, loss: ampx.scale_loss(loss, opt).__enter__(), ampx.LossDtypeError, "which scales the loss itself"),
        (lambda opt, loss: (opt.minimize(loss), opt.minimize(loss)), ampx.ProtocolError, "a second time"),
        pytest.param(
            lambda opt, loss: ampx.init("paddle", level="O2", dtype="bfloat16").wrap_optimizer(opt.optimizer),
            ampx.UnsupportedByBackendError,
            "level='O1'",
            marks=pytest.mark.bfloat16,
        ),
        (lambda opt, loss: copy.deepcopy(opt), ampx.UnsupportedByBackendError, "belongs to its program"),
        (lambda opt, loss: opt.step(), ampx.UnsupportedByBackendError, "static graph"),
        (lambda opt, loss: ampx.unscale(opt), ampx.UnsupportedByBackendError, "static graph"),
        (lambda opt, loss: ampx.clip_grad_norm(opt, 1.0), ampx.UnsupportedByBackendError, "max_grad_norm"),
        (lambda opt, loss: ampx.wrap_optimizer(opt), ampx.AlreadyWrappedError, "wrapped already"),
        (
            lambda opt, loss: (opt.minimize(loss), ampx.load_state_dict(ampx.state_dict())),
            ampx.ProtocolError,
            "startup program",
        ),
        (
            lambda opt, loss: ampx.wrap_optimizer([paddle.optimizer.SGD(0.1) for _ in "12"]),
            ampx.UnsupportedByBackendError,
            "one by one",
        ),
    ],
)
def test_mistakes_are_refused(call, error, words):
    with graph():
        ampx.init("paddle", level="O0", loss_scale="dynamic")
        loss = paddle.nn.Linear(8, 1)(paddle.static.data("x", [4, 8], "float32")).mean()
        opt = ampx.wrap_optimizer(paddle.optimizer.SGD(0.1))
        assert isinstance(opt, paddle.optimizer.Optimizer)
        with pytest.raises(error, match=words):
            call(opt, loss)


def parameter(shape, value, name=None):
    initial = paddle.nn.initializer.Constant(value)
    return paddle.static.create_parameter(shape, "float32", name=name, default_initializer=initial)


def run(programs, feeds, fetch):
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(programs[1])
    for feed in feeds:
        yield executor.run(programs[0], feed={"x": np.array(feed, "float32")}, fetch_list=fetch)


def test_gradients_that_overflow_when_divided_are_skipped():
    """The scaled gradient is finite, the true one (1.2e39) is not; Paddle's kernel tests the scaled one only."""
    amp = ampx.init("paddle", level="O0", loss_scale=2.0**-10)
    with graph() as programs:
        weight = parameter([1], 0.0625)
        opt = amp.wrap_optimizer(paddle.optimizer.SGD(1.0))
        opt.minimize((weight * paddle.static.data("x", [1], "float32")).sum() * 4.0)
        seen = [(opt.last_step.applied, now.item()) for (now,) in run(programs, ([3e38], [0.25]), [weight])]
    assert seen == [(False, 0.0625), (True, -0.9375)]


def test_a_scale_below_one_is_not_loaded_into_a_program_that_was_not_built_for_it():
    state = train(init_scale=0.25, min_scale=0.125, growth_interval=3)["state"]
    with pytest.raises(ampx.ProtocolError, match=r"a state with loss scale 0\.25 was loaded"):
        train(load=state)
    with pytest.warns(ampx.AmpxWarning, match="another configuration"):
        loaded = train(load=state, min_scale=0.125, growth_interval=3)
    assert loaded["results"][0][1] == 0.25


def test_a_norm_beyond_float32_clips_rightly():
    """RAdam makes NaN of the zeros that a norm of inf would leave on a first step."""
    amp = ampx.init("paddle", level="O0", loss_scale=1.0)
    with graph() as programs:
        x, weights = paddle.static.data("x", [2], "float32"), [parameter([2], 1.0) for _ in range(2)]
        for weight, raw in zip(weights, (paddle.optimizer.SGD(1.0), paddle.optimizer.RAdam(0.5)), strict=True):
            amp.wrap_optimizer(raw, max_grad_norm=5.0).minimize((weight * x).sum())
        ((first, second),) = run(programs, [[1.8e38, 2.4e38]], weights)
    assert first.tolist() == pytest.approx([1 - 3, 1 - 4], abs=1e-5)
    assert np.isfinite(second).all()


@pytest.mark.parametrize("optimizer", ["Momentum", "AdamW", "RMSProp", "RAdam"])
def test_what_saves_a_program_finds_the_optimizers_state(optimizer):
    """The same variables as of the plain optimizer, and the loss scale's."""
    amp = ampx.init("paddle", level="O0", loss_scale="dynamic")
    names = []
    for wrap in (lambda raw: raw, amp.wrap_optimizer):
        with graph() as (main, _):
            product = paddle.matmul(paddle.static.data("x", [1, 2], "float32"), parameter([2, 1], 1.0, "weight"))
            wrap(getattr(paddle.optimizer, optimizer)(0.1)).minimize(product.mean())
            variables = [value for listed in get_pir_parameters(main) for value in listed if value.persistable]
        names.append(sorted(value.name for value in variables if not value.name.startswith("ampx_")))
    assert names[0] == names[1]
    assert len(names[0]) > 2


def test_a_wrapper_whose_init_did_not_run_has_no_names_of_an_optimizer():
    assert not hasattr(StaticOptimizer.__new__(StaticOptimizer), "get_lr")
