"""A Ctrl-C or a signal handler's time-out at any line of ampx: what follows is right or is refused.

Right is what momentum by hand does with the same gradients, which are known: losses are linear in the weights.
"""

import math
import os
import threading
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ampx
from ampx.session import sessions
from ampx_tensorflow.contexts import on_host
from interruptions import Interruption, interrupted_everywhere

PACKAGES = ("ampx", "ampx_tensorflow")
THOROUGH = bool(os.environ.get("AMPX_TEST_ALL"))  # every line and call; else a part of the lines
SCALE = 1024.0
KINDS = {
    "keras": lambda: keras.optimizers.SGD(0.5, momentum=0.5),
    "tf_keras": lambda: tf_keras.optimizers.SGD(0.5, momentum=0.5),
    "tf.compat.v1": lambda: tf.compat.v1.train.MomentumOptimizer(0.5, 0.5),
}


class Subject:
    """Optimizers of one variable each, after one step; the next has gradients of `size`."""

    def __init__(self, *, kind="keras", optimizers=1, by_hand=False, several=False, size=3.0, **options):
        amp = sessions.get("tensorflow") or ampx.init("tensorflow", level="O0", nan_loss="skip")
        scale = ampx.LossScale(init_scale=SCALE, growth_interval=100)
        self.raws = [KINDS[kind]() for _ in range(optimizers)]
        raws = self.raws if optimizers > 1 else self.raws[0]
        wrapped = amp.wrap_optimizer(raws, loss_scale=scale, **options)
        self.opts = wrapped if optimizers > 1 else [wrapped]
        self.variables = [tf.Variable(tf.zeros(2)) for _ in range(optimizers)]
        self.by_hand, self.several, self.size = by_hand, several, size
        self.gradients, self.history = None, []
        self.train(2.0)
        self.history.append(2.0)

    def backward_of_several(self, size):
        """Run backward of two losses with scales of their own, whose gradients add up to the size."""
        parts = []
        for loss_id in (0, 1):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.variables[0]) * (1.0 if loss_id == 0 else size - 1.0)
            with ampx.scale_loss(loss, self.opts[0], loss_id=loss_id) as scaled:
                parts.append(scaled.gradient(tape, self.variables[0]))
        self.gradients = [parts[0] + parts[1]]

    def backward(self, size):
        self.gradients = None
        if self.several:
            self.backward_of_several(size)
            return
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable) * size for variable in self.variables])
            with ampx.scale_loss(loss, self.opts) as scaled:
                pass
        self.gradients = tape.gradient(scaled, self.variables)
        if self.by_hand:
            self.gradients = self.opts[0].get_unscaled_gradients(self.gradients)

    def apply(self, optimizers):
        for optimizer, gradient, variable in zip(optimizers, self.gradients, self.variables, strict=True):
            optimizer.apply_gradients([(gradient, variable)])

    def train(self, size):
        self.backward(size)
        self.apply(self.opts)

    def act(self):
        self.train(self.size)

    def zero_grad(self):
        for opt in self.opts:
            opt.zero_grad()

    def plainly(self, *gradients):
        """The weights after the steps so far and these."""
        weight = speed = 0.0
        for gradient in (*self.history, *gradients):
            speed = 0.5 * speed + gradient
            weight -= 0.5 * speed
        return weight

    def stand_at(self, *choices):
        """Whether each variable is at one of some values; the variables may differ."""
        weights = [variable.numpy() for variable in self.variables]
        return all(any(np.abs(weight - choice).max() < 1e-5 for choice in choices) for weight in weights)


SUBJECTS = {
    "plain": {},
    "overflow": {"size": math.inf},
    "clipped": {"max_grad_norm": 1e6},
    "clipped by value, overflow": {"max_grad_value": 1e6, "size": math.inf},
    "unscaled by hand": {"by_hand": True},
    "several losses": {"several": True},
    "several losses, overflow": {"several": True, "size": math.inf},
    "list": {"optimizers": 2},
    "list, overflow": {"optimizers": 2, "size": math.inf},
    "tf_keras": {"kind": "tf_keras"},
    "tf_keras, overflow": {"kind": "tf_keras", "size": math.inf},
    "tf.compat.v1": {"kind": "tf.compat.v1"},
    "tf.compat.v1, overflow": {"kind": "tf.compat.v1", "size": math.inf},
}


def interruptions(name, first, error=Interruption):
    """Each interrupted second step: its weights are those before or after it, and never others."""
    places = 0
    options = {"after_calls": True} if THOROUGH else {"stride": 97, "first": first}
    for subject, place in interrupted_everywhere(
        lambda: Subject(**SUBJECTS[name]), Subject.act, PACKAGES, error=error, **options
    ):
        choices = [subject.plainly(), *([] if math.isinf(subject.size) else [subject.plainly(subject.size)])]
        assert subject.stand_at(*choices), place
        places += 1
        yield subject, place, choices
    assert places > 2


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_same_gradients_again_after_an_interruption_are_the_step_or_are_refused(name):
    for subject, place, choices in interruptions(name, 1):
        if subject.gradients is None:
            continue
        for opt, gradient, variable in zip(subject.opts, subject.gradients, subject.variables, strict=True):
            try:
                opt.apply_gradients([(gradient, variable)])
            except ampx.AmpxError:
                continue
        assert subject.stand_at(*choices), place


@pytest.mark.parametrize("name", [name for name in SUBJECTS if name not in ("clipped", "unscaled by hand")])
def test_the_raw_optimizer_after_an_interruption_is_refused_or_had_nothing_scaled(name):
    for subject, place, choices in interruptions(name, 2):
        if subject.gradients is None:
            continue
        pending = [opt.ampx_pending for opt in subject.opts]
        for raw, gradient, variable, refuses in zip(
            subject.raws, subject.gradients, subject.variables, pending, strict=True
        ):
            if refuses:
                with pytest.raises(ampx.RawStepError):
                    raw.apply_gradients([(gradient, variable)])
        assert subject.stand_at(*choices), place
        # Not pending: the step was complete, or its gradients were never made.
        assert all(pending) or len(pending) > 1 or not subject.stand_at(choices[0]) or len(choices) == 1, place


@pytest.mark.parametrize(
    ("name", "error"),
    [*((name, Interruption) for name in SUBJECTS), ("plain", TimeoutError), ("overflow", TimeoutError)],
)
def test_zero_grad_after_an_interruption_starts_over(name, error):
    for subject, place, choices in interruptions(name, 3 if error is Interruption else 4, error):
        subject.zero_grad()
        stepped = [np.abs(variable.numpy() - choices[0]).max() > 1e-5 for variable in subject.variables]
        for size in (5.0, 7.0):
            subject.train(size)
            assert all(opt.last_step.applied for opt in subject.opts), place
        for variable, was_stepped in zip(subject.variables, stepped, strict=True):
            gradients = ([subject.size] if was_stepped else []) + [5.0, 7.0]
            assert np.abs(variable.numpy() - subject.plainly(*gradients)).max() < 1e-4, place
        assert {float(opt.loss_scale) for opt in subject.opts} <= {SCALE, SCALE / 2}, place


# An overflow that the second of several losses was seen to have skips the step, though its gradients are lost.
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "several losses, overflow"])
def test_a_new_loss_after_an_interruption_starts_over_or_is_refused(name):
    """Nothing adds to gradients that are values: what was interrupted is applied in full, or is gone."""
    for subject, place, choices in interruptions(name, 5):
        stepped = [np.abs(variable.numpy() - choices[0]).max() > 1e-5 for variable in subject.variables]
        try:
            subject.train(5.0)
        except ampx.AmpxError:
            subject.zero_grad()
            subject.train(5.0)
        assert all(opt.last_step.applied for opt in subject.opts), place
        for variable, was_stepped in zip(subject.variables, stepped, strict=True):
            done = [subject.size] if was_stepped else []
            before = [subject.plainly(*done, 5.0)]
            if len(subject.opts) > 1:  # the first stepped twice: before the second was refused, and after zero_grad
                before.append(subject.plainly(*done, 5.0, 5.0))
            assert any(np.abs(variable.numpy() - weight).max() < 1e-5 for weight in before), place


def test_looking_at_the_protocol_changes_nothing():
    """Neither the member nor what is pending moves by being asked for, in the host or in a trace (C4)."""
    subject = Subject()
    opt = subject.opts[0]
    step = tf.function(lambda: subject.train(3.0))
    step()
    subject.backward(5.0)  # the host scales; the function, which is not called again, is where gradients were left
    before = opt.ampx_member.stage, dict(opt.ampx_member.factors), opt.ampx_pending
    for _ in range(3):
        assert (opt.ampx_member.stage, dict(opt.ampx_member.factors), opt.ampx_pending) == before
    assert before[0] == "scaled"
    subject.apply(subject.opts)
    assert subject.stand_at(subject.plainly(3.0, 5.0))


def test_threads_that_look_do_not_disturb_one_that_trains():
    """Two ask for last_step, loss_scale and what is pending while a third steps (C4)."""
    subject = Subject()
    opt, stop, problems = subject.opts[0], threading.Event(), []

    def look():
        while not stop.is_set():
            try:
                assert opt.last_step.finite
                assert opt.loss_scale == SCALE
                assert opt.ampx_member.stage in ("idle", "inside", "scaled", "changing", "interrupted")
                assert opt.ampx_pending in (True, False)
            except Exception as error:
                problems.append(error)
                return

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            subject.train(1.0)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert on_host()
    assert subject.stand_at(subject.plainly(*[1.0] * 60))


def enter_and_leave(inner, outer=None):
    with outer or nullcontext(), inner:
        pass


ACTS = {
    "off": lambda _: enter_and_leave(ampx.autocast(enabled=False)),
    "on": lambda _: enter_and_leave(ampx.autocast(dtype="float16")),
    "off inside on": lambda _: enter_and_leave(ampx.autocast(enabled=False), ampx.autocast(dtype="float16")),
    "step": Subject.act,
}


@pytest.mark.parametrize("name", ACTS)
def test_the_session_casts_after_an_interruption_at_any_line_of_a_region(name):
    """No region counts that its `with` statement has left: neither for layers that exist, nor for new ones."""
    ampx.init("tensorflow", dtype="bfloat16", nan_loss="skip")
    policies = keras.config.dtype_policy(), tf_keras.mixed_precision.global_policy()
    layer, ones, places = keras.layers.Dense(1), tf.ones((1, 2)), 0
    stride = 1 if THOROUGH else 29 if name == "step" else 7
    for _, place in interrupted_everywhere(Subject, ACTS[name], PACKAGES, stride=stride):
        dtypes = tf.function(layer)(ones).dtype, layer(ones).dtype, keras.layers.Dense(1)(ones).dtype
        assert dtypes == (tf.bfloat16,) * 3, place
        assert (keras.config.dtype_policy(), tf_keras.mixed_precision.global_policy()) == policies, place
        places += 1
    assert places > 5
