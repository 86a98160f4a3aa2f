"""Events of steps that Python does not see, in functions and in fit: none is lost, and a collapse is told by itself."""

import contextlib
import math
import random
from dataclasses import asdict

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ampx
from ampx.testing.oracle import Oracle
from ampx_tensorflow import history
from processes import run_python

v1 = tf.compat.v1
COLLAPSE = pytest.mark.filterwarnings("ignore::ampx.errors.ScaleCollapsedWarning")


def expected(config, pattern):
    """The events of steps one by one, by the specification: kind, step, scale, next scale, skips."""
    oracle, scale, events = Oracle(asdict(config)), config.init_scale, []
    for step, overflow in enumerate(pattern, start=1):
        row = oracle.step(overflow)
        numbers = step, scale, row.scale, row.consecutive_skips
        if overflow:
            events.append(("StepSkipped", *numbers))
        if row.scale != scale:
            events.append(("ScaleChanged", *numbers))
        if overflow and row.consecutive_skips == config.max_consecutive_skips:
            events.append(("ScaleCollapsed", *numbers))
        scale = row.scale
    return events


def numbers_of(events):
    return [
        (type(event).__name__, event.step, event.scale, event.next_scale, event.consecutive_skips) for event in events
    ]


def listening(amp):
    seen = []
    amp.on_event(seen.append)
    return seen


def make_step(opt, variable):
    def step(factor):
        with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(variable) * factor, opt) as scaled:
            pass
        opt.apply_gradients([(tape.gradient(scaled, variable), variable)])

    return step


def overflow(step):
    """Let so many steps overflow that the scale collapses and the host looks once more."""
    for _ in range(51 + history.LOOK_EVERY):
        step(tf.constant(math.inf))


def factors(pattern):
    return tf.constant([math.inf if overflow else 1.0 for overflow in pattern])


def patterns():
    numbers = random.Random(0)
    yield "a few", [numbers.random() < 0.1 for _ in range(800)]
    yield "half", [numbers.random() < 0.5 for _ in range(800)]
    yield "all", [True] * 800
    yield "in long stretches", ([False] * 70 + [True] * 60) * 6


@COLLAPSE
@pytest.mark.parametrize(
    ("name", "pattern"), list(patterns()), ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("compiled", [False, True])
def test_every_event_of_a_function_is_sent_once_and_in_order(amp, name, pattern, compiled):
    seen, config = listening(amp), ampx.LossScale(growth_interval=7)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1), loss_scale=config)
    step = tf.function(make_step(opt, tf.Variable([1.0])), jit_compile=compiled)
    for factor in factors(pattern):
        step(factor)
    due = expected(config, pattern)
    sent = numbers_of(seen)
    assert sent == due[: len(sent)]
    assert len(sent) >= sum(event[1] <= len(pattern) - history.LOOK_EVERY for event in due)
    assert opt.last_step.applied is not pattern[-1]
    assert numbers_of(seen) == due


@COLLAPSE
@pytest.mark.parametrize("compiled", [False, True])
def test_every_event_of_a_loop_in_one_call_is_sent(amp, compiled):
    """Thousands of steps, of which Python sees none."""
    numbers = random.Random(1)
    pattern = [numbers.random() < 0.3 for _ in range(2000)] + [True] * 2000 + [False] * 2000
    seen, config = listening(amp), ampx.LossScale(growth_interval=50, hysteresis=2)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1), loss_scale=config)
    variable = tf.Variable([1.0])
    opt.build([variable])
    step = make_step(opt, variable)

    @tf.function(jit_compile=compiled)
    def train(factors):
        for place in tf.range(len(factors)):
            step(factors[place])

    train(factors(pattern))
    assert opt.last_step.applied
    assert numbers_of(seen) == expected(config, pattern)


def test_more_stretches_than_fit_are_a_warning(amp):
    """Every second step of one call overflows: what cannot be told one by one is said to be so."""
    seen = listening(amp)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1), loss_scale=ampx.LossScale(growth_interval=3))
    variable = tf.Variable([1.0])
    opt.build([variable])
    step = make_step(opt, variable)

    @tf.function
    def train(factors):
        for place in tf.range(len(factors)):
            step(factors[place])

    pattern = [True, False] * (history.STRETCHES + 10)
    train(factors(pattern))
    with pytest.warns(ampx.AmpxWarning, match="fewer steps at a time"):
        assert opt.loss_scale == 1.0
    assert numbers_of(seen) == []
    train(factors([False] * 3))
    assert opt.loss_scale == 2.0
    assert numbers_of(seen) == [("ScaleChanged", len(pattern) + 2, 1.0, 2.0, 0)]


def overflowing(optimizer, kind, **options):
    module = tf_keras if kind == "tf_keras" else keras
    model = module.Sequential(
        [module.layers.Dense(1, input_shape=(2,)) if kind == "tf_keras" else module.layers.Dense(1)]
    )
    model.compile(optimizer=optimizer, loss="mse", **options)
    x = np.full((240, 2), np.inf, "float32")
    model.fit(x, np.zeros((240, 1), "float32"), batch_size=2, epochs=1, verbose=0)
    return model


FITS = {
    "graph": ("keras", {}),
    "compiled": ("keras", {"jit_compile": True}),
    "eager": ("keras", {"run_eagerly": True}),
    "many steps a call": ("keras", {"steps_per_execution": 40}),
    "tf_keras": ("tf_keras", {}),
}


@pytest.mark.parametrize(("kind", "options"), FITS.values(), ids=FITS)
def test_a_fit_that_collapses_says_so(amp, kind, options):
    """Of 120 batches each overflows; nobody looks at the optimizer, in fit or after."""
    seen = listening(amp)
    raw = (tf_keras if kind == "tf_keras" else keras).optimizers.SGD(0.1)
    opt = amp.wrap_optimizer(raw)
    with pytest.warns(ampx.ScaleCollapsedWarning, match="50 steps in a row"):
        overflowing(opt, kind, **options)
    assert numbers_of(seen) == expected(ampx.LossScale(), [True] * 120)


def test_a_loop_over_a_function_that_collapses_says_so(amp):
    seen = listening(amp)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1))
    step = tf.function(make_step(opt, tf.Variable([1.0])))
    with pytest.warns(ampx.ScaleCollapsedWarning, match="50 steps in a row"):
        overflow(step)
    assert sum(isinstance(event, ampx.ScaleCollapsed) for event in seen) == 1


def test_bfloat16_without_a_scale_collapses_too():
    """Its scale is 1 for ever; skipped steps are events like any other."""
    amp = ampx.init("tensorflow", dtype="bfloat16", device="cpu", on_unsupported="warn", nan_loss="skip")
    seen = listening(amp)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1))
    step = tf.function(make_step(opt, tf.Variable([1.0])))
    with pytest.warns(ampx.ScaleCollapsedWarning, match="50 steps in a row"):
        overflow(step)
    assert sum(isinstance(event, ampx.ScaleCollapsed) for event in seen) == 1
    assert opt.loss_scale == 1.0


SHORT = """
import ampx, keras, math, tensorflow as tf

amp = ampx.init("tensorflow", level="O0", loss_scale="dynamic", nan_loss="skip")
amp.on_event(lambda event: print(type(event).__name__, event.step))
opt, variable = amp.wrap_optimizer(keras.optimizers.SGD(0.1)), tf.Variable([1.0])

@tf.function
def step():
    with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(variable) * math.inf, opt) as scaled:
        pass
    opt.apply_gradients([(tape.gradient(scaled, variable), variable)])

for _ in range(55):
    step()
"""


def test_a_script_that_ends_early_has_told_everything():
    """55 steps, fewer than the host waits for before it looks."""
    done = run_python("-c", SHORT, check=True)
    lines = done.stdout.split("\n")
    assert [line for line in lines if line.startswith("StepSkipped")] == [
        f"StepSkipped {step}" for step in range(1, 56)
    ]
    assert "ScaleCollapsed 50" in lines
    assert "ScaleCollapsedWarning: 50 steps in a row" in done.stderr


@COLLAPSE
def test_listeners_may_raise_and_look(amp):
    """The error comes out of a call of the function, before its step; no event is sent twice, and none is lost."""
    seen = []

    def listen(event):
        seen.extend([event.step] if isinstance(event, ampx.StepSkipped) else [])
        assert opt.last_step is not None
        if event.step == 3:
            raise ZeroDivisionError

    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1), loss_scale=16.0)
    amp.on_event(listen)
    step, errors = tf.function(make_step(opt, tf.Variable([1.0]))), 0
    for _ in range(3 * history.LOOK_EVERY):
        try:
            step(tf.constant(math.inf))
        except ZeroDivisionError:
            errors += 1
    assert errors == 1
    assert opt.last_step.consecutive_skips == 3 * history.LOOK_EVERY - 1
    assert seen == list(range(1, 3 * history.LOOK_EVERY))


def test_finite_steps_are_followed_in_no_time(amp):
    """A million steps in one call: the host computes where they lead and does not repeat them."""
    seen, config = listening(amp), ampx.LossScale(growth_interval=100_000, max_scale=2.0**20)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1), loss_scale=config)
    log = opt._ledger.history
    opt._ledger.scale.assign(2.0**20)
    opt._ledger.counters.assign([0, 1, 0, 1_000_000])
    log.counts.assign([1_000_000, 0, 0])
    assert opt.loss_scale == 2.0**20
    assert numbers_of(seen) == expected(config, [False] * 1_000_000)


@COLLAPSE
@pytest.mark.parametrize("where", ["session", "function", "eager"])
def test_optimizers_of_tensorflow_1_send_every_event(amp, where):
    """In a session when somebody asks; in functions and outside by themselves."""
    numbers = random.Random(2)
    pattern = [numbers.random() < 0.5 for _ in range(200)]
    seen, config = listening(amp), ampx.LossScale(growth_interval=4)
    with tf.Graph().as_default() if where == "session" else contextlib.nullcontext():
        variable = v1.get_variable(f"of {where}".replace(" ", "_"), initializer=[1.0], use_resource=True)
        opt = amp.wrap_optimizer(v1.train.GradientDescentOptimizer(0.1), loss_scale=config)
        if where == "session":
            factor = v1.placeholder(tf.float32, [])
            train = opt.minimize(tf.reduce_sum(variable) * factor)
            for start in (0, 100):  # a session of its own each: the second starts over
                with v1.Session() as session:
                    session.run(v1.global_variables_initializer())
                    for overflow in pattern[start : start + 100]:
                        session.run(train, {factor: math.inf if overflow else 1.0})
                    assert opt.last_step.applied is not pattern[start + 99]
                assert numbers_of(seen) == expected(config, pattern[start : start + 100])
                seen.clear()
            return

        def step(factor):
            opt.apply_gradients(opt.compute_gradients(lambda: tf.reduce_sum(variable) * factor, [variable]))

        step = tf.function(step) if where == "function" else step
        for factor in factors(pattern):
            step(factor)
    assert len(seen) > 0
    assert opt.last_step.applied is not pattern[-1]
    assert numbers_of(seen) == expected(config, pattern)


def test_sessions_need_no_other_initializer_and_checkpoints_hold_no_log(amp, tmp_path):
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=[1.0])
        opt = amp.wrap_optimizer(v1.train.GradientDescentOptimizer(0.1))
        train = opt.minimize(tf.reduce_sum(variable))
        saver = v1.train.Saver()
        with v1.train.MonitoredSession() as session:  # finishes the graph
            session.run(train)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            saver.save(session, str(tmp_path / "c"))
    shapes = [shape for _, shape in tf.train.list_variables(str(tmp_path / "c"))]
    assert [3] not in shapes
    assert [history.STRETCHES, 2] not in shapes
