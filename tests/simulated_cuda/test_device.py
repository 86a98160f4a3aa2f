"""The simulated CUDA device: numbers are the CPU's, dtypes CUDA's, and it sees what the host waits for.

Faults that only CUDA shows are planted into ampx: there they are found.
"""

import copy
import io
import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import ampx  # noqa: E402
import simulated_cuda  # noqa: E402
from ampx_torch import casting  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not simulated_cuda.started(), reason="there is no simulated CUDA device"),
]


@pytest.fixture(autouse=True)
def end():
    yield
    torch.cuda.set_sync_debug_mode("default")
    ampx.shutdown()


def train(device, make_optimizer, steps=5):
    """Train a small convolutional network; give its losses and its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    x, y = torch.randn(6, 1, 8, 8), torch.arange(6) % 3
    model, x, y = model.to(device), x.to(device), y.to(device)
    opt, losses = make_optimizer(model.parameters()), []
    for _ in range(steps):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        losses.append(loss.item())
    return losses, [value.tolist() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    ],
    ids=["foreach", "fused"],
)
def test_a_training_has_the_numbers_of_the_cpu(make_optimizer):
    assert train("cuda", make_optimizer) == train("cpu", make_optimizer)


def test_operations_get_the_dtypes_that_torch_documents_for_cuda():
    x = torch.ones(4, 4, device="cuda")
    with torch.autocast("cuda", torch.float16):
        product = x @ x
        assert product.dtype == F.conv2d(x[None, None], x[None, None]).dtype == torch.float16
        assert product.exp().dtype == product.sum().dtype == product.softmax(-1).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(torch.sigmoid(x), x)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.float32


def test_views_writes_in_place_and_results_share_memory_as_on_any_device():
    x = torch.zeros(2, 3, device="cuda")
    row, alias = x[0], x.detach()
    row.add_(1)
    alias[1] = 2
    assert x.tolist() == [[1, 1, 1], [2, 2, 2]]
    assert row.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    out = torch.empty(0, device="cuda")
    torch.add(x, 1, out=out)
    assert out.tolist() == [[2, 2, 2], [3, 3, 3]]
    assert (out.resize_(1, 3).shape, out.is_cuda) == ((1, 3), True)


def test_moving_a_model_keeps_its_parameters_and_its_optimizer():
    model = nn.Linear(2, 2)
    weight = model.weight
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    model.cuda()
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    before = weight.tolist()
    opt.step()
    assert model.weight is weight
    assert weight.tolist() != before
    assert weight.is_cuda


def test_copies_and_files_keep_device_and_numbers():
    model = nn.Linear(2, 2).cuda()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for state in (copy.deepcopy(model).state_dict(), torch.load(file)):
        assert all(value.is_cuda for value in state.values())
        assert state["weight"].tolist() == model.weight.tolist()


def test_tensors_of_two_devices_do_not_mix():
    x = torch.ones(2, device="cuda")
    assert (x + torch.tensor(1.0)).tolist() == [2, 2]  # a scalar of the host is no tensor to a kernel
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        torch._amp_update_scale_(x[0], torch.zeros((), dtype=torch.int32, device="cuda"), torch.tensor(1.0), 2, 0.5, 1)
    with pytest.raises(TypeError, match="cuda"):
        x.numpy()


READS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0]),
    "tolist": lambda x: x.tolist(),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: x.copy_(torch.ones(2)),
    "mask": lambda x: x[x > 0],
    "write under a mask": lambda x: x.__setitem__(x > 0, 1.0),
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
}
WORK = {
    "sum": lambda x: x.sum(),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "to the host, not blocking": lambda x: x.to("cpu", non_blocking=True),
    "on the device": lambda x: x.copy_(x + 1),
    "index": lambda x: x[torch.zeros(1, dtype=torch.long, device="cuda")],
}


@pytest.mark.parametrize("name", READS)
def test_what_the_host_waits_for_counts_and_is_an_error_on_request(name):
    x = torch.ones(2, device="cuda")
    before = simulated_cuda.syncs()
    READS[name](x)
    assert simulated_cuda.syncs() > before
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        READS[name](x)
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
        READS[name](x)


@pytest.mark.parametrize("name", WORK)
def test_what_stays_on_the_device_does_not_count(name):
    x = torch.ones(2, device="cuda")
    before = simulated_cuda.syncs()
    torch.cuda.set_sync_debug_mode("error")
    WORK[name](x)
    assert simulated_cuda.syncs() == before


def test_new_threads_have_the_device_too():
    seen = {}

    def work():
        x = torch.ones(2, 2, device="cuda")
        with torch.autocast("cuda", torch.float16):
            seen["product"] = x @ x

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (seen["product"].is_cuda, seen["product"].dtype) == (True, torch.float16)


def test_backward_runs_in_the_thread_of_the_device():
    seen = {}

    class Where(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen[gradient.device.type] = threading.get_ident()
            return gradient

    for device in ("cpu", "cuda"):
        Where.apply(torch.ones(1, device=device, requires_grad=True)).sum().backward()
    assert seen["cpu"] == threading.get_ident() != seen["cuda"]


# -- planted faults ----------------------------------------------------------------------------------------


def rules_are_in_force():
    ampx.init("torch", device="cuda", dtype="float16", allow=["exp"])
    return torch.exp(torch.ones(2, device="cuda")).dtype == torch.float16


def a_region_without_casting_computes_in_float32():
    amp = ampx.init("torch", device="cuda", dtype="float16")
    x = torch.ones(2, 2, device="cuda")
    with amp.autocast(False):
        return (x @ x).dtype == torch.float32


def new_weights_are_read():
    ampx.init("torch", device="cuda", dtype="float16")
    model, x = nn.Linear(2, 2, device="cuda"), torch.ones(1, 2, device="cuda")
    before = model(x)
    model.weight.data.add_(1)
    return not torch.equal(model(x), before)


def rules_under_the_key_of_the_cpu(monkeypatch):
    monkeypatch.setitem(casting.rules.kernels._KEYS, "cuda", "AutocastCPU")


def regions_with_the_flag_of_the_cpu(monkeypatch):
    monkeypatch.setattr(casting, "Off", lambda device, off=casting.Off: off("cpu"))


def weight_cache_left_on(monkeypatch):
    monkeypatch.setattr(torch, "set_autocast_cache_enabled", lambda enabled: None)


@pytest.mark.parametrize(
    ("fault", "holds"),
    [
        (rules_under_the_key_of_the_cpu, rules_are_in_force),
        (regions_with_the_flag_of_the_cpu, a_region_without_casting_computes_in_float32),
        (weight_cache_left_on, new_weights_are_read),
    ],
)
def test_a_fault_that_only_cuda_shows_is_found(fault, holds, monkeypatch):
    assert holds()
    ampx.shutdown()
    fault(monkeypatch)
    assert not holds()
