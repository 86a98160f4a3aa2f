"""`ampx run --replace-native`: without --dtype, the script's own regions and GradScaler decide.

The oracle is the same loop without ampx, in PyTorch's own mixed precision: the losses are made of elementwise
operations, which autocast leaves in float32, and loss scales are powers of two, so both agree to the bit.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from processes import run_python

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import ampx  # noqa: E402
from ampx.backend import offer  # noqa: E402
from ampx.plugins import default_registry  # noqa: E402
from ampx.run import Automation, Run, RunSettings  # noqa: E402
from ampx_torch import devices  # noqa: E402

LOW = pytest.mark.parametrize("low", ["float16", "bfloat16"])


def run_of(dtype="auto", **settings):
    return Run("torch", RunSettings(dtype=dtype, device="cpu", **settings))


def automated(run):
    return offer(default_registry().load("torch"), Automation).automate(run)


def same(loop, dtype="auto"):
    """Run a loop with PyTorch alone and automated; both must give the same. Returns the run."""
    expected = loop()
    run = run_of(dtype, replace_native=True)
    with automated(run):
        assert loop() == expected
    return run


class Spy(torch.autograd.Function):
    """Does nothing but note the gradient that comes to it."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        ctx.seen.append(upstream.item())
        return upstream, None


def training(low, first):
    """Return a loop that makes optimizer, scaler and region in some order, and meets an overflow."""

    def loop():
        w = torch.nn.Parameter(torch.tensor([2.0]))
        namespace = {}
        makers = {
            "optimizer": lambda: torch.optim.SGD([w], lr=0.25),
            "scaler": lambda: torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2),
            "region": lambda: torch.autocast("cpu", dtype=getattr(torch, low)),
        }
        for name in sorted(makers, key=lambda name: name != first):
            namespace[name] = makers[name]()
        optimizer, scaler = namespace["optimizer"], namespace["scaler"]
        seen, values = [], [scaler.get_scale()]
        for slope in (1.0, 1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            with namespace["region"]:
                values.append(str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype))
                loss = (Spy.apply(w, seen) * slope).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            values.append(torch.nn.utils.clip_grad_norm_([w], 0.5).item())
            scaler.step(optimizer)
            scaler.update()
            values += [scaler.get_scale(), w.item()]
        return seen, values, scaler.state_dict()

    return loop


@LOW
@pytest.mark.parametrize("first", ["optimizer", "scaler", "region"])
def test_the_scaler_scales_whatever_dtype_the_regions_compute_in(low, first):
    run = same(training(low, first))
    assert run.amp.effective.dtype == low
    assert low in run.amp.effective.reason
    (optimizer,) = run.recorder.optimizers.values()
    assert (optimizer.steps, optimizer.skipped, optimizer.initial_scale) == (4, [3], 512.0)


def test_a_region_made_before_the_optimizer_leaves_gradients_true():
    """With a dtype asked for, too, as scripts do that make their region at the top."""
    run = same(training("float16", "region"), "float16")
    assert run.recorder.ops


def test_a_scaler_that_comes_after_the_first_backward_scales():
    def loop():
        w, seen = torch.nn.Parameter(torch.tensor([2.0])), []
        optimizer = torch.optim.SGD([w], lr=0.25)
        w.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        for _ in range(2):
            scaler.scale(Spy.apply(w, seen).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return seen, w.item(), scaler.get_scale()

    same(loop)


@LOW
def test_without_a_scaler_nothing_is_scaled(low):
    def loop():
        w, seen = torch.nn.Parameter(torch.tensor([2.0])), []
        optimizer = torch.optim.SGD([w], lr=0.25)
        with torch.autocast("cpu", dtype=getattr(torch, low)):
            loss = Spy.apply(w, seen).sum()
        loss.backward()
        optimizer.step()
        return seen, w.item()

    assert same(loop).amp.effective.dtype == low


def test_regions_of_several_dtypes_are_told():
    run = run_of(replace_native=True)
    with automated(run):
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.25)
        assert run.amp.effective.dtype is None
        assert "it entered none" in run.amp.effective.reason
        for low in (torch.bfloat16, torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype=low):
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is low
        assert run.amp.effective.dtype == "bfloat16"
        assert run.amp.effective.reason.count("ask for bfloat16") == 1
        assert run.amp.effective.reason.count("ask for float16") == 1


def test_bfloat16_that_was_asked_for_needs_no_scale():
    run = run_of("bfloat16", replace_native=True)
    with automated(run):
        w = torch.nn.Parameter(torch.ones(1))
        optimizer, scaler = torch.optim.SGD([w], lr=0.25), torch.amp.GradScaler("cpu")
        with torch.autocast("cpu", dtype=torch.float16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
        assert scaler.get_scale() == 1.0


def test_the_scale_drops_with_update_and_not_with_step():
    """So scripts hold a scheduler back: by comparing the scale before and after `update`."""

    def loop():
        w = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([w], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for slope in (1.0, float("inf"), 1.0, 1.0):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (w * slope).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scales.append(scaler.state_dict())
            scaler.update()
            if scale <= scaler.get_scale():
                scheduler.step()
            scales += [scale, scaler.get_scale(), scheduler.get_last_lr()]
        return scales

    same(loop)


@pytest.mark.parametrize("before_unscale", [True, False])
def test_an_infinity_that_the_script_writes_is_skipped(before_unscale):
    """PyTorch skips what was there before `unscale_`, and writes what came after into the weights; ampx skips both."""

    def loop():
        w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = torch.optim.SGD([w], lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(w.sum()).backward()
            if before_unscale:
                w.grad[0] = float("inf")
                scaler.unscale_(optimizer)
            else:
                scaler.unscale_(optimizer)
                w.grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        return w.tolist(), scaler.get_scale()

    expected = loop() if before_unscale else ([1.0, 2.0], 256.0)
    with automated(run_of(replace_native=True)):
        assert loop() == expected == ([1.0, 2.0], 256.0)


@pytest.mark.parametrize(
    ("low", "scaler", "asked", "expected"),
    [
        ("bfloat16", None, "auto", 1.0),
        ("float16", None, "auto", 1.0),
        ("float16", {}, "auto", 65536.0),
        ("bfloat16", {}, "auto", 65536.0),
        ("bfloat16", {"init_scale": 512.0, "growth_interval": 7}, "auto", 512.0),
        ("bfloat16", {}, "float16", 65536.0),
        ("float16", {}, "bfloat16", 1.0),
        ("float16", {"init_scale": 2.0**30}, "auto", 2.0**30),
    ],
)
def test_the_lines_by_hand_start_the_session_that_ran(low, scaler, asked, expected):
    run = run_of(asked, replace_native=True)
    with automated(run):
        w = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([w], lr=0.25)
        scaler = torch.amp.GradScaler("cpu", enabled=scaler is not None, **(scaler or {}))
        with torch.autocast("cpu", dtype=getattr(torch, low)):
            loss = w.sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    lines = run.explain()
    names = {"ampx": ampx}
    exec(lines[0], names)
    effective = names["amp"].effective
    assert effective.dtype == (low if asked == "auto" else asked)
    assert not effective.process_wide
    assert effective.loss_scale.init_scale == expected
    assert any("amp.autocast()" in line for line in lines)
    ampx.shutdown()


def test_the_lines_by_hand_wrap_every_optimizer_of_a_scaler():
    run = run_of(replace_native=True)
    with automated(run):
        weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        optimizers = [torch.optim.SGD([weights[0]], lr=0.25), torch.optim.Adam([weights[1]])]
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = sum(weights).sum()
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    wraps = [line.partition("  # ") for line in run.explain() if "wrap_optimizer(" in line]
    assert [origin.partition(" of ")[0] for _, _, origin in wraps] == ["SGD", "Adam"]
    assert wraps[0][0] == "optimizer_1 = ampx.wrap_optimizer(optimizer_1)"
    assert any("scale_loss(loss, [optimizer_1, optimizer_2])" in line for line in run.explain())


def test_no_lines_by_hand_where_nothing_was_cast():
    run = run_of(replace_native=True)
    with automated(run):
        w = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([w], lr=0.25)
        w.sum().backward()
        optimizer.step()
    assert run.explain() == ()


class Ascending(torch.optim.Optimizer):
    """Steps uphill first, as sharpness-aware optimizers do, and by an optimizer of its own after that."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure):
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=0.05)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, old in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
                p.copy_(old)
        self.base.step()


def test_a_closure_for_two_optimizers_with_the_same_parameters_is_refused_in_terms_of_the_script():
    def loop():
        w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = Ascending([w])

        def closure():
            optimizer.zero_grad()
            loss = (w * w).sum()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
        return w.tolist()

    expected = loop()
    with automated(run_of("float16")):
        message = "Ascending is stepped, but another optimizer .* holds its parameters.*--dtype bfloat16"
        with pytest.raises(ampx.RunRefusedError, match=message):
            loop()
    with automated(run_of("bfloat16")):
        assert loop() == expected


def test_the_summary_tells_the_dtype_of_the_regions(tmp_path):
    pytest.importorskip("typer", reason="needs typer, of the extra cli")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "w = torch.nn.Parameter(torch.ones(1))\n"
        "optimizer, scaler = torch.optim.SGD([w], lr=0.1), torch.amp.GradScaler('cpu', init_scale=64.0)\n"
        "with torch.autocast('cpu', dtype=torch.float16):\n"
        "    loss = w.sum()\n"
        "scaler.scale(loss).backward()\n"
        "scaler.step(optimizer)\n"
    )
    done = run_python("-m", "ampx", "run", "--replace-native", script, check=True)
    assert "ampx run: torch in float16 on cpu" in done.stderr
    assert "loss scale 64\n" in done.stderr


# As nanoGPT has it: on a CPU no region, but a GradScaler that the dtype switches on.
WITHOUT_REGION = """
from contextlib import nullcontext
import torch
device, dtype = "cpu", "float16"
context = nullcontext() if device == "cpu" else torch.amp.autocast(device, dtype=getattr(torch, dtype))
model = torch.nn.Linear(4, 4)
model.register_forward_hook(lambda module, inputs, output: print(output.dtype))
scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(model.parameters())
with context:
    loss = model(torch.ones(2, 4)).square().mean()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
"""


@pytest.mark.parametrize("options", [(), ("--dtype", "float16")], ids=["auto", "float16"])
def test_the_headline_says_float32_where_the_script_entered_no_region(tmp_path, options):
    pytest.importorskip("typer", reason="needs typer, of the extra cli")
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_REGION)
    done = run_python("-m", "ampx", "run", "--replace-native", *options, script, check=True)
    assert done.stdout == "torch.float32\n"
    (headline,) = [line for line in done.stderr.splitlines() if line.startswith("ampx run:")]
    assert headline.startswith("ampx run: torch in float32 on cpu")
    assert headline.endswith("only the script's own regions are cast, and it entered none")
    assert "by hand" not in done.stderr


@pytest.mark.parametrize("asked", ["auto", "float16"])
@pytest.mark.parametrize("enters", [False, True])
def test_a_region_counts_once_it_is_entered(asked, enters):
    run, seen = run_of(asked, replace_native=True), []
    with automated(run):
        model = torch.nn.Linear(2, 2)
        model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        region = torch.autocast("cpu", dtype=torch.float16)
        for _ in range(2):
            optimizer.zero_grad()
            with region if enters else nullcontext():
                loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            optimizer.step()
    assert seen == [torch.float16 if enters else torch.float32] * 2
    assert run.amp.effective.dtype == ("float16" if enters else None)
    assert bool(run.explain()) == enters


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("preferred", ["bfloat16", None])
@pytest.mark.parametrize("region", ["cuda.amp.autocast()", "autocast('cuda')"])
def test_a_region_for_a_device_that_is_not_there_tells_what_it_asked_for_and_what_computed(
    monkeypatch, region, preferred
):
    cpu = replace(devices.describe("cpu"), preferred=preferred, reason="so the CPU says")
    monkeypatch.setattr(devices, "_describe_cpu", lambda: cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run, seen = run_of(replace_native=True), []
    with automated(run):
        model = torch.nn.Linear(2, 2)
        model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        with eval(f"torch.{region}"):
            loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
    computed = preferred or "float32"
    assert seen == [getattr(torch, computed)]
    assert run.amp.effective.dtype == preferred
    assert run.amp.effective.reason == (
        f"the script's own regions ask for float16 on cuda, which this machine lacks: on the cpu they compute in "
        f"{computed}, because so the CPU says"
    )


def test_regions_of_a_library_are_told_as_the_library_s(monkeypatch, tmp_path):
    """A trainer may ask for another dtype than the script asked it for, as Lightning does on a CPU."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "some_trainer.py").write_text(
        "import torch\n\ndef region(asked):\n    return torch.autocast('cpu', dtype=torch.bfloat16)\n"
    )
    monkeypatch.syspath_prepend(folder)
    some_trainer = __import__("some_trainer")
    run = run_of(replace_native=True)
    with automated(run):
        for region in (some_trainer.region("float16"), torch.autocast("cpu", dtype=torch.float16)):
            with region:
                pass
    assert run.amp.effective.dtype == "bfloat16"
    assert run.amp.effective.reason == (
        "the regions of some_trainer ask for bfloat16; the script's own regions ask for float16"
    )
