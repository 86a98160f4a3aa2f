"""Casting under torch.compile. The eager backends trace as the compiler does, without its code generation."""

import concurrent.futures
import contextlib
import shutil

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn

import ampx
import ampx_torch.casting.compiled


@pytest.fixture(autouse=True)
def restored():
    torch.compiler.reset()
    yield
    ampx.shutdown()
    torch.compiler.reset()


@pytest.fixture
def x():
    return torch.ones(2, 4)


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_a_compiled_model_follows_init_and_shutdown(x):
    model = compiled(nn.Linear(4, 4))
    dtypes = [model(x).dtype]
    amp = ampx.init("torch", dtype="bfloat16", device="cpu")
    dtypes.append(model(x).dtype)
    with amp.autocast(False):
        dtypes.append(model(x).dtype)
    amp.shutdown()
    dtypes.append(model(x).dtype)
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32, torch.float32]


def test_a_compiled_model_sees_updates(x):
    amp = ampx.init("torch", dtype="bfloat16", device="cpu", loss_scale=1.0)
    linear = nn.Linear(4, 4, bias=False)
    model, opt = compiled(linear), amp.wrap_optimizer(torch.optim.SGD(linear.parameters(), lr=1.0))
    first = model(x)
    with amp.scale_loss(first.float().sum(), opt) as scaled:
        scaled.backward()
    opt.step()
    # Every gradient element is 2, so every output moves by 4 × 2.
    torch.testing.assert_close(first - model(x), torch.full((2, 4), 8.0).bfloat16(), atol=0.1, rtol=0)


@pytest.mark.parametrize("process_wide", [True, False])
def test_regions_compile_into_one_graph(x, process_wide):
    amp = ampx.init("torch", dtype="bfloat16", device="cpu", process_wide=process_wide)

    def function(x):
        with amp.autocast(False):
            off = x @ x.T
        with amp.autocast():
            on = x @ x.T
        return off, on

    assert [tensor.dtype for tensor in compiled(function)(x)] == [torch.float32, torch.bfloat16]
    assert torch.is_autocast_enabled("cpu") is process_wide


def test_annotated_functions_compile_into_one_graph(x):
    amp = ampx.init("torch", dtype="bfloat16", device="cpu")
    assert compiled(amp.float_function(lambda x: x @ x.T))(x).dtype == torch.float32
    assert compiled(amp.half_function(lambda x: x * 2))(x).dtype == torch.bfloat16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.first(x))


def test_operation_rules_compile_and_are_forgotten(x):
    low, function = x.bfloat16(), compiled(lambda x: torch.softmax(x, -1))
    ampx.init("torch", dtype="bfloat16", device="cpu")
    dtypes = [function(low).dtype]
    ampx.init("torch", dtype="bfloat16", device="cpu", deny=[torch.softmax])
    dtypes.append(function(low).dtype)
    ampx.init("torch", dtype="bfloat16", device="cpu")
    dtypes.append(function(low).dtype)
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("prepared", [False, True])
def test_module_rules_compile(x, prepared):
    amp = ampx.init("torch", dtype="bfloat16", device="cpu", deny=[nn.Linear])
    model = Block()
    if prepared:
        amp.prepare(model)
    # The method is compiled: torch warns of global hooks when a module is, and they run within the graph here.
    assert compiled(lambda x: model(x))(x).dtype == torch.float32
    assert torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own, while it traces
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_prepared_models_compile_into_one_graph_and_see_updates(x, level):
    amp = ampx.init("torch", dtype="bfloat16", device="cpu", level=level, loss_scale=1.0)
    block = Block()
    block, raw = amp.prepare(block, torch.optim.SGD(block.parameters(), lr=1.0))
    opt, model = amp.wrap_optimizer(raw), compiled(block)
    before = model(x)
    with amp.scale_loss(before.square().sum() + before.sum(), opt) as scaled:
        scaled.backward()
    opt.step()
    after = model(x)
    assert before.dtype == after.dtype == torch.float32
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, block(x), rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_code_cached_without_a_rule_is_not_used_with_it(x, monkeypatch):
    # To try all instruction sets, and to compile headers in advance, takes three times as long as to compile the code.
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)
    dtypes = []
    for deny in ([], [torch.mm], []):
        ampx.init("torch", dtype="bfloat16", device="cpu", deny=deny)
        torch.compiler.reset()
        dtypes.append(torch.compile(lambda x: torch.mm(x, x.T))(x.bfloat16()).dtype)
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert torch.compiler.config.cache_key_tag == ""


def gradients_beside_an_island(amp, compile, wide):
    """Gradients of a layer in low precision, and of a matrix in a float32 region through which 65536 goes back."""
    layer, matrix = nn.Linear(4, 4, bias=False), nn.Parameter(torch.eye(4))
    nn.init.ones_(layer.weight)

    def function(x):
        low = layer(x)
        with amp.autocast(False):
            return ((low.float() * 2**-6) @ matrix).sum()

    opt = amp.wrap_optimizer(torch.optim.SGD([layer.weight, matrix], lr=1.0))
    with contextlib.nullcontext() if wide else amp.autocast():
        loss = (compiled(function) if compile else function)(torch.ones(2, 4))
    with amp.scale_loss(loss, opt) as scaled:
        scaled.backward()
    return layer.weight.grad, matrix.grad


@pytest.mark.parametrize("wide", [True, False], ids=["process-wide", "region"])
def test_a_float32_island_keeps_its_range_in_compiled_backward(wide):
    options = torch._functorch.config
    before = options.backward_pass_autocast
    amp = ampx.init(
        "torch", dtype="float16", device="cpu", on_unsupported="warn", process_wide=wide, loss_scale=2.0**16
    )
    eager = gradients_beside_an_island(amp, False, wide)
    own = gradients_beside_an_island(amp, True, wide)
    assert options.backward_pass_autocast == ("off" if wide else before)
    amp.shutdown()
    assert options.backward_pass_autocast == before
    assert [gradient[0, 0].item() for gradient in eager] == [2048.0, 8192.0]  # as in float32
    for tensor, other in zip(own, eager, strict=True):
        torch.testing.assert_close(tensor, other)


def in_a_thread(work):
    """Run in a thread of its own: the option is looked up once a thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_what_somebody_chose_for_compiled_backward_stays():
    options, chosen = torch._functorch.config, [{"device_type": "cpu"}]

    def work():
        options.backward_pass_autocast = chosen
        with ampx.init("torch", dtype="bfloat16", device="cpu") as amp, amp.autocast():
            inside = options.backward_pass_autocast
        return inside, options.backward_pass_autocast

    assert in_a_thread(work) == (chosen, chosen)


def test_another_session_and_threads_keep_compiled_backward_uncast():
    options = torch._functorch.config
    before = options.backward_pass_autocast
    for dtype in ("bfloat16", "float16"):
        amp = ampx.init("torch", dtype=dtype, device="cpu", on_unsupported="warn")
    assert options.backward_pass_autocast == "off"

    def work():
        with amp.autocast():
            inside = options.backward_pass_autocast
        ampx.enter_thread()
        return inside, options.backward_pass_autocast

    assert in_a_thread(work) == ("off", "off")
    amp.shutdown()
    assert options.backward_pass_autocast == before


def test_a_torch_without_the_option_casts_as_before(x, monkeypatch):
    monkeypatch.setattr(ampx_torch.casting.compiled, "_OPTION", "no_such_option")

    def work():
        with ampx.init("torch", dtype="bfloat16", device="cpu"):
            return compiled(nn.Linear(4, 4))(x).dtype

    assert in_a_thread(work) == torch.bfloat16
