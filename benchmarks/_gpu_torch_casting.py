"""Casting on the device: results of single operations, stale weights, backward threads, O2, torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from _gpu_checks import Figure, NotHere, Setup, require
from _gpu_torch_steps import mlp, through_ampx
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import ampx

DTYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16}

_OPERATIONS: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w,
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "conv2d": lambda x, w: F.conv2d(x[None, None], w[None, None, :3, :3]),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None]),
    "softmax": lambda x, w: (x @ w).softmax(-1),
    "layer_norm": lambda x, w: F.layer_norm(x @ w, (16,)),
    "group_norm": lambda x, w: F.group_norm((x @ w)[None, ..., None].transpose(1, 2), 4),
    "exp": lambda x, w: (x @ w).exp(),
    "pow": lambda x, w: (x @ w).pow(2),
    "sum": lambda x, w: (x @ w).sum(),
    "mse_loss": lambda x, w: F.mse_loss(x @ w, x),
    "cross_entropy": lambda x, w: F.cross_entropy(x @ w, torch.zeros(16, dtype=torch.long, device=x.device)),
    "gelu": lambda x, w: F.gelu(x @ w),
    "cat": lambda x, w: torch.cat([x @ w, x]),
    "add": lambda x, w: x @ w + x,
}
# What torch documents for CUDA: these give the low precision there, and these float32.
_LOW: Final = ("linear", "matmul", "bmm", "addmm", "einsum", "conv2d", "attention", "gelu")
_FLOAT32_ON_CUDA: Final = ("softmax", "layer_norm", "group_norm", "exp", "pow", "sum", "mse_loss", "cross_entropy")


def autocast_results_are_those_of_torch(setup: Setup) -> Figure:
    """Every operation, process-wide: dtype and bits as under torch.autocast; the dtypes that torch documents."""
    torch.manual_seed(0)
    x, w = torch.randn(16, 16, device=setup.device), torch.randn(16, 16, device=setup.device)
    compared: dict[str, str] = {}
    for name, dtype in DTYPES.items():
        for operation, compute in _OPERATIONS.items():
            with torch.autocast(setup.device, dtype):
                native = compute(x, w)
            with ampx.init("torch", device=setup.device, dtype=name):
                ours = compute(x, w)
            label = f"{operation} in {name}"
            require(ours.dtype == native.dtype, f"{label}: {ours.dtype}, torch gives {native.dtype}")
            require(torch.equal(ours, native), f"{label}: other values than torch's")
            if operation in _LOW:
                require(ours.dtype == dtype, f"{label}: {ours.dtype}")
            if operation in _FLOAT32_ON_CUDA and setup.on_gpu:
                require(ours.dtype == torch.float32, f"{label}: {ours.dtype}")
            compared[label] = str(ours.dtype)
    after = F.linear(x, w).dtype
    require(after == torch.float32, f"after shutdown linear gives {after}")
    return Figure(f"{len(compared)} results equal bit by bit", compared)


def process_wide_casting_never_reads_old_weights(setup: Setup) -> Figure:
    """After a step, after load_state_dict and after a change of `.data`, the next forward sees the new weights."""
    with ampx.init("torch", device=setup.device, dtype="bfloat16") as amp:
        model = nn.Linear(16, 16).to(setup.device)
        opt = amp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        x = torch.ones(4, 16, device=setup.device)

        def step() -> None:
            with ampx.scale_loss(model(x).float().square().mean(), opt) as scaled:
                scaled.backward()
            opt.step()
            opt.zero_grad()

        def load() -> None:
            model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})

        def poke() -> None:
            model.weight.data.mul_(2)

        for change in (step, load, poke, step):
            before = model(x).detach().clone()
            change()
            with torch.autocast(setup.device, torch.bfloat16, cache_enabled=False):
                fresh = model(x)
            require(torch.equal(model(x), fresh), f"after {change.__name__} the forward used other weights")
            require(not torch.equal(before, fresh), f"{change.__name__} changed nothing, so nothing was shown")
    return Figure("step, load_state_dict, .data")


class _Island(torch.autograd.Function):
    """Notes, in backward, what autocast is there and what a product of float32 matrices gives."""

    seen: dict[str, Any]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        device = gradient.device.type
        product = torch.ones(4, 4, device=device) @ torch.ones(4, 4, device=device)
        _Island.seen = {"autocast": torch.is_autocast_enabled(device), "product": str(product.dtype)}
        return gradient


def backward_runs_uncast_in_its_own_threads(setup: Setup) -> Figure:
    """Inside `scale_loss` backward keeps float32, whatever thread runs it; recomputation casts as forward did."""
    for name, dtype in DTYPES.items():
        with ampx.init("torch", device=setup.device, dtype=name, loss_scale=1024.0) as amp:
            torch.manual_seed(0)
            model = nn.Linear(8, 8).to(setup.device)
            opt = amp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            forwards: list[torch.dtype] = []

            def layer(
                x: torch.Tensor, model: nn.Module = model, forwards: list[torch.dtype] = forwards
            ) -> torch.Tensor:
                y = model(x)
                forwards.append(y.dtype)
                return y

            x = torch.randn(4, 8, device=setup.device, requires_grad=True)
            for reentrant in (False, True):
                forwards.clear()
                _Island.seen = {}
                loss = _Island.apply(checkpoint(layer, x, use_reentrant=reentrant)).float().square().mean()
                with ampx.scale_loss(loss, opt) as scaled:
                    scaled.backward()
                label = f"{name}, reentrant={reentrant}"
                require(_Island.seen == {"autocast": False, "product": "torch.float32"}, f"{label}: {_Island.seen}")
                require(set(forwards) == {dtype}, f"{label}: forward and recomputation ran in {forwards}")
                require(model.weight.grad.dtype == torch.float32, f"{label}: gradients in {model.weight.grad.dtype}")
                opt.step()
                opt.zero_grad()
            require(torch.is_autocast_enabled(setup.device), f"{name}: casting is off after the step")
    return Figure("float16 and bfloat16, plain and checkpointed")


def master_weights_keep_small_updates(setup: Setup) -> Figure:
    """At O2 a hundred updates, each far below the parameters' precision, add up as in float32; norms stay float32."""
    steps, rate = 100, 1e-4
    reached: dict[str, float] = {}
    for name, dtype in DTYPES.items():
        with ampx.init("torch", device=setup.device, dtype=name, level="O2", loss_scale=256.0) as amp:
            model = nn.Sequential(nn.Linear(8, 1, bias=False), nn.LayerNorm(1)).to(setup.device)
            nn.init.ones_(model[0].weight)
            model, raw = amp.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
            opt = amp.wrap_optimizer(raw)
            require(model[0].weight.dtype == dtype, f"{name}: the parameter is {model[0].weight.dtype}")
            require(model[1].weight.dtype == torch.float32, f"{name}: the norm is {model[1].weight.dtype}")
            x = torch.ones(4, 8, device=setup.device)
            for _ in range(steps):
                loss = model[0](x.to(dtype)).float().mean()
                with ampx.scale_loss(loss, opt) as scaled:
                    scaled.backward()  # every weight's gradient is 1
                opt.step()
                opt.zero_grad()
            reached[name] = model[0].weight.float().mean().item()
            step = torch.finfo(dtype).eps
            require(
                abs(reached[name] - (1 - steps * rate)) <= step, f"{name}: the weights are {reached[name]}, not 0.99"
            )
            require(reached[name] != 1.0, f"{name}: the weights never moved")
    return Figure(", ".join(f"{name}: 1 → {value:.4f}" for name, value in reached.items()), reached)


def compiled_step_trains_like_the_eager_one(setup: Setup) -> Figure:
    """A compiled model and loss, stepped through ampx, follows the eager run; it neither goes stale nor stays cast."""
    backend = "inductor" if setup.on_gpu else "aot_eager"
    losses: dict[str, list[float]] = {}
    torch.manual_seed(0)
    start = mlp().to(setup.device)
    x = torch.randn(32, 16, device=setup.device)
    y = x[:, :4].argmax(1)
    for kind in ("eager", "compiled"):
        model = copy.deepcopy(start)
        with ampx.init("torch", device=setup.device, dtype="bfloat16", loss_scale="dynamic") as amp:
            opt = amp.wrap_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
            forward = model if kind == "eager" else torch.compile(model, backend=backend)
            try:
                losses[kind] = [through_ampx(forward, opt, x, y).item() for _ in range(8)]
            except Exception as error:
                if "compiler" in str(error).lower() or "triton" in str(error).lower():
                    raise NotHere(f"torch.compile has no compiler here: {error}".partition("\n")[0]) from error
                raise
    after = forward(x).dtype
    require(after == torch.float32, f"after shutdown the compiled model gives {after}")
    worst = max(abs(a - b) for a, b in zip(losses["eager"], losses["compiled"], strict=True))
    require(worst < 0.02, f"the losses differ by {worst}: {losses}")
    require(losses["compiled"][-1] < losses["compiled"][0], f"the compiled model did not train: {losses['compiled']}")
    return Figure(f"{backend}; losses differ by at most {worst:.1e}", losses)
