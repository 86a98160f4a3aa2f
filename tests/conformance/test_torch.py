"""The kit on PyTorch."""

import math
import pathlib
import sys
from typing import Any, ClassVar

import pytest
from hypothesis import settings

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from interrupted_steps import ClosureTraining, InterruptedRegionSuite, InterruptedStepSuite, Training  # noqa: E402

from ampx.testing import BackendSuite, FuzzSuite, Harness, PluginSuite  # noqa: E402
from ampx.testing.kit.windows import AccumulationTests, GroupTests, PerLossTests, SkipTests  # noqa: E402
from ampx_torch.casting import lstm  # noqa: E402
from matrix import MatrixSuite  # noqa: E402
from transfer import TransferSuite  # noqa: E402


class Pull(torch.autograd.Function):
    """The sum of a parameter, with derivatives of the caller's choice."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, slopes: Any) -> Any:
        ctx.save_for_backward(slopes)
        return parameter.detach().float().sum()

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        return upstream * ctx.saved_tensors[0], None


class Twice(torch.nn.Module):
    def forward(self, x):
        return x * 1, x * 2


class TorchHarness(Harness):
    framework, plugin, device = "torch", "ampx_torch", "cpu"
    dtype: ClassVar[Any] = "bfloat16"
    closures = True
    copies, guards_raw_steps, watches_others = ("deepcopy", "pickle"), True, True
    shares_parameters = tells_rates = True

    def tensor(self, values, dtype):
        return torch.tensor(values, dtype=getattr(torch, dtype), device=self.device)

    def dtype_of(self, tensor):
        return str(tensor.dtype).removeprefix("torch.")

    def numbers(self, tensor):
        return tensor.detach().flatten().tolist()

    def parameter(self, values):
        return torch.nn.Parameter(torch.tensor(values, device=self.device))

    def optimizer(self, parameters, momentum):
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.5 if momentum else 0.0)

    def set_rate(self, raw, rate):
        for group in raw.param_groups:
            group["lr"] = rate

    def optimizer_state(self, raw):
        return [
            None if (buffer := raw.state[p].get("momentum_buffer")) is None else buffer.tolist()
            for group in raw.param_groups
            for p in group["params"]
            if p in raw.state
        ]

    def loss(self, parameters, gradients):
        pairs = zip(parameters, gradients, strict=True)
        return sum(Pull.apply(p, torch.tensor(slopes, device=self.device).reshape(p.shape)) for p, slopes in pairs)

    def backward(self, scaled, parameters):
        scaled.backward()

    def gradients(self, parameters):
        return [None if p.grad is None else p.grad.tolist() for p in parameters]

    def write_gradients(self, raw, parameters, gradients):
        for parameter, values in zip(parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(torch.tensor(values))

    def casting(self):
        kinds = ("cpu", "cuda")
        state = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        return state, torch.is_autocast_cache_enabled()

    def computes_in(self):
        return self.dtype_of(torch.ones(2, 2, device=self.device) @ torch.ones(2, 2, device=self.device))

    def operation(self):
        return torch.matmul

    def model(self):
        return torch.nn.Linear(2, 2).to(self.device)

    def chain(self, weights, inputs, noise=False):
        layers = [torch.nn.Linear(1, 1, bias=False) for _ in weights]
        for layer, weight in zip(layers, weights, strict=True):
            torch.nn.init.constant_(layer.weight, weight)
        names = [str(position) for position in range(len(layers))]
        noises = [torch.nn.BatchNorm1d(1, affine=False), torch.nn.Dropout()] if noise else []
        model = torch.nn.Sequential(*layers, *noises).to(self.device)
        batch = torch.tensor(inputs, device=self.device).reshape(-1, 1)
        return model, lambda model: model(batch).float().sum(), names

    def fork(self, inputs):
        layers, _, _ = self.chain((1.0,), ())
        model, batch = layers.append(Twice()), self.batch(inputs)

        def step(model):
            first, second = model(batch)
            return first.float().sum() + 3 * second.float().sum()

        return model, step, "1"

    def larger(self, model):
        larger = torch.nn.Sequential(model)
        return larger, "0", lambda batch: larger[0](batch)

    def shipped(self, weights, norm=False):
        model, _, names = self.chain(weights, ())
        if norm:
            model.append(torch.nn.BatchNorm1d(1).to(self.device))
            names = [*names, str(len(weights))]
        return model.train(), names

    def batch(self, inputs):
        return torch.tensor(inputs, device=self.device).reshape(-1, 1)

    def stored(self, model, layer):
        tensors = model.get_submodule(layer).state_dict().values()
        return {self.dtype_of(tensor) for tensor in tensors if tensor.is_floating_point()}

    def model_state(self, model):
        tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
        return [tensor.tolist() for tensor in tensors], torch.get_rng_state().tolist()

    def surroundings(self):
        return torch.get_default_dtype(), torch.get_rng_state().tolist(), torch.is_grad_enabled()


class Float16Harness(TorchHarness):
    dtype = "float16"


# A hundred cases, as without a framework, take twenty seconds; fifteen reject every mutant of tests/kit/toy.
FEW = settings(max_examples=20, deadline=None, database=None, derandomize=True)


class TestBfloat16(BackendSuite):
    harness = TorchHarness
    hypothesis = FEW


class TestFloat16(BackendSuite):
    harness = Float16Harness
    hypothesis = FEW


class FusedHarness(TorchHarness):
    def optimizer(self, parameters, momentum):
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.5 if momentum else 0.0, fused=True)


class TestScaleOnTheDevice(SkipTests, AccumulationTests, GroupTests, PerLossTests):
    harness = FusedHarness

    def bench(self, amp, momentum=False, **options):
        return super().bench(amp, momentum, device_scale=True, **options)

    def group(self, amp):
        return super().group(amp, device_scale=True)


class TestInterruptedSteps(InterruptedStepSuite):
    harness = TorchHarness
    session: ClassVar[Any] = {"process_wide": False}
    stride = 16
    packages = ("ampx", "ampx_apex", "ampx_torch")
    cases: ClassVar[Any] = {
        **InterruptedStepSuite.cases,
        "closure": {"by": "closure"},
        "fused": {"fused": "auto"},
        "fused on the device": {"fused": "auto", "device_scale": True},
        "fused on the device, overflow": {"fused": "auto", "device_scale": True, "third": math.inf},
        "fused on the device, clipped": {"fused": "auto", "device_scale": True, "clip": "max_grad_norm", "third": 6.0},
    }


class LargeHarness(TorchHarness):
    """Has parameters so large that a gradient is read before the kernel divides it; all elements are the same."""

    def parameter(self, values):
        return torch.nn.Parameter(torch.full((2**16,), values[0]))

    def loss(self, parameters, gradients):
        return sum(
            Pull.apply(p, torch.full_like(p, slopes[0])) for p, slopes in zip(parameters, gradients, strict=True)
        )

    def numbers(self, tensor):
        return tensor.detach().unique().tolist()


class LargeTraining(Training):
    elements = 2 * 2**16


class TestInterruptedFoldedSteps(TestInterruptedSteps):
    harness, training = LargeHarness, LargeTraining
    cases: ClassVar[Any] = {
        "folded": {"fused": "auto"},
        "folded, clipped": {"fused": "auto", "clip": "max_grad_norm", "third": 6.0},
    }


class HookedHarness(TorchHarness):
    def optimizer(self, parameters, momentum):
        raw = super().optimizer(parameters, momentum)
        raw.register_step_pre_hook(lambda *_: None)
        return raw


class TestInterruptedStepsWithHooks(TestInterruptedSteps):
    harness = HookedHarness
    cases: ClassVar[Any] = {"hooks": {"clip": "max_grad_norm", "third": 6.0}}


class LbfgsHarness(TorchHarness):
    def optimizer(self, parameters, momentum):
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=2)


class TestInterruptedLbfgs(TestInterruptedSteps):
    harness, training = LbfgsHarness, ClosureTraining
    cases: ClassVar[Any] = {"LBFGS": {"by": "closure"}, "LBFGS, overflow": {"by": "closure", "third": math.inf}}


class MasterTraining(Training):
    """Of a model with low-precision parameters: what the optimizer updates are its masters."""

    def make(self):
        bench = super().make()
        model = torch.nn.ParameterList(bench.parameters)
        self.amp.prepare(model, bench.raw)
        bench.parameters = list(model)
        return bench

    def values(self, bench):
        return [master.tolist() for group in bench.raw.param_groups for master in group["params"]]

    def look_after(self, place):
        for bench in self.benches:
            for own, master in bench.opt.masters.pairs:
                assert torch.equal(own, master.to(own.dtype)), place


class TestInterruptedStepsOfMasters(TestInterruptedSteps):
    training = MasterTraining
    session: ClassVar[Any] = {"process_wide": False, "level": "O2"}
    cases: ClassVar[Any] = {"masters": {}, "masters, overflow": {"third": math.inf}}


class TestInterruptedRegions(InterruptedRegionSuite):
    harness = TorchHarness
    packages = TestInterruptedSteps.packages
    stride, region_stride = 4, 1

    def look(self):
        """Count the hooks of every optimizer's steps, too, and the owners of the LSTM's kernel."""
        hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks  # torch.optim hides the module
        return super().look(), len(hooks), len(lstm._installed.plans)

    @pytest.fixture(autouse=True)
    def _weak_cpu(self, monkeypatch):
        """Regions install the LSTM's kernel, as on a CPU that cannot train one in low precision."""
        monkeypatch.setattr(lstm, "computable", lambda dtype: False)


class TestFuzz(FuzzSuite):
    harness = TorchHarness


class CudaHarness(Float16Harness):
    device = "cuda"


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.gpu
@on_cuda
class TestOnCuda(BackendSuite):
    harness = CudaHarness
    hypothesis = FEW


@pytest.mark.gpu
@on_cuda
class TestMatrixOnCuda(MatrixSuite):
    harness = CudaHarness


class TestPlugin(PluginSuite):
    plugin, framework, modules = "ampx_torch", "torch", ("torch",)


class TestMatrix(MatrixSuite):
    harness = TorchHarness


class TestTransfer(TransferSuite):
    harness = TorchHarness
    states = pathlib.Path(__file__).parents[1] / "states"
