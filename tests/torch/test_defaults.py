"""What `torch.set_default_dtype` and `torch.set_default_device` say of tensors that nobody asked for changes nothing.

Parameters and data are made with their dtype and device; a tensor of ampx's own that takes the default would fail on
the device that holds no values (`meta`), or in torch's kernels, which take float32 only.
"""

import types

import pytest
import torch
from torch import nn

import ampx
from ampx_torch import devices
from ampx_torch.casting import lstm

SCALES = {"float64": 2.0**9, "bfloat16": 2.0**11, "meta": 2.0**13}  # no scale that a test before has kept


@pytest.fixture(params=SCALES)
def scale(request):
    """Another default; a loss scale, and what goes back to torch's own default."""
    if request.param == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(getattr(torch, request.param))
    yield SCALES[request.param]
    _reset()


def _reset():
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def _train(scale, level="O1", clip=None, **options):
    """Train layers smaller and larger than what is read fast, through an overflow; return weights and results."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator)

    model = nn.Sequential(
        *(nn.Linear(size, 300, bias=size == 4, device="cpu", dtype=torch.float32) for size in (4, 300))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(normal(*parameter.shape) / 17)
    ampx.init(
        "torch", dtype="bfloat16", level=level, device="cpu", loss_scale=ampx.LossScale(init_scale=scale),
        process_wide=False, nan_loss="skip",
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    model, optimizer = ampx.prepare(model, optimizer)
    optimizer = ampx.wrap_optimizer(optimizer, max_grad_norm=clip)
    results = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        for loss_id in (0, 1):
            loss = (model(normal(8, 4)) * factor).square().mean()
            with ampx.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
        optimizer.step()
        results.append(optimizer.last_step)
    ampx.shutdown()
    return [parameter.detach() for parameter in optimizer.param_groups[0]["params"]], results


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_a_training_is_the_same_bit_for_bit(same, scale, level, clip, options):
    weights, results = _train(scale, level, clip, **options)
    _reset()
    expected, outcomes = _train(scale, level, clip, **options)
    assert [result.applied for result in results] == [True, False, True]
    assert same(weights, expected)
    assert results == outcomes


def test_what_this_cpu_computes_is_the_same(scale):
    dtypes = (torch.bfloat16, torch.float32)
    lstm.computable.cache_clear()
    answers = [lstm.computable(dtype) for dtype in dtypes]
    _reset()
    lstm.computable.cache_clear()
    assert answers == [lstm.computable(dtype) for dtype in dtypes]


@pytest.mark.parametrize(
    ("capability", "native", "preferred"),
    [((5, 2), set(), None), ((5, 3), {"float16"}, None), ((7, 0), {"float16"}, "float16")],
)
def test_what_a_gpu_computes_natively_is_told_by_its_compute_capability(monkeypatch, capability, native, preferred):
    properties = types.SimpleNamespace(total_memory=2**34)
    answers = {"get_device_capability": capability, "get_device_name": "GPU", "get_device_properties": properties}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda index, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    described = devices._describe_cuda(0)
    assert (described.native, described.preferred) == (native, preferred)
