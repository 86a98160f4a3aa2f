"""The wrapped trainer: a gluon trainer to everybody, with the loss scale its own."""

import contextlib
import copy
import math
import pickle
import warnings

import numpy as np
import pytest

import ampx
from ampx_mxnet import gradients
from ampx_mxnet.compat import mx
from ampx_mxnet.hook import OverflowHook

gluon, autograd = mx.gluon, mx.autograd


def _trainer(net, **options):
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5, "momentum": 0.5}, **options)


def _backward(net, opt, slope=1.0):
    with autograd.record():
        loss = (net(mx.nd.ones((1, 2))) * slope).sum()
    with ampx.scale_loss(loss, opt) as scaled:
        scaled.backward()


def test_a_trainer_of_a_frozen_network_does_not_warn(amp, dense):
    net, other = dense(), dense()
    opt = amp.wrap_optimizer(_trainer(net))
    net.collect_params().setattr("grad_req", "null")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ampx.NoGradientsWarning)
        for _ in range(5):
            _backward(other, opt)
            opt.step(1)


def test_it_is_a_trainer_and_everything_else_is_the_raw_ones(amp, dense):
    raw = _trainer(dense())
    opt = amp.wrap_optimizer(raw)
    assert isinstance(opt, gluon.Trainer)
    assert opt.optimizer is raw.optimizer
    opt.set_learning_rate(0.125)
    assert raw.learning_rate == opt.learning_rate == 0.125
    estimator = pytest.importorskip("mxnet.gluon.contrib.estimator", reason="no estimator in this MXNet")
    assert estimator.Estimator(dense(), gluon.loss.L2Loss(), trainer=opt, context=mx.cpu()).trainer is opt


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("hybridize", [False, True])
def test_scale_loss_may_stand_inside_and_outside_of_record(amp, dense, inside, hybridize):
    net = dense()
    net.hybridize(hybridize)
    opt = amp.wrap_optimizer(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}))
    with autograd.record():
        loss = net(mx.nd.array([[1.0, 2.0]])).sum()
        if inside:
            with ampx.scale_loss(loss, opt) as scaled:
                scaled.backward()
    if not inside:
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()
    assert not autograd.is_recording()
    opt.step(1)
    assert net.weight.data().asnumpy().tolist() == [[0.5, 0.0]]


def _recorded(net, compute):
    with autograd.record():
        return compute(net(mx.nd.array([[1.0, 2.0]])).sum())


def _after_backward(net):
    loss = _recorded(net, lambda loss: loss)
    loss.backward()
    return loss


UNRECORDED = {
    "outside": lambda net: net(mx.nd.array([[1.0, 2.0]])).sum(),
    "detached": lambda net: _recorded(net, lambda loss: loss.detach()),
    "paused": lambda net: _recorded(net, lambda loss: _paused(lambda: loss * 2)),
    "cast outside": lambda net: _recorded(net, lambda loss: loss).astype("float16"),
    "a NumPy array": lambda net: _recorded(net, lambda loss: loss).as_np_ndarray() * 2,
    "backward has run": _after_backward,
}


def _paused(compute):
    with autograd.pause():
        return compute()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("case", UNRECORDED)
def test_a_loss_that_was_not_recorded_is_refused_and_training_goes_on(amp, dense, case, hybridize, inside):
    net = dense()
    net.hybridize(hybridize)
    opt = amp.wrap_optimizer(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}))
    loss = UNRECORDED[case](net)
    for losses in (loss, [_recorded(net, lambda loss: loss), loss]):
        with (
            autograd.record() if inside else contextlib.nullcontext(),
            pytest.raises(ampx.DetachedLossError, match=r"not recorded.*Remove detach\(\)"),
        ):
            amp.scale_loss(losses, opt).__enter__()
    with amp.scale_loss(_recorded(net, lambda loss: loss), opt) as scaled:
        scaled.backward()
    opt.step(1)
    assert opt.last_step.applied
    assert net.weight.data().asnumpy().tolist() == [[0.5, 0.0]]


def test_the_training_mode_of_record_holds_for_backward(amp, dense):
    """Dropout outside of training is the identity; the loss was recorded so."""
    net = gluon.nn.HybridSequential()
    net.add(dense(), gluon.nn.Dropout(0.5))
    opt = amp.wrap_optimizer(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}))
    with autograd.record(train_mode=False):
        loss = net(mx.nd.array([[1.0, 2.0]])).sum()
    with ampx.scale_loss(loss, opt) as scaled:
        scaled.backward(train_mode=False)
    opt.step(1)
    assert net[0].weight.data().asnumpy().tolist() == [[0.5, 0.0]]


def test_an_optimizer_in_the_place_of_its_trainer_is_refused(amp):
    with pytest.raises(ampx.NotAnOptimizerError, match=r"SGD, .* accepted: a gluon\.Trainer"):
        amp.wrap_optimizer(mx.optimizer.SGD())


def test_the_batch_size_divides_like_in_mxnet(amp, dense):
    """Bit for bit, for a batch size that is no power of two too."""
    nets = dense(), dense()
    opt, plain = amp.wrap_optimizer(_trainer(nets[0])), _trainer(nets[1])
    for slope, batch_size in ((0.1, 3), (0.7, 7), (1.3, 5)):
        _backward(nets[0], opt, slope)
        opt.step(batch_size)
        with autograd.record():
            loss = (nets[1](mx.nd.ones((1, 2))) * slope).sum()
        loss.backward()
        plain.step(batch_size)
        assert nets[0].weight.data().asnumpy().tolist() == nets[1].weight.data().asnumpy().tolist()
    assert opt.trainer._optimizer.rescale_grad == plain._optimizer.rescale_grad
    assert opt.trainer._scale == plain._scale == 1.0


def test_deepcopies_and_pickles_go_their_own_way(dense):
    amp = ampx.init("mxnet", level="O0", loss_scale=ampx.LossScale(growth_interval=1))
    net = dense()
    opt = amp.wrap_optimizer(_trainer(net))
    _backward(net, opt)
    opt.step(1)
    _backward(net, opt)
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert (type(twin), twin.loss_scale) == (type(opt), 2.0**17)
        assert twin.ampx_member.stage == "idle"
        assert twin.trainer is not opt.trainer
    opt.step(1)
    assert opt.loss_scale == 2.0**18


def test_a_failed_step_can_be_tried_again(amp, weights, backward):
    """MXNet raises for a parameter without a new gradient; nothing has changed, and the second try updates the rest."""
    used, unused = weights(1.0, 1.0, name="used"), weights(1.0, 1.0, name="unused")
    opt = amp.wrap_optimizer(gluon.Trainer([used, unused], "sgd", {"learning_rate": 0.5}))
    backward(lambda: used.data().sum(), opt)
    with pytest.raises(UserWarning, match="`unused`"):
        opt.step(1)
    assert (opt.last_step, opt.trainer._scale) == (None, 1.0)
    opt.step(1, ignore_stale_grad=True)
    assert opt.last_step.applied
    assert used.data().asnumpy().tolist() == [0.5, 0.5]
    assert unused.data().asnumpy().tolist() == [1.0, 1.0]


def test_an_old_overflow_of_an_unused_parameter_is_not_seen_again(amp, weights, backward):
    used, unused = weights(1.0, 1.0, name="used"), weights(1.0, 1.0, name="unused")
    opt = amp.wrap_optimizer(gluon.Trainer([used, unused], "sgd", {"learning_rate": 0.5}))
    for use_both in (True, False):
        slope = math.inf if use_both else None
        backward(lambda slope=slope: used.data().sum() + ((unused.data() * slope).sum() if slope else 0), opt)
        opt.step(1, ignore_stale_grad=True)
        assert opt.last_step.applied is not use_both
    assert (used.data().asnumpy().tolist(), unused.data().asnumpy().tolist()) == ([0.5, 0.5], [1.0, 1.0])


def test_stepping_without_a_new_backward_is_refused(amp, dense):
    net = dense()
    opt = amp.wrap_optimizer(_trainer(net))
    _backward(net, opt)
    opt.step(1)
    after = net.weight.data().asnumpy().tolist()
    with pytest.raises(ampx.NotScaledError):
        opt.step(1)
    opt.step(1, ignore_stale_grad=True)
    assert not opt.last_step.applied
    assert net.weight.data().asnumpy().tolist() == after


def test_overwritten_gradients_are_a_step_skipped_by_hand(amp, dense):
    """With grad_req='write', true gradients that were not stepped with vanish in the next backward."""
    net = dense()
    opt = amp.wrap_optimizer(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}))
    _backward(net, opt, 100.0)
    assert float(ampx.clip_grad_norm(opt, 1000.0)) > 100.0
    _backward(net, opt, 1.0)
    opt.step(1)
    assert net.weight.data().asnumpy().tolist() == [[0.5, 0.5]]
    assert opt.ampx_member.group.steps == 1


def test_scales_below_one_that_overflow_on_dividing_are_skipped(dense, backward):
    amp = ampx.init("mxnet", level="O0", loss_scale=ampx.LossScale(init_scale=2.0**-4, min_scale=2.0**-8))
    net = dense()
    opt = amp.wrap_optimizer(_trainer(net))
    backward(lambda: (net(mx.nd.ones((1, 2))) * 2.0**127).sum() * 4.0, opt)
    assert net.weight.grad().asnumpy().tolist() == [[2.0**125, 2.0**125]]
    opt.step(1)
    assert not opt.last_step.applied
    assert net.weight.data().asnumpy().tolist() == [[1.0, 1.0]]


def test_stepping_waits_for_the_device_as_often_as_mxnet(amp, dense, monkeypatch):
    """Once: every reading of an array on the host goes through `asnumpy`, every waiting through these functions.

    Clipping by hand waits once, as `gluon.utils.clip_global_norm` does; clipping in the step does not add to its wait.
    """
    net = dense()
    opt = amp.wrap_optimizer(_trainer(net))
    waits = []
    for name in ("asnumpy", "wait_to_read"):
        native = getattr(mx.nd.NDArray, name)
        monkeypatch.setattr(mx.nd.NDArray, name, lambda self, native=native: (waits.append(1), native(self))[1])
    for slope in (1.0, math.inf):
        _backward(net, opt, slope)
        assert waits == []
        opt.step(1)
        assert waits == [1]
        waits.clear()
    _backward(net, opt)
    gluon.utils.clip_global_norm([net.weight.grad()], 1.0)
    native, waits[:] = list(waits), []
    ampx.clip_grad_norm(opt, 1.0)
    assert waits == [1]
    assert len(native) >= 1
    opt.step(1)
    assert waits == [1, 1]
    waits.clear()
    clipped = amp.wrap_optimizer(_trainer(net), max_grad_norm=1.0)
    _backward(net, clipped)
    clipped.step(1)
    assert waits == [1]


def test_numpy_arrays_of_mxnet_train_too():
    amp = ampx.init("mxnet", level="O0", loss_scale="dynamic")
    mx.npx.set_np()
    try:
        net = gluon.nn.Dense(1, in_units=2, use_bias=False)
        net.initialize(mx.init.One())
        opt = amp.wrap_optimizer(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}), max_grad_norm=1.0)
        for slope, after in ((math.inf, 1.0), (1.0, 1.0 - math.sqrt(0.5))):
            with autograd.record():
                loss = (net(mx.np.ones((1, 2))) * slope).sum()
            with ampx.scale_loss(loss, opt) as scaled:
                scaled.backward()
            opt.step(1)
            # float32 has 24 bits; the norm and the two products round three times.
            np.testing.assert_allclose(net.weight.data().asnumpy(), [[after, after]], rtol=3 * 2.0**-24 / after)
    finally:
        mx.npx.reset_np()


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_sparse_gradients_are_scaled_checked_and_clipped(amp, max_grad_norm):
    layer = gluon.nn.Embedding(5, 2, sparse_grad=True)
    layer.initialize(mx.init.One())
    raw = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 1.0})
    opt = amp.wrap_optimizer(raw, max_grad_norm=max_grad_norm)
    # Four ones: a norm of 2, cut to 1.
    step = 1.0 if max_grad_norm is None else 0.5
    for slope, after in ((math.inf, 1.0), (1.0, 1.0 - step)):
        with autograd.record():
            loss = (layer(mx.nd.arange(1, 5, 2)) * slope).sum()
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()
        opt.step(1)
        rows = layer.weight.data().asnumpy()[:, 0].tolist()
        assert rows == [1.0, after, 1.0, after, 1.0]
        assert opt.last_step.applied is (slope == 1.0)


def test_mxnets_own_loss_scaling_is_refused(amp, dense, monkeypatch):
    raw = _trainer(dense())
    raw._amp_loss_scaler = object()  # what amp.init_trainer sets
    with pytest.raises(ampx.ProtocolError, match="init_trainer"):
        amp.wrap_optimizer(raw)


@pytest.mark.parametrize("masters", [False, True])
def test_low_precision_parameters_need_master_weights(amp, weights, backward, masters):
    parameter = weights(1.0, 1.0, dtype="float16")
    raw = gluon.Trainer([parameter], "sgd", {"learning_rate": 2.0**-12, "multi_precision": masters})
    if not masters:
        with pytest.raises(ampx.LowPrecisionParametersError, match="multi_precision"):
            amp.wrap_optimizer(raw)
        return
    opt = amp.wrap_optimizer(raw, loss_scale=8.0)
    for _ in range(4):  # each update is lost in float16, where 1 - 2**-12 is 1; four are not
        backward(lambda: parameter.data().sum(), opt)
        opt.step(1)
    assert parameter.data().asnumpy().tolist() == [1 - 2.0**-10] * 2


def test_gradients_that_are_new_arrays_are_checked_too(amp, weights, backward):
    """What a step knows of the gradients holds while they are the same arrays: here a layer was frozen meanwhile."""
    weight = weights(1.0, 2.0)
    opt = ampx.wrap_optimizer(mx.gluon.Trainer([weight], "sgd", {"learning_rate": 0.5}))
    backward(lambda: weight.data().sum(), opt)
    opt.step(1)
    weight.grad_req = "null"
    weight.grad_req = "write"
    backward(lambda: (weight.data() * mx.nd.array([float("inf"), 1.0])).sum(), opt)
    opt.step(1)
    assert not opt.last_step.applied
    assert weight.data().asnumpy().tolist() == [0.5, 1.5]


# -- what must not go wrong silently --------------------------------------------------------------------------------


def test_updating_by_the_raw_trainer_on_pending_gradients_is_refused(amp, dense):
    """As its step is, by the kit."""
    net = dense()
    raw = _trainer(net)
    opt = amp.wrap_optimizer(raw)
    _backward(net, opt)
    for unscales in (False, True):
        if unscales:
            ampx.unscale(opt)
        with pytest.raises(ampx.RawStepError, match="Call step"):
            raw.update(1)
    opt.step(1)
    assert net.weight.data().asnumpy().tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("disabled", [False, True])
def test_a_trainer_that_is_disabled_or_copied_carries_no_hook(dense, disabled):
    amp = ampx.init("mxnet", level="O0", enabled=not disabled)
    net = dense()
    raw = _trainer(net)
    opt = amp.wrap_optimizer(raw)
    _backward(net, opt)
    opt.step(1)
    if disabled:
        assert "_amp_loss_scaler" not in vars(raw)
    assert copy.copy(raw._optimizer) is not None
    twin = pickle.loads(pickle.dumps(raw))
    assert not isinstance(getattr(twin, "_amp_loss_scaler", None), OverflowHook)
    ampx.wrap_optimizer(twin)


def test_what_another_loss_left_on_the_parameters_is_not_applied(amp, weights, backward):
    """Gradients written outside of this trainer's scale_loss carry another factor, or none: MXNet calls them stale."""
    reached, left = weights(1.0, name="reached"), weights(1.0, name="left")
    opt = amp.wrap_optimizer(gluon.Trainer([reached, left], "sgd", {"learning_rate": 0.5}))
    with autograd.record():
        foreign = (reached.data() + left.data()).sum()
    foreign.backward()
    backward(lambda: reached.data().sum(), opt)
    with pytest.raises(UserWarning, match="`left`"):
        opt.step(1)
    opt.step(1, ignore_stale_grad=True)
    assert (reached.data().asnumpy().item(), left.data().asnumpy().item()) == (0.5, 1.0)


ADDING = (
    (1.0, 2.0),  # every step adds to what the steps before left
    (0.5, 4.0),
    (2.0, -1.0),
    (1.0, 0.25),
    (3.0, 1.0),
)


def _never_cleared(opt, both, ignore_stale_grad=False):
    first, second = both
    for slope, bias in ADDING:
        with autograd.record():
            loss = (first.data() * slope).sum()
            if not (ignore_stale_grad and bias < 0):
                loss = loss + (second.data() * bias).sum()
        if isinstance(opt, ampx.WrappedOptimizer):
            with ampx.scale_loss(loss, opt) as scaled:
                scaled.backward()
        else:
            loss.backward()
        opt.step(1, ignore_stale_grad)
    return [parameter.data().asnumpy().tolist() for parameter in both]


@pytest.mark.parametrize("ignore_stale_grad", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_grad_value": 1e6}])
def test_adding_gradients_that_are_never_cleared_give_the_weights_of_plain_mxnet(weights, options, ignore_stale_grad):
    """While the scale grows; powers of two, so that the weights are the same bits."""
    amp = ampx.init("mxnet", level="O0", loss_scale=ampx.LossScale(init_scale=2.0**4, growth_interval=2))
    plain, scaled = ([weights(1.0, 2.0, name=name, grad_req="add") for name in ("one", "other")] for _ in range(2))
    raw = gluon.Trainer(plain, "sgd", {"learning_rate": 0.5, "momentum": 0.5})
    opt = amp.wrap_optimizer(gluon.Trainer(scaled, "sgd", {"learning_rate": 0.5, "momentum": 0.5}), **options)
    assert _never_cleared(opt, scaled, ignore_stale_grad) == _never_cleared(raw, plain, ignore_stale_grad)
    assert opt.loss_scale == 2.0**6


def test_adding_to_gradients_of_another_loss_is_refused(amp, dense, backward):
    """The discriminator's gradients of the generator's loss carry the generator's scale."""
    net = dense(grad_req="add")
    opt = amp.wrap_optimizer(_trainer(net))
    foreign = amp.wrap_optimizer(_trainer(dense()), loss_scale=4.0)
    backward(lambda: net(mx.nd.ones((1, 2))).sum(), foreign)
    with pytest.raises(ampx.ProtocolError, match=r"another backward or trainer's step where.*scale_loss with all"):
        _backward(net, opt)
    opt.zero_grad()
    _backward(net, opt)
    opt.step(1)
    assert net.weight.data().asnumpy().tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bfloat16)])
def test_adding_to_gradients_of_another_trainer_of_the_same_parameter_is_refused(weights, backward, dtype, steps):
    """They carry its scale, also where a step has used them; in bfloat16 on the CPU it is ampx that adds."""
    level = {"level": "O0"} if dtype == "float32" else {"dtype": dtype}
    amp, weight = ampx.init("mxnet", **level), weights(1.0, grad_req="add")
    raws = [gluon.Trainer([weight], "sgd", {"learning_rate": 0.5}) for _ in range(2)]
    first, second = (amp.wrap_optimizer(raw, loss_scale=scale) for raw, scale in zip(raws, (1024.0, 8.0), strict=True))
    backward(lambda: weight.data().sum(), first)
    if steps:
        first.step(1)
    before = weight.grad().asnumpy().tolist()
    with pytest.raises(ampx.ProtocolError, match=r"another backward or trainer's step where grad_req='add'"):
        backward(lambda: weight.data().sum(), second)
    assert weight.grad().asnumpy().tolist() == before
    second.zero_grad()
    backward(lambda: 2 * weight.data().sum(), second)
    second.step(1)
    assert weight.data().asnumpy().tolist() == [-0.5 * steps]


def test_a_refused_loss_forgets_nothing_of_true_gradients_that_the_next_backward_overwrites(amp, weights, backward):
    """The scale that is shared with a trainer whose step was skipped still waits for the step."""
    parameters = weights(1.0), weights(1.0, name="other")
    raws = [gluon.Trainer([parameter], "sgd", {"learning_rate": 0.5}) for parameter in parameters]
    opts = amp.wrap_optimizer(raws)
    for parameter, opt, slope in zip(parameters, opts, (1.0, math.inf), strict=True):
        backward(lambda parameter=parameter, slope=slope: parameter.data().sum() * slope, opt)
    opts[1].step(1)
    ampx.unscale(opts[0])
    before = amp.state_dict()
    with pytest.raises(ampx.LossDtypeError):
        ampx.scale_loss(mx.nd.ones(1, dtype="int32"), opts[0]).__enter__()
    assert amp.state_dict() == before
    opts[0].step(1)
    assert opts[0].last_step.applied
    assert parameters[0].data().asscalar() == 0.5


def test_scale_loss_refused_after_allreduce_grads_leaves_gradients_that_add(weights, backward):
    amp = ampx.init("mxnet", level="O0", loss_scale=8.0)
    weight = weights(1.0, grad_req="add", ctx=[mx.cpu(0), mx.cpu(1)])
    opt = amp.wrap_optimizer(gluon.Trainer([weight], "sgd", {"learning_rate": 0.5}), max_grad_value=1e6)
    backward(lambda: [data.sum() for data in weight.list_data()], opt)
    opt.step(1)
    opt.allreduce_grads()
    before = [gradient.asnumpy().tolist() for gradient in weight.list_grad()]
    with pytest.raises(ampx.ProtocolError, match="after allreduce_grads"):
        backward(lambda: [data.sum() for data in weight.list_data()], opt)
    assert [gradient.asnumpy().tolist() for gradient in weight.list_grad()] == before


def test_gradients_that_a_body_which_raised_left_add_up_as_in_plain_mxnet(weights, backward):
    """They carry its scale, which is not that of the next."""
    amp = ampx.init("mxnet", level="O0")
    weight, other = weights(1.0, grad_req="add"), weights(1.0, name="other", grad_req="add")
    opt, second = (
        amp.wrap_optimizer(gluon.Trainer([parameter], "sgd", {"learning_rate": 0.5}), loss_scale=scale)
        for parameter, scale in ((weight, 8.0), (other, 4.0))
    )
    backward(lambda: weight.data().sum() * 2, opt)
    opt.step(1)

    with autograd.record():
        loss = weight.data() + other.data()
    with pytest.raises(KeyError, match="mine"), ampx.scale_loss(loss, [opt, second]):
        raise KeyError("mine")
    backward(lambda: weight.data().sum(), opt)
    opt.step(1)
    assert weight.data().asscalar() == 1.0 - 0.5 * 2 - 0.5 * 3


@pytest.mark.parametrize("verb", ["step", "unscale"])
@pytest.mark.parametrize("kernel", ["all_finite", "asnumpy"])
def test_a_step_after_a_kernel_had_failed_divides_once_or_is_refused(dense, monkeypatch, verb, kernel):
    """Clipping needs true gradients, so they are divided before they are tested."""
    amp = ampx.init("mxnet", level="O0", loss_scale=1024.0)
    net = dense()
    opt = amp.wrap_optimizer(_trainer(net), max_grad_norm=100.0)
    _backward(net, opt)

    def fail(*_, **__):
        raise mx.MXNetError("the device is gone")

    def act():
        if verb == "unscale":
            ampx.unscale(opt)
        opt.step(1)

    with monkeypatch.context() as patch:
        if kernel == "asnumpy":
            patch.setattr(mx.nd.NDArray, "asnumpy", fail)
        else:
            for name in ("_multi_all_finite", "_all_finite"):
                patch.setattr(gradients, name, fail)
        with pytest.raises(mx.MXNetError):
            act()
    with pytest.raises(ampx.ProtocolError, match=r"interrupted .*Call opt\.zero_grad"):
        opt.step(1)
    assert net.weight.data().asnumpy().tolist() == [[1.0, 1.0]]
    opt.zero_grad()
    _backward(net, opt)
    opt.step(1)
    assert net.weight.data().asnumpy().tolist() == [[0.5, 0.5]]


def test_weights_written_between_wrapping_and_the_first_step_count(amp, weights, backward):
    """As a broadcast or an initialization writes them: MXNet makes masters in the first step, of what is there then."""
    parameter = weights(1.0, 1.0, dtype="float16")
    options = {"learning_rate": 0.5, "multi_precision": True}
    opt = amp.wrap_optimizer(gluon.Trainer({"w": parameter}, "sgd", options), loss_scale=4.0)
    parameter.set_data(mx.nd.array([0.25, 0.25], dtype="float16"))
    for expected in (-0.25, -0.75):
        backward(lambda: parameter.data().astype("float32").sum(), opt)
        opt.step(1)
        assert parameter.data().asnumpy().tolist() == [expected, expected]


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("first", ["unscale", "clip"])
@pytest.mark.parametrize("then", ["step", "unscale"])
def test_a_gradient_that_another_trainer_made_true_is_not_divided_again(amp, weights, backward, then, first, grad_req):
    """It is refused; after that trainer's step the gradient is used up, as in plain MXNet."""
    own, others, shared = (weights(0.0, name=name, grad_req=grad_req) for name in "abs")
    raws = [gluon.Trainer(pair, "sgd", {"learning_rate": 1.0}) for pair in ([own, shared], [shared, others])]
    first_trainer, another = (amp.wrap_optimizer(raw) for raw in raws)
    backward(lambda: own.data() * 1 + others.data() * 2 + shared.data() * 4, [first_trainer, another])
    ampx.unscale(first_trainer) if first == "unscale" else ampx.clip_grad_norm(first_trainer, 100.0)
    with pytest.raises(ampx.ProtocolError, match="another trainer holds parameters of this one"):
        another.step(1) if then == "step" else ampx.unscale(another)
    assert [parameter.data().asscalar() for parameter in (own, others, shared)] == [0.0, 0.0, 0.0]
    first_trainer.step(1)
    another.step(1, ignore_stale_grad=True)
    assert [parameter.data().asscalar() for parameter in (own, others, shared)] == [-1.0, -2.0, -4.0]
