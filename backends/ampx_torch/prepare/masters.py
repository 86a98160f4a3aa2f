"""Float32 master weights: what the optimizer updates while the model computes with low-precision copies.

They are made of the weights before these are rounded. Until they are first used the model's weights may still change,
by initialising them anew or by a broadcast of DistributedDataParallel, and count (`MasterWeights.begin`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import nn

from ampx import callers
from ampx.errors import PrecisionWarning, UnsupportedByBackendError
from ampx_torch.trees import LOW, gradient_of


class MasterWeights:
    """The masters of one raw optimizer. Travels with copies and pickles of (model, wrapped optimizer)."""

    def __init__(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Keep the pairs, and until `begin` what the parameters are and how often their masters were written."""
        self.pairs = list(pairs)  # (the model's parameter, its float32 master), every parameter once
        self._new = [(own, master, own.detach().clone(), master._version) for own, master in self.pairs]
        # Memory of the masters' gradients by place in `pairs`, on a CPU only.
        self._kept: dict[int, torch.Tensor] = {}
        self._versions: list[int] | None = None  # of the model's gradients, after `note_unscaled`; None: nobody asks
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave the gradients' memory out: it holds nothing of value between steps."""
        return {**self.__dict__, "_kept": {}, "_versions": None}

    def model_parameters(self) -> list[nn.Parameter]:
        """List the model's parameters that have masters."""
        return [own for own, _ in self.pairs]

    def any_gradient(self) -> bool:
        """Return whether any of the model's parameters has a gradient that is not all zeros. Sync: one a parameter."""
        gradients = [gradient_of(own) for own, _ in self.pairs]
        return any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    def pull_gradients(self) -> None:
        """Set the gradients of the masters to the model's, in float32.

        The model's own gradients stay: they are summed up by further backwards and dropped by `zero_grad`.
        Pulling twice is pulling once; pull before unscaling, which changes the masters' gradients only.

        On a CPU the memory stays with the masters after `zero_grad`: mapping it anew in every step takes longer than
        filling it. On an accelerator torch keeps freed memory itself, and lends it to the forward in between.
        """
        targets, sources = [], []
        for place, (own, master) in enumerate(self.pairs):
            gradient, target = gradient_of(own), gradient_of(master)
            if gradient is None:
                master.grad = None
                continue
            if target is None:
                target = master.grad = self._kept.get(place)
            if target is None or gradient.is_sparse or target.is_sparse:
                target = master.grad = gradient.to(torch.float32, copy=True)
                if gradient.is_cpu and not gradient.is_sparse:
                    self._kept[place] = target
            else:
                targets.append(target)
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    def note_unscaled(self) -> None:
        """Note that the masters' gradients are unscaled, and that the script may write to them now."""
        self._versions = None if self._warned else self._versions_now()

    def check_writes(self) -> None:
        """Warn, once, where the model's gradients were written instead, which the step does not read."""
        versions, self._versions = self._versions, None
        if versions is not None and versions != self._versions_now():
            self._warned = True
            callers.warn(
                "gradients of the model's parameters were changed between unscale and the step, which does nothing "
                "where the optimizer updates master weights: their gradients are the true ones. Clip by "
                "ampx.clip_grad_norm(opt, max_norm) or max_grad_norm=… of wrap_optimizer, or change the gradients of "
                "the parameters in opt.param_groups.",
                PrecisionWarning,
            )

    def _versions_now(self) -> list[int]:
        return [gradient._version for own, _ in self.pairs if (gradient := gradient_of(own)) is not None]

    @torch.no_grad()
    def begin(self) -> None:
        """Take over what was written into the model's parameters since the masters were made; once, before their use.

        A parameter that is what its master rounds to keeps its exact master. With several processes it does so only
        where the master was loaded from a checkpoint: a process whose weights were broadcast cannot know that the
        others' were changed, and their masters must be the same.
        """
        if not self._new:
            return
        new, self._new = self._new, []
        available = torch.distributed.is_available() and torch.distributed.is_initialized()
        several = available and torch.distributed.get_world_size() > 1
        for own, master, before, version in new:
            if several and master._version == version:
                master.copy_(own)
            else:
                written = (own != before) & (own != master.to(own.dtype))
                master.copy_(torch.where(written, own.to(master.dtype), master))

    def extend(self, others: MasterWeights) -> None:
        """Take in other parameters with their masters."""
        self.pairs += others.pairs
        self._new += others._new

    def push_weights(self) -> None:
        """Round the masters into the model's parameters."""
        with torch.no_grad():
            if self.pairs:
                owns, masters = zip(*self.pairs, strict=True)
                torch._foreach_copy_(owns, masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the model's parameters and of the masters."""
        for pair in self.pairs:
            for parameter in pair:
                if set_to_none or parameter.grad is None:
                    parameter.grad = None
                else:
                    parameter.grad = parameter.grad.detach().zero_()


def of(optimizer: Any) -> MasterWeights | None:
    """Return the master weights of a raw optimizer, if `prepare` made any.

    Copies of a raw optimizer lose them: copy the wrapped one.
    """
    masters = vars(optimizer).get("ampx_masters")
    return masters if isinstance(masters, MasterWeights) else None


def check_movable(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that keeps its own references to parameters, as LBFGS does: they cannot be replaced."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedByBackendError(
            "prepare got LBFGS, which evaluates the model between its own updates, so that master weights would be "
            "one evaluation late; supported: optimizers that update once a step. Use level='O1' with it."
        )


def give(
    optimizers: Sequence[torch.optim.Optimizer], masters: Mapping[nn.Parameter, nn.Parameter]
) -> list[MasterWeights]:
    """Point optimizers at masters of their parameters, in place: groups, options and names stay, state moves along."""
    return [_give(optimizer, masters) for optimizer in optimizers]


def _give(optimizer: torch.optim.Optimizer, masters: Mapping[nn.Parameter, nn.Parameter]) -> MasterWeights:
    pairs = []
    for group in optimizer.param_groups:
        for index, own in enumerate(group["params"]):
            master = masters.get(own)
            if master is None:
                continue
            group["params"][index] = master
            pairs.append((own, master))
            if own in optimizer.state:
                optimizer.state[master] = _in_float32(optimizer.state.pop(own))
    weights = MasterWeights(pairs)
    optimizer.ampx_masters = weights
    return weights


def _in_float32(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {
        key: value.to(torch.float32) if isinstance(value, torch.Tensor) and value.dtype in LOW else value
        for key, value in state.items()
    }
