"""The folded step gives what torch's own recipe gives: bit for bit, or as near as the roundings of both allow."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ampx
from ampx_torch.step import AmpOptimizer

UNIT = 2.0**-24  # half a unit in the last place of a float32: the relative error of one rounding
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "sgd momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {}),
    "adagrad": (torch.optim.Adagrad, {}),
}
SHAPES = {
    "small": [(7, 5), (5,), (3,)],
    "large": [(300, 256), (256,), (90000,), (2, 3, 20000)],
    "channels last": [(64, 32, 6, 6), (64,)],
}
PATTERN = (False, False, True, False, False)


class Trainer:
    """Parameters, a fused optimizer, and gradients that are the same for everybody who asks for the same step."""

    def __init__(self, shapes, cls, options, fused=True):
        generator = torch.Generator().manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        for parameter in self.parameters:
            if parameter.dim() == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
        self.raw = cls(self.parameters, lr=0.1, fused=fused, **options)

    def loss(self, step, bad=False, size=1.0):
        generator = torch.Generator().manual_seed(step)
        factors = [torch.randn(tensor.shape, generator=generator) * size for tensor in self.parameters]
        if bad:
            factors[-1].view(-1)[0] = math.inf if step % 2 else math.nan
        return sum((tensor * factor).sum() for tensor, factor in zip(self.parameters, factors, strict=True))

    def tensors(self):
        state = [value for tensor in self.parameters for value in self.raw.state[tensor].values() if value is not None]
        return [tensor.detach().clone() for tensor in (*self.parameters, *state)]

    def gradients(self):
        return [tensor.grad.clone() for tensor in self.parameters]


def native(trainer, scale, clip):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step(loss):
        scaler.scale(loss).backward()
        norm = None
        if clip is not None:
            scaler.unscale_(trainer.raw)
            norm = nn.utils.clip_grad_norm_(trainer.parameters, clip)
        scaler.step(trainer.raw)
        scaler.update()
        return norm

    return step


def through_ampx(trainer, scale, clip, **options):
    opt = ampx.wrap_optimizer(trainer.raw, loss_scale=ampx.LossScale(init_scale=scale), max_grad_norm=clip, **options)

    def step(loss):
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()
        opt.step()
        return opt.last_step

    return opt, step


@pytest.fixture
def folded(monkeypatch):
    """List the divisors that kernels were given."""
    seen = []
    fold = AmpOptimizer._fold

    def note(self, gradients):
        folded = fold(self, gradients)
        if folded is not None:
            seen.append(folded.divisor)
        return folded

    monkeypatch.setattr(AmpOptimizer, "_fold", note)
    return seen


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("clip", [None, 1e9], ids=["", "clip"])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_where_nothing_is_clipped_steps_and_gradients_are_the_native_ones_bit_for_bit(
    optimizer, shapes, clip, on_device, amp, same
):
    # A power of two, as all scales are by default: dividing by it and multiplying with its reciprocal round nothing.
    ours, theirs = (Trainer(SHAPES[shapes], *OPTIMIZERS[optimizer]) for _ in range(2))
    _, step = through_ampx(ours, 2.0**16, clip, device_scale=on_device)
    by_hand = native(theirs, 2.0**16, clip)
    # Native defect: fused SGD keeps its momentum uninitialised when the first step overflows, so the first is finite.
    for number, bad in enumerate(PATTERN):
        result = step(ours.loss(number, bad))
        by_hand(theirs.loss(number, bad))
        assert result.applied is not bad
        assert same(ours.tensors(), theirs.tensors())
        if not bad:
            assert same(ours.gradients(), theirs.gradients())
        ours.raw.zero_grad()
        theirs.raw.zero_grad()


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("scale", [2.0**16, 1000.0])
@pytest.mark.parametrize("shapes", SHAPES)
def test_clipped_gradients_differ_from_the_exact_ones_by_two_roundings(shapes, scale, on_device, amp):
    ours = Trainer(SHAPES[shapes], *OPTIMIZERS["sgd"])
    _, step = through_ampx(ours, scale, 0.5, device_scale=on_device)
    loss = ours.loss(1)
    exact = torch.autograd.grad(loss * torch.tensor(scale), ours.parameters, retain_graph=True)
    result = step(loss)
    # float64 throughout: the norm of the scaled gradients, then one division of each.
    norm = math.sqrt(sum(tensor.double().square().sum().item() for tensor in exact)) / scale
    # A sum of n squares by rows of m loses no more than (m + n / m) / 2 roundings at worst, and at random their root.
    norm_error = math.sqrt(max(tensor.numel() for tensor in exact)) / 2 * UNIT
    assert abs(result.grad_norm / norm - 1) <= norm_error + UNIT
    for gradient, scaled in zip(ours.gradients(), exact, strict=True):
        wanted = scaled.double() * (0.5 / (norm + 1e-6) / scale)
        # One rounding of the divisor and one of the quotient, beside the norm's own error.
        assert ((gradient.double() - wanted).abs() <= wanted.abs() * (2.01 * UNIT + norm_error)).all()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipped_steps_are_the_native_ones_but_for_rounding(optimizer, amp):
    # Few elements in a gradient: the norms on both sides are the same to one rounding.
    ours, theirs = (Trainer(SHAPES["small"], *OPTIMIZERS[optimizer]) for _ in range(2))
    _, step = through_ampx(ours, 2.0**16, 0.5)
    by_hand = native(theirs, 2.0**16, 0.5)
    result, norm = step(ours.loss(1)), by_hand(theirs.loss(1))
    assert abs(result.grad_norm / norm.item() - 1) <= 2 * UNIT
    # Ours: divisor and quotient. Native: norm + 1e-6, coefficient and product. And 2 for the norm.
    for gradient, wanted in zip(ours.gradients(), theirs.gradients(), strict=True):
        assert ((gradient - wanted).abs() <= wanted.abs() * 7 * UNIT).all()


def test_without_a_power_of_two_as_scale_the_step_is_still_the_native_one(amp, same):
    # Native divides in the kernel as well, by the same scale.
    ours, theirs = (Trainer(SHAPES["large"], *OPTIMIZERS["adamw"]) for _ in range(2))
    _, step = through_ampx(ours, 1000.0, None)
    step(ours.loss(1))
    native(theirs, 1000.0, None)(theirs.loss(1))
    assert same(ours.tensors() + ours.gradients(), theirs.tensors() + theirs.gradients())


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("clip", [None, 1.0], ids=["", "clip"])
def test_finite_gradients_whose_squares_overflow_are_applied(clip, on_device, amp):
    # 2**70 squared is beyond float32, scaled or not.
    ours = Trainer(SHAPES["large"], *OPTIMIZERS["sgd"])
    before = ours.tensors()
    _, step = through_ampx(ours, 1024.0, clip, device_scale=on_device)
    result = step(ours.loss(1, size=2.0**70))
    assert result.applied
    assert all(tensor.isfinite().all() for tensor in ours.tensors())
    assert clip is not None or not torch.equal(before[0], ours.tensors()[0])


@pytest.mark.parametrize("position", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("clip", [None, 1.0], ids=["", "clip"])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_one_bad_element_anywhere_skips_the_step_and_gradients_lose_their_scale(
    position, value, clip, scale, fused, amp, same
):
    ours = Trainer(SHAPES["large"], torch.optim.SGD, {"momentum": 0.9}, fused=fused)
    opt, _ = through_ampx(ours, scale, clip)
    before = ours.tensors()
    with ampx.scale_loss(ours.loss(1), opt) as scaled:
        scaled.backward()
    ours.parameters[position].grad.view(-1)[-1] = value
    wanted = [tensor / scale for tensor in ours.gradients()]
    opt.step()
    assert not opt.last_step.applied
    assert same(ours.tensors(), before)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(ours.gradients(), wanted, strict=True))


# -- where somebody could tell --------------------------------------------------------------------


@pytest.mark.parametrize("shapes", ["small", "large"])
@pytest.mark.parametrize("clip", [None, 1e9], ids=["", "clip"])
def test_the_kernel_unscales_where_that_pays(shapes, clip, amp, folded):
    ours = Trainer(SHAPES[shapes], *OPTIMIZERS["adamw"])
    _, step = through_ampx(ours, 1024.0, clip)
    step(ours.loss(1))
    assert [float(tensor) for tensor in folded] == ([1024.0] if clip or shapes == "large" else [])


def observed_by(observe, clip=1e9):
    """Step once, and give the gradients that `observe` noted."""
    ours = Trainer(SHAPES["large"], *OPTIMIZERS["sgd"])
    seen = []
    handle = observe(ours, seen)
    _, step = through_ampx(ours, 1024.0, clip)
    step(ours.loss(1))
    if handle is not None:
        handle.remove()
    true = torch.autograd.grad(ours.loss(1), ours.parameters)
    return seen, true[0]


def test_hooks_before_the_step_see_true_gradients(amp, folded):
    def hook(seen):
        return lambda opt, args, kwargs: seen.append(opt.param_groups[0]["params"][0].grad.clone())

    def on_raw(ours, seen):
        return ours.raw.register_step_pre_hook(hook(seen))

    def on_all(ours, seen):
        return register_optimizer_step_pre_hook(hook(seen))

    for observe in (on_raw, on_all):
        (seen,), true = observed_by(observe)
        assert torch.equal(seen, true)
    assert folded == []


def test_hooks_after_the_step_see_true_gradients_though_the_kernel_unscaled(amp, folded):
    def observe(ours, seen):
        return ours.raw.register_step_post_hook(
            lambda opt, args, kwargs: seen.append(opt.param_groups[0]["params"][0].grad.clone())
        )

    (seen,), true = observed_by(observe)
    assert torch.equal(seen, true)
    assert len(folded) == 1


def test_an_optimizer_with_a_step_of_its_own_sees_true_gradients(amp, folded):
    class Watching(torch.optim.SGD):
        def step(self, closure=None):
            self.seen = self.param_groups[0]["params"][0].grad.clone()
            return super().step(closure)

    ours = Trainer(SHAPES["large"], Watching, {})
    _, step = through_ampx(ours, 1024.0, 1e9)
    loss = ours.loss(1)
    true = torch.autograd.grad(loss, ours.parameters, retain_graph=True)[0]
    step(loss)
    assert torch.equal(ours.raw.seen, true)
    assert folded == []


def test_a_scheduler_on_the_raw_optimizer_does_not_keep_the_kernel_from_unscaling(amp, folded):
    ours = Trainer(SHAPES["large"], *OPTIMIZERS["sgd"])
    scheduler = lr_scheduler.StepLR(ours.raw, 1)
    _, step = through_ampx(ours, 1024.0, 1.0)
    step(ours.loss(1))
    scheduler.step()
    assert len(folded) == 1


@pytest.mark.parametrize("how", ["unscale", "clip", "value", "losses", "float64", "one group not fused"])
def test_what_needs_true_gradients_before_the_kernel_gets_them(how, amp, folded):
    ours = Trainer(SHAPES["large"], *OPTIMIZERS["sgd"])
    if how == "float64":
        for tensor in ours.parameters:
            tensor.data = tensor.data.double()
    if how == "one group not fused":
        ours.raw.add_param_group({"params": [nn.Parameter(torch.ones(2))], "fused": False})
    opt = ampx.wrap_optimizer(
        ours.raw, loss_scale=1024.0, max_grad_norm=1e9, max_grad_value=1e9 if how == "value" else None
    )
    with ampx.scale_loss(ours.loss(1), opt) as scaled:
        scaled.backward()
    if how == "losses":
        with ampx.scale_loss(ours.loss(2) * 0, opt, loss_id=1) as scaled:
            scaled.backward()
    if how == "unscale":
        ampx.unscale(opt)
    if how == "clip":
        ampx.clip_grad_norm(opt, 1e9)
    opt.step()
    assert folded == []
    true = torch.autograd.grad(ours.loss(1), ours.parameters)[0]
    assert torch.equal(ours.parameters[0].grad, true)


def test_accumulated_gradients_are_divided_once(amp, folded):
    ours = Trainer(SHAPES["large"], *OPTIMIZERS["sgd"])
    opt, _ = through_ampx(ours, 1024.0, 1e9)
    for number in (1, 2):
        with ampx.scale_loss(ours.loss(number), opt) as scaled:
            scaled.backward()
    opt.step()
    true = torch.autograd.grad(ours.loss(1) + ours.loss(2), ours.parameters)[0]
    assert torch.equal(ours.parameters[0].grad, true)
    assert len(folded) == 1


@pytest.mark.parametrize("clip", [None, 1e9], ids=["", "clip"])
def test_a_closure_may_hold_backward(clip, amp, same, folded):
    ours, theirs = (Trainer(SHAPES["large"], *OPTIMIZERS["adamw"]) for _ in range(2))
    opt, _ = through_ampx(ours, 1024.0, clip)

    def closure():
        opt.zero_grad()
        loss = ours.loss(1)
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()
        return loss

    opt.step(closure)
    native(theirs, 1024.0, clip)(theirs.loss(1))
    assert same(ours.tensors(), theirs.tensors())
    assert len(folded) == 1


def test_after_an_error_in_the_raw_step_its_gradients_are_not_used_again(amp):
    ours = Trainer(SHAPES["large"], *OPTIMIZERS["sgd"])

    def fail(*_):
        raise OSError("disk full")

    handle = ours.raw.register_step_post_hook(fail)
    opt, step = through_ampx(ours, 1024.0, 1.0)
    with pytest.raises(OSError, match="disk full"):
        step(ours.loss(1))
    handle.remove()
    weights = [tensor.detach().clone() for tensor in ours.parameters]
    with pytest.raises(ampx.ProtocolError, match="interrupted"):
        opt.step()
    assert all(torch.equal(tensor, other) for tensor, other in zip(ours.parameters, weights, strict=True))
    opt.zero_grad()
    assert step(ours.loss(2)).applied


def test_the_norm_does_not_depend_on_the_number_of_threads(amp):
    norms = set()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        ours = Trainer([(512, 512)], *OPTIMIZERS["sgd"])
        _, step = through_ampx(ours, 1024.0, 1.0)
        norms.add(step(ours.loss(1)).grad_norm)
    assert len(norms) == 1


@pytest.mark.parametrize("clip", [None, 1e9], ids=["", "clip"])
@pytest.mark.parametrize("shapes", ["small", "large"])
def test_master_weights_step_as_a_native_optimizer_of_float32_copies(shapes, clip, folded, same):
    amp = ampx.init("torch", device="cpu", dtype="bfloat16", level="O2", loss_scale=2.0**10)
    model = nn.ParameterList(Trainer(SHAPES[shapes], *OPTIMIZERS["adamw"]).parameters)
    copies = [nn.Parameter(tensor.detach().clone()) for tensor in model]
    raw = torch.optim.AdamW(model, lr=0.1, fused=True)
    _, opt = amp.prepare(model, amp.wrap_optimizer(raw, max_grad_norm=clip))
    native_opt, scaler = torch.optim.AdamW(copies, lr=0.1, fused=True), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(3):
        opt.zero_grad()
        with ampx.scale_loss(sum(tensor.float().square().sum() for tensor in model), opt) as scaled:
            scaled.backward()
        scaler.scale(torch.ones(()))
        for tensor, copied in zip(model, copies, strict=True):
            copied.grad = tensor.grad.float()
        if clip is not None:
            scaler.unscale_(native_opt)
            nn.utils.clip_grad_norm_(copies, clip)
        scaler.step(native_opt)
        scaler.update()
        opt.step()
        assert same(
            [tensor.detach() for tensor in opt.param_groups[0]["params"]], [tensor.detach() for tensor in copies]
        )
        assert same([tensor.detach() for tensor in model], [tensor.detach().bfloat16() for tensor in copies])
    assert len(folded) == (3 if clip or shapes == "large" else 0)


@pytest.mark.parametrize("clip", [None, 1e9], ids=["", "clip"])
def test_one_backward_may_serve_scales_on_the_host_and_on_the_device(clip, amp):
    trainers = [Trainer(SHAPES["large"], *OPTIMIZERS["sgd"]) for _ in range(2)]
    opts = [
        ampx.wrap_optimizer(trainer.raw, loss_scale=1024.0, max_grad_norm=clip, device_scale=on_device)
        for trainer, on_device in zip(trainers, (False, True), strict=True)
    ]
    with ampx.scale_loss(sum(trainer.loss(1) for trainer in trainers), opts) as scaled:
        scaled.backward()
    true = torch.autograd.grad(trainers[0].loss(1), trainers[0].parameters)
    for trainer, opt in zip(trainers, opts, strict=True):
        opt.step()
        assert opt.last_step.applied
        assert all(map(torch.equal, trainer.gradients(), true))
