"""Several contexts: gradients are added up first, checked then, and nothing updates before that."""

import math

import numpy as np
import pytest

import ampx
from ampx_mxnet.compat import mx

CONTEXTS = [mx.cpu(0), mx.cpu(1)]


def _backward(net, opt, slopes=(1.0, 1.0)):
    """Run a backward in which the weights' gradients on each context are the slopes given for it."""
    with mx.autograd.record():
        losses = [
            (net(mx.nd.ones((1, 2), ctx=context)) * slope).sum()
            for context, slope in zip(CONTEXTS, slopes, strict=True)
        ]
    with ampx.scale_loss(losses, opt) as scaled:
        mx.autograd.backward(scaled)


def _train(net, opt, slopes):
    _backward(net, opt, slopes)
    opt.step(1)


def _weights(net):
    return [weight.asnumpy().ravel().tolist() for weight in net.weight.list_data()]


@pytest.mark.parametrize("kvstore", ["device", "local", None])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_on_any_context_is_skipped_on_all(amp, dense, kvstore, bad):
    net = dense(ctx=CONTEXTS)
    opt = amp.wrap_optimizer(
        mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25, "momentum": 0.5}, kvstore=kvstore)
    )
    slopes = [1.0, 1.0]
    slopes[bad] = math.inf
    _train(net, opt, slopes)
    assert _weights(net) == [[1.0, 1.0], [1.0, 1.0]]
    assert (opt.last_step.applied, opt.loss_scale) == (False, 2.0**15)
    _train(net, opt, [1.0, 2.0])
    # With a store, every context updates by the sum of the slopes; without, each by its own.
    sums = (3.0, 3.0) if kvstore else (1.0, 2.0)
    assert _weights(net) == [[1.0 - 0.25 * total] * 2 for total in sums]
    assert opt.last_step.applied


def test_the_sum_over_contexts_may_overflow(amp, dense):
    """Each context's gradients are finite, their sum is not."""
    net = dense(ctx=CONTEXTS)
    opt = amp.wrap_optimizer(mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25}))
    _train(net, opt, [2.0**111, 2.0**111])
    assert not opt.last_step.applied
    assert _weights(net) == [[1.0, 1.0], [1.0, 1.0]]


def test_unscale_and_clip_see_the_sum_once(amp, dense):
    """The norm is that of the sum over contexts, and the step does not add up again."""
    net = dense(ctx=CONTEXTS)
    opt = amp.wrap_optimizer(mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}))
    with mx.autograd.record():
        losses = [net(mx.nd.array([[3.0, 4.0]], ctx=context)).sum() for context in CONTEXTS]
    with ampx.scale_loss(losses, opt) as scaled:
        mx.autograd.backward(scaled)
    assert float(ampx.clip_grad_norm(opt, 5.0)) == 10.0
    opt.step(1)
    assert _weights(net) == [[-2.0, -3.0], [-2.0, -3.0]]
    assert opt.last_step.grad_norm == 10.0


def test_allreduce_grads_and_update_are_a_step(amp, dense):
    """So they are in MXNet; `step` after `allreduce_grads` does not add up again either."""
    for verb in ("update", "step"):
        net = dense(ctx=CONTEXTS)
        opt = amp.wrap_optimizer(mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25}))
        for slopes, after in (((1.0, math.inf), 1.0), ((1.0, 2.0), 0.625)):
            _backward(net, opt, slopes)
            opt.allreduce_grads()
            getattr(opt, verb)(2)
            assert _weights(net) == [[after, after]] * 2


@pytest.mark.parametrize("enabled", [True, False])
def test_a_second_try_does_not_add_up_again(amp, weights, backward, enabled):
    """MXNet raises for a stale gradient after it has added up the contexts."""
    if not enabled:
        amp = ampx.init("mxnet", enabled=False)
    used, unused = (weights(1.0, 1.0, name=name, ctx=CONTEXTS) for name in ("used", "unused"))
    raw = mx.gluon.Trainer([used, unused], "sgd", {"learning_rate": 0.25}, update_on_kvstore=False)
    opt = amp.wrap_optimizer(raw)
    slopes = zip(CONTEXTS, (1.0, 2.0), strict=True)
    backward(lambda: [(used.data(context) * slope).sum() for context, slope in slopes], opt)
    with pytest.raises(UserWarning, match="`unused`"):
        opt.step(1)
    opt.step(1, ignore_stale_grad=True)
    assert [used.data(context).asnumpy().tolist() for context in CONTEXTS] == [[0.25, 0.25]] * 2


def test_adding_after_allreduce_is_refused(amp, dense):
    net = dense(ctx=CONTEXTS, grad_req="add")
    opt = amp.wrap_optimizer(mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25}))
    _backward(net, opt)
    opt.allreduce_grads()
    with pytest.raises(ampx.ProtocolError, match="after the last backward"):
        _backward(net, opt)
    opt.step(1)
    assert _weights(net) == [[0.5, 0.5]] * 2


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ({"update_on_kvstore": True}, "update_on_kvstore=True"),
        ({"kvstore": "dist_async"}, "kvstore='dist_async'"),
    ],
)
def test_trainers_that_update_in_the_store_are_refused(amp, dense, options, passed):
    raw = mx.gluon.Trainer(dense(ctx=CONTEXTS).collect_params(), "sgd", **options)
    before = dict(raw._kvstore_params)
    with pytest.raises(ampx.UnsupportedByBackendError, match=passed):
        amp.wrap_optimizer(raw)
    assert raw._kvstore_params == before


def test_a_refused_list_leaves_every_trainer_as_it_was(amp, dense):
    good = mx.gluon.Trainer(dense(ctx=CONTEXTS).collect_params(), "sgd")
    bad = mx.gluon.Trainer(dense(ctx=CONTEXTS).collect_params(), "sgd", update_on_kvstore=True)
    with pytest.raises(ampx.UnsupportedByBackendError):
        amp.wrap_optimizer([good, bad])
    assert good._kvstore_params == {"kvstore": "device", "update_on_kvstore": None}


def test_a_disabled_session_leaves_the_store_alone(dense):
    amp = ampx.init("mxnet", enabled=False)
    net = dense(ctx=CONTEXTS)
    raw = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25})
    opt = amp.wrap_optimizer(raw)
    _train(net, opt, [1.0, 2.0])
    assert raw._update_on_kvstore
    np.testing.assert_array_equal(_weights(net), [[0.25, 0.25]] * 2)


def test_a_parameter_with_inf_on_the_second_context_is_named(amp, dense):
    net = dense(ctx=CONTEXTS)
    opt = amp.wrap_optimizer(mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=None))
    _train(net, opt, [1.0, math.inf])
    (weight,) = ampx.debug.nonfinite_parameters(opt, net)
    assert (weight.name, weight.nonfinite, weight.elements) == ("weight", 2, 2)


@pytest.mark.parametrize("verb", ["step", "update"])
def test_after_a_refused_step_of_the_raw_trainer_nothing_is_added_up_twice(amp, dense, verb):
    """MXNet's `step` adds up before it asks, its `update` does not: the gradients are dropped, and a step says so."""
    net = dense(ctx=CONTEXTS)
    raw = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    opt = amp.wrap_optimizer(raw)
    _train(net, opt, [0.0, 0.0])  # makes the store
    _backward(net, opt)
    with pytest.raises(ampx.RawStepError, match="were dropped; run backward again"):
        getattr(raw, verb)(1)
    with pytest.raises(ampx.NotScaledError):
        opt.step(1)
    assert _weights(net) == [[1.0, 1.0], [1.0, 1.0]]
    _train(net, opt, [0.25, 0.5])
    assert _weights(net) == [[0.25, 0.25], [0.25, 0.25]]


@pytest.mark.parametrize("verb", ["step", "allreduce_grads", "unscale"])
def test_a_step_after_the_sum_over_contexts_had_failed_adds_nothing_twice(amp, weights, backward, monkeypatch, verb):
    """The store fails at the second parameter: the first one's gradients are added up already."""
    pair = [weights(1.0, 1.0, name=name, ctx=CONTEXTS) for name in ("first", "second")]
    opt = amp.wrap_optimizer(mx.gluon.Trainer(pair, "sgd", {"learning_rate": 0.25}))

    def train(act):
        backward(lambda: [sum(parameter.data(context).sum() for parameter in pair) for context in CONTEXTS], opt)
        act()

    train(lambda: opt.step(1))
    native = type(opt._kvstore).pushpull

    def fail(store, key, *args, **options):
        if key == 1:
            raise mx.MXNetError("a peer is gone")
        return native(store, key, *args, **options)

    act = {"step": lambda: opt.step(1), "unscale": lambda: ampx.unscale(opt)}.get(verb, opt.allreduce_grads)
    with monkeypatch.context() as patch:
        patch.setattr(type(opt._kvstore), "pushpull", fail)
        with pytest.raises(mx.MXNetError, match="a peer is gone"):
            train(act)
    with pytest.raises(ampx.ProtocolError, match=r"interrupted .*Call opt\.zero_grad"):
        opt.step(1)
    opt.zero_grad()
    train(lambda: opt.step(1))
    assert [parameter.data(context).asnumpy().tolist() for parameter in pair for context in CONTEXTS] == [
        [0.0, 0.0]
    ] * 4
