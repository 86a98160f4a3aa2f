"""Gradients that something else wrote: other losses, an earlier step, the script itself. Paddle adds them all up."""

import contextlib
import math

import paddle
import pytest

import ampx
from ampx_paddle.scaler import GradScaler

SLOPES = (1.0, 0.5, 2.0, 1.0, 3.0)


@pytest.fixture
def growing():
    """A session whose scale starts at 16 and doubles after every second step."""
    return ampx.init("paddle", level="O0", loss_scale=ampx.LossScale(init_scale=2.0**4, growth_interval=2))


def sgd(parameter, **options):
    return paddle.optimizer.Momentum(0.5, 0.5, parameters=[parameter], **options)


# -- clear_grad left out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_grad_value": 1e6}])
@pytest.mark.parametrize("clear", ["never", "by the parameter"])
def test_gradients_that_are_never_cleared_give_the_weights_of_plain_paddle(growing, weights, backward, clear, options):
    """While the scale grows; powers of two, so that the weights are the same bits."""
    plain, scaled = weights(1.0, 2.0), weights(1.0, 2.0)
    raw, opt = sgd(plain), growing.wrap_optimizer(sgd(scaled), **options)
    for slope in SLOPES:
        (plain * slope).sum().backward()
        raw.step()
        backward((scaled * slope).sum(), opt)
        opt.step()
        if clear == "by the parameter":
            plain.clear_gradient()
            scaled.clear_gradient()
        assert scaled.tolist() == plain.tolist()
    assert opt.loss_scale == 2.0**6


def test_sparse_gradients_that_are_never_cleared_add_up_too(growing, backward):
    tables = []
    for _ in range(2):
        paddle.seed(0)
        tables.append(paddle.nn.Embedding(4, 2, sparse=True))
    raw = paddle.optimizer.SGD(0.5, parameters=tables[0].parameters())
    opt = growing.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=tables[1].parameters()))
    for row in (1, 2, 1, 3):
        tables[0](paddle.to_tensor([row])).sum().backward()
        raw.step()
        backward(tables[1](paddle.to_tensor([row])).sum(), opt)
        opt.step()
    assert tables[1].weight.tolist() == tables[0].weight.tolist()


# -- other losses ----------------------------------------------------------------------------------------------------


def test_the_same_scale_may_be_added_to_pending_gradients(amp, weights, backward):
    """Two optimizers with scales of their own that are equal: as it was, and as in plain Paddle."""
    parameter, other = weights(1.0), weights(1.0)
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[parameter]))
    generator = amp.wrap_optimizer(sgd(other))
    backward(parameter.sum(), opt)
    backward((parameter * 2).sum() + other.sum(), generator)
    opt.step()
    assert parameter.item() == 1.0 - 0.5 * 3


@pytest.mark.parametrize("call", ["step", "unscale", "clip_grad_norm"])
@pytest.mark.parametrize("scale", [2.0**16, 4.0])
def test_a_scaled_loss_of_others_added_to_true_gradients_is_refused(amp, weights, backward, call, scale):
    """Of the optimizer's own scale too: what it divided already must not be mixed with what is not."""
    parameter, other = weights(1.0), weights(1.0)
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[parameter]))
    generator = amp.wrap_optimizer(sgd(other), loss_scale=scale)
    backward(parameter.sum(), opt)
    ampx.unscale(opt)
    backward(parameter.sum() + other.sum(), generator)
    calls = {
        "step": opt.step,
        "unscale": lambda: ampx.unscale(opt),
        "clip_grad_norm": lambda: ampx.clip_grad_norm(opt, 1.0),
    }
    with pytest.raises(ampx.ProtocolError, match=r"more than one loss scale.*Call opt\.zero_grad"):
        calls[call]()
    assert (parameter.item(), parameter.grad.item(), opt.loss_scale) == (1.0, 1.0 + scale, 2.0**16)
    opt.clear_grad()
    backward(parameter.sum(), opt)
    opt.step()
    assert parameter.item() == 0.5


@pytest.mark.parametrize("scale", [None, 1.0])
def test_true_gradients_of_other_losses_are_added_to_true_gradients_as_in_plain_paddle(amp, weights, backward, scale):
    """By a loss that nobody scaled, or of an optimizer whose scale is 1."""
    parameter, other = weights(1.0), weights(1.0)
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[parameter]))
    generator = amp.wrap_optimizer(sgd(other), loss_scale=scale)
    backward(parameter.sum(), opt)
    ampx.unscale(opt)
    if scale is None:
        (parameter * 2).sum().backward()
    else:
        backward((parameter * 2).sum() + other.sum(), generator)
    assert ampx.clip_grad_norm(opt, 100.0).item() == 3.0
    opt.step()
    assert parameter.item() == 1.0 - 0.5 * 3


def test_what_others_added_before_unscale_with_the_same_scale_is_true_after_it(amp, weights, backward):
    parameter, other = weights(1.0), weights(1.0)
    opt, generator = (amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[owned])) for owned in (parameter, other))
    backward(parameter.sum(), opt)
    backward((parameter * 2).sum() + other.sum(), generator)
    ampx.unscale(opt)
    ampx.unscale(opt)
    opt.step()
    assert parameter.item() == 1.0 - 0.5 * 3


def test_a_scaled_loss_may_run_backward_outside_as_with_a_grad_scaler(amp, weights):
    """Left gradients included; of several optimizers nobody can tell then what the others' gradients carry."""
    parameter, other = weights(1.0), weights(1.0)
    opt, foreign = (amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[owned])) for owned in (parameter, other))
    scaler = GradScaler(opt)
    for _ in range(2):
        scaler.scale(parameter.sum()).backward()
        scaler.scale((parameter * 3).sum()).backward()
        scaler.step(opt)
        scaler.update()
    assert parameter.item() == 1.0 - 0.5 * 4 - 0.5 * 8  # the second step's gradients add to the first's
    scaler.scale(parameter.sum() + other.sum()).backward()
    with pytest.raises(ampx.ProtocolError, match="outside of scale_loss has"), ampx.scale_loss(other.sum(), foreign):
        pass
    foreign.clear_grad()
    with ampx.scale_loss(other.sum(), foreign) as scaled:
        scaled.backward()
    foreign.step()
    assert other.item() == 0.5
    scaler.step(opt)
    assert opt.last_step.applied


def test_true_gradients_are_not_taken_for_those_of_a_scaled_loss_that_reached_nothing(amp, weights, backward):
    """Of two optimizers the loss reached the other; its own backward ran in its body and is no late one."""
    parameter, other = weights(1.0), weights(1.0)
    opt, reached = (amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[owned])) for owned in (parameter, other))
    backward(other.sum(), [opt, reached])
    (parameter * 3).sum().backward()
    with pytest.raises(ampx.ProtocolError, match=r"outside of scale_loss has added.*Call opt\.zero_grad"):
        backward(parameter.sum(), opt)
    assert (parameter.item(), parameter.grad.item(), opt.loss_scale) == (1.0, 3.0, 2.0**16)
    opt.clear_grad()
    backward(parameter.sum(), opt)
    opt.step()
    reached.step()
    assert (parameter.item(), other.item()) == (0.5, 0.5)


def test_a_late_backward_is_not_taken_for_ones_own_after_a_backward_in_the_body(amp, weights, backward):
    """Of equal loss scales nobody can tell which of the losses wrote; here one that was not scaled did."""
    parameter, other = weights(1.0), weights(1.0)
    opt, late = (amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[owned])) for owned in (parameter, other))
    backward(parameter.sum(), opt)
    with ampx.scale_loss(other.sum(), late) as scaled:
        pass
    (parameter * 3).sum().backward()
    scaled.backward()
    with pytest.raises(ampx.ProtocolError, match=r"outside of scale_loss has added.*Call opt\.zero_grad"):
        opt.step()
    assert parameter.item() == 1.0
    late.step()
    assert other.item() == 0.5


def test_a_scaled_loss_that_runs_backward_after_unscale_is_refused(amp, weights):
    """It would add scaled gradients to true ones."""
    parameter = weights(1.0)
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[parameter]))
    scaler = GradScaler(opt)
    scaled = scaler.scale(parameter.sum())
    scaled.backward(retain_graph=True)
    scaler.unscale_(opt)
    scaled.backward()
    with pytest.raises(ampx.ProtocolError, match=r"outside of scale_loss has added.*Call opt\.zero_grad"):
        scaler.step(opt)
    assert (parameter.item(), opt.loss_scale) == (1.0, 2.0**16)


# -- gradients that change after they were made true -----------------------------------------------------------------


def test_an_infinity_written_inside_a_closure_is_not_applied(amp, weights, backward):
    parameter = weights(1.0, 1.0)
    opt = amp.wrap_optimizer(paddle.optimizer.LBFGS(parameters=[parameter]))

    def closure():
        opt.clear_grad()
        loss = parameter.square().sum()
        backward(loss, opt)
        ampx.unscale(opt)
        parameter.grad = paddle.to_tensor([1.0, math.inf])
        return loss

    opt.step(closure)
    assert not opt.last_step.applied
    assert parameter.tolist() == [1.0, 1.0]


# -- an optimizer that takes the same gradients every time -----------------------------------------------------------


def test_a_gradient_that_comes_later_is_refused_where_paddle_updates_several_at_once(amp, weights, backward):
    first, later = weights(1.0), weights(1.0)
    raw = paddle.optimizer.Adam(0.5, parameters=[first, later], use_multi_tensor=True)
    opt = amp.wrap_optimizer(raw)
    backward(first.sum(), opt)
    opt.step()
    opt.clear_grad()
    before = first.item(), opt.loss_scale
    backward(first.sum() + later.sum(), opt)
    with pytest.raises(ampx.UnsupportedByBackendError, match="Make the optimizer without it"):
        opt.step()
    assert (first.item(), opt.loss_scale) == before
    opt.clear_grad(set_to_zero=False)
    backward(first.sum(), opt)
    opt.step()
    assert opt.last_step.applied


@pytest.mark.parametrize(("before", "after"), [(2.0**-40, 2.0**100), (2.0**100, 2.0**-40)])
def test_gradients_that_were_left_add_up_over_loss_scales_that_are_far_apart(before, after):
    """The quotient of the two scales is no number of float32, but what is left fits both."""
    amp = ampx.init(
        "paddle", dtype="float32", loss_scale=ampx.LossScale(init_scale=before, min_scale=2.0**-40, max_scale=2.0**100)
    )
    parameter = paddle.create_parameter([2], "float32", default_initializer=paddle.nn.initializer.Constant(0.0))
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(1.0, parameters=[parameter]))
    with contextlib.suppress(ZeroDivisionError), amp.scale_loss((parameter * 2.0).sum(), opt) as scaled:
        scaled.backward()
        raise ZeroDivisionError
    state = amp.state_dict(opt)
    state["groups"][0]["losses"][0]["scale"] = after
    amp.load_state_dict(state, opt)
    with amp.scale_loss((parameter * 0.0).sum(), opt) as scaled:
        scaled.backward()
    opt.step()
    assert parameter.numpy().tolist() == [-2.0, -2.0]


# -- several optimizers ----------------------------------------------------------------------------------------------


def bits(*parameters):
    return [parameter.grad.numpy().tobytes() for parameter in parameters]


def test_a_list_refused_because_gradients_cannot_be_kept_apart_leaves_the_gradients_of_all(amp, weights, backward):
    fine, table = weights(1.0), paddle.nn.Embedding(4, 2, sparse=True)
    opts = [amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=own)) for own in ([fine], table.parameters())]
    backward(fine.sum() * 3 + table(paddle.to_tensor([1])).sum(), opts)
    before = bits(fine)
    with pytest.raises(ampx.UnsupportedByBackendError, match="several loss ids"):
        backward(fine.sum(), opts, loss_id=1)
    assert bits(fine) == before
    opts[0].step()
    assert fine.item() == 1.0 - 0.5 * 3


@pytest.mark.parametrize("refusal", ["the loss", "another optimizer"])
def test_a_refused_call_forgets_nothing_of_gradients_that_were_cleared_behind_the_wrapper(amp, weights, refusal):
    """Those of a loss that overflowed: its step is still to be skipped."""
    cleared, other = weights(1.0), weights(1.0)
    opts = [amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[own])) for own in (cleared, other)]
    with ampx.scale_loss((cleared * math.inf).sum() + other.sum(), opts) as scaled:
        scaled.backward()
    for opt in opts:
        ampx.unscale(opt)
    cleared.clear_gradient()
    if refusal == "the loss":
        with pytest.raises(ampx.DetachedLossError):
            ampx.scale_loss(cleared.sum().detach(), opts[0]).__enter__()
    else:
        with pytest.raises(ampx.ProtocolError, match="after unscale"):
            ampx.scale_loss(cleared.sum(), opts).__enter__()
    opts[0].step()
    assert opts[0].last_step == ampx.StepResult(False, False, 2.0**16, 2.0**15, 1, None)
