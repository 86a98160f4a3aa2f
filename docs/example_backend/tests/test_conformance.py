"""The conformance kit on autograd."""

import autograd.tracer
import numpy as np
from ampx_autograd.optimizer import SGD
from autograd.core import backward_pass
from autograd.extend import VJPNode, defvjp, primitive

from ampx.testing import BackendSuite, FuzzSuite, Harness, PluginSuite


@primitive
def pull(parameter, slopes):
    """The sum of a parameter, with derivatives of the caller's choice."""
    return np.sum(parameter)


defvjp(pull, lambda total, parameter, slopes: lambda upstream: upstream * slopes, argnums=(0,))


class AutogradHarness(Harness):
    framework = "autograd"
    plugin = "ampx_autograd"

    def tensor(self, values, dtype):
        return np.array(values, dtype)

    def dtype_of(self, tensor):
        return str(tensor.dtype)

    def numbers(self, tensor):
        return np.ravel(autograd.tracer.getval(tensor)).tolist()

    def parameter(self, values):
        return np.array(values, "float32")

    def optimizer(self, parameters, momentum):
        return SGD(parameters, learning_rate=0.5, momentum=0.5 if momentum else 0.0)

    def optimizer_state(self, raw):
        return [velocity.tolist() for velocity in raw.velocities]

    def loss(self, parameters, gradients):
        # What autograd.grad does up to the loss; the trace lives on in it until `backward`.
        with autograd.tracer.trace_stack.new_trace() as trace:
            traced = autograd.tracer.new_box(list(parameters), trace, VJPNode.new_root())
            slopes = [np.array(gradient, "float32") for gradient in gradients]
            return sum(pull(traced[position], slope) for position, slope in enumerate(slopes))

    def backward(self, scaled, parameters):
        return backward_pass(np.float32(1), scaled._node)

    def gradients(self, parameters):
        raise AssertionError("no gradients hang on parameters")

    def casting(self):
        return None  # autograd has no switch

    def computes_in(self):
        return str((np.ones(2, "float32") @ np.ones(2, "float32")).dtype)


class TestBackend(BackendSuite):
    harness = AutogradHarness


class TestFuzz(FuzzSuite):
    harness = AutogradHarness


class TestPlugin(PluginSuite):
    plugin, framework, modules = "ampx_autograd", "autograd", ("autograd",)
