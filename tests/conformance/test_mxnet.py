"""The kit on MXNet."""

import importlib.util
import itertools
import pathlib
import random
from typing import Any, ClassVar

import pytest

if importlib.util.find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed", allow_module_level=True)

import numpy as np
from interrupted_steps import InterruptedRegionSuite, InterruptedStepSuite, Training

import ampx
from ampx.testing import BackendSuite, FuzzSuite, Harness, PluginSuite
from ampx.testing.kit.orders import OrderTests
from ampx.testing.kit.windows import PerLossTests
from ampx_mxnet.compat import mx
from ampx_mxnet.devices import describe
from ampx_mxnet.dtypes import DTYPES, cast_tensor, name_of
from matrix import MatrixSuite
from transfer import TransferSuite


class Pull(mx.autograd.Function):
    """The sum of a parameter, with derivatives of the caller's choice."""

    def __init__(self, slopes):
        super().__init__()
        self.slopes = slopes

    def forward(self, values):
        return values.sum()

    def backward(self, upstream):
        return upstream * self.slopes


class Times(mx.gluon.nn.Dense):
    """A dense layer from 1 to 1 that takes any dtype, which MXNet's own does not."""

    def hybrid_forward(self, space, inputs, weight):
        return super().hybrid_forward(space, inputs.astype("float32"), weight)


class MXNetHarness(Harness):
    framework, plugin, device, dtype = "mxnet", "ampx_mxnet", "cpu", "bfloat16"
    guards_raw_steps, brings_backwards, tells_rates = True, False, True

    def tensor(self, values, dtype):
        if dtype == "bfloat16":
            return self.tensor(values, "float32").astype(DTYPES["bfloat16"])
        tensor = mx.nd.empty((len(values),), dtype=dtype, ctx=self._context())
        tensor[:] = np.array(values, dtype)  # nd.array warns of SciPy, and the kit looks at warnings
        return tensor

    def dtype_of(self, tensor):
        return name_of(tensor.dtype)

    def numbers(self, tensor):
        values = tensor.data() if isinstance(tensor, mx.gluon.Parameter) else tensor
        if name_of(values.dtype) == "bfloat16":
            values = values.astype("float32")
        return values.asnumpy().flatten().tolist()

    def parameter(self, values):
        parameter = mx.gluon.Parameter("weight", shape=(len(values),), grad_req="add")
        parameter.initialize(mx.init.Constant(mx.nd.array(values)), ctx=self._context())
        return parameter

    def optimizer(self, parameters, momentum):
        options = {"learning_rate": 0.5, **({"momentum": 0.5} if momentum else {})}
        return mx.gluon.Trainer(parameters, "sgd", options)

    def set_rate(self, raw, rate):
        raw.set_learning_rate(rate)

    def optimizer_state(self, raw):
        momenta = [None if state is None else state.asnumpy().tolist() for state in raw._updaters[0].states.values()]
        return momenta, raw._optimizer.num_update, raw._scale

    def loss(self, parameters, gradients):
        with mx.autograd.record():
            pairs = zip(parameters, gradients, strict=True)
            # Times one, because MXNet's custom functions write nothing where a parameter's gradients are added up.
            return sum(
                Pull(self.tensor(slopes, "float32").reshape(p.shape))(cast_tensor(p.data() * 1, "float32"))
                for p, slopes in pairs
            )

    def recorded(self, compute):
        with mx.autograd.record():
            return compute()

    def nan_loss(self, parameters):
        return self.recorded(lambda: super(MXNetHarness, self).nan_loss(parameters))

    def wide_loss(self, parameters):
        with mx.autograd.record():
            # Every parameter takes part: MXNet's trainer insists on it.
            return parameters[0].data() * 2.0 + mx.nd.broadcast_mul(parameters[1].data(), mx.nd.zeros((2,)))

    def backward(self, scaled, parameters):
        scaled.backward()

    def gradients(self, parameters):
        return [p.grad().asnumpy().tolist() if p.data()._fresh_grad else None for p in parameters]

    def write_gradients(self, raw, parameters, gradients):
        for parameter, values in zip(parameters, gradients, strict=True):
            parameter.grad()[:] = np.array(values, "float32")
            parameter.data()._fresh_grad = True  # else the framework takes them for those of an old step

    def step(self, opt, gradients):
        opt.step(1)

    def step_closure(self, opt, closure):
        return opt.step(closure)

    def watch_update(self, raw, watch):
        update = raw._updaters[0]

        def watched(*args):
            watch()
            return update(*args)

        watched.states = update.states
        raw._updaters[0] = watched

    def zero_grad(self, opt):
        if hasattr(opt, "zero_grad"):
            opt.zero_grad()
            return
        for parameter in opt._params:
            parameter.zero_grad()
            parameter.data()._fresh_grad = False

    def casting(self):
        return self.computes_in(), mx.nd.FullyConnected, mx.sym.FullyConnected

    def computes_in(self):
        ones = mx.nd.ones((2, 2), ctx=self._context())
        return self.dtype_of(mx.nd.FullyConnected(ones, ones, num_hidden=2, no_bias=True))

    def operation(self):
        return mx.nd.FullyConnected

    def chain(self, weights, inputs, noise=False):
        model = mx.gluon.nn.HybridSequential()
        for weight in weights:
            layer = Times(1, in_units=1, use_bias=False)
            layer.initialize(mx.init.Constant(weight), ctx=self._context())
            model.add(layer)
        if noise:
            model.add(mx.gluon.nn.BatchNorm(in_channels=1), mx.gluon.nn.Dropout(0.5))
            model[len(weights)].initialize(ctx=self._context())
        batch = mx.nd.empty((len(inputs), 1), ctx=self._context())
        batch[:] = np.array(inputs, "float32").reshape(-1, 1)

        def step(model):
            with mx.autograd.record():
                return model(batch).astype("float32").sum()

        return model, step, [str(position) for position in range(len(weights))]

    def fork(self, inputs):
        model, _, _ = self.chain((1.0,), (1.0,))
        model.add(mx.gluon.nn.HybridLambda(lambda functions, x: (x * 1, x * 2)))

        def step(model):
            with mx.autograd.record():
                first, second = model(self.batch(inputs))
                return first.astype("float32").sum() + 3 * second.astype("float32").sum()

        return model, step, "1"

    def larger(self, model):
        larger = mx.gluon.nn.HybridSequential()
        larger.add(model)
        return larger, "0", lambda batch: larger[0](batch)

    def shipped(self, weights, norm=False):
        self.block, _, names = self.chain(weights, ())
        if norm:
            self.block.add(mx.gluon.nn.BatchNorm(in_channels=1))
            self.block[len(weights)].initialize(ctx=self._context())
            names = [*names, str(len(weights))]
        return self.block, names

    def batch(self, inputs):
        batch = mx.nd.empty((len(inputs), 1), ctx=self._context())
        batch[:] = np.array(inputs, "float32").reshape(-1, 1)
        return batch

    def stored(self, model, layer):
        names = self.block[int(layer)].collect_params()
        return {self.dtype_of(p) for name, p in model.collect_params().items() if name in names}

    def model_state(self, model):
        # Not the random state of MXNet, which tells nobody.
        parameters = model._collect_params_with_prefix().values()
        gradients = [
            None if p.grad_req == "null" else (p.grad().asnumpy().tolist(), p.data()._fresh_grad) for p in parameters
        ]
        return [p.data().asnumpy().tolist() for p in parameters], gradients, random.getstate()

    def model(self):
        model = mx.gluon.nn.Dense(2, in_units=2)
        model.initialize(ctx=self._context())
        return model

    def parameters_of(self, model):
        return [p for p in model.collect_params().values() if p.grad_req != "null"]

    def surroundings(self):
        return mx.autograd.is_recording(), mx.autograd.is_training(), mx.util.is_np_array()

    def _context(self):
        return mx.Context(self.device)


class TestCpu(BackendSuite):
    harness = MXNetHarness


class TestInFloat32(OrderTests, PerLossTests):
    """MXNet adds gradients up by itself here; where bfloat16 is cast, ampx does."""

    harness = MXNetHarness

    def start(self, loss_scale=None, **options):
        return super().start(loss_scale, **{"dtype": "float32", "level": "O0", **options})


class MXNetTraining(Training):
    def step(self, size):
        if self.by != "update":
            super().step(size)
            return
        for bench in self.benches:
            bench.opt.allreduce_grads()
            bench.opt.update(1)

    def step_raw(self):
        if self.benches[0].opt is not self.benches[0].raw:  # else it is taken over in place: there is no raw trainer
            super().step_raw()

    def look_after(self, place):
        assert {bench.raw._scale for bench in self.benches} == {1.0}, place


class TestInterruptedSteps(InterruptedStepSuite):
    harness, training = MXNetHarness, MXNetTraining
    session: ClassVar[Any] = {"level": "O0", "dtype": "float32"}
    refusals = (ampx.AmpxError, UserWarning)  # MXNet's own, of gradients that it calls stale
    takes_old_gradients, clears_one_by_one = False, True
    cases: ClassVar[Any] = {**InterruptedStepSuite.cases, "in place": {"in_place": True}}


class WritingHarness(MXNetHarness):
    """Has parameters whose gradients each backward overwrites."""

    grad_req, contexts, numbers_of_parameters = "write", [mx.cpu(0)], itertools.count()

    def parameter(self, values):
        name = f"weight{next(self.numbers_of_parameters)}"  # several contexts are told apart by names
        parameter = mx.gluon.Parameter(name, shape=(len(values),), grad_req=self.grad_req)
        parameter.initialize(mx.init.Zero(), ctx=self.contexts)
        parameter.set_data(mx.nd.array(values))
        return parameter

    def loss(self, parameters, gradients):
        losses = []
        with mx.autograd.record():
            for context in self.contexts:
                parts = []
                for parameter, slopes in zip(parameters, gradients, strict=True):
                    share = mx.nd.array([slope / len(self.contexts) for slope in slopes], ctx=context)
                    parts.append(Pull(share)(parameter.data(context) * 1))
                losses.append(sum(parts))
        return losses

    def backward(self, scaled, parameters):
        mx.autograd.backward(scaled)

    def numbers(self, tensor):
        return [number for values in tensor.list_data() for number in values.asnumpy().tolist()]


class TestInterruptedStepsThatOverwrite(TestInterruptedSteps):
    harness = WritingHarness
    cases: ClassVar[Any] = {
        name: case
        for name, case in TestInterruptedSteps.cases.items()
        if not ("losses" in case or "clears" in case or case.get("by") == "twice")
    }


class ContextsHarness(WritingHarness):
    contexts: ClassVar[Any] = [mx.cpu(0), mx.cpu(1)]


class TestInterruptedStepsOnContexts(TestInterruptedSteps):
    harness = ContextsHarness
    cases: ClassVar[Any] = {
        "contexts": {},
        "contexts, update": {"by": "update"},
        "contexts, unscale and clip by hand": {"by": "unscale"},
    }


class AddingContextsHarness(ContextsHarness):
    grad_req = "add"


class TestInterruptedStepsThatAddOnContexts(TestInterruptedSteps):
    harness = AddingContextsHarness
    copies = (1, 2)  # a step adds the gradients of all contexts up, in each
    cases: ClassVar[Any] = {"losses, contexts": {"losses": 2}}


computes_bfloat16 = pytest.mark.skipif(
    not describe("cpu").native | describe("cpu").emulated, reason="MXNet computes no bfloat16 on this CPU"
)


@computes_bfloat16
class TestInterruptedStepsInBfloat16(TestInterruptedSteps):
    """There ampx adds by itself: what it keeps aside for that must come back."""

    session: ClassVar[Any] = {}
    cases: ClassVar[Any] = {"accumulated": {"by": "twice"}}

    def test_gradients_that_were_kept_aside_for_an_optimizer_that_is_gone_are_not_added_to_others(self, name):
        for training, place in self.interruptions(name, 1):
            (bench,), training.benches = training.benches, []
            parameters, before = bench.parameters, bench.values()
            del bench
            for parameter in parameters:
                parameter.grad_req = "write"
            trainer = mx.gluon.Trainer(parameters, "sgd", {"learning_rate": 0.5})
            with mx.autograd.record():
                loss = sum((parameter.data() * 5).sum() for parameter in parameters)
            loss.backward()
            trainer.step(1)
            after = [self.subject.numbers(parameter) for parameter in parameters]
            assert after == [pytest.approx([value - 2.5 for value in values], abs=1e-5) for values in before], place


@computes_bfloat16
class TestInterruptedRegions(InterruptedRegionSuite):
    harness = MXNetHarness
    refusals = TestInterruptedSteps.refusals
    process_wide = (True,)  # entering the first region takes thousands of lines: tests/mxnet/test_interruptions.py

    def start(self, loss_scale=None, **options):
        self.layer = mx.gluon.nn.Dense(1, in_units=2, use_bias=False)
        self.layer.initialize(mx.init.One())
        self.layer.hybridize()
        return super().start(loss_scale, **options)

    def look(self):
        fine = mx.nd.full((1, 2), 1 + 2.0**-10)  # 1 in bfloat16, whose digits are eight
        product = mx.nd.FullyConnected(fine, mx.nd.ones((1, 2)), num_hidden=1, no_bias=True)
        return super().look(), self.subject.numbers(product), self.subject.numbers(self.layer(fine))


class TestFuzz(FuzzSuite):
    harness = MXNetHarness
    steps = 100  # each takes longer than ten without a framework


class GpuHarness(MXNetHarness):
    device, dtype = "gpu", "float16"


on_gpu = pytest.mark.skipif(not mx.context.num_gpus(), reason="no CUDA device for mxnet: the kit did not run on one")


@pytest.mark.gpu
@on_gpu
class TestOnGpu(BackendSuite):
    harness = GpuHarness


@pytest.mark.gpu
@on_gpu
class TestMatrixOnGpu(MatrixSuite):
    harness = GpuHarness


class TestPlugin(PluginSuite):
    plugin, framework, modules = "ampx_mxnet", "mxnet", ("ampx_mxnet.compat", "mxnet")


# What is on file is what a CPU with bfloat16 showed. Where there is none, the kit tests that it is refused, above.
@pytest.mark.bfloat16
@computes_bfloat16
class TestMatrix(MatrixSuite):
    harness = MXNetHarness


class TestTransfer(TransferSuite):
    harness = MXNetHarness
    states = pathlib.Path(__file__).parents[1] / "states"
