"""Graphs and sessions: optimizers of tf.compat.v1.train."""

import math

import numpy as np
import pytest
import tensorflow as tf

import ampx
from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE

v1 = tf.compat.v1
OPTIMIZERS = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.25),
    "momentum": lambda: v1.train.MomentumOptimizer(0.25, 0.5),
    "adam": lambda: v1.train.AdamOptimizer(0.25),
}


class Program:
    """A variable, a loss that is its sum times what is fed, and a training operation."""

    def __init__(self, amp, make_train, optimizer="momentum", **options):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.variable = v1.get_variable("v", initializer=[1.0, 2.0])
            self.slope = v1.placeholder(tf.float32, [])
            self.step = v1.train.get_or_create_global_step()
            self.opt = amp.wrap_optimizer(OPTIMIZERS[optimizer](), **options)
            self.train = make_train(self, tf.reduce_sum(self.variable * self.slope))
            self.start = v1.global_variables_initializer()

    def run(self, session, slope):
        session.run(self.train, {self.slope: slope})


def minimize(program, loss):
    return program.opt.minimize(loss, global_step=program.step)


def minimize_what_scale_loss_gave(program, loss):
    with ampx.scale_loss(loss, program.opt) as scaled:
        pass
    return program.opt.minimize(scaled, global_step=program.step)


def compute_and_apply(program, loss):
    pairs = program.opt.compute_gradients(loss)
    return program.opt.apply_gradients([(tf.clip_by_value(g, -9.0, 9.0), v) for g, v in pairs], program.step)


def compute_inside(program, loss):
    with ampx.scale_loss(loss, program.opt) as scaled:
        pairs = program.opt.compute_gradients(scaled)
    return program.opt.apply_gradients(pairs, program.step)


def differentiate_and_apply(program, loss):
    with ampx.scale_loss(loss, program.opt) as scaled:
        (gradient,) = tf.gradients(scaled, [program.variable])
    return program.opt.apply_gradients([(gradient, program.variable)], program.step)


WAYS = [minimize, minimize_what_scale_loss_gave, compute_and_apply, compute_inside, differentiate_and_apply]


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("way", WAYS)
def test_the_trace_is_the_reference_and_a_skip_changes_nothing(amp, way, optimizer):
    program = Program(amp, way, optimizer, loss_scale=ampx.LossScale(growth_interval=3))
    events, trace = [], []
    amp.on_event(events.append)
    with v1.Session(graph=program.graph) as session:
        session.run(program.start)
        kept = [program.variable, program.step, *program.opt._optimizer.variables()]
        assert program.opt.last_step is None
        for overflow in REFERENCE_PATTERN:
            before = session.run(kept)
            program.run(session, math.inf if overflow else 1.0)
            trace.append(program.opt.loss_scale)
            result = program.opt.last_step
            assert (result.applied, result.next_scale) == (not overflow, trace[-1])
            same = all(np.array_equal(old, new) for old, new in zip(before, session.run(kept), strict=True))
            assert same == bool(overflow)
        assert session.run(program.step) == REFERENCE_PATTERN.count(0)
    assert trace == list(REFERENCE_TRACE)
    assert sum(isinstance(event, ampx.StepSkipped) for event in events) == REFERENCE_PATTERN.count(1)


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_the_raw_optimizer(amp, way):
    program = Program(amp, way)
    raw = Program(ampx.init("tensorflow", enabled=False), minimize)
    weights = []
    for subject in (program, raw):
        with v1.Session(graph=subject.graph) as session:
            session.run(subject.start)
            for slope in (0.5, -3.0, 1.0):
                subject.run(session, slope)
            weights.append(session.run(subject.variable))
    assert np.array_equal(*weights)  # powers of two change no bit


def test_a_float16_loss_is_scaled_in_float32(native, amp):
    code, out, err = native(
        """
v1 = tf.compat.v1
with tf.Graph().as_default(), v1.Session() as session:
    v = v1.get_variable("v", initializer=1.0)
    scale = v1.mixed_precision.DynamicLossScale(2.0**15)
    opt = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(v1.train.GradientDescentOptimizer(1.0), scale)
    scaled = opt._scale_loss(tf.cast(v, tf.float16) * 2.0)
    session.run(v1.global_variables_initializer())
    print(session.run(scaled))
"""
    )
    assert code == 0, err
    assert out.split()[-1] == "inf"

    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("v", initializer=1.0)
        opt = amp.wrap_optimizer(v1.train.GradientDescentOptimizer(1.0))
        with ampx.scale_loss(tf.cast(variable, tf.float16) * 2.0, opt) as scaled:
            pass
        session.run(v1.global_variables_initializer())
        assert session.run(scaled) == 2.0**17


def test_a_static_scale_skips_too(native, amp):
    """Natively it does not: FixedLossScale applies whatever comes."""
    code, out, err = native(
        """
v1 = tf.compat.v1
with tf.Graph().as_default(), v1.Session() as session:
    v = v1.get_variable("v", initializer=1.0)
    opt = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(v1.train.GradientDescentOptimizer(1.0), 8.0)
    train = opt.minimize(v * float("inf"))
    session.run(v1.global_variables_initializer())
    session.run(train)
    print(session.run(v))
"""
    )
    assert code == 0, err
    assert out.split()[-1] == "-inf"

    program = Program(amp, minimize, loss_scale=8.0)
    with v1.Session(graph=program.graph) as session:
        session.run(program.start)
        program.run(session, math.inf)
        assert session.run(program.variable).tolist() == [1.0, 2.0]
        assert (program.opt.loss_scale, program.opt.last_step.applied) == (8.0, False)


def test_clipping_sees_true_gradients(amp):
    program = Program(amp, lambda program, loss: minimize(program, loss * [3.0, 4.0][0]), "sgd", max_grad_norm=1.0)
    with v1.Session(graph=program.graph) as session:
        session.run(program.start)
        program.run(session, 1.0)
        np.testing.assert_allclose(session.run(program.variable), np.array([1.0, 2.0]) - 0.25 / math.sqrt(2), rtol=1e-6)
        assert math.isclose(program.opt.last_step.grad_norm, 3 * math.sqrt(2), rel_tol=1e-6)


def test_sparse_gradients(amp):
    with tf.Graph().as_default(), v1.Session() as session:
        table = v1.get_variable("t", initializer=tf.zeros([4, 1]))
        slope = v1.placeholder(tf.float32, [])
        opt = amp.wrap_optimizer(v1.train.GradientDescentOptimizer(0.5))
        train = opt.minimize(tf.reduce_sum(tf.gather(table, [1, 1, 3])) * slope)
        session.run(v1.global_variables_initializer())
        for value in (1.0, math.inf, 0.5):
            session.run(train, {slope: value})
            assert opt.last_step.applied is (value != math.inf)
        assert session.run(table).ravel().tolist() == [0.0, -1.5, 0.0, -0.75]


def test_a_saved_state_goes_on(amp):
    program = Program(amp, minimize, loss_scale=ampx.LossScale(growth_interval=3))
    with v1.Session(graph=program.graph) as session:
        session.run(program.start)
        for slope in (1.0, math.inf, 1.0, 1.0):
            program.run(session, slope)
        saved = amp.state_dict()
    assert saved["groups"][0]["losses"] == [
        {"loss_id": 0, "scale": 2.0**15, "growth_tracker": 2, "hysteresis_tracker": 1, "consecutive_skips": 0}
    ]
    amp = ampx.init("tensorflow", level="O0", loss_scale=ampx.LossScale(growth_interval=3))
    program = Program(amp, minimize)
    with pytest.raises(ampx.ProtocolError, match="after the initializer ran"):
        amp.load_state_dict(saved)
    with v1.Session(graph=program.graph) as session:
        session.run(program.start)
        amp.load_state_dict(saved)
        program.run(session, 1.0)
        assert program.opt.last_step == ampx.StepResult(True, True, 2.0**15, 2.0**16, 0)


def test_checkpoints_hold_the_scale(amp, tmp_path):
    first = Program(amp, minimize)
    with first.graph.as_default():
        saver = v1.train.Saver()
    with v1.Session(graph=first.graph) as session:
        session.run(first.start)
        first.run(session, math.inf)
        path = saver.save(session, str(tmp_path / "model"))
    second = Program(amp, minimize)
    with second.graph.as_default():
        saver = v1.train.Saver()
    with v1.Session(graph=second.graph) as session:
        saver.restore(session, path)
        assert second.opt.loss_scale == 2.0**15


def test_outside_a_session_results_are_tensors_and_states_are_refused(amp):
    program = Program(amp, minimize)
    with program.graph.as_default():
        seen = [program.opt.last_step.applied, program.opt.last_step.consecutive_skips, program.opt.loss_scale]
    with pytest.raises(ampx.ProtocolError, match="as_default"):
        amp.state_dict()
    with v1.Session(graph=program.graph) as session:
        session.run(program.start)
        program.run(session, math.inf)
        assert session.run(seen) == [False, 1, 2.0**15]


def test_eager_code_and_functions_work_too(amp):
    variable = tf.Variable([1.0, 2.0])
    opt = amp.wrap_optimizer(v1.train.GradientDescentOptimizer(1.0), loss_scale=ampx.LossScale(growth_interval=3))

    @tf.function
    def step(slope):
        with tf.GradientTape() as tape, ampx.scale_loss(tf.reduce_sum(variable) * slope, opt) as scaled:
            pass
        opt.apply_gradients([(tape.gradient(scaled, variable), variable)])

    trace = []
    for position, overflow in enumerate(REFERENCE_PATTERN):
        slope = tf.constant(math.inf if overflow else 0.0)
        if position % 2:
            opt.minimize(lambda slope=slope: tf.reduce_sum(variable) * slope, var_list=[variable])
        else:
            step(slope)
        trace.append(opt.loss_scale)
    assert trace == list(REFERENCE_TRACE)
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_mistakes_are_refused(amp):
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=1.0)
        low = v1.get_variable("low", initializer=tf.constant(1.0, tf.float16))
        raw = v1.train.GradientDescentOptimizer(1.0)
        opt = amp.wrap_optimizer(raw)
        with pytest.raises(ampx.NotScaledError):
            opt.apply_gradients([(tf.constant(1.0), variable)])
        with pytest.raises(ampx.LowPrecisionParametersError):
            opt.minimize(low * 2.0, var_list=[low])
        for again in (raw, opt):
            with pytest.raises(ampx.AlreadyWrappedError):
                amp.wrap_optimizer(again)
        with pytest.raises(ampx.UnsupportedByBackendError, match="one by one"):
            amp.wrap_optimizer([v1.train.GradientDescentOptimizer(1.0) for _ in range(2)])
        for call in (ampx.unscale, lambda optimizer: ampx.clip_grad_norm(optimizer, 1.0)):
            with pytest.raises(ampx.UnsupportedByBackendError, match="gradients"):
                call(opt)
        with pytest.raises(ampx.NotAnOptimizerError):
            amp.wrap_optimizer(v1.train.Saver([variable]))


def test_a_disabled_session_adds_nothing_to_the_graph():
    def variables(opt):
        with tf.Graph().as_default():
            variable = v1.get_variable("v", initializer=1.0)
            opt.minimize(variable * 2.0)
            return sorted(variable.name for variable in v1.global_variables())

    opt = ampx.init("tensorflow", enabled=False).wrap_optimizer(OPTIMIZERS["adam"]())
    assert opt.last_step is None
    assert variables(opt) == variables(OPTIMIZERS["adam"]())
    assert opt.last_step == ampx.events.UNCHECKED


def test_a_disabled_optimizer_clips_as_asked():
    amp = ampx.init("tensorflow", enabled=False)
    program = Program(amp, minimize, "sgd", max_grad_value=4.0)
    with v1.Session(graph=program.graph) as session:
        session.run(program.start)
        program.run(session, 8.0)
        assert session.run(program.variable).tolist() == [0.0, 1.0]  # 1 and 2, less 0.25 times 4


def test_shutdown_needs_no_session():
    with ampx.init("tensorflow", level="O0", loss_scale="dynamic") as amp:
        Program(amp, minimize)


def test_gradients_of_the_loss_itself_are_refused(amp):
    """Nothing says on a gradient that it is scaled; what was differentiated the graph knows."""

    def differentiate_the_loss(program, loss):
        with ampx.scale_loss(loss, program.opt):
            (gradient,) = tf.gradients(loss, [program.variable])
        return program.opt.apply_gradients([(gradient, program.variable)], program.step)

    with pytest.raises(ampx.NotScaledError, match="that was passed to scale_loss"):
        Program(amp, differentiate_the_loss)
