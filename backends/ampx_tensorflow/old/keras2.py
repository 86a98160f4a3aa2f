"""Names of Keras 2's mixed precision that Keras 3 has no more, for scripts written with them."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

import keras
import tensorflow as tf

from ampx.errors import InvalidOptionError
from ampx_tensorflow.keras3 import AmpOptimizer, read_configuration
from ampx_tensorflow.step import LedgerOptimizer

from .graph_rewrite import read_loss_scale

_OPTIONS: Final = frozenset(
    {"loss_scale", "max_grad_norm", "max_grad_value", "enabled", "keeps_masters", "member", "name"}
)
_OF_THE_INNER: Final[Mapping[str, Any]] = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


class Keras2Optimizer(LedgerOptimizer):
    """What Keras 2's `LossScaleOptimizer` says of its loss scale, truthfully."""

    @property
    def loss_scale(self) -> Any:
        """The current loss scale as a float32 scalar tensor. Sync: one, unless traced."""
        return tf.convert_to_tensor(super().loss_scale, tf.float32)

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return self._ledger.contexts.host.config.dynamic

    @property
    def initial_scale(self) -> float:
        """The first loss scale."""
        return self._ledger.contexts.host.config.init_scale

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Finite steps in a row before growth; None for a static scale."""
        config = self._ledger.contexts.host.config
        return config.growth_interval if config.dynamic else None

    @property
    def dynamic_counter(self) -> Any:
        """Finite steps since the scale changed last, as an int64 scalar tensor; None for a static scale."""
        return tf.convert_to_tensor(self._ledger.counters)[0] if self.dynamic else None


@keras.saving.register_keras_serializable("ampx")
class LossScaleOptimizer(Keras2Optimizer, AmpOptimizer):
    """`tf.keras.mixed_precision.LossScaleOptimizer` as Keras 2 had it, over an optimizer of Keras 3."""

    def __init__(
        self,
        inner_optimizer: Any,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        **options: Any,
    ) -> None:
        """Wrap an optimizer.

        Args:
            inner_optimizer: An optimizer of Keras 3, not wrapped.
            dynamic: False keeps the scale at `initial_scale`.
            initial_scale: The first loss scale; by default 2**15, for a static one it has to be given.
            dynamic_growth_steps: Finite steps in a row before growth; by default 2000, for a static scale none.
            **options: As `AmpOptimizer`, which Keras gives when it loads a model.

        Raises:
            InvalidOptionError: The arguments contradict each other, are out of range, or the inner optimizer's.
        """
        if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
            raise InvalidOptionError(
                f"LossScaleOptimizer got {type(inner_optimizer).__name__}, which scales the loss itself; accepted: an "
                f"optimizer that does not. Pass the one inside (inner_optimizer)."
            )
        if "loss_scale" not in options:
            options["loss_scale"] = read_configuration(dynamic, initial_scale, dynamic_growth_steps)
        for name, default in _OF_THE_INNER.items():  # Keras writes the defaults into its configurations
            if options.get(name, default) == default:
                options.pop(name, None)
        if unknown := sorted(set(options) - _OPTIONS):
            raise InvalidOptionError(
                f"LossScaleOptimizer got {', '.join(unknown)}, which is nothing of its own; accepted: dynamic, "
                f"initial_scale, dynamic_growth_steps, name. Set it on the inner optimizer."
            )
        super().__init__(inner_optimizer, **options)

    @property
    def initial_scale(self) -> float:
        """The first loss scale."""
        return super().initial_scale

    @initial_scale.setter
    def initial_scale(self, value: float) -> None:
        """Ignore what Keras 3 sets: the configuration tells it."""

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Finite steps in a row before growth; None for a static scale."""
        return super().dynamic_growth_steps

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, value: int) -> None:
        """Ignore what Keras 3 sets: the configuration tells it."""


class _Experimental(LossScaleOptimizer):
    """The same as it was in `tf.keras.mixed_precision.experimental`, with the loss scale as one argument."""

    def __init__(self, optimizer: Any, loss_scale: Any = "dynamic", **options: Any) -> None:
        super().__init__(optimizer, loss_scale=read_loss_scale(loss_scale), **options)


def policy(name: str, loss_scale: Any = "auto") -> keras.DTypePolicy:
    """Make a policy, as `tf.keras.mixed_precision.experimental.Policy` did.

    Raises:
        InvalidOptionError: A loss scale was given, which policies of Keras 3 do not hold.
    """
    if loss_scale != "auto":
        raise InvalidOptionError(
            f"Policy({name!r}, loss_scale={loss_scale!r}): a policy holds no loss scale any more; accepted: 'auto'. "
            f"Give it to LossScaleOptimizer(optimizer, loss_scale)."
        )
    return keras.DTypePolicy(name)


def experimental() -> ModuleType:
    """Make what was `tf.keras.mixed_precision.experimental`."""
    module = ModuleType("tensorflow.keras.mixed_precision.experimental")
    names = {
        "LossScaleOptimizer": _Experimental,
        "Policy": policy,
        "global_policy": keras.config.dtype_policy,
        "set_policy": keras.config.set_dtype_policy,
        "get_layer_policy": lambda layer: layer.dtype_policy,
    }
    vars(module).update(names)
    return module


def loss_scales() -> dict[str, Any]:
    """Return the classes of loss scales, which TensorFlow still has under `compat.v1`."""
    kinds = tf.compat.v1.mixed_precision
    return {name: getattr(kinds, name) for name in ("LossScale", "DynamicLossScale", "FixedLossScale")}
