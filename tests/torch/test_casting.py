"""Process-wide casting, regions and what native autocast gets wrong, each shown beside ampx."""

import collections
import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampx

# A CPU without float16 hardware emulates it, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::ampx.errors.PrecisionWarning")

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def restored():
    """No test may leave anything behind, and every session must put back what it found."""
    torch.set_num_threads(1)
    before = flags()
    yield
    ampx.shutdown()
    assert flags() == before


@pytest.fixture
def native():
    """Native process-wide autocast, as users write it."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.set_autocast_enabled("cpu", True)
    yield
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", before)
    torch.clear_autocast_cache()


@pytest.fixture(params=sorted(DTYPES))
def amp(request):
    return ampx.init("torch", dtype=request.param, device="cpu", loss_scale=1.0)


def flags():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def reference(linear, x, dtype):
    """What the layer gives with its present weights: cast by hand, no autocast."""
    before = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    try:
        return nn.functional.linear(x.to(dtype), linear.weight.detach().to(dtype))
    finally:
        torch.set_autocast_enabled("cpu", before)


def change_by_step(linear):
    linear.weight.grad = torch.ones_like(linear.weight)
    torch.optim.SGD(linear.parameters(), lr=1.0).step()


def change_by_load_state_dict(linear):
    linear.load_state_dict({name: value + 1 for name, value in linear.state_dict().items()})


def change_by_data(linear):
    linear.weight.data = linear.weight.data + 1


CHANGES = [change_by_step, change_by_load_state_dict, change_by_data]


@pytest.mark.parametrize("change", CHANGES)
def test_native_autocast_computes_with_stale_weights(native, change):
    linear, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
    stale = linear(x)
    change(linear)
    assert torch.equal(linear(x), stale)


@pytest.mark.parametrize("change", CHANGES)
def test_stale_weights_do_not_occur_with_ampx(amp, change):
    linear, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
    first = linear(x)
    change(linear)
    second = linear(x)
    assert not torch.equal(first, second)
    assert torch.equal(second, reference(linear, x, DTYPES[amp.plan.dtype]))


@pytest.mark.parametrize("how", ["raw", "wrapped"])
def test_a_training_loop_inside_one_region_sees_every_update(how):
    amp = ampx.init("torch", dtype="bfloat16", device="cpu", process_wide=False)
    linear, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
    opt = torch.optim.SGD(linear.parameters(), lr=1.0)
    opt = amp.wrap_optimizer(opt) if how == "wrapped" else opt
    with amp.autocast():
        for _ in range(3):
            y = linear(x)
            assert y.dtype == torch.bfloat16
            assert torch.equal(y, reference(linear, x, torch.bfloat16))
            if how == "wrapped":
                with amp.scale_loss(y.float().sum(), opt) as scaled:
                    scaled.backward()
            else:
                y.float().sum().backward()
            opt.step()
            opt.zero_grad()


def test_weights_updated_by_hand_after_backward_inside_one_region_are_seen():
    amp = ampx.init("torch", dtype="bfloat16", device="cpu", process_wide=False)
    linear, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
    opt = amp.wrap_optimizer(torch.optim.SGD(linear.parameters(), lr=1.0))
    with amp.autocast():
        with amp.scale_loss(linear(x).float().sum(), opt) as scaled:
            scaled.backward()
        linear.weight.data -= linear.weight.grad
        assert torch.equal(linear(x), reference(linear, x, torch.bfloat16))


def test_a_weight_used_often_in_a_region_is_cast_once():
    amp = ampx.init("torch", dtype="bfloat16", device="cpu", process_wide=False)
    linear, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
    with amp.autocast():
        first, second = linear(x), linear(x)
    sources = {id(y.grad_fn.next_functions[1][0].next_functions[0][0]) for y in (first, second)}
    assert len(sources) == 1


def leaks():
    model = nn.Linear(8, 8)
    weight = weakref.ref(model.weight)
    model(torch.ones(1, 8))
    del model
    gc.collect()
    return weight() is not None


def test_native_autocast_leaks_dead_models(native):
    assert leaks()


def test_leaked_models_do_not_occur_with_ampx(amp):
    assert not leaks()


def island_gradient(backward):
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(8, 64)
    with torch.autocast("cpu", enabled=False):
        loss = (x @ weight).pow(2).sum()
    backward(loss)
    return weight.grad


def test_native_autocast_casts_the_backward_of_a_float32_island(native):
    casted = island_gradient(lambda loss: loss.backward())
    torch.set_autocast_enabled("cpu", False)
    assert not torch.equal(casted, island_gradient(lambda loss: loss.backward()))


def test_backward_under_autocast_does_not_occur_with_ampx():
    expected = island_gradient(lambda loss: loss.backward())
    amp = ampx.init("torch", dtype="bfloat16", device="cpu", loss_scale=1.0)
    opt = amp.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))

    def backward(loss):
        with amp.scale_loss(loss, opt) as scaled:
            scaled.backward()

    assert torch.equal(island_gradient(backward), expected)


def test_shutdown_restores_flags_the_user_had_set(native):
    torch.set_autocast_cache_enabled(False)
    try:
        before = flags()
        ampx.init("torch", dtype="float16", device="cpu")
        ampx.shutdown()
        assert flags() == before
    finally:
        torch.set_autocast_cache_enabled(True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_in_the_dtype_of_the_forward(amp, reentrant):
    linear, seen = nn.Linear(4, 4), []

    def segment(x):
        y = linear(x)
        seen.append(y.dtype)
        return y.sin()

    opt = amp.wrap_optimizer(torch.optim.SGD(linear.parameters(), lr=1.0))
    y = checkpoint(segment, torch.ones(2, 4, requires_grad=True), use_reentrant=reentrant)
    with amp.scale_loss(y.sum(), opt) as scaled:
        scaled.backward()
    assert len(set(seen)) == 1
    assert linear.weight.grad.abs().sum() > 0


def test_a_step_makes_casts_of_weights_out_of_date_that_a_region_of_torch_s_own_keeps():
    """Where casting is off during the step, too."""
    amp = ampx.init("torch", dtype="bfloat16", device="cpu", process_wide=False)
    linear, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    opt = amp.wrap_optimizer(torch.optim.SGD(linear.parameters(), lr=1.0))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear(x).sum()
        with amp.scale_loss(loss, opt) as scaled:
            scaled.backward()
        linear(x)
        with torch.autocast("cpu", enabled=False):
            opt.step()
        assert torch.equal(linear(x), reference(linear, x, torch.bfloat16))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("inside_region", [False, True])
def test_gradients_arrive_after_a_forward_without_them(mode, inside_region):
    amp = ampx.init("torch", dtype="bfloat16", device="cpu", process_wide=not inside_region)
    linear, x = nn.Linear(4, 4), torch.ones(2, 4)
    with amp.autocast() if inside_region else contextlib.nullcontext():
        with mode():
            linear(x)
        loss = linear(x).float().sum()
    loss.backward()
    assert torch.equal(linear.weight.grad, torch.full((4, 4), 2.0))


def test_cast_keeps_the_shape_of_trees_and_touches_floating_tensors_only():
    pair = collections.namedtuple("pair", "x y")
    ordered = collections.OrderedDict(b=torch.ones(1), a=None)
    integers, low = torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.float16)
    tree = {"p": pair(torch.ones(2), integers), "l": [low, "text", None, 3], "o": ordered, "c": torch.ones(1) * 1j}
    amp = ampx.init("torch", dtype="float16", device="cpu")
    result = amp.backend.cast(tree, "float16")
    assert isinstance(result["p"], pair)
    assert result["p"].x.dtype == torch.float16
    assert result["p"].y is integers
    assert result["l"][0] is low
    assert result["l"][1:] == ["text", None, 3]
    assert type(result["o"]) is collections.OrderedDict
    assert list(result["o"]) == ["b", "a"]
    assert result["o"]["b"].dtype == torch.float16
    assert ordered["b"].dtype == torch.float32
    assert result["c"].is_complex()


def test_packed_sequences_are_cast():
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
    amp = ampx.init("torch", dtype="bfloat16", device="cpu")
    result = amp.backend.cast(packed, "bfloat16")
    assert isinstance(result, nn.utils.rnn.PackedSequence)
    assert result.data.dtype == torch.bfloat16
    assert torch.equal(result.batch_sizes, packed.batch_sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("change", CHANGES)
def test_stale_weights_do_not_occur_on_cuda(dtype, change):
    ampx.init("torch", dtype=dtype, device="cuda")
    linear, x = nn.Linear(16, 16, bias=False, device="cuda"), torch.ones(2, 16, device="cuda")
    first = linear(x)
    change(linear)
    assert first.dtype == DTYPES[dtype]
    assert not torch.equal(first, linear(x))
    ampx.shutdown()
    assert linear(x).dtype == torch.float32
