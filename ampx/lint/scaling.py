"""Rules about loss scaling: in which order its calls must come, and what must know of a skipped step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Final

from ampx.syntax.program import called_name, dotted

from .problem import Place
from .script import SCALERS, Event, Script, dtype_of

_AVERAGES: Final = {"ema", "model_ema", "ema_model", "ema_net", "net_ema", "swa_model", "averaged_model"}
# Libraries that scale the loss, or move a schedule, somewhere else.
_ELSEWHERE: Final = re.compile(r"GradScaler|[Ss]caler|scale_loss|accelerat|deepspeed|[Ff]abric|[Ll]ightning|ampx|apex")


def clipped_while_scaled(script: Script) -> Iterator[Place]:
    """Clipping bounds scaled gradients."""
    for function, events in script.events.items():
        for clip in (event for event in events if event.kind == "clip"):
            before = [event for event in events if script.is_before(event.node, clip.node)]
            earlier = [event for event in before if not script.excludes(event.node, clip.node)]
            scaled = [event for event in earlier if event.kind == "scaled" and _shares(script, clip, event)]
            if not scaled or _mentions(script, function, "unscale", clip.node):
                continue
            scaler = scaled[-1].scaler
            name = script.program.code(clip.node.func)
            if scaler.endswith(".scale_loss"):
                yield from _clipped_beside_block(script, clip, scaled[-1], name)
            elif any(
                event.kind == "step"
                and event.scaler == scaler
                and script.is_before(clip.node, event.node)
                and not script.excludes(event.node, clip.node)
                for event in events
            ):
                yield (
                    clip.node,
                    f"`{name}` bounds gradients that still carry the loss scale of `{scaler}`; call "
                    f"`{scaler}.unscale_(optimizer)` before it",
                )
    yield from _clipped_tape(script)


def _shares(script: Script, clip: Event, scaled: Event) -> bool:
    loops = script.program.loops(scaled.node)
    return all(loop in loops for loop in script.program.loops(clip.node))


def _mentions(script: Script, function: ast.AST, word: str, before: ast.AST) -> bool:
    """Return whether a function calls something with a word in its name, in front of a node."""
    calls = script.calls_in(function)
    return any(word in (dotted(call.func) or "") and script.is_before(call, before) for call in calls)


def _clipped_beside_block(script: Script, clip: Event, scaled: Event, name: str) -> Iterator[Place]:
    region, kind = next(
        ((node, kind) for node, _, kind in script.blocks if script.program.inside(scaled.node, node)), (None, "")
    )
    if region is None:
        return
    inside = script.program.inside(clip.node, region)
    if kind == "apex" and inside:
        yield (
            clip.node,
            f"`{name}` in the block of `amp.scale_loss` bounds gradients that still carry the loss scale; move it "
            "behind the block",
        )
    elif kind == "ampx":
        yield (
            clip.node,
            f"`{name}` bounds gradients that carry the loss scale; call `ampx.unscale(optimizer)` behind the block, or "
            "clip by `ampx.clip_grad_norm`",
        )
    elif kind == "mxnet":
        yield clip.node, f"`{name}` bounds gradients that carry the loss scale; call `amp.unscale(trainer)` before it"


def _clipped_tape(script: Script) -> Iterator[Place]:
    """Gradients of a scaled loss from a tape, clipped before the optimizer divides them."""
    clips = ("tensorflow.clip_by_global_norm", "tensorflow.clip_by_norm", "tensorflow.clip_by_value")
    for clip in script.calls_of(clips):
        function = script.program.function(clip)
        scaled = {
            dotted(target)
            for assign in script.program.every(ast.Assign)
            if script.program.function(assign) is function
            and isinstance(assign.value, ast.Call)
            and called_name(assign.value) in ("get_scaled_loss", "scale_loss")
            for target in assign.targets
        }
        names = {dotted(argument) for argument in clip.args[:1]} | {
            node.id for argument in clip.args[:1] for node in ast.walk(argument) if isinstance(node, ast.Name)
        }
        assigned = [
            assign
            for assign in script.program.every(ast.Assign)
            if script.program.function(assign) is function
            and script.is_before(assign, clip)
            and any(dotted(target) in names for target in assign.targets)
        ]
        values = [assign.value for assign in assigned]
        if values and all(isinstance(value, ast.Call) and _is_gradient_of(value, scaled) for value in values):
            name = script.program.code(clip.func)
            yield (
                clip,
                f"`{name}` bounds gradients of a scaled loss; divide first, or give the optimizer `global_clipnorm`",
            )


def _is_gradient_of(call: ast.Call, losses: set[str | None]) -> bool:
    return called_name(call) == "gradient" and bool(call.args) and dotted(call.args[0]) in losses


def updated_between_steps(script: Script) -> Iterator[Place]:
    """The scale moves while another optimizer's gradients still carry the old one."""
    for events in script.events.values():
        for position, update in enumerate(events):
            if update.kind != "update":
                continue
            same = [event for event in events if event.scaler == update.scaler]
            before = [event for event in same if event.kind == "step" and _joined(script, event, update)]
            before = [event for event in before if script.is_before(event.node, update.node)]
            for event in events[position + 1 :]:
                if event.kind == "scaled" and event.scaler == update.scaler:
                    break
                if (
                    event.kind == "step"
                    and event.scaler == update.scaler
                    and _joined(script, event, update)
                    and before
                    and event.subject not in {step.subject for step in before}
                ):
                    yield (
                        update.node,
                        f"`{update.scaler}` moves its scale before `{event.subject}` was stepped, whose gradients "
                        "carry the old one; call it once, after the last step",
                    )
                    break


def _joined(script: Script, first: Event, second: Event) -> bool:
    return script.same_pass(first.node, second.node) and not script.excludes(first.node, second.node)


def moved_on_skipped_steps(script: Script) -> Iterator[Place]:
    """A schedule or an average moves on though the step was skipped."""
    for function, events in script.events.items():
        steps = [event for event in events if event.kind == "step" and script.program.loops(event.node)]
        for call in script.calls_in(function) if steps else ():
            if not any(script.same_pass(call, step.node) and script.is_before(step.node, call) for step in steps):
                continue
            what = _moves(script, call)
            if what and not _knows_of_skips(script, function):
                code = script.program.code(call.func)
                yield call, f"`{code}` moves {what} in every pass, also where the scaler skipped the step"


def _moves(script: Script, call: ast.Call) -> str:
    function = call.func
    if not isinstance(function, ast.Attribute):
        return ""
    made_by = script.made_by(function.value)
    if function.attr == "step":
        scheduled = [name for name in made_by if ".lr_scheduler." in name or re.search(r"get_\w*schedule\w*$", name)]
        return "the learning rate" if scheduled and not any("ReduceLROnPlateau" in name for name in made_by) else ""
    last = (dotted(function.value) or "").rpartition(".")[2]
    averages = function.attr == "update_parameters" and any("AveragedModel" in name for name in made_by)
    return "the average of the weights" if averages or (function.attr == "update" and last in _AVERAGES) else ""


def _knows_of_skips(script: Script, function: ast.AST) -> bool:
    """Return whether a function looks at what the step did."""
    words = re.compile(r"get_scale|get_loss_scaling|_scale\b|skipped|overflow|found_inf|gate\(|applied")
    text = script.source.text if isinstance(function, ast.Module) else script.program.code(function)
    return words.search(text) is not None


def float16_without_scaling(script: Script) -> Iterator[Place]:
    """Float16 gradients of an unscaled loss."""
    if not _ELSEWHERE.search(script.source.text):
        for region in script.regions:
            function = script.program.function(region.node)
            inside = region.node if region.node is function else None
            trains = [
                event
                for event in script.events.get(inside or function, [])
                if event.kind == "backward" and script.is_before(region.call, event.node)
            ]
            if region.dtype == "float16" and region.enabled and trains:
                name = script.program.code(region.call.func)
                yield (
                    region.call,
                    f"`{name}` casts to float16, and no loss is scaled: gradients below 6e-8 become 0; scale the loss, "
                    "or cast to bfloat16",
                )
    yield from _tape_without_scaling(script)
    yield from _unwrapped_in_float16(script)


def _unwrapped_in_float16(script: Script) -> Iterator[Place]:
    """An optimizer that ampx was never given, in a process in which ampx casts to float16."""
    inits = [call for call in script.calls_of({"ampx.init"}) if _casts_to_float16(call)]
    for function, events in script.events.items():
        if not any(script.program.function(call) in (function, script.source.tree) for call in inits):
            continue
        for step in (event for event in events if event.kind == "raw step"):
            owner = step.node.func.value if isinstance(step.node.func, ast.Attribute) else step.node
            before = [
                event for event in events if _joined(script, event, step) and event.kind in ("scaled", "backward")
            ]
            before = [event for event in before if script.is_before(event.node, step.node)]
            if not before or before[-1].kind == "scaled" or "ampx.wrap_optimizer" in script.made_by(owner):
                continue
            if not any("autocast" in script.program.code(item) for item in _entered(script, before[-1].node)):
                yield (
                    step.node,
                    f"`{step.subject}.step()` applies gradients that were computed in float16 of a loss that nobody "
                    f"scaled: those below 6e-8 are 0; call `ampx.wrap_optimizer({step.subject})`, and backward in the "
                    "block of `ampx.scale_loss`",
                )


def _casts_to_float16(init: ast.Call) -> bool:
    """Return whether a call of `ampx.init` has the whole process cast to float16, and losses scaled."""
    options = {option.arg: option.value for option in init.keywords}
    return dtype_of(options.get("dtype")) == "float16" and not options.keys() & {"level", "process_wide", "loss_scale"}


def _entered(script: Script, node: ast.AST) -> list[ast.expr]:
    """List the context managers of the blocks around a node."""
    regions = [outer for outer in script.program.around(node) if isinstance(outer, ast.With)]
    return [item.context_expr for region in regions for item in region.items]


def _tape_without_scaling(script: Script) -> Iterator[Place]:
    if "mixed_float16" not in script.source.text or re.search(
        r"scale_loss|get_scaled_loss|LossScaleOptimizer|ampx", script.source.text
    ):
        return
    tapes = {"tensorflow.GradientTape"}
    for call in script.calls:
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr == "gradient" and isinstance(function.value, ast.Name):
            bound = {
                name
                for region in script.program.every(ast.With)
                for item in region.items
                if dotted(item.optional_vars) == function.value.id and isinstance(item.context_expr, ast.Call)
                for name in script.names(item.context_expr.func)
            }
            if bound & tapes:
                yield (
                    call,
                    "under the policy mixed_float16 a loop of one's own scales no loss: gradients below 6e-8 become 0; "
                    "use `keras.optimizers.LossScaleOptimizer` and its `scale_loss`",
                )


def scale_not_saved(script: Script) -> Iterator[Place]:
    """A checkpoint holds the optimizer and not the loss scale."""
    own = [text for text, call in script.scalers.items() if call is not None and not _is_off(call)]
    uses_apex = bool(script.calls_of({"apex.amp.initialize"}))
    if not own and not uses_apex:
        return
    texts = "|".join(re.escape(text.rpartition(".")[2]) for text in own) or "amp"
    if re.search(rf"\b({texts}|amp)\b\.state_dict\(", script.source.text) or any(map(script.leaves, own)):
        return
    for call in script.calls_of({"torch.save", "paddle.save"}):
        saved = call.args[0] if call.args else None
        if isinstance(saved, ast.Name):
            origins = script.flow.origins(saved) or []
            values = [origin.value for origin in origins if origin.value is not None]
            saved = values[0] if len(values) == 1 else None
        states = [
            dotted(inner.func.value) or ""
            for inner in (ast.walk(saved) if saved is not None else ())
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr == "state_dict"
        ]
        optimizer = next((text for text in states if re.search(r"optim|(^|[._])opt", text, flags=re.I)), None)
        if optimizer is not None:
            scaler = own[0] if own else "amp"
            yield (
                call,
                f"the checkpoint holds `{optimizer}` and not `{scaler}`: a run that is resumed begins with another "
                f"loss scale; save `{scaler}.state_dict()`, too",
            )


def _is_off(call: ast.Call | None) -> bool:
    """Return whether the text switches a scaler off; False where it is made elsewhere."""
    if call is None:
        return False
    values = [keyword.value for keyword in call.keywords if keyword.arg in ("enabled", "enable")]
    return any(isinstance(value, ast.Constant) and value.value is False for value in values)


def unscaled_twice(script: Script) -> Iterator[Place]:
    """Gradients are divided twice."""
    for events in script.events.values():
        open_calls: list[Event] = []
        for event in events:
            if event.kind in ("step", "update", "scaled", "backward"):
                open_calls = []
            if event.kind != "unscale" or not event.scaler or event.scaler not in script.scalers:
                continue
            if any(
                (event.scaler, event.subject) == (earlier.scaler, earlier.subject)
                and script.same_pass(event.node, earlier.node)
                and script.implies(event.node, earlier.node)
                for earlier in open_calls
            ):
                yield (
                    event.node,
                    f"`{event.scaler}` divides the gradients of `{event.subject}` a second time, and raises",
                )
            open_calls.append(event)


def never_updated(script: Script) -> Iterator[Place]:
    """The scale never moves."""
    for text, call in script.scalers.items():
        if call is None or script.leaves(text) or _is_off(call):
            continue
        last = text.rpartition(".")[2]
        updates = any(
            isinstance(other.func, ast.Attribute)
            and other.func.attr in ("update", "minimize")
            and (dotted(other.func.value) or "").rpartition(".")[2] == last
            for other in script.calls
        )
        steps = [event for events in script.events.values() for event in events if event.kind == "step"]
        steps = [event for event in steps if event.scaler == text and called_name(event.node) == "step"]
        if steps and not updates:
            yield (
                steps[0].node,
                f"`{text}.update()` is called nowhere: the scale never moves, and a second `step` raises; call it "
                "after the last step of each pass",
            )


def _scaled_beside(script: Script, events: Sequence[Event], event: Event) -> list[Event]:
    """Return the backward calls of scaled losses in the same pass as an event."""
    return [
        other
        for other in events
        if other.kind == "scaled" and other.scaler in script.scalers and script.same_pass(event.node, other.node)
    ]


def stepped_by_itself(script: Script) -> Iterator[Place]:
    """The optimizer steps on gradients that carry the scale."""
    for events in script.events.values():
        for event in events:
            if event.kind != "raw step":
                continue
            scaled = [
                other
                for other in _scaled_beside(script, events, event)
                if script.is_before(other.node, event.node) and script.implies(event.node, other.node)
            ]
            if not scaled:
                continue
            scaler = scaled[-1].scaler
            divided = any(other.scaler == scaler and other.kind in ("step", "unscale") for other in events)
            if not divided and not _is_off(script.scalers[scaler]):
                yield (
                    event.node,
                    f"`{event.subject}.step()` applies gradients that carry the loss scale of `{scaler}`; call "
                    f"`{scaler}.step({event.subject})` and `{scaler}.update()`",
                )


def unscaled_beside_scaled(script: Script) -> Iterator[Place]:
    """Gradients of an unscaled loss are divided by the scale."""
    for events in script.events.values():
        if any(event.kind == "raw step" for event in events):
            continue
        for event in events:
            if event.kind != "backward":
                continue
            branches = script.program.branches(event.node)
            scaled = [
                other
                for other in _scaled_beside(script, events, event)
                if script.program.branches(other.node) == branches
            ]
            if not scaled:
                continue
            last = scaled[-1]
            earlier, later = sorted((event.node, last.node), key=script.program.order)
            steps = [other for other in events if other.kind == "step" and script.is_before(earlier, other.node)]
            between = any(script.is_before(step.node, later) for step in steps)
            if not between and any(step.scaler == last.scaler for step in steps):
                loss = event.subject or script.program.code(event.node.func)
                yield (
                    event.node,
                    f"the gradients of `{loss}` carry no loss scale and are divided by that of `{last.scaler}`; scale "
                    "this loss, too",
                )
    yield from _unscaled_in_block(script)


def _unscaled_in_block(script: Script) -> Iterator[Place]:
    """Backward on the loss that a block was given, where it yields the scaled one."""
    for region, call, _ in script.blocks:
        loss = dotted(call.args[0]) if call.args else None
        bound = {dotted(node) for node in ast.walk(region) if isinstance(getattr(node, "ctx", None), ast.Store)}
        if loss is None or loss in bound:
            continue
        scaled = next((dotted(item.optional_vars) for item in region.items if item.context_expr is call), None)
        for backward in script.calls:
            if called_name(backward) != "backward" or not script.program.inside(backward, region):
                continue
            owner = backward.func.value if isinstance(backward.func, ast.Attribute) else None
            if loss in (dotted(owner), dotted(backward.args[0]) if backward.args else None):
                yield (
                    backward,
                    f"the gradients of `{loss}` carry no loss scale and are divided by it; call backward on "
                    f"{f'`{scaled}`' if scaled else 'what the block yields'}",
                )


def made_in_a_loop(script: Script) -> Iterator[Place]:
    """Each pass begins with a new scale."""
    for call in script.calls_of(SCALERS):
        loops = script.program.loops(call)
        function = script.program.function(call)
        inside = [
            event
            for event in script.events.get(function, [])
            if loops and all(loop in script.program.loops(event.node) for loop in loops)
        ]
        scales = any(event.kind == "scaled" for event in inside)
        stepped = {event.subject for event in inside if event.kind == "step"}
        if scales and not _is_off(call) and not _assigned(script, function, loops, stepped):
            yield (
                call,
                "a scaler made in a loop begins with its first scale in every pass; make it once, before the loop",
            )


def _assigned(script: Script, function: ast.AST, loops: Sequence[ast.AST], names: set[str]) -> bool:
    """Return whether each pass of some loops assigns one of some names: where it is the optimizer, training is new."""
    return any(
        script.program.function(assign) is function
        and all(loop in script.program.loops(assign) for loop in loops)
        and any(dotted(node) in names for target in assign.targets for node in ast.walk(target))
        for assign in script.program.every(ast.Assign)
    )
