"""Rewrite code around a `GradScaler`, PyTorch's or Paddle's.

The session takes the scaler's place, and its optimizers are wrapped. The name that held the scaler holds the session
afterwards, so that functions it is passed to, attributes it is kept in and checkpoints that save its state go on
working, in whatever file of the program they are.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Final

from ampx.syntax.flow import Binding, Flow, Place
from ampx.syntax.program import FUNCTIONS, Function, Reference, called_name, decided, dotted, is_none, receiver
from ampx.syntax.source import Source

from .edits import Edits, Plan
from .optimizers import asks_for_type, keeps
from .report import NeedsHumanError

BY_HAND: Final = "Rewrite this file by hand: the manual's pages on migration show the counterparts."
_WRAP: Final = "Call `ampx.wrap_optimizer` on it where it is made, after `ampx.init`; then migrate the rest by hand."
_TESTS: Final = (ast.Compare, ast.If, ast.IfExp, ast.BoolOp, ast.UnaryOp, ast.While)


@dataclass(frozen=True)
class Start:
    """Where a session begins."""

    statement: ast.stmt  # the line after which it is there
    name: str  # what holds the session in that line
    maybe_none: bool  # whether what holds it may be None instead


@dataclass(eq=False)
class Scaler:
    """One constructor call and what hangs on it."""

    call: ast.Call
    start: Start  # where it is made
    init: str  # the call of `ampx.init` that takes its place
    places: set[Place] = field(default_factory=set)  # what holds it
    backward: list[ast.Call] = field(default_factory=list)  # calls of `scale`, in the order of the text
    # Calls that step an optimizer, with the optimizer.
    steps: list[tuple[ast.Call, ast.expr]] = field(default_factory=list)
    # What is stepped or unscaled, one expression for each optimizer.
    optimizers: list[ast.expr] = field(default_factory=list)
    updates: list[ast.Call] = field(default_factory=list)  # calls that move its scale
    loads: list[ast.Call] = field(default_factory=list)  # calls that load its state or ask for its scale


class ScalerRewriter:
    """Plans the edits for every scaler of a program."""

    def __init__(
        self, plan: Plan, framework: str, constructors: Set[str], write_init: Callable[[ast.Call], str]
    ) -> None:
        """Take what the dialect knows; `write_init` gives the `ampx.init` call for a constructor call."""
        self._plan = plan
        self._program = plan.program
        self._framework = framework
        self._constructors = constructors
        self._write_init = write_init

    @property
    def _flow(self) -> Flow:
        return self._plan.flow

    def rewrite(self) -> Scaler | None:
        """Plan everything; return the scaler, if there is one."""
        calls, types = self._find_constructors()
        if not calls:
            return None
        if len(calls) > 1:
            raise self._block(
                calls[1],
                f"a second scaler; a process has one session of ampx for {self._framework}",
                "Make one session, and wrap each optimizer with a `loss_scale` of its own.",
            )
        scaler = self._begin(calls[0])
        self._follow(scaler)
        while self._load_receivers(scaler):
            self._follow(scaler)
        self._check_bindings(scaler)
        self._check_holders(scaler)
        for use in self._uses(scaler):
            self._use(scaler, use)
        self._finish(scaler)
        for node in types:
            if self._edits(node).nodes:  # an annotation alone is no reason to change a file
                self._edits(node).expression(node, "ampx.Amp")
        return scaler

    def _find_constructors(self) -> tuple[list[ast.Call], list[Reference]]:
        """Return the calls that make a scaler, and where the class is named as a type."""
        calls: list[ast.Call] = []
        types: list[Reference] = []
        for node in [node for node, name in self._program.references() if name in self._constructors]:
            self._edits(node).claimed.add(node)
            call = self._program.call_of(node)
            if call is not None:
                calls.append(call)
            elif self._is_type(node):
                types.append(node)
            else:
                raise self._block(node, f"`{self._program.code(node)}` is used without being called", BY_HAND)
        return calls, types

    def _uses(self, scaler: Scaler) -> list[Reference]:
        return [use for place in scaler.places for use in self._flow.uses_at(place)]

    def _edits(self, node: ast.AST) -> Edits:
        return self._plan.of(node)

    def _block(self, node: ast.AST, what: str, advice: str) -> NeedsHumanError:
        return NeedsHumanError(node, what, advice)

    def _is_type(self, node: ast.AST) -> bool:
        """Return whether the class is named in an annotation, or asked for by isinstance."""
        return self._program.in_annotation(node) or any(map(self._is_isinstance, self._program.around(node)))

    def _is_isinstance(self, call: ast.AST) -> bool:
        return isinstance(call, ast.Call) and dotted(call.func) == "isinstance"

    # -- where it is made, and what holds it ---------------------------------------------------------

    def _begin(self, call: ast.Call) -> Scaler:
        program = self._program
        target, maybe_none = self._kept_in(call)
        place = None if target is None else self._flow.place(target)
        if target is None or place is None:
            raise self._block(call, f"`{program.code(call)}` is not kept in a variable", BY_HAND)
        statement = program.statement(call)
        if program.loops(statement):
            raise self._block(call, "a scaler is made in a loop", BY_HAND)
        maybe_none = maybe_none or any(map(is_none, self._flow.values_at(place)))
        self._check_made_once(call)
        scaler = Scaler(call, Start(statement, program.code(target), maybe_none), self._write_init(call), {place})
        self._edits(call).expression(call, scaler.init)
        return scaler

    def _kept_in(self, call: ast.Call) -> tuple[ast.AST | None, bool]:
        """Return the target that a scaler is assigned to, and whether the same line may assign None."""
        program = self._program
        value: ast.AST = call
        choice = program.parent(call)
        if isinstance(choice, ast.IfExp) and call is not choice.test:
            if not is_none(choice.orelse if choice.body is call else choice.body):
                raise self._block(choice, f"`{program.code(choice)}` makes one of two things", BY_HAND)
            value = choice
        match program.parent(value):
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
                return target, value is choice
        return None, False

    def _check_made_once(self, call: ast.Call) -> None:
        """Refuse a scaler of objects of which there are several."""
        home = self._program.function(call)
        if isinstance(home, FUNCTIONS) and home.name == "__init__" and len(self._flow.calls_of(home)) > 1:
            raise self._block(
                call,
                "a scaler for each of several objects; a process has one session of ampx for " + self._framework,
                "Make one session, and wrap each optimizer with a `loss_scale` of its own.",
            )

    def _follow(self, scaler: Scaler) -> None:
        """Add the parameters and attributes that the scaler is passed on to."""
        waiting = list(scaler.places)
        while waiting:
            for use in self._flow.uses_at(waiting.pop()):
                for place in self._passed_to(use):
                    if place not in scaler.places:
                        scaler.places.add(place)
                        waiting.append(place)

    def _passed_to(self, use: Reference) -> list[Place]:
        parent = self._program.parent(use)
        if isinstance(parent, ast.Assign) and parent.value is use:
            places = [self._flow.place(target) for target in parent.targets]
            return [place for place in places if place is not None]
        return self._flow.receivers(use)

    def _load_receivers(self, scaler: Scaler) -> bool:
        """Take in the files of functions that get the scaler or an optimizer; return whether there was one."""
        places = scaler.places | self._places_of_optimizers(scaler)
        calls = [self._program.receiving_call(use) for place in places for use in self._flow.uses_at(place)]
        return any([self._program.load(call.func) for call in calls if call is not None])

    def _places_of_optimizers(self, scaler: Scaler) -> set[Place]:
        """Return what holds the optimizers that the scaler steps or unscales, here and where they are made."""
        optimizers = [optimizer for use in self._uses(scaler) for optimizer in self._stepped_by(use)]
        origins = [origin for optimizer in optimizers for origin in self._origins(scaler, optimizer) or ()]
        places = map(self._flow.place, [*optimizers, *(origin.node for origin in origins)])
        return {place for place in places if place is not None}

    def _stepped_by(self, use: Reference) -> list[ast.expr]:
        """Return the optimizers of a call of the scaler that steps or unscales."""
        method = self._program.parent(use)
        call = self._program.parent(method)
        if isinstance(method, ast.Attribute) and method.attr in ("step", "unscale_", "minimize"):
            return call.args[:1] if isinstance(call, ast.Call) else []
        return []

    def _check_bindings(self, scaler: Scaler) -> None:
        for place in scaler.places:
            for binding in self._flow.bindings_at(place):
                if not self._is_scaler(scaler, place, binding):
                    code = self._program.code(binding.node).strip()
                    raise self._block(binding.node, f"`{code}` is the scaler here and something else there", BY_HAND)

    def _is_scaler(self, scaler: Scaler, place: Place, binding: Binding) -> bool:
        if isinstance(binding.node, ast.arg):
            passed = [self._flow.place(value) for value in self._flow.arguments(place) if not is_none(value)]
            return all(origin in scaler.places for origin in passed)
        value = binding.value
        if value is None:
            return False
        if value is scaler.call or is_none(value) or self._flow.place(value) in scaler.places:
            return True
        return isinstance(value, ast.IfExp) and scaler.call in (value.body, value.orelse)

    def _check_holders(self, scaler: Scaler) -> None:
        """Refuse where something that is not followed may hold the scaler under the same name."""
        for place in scaler.places:
            owner, _, name = place[1].rpartition(".")
            for node in self._flow.attributes.get(name, []) if owner or self._is_module(place) else ():
                other = self._flow.place(node)
                if other in scaler.places or (other is not None and other in self._flow.bindings):
                    continue
                if owner or other is None:
                    raise self._block(node, f"`{self._program.code(node)}` may be the scaler", BY_HAND)

    def _is_module(self, place: Place) -> bool:
        return isinstance(getattr(place[0], "node", None), ast.Module)

    # -- what is done with it ------------------------------------------------------------------------

    def _use(self, scaler: Scaler, use: Reference) -> None:
        parent = self._program.parent(use)
        getter = self._program.receiving_call(use)
        if isinstance(parent, ast.Attribute):
            call = self._program.call_of(parent)
            if call is None:
                raise self._unknown(parent)
            self._method(scaler, parent.attr, call)
        elif getter is not None:
            if not self._flow.receivers(use) and not self._is_isinstance(getter):
                function = self._program.code(getter.func)
                raise self._block(
                    use,
                    f"the scaler is passed to `{function}`, which is no function of the files that are migrated",
                    "Pass the file that has it, too; or migrate both by hand.",
                )
        elif not (isinstance(parent, _TESTS) or (isinstance(parent, ast.Assign) and self._passed_to(use))):
            raise self._unknown(parent if isinstance(parent, ast.expr) else use)

    def _unknown(self, node: ast.AST) -> NeedsHumanError:
        return self._block(node, f"`{self._program.code(node).strip()}` has no counterpart that is known", BY_HAND)

    def _method(self, scaler: Scaler, name: str, call: ast.Call) -> None:
        """Plan what takes the place of a call of the scaler."""
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        hidden = None in [keyword.arg for keyword in call.keywords] or ast.Starred in map(type, values)
        method = _METHODS.get(name)
        if hidden or method is None or len(values) != method.arguments:
            raise self._unknown(call)
        if method.is_statement and not isinstance(self._program.parent(call), ast.Expr):
            raise self._unknown(call)
        method.plan(self, scaler, call, *values)

    def _plan_scale(self, scaler: Scaler, call: ast.Call, _: ast.expr) -> None:
        scaler.backward.append(call)

    def _plan_step(self, scaler: Scaler, call: ast.Call, optimizer: ast.expr, *_: ast.expr) -> None:
        self._note_optimizer(scaler, optimizer)
        scaler.steps.append((call, optimizer))
        self._edits(call).expression(call, f"{self._program.code(optimizer)}.step()")

    def _plan_unscale(self, scaler: Scaler, call: ast.Call, optimizer: ast.expr) -> None:
        self._note_optimizer(scaler, optimizer)
        self._edits(call).expression(call.func, "ampx.unscale")

    def _plan_update(self, scaler: Scaler, call: ast.Call) -> None:
        scaler.updates.append(call)
        self._edits(call).remove(call)

    def _plan_get_scale(self, scaler: Scaler, call: ast.Call) -> None:
        scaler.loads.append(call)  # rewritten when the optimizers are known

    def _plan_is_enabled(self, scaler: Scaler, call: ast.Call) -> None:
        self._edits(call).expression(call, f"{self._program.code(_holder(call))}.enabled")

    def _plan_load(self, scaler: Scaler, call: ast.Call, state: ast.expr) -> None:
        edits = self._edits(call)
        scaler.loads.append(call)
        edits.expression(state, lambda: f"ampx.import_state({edits.code(state)})")

    def _plan_state(self, scaler: Scaler, call: ast.Call) -> None:
        if isinstance(self._program.parent(call), (ast.Subscript, ast.Attribute)):
            raise self._unknown(call)

    def _note_optimizer(self, scaler: Scaler, optimizer: ast.expr) -> None:
        if self._key(scaler, optimizer) not in [self._key(scaler, other) for other in scaler.optimizers]:
            scaler.optimizers.append(optimizer)

    def _origins(self, scaler: Scaler, optimizer: ast.expr) -> list[Binding] | None:
        return self._flow.origins(optimizer, self._program.function(scaler.start.statement))

    def _key(self, scaler: Scaler, optimizer: ast.expr) -> frozenset[object]:
        """Know optimizers apart by where they are made."""
        origins = self._origins(scaler, optimizer) or ()
        return frozenset(origin.node for origin in origins) or frozenset({optimizer})

    # -- what needs to know all of it ----------------------------------------------------------------

    def _finish(self, scaler: Scaler) -> None:
        if not scaler.steps and scaler.backward:
            first = min(scaler.backward, key=self._program.order)
            holder = self._program.code(first.func).removesuffix(".scale")
            raise self._block(
                first,
                f"the loss is scaled here, and there is no `{holder}.step`: `optimizer.step()` applies scaled "
                f"gradients, and those that overflowed",
                f"Write `{holder}.step(optimizer)` in its place, and migrate again.",
            )
        if not scaler.steps:
            raise self._block(scaler.call, "no optimizer is stepped through this scaler here", BY_HAND)
        # By file: the order of files means nothing, and nothing below compares places of two files.
        scaler.backward.sort(key=self._program.order)
        scaler.steps.sort(key=lambda step: self._program.order(step[0]))
        points = self._wrap(scaler)
        if len(scaler.optimizers) > 1:
            self._edits(scaler.call).tell(
                scaler.call,
                "note",
                f"{len(scaler.optimizers)} optimizers share a loss scale, as they shared the scaler; it moves with "
                "their steps, not with `update`",
                "Wrap them one by one if each shall have its own.",
            )
        self._refuse_raw_steps(scaler)
        names: dict[Source, str] = {}
        for call in scaler.backward:
            source = self._program.source(call)
            if source not in names:
                used = {name.id for name in self._program.every(ast.Name, source.tree)}
                names[source] = _free_name("scaled_loss", used)
            self._backward(scaler, call, names[source])
        for call in scaler.loads:
            if called_name(call) == "load_state_dict":
                self._check_load(call, points)
            else:
                self._refuse_between_step_and_update(scaler, call)
                self._edits(call).expression(call, self._write_scale(scaler, call))

    def _check_load(self, call: ast.Call, points: list[ast.stmt]) -> None:
        home = self._program.function(call)
        for point in points:
            late = self._program.order(point) > self._program.order(call)
            if self._program.function(point) is home and late:
                raise self._block(call, "the state is loaded before the optimizer is made", BY_HAND)

    def _runs_without_session(self, scaler: Scaler, node: ast.AST) -> bool:
        """Return whether a node is only reached where there is no session, or where it is switched off."""
        there = self._when_there(scaler)
        for branch, holds in self._program.branches(node).items():
            for part, text, outcome in decided(branch.test, holds):
                if there.get(text.removeprefix("self.")) is not (not outcome):
                    continue
                held = part.left if isinstance(part, ast.Compare) else part
                if self._flow.place(held) not in scaler.places or self._everybody_passes(scaler, held):
                    return True
        return False

    def _when_there(self, scaler: Scaler) -> dict[str, bool]:
        """Return the tests whose outcome is known where there is a session that is switched on."""
        facts = [
            fact
            for branch, holds in self._program.branches(scaler.call).items()
            for fact in decided(branch.test, holds)
        ]
        choice = self._program.parent(scaler.call)
        if isinstance(choice, ast.IfExp):
            facts += decided(choice.test, choice.body is scaler.call)
        for keyword in scaler.call.keywords:
            if str(keyword.arg).startswith("enable"):
                facts += decided(keyword.value, True)
        there = {text.removeprefix("self."): holds for _, text, holds in facts}
        for _, text in scaler.places:
            name = text.removeprefix("self.")
            there |= {name: True, f"{name} is None": False}
        return there

    def _everybody_passes(self, scaler: Scaler, node: ast.expr) -> bool:
        """Return whether a parameter that holds the scaler gets it in every call."""
        place = self._flow.place(node)
        for binding in self._flow.bindings_at(place):
            owner = self._program.parent(self._program.parent(binding.node))
            if isinstance(binding.node, ast.arg) and isinstance(owner, FUNCTIONS) and place is not None:
                arguments = self._flow.arguments(place)
                if len(arguments) < len(self._flow.calls_of(owner)) or any(map(is_none, arguments)):
                    return False
        return True

    def _refuse_raw_steps(self, scaler: Scaler) -> None:
        keys = [self._key(scaler, optimizer) for optimizer in scaler.optimizers]
        for call in self._program.every(ast.Call):
            func = call.func
            if isinstance(func, ast.Attribute) and func.attr == "step" and self._key(scaler, func.value) in keys:
                if self._runs_without_session(scaler, call):
                    continue
                raise self._block(
                    call,
                    f"`{self._program.code(call)}` steps without the scaler where there may be one",
                    "Make the scaler with `enabled=` what decides here, use it in both cases, and migrate again.",
                )

    # -- the optimizers --------------------------------------------------------------------------------

    def _wrap(self, scaler: Scaler) -> list[ast.stmt]:
        """Plan the wrapping of the optimizers that share the loss scale; return the lines after which it stands."""
        groups = self._made(scaler)
        bindings = [binding for _, group in groups for binding in group]
        names = [name for name, _ in groups]
        starts = {self._start_for(scaler, binding) for binding in bindings}
        start = starts.pop()
        if starts:
            raise self._block(scaler.call, f"{', '.join(names)} are made in several functions", _WRAP)
        late = [binding for binding in bindings if not self._precedes(binding, start)]
        for binding in late:
            self._check_after(binding, start)
            self._check_not_replaced(binding, late)
        points = self._wrapping_points(names, bindings, late) if late else [start.statement]
        for binding in bindings:
            self._check_not_held(binding, points)
        for point in points:
            self._edits(point).insert_after(point, _wrap_text(names, start))
        return points

    def _wrapping_points(self, names: list[str], bindings: list[Binding], late: list[Binding]) -> list[ast.stmt]:
        """Return the lines behind which optimizers are wrapped that are made after the session begins."""
        program = self._program
        points = [program.statement(binding.node) for binding in late]
        if len(names) == 1:
            if len(late) < len(bindings):
                raise self._block(late[0].node, f"`{names[0]}` is made before and after the session begins", _WRAP)
            return points
        last = max(bindings, key=lambda binding: program.order(binding.node))
        if len({id(program.block(point)) for point in points}) > 1 or len(bindings) > len(names):
            what = f"{', '.join(names)} share a loss scale and are made in several places"
            raise self._block(last.node, what, _WRAP)
        return [program.statement(last.node)]

    def _made(self, scaler: Scaler) -> list[tuple[str, list[Binding]]]:
        """Return what holds the optimizers of a scaler: for each place its code, and where it is bound."""
        program = self._program
        groups: list[tuple[str, list[Binding]]] = []
        for optimizer in scaler.optimizers:
            origins = self._origins(scaler, optimizer)
            if not origins:
                raise self._block(optimizer, f"it cannot be told where `{program.code(optimizer)}` is made", _WRAP)
            for binding in origins:
                place = self._flow.place(binding.node)
                group_of_place = next((group for group in groups if self._flow.place(group[1][0].node) == place), None)
                if group_of_place is None:
                    groups.append((program.code(binding.node), [binding]))
                elif binding not in group_of_place[1]:
                    group_of_place[1].append(binding)
        return groups

    def _start_for(self, scaler: Scaler, binding: Binding) -> Start:
        """Return where the session begins as the function sees it that makes an optimizer: where it calls what does."""
        program, start = self._program, scaler.start
        home = program.function(start.statement)
        wanted = program.function(binding.node)
        if start.maybe_none or program.is_branched(start.statement):
            return start
        for _ in range(5):
            if home is wanted or isinstance(home, ast.Module):
                break
            calls = self._flow.calls_of(home)
            if len(calls) != 1 or program.is_used_elsewhere(home):
                break
            home = program.function(calls[0])
            if home is wanted:
                return Start(program.statement(calls[0]), "", False)
        return start

    def _precedes(self, binding: Binding, start: Start) -> bool:
        """Return whether a value is surely there when the session begins, and made as often."""
        program = self._program
        if program.function(binding.node) is not program.function(start.statement):
            return False
        if program.order(binding.node) > program.order(start.statement):
            return False
        here, there = program.branches(start.statement), program.branches(binding.node)
        exclusive = any(here[branch] is not holds for branch, holds in there.items() if branch in here)
        return not exclusive and program.loops(binding.node) == program.loops(start.statement)

    def _check_after(self, binding: Binding, start: Start) -> None:
        program = self._program
        home, other = program.function(start.statement), program.function(binding.node)
        if home is other:
            block = program.block(start.statement)
            inside = start.maybe_none or any(program.inside(binding.node, statement) for statement in block)
            after = inside and program.order(binding.node) > program.order(start.statement)
        else:
            after = not start.maybe_none and self._is_called_after(other, start)
        if not after:
            name = program.code(binding.node)
            raise self._block(
                binding.node, f"it cannot be told whether `{name}` is made after the session begins", _WRAP
            )

    def _is_called_after(self, function: Function | ast.Module, start: Start) -> bool:
        """Return whether a session begins in a module, before the module calls a function of its own."""
        program = self._program
        home = program.function(start.statement)
        if not isinstance(home, ast.Module) or home is not program.module(function):
            return False
        calls = [] if isinstance(function, ast.Module) else self._flow.calls_of(function)
        early = [call for call in calls if program.function(call) is home]
        return not any(program.order(call) < program.order(start.statement) for call in early)

    def _check_not_replaced(self, binding: Binding, others: list[Binding]) -> None:
        """Refuse an optimizer that takes another's place: the scaler goes on, its own scale would begin anew."""
        program = self._program
        home = program.function(binding.node)
        calls = self._flow.calls_of(home) if isinstance(home, FUNCTIONS) else []
        again = any(program.loops(node) for node in (binding.node, *calls))
        place, branches = self._flow.place(binding.node), program.branches(binding.node)
        for other in others:
            if other is not binding and self._flow.place(other.node) == place and program.function(other.node) is home:
                here = program.branches(other.node)
                again = again or not any(branches.get(branch, holds) is not holds for branch, holds in here.items())
        if again:
            raise self._block(
                binding.node,
                f"`{program.code(binding.node)}` is made more than once; the scaler goes on, and a wrapped "
                "optimizer's scale begins anew",
                "Wrap each of them by hand, with `loss_scale=` where the scale shall go on; or make it once.",
            )

    def _check_not_held(self, binding: Binding, points: list[ast.stmt]) -> None:
        """Refuse where something got the raw optimizer to keep, before it is wrapped."""
        program = self._program
        place = self._flow.place(binding.node)
        home = program.function(binding.node)
        for use in self._flow.uses_at(place):
            if asks_for_type(program, use):
                raise self._block(
                    use, f"`{program.code(program.parent(use))}` is the wrapper's class", "Use isinstance."
                )
            early = any(
                program.function(point) is home is program.function(use) and program.order(use) < program.order(point)
                for point in points
            )
            if early and program.order(use) > program.order(binding.node) and keeps(program, use):
                raise self._block(
                    use,
                    f"`{program.code(program.statement(use)).strip()}` keeps the optimizer before the session begins",
                    "Make the scaler before this line, and migrate again.",
                )

    # -- the backward calls ----------------------------------------------------------------------------

    def _backward(self, scaler: Scaler, call: ast.Call, name: str) -> None:
        """Put the backward of a scaled loss into a `scale_loss` block for the optimizers it makes gradients for."""
        program, edits = self._program, self._edits(call)
        optimizers = ", ".join(self._stepped_after(scaler, call))
        if ", " in optimizers:
            optimizers = f"[{optimizers}]"
        loss = [*call.args, *(keyword.value for keyword in call.keywords)][0]
        parent = program.parent(call)
        backward = program.parent(parent)
        is_call = isinstance(parent, ast.Attribute) and parent.attr == "backward" and isinstance(backward, ast.Call)
        if is_call and isinstance(program.parent(backward), ast.Expr):
            rest = edits.code(backward).removeprefix(edits.code(parent))

            def write() -> str:
                return f"with ampx.scale_loss({edits.code(loss)}, {optimizers}) as {name}:\n    {name}.backward{rest}"

            edits.statement(backward, write)
            return
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
            target = program.code(parent.targets[0])
            after = self._next(parent)
            if after is not None and program.code(after).startswith(f"{target}.backward("):

                def write_two() -> str:
                    rest = edits.code(after)
                    return f"with ampx.scale_loss({edits.code(loss)}, {optimizers}) as {target}:\n    {rest}"

                edits.statement(parent, write_two)
                edits.remove(after)
                return
        raise self._block(
            call,
            f"`{program.code(call)}` is not followed by `.backward()`",
            "Put the backward call into `with ampx.scale_loss(loss, optimizer) as scaled_loss:`.",
        )

    def _next(self, statement: ast.stmt) -> ast.stmt | None:
        block = self._program.block(statement)
        position = next(at for at, other in enumerate(block) if other is statement) + 1
        return block[position] if position < len(block) and isinstance(block[position], ast.Expr) else None

    def _stepped_after(self, scaler: Scaler, call: ast.Call) -> list[str]:
        """Return the optimizers whose gradients a backward makes: those stepped between it and the next one after."""
        steps = [(step, optimizer) for step, optimizer in scaler.steps if self._follows(step, call)]
        others = [other for other in scaler.backward if steps and self._follows(other, steps[0][0])]
        codes = [self._program.code(opt) for step, opt in steps if not others or not self._follows(step, others[0])]
        texts = list(dict.fromkeys(codes))
        if not texts and len(scaler.optimizers) > 1:
            raise self._block(call, "it cannot be told which optimizers this backward is for", BY_HAND)
        return texts or self._visible(scaler, call)

    def _follows(self, node: ast.AST, other: ast.AST) -> bool:
        """Return whether a node stands in the same function as another, behind it."""
        program = self._program
        return program.function(node) is program.function(other) and program.order(node) > program.order(other)

    def _visible(self, scaler: Scaler, node: ast.AST) -> list[str]:
        """Return an optimizer of the scaler as it can be named at a node; all have the same loss scale."""
        home = self._program.function(node)
        for call, optimizer in scaler.steps:
            if self._program.function(call) is home:
                return [self._program.code(optimizer)]
        for optimizer in scaler.optimizers:
            for origin in self._origins(scaler, optimizer) or ():
                if self._program.function(origin.node) is home or self._is_seen(origin.node, node):
                    return [self._program.code(origin.node)]
            text = self._seen_attribute(scaler, optimizer, node)
            if text is not None:
                return [text]
        raise self._block(node, "it cannot be told which optimizer this is for", BY_HAND)

    def _is_seen(self, optimizer: ast.AST, node: ast.AST) -> bool:
        text = self._program.code(optimizer)
        if text.startswith("self."):
            return self._program.enclosing_class(optimizer) is self._program.enclosing_class(node)
        place = self._flow.place(optimizer)
        return place is not None and place[0] is self._program.scope(self._program.module(node))

    def _seen_attribute(self, scaler: Scaler, optimizer: ast.expr, node: ast.AST) -> str | None:
        """Return an optimizer that is an attribute of the object whose scaler a call at a node is of."""
        place = self._flow.place(optimizer)
        text = self._program.code(optimizer)
        if place is None or not text.startswith("self.") or not isinstance(node, ast.Call):
            return None
        holder = receiver(node)
        held = None if holder is None else self._flow.place(holder)
        if isinstance(holder, ast.Attribute) and held is not None and held[0] is place[0] and held[1].count(".") == 1:
            return f"{self._program.code(holder.value)}.{place[1].removeprefix('self.')}"
        return None

    # -- the scale ---------------------------------------------------------------------------------------

    def _refuse_between_step_and_update(self, scaler: Scaler, call: ast.Call) -> None:
        """Refuse to tell the scale where the script's has not moved yet, and that of ampx has.

        Scripts compare it with the scale after `update`, to hold their scheduler back when a step was skipped.
        """
        program = self._program
        home, here = program.function(call), program.order(call)
        moves = [program.order(update) for update in scaler.updates if program.function(update) is home]
        steps = [program.order(step) for step, _ in scaler.steps if program.function(step) is home]
        last = max((move for move in moves if move < here), default=(0, 0))
        if any(last < step < here for step in steps) and any(move > here for move in moves):
            raise self._block(
                call,
                f"`{program.code(call)}` asks for the scale between `step` and `update`; ampx moves it in `step`",
                "Ask for it before the first step, which tells the same, and migrate again.",
            )

    def _write_scale(self, scaler: Scaler, call: ast.Call) -> str:
        """Write the present scale; a scaler that is switched off gives 1, whatever it was configured with."""
        scale = f"{self._visible(scaler, call)[0]}.loss_scale"
        if not ("loss_scale=" in scaler.init and "enabled=" in scaler.init):
            return scale
        return f"({scale} if {self._program.code(_holder(call))}.enabled else 1.0)"


@dataclass(frozen=True)
class Method:
    """A method of a scaler that is rewritten."""

    plan: Callable[..., None]  # plans the edits of a call: takes the rewriter, the scaler, the call, the arguments
    arguments: int = 0  # how many it takes
    is_statement: bool = False  # what it returns has no counterpart


_METHODS: Final = {
    "scale": Method(ScalerRewriter._plan_scale, 1),
    "step": Method(ScalerRewriter._plan_step, 1, is_statement=True),
    "minimize": Method(ScalerRewriter._plan_step, 2, is_statement=True),
    "unscale_": Method(ScalerRewriter._plan_unscale, 1, is_statement=True),
    "update": Method(ScalerRewriter._plan_update, is_statement=True),
    "get_scale": Method(ScalerRewriter._plan_get_scale),
    "get_loss_scaling": Method(ScalerRewriter._plan_get_scale),
    "is_enabled": Method(ScalerRewriter._plan_is_enabled),
    "is_enable": Method(ScalerRewriter._plan_is_enabled),
    "load_state_dict": Method(ScalerRewriter._plan_load, 1),
    "state_dict": Method(ScalerRewriter._plan_state),
}


def _holder(call: ast.Call) -> ast.expr:
    """Return what a method is called on."""
    holder = receiver(call)
    assert holder is not None
    return holder


def _wrap_text(names: list[str], start: Start) -> str:
    wrap_optimizer = f"{start.name}.wrap_optimizer" if start.maybe_none else "ampx.wrap_optimizer"
    if len(names) == 1:
        line = f"{names[0]} = {wrap_optimizer}({names[0]})"
    else:
        listed = ", ".join(names)
        line = f"{listed} = {wrap_optimizer}([{listed}])"
    return f"if {start.name} is not None:\n    {line}" if start.maybe_none else line


def _free_name(name: str, used: Set[str]) -> str:
    while name in used:
        name += "_"
    return name
