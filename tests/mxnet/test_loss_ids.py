"""Losses with loss scales of their own on one trainer."""

import copy
import math

import numpy as np
import pytest
from loss_ids import scales, set_scale

import ampx
from ampx.backend import CastPlan
from ampx_mxnet import accumulation
from ampx_mxnet.compat import mx
from ampx_mxnet.dtypes import name_of
from ampx_mxnet.prepare import prepare

gluon, autograd = mx.gluon, mx.autograd
CONTEXTS = [mx.cpu(0), mx.cpu(1)]


@pytest.fixture
def weight(weights):
    return weights(1.0, 1.0, grad_req="add")


@pytest.fixture
def opt(amp, weight):
    return amp.wrap_optimizer(sgd(weight))


def sgd(*parameters, rate=1.0):
    return gluon.Trainer(list(parameters), "sgd", {"learning_rate": rate})


def values(parameter):
    return parameter.data().asnumpy().tolist()


@pytest.mark.parametrize("adds", ["mxnet", "ampx"])
def test_a_body_may_run_several_backwards(adds, amp, opt, weight):
    if adds == "ampx":
        opt.ampx_adopt_adding()
        accumulation.follow()  # as a session does that casts to bfloat16
    try:
        set_scale(amp, 1, 8.0)
        for loss_id in (0, 1):
            with autograd.record():
                losses = [weight.data().sum(), (weight.data() * 2).sum()]
                with ampx.scale_loss(losses, opt, loss_id=loss_id) as scaled:
                    for loss in scaled:
                        loss.backward()
        opt.step(1)
    finally:
        accumulation.unfollow()
    assert values(weight) == [-5.0, -5.0]


def test_training_on_two_losses_equals_numpys(weights):
    """A trunk that both losses reach, and a head each; what one loss overflows is skipped, and only its scale falls."""
    shape = {"trunk": (4,), "left": (1,), "right": (1,)}
    random = np.random.default_rng(0)
    inputs = random.standard_normal((8, 6, 4)).astype("float32")
    start = {name: random.standard_normal(size).astype("float32") for name, size in shape.items()}
    parameters = {name: weights(*numbers, name=name, grad_req="add") for name, numbers in start.items()}
    amp = ampx.init("mxnet", level="O0", loss_scale=ampx.LossScale(init_scale=2.0**10, growth_interval=2))
    opt = amp.wrap_optimizer(sgd(*parameters.values(), rate=0.0625))
    expected = {name: numbers.astype("float64") for name, numbers in start.items()}
    for number, batch in enumerate(inputs):
        factors = {"left": 1.0, "right": math.inf if number == 3 else 0.5}
        for loss_id, (head, factor) in enumerate(factors.items()):
            with autograd.record():
                hidden = mx.nd.dot(mx.nd.array(batch), parameters["trunk"].data())
                loss = ((hidden * parameters[head].data()) ** 2).mean() * factor
                with ampx.scale_loss(loss, opt, loss_id=loss_id) as scaled:
                    scaled.backward()
        opt.step(1)
        opt.zero_grad()
        if number != 3:
            hidden = batch @ expected["trunk"]
            slopes = {
                head: (2 * factor * expected[head] * hidden**2).mean(keepdims=True) for head, factor in factors.items()
            }
            slopes["trunk"] = sum(
                (2 * factor * (expected[head] ** 2 * hidden)[:, None] * batch).mean(axis=0)
                for head, factor in factors.items()
            )
            for name, slope in slopes.items():
                expected[name] -= 0.0625 * slope
    for name, parameter in parameters.items():
        # Seven updates, each of sums of 24 float32 products: some hundred roundings of 2**-24.
        np.testing.assert_allclose(parameter.data().asnumpy(), expected[name], rtol=2.0**-16, atol=2.0**-18)
    assert scales(amp) == {0: 2.0**14, 1: 2.0**12}  # the second: three times up, once down


def test_gradients_that_are_never_cleared_add_up_as_in_plain_mxnet(amp, opt, weight, backward):
    set_scale(amp, 1, 8.0)
    for _ in range(2):
        for loss_id in (0, 1):
            backward(lambda: weight.data().sum(), opt, loss_id=loss_id)
        opt.step(1)
    assert values(weight) == [1.0 - 2 - 4] * 2


def test_what_the_last_step_left_on_parameters_that_one_loss_reaches_stays_true(amp, weights, backward):
    first, second = (weights(1.0, name=name, grad_req="add") for name in "ab")
    opt = amp.wrap_optimizer(sgd(first, second))
    set_scale(amp, 1, 8.0)
    for parameters in ((first, second), (second, first)):
        for loss_id, parameter in enumerate(parameters):
            backward(lambda parameter=parameter: parameter.data() * 2, opt, loss_id=loss_id)
        opt.step(1)
    assert (values(first), values(second)) == ([1.0 - 2 - 4], [1.0 - 2 - 4])


def test_what_the_last_step_left_stays_true_where_no_loss_gives_a_gradient(amp, opt, weight, weights, backward):
    elsewhere = weights(1.0, name="elsewhere")
    backward(lambda: weight.data().sum(), opt)
    opt.step(1)
    set_scale(amp, 1, 8.0)
    for loss_id in (0, 1):
        backward(lambda: elsewhere.data(), opt, loss_id=loss_id)
    opt.step(1)
    assert not opt.last_step.applied
    backward(lambda: weight.data().sum(), opt)
    opt.step(1)
    assert values(weight) == [1.0 - 1 - 2] * 2


@pytest.mark.parametrize("others", [{}, {"max_grad_norm": 1.0}])
def test_a_sum_of_losses_that_overflows_is_skipped(weights, backward, others):
    """Each of the two is finite: 3e38 + 3e38 is beyond float32."""
    amp = ampx.init("mxnet", level="O0", loss_scale=ampx.LossScale(init_scale=1.0, min_scale=0.25))
    weight = weights(1.0, grad_req="add")
    opt = amp.wrap_optimizer(sgd(weight), **others)
    for loss_id in (0, 1):
        backward(lambda: (weight.data() * 3e38).sum(), opt, loss_id=loss_id)
    opt.step(1)
    assert (opt.last_step.applied, opt.last_step.finite) == (False, False)
    assert values(weight) == [1.0]
    assert [state.scale for state in opt.ampx_member.group.states.values()] == [0.5, 0.5]
    opt.zero_grad()
    for loss_id in (0, 1):
        backward(lambda: (weight.data() * 0.25).sum(), opt, loss_id=loss_id)
    opt.step(1)
    assert values(weight) == [0.5]


# -- grad_req="write": MXNet overwrites --------------------------------------------------------------


@pytest.mark.parametrize("slope", [1.0, math.inf])
def test_losses_that_share_no_parameters_need_not_add(slope, amp, weights, backward):
    """As the policy and the value of reinforcement learning, each with a network of its own."""
    policy, value, model = (weights(1.0, name=name) for name in ("policy", "value", "model"))
    opt = amp.wrap_optimizer(sgd(policy, value, model))
    set_scale(amp, 1, 8.0)
    backward(lambda: policy.data() * 2, opt, loss_id=0)
    backward(lambda: value.data() * 3 * slope, opt, loss_id=1)
    backward(lambda: model.data() * 4, opt, loss_id=2)
    opt.step(1)
    assert opt.last_step.applied is (slope == 1.0)
    after = [[-1.0], [-2.0], [-3.0]] if slope == 1.0 else [[1.0]] * 3
    assert [values(parameter) for parameter in (policy, value, model)] == after
    assert scales(amp) == {0: 2.0**16, 1: 8.0 if slope == 1.0 else 4.0, 2: 2.0**16}


def test_a_later_loss_that_overwrites_an_earlier_ones_gradients_is_refused(amp, weights, backward):
    """As without ampx only the last loss would count: who numbers losses means all of them."""
    weight, own = weights(1.0), weights(1.0, name="own", grad_req="add")
    opt = amp.wrap_optimizer(sgd(weight, own))
    saved = copy.deepcopy(amp.state_dict())
    backward(lambda: weight.data() * 2 + own.data(), opt, loss_id=0)
    with pytest.raises(ampx.ProtocolError, match=r"'write' .w.*overwrote.*grad_req='add'.*cleared"):
        backward(lambda: weight.data() * 3, opt, loss_id=1)
    opt.step(1)
    assert not opt.last_step.applied
    assert (values(weight), values(own), amp.state_dict()) == ([1.0], [1.0], saved)
    backward(lambda: weight.data() * 2 + own.data(), opt)
    opt.step(1)
    assert (values(weight), values(own)) == ([-1.0], [0.0])


def test_a_body_that_raised_restores_what_its_backward_overwrote(amp, weights, backward):
    weight = weights(1.0)
    opt = amp.wrap_optimizer(sgd(weight))
    backward(lambda: weight.data() * 2, opt, loss_id=0)
    with autograd.record():
        loss = weight.data() * 3

    def failing():
        with ampx.scale_loss(loss, opt, loss_id=1) as scaled:
            scaled.backward()
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    opt.step(1)
    assert values(weight) == [-1.0]


# -- contexts, sparse and low-precision parameters ---------------------------------------------------


def backward_on_contexts(weight, opt, slopes, loss_id):
    with autograd.record():
        losses = [(data * slope).sum() for data, slope in zip(weight.list_data(), slopes, strict=True)]
        with ampx.scale_loss(losses, opt, loss_id=loss_id) as scaled:
            autograd.backward(scaled)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("bad", [None, 0, 1])
def test_several_contexts_add_up_the_true_gradients_of_all_losses(amp, weights, bad, unscales):
    weight = weights(1.0, ctx=CONTEXTS, grad_req="add")
    opt = amp.wrap_optimizer(sgd(weight, rate=0.125))
    set_scale(amp, 1, 8.0)
    backward_on_contexts(weight, opt, (1.0, 2.0), 0)
    backward_on_contexts(weight, opt, [math.inf if context == bad else 3.0 for context in (0, 1)], 1)
    if unscales:
        ampx.unscale(opt)
        ampx.unscale(opt)  # a second time changes nothing
        if bad is None:
            assert [gradient.asscalar() for gradient in weight.list_grad()] == [9.0, 9.0]
    opt.step(1)
    assert opt.last_step.applied is (bad is None)
    after = 1.0 - 0.125 * 9 if bad is None else 1.0
    assert [data.asscalar() for data in weight.list_data()] == [after, after]
    assert scales(amp) == {0: 2.0**16, 1: 8.0 if bad is None else 4.0}


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_another_loss_after_allreduce_grads_is_refused(grad_req, amp, weights):
    """The contexts' sum of the first loss would be added up again in the step."""
    first, second = (weights(1.0, name=name, ctx=CONTEXTS, grad_req=grad_req) for name in "ab")
    opt = amp.wrap_optimizer(sgd(first, second, rate=0.125))
    backward_on_contexts(first, opt, (1.0, 2.0), 0)
    opt.allreduce_grads()
    with pytest.raises(ampx.ProtocolError, match=r"after allreduce_grads.*another loss_id"):
        backward_on_contexts(second, opt, (1.0, 2.0), 1)
    opt.step(1, ignore_stale_grad=True)
    assert [data.asscalar() for data in first.list_data()] == [1.0 - 0.125 * 3] * 2


@pytest.mark.parametrize("tables", [1, 2])
def test_sparse_gradients_of_several_losses_may_not_share_a_table(tables, amp, backward):
    """MXNet computes sparse gradients with grad_req='write' only."""
    layers = [gluon.nn.Embedding(3, 2, sparse_grad=True, prefix=f"table{number}_") for number in range(tables)]
    for layer in layers:
        layer.initialize(mx.init.One())
    opt = amp.wrap_optimizer(sgd(*[layer.weight for layer in layers]))
    set_scale(amp, 1, 8.0)
    backward(lambda: layers[0](mx.nd.array([1])).sum(), opt, loss_id=0)
    if tables == 1:
        with pytest.raises(ampx.ProtocolError, match=r"table0_weight.*overwrote"):
            backward(lambda: layers[0](mx.nd.array([2])).sum(), opt, loss_id=1)
        backward(lambda: layers[0](mx.nd.array([1])).sum(), opt, loss_id=0)
    else:
        backward(lambda: layers[1](mx.nd.array([2])).sum(), opt, loss_id=1)
    opt.step(1)
    after = [layer.weight.data().asnumpy()[:, 0].tolist() for layer in layers]
    assert after == [[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]][:tables]


class Scale(gluon.nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.weight = self.params.get("weight", shape=(2,), init=mx.init.One(), grad_req="add")

    def hybrid_forward(self, space, x, weight):
        return space.broadcast_mul(space.cast(x, "float16"), weight)


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_of_low_precision_parameters_add_up_in_float32(clips):
    """2**-26 and its like are no float16; scaled they are, and the masters get their exact sum."""
    amp = ampx.init("mxnet", level="O0", loss_scale=2.0**12)
    net = Scale()
    net.initialize()
    net, raw = prepare(net, sgd(*net.collect_params().values(), rate=2.0**6), CastPlan("cpu", "float16", "O2"))
    opt = amp.wrap_optimizer(raw, **({"max_grad_norm": 1.0} if clips else {}))
    assert name_of(net.weight.data().dtype) == "float16"

    def backward(loss_id, factor, error=None):
        with autograd.record():
            loss = (net(mx.nd.full((1, 2), 2.0**-6)).astype("float32") * 2.0**-20 * factor).sum()
            with ampx.scale_loss(loss, opt, loss_id=loss_id) as scaled:
                scaled.backward()
                if error is not None:
                    raise error

    for loss_id, factor in ((0, 1.0), (1, 2.0), (0, 4.0)):
        backward(loss_id, factor)
    with pytest.raises(KeyError):
        backward(1, 8.0, KeyError())
    opt.step(1)
    assert net.weight.ampx_masters[0].asnumpy().tolist() == [1 - 7 * 2.0**-20] * 2
    assert name_of(net.weight.grad().dtype) == "float16"


def test_a_copy_starts_without_pending_gradients(amp, opt, weight, backward):
    for loss_id in (0, 1):
        backward(lambda: weight.data().sum(), opt, loss_id=loss_id)
    new = copy.deepcopy(opt)
    (own,) = new._params
    new.step(1, ignore_stale_grad=True)
    assert not new.last_step.applied
    opt.step(1)
    assert (values(own), values(weight)) == ([1.0, 1.0], [-1.0, -1.0])
