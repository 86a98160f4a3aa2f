"""Static graphs: each program in a process of its own, because Paddle's mode and scope are global."""

import json
import math
import pathlib
import subprocess
import sys

import pytest

from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE

WORKER = pathlib.Path(__file__).with_name("static_worker.py")
WHERE = {"float32": "cpu, static graphs/float32/O0", "bfloat16": "cpu, static graphs/bfloat16/O1"}


def start(**options):
    return subprocess.run(
        [sys.executable, str(WORKER), json.dumps(options)], capture_output=True, text=True, check=False, timeout=120
    )


def run(**options):
    done = start(**options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("JSON", 1)[1])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bfloat16)])
def test_reference_trace_and_untouched_weights(dtype, covers):
    seen = run(dtype=dtype, pattern=list(REFERENCE_PATTERN))
    assert seen["before"]
    assert [result[2] for result in seen["results"]] == list(REFERENCE_TRACE)
    assert [not result[0] for result in seen["results"]] == [bool(one) for one in REFERENCE_PATTERN]
    for position, overflow in enumerate(REFERENCE_PATTERN):
        assert (seen["weights"][position] == seen["weights"][position - 1]) is bool(overflow)
    assert all(math.isfinite(one) for one in seen["weights"][-1])
    covers("scaling", "paddle", WHERE[dtype])


@pytest.mark.parametrize("optimizer", ["SGD", "Momentum", "Adam", "AdamW"])
def test_scaled_training_with_skips_equals_plain_training_without_them(optimizer):
    """Bit for bit, optimizer state included: else the steps after a skip would differ."""
    scaled = run(optimizer=optimizer, pattern=[0, 0, 1, 0, 1, 1, 0])
    plain = run(optimizer=optimizer, pattern=[0, 0, 0, 0], plain=True)
    assert [scaled["weights"][position] for position in (0, 1, 3, 6)] == plain["weights"]


@pytest.mark.bfloat16
def test_bfloat16_really_casts_on_the_cpu(covers):
    """The program holds casts, and its numbers are near those of float32 but not the same."""
    low, wide = run(dtype="bfloat16", pattern=[0] * 4), run(pattern=[0] * 4)
    assert low["casts"] > wide["casts"]
    assert low["losses"] != wide["losses"]
    for one, other in zip(low["losses"], wide["losses"], strict=True):
        assert math.isclose(one, other, rel_tol=2e-2)
    covers("casting", "paddle", WHERE["bfloat16"])


def test_float16_is_refused_on_the_cpu(static_dtype):
    done = start(dtype="float16")
    assert done.returncode == 1
    assert "UnsupportedDtypeError" in done.stderr
    assert {"bfloat16": "supported: bfloat16", "float32": "supported: none"}[static_dtype] in done.stderr


TRAINS = """
paddle.enable_static()
x = paddle.static.data("x", [4, 8], "float32")
x.stop_gradient = False
with paddle.amp.auto_cast(dtype="bfloat16"):
    loss = paddle.nn.Linear(8, 1)(x).astype("float32").mean()
paddle.optimizer.SGD(0.1).minimize(loss)
executor = paddle.static.Executor(paddle.CPUPlace())
executor.run(paddle.static.default_startup_program())
executor.run(feed={"x": np.ones([4, 8], "float32")}, fetch_list=[loss])
"""


@pytest.mark.parametrize("limit", [None, "AVX2"])
def test_bfloat16_is_refused_where_paddles_own_training_fails_in_its_first_step(native, monkeypatch, limit):
    """Paddle asks the CPU what it has, and oneDNN computes with what it may use: without AVX-512 there is no kernel."""
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    code, _, err = native(TRAINS)
    assert code == 0 or "std::exception" in err
    done = start(dtype="bfloat16", pattern=[0])
    if code == 0:
        assert done.returncode == 0, done.stderr[-3000:]
        return
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("ampx.errors.UnsupportedDtypeError")
    assert "supported: none: only float32 (static graphs compute bfloat16 with AVX-512 only" in message
    assert [result[0] for result in run(dtype="auto", pattern=[0, 1])["results"]] == [True, False]


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
    done = start(dtype="bfloat16", stop_gradient=True)
    assert done.returncode == 1
    assert "UnsupportedByBackendError" in done.stderr
    assert "Set x.stop_gradient" in done.stderr
    assert run(dtype="float32", stop_gradient=True, pattern=[0])["results"][0][0]


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


def test_what_native_decorate_gives_is_refused(native):
    """The same names work underneath: wrap the optimizer itself."""
    code, _, err = native(
        """
import ampx
paddle.enable_static()
ampx.init("paddle", level="O0", device="cpu")
ampx.wrap_optimizer(paddle.static.amp.decorate(paddle.optimizer.SGD(0.1), dtype="bfloat16"))
"""
    )
    assert code == 1
    assert err.strip().splitlines()[-1].startswith("ampx.errors.NotAnOptimizerError"), err[-2000:]


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
    seen = run(loss_scale=config, pattern=[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0])
    expected = [32.0, 100.0, 100.0, 100.0, 25.0, 25.0, 6.25, 6.25, 4.0, 4.0, 16.0]
    assert [result[2] for result in seen["results"]] == expected
    assert [result[3] for result in seen["results"]] == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 0]


def test_a_static_scale_stays_and_skips():
    seen = run(loss_scale={"init_scale": 4.0, "dynamic": False}, pattern=[0, 1, 0])
    assert [result[:3] for result in seen["results"]] == [[True, 4.0, 4.0], [False, 4.0, 4.0], [True, 4.0, 4.0]]


def test_a_saved_state_goes_on(covers):
    first = run(pattern=[0, 0, 1, 0, 0])
    state = first["state"]
    assert state["groups"][0]["losses"] == [
        {"loss_id": 0, "scale": 32768.0, "growth_tracker": 2, "hysteresis_tracker": 1, "consecutive_skips": 0}
    ]
    second = run(load=state, pattern=[0, 0])
    assert [result[1:3] for result in second["results"]] == [[32768.0, 65536.0], [65536.0, 65536.0]]
    covers("state", "paddle", WHERE["float32"])


def test_clipping_sees_true_gradients():
    """A bound far below the norm makes steps of that length: SGD at 0.01 moves by at most 0.01 * 0.5."""
    seen = run(optimizer="SGD", pattern=[0, 0], clip={"max_grad_norm": 0.5})
    moved = math.dist(seen["weights"][0], seen["weights"][1])
    assert 0 < moved <= 0.01 * 0.5 * (1 + 1e-5)
    free = run(optimizer="SGD", pattern=[0, 0])
    assert math.dist(free["weights"][0], free["weights"][1]) > moved


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        ("ampx.scale_loss(loss, opt).__enter__()", "LossDtypeError", "which scales the loss itself"),
        ("opt.minimize(loss); opt.minimize(loss)", "ProtocolError", "a second time"),
        pytest.param(
            "ampx.init('paddle', level='O2', dtype='bfloat16'); ampx.wrap_optimizer(paddle.optimizer.SGD(0.1))",
            "UnsupportedByBackendError",
            "level='O1'",
            marks=pytest.mark.bfloat16,
        ),
        ("import copy; copy.deepcopy(opt)", "UnsupportedByBackendError", "belongs to its program"),
        ("opt.step()", "UnsupportedByBackendError", "static graph"),
        ("ampx.unscale(opt)", "UnsupportedByBackendError", "static graph"),
        ("ampx.clip_grad_norm(opt, 1.0)", "UnsupportedByBackendError", "max_grad_norm"),
        ("ampx.wrap_optimizer(opt)", "AlreadyWrappedError", "wrapped already"),
        ("opt.minimize(loss); ampx.load_state_dict(ampx.state_dict())", "ProtocolError", "startup program"),
        ("ampx.wrap_optimizer([paddle.optimizer.SGD(0.1) for _ in '12'])", "UnsupportedByBackendError", "one by one"),
    ],
)
def test_mistakes_are_refused(native, line, error, words):
    code, _, err = native(
        f"""
import ampx
paddle.enable_static()
ampx.init("paddle", level="O0", loss_scale="dynamic")
with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
    x = paddle.static.data("x", [4, 8], "float32")
    loss = paddle.nn.Linear(8, 1)(x).mean()
    opt = ampx.wrap_optimizer(paddle.optimizer.SGD(0.1))
    assert isinstance(opt, paddle.optimizer.Optimizer)
    {line}
"""
    )
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith(f"ampx.errors.{error}"), err[-2000:]
    assert words in last


def test_gradients_that_overflow_when_divided_are_skipped(native):
    """The scaled gradient is finite, the true one (1.2e39) is not; Paddle's kernel tests the scaled one only."""
    code, out, err = native(
        """
import ampx
paddle.enable_static()
amp = ampx.init("paddle", level="O0", loss_scale=2.0**-10)
main, startup = paddle.static.Program(), paddle.static.Program()
with paddle.static.program_guard(main, startup):
    x = paddle.static.data("x", [1], "float32")
    initial = paddle.nn.initializer.Constant(0.0625)
    weight = paddle.static.create_parameter([1], "float32", default_initializer=initial)
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(1.0))
    opt.minimize((weight * x).sum() * 4.0)
executor = paddle.static.Executor(paddle.CPUPlace())
executor.run(startup)
for value in (3e38, 0.25):
    (now,) = executor.run(main, feed={"x": np.array([value], "float32")}, fetch_list=[weight])
    print("SEEN", opt.last_step.applied, now.item())
"""
    )
    assert code == 0, err[-2000:]
    seen = [line.split()[1:] for line in out.splitlines() if line.startswith("SEEN")]
    assert seen == [["False", "0.0625"], ["True", "-0.9375"]]


def test_a_scale_below_one_is_not_loaded_into_a_program_that_was_not_built_for_it():
    state = run(pattern=[0], loss_scale={"init_scale": 0.25, "min_scale": 0.125, "growth_interval": 3})["state"]
    done = start(pattern=[0], load=state)
    assert done.returncode == 1
    assert "ProtocolError: a state with loss scale 0.25 was loaded" in done.stderr
    loaded = run(pattern=[0], load=state, loss_scale={"min_scale": 0.125, "growth_interval": 3})
    assert loaded["results"][0][1] == 0.25


def test_a_norm_beyond_float32_clips_rightly(native):
    """RAdam makes NaN of the zeros that a norm of inf would leave on a first step."""
    code, out, err = native(
        """
import ampx
paddle.enable_static()
amp = ampx.init("paddle", level="O0", loss_scale=1.0)
main, startup = paddle.static.Program(), paddle.static.Program()
with paddle.static.program_guard(main, startup):
    x = paddle.static.data("x", [2], "float32")
    initial = paddle.nn.initializer.Constant(1.0)
    weights = [paddle.static.create_parameter([2], "float32", default_initializer=initial) for _ in range(2)]
    opts = [paddle.optimizer.SGD(1.0), paddle.optimizer.RAdam(0.5)]
    for weight, opt in zip(weights, opts):
        amp.wrap_optimizer(opt, max_grad_norm=5.0).minimize((weight * x).sum())
executor = paddle.static.Executor(paddle.CPUPlace())
executor.run(startup)
feed = {"x": np.array([1.8e38, 2.4e38], "float32")}
first, second = executor.run(main, feed=feed, fetch_list=weights)
print("SEEN", np.abs(first - [1 - 3, 1 - 4]).max() < 1e-5, np.isfinite(second).all())
"""
    )
    assert code == 0, err[-2000:]
    assert "SEEN True True" in out


@pytest.mark.parametrize("optimizer", ["Momentum", "AdamW", "RMSProp", "RAdam"])
def test_what_saves_a_program_finds_the_optimizers_state(optimizer, native):
    """The same variables as of the plain optimizer, and the loss scale's."""
    code, out, err = native(
        f"""
import ampx
from paddle.static.pir_io import get_pir_parameters
paddle.enable_static()
amp = ampx.init("paddle", level="O0", loss_scale="dynamic")
found = []
for wrap in (lambda raw: raw, amp.wrap_optimizer):
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        x = paddle.static.data("x", [1, 2], "float32")
        weight = paddle.static.create_parameter([2, 1], "float32", name="weight")
        wrap(paddle.optimizer.{optimizer}(0.1)).minimize(paddle.matmul(x, weight).mean())
    variables = [one for listed in get_pir_parameters(main) for one in listed if one.persistable]
    found.append(sorted(one.name for one in variables if not one.name.startswith("ampx_")))
print("SEEN", found[0] == found[1], len(found[0]) > 2)
"""
    )
    assert code == 0, err[-2000:]
    assert "SEEN True True" in out
