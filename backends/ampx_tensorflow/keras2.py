"""Names of Keras 2's mixed precision that Keras 3 has no more, for scripts written with them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import keras
import tensorflow as tf

from ampx.errors import InvalidOptionError
from ampx.scale_state import LossScale

from .graph_rewrite import FORMER_INIT_SCALE, read_loss_scale
from .optimizer import AmpOptimizer


@keras.saving.register_keras_serializable("ampx")
class LossScaleOptimizer(AmpOptimizer):
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
            InvalidOptionError: The arguments contradict each other, or are out of range.
        """
        if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
            raise InvalidOptionError(
                f"LossScaleOptimizer got {type(inner_optimizer).__name__}, which scales the loss itself; accepted: an "
                f"optimizer that does not. Pass the one inside (inner_optimizer)."
            )
        if "loss_scale" not in options:
            options["loss_scale"] = _config(dynamic, initial_scale, dynamic_growth_steps)
        super().__init__(inner_optimizer, **options)

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves. Sync: none."""
        return self._ledger.contexts.host.config.dynamic

    @property
    def initial_scale(self) -> float:
        """The first loss scale. Sync: none."""
        return self._ledger.contexts.host.config.init_scale

    @initial_scale.setter
    def initial_scale(self, value: float) -> None:
        """Ignore what Keras 3 sets: the configuration tells it."""

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Finite steps in a row before growth; None for a static scale. Sync: none."""
        config = self._ledger.contexts.host.config
        return config.growth_interval if config.dynamic else None

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, value: int) -> None:
        """Ignore what Keras 3 sets: the configuration tells it."""


class _Experimental(LossScaleOptimizer):
    """The same as it was in `tf.keras.mixed_precision.experimental`, with the loss scale as one argument."""

    def __init__(self, optimizer: Any, loss_scale: Any = "dynamic", **options: Any) -> None:
        super().__init__(optimizer, loss_scale=read_loss_scale(loss_scale), **options)


def _config(dynamic: bool, initial_scale: float | None, growth_steps: int | None) -> LossScale:
    if dynamic:
        return LossScale(
            init_scale=FORMER_INIT_SCALE if initial_scale is None else initial_scale,
            growth_interval=2000 if growth_steps is None else growth_steps,
        )
    if initial_scale is None or growth_steps is not None:
        raise InvalidOptionError(
            f"LossScaleOptimizer(dynamic=False, initial_scale={initial_scale!r}, dynamic_growth_steps="
            f"{growth_steps!r}); accepted: a static scale has an initial_scale and no dynamic_growth_steps. Pass those."
        )
    return LossScale.static(initial_scale)


def policy(name: str, loss_scale: Any = "auto") -> keras.DTypePolicy:
    """Make a policy, as `tf.keras.mixed_precision.experimental.Policy` did.

    Raises:
        InvalidOptionError: A loss scale was given, which policies of Keras 3 do not hold.

    Sync: none.
    """
    if loss_scale != "auto":
        raise InvalidOptionError(
            f"Policy({name!r}, loss_scale={loss_scale!r}): a policy holds no loss scale any more; accepted: 'auto'. "
            f"Give it to LossScaleOptimizer(optimizer, loss_scale)."
        )
    return keras.DTypePolicy(name)


def experimental() -> ModuleType:
    """Make what was `tf.keras.mixed_precision.experimental`. Sync: none."""
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
    """Give the classes of loss scales, which TensorFlow still has under `compat.v1`. Sync: none."""
    kinds = tf.compat.v1.mixed_precision
    return {name: getattr(kinds, name) for name in ("LossScale", "DynamicLossScale", "FixedLossScale")}
