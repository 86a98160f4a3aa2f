"""Training in several processes: apex's arguments on torch's DistributedDataParallel."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ampx.errors import AmpxWarning, InvalidOptionError, ProtocolError, UnsupportedByBackendError
from ampx_apex.apex.apex_c import flatten, unflatten


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Averages gradients over the processes of the default group, whatever the devices of the module are.

    Parameters that take no part in a loss are allowed, and buffers are synchronised once, when it is made: as in
    apex, and unlike in torch's defaults. Where all take part, torch prints once that it need not have looked.
    `message_size` elements at least travel together, all with `delay_allreduce`; `allreduce_always_fp32` sums low
    precision in float32. Gradients are divided by `gradient_predivide_factor` before they are summed and by the rest
    after; the latter not without `gradient_average`. What torch decides itself warns: trigger parameters, streams.

    Raises:
        ProtocolError: There is no process group.
        InvalidOptionError: Arguments contradict each other, or are out of range.
        UnsupportedByBackendError: `retain_allreduce_buffers` is asked for.

    Sync: when it is made, as torch's.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Iterable[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Sequence[Any] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        _check_ready("DistributedDataParallel")
        _check_arguments(shared_param, delay_allreduce, allreduce_trigger_params, num_allreduce_streams)
        if retain_allreduce_buffers:
            raise UnsupportedByBackendError(
                "DistributedDataParallel(retain_allreduce_buffers=True) is not supported; accepted: False. Read the "
                "gradients from the parameters."
            )
        if gradient_average_split_factor is not None:
            _warn("gradient_average_split_factor", "is the former name of gradient_predivide_factor")
            gradient_predivide_factor = gradient_average_split_factor
        if not 0 < gradient_predivide_factor < math.inf:
            _refuse("gradient_predivide_factor", gradient_predivide_factor, "a positive number")
        for option in _ignored(allreduce_trigger_params, num_allreduce_streams, allreduce_communicators, prof):
            _warn(*option)
        group = allreduce_communicators[0][0] if allreduce_communicators else None
        size = max((parameter.element_size() for parameter in module.parameters()), default=4)
        super().__init__(
            module,
            process_group=group,
            bucket_cap_mb=2**20 if delay_allreduce else message_size * size / 2**20,
            find_unused_parameters=True,
        )
        # As an argument it would leave buffers as they are now, and warn in new releases of torch.
        self.broadcast_buffers = False
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            after = gradient_predivide_factor / dist.get_world_size(group) if gradient_average else 1.0
            self.register_comm_hook(None, _make_hook(group, allreduce_always_fp32, gradient_predivide_factor, after))

    def enable_allreduce(self) -> None:
        """Average gradients again in backward passes of forward passes to come."""
        self.require_backward_grad_sync = True

    def disable_allreduce(self) -> None:
        """Leave gradients to their process, for instance while they add up."""
        self.require_backward_grad_sync = False


class Reducer:
    """Averages gradients when told to: those of a module, whose parameters rank 0 hands out now, or those of a list."""

    def __init__(self, module_or_grads_list: nn.Module | Iterable[torch.Tensor]) -> None:
        _check_ready("Reducer")
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads: list[torch.Tensor] = []
        if self.module is not None:
            flat_dist_call([parameter.detach() for parameter in self.module.parameters()], dist.broadcast, (0,))
        elif not isinstance(module_or_grads_list, nn.Module):
            self.grads = list(module_or_grads_list)

    def reduce(self) -> None:
        """Average the gradients, in place."""
        if self.module is None:
            gradients = self.grads
        else:
            gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        flat_dist_call(gradients, dist.all_reduce)


def flat_dist_call(
    tensors: Iterable[torch.Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run a collective on tensors of any dtypes, in place; the sums of `all_reduce` become averages."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for bucket in kinds.values():
        apply_flat_dist_call(bucket, call, extra_args)


@torch.no_grad()
def apply_flat_dist_call(
    bucket: Sequence[torch.Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Do as `flat_dist_call` with tensors of one dtype and device."""
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    torch._foreach_copy_(list(bucket), unflatten(flat, bucket))


def split_half_float_double(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Sort tensors into lists of one dtype, the narrowest first; empty ones are left out."""
    tensors = list(tensors)
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    buckets = [[tensor for tensor in tensors if tensor.dtype == dtype] for dtype in dtypes]
    return [bucket for bucket in buckets if bucket]


def _make_hook(group: Any, in_float32: bool, before: float, after: float) -> Any:
    """Return the hook that sums one bucket of gradients: divided by `before`, then multiplied by `after`."""

    # torch compares these annotations with its types, so that this module must not turn them into strings.
    def reduce(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        own = bucket.buffer()
        summed = own.float() if in_float32 else own
        summed.div_(before)
        work = dist.all_reduce(summed, group=group, async_op=True)

        def finish(_: Any) -> torch.Tensor:
            summed.mul_(after)
            return own if summed is own else own.copy_(summed)

        return work.get_future().then(finish)

    return reduce


def _check_ready(name: str) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ProtocolError(
            f"{name} was made without a process group; accepted: after torch.distributed.init_process_group(...). "
            f"Call that first."
        )


def _check_arguments(shared: bool | None, delays: bool, triggers: Any, streams: int) -> None:
    """Raise for what torch needs not to be told, and for arguments that contradict `delay_allreduce`."""
    if shared is not None:
        _refuse("shared_param", shared, "leaving it out; shared parameters need nothing")
    if delays and triggers is not None:
        _refuse("allreduce_trigger_params", "...", "it without delay_allreduce=True")
    if delays and streams > 1:
        _refuse("num_allreduce_streams", streams, "1 with delay_allreduce=True")


def _ignored(triggers: Any, streams: int, communicators: Any, prof: bool) -> Iterator[tuple[str, str]]:
    """Walk over the arguments that torch does not follow, with what becomes of each."""
    same = "has no effect: torch decides that, and the gradients are the same"
    if triggers is not None:
        yield "allreduce_trigger_params", same
    if streams > 1 and not communicators:
        yield "num_allreduce_streams", same
    if prof:
        yield "prof", "has no effect: torch.profiler shows the collectives"
    if communicators:
        yield "allreduce_communicators", "is used for its first process group only; the gradients are the same"


def _refuse(name: str, value: object, accepted: str) -> None:
    raise InvalidOptionError(
        f"DistributedDataParallel({name}={value}) is not accepted; accepted: {accepted}. Change it."
    )


def _warn(name: str, what: str) -> None:
    warnings.warn(f"DistributedDataParallel's {name} {what}.", AmpxWarning, stacklevel=3)
