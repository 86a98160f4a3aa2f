"""`scale_loss`: true gradients after every block, right sums over blocks, skipped steps, moving scales.

The oracle is the same program in float32 without any of it. Losses are linear in the weights and inputs are powers of
two, so that scaling, casting and unscaling are exact and results must be equal bit for bit.
"""

import copy

import pytest
import torch
from torch import nn

import ampx
from ampx.errors import AlreadyScaledError, NestedScaleError, UnsupportedByBackendError
from ampx_torch.apex import amp

LEVELS = ["O0", "O1", "O2", "O3"]


class Linear(nn.Module):
    """A loss that is linear in its weights; its gradient is the input's sum over the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.layer.weight, 1.0)

    def forward(self, x):
        return self.layer(x).sum()


def start(opt_level="O1", number=1, lr=0.5, momentum=0.5, **options):
    models = [Linear() for _ in range(number)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum) for model in models]
    options = {"loss_scale": "dynamic", "verbosity": 0, **options}
    amp.initialize(models, optimizers, opt_level=opt_level, **options)
    for scaler in amp._amp_state.loss_scalers:
        if scaler.dynamic:
            scaler._loss_scale = 128.0
    return (models[0], optimizers[0]) if number == 1 else (models, optimizers)


def batch(value):
    return torch.full((1, 4), float(value))


def backward(loss, optimizers, **options):
    with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
        scaled_loss.backward()


def gradients(optimizer):
    return [parameter.grad for parameter in amp.master_params(optimizer)]


def weights(model):
    return model.state_dict()["layer.weight"].flatten().tolist()


def scales():
    return [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]


INFINITE = float("inf")


# -- true gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_gradients_are_true_when_the_block_is_left(opt_level, loss_scale):
    model, optimizer = start(opt_level, loss_scale=loss_scale)
    loss = model(batch(2))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.dtype == torch.float32
        assert scaled_loss.item() == loss.item() * 128
        scaled_loss.backward()
    (gradient,) = gradients(optimizer)
    assert gradient.tolist() == [[2.0] * 4]
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    assert norm.item() == 4.0
    optimizer.step()
    # clip_grad_norm_ divides by the norm plus 1e-6; a float16 weight rounds to 2**-11 of its value
    assert weights(model) == pytest.approx([1 - 0.5 * 0.5] * 4, abs=1e-3)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_step_is_that_of_float32(opt_level):
    model, optimizer = start(opt_level)
    exact, plain = Linear(), None
    plain = torch.optim.SGD(exact.parameters(), lr=0.5, momentum=0.5)
    for value in (1, -2, 0.5):
        optimizer.zero_grad()
        backward(model(batch(value)), optimizer)
        optimizer.step()
        plain.zero_grad()
        exact(batch(value)).backward()
        plain.step()
        assert weights(model) == weights(exact)
        assert optimizer.last_step.applied


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("zero", ["optimizer", "model", "none", "in place"])
def test_blocks_with_different_scales_add_up(opt_level, zero):
    """Three blocks a step, with a loss scale that another hand moves in between; three steps."""
    model, optimizer = start(opt_level)
    exact = Linear()
    plain = torch.optim.SGD(exact.parameters(), lr=0.5, momentum=0.5)
    for _ in range(3):
        if zero == "optimizer":
            optimizer.zero_grad()
        elif zero == "in place":
            optimizer.zero_grad(set_to_none=False)
        elif zero == "model":
            model.zero_grad()
        else:
            for parameter in model.parameters():
                parameter.grad = None
        plain.zero_grad()
        for value, scale in ((1, 128.0), (2, 8.0), (-4, 512.0)):
            amp._amp_state.loss_scalers[0]._loss_scale = scale
            backward(model(batch(value)), optimizer)
            exact(batch(value)).backward()
        assert gradients(optimizer)[0].tolist() == exact.layer.weight.grad.tolist() == [[-1.0] * 4]
        optimizer.step()
        plain.step()
        assert weights(model) == weights(exact)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_losses_with_scales_of_their_own_add_up(opt_level):
    model, optimizer = start(opt_level, num_losses=3)
    for position, scale in enumerate((64.0, 1024.0, 2.0)):
        amp._amp_state.loss_scalers[position]._loss_scale = scale
    for loss_id, value in enumerate((1, 2, 4)):
        backward(model(batch(value)), optimizer, loss_id=loss_id)
    assert gradients(optimizer)[0].tolist() == [[7.0] * 4]


@pytest.mark.parametrize("opt_level", LEVELS)
def test_gradients_of_a_backward_outside_any_block_are_true_and_stay(opt_level):
    """A penalty on the weights, say; before a block, after one, or alone."""
    model, optimizer = start(opt_level)
    model(batch(1)).backward()
    backward(model(batch(2)), optimizer)
    assert gradients(optimizer)[0].tolist() == [[3.0] * 4]
    optimizer.step()
    assert weights(model) == [1 - 0.5 * 3.0] * 4
    optimizer.zero_grad()
    model(batch(1)).backward()
    optimizer.step()
    assert weights(model) == [-0.5 - 0.5 * (1.0 + 0.5 * 3.0)] * 4


@pytest.mark.parametrize("inside", [True, False])
def test_a_second_step_without_a_backward_does_not_apply_gradients_of_the_model_again(inside):
    model, optimizer = start("O2", momentum=0.0)
    if inside:
        backward(model(batch(2)), optimizer)
    else:
        model(batch(2)).backward()
    optimizer.step()
    optimizer.step()
    assert weights(model) == [1 - 0.5 * 2.0] * 4


@pytest.mark.parametrize("opt_level", LEVELS)
def test_delayed_unscaling_gives_the_same_sum(opt_level):
    model, optimizer = start(opt_level)
    backward(model(batch(1)), optimizer, delay_unscale=True)
    backward(model(batch(2)), optimizer, delay_unscale=True)
    backward(model(batch(4)), optimizer)
    assert gradients(optimizer)[0].tolist() == [[7.0] * 4]
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1
    optimizer.step()
    assert weights(model) == [1 - 0.5 * 7.0] * 4


@pytest.mark.parametrize("opt_level", LEVELS)
def test_delayed_gradients_go_with_true_ones_and_with_those_of_another_loss(opt_level):
    """In apex these were added as they were, and the sum was wrong."""
    model, optimizer = start(opt_level, num_losses=2)
    amp._amp_state.loss_scalers[1]._loss_scale = 4.0
    backward(model(batch(1)), optimizer)
    backward(model(batch(2)), optimizer, delay_unscale=True)
    backward(model(batch(4)), optimizer, loss_id=1)
    backward(model(batch(8)), optimizer, delay_unscale=True)
    optimizer.step()
    assert weights(model) == [1 - 0.5 * 15.0] * 4


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_scale_that_moved_under_delayed_gradients_does_not_matter(opt_level):
    model, optimizer = start(opt_level)
    backward(model(batch(1)), optimizer, delay_unscale=True)
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    backward(model(batch(2)), optimizer)
    optimizer.step()
    assert weights(model) == [1 - 0.5 * 3.0] * 4


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_zero_grad_drops_gradients_that_were_put_aside(opt_level):
    """Some scripts clear gradients inside the block."""
    model, optimizer = start(opt_level)
    backward(model(batch(1)), optimizer)
    with amp.scale_loss(model(batch(2)), optimizer) as scaled_loss:
        optimizer.zero_grad()
        scaled_loss.backward()
    assert gradients(optimizer)[0].tolist() == [[2.0] * 4]


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_an_exception_in_the_block_leaves_what_was_before(opt_level):
    model, optimizer = start(opt_level)
    backward(model(batch(1)), optimizer)

    def fail(loss):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail(model(batch(2)))
    assert gradients(optimizer)[0].tolist() == [[1.0] * 4]
    assert scales() == [128.0]
    optimizer.step()
    assert weights(model) == [0.5] * 4


def test_a_loss_of_several_elements_is_scaled_as_it_is():
    model, optimizer = start()
    losses = model.layer(torch.tensor([[1.0] * 4, [2.0] * 4]))
    with amp.scale_loss(losses, optimizer) as scaled_losses:
        assert scaled_losses.shape == losses.shape
        scaled_losses.backward(torch.tensor([[1.0], [0.5]]))
    assert gradients(optimizer)[0].tolist() == [[2.0] * 4]


def test_a_closure_is_evaluated_once():
    model, optimizer = start()

    def closure():
        optimizer.zero_grad()
        loss = model(batch(2))
        backward(loss, optimizer)
        return loss

    assert optimizer.step(closure).item() == 8.0
    assert weights(model) == [0.0] * 4
    lbfgs = torch.optim.LBFGS(Linear().parameters())
    amp.initialize(Linear(), lbfgs, opt_level="O1", verbosity=0)
    with pytest.raises(UnsupportedByBackendError, match=r"LBFGS.*ampx\.wrap_optimizer"):
        lbfgs.step(closure)


# -- overflow ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
def test_an_overflow_skips_the_next_step_and_halves_the_scale(opt_level, capsys):
    model, optimizer = start(opt_level, verbosity=1)
    capsys.readouterr()
    backward(model(batch(1)), optimizer)
    optimizer.step()
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    backward(model(batch(1)) * INFINITE, optimizer)
    assert scales() == [64.0]
    optimizer.step()
    assert weights(model) == before
    assert str(optimizer.state_dict()) == str(state)
    assert (optimizer.last_step.applied, optimizer.last_step.scale) == (False, 128.0)
    assert optimizer.last_step.next_scale == optimizer.loss_scale == 64.0
    assert "the step is skipped; loss scale 0 is 64 now" in capsys.readouterr().out
    optimizer.zero_grad()
    backward(model(batch(1)), optimizer)
    optimizer.step()
    assert weights(model) != before
    assert optimizer.last_step.applied


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_overflow_in_any_block_skips_the_whole_step(opt_level, bad):
    model, optimizer = start(opt_level, num_losses=3)
    for loss_id in range(3):
        factor = INFINITE if loss_id == bad else 1.0
        backward(model(batch(1)) * factor, optimizer, loss_id=loss_id)
    optimizer.step()
    assert weights(model) == [1.0] * 4
    assert scales() == [64.0 if loss_id == bad else 128.0 for loss_id in range(3)]


@pytest.mark.parametrize("opt_level", LEVELS)
def test_an_overflow_skips_the_step_of_every_optimizer_of_the_block(opt_level):
    (first, second), (first_optimizer, second_optimizer) = start(opt_level, number=2)
    loss = first(batch(1)) * INFINITE + second(batch(1))
    backward(loss, [first_optimizer, second_optimizer])
    assert scales() == [64.0]
    first_optimizer.step()
    second_optimizer.step()
    assert weights(first) == weights(second) == [1.0] * 4
    assert not first_optimizer.last_step.applied
    assert not second_optimizer.last_step.applied
    for optimizer in (first_optimizer, second_optimizer):
        optimizer.zero_grad()
    backward(first(batch(1)) + second(batch(1)), [first_optimizer, second_optimizer])
    first_optimizer.step()
    second_optimizer.step()
    assert weights(first) == weights(second) == [0.5] * 4


def test_a_static_scale_skips_too_and_does_not_move():
    model, optimizer = start(loss_scale=8.0)
    backward(model(batch(1)) * INFINITE, optimizer)
    optimizer.step()
    assert weights(model) == [1.0] * 4
    assert scales() == [8.0]


def test_infinite_gradients_of_a_backward_outside_any_block_are_not_applied():
    model, optimizer = start()
    (model(batch(1)) * INFINITE).backward()
    optimizer.step()
    assert weights(model) == [1.0] * 4
    assert scales() == [128.0]


@pytest.mark.parametrize("opt_level", LEVELS)
def test_gradients_that_become_infinite_after_their_block_are_not_applied(opt_level):
    """An average over processes, say."""
    model, optimizer = start(opt_level)
    backward(model(batch(1)), optimizer)
    gradients(optimizer)[0].fill_(INFINITE)
    optimizer.step()
    assert weights(model) == [1.0] * 4
    assert scales() == [64.0]


@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_gradients_that_overflowed_and_were_cleared_skip_nothing(clear):
    model, optimizer = start()
    backward(model(batch(1)) * INFINITE, optimizer)
    (optimizer if clear == "optimizer" else model).zero_grad()
    backward(model(batch(1)), optimizer)
    optimizer.step()
    assert weights(model) == [0.5] * 4


def test_a_delayed_overflow_check_is_made_up_for_in_the_step():
    model, optimizer = start()
    backward(model(batch(1)) * INFINITE, optimizer, delay_overflow_check=True)
    assert scales() == [128.0]
    optimizer.step()
    assert weights(model) == [1.0] * 4
    assert scales() == [64.0]


def test_the_scale_grows_after_2000_blocks_up_to_its_ceiling():
    model, optimizer = start(max_loss_scale=256.0)
    (scaler,) = amp._amp_state.loss_scalers
    for expected in (256.0, 256.0):
        scaler._unskipped = 1999
        backward(model(batch(1)), optimizer)
        assert scales() == [expected]
        assert scaler._unskipped == 0


@pytest.mark.parametrize(("floor", "lowest"), [(64.0, 64.0), (None, 2.0**-24)])
def test_the_scale_stops_at_its_floor(floor, lowest):
    model, optimizer = start(min_loss_scale=floor)
    for _ in range(40):
        optimizer.zero_grad()
        backward(model(batch(1)) * INFINITE, optimizer)
        optimizer.step()
    assert scales() == [lowest]


def test_every_loss_has_the_trace_of_the_published_algorithm():
    """Overflows of three losses at different times, as apex's own checkpoint test has them."""
    model, optimizer = start(num_losses=3)
    left = [0, 1, 2]
    for _ in range(2):
        optimizer.zero_grad()
        for loss_id in range(3):
            factor = INFINITE if left[loss_id] else 1.0
            left[loss_id] = max(0, left[loss_id] - 1)
            backward(model(batch(1)) * factor, optimizer, loss_id=loss_id)
        optimizer.step()
    assert scales() == [128.0, 64.0, 32.0]
    assert [value["unskipped"] for value in amp.state_dict().values()] == [2, 1, 0]


# -- what ampx tells beside it -----------------------------------------------------------------------


def test_events_and_results_tell_what_happened():
    model, optimizer = start(num_losses=2)
    seen = []
    ampx.on_event(seen.append)
    for loss_id, factor in ((0, 1.0), (1, INFINITE)):
        backward(model(batch(1)) * factor, optimizer, loss_id=loss_id)
    optimizer.step()
    changed, skipped = seen
    assert isinstance(changed, ampx.ScaleChanged)
    assert isinstance(skipped, ampx.StepSkipped)
    for event in seen:
        assert (event.framework, event.loss_id, event.scale, event.next_scale) == ("torch", 1, 128.0, 64.0)
        assert event.consecutive_skips == 1


@pytest.mark.parametrize("kind", [ampx.ScaleChanged, ampx.StepSkipped])
def test_a_listener_that_raises_does_not_make_an_overflow_pass(kind):
    model, optimizer = start()

    def listener(event):
        if isinstance(event, kind):
            raise KeyError

    remove = ampx.on_event(listener)

    def overflow():
        backward(model(batch(1)) * INFINITE, optimizer)
        optimizer.step()

    with pytest.raises(KeyError):
        overflow()
    remove()
    optimizer.step()
    assert weights(model) == [1.0] * 4
    optimizer.zero_grad()
    backward(model(batch(1)), optimizer)
    optimizer.step()
    assert weights(model) == [0.5] * 4


def test_a_collapse_names_the_parameters():
    model, optimizer = start()
    seen = []
    ampx.on_event(seen.append)

    def overflow(times):
        for _ in range(times):
            optimizer.zero_grad()
            backward(model(batch(1)) * INFINITE, optimizer)
            optimizer.step()

    overflow(49)
    with pytest.warns(ampx.errors.ScaleCollapsedWarning, match="are not finite"):
        overflow(1)
    (collapse,) = [event for event in seen if isinstance(event, ampx.ScaleCollapsed)]
    assert len(collapse.parameters) == 1


def test_the_calls_of_ampx_work_on_these_optimizers():
    model, optimizer = start()
    scheduler = ampx.gate(torch.optim.lr_scheduler.StepLR(optimizer, 1), optimizer)
    with ampx.scale_loss(model(batch(2)), optimizer) as scaled:
        scaled.backward()
    ampx.unscale(optimizer)
    assert ampx.clip_grad_norm(optimizer, 8.0).item() == 4.0
    optimizer.step()
    scheduler.step()
    assert weights(model) == [0.0] * 4
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    optimizer.zero_grad()
    with ampx.scale_loss(model(batch(2)) * INFINITE, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    scheduler.step()
    assert weights(model) == [0.0] * 4
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert scales() == [64.0]


def test_a_loss_is_scaled_once():
    (first, second), (first_optimizer, second_optimizer) = start(number=2)
    loss = first(batch(1)) + second(batch(1))
    with amp.scale_loss(loss, first_optimizer) as scaled_loss:
        with pytest.raises(AlreadyScaledError), amp.scale_loss(scaled_loss, second_optimizer):
            pass
        with pytest.raises(NestedScaleError), amp.scale_loss(loss, first_optimizer):
            pass
