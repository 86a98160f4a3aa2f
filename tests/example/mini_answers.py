"""What an author writes whose framework has implicit gradients and casting regions; `mini` is the toy framework."""

import math
from typing import Any

import mini

import ampx
from ampx.testing import BackendSuite, FuzzSuite, Harness, PluginSuite  # noqa: F401 -- the new package's tests use them


class MiniBackend(ampx.GenericBackend):
    """The verbs of ampx in mini."""

    name = "mini"
    capabilities = ampx.Capabilities(
        devices=("cpu",),
        dtypes=frozenset({"float16"}),
        levels=frozenset({"O0", "O1"}),
        gradients="implicit",  # they hang on the parameters; "explicit" where they are values
        autocast="scoped",  # the framework has regions
    )

    def device(self, name):
        if name not in ("auto", "cpu"):
            raise ampx.UnsupportedDeviceError(
                f"device={name!r} is not a device of mini; accepted: 'cpu', 'auto'. Pass one of these."
            )
        return ampx.Device("cpu", native=frozenset({"float16"}), preferred="float16", reason="mini computes float16")

    def is_optimizer(self, candidate):
        return isinstance(candidate, mini.Optimizer)

    def autocast(self, plan, enabled):
        return mini.autocast(mini.CastingState(plan.dtype if enabled else None))

    def activate(self, plan):
        mini.set_casting(mini.CastingState(plan.dtype))

    def deactivate(self, plan):
        mini.set_casting(mini.CastingState())

    def cast(self, tree, dtype):
        if isinstance(tree, dict):
            return {key: self.cast(value, dtype) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.cast(value, dtype) for value in tree)
        return tree.to(dtype) if isinstance(tree, mini.Tensor) and tree.dtype in mini.FLOATING else tree

    def inspect_loss(self, loss, check_nan):
        if not isinstance(loss, mini.Tensor):
            raise ampx.LossDtypeError(
                f"scale_loss got {type(loss).__name__}; accepted: a tensor of mini. Pass what the loss function gave."
            )
        nan = None if check_nan is False else any(math.isnan(value) for value in loss.data)
        return ampx.LossInfo(len(loss.data), loss.dtype, loss.dtype in mini.FLOATING, loss.attached, nan)

    def scale(self, loss, scale):
        return loss.to("float32") * scale

    def gradients(self, optimizer: Any) -> Any:
        return [parameter.grad for parameter in optimizer.parameters if parameter.grad is not None]

    def zero_gradients(self, optimizer):
        optimizer.zero_grad()

    def unscale(self, grads, scale):
        finite = all(math.isfinite(value) for grad in grads for value in grad.data)
        for grad in grads:
            grad.data = tuple(value / scale for value in grad.data)
        return ampx.Unscaled(grads, finite)

    def apply(self, optimizer, grads):
        optimizer.step()


class MiniHarness(Harness):
    framework = "mini"
    plugin = "ampx_mini"

    def tensor(self, values, dtype):
        return mini.Tensor(values, dtype)

    def dtype_of(self, tensor):
        return tensor.dtype

    def numbers(self, tensor):
        return list(tensor.data)

    def parameter(self, values):
        return mini.Tensor(values, parameter=True)

    def optimizer(self, parameters, momentum):
        return mini.Optimizer(parameters, lr=0.5, momentum=0.5 if momentum else 0.0)

    def optimizer_state(self, raw):
        return raw.steps, [None if buffer is None else buffer.data for buffer in raw.buffers]

    def loss(self, parameters, gradients):
        return mini.pull(parameters, gradients)

    def backward(self, scaled, parameters):
        scaled.backward()

    def gradients(self, parameters):
        return [None if parameter.grad is None else list(parameter.grad.data) for parameter in parameters]

    def casting(self):
        return mini.casting_state()

    def computes_in(self):
        return mini.product(mini.Tensor([2.0]), mini.Tensor([3.0])).dtype
