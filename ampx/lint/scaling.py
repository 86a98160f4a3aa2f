"""Rules about loss scaling: in which order its calls must come, and what must know of a skipped step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence, Set
from typing import Final

from ampx.syntax.program import called_name, constant, dotted, keywords, receiver

from .problem import Edit, Place
from .script import SCALERS, Event, Kind, Script, dtype_of

_AVERAGES: Final = {"ema", "model_ema", "ema_model", "ema_net", "net_ema", "swa_model", "averaged_model"}
# What code looks at that moves something only where the step was applied; `multi_scale` is about images.
_OF_SKIPS: Final = re.compile(
    r"get_scale|get_loss_scaling|\._scale\b|loss_scale|(old|prev|previous|last|new)_scale|skipped|overflow|found_inf"
    r"|gate\(|applied"
)
_AVERAGES_BY_FUNCTION: Final = re.compile(
    r"_?((update|apply)_(\w+_)?ema(_model|_weights|_parameters)?|ema_(update|step))"
)
_FINITE: Final = re.compile(r"isfinite|isinf|isnan|is_finite")
_SCHEDULES: Final = re.compile(r"^torch\.optim\.lr_scheduler\.|^paddle\.optimizer\.lr\.|\.get_\w*schedule\w*$")
_OPTIMIZER: Final = re.compile(r"optim|(^|[._])opt", flags=re.I)
# Libraries that scale the loss, or move a schedule, somewhere else.
_ELSEWHERE: Final = re.compile(r"GradScaler|[Ss]caler|scale_loss|accelerat|deepspeed|[Ff]abric|[Ll]ightning|ampx|apex")


def _of_kind(events: Sequence[Event], *kinds: Kind) -> list[Event]:
    return [event for event in events if event.kind in kinds]


def clipped_while_scaled(script: Script) -> Iterator[Place]:
    """Clipping bounds scaled gradients."""
    for function, events in script.events.items():
        for clip in _of_kind(events, "clip"):
            scaled = [
                event
                for event in _of_kind(events, "scaled")
                if script.comes_before(event.node, clip.node) and _shares(script, clip, event)
            ]
            if scaled and not _mentions(script, function, "unscale", clip.node):
                yield from _clipped(script, events, clip, scaled[-1])
    yield from _clipped_tape(script)


def _clipped(script: Script, events: Sequence[Event], clip: Event, scaled: Event) -> Iterator[Place]:
    scaler, name = scaled.scaler, script.program.code(clip.node.func)
    steps = [event for event in _of_kind(events, "step") if event.scaler == scaler]
    if scaler.endswith(".scale_loss"):
        yield from _clipped_beside_block(script, clip, scaled, name)
    elif any(script.comes_before(clip.node, step.node) for step in steps):
        yield (
            clip.node,
            f"`{name}` bounds gradients that still carry the loss scale of `{scaler}`; call "
            f"`{scaler}.unscale_(optimizer)` before it",
            _unscaled_first(script, events, clip, steps),
        )


def _unscaled_first(script: Script, events: Sequence[Event], clip: Event, steps: Sequence[Event]) -> tuple[Edit, ...]:
    """Return a line before a clip that unscales the optimizer's gradients; nothing where it is not shown to be that.

    One optimizer is stepped, wherever the clip is reached and nowhere else, and both have the same model's parameters.
    """
    statement = script.program.statement(clip.node)
    start, _ = script.source.span(statement)
    line = script.source.line_start(start)
    indentation = script.source.text[line:start]
    if len(steps) != 1 or _of_kind(events, "unscale") or indentation.strip():
        return ()
    step = steps[0]
    always = script.implies(step.node, clip.node) and script.implies(clip.node, step.node)
    if not (always and step.subject and _is_of_same_model(script, step, clip)):
        return ()
    return (Edit(line, line, f"{indentation}{step.scaler}.unscale_({step.subject}){script.source.newline}"),)


def _is_of_same_model(script: Script, step: Event, clip: Event) -> bool:
    """Return whether an optimizer that is stepped was made with the parameters that are clipped."""
    makers = script.makers(step.node.args[0])
    model = _parameters(clip.node)
    return model is not None and [_parameters(maker) for maker in makers if script.is_optimizer(maker)] == [model]


def _parameters(call: ast.Call) -> str | None:
    """Return the text of `model` where a call is given `model.parameters()` first."""
    first = next(iter(call.args), None)
    return dotted(receiver(first)) if called_name(first) == "parameters" else None


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
        assigned = script.assignments_in(script.program.function(clip))
        scaled = [assign for assign in assigned if called_name(assign.value) in ("get_scaled_loss", "scale_loss")]
        losses = {target for assign in scaled for target in map(dotted, assign.targets)}
        clipped = _names_in(clip.args[:1])
        values = [
            assign.value
            for assign in assigned
            if script.is_before(assign, clip) and not clipped.isdisjoint(map(dotted, assign.targets))
        ]
        if values and all(_is_gradient_of(value, losses) for value in values):
            name = script.program.code(clip.func)
            yield (
                clip,
                f"`{name}` bounds gradients of a scaled loss; divide first, or give the optimizer `global_clipnorm`",
            )


def _names_in(expressions: Sequence[ast.expr]) -> set[str | None]:
    """Return the texts of some expressions, and the names in them."""
    inner = {node.id for expression in expressions for node in ast.walk(expression) if isinstance(node, ast.Name)}
    return {*map(dotted, expressions), *inner}


def _is_gradient_of(value: ast.expr, losses: set[str | None]) -> bool:
    if not isinstance(value, ast.Call) or called_name(value) != "gradient":
        return False
    return bool(value.args) and dotted(value.args[0]) in losses


def updated_between_steps(script: Script) -> Iterator[Place]:
    """The scale moves while another optimizer's gradients still carry the old one."""
    for events in script.events.values():
        for update in _of_kind(events, "update"):
            late = _stepped_late(script, events, update)
            if late is not None:
                yield (
                    update.node,
                    f"`{update.scaler}` moves its scale before `{late.subject}` was stepped, whose gradients "
                    "carry the old one; call it once, after the last step",
                )
            elif _steps_one_of_several(script, events, update):
                yield (
                    update.node,
                    f"`{update.scaler}` moves its scale before the next optimizer of the loop is stepped, whose "
                    "gradients carry the old one; call it once, after the loop",
                )


def _stepped_late(script: Script, events: Sequence[Event], update: Event) -> Event | None:
    """Return the first step after an update, in the same pass, of an optimizer that was not stepped before it."""
    same = [event for event in events if event.scaler == update.scaler]
    steps = [event for event in _of_kind(same, "step") if _joined(script, event.node, update.node)]
    before = {step.subject for step in steps if script.is_before(step.node, update.node)}
    for event in same[same.index(update) + 1 :] if before else ():
        if event.kind == "scaled":
            return None
        if event in steps and event.subject not in before:
            return event
    return None


def _steps_one_of_several(script: Script, events: Sequence[Event], update: Event) -> bool:
    """Return whether an update stands in a loop over optimizers, whose gradients were all computed before it."""
    loop = next(iter(script.program.loops(update.node)), None)
    if not isinstance(loop, ast.For):
        return False
    same = [event for event in events if event.scaler == update.scaler]
    targets = _names_in([loop.target])
    stepped = [event for event in _of_kind(same, "step") if script.same_pass(event.node, update.node)]
    scaled = _of_kind(same, "scaled")
    before = any(script.comes_before(event.node, loop) for event in scaled)
    inside = any(script.program.inside(event.node, loop) for event in scaled)
    return before and not inside and any(not targets.isdisjoint(_names_in(event.node.args[:1])) for event in stepped)


def moved_on_skipped_steps(script: Script) -> Iterator[Place]:
    """A schedule or an average moves on though the step was skipped."""
    for function, events in script.events.items():
        steps = [event.node for event in _of_kind(events, "step")]
        steps = [step for step in steps if function is not script.source.tree or script.program.loops(step)]
        for call in script.calls_in(function) if steps else ():
            what = _moves(script, call) if any(_joined(script, call, step) for step in steps) else ""
            if what and not _knows_of_skips(script, function):
                code = script.program.code(call.func)
                yield call, f"`{code}` moves {what} in every pass, also where the scaler skipped the step"


def _joined(script: Script, first: ast.AST, second: ast.AST) -> bool:
    return script.same_pass(first, second) and not script.excludes(first, second)


def _moves(script: Script, call: ast.Call) -> str:
    """Return what a call moves: "the learning rate", "the average of the weights"; "" for anything else."""
    owner = receiver(call)
    match called_name(call):
        case "step" if owner is not None and _is_schedule(script.made_by(owner)):
            return "the learning rate"
        case "update_parameters" if owner is not None:
            averages = any("AveragedModel" in name for name in script.made_by(owner))
        case "update":
            averages = (dotted(owner) or "").rpartition(".")[2] in _AVERAGES
        case name:
            averages = _AVERAGES_BY_FUNCTION.fullmatch(name) is not None and len(call.args) + len(call.keywords) > 1
    return "the average of the weights" if averages else ""


def _is_schedule(made_by: Set[str]) -> bool:
    """Return whether something is a schedule that moves in every pass; one that waits for a plateau does not."""
    return any(map(_SCHEDULES.search, made_by)) and not any("Plateau" in name for name in made_by)


def _knows_of_skips(script: Script, function: ast.AST) -> bool:
    """Return whether a function looks at what the step did."""
    return _OF_SKIPS.search(_text(script, function)) is not None


def _text(script: Script, function: ast.AST) -> str:
    return script.source.text if isinstance(function, ast.Module) else script.program.code(function)


def float16_without_scaling(script: Script) -> Iterator[Place]:
    """Float16 gradients of an unscaled loss."""
    if not _ELSEWHERE.search(script.source.text):
        for region in script.regions:
            function = script.program.function(region.node)
            inside = region.node if region.node is function else None
            trains = [
                event
                for event in _of_kind(script.events.get(inside or function, []), "backward")
                if script.is_before(region.call, event.node)
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
    cast = {script.program.function(call) for call in script.calls_of({"ampx.init"}) if _casts_to_float16(call)}
    for function, events in script.events.items():
        for step in _of_kind(events, "raw step") if cast & {function, script.source.tree} else ():
            if _applies_unscaled(script, events, step):
                yield (
                    step.node,
                    f"`{step.subject}.step()` applies gradients that were computed in float16 of a loss that was not "
                    f"scaled: those below 6e-8 are 0; call `ampx.wrap_optimizer({step.subject})`, and backward in the "
                    "block of `ampx.scale_loss`",
                )


def _applies_unscaled(script: Script, events: Sequence[Event], step: Event) -> bool:
    """Return whether the last backward before a step is of a plain loss, and casting was on."""
    before = [
        event
        for event in _of_kind(events, "scaled", "backward")
        if _joined(script, event.node, step.node) and script.is_before(event.node, step.node)
    ]
    owner = receiver(step.node)
    if not before or before[-1].kind == "scaled" or owner is None or "ampx.wrap_optimizer" in script.made_by(owner):
        return False
    return not any("autocast" in script.program.code(item) for item in _entered(script, before[-1].node))


def _casts_to_float16(init: ast.Call) -> bool:
    """Return whether a call of `ampx.init` has the whole process cast to float16, and losses scaled."""
    options = {option.arg: option.value for option in init.keywords}
    return dtype_of(options.get("dtype")) == "float16" and not options.keys() & {"level", "process_wide", "loss_scale"}


def _entered(script: Script, node: ast.AST) -> list[ast.expr]:
    """List the context managers of the blocks around a node."""
    regions = [outer for outer in script.program.around(node) if isinstance(outer, ast.With)]
    return [item.context_expr for region in regions for item in region.items]


def _tape_without_scaling(script: Script) -> Iterator[Place]:
    text = script.source.text
    if "mixed_float16" not in text or re.search(r"scale_loss|get_scaled_loss|LossScaleOptimizer|ampx", text):
        return
    for call in script.calls:
        tape = receiver(call)
        if called_name(call) != "gradient" or not isinstance(tape, ast.Name):
            continue
        if "tensorflow.GradientTape" in _entered_as(script, tape.id):
            yield (
                call,
                "under the policy mixed_float16 a loop of one's own scales no loss: gradients below 6e-8 become 0; "
                "use `keras.optimizers.LossScaleOptimizer` and its `scale_loss`",
            )


def _entered_as(script: Script, name: str) -> set[str]:
    """Return the full names of the calls whose context managers are entered under a name."""
    items = [item for region in script.program.every(ast.With) for item in region.items]
    entered = [item.context_expr for item in items if dotted(item.optional_vars) == name]
    return {full for call in entered if isinstance(call, ast.Call) for full in script.names(call.func)}


def scale_not_saved(script: Script) -> Iterator[Place]:
    """A checkpoint holds the optimizer and not the loss scale."""
    own = [text for text, call in script.scalers.items() if call is not None and not _is_off(call)]
    scaler = own[0] if own else "amp" if script.calls_of({"apex.amp.initialize"}) else None
    if scaler is None or _saves_scale(script, own) or any(script.leaves(text, _keeps_state) for text in own):
        return
    for state in _saved_states(script):
        optimizer = dotted(receiver(state)) or ""
        if _OPTIMIZER.search(optimizer):
            yield (
                state,
                f"the checkpoint holds `{optimizer}` and not `{scaler}`: a run that is resumed begins with another "
                f"loss scale; save `{scaler}.state_dict()`, too",
            )


def _keeps_state(function: str) -> bool:
    """Return whether what a scaler is passed to may save it: an object, or what is about checkpoints."""
    return function[:1].isupper() or re.search(r"save|load|check|ckpt|state|resum|restor|regist", function) is not None


def _saves_scale(script: Script, scalers: Sequence[str]) -> bool:
    names = "|".join(re.escape(text.rpartition(".")[2]) for text in (*scalers, "amp"))
    return re.search(rf"\b({names})\b\.state_dict\(", script.source.text) is not None


def _saved_states(script: Script) -> Iterator[ast.Call]:
    """Yield the calls of `state_dict` in what functions that save something are passed."""
    for call in script.calls:
        passed = [*call.args, *keywords(call).values()] if "save" in called_name(call) else []
        for value in (value for saved in passed for value in _values(script, saved)):
            calls = (node for node in ast.walk(value) if isinstance(node, ast.Call))
            yield from (inner for inner in calls if called_name(inner) == "state_dict")


def _values(script: Script, node: ast.expr) -> list[ast.expr]:
    """Return what a name was assigned, as far as that is known; any other expression as it is."""
    origins = script.flow.origins(node) if isinstance(node, ast.Name) else None
    return [node] if origins is None else [origin.value for origin in origins if origin.value is not None]


def _is_off(call: ast.Call | None) -> bool:
    """Return whether the text switches a scaler off; False where it is made elsewhere."""
    keywords = [] if call is None else call.keywords
    return any(keyword.arg in ("enabled", "enable") and constant(keyword.value) is False for keyword in keywords)


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
            elif _is_updated_in_some_passes(script, events, event):
                yield (
                    event.node,
                    f"`{event.scaler}` divides the gradients of `{event.subject}` in every pass and is updated in "
                    "some: in the others it divides them again, and raises; divide where the optimizer is stepped",
                )
            open_calls.append(event)


def _is_updated_in_some_passes(script: Script, events: Sequence[Event], unscale: Event) -> bool:
    """Return whether gradients are accumulated: only every so many passes reach an update, and all divide them."""
    updates = [event for event in _of_kind(events, "update") if event.scaler == unscale.scaler]
    around = script.program.branches(unscale.node)
    return bool(updates) and all(
        _joined(script, update.node, unscale.node)
        and any(_counts(test) for test in script.program.branches(update.node).keys() - around.keys())
        for update in updates
    )


def _counts(test: ast.If) -> bool:
    """Return whether a condition holds in every so many passes: `(step + 1) % accumulate == 0`."""
    return any(isinstance(node, ast.Mod) for node in ast.walk(test.test))


def never_updated(script: Script) -> Iterator[Place]:
    """The scale never moves."""
    for text, call in script.scalers.items():
        if call is None or script.leaves(text) or _is_off(call) or _is_updated(script, text):
            continue
        steps = [event for events in script.events.values() for event in _of_kind(events, "step")]
        steps = [event for event in steps if event.scaler == text and called_name(event.node) == "step"]
        if steps:
            yield (
                steps[0].node,
                f"`{text}.update()` is called nowhere: the scale never moves, and a second `step` raises; call it "
                "after the last step of each pass",
            )


def _is_updated(script: Script, scaler: str) -> bool:
    """Return whether something of a scaler's name is updated anywhere in the file."""
    updated = [receiver(call) for call in script.calls if called_name(call) in ("update", "minimize")]
    names = [(dotted(owner) or "").rpartition(".")[2] for owner in updated if owner is not None]
    return scaler.rpartition(".")[2] in names


def _scaled_beside(script: Script, events: Sequence[Event], event: Event) -> list[Event]:
    """Return the backward calls of scaled losses in the same pass as an event."""
    return [
        other
        for other in _of_kind(events, "scaled")
        if other.scaler in script.scalers and script.same_pass(event.node, other.node)
    ]


def stepped_by_itself(script: Script) -> Iterator[Place]:
    """The optimizer steps on gradients that carry the scale."""
    for events in script.events.values():
        for event in _of_kind(events, "raw step"):
            scaled = [
                other
                for other in _scaled_beside(script, events, event)
                if script.is_before(other.node, event.node) and script.implies(event.node, other.node)
            ]
            if not scaled:
                continue
            scaler = scaled[-1].scaler
            divided = any(other.scaler == scaler for other in _of_kind(events, "step", "unscale"))
            if not divided and not _is_off(script.scalers[scaler]):
                yield (
                    event.node,
                    f"`{event.subject}.step()` applies gradients that carry the loss scale of `{scaler}`; call "
                    f"`{scaler}.step({event.subject})` and `{scaler}.update()`",
                )
    yield from _stepped_unchecked(script)


def _stepped_unchecked(script: Script) -> Iterator[Place]:
    """The optimizer steps on gradients that the scaler divided, though no overflow in them was looked for."""
    for function, events in script.events.items():
        for event in _of_kind(events, "raw step"):
            divided = [
                other
                for other in _of_kind(events, "unscale")
                if other.scaler in script.scalers
                and other.subject == event.subject
                and script.comes_before(other.node, event.node)
                and script.same_pass(event.node, other.node)
                and script.implies(event.node, other.node)
            ]
            if divided and not _knows_of_skips(script, function) and not _FINITE.search(_text(script, function)):
                scaler = divided[-1].scaler
                yield (
                    event.node,
                    f"`{event.subject}.step()` applies gradients also where `{scaler}.unscale_` met an overflow in "
                    f"them; call `{scaler}.step({event.subject})`, which skips the step",
                )


def unscaled_beside_scaled(script: Script) -> Iterator[Place]:
    """Gradients of an unscaled loss are divided by the scale."""
    for events in script.events.values():
        for event in () if _of_kind(events, "raw step") else _of_kind(events, "backward"):
            branches = script.program.branches(event.node)
            scaled = [
                other
                for other in _scaled_beside(script, events, event)
                if script.program.branches(other.node) == branches
            ]
            if scaled and _step_together(script, events, event, scaled[-1]):
                loss = event.subject or script.program.code(event.node.func)
                yield (
                    event.node,
                    f"the gradients of `{loss}` carry no loss scale and are divided by that of `{scaled[-1].scaler}`; "
                    "scale this loss, too",
                )
    yield from _unscaled_in_block(script)


def _step_together(script: Script, events: Sequence[Event], event: Event, scaled: Event) -> bool:
    """Return whether a step applies the gradients of two backward calls: one after both, and none between them."""
    earlier, later = sorted((event.node, scaled.node), key=script.program.order)
    steps = [step for step in _of_kind(events, "step") if script.is_before(earlier, step.node)]
    between = any(script.is_before(step.node, later) for step in steps)
    return not between and any(step.scaler == scaled.scaler for step in steps)


def _unscaled_in_block(script: Script) -> Iterator[Place]:
    """Backward on the loss that a block was given, where it yields the scaled one."""
    for region, call, _ in script.blocks:
        loss = dotted(call.args[0]) if call.args else None
        if loss is None or loss in map(dotted, _assigned_in(region)):
            continue
        scaled = next((dotted(item.optional_vars) for item in region.items if item.context_expr is call), None)
        for backward in script.calls:
            if _is_backward_of(backward, loss) and script.program.inside(backward, region):
                yield (
                    backward,
                    f"the gradients of `{loss}` carry no loss scale and are divided by it; call backward on "
                    f"{f'`{scaled}`' if scaled else 'what the block yields'}",
                )


def _assigned_in(region: ast.AST) -> Iterator[ast.AST]:
    return (node for node in ast.walk(region) if isinstance(getattr(node, "ctx", None), ast.Store))


def _is_backward_of(call: ast.Call, loss: str) -> bool:
    """Return whether a call is `loss.backward()`, or `backward(loss)` of anything."""
    return called_name(call) == "backward" and loss in map(dotted, (receiver(call), *call.args[:1]))


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
        stepped = {event.subject for event in _of_kind(inside, "step")}
        if _of_kind(inside, "scaled") and not _is_off(call) and not _assigned(script, function, loops, stepped):
            yield (
                call,
                "a scaler made in a loop begins with its first scale in every pass; make it once, before the loop",
            )


def _assigned(script: Script, function: ast.AST, loops: Sequence[ast.AST], names: set[str]) -> bool:
    """Return whether each pass of some loops assigns one of some names: where it is the optimizer, training is new."""
    return any(
        all(loop in script.program.loops(assign) for loop in loops)
        and any(dotted(node) in names for target in assign.targets for node in ast.walk(target))
        for assign in script.assignments_in(function)
    )
