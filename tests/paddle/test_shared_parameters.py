"""Parameters that several wrapped optimizers hold: every step sees the gradients that it sees in plain Paddle."""

import numpy as np
import paddle
import pytest
from shared_parameters import CLIPS, REFUSED, SCRIPTS, a_loss_each, accumulated, both_at_once

import ampx

SCALE = 2.0**10
START = np.random.default_rng(0).normal(size=(3, 3)).astype("float32")


class Trainees:
    """Two optimizers over `shared` and a parameter of their own each; `amp` is None for plain float32."""

    def __init__(self, amp, make, weights, scales=(SCALE, SCALE), together=False):
        self.parameters = [weights(*row.tolist()) for row in START]
        first, second, shared = self.parameters
        raws = [make([first, shared]), make([shared, second])]
        self.amp = amp
        if amp is None:
            self.opts = raws
        elif together:
            self.opts = ampx.wrap_optimizer(raws, loss_scale=scales[0])
        else:
            self.opts = [ampx.wrap_optimizer(raw, loss_scale=scale) for raw, scale in zip(raws, scales, strict=True)]

    def loss(self, number=1.0):
        first, second, shared = self.parameters
        return (number * shared * first).sum() + (shared * second).pow(2).sum()

    def own(self, index):
        """Return a loss of what only one of them holds."""
        return self.parameters[index].sum()

    def backward(self, loss, *which):
        if self.amp is None:
            loss.backward()
            return
        opts = [self.opts[index] for index in which]
        with ampx.scale_loss(loss, opts[0] if len(opts) == 1 else opts) as scaled:
            scaled.backward()

    def unscale(self, index):
        if self.amp is not None:
            ampx.unscale(self.opts[index])

    def clip(self, index, norm):
        opt = self.opts[index]
        if self.amp is not None:
            ampx.clip_grad_norm(opt, norm)
        else:
            paddle.nn.utils.clip_grad_norm_(opt._parameter_list, norm)

    def step(self, index):
        self.opts[index].step()

    def zero_grad(self, *which):
        for index in which or range(2):
            self.opts[index].clear_grad()

    def values(self):
        return [parameter.numpy() for parameter in self.parameters]


def sgd(parameters):
    return paddle.optimizer.SGD(0.25, parameters=parameters)


OPTIMIZERS = {
    "momentum": lambda parameters: paddle.optimizer.Momentum(0.25, 0.5, parameters=parameters),
    "adam": lambda parameters: paddle.optimizer.Adam(0.01, parameters=parameters),
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scales", ["alike", "unlike", "one for both"])
def test_every_step_sees_the_gradients_of_plain_float32(scales, optimizer, script, amp, weights):
    if scales == "unlike" and script is a_loss_each:
        pytest.skip("refused: tested below")
    plain = Trainees(None, OPTIMIZERS[optimizer], weights)
    pair = (SCALE, 4.0 if scales == "unlike" else SCALE)
    scaled = Trainees(amp, OPTIMIZERS[optimizer], weights, pair, together=scales == "one for both")
    for _ in range(4):
        script(plain)
        script(scaled)
    # Powers of two scale exactly. The norm that clips is a sum in another order than Paddle's, of six squares: it and
    # the quotient round, four times over.
    tolerance = 4 * 8 * np.finfo(np.float32).eps if script in CLIPS else 0.0
    for own, others in zip(scaled.values(), plain.values(), strict=True):
        np.testing.assert_allclose(own, others, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("script", [a_loss_each, *REFUSED], ids=lambda script: script.__name__)
def test_what_is_refused_changes_nothing_and_a_cleared_start_trains(script, amp, weights):
    scaled = Trainees(amp, sgd, weights, (SCALE, 4.0) if script is a_loss_each else (SCALE, SCALE))
    with pytest.raises(ampx.ProtocolError, match="zero_grad"):
        script(scaled)
    stopped_at = scaled.values()
    scaled.zero_grad()
    np.testing.assert_array_equal(scaled.values(), stopped_at)
    plain = Trainees(None, sgd, weights)
    for parameter, value in zip(plain.parameters, stopped_at, strict=True):
        parameter.set_value(value)
    for trainees in (plain, scaled):
        both_at_once(trainees)
    np.testing.assert_array_equal(scaled.values(), plain.values())


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("broken", [0, 1, 2], ids=["own", "the other's", "shared"])
def test_what_overflows_is_never_applied(broken, first, amp, weights):
    """Paddle's kernel leaves nothing of the gradients among which one overflowed, and so it is of shared ones."""
    scaled = Trainees(amp, OPTIMIZERS["momentum"], weights)
    scaled.backward(scaled.loss(), 0, 1)
    scaled.parameters[broken].grad.set_value(np.full(3, np.inf, "float32"))
    for index in (first, 1 - first):
        scaled.step(index)
    both = broken in (2, first)
    assert scaled.opts[first].last_step.applied == (broken == 1 - first)
    assert scaled.opts[1 - first].last_step.applied is False
    for index, start in enumerate(START):
        assert np.isfinite(scaled.values()[index]).all()
        if both:
            np.testing.assert_array_equal(scaled.values()[index], start)


def test_an_interrupted_unscaling_asks_for_cleared_gradients(amp, weights, monkeypatch):
    from ampx_paddle import step

    scaled = Trainees(amp, OPTIMIZERS["momentum"], weights)
    scaled.backward(scaled.loss(), 0, 1)
    with monkeypatch.context() as broken:
        broken.setattr(step, "spoil", lambda *_: 1 / 0)  # of the other's gradients
        with pytest.raises(ZeroDivisionError):
            scaled.step(0)
    np.testing.assert_array_equal(scaled.values(), START)
    with pytest.raises(ampx.ProtocolError, match="interrupted"):
        scaled.step(1)
    scaled.zero_grad()
    plain = Trainees(None, OPTIMIZERS["momentum"], weights)
    for trainees in (plain, scaled):
        accumulated(trainees)
    np.testing.assert_array_equal(scaled.values(), plain.values())


def test_scales_by_loss_id_are_refused_where_another_optimizer_waits_for_the_gradients(amp, weights, backward):
    scaled = Trainees(amp, OPTIMIZERS["momentum"], weights)
    scaled.backward(scaled.loss(), 0, 1)
    before = [parameter.grad.numpy() for parameter in scaled.parameters]
    with pytest.raises(ampx.ProtocolError, match=r"shares parameters with another.*Leave loss_id out"):
        backward(scaled.loss(), scaled.opts, loss_id=1)
    np.testing.assert_array_equal([parameter.grad.numpy() for parameter in scaled.parameters], before)
