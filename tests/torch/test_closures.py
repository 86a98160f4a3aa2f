"""Optimizers that take a closure: LBFGS, SAM and the like, and first-order ones."""

import copy
import warnings

import pytest
import torch
from torch import nn

import ampx

INF = float("inf")


def problem():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, torch.randn(8, 3), torch.randn(8, 1)


def closure_of(opt, make_loss, scales=True):
    """Return a closure as its users write it."""

    def closure():
        opt.zero_grad()
        loss = make_loss()
        if scales:
            with ampx.scale_loss(loss, opt) as scaled:
                scaled.backward()
        else:
            loss.backward()
        return loss

    return closure


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation as its users write it: climb, evaluate again, come back and descend."""

    def __init__(self, params, rho=0.05, lr=0.1):
        super().__init__(params, {"rho": rho, "lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p in parameters:
            p.copy_(self.state[p]["old"])
            p.sub_(p.grad * self.param_groups[0]["lr"])


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_takes_the_plain_optimizers_steps_bit_for_bit(search, amp, same):
    def train(wrap):
        model, x, y = problem()
        opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, history_size=3, line_search_fn=search)
        if wrap:
            opt = ampx.wrap_optimizer(opt)
        losses = []

        def make_loss():
            loss = ((model(x) - y) ** 2).mean()
            losses.append(loss.item())
            return loss

        closure = closure_of(opt, make_loss, wrap)
        returned = [opt.step(closure).item(), opt.step(closure=closure).item(), opt.step(closure).item()]
        return losses, returned, model.state_dict(), opt.state_dict()["state"]

    assert same(train(True), train(False))
    assert amp.state_dict()["groups"] == []


@pytest.mark.parametrize("evaluation", [1, 2, 4])
def test_overflow_in_any_lbfgs_evaluation_puts_parameters_and_state_back(evaluation, amp, same):
    model, x, y = problem()
    opt = ampx.wrap_optimizer(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, history_size=3))
    bad, count = 0, 0

    def make_loss():
        nonlocal count
        count += 1
        return ((model(x) - y) ** 2).mean() * (INF if count == bad else 1.0)

    closure = closure_of(opt, make_loss)
    opt.step(closure)
    assert opt.last_step.applied
    before = copy.deepcopy((model.state_dict(), opt.state_dict()))
    count, bad = 0, evaluation
    returned = opt.step(closure)
    assert count == evaluation
    assert returned == INF
    assert same((model.state_dict(), opt.state_dict()), before)
    result = opt.last_step
    assert (result.applied, result.scale, result.next_scale, result.consecutive_skips) == (False, 2.0**16, 2.0**15, 1)
    bad = 0
    opt.step(closure)
    assert opt.last_step.applied
    assert not same(model.state_dict(), before[0])


def test_lbfgs_recovers_from_a_scale_that_is_too_large(amp):
    torch.manual_seed(1)
    weight, x, y = nn.Parameter(torch.zeros(3)), torch.randn(8, 3), torch.randn(8)
    scale = ampx.LossScale(init_scale=2.0**127, max_scale=2.0**127)
    opt = ampx.wrap_optimizer(torch.optim.LBFGS([weight], max_iter=8, line_search_fn="strong_wolfe"), loss_scale=scale)
    closure = closure_of(opt, lambda: ((x @ weight - y) ** 2).sum())
    results = []
    for _ in range(10):
        opt.step(closure)
        results.append(opt.last_step.applied)
    assert not results[0]
    assert results == sorted(results)
    solution = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    torch.testing.assert_close(weight.detach(), solution, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("evaluation", [1, 2])
def test_a_closure_that_raises_leaves_everything_as_before(evaluation, amp, same):
    model, x, _ = problem()
    opt = ampx.wrap_optimizer(torch.optim.LBFGS(model.parameters(), max_iter=3))
    count = 0
    fail_at = 0

    def closure():
        nonlocal count
        count += 1
        opt.zero_grad()
        loss = model(x).pow(2).mean()
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()
            if count == fail_at:
                raise KeyError("mine")
        return loss

    opt.step(closure)
    before = copy.deepcopy((model.state_dict(), opt.state_dict(), amp.state_dict()))
    count, fail_at = 0, evaluation
    with pytest.raises(KeyError, match="mine"):
        opt.step(closure)
    assert same((model.state_dict(), opt.state_dict(), amp.state_dict()), before)
    fail_at = 0
    opt.step(closure)
    assert opt.last_step.applied


def test_a_closure_that_forgets_zero_grad_is_told_so(amp, same):
    model, x, _ = problem()
    opt = ampx.wrap_optimizer(torch.optim.LBFGS(model.parameters(), max_iter=3))
    before = copy.deepcopy(model.state_dict())

    def closure():
        loss = model(x).pow(2).mean()
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()
        return loss

    with pytest.raises(ampx.ProtocolError, match="zero_grad"):
        opt.step(closure)
    assert same(model.state_dict(), before)


def test_a_closure_that_never_scales_its_loss_is_told_so(amp, same):
    model, x, _ = problem()
    opt = ampx.wrap_optimizer(torch.optim.LBFGS(model.parameters(), max_iter=3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ampx.NotScaledError):
        opt.step(closure_of(opt, lambda: model(x).pow(2).mean(), scales=False))
    assert same(model.state_dict(), before)


@pytest.mark.parametrize("clear", ["opt.zero_grad", "model.zero_grad", "to zeros"])
def test_a_closure_may_clear_gradients_as_it_likes_and_accumulate_within_an_evaluation(clear, amp, same):
    def train(wrap):
        model, x, y = problem()
        opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        if wrap:
            opt = ampx.wrap_optimizer(opt)

        def closure():
            if clear == "model.zero_grad":
                model.zero_grad()
            else:
                opt.zero_grad(set_to_none=clear == "opt.zero_grad")
            total = 0.0
            for half in (slice(0, 4), slice(4, 8)):
                loss = ((model(x[half]) - y[half]) ** 2).mean()
                if wrap:
                    with ampx.scale_loss(loss, opt) as scaled:
                        scaled.backward()
                else:
                    loss.backward()
                total = total + loss.detach()
            return total

        opt.step(closure)
        opt.step(closure)
        return model.state_dict()

    assert same(train(True), train(False))


def test_losses_with_scales_of_their_own_are_kept_apart_within_a_closure(amp, same):
    def train(wrap):
        model, x, y = problem()
        opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        if wrap:
            opt = ampx.wrap_optimizer(opt)
            state = amp.state_dict(opt)
            losses = state["groups"][0]["losses"]
            losses.append({**losses[0], "loss_id": 1, "scale": 2.0**4})
            amp.load_state_dict(state, opt)

        def closure():
            opt.zero_grad()
            losses = [((model(x) - y) ** 2).mean(), model(x).pow(2).mean()]
            for loss_id, loss in enumerate(losses):
                if wrap:
                    with ampx.scale_loss(loss, opt, loss_id=loss_id) as scaled:
                        scaled.backward()
                else:
                    loss.backward()
            return losses[0]

        opt.step(closure)
        opt.step(closure)
        return model.state_dict()

    assert same(train(True), train(False))


def test_overflow_of_one_loss_in_a_closure_backs_off_that_losss_scale_only(amp):
    model, x, _ = problem()
    opt = ampx.wrap_optimizer(torch.optim.LBFGS(model.parameters(), max_iter=4))

    def closure():
        opt.zero_grad()
        for loss_id, factor in ((0, 1.0), (1, INF)):
            with ampx.scale_loss(model(x).pow(2).mean() * factor, opt, loss_id=loss_id) as scaled:
                scaled.backward()
        return torch.zeros(())

    opt.step(closure)
    scales = {loss["loss_id"]: loss["scale"] for loss in amp.state_dict(opt)["groups"][0]["losses"]}
    assert scales == {0: 2.0**16, 1: 2.0**15}


def test_sam_takes_the_plain_optimizers_steps_and_skips_overflow_in_either_pass(amp, backward, same):
    def train(wrap, bad_pass=None):
        model, x, y = problem()
        opt = Sam(model.parameters())
        if wrap:
            opt = ampx.wrap_optimizer(opt)

        def evaluate(factor):
            loss = ((model(x) - y) ** 2).mean() * factor
            backward(loss, opt) if wrap else loss.backward()
            return loss

        for _ in range(2):
            opt.zero_grad()
            evaluate(INF if bad_pass == 1 else 1.0)
            opt.step(lambda: evaluate(INF if bad_pass == 2 else 1.0))
        return model.state_dict(), opt

    plain, _ = train(False)
    wrapped, opt = train(True)
    assert same(wrapped, plain)
    assert opt.last_step.applied
    untrained = problem()[0].state_dict()
    for bad_pass in (1, 2):
        left, opt = train(True, bad_pass)
        assert same(left, untrained)
        assert opt.loss_scale == 2.0**14
        assert not opt.state


def test_a_scheduler_does_not_complain_where_gradients_overflowed_before_the_first_evaluation(amp, backward):
    model, x, y = problem()
    raw = Sam(model.parameters())
    opt, scheduler = ampx.wrap_optimizer(raw), torch.optim.lr_scheduler.StepLR(raw, 1)
    backward(((model(x) - y) ** 2).mean() * INF, opt)
    opt.step(closure_of(opt, lambda: ((model(x) - y) ** 2).mean()))
    assert not opt.last_step.applied
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_first_order_optimizers_evaluate_a_closure_once_and_give_its_loss(how, amp, same):
    def train(wrap):
        model, x, y = problem()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if wrap:
            opt = ampx.wrap_optimizer(opt)
        count = 0

        def make_loss():
            nonlocal count
            count += 1
            return ((model(x) - y) ** 2).mean()

        closure = closure_of(opt, make_loss, wrap)
        with torch.no_grad():  # as in plain torch, the closure computes with gradients all the same
            losses = [opt.step(closure) if how == "positional" else opt.step(closure=closure) for _ in range(2)]
        return count, [loss.item() for loss in losses], model.state_dict()

    assert same(train(True), train(False))


def test_a_first_order_closure_that_overflows_is_a_skipped_step(amp, same):
    model, x, _ = problem()
    opt = ampx.wrap_optimizer(torch.optim.Adam(model.parameters()))
    before = copy.deepcopy(model.state_dict())
    assert opt.step(closure_of(opt, lambda: model(x).pow(2).mean() * INF)) == INF
    assert not opt.last_step.applied
    assert same(model.state_dict(), before)
    opt.zero_grad()
    assert opt.step(closure=None) is None


def test_clipping_applies_to_every_evaluation_as_it_would_by_hand(amp, same):
    def train(wrap):
        model, x, y = problem()
        opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        if wrap:
            opt = ampx.wrap_optimizer(opt, max_grad_norm=0.1)
        evaluate = closure_of(opt, lambda: ((model(x) - y) ** 2).mean(), wrap)

        def clipped():
            loss = evaluate()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        opt.step(evaluate if wrap else clipped)
        return model.state_dict()

    assert same(train(True), train(False))


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_disabled_session_steps_as_plain_torch(max_norm, same):
    def train(wrap):
        model, x, y = problem()
        opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        evaluate = closure_of(opt, lambda: ((model(x) - y) ** 2).mean(), scales=False)

        def clipped():
            loss = evaluate()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            return loss

        if wrap:
            opt = ampx.init("torch", device="cpu", enabled=False).wrap_optimizer(opt, max_grad_norm=max_norm)
        return opt.step(evaluate if wrap or max_norm is None else clipped).item(), model.state_dict()

    assert same(train(True), train(False))


def test_process_wide_casting_is_on_in_the_closure_and_off_in_the_optimizer():
    ampx.init("torch", dtype="bfloat16")
    weight = nn.Parameter(torch.ones(2, 2))
    seen = {}

    class Multiplies(torch.optim.Optimizer):
        def step(self, closure=None):
            closure()
            seen["optimizer"] = (weight.detach() @ weight.detach()).dtype

    opt = ampx.wrap_optimizer(Multiplies([weight], {}))

    def closure():
        product = weight @ weight
        seen["closure"] = product.dtype
        with ampx.scale_loss(product.float().sum(), opt) as scaled:
            scaled.backward()

    opt.step(closure)
    assert seen == {"closure": torch.bfloat16, "optimizer": torch.float32}


def test_every_evaluation_sees_the_weights_the_optimizer_has_just_set():
    ampx.init("torch", dtype="bfloat16", process_wide=False)
    weight = nn.Parameter(torch.ones(1, 1))
    opt = ampx.wrap_optimizer(torch.optim.LBFGS([weight], lr=0.25, max_iter=2, tolerance_change=0, tolerance_grad=0))
    seen = []

    def closure():
        opt.zero_grad()
        product = torch.ones(1, 1) @ weight
        seen.append((product.item(), weight.item()))
        with ampx.scale_loss(product.float().sum() * 2, opt) as scaled:
            scaled.backward()
        return product.float().sum()

    with ampx.autocast():
        assert (torch.ones(1, 1) @ weight).dtype is torch.bfloat16
        opt.step(closure)
    assert len(seen) >= 2
    assert len({weight for _, weight in seen}) == len(seen)
    assert all(product == pytest.approx(weight, rel=2**-8) for product, weight in seen)


def test_overflow_puts_options_back_that_the_optimizer_changes_in_its_step(amp, backward):
    class Warms(torch.optim.Optimizer):
        def step(self, closure=None):
            self.param_groups[0]["lr"] *= 2
            closure()

    weight = nn.Parameter(torch.ones(1))
    opt = ampx.wrap_optimizer(Warms([weight], {"lr": 0.5}))
    opt.step(lambda: backward((weight * INF).sum(), opt))
    assert not opt.last_step.applied
    assert opt.param_groups[0]["lr"] == 0.5
