"""The kit on PaddlePaddle."""

import functools
import math
import pathlib
import random
import warnings
from typing import Any, ClassVar

import pytest

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "No ccache found", UserWarning)  # paddle says so on import
    paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

from interrupted_steps import ClosureTraining, InterruptedStepSuite, Training

from ampx.testing import BackendSuite, FuzzSuite, Harness, PluginSuite
from ampx_paddle import devices
from ampx_paddle.scaler import GradScaler
from matrix import MatrixSuite
from transfer import TransferSuite


class Pull(paddle.autograd.PyLayer):
    """The sum of a parameter, with derivatives of the caller's choice."""

    @staticmethod
    def forward(ctx, parameter, slopes):
        ctx.save_for_backward(slopes)
        return parameter.detach().astype("float32").sum()

    @staticmethod
    def backward(ctx, upstream):
        (slopes,) = ctx.saved_tensor()
        return upstream * slopes


class QuietNorm(paddle.nn.BatchNorm1D):
    """Batch normalization, which warns in every training step that it does what it should."""

    def forward(self, inputs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return super().forward(inputs)


class Twice(paddle.nn.Layer):
    def forward(self, x):
        return x * 1, x * 2


class PaddleHarness(Harness):
    framework, plugin, device = "paddle", "ampx_paddle", "cpu"
    converts_to = "bfloat16" if devices.programs_compute_bfloat16() else None
    returns_low = False  # on a CPU
    closures = True
    clears_to_zero, copies, guards_raw_steps, watches_others = True, ("deepcopy",), True, True
    watches_true, shares_parameters, tells_rates = True, True, True

    def __init__(self):
        paddle.set_device(self.device)

    def tensor(self, values, dtype):
        return paddle.to_tensor(values, dtype=dtype, place=self._place())

    def dtype_of(self, tensor):
        return str(tensor.dtype).removeprefix("paddle.")

    def numbers(self, tensor):
        wide = tensor.detach().astype("float32") if tensor.is_floating_point() else tensor
        return wide.flatten().tolist()

    def parameter(self, values):
        initial = paddle.nn.initializer.Assign(values)
        return paddle.create_parameter([len(values)], "float32", default_initializer=initial)

    def optimizer(self, parameters, momentum):
        if momentum:
            return paddle.optimizer.Momentum(0.5, momentum=0.5, parameters=parameters)
        return paddle.optimizer.SGD(0.5, parameters=parameters)

    def set_rate(self, raw, rate):
        raw.set_lr(rate)

    def optimizer_state(self, raw):
        # Paddle makes momenta of zeros as soon as somebody tries to step, refused or not.
        momenta = [value.tolist() for value in raw.state_dict().values()]
        return [numbers for numbers in momenta if any(numbers)]

    def loss(self, parameters, gradients):
        pairs = zip(parameters, gradients, strict=True)
        return sum(Pull.apply(p, self.tensor(slopes, "float32").reshape(p.shape)) for p, slopes in pairs)

    def backward(self, scaled, parameters):
        scaled.backward()

    def gradients(self, parameters):
        return [None if p.grad is None else p.grad.tolist() for p in parameters]

    def write_gradients(self, raw, parameters, gradients):
        for parameter, values in zip(parameters, gradients, strict=True):
            # Not `parameter.grad = ...`: after clear_grad the next backward overwrites that, in plain Paddle too.
            parameter._set_grad_ivar(self.tensor(values, "float32"))

    def zero_grad(self, opt):
        opt.clear_grad()

    def casting(self):
        return paddle.amp.is_autocast_enabled(), str(paddle.amp.get_autocast_dtype())

    def computes_in(self):
        ones = paddle.ones([2, 2]).to(self._place())
        return self.dtype_of(ones @ ones)

    def operation(self):
        return paddle.matmul

    def model(self):
        return paddle.nn.Linear(2, 2)

    def chain(self, weights, inputs, noise=False):
        layers = [paddle.nn.Linear(1, 1, bias_attr=False) for _ in weights]
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight.set_value(paddle.full([1, 1], weight))
        names = [str(position) for position in range(len(layers))]
        behind = [QuietNorm(1), paddle.nn.Dropout(0.5)] if noise else []
        model = paddle.nn.Sequential(*layers, *behind)
        batch = paddle.to_tensor([[value] for value in inputs], "float32")
        return model, lambda model: model(batch).astype("float32").sum(), names

    def fork(self, inputs):
        model, _, _ = self.chain((1.0,), (1.0,))
        model.add_sublayer("1", Twice())

        def step(model):
            first, second = model(self.batch(inputs))
            return first.astype("float32").sum() + 3 * second.astype("float32").sum()

        return model, step, "1"

    def larger(self, model):
        larger = paddle.nn.Sequential(model)
        return larger, "0", lambda batch: larger[0](batch)

    def shipped(self, weights, norm=False):
        model, _, names = self.chain(weights, (1.0,))
        if norm:
            model.add_sublayer(str(len(weights)), QuietNorm(1))
            names = [*names, str(len(weights))]
        layers = dict(model.named_children())
        self.names = {name: [value.name for value in layers[name].state_dict().values()] for name in layers}
        return model, names

    def batch(self, inputs):
        return paddle.to_tensor([[value] for value in inputs], "float32", place=self._place())

    def stored(self, model, layer):
        names = tuple(self.names[layer])  # with which those of copies begin
        return {self.dtype_of(value) for value in model.state_dict().values() if value.name.startswith(names)}

    def model_state(self, model):
        state = {name: value.tolist() for name, value in model.state_dict().items()}
        gradients = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
        drawn = [word for word in str(paddle.get_rng_state()[0]).split() if not word.startswith("0x")]  # an address
        return state, gradients, drawn, random.getstate()

    def parameters_of(self, model):
        return [parameter for parameter in model.parameters() if not parameter.stop_gradient]

    def surroundings(self):
        return paddle.get_default_dtype(), paddle.get_device(), paddle.is_grad_enabled()

    def _place(self):
        return paddle.CUDAPlace(0) if self.device == "gpu" else paddle.CPUPlace()


class TestCpu(BackendSuite):
    harness = PaddleHarness


class TestInterruptedSteps(InterruptedStepSuite):
    harness = PaddleHarness
    session: ClassVar[Any] = {"level": "O0"}
    cases: ClassVar[Any] = {
        **InterruptedStepSuite.cases,
        "closure": {"by": "closure"},
    }


class ScalerTraining(Training):
    """A script with the scaler that Paddle's documents have."""

    @functools.cached_property
    def scaler(self):
        return GradScaler(*(bench.opt for bench in self.benches))

    @property
    def parts(self):
        """Where a loss was scaled whose backward did not come, Paddle steps with the zeros that clearing left."""
        rows = [row for bench in self.benches for row in self.subject.gradients(bench.parameters)]
        return super().parts if any(map(any, filter(None, rows))) else [0.0, *super().parts]

    def scaled_backward(self, loss, loss_id, parameters):
        self.scaler.scale(loss).backward()

    def step(self, size):
        for bench in self.benches:
            self.scaler.step(bench.opt)
            self.scaler.update()


class TestInterruptedStepsOfAScaler(TestInterruptedSteps):
    training = ScalerTraining
    cases: ClassVar[Any] = {"scaler": {}}


class LbfgsHarness(PaddleHarness):
    def optimizer(self, parameters, momentum):
        return paddle.optimizer.LBFGS(0.5, max_iter=2, parameters=parameters)


# Paddle's LBFGS copies a tensor in a way that Paddle warns of.
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
class TestInterruptedLbfgs(TestInterruptedSteps):
    harness, training = LbfgsHarness, ClosureTraining
    cases: ClassVar[Any] = {"LBFGS": {"by": "closure"}, "LBFGS, overflow": {"by": "closure", "third": math.inf}}


class TestFuzz(FuzzSuite):
    harness = PaddleHarness


class GpuHarness(PaddleHarness):
    device, converts_to, returns_low = "gpu", None, True


on_gpu = pytest.mark.skipif(
    not (paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count()),
    reason="no CUDA device for paddle: the kit did not run on one",
)
# Paddle says at O3 that an optimizer without master copies accumulates in low precision, which is what O3 is.
accumulates = pytest.mark.filterwarnings("ignore:Accumulating with FP16/BF16 in optimizer")


@pytest.mark.gpu
@on_gpu
@accumulates
class TestOnGpu(BackendSuite):
    harness = GpuHarness


@pytest.mark.gpu
@on_gpu
@accumulates
class TestMatrixOnGpu(MatrixSuite):
    harness = GpuHarness


class TestPlugin(PluginSuite):
    plugin, framework, modules = "ampx_paddle", "paddle", ("paddle",)


class TestMatrix(MatrixSuite):
    harness = PaddleHarness


class TestTransfer(TransferSuite):
    harness = PaddleHarness
    states = pathlib.Path(__file__).parents[1] / "states"
