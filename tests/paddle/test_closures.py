"""Optimizers that take a closure: LBFGS, and first-order ones, which run it once."""

import math

import numpy as np
import paddle
import pytest

import ampx

# Paddle's LBFGS copies a tensor in a way that Paddle warns of.
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")


def problem():
    paddle.seed(7)
    model = paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 1))
    rng = np.random.default_rng(0)
    return model, *(paddle.to_tensor(rng.normal(size=shape).astype("float32")) for shape in ((8, 3), (8, 1)))


def parts(value):
    """Return the numbers of a state, tensors in lists included."""
    if isinstance(value, paddle.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: parts(part) for key, part in value.items()}
    return [parts(part) for part in value] if isinstance(value, list) else value


def numbers(model, opt):
    return parts([*model.parameters()]), parts(opt.state_dict())


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_takes_the_plain_optimizers_steps_bit_for_bit(search, amp, backward):
    def train(wrap):
        model, x, y = problem()
        opt = paddle.optimizer.LBFGS(
            0.5, max_iter=5, history_size=3, line_search_fn=search, parameters=model.parameters()
        )
        if wrap:
            opt = amp.wrap_optimizer(opt)
        losses = []

        def closure():
            opt.clear_grad()
            loss = (model(x) - y).square().mean()
            if wrap:
                backward(loss, opt)
            else:
                loss.backward()
            losses.append(loss.item())
            return loss

        returned = [opt.step(closure).item() for _ in range(3)]
        return losses, returned, numbers(model, opt)

    scaled, plain = train(True), train(False)
    assert len(scaled[0]) > 6
    assert scaled == plain


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("evaluation", [1, 2, 4])
def test_overflow_in_any_lbfgs_evaluation_puts_parameters_and_state_back(search, evaluation, amp, backward):
    model, x, y = problem()
    raw = paddle.optimizer.LBFGS(0.5, max_iter=5, history_size=3, line_search_fn=search, parameters=model.parameters())
    opt = amp.wrap_optimizer(raw)
    bad, count = 0, 0

    def closure():
        nonlocal count
        count += 1
        opt.clear_grad()
        loss = (model(x) - y).square().mean() * (math.inf if count == bad else 1.0)
        backward(loss, opt)
        return loss

    for _ in range(2):
        opt.step(closure)
        assert opt.last_step.applied
    before = numbers(model, opt)
    count, bad = 0, evaluation
    assert opt.step(closure).item() == math.inf
    assert count == evaluation
    assert numbers(model, opt) == before
    assert opt.last_step == ampx.StepResult(False, False, 2.0**16, 2.0**15, 1)
    bad = 0
    opt.step(closure)
    assert opt.last_step.applied
    assert numbers(model, opt) != before


@pytest.mark.parametrize("evaluation", [1, 3])
def test_a_closure_that_raises_leaves_everything_as_before(evaluation, amp, backward):
    model, x, _ = problem()
    opt = amp.wrap_optimizer(paddle.optimizer.LBFGS(max_iter=4, parameters=model.parameters()))
    count, fail_at = 0, 0

    def closure():
        nonlocal count
        count += 1
        opt.clear_grad()
        loss = model(x).square().mean()
        backward(loss, opt)
        if count == fail_at:
            raise KeyError("mine")
        return loss

    opt.step(closure)
    before, result = numbers(model, opt), opt.last_step
    count, fail_at = 0, evaluation
    with pytest.raises(KeyError):
        opt.step(closure)
    assert numbers(model, opt) == before
    assert opt.last_step == result
    fail_at = 0
    opt.step(closure)
    assert opt.last_step.applied


def test_lbfgs_mistakes_are_refused_and_change_nothing(amp, backward):
    model, x, _ = problem()
    opt = amp.wrap_optimizer(paddle.optimizer.LBFGS(max_iter=4, parameters=model.parameters()))
    before = numbers(model, opt)

    def unscaled():
        opt.clear_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def uncleared():
        loss = model(x).square().mean()
        backward(loss, opt)
        return loss

    for call, error in (
        (opt.step, ampx.ProtocolError),
        (lambda: opt.minimize(None), ampx.ProtocolError),
        (lambda: opt.step(unscaled), ampx.NotScaledError),
        (lambda: opt.step(uncleared), ampx.ProtocolError),
    ):
        with pytest.raises(error):
            call()
        assert numbers(model, opt) == before
        opt.clear_grad()


def test_lbfgs_with_losses_of_their_own_scales_and_a_norm(amp, backward):
    """The sum of two losses, each with a scale of its own, takes the steps of the sum."""

    def train(loss_ids, **options):
        model, x, y = problem()
        raw = paddle.optimizer.LBFGS(0.5, max_iter=4, parameters=model.parameters())
        opt = amp.wrap_optimizer(raw, **options)

        def closure():
            opt.clear_grad()
            first, second = (model(x) - y).square().mean(), model(x).square().mean() * 0.25
            if loss_ids:
                backward(first, opt, loss_id=0)
                backward(second, opt, loss_id=1)
            else:
                backward(first + second, opt)
            return first + second

        for _ in range(2):
            opt.step(closure)
        assert opt.last_step.applied
        return np.concatenate([parameter.numpy().ravel() for parameter in model.parameters()]), opt.last_step.grad_norm

    apart, _ = train(True)
    together, norm = train(False)
    assert norm is None
    # The two sums of gradients differ by the order of additions: a few roundings, carried through 2 × 4 iterations.
    np.testing.assert_allclose(apart, together, rtol=1e-3, atol=1e-4)
    _, norm = train(False, max_grad_norm=1e6)
    assert norm > 0


def test_first_order_optimizers_run_the_closure_once(amp, weights, backward):
    parameter = weights(1.0)
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(1.0, parameters=[parameter]))
    calls = []

    @paddle.no_grad()
    def step():
        def closure():
            calls.append(1)
            opt.clear_grad()
            loss = parameter.sum() * 2.0
            backward(loss, opt)
            return loss

        return opt.step(closure)

    assert step().item() == 2.0
    assert calls == [1]
    assert parameter.item() == -1.0


def test_disabled_sessions_pass_closures_on(weights):
    amp = ampx.init("paddle", enabled=False)
    for make in (paddle.optimizer.LBFGS, paddle.optimizer.SGD):
        parameter = weights(1.0)
        opt = amp.wrap_optimizer(make(1.0, parameters=[parameter]))

        def closure(opt=opt, parameter=parameter):
            opt.clear_grad()
            loss = parameter.square().sum()
            loss.backward()
            return loss

        assert opt.step(closure).item() == 1.0
        assert parameter.item() != 1.0


def test_the_lbfgs_that_paddle_replaced_is_refused(amp, weights):
    from paddle.incubate.optimizer import LBFGS

    with pytest.warns(Warning, match="deprecated"):
        raw = LBFGS(parameters=[weights(1.0)])
    with pytest.raises(ampx.UnsupportedByBackendError, match=r"paddle\.optimizer\.LBFGS"):
        amp.wrap_optimizer(raw)
