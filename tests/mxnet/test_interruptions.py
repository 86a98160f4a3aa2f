"""A Ctrl-C or a signal handler's time-out at any line of ampx: what follows is right or is refused.

Right is what MXNet's own trainer does with the same gradients, which are known: losses are linear in the weights.
"""

import math
import os

import numpy as np
import pytest

import ampx
from ampx.session import sessions
from ampx_mxnet.compat import amp as native_amp, mx
from ampx_mxnet.dtypes import name_of
from interruptions import Interruption, interrupted_everywhere

PACKAGES = ("ampx", "ampx_mxnet")
THOROUGH = bool(os.environ.get("AMPX_TEST_ALL"))  # a tenth of all lines and calls; else of the lines a 29th
SCALE = 1024.0


class Subject:
    """Trainers of one parameter each, after two steps; `by` says how the third goes."""

    def __init__(self, *, contexts=1, trainers=1, grad_req="write", by="step", third=3.0, **options):
        amp = sessions.get("mxnet") or ampx.init("mxnet", level="O0", nan_loss="skip")
        scale = ampx.LossScale(init_scale=SCALE, growth_interval=100)
        self.contexts = [mx.cpu(number) for number in range(contexts)]
        self.parameters = [mx.gluon.Parameter(f"w{number}", shape=(2,)) for number in range(trainers)]
        for parameter in self.parameters:
            parameter.initialize(mx.init.Zero(), ctx=self.contexts)
            parameter.grad_req = grad_req
        self.raws = [self.trainer(parameter) for parameter in self.parameters]
        self.opts = amp.wrap_optimizer(self.raws, loss_scale=scale, **options)
        self.by, self.third, self.adds = by, third, grad_req == "add"
        self.history = []
        for size in (1.0, 2.0):
            self.train(size)
            self.history.append(size)

    @staticmethod
    def trainer(parameter):
        return mx.gluon.Trainer([parameter], "sgd", {"learning_rate": 0.5, "momentum": 0.5})

    def backward(self, size, loss_id=0):
        with mx.autograd.record():
            losses = [
                sum((parameter.data(context) * size).sum() for parameter in self.parameters)
                for context in self.contexts
            ]
            with ampx.scale_loss(losses, self.opts, loss_id=loss_id) as scaled:
                mx.autograd.backward(scaled)

    def zero_grad(self):
        for opt in self.opts:
            opt.zero_grad()

    def step(self):
        for opt in self.opts:
            if self.by == "unscale":
                ampx.unscale(opt)
                ampx.clip_grad_norm(opt, 1e6)
            if self.by == "update":
                opt.allreduce_grads()
                opt.update(1)
            else:
                opt.step(1)

    def train(self, size):
        if self.adds:
            self.zero_grad()
        if size == self.third and self.by in ("twice", "losses"):
            self.backward(size / 2)
            self.backward(size / 2, loss_id=int(self.by == "losses"))
        else:
            self.backward(size)
        self.step()

    def act(self):
        self.train(self.third)

    def weights(self):
        return [
            np.stack([parameter.data(context).asnumpy() for context in self.contexts]) for parameter in self.parameters
        ]

    def plainly(self, *gradients):
        """The weights after the steps so far and these, of momentum by hand; contexts add their gradients up."""
        weight = speed = 0.0
        for gradient in (*self.history, *gradients):
            speed = 0.5 * speed - 0.5 * gradient * len(self.contexts)
            weight += speed
        return weight

    def stand_at(self, *choices):
        """Whether each parameter is at one of some values, on every context; the parameters may differ."""
        return all(any(np.abs(own - choice).max() < 1e-5 for choice in choices) for own in self.weights())


SUBJECTS = {
    "plain": {},
    "overflow": {"third": math.inf},
    "unscale and clip by hand": {"by": "unscale"},
    "clipped": {"max_grad_norm": 1e6},
    "clipped by value, overflow": {"max_grad_value": 1e6, "third": math.inf},
    "contexts": {"contexts": 2},
    "contexts, update": {"contexts": 2, "by": "update"},
    "contexts, unscale and clip by hand": {"contexts": 2, "by": "unscale"},
    "list": {"trainers": 2},
    "list, overflow": {"trainers": 2, "third": math.inf},
    "adding": {"grad_req": "add", "by": "twice"},
    "adding, clipped": {"grad_req": "add", "by": "twice", "max_grad_norm": 1e6},
    "two losses": {"grad_req": "add", "by": "losses"},
    "two losses, contexts": {"grad_req": "add", "by": "losses", "contexts": 2},
    "two losses, overflow": {"grad_req": "add", "by": "losses", "third": math.inf},
    "in place": {"in_place": True},
}


def interruptions(name, first, error=Interruption):
    """Each interrupted third step: its weights are those before or after it, and never others."""
    places = 0
    options = {"stride": 10, "first": first, "after_calls": True} if THOROUGH else {"stride": 29, "first": first}
    arguments = SUBJECTS[name]
    for subject, place in interrupted_everywhere(
        lambda: Subject(**arguments), Subject.act, PACKAGES, error=error, **options
    ):
        after = [] if math.isinf(subject.third) else [subject.plainly(subject.third)]
        if subject.by in ("twice", "losses"):  # the first of the two backwards, where the second did not come
            after.append(subject.plainly(subject.third / 2))
        assert subject.stand_at(subject.plainly(), *after), place
        places += 1
        yield subject, place, [subject.plainly(), *after]
    assert places > 5


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_second_step_after_an_interruption_is_the_step_or_is_refused(name):
    for subject, place, choices in interruptions(name, 1):
        done = not subject.stand_at(choices[0])
        for opt in subject.opts:
            try:
                opt.step(1)
            except (ampx.AmpxError, UserWarning):
                continue
        assert subject.stand_at(*choices), place
        if done:
            assert subject.stand_at(choices[1]) or len(subject.opts) > 1, place


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_raw_trainer_after_an_interruption_steps_rightly_or_is_refused(name):
    for subject, place, choices in interruptions(name, 2):
        if subject.opts[0] is subject.raws[0]:
            continue  # taken over in place: the script has no raw trainer
        for raw in subject.raws:
            try:
                raw.step(1)
            except (ampx.RawStepError, UserWarning):
                continue
        assert subject.stand_at(*choices), place


@pytest.mark.parametrize(("error", "first"), [(Interruption, 3), (TimeoutError, 4)])
@pytest.mark.parametrize("name", SUBJECTS)
def test_zero_grad_after_an_interruption_starts_over(name, error, first):
    for subject, place, _ in interruptions(name, first, error):
        subject.zero_grad()
        stepped = [not np.abs(own - subject.plainly()).max() < 1e-5 for own in subject.weights()]
        for size in (5.0, 7.0):
            subject.train(size)
            assert all(opt.last_step.applied for opt in subject.opts), place
        for own, was_stepped in zip(subject.weights(), stepped, strict=True):
            gradients = ([subject.third] if was_stepped else []) + [5.0, 7.0]
            assert np.abs(own - subject.plainly(*gradients)).max() < 1e-4, place
        assert {opt.loss_scale for opt in subject.opts} <= {SCALE, SCALE / 2}, place
        assert {raw._scale for raw in subject.raws} == {1.0}, place


@pytest.mark.parametrize("name", SUBJECTS)
def test_going_on_without_zero_grad_after_an_interruption_is_right_or_is_refused(name):
    """Right: what was interrupted counts, or is gone; adding gradients may hold it still, or what was not cleared."""
    for subject, place, _ in interruptions(name, 5):
        stepped = not subject.stand_at(subject.plainly())
        before = [subject.third] if stepped else []
        try:
            subject.backward(5.0)
            for opt in subject.opts:
                opt.step(1)
        except (ampx.AmpxError, UserWarning):
            subject.zero_grad()
            continue
        left = [0.0]
        if subject.adds:  # by each context, or by all: the last step added them up
            left += [
                rest * contexts
                for rest in (subject.third, subject.third / 2, subject.history[-1])
                for contexts in (1, len(subject.contexts))
            ]
        choices = [subject.plainly(*before, 5.0 + rest) for rest in left if math.isfinite(rest)]
        if len(subject.opts) > 1:
            choices += [subject.plainly(*some) for some in ((5.0,), (subject.third, 5.0)) if math.isfinite(sum(some))]
        skipped = [subject.plainly(*before)] if math.isinf(subject.third) else []
        assert subject.stand_at(*choices, *skipped), place


@pytest.mark.bfloat16
def test_an_interruption_while_bfloat16_gradients_add_starts_over():
    """There ampx adds by itself: what it keeps aside for that must come back."""
    ampx.init("mxnet", dtype="bfloat16", device="cpu", nan_loss="skip")
    test_zero_grad_after_an_interruption_starts_over("adding", Interruption, 1)
    test_a_second_step_after_an_interruption_is_the_step_or_is_refused("adding")


def _compute_dtype():
    ones = mx.nd.ones((2, 2))
    return name_of(mx.nd.FullyConnected(ones, ones, num_hidden=2, no_bias=True).dtype)


def _inside(enabled):
    with ampx.autocast(enabled=enabled):
        pass


REGIONS = {
    "off": (None, lambda _: _inside(False)),
    "on": (None, lambda _: _inside(True)),
    "step": (Subject, Subject.act),
}


@pytest.mark.bfloat16
@pytest.mark.parametrize("name", REGIONS)
def test_a_session_casts_again_after_a_region_was_interrupted_at_any_line(name):
    ampx.init("mxnet", dtype="bfloat16", device="cpu", nan_loss="skip")
    start, act = REGIONS[name]
    places = 0
    for _, place in interrupted_everywhere(start or object, act, PACKAGES):
        assert _compute_dtype() == "bfloat16", place
        places += 1
    assert places > 5
    _inside(False)
    assert _compute_dtype() == "bfloat16"


@pytest.mark.bfloat16
def test_a_new_session_casts_where_a_region_was_never_left():
    """So it lives on in the traceback of an exception, which Python's prompt keeps."""
    left_open = ampx.init("mxnet", dtype="bfloat16", device="cpu").autocast(enabled=False)
    left_open.__enter__()
    assert _compute_dtype() == "float32"
    ampx.init("mxnet", dtype="bfloat16", device="cpu")
    assert _compute_dtype() == "bfloat16"
    left_open.__exit__(None, None, None)
    assert _compute_dtype() == "bfloat16"


def _start(process_wide=True):
    return ampx.init("mxnet", dtype="bfloat16", device="cpu", process_wide=process_wide)


@pytest.mark.bfloat16
@pytest.mark.parametrize(
    ("process_wide", "act"), [(True, lambda _: _start()), (False, lambda _: _inside(True))], ids=["init", "region"]
)
def test_functions_are_cast_as_long_as_somebody_needs_it_after_an_interruption(process_wide, act):
    """While they are put in place or taken away, which takes thousands of lines, of which some are interrupted."""
    original = mx.nd.FullyConnected
    expected = "bfloat16" if process_wide else "float32"
    for _, place in interrupted_everywhere(lambda: _start(process_wide), act, PACKAGES, stride=97 if THOROUGH else 997):
        if sessions.get("mxnet") is not None:
            assert _compute_dtype() == expected, place
            _inside(True)
            assert _compute_dtype() == expected, place
            assert (mx.nd.FullyConnected is original) is not process_wide, place
        ampx.shutdown()
        assert mx.nd.FullyConnected is original, place
        assert not native_amp.amp._amp_initialized, place


@pytest.mark.bfloat16
def test_gradients_that_were_kept_aside_for_an_optimizer_that_is_gone_are_not_added_to_others():
    ampx.init("mxnet", dtype="bfloat16", device="cpu", nan_loss="skip")
    for subject, place in interrupted_everywhere(
        lambda: Subject(**SUBJECTS["adding"]), Subject.act, PACKAGES, stride=11
    ):
        (parameter,), before = subject.parameters, subject.weights()[0]
        subject.opts.clear()
        subject.raws.clear()
        parameter.grad_req = "write"
        trainer = mx.gluon.Trainer([parameter], "sgd", {"learning_rate": 0.5})
        with mx.autograd.record():
            loss = (parameter.data() * 5).sum()
        loss.backward()
        trainer.step(1)
        assert np.abs(subject.weights()[0] - (before - 2.5)).max() < 1e-5, place
