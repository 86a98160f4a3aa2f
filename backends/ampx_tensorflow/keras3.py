"""The optimizer of Keras 3: its own `LossScaleOptimizer`, with the step and the loss scale of ampx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, NoReturn

import keras
import tensorflow as tf

from ampx.errors import AlreadyWrappedError, InvalidOptionError, ProtocolError, UnsupportedByBackendError
from ampx.protocol import Member
from ampx.scale_state import LossScale
from ampx.session import new_group

from . import casting, guard, history, masters, oplists, replicas
from .device_scale import VariableLedger
from .losses import is_computed
from .names import plain
from .step import LedgerOptimizer

# The first loss scale of Keras's LossScaleOptimizer, and of TensorFlow's function that rewrites graphs.
FORMER_INIT_SCALE: Final = 2.0**15
_ONLY_KERAS_2: Final = ("jit_compile", "is_legacy_optimizer")


@keras.saving.register_keras_serializable("ampx")
class AmpOptimizer(LedgerOptimizer, keras.optimizers.LossScaleOptimizer):
    """A Keras optimizer with its own loss scale.

    It is Keras' own `LossScaleOptimizer` with the loss scale of the specification, in variables that are there from
    the beginning: natively, a function traced before the first step holds the first scale for ever.

    Attributes:
        inner_optimizer: The raw optimizer.
        dynamic_scale: The variable of the current loss scale.
        counters: The variable of the loss scale's counters: see `VariableLedger`.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        loss_scale: LossScale | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        enabled: bool = True,
        keeps_masters: bool = False,
        member: Member | None = None,
        name: str | None = None,
    ) -> None:
        """Made by `ampx.wrap_optimizer`, and by Keras when it loads a model."""
        if member is None:
            member = new_group("tensorflow", loss_scale or LossScale(), enabled).add_member()
        group = member.group
        super().__init__(inner_optimizer, group.config.init_scale, group.config.growth_interval, name=name)
        self.max_grad_norm = max_grad_norm
        self.max_grad_value = max_grad_value
        self.keeps_masters = keeps_masters
        if not isinstance(group.ledger, VariableLedger):
            group.ledger = VariableLedger(group, *self._make_scale(group))
        self._ledger: VariableLedger = group.ledger
        # Tracked under these names: models and checkpoints save them.
        self.dynamic_scale, self.counters = group.ledger.scale, group.ledger.counters
        self._place = group.ledger.join()
        member.belong_to(self)
        if group.enabled:
            guard.watch(inner_optimizer, self, "apply")

    def _make_scale(self, group: Any) -> tuple[Any, Any]:
        state = group.states[0]
        first = [state.growth_tracker, state.hysteresis_tracker, state.consecutive_skips, 0]
        scale = self.add_variable((), keras.initializers.Constant(state.scale), "float32", name="dynamic_scale")
        counters = self.add_variable((len(first),), "zeros", "int64", name="counters")
        with tf.init_scope():  # in a trace this would be an operation of every step
            counters.assign(first)
        return scale, counters

    def build(self, var_list: Sequence[Any]) -> None:
        """Make the raw optimizer's variables; the loss scale's are there already.

        Low-precision variables of a model that Keras loaded get their masters here, before their weights come.
        """
        if self.keeps_masters:
            for variable in var_list:
                if variable.dtype in casting.LOW and isinstance(variable, keras.Variable):
                    masters.attach(variable, variable.dtype)
        elif self._ledger.contexts.host.enabled:
            masters.check_none(var_list)
            # Those of level O3, and of a model that Keras loaded, may be low precision.
            if self._compute is not None and not self._must_be_prepared:
                guard.refuse_low_precision(var_list)
        if not self.inner_optimizer.built:
            masters.build(self.inner_optimizer, var_list)
        super(keras.optimizers.LossScaleOptimizer, self).build(var_list)

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Scale a loss inside the tape, as Keras does in `fit`, and users do who override `train_step`.

        Gradients that are computed by hand may follow, where the loss is a constant or argument.

        Args:
            loss: Floating scalar tensor of any dtype.

        Returns:
            The loss in float32 times the loss scale.

        Raises:
            NestedScaleError: A `scale_loss` body for this optimizer is running.
            AlreadyScaledError: The loss is scaled already.
        """
        return self._scaled(loss, watched=is_computed(loss))

    # -- stepping -------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Unscale, check, clip, apply or skip, move the loss scale.

        Args:
            grads: The scaled gradients: tensors, `IndexedSlices`, None where there is none.
            trainable_variables: The variables they belong to; those the optimizer was built with by default.

        Raises:
            NotScaledError: No `scale_loss` came since the last step.
            ProtocolError: Every gradient is None.

        Sync: as Keras: one outside of traced code, else none.
        """
        self._step(list(grads), None if trainable_variables is None else list(trainable_variables))

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Call `apply` with pairs of gradients and variables; return `iterations`."""
        pairs = list(grads_and_vars)
        self.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        return self.iterations

    @tf.autograph.experimental.do_not_convert
    def ampx_apply_true(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Do what `apply` does with gradients that carry no scale, as `ampx run` gets them. Sync: as `apply`."""
        member = self.ampx_member
        if member.group.enabled:
            scale = self._ledger.factor(member.group, 0)
            self._pending.carry(scale)
            member.note_unscaled(scale)
        self.apply(grads, trainable_variables)

    def stateless_apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: optimizers of Keras on TensorFlow have no state as values.

        Raises:
            UnsupportedByBackendError: Always.
        """
        raise UnsupportedByBackendError(
            "stateless_apply was called, which Keras has on the JAX engine only; accepted: apply and apply_gradients. "
            "Call one of these."
        )

    def _check_gradients(self, member: Member, grads: Sequence[Any]) -> None:
        if all(gradient is None for gradient in grads):
            raise ProtocolError(
                f"apply got {len(grads)} gradients, all None: the loss was scaled outside the tape, or does not depend "
                f"on the variables; accepted: gradients of the scaled loss. Enter scale_loss inside the tape, or call "
                f"scaled.gradient(tape, variables)."
            )
        super()._check_gradients(member, grads)

    def _sum(self, grads: Sequence[Any], variables: Any, aggregate: bool) -> Sequence[Any]:
        return replicas.summed(grads) if self._clips else grads  # Keras adds them up, but after clipping

    def _are_finite(self, grads: Sequence[Any]) -> Any:
        return super()._are_finite(grads if self._clips else replicas.with_headroom(grads))

    def _build(self, variables: Any) -> None:
        if self.keeps_masters and self.inner_optimizer.built:
            masters.adopt(self.inner_optimizer)
        if self.built:
            return
        if variables is None and self.inner_optimizer.built:
            variables = self._updated(None)
        if variables is not None:
            # Natively, variables that are made in a function first called on several replicas break it.
            with tf.init_scope(), keras.name_scope(self.name, caller=self):
                self.build(variables)

    def _apply(self, grads: Sequence[Any], variables: Any) -> None:
        owned = self._updated(variables) if self.keeps_masters else ()
        updated = [masters.of(variable) for variable in owned] if self.keeps_masters else variables
        with casting.off():
            shared = replicas.shared(grads) if self._clips else grads
            guard.native(self.inner_optimizer, "apply")(shared, trainable_variables=updated)
        masters.push(owned)

    @property
    def _accumulates(self) -> bool:
        return bool(self.inner_optimizer.gradient_accumulation_steps)

    def _updated(self, variables: Any) -> Sequence[Any]:
        return list(map(masters.owner, self.inner_optimizer._trainable_variables)) if variables is None else variables

    def ampx_owns(self, variable: Any) -> bool | None:
        """Return whether the optimizer updates a variable; None where it was not built yet."""
        if not self.inner_optimizer.built:
            return None
        return id(plain(variable)) in {id(plain(owned)) for owned in self._updated(None)}

    def ampx_unwrap(self) -> None:
        """Leave the raw optimizer as if it had never been wrapped."""
        guard.leave(self.inner_optimizer)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Do what Keras does at the end of `fit`, and send the events that are still due. Sync: one."""
        super().finalize_variable_values([masters.of(variable) for variable in var_list])
        if self.inner_optimizer.use_ema:  # Keras has overwritten the weights
            masters.push(var_list)
        history.look()

    # -- saving ---------------------------------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        """Write the variables into a file of Keras, and the scales of losses of other ids than 0."""
        super().save_own_variables(store)
        for name, variable in self._ledger.saved_others().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Read what `save_own_variables` wrote, here or in an optimizer of Keras's own."""
        own, names = {}, list(store.keys())
        for name in names:
            variable = self._ledger.find_other(name)
            if variable is None:
                own[name] = store[name]
            else:
                variable.assign(store[name])
        super().load_own_variables(own)

    def get_config(self) -> dict[str, Any]:
        """Return what Keras saves to make the optimizer again."""
        group = self._ledger.contexts.host
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "loss_scale": asdict(group.config),
            "max_grad_norm": self.max_grad_norm,
            "max_grad_value": self.max_grad_value,
            "enabled": group.enabled,
            "keeps_masters": self.keeps_masters,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> AmpOptimizer:
        """Return an optimizer made from what `get_config` returned, here or of a LossScaleOptimizer of Keras 2 or 3.

        Raises:
            InvalidOptionError: It is the configuration of no such optimizer.
        """
        config = dict(config)
        if not isinstance(config.get("inner_optimizer"), dict):
            raise InvalidOptionError(
                f"from_config got a configuration with the names {sorted(config)}; accepted: that of an optimizer "
                f"which scales the loss, with its inner_optimizer. Pass what get_config gave."
            )
        inner = dict(config.pop("inner_optimizer"))
        if isinstance(inner.get("config"), dict):  # Keras 2 says more than the optimizers of Keras 3 take
            inner["config"] = {name: value for name, value in inner["config"].items() if name not in _ONLY_KERAS_2}
        if "loss_scale" in config:
            config["loss_scale"] = LossScale(**config["loss_scale"])
        else:
            config["loss_scale"] = read_configuration(
                config.pop("dynamic", True), config.pop("initial_scale", None), config.pop("dynamic_growth_steps", None)
            )
        return cls(keras.saving.deserialize_keras_object(inner, custom_objects=custom_objects), **config)


def read_configuration(dynamic: bool, initial_scale: float | None, growth_steps: int | None) -> LossScale:
    """Return the loss scale that the arguments of Keras's LossScaleOptimizer mean.

    Raises:
        InvalidOptionError: They contradict each other, or are out of range.
    """
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


def wrap(optimizer: Any, member: Member, options: Mapping[str, Any]) -> AmpOptimizer:
    """Wrap an optimizer of Keras 3; raise for one that scales the loss itself or keeps low-precision variables."""
    _check(optimizer, options)
    plan, level = options["plan"], options["level"]
    lowers = plan is not None and level.casts_params
    if optimizer.built and lowers and level.master_weights:
        masters.adopt(optimizer)
    if member.group.enabled and not (lowers and not level.master_weights):
        guard.refuse_low_precision(optimizer._trainable_variables)
    wrapped = AmpOptimizer(
        optimizer,
        max_grad_norm=options.get("max_grad_norm"),
        max_grad_value=options.get("max_grad_value"),
        keeps_masters=lowers and level.master_weights,
        member=member,
    )
    wrapped._compute = "float32" if plan is None else plan.dtype
    wrapped._must_be_prepared = lowers
    wrapped._lists = plan if isinstance(plan, oplists.ListsPlan) else None
    return wrapped


def _check(optimizer: Any, options: Mapping[str, Any]) -> None:
    """Raise for an optimizer that scales the loss itself, and for bounds of what it accumulates."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None:
        raise AlreadyWrappedError(
            f"wrap_optimizer got {type(optimizer).__name__}, which scales the loss itself; its gradients would be "
            f"unscaled twice. Pass the optimizer inside (inner_optimizer), without loss_scale_factor, and give "
            f"loss_scale=… to wrap_optimizer."
        )
    bounds = [name for name in ("max_grad_norm", "max_grad_value") if options.get(name) is not None]
    if bounds and optimizer.gradient_accumulation_steps:
        raise InvalidOptionError(
            f"wrap_optimizer got {', '.join(bounds)} for an optimizer with gradient_accumulation_steps, of which ampx "
            f"sees only micro-batches; accepted: one of them. Pass global_clipnorm or clipvalue to the optimizer, "
            f"which clips what was accumulated."
        )
