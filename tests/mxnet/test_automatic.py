"""`ampx run` in MXNet: scripts that know nothing of ampx."""

import json
import pathlib
import sys

import numpy as np
import pytest

import ampx
from ampx.backend import offer
from ampx.numerics.probe import Probe, Watching
from ampx.run import LossCurve, Run, RunSettings
from ampx.testing.kit.automation import Rates
from ampx_mxnet.compat import amp as native_amp, mx
from ampx_mxnet.run import automate
from ampx_mxnet.run.manager import ManagedTrainer
from processes import last_json

PROGRAMS = pathlib.Path(__file__).parents[1] / "programs"
autograd, gluon = mx.autograd, mx.gluon


@pytest.fixture
def run():
    return Run("mxnet", RunSettings(level="O0", device="cpu"))


@pytest.fixture
def scaling(run):
    """A run that scales, as on a GPU; the arithmetic stays float32, so that every result is the plain one exactly."""
    with automate(run):
        run.session(loss_scale=ampx.LossScale(init_scale=2.0**10, growth_interval=3))
        yield run


def both_ways(run, train):
    """Train on MXNet as it is, then automated and scaled."""
    plain = train()
    with automate(run):
        run.session(loss_scale=ampx.LossScale(init_scale=2.0**10, growth_interval=3))
        return plain, train()


def network(grad_req="write"):
    mx.random.seed(3)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4, activation="tanh", in_units=3), gluon.nn.Dense(1, in_units=4))
    net.initialize(mx.init.Normal(0.5))
    net.collect_params().setattr("grad_req", grad_req)
    return net


def weights(net):
    return [parameter.data().asnumpy().tolist() for parameter in net.collect_params().values()]


def batches(count, overflow=()):
    rng = np.random.default_rng(0)
    for position in range(count):
        values = rng.normal(size=(5, 3))
        if position in overflow:
            values[0, 0] = np.inf
        yield mx.nd.array(values)


# -- who looks on ------------------------------------------------------------------------------------------------


class Watcher:
    """Looks on as `ampx compare` and `ampx diagnose` do: watches the second step."""

    def __init__(self, run):
        self.backend, self.losses, self.steps, self.regions, self.readings = run.session().backend, [], 0, [], []

    def loss(self, read):
        self.losses.append(read)

    def stepped(self, steps):
        self.steps = steps
        for region, watch in self.regions:
            self.readings += watch.readings()
            region.__exit__(None, None, None)
        region = offer(self.backend, Probe).watch(None, Watching())
        self.regions = [(region, region.__enter__())] if steps == 1 else []


@pytest.mark.parametrize("dtype", ["scaled", "float32"])
def test_who_looks_on_reads_true_losses_and_the_blocks_of_a_hybridized_step(dtype):
    net, expected = network(), []
    net.hybridize()
    run = Run("mxnet", RunSettings(level="O1" if dtype == "float32" else "O0", dtype="float32", device="cpu"))
    with automate(run):
        if dtype == "scaled":
            run.session(loss_scale=2.0**10)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        observer = run.recorder.observer = Watcher(run)
        for batch in batches(3):
            with autograd.record():
                loss = (net(batch) ** 2).mean(axis=1)
            expected.append(float(loss.mean().asscalar()))
            loss.backward()
            trainer.step(5)
    assert [read() for read in observer.losses] == expected
    assert observer.steps == 3
    seen = [(reading.module, reading.direction) for reading in observer.readings]
    names = ["0.act", "0", "1", ""]
    assert seen == [*((name, "forward") for name in names), *((name, "backward") for name in ("", "1", "0", "0.act"))]


def test_the_rates_of_a_schedule_are_those_that_steps_used_or_would_have_used(scaling):
    scaling.recorder.observer = seen = Rates(scaling.recorder)
    schedule = mx.lr_scheduler.MultiFactorScheduler([1, 2], 0.5)
    net = network()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5, "lr_scheduler": schedule})
    for batch in batches(4, overflow=[1]):  # a skipped step does not move the schedule
        with autograd.record():
            loss = net(batch).mean()
        loss.backward()
        trainer.step(1)
    assert seen.rates == [(0.5,), (0.25,), (0.25,), (0.125,)]


@pytest.mark.bfloat16
def test_what_ran_is_that_of_the_run_where_shapes_were_told_before():
    """MXNet keeps the graph by which it inferred the shapes; a block that is not hybridized does not compute by it."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(1))
    net.initialize()
    batch = mx.nd.ones((2, 3))
    net(batch)
    run = Run("mxnet", RunSettings(dtype="bfloat16", device="cpu"))
    with automate(run):
        trainer = gluon.Trainer(net.collect_params(), "sgd")
        with autograd.record():
            loss = net(batch).mean()
        loss.backward()
        trainer.step(1)
    assert dict(run.recorder.ops) == {("Dense", "bfloat16"): 1}
    assert run.recorder.notes == []


def ran_once(net, batch):
    """Train one step in bfloat16."""
    net.initialize(mx.init.One())
    run = Run("mxnet", RunSettings(dtype="bfloat16", device="cpu"))
    with automate(run):
        trainer = gluon.Trainer(net.collect_params(), "sgd")
        with autograd.record():
            loss = net(batch).mean()
        loss.backward()
        trainer.step(1)
    return run.recorder


@pytest.mark.bfloat16
def test_a_run_in_which_nothing_was_cast_says_so():
    """MXNet has no recurrent layers in bfloat16."""
    (note,) = ran_once(gluon.rnn.LSTM(2, input_size=2), mx.nd.ones((1, 1, 2))).notes
    assert "no operation of the first steps computed in bfloat16" in note


@pytest.mark.bfloat16
def test_operators_of_an_imported_graph_are_counted():
    data = mx.sym.var("data", dtype="float32")
    block = gluon.SymbolBlock(mx.sym.softmax(mx.sym.FullyConnected(data, num_hidden=2, name="fc")), data)
    recorder = ran_once(block, mx.nd.ones((1, 2)))
    assert dict(recorder.ops) == {("FullyConnected", "bfloat16"): 1, ("softmax", "float32"): 1}
    assert recorder.notes == []


def test_losses_that_are_numpy_arrays_are_read(run):
    with mx.util.np_shape(True), mx.util.np_array(True), automate(run):
        net = gluon.nn.Dense(1, in_units=2, use_bias=False)
        net.initialize(mx.init.One())
        trainer = gluon.Trainer(net.collect_params(), "sgd")
        run.recorder.curve = LossCurve()
        with autograd.record():
            loss = net(mx.np.array([[1.0, 2.0], [3.0, 4.0]]))
        loss.backward()
        trainer.step(1)
    assert run.recorder.curve.points() == [(1, 5.0, 0)]


@pytest.mark.bfloat16
def test_layers_of_numpy_arrays_that_return_float32_are_counted_as_they_compute():
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(2, in_units=2), gluon.nn.LayerNorm(in_channels=2))
        recorder = ran_once(net, mx.np.ones((1, 2)))
    assert dict(recorder.ops) == {("Dense", "bfloat16"): 1, ("LayerNorm", "float32"): 1}
    assert recorder.notes == []


# -- scripts -----------------------------------------------------------------------------------------------------


def command(*arguments):
    return last_json("-W", "ignore", "-m", "ampx", *arguments)


def test_an_unedited_script_reaches_the_accuracy_of_float32(tmp_path):
    """450 images: the standard error of a share of 0.98 is 0.0066, that of a difference of two 0.0093; twice that."""
    pytest.importorskip("typer", reason="the command line is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    script = PROGRAMS / "plain" / "mxnet_plain.py"
    head = f"import ampx_mxnet.compat, runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    plain = last_json("-W", "ignore", "-c", head)
    report = tmp_path / "out.json"
    done = command("run", "--framework", "mxnet", "--report", str(report), str(script))
    assert plain["metric"] > 0.95
    assert abs(done["metric"] - plain["metric"]) < 0.019
    facts = json.loads(report.read_text())
    assert facts["steps"] == len(done["losses"]) == len(plain["losses"])
    if facts["dtype"] == "bfloat16":
        assert {
            operation["dtype"] for operation in facts["ops"] if operation["op"] in ("Convolution", "FullyConnected")
        } == {"bfloat16"}


def test_a_script_that_uses_mxnets_amp_runs_on_ampx(tmp_path):
    pytest.importorskip("typer", reason="the command line is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    done = command("run", "--framework", "mxnet", str(PROGRAMS / "mxnet" / "gan.py"), "--amp", "--epochs", "1")
    assert len(done["losses"]) == 28


# -- loops, exactly -------------------------------------------------------------------------------------------------


def simple():
    net = network()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    for x in batches(8):
        with autograd.record():
            loss = net(x) ** 2
        loss.backward()
        trainer.step(5)
    return weights(net), trainer


def test_a_plain_loop_gives_the_weights_of_float32(run):
    (expected, _), (trained, trainer) = both_ways(run, simple)
    assert trained == expected
    assert isinstance(trainer, ManagedTrainer)
    assert run.recorder.steps == 8
    (record,) = run.recorder.optimizers.values()
    assert (record.kind, record.initial_scale) == ("SGD", 2.0**10)
    assert record.scales == [(3, 2.0**11), (6, 2.0**12)]
    assert set(run.recorder.seconds) == {"forward", "backward", "step"}


@pytest.mark.bfloat16
def test_the_lines_by_hand_wrap_every_trainer_of_the_script():
    run = Run("mxnet", RunSettings(dtype="bfloat16", device="cpu"))
    with automate(run):
        for kind in ("sgd", "adam"):
            net = network()
            trainer = gluon.Trainer(net.collect_params(), kind, {"learning_rate": 0.01})
            with autograd.record():
                loss = net(next(batches(1))) ** 2
            loss.backward()
            trainer.step(5)
        lines = run.explain()
    wraps = [line.partition("  # ") for line in lines if "wrap_optimizer(" in line]
    assert [origin.partition(" of test_automatic.py:")[0] for _, _, origin in wraps] == ["SGD", "Adam"]
    assert [call for call, _, _ in wraps] == [f"trainer_{n} = ampx.wrap_optimizer(trainer_{n})" for n in (1, 2)]
    assert any("scale_loss(loss, [trainer_1, trainer_2])" in line for line in lines)


def never_cleared():
    """Gradients of all steps add up, while the loss scale grows."""
    net = network("add")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    for x in batches(8):
        with autograd.record():
            loss = net(x) ** 2
        loss.backward()
        trainer.step(5)
    return weights(net)


def test_gradients_that_are_never_cleared_add_up_as_in_float32(run):
    expected, trained = both_ways(run, never_cleared)
    assert trained == expected
    assert run.recorder.steps == 8


def adversarial():
    """Two trainers; the second loss reaches the parameters of the first as well."""
    first, second = network(), network()
    trainers = [gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}) for net in (first, second)]
    for x in batches(8):
        with autograd.record():
            loss = first(x) ** 2
        loss.backward()
        trainers[0].step(5)
        with autograd.record():
            loss = (first(x) - second(x)) ** 2
        loss.backward()
        trainers[1].step(5)
    return weights(first), weights(second)


def test_two_trainers_get_the_weights_of_float32_each(run):
    expected, trained = both_ways(run, adversarial)
    assert [optimizer.steps for optimizer in run.recorder.optimizers.values()] == [8, 8]
    assert trained == expected


@pytest.mark.parametrize("numpy_arrays", [False, True])
def test_gradients_read_through_an_array_are_true(scaling, numpy_arrays):
    with mx.util.np_shape(numpy_arrays), mx.util.np_array(numpy_arrays):
        net = network()
        trainer = gluon.Trainer(net.collect_params(), "sgd")
        (x,) = batches(1)
        with autograd.record():
            loss = net(x.as_np_ndarray() if numpy_arrays else x).sum()
        loss.backward()
        weight = next(iter(net.collect_params().values()))
        carried = weight._grad[0].asnumpy()
        assert np.abs(weight.data().grad.asnumpy() * 2.0**10 - carried).max() == 0
        trainer.step(1)
    assert trainer.last_step.applied


def clipped_on_contexts():
    """As MXNet's manual says: gradients are added up, clipped on each context, and then used."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = network()
    net.collect_params().reset_ctx(contexts)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, update_on_kvstore=False)
    norms = []
    for x in batches(4):
        with autograd.record():
            losses = [(net(x.as_in_context(context)) ** 2).mean() for context in contexts]
        autograd.backward(losses)
        trainer.allreduce_grads()
        for context in contexts:
            gradients = [parameter.grad(context) for parameter in net.collect_params().values()]
            norms.append(gluon.utils.clip_global_norm(gradients, 0.25))
        trainer.update(2)
    return weights(net), norms


def test_gradients_of_several_contexts_are_true_once_they_are_added_up(run):
    expected, trained = both_ways(run, clipped_on_contexts)
    assert trained == expected
    assert run.recorder.steps == 4


class Recomputed(autograd.Function):
    """Computes a block again in the backward, by a backward of its own."""

    def __init__(self, block):
        super().__init__()
        self._block = block

    def forward(self, x):
        self.save_for_backward(x)
        with autograd.pause():
            return self._block(x)

    def backward(self, gradient):
        x = self.saved_tensors[0].copy()
        x.attach_grad()
        with autograd.record():
            output = self._block(x)
        output.backward(gradient)
        return x.grad


def recomputed():
    net = network()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for x in batches(4):
        with autograd.record():
            loss = (Recomputed(net[1])(net[0](x)) ** 2).mean()
        loss.backward()
        mx.nd.waitall()
        trainer.step(1)
    return weights(net)


def test_a_backward_inside_of_a_backward_is_not_scaled_again(run):
    expected, trained = both_ways(run, recomputed)
    assert trained == expected
    assert run.recorder.steps == 4


def averaged_by_hand(bad=()):
    """Gradients that the script sums over processes itself; in some steps the other process overflowed."""
    net = network()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    for position, x in enumerate(batches(6)):
        with autograd.record():
            loss = (net(x) ** 2).mean()
        loss.backward()
        for parameter in net.collect_params().values():
            gradient = parameter.list_grad()[0]
            gradient[:] = (gradient + (np.inf if position in bad else gradient)) / 2
        trainer.step(1)
    return weights(net)


def test_an_overflow_that_comes_after_the_script_looked_is_skipped(scaling):
    trained = averaged_by_hand(bad=(2,))
    assert all(np.isfinite(weights).all() for weights in trained)
    (record,) = scaling.recorder.optimizers.values()
    assert record.skipped == [3]
    assert record.scales[0] == (3, 2.0**9)


# -- mixed precision of the script's own, which is told ----------------------------------------------------------------


def by_mxnets_amp(net):
    from mxnet.contrib import amp

    amp.init("bfloat16")
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    amp.init_trainer(trainer)
    return trainer, amp.scale_loss


@pytest.mark.bfloat16
def test_what_a_script_does_with_mxnets_amp_is_told(run):
    with automate(run):
        net = network()
        trainer, scale_loss = by_mxnets_amp(net)
        for x in batches(5, overflow=(1,)):
            with autograd.record():
                loss = net(x) ** 2
                with scale_loss(loss, trainer) as scaled:
                    autograd.backward(scaled)
            trainer.step(5)
        assert not isinstance(trainer, ManagedTrainer)
    assert (run.amp.effective.dtype, run.amp.effective.level) == ("bfloat16", "O1")
    (record,) = run.recorder.optimizers.values()
    assert (record.kind, record.initial_scale, record.steps, record.skipped) == ("Adam", 65536.0, 5, [2])
    assert record.scales == [(2, 32768.0)]
    facts = run.recorder.to_json()
    assert facts["sampled_steps"] == 3
    assert run.recorder.ops["Dense", "bfloat16"] == 3  # the other layer ends in an activation, which is float32
    assert set(facts["seconds"]) == {"forward", "backward", "step"}
    assert "by itself, with mxnet.contrib.amp;" in facts["notes"][0]
    assert run.explain() == ("the script has it by hand: its own calls decide",)


def test_a_script_may_import_the_compatibility_module_first(tmp_path):
    """The backend is loaded while that module imports MXNet, and imports from it."""
    pytest.importorskip("typer", reason="the command line is not installed")
    script = tmp_path / "train.py"
    script.write_text("from ampx_mxnet.compat import mx\nprint(mx.nd.ones(1).asscalar())")
    assert command("run", str(script)) == 1.0


# -- what the script holds -------------------------------------------------------------------------------------------


class CountingTrainer(gluon.Trainer):
    calls = 0

    def train(self, loss):
        loss.backward()
        self.step(1)

    def step(self, batch_size, ignore_stale_grad=False):
        self.calls += 1
        super().step(batch_size, ignore_stale_grad)


def test_a_trainer_of_the_scripts_own_class_stays_one(scaling):
    net = network()
    trainer = CountingTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    before = weights(net)
    for x in batches(3):
        with autograd.record():
            loss = net(x).mean()
        trainer.train(loss)
    assert isinstance(trainer, CountingTrainer)
    assert trainer.calls == 3
    assert trainer.last_step.scale == 2.0**10
    assert weights(net) != before
    moved = [np.abs(np.subtract(*pair)).max() for pair in zip(before, weights(net), strict=True)]
    assert max(moved) < 1  # with gradients that carry the scale, by hundreds


def test_backward_before_any_trainer_is_mxnets_own(scaling):
    x = mx.nd.array([1.0, 2.0])
    x.attach_grad()
    with autograd.record():
        y = (x * x).sum()
    y.backward()
    assert x.grad.asnumpy().tolist() == [2.0, 4.0]


# -- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_managed_is_refused_with_the_reason(scaling):
    net = network()
    gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=True)
    with pytest.raises(ampx.RunRefusedError, match=r"test_automatic\.py:\d+: .*update_on_kvstore=True"):
        autograd.record()
    assert scaling.refusal is not None


def by_array(net):
    x = mx.nd.ones((1, 3))
    x.attach_grad()
    with autograd.record():
        loss = net(x).sum()
    loss.backward()


def by_hand(net):
    other = network()
    with autograd.record():
        loss = net(other(mx.nd.ones((1, 3))).broadcast_to((1, 3))).sum()
    loss.backward()
    next(iter(other.collect_params().values())).grad()


@pytest.mark.parametrize("use", [by_array, by_hand])
def test_scaled_gradients_of_what_no_trainer_holds_are_refused(scaling, use):
    """With a loss scale only: without one they are what the script expects."""
    net = network()
    gluon.Trainer(net.collect_params(), "sgd")
    with pytest.raises(ampx.RunRefusedError, match="no trainer holds"):
        use(net)


@pytest.mark.parametrize("use", [by_array, by_hand])
def test_gradients_of_what_no_trainer_holds_are_the_scripts_where_nothing_is_scaled(run, use):
    with automate(run):
        net = network()
        gluon.Trainer(net.collect_params(), "sgd")
        use(net)


def test_float16_on_a_cpu_is_refused():
    run = Run("mxnet", RunSettings(dtype="float16", device="cpu"))
    with automate(run), pytest.raises(ampx.InvalidOptionError, match="'float16' is not supported"):
        gluon.Trainer(network().collect_params(), "sgd")


# -- the end ---------------------------------------------------------------------------------------------------------


def patched():
    trainer, block, parameter = gluon.Trainer, gluon.Block, gluon.Parameter
    return [
        *(vars(trainer)[name] for name in ("__init__", "step", "update")),
        block.__call__,
        parameter.grad,
        parameter.list_grad,
        mx.nd.NDArray.grad,
        mx.np.ndarray.grad,
        mx.nd.NDArray.backward,
        autograd.backward,
        autograd.grad,
        autograd.mark_variables,
        autograd.Function.__call__,
        mx.operator.register,
        autograd.record,
        mx.nd.FullyConnected,
        mx.contrib.amp,
        sys.modules["mxnet.contrib.amp"],
        "mxnet.amp" in sys.modules,
    ]


@pytest.mark.bfloat16
def test_leaving_restores_every_patch():
    before = patched()
    run = Run("mxnet", RunSettings(dtype="bfloat16", device="cpu"))

    def script():
        simple()
        assert all(now is not then for now, then in zip(patched()[:15], before[:15], strict=True))
        assert mx.contrib.amp is not native_amp
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), automate(run):
        script()
    assert patched() == before
