"""Optimizers of tf_keras (Keras 2): a `LossScaleOptimizer` of theirs that follows the specification.

Imported only where tf_keras is.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision import loss_scale_optimizer as native

import ampx
from ampx.errors import AlreadyWrappedError, InvalidOptionError, NotInitializedError, UnsupportedByBackendError
from ampx.events import UNCHECKED
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import Member
from ampx.scale_state import LossScale
from ampx_tensorflow import casting, guard, history
from ampx_tensorflow.device_scale import VariableLedger
from ampx_tensorflow.keras3 import read_configuration

from . import tf_keras_casting
from .keras2 import Keras2Optimizer


class _Meta(ABCMeta, native.LossScaleOptimizerMetaclass):
    """What both bases below ask of a class."""


class _Scaling(Keras2Optimizer, metaclass=_Meta):
    """What the two classes below share; `native` is tf_keras's own class of the same kind.

    `minimize`, and so `fit`, scales the loss and passes unscaled gradients to `apply_gradients`, which unscales those
    of a loss that came out of `scale_loss`.
    """

    native: Any
    _loss_scale: Any
    _optimizer: Any

    def __init__(self, optimizer: Any, member: Member, options: Mapping[str, Any]) -> None:
        group = member.group
        # Native defect: with dynamic=False gradients that are not finite are applied.
        self.native.__init__(self, optimizer, initial_scale=group.config.init_scale)
        self.max_grad_norm = options["max_grad_norm"]
        self.max_grad_value = options["max_grad_value"]
        if not isinstance(group.ledger, VariableLedger):
            counters = self._loss_scale._add_weight("counters", [0, group.config.hysteresis, 0, 0], tf.int64)
            group.ledger = VariableLedger(group, self._loss_scale.current_loss_scale, counters)
        self._ledger = group.ledger
        self._place = self._ledger.join()
        member.belong_to(self)
        self._compute = "float32" if options["plan"] is None else options["plan"].dtype
        if group.enabled:
            guard.watch(optimizer, self, "apply_gradients")

    def get_scaled_loss(self, loss: Any) -> Any:
        """Return the loss in float32 times the loss scale: see `LedgerOptimizer`."""
        self._loss_has_been_scaled = True
        return super().get_scaled_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Return unscaled gradients: see `LedgerOptimizer`."""
        self._gradients_have_been_unscaled = True
        return super().get_unscaled_gradients(grads)

    def _step_pairs(self, grads_and_vars: Any, aggregate: bool, step: Callable[[Any], None]) -> None:
        """Collect gradients and variables and step; `step` is the raw optimizer's, for where there is nothing to do."""
        pairs = list(grads_and_vars)
        if not (self._ledger.contexts.host.enabled or self._clips):
            step(pairs)
            self._caught_up().note_result(UNCHECKED)
            return
        pairs = [pair for pair in pairs if pair[0] is not None]
        self._step([gradient for gradient, _ in pairs], [variable for _, variable in pairs], aggregate)

    def _sum(self, grads: Sequence[Any], variables: Any, aggregate: bool) -> Sequence[Any]:
        if not aggregate:
            return grads
        # Before the check, as natively: an overflow on any replica is then one on all.
        return [gradient for gradient, _ in self._aggregate(list(zip(grads, variables, strict=True)))]

    def _build(self, variables: Any) -> None:
        if self._ledger.contexts.host.enabled:
            guard.refuse_low_precision(variables)
        with tf.init_scope():
            self._make_slots(variables)

    def _apply(self, grads: Sequence[Any], variables: Any) -> None:
        with casting.off():
            self._apply_true(list(zip(grads, variables, strict=True)))

    def _make_slots(self, variables: Sequence[Any]) -> None:
        raise NotImplementedError

    def _aggregate(self, pairs: Any) -> Any:
        raise NotImplementedError

    def _apply_true(self, pairs: Any) -> None:
        raise NotImplementedError

    def ampx_unwrap(self) -> None:
        """Leave the raw optimizer as if it had never been wrapped."""
        self._optimizer._is_wrapped_by_loss_scale_optimizer = False
        guard.leave(self._optimizer)

    def get_config(self) -> dict[str, Any]:
        """Return the raw optimizer's configuration and the loss scale's."""
        return {
            "inner_optimizer": tf_keras.optimizers.serialize(self._optimizer),
            "loss_scale": asdict(self._ledger.contexts.host.config),
            "max_grad_norm": self.max_grad_norm,
            "max_grad_value": self.max_grad_value,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> Any:
        """Wrap the raw optimizer of a configuration anew, in the active session; Keras's configurations are read, too.

        Raises:
            NotInitializedError: There is none.
            InvalidOptionError: It is the configuration of no such optimizer.
        """
        if "inner_optimizer" not in config:
            raise InvalidOptionError(
                f"from_config got a configuration with the names {sorted(config)}; accepted: that of an optimizer "
                f"which scales the loss, with its inner_optimizer. Pass what get_config gave."
            )
        if "loss_scale" in config:
            scale = LossScale(**config["loss_scale"])
        else:
            names = "initial_scale", "dynamic_growth_steps"
            scale = read_configuration(config.get("dynamic", True), *map(config.get, names))
        try:
            session = ampx.current("tensorflow")
        except NotInitializedError as error:
            raise NotInitializedError(
                "a tf_keras model was loaded whose optimizer ampx had wrapped, without a session; accepted: loading "
                "after ampx.init, or load_model(…, compile=False). Call ampx.init(framework='tensorflow') first."
            ) from error
        inner = tf_keras.optimizers.deserialize(
            config["inner_optimizer"], custom_objects=custom_objects, use_legacy_optimizer=cls is AmpLegacyOptimizer
        )
        return session.wrap_optimizer(
            inner,
            loss_scale=scale,
            max_grad_norm=config.get("max_grad_norm"),
            max_grad_value=config.get("max_grad_value"),
        )


@tf_keras.saving.register_keras_serializable("ampx")
class AmpOptimizer(_Scaling, native.LossScaleOptimizerV3):
    """A tf_keras optimizer with its own loss scale."""

    native = native.LossScaleOptimizerV3

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any, skip_gradients_aggregation: bool = False, **kwargs: Any) -> None:
        """Apply unscaled gradients if all are finite on all replicas; move the loss scale.

        Args:
            grads_and_vars: Pairs of gradients and variables.
            skip_gradients_aggregation: The gradients were added up over the replicas already.
            **kwargs: As tf_keras's.

        Raises:
            NotScaledError: There are gradients, but their loss was not scaled.

        Sync: one on an accelerator in eager mode, none in a function.
        """
        aggregate = kwargs.get("experimental_aggregate_gradients", True) and not skip_gradients_aggregation
        step = self._optimizer.apply_gradients
        self._step_pairs(grads_and_vars, aggregate, lambda pairs: step(pairs, skip_gradients_aggregation, **kwargs))

    def _make_slots(self, variables: Sequence[Any]) -> None:
        self._optimizer.build(variables)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Do what tf_keras does at the end of `fit`, and send the events that are still due. Sync: one."""
        super().finalize_variable_values(var_list)
        history.look()

    def _aggregate(self, pairs: Any) -> Any:
        return self._optimizer.aggregate_gradients(pairs)

    def _apply_true(self, pairs: Any) -> None:
        guard.native(self._optimizer, "apply_gradients")(pairs, skip_gradients_aggregation=True)


@tf_keras.saving.register_keras_serializable("ampx")
class AmpLegacyOptimizer(_Scaling, native.LossScaleOptimizer):
    """An optimizer of tf_keras.optimizers.legacy with its own loss scale."""

    native = native.LossScaleOptimizer

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(
        self, grads_and_vars: Any, name: str | None = None, experimental_aggregate_gradients: bool = True
    ) -> None:
        """Apply unscaled gradients if all are finite on all replicas; move the loss scale.

        Args:
            grads_and_vars: Pairs of gradients and variables.
            name: As tf_keras's.
            experimental_aggregate_gradients: Add up the gradients of the replicas.

        Raises:
            NotScaledError: There are gradients, but their loss was not scaled.

        Sync: one on an accelerator in eager mode, none in a function.
        """
        step, aggregate = self._optimizer.apply_gradients, experimental_aggregate_gradients
        self._step_pairs(grads_and_vars, aggregate, lambda pairs: step(pairs, name, aggregate))

    def _make_slots(self, variables: Sequence[Any]) -> None:
        self._optimizer._create_all_weights(variables)

    def _aggregate(self, pairs: Any) -> Any:
        return self._optimizer._aggregate_gradients(self._optimizer._transform_unaggregated_gradients(pairs))

    def _apply_true(self, pairs: Any) -> None:
        guard.native(self._optimizer, "apply_gradients")(pairs, experimental_aggregate_gradients=False)


def wrap(optimizer: Any, member: Member, options: Mapping[str, Any]) -> WrappedOptimizer:
    """Wrap a raw optimizer; raise where it scales the loss itself, in graphs, and where tf_keras came after `init`."""
    if isinstance(optimizer, native.BaseLossScaleOptimizer):
        raise AlreadyWrappedError(
            f"wrap_optimizer got {type(optimizer).__name__} of tf_keras, which scales the loss itself; its gradients "
            f"would be unscaled twice. Pass an optimizer that nothing wraps, made as the one inside (inner_optimizer), "
            f"and give loss_scale=… to wrap_optimizer."
        )
    if getattr(optimizer, "_is_wrapped_by_loss_scale_optimizer", False):
        raise AlreadyWrappedError(
            f"wrap_optimizer got {type(optimizer).__name__}, which a LossScaleOptimizer of tf_keras holds; its "
            f"gradients would be unscaled twice. Pass an optimizer that nothing wraps."
        )
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise UnsupportedByBackendError(
            "wrap_optimizer got an optimizer of tf_keras while a graph is built; accepted: eager mode and tf.function, "
            "and in graphs optimizers of tf.compat.v1.train. Use one of these."
        )
    tf_keras_casting.check_active(options["session"])
    kind = AmpLegacyOptimizer if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer) else AmpOptimizer
    return kind(optimizer, member, options)
