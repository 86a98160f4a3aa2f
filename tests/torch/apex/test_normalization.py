"""The norms against their formulas, in float64."""

import pytest
import torch

from ampx.errors import AmpxWarning
from ampx_torch.apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from ampx_torch.apex.normalization.fused_layer_norm import (
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)

SHAPE = (4, 6)
EPS = 1e-5


def layer_norm(x, weight=1.0, bias=0.0, eps=EPS):
    x = x.double()
    mean = x.mean((-2, -1), keepdim=True)
    variance = (x - mean).square().mean((-2, -1), keepdim=True)
    return (x - mean) / (variance + eps).sqrt() * weight + bias


def rms_norm(x, weight=1.0, eps=EPS):
    x = x.double()
    return x / (x.square().mean((-2, -1), keepdim=True) + eps).sqrt() * weight


def make(kind, **options):
    module = kind(SHAPE, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(SHAPE))
    return module


def expected(module, x):
    weight = module.weight.detach().double() if module.elementwise_affine else 1.0
    if isinstance(module, FusedRMSNorm):
        return rms_norm(x, weight)
    return layer_norm(x, weight, module.bias.detach().double() if module.elementwise_affine else 0.0)


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_the_value_and_the_gradient_are_those_of_the_formula(kind):
    module, x = make(kind), torch.randn(3, *SHAPE, requires_grad=True)
    y = module(x)
    # A handful of float32 operations on values near 1: some 2**-24 each.
    torch.testing.assert_close(y.double(), expected(module, x), rtol=1e-5, atol=1e-5)
    reference = x.detach().double().requires_grad_()
    (factors := torch.randn(3, *SHAPE)).mul(y).sum().backward()
    factors.mul(expected(module, reference)).sum().backward()
    torch.testing.assert_close(x.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)
    assert module.weight.grad is not None


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm])
def test_without_parameters_it_only_normalises(kind):
    module, x = kind(SHAPE, elementwise_affine=False), torch.randn(3, *SHAPE)
    assert not list(module.parameters())
    torch.testing.assert_close(module(x).double(), expected(module, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "of_weight"),
    [(FusedLayerNorm, False), (FusedRMSNorm, False), (MixedFusedLayerNorm, True), (MixedFusedRMSNorm, True)],
)
def test_the_dtype_is_that_of_the_input_or_in_mixed_norms_that_of_the_weight(kind, of_weight, low):
    module, x = make(kind), torch.randn(3, *SHAPE).to(low)
    y = module(x)
    assert y.dtype == (torch.float32 if of_weight else low)
    # Only the result is rounded: to 2**-11 (float16) or 2**-8 (bfloat16) of a value.
    torch.testing.assert_close(y.double(), expected(module, x), rtol=2.0**-8, atol=2.0**-8)
    y = module.to(low)(x.float())
    assert y.dtype == (low if of_weight else torch.float32)


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_in_autocast_it_gives_the_dtype_of_autocast(kind):
    module, x = make(kind), torch.randn(3, *SHAPE)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    # The input, the weight and the result are rounded, to 2**-9 of a value each; values stay below 16.
    torch.testing.assert_close(y.double(), expected(module, x), rtol=2.0**-6, atol=2.0**-6)


def test_the_functions_compute_what_the_modules_do():
    x, weight, bias = torch.randn(3, *SHAPE), torch.randn(SHAPE), torch.randn(SHAPE)
    pairs = [
        (fused_layer_norm(x, SHAPE), layer_norm(x, eps=1e-6)),
        (fused_layer_norm_affine(x, weight, bias, SHAPE), layer_norm(x, weight, bias, eps=1e-6)),
        (mixed_dtype_fused_layer_norm_affine(x, weight, bias, SHAPE), layer_norm(x, weight, bias, eps=1e-6)),
        (fused_rms_norm(x, SHAPE), rms_norm(x, eps=1e-6)),
        (fused_rms_norm_affine(x, weight, SHAPE), rms_norm(x, weight, eps=1e-6)),
        (mixed_dtype_fused_rms_norm_affine(x, weight, SHAPE), rms_norm(x, weight, eps=1e-6)),
    ]
    for actual, expect in pairs:
        torch.testing.assert_close(actual.double(), expect.double(), rtol=1e-5, atol=1e-5)


def test_one_dimension_may_be_a_number():
    x = torch.randn(3, 6)
    assert torch.equal(FusedLayerNorm(6)(x), torch.nn.LayerNorm(6)(x))
    assert fused_rms_norm(x, 6).shape == x.shape


def test_saving_memory_is_not_possible_and_is_said():
    with pytest.warns(AmpxWarning, match="memory_efficient"):
        FusedLayerNorm(6, memory_efficient=True)
    with pytest.warns(AmpxWarning, match="memory_efficient"):
        fused_rms_norm(torch.randn(3, 6), 6, memory_efficient=True)


@pytest.mark.parametrize("kind", [MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_a_mixed_norm_needs_its_weight(kind):
    with pytest.raises(RuntimeError, match=r"elementwise_affine=False.*Use Fused"):
        kind(6, elementwise_affine=False)


def test_a_checkpoint_of_torchs_norm_loads():
    module = FusedLayerNorm(6)
    module.load_state_dict(torch.nn.LayerNorm(6).state_dict())
    assert isinstance(module, torch.nn.LayerNorm)
