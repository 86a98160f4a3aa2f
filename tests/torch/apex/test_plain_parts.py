"""What is plain PyTorch under apex's names: layers, norms and losses, against their formulas."""

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ampx.errors import AmpxWarning, InvalidOptionError
from ampx_torch.apex import contrib
from ampx_torch.apex.fused_dense import DenseNoBiasFunc, FusedDense, FusedDenseFunc, FusedDenseGeluDense
from ampx_torch.apex.mlp import MLP
from ampx_torch.apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormFunction,
    manual_rms_norm,
)
from ampx_torch.apex.parallel.distributed import split_half_float_double

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # both compute in float64


def gradients(values, *tensors):
    weights = torch.linspace(0.5, 2.0, values.numel(), dtype=values.dtype).view_as(values)
    return torch.autograd.grad((values * weights).sum(), tensors)


def agree(actual, expected, *tensors, **tolerance):
    torch.testing.assert_close(actual, expected, **tolerance)
    for own, other in zip(gradients(actual, *tensors), gradients(expected, *tensors), strict=True):
        torch.testing.assert_close(own, other, **tolerance)


# -- cross entropy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("padding_idx", [0, 2, -100])
def test_cross_entropy_is_that_of_smoothed_labels(smoothing, padding_idx):
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 2, 6, 2, 1])
    logs = logits - torch.logsumexp(logits, 1, keepdim=True)
    expected = -(1 - smoothing) * logs[range(5), labels] - smoothing * logs.mean(1)
    expected = expected.masked_fill(labels == padding_idx, 0.0)
    agree(contrib.SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding_idx), expected, logits, **EXACT)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_cross_entropy_of_low_precision_is_computed_in_float32(low):
    logits = (torch.randn(3, 1000) * 8).to(low).requires_grad_()
    labels = torch.tensor([1, 2, 3])
    wide = contrib.SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, 0, True)
    expected = F.cross_entropy(logits.detach().double(), labels, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(wide, expected.float())
    with torch.autocast("cpu", dtype=low):
        narrow = contrib.SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, 0, False)
    assert narrow.dtype == low
    assert torch.equal(narrow, wide.to(low))
    assert gradients(narrow, logits)[0].dtype == low


# -- norms -------------------------------------------------------------------------------------------


def layer_norm(x, weight=1.0, bias=0.0, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def rms_norm(x, weight=1.0, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_functions_of_norms_that_are_called_as_autograd_functions_compute_the_formula():
    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 8), (8,), (8,)))
    agree(FusedLayerNormAffineFunction.apply(x, weight, bias, (8,), 1e-5), layer_norm(x, weight, bias), x, weight, bias)
    agree(FusedLayerNormFunction.apply(x, (8,), 1e-5), layer_norm(x), x)
    agree(FusedRMSNormAffineFunction.apply(x, weight, torch.Size([8]), 1e-5), rms_norm(x, weight), x, weight)
    agree(FusedRMSNormFunction.apply(x, (8,), 1e-5, False), rms_norm(x), x)
    agree(contrib.FastLayerNormFN.apply(x, weight, bias, 1e-5), layer_norm(x, weight, bias), x, weight, bias)
    agree(manual_rms_norm(x, (8,), weight, 1e-5), rms_norm(x, weight), x, weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_they_give_the_dtype_of_their_input_also_where_autocast_is_on(dtype):
    x, weight, bias = torch.randn(2, 8).to(dtype), torch.ones(8), torch.zeros(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = FusedLayerNormAffineFunction.apply(x, weight, bias, (8,), 1e-5)
    assert result.dtype == dtype
    torch.testing.assert_close(result, layer_norm(x.double()).to(dtype))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (FusedLayerNormAffineFunction, (torch.ones(4), torch.zeros(4), (4,), 1e-5)),
        (FusedRMSNormAffineFunction, (torch.ones(4), (4,), 1e-5)),
        (contrib.FastLayerNormFN, (torch.ones(4), torch.zeros(4), 1e-5)),
    ],
)
def test_trainers_that_look_for_the_memory_saving_argument_find_it(function, arguments):
    assert inspect.getfullargspec(function.forward).args[-1] == "memory_efficient"
    x = torch.randn(2, 4)
    with pytest.warns(AmpxWarning, match="memory_efficient=True has no effect"):
        saving = function.apply(x, *arguments, True)
    assert torch.equal(saving, function.apply(x, *arguments))


@pytest.mark.parametrize(
    ("low", "weight", "expected"),
    [
        (torch.float16, None, torch.float32),
        (torch.float16, torch.float16, torch.float16),
        (torch.float16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
    ],
)
def test_the_manual_norm_gives_the_dtype_of_a_low_weight(low, weight, expected):
    x = torch.randn(2, 8).to(low)
    own = None if weight is None else torch.full((8,), 2.0, dtype=weight)
    result = manual_rms_norm(x, (8,), own, 1e-6)
    assert result.dtype == expected
    torch.testing.assert_close(result.double(), rms_norm(x.double(), 1.0 if own is None else 2.0), atol=2e-2, rtol=2e-2)


def test_the_fast_norm_is_layer_norm():
    norm, x = contrib.FastLayerNorm(8).double(), torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert (norm.weight.tolist(), norm.bias.tolist()) == ([1.0] * 8, [0.0] * 8)
    nn.init.normal_(norm.weight)
    agree(norm(x), layer_norm(x, norm.weight, norm.bias), x, norm.weight, norm.bias, **EXACT)
    plain = nn.LayerNorm(8)
    plain.load_state_dict(norm.state_dict())


# -- layers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("activation", "plain"), [("relu", nn.ReLU), ("sigmoid", nn.Sigmoid), ("none", nn.Identity)])
def test_the_perceptron_is_linear_layers_each_with_its_activation(bias, activation, plain):
    mlp = MLP([4, 6, 3], bias=bias, activation=activation).double()
    layers = []
    for position, (weight, sizes) in enumerate(zip(mlp.weights, [(4, 6), (6, 3)], strict=True)):
        layers += [nn.Linear(*sizes, bias=bias).double(), plain()]
        layers[-2].weight = weight
        if bias:
            layers[-2].bias = mlp.biases[position]
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    agree(mlp(x), nn.Sequential(*layers)(x), x, *mlp.parameters(), **EXACT)
    assert [name for name, _ in mlp.named_parameters()][:1] == ["weight_0"]
    assert torch.equal(copy.deepcopy(mlp)(x), mlp(x))


def test_parameters_of_the_perceptron_are_drawn_anew_from_the_distributions_of_apex():
    torch.manual_seed(0)
    mlp = MLP([512, 512])
    for parameter in mlp.parameters():
        nn.init.zeros_(parameter)
    mlp.reset_parameters()
    for values, variance in ((mlp.weight_0, 2 / (512 + 512)), (mlp.bias_0, 1 / 512)):
        # A variance that is estimated from n normal numbers has a relative standard deviation of the root of 2 / n.
        assert abs(values.var().item() / variance - 1) < 4 * (2 / values.numel()) ** 0.5


def test_the_perceptron_knows_three_activations():
    with pytest.raises(InvalidOptionError, match="'none', 'relu', 'sigmoid'"):
        MLP([2, 2], activation="gelu")


def test_dense_layers_are_linear_layers():
    layer, x = FusedDense(4, 3), torch.randn(2, 4, requires_grad=True)
    agree(layer(x), x @ layer.weight.t() + layer.bias, x, layer.weight, layer.bias)
    agree(FusedDenseFunc.apply(x, layer.weight, layer.bias), layer(x), x, layer.weight)
    agree(DenseNoBiasFunc.apply(x, layer.weight), x @ layer.weight.t(), x, layer.weight)
    assert FusedDense(4, 3, bias=False).bias is None


def test_dense_gelu_dense_has_the_tanh_approximation_in_between():
    block, x = FusedDenseGeluDense(4, 8, 3).double(), torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    hidden = x @ block.weight1.t() + block.bias1
    hidden = 0.5 * hidden * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
    agree(block(x), hidden @ block.weight2.t() + block.bias2, x, *block.parameters(), **EXACT)
    with pytest.raises(InvalidOptionError, match="bias=False"):
        FusedDenseGeluDense(4, 8, 3, bias=False)


def test_autocast_casts_the_layers():
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        assert MLP([4, 4])(torch.ones(1, 4)).dtype == torch.bfloat16
        assert FusedDense(4, 4)(torch.ones(1, 4)).dtype == torch.bfloat16
        assert FusedDenseGeluDense(4, 4, 4)(torch.ones(1, 4)).dtype == torch.bfloat16


# -- small things ------------------------------------------------------------------------------------


def test_tensors_are_sorted_by_dtype_from_the_narrowest():
    tensors = [torch.ones(1, dtype=dtype) for dtype in (torch.float64, torch.float16, torch.float32, torch.float16)]
    buckets = split_half_float_double(tensors)
    assert [[id(tensor) for tensor in bucket] for bucket in buckets] == [
        [id(tensors[1]), id(tensors[3])],
        [id(tensors[2])],
        [id(tensors[0])],
    ]
