"""Sessions: what init chooses and refuses, which session a call finds, and what shutdown restores."""

import collections
import contextlib
import functools
import gc
import math
import re
import sys
import threading
import types

import pytest

import ampx
from ampx.backend import Forcing
from ampx.optimizer import GenericOptimizer
from ampx.session import sessions

INF = math.inf


# -- init -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dtype", "dynamic", "casting"),
    [
        ({}, "float16", True, "float16"),
        ({"dtype": "bf16"}, "bfloat16", False, "bfloat16"),
        ({"dtype": "half", "loss_scale": 128}, "float16", False, "float16"),
        ({"dtype": "bfloat16", "loss_scale": "dynamic"}, "bfloat16", True, "bfloat16"),
        ({"device": "chip"}, "bfloat16", False, "bfloat16"),
        ({"level": "O0"}, None, False, None),
        ({"dtype": "float32"}, None, False, None),
        ({"level": "O0", "dtype": "float16"}, None, False, None),
        ({"enabled": False}, None, False, None),
        ({"process_wide": False}, "float16", True, None),
    ],
)
def test_what_init_chooses(alpha, options, dtype, dynamic, casting):
    amp = ampx.init("alpha", **options)
    assert (amp.effective.dtype, amp.effective.loss_scale.dynamic, alpha.casting) == (dtype, dynamic, casting)
    assert amp.effective.policy.compute_dtype == (dtype or "float32")
    assert amp.effective.reason
    ampx.shutdown()
    assert alpha.casting is None


def test_auto_without_hardware_is_off_with_one_warning(alpha):
    with pytest.warns(ampx.PrecisionWarning, match="off on slow: it has no hardware") as caught:
        amp = ampx.init("alpha", device="slow")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert (amp.effective.dtype, alpha.casting) == (None, None)


def test_an_emulated_dtype_is_used_with_one_warning(alpha):
    with pytest.warns(ampx.PrecisionWarning, match="emulated and slow") as caught:
        amp = ampx.init("alpha", device="slow", dtype="bfloat16")
    assert len(caught) == 1
    assert (amp.effective.dtype, amp.effective.native) == ("bfloat16", False)


def test_an_unsupported_dtype_falls_back_only_when_asked(alpha):
    with pytest.raises(ampx.UnsupportedDtypeError, match=r"'float16'.*supported: bfloat16"):
        ampx.init("alpha", device="chip", dtype="float16")
    with pytest.warns(ampx.PrecisionWarning, match="falling back to bfloat16"):
        amp = ampx.init("alpha", device="chip", dtype="float16", on_unsupported="warn")
    assert amp.effective.dtype == "bfloat16"
    with pytest.warns(ampx.PrecisionWarning, match="falling back to float32"):
        amp = ampx.init("alpha", device="old", dtype="float16", on_unsupported="warn")
    assert amp.effective.dtype is None


class Odd:
    """Compares like a numpy dtype: with what it does not know, it raises."""

    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        raise TypeError(f"{other!r} not understood")

    __hash__ = None


def test_a_dtype_object_that_cannot_be_compared_with_text_is_read(alpha):
    assert ampx.init("alpha", dtype=Odd("bfloat16")).effective.dtype == "bfloat16"
    with pytest.raises(ampx.InvalidOptionError):
        ampx.init("alpha", loss_scale=Odd("auto"))


FAILURES = [
    ({"framework": "gamma"}, ampx.UnknownFrameworkError),
    ({"framework": 5}, ampx.UnknownFrameworkError),
    ({"framework": None}, ampx.AmbiguousFrameworkError),
    ({"dtype": "float64"}, ampx.UnsupportedDtypeError),
    ({"dtype": None}, ampx.UnsupportedDtypeError),
    ({"dtype": "float16", "device": "chip"}, ampx.UnsupportedDtypeError),
    ({"level": "O9"}, ampx.UnsupportedLevelError),
    ({"level": "O2"}, ampx.UnsupportedByBackendError),
    ({"device": "tpu"}, ampx.UnsupportedDeviceError),
    ({"loss_scale": "static"}, ampx.InvalidOptionError),
    ({"loss_scale": -1}, ampx.InvalidOptionError),
    ({"loss_scale": True}, ampx.InvalidOptionError),
    ({"loss_scale": None}, ampx.InvalidOptionError),
    ({"on_unsupported": "ignore"}, ampx.InvalidOptionError),
    ({"nan_loss": "ignore"}, ampx.InvalidOptionError),
    ({"allow": "matmul"}, ampx.InvalidOptionError),
    ({"deny": 3}, ampx.InvalidOptionError),
    ({"allow": "matmul", "enabled": False}, ampx.InvalidOptionError),
    ({"deny": ["nonsense"]}, ampx.UnsupportedOpError),
    ({"enabled": "False"}, ampx.InvalidOptionError),
    ({"process_wide": "no"}, ampx.InvalidOptionError),
]


@pytest.mark.parametrize(("options", "error"), FAILURES, ids=lambda value: str(value)[:50])
def test_a_refused_init_leaves_the_former_session(alpha, make_trainer, options, error):
    former = ampx.init("alpha", dtype="bfloat16", loss_scale="dynamic")
    trainer = make_trainer(alpha)
    with pytest.raises(error) as caught:
        ampx.init(**{"framework": "alpha", **options})
    assert type(caught.value) is error
    assert ampx.current() is former
    assert alpha.casting == "bfloat16"
    assert trainer.step(2.0).applied


def test_a_framework_that_refuses_to_be_activated_leaves_the_former_session(alpha, make_trainer):
    former = ampx.init("alpha", dtype="bfloat16", process_wide=False)
    alpha.refuses_activation = True
    with pytest.raises(RuntimeError, match="said no"):
        ampx.init("alpha")
    assert ampx.current() is former
    assert make_trainer(alpha).step(2.0).applied
    with former.autocast():
        assert alpha.casting == "bfloat16"
    former.shutdown()
    assert sessions.all_sessions() == []


def test_an_option_list_may_be_a_generator(alpha):
    amp = ampx.init("alpha", allow=(name for name in ("matmul", "conv")))
    assert amp.plan.allow == ("matmul", "conv")


@pytest.mark.parametrize("off", [{"level": "O0"}, {"dtype": "float32"}, {"device": "slow"}, {"device": "old"}])
@pytest.mark.parametrize("option", ["allow", "deny"])
@pytest.mark.filterwarnings("ignore:mixed precision is off:ampx.PrecisionWarning")
def test_op_lists_are_checked_with_casting_off_too(alpha, off, option):
    with pytest.raises(ampx.UnsupportedOpError):
        ampx.init("alpha", **off, **{option: ["nonsense"]})
    amp = ampx.init("alpha", **off, **{option: ["matmul"]})
    assert (amp.plan, alpha.casting) == (None, None)
    ampx.init("alpha", enabled=False, **off, **{option: ["nonsense"]})


def test_op_lists_are_refused_with_casting_off_where_there_are_none(make_framework):
    framework = make_framework("alpha", op_lists=False)
    framework.Backend.check_plan = ampx.Backend.check_plan
    with pytest.raises(ampx.UnsupportedByBackendError, match="op lists"):
        ampx.init("alpha", level="O0", deny=["exp"])


def test_denied_modules_are_forced_into_float32_as_long_as_the_session_lasts(make_framework, monkeypatch):
    gamma = make_framework("gamma", op_lists=False)
    log = []

    @contextlib.contextmanager
    def force(backend, model, dtypes):
        if model == "other":
            raise ampx.UnsupportedOpError("nowhere")
        log.append(("enter", model, dtypes))
        yield
        log.append(("leave", model, dtypes))

    monkeypatch.setattr(gamma.Backend, "offers", {"probe": type("Forces", (Forcing,), {"force": force})})
    for verb in ("check_plan", "prepare"):
        monkeypatch.setattr(gamma.Backend, verb, getattr(ampx.Backend, verb))
    amp = ampx.init("gamma", dtype="float16", deny=["module:head.*"])
    entered = [("enter", None, {"head.*": "float32"})]
    assert log == entered
    assert amp.prepare("model") == "model"
    assert log[1:] == [(word, "model", {"head.*": "float32"}) for word in ("enter", "leave")]
    with pytest.raises(ampx.UnsupportedOpError, match="nowhere"):
        amp.prepare("other", "opt")
    del log[1:]
    for refused in ({"allow": ["module:head"]}, {"deny": ["module:head", "relu"]}):
        with pytest.raises(ampx.UnsupportedByBackendError, match="beyond 'module:name' in deny"):
            ampx.init("gamma", dtype="float16", **refused)
    assert log == entered
    ampx.shutdown()
    assert log == [*entered, ("leave", None, {"head.*": "float32"})]
    ampx.init("gamma", dtype="float16", deny=["module:head.*"], enabled=False)
    assert len(log) == 2


def test_the_imported_framework_is_guessed(alpha, beta, monkeypatch):
    monkeypatch.setitem(sys.modules, "beta", types.ModuleType("beta"))
    assert ampx.init().framework == "beta"


# -- wrap_optimizer ---------------------------------------------------------------------------------------


def test_a_list_is_wrapped_as_a_whole_or_not_at_all(alpha, monkeypatch):
    amp = ampx.init("alpha")
    wrap, undone = alpha.Backend.wrap_optimizer, []

    class Hooked(GenericOptimizer):
        def ampx_unwrap(self):
            undone.append(self.optimizer)

    def refuse_the_slow(self, optimizer, member, options):
        if optimizer.lr == 0.0:
            raise ampx.LowPrecisionParametersError("the third is refused")
        return Hooked(self, optimizer, member, options)

    first, second, slow = alpha.Sgd(), alpha.Sgd(), alpha.Sgd(lr=0.0)
    monkeypatch.setattr(alpha.Backend, "wrap_optimizer", refuse_the_slow)
    with pytest.raises(ampx.LowPrecisionParametersError):
        ampx.wrap_optimizer([first, second, slow])
    assert undone == [second, first]
    assert amp.state_dict()["groups"] == []
    monkeypatch.setattr(alpha.Backend, "wrap_optimizer", wrap)
    assert len(ampx.wrap_optimizer([first, second, slow])) == 3


def test_what_is_no_optimizer_is_refused(alpha, beta):
    ampx.init("alpha")
    for wrong in (None, "sgd", beta.Sgd(), object(), [alpha.Sgd(), None], []):
        with pytest.raises(ampx.NotAnOptimizerError):
            ampx.wrap_optimizer(wrong)
    assert ampx.state_dict()["groups"] == []


def test_a_class_in_the_place_of_an_optimizer_is_named(alpha):
    ampx.init("alpha")
    with pytest.raises(ampx.NotAnOptimizerError, match=r"the class \S*Sgd, .*made with its parameters"):
        ampx.wrap_optimizer(alpha.Sgd)


def test_a_session_prints_what_it_does(alpha):
    amp = ampx.init("alpha", dtype="bfloat16")
    assert re.match(r"<ampx\.Amp: alpha in bfloat16 on \w+, O1; .+>", repr(amp))
    amp.shutdown()
    assert repr(amp).endswith("; shut down>")
    assert repr(ampx.init("alpha", enabled=False)).endswith("in float32 on cpu, O1; enabled=False>")


def test_a_wrapper_of_a_former_session_is_refused_and_its_raw_optimizer_can_be_wrapped_anew(alpha, make_trainer):
    ampx.init("alpha")
    trainer = make_trainer(alpha)
    ampx.init("alpha")
    with pytest.raises(ampx.AlreadyWrappedError, match=r"init was called again.*Wrap the raw optimizer anew"):
        ampx.wrap_optimizer(trainer.opt)
    assert ampx.wrap_optimizer(trainer.raw).optimizer is trainer.raw


@pytest.mark.parametrize(
    "options",
    [
        {"loss_scale": "static"},
        {"loss_scale": 0},
        {"max_grad_norm": 0},
        {"max_grad_value": "1"},
        {"process_group": None},
        {"max_grad_nrom": 1.0},
        {"plan": None},
        {"level": None},
    ],
)
def test_an_unknown_or_absurd_option_is_refused(alpha, options):
    amp = ampx.init("alpha")
    raw = alpha.Sgd()
    with pytest.raises(ampx.InvalidOptionError):
        ampx.wrap_optimizer(raw, **options)
    assert amp.live_groups() == []
    assert amp.wrap_optimizer(raw).optimizer is raw


def test_dead_optimizers_leave_the_state_and_the_positions_of_the_others_fit(alpha, make_trainer):
    amp = ampx.init("alpha")
    seen = []
    ampx.on_event(seen.append)
    first, second = make_trainer(alpha), make_trainer(alpha, loss_scale=ampx.LossScale(init_scale=8))
    del first
    gc.collect()
    third = make_trainer(alpha, loss_scale=ampx.LossScale(init_scale=4))
    assert [group["config"]["init_scale"] for group in amp.state_dict()["groups"]] == [8, 4]
    second.step(INF)
    third.step(INF)
    assert [event.group for event in seen if isinstance(event, ampx.StepSkipped)] == [0, 1]


# -- which session ----------------------------------------------------------------------------------------


def test_two_frameworks_train_side_by_side_by_the_same_functions(alpha, beta, make_trainer):
    there, here = ampx.init("alpha", loss_scale=8), ampx.init("beta", loss_scale=16)
    first, other = make_trainer(alpha), make_trainer(beta)
    assert (first.step(2.0).scale, other.step(3.0).scale) == (8.0, 16.0)
    assert (first.param.value, other.param.value) == (-2.0, -3.0)
    assert ampx.state_dict(other.opt)["framework"] == "beta"
    assert ampx.wrap_optimizer([beta.Sgd()])[0].ampx_member.group.framework == "beta"
    with pytest.raises(ampx.NotInitializedError, match="alpha, beta"):
        ampx.state_dict()
    assert ampx.current("alpha") is there
    ampx.shutdown("alpha")
    assert sessions.all_sessions() == [here]
    assert (alpha.casting, beta.casting) == (None, "float16")


def test_the_only_session_is_not_taken_for_another_frameworks(alpha, beta, make_trainer):
    ampx.init("alpha")
    trainer = make_trainer(alpha)
    ampx.shutdown()
    ampx.init("beta")
    with pytest.raises(ampx.NotInitializedError, match="active sessions: beta"):
        trainer.backward()
    with pytest.raises(ampx.NotInitializedError):
        ampx.current("alpha")


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: (1, x), lambda x: {"a": None, "b": [x]}, lambda x: [[], {}, x]]
)
def test_objects_are_recognised_inside_containers_without_importing(alpha, beta, wrap):
    ampx.init("alpha")
    session = ampx.init("beta")
    before = set(sys.modules)
    assert sessions.find("test", wrap(beta.Param(0.0))) is session
    assert set(sys.modules) == before


def test_subclasses_belong_to_the_framework_of_their_base(alpha, beta):
    class Mine(beta.Sgd):
        pass

    ampx.init("alpha")
    session = ampx.init("beta")
    assert sessions.find("test", Mine()) is session


def test_a_named_tuple_of_a_framework_belongs_to_it_whatever_it_holds(alpha, beta):
    """As optax's transformations: named tuples of functions, which belong to nobody."""
    kind = collections.namedtuple("Transformation", ["init", "update"], module="beta.core")
    ampx.init("alpha")
    session = ampx.init("beta")
    transformation = kind(lambda params: None, lambda *arguments: None)
    assert sessions.find("test", transformation) is session
    assert sessions.find("test", [transformation]) is session


def test_a_gate_over_a_function_finds_the_session_of_what_it_gives(alpha, make_framework, monkeypatch):
    ampx.init("alpha")
    gamma = make_framework("gamma")
    handle = types.SimpleNamespace(last_step=ampx.StepResult(True, True, 8.0, 8.0, 0, None))
    monkeypatch.setattr(gamma.Backend, "state_handle", lambda self, state, call: handle)
    ampx.init("gamma")
    stepped, state = [], gamma.Param(1.0)
    scheduler = types.SimpleNamespace(step=lambda: stepped.append(1))
    assert ampx.gate(scheduler, lambda: state).step() is True
    for followed in ([lambda: state], (lambda: state,), functools.partial(lambda: state)):
        assert ampx.gate(scheduler, followed).step() is True
    assert stepped == [1] * 4
    with pytest.raises(ampx.NotWrappedError, match="function"):
        ampx.current("gamma").gate(scheduler, state)


def test_a_framework_that_no_plugin_registers_is_not_shut_down_in_silence(alpha, beta):
    amp = ampx.init("alpha")
    with pytest.raises(ampx.UnknownFrameworkError, match="alhpa"):
        ampx.shutdown("alhpa")
    ampx.shutdown("beta")  # registered, and without a session
    assert ampx.current() is amp


def test_what_belongs_to_nobody_is_refused_with_two_sessions(alpha, beta):
    ampx.init("alpha")
    ampx.init("beta")
    for stranger in (object(), 3, [], {"a": 1}, None):
        with pytest.raises(ampx.NotInitializedError, match="test found no session"):
            sessions.find("test", stranger)


def test_shutdown_of_all_reaches_everyone_even_when_one_fails(alpha, beta, monkeypatch):
    ampx.init("alpha")
    ampx.init("beta")

    def fail(self, plan):
        raise RuntimeError("stuck")

    monkeypatch.setattr(alpha.Backend, "deactivate", fail)
    with pytest.raises(RuntimeError, match="stuck"):
        ampx.shutdown()
    assert beta.casting is None
    assert sessions.all_sessions() == []


def test_shutdown_restores_the_framework_even_when_a_listener_fails(alpha, make_trainer, monkeypatch):
    amp = ampx.init("alpha")
    trainers, resolved = [make_trainer(alpha), make_trainer(alpha)], []
    group = type(trainers[0].opt.ampx_member.group)
    # Events still due reach a listener that raises.
    monkeypatch.setattr(group, "resolve", lambda self: resolved.append(self) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        amp.shutdown()
    assert len(resolved) == len(trainers)
    assert alpha.casting is None
    assert sessions.all_sessions() == []


@pytest.mark.parametrize("fails", ["ending", "backend"])
def test_shutdown_calls_all_that_wait_for_it_even_when_one_fails(alpha, monkeypatch, fails):
    amp, called = ampx.init("alpha"), []
    amp.at_shutdown(lambda: called.append("first"))
    if fails == "ending":
        amp.at_shutdown(lambda: 1 / 0)
    else:
        monkeypatch.setattr(alpha.Backend, "deactivate", lambda self, plan: 1 / 0)
    amp.at_shutdown(lambda: called.append("last"))
    with pytest.raises(ZeroDivisionError):
        amp.shutdown()
    amp.shutdown()
    assert called == ["last", "first"]
    assert sessions.all_sessions() == []


# -- casting ----------------------------------------------------------------------------------------------


def test_a_region_with_another_dtype_keeps_the_op_lists(alpha):
    ampx.init("alpha", allow=["matmul"], deny=["exp"])
    with ampx.autocast(dtype="bfloat16"):
        pass
    assert (alpha.plans[-1].dtype, alpha.plans[-1].allow, alpha.plans[-1].deny) == ("bfloat16", ("matmul",), ("exp",))


@pytest.mark.parametrize("dtype", ["float64", 16])
def test_a_region_refuses_an_unknown_dtype_at_once(alpha, dtype):
    ampx.init("alpha")
    with pytest.raises(ampx.UnsupportedDtypeError):
        ampx.autocast(dtype=dtype)


@pytest.mark.parametrize("first", ["cuda", "float16", len, None])
def test_a_region_refuses_what_stands_first_in_other_libraries(alpha, first):
    amp = ampx.init("alpha")
    for autocast in (ampx.autocast, amp.autocast):
        with pytest.raises(ampx.InvalidOptionError, match=r"enabled=.* dtype=.* @ampx\.autocast\(\)"):
            autocast(first)


def test_a_region_refuses_a_dtype_the_device_cannot_compute(alpha):
    ampx.init("alpha", device="chip")
    with pytest.raises(ampx.UnsupportedDtypeError, match="supported: bfloat16"), ampx.autocast(dtype="float16"):
        pytest.fail("the body ran")
    with ampx.autocast(dtype="float32"):
        assert alpha.casting is None
    assert alpha.casting == "bfloat16"


def test_one_region_object_serves_several_threads(alpha):
    log = []

    class Watched:
        def __enter__(self):
            self.thread = threading.get_ident()

        def __exit__(self, *_):
            log.append(self.thread == threading.get_ident())

    from ampx.annotate import Region

    region, entered, leave = Region(Watched), threading.Event(), threading.Event()

    def other():
        with region:
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with region:
        thread.start()
        entered.wait(10)
    leave.set()
    thread.join()
    assert log == [True, True]


def test_regions_left_in_another_order_leave_what_they_entered():
    from ampx.annotate import Region

    log = []

    class Watched:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            log.append(f"+{self.name}")

        def __exit__(self, *_):
            log.append(f"-{self.name}")

    first, other = Region(lambda: Watched("one")), Region(lambda: Watched("other"))
    first.__enter__()
    other.__enter__()
    first.__enter__()
    first.__exit__(None, None, None)
    first.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert log == ["+one", "+other", "+one", "-one", "-one", "-other"]


def test_decorated_functions_run_inside_the_region_of_the_moment(alpha):
    @ampx.autocast(enabled=False)
    def look():
        """Documented."""
        return alpha.casting

    ampx.init("alpha")
    assert (look(), alpha.casting, look.__doc__) == (None, "float16", "Documented.")


def test_annotated_functions_cast_their_arguments_with_casting_off(alpha):
    def look(*args, **kwargs):
        return args, kwargs, alpha.casting

    floating, half, promote = ampx.float_function(look), ampx.half_function(look), ampx.promote_function(look)
    assert half("x", 1, key="y") == (("x", 1), {"key": "y"}, None)  # without a session: as it is
    ampx.init("alpha")
    assert floating("x", 1, key="y") == (("x:float32", 1), {"key": "y:float32"}, None)
    assert half("x") == (("x:float16",), {}, None)
    assert promote("x") == (("x:float16",), {}, None)
    assert promote("x", "float32") == (("x:float32", "float32:float32"), {}, None)
    assert half.__wrapped__ is look
    assert alpha.casting == "float16"
    ampx.shutdown()
    assert half("x") == (("x",), {}, None)


def generator():
    yield


async def coroutine():
    pass


@pytest.mark.parametrize("decorate", [ampx.autocast(), ampx.float_function, ampx.half_function])
@pytest.mark.parametrize("later", [generator, coroutine, type("Model", (), {})])
def test_a_function_whose_body_runs_later_is_not_decorated_in_vain(decorate, later):
    with pytest.raises(ampx.InvalidOptionError, match="when the region has ended"):
        decorate(later)


def test_no_model_cannot_be_prepared(alpha):
    with pytest.raises(ampx.InvalidOptionError, match="None as the model"):
        ampx.init("alpha").prepare(None, object())
    assert ampx.init("alpha", enabled=False).prepare(None) is None


def test_after_shutdown_the_sessions_regions_do_nothing(alpha):
    amp = ampx.init("alpha")
    amp.shutdown()
    with amp.autocast():
        assert alpha.casting is None
    amp.enter_thread()
    assert alpha.casting is None
    assert amp.half_function(lambda x: x)("x") == "x"


def test_enter_thread_switches_on_only_process_wide_sessions(alpha, beta):
    ampx.init("alpha")
    ampx.init("beta", process_wide=False)
    alpha.casting = beta.casting = None  # what a new thread sees
    ampx.enter_thread()
    assert (alpha.casting, beta.casting) == ("float16", None)


def test_enter_thread_without_a_session_says_that_there_is_nothing_to_switch_on(alpha):
    with pytest.raises(ampx.NotInitializedError, match="enter_thread found no session"):
        ampx.enter_thread()
    ampx.init("alpha", enabled=False)
    ampx.enter_thread()
    assert alpha.casting is None


def test_a_call_that_several_sessions_could_answer_names_them(alpha, beta):
    ampx.init("alpha")
    ampx.init("beta")
    with pytest.raises(ampx.NotInitializedError, match=r"several sessions: alpha, beta; .*ampx\.current"):
        ampx.state_dict()
    with pytest.raises(ampx.NotInitializedError, match="no session of 'gamma'; active sessions: alpha, beta"):
        ampx.current("gamma")


def test_enter_thread_of_a_session_that_was_replaced_is_refused(alpha):
    first = ampx.init("alpha")
    ampx.init("alpha", dtype="bfloat16")
    alpha.casting = None  # what a new thread sees
    with pytest.raises(ampx.ProtocolError, match="replaced"):
        first.enter_thread()
    assert alpha.casting is None


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_prepare_returns_what_it_was_given_where_the_level_needs_nothing(alpha, level):
    amp = ampx.init("alpha", level=level)
    model, opt = object(), object()
    assert amp.prepare(model) is model
    assert amp.prepare(model, opt) == (model, opt)
