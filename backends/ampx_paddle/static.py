"""Optimizers of static graphs: the step, its check and the loss scale are operations of the program."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final, NoReturn

import numpy as np
import paddle

from ampx.backend import GenericBackend
from ampx.errors import AmpxWarning, ProtocolError, UnsupportedByBackendError
from ampx.events import Event, Progress, StepResult
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import Ledger, Member, Outcome, ScaleGroup
from ampx.scale_state import LossScaleState, next_state

from . import casting
from .delegation import DelegatingOptimizer

_FIELDS: Final = tuple(field.name for field in fields(LossScaleState))
_OWN: Final = frozenset(("optimizer", "ampx_member", "_backend", "_plan", "_clips", "ampx_values"))
# On the CPU their bfloat16 gradient kernels want both gradients.
_PRODUCTS: Final = frozenset(("pd_op.matmul", "pd_op.linear", "pd_op.linear_v2"))


class GraphLedger(Ledger):
    """The state is persistable variables of the program, by name, in Paddle's global scope."""

    def __init__(self, names: Mapping[str, str], config: Any, below_one: bool) -> None:
        """Remember the variables' names by field, the program's configuration, and whether its scale may be below 1."""
        self._names = dict(names)
        self._config = config
        self._below_one = below_one
        self._sent = 0

    def keep_loss(self, loss: Any) -> None:
        """Have the program keep its loss, as it is before it is scaled, in a variable `"loss"` more."""
        self._names["loss"] = paddle.utils.unique_name.generate("ampx_loss")
        kept = _make_variable(self._names["loss"], "float32", math.nan)
        paddle.assign(loss.astype("float32").reshape([1]), kept)

    def value(self, field: str) -> Any:
        """Return a variable's number; None before the startup program ran. Sync: one on an accelerator."""
        if field not in self._names:
            return None
        variable = paddle.static.global_scope().find_var(self._names[field])
        tensor = None if variable is None else variable.get_tensor()
        if tensor is None or not tensor._is_initialized():
            return None
        return np.array(tensor).item()

    def factor(self, group: ScaleGroup, loss_id: int) -> float:
        """Return the scale as the program has it now."""
        self.resolve(group)
        return float(group.state_of(0).scale)

    def settle(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        """Do nothing: the program moves the scale."""

    def resolve(self, group: ScaleGroup) -> None:
        """Read the variables."""
        state = {name: self.value(name) for name in _FIELDS}
        if None not in state.values():
            group.states[0] = LossScaleState(**state)
            group.steps = int(self.value("steps") or 0)

    def events(self, group: ScaleGroup) -> Iterator[Event]:
        """Return the events of the last run, once: nothing else sends them. Sync: some on an accelerator."""
        steps = int(self.value("steps") or 0)
        if steps == self._sent:
            return
        self._sent = steps
        self.resolve(group)
        after = group.states[0]
        before = replace(after, scale=self.value("used"))
        finite = bool(self.value("finite"))
        if not finite:
            group.skipped[0] = group.skipped.get(0, 0) + 1
        labels = (group.framework, group.index, 0, steps)
        yield from group.events_of(labels, before, after, finite)
        if group.observer is not None and group.observer.is_due(steps):
            yield Progress(*labels, before.scale, after.scale, after.consecutive_skips, group.skipped.get(0, 0))

    def read(self, outcome: Outcome) -> dict[int, bool]:
        """Return what the outcome holds; there are none."""
        return outcome.finite

    def reload(self, group: ScaleGroup) -> None:
        """Write the variables, once the startup program ran, and with a scale that the program was built for."""
        state = group.states[0]
        if self.value("scale") is None:
            raise ProtocolError(
                "a state was loaded before the startup program ran, which would overwrite it; accepted: loading after "
                "exe.run(startup_program). Call load_state_dict then."
            )
        if state.scale < 1 and not self._below_one:
            raise ProtocolError(
                f"a state with loss scale {state.scale:g} was loaded into a program that was built for scales from 1 "
                f"on, and tests gradients before it divides them; accepted: a scale of at least 1. Build the program "
                f"with LossScale(min_scale={state.scale:g}), and load the state then."
            )
        if group.config != self._config:
            group.config = self._config
            warnings.warn(
                "the state holds another configuration of the loss scale than the program was built with; the numbers "
                "were taken over, the configuration was not",
                AmpxWarning,
                stacklevel=5,
            )
        for name in _FIELDS:
            tensor = paddle.static.global_scope().find_var(self._names[name]).get_tensor()
            place = tensor._place()
            target = paddle.CUDAPlace(place.gpu_device_id()) if place.is_gpu_place() else paddle.CPUPlace()
            tensor.set(np.array([getattr(state, name)], np.float32 if name == "scale" else np.int32), target)


class StaticOptimizer(WrappedOptimizer, DelegatingOptimizer):
    """A Paddle optimizer of a static graph, with a loss scale in the graph.

    `minimize(loss)` scales, differentiates, checks, and applies under a condition. The scale moves as the
    specification says, floors and ceilings included.
    """

    # `paddle.static.amp.decorate` does none of this in Paddle 3.3's graphs, so there is nothing of it to stand on: it
    # makes no variable for the scale and multiplies no loss by it, so that `minimize` raises for float16 and for any
    # static scale; with bfloat16 it drops the scale, checks nothing and casts nothing. tests/paddle/test_static.py
    # shows both. Casting is `auto_cast`'s work while the program is built, the check is Paddle's own kernel, and the
    # condition is `paddle.static.nn.cond`.

    def __init__(self, backend: GenericBackend, optimizer: Any, member: Member, options: Mapping[str, Any]) -> None:
        self.optimizer = optimizer
        self.ampx_member = member
        self._backend = backend
        self._plan = options["plan"]
        self._clips = (options["max_grad_norm"], options["max_grad_value"])
        # Values of the program to fetch, after `minimize`: `"scale"` and `"scaled_loss"`.
        self.ampx_values: dict[str, Any] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled."""
        self._backend.refuse("copies of an optimizer of a static graph, which belongs to its program")

    @property
    def last_step(self) -> StepResult | None:
        """What the last run of the program did; None before the first. Sync: some on an accelerator."""
        ledger = self.ampx_member.group.ledger
        if not isinstance(ledger, GraphLedger) or not ledger.value("steps"):
            return None
        ledger.resolve(self.ampx_member.group)
        state = self.ampx_member.group.states[0]
        finite = bool(ledger.value("finite"))
        return StepResult(finite, finite, ledger.value("used"), state.scale, int(state.consecutive_skips))

    def minimize(
        self, loss: Any, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None
    ) -> tuple[Any, list[tuple[Any, Any]]]:
        """Add scaling, backward, check and update to the program.

        Args:
            loss: Value of one element, as the loss function gave it: it is scaled here.
            startup_program: As in Paddle.
            parameters: As in Paddle.
            no_grad_set: As in Paddle.

        Returns:
            None, and the pairs of parameters and unscaled gradients.

        Raises:
            ProtocolError: The program was given to `minimize` already.
            UnsupportedByBackendError: An input of a bfloat16 product has `stop_gradient=True` on the CPU (Paddle
                would crash), or a gradient is not float32.
        """
        group = self.ampx_member.group
        if not group.enabled:
            return self.optimizer.minimize(loss, startup_program, parameters, no_grad_set)
        if isinstance(group.ledger, GraphLedger):
            raise ProtocolError(
                "minimize was called a second time; accepted: once for an optimizer. Wrap another optimizer for "
                "another program."
            )
        if self._plan is None:
            return self._build(group, loss, startup_program, parameters, no_grad_set)
        _refuse_crashing_products()
        with casting.region(self._plan, False):
            return self._build(group, loss, startup_program, parameters, no_grad_set)

    def _build(
        self, group: ScaleGroup, loss: Any, startup: Any, parameters: Any, no_grad_set: Any
    ) -> tuple[None, list[tuple[Any, Any]]]:
        """Add the step to the program, in the order of every step."""
        first = group.state_of(0)  # the configuration's first, or a loaded one
        names, values = _make_variables(first)
        state = LossScaleState(**{name: values[name] for name in _FIELDS})
        scaled = loss.astype("float32") * state.scale
        self.ampx_values = {"scale": state.scale, "scaled_loss": scaled}
        pairs = self._collect(scaled, startup, parameters, no_grad_set)
        below_one = min(group.config.init_scale, group.config.min_scale, first.scale) < 1
        finite = self._unscale_and_check(pairs, state.scale, below_one)
        self._apply_or_skip(pairs, finite, loss.block)
        self._close(group.config, values, state, finite)
        group.ledger = GraphLedger(names, group.config, below_one)
        return None, pairs

    def _collect(self, scaled: Any, startup: Any, parameters: Any, no_grad_set: Any) -> list[tuple[Any, Any]]:
        """Add the backward, and return the pairs of parameters and gradients."""
        pairs: list[tuple[Any, Any]] = self.optimizer.backward(scaled, startup, parameters, no_grad_set)
        if any(gradient.dtype != paddle.float32 for _, gradient in pairs):
            raise UnsupportedByBackendError(
                "minimize got gradients that are not float32; accepted: float32 parameters. Keep them in float32, and "
                "let casting do the rest."
            )
        return pairs

    def _unscale_and_check(self, pairs: list[tuple[Any, Any]], scale: Any, below_one: bool) -> Any:
        """Divide gradients by the scale in place, and return whether all are finite."""
        gradients = [gradient for _, gradient in pairs]
        _, overflow = paddle._C_ops.check_finite_and_unscale_(gradients, scale)
        finite = paddle.logical_not(overflow)
        if below_one:
            # Paddle's kernel tests before it divides, and dividing by less than one may overflow.
            for gradient in gradients:
                finite = paddle.logical_and(finite, paddle.isfinite(gradient).all())
        return finite

    def _apply_or_skip(self, pairs: list[tuple[Any, Any]], finite: Any, block: Any) -> None:
        # Made inside the condition, variables would be hidden: from the executor, which sets the learning rate for
        # schedulers, and from all that saves and loads a program, which would leave the optimizer's state out.
        self.optimizer._create_global_learning_rate()
        trained = [parameter for parameter, _ in pairs if not parameter.stop_gradient]
        self.optimizer._create_accumulators(block, trained)
        # A condition, and not Paddle's mark `found_inf`, which only some optimizers look at.
        paddle.static.nn.cond(finite, lambda: self._apply(self._clip(pairs)), None)

    def _apply(self, pairs: list[tuple[Any, Any]]) -> None:
        self.optimizer.apply_gradients(pairs)

    def _clip(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        norm, value = self._clips
        if value is not None:
            pairs = paddle.nn.ClipGradByValue(value)(pairs)
        return pairs if norm is None else _clip_by_norm(pairs, norm)

    def _close(self, config: Any, values: dict[str, Any], state: LossScaleState, finite: Any) -> None:
        """Note the outcome and move the loss scale."""
        after = next_state(config, state, finite, where=_where)
        paddle.assign(state.scale * 1.0, values["used"])
        paddle.assign(finite.astype("int32"), values["finite"])
        paddle.assign(values["steps"] + 1, values["steps"])
        for name in _FIELDS:
            if getattr(after, name) is not values[name]:
                paddle.assign(getattr(after, name), values[name])

    def step(self) -> None:
        """Refuse: in a static graph `minimize` is the step."""
        self._backend.refuse("step in a static graph (minimize is part of the program)")

    def ampx_unscale(self) -> None:
        """Refuse: gradients are values of the program."""
        self._backend.refuse("unscale in a static graph")

    def ampx_clip_grad_norm(self, max_norm: float) -> Any:
        """Refuse: pass `max_grad_norm` to `wrap_optimizer`."""
        self._backend.refuse("clip_grad_norm in a static graph (wrap_optimizer takes max_grad_norm)")


def _make_variables(first: LossScaleState) -> tuple[dict[str, str], dict[str, Any]]:
    """Make the persistable variables of the step; return their names, and their values in the program."""
    starts = {**{name: getattr(first, name) for name in _FIELDS}, "finite": 1, "used": first.scale, "steps": 0}
    names = {name: paddle.utils.unique_name.generate(f"ampx_{name}") for name in starts}
    values = {
        name: _make_variable(names[name], "float32" if name in ("scale", "used") else "int32", start)
        for name, start in starts.items()
    }
    return names, values


def _make_variable(name: str, dtype: str, start: float) -> Any:
    initializer = paddle.nn.initializer.ConstantInitializer(value=start)
    return paddle.pir.core.create_persistable_value(dtype=dtype, shape=[1], name=name, initializer=initializer)


def _clip_by_norm(pairs: list[tuple[Any, Any]], max_norm: float) -> list[tuple[Any, Any]]:
    """Clip by global norm, in float64: in float32, as Paddle's own clipping, a norm may overflow."""
    wide = [gradient.astype("float64") for _, gradient in pairs]
    norm = paddle.add_n([gradient.square().sum() for gradient in wide]).sqrt()
    factor = paddle.where(norm > max_norm, max_norm / norm, paddle.ones_like(norm))
    clipped = [(gradient * factor).astype("float32") for gradient in wide]
    return [(parameter, gradient) for (parameter, _), gradient in zip(pairs, clipped, strict=True)]


def _where(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Choose in the graph; numbers become values like the other branch, or integers where both are numbers."""
    like = next((value for value in (if_true, if_false) if not isinstance(value, (int, float))), None)
    dtype: Any = "int32" if like is None else like.dtype

    def lift(value: Any) -> Any:
        return paddle.full([1], value, dtype) if isinstance(value, (int, float)) else value

    return paddle.where(condition, lift(if_true), lift(if_false))


def _refuse_crashing_products() -> None:
    """Raise where Paddle's bfloat16 kernels on the CPU would be asked for one gradient of two, and crash."""
    if paddle.device.get_device() != "cpu":
        return
    for operation in paddle.static.default_main_program().global_block().ops:
        sources = operation.operands_source() if operation.name() in _PRODUCTS else []
        constant = {source.stop_gradient for source in sources if source.dtype == paddle.bfloat16}
        if len(constant) == 2:
            raise UnsupportedByBackendError(
                "the program multiplies an input with stop_gradient=True in bfloat16 on the CPU, where Paddle's "
                "backward would end the process; accepted: inputs with stop_gradient=False. Set x.stop_gradient = "
                "False on what paddle.static.data returned, before the model is built."
            )
