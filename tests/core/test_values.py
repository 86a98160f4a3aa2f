"""The calls that also take optimizer state as a value, given optimizer objects; values are the kit's and JAX's part."""

import types

import pytest

import ampx
from ampx.testing.bench import OVERFLOW, Bench
from toy import plugin
from toy.harness import ImplicitToyHarness


@pytest.fixture
def bench():
    if "toy" not in ampx.backends():
        ampx.register_plugin(plugin)
    yield Bench(ImplicitToyHarness()).wrap(ampx.init("toy", dtype="float16", loss_scale="dynamic"))
    ampx.shutdown()


def test_last_step_and_loss_scale_are_those_of_the_optimizer(bench):
    assert ampx.last_step(bench.opt) is None
    bench.train(OVERFLOW)
    assert ampx.last_step(bench.opt) == bench.opt.last_step == ampx.StepResult(False, False, 65536.0, 32768.0, 1)
    assert ampx.loss_scale(bench.opt) == bench.opt.loss_scale == 32768.0


def test_observe_sends_nothing_twice(bench):
    seen = []
    ampx.on_event(seen.append)
    bench.train(OVERFLOW)
    before = list(seen)
    assert ampx.observe(bench.opt) == bench.opt.last_step
    assert seen == before


def test_loading_gives_the_optimizer_back(bench):
    assert ampx.load_state_dict(ampx.state_dict(), bench.opt) is bench.opt


@pytest.mark.parametrize("call", [ampx.last_step, ampx.loss_scale, ampx.observe])
def test_a_raw_optimizer_is_refused(bench, call):
    with pytest.raises(ampx.NotWrappedError, match="did not return"):
        call(bench.raw)
    with pytest.raises(ampx.InvalidOptionError, match="list of 2"):
        call([bench.opt, bench.opt])


def test_a_gate_takes_a_function_that_gives_the_optimizer(bench):
    stepped = []
    gate = ampx.gate(types.SimpleNamespace(step=lambda: stepped.append(1)), lambda: bench.opt)
    bench.train(OVERFLOW)
    assert gate.step() is False
    bench.train()
    assert gate.step() is True
    assert stepped == [1]
