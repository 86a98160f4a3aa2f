"""The operations of `amp_C`, on torch's foreach and fused kernels.

All take a chunk size, which is of no meaning here, an integer tensor of one element, and lists of tensors. Most set the
integer to 1 where they meet a value that is not finite. They compute in float32 and round into the dtype of the tensors
they write. The optimizers of `apex.optimizers` stand on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ampx.errors import InvalidOptionError

TensorLists: TypeAlias = Sequence[Sequence[torch.Tensor]]

_LOW: Final = (torch.float16, torch.bfloat16)
_FUSED_DEVICES: Final = {"cpu", "cuda"}
_NORMS: Final = {2: 2.0, 0: float("inf")}


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """Write `source * scale` for every tensor, and set the flag where a source is not finite."""
    sources, targets = _check("multi_tensor_scale", tensor_lists, 2)
    if sources:
        _flag(noop_flag, sources)
        torch._foreach_copy_(targets, torch._foreach_mul([in_float32(source) for source in sources], scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """Write `a * x + b * y` for every pair; `arg_to_check` 0 tests x, 1 tests y, -1 both."""
    xs, ys, targets = _check("multi_tensor_axpby", tensor_lists, 3)
    checked = {-1: [*xs, *ys], 0: xs, 1: ys}.get(arg_to_check)
    if checked is None:
        raise InvalidOptionError(
            f"multi_tensor_axpby(arg_to_check={arg_to_check!r}) is not accepted; accepted: 0 (x), 1 (y), -1 (both). "
            f"Change it."
        )
    if xs:
        _flag(noop_flag, checked)
        sums = torch._foreach_mul([in_float32(x) for x in xs], a)
        torch._foreach_add_(sums, [in_float32(y) for y in ys], alpha=b)
        torch._foreach_copy_(targets, sums)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor | None, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the L2 norm over all tensors, and the norm of each where asked for.

    Both are float32 tensors of one dimension; the flag is set where the norm is not finite.
    """
    (tensors,) = _check("multi_tensor_l2norm", tensor_lists, 1)
    if not tensors:
        device = None if noop_flag is None else noop_flag.device
        return torch.zeros(1, device=device), torch.zeros(0, device=device)
    norms = torch._foreach_norm([in_float32(tensor) for tensor in tensors])
    each = torch.stack([norm.to(tensors[0].device) for norm in norms]).float()
    norm = torch.linalg.vector_norm(each).reshape(1)
    if noop_flag is not None:
        noop_flag.masked_fill_(~torch.isfinite(norm).to(noop_flag.device), 1)
    return norm, each if per_tensor else each.new_zeros(0)


multi_tensor_l2norm_mp = multi_tensor_l2norm


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: TensorLists,
    scale: float,
    per_tensor: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write `source * scale` for every tensor, and return the norms of the sources."""
    sources, targets = _check("multi_tensor_l2norm_scale", tensor_lists, 2)
    norms = multi_tensor_l2norm(chunk_size, noop_flag, [sources], per_tensor)
    if sources:
        torch._foreach_copy_(targets, torch._foreach_mul([in_float32(source) for source in sources], scale))
    return norms


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: TensorLists,
    inv_scale: torch.Tensor,
    per_tensor: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of the tensors times a scalar tensor; they stay as they are."""
    norm, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    return norm * inv_scale, each * inv_scale


# -- steps of optimizers -----------------------------------------------------------------------------


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Do one step of Adam on gradients, parameters, and averages of the gradients and of their squares.

    `step` counts from 1. Mode 0 adds the decay to the gradients, 1 decays weights apart from them.
    """
    gradients, parameters, averages, squares = _check("multi_tensor_adam", tensor_lists, 4)
    if not parameters:
        return
    gradients = [in_float32(gradient) for gradient in gradients]
    with _rounded(parameters, averages, squares) as (parameters, averages, squares):
        if not bias_correction:  # torch's Adam always corrects
            _adam_uncorrected(gradients, parameters, averages, squares, lr, beta1, beta2, epsilon, mode, weight_decay)
            return
        fused = has_fused_kernel(parameters)
        # The functions count the step themselves, in one tensor a parameter.
        before = torch.full((len(parameters),), step - 1.0, device=parameters[0].device if fused else "cpu")
        (adamw if mode else adam)(
            parameters,
            gradients,
            averages,
            squares,
            [],
            list(before.unbind()),
            fused=fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=epsilon,
            maximize=False,
        )


def _adam_uncorrected(
    gradients: list[torch.Tensor],
    parameters: list[torch.Tensor],
    averages: list[torch.Tensor],
    squares: list[torch.Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    if weight_decay and not mode:
        gradients = list(torch._foreach_add(gradients, parameters, alpha=weight_decay))
    torch._foreach_lerp_(averages, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_add_(denominators, epsilon)
    if weight_decay and mode:
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_addcdiv_(parameters, averages, denominators, -lr)


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """Multiply the gradients by `inv_scale` in place, and do as `multi_tensor_adam`; nothing where the flag is set.

    The learning rate and the number of the step are tensors. CUDA graphs cannot capture it.

    Sync: three.
    """
    if noop_flag.item():
        return
    _unscale(tensor_lists[0], inv_scale)
    numbers = (float(lr), beta1, beta2, epsilon, int(step), mode, bias_correction, weight_decay)
    multi_tensor_adam(chunk_size, None, tensor_lists, *numbers)


def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """Do as `multi_tensor_adam_capturable` with a fifth list, masters, that round into the parameters. Sync: three."""
    gradients, parameters, averages, squares, masters = _check("multi_tensor_adam_capturable_master", tensor_lists, 5)
    numbers = (lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale)
    multi_tensor_adam_capturable(chunk_size, noop_flag, [gradients, masters, averages, squares], *numbers)
    _copy(parameters, masters)


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: TensorLists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Do one step of Adagrad on gradients, parameters and sums of squares; modes as in Adam."""
    gradients, parameters, sums = _check("multi_tensor_adagrad", tensor_lists, 3)
    if not parameters:
        return
    with _rounded(parameters, sums) as (parameters, sums):
        if weight_decay and mode:
            torch._foreach_mul_(parameters, 1 - lr * weight_decay)
        # The count matters to torch's Adagrad only where the learning rate decays, which apex's does not.
        adagrad(
            parameters,
            [in_float32(gradient) for gradient in gradients],
            sums,
            list(torch.zeros(len(parameters)).unbind()),
            foreach=True,
            lr=lr,
            weight_decay=0.0 if mode else weight_decay,
            lr_decay=0.0,
            eps=epsilon,
            maximize=False,
        )


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: TensorLists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
) -> None:
    """Do one step of SGD on gradients, parameters, momenta, and perhaps copies of the parameters in another dtype.

    Nothing happens where the flag is set. In the first run the momenta hold nothing yet. `wd_after_momentum` adds the
    decay to the momentum's result and not to the gradients, which are multiplied by `scale`.

    Sync: one where there is a flag.
    """
    gradients, parameters, momenta, *copies = _check(
        "multi_tensor_sgd", tensor_lists, 3 if len(tensor_lists) < 4 else 4
    )
    if not parameters or (noop_flag is not None and noop_flag.item()):
        return
    gradients = [in_float32(gradient) for gradient in gradients]
    if scale != 1.0:
        gradients = list(torch._foreach_mul(gradients, scale))
    with _rounded(parameters, momenta) as (work, buffers):
        if wd and wd_after_momentum:
            torch._foreach_mul_(work, 1 - lr * wd)
        kept: list[torch.Tensor | None] = [None] * len(work) if first_run or not momentum else list(buffers)
        sgd(
            work,
            gradients,
            kept,
            fused=has_fused_kernel(work),
            weight_decay=0.0 if wd_after_momentum else wd,
            momentum=momentum,
            lr=lr,
            dampening=dampening,
            nesterov=nesterov,
            maximize=False,
        )
        if first_run and momentum:
            _copy(buffers, [buffer for buffer in kept if buffer is not None])
    for targets in copies:
        _copy(targets, parameters)


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: TensorLists,
    grad_norms: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    moment_mode: int,
    norm_type: int,
) -> None:
    """Do one step of NovoGrad on gradients, parameters and averages of the gradients.

    `grad_norms` are the average norms up to now, and change; `norm_type` is 2, or 0 for the largest value. In moment
    mode 0, gradients are normalised and decayed before they enter their average, in 1 after. `grad_averaging` lets
    them enter times 1 - beta1 rather than whole.
    """
    gradients, parameters, averages = _check("multi_tensor_novograd", tensor_lists, 3)
    if not parameters:
        return
    gradients = [in_float32(gradient) for gradient in gradients]
    first, second = (1 - beta1**step, (1 - beta2**step) ** 0.5) if bias_correction else (1.0, 1.0)
    norms = torch.stack([norm.to(grad_norms.device) for norm in torch._foreach_norm(gradients, _NORMS[norm_type])])
    if norm_type:
        grad_norms.copy_((beta2 * grad_norms.square() + (1 - beta2) * norms.square()).sqrt())
    else:
        grad_norms.mul_(beta2).add_(norms, alpha=1 - beta2)
    denominators = [
        denominator.to(gradient.device)
        for denominator, gradient in zip((grad_norms / second + epsilon).unbind(), gradients, strict=True)
    ]
    with _rounded(parameters, averages) as (parameters, averages):
        torch._foreach_mul_(averages, beta1)
        if not moment_mode:
            gradients = list(torch._foreach_div(gradients, denominators))
            torch._foreach_add_(gradients, parameters, alpha=weight_decay)
        torch._foreach_add_(averages, gradients, alpha=1 - beta1 if grad_averaging else 1.0)
        updates = torch._foreach_div(averages, first)
        if moment_mode:
            torch._foreach_div_(updates, denominators)
            torch._foreach_add_(updates, parameters, alpha=weight_decay)
        torch._foreach_add_(parameters, updates, alpha=-lr)


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Any,
    max_grad_norm: Any,
    use_nvlamb: bool | None = False,
) -> None:
    """Do one step of LAMB on gradients, parameters, and averages of the gradients and of their squares.

    Gradients are clipped by their norm and its bound first. `mode` is that of Adam, `grad_averaging` that of NovoGrad.
    `use_nvlamb` scales the step of every parameter, else only where there is weight decay.
    """
    gradients, parameters, averages, squares = _check("multi_tensor_lamb", tensor_lists, 4)
    if not parameters:
        return
    with _rounded(parameters, averages, squares) as (parameters, averages, squares):
        gradients = _clipped(gradients, global_grad_norm, max_grad_norm)
        if weight_decay and not mode:
            torch._foreach_add_(gradients, parameters, alpha=weight_decay)
        decays = [weight_decay if mode else 0.0] * len(parameters)
        entering, corrected = 1 - beta1 if grad_averaging else 1.0, step if bias_correction else 0
        lists = (gradients, parameters, averages, squares)
        updates = _lamb_updates(lists, decays, beta1, entering, beta2, epsilon, corrected)
        norms = (torch._foreach_norm(parameters), torch._foreach_norm(updates))
        _lamb_apply(parameters, updates, norms, lr, adapts=bool(weight_decay or use_nvlamb))


def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: TensorLists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: torch.Tensor,
    max_grad_norm: torch.Tensor,
    use_nvlamb: bool | None,
    found_inf: torch.Tensor,
    inv_scale: torch.Tensor,
) -> None:
    """Do as `multi_tensor_lamb`, with tensors in place of numbers; nothing where `found_inf` is set.

    A fifth list takes copies of the parameters in their dtype. Gradients, their norm and its bound carry the scale
    whose inverse is `inv_scale`; the gradients are multiplied by it in place.

    Sync: three.
    """
    if found_inf.item():
        return
    gradients, parameters, averages, squares, *copies = _check(
        "multi_tensor_lamb_mp", tensor_lists, 4 if len(tensor_lists) < 5 else 5
    )
    _unscale(gradients, inv_scale)
    first = (float(lr), beta1, beta2, epsilon, int(step), bias_correction, weight_decay, grad_averaging, mode)
    norms = (global_grad_norm * inv_scale, max_grad_norm * inv_scale, use_nvlamb)
    multi_tensor_lamb(chunk_size, None, [gradients, parameters, averages, squares], *first, *norms)
    for targets in copies:
        _copy(targets, parameters)


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: TensorLists,
    per_tensor_decay: torch.Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: Any,
    max_global_grad_norm: float,
) -> None:
    """Compute the updates of LAMB into a fifth list; `step` counts from 0, and each tensor has its decay. Sync: one."""
    lists = _check("multi_tensor_lamb_stage1_cuda", tensor_lists, 5)
    gradients, parameters, averages, squares, updates = lists
    if parameters:
        with _rounded(averages, squares) as (averages, squares):
            gradients = _clipped(gradients, global_grad_norm, max_global_grad_norm)
            work = (gradients, [in_float32(own) for own in parameters], averages, squares)
            decays = per_tensor_decay.tolist()
            _copy(updates, _lamb_updates(work, decays, beta1, 1 - beta1, beta2, epsilon, step + 1))


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: TensorLists,
    per_tensor_param_norm: torch.Tensor,
    per_tensor_update_norm: torch.Tensor,
    lr: float,
    weight_decay: float | None = None,
    use_nvlamb: bool | None = False,
) -> None:
    """Apply the updates of LAMB to the parameters; without `weight_decay` every step is scaled."""
    parameters, updates = _check("multi_tensor_lamb_stage2_cuda", tensor_lists, 2)
    if parameters:
        norms = (per_tensor_param_norm.unbind(), per_tensor_update_norm.unbind())
        with _rounded(parameters) as (work,):
            ready = [in_float32(update) for update in updates]
            _lamb_apply(work, ready, norms, lr, adapts=bool(weight_decay is None or weight_decay or use_nvlamb))


def _clipped(gradients: list[torch.Tensor], norm: Any, bound: Any) -> list[torch.Tensor]:
    divisor = torch.as_tensor(norm / bound).clamp(min=1.0)
    return [in_float32(gradient) / divisor.to(gradient.device) for gradient in gradients]


def _lamb_updates(
    tensor_lists: tuple[list[torch.Tensor], ...],
    decays: list[float],
    beta1: float,
    entering: float,
    beta2: float,
    epsilon: float,
    step: int,
) -> list[torch.Tensor]:
    """Move the averages and compute the updates; step 0 corrects nothing."""
    gradients, parameters, averages, squares = tensor_lists
    torch._foreach_mul_(averages, beta1)
    torch._foreach_add_(averages, gradients, alpha=entering)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_div(squares, 1 - beta2**step if step else 1.0)
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, epsilon)
    updates = torch._foreach_div(averages, 1 - beta1**step if step else 1.0)
    torch._foreach_div_(updates, denominators)
    if any(decays):
        torch._foreach_add_(updates, torch._foreach_mul(parameters, decays))
    return list(updates)


def _lamb_apply(
    parameters: list[torch.Tensor], updates: list[torch.Tensor], norms: Any, lr: float, adapts: bool
) -> None:
    if adapts:
        # A layer, or an update, that is all zeros is not scaled.
        ratios = [torch.where((own > 0) & (new > 0), own / new, 1.0) for own, new in zip(*norms, strict=True)]
        updates = list(torch._foreach_mul(updates, ratios))
    torch._foreach_add_(parameters, updates, alpha=-lr)


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> torch.Tensor:
    """Move a loss scale on its device as Megatron does, and return it; all four tensors have one element.

    It falls with every overflow once `hysteresis` of them came in a row, and grows after `growth_interval` steps
    without any. This is not the state machine of ampx, which fills the hysteresis again after each fall.
    """
    overflow = found_inf > 0
    hysteresis_tracker.copy_(torch.where(overflow, hysteresis_tracker - 1, hysteresis))
    falls = overflow & (hysteresis_tracker <= 0)
    grows = ~overflow & (growth_tracker + 1 == growth_interval)
    larger = current_scale * growth_factor
    grown = torch.where(grows & torch.isfinite(larger), larger, current_scale)
    current_scale.copy_(torch.where(falls, current_scale * backoff_factor, grown))
    growth_tracker.copy_(torch.where(overflow | grows, 0, growth_tracker + 1))
    return current_scale


# -- parts -------------------------------------------------------------------------------------------


def in_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a low-precision tensor in float32, and any other as it is."""
    return tensor.float() if tensor.dtype in _LOW else tensor


def has_fused_kernel(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether torch's fused optimizer kernels take all of these."""
    return all(own.device.type in _FUSED_DEVICES for own in parameters)


@contextmanager
def _rounded(*tensor_lists: list[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], ...]]:
    """Return lists to change in float32, and round them into the tensors they stand for afterwards."""
    work = tuple([in_float32(tensor) for tensor in tensors] for tensors in tensor_lists)
    yield work
    for tensors, results in zip(tensor_lists, work, strict=True):
        changed = [(own, new) for own, new in zip(tensors, results, strict=True) if own is not new]
        _copy([own for own, _ in changed], [new for _, new in changed])


@torch.no_grad()
def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


@torch.no_grad()
def _unscale(gradients: Sequence[torch.Tensor], inv_scale: torch.Tensor) -> None:
    for gradient in gradients:
        gradient.mul_(inv_scale.to(gradient.device))


def _check(name: str, tensor_lists: TensorLists, count: int) -> list[list[torch.Tensor]]:
    lists = [list(tensors) for tensors in tensor_lists]
    lengths = [len(tensors) for tensors in lists]
    if len(lists) != count or len(set(lengths)) > 1:
        raise InvalidOptionError(f"{name} got lists of {lengths} tensors; accepted: {count} of one length. Pass these.")
    return lists


def _flag(noop_flag: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    # A sum may overflow where no value is infinite; the largest magnitude cannot, and it carries NaN along.
    largest = [tensor.to(noop_flag.device) for tensor in torch._foreach_norm(tensors, float("inf"))]
    finite = torch.isfinite(torch.stack([norm.float() for norm in largest])).all()
    noop_flag.masked_fill_(~finite, 1)
