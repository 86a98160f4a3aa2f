"""The script's backward: the loss is scaled for the optimizers whose parameters it reaches."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final
from unittest import mock

import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ampx.run import asked_by_script, is_script_function
from ampx.run.recorder import Recorder
from ampx_torch.backend import TorchBackend
from ampx_torch.reach import bring_together, leaves_of
from ampx_torch.trees import LOW, gradient_of

from .gradients import unscaled
from .manager import WIDE, Owners, TorchManaged, TorchManager
from .native import OWN

# The last two where the script has set a default device, or is in another mode of torch functions.
_THROUGH: Final = ("torch._tensor", "torch.autograd", "torch.overrides", "torch.utils._device")
_NONE: Final = frozenset({type(None)})
_TRUE: Final = "_ampx_true_loss"  # on a scaled loss: the loss


@contextmanager
def backward_scaled(manager: TorchManager) -> Iterator[None]:
    """Patch `torch.autograd.backward`, which `Tensor.backward` calls."""
    true = torch.autograd.backward

    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        if torch.compiler.is_dynamo_compiling():
            manager.untraced(backward, tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        weights = grad_tensors if grad_variables is None else grad_variables
        if manager.held:
            manager.decide(manager.held)
        recorder = manager.run.recorder
        if recorder.wants_losses and not manager.inside and asked_by_script(OWN, _THROUGH):
            _report_loss(recorder, tensors, weights)
        if manager.stood_down:
            with manager.records_only("backward"):
                true(tensors, weights, retain_graph, create_graph, inputs=inputs)
            return
        if manager.native.scales:
            with manager.backward_phase:
                manager.note_scaler(tensors)
                true(tensors, weights, retain_graph, create_graph, inputs=inputs)
            return
        options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        if manager.shows and _backward_nested(manager, true, tensors, weights, options):
            return
        losses = None if manager.inside else _losses(tensors, weights)
        optimizers = manager.all() if losses else []
        if losses and not optimizers and manager.adopt_trained_copies():
            optimizers = manager.all()
        if losses is None or not optimizers:
            if manager.pending and not manager.inside:  # by edges of the graph, say: what it adds is not scaled
                for managed in manager.managed():
                    manager.unscale(managed)
            true(tensors, weights, retain_graph, create_graph, inputs=inputs)
            return
        with manager.backward_phase:
            if manager.scales:
                _backward_scaled(manager, true, losses, optimizers, options)
            else:
                if recorder.sampling:  # the first steps tell; walking the graph takes time
                    manager.owners.sort(optimizers)
                    _refuse_by_hand(manager, leaves_of(losses)[0])
                with manager.working():
                    _backward(manager, true, losses, _ready(optimizers), options)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd, "backward", backward))
        stack.enter_context(mock.patch.object(torch.autograd, "grad", _grad_nested(manager, torch.autograd.grad)))
        if manager.run.recorder.wants_losses:
            for owner in (TorchBackend, GradScaler):
                stack.enter_context(mock.patch.object(owner, "scale", _remembering(owner.scale)))
        yield


def _remembering(scale: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that scales a loss and notes on the result what it was."""

    @functools.wraps(scale)
    def remember(self: Any, loss: Any, *rest: Any) -> Any:
        scaled = scale(self, loss, *rest)
        if isinstance(scaled, torch.Tensor) and isinstance(loss, torch.Tensor):
            setattr(scaled, _TRUE, loss.detach())
        return scaled

    return remember


def _report_loss(recorder: Recorder, tensors: Any, weights: Any) -> None:
    """Report the unscaled loss of a backward, whether the script or ampx scales it."""
    losses = _losses(tensors, weights)
    if losses:
        values = [getattr(loss, _TRUE, loss).detach().clone() for loss in losses]  # the script may write to its own
        recorder.saw_loss(lambda: sum(map(float, values)))


def _backward_scaled(
    manager: TorchManager,
    true: Any,
    losses: list[torch.Tensor],
    optimizers: list[TorchManaged],
    options: dict[str, Any],
) -> None:
    """Find out what the loss reaches, bring gradients that wait to the same scale, and run."""
    leaves, optimizers = _reached(manager, losses, optimizers, options["inputs"])
    if not optimizers:
        true(losses, None, **options)
        return
    optimizers = _ready(optimizers)
    _refuse_graph(manager, options)
    _note_dispatch_modes(manager)
    try:
        with manager.working():
            # Unscaled gradients that are there may be the script's own: views of one buffer, or kept in a list.
            kept = [] if _NONE.issuperset(map(type, map(gradient_of, leaves.values()))) else optimizers
            kept = [managed for managed in kept if not managed.carries_scale and managed.has_gradients()]
            if len(optimizers) > 1 or optimizers[0].wrapped.ampx_member.stage != "idle":
                bring_together(manager.run.session().backend, [managed.wrapped for managed in optimizers])
            factor = _backward(manager, true, losses, optimizers, options, leaves)
            if manager.arriving:
                _unscale_fellows(manager, optimizers, factor)
            manager.pending = True
    except BaseException:
        manager.look()
        raise
    for managed in kept:
        manager.unscale(managed)


def _reached(
    manager: TorchManager, losses: list[torch.Tensor], optimizers: list[TorchManaged], inputs: Any
) -> tuple[dict[int, torch.Tensor], list[TorchManaged]]:
    """Return the tensors to whose gradients a backward adds, by id, and the optimizers that hold some of them."""
    leaves, hidden = _added_to(losses, inputs)
    owners = manager.owners
    owners.sort(optimizers)
    if manager.sampler.counts:
        _refuse_by_hand(manager, leaves)
    reached = owners.reached(leaves)
    if None in reached and _flattened(leaves, owners):
        reached = owners.reached(leaves)
    if None in reached and manager.adopt_trained_copies(leaves):
        optimizers = manager.all()
        owners.sort(optimizers)
        reached = owners.reached(leaves)
    return leaves, optimizers if hidden else [managed for managed in optimizers if managed.reference in reached]


def _note_dispatch_modes(manager: TorchManager) -> None:
    """Note that modes of the script see the operations of a scaled backward as they run."""
    for mode in _get_current_dispatch_mode_stack():
        if is_script_function(type(mode).__torch_dispatch__):
            manager.run.recorder.note_scaled(f"the dispatch mode {type(mode).__name__}")


def _added_to(losses: list[torch.Tensor], inputs: Any) -> tuple[dict[int, torch.Tensor], bool]:
    """Return the tensors to whose gradients a backward adds, by id, and whether there may be more."""
    if inputs is None:
        return leaves_of(losses)
    wanted = list(inputs.values()) if isinstance(inputs, dict) else _listed(inputs)
    wanted = [tensor if isinstance(tensor, torch.Tensor) else getattr(tensor[0], "variable", None) for tensor in wanted]
    return {id(tensor): tensor for tensor in wanted if tensor is not None}, False


def _flattened(leaves: dict[int, torch.Tensor], owners: Owners) -> bool:
    """Put the parameters of the script for those that FSDP has flattened; return whether there are any.

    With `use_orig_params=True` the optimizer holds views of those to which backward adds.
    """
    flat = [leaf for key, leaf in leaves.items() if owners.of(key) is None and getattr(leaf, "_is_flat_param", False)]
    originals = {id(parameter): parameter for leaf in flat for parameter in vars(leaf).get("_params") or ()}
    if originals:
        for leaf in flat:
            del leaves[id(leaf)]
        leaves.update(originals)
    return bool(originals)


def _refuse_graph(manager: TorchManager, options: dict[str, Any]) -> None:
    if options["create_graph"]:
        manager.run.refuse(
            "backward(create_graph=True) makes gradients that are differentiated again, which a loss scale would "
            "multiply twice; accepted: torch.autograd.grad for these, or --dtype bfloat16, which needs no loss scale"
        )


def _scaled_inside(manager: TorchManager, tensors: Any, weights: Any) -> list[torch.Tensor] | None:
    """Return losses with the loss scale of the backward under way, in code that it calls; None as in `_losses`."""
    with torch.enable_grad():
        losses = _losses(tensors, weights)
        return None if losses is None else [loss * manager.factor for loss in losses]


def _backward_nested(manager: TorchManager, true: Any, tensors: Any, weights: Any, options: dict[str, Any]) -> bool:
    """Run a backward that code of the script runs inside another: what it adds is to carry the same loss scale.

    As reentrant checkpoints do that a script has written itself. Return whether torch will take what it is given.
    """
    losses = _scaled_inside(manager, tensors, weights)
    if losses is None:
        return False
    leaves, _ = _added_to(losses, options["inputs"])
    if manager.owners.reached(leaves) - {None, *(managed.reference for managed in manager.reached)}:
        manager.run.refuse(
            "a backward inside another reaches parameters of an optimizer that the outer one does not reach, whose "
            "loss scale it cannot carry; accepted: a backward of its own after the first, or --dtype bfloat16, which "
            "needs no loss scale"
        )
    _refuse_graph(manager, options)
    with manager.script_code.switched(False):
        _run(manager, true, losses, options, leaves)
    return True


def _grad_nested(manager: TorchManager, true: Any) -> Callable[..., Any]:
    """Return `torch.autograd.grad`, which inside a backward computes with its loss scale, so that nothing underflows.

    What it returns is not scaled, there as anywhere.
    """

    @functools.wraps(true)
    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **options: Any) -> Any:
        batched = options.get("is_grads_batched")
        losses = None if batched or not manager.shows else _scaled_inside(manager, outputs, grad_outputs)
        if losses is None:
            return true(outputs, inputs, grad_outputs, *args, **options)
        with manager.script_code.switched(False):
            gradients = true(losses, inputs, None, *args, **options)
        return unscaled(gradients, manager.factor)

    return grad


def _ready(optimizers: list[TorchManaged]) -> list[TorchManaged]:
    """Leave out optimizers whose step was skipped: the script may clear their gradients later, before its own backward.

    As in adversarial training, where the other network's loss comes in between.
    """
    return [managed for managed in optimizers if not managed.wrapped.are_unknown()] or optimizers


def _refuse_by_hand(manager: TorchManager, leaves: dict[int, torch.Tensor]) -> None:
    """Refuse parameters in low precision that no optimizer holds: the script keeps float32 copies of them by itself."""
    for key, leaf in leaves.items():
        if leaf.dtype in LOW and isinstance(leaf, torch.nn.Parameter) and manager.owners.of(key) is None:
            apex = "" if not manager.run.provided else ", with the apex that it finds here"
            dtype = str(leaf.dtype).removeprefix("torch.")
            manager.run.refuse(
                f"backward reaches {dtype} parameters that no optimizer holds, so the script has mixed precision by "
                f"hand, with float32 copies of its own, and casting on top of it would compute in another dtype than "
                f"it says; accepted: parameters in float32. Run it with --unchanged-if-refused{apex}, or leave its "
                f"parameters in float32"
            )


def _backward(
    manager: TorchManager,
    true: Any,
    losses: list[torch.Tensor],
    optimizers: Sequence[TorchManaged],
    options: dict[str, Any],
    leaves: dict[int, torch.Tensor] | None = None,
) -> Any:
    """Run backward on the scaled losses; return the scale."""
    first = optimizers[0].wrapped
    # One tensor is the fast way through; several come back as a list of the same length.
    loss = losses[0] if len(losses) == 1 else losses
    optimizer = first if len(optimizers) == 1 else [managed.wrapped for managed in optimizers]
    with manager.run.session().scale_loss(loss, optimizer) as scaled:
        factor = first.ampx_member.factors.get(0, 1.0)
        manager.reached = list(optimizers)
        try:
            with manager.differentiating(factor):
                if leaves is None:
                    true(scaled, None, **options)
                else:
                    with _arriving(manager, factor) if manager.arriving else nullcontext():
                        _run(manager, true, scaled, options, leaves)
        finally:
            manager.reached = []
    return factor


def _run(
    manager: TorchManager, true: Any, scaled: Any, options: dict[str, Any], leaves: dict[int, torch.Tensor]
) -> None:
    """Run a scaled backward; unscale at once what no optimizer holds, and what is retained."""
    others = []
    if manager.retained or None in manager.owners.reached(leaves):
        others = _without_owner(manager, leaves)
    aside = [(tensor, _gradient_of(tensor), vars(tensor).get(WIDE)) for tensor in others]
    for tensor in others:
        tensor.grad = None
    adding, manager.adding = manager.adding, {*manager.adding, *leaves, *map(id, others)}
    completed = False
    try:
        true(scaled, None, **options)
        completed = True
    finally:
        manager.adding = adding
        for tensor, before, wide in aside:
            added = _gradient_of(tensor) if completed else None
            _set_unscaled(tensor, before, wide, added, manager.factor)


def _without_owner(manager: TorchManager, leaves: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """List the tensors to which a backward adds a gradient that no optimizer unscales."""
    others = [leaf for key, leaf in leaves.items() if manager.owners.of(key) is None and key not in manager.arriving]
    alive = {key: tensor for key, reference in manager.retained.items() if (tensor := reference()) is not None}
    manager.retained = {key: manager.retained[key] for key in alive}
    return others + [tensor for key, tensor in alive.items() if key not in leaves]


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor that may be no leaf, without torch's warning that it need not have one."""
    if tensor.is_leaf or tensor.retains_grad:
        return gradient_of(tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gradient_of(tensor)


def _set_unscaled(tensor: torch.Tensor, before: Any, wide: Any, added: torch.Tensor | None, factor: Any) -> None:
    """Set what a tensor shows as `.grad`: what it was before, and what backward added, multiplied by a factor."""
    dtype = tensor.dtype if added is None else added.dtype
    after = None if added is None else unscaled(added, factor)
    if after is None:
        after = wide
    elif tensor.is_leaf and before is not None:
        before.add_(after)
        after = None
    elif before is not None:
        after = after + (before if wide is None else wide)
    if after is None:
        tensor.grad = before
        return
    tensor.grad = after.to(dtype)
    if after.dtype is not dtype and not tensor.is_leaf:
        vars(tensor)[WIDE] = after


@contextmanager
def _arriving(manager: TorchManager, factor: Any) -> Iterator[None]:
    """Have backward add unscaled gradients to tensors at whose `.grad` the script looks inside backward."""

    def divide(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(None if gradient is None else gradient / factor for gradient in gradients)

    handles = []
    for key, reference in list(manager.arriving.items()):
        leaf = reference()
        if leaf is None:
            del manager.arriving[key]
            continue
        if leaf.requires_grad:
            handles.append(torch.autograd.graph.get_gradient_edge(leaf).node.register_prehook(divide))
        gradient = gradient_of(leaf)
        if gradient is not None and manager.owners.of(key) in manager.reached:
            gradient.div_(factor)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _unscale_fellows(manager: TorchManager, optimizers: Sequence[TorchManaged], factor: Any) -> None:
    """Unscale the other gradients of optimizers of which some arrived unscaled."""
    for managed in optimizers:
        parameters = managed.wrapped.gradients.parameters()
        fellows = [parameter for parameter in parameters if id(parameter) not in manager.arriving]
        if len(fellows) < len(parameters):
            for gradient in map(gradient_of, fellows):
                if gradient is not None:
                    gradient.div_(factor)
            managed.wrapped.ampx_member.note_scaled(1.0)


def _is_root(value: object) -> bool:
    """Return whether it is one tensor, or one edge of a graph."""
    return isinstance(value, (torch.Tensor, torch.autograd.graph.GradientEdge))


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if _is_root(tensors) else list(tensors)


def _losses(tensors: Any, weights: Any) -> list[torch.Tensor] | None:
    """Return scalars with the same gradients; None for what torch will not take, and shall refuse in its own words.

    What comes with a gradient is replaced by the sum of `tensor * gradient`.
    """
    if weights is None and isinstance(tensors, torch.Tensor):  # what most scripts do
        usual = tensors.requires_grad and tensors.numel() == 1 and tensors.is_floating_point()
        return [tensors] if usual else None
    roots = _listed(tensors)
    weights = [None] * len(roots) if weights is None else _listed(weights)
    if not roots or len(weights) != len(roots):
        return None
    pairs = list(zip(roots, weights, strict=True))
    if not all(_is_taken(root, weight) for root, weight in pairs):
        return None
    return [root if weight is None else _weighted(root, weight) for root, weight in pairs]


def _is_taken(root: Any, weight: Any) -> bool:
    """Return whether torch differentiates a tensor, with a gradient or, where it is a scalar, without one."""
    if not (isinstance(root, torch.Tensor) and root.requires_grad and root.is_floating_point()):
        return False
    return bool(root.numel() == 1 if weight is None else root.shape == weight.shape)


def _weighted(root: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = root.float() if root.dtype in (torch.float16, torch.bfloat16) else root
    return torch.sum(wide * weight)
