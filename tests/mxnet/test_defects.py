"""Defects of plain MXNet (each shown in a process of its own), and the right result through ampx."""

import math

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

import ampx
from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE

CONTEXTS = [mx.cpu(0), mx.cpu(1)]
NATIVE = """
def make(*contexts, dtype="float32", name="w", **options):
    w = gluon.Parameter(name, shape=(1,), init="ones", dtype=dtype)
    w.initialize(ctx=list(contexts) or None)
    trainer = gluon.Trainer({name: w}, "sgd", {"learning_rate": 1.0}, **options)
    amp.init_trainer(trainer)
    return w, trainer
def backward(trainer, *losses):
    with amp.scale_loss(list(losses), trainer) as scaled:
        autograd.backward(scaled)
amp.init("bfloat16")
"""


class TestDefect14UpdateOnKvstoreWritesInfBeforeTheCheck:
    def test_native(self, native):
        code, out, err = native(
            NATIVE
            + """
contexts = mx.cpu(0), mx.cpu(1)
w, trainer = make(*contexts)
with autograd.record():
    backward(trainer, *[w.data(one).sum() * factor for one, factor in zip(contexts, (1.0, np.inf))])
trainer.step(1)
print(trainer._update_on_kvstore, *[w.data(one).asscalar() for one in contexts])
"""
        )
        assert code == 0, err
        assert out.split()[-3:] == ["True", "-inf", "-inf"]

    def test_ampx_refuses_a_trainer_that_updates_on_its_kvstore_already(self, amp, weights):
        """Its weights live in the store, and the choice was made with the first step."""
        parameter = weights(1.0, ctx=CONTEXTS)
        raw = gluon.Trainer({"w": parameter}, "sgd", {"learning_rate": 0.25})
        with autograd.record():
            losses = [parameter.data(c).sum() for c in CONTEXTS]
        autograd.backward(losses)
        raw.step(1)
        assert raw._update_on_kvstore is True
        with pytest.raises(ampx.AmpxError, match="update_on_kvstore"):
            amp.wrap_optimizer(raw)
        assert [parameter.data(c).asscalar() for c in CONTEXTS] == [0.5, 0.5]


@pytest.mark.bfloat16
class TestDefect15AccumulatedGradientsStayZeroInBfloat16:
    def test_native(self, native):
        code, out, err = native(
            """
amp.init("bfloat16")
net = gluon.nn.Dense(1, in_units=2, use_bias=False)
net.initialize(mx.init.One())
net.collect_params().setattr("grad_req", "add")
for _ in range(2):
    with autograd.record():
        loss = net(nd.array([[1.0, 2.0]])).astype("float32").sum()
    loss.backward()
print(*net.weight.grad().asnumpy().ravel())
"""
        )
        assert code == 0, err
        assert out.split()[-2:] == ["0.0", "0.0"]  # 2 and 4 are right

    @pytest.mark.parametrize("hybridize", [False, True])
    @pytest.mark.parametrize("contexts", [1, 2])
    def test_ampx(self, backward, hybridize, contexts):
        """Small whole numbers are exact in bfloat16, and so are their sums over backwards and contexts."""
        amp = ampx.init("mxnet", dtype="bfloat16", loss_scale="dynamic")
        where = CONTEXTS[:contexts]
        net = gluon.nn.Dense(1, in_units=2, use_bias=False)
        net.initialize(mx.init.One(), ctx=where)
        net.collect_params().setattr("grad_req", "add")
        if hybridize:
            net.hybridize()
        opt = amp.wrap_optimizer(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125}))
        inputs = [nd.array([[1.0, 2.0]], ctx=context) for context in where]
        for step in (1, 2):
            for _ in range(2):
                backward(lambda: [net(x).astype("float32").sum() for x in inputs], opt)
            opt.step(1)
            opt.zero_grad()
            moved = 0.125 * 2 * contexts * step
            for context in where:
                np.testing.assert_array_equal(net.weight.data(context).asnumpy(), [[1.0 - moved, 1.0 - 2 * moved]])

    def test_ampx_adds_nothing_of_an_overflow_to_the_next_step(self, backward):
        amp = ampx.init("mxnet", dtype="bfloat16", loss_scale="dynamic")
        net = gluon.nn.Dense(1, in_units=1, use_bias=False)
        net.initialize(mx.init.One())
        net.collect_params().setattr("grad_req", "add")
        opt = amp.wrap_optimizer(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}))
        for factor, weight in ((math.inf, 1.0), (1.0, 0.5)):
            for slope in (1.0, factor):
                backward(lambda slope=slope: net(nd.ones((1, 1))).astype("float32").sum() * slope * 0.5, opt)
            opt.step(1)
            opt.zero_grad()
            assert net.weight.data().asscalar() == weight


class TestDefect16ScaleIsLateAndOnlyTheFirstContextIsLookedAt:
    def test_native_is_one_step_late(self, native):
        code, out, err = native(
            NATIVE
            + f"""
w, trainer = make()
trainer._amp_loss_scaler._scale_seq_len = 3
for overflow in {REFERENCE_PATTERN}:
    with autograd.record():
        backward(trainer, w.data().sum() * (np.inf if overflow else 0.0))
    trainer.step(1)
    print(trainer._amp_loss_scaler.loss_scale)
"""
        )
        assert code == 0, err
        scales = list(map(float, out.split()))
        assert scales[1:] == list(REFERENCE_TRACE[:-1])
        assert scales != list(REFERENCE_TRACE)

    def test_native_looks_at_the_first_context_only(self, native):
        """Without a kvstore every context keeps and applies its own gradient."""
        code, out, err = native(
            NATIVE
            + """
contexts = mx.cpu(0), mx.cpu(1)
w, trainer = make(*contexts, kvstore=None)
with autograd.record():
    backward(trainer, *[w.data(one).sum() * factor for one, factor in zip(contexts, (1.0, np.inf))])
trainer.step(1)
print(*[w.data(one).asscalar() for one in contexts])
"""
        )
        assert code == 0, err
        assert out.split()[-2:] == ["0.0", "-inf"]

    @pytest.mark.parametrize(
        ("parameters", "message"), [("", "IndexError"), ("a, b", "data type do not match specified type")]
    )
    def test_native_crashes_without_gradients_and_on_mixed_dtypes(self, native, parameters, message):
        code, _, err = native(
            NATIVE
            + f"""
(a, _), (b, trainer) = make(), make(dtype="float16", name="b")
with autograd.record():
    loss = a.data().sum() + b.data().astype("float32").sum()
loss.backward()
trainer._amp_loss_scaler.has_overflow([{parameters}])
"""
        )
        assert code != 0
        assert message in err

    @pytest.mark.parametrize("overflow", [None, "a", "b"])
    def test_ampx_takes_mixed_dtypes(self, amp, weights, backward, overflow):
        pair = {"a": weights(1.0, name="a"), "b": weights(1.0, name="b", dtype="float16")}
        raw = gluon.Trainer(pair, "sgd", {"learning_rate": 0.5, "multi_precision": True})
        opt = amp.wrap_optimizer(raw, loss_scale=1024.0)
        factors = {name: math.inf if name == overflow else 1.0 for name in pair}
        backward(lambda: sum(pair[name].data().astype("float32").sum() * factors[name] for name in pair), opt)
        opt.step(1)
        assert opt.last_step.applied is (overflow is None)
        expected = 0.5 if overflow is None else 1.0
        assert [parameter.data().asscalar() for parameter in pair.values()] == [expected, expected]

    def test_ampx_without_gradients_counts_nothing(self, amp, weights, backward):
        frozen = weights(1.0, grad_req="null")
        opt = amp.wrap_optimizer(gluon.Trainer({"w": frozen}, "sgd", {"learning_rate": 1.0}))
        opt.step(1)
        assert opt.last_step == ampx.StepResult(False, True, 2.0**16, 2.0**16, 0)
        assert frozen.data().asscalar() == 1.0


class TestDefect17PlainStepAfterScaleLossIsTooSmall:
    def test_native(self, native):
        code, out, err = native(
            NATIVE
            + """
w, trainer = make()
with autograd.record():
    backward(trainer, w.data().sum())
trainer.step(1)
before = w.data().asscalar()
with autograd.record():
    loss = w.data().sum()
loss.backward()
trainer.step(1)
print(float(before - w.data().asscalar()))
"""
        )
        assert code == 0, err
        assert float(out.split()[-1]) == 2.0**-16  # a step of length 1 is right

    def test_ampx_leaves_the_raw_trainer_right(self, amp, weights, backward):
        parameter = weights(1.0)
        raw = gluon.Trainer({"w": parameter}, "sgd", {"learning_rate": 1.0})
        opt = amp.wrap_optimizer(raw)
        for factor in (1.0, math.inf):
            backward(lambda factor=factor: parameter.data().sum() * factor, opt)
            opt.step(1)
        with autograd.record():
            loss = parameter.data().sum()
        loss.backward()
        raw.step(1)
        np.testing.assert_array_equal(parameter.data().asnumpy(), [-1.0])
