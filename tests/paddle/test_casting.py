"""Casting: what can be seen without a GPU, and what a GPU must show."""

import importlib
import warnings

import paddle
import pytest
from paddle.amp.auto_cast import amp_global_state

import ampx
from ampx.backend import CastPlan
from ampx_paddle import casting
from ampx_paddle.prepare import prepare

PLAN = CastPlan("gpu", "bfloat16", "O1", ("matmul",), ("softmax",))
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(
    not (paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count()), reason="no CUDA device for paddle"
)


@pytest.mark.parametrize("enabled", [False, True])
def test_regions_leave_no_dtype_behind(enabled):
    """Paddle's auto_cast does, and its GradScaler then switches itself off."""
    state = amp_global_state()
    before = state.amp_dtype
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Paddle's auto_cast on the CPU
        with casting.region(PLAN, enabled):
            assert state.amp_dtype == "bfloat16"
        assert state.amp_dtype == before
        with pytest.raises(KeyError), casting.region(PLAN, enabled):
            raise KeyError("body")
        assert state.amp_dtype == before
        with casting.off():
            pass
        assert state.amp_dtype == before
        if enabled:
            casting.activate(PLAN)
            casting.deactivate()
            casting.deactivate()
            assert state.amp_dtype == before


def test_op_lists_take_operators_and_their_names():
    plan = casting.check_plan(CastPlan("gpu", "float16", "O1", (paddle.matmul,), ("softmax",)))
    assert (plan.allow, plan.deny) == (("matmul_v2",), ("softmax",))  # as Paddle's own lists spell them
    for allow, deny, words in (
        (("no_such_operator",), (), "no operator of paddle"),
        ((object(),), (), "no operator of paddle"),
        (("matmul",), (paddle.matmul,), "both name matmul_v2"),
    ):
        with pytest.raises(ampx.UnsupportedOpError, match=words):
            casting.check_plan(CastPlan("gpu", "float16", "O1", allow, deny))


def test_o2_refuses_to_prepare_for_another_device_than_paddle_computes_on():
    """There Paddle's decorate does nothing, silently."""
    model = paddle.nn.Linear(2, 2)
    elsewhere = "gpu" if paddle.device.get_device() == "cpu" else "cpu"
    with pytest.raises(ampx.UnsupportedDeviceError, match=f"set_device\\('{elsewhere}'\\)"):
        prepare(model, None, CastPlan(elsewhere, "float16", "O2"))
    assert model.weight.dtype == paddle.float32


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(ampx.UnsupportedDeviceError, match=r"accepted: 'auto', 'cpu'"):
        ampx.init("paddle", device="gpu:99")


@gpu
@needs_gpu
def test_a_gpu_is_refused_while_paddle_was_told_to_compute_on_the_cpu():
    """There auto_cast casts nothing, and says it in Paddle's words."""
    before = paddle.get_device()
    paddle.set_device("cpu")
    try:
        for level in ("O0", "O1"):
            with pytest.raises(ampx.UnsupportedDeviceError, match=r"computes on 'cpu'.*set_device\('gpu:0'\)"):
                ampx.init("paddle", device="gpu:0", level=level)
        with pytest.warns(ampx.PrecisionWarning, match="off on cpu: eager Paddle computes float32"):
            assert ampx.init("paddle").effective.device == "cpu"
        paddle.set_device("gpu")
        with pytest.warns(ampx.PrecisionWarning, match=r"computes on 'gpu:0' now: paddle\.set_device\('cpu'\)"):
            ampx.init("paddle", device="cpu")
        assert ampx.init("paddle").effective.device == "gpu"
        model = paddle.nn.Linear(2, 2)
        assert model(paddle.ones([1, 2])).dtype == paddle.float16
    finally:
        paddle.set_device(before)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_o1_casts_products_and_trains(dtype):
    paddle.set_device("gpu")
    amp = ampx.init("paddle", dtype=dtype, loss_scale="dynamic")
    model = paddle.nn.Linear(8, 8)
    opt = amp.wrap_optimizer(paddle.optimizer.AdamW(0.01, parameters=model.parameters()))
    x = paddle.rand([4, 8])
    losses = []
    for _ in range(20):
        out = model(x)
        assert str(out.dtype) == f"paddle.{dtype}"
        loss = (out.astype("float32") - 1.0).square().mean()
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()
        opt.step()
        opt.clear_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.weight.dtype == paddle.float32


@gpu
@needs_gpu
def test_denying_everything_else_leaves_products_only():
    """Paddle's level OD."""
    paddle.set_device("gpu")
    ampx.init("paddle", dtype="float16", deny=["*"])
    out = paddle.matmul(paddle.ones([8, 8]), paddle.ones([8, 8]))
    assert out.dtype == paddle.float16
    assert paddle.tanh(out).dtype == paddle.float32


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_o2_has_low_precision_parameters_float32_norms_and_masters(dtype):
    paddle.set_device("gpu")
    amp = ampx.init("paddle", dtype=dtype, level="O2")
    model = paddle.nn.Sequential(paddle.nn.Linear(8, 8), paddle.nn.LayerNorm(8))
    raw = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    model, opt = amp.prepare(model, amp.wrap_optimizer(raw))
    assert str(model[0].weight.dtype) == f"paddle.{dtype}"
    assert model[1].weight.dtype == paddle.float32
    with amp.autocast():
        out = model(paddle.rand([4, 8]))
    with ampx.scale_loss(out.astype("float32").square().mean(), opt) as scaled:
        scaled.backward()
    opt.step()
    assert opt.last_step.applied
    masters = opt.state_dict()["master_weights"].values()
    assert {master.dtype for master in masters} == {paddle.float32}


class GpuPlace:
    is_gpu_place = staticmethod(lambda: True)
    is_xpu_place = is_custom_place = staticmethod(lambda: False)


class GpuTracer:
    _expected_place = GpuPlace()


def test_weights_written_after_prepare_and_before_the_first_step_count(monkeypatch):
    """As DataParallel's broadcast writes them: Paddle makes master weights in the first step, of what is there then.

    Paddle's decorate does nothing on a CPU, so it is told of a GPU; its SGD is the one that computes with masters here.
    """
    module = importlib.import_module("paddle.amp.auto_cast")
    monkeypatch.setattr(module, "_dygraph_tracer", GpuTracer)
    monkeypatch.setattr(module, "_is_gpu_bfloat16_supported", lambda: True)
    model = paddle.nn.Linear(2, 1, bias_attr=False)
    raw = paddle.optimizer.SGD(0.5, parameters=model.parameters())
    present = paddle.device.get_device()
    model, _ = prepare(model, raw, CastPlan(present, "bfloat16", "O2"))
    assert model.weight.dtype == paddle.bfloat16
    assert raw._multi_precision
    assert dict(raw._master_weights) == {}
    model.weight.set_value(paddle.full([2, 1], 0.25, "bfloat16"))
    model.weight._set_grad_ivar(paddle.ones([2, 1], "bfloat16"))
    raw.step()
    assert model.weight.astype("float32").flatten().tolist() == [-0.25, -0.25]
    (master,) = raw._master_weights.values()
    assert master.dtype == paddle.float32


@gpu
@needs_gpu
def test_sparse_gradients_on_a_gpu():
    paddle.set_device("gpu")
    amp = ampx.init("paddle", level="O0", loss_scale="dynamic")
    sparse = paddle.nn.Embedding(5, 3, sparse=True)
    before = sparse.weight.numpy().copy()
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=sparse.parameters()), max_grad_norm=100.0)
    with ampx.scale_loss(sparse(paddle.to_tensor([1, 1, 3])).sum(), opt) as scaled:
        scaled.backward()
    opt.step()
    moved = before - sparse.weight.numpy()
    assert abs(moved - [[0.0], [1.0], [0.0], [0.5], [0.0]]).max() < 1e-5
