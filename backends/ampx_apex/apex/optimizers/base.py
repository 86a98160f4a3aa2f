"""What the fused optimizers share: which tensors a step works on, and in which dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, TypeAlias

import torch

from ampx.errors import UnsupportedByBackendError, UnsupportedDtypeError
from ampx_apex.apex.amp_c import in_float32

_LOW: Final = (torch.float16, torch.bfloat16)
Group: TypeAlias = dict[str, Any]
State: TypeAlias = dict[str, Any]
Lists: TypeAlias = list[list[torch.Tensor]]


class FusedOptimizer(torch.optim.Optimizer):
    """Computes in float32 whatever the parameters are, as the kernels of apex do, and keeps its state in float32.

    Attributes:
        set_grad_none: Whether `zero_grad` drops the gradients rather than filling them with zeros.
    """

    state_names: ClassVar[tuple[str, ...]] = ()  # of the tensors in its state that are like the parameter
    set_grad_none: bool

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        device = next((own.device for group in self.param_groups for own in group["params"]), None)
        # Optimizers derived from these call the kernels themselves, and pass them this.
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32, device=device)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles need: torch leaves out all attributes of its subclasses."""
        own = {name: value for name, value in vars(self).items() if name[:1] != "_" and not callable(value)}
        return {**own, **super().__getstate__(), "_dummy_overflow_buf": self._dummy_overflow_buf}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients, by default in the way that `set_grad_none` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients, and return what the closure gave.

        Raises:
            UnsupportedByBackendError: A gradient is sparse. Nothing was updated.
            UnsupportedDtypeError: A parameter is not a real floating tensor. Nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tensors = [self._gather(group) for group in self.param_groups]
        self._prepare(tensors)
        for group, (parameters, gradients) in zip(self.param_groups, tensors, strict=True):
            group["step"] = group.get("step", 0) + 1
            if parameters:
                self._update_in_float32(group, parameters, gradients)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. The float32 state of low-precision parameters is not rounded to their dtype."""
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        current = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, current, strict=True):
            if parameter.dtype in _LOW:
                for name, value in state_dict["state"].get(key, {}).items():
                    if torch.is_tensor(value) and value.is_floating_point():
                        self.state[parameter][name] = value.to(parameter.device, torch.float32, copy=True)

    def _prepare(self, tensors: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
        """Compute what an update needs from the gradients of all groups."""

    def _update(self, group: Group, lists: Lists, states: Sequence[State]) -> None:
        """Update the parameters of one group in place.

        The lists are gradients, which stay as they are, float32 or float64 parameters, and those of `state_names`.
        """
        raise NotImplementedError

    def _gather(self, group: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if parameter.grad.layout is not torch.strided:
                raise UnsupportedByBackendError(
                    f"{type(self).__name__} got a sparse gradient; accepted: dense gradients. Make the embedding with "
                    f"sparse=False, or use torch.optim.SparseAdam."
                )
            if not parameter.is_floating_point():
                raise UnsupportedDtypeError(
                    f"{type(self).__name__} got a parameter of dtype {parameter.dtype}; accepted: float16, bfloat16, "
                    f"float32, float64. Leave it out of the optimizer."
                )
        return parameters, [parameter.grad for parameter in parameters]

    def _update_in_float32(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        states = [self.state[own] for own in parameters]
        work = self._work(parameters, states)
        gradients = [grad.to(own.dtype) for grad, own in zip(gradients, work, strict=True)]
        self._update(
            group, [gradients, work, *(state_tensors(states, name, work) for name in self.state_names)], states
        )
        rounded = [(own, new) for own, new in zip(parameters, work, strict=True) if own is not new]
        if rounded:
            owns, ones = zip(*rounded, strict=True)
            torch._foreach_copy_(owns, ones)

    def _work(self, parameters: list[torch.Tensor], states: list[dict[str, Any]]) -> list[torch.Tensor]:
        """Return what to update, to be rounded into the parameters."""
        return [in_float32(parameter) for parameter in parameters]


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    """Refuse the variant that no fused optimizer of apex has."""
    if amsgrad:
        raise UnsupportedByBackendError(
            f"{name}(amsgrad=True) is not supported; accepted: False. Use torch.optim.AdamW(amsgrad=True)."
        )


def state_tensors(
    states: list[dict[str, Any]], name: str, parameters: list[torch.Tensor], fill: float = 0.0
) -> list[torch.Tensor]:
    """Return one tensor of every state, made like its parameter where it is not there yet."""
    tensors = []
    for state, own in zip(states, parameters, strict=True):
        if name not in state:
            state[name] = torch.full_like(own, fill, memory_format=torch.preserve_format)
        tensors.append(state[name])
    return tensors
