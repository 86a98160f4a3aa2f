"""Casting under torch.compile. The eager backends trace as the compiler does, without its code generation."""

import shutil

import pytest
import torch
from torch import nn

import ampx


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

    assert [one.dtype for one in compiled(function)(x)] == [torch.float32, torch.bfloat16]
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
def test_code_cached_without_a_rule_is_not_used_with_it(x):
    low = x.bfloat16()
    dtypes = []
    for deny in ([], [torch.softmax], []):
        ampx.init("torch", dtype="bfloat16", device="cpu", deny=deny)
        torch.compiler.reset()
        dtypes.append(torch.compile(lambda x: torch.softmax(x, -1) * 3)(low).dtype)
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert torch.compiler.config.cache_key_tag == ""
