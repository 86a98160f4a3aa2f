"""Which dtype an operation gives at O1: the expected values are apex's own lists, written out here."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import ampx
from ampx.errors import InvalidOptionError
from ampx_torch.apex import amp
from ampx_torch.apex.amp import lists, registry

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture(params=["float16", "bfloat16"])
def low(request, monkeypatch):
    """Operations are cast to this."""
    monkeypatch.setenv("AMPX_APEX_DTYPE", request.param)
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    return getattr(torch, request.param)


ALWAYS_LOW = {
    "linear": lambda x: F.linear(x, torch.ones(4, 4)),
    "module": lambda x: nn.Linear(4, 4)(x),
    "conv2d": lambda x: F.conv2d(x.reshape(1, 1, 4, 4), torch.ones(1, 1, 3, 3)),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x.reshape(1, 4, 4), torch.ones(4, 1, 2)),
    "matmul": lambda x: x.matmul(torch.ones(4, 4)),
    "rmatmul": lambda x: torch.ones(4, 4) @ x,
    "mm": lambda x: torch.mm(x, torch.ones(4, 4)),
    "mv": lambda x: torch.mv(x, torch.ones(4)),
    "addmm": lambda x: torch.addmm(torch.ones(4, 4), x, x),
    "addmv": lambda x: torch.addmv(torch.ones(4), x, torch.ones(4)),
    "addr": lambda x: torch.addr(x, torch.ones(4), torch.ones(4)),
    "bmm": lambda x: torch.bmm(x[None], torch.ones(1, 4, 4)),
    "prelu": lambda x: F.prelu(x, torch.ones(1)),
    "rnn_cell": lambda x: nn.RNNCell(4, 4)(x),
    "lstm_cell": lambda x: nn.LSTMCell(4, 4)(x)[0],
    "gru_cell": lambda x: nn.GRUCell(4, 4)(x),
    "lstm": lambda x: nn.LSTM(4, 4)(x)[0],
    "gru": lambda x: nn.GRU(4, 4, num_layers=2)(x)[0],
    "rnn": lambda x: nn.RNN(4, 4, bidirectional=True)(x)[0],
}
ALWAYS_FLOAT = {
    **{
        name: getattr(torch, name)
        for name in (
            [
                "acos",
                "asin",
                "cosh",
                "erfinv",
                "exp",
                "expm1",
                "log",
                "log10",
                "log2",
                "reciprocal",
                "rsqrt",
                "sinh",
                "tan",
                "prod",
                "std",
                "var",
                "sum",
                "norm",
            ]
        )
    },
    "pow": lambda x: x.pow(2.0),
    "pow operator": lambda x: x**2.0,
    "rpow": lambda x: 2.0**x,
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "dist": lambda x: torch.dist(x, x + 1),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "softmax": lambda x: F.softmax(x, dim=1),
    "softmax module": nn.Softmax(dim=1),
    "log_softmax": lambda x: F.log_softmax(x, dim=1),
    "softmin": lambda x: F.softmin(x, dim=1),
    "softplus": F.softplus,
    "gelu": F.gelu,
    "interpolate nearest": lambda x: F.interpolate(x[None, None], scale_factor=2),
    "interpolate bilinear": lambda x: F.interpolate(x[None, None], size=(8, 8), mode="bilinear"),
    "interpolate bicubic": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bicubic"),
    "interpolate linear": lambda x: F.interpolate(x[None], scale_factor=2, mode="linear"),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": nn.GroupNorm(2, 4),
    "local_response_norm": lambda x: F.local_response_norm(x[None], 2),
    "normalize": F.normalize,
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "mse_loss": lambda x: F.mse_loss(x, torch.ones(4, 4)),
    "l1_loss": lambda x: F.l1_loss(x, torch.ones(4, 4)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.ones(4, 4)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(4)),
    "nll_loss": lambda x: F.nll_loss(x, torch.arange(4)),
    "kl_div": lambda x: F.kl_div(x, torch.ones(4, 4), reduction="batchmean"),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, torch.ones(4, 4)),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, torch.ones(4, 4)),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x, torch.ones(4)),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x[0], x[1], torch.ones(4)),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, torch.zeros(4, 4, dtype=torch.int64)),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, torch.ones(4, 4)),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, torch.arange(4)),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, torch.ones(4, 4)),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x + 1, x + 2),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(4, 4)),
}
AS_INPUT = {
    "relu": F.relu,
    "relu module": nn.ReLU(),
    "batch_norm": lambda x: nn.BatchNorm1d(4)(x),
    "dropout": F.dropout,
    "max_pool": lambda x: F.max_pool1d(x, 2),
    "reshape": lambda x: x.reshape(2, 8),
}


def values():
    return torch.linspace(0.1, 0.9, 16).reshape(4, 4)


@pytest.mark.parametrize("name", ALWAYS_LOW)
def test_it_gives_low_precision(low, name):
    for dtype in (low, FLOAT):
        x = values().to(dtype).requires_grad_()
        result = ALWAYS_LOW[name](x)
        assert result.dtype == low
        with amp.disable_casts():
            result.float().sum().backward()
        assert x.grad.dtype == dtype


@pytest.mark.parametrize("name", ALWAYS_FLOAT)
def test_it_gives_float32(low, name):
    for dtype in (low, FLOAT):
        x = values().to(dtype).requires_grad_()
        result = ALWAYS_FLOAT[name](x)
        assert result.dtype == FLOAT
        result.float().sum().backward()
        assert x.grad.dtype == dtype


@pytest.mark.parametrize("name", AS_INPUT)
def test_it_follows_its_input(low, name):
    for dtype in (low, FLOAT):
        assert AS_INPUT[name](values().to(dtype)).dtype == dtype


ON_CUDA = (
    "acos asin cosh cosine_similarity cumprod cumsum dist erfinv exp expm1 gelu group_norm kl_div l1_loss layer_norm "
    "log log10 log2 log_softmax.int mse_loss multi_margin_loss norm.Scalar pow.Tensor_Scalar prod reciprocal renorm "
    "rsqrt sinh smooth_l1_loss softmax.int softplus std std.correction sum tan upsample_bicubic2d upsample_bilinear2d "
    "upsample_nearest2d upsample_trilinear3d var var.correction"
)


@pytest.mark.parametrize("operation", ON_CUDA.split(" "))
def test_on_cuda_torch_or_our_list_has_the_float32_operations(operation):
    """torch registers its kernels for CUDA in every build."""
    native = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operation}", "AutocastCUDA")
    ours = {item for entry in lists.denied("cuda", allow_banned=False) for item in registry.operation(entry)}
    assert native or f"aten::{operation}" in {name.removesuffix(".default") for name in ours}


@pytest.mark.parametrize("operation", ["addmv", "addr", "mv", "mm", "conv2d", "lstm_cell", "gru_cell", "prelu", "dot"])
def test_on_cuda_torch_has_the_rest(operation):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operation}", "AutocastCUDA")


WIDEST = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": torch.mul,
    "div": lambda x, y: x / y,
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "atan2": torch.atan2,
    "cross": lambda x, y: torch.linalg.cross(x[:, :3], y[:, :3]),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "cat": lambda x, y: torch.cat([x, x, y]),
    "stack": lambda x, y: torch.stack([x, x, y]),
}


@pytest.mark.parametrize("name", WIDEST)
def test_several_arguments_give_the_widest_dtype(low, name):
    for first in (low, FLOAT):
        for second in (low, FLOAT):
            x, y = values().to(first).requires_grad_(), values().to(second)
            result = WIDEST[name](x, y)
            assert result.dtype == (FLOAT if FLOAT in (first, second) else low)
            result.float().sum().backward()
            assert x.grad.dtype == first


def test_bilinear_gives_the_widest_dtype(low):
    x = values().to(low)
    assert F.bilinear(x, values(), torch.ones(2, 4, 4).to(low)).dtype == FLOAT
    assert F.bilinear(x, x, torch.ones(2, 4, 4).to(low)).dtype == low


@pytest.mark.parametrize("compare", [torch.eq, torch.ge, torch.gt, torch.le, torch.lt, torch.ne])
def test_comparisons_take_mixed_arguments(low, compare):
    assert compare(values().to(low), values()).dtype == torch.bool


def test_in_place_operations_keep_the_dtype_of_what_they_change(low):
    for first in (low, FLOAT):
        for second in (low, FLOAT):
            x = values().to(first)
            assert x.add_(values().to(second)).dtype == first
            x *= values().to(second)
            assert x.dtype == first
    assert values().to(low).exp_().dtype == low


# -- banned ------------------------------------------------------------------------------------------


def test_binary_cross_entropy_refuses_low_precision(low):
    target = torch.ones(4, 4)
    for call in (nn.BCELoss(), F.binary_cross_entropy):
        assert call(values(), target).dtype == FLOAT
        with pytest.raises(NotImplementedError, match=r"binary_cross_entropy got .*accepted: float32.*with_logits"):
            call(values().to(low), target.to(low))


def test_binary_cross_entropy_is_computed_in_float32_where_banned_functions_are_allowed():
    handle = amp.init(allow_banned=True)
    assert F.binary_cross_entropy(values().half(), torch.ones(4, 4)).dtype == FLOAT
    handle._deactivate()


def test_a_registered_sigmoid_makes_binary_cross_entropy_work():
    """What apex's message advised."""
    amp.register_float_function(torch, "sigmoid")
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    output = torch.sigmoid(F.linear(values(), torch.ones(4, 4)))
    assert output.dtype == FLOAT
    F.binary_cross_entropy(output, torch.ones(4, 4))


# -- off and on --------------------------------------------------------------------------------------


def test_disable_casts_may_be_nested_and_restores_after_an_exception(low):
    with amp.disable_casts():
        with amp.disable_casts():
            assert F.linear(values(), values()).dtype == FLOAT
        assert F.linear(values(), values()).dtype == FLOAT
    assert F.linear(values(), values()).dtype == low
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert F.linear(values(), values()).dtype == low


@pytest.mark.parametrize("opt_level", ["O0", "O2", "O3"])
def test_operations_are_not_cast_at_other_levels(opt_level):
    amp.initialize(nn.Linear(1, 1), opt_level=opt_level, verbosity=0)
    with amp.disable_casts():
        assert F.linear(values(), values()).dtype == FLOAT
    assert F.linear(values(), values()).dtype == FLOAT


def test_patch_torch_functions_can_be_switched_off_at_o1():
    amp.initialize(nn.Linear(1, 1), opt_level="O1", patch_torch_functions=False, verbosity=0)
    assert F.linear(values(), values()).dtype == FLOAT


def test_a_raised_overflow_of_a_sum_does_not_happen(low):
    """70 000 is more than float16 holds."""
    assert torch.full((70_000,), 1.0, dtype=low).sum() == 70_000


def test_weights_changed_by_hand_between_two_forwards_are_seen(low):
    """The weights of an evaluation must not be those of the last training step."""
    model, x = nn.Linear(4, 1, bias=False), torch.ones(1, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=4.0, verbosity=0)
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(value)
            assert model(x).item() == 4 * value
        model.zero_grad()
        with amp.scale_loss(model(x).sum() * value, optimizer) as scaled_loss:
            scaled_loss.backward()
        assert torch.equal(model.weight.grad, torch.full((1, 4), value))


def test_a_packed_sequence_goes_through_an_rnn(low):
    x = torch.rand(3, 2, 4, requires_grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]))
    output, _ = nn.RNN(4, 4, num_layers=2)(packed)
    assert output.data.dtype == low
    output.data.float().sum().backward()
    assert x.grad.dtype == FLOAT


def test_shutdown_restores_torch(low):
    ampx.shutdown()
    x = values().half()
    assert F.softmax(x, dim=1).dtype == HALF
    assert F.linear(values(), values()).dtype == FLOAT
    with torch.autocast("cpu", dtype=torch.float16):
        assert F.binary_cross_entropy(x, x).dtype == FLOAT


def test_the_dtype_must_be_a_low_one(monkeypatch):
    monkeypatch.setenv("AMPX_APEX_DTYPE", "float32")
    with pytest.raises(InvalidOptionError, match="AMPX_APEX_DTYPE"):
        amp.initialize(nn.Linear(1, 1))
    amp.initialize(nn.Linear(1, 1), dtype=torch.bfloat16, verbosity=0)
    assert F.linear(values(), values()).dtype == torch.bfloat16
