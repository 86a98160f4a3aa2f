"""The order of calls: what is counted, what is divided, what is refused, and what an exception leaves behind."""

import copy
import gc
import math
import pickle
import threading
import warnings

import pytest
from shared_parameters import SCRIPTS, left_from_before, one_after_the_other

import ampx

INF = math.inf


@pytest.fixture
def amp(alpha):
    return ampx.init("alpha", loss_scale=ampx.LossScale(init_scale=1024.0, growth_interval=3))


@pytest.fixture
def trainer(amp, alpha, make_trainer):
    return make_trainer(alpha)


def stand(trainer):
    member = trainer.opt.ampx_member
    return (
        member.stage,
        dict(member.factors),
        trainer.param.value,
        trainer.raw.updates,
        ampx.state_dict(trainer.opt),
    )


# -- steps ----------------------------------------------------------------------------------------------


def unreached(call):
    """Return the warnings of a call that no gradient came."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [warning for warning in caught if warning.category is ampx.NoGradientsWarning]


def a_step_on_a_copy(trainer):
    copied = copy.deepcopy(trainer.param)
    with ampx.scale_loss(trainer.framework.Loss((copied, 1.0)), trainer.opt) as scaled:
        scaled.backward()
    trainer.opt.step()


def test_steps_whose_losses_reach_nothing_warn_once_and_name_the_line_of_the_user(trainer):
    assert not unreached(lambda: [a_step_on_a_copy(trainer) for _ in range(2)])
    (warning,) = unreached(lambda: [a_step_on_a_copy(trainer) for _ in range(10)])
    assert warning.filename == __file__
    for word in ("3 steps", "copy", "between backward and step", "Make the optimizer from"):
        assert word in str(warning.message)
    assert (trainer.param.value, trainer.opt.loss_scale) == (0.0, 1024.0)


def test_gradients_that_are_cleared_before_every_step_warn(trainer):
    def step():
        trainer.backward(1.0)
        trainer.opt.zero_grad()
        trainer.opt.step()

    assert len(unreached(lambda: [step() for _ in range(10)])) == 1


def test_steps_that_find_nothing_only_now_and_then_do_not_warn(trainer):
    def steps():
        for _ in range(4):
            a_step_on_a_copy(trainer)
            a_step_on_a_copy(trainer)
            trainer.step(1.0)

    assert not unreached(steps)


def test_an_optimizer_that_stops_being_reached_warns(trainer):
    trainer.step(1.0)
    assert len(unreached(lambda: [a_step_on_a_copy(trainer) for _ in range(5)])) == 1


def test_steps_of_an_optimizer_that_no_loss_is_scaled_for_do_not_warn(amp, trainer, alpha, make_trainer):
    other = make_trainer(alpha)

    def steps():
        for _ in range(10):
            other.step(1.0)
            trainer.opt.step()

    assert not unreached(steps)
    trainer.backward(1.0)  # a batch that is left out by hand, before one that is not
    trainer.opt.zero_grad()
    trainer.step(1.0)
    assert not unreached(steps)


def test_clearing_where_no_loss_was_scaled_counts_for_none(trainer):
    def steps():
        for _ in range(10):
            trainer.opt.ampx_member.forget()  # PyTorch's wrapper does so at every zero_grad
            trainer.opt.step()

    assert not unreached(steps)


def test_an_optimizer_whose_parameters_are_frozen_does_not_warn_until_they_are_not(trainer, monkeypatch):
    with monkeypatch.context() as frozen:
        frozen.setattr(type(trainer.opt), "ampx_is_frozen", lambda self: True)
        assert not unreached(lambda: [a_step_on_a_copy(trainer) for _ in range(5)])
    assert not unreached(lambda: [a_step_on_a_copy(trainer) for _ in range(2)])
    assert len(unreached(lambda: [a_step_on_a_copy(trainer) for _ in range(5)])) == 1


def test_a_disabled_session_does_not_warn(alpha, make_trainer):
    ampx.init("alpha", enabled=False)
    trainer = make_trainer(alpha)
    assert not unreached(lambda: [a_step_on_a_copy(trainer) for _ in range(5)])


# -- unscale and clip -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0, -1.0, math.nan, "1", True, None])
def test_a_bound_that_is_none_is_refused(trainer, bound):
    trainer.backward()
    before = stand(trainer)
    with pytest.raises(ampx.InvalidOptionError, match="max_norm"):
        ampx.clip_grad_norm(trainer.opt, bound)
    assert stand(trainer) == before


@pytest.mark.parametrize("call", [ampx.unscale, ampx.state_dict, lambda opt: ampx.clip_grad_norm(opt, 1.0)])
def test_an_empty_list_is_no_optimizer(trainer, call):
    with pytest.raises(ampx.InvalidOptionError, match="empty list"):
        call([])


def test_clip_grad_norm_takes_one_optimizer(amp, alpha, make_trainer):
    with pytest.raises(ampx.InvalidOptionError, match="one optimizer"):
        ampx.clip_grad_norm([make_trainer(alpha).opt, make_trainer(alpha).opt], 1.0)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("bound", [{"max_grad_norm": 1.0}, {"max_grad_value": 1.0}])
def test_clipping_that_is_not_declared_is_refused_at_once(make_framework, make_trainer, bound, enabled):
    framework = make_framework("alpha", clipping=False)
    amp = ampx.init("alpha", enabled=enabled)
    raw = framework.Sgd(framework.Param(0.0))
    with pytest.raises(ampx.UnsupportedByBackendError, match="does not support gradient clipping"):
        ampx.wrap_optimizer(raw, **bound)
    assert amp.state_dict()["groups"] == []
    assert ampx.wrap_optimizer(raw)
    trainer = make_trainer(framework)
    trainer.backward()
    before = stand(trainer)
    with pytest.raises(ampx.UnsupportedByBackendError, match="does not support gradient clipping"):
        ampx.clip_grad_norm(trainer.opt, 1.0)
    assert stand(trainer) == before


# -- scale_loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"elements": 2}, ampx.LossShapeError),
        ({"elements": 0}, ampx.LossShapeError),
        ({"dtype": "int64"}, ampx.LossDtypeError),
        ({"attached": False}, ampx.DetachedLossError),
        ({"value": math.nan}, ampx.NonFiniteLossError),
    ],
)
def test_a_loss_that_cannot_be_scaled_is_refused(trainer, alpha, options, error):
    before = stand(trainer)
    for loss in (alpha.Loss(**options), [alpha.Loss(), alpha.Loss(**options)], {"a": (alpha.Loss(**options),)}):
        with pytest.raises(error) as caught, ampx.scale_loss(loss, trainer.opt):
            pytest.fail("the body ran")
        assert type(caught.value) is error
        assert stand(trainer) == before


@pytest.mark.parametrize("loss", [None, 1.0, "loss", [], {}, [[]]])
def test_what_is_no_loss_is_refused(trainer, loss):
    before = stand(trainer)
    with pytest.raises(ampx.LossError), ampx.scale_loss(loss, trainer.opt):
        pytest.fail("the body ran")
    assert stand(trainer) == before


def test_a_scaled_loss_without_weak_references_is_known_until_the_step(amp, trainer, alpha, monkeypatch):
    monkeypatch.setattr(alpha.Backend, "scale", lambda self, loss, scale: 0.25 * scale)  # a float, as backends may
    for _ in range(2):
        with ampx.scale_loss(alpha.Loss(), trainer.opt) as scaled:
            trainer.param.grad = 1.0
        with pytest.raises(ampx.AlreadyScaledError), ampx.scale_loss(scaled, trainer.opt):
            pytest.fail("the body ran")
    assert [held.loss for held in trainer.opt.ampx_member.held] == [scaled], "one graph at a time is kept alive"
    trainer.opt.step()
    assert trainer.opt.ampx_member.held == []
    assert [reference() for reference in amp.scaled.values() if reference() is not None] == []


def test_scaled_losses_are_not_kept_alive_and_not_remembered_for_ever(amp, trainer):
    for _ in range(300):
        trainer.step()
    gc.collect()
    assert [reference() for reference in amp.scaled.values() if reference() is not None] == []
    assert len(amp.scaled) < 100


def test_the_loss_is_scaled_in_float32_with_casting_off(trainer, alpha):
    assert alpha.casting == "float16"
    with ampx.scale_loss(alpha.Loss(dtype="float16"), trainer.opt) as scaled:
        assert (scaled.dtype, scaled.factor, alpha.casting) == ("float32", 1024.0, None)
    assert alpha.casting == "float16"


def test_a_region_used_as_the_loss_says_where_the_scaled_loss_is(trainer, alpha):
    region = ampx.scale_loss(alpha.Loss((trainer.param, 2.0)), trainer.opt)
    with pytest.raises(ampx.NotEnteredError, match=r"without with: \.backward .* as scaled: scaled\.backward\(\)"):
        region.backward()
    assert not hasattr(region, "backward")  # libraries ask so
    with region as scaled:
        scaled.backward()
    trainer.opt.step()
    assert trainer.param.value == -2.0


@pytest.mark.parametrize("call", [ampx.unscale, lambda opt: ampx.clip_grad_norm(opt, 1.0)])
def test_what_was_never_scaled_is_refused_without_speaking_of_another_call(call, trainer, alpha):
    alpha.Loss((trainer.param, 2.0)).backward()
    with pytest.raises(ampx.NotScaledError) as caught:
        call(trainer.opt)
    assert "step was called" not in str(caught.value)
    assert (trainer.param.grad, trainer.opt.loss_scale) == (2.0, 1024.0)


def test_an_exception_while_scaling_leaves_the_protocol_as_it_was(trainer, alpha):
    calls = []
    trainer.opt.__class__ = type(
        "Watched",
        (type(trainer.opt),),
        {
            "ampx_before_backward": lambda self, loss_id, scale: calls.append("before"),
            "ampx_abandon_backward": lambda self, loss_id: calls.append("abandon"),
            "ampx_after_backward": lambda self, loss_id: calls.append("after"),
        },
    )
    before = stand(trainer)
    with pytest.raises(RuntimeError, match="scaling failed"):
        ampx.scale_loss(alpha.Loss(value="broken", dtype="float32"), trainer.opt).__enter__()
    assert stand(trainer) == before
    assert alpha.casting == "float16"
    assert calls == ["before", "abandon"]
    trainer.step()
    assert calls == ["before", "abandon", "before", "after"]


def test_preparation_that_fails_for_one_optimizer_is_undone_for_the_others(amp, alpha, make_trainer):
    calls = []
    first, second = make_trainer(alpha), make_trainer(alpha)

    def prepare(self, loss_id, scale):
        if self is second.opt:
            raise RuntimeError("not me")
        calls.append("before")

    hooks = {"ampx_before_backward": prepare, "ampx_abandon_backward": lambda self, loss_id: calls.append("abandon")}
    for trainer in (first, second):
        trainer.opt.__class__ = type("Watched", (type(trainer.opt),), hooks)
    with pytest.raises(RuntimeError, match="not me"):
        ampx.scale_loss(alpha.Loss(), [first.opt, second.opt]).__enter__()
    assert calls == ["before", "abandon"]
    assert first.opt.ampx_member.stage == second.opt.ampx_member.stage == "idle"


@pytest.mark.parametrize("refused", [0, 1])
def test_a_list_refused_for_one_optimizer_leaves_the_gradients_of_all(amp, alpha, make_trainer, monkeypatch, refused):
    """Those that a step left: no float64 holds the scale times the largest."""
    trainers = [make_trainer(alpha, loss_scale=4.0) for _ in range(2)]
    for trainer in trainers:
        trainer.backward(0.1)
        trainer.opt.step()
        trainer.param.grad = 2.0**1023
    unscale = alpha.Backend.unscale

    def refuse(backend, grads, scale):
        if trainers[refused].param in grads:
            raise ampx.LowPrecisionParametersError("parameters were made float16 since")
        return unscale(backend, grads, scale)

    monkeypatch.setattr(alpha.Backend, "unscale", refuse)
    before = [stand(trainer) for trainer in trainers]
    with pytest.raises(ampx.LowPrecisionParametersError):
        ampx.scale_loss(alpha.Loss(), [trainer.opt for trainer in trainers]).__enter__()
    assert [trainer.param.grad for trainer in trainers] == [2.0**1023] * 2
    assert [stand(trainer) for trainer in trainers] == before


# -- groups ---------------------------------------------------------------------------------------------


class Pair:
    def __init__(self, alpha):
        self.alpha = alpha
        self.params = [alpha.Param(0.0), alpha.Param(0.0)]
        self.first, self.second = ampx.wrap_optimizer([alpha.Sgd(param) for param in self.params])
        self.both = [self.first, self.second]

    def backward(self, first, other, opts=None):
        terms = list(zip(self.params, (first, other), strict=True))
        with ampx.scale_loss(self.alpha.Loss(*terms), opts or self.both) as scaled:
            scaled.backward()


@pytest.fixture
def pair(amp, alpha):
    return Pair(alpha)


def test_a_member_without_gradients_does_not_hold_the_group_up(pair):
    pair.backward(INF, 1.0)
    pair.first.step()
    pair.second.zero_grad()
    assert pair.first.loss_scale == 512.0


def test_the_scale_of_a_group_is_frozen_while_a_member_is_pending(pair):
    pair.backward(INF, 1.0)
    pair.first.step()
    pair.first.zero_grad()
    # first starts its next window before second stepped: both still carry the same scale
    with ampx.scale_loss(pair.alpha.Loss((pair.params[0], 5.0)), pair.first) as scaled:
        assert scaled.factor == 1024.0
        scaled.backward()
    pair.second.step()
    assert pair.first.loss_scale == 1024.0
    pair.first.step()
    assert pair.first.loss_scale == 512.0
    assert [param.value for param in pair.params] == [-5.0, -1.0]


@pytest.mark.parametrize(("loss_scale", "warnings_expected"), [(8.0, 0), (ampx.LossScale(init_scale=8.0), 1)])
def test_a_scale_that_waits_for_ever_for_a_member_is_said_once(alpha, loss_scale, warnings_expected):
    """Overflows do not lower it: all gradients that wait carry it. A static one does not move anyway."""
    ampx.init("alpha", loss_scale=loss_scale)
    pair = Pair(alpha)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(120):
            pair.backward(INF, 1.0)
            pair.first.step()
            pair.first.zero_grad()
    assert [warning.filename for warning in caught] == [__file__] * warnings_expected
    assert all("leave it out of scale_loss" in str(warning.message) for warning in caught)
    assert pair.first.loss_scale == 8.0
    pair.second.zero_grad()
    assert pair.first.loss_scale == (4.0 if warnings_expected else 8.0)


# -- what the fuzzer found ------------------------------------------------------------------------------


def test_gradients_cleared_or_replaced_after_unscale_are_not_those_that_are_clipped(trainer):
    trainer.backward(8.0)
    ampx.unscale(trainer.opt)
    trainer.param.grad = None
    assert ampx.clip_grad_norm(trainer.opt, 2.0) == 0.0
    trainer.param.grad = 16.0
    assert ampx.clip_grad_norm(trainer.opt, 4.0) == 16.0
    trainer.opt.step()
    assert trainer.param.value == -4.0


def test_clipping_again_keeps_the_norm_that_was_measured_first(trainer):
    trainer.backward(8.0)
    assert [ampx.clip_grad_norm(trainer.opt, bound) for bound in (4.0, 2.0)] == [8.0, 4.0]
    trainer.opt.step()
    assert trainer.opt.last_step.grad_norm == 8.0


def test_a_step_of_several_losses_tells_of_the_lowest_id(trainer, alpha):
    trainer.backward(1.0, loss_id=1)
    state = ampx.state_dict()
    state["groups"][0]["losses"][0]["scale"] = 8.0
    ampx.load_state_dict(state)
    trainer.opt.step()
    trainer.opt.zero_grad()
    trainer.backward(1.0, loss_id=1)
    trainer.backward(1.0, loss_id=0)
    trainer.opt.step()
    assert (trainer.opt.last_step.scale, trainer.opt.last_step.next_scale) == (8.0, 8.0)


def test_a_step_without_gradients_is_what_last_step_tells_in_a_group_too(pair):
    pair.backward(1.0, 1.0)
    pair.first.step()
    assert pair.first.last_step.applied
    pair.first.zero_grad()
    pair.first.step()
    assert not pair.first.last_step.applied
    pair.second.step()
    assert not pair.first.last_step.applied
    assert pair.second.last_step.applied


def test_looking_at_a_step_starts_no_loss(pair, amp, alpha):
    saved = amp.state_dict()
    both = alpha.Loss(*((param, 1.0) for param in pair.params))
    with ampx.scale_loss(both, [pair.first, pair.second], loss_id=1) as scaled:
        scaled.backward()
    pair.first.step()
    amp.load_state_dict(saved)
    assert pair.first.last_step.applied
    assert amp.state_dict() == saved


def test_a_copy_of_one_member_does_not_wait_for_those_that_were_not_copied(pair, alpha):
    pair.backward(1.0, 1.0)
    pair.first.step()
    pair.first.zero_grad()
    for twin in (copy.deepcopy(pair.first), copy.deepcopy([pair.first])[0]):
        with ampx.scale_loss(alpha.Loss((twin.optimizer.params[0], INF)), twin) as scaled:
            scaled.backward()
        twin.step()
        assert twin.loss_scale == pair.first.loss_scale / 2


def test_a_list_that_is_copied_whole_shares_its_scale(pair, alpha):
    pair.backward(1.0, INF)
    first, second = copy.deepcopy([pair.first, pair.second])
    first.step()
    assert first.loss_scale == 1024.0
    second.step()
    assert first.loss_scale == second.loss_scale == 512.0


def test_the_scale_does_not_wait_for_an_optimizer_that_is_gone(pair):
    pair.backward(INF, 1.0)
    del pair.second, pair.both
    gc.collect()
    pair.first.step()
    assert pair.first.loss_scale == 512.0


def test_the_events_of_a_copy_are_sent(trainer, alpha):
    seen = []
    ampx.on_event(seen.append)
    twin = copy.deepcopy(trainer.opt)
    with ampx.scale_loss(alpha.Loss((twin.optimizer.params[0], INF)), twin) as scaled:
        scaled.backward()
    twin.step()
    assert [type(event) for event in seen] == [ampx.StepSkipped, ampx.ScaleChanged]


def test_a_shallow_copy_is_refused_for_it_would_wrap_the_same_optimizer_again(trainer):
    with pytest.raises(ampx.AlreadyWrappedError, match="deepcopy"):
        copy.copy(trainer.opt)
    assert trainer.step(2.0).applied


# -- copies, threads, the end --------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["idle", "scaled", "unscaled"])
def test_a_deep_copy_steps_on_its_own(trainer, alpha, stage):
    trainer.step(INF)
    if stage != "idle":
        trainer.backward(2.0)
    if stage == "unscaled":
        ampx.unscale(trainer.opt)
    twin = copy.deepcopy(trainer.opt)
    (param,) = twin.optimizer.params
    if stage == "idle":
        with ampx.scale_loss(alpha.Loss((param, 2.0)), twin) as scaled:
            scaled.backward()
    twin.step()
    assert (param.value, trainer.param.value) == (-2.0, 0.0)
    assert twin.loss_scale == 512.0
    assert trainer.opt.ampx_member.stage == stage
    assert trainer.opt.ampx_member.group is not twin.ampx_member.group


def test_a_group_survives_pickling_with_its_state(amp, trainer):
    trainer.step(INF)
    trainer.backward()
    member = pickle.loads(pickle.dumps(trainer.opt.ampx_member))
    assert (member.stage, member.factor) == ("scaled", 512.0)
    assert member.group.states == trainer.opt.ampx_member.group.states
    member.finish({0: False})
    assert member.group.states[0].scale == 256.0
    assert trainer.opt.loss_scale == 512.0


def test_a_wrapper_prints_the_raw_optimizer_and_the_configuration_of_its_scale(trainer):
    assert repr(trainer.opt).startswith(f"GenericOptimizer({trainer.raw!r}, LossScale(init_scale=1024.0, ")


def test_attributes_reach_the_raw_optimizer_in_both_directions(trainer):
    trainer.opt.lr = 0.5
    assert (trainer.raw.lr, trainer.opt.lr) == (0.5, 0.5)
    trainer.step(2.0)
    assert trainer.param.value == -1.0
    with pytest.raises(AttributeError):
        trainer.opt.loss_scale = 3.0
    with pytest.raises(AttributeError):
        _ = trainer.opt.no_such_attribute


def test_threads_train_their_own_optimizers(amp, alpha, make_trainer):
    trainers = [make_trainer(alpha) for _ in range(4)]
    failures = []

    def train(trainer, gradient):
        try:
            for _ in range(50):
                trainer.step(gradient)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(each, 2.0**-place)) for place, each in enumerate(trainers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [each.param.value for each in trainers] == [-50.0, -25.0, -12.5, -6.25]


def test_another_thread_may_scale_and_forget_losses_while_this_one_forgets_its_own(amp, trainer):
    def in_another_thread(key):
        def look():
            amp.scaled[1000 + key] = lambda: None
            amp.scaled.pop(key, None)

        return look

    amp.scaled.update({key: in_another_thread(key) for key in range(100)})
    assert trainer.step().applied
    assert amp.scaled.keys().isdisjoint(range(100))


# -- disabled and explicit ----------------------------------------------------------------------------


def test_disabled_still_clips(alpha, make_trainer):
    ampx.init("alpha", enabled=False)
    bounded, called = make_trainer(alpha, max_grad_norm=2.0), make_trainer(alpha)
    bounded.step(8.0)
    called.backward(8.0)
    assert ampx.clip_grad_norm(called.opt, 2.0) == 8.0
    called.opt.step()
    assert (bounded.param.value, called.param.value) == (-2.0, -2.0)
    called.opt.zero_grad()
    called.step(1.0)
    assert called.param.value == -3.0


class Vector:
    """Gradients as one value whose truth is ambiguous, as an array's is."""

    def __init__(self, *values):
        self.values = values

    def __iter__(self):
        return iter(self.values)

    def __bool__(self):
        raise ValueError("the truth value of an array is ambiguous")


def test_explicit_gradients_are_given_to_step(make_framework, make_trainer):
    delta = make_framework("delta", gradients="explicit")
    ampx.init("delta", loss_scale=ampx.LossScale(init_scale=8))
    trainer = make_trainer(delta)
    trainer.backward(2.0)
    trainer.opt.step(Vector(trainer.param.grad))
    assert trainer.param.value == -2.0
    with pytest.raises(ampx.NotScaledError):
        trainer.opt.step([16.0])
    with pytest.raises(ampx.ProtocolError, match="gradients as values"):
        ampx.unscale(trainer.opt)


def test_a_step_whose_flag_cannot_be_read_is_not_repeated_on_values_that_were_passed(
    make_framework, make_trainer, monkeypatch
):
    class Flag:
        def __bool__(self):
            raise RuntimeError("the device failed")

    delta = make_framework("delta", gradients="explicit")
    ampx.init("delta", loss_scale=ampx.LossScale(init_scale=8))
    trainer, unscale = make_trainer(delta), delta.Backend.unscale
    trainer.backward(2.0)
    monkeypatch.setattr(delta.Backend, "unscale", lambda *args: unscale(*args)._replace(finite=Flag()))
    with pytest.raises(RuntimeError, match="device"):
        trainer.opt.step([16.0])
    monkeypatch.setattr(delta.Backend, "unscale", unscale)
    with pytest.raises(ampx.ProtocolError, match="zero_grad"):
        trainer.opt.step([16.0])
    assert trainer.param.value == 0.0
    trainer.opt.zero_grad()
    trainer.backward(2.0)
    trainer.opt.step([16.0])
    assert trainer.param.value == -2.0


class Sharing:
    """Two optimizers over a parameter of their own and one that they share; `amp` False for plain training."""

    def __init__(self, framework, amp, scale=8.0):
        self.framework, self.amp = framework, amp
        self.params = [framework.Param(float(value)) for value in (1, 2, 3)]
        first, second, shared = self.params
        raws = [framework.Sgd(first, shared), framework.Sgd(shared, second)]
        self.opts = [ampx.wrap_optimizer(raw, loss_scale=scale) for raw in raws] if amp else raws

    def loss(self, number=1.0):
        return self.framework.Loss(
            *((param, number * slope) for param, slope in zip(self.params, (1, 4, 2), strict=True))
        )

    def backward(self, loss, *which):
        if not self.amp:
            loss.backward()
            return
        with ampx.scale_loss(loss, [self.opts[index] for index in which]) as scaled:
            scaled.backward()

    def unscale(self, index):
        if self.amp:
            ampx.unscale(self.opts[index])

    def clip(self, index, norm):
        if self.amp:
            ampx.clip_grad_norm(self.opts[index], norm)
        else:
            self.framework.Backend.clip(None, self.opts[index].params, norm, None)

    def step(self, index):
        self.opts[index].step() if self.amp else self.opts[index].update()

    def zero_grad(self, *which):
        for index in which or range(2):
            if self.amp:
                self.opts[index].zero_grad()
            else:
                self.framework.Backend.zero_gradients(None, self.opts[index])


# What a loss leaves on parameters of an optimizer that it was not scaled for, the user clears: see `watches_others`.
CLEARED = [script for script in SCRIPTS if script is not left_from_before]


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("script", CLEARED, ids=lambda script: script.__name__)
def test_a_gradient_that_two_optimizers_share_is_never_divided_twice(amp, alpha, script, scale):
    """Every step sees what plain training sees, or is refused and leaves the weights as they are."""
    plain, scaled = Sharing(alpha, amp=False), Sharing(alpha, amp=True, scale=scale)
    expected = [param.value for param in plain.params]
    if scale != 1.0 and script is not one_after_the_other:
        with pytest.raises(ampx.ProtocolError, match="two wrapped optimizers hold one parameter"):
            script(scaled)
    else:
        script(plain)
        script(scaled)
        expected = [param.value for param in plain.params]
    assert [param.value for param in scaled.params] == pytest.approx(expected)
    scaled.zero_grad()
    one_after_the_other(scaled)
    assert scaled.opts[0].last_step.applied
