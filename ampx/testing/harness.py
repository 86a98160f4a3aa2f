"""What a backend's author fills in: the things that only tests need."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ampx.optimizer import WrappedOptimizer
from ampx.policy import Dtype

Chosen = Sequence[Sequence[float]]


class Harness(abc.ABC):
    """One framework as the kit sees it. Abstract here, final in tests; a fresh instance serves every test.

    Attributes:
        framework: What `ampx.init(framework=…)` takes.
        plugin: Import name of the plugin's module.
        detaches: The framework tells a loss from which no gradient can flow.
        dtype: Compute dtype of the tests. The loss scale is given explicitly, so any will do.
        device: Device of the tests.
        converts_to: The dtype that models are converted to, where the device computes that only in converted models.
        returns_low: What `ampx.convert` returns can return the low dtype (`keep_io=False`).
        clears_to_zero: Clearing leaves gradients of zeros, not none.
        copies: How optimizers of the framework can be copied: "deepcopy", "pickle".
        closures: `opt.step(closure)` works.
        guards_raw_steps: Stepping the raw optimizer while scaled gradients are pending raises `RawStepError`.
        watches_others: What a loss leaves on parameters of optimizers that it was not scaled for is unscaled, or
            refused; elsewhere the user clears it.
        watches_true: So is what such a loss adds to gradients after `unscale`, and what a loss that no body scaled
            adds to pending ones.
        brings_backwards: What a backward left that ran in no body, or in one that raised, is added to as in the
            framework; elsewhere the next body is refused.
        shares_parameters: Two optimizers that hold one parameter may wait for their steps at once; elsewhere the second
            is refused.
        tells_rates: A run that is watched knows the learning rates of optimizers.
        models_are_values: Two models of one class cannot be told from each other when they are called.
    """

    framework: ClassVar[str]
    plugin: ClassVar[str]
    detaches: ClassVar[bool] = True
    dtype: ClassVar[Dtype] = "float16"
    device: ClassVar[str] = "auto"
    converts_to: ClassVar[Dtype | None] = None
    returns_low: ClassVar[bool] = True
    clears_to_zero: ClassVar[bool] = False
    copies: ClassVar[tuple[str, ...]] = ()
    closures: ClassVar[bool] = False
    guards_raw_steps: ClassVar[bool] = False
    watches_others: ClassVar[bool] = False
    watches_true: ClassVar[bool] = False
    brings_backwards: ClassVar[bool] = True
    shares_parameters: ClassVar[bool] = False
    tells_rates: ClassVar[bool] = False
    models_are_values: ClassVar[bool] = False

    @abc.abstractmethod
    def tensor(self, values: Sequence[float], dtype: str) -> Any:
        """Make a vector from which no gradient flows. `dtype`: "float32", "float16", "bfloat16", "int64" or "bool"."""

    @abc.abstractmethod
    def dtype_of(self, tensor: Any) -> str:
        """Name a tensor's dtype, as in `tensor`."""

    @abc.abstractmethod
    def numbers(self, tensor: Any) -> list[float]:
        """Read a tensor of any dtype as a flat list."""

    @abc.abstractmethod
    def parameter(self, values: Sequence[float]) -> Any:
        """Make a trainable float32 vector."""

    @abc.abstractmethod
    def optimizer(self, parameters: list[Any], momentum: bool) -> Any:
        """Make a raw optimizer: gradient descent with learning rate 0.5, perhaps with momentum 0.5, which is state."""

    @abc.abstractmethod
    def optimizer_state(self, raw: Any) -> Any:
        """Read a raw optimizer's state (momentum, counters) as something that `==` compares."""

    @abc.abstractmethod
    def loss(self, parameters: list[Any], gradients: Chosen) -> Any:
        """Compute a scalar float32 loss with a finite value and these derivatives, inf and NaN included.

        It must be a loss of the framework, made of operations on the parameters: the framework multiplies the
        derivatives by whatever the loss is multiplied with. A sum of the parameters with a custom backward will do.
        """

    @abc.abstractmethod
    def backward(self, scaled: Any, parameters: list[Any]) -> list[Any] | None:
        """Run backward on a scaled loss; return the gradients where they are values, else None."""

    @abc.abstractmethod
    def gradients(self, parameters: list[Any]) -> list[list[float] | None]:
        """Read the gradients that hang on parameters; None without. Called where gradients are implicit."""

    @abc.abstractmethod
    def casting(self) -> Any:
        """Read the framework's casting switch (on or off, dtype) as something that `==` compares."""

    @abc.abstractmethod
    def computes_in(self) -> str:
        """Name the dtype in which an operation of the framework's allow list computes float32 inputs now."""

    # What follows suits most frameworks.

    def step(self, opt: Any, gradients: list[Any] | None) -> None:
        """Step an optimizer, wrapped or raw."""
        if gradients is None:
            opt.step()
        else:
            opt.step(gradients)

    def plain_step(self, raw: Any, gradients: list[Any] | None) -> None:
        """Step a raw optimizer, without ampx."""
        self.step(raw, gradients)

    def watch_update(self, raw: Any, watch: Callable[[], object]) -> None:
        """Have `watch` called whenever the framework's own update of a raw optimizer runs."""
        update = raw.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            watch()
            return update(*args, **kwargs)

        raw.step = watched

    def zero_grad(self, opt: Any) -> None:
        """Forget gradients that hang on parameters."""
        opt.zero_grad()

    def write_gradients(self, raw: Any, parameters: list[Any], gradients: Chosen) -> None:
        """Put gradients on parameters without any call of ampx."""
        self.zero_grad(raw)
        self.backward(self.loss(parameters, gradients), parameters)

    def step_closure(self, opt: Any, closure: Any) -> Any:
        """Step with a closure."""
        return opt.step(closure)

    def set_rate(self, raw: Any, rate: float) -> None:
        """Set the learning rate of a raw optimizer (of its state, where that is a value) for the steps to come."""
        raise NotImplementedError(f"{type(self).__name__}.set_rate: wanted because tells_rates is declared")

    def add(self, a: list[Any], b: list[Any]) -> list[Any]:
        """Add gradients that are values."""
        return [x + y for x, y in zip(a, b, strict=True)]

    def recorded(self, compute: Callable[[], Any]) -> Any:
        """Compute something that a gradient can flow from; frameworks that record only when told to need more."""
        return compute()

    def nan_loss(self, parameters: list[Any]) -> Any:
        """Compute a loss that is NaN and attached."""
        return self.loss(parameters, [[1.0] * len(self.numbers(parameter)) for parameter in parameters]) * math.nan

    def wide_loss(self, parameters: list[Any]) -> Any:
        """Compute a "loss" of two elements."""
        return parameters[0] * 2.0

    def operation(self) -> Any:
        """Name an operation that casting computes in low precision, for `deny`; the one of `computes_in`."""
        raise NotImplementedError(f"{type(self).__name__}.operation: wanted because op_lists is declared")

    def chain(
        self, weights: Sequence[float], inputs: Sequence[float], noise: bool = False
    ) -> tuple[Any, Callable[[Any], Any], list[str]]:
        """Make a float32 model in which named modules multiply by one trainable weight each, one after the other.

        A module is a dense layer from 1 to 1 without bias, so that casting computes it in low precision.

        Args:
            weights: One number a module.
            inputs: A batch of rows of one number each.
            noise: Let a batch normalization (where the framework has one) and a dropout that drops half of the
                elements come behind the last module, both as in training.

        Returns:
            The model (or its parameters where these are a value), a function that takes it and returns the loss, which
            is the sum of the outputs in float32, and the names of the modules that multiply.
        """
        raise NotImplementedError(f"{type(self).__name__}.chain: wanted because the probe is offered")

    def fork(self, inputs: Sequence[float]) -> tuple[Any, Callable[[Any], Any], str] | None:
        """Make a float32 model in which a named module returns two tensors; None where no module can.

        A layer as in `chain`, with the weight 1, comes before that module, which returns a pair: one time what it
        receives, and two times that, in tensors of their own.

        Args:
            inputs: A batch of rows of one number each.

        Returns:
            The model, a function that takes it and returns the loss, the sum of the first output and three times that
            of the second; and the name of the module.
        """
        return None

    def larger(self, model: Any) -> tuple[Any, str, Callable[[Any], Any]] | None:
        """Make a model that has a model of `chain` as its only part; None where a part is not called by itself.

        Returns:
            The larger model, the name of the part in it, and a function that calls the part by itself with a batch and
            has the larger model, but not the part, in a variable.
        """
        return None

    def model_state(self, model: Any) -> Any:
        """Read weights, gradients and buffers of a model, and the random state, as something that `==` compares."""
        raise NotImplementedError(f"{type(self).__name__}.model_state: wanted because the probe is offered")

    def shipped(self, weights: Sequence[float], norm: bool = False) -> tuple[Any, list[str]]:
        """Make a float32 model for `ampx.convert`, in training mode: layers as in `chain`, which returns their outputs.

        Args:
            weights: One number a layer.
            norm: Let a normalization come behind the last layer, with running statistics where the framework has them:
                mean 0, variance 1, weight 1, bias 0.

        Returns:
            The model, and the names of the layers, that of the normalization last.
        """
        raise NotImplementedError(f"{type(self).__name__}.shipped: wanted because the converter is offered")

    def batch(self, inputs: Sequence[float]) -> Any:
        """Make a batch for the model of `shipped`: rows of one number each."""
        raise NotImplementedError(f"{type(self).__name__}.batch: wanted because the converter is offered")

    def stored(self, model: Any, layer: str) -> set[str]:
        """Name the dtypes of a layer's floating weights, running statistics included, in `shipped` or converted."""
        raise NotImplementedError(f"{type(self).__name__}.stored: wanted because the converter is offered")

    def called(self, model: Any, batch: Any) -> Any:
        """Call a converted model."""
        return model(batch)

    def model(self) -> Any:
        """Make a small float32 model for `prepare`: no normalization, parameters between -1 and 1."""
        raise NotImplementedError(f"{type(self).__name__}.model: wanted because levels O2 or O3 are declared")

    def parameters_of(self, model: Any) -> list[Any]:
        """List a model's parameters."""
        return list(model.parameters())

    def surroundings(self) -> Any:
        """Read what neither loading nor using a backend may change: default dtype, random state."""
        return None

    def last_step(self, opt: WrappedOptimizer) -> Any:
        """Read what the last step did."""
        return opt.last_step

    def loss_scale(self, opt: WrappedOptimizer) -> float:
        """Read the current loss scale."""
        return opt.loss_scale


class ValueHarness(Harness):
    """A framework whose optimizer state is a value (the verb `state_handle`): optimizers are pure functions of it."""

    @abc.abstractmethod
    def init(self, opt: Any, parameters: list[Any]) -> Any:
        """Make the state of an optimizer, raw or wrapped."""

    @abc.abstractmethod
    def update(self, opt: Any, gradients: Any, state: Any, parameters: list[Any]) -> tuple[list[Any], Any]:
        """Return the parameters and the state after one step; without gradients, the parameters as they are."""

    @abc.abstractmethod
    def differentiate(self, function: Callable[[list[Any]], Any], parameters: list[Any]) -> list[Any]:
        """Return the gradients of a function of the parameters."""

    def backward(self, scaled: Any, parameters: list[Any]) -> list[Any] | None:
        """Never called: gradients come from `differentiate`."""
        raise NotImplementedError(f"{type(self).__name__}.backward: gradients come from differentiate")

    def gradients(self, parameters: list[Any]) -> list[list[float] | None]:
        """Never called: no gradients hang on parameters."""
        raise NotImplementedError(f"{type(self).__name__}.gradients: no gradients hang on parameters")
