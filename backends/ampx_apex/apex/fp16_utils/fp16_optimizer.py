"""The optimizer wrapper from before `apex.amp`: it owns the backward pass, the masters and the loss scale."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from ampx.errors import InvalidOptionError, InvalidStateError, ProtocolError, UnsupportedDtypeError
from ampx_torch.delegation import of_raw
from ampx_torch.prepare import masters

from .fp16util import clip_grad_norm
from .loss_scaler import DynamicLossScaler, LossScaler

_LOW = (torch.float16, torch.bfloat16)


class FP16Optimizer:
    """Trains low-precision parameters through float32 masters, with a static or a dynamic loss scale.

    A step whose gradients are not finite is skipped, also with a static loss scale. The low-precision parameters of
    `init_optimizer` are replaced by masters, in place; `dynamic_loss_args` are those of `DynamicLossScaler`.

    Raises:
        UnsupportedDtypeError: A parameter is neither float16, bfloat16 nor float32. Nothing was changed.
        InvalidOptionError: An option of the loss scale is out of range. Nothing was changed.

    Attributes:
        optimizer: The wrapped optimizer.
        loss_scaler: The loss scale.
        overflow: Whether the gradients that were last computed are not finite.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.verbose = verbose
        self.optimizer = init_optimizer
        self.loss_scaler: LossScaler | DynamicLossScaler
        if dynamic_loss_scale:
            self.loss_scaler = DynamicLossScaler(**(dynamic_loss_args or {}))
        else:
            self.loss_scaler = LossScaler(static_loss_scale)
        self.dynamic_loss_scale = dynamic_loss_scale
        self.overflow = False
        self.first_closure_call_this_step = True
        trained = _trained(init_optimizer)
        self._full = [parameter for parameter in trained if parameter.dtype == torch.float32]
        low = [parameter for parameter in trained if parameter.dtype in _LOW]
        (self._masters,) = masters.give([init_optimizer], {parameter: _master(parameter) for parameter in low})
        self._full_unscaled = False  # whether gradients of float32 parameters lie there unscaled

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled."""
        raise ProtocolError("FP16_Optimizer was pickled; accepted: its state_dict(). Save that.")

    def __setstate__(self, state: Any) -> NoReturn:
        """Refuse to be unpickled."""
        raise ProtocolError("FP16_Optimizer was unpickled; accepted: load_state_dict(). Make a new one and use that.")

    def maybe_print(self, message: str) -> None:
        """Print a message where `verbose` is set."""
        if self.verbose:
            sys.stdout.write(f"{message}\n")

    @property
    def loss_scale(self) -> float:
        """The current loss scale; may be set."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    state = of_raw("state")
    param_groups = of_raw("param_groups")  # with masters in place of low-precision parameters

    def backward(self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Compute the gradients of a loss, and hand them unscaled to the masters, unless more losses are to add up.

        Sync: one, in `update_master_grads`.
        """
        self._masters.begin()
        if self._full_unscaled:
            gradients = self._full_gradients()
            if gradients:
                torch._foreach_mul_(gradients, self.loss_scale)  # exact: scales are powers of two
            self._full_unscaled = False
        self.loss_scaler.backward(loss.float(), retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Hand the gradients to the masters, unscaled; where they are not finite, set `overflow` instead. Sync: one."""
        self.overflow = self.loss_scaler.has_overflow([*self._masters.model_parameters(), *self._full])
        if self.overflow:
            return
        self._masters.pull_gradients()
        gradients = [
            master.grad for _, master in self._masters.pairs if master.grad is not None
        ] + self._full_gradients()
        if gradients and self.loss_scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale)
        self._full_unscaled = True
        if self.loss_scale < 1.0:  # a quotient may overflow though what was divided did not
            self.overflow = self.loss_scaler.has_overflow([*(master for _, master in self._masters.pairs), *self._full])

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the unscaled gradients of all parameters; return their norm before, -1 after an overflow."""
        if self.overflow:
            return -1
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return clip_grad_norm(parameters, max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, or skip after an overflow, and move the loss scale.

        A closure clears the gradients, computes the loss, calls `backward` of this optimizer and returns the loss.

        Raises:
            ProtocolError: In a closure, gradients are not finite whatever the scale.

        Sync: none; with a closure one an evaluation.
        """
        if closure is not None:
            return self._step_with_closure(closure)
        before = self.loss_scale
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            self.maybe_print(f"OVERFLOW! Skipping step. Loss scale was {before:g}, is now {self.loss_scale:g}")
            return None
        result = self.optimizer.step()
        self._masters.push_weights()
        return result

    def zero_grad(self, set_grads_to_none: bool = False, **old_spelling: bool) -> None:
        """Drop all gradients, or fill them with zeros; apex spelled the argument `set_grads_to_None`."""
        drop = old_spelling.pop("set_grads_to_None", set_grads_to_none)
        if old_spelling:
            raise InvalidOptionError(
                f"FP16_Optimizer.zero_grad got {sorted(old_spelling)}; accepted: set_grads_to_None. Leave "
                f"the others out."
            )
        self._masters.zero_grad(drop)
        for parameter in self._full:
            if drop or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = parameter.grad.detach().zero_()

    def inspect_master_grad_data(self) -> list[list[torch.Tensor | None]] | None:
        """Return the unscaled gradients group by group, or None after an overflow."""
        if self.overflow:
            self.maybe_print("Gradients overflowed: there are no master gradients to inspect.")
            return None
        return [[parameter.grad for parameter in group["params"]] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, the masters and the loss scale, all of types that `torch.load` trusts."""
        return {
            "loss_scaler": self.loss_scaler.__getstate__(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [
                [
                    master.detach()
                    for _, master in self._masters.pairs
                    if any(master is parameter for parameter in group["params"])
                ]
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, here or in apex. Load the model before.

        Raises:
            InvalidStateError: It is of an optimizer with other parameters. Nothing was changed.
        """
        saved = [parameter for group in state_dict["fp32_from_fp16"] for parameter in group]
        current = [master for _, master in self._masters.pairs]
        shapes, accepted = [[tuple(master.shape) for master in group] for group in (saved, current)]
        if shapes != accepted:
            raise InvalidStateError(
                f"FP16_Optimizer.load_state_dict got masters of the shapes {shapes}; accepted: {accepted}. Load the "
                f"state of the same model."
            )
        scaler = state_dict["loss_scaler"]
        kept = scaler if isinstance(scaler, dict) else scaler.__getstate__()
        fresh = (DynamicLossScaler if state_dict["dynamic_loss_scale"] else LossScaler)()
        fresh.__setstate__(kept)
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.loss_scaler = fresh
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        with torch.no_grad():
            for master, value in zip(current, saved, strict=True):
                master.copy_(value)

    def _full_gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._full if parameter.grad is not None]

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            # An optimizer that evaluates several times has changed the masters in between.
            if self.first_closure_call_this_step:
                self.first_closure_call_this_step = False
            else:
                self._masters.push_weights()
            loss = closure()
            while self.overflow:
                before = self.loss_scale
                self.loss_scaler.update_scale(True)
                if self.loss_scale == before:
                    raise ProtocolError(
                        f"FP16_Optimizer.step(closure) got gradients that are not finite at a loss scale of {before:g} "
                        f"that cannot fall; accepted: finite gradients. Step without a closure to skip such steps."
                    )
                self.maybe_print(f"OVERFLOW in the closure! Loss scale was {before:g}, is now {self.loss_scale:g}")
                loss = closure()
            return loss

        try:
            result = self.optimizer.step(evaluate)
        finally:
            self.first_closure_call_this_step = True
        self.loss_scaler.update_scale(False)
        self._masters.push_weights()
        return result


def _trained(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """List the parameters that an optimizer trains; raise where there is one that is neither float32 nor low."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        if parameter.dtype not in (*_LOW, torch.float32):
            raise UnsupportedDtypeError(
                f"FP16_Optimizer got a parameter of dtype {parameter.dtype}; accepted: float16, bfloat16, float32. "
                f"Convert the model, or leave the parameter out."
            )
    return trained


def _master(parameter: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone().float())


FP16_Optimizer = FP16Optimizer
