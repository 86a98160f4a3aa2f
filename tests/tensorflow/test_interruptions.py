"""Looks at the protocol while it goes on, and regions that are interrupted at any line.

Interrupted steps are in tests/conformance/test_tensorflow.py.
"""

import os
import threading
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ampx
from ampx_tensorflow.contexts import on_host
from interruptions import interrupted_everywhere

PACKAGES = ("ampx", "ampx_tensorflow")
THOROUGH = bool(os.environ.get("AMPX_TEST_ALL"))  # every line; else a part of the lines
SCALE = 1024.0


class Trainee:
    """An optimizer with momentum, of one variable."""

    def __init__(self, amp):
        self.opt = amp.wrap_optimizer(keras.optimizers.SGD(0.5, momentum=0.5), loss_scale=SCALE)
        self.variable, self.gradients = tf.Variable(tf.zeros(2)), None
        self.train(2.0)

    def backward(self, size):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.variable) * size
            with ampx.scale_loss(loss, self.opt) as scaled:
                pass
        self.gradients = tape.gradient(scaled, [self.variable])

    def apply(self):
        self.opt.apply_gradients(zip(self.gradients, [self.variable], strict=True))

    def train(self, size):
        self.backward(size)
        self.apply()

    def stands_after(self, *gradients):
        weight = speed = 0.0
        for gradient in (2.0, *gradients):
            speed = 0.5 * speed + gradient
            weight -= 0.5 * speed
        return np.abs(self.variable.numpy() - weight).max() < 1e-5


def test_looking_at_the_protocol_changes_nothing(amp):
    """Neither the member nor what is pending moves by being asked for, in the host or in a trace (C4)."""
    subject = Trainee(amp)
    opt = subject.opt
    step = tf.function(lambda: subject.train(3.0))
    step()
    subject.backward(5.0)  # the host scales; the function, which is not called again, is where gradients were left
    before = opt.ampx_member.stage, dict(opt.ampx_member.factors), opt.ampx_pending
    for _ in range(3):
        assert (opt.ampx_member.stage, dict(opt.ampx_member.factors), opt.ampx_pending) == before
    assert before[0] == "scaled"
    subject.apply()
    assert subject.stands_after(3.0, 5.0)


def test_threads_that_look_do_not_disturb_one_that_trains(amp):
    """Two ask for last_step, loss_scale and what is pending while a third steps (C4)."""
    subject = Trainee(amp)
    opt, stop, problems = subject.opt, threading.Event(), []

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
    assert subject.stands_after(*[1.0] * 60)


def enter_and_leave(inner, outer=None):
    with outer or nullcontext(), inner:
        pass


ACTS = {
    "off": lambda _: enter_and_leave(ampx.autocast(enabled=False)),
    "on": lambda _: enter_and_leave(ampx.autocast(dtype="float16")),
    "off inside on": lambda _: enter_and_leave(ampx.autocast(enabled=False), ampx.autocast(dtype="float16")),
}


@pytest.mark.parametrize("name", ACTS)
def test_the_session_casts_after_an_interruption_at_any_line_of_a_region(name):
    """No region counts that its `with` statement has left: neither for layers that exist, nor for new ones."""
    ampx.init("tensorflow", dtype="bfloat16", nan_loss="skip")
    policies = keras.config.dtype_policy(), tf_keras.mixed_precision.global_policy()
    layer, ones, places = keras.layers.Dense(1), tf.ones((1, 2)), 0
    for _, place in interrupted_everywhere(lambda: None, ACTS[name], PACKAGES, stride=1 if THOROUGH else 7):
        dtypes = tf.function(layer)(ones).dtype, layer(ones).dtype, keras.layers.Dense(1)(ones).dtype
        assert dtypes == (tf.bfloat16,) * 3, place
        assert (keras.config.dtype_policy(), tf_keras.mixed_precision.global_policy()) == policies, place
        places += 1
    assert places > 5
