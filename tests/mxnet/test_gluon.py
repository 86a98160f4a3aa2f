"""What Gluon code does around a session: blocks traced before it, sessions one after another, ways to run backward."""

import math

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

import ampx

CONTEXTS = [mx.cpu(0), mx.cpu(1)]


def dtype_name(array):
    return "bfloat16" if np.dtype(array.dtype).names else np.dtype(array.dtype).name


@pytest.fixture
def dense():
    """A layer of ones on one or several contexts."""

    def make(units=1, **options):
        made = gluon.nn.Dense(units, in_units=2, use_bias=False)
        made.initialize(mx.init.One(), **options)
        return made

    return make


@pytest.mark.bfloat16
class TestHybridizedBlocks:
    def test_block_called_before_init_casts_after_it_and_no_more_after_shutdown(self, dense):
        net, x = dense(), nd.ones((1, 2))
        net.hybridize()
        assert dtype_name(net(x)) == "float32"
        amp = ampx.init("mxnet", dtype="bfloat16")
        assert dtype_name(net(x)) == "bfloat16"
        amp.shutdown()
        assert dtype_name(net(x)) == "float32"

    def test_block_inside_a_block_follows_too(self, dense):
        outer = gluon.nn.HybridSequential()
        outer.add(dense(2), dense())
        outer.hybridize(static_alloc=True, static_shape=True)
        x = nd.ones((1, 2))
        outer(x)
        with ampx.init("mxnet", dtype="bfloat16"):
            assert dtype_name(outer(x)) == "bfloat16"
        assert dtype_name(outer(x)) == "float32"

    def test_block_called_first_in_the_session_is_float32_after_it(self, dense):
        net, x = dense(), nd.ones((1, 2))
        net.hybridize()
        with ampx.init("mxnet", dtype="bfloat16"):
            assert dtype_name(net(x)) == "bfloat16"
        assert dtype_name(net(x)) == "float32"

    @pytest.mark.parametrize("hybridize", [False, True])
    def test_training_in_bfloat16_stays_near_float32(self, hybridize):
        """The loss of a regression falls as in float32; the gap is bfloat16's resolution of the predictions."""
        losses = {}
        x = nd.array(np.random.default_rng(0).normal(size=(64, 4)).astype("float32"))
        y = x.sum(axis=1, keepdims=True)
        for dtype in ("float32", "bfloat16"):
            amp = ampx.init("mxnet", dtype=dtype, enabled=dtype != "float32", loss_scale="dynamic")
            net = gluon.nn.HybridSequential()
            net.add(gluon.nn.Dense(8, in_units=4, activation="relu"), gluon.nn.Dense(1, in_units=8))
            mx.random.seed(1)
            net.initialize(mx.init.Xavier())
            if hybridize:
                net.hybridize()
            opt = amp.wrap_optimizer(gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.03}))
            for _ in range(60):
                with autograd.record():
                    loss = ((net(x).astype("float32") - y) ** 2).mean()
                    with ampx.scale_loss(loss, opt) as scaled:
                        scaled.backward()
                opt.step(1)
            losses[dtype] = float(loss.asscalar())
            amp.shutdown()
        # Predictions of size 2 are spaced by 2**-7 to 2**-6 in bfloat16: squared, 2**-12 at the end of training.
        assert losses["float32"] < 0.05
        assert abs(losses["bfloat16"] - losses["float32"]) < 0.02


class TestSessionsOneAfterAnother:
    @pytest.mark.bfloat16
    def test_init_again_with_other_settings_replaces_the_former(self, dense):
        net, x = dense(), nd.ones((1, 2))
        for _ in range(2):
            ampx.init("mxnet", dtype="bfloat16")
            assert dtype_name(net(x)) == "bfloat16"
            ampx.init("mxnet", level="O0", loss_scale="dynamic")
            assert dtype_name(net(x)) == "float32"
            ampx.init("mxnet", dtype="bfloat16", deny=["FullyConnected"])
            assert dtype_name(net(x)) == "float32"

    @pytest.mark.bfloat16
    def test_refused_dtype_leaves_the_running_session(self, dense):
        net, x = dense(), nd.ones((1, 2))
        ampx.init("mxnet", dtype="bfloat16")
        with pytest.raises(ampx.UnsupportedDtypeError, match=r"float16.*bfloat16"):
            ampx.init("mxnet", dtype="float16", device="cpu")
        assert dtype_name(net(x)) == "bfloat16"

    def test_trainer_wrapped_in_a_former_session_goes_on(self, weights, backward):
        parameter = weights(1.0)
        former = ampx.init("mxnet", level="O0", loss_scale=1024.0)
        opt = former.wrap_optimizer(gluon.Trainer({"w": parameter}, "sgd", {"learning_rate": 0.25}))
        backward(lambda: parameter.data().sum(), opt)
        opt.step(1)
        ampx.init("mxnet", level="O0", loss_scale=8.0)
        backward(lambda: parameter.data().sum(), opt)
        opt.step(1)
        assert parameter.data().asscalar() == 0.5
        assert opt.last_step.scale == 1024.0


class TestWaysToRunBackward:
    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("hybridize", [False, True])
    def test_scale_loss_inside_and_outside_of_record(self, amp, dense, inside, hybridize):
        net, x = dense(), nd.array([[1.0, 2.0]])
        if hybridize:
            net.hybridize()
        opt = amp.wrap_optimizer(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}))
        with autograd.record():
            loss = net(x).sum()
            if inside:
                with ampx.scale_loss(loss, opt) as scaled:
                    scaled.backward()
        if not inside:
            with ampx.scale_loss(loss, opt) as scaled:
                scaled.backward()
        assert autograd.is_recording() is False
        opt.step(1)
        np.testing.assert_array_equal(net.weight.data().asnumpy(), [[0.5, 0.0]])

    def test_the_training_mode_of_record_holds_for_backward(self, amp):
        """Dropout outside of training is the identity; the loss was recorded so."""
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(1, in_units=2, use_bias=False), gluon.nn.Dropout(0.5))
        net.initialize(mx.init.One())
        opt = amp.wrap_optimizer(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}))
        with autograd.record(train_mode=False):
            loss = net(nd.array([[1.0, 2.0]])).sum()
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward(train_mode=False)
        opt.step(1)
        np.testing.assert_array_equal(net[0].weight.data().asnumpy(), [[0.5, 0.0]])

    def test_losses_of_two_contexts_with_an_overflow_on_the_second(self, amp, dense):
        net = dense(ctx=CONTEXTS)
        opt = amp.wrap_optimizer(gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.5}))
        for bad in (True, False):
            inputs = [nd.array([[math.inf if bad and i else 1.0, 1.0]], ctx=c) for i, c in enumerate(CONTEXTS)]
            with autograd.record():
                losses = [net(x).sum() for x in inputs]
                with ampx.scale_loss(losses, opt) as scaled:
                    autograd.backward(scaled)
            before = [net.weight.data(c).asnumpy() for c in CONTEXTS]
            opt.step(2)
            after = [net.weight.data(c).asnumpy() for c in CONTEXTS]
            assert opt.last_step.applied is not bad
            for one, other in zip(before, after, strict=True):
                assert np.array_equal(one, other) is bad
            np.testing.assert_array_equal(*after)
        assert opt.loss_scale == 2.0**15
        assert opt.optimizer.num_update == 1

    def test_exception_in_the_body_leaves_nothing_pending(self, amp, weights, backward):
        parameter = weights(1.0)
        opt = amp.wrap_optimizer(gluon.Trainer({"w": parameter}, "sgd", {"learning_rate": 0.25}))
        with pytest.raises(KeyError), autograd.record(), ampx.scale_loss(parameter.data().sum(), opt):
            raise KeyError
        assert autograd.is_recording() is False
        backward(lambda: parameter.data().sum(), opt)
        opt.step(1)
        assert parameter.data().asscalar() == 0.75


class TestAccumulation:
    def test_grad_req_add_sums_true_gradients(self, amp, weights, backward):
        """Over backwards on both sides of a growth that is due: the scale waits for the step."""
        parameter = weights(1.0, grad_req="add")
        raw = gluon.Trainer({"w": parameter}, "sgd", {"learning_rate": 0.125})
        opt = amp.wrap_optimizer(raw, loss_scale=ampx.LossScale(init_scale=4.0, growth_interval=1))
        expected = 1.0
        for factors in ((1.0, 2.0), (4.0,), (1.0, 1.0, 1.0)):
            for factor in factors:
                backward(lambda factor=factor: parameter.data().sum() * factor, opt)
            opt.step(1)
            opt.zero_grad()
            expected -= 0.125 * sum(factors)
            assert parameter.data().asscalar() == expected
        assert opt.loss_scale == 32.0

    def test_overflow_in_one_of_several_backwards_skips_the_step(self, amp, weights, backward):
        parameter = weights(1.0, grad_req="add")
        opt = amp.wrap_optimizer(gluon.Trainer({"w": parameter}, "sgd", {"learning_rate": 0.125}))
        for factor in (1.0, math.inf, 1.0):
            backward(lambda factor=factor: parameter.data().sum() * factor, opt)
        opt.step(1)
        assert not opt.last_step.applied
        opt.zero_grad()
        backward(lambda: parameter.data().sum(), opt)
        opt.step(1)
        assert parameter.data().asscalar() == 0.875
