"""PaddlePaddle's checks, and what Paddle knows about the machine."""

from __future__ import annotations

import math
from typing import Any, Final

import paddle
from _gpu_checks import Check, Figure, NotHere, Setup, require

import ampx

# native-facts: 1 is an overflow; scales after each step, from 2**16 with a growth interval of 3.
PATTERN: Final = (0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0)
REFERENCE: Final = [2.0**power for power in (16, 16, 17, 16, 16, 16, 15, 14, 14, 14, 15, 15, 15, 16)]
OPTIMIZERS: Final = ("SGD", "Momentum", "Adam", "AdamW", "Lamb")


def has(device: str) -> bool:
    """Return whether Paddle offers the device here."""
    return device == "cpu" or bool(paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count())


def describe(device: str) -> dict[str, Any]:
    """Return versions, and for a GPU its name and compute capability."""
    return dict(ampx.init("paddle", level="O0", device=_place(device)).backend.device(_place(device)).details)


def scale_trace_is_the_reference_and_skips_change_nothing(setup: Setup) -> Figure:
    """Every optimizer: the specified trace, and the same bits after a skipped step."""
    for name in OPTIMIZERS:
        with _session(setup, level="O0", loss_scale=ampx.LossScale(growth_interval=3)) as amp:
            model = _model()
            opt = amp.wrap_optimizer(getattr(paddle.optimizer, name)(0.01, parameters=model.parameters()))
            trace = []
            for overflow in PATTERN:
                before = _bits(model, opt)
                _backward(model, opt, overflow)
                opt.step()
                opt.clear_grad()
                trace.append(opt.loss_scale)
                same = before == _bits(model, opt)
                require(same == bool(overflow), f"{name}: overflow {overflow}, unchanged {same}")
            require(trace == REFERENCE, f"{name}: {trace}, not {REFERENCE}")
    return Figure(f"{len(OPTIMIZERS)} optimizers", {"tried": list(OPTIMIZERS)})


def sparse_gradients_step_like_dense_ones(setup: Setup) -> Figure:
    """Rows of an embedding that were looked up twice, with an overflow in between."""
    with _session(setup, level="O0", loss_scale="dynamic") as amp:
        sparse, dense = (paddle.nn.Embedding(50, 8, sparse=flag) for flag in (True, False))
        dense.weight.set_value(sparse.weight)
        opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=sparse.parameters()), max_grad_norm=1e6)
        plain = paddle.optimizer.SGD(0.5, parameters=dense.parameters())
        rows = paddle.to_tensor([1, 1, 3, 49])
        for factor in (1.0, math.inf, 0.25):
            with ampx.scale_loss((sparse(rows) * factor).sum(), opt) as scaled:
                scaled.backward()
            opt.step()
            opt.clear_grad()
            if factor != math.inf:
                (dense(rows) * factor).sum().backward()
                plain.step()
                plain.clear_grad()
        error = float((sparse.weight - dense.weight).abs().max())
        require(error < 1e-6, f"sparse and dense weights differ by {error}")
    return Figure(f"largest difference {error:.1e}", {"error": error})


def o1_casts_products_and_trains(setup: Setup) -> Figure:
    """A linear layer computes in the dtype, its parameters stay float32, and the loss falls."""
    _needs_gpu(setup)
    losses = {}
    for dtype in ("float16", "bfloat16"):
        with _session(setup, dtype=dtype, loss_scale="dynamic") as amp:
            model = _model()
            require(dtype in str(model[0](paddle.ones([2, 16])).dtype), f"a linear layer was not cast to {dtype}")
            opt = amp.wrap_optimizer(paddle.optimizer.AdamW(0.01, parameters=model.parameters()))
            seen = []
            for _ in range(30):
                seen.append(_backward(model, opt, 0))
                opt.step()
                opt.clear_grad()
            require(seen[-1] < 0.5 * seen[0], f"{dtype}: the loss went from {seen[0]} to {seen[-1]}")
            require(model[0].weight.dtype == paddle.float32, f"{dtype}: the parameters were cast")
            losses[dtype] = seen[-1]
    return Figure(", ".join(f"{dtype} {loss:.4f}" for dtype, loss in losses.items()), losses)


def op_lists_reach_the_operators(setup: Setup) -> Figure:
    """A denied product is float32, an allowed exponential low; "*" leaves nothing low but products (level OD)."""
    _needs_gpu(setup)
    expected = {
        "plain": ({}, ("float16", "float16", "float32")),
        "deny matmul": ({"deny": ["matmul"]}, ("float32", "float32", "float32")),
        "allow exp": ({"allow": [paddle.exp]}, ("float16", "float16", "float16")),
        "deny *": ({"deny": ["*"]}, ("float16", "float32", "float32")),
    }
    for name, (lists, dtypes) in expected.items():
        with _session(setup, dtype="float16", **lists):
            ones = paddle.ones([8, 8])
            product = paddle.matmul(ones, ones)
            actual = tuple(
                str(tensor.dtype)[7:] for tensor in (product, paddle.tanh(product), paddle.exp(product * 0.01))
            )
            require(actual == dtypes, f"{name}: matmul, tanh, exp are {actual}, not {dtypes}")
    return Figure(", ".join(expected))


def master_weights_keep_small_updates(setup: Setup) -> Figure:
    """At O2, updates too small for a float16 weight add up in its float32 copy."""
    _needs_gpu(setup)
    with _session(setup, dtype="float16", level="O2", loss_scale=1024.0) as amp:
        model = paddle.nn.Linear(4, 4)
        before = model.weight.astype("float32").numpy()
        raw = paddle.optimizer.Momentum(0.5, momentum=0.0, parameters=model.parameters())
        model, opt = amp.prepare(model, amp.wrap_optimizer(raw))
        require("float16" in str(model.weight.dtype), "the parameters were not cast")
        for _ in range(512):
            with ampx.scale_loss((model.weight.astype("float32") * 2.0**-12).sum(), opt) as scaled:
                scaled.backward()
            opt.step()
            opt.clear_grad()
        moved = float((before - model.weight.astype("float32").numpy()).mean())
        require(abs(moved - 512 * 0.5 * 2.0**-12) < 2.0**-8, f"the weights moved by {moved}")
    return Figure(f"moved by {moved:.5f}", {"moved": moved})


CHECKS: Final[tuple[Check, ...]] = (
    scale_trace_is_the_reference_and_skips_change_nothing,
    sparse_gradients_step_like_dense_ones,
    o1_casts_products_and_trains,
    op_lists_reach_the_operators,
    master_weights_keep_small_updates,
)
# None is larger in full runs.
MEASURED: Final[tuple[Check, ...]] = ()
# Check → what it needs that the simulated GPU has not.
NOT_SIMULATED: Final[dict[str, str]] = {}
# Check → what its passing on a GPU shows, as device/dtype/level/aspect, for the table of what is tested.
COVERS: Final = {
    "scale_trace_is_the_reference_and_skips_change_nothing": ("gpu/float32/O0/scaling",),
    "o1_casts_products_and_trains": ("gpu/float16/O1/casting", "gpu/bfloat16/O1/casting"),
    "master_weights_keep_small_updates": ("gpu/float16/O2/casting", "gpu/float16/O2/master weights"),
}


def _place(device: str) -> str:
    return "cpu" if device == "cpu" else "gpu"


def _session(setup: Setup, **options: Any) -> ampx.Amp:
    paddle.set_device(_place(setup.device))
    paddle.seed(0)
    return ampx.init("paddle", device=_place(setup.device), nan_loss="skip", **options)


def _needs_gpu(setup: Setup) -> None:
    if not setup.on_gpu:
        raise NotHere("eager Paddle casts nothing on a CPU")


def _model() -> paddle.nn.Layer:
    return paddle.nn.Sequential(paddle.nn.Linear(16, 32), paddle.nn.ReLU(), paddle.nn.Linear(32, 4))


def _backward(model: paddle.nn.Layer, opt: Any, overflow: int) -> float:
    loss = (model(paddle.ones([8, 16])).astype("float32") - 1.0).square().mean()
    with ampx.scale_loss(loss * (math.inf if overflow else 1.0), opt) as scaled:
        scaled.backward()
    return float(loss)


def _bits(model: paddle.nn.Layer, opt: Any) -> list[bytes]:
    tensors = [*model.parameters(), *(value for value in opt.state_dict().values() if isinstance(value, paddle.Tensor))]
    return [tensor.numpy().tobytes() for tensor in tensors]
