"""An LSTM in low precision on a CPU whose oneDNN has no primitive for it: float32 inside, the same dtypes outside.

The oracle is the same module in float32. Every test takes away the primitive first, so that it tests the same on every
CPU; the last one is about the CPU that it runs on.
"""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import ampx  # noqa: E402
from ampx.backend import offer  # noqa: E402
from ampx.numerics.probe import Probe  # noqa: E402
from ampx.plugins import default_registry  # noqa: E402
from ampx.run import Automation, Run, RunSettings  # noqa: E402
from ampx_torch.apex import amp as apex_amp  # noqa: E402
from ampx_torch.casting import lstm  # noqa: E402

LOW = pytest.mark.parametrize("low", ["float16", "bfloat16"])
EXPECTED = "an LSTM was to compute in float16.*it computes in float32"


@pytest.fixture
def no_primitive(monkeypatch):
    """Have the machine look as if it could compute LSTMs in float32 only."""
    monkeypatch.setattr(lstm, "computable", lambda dtype: False)


def model_and_input():
    torch.manual_seed(0)
    return torch.nn.LSTM(4, 6, num_layers=2, bidirectional=True), torch.randn(5, 2, 4)


def rounded(low):
    """Return what float32 gives, layer by layer, rounded to low precision where an LSTM layer begins and ends."""
    model, x = model_and_input()
    dtype = getattr(torch, low)
    hidden = x.to(dtype)
    for layer in range(2):
        parts = []
        for suffix in ("", "_reverse"):
            single = torch.nn.LSTM(hidden.shape[-1], 6)
            with torch.no_grad():
                for name, parameter in single.named_parameters():
                    parameter.copy_(getattr(model, f"{name[:-1]}{layer}{suffix}"))
            flipped = hidden.float().flip(0) if suffix else hidden.float()
            output = single(flipped)[0]
            parts.append(output.flip(0) if suffix else output)
        hidden = torch.cat(parts, -1).to(dtype)
    return hidden.detach()


def close(outputs, low):
    """Judge outputs and states: their dtype is the region's, their values are float32's but for rounding weights."""
    y, (h, c) = outputs
    assert {y.dtype, h.dtype, c.dtype} == {getattr(torch, low)}
    # Rounding x and the weights moves gates by a few units of the last place; all values are below 1.
    torch.testing.assert_close(y.detach(), rounded(low), rtol=0, atol=8 * torch.finfo(y.dtype).eps)


@LOW
def test_it_computes_in_float32_and_says_so_once(no_primitive, low):
    model, x = model_and_input()
    ampx.init("torch", dtype=low, device="cpu")
    with pytest.warns(ampx.PrecisionWarning, match=EXPECTED.replace("float16", low)) as caught:
        outputs = model(x)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    assert len(caught) == 1
    close(outputs, low)


def test_outputs_are_those_of_float32_rounded(no_primitive):
    """Weights and inputs that are float16 numbers: then float32 with a rounded output is all that can come out."""
    torch.manual_seed(0)
    model, x = torch.nn.LSTM(4, 6).half().float(), torch.randn(5, 2, 4).half().float()
    expected = model(x)[0].half()
    ampx.init("torch", dtype="float16", device="cpu")
    assert torch.equal(model(x)[0], expected)


def test_it_trains_with_the_gradients_of_float32(no_primitive):
    def gradients(loss_of):
        torch.manual_seed(0)
        model, x = torch.nn.LSTM(4, 6).half().float(), torch.randn(5, 2, 4).half().float()
        loss_of(model, x)
        return [parameter.grad for parameter in model.parameters()]

    def in_float32(model, x):
        model(x)[0].sum().backward()

    def in_low_precision(model, x):
        ampx.init("torch", dtype="float16", device="cpu")
        optimizer = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), loss_scale=1024.0)
        with ampx.scale_loss(model(x)[0].float().sum(), optimizer) as scaled:
            scaled.backward()
        ampx.unscale(optimizer)

    for gradient, expected in zip(gradients(in_low_precision), gradients(in_float32), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=2 * torch.finfo(torch.float16).eps, atol=1e-4)


def test_regions_too_and_torch_s_own_kernel_comes_back(no_primitive):
    before = torch._C._dispatch_dump("aten::mkldnn_rnn_layer")
    model, x = model_and_input()
    amp = ampx.init("torch", dtype="float16", device="cpu", process_wide=False)

    def inside_and_outside():
        with amp.autocast():
            outputs = model(x)
        assert model(x)[0].dtype is torch.float32
        return outputs

    with pytest.warns(ampx.PrecisionWarning, match=EXPECTED):
        close(inside_and_outside(), "float16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside_and_outside()
    assert torch._C._dispatch_dump("aten::mkldnn_rnn_layer") == before
    ampx.init("torch", dtype="float16", device="cpu")
    assert torch._C._dispatch_dump("aten::mkldnn_rnn_layer") != before
    ampx.shutdown()
    assert torch._C._dispatch_dump("aten::mkldnn_rnn_layer") == before


def test_a_denied_lstm_is_float32_altogether_and_needs_no_warning(no_primitive):
    model, x = model_and_input()
    expected = model(x)[0]
    for entry in (torch.lstm, torch.ops.aten.mkldnn_rnn_layer):
        ampx.init("torch", dtype="float16", device="cpu", deny=[entry])
        assert torch.equal(model(x)[0], expected)


@pytest.mark.parametrize(("dtype", "replaced"), [("float16", True), ("bfloat16", True), ("float32", False)])
def test_torch_s_kernel_is_replaced_while_modules_are_forced_into_low_precision(no_primitive, dtype, replaced):
    before = torch._C._dispatch_dump("aten::mkldnn_rnn_layer")
    model, _ = model_and_input()
    with offer(default_registry().load("torch"), Probe).force(torch.nn.Sequential(model), {"0": dtype}):
        assert (torch._C._dispatch_dump("aten::mkldnn_rnn_layer") != before) is replaced
    assert torch._C._dispatch_dump("aten::mkldnn_rnn_layer") == before


@LOW
def test_regions_of_a_script_that_ampx_run_carries_out(no_primitive, low):
    model, x = model_and_input()
    run = Run("torch", RunSettings(device="cpu", replace_native=True))
    with (
        offer(default_registry().load("torch"), Automation).automate(run),
        torch.autocast("cpu", dtype=getattr(torch, low)),
    ):
        with pytest.warns(ampx.PrecisionWarning, match="it computes in float32"):
            close(model(x), low)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)


def test_an_unedited_script(no_primitive):
    model, x = model_and_input()
    run = Run("torch", RunSettings(dtype="float16", device="cpu"))
    with offer(default_registry().load("torch"), Automation).automate(run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.warns(ampx.PrecisionWarning, match="it computes in float32"):
            outputs = model(x)
        close(outputs, "float16")
        outputs[0].float().sum().backward()
        optimizer.step()
    assert run.recorder.steps == 1


def test_apex_at_o1(no_primitive):
    model, x = model_and_input()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = apex_amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with pytest.warns(ampx.PrecisionWarning, match="it computes in float32"):
        close(model(x), "float16")


@LOW
def test_on_this_cpu_it_has_the_dtype_of_the_region_and_trains(low):
    model, x = model_and_input()
    ampx.init("torch", dtype=low, device="cpu")
    optimizer = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=1024.0)
    outputs = model(x)
    close(outputs, low)
    with ampx.scale_loss(outputs[0].float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert optimizer.last_step.finite
