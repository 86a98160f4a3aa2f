"""Optimizers of tf_keras (Keras 2): a `LossScaleOptimizer` of theirs that follows the specification.

Imported only where tf_keras is.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision import loss_scale_optimizer as native

from ampx.errors import (
    AlreadyWrappedError,
    InvalidOptionError,
    LowPrecisionParametersError,
    NotInitializedError,
    UnsupportedByBackendError,
)
from ampx.events import UNCHECKED
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import Member
from ampx.scale_state import LossScale
from ampx.session import sessions

from . import casting, gradients, guard, history, legacy_casting, replicas
from .device_scale import VariableLedger
from .optimizer import read_configuration
from .protocol import Keras2Optimizer, make_slots

if TYPE_CHECKING:
    from .backend import TensorFlowBackend


class _Meta(ABCMeta, native.LossScaleOptimizerMetaclass):  # type: ignore[misc]
    """What both bases below ask of a class."""


class _Scaling(Keras2Optimizer, metaclass=_Meta):
    """What the two classes below share; `native` is tf_keras's own class of the same kind.

    `minimize`, and so `fit`, scales the loss and gives `apply_gradients` true gradients. Gradients of a loss that came
    out of `scale_loss` are made true by `apply_gradients`.
    """

    native: Any
    _loss_scale: Any
    _optimizer: Any

    def __init__(self, backend: TensorFlowBackend, optimizer: Any, member: Member, options: Mapping[str, Any]) -> None:
        """Made by `ampx.wrap_optimizer`."""
        group = member.group
        # Native defect: with dynamic=False gradients that are not finite are applied.
        self.native.__init__(self, optimizer, initial_scale=group.config.init_scale)
        self._max_grad_norm = options["max_grad_norm"]
        self._max_grad_value = options["max_grad_value"]
        if not isinstance(group.ledger, VariableLedger):
            counters = self._loss_scale._add_weight("counters", [0, group.config.hysteresis, 0, 0], tf.int64)
            group.ledger = VariableLedger(group, self._loss_scale.current_loss_scale, counters)
        self._ledger = group.ledger
        self._place = self._ledger.join(make_slots())
        if group.enabled:
            guard.watch(optimizer, self, "apply_gradients")

    @property
    def _measures(self) -> bool:
        return self._max_grad_norm is not None

    def get_scaled_loss(self, loss: Any) -> Any:
        """Return the loss in float32 times the loss scale: see `LedgerOptimizer`."""
        self._loss_has_been_scaled = True
        return super().get_scaled_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Return true gradients: see `LedgerOptimizer`."""
        self._gradients_have_been_unscaled = True
        return super().get_unscaled_gradients(grads)

    def _step(self, grads_and_vars: Any, aggregate: bool) -> None:
        """Make gradients true if they are not, add them up over the replicas, apply or skip, move the scale."""
        member, pairs = self._caught_up(), [pair for pair in grads_and_vars if pair[0] is not None]
        if not pairs:
            self._nothing_to_do(member)
            return
        factor = self._check_step(member)
        self._check_replicas()
        _refuse_low_precision([variable for _, variable in pairs])
        grads, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        if member.stage == "unscaled":
            self._check_unscaled(grads)
        else:
            self._check_scaled("apply_gradients", grads)
            pairs = list(zip(gradients.unscale(grads, factor), variables, strict=True))
        with casting.off():
            with tf.init_scope():
                self._make_slots(variables)
            if aggregate:
                # First, as natively: an overflow on any replica is then one on all.
                pairs = list(self._aggregate(pairs))
            grads = [gradient for gradient, _ in pairs]
            finite = replicas.everywhere(gradients.finite(grads))
            norm = None
            if self._max_grad_norm is not None or self._max_grad_value is not None:
                grads, norm = gradients.clip(grads, self._max_grad_norm, self._max_grad_value)

            def apply(grads: Any) -> None:
                self._apply_true(list(zip(grads, variables, strict=True)))

            self._conclude(member, factor, finite, norm, apply, grads)

    def _step_disabled(self, grads_and_vars: Any, aggregate: bool, step: Callable[[Any], None]) -> None:
        """Step the raw optimizer, after clipping as `wrap_optimizer` was asked to."""
        pairs = list(grads_and_vars)
        if self._max_grad_norm is not None or self._max_grad_value is not None:
            variables = [variable for _, variable in pairs]
            with tf.init_scope():
                self._make_slots(variables)
            pairs = [pair for pair in pairs if pair[0] is not None]
            if aggregate:  # their sum is what is clipped
                pairs = list(self._aggregate(pairs))
            grads, _ = gradients.clip([gradient for gradient, _ in pairs], self._max_grad_norm, self._max_grad_value)
            self._apply_true(list(zip(grads, [variable for _, variable in pairs], strict=True)))
        else:
            step(pairs)
        self._caught_up().note_result(UNCHECKED)

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
            "max_grad_norm": self._max_grad_norm,
            "max_grad_value": self._max_grad_value,
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
        session = sessions.get("tensorflow")
        if session is None:
            raise NotInitializedError(
                "a tf_keras model was loaded whose optimizer ampx had wrapped, without a session; accepted: loading "
                "after ampx.init, or load_model(…, compile=False). Call ampx.init(framework='tensorflow') first."
            )
        inner = tf_keras.optimizers.deserialize(
            config["inner_optimizer"], custom_objects=custom_objects, use_legacy_optimizer=cls is AmpLegacyOptimizer
        )
        return session.wrap_optimizer(
            inner,
            loss_scale=scale,
            max_grad_norm=config.get("max_grad_norm"),
            max_grad_value=config.get("max_grad_value"),
        )


class AmpOptimizer(_Scaling, native.LossScaleOptimizerV3):  # type: ignore[misc]
    """A tf_keras optimizer with its own loss scale."""

    native = native.LossScaleOptimizerV3

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any, skip_gradients_aggregation: bool = False, **kwargs: Any) -> None:
        """Apply true gradients if all are finite on all replicas; move the loss scale.

        Args:
            grads_and_vars: Pairs of gradients and variables.
            skip_gradients_aggregation: The gradients were added up over the replicas already.
            **kwargs: As tf_keras's.

        Raises:
            NotScaledError: There are gradients, but their loss was not scaled.

        Sync: one on an accelerator in eager mode, none in a function.
        """
        aggregate = kwargs.get("experimental_aggregate_gradients", True) and not skip_gradients_aggregation
        if self._ledger.contexts.host.enabled:
            self._step(grads_and_vars, aggregate)
        else:
            native_step = self._optimizer.apply_gradients
            self._step_disabled(
                grads_and_vars, aggregate, lambda pairs: native_step(pairs, skip_gradients_aggregation, **kwargs)
            )

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


class AmpLegacyOptimizer(_Scaling, native.LossScaleOptimizer):  # type: ignore[misc]
    """An optimizer of tf_keras.optimizers.legacy with its own loss scale."""

    native = native.LossScaleOptimizer

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(
        self, grads_and_vars: Any, name: str | None = None, experimental_aggregate_gradients: bool = True
    ) -> None:
        """Apply true gradients if all are finite on all replicas; move the loss scale.

        Args:
            grads_and_vars: Pairs of gradients and variables.
            name: As tf_keras's.
            experimental_aggregate_gradients: Add up the gradients of the replicas.

        Raises:
            NotScaledError: There are gradients, but their loss was not scaled.

        Sync: one on an accelerator in eager mode, none in a function.
        """
        aggregate = experimental_aggregate_gradients
        if self._ledger.contexts.host.enabled:
            self._step(grads_and_vars, aggregate)
        else:
            native_step = self._optimizer.apply_gradients
            self._step_disabled(grads_and_vars, aggregate, lambda pairs: native_step(pairs, name, aggregate))

    def _make_slots(self, variables: Sequence[Any]) -> None:
        self._optimizer._create_all_weights(variables)

    def _aggregate(self, pairs: Any) -> Any:
        return self._optimizer._aggregate_gradients(self._optimizer._transform_unaggregated_gradients(pairs))

    def _apply_true(self, pairs: Any) -> None:
        guard.native(self._optimizer, "apply_gradients")(pairs, experimental_aggregate_gradients=False)


def _refuse_low_precision(variables: Sequence[Any]) -> None:
    low = [variable.name for variable in variables if variable.dtype in (tf.float16, tf.bfloat16)]
    if low:
        raise LowPrecisionParametersError(
            f"the optimizer was given {len(low)} low-precision variables ({', '.join(low[:5])}); updates smaller "
            f"than their precision would be lost. Keep the variables in float32 and let a policy cast them."
        )


def is_optimizer(candidate: object) -> bool:
    """Return whether this is an optimizer of tf_keras, not wrapped by ampx."""
    return isinstance(candidate, (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer))


def wrap(backend: TensorFlowBackend, optimizer: Any, member: Member, options: Mapping[str, Any]) -> WrappedOptimizer:
    """Wrap a raw optimizer.

    Raises:
        AlreadyWrappedError: It is one of tf_keras's loss-scale optimizers, or inside one.
        ProtocolError: tf_keras was imported after `init`.
        UnsupportedByBackendError: A graph of TensorFlow 1 is being built.
    """
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
    legacy_casting.check_active()
    kind = AmpLegacyOptimizer if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer) else AmpOptimizer
    return kind(backend, optimizer, member, options)
