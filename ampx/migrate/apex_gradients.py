"""Code of apex scripts that looks at gradients between backward and step.

apex leaves true gradients behind when a `scale_loss` block ends; ampx leaves them scaled until the step. So whatever
reads or clips them in between gets them made true first, by `ampx.unscale`. Such a call is right only where every way
to it led through a `scale_loss` block, and where no further block of the same optimizer comes before its step. Both
are shown by following the optimizer's gradients through all ways that the program can take; where they cannot be
shown, a human has to look.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, TypeGuard

from ampx.syntax.flow import Place
from ampx.syntax.program import FUNCTIONS, Function, called_name, constant, decided, dotted, receiver

from .edits import Plan
from .report import NeedsHumanError

# What an optimizer's gradients are: none that count, times the loss scale, or true. `scaled before`: already when
# the present function was called, so that its caller has to see to them. `never scaled`: of a plain backward.
State: TypeAlias = Literal["clear", "scaled", "scaled before", "true", "never scaled"]
Fact: TypeAlias = tuple[str, bool]  # the text of a test, and whether it holds
# What of a statement may do something to gradients, or look at them.
Event: TypeAlias = ast.Call | ast.Attribute | ast.Name

_CLIPS: Final = {"clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grad_value"}
_GRADIENTS: Final = re.compile(r"grad", flags=re.I)
_NO_GRADIENTS: Final = re.compile(
    r"zero_?grad|no_?grad|enable_grad|requires_grad|retain_grad|grad_enabled|autograd|gradscaler|grad(ient)?_?accum",
    flags=re.I,
)
_MODELS: Final = {"parameters", "named_parameters"}  # what only a model has
_ENDS: Final = {"sys.exit", "exit", "quit", "os._exit", "os.abort"}
_NEW_TENSORS: Final = re.compile(
    r"(torch\.(zeros|ones|empty|full|rand|randn|randint)(_like)?|torch\.(tensor|from_numpy|as_tensor|stack|cat|clamp|"
    r"where|normal|arange|linspace|autograd\.Variable))"
)
_COPIES: Final = {"clone", "detach", "new_zeros", "new_ones", "new_tensor"}
_SAME: Final = {"to", "cuda", "cpu", "float", "half", "requires_grad_", "uniform_", "normal_", "clamp_", "zero_"}
_ADVICE: Final = (
    "apex leaves true gradients behind a `scale_loss` block, ampx scaled ones until the step. Rewrite this by hand, "
    "with `ampx.unscale(optimizer)` where gradients are read, once a step; or import `amp` from `ampx_torch.apex`."
)
_DEPTH: Final = 6  # calls within calls that are followed


@dataclass(frozen=True)
class World:
    """One way in which a place can be reached."""

    state: State  # what the optimizer's gradients are then
    facts: frozenset[Fact] = frozenset()  # tests that were decided on the way


Worlds: TypeAlias = frozenset[World]
_NOWHERE: Final[Worlds] = frozenset()


@dataclass
class Exits:
    """How a block of statements can be left, but for its end."""

    breaks: Worlds = _NOWHERE
    continues: Worlds = _NOWHERE
    returns: Worlds = _NOWHERE


@dataclass(frozen=True)
class Frame:
    """A function that is gone through, or a module."""

    # Which of its parameters the optimizer is, and what that is in the outermost function.
    names: tuple[tuple[Place, Place], ...]
    depth: int  # how many calls it is away from that
    branched: bool = False  # whether one of those calls stands in a branch


@dataclass(frozen=True)
class Unscale:
    """A call of `ampx.unscale` to be inserted."""

    statement: ast.stmt  # the statement before which it stands
    optimizer: str  # what the optimizer is called there
    place: Place  # the same as a place
    guard: Fact | None = None  # a test that must hold; None where it always does
    after: bool = False  # it stands behind the statement, which is a `scale_loss` block


@dataclass
class Findings:
    """What going through a program shows for one optimizer."""

    # Looks at scaled gradients, by the statement before which they would have to be made true.
    exposed: dict[ast.stmt, ast.AST] = field(default_factory=dict)
    worlds: dict[ast.stmt, Worlds] = field(default_factory=dict)  # in which worlds such statements are reached
    names: dict[ast.stmt, Place] = field(default_factory=dict)  # what the optimizer is called there
    wrong: list[ast.AST] = field(default_factory=list)  # what would raise
    steps: bool = False  # whether there is a step

    @property
    def is_clean(self) -> bool:
        """Whether gradients are true wherever they are looked at."""
        return not self.exposed and not self.wrong


class GradientReaders:
    """Plans where gradients are unscaled before they are read, and what replaces `master_params`."""

    def __init__(self, plan: Plan, regions: dict[ast.AST, ast.expr], initialized: list[ast.Call]) -> None:
        """Take the `scale_loss` blocks, each with the expression of its optimizers, and the calls of `initialize`."""
        self._plan = plan
        self.program = plan.program
        self.regions = regions
        self.initialized = initialized
        self._by_function: dict[ast.AST, list[ast.AST]] = {}
        for region in regions:
            self._by_function.setdefault(self.program.function(region), []).append(region)
        self.flow = plan.flow
        self._reached = self._lead_to_a_block()
        while self._load_callees():
            self.flow = plan.flow
            self._reached = self._lead_to_a_block()
        self.models = self._find_models()
        self.followed: set[ast.AST] = set()  # looks at gradients of which it is known when they happen
        functions: list[Function] = [*self.program.every(ast.FunctionDef), *self.program.every(ast.AsyncFunctionDef)]
        self.readers = {
            function.name for function in functions if any(map(self.looks_at_gradients, ast.walk(function)))
        }

    def rewrite(self, masters: list[ast.Call]) -> None:
        """Plan the edits."""
        clips = {clip for call in masters if (clip := self._clip_of(call)) is not None}
        inserted = self._insertions(clips, set(masters))
        if inserted is None and clips:
            clips = set()
            inserted = self._insertions(clips, set(masters))
        self._check_all_followed()
        for call in masters:
            optimizer = self.program.code(call.args[0])
            clip = self._clip_of(call)
            if clip in clips and clip is not None:
                self._plan.of(clip).expression(clip, self._write_clip(clip, optimizer))
            else:
                text = f'(parameter for group in {optimizer}.param_groups for parameter in group["params"])'
                self._plan.of(call).expression(call, text)
        for unscale in sorted(inserted or (), key=lambda unscale: self.program.order(unscale.statement)):
            text = f"ampx.unscale({unscale.optimizer})"
            if unscale.guard is not None:
                text = f"if {_written(unscale.guard)}:\n    {text}"
            edits = self._plan.of(unscale.statement)
            (edits.insert_after if unscale.after else edits.insert_before)(unscale.statement, text)

    # -- clipping of master parameters ---------------------------------------------------------------------

    def _clip_of(self, master: ast.Call) -> ast.Call | None:
        """Return the call that clips these master parameters by their L2 norm, which ampx has a function for."""
        call = self.program.parent(master)
        if not isinstance(call, ast.Call) or called_name(call) not in ("clip_grad_norm_", "clip_grad_norm"):
            return None
        names = {keyword.arg for keyword in call.keywords}
        plain = len(call.args) + len(call.keywords) == 2 and call.args[:1] == [master] and names <= {"max_norm"}
        return call if plain and not any(isinstance(value, ast.Starred) for value in call.args) else None

    def _write_clip(self, clip: ast.Call, optimizer: str) -> str:
        bound = clip.args[1] if len(clip.args) == 2 else clip.keywords[0].value
        return f"ampx.clip_grad_norm({optimizer}, {self._plan.of(clip).code(bound)})"

    # -- what has to be inserted -----------------------------------------------------------------------------

    def _insertions(self, clips: set[ast.Call], masters: set[ast.Call]) -> set[Unscale] | None:
        """Return the calls of `ampx.unscale` to insert; None where a clip is reached without a block before it."""
        inserted: set[Unscale] = set()
        for root in self._roots():
            for optimizer in self._optimizers(root):
                if not _Walk(self, optimizer, clips, masters).settle(root, inserted):
                    return None
        return inserted

    def _lead_to_a_block(self) -> dict[ast.AST, None]:
        """Return the functions and modules that hold a block, or call what does, always in one order."""
        reached: dict[ast.AST, None] = {}
        waiting = list(self._by_function)
        while waiting:
            function = waiting.pop()
            if function not in reached:
                reached[function] = None
                if isinstance(function, FUNCTIONS):
                    waiting += [self.program.function(call) for call in self.flow.calls_of(function)]
        return reached

    def _load_callees(self) -> bool:
        """Take in the files of functions that training calls; return whether there was one."""
        calls = [call for function in self._reached for call in self._calls_in(function)]
        return any([self.program.load(call.func) for call in calls])

    def _roots(self) -> list[ast.AST]:
        """Return the functions and modules that are started from outside, and that lead to a block."""
        roots = [root for root in self._reached if not isinstance(root, FUNCTIONS) or self._is_started_outside(root)]
        below: set[ast.AST] = set()
        for root in roots:
            self._below(root, below)
        return [*roots, *(root for root in self._reached if root not in below)]

    def _is_started_outside(self, function: Function) -> bool:
        """Return whether a function is called by who is not seen, as far as can be told."""
        calls = [call.func for call in self.flow.calls_of(function)]
        uses = self.flow.uses_at((self.program.scope(function), function.name))
        return not calls or any(use not in calls for use in uses) or self.program.is_used_elsewhere(function)

    def _below(self, root: ast.AST, seen: set[ast.AST]) -> None:
        if root not in seen:
            seen.add(root)
            for call in self._calls_in(root):
                function = self.flow.called(call)
                if function is not None:
                    self._below(function, seen)

    def _calls_in(self, root: ast.AST) -> list[ast.Call]:
        return [call for call in self.program.under(root, ast.Call) if self.program.function(call) is root]

    def _optimizers(self, root: ast.AST) -> list[Place]:
        """Return the optimizers of the blocks that a root leads to, as the root knows them."""
        optimizers: dict[Place, None] = {}
        waiting: list[tuple[ast.AST, dict[Place, Place], int]] = [(root, {}, 0)]
        while waiting:
            function, names, depth = waiting.pop()
            for region in self._by_function.get(function, []):
                optimizers.update(
                    dict.fromkeys(self.known_as(element, names) for element in elements(self.regions[region]))
                )
            for call in self._calls_in(function) if depth < _DEPTH else ():
                callee = self.flow.called(call)
                if callee is not None and callee is not function:
                    waiting.append((callee, self.names_in(call, callee, names), depth + 1))
        return list(optimizers)

    # -- names across calls ----------------------------------------------------------------------------------

    def known_as(self, node: ast.AST, names: Mapping[Place, Place]) -> Place:
        """Return what an expression stands for in the outermost function; what is no name is known by its text."""
        place = self.flow.place(node) or (None, ast.unparse(node))
        return names.get(place, place)

    def names_in(self, call: ast.Call, function: Function, names: Mapping[Place, Place]) -> dict[Place, Place]:
        """Return what the parameters of a called function stand for in the outermost function."""
        passed = self.flow.passed(call, function)
        return {self.flow.parameter_place(parameter): self.known_as(value, names) for parameter, value in passed}

    def leads_to_a_block(self, node: ast.AST) -> bool:
        """Return whether there is a block or a step in a statement, or in a function that it calls."""
        return any(
            inner in self.regions
            or (
                isinstance(inner, ast.Call)
                and (called_name(inner) == "step" or self.flow.called(inner) in self._reached)
            )
            for inner in ast.walk(node)
        )

    def _check_all_followed(self) -> None:
        """Refuse looks at gradients in functions that are used, and of which it is not seen when they are called."""
        functions: list[Function] = [*self.program.every(ast.FunctionDef), *self.program.every(ast.AsyncFunctionDef)]
        for function in functions:
            place = self.program.scope(function), function.name
            if function.name not in self.readers:
                continue
            if not self.flow.uses_at(place) and function.name not in self.flow.attributes:
                continue
            for node in ast.walk(function):
                if self._looks(node) and self.program.function(node) is function and node not in self.followed:
                    raise NeedsHumanError(
                        node,
                        f"`{self.program.code(node)}` in `{function.name}`: it cannot be told when gradients are read",
                        _ADVICE,
                    )

    def _looks(self, node: ast.AST) -> bool:
        """Return whether a node is a look at gradients that the walks would come by."""
        if isinstance(node, ast.Call):
            return self.is_named_for_gradients(node.func) and self.flow.called(node) is None
        return _reads_gradient(node) and not self.program.qualified(node)

    # -- who may look at gradients ---------------------------------------------------------------------------

    def _find_models(self) -> set[Place]:
        """Return what holds a model: what is asked for its parameters, and what that is passed on to."""
        attributes = [node for name in _MODELS for node in self.flow.attributes.get(name, [])]
        places = {place for node in attributes if (place := self.flow.place(node.value)) is not None}
        waiting = list(places)
        while waiting:
            for use in self.flow.uses_at(waiting.pop()):
                passed = [place for place in self.flow.receivers(use) if place not in places]
                places.update(passed)
                waiting += passed
        return places

    def looks_at_gradients(self, node: ast.AST) -> bool:
        """Return whether a node by itself looks at gradients: `p.grad`, "grad", or a function named for them."""
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            return True
        if isinstance(node, ast.Constant):
            return node.value == "grad"
        return isinstance(node, (ast.Name, ast.Attribute)) and self.is_named_for_gradients(node)

    def is_named_for_gradients(self, function: ast.expr) -> bool:
        """Return whether what is called is named for gradients, here or where it is imported from."""
        last = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        for full in self.program.qualified(function) or {last}:
            names = {last, full.rpartition(".")[2]}
            reads = any(_GRADIENTS.search(name) for name in names) and not _NO_GRADIENTS.search(full)
            if names & _CLIPS or reads:
                return True
        return False

    def may_look(self, call: ast.Call) -> bool:
        """Return whether a call may look at gradients, as far as names and arguments tell."""
        function = call.func
        if self.is_named_for_gradients(function) or any(constant(value) == "grad" for value in call.args):
            return True
        if self.program.qualified(function) or self.flow.called(call) is not None:
            return False
        place = self.flow.place(_root(function))
        if any(self.looks_at_gradients(inner) for value in self.flow.values_at(place) for inner in ast.walk(value)):
            return True
        if place is None or place in self.models:  # a builtin, or a model's own method
            return False
        if called_name(call) in self.readers:
            return True
        # A callback gets the model. Methods that get it save or validate it, if they are not named for gradients.
        return not isinstance(function, ast.Attribute) and self._gets_model(call)

    def _gets_model(self, call: ast.Call) -> bool:
        """Return whether a call is passed a model or its parameters."""
        passed = (*call.args, *(keyword.value for keyword in call.keywords))
        return any(self.flow.place(value) in self.models or called_name(value) in _MODELS for value in passed)


def _root(node: ast.AST) -> ast.AST:
    """Return the name that a chain of attributes, indices and calls begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def elements(optimizers: ast.expr) -> list[ast.expr]:
    """Return the optimizers of a block, which may be a list."""
    return list(optimizers.elts) if isinstance(optimizers, (ast.List, ast.Tuple)) else [optimizers]


class _Walk:
    """Goes all ways through a program, for one optimizer."""

    def __init__(
        self, readers: GradientReaders, optimizer: Place, clips: set[ast.Call], masters: set[ast.Call]
    ) -> None:
        self._readers = readers
        self._program = readers.program
        self._flow = readers.flow
        self._optimizer = optimizer
        self._clips, self._masters = clips, masters
        self._tests = self._tests_around_blocks()
        self._unscales: dict[ast.stmt, list[Unscale]] = {}
        self._findings = Findings()
        self._muted = False
        self._running: list[ast.AST] = []
        self._bubbling: list[list[ast.AST]] = []  # looks at gradients that were scaled before the present call
        self._seen: dict[object, tuple[Worlds, list[ast.AST]]] = {}

    # -- deciding --------------------------------------------------------------------------------------------

    def settle(self, root: ast.AST, inserted: set[Unscale]) -> bool:
        """Add what this optimizer needs; return False where a clip is reached without a block before it."""
        first = findings = self._look(root, inserted)
        needed = set(inserted)
        while fresh := [statement for statement in findings.exposed if not self._has(needed, statement)]:
            statement = min(fresh, key=self._program.order)
            place = findings.names[statement]
            needed.add(Unscale(statement, place[1], place, self._guard(findings.worlds[statement])))
            findings = self._look(root, needed)
        if not findings.is_clean and first.exposed:  # right behind the blocks, then
            behind = inserted | self._behind_blocks()
            again = self._look(root, behind)
            if again.is_clean:
                needed, findings = behind, again
        if any(node in self._clips for node in findings.wrong):
            return False
        if not findings.is_clean:
            reads = first.exposed or findings.exposed
            node = reads[min(reads, key=self._program.order)] if reads else findings.wrong[0]
            raise NeedsHumanError(
                node,
                f"`{self._short(node)}`: it cannot be shown where gradients of `{self._optimizer[1]}` have to be true",
                _ADVICE,
            )
        inserted |= needed
        return True

    def _has(self, unscales: set[Unscale], statement: ast.stmt) -> bool:
        return any(unscale.statement is statement for unscale in unscales)

    def _short(self, node: ast.AST) -> str:
        return self._program.code(node).split("\n")[0].strip()[:60]

    def _guard(self, worlds: Worlds) -> Fact | None:
        """Return the test by which the ways that led through a block differ from the others; None for no need."""
        scaled = [world for world in worlds if world.state not in ("clear", "never scaled")]
        clear = [world for world in worlds if world.state in ("clear", "never scaled")]
        if not clear or not scaled:
            return None
        for test, holds in sorted(frozenset.intersection(*(world.facts for world in scaled))):
            if all((test, not holds) in world.facts for world in clear):
                return test, holds
        return None

    def _behind_blocks(self) -> set[Unscale]:
        unscales = set()
        for region, optimizers in self._readers.regions.items():
            for optimizer in elements(optimizers):
                place = self._readers.known_as(optimizer, {})
                assert isinstance(region, ast.stmt)
                unscales.add(Unscale(region, self._program.code(optimizer), place, after=True))
        return unscales

    def _tests_around_blocks(self) -> set[str]:
        tests = set()
        for region in self._readers.regions:
            for branch in self._program.branches(region):
                tests |= {test for holds in (True, False) for test, _ in self._facts(branch.test, holds)}
        return tests

    # -- going -----------------------------------------------------------------------------------------------

    def _look(self, root: ast.AST, unscales: set[Unscale]) -> Findings:
        """Go through a root as often as it changes something: how often it is called is not known."""
        self._findings = Findings()
        self._unscales = {}
        for unscale in unscales:
            self._unscales.setdefault(unscale.statement, []).append(unscale)
        frame = Frame((), 0)
        worlds: Worlds = frozenset({World("clear")})
        while True:
            exits = Exits()
            self._running, self._bubbling, self._seen = [root], [[]], {}
            after = self._block(root.body, worlds, frame, exits)  # type: ignore[attr-defined]
            ends = frozenset(World(world.state) for world in after | exits.returns)
            if isinstance(root, ast.Module) or ends <= worlds:
                break
            worlds |= ends
        if isinstance(root, FUNCTIONS) and World("scaled") in ends and not self._findings.steps:
            name = self._optimizer[1]
            raise NeedsHumanError(
                root, f"`{root.name}` leaves gradients of `{name}` behind, and it is not seen who reads them", _ADVICE
            )
        return self._findings

    def _block(self, statements: Iterable[ast.stmt], worlds: Worlds, frame: Frame, exits: Exits) -> Worlds:
        for statement in statements:
            if not worlds:
                break
            earlier = self._findings.worlds.get(statement, _NOWHERE)
            self._findings.worlds[statement] = earlier | worlds
            unscales = self._own_unscales(statement, frame)
            worlds = self._unscale(statement, worlds, [unscale for unscale in unscales if not unscale.after])
            worlds = self._statement(statement, worlds, frame, exits)
            worlds = self._unscale(statement, worlds, [unscale for unscale in unscales if unscale.after])
        return worlds

    def _own_unscales(self, statement: ast.stmt, frame: Frame) -> list[Unscale]:
        names = dict(frame.names)
        unscales = self._unscales.get(statement, [])
        return [unscale for unscale in unscales if names.get(unscale.place, unscale.place) == self._optimizer]

    def _unscale(self, statement: ast.stmt, worlds: Worlds, unscales: list[Unscale]) -> Worlds:
        """Carry out what was inserted."""
        for unscale in unscales:
            after = set()
            for world in worlds:
                skipped = unscale.guard is not None and (unscale.guard[0], not unscale.guard[1]) in world.facts
                if not skipped and world.state in ("clear", "never scaled"):
                    self._findings.wrong.append(statement)
                after.add(world if skipped else World("true", world.facts))
            worlds = frozenset(after)
        return worlds

    def _statement(self, statement: ast.stmt, worlds: Worlds, frame: Frame, exits: Exits) -> Worlds:
        match statement:
            case ast.If():
                worlds = self._evaluate(statement.test, worlds, statement, frame)
                body = self._block(statement.body, self._assume(worlds, statement.test, True), frame, exits)
                other = self._block(statement.orelse, self._assume(worlds, statement.test, False), frame, exits)
                return body | other
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(statement, worlds, frame, exits)
            case ast.With() | ast.AsyncWith():
                return self._with(statement, worlds, frame, exits)
            case ast.Try():
                return self._try(statement, worlds, frame, exits)
            case ast.Match():
                worlds = self._evaluate(statement.subject, worlds, statement, frame)
                return worlds.union(*(self._block(case.body, worlds, frame, exits) for case in statement.cases))
            case ast.Return():
                exits.returns |= self._evaluate(statement, worlds, statement, frame)
                return _NOWHERE
            case ast.Raise():
                return _NOWHERE
            case ast.Break():
                exits.breaks |= worlds
                return _NOWHERE
            case ast.Continue():
                exits.continues |= worlds
                return _NOWHERE
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return worlds
        return self._evaluate(statement, worlds, statement, frame)

    def _loop(self, loop: ast.For | ast.AsyncFor | ast.While, worlds: Worlds, frame: Frame, exits: Exits) -> Worlds:
        endless = isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and bool(loop.test.value)
        worlds = self._evaluate(loop.test if isinstance(loop, ast.While) else loop.iter, worlds, loop, frame)
        while True:
            inside = Exits()
            after = self._block(loop.body, worlds, frame, inside) | inside.continues
            if after <= worlds:
                break
            worlds |= after
        exits.returns |= inside.returns
        finished = _NOWHERE if endless else self._block(loop.orelse, worlds, frame, exits)
        return finished | inside.breaks

    def _try(self, statement: ast.Try, worlds: Worlds, frame: Frame, exits: Exits) -> Worlds:
        inside = Exits()
        body = self._block(statement.body, worlds, frame, inside)
        handled = [self._block(handler.body, worlds | body, frame, inside) for handler in statement.handlers]
        after = self._block(statement.orelse, body, frame, inside).union(*handled)
        exits.breaks |= self._block(statement.finalbody, inside.breaks, frame, exits)
        exits.continues |= self._block(statement.finalbody, inside.continues, frame, exits)
        exits.returns |= self._block(statement.finalbody, inside.returns, frame, exits)
        return self._block(statement.finalbody, after, frame, exits)

    def _with(self, region: ast.With | ast.AsyncWith, worlds: Worlds, frame: Frame, exits: Exits) -> Worlds:
        optimizers = self._readers.regions.get(region)
        names = dict(frame.names)
        if optimizers is None:
            for item in region.items:
                worlds = self._evaluate(item.context_expr, worlds, region, frame)
        elif any(self._readers.known_as(element, names) == self._optimizer for element in elements(optimizers)):
            if any(world.state == "true" for world in worlds):
                self._findings.wrong.append(region)
            muted, self._muted = self._muted, True  # in the block gradients are scaled with apex, too
            worlds = self._block(region.body, worlds, frame, exits)
            self._muted = muted
            return _changed(worlds, {"clear": "scaled", "true": "scaled", "never scaled": "scaled"})
        return self._block(region.body, worlds, frame, exits)

    # -- expressions -----------------------------------------------------------------------------------------

    def _evaluate(self, node: ast.AST, worlds: Worlds, statement: ast.stmt, frame: Frame) -> Worlds:
        """Carry out what a statement, or an expression of its head, does to the gradients."""
        events = list(_events(node))
        self._note_followed(node, events, worlds)
        for event in events:
            if isinstance(event, ast.Call):
                worlds = self._call(event, worlds, statement, frame)
            elif self._is_look(event):
                self._read(event, worlds, statement, frame)
        return worlds

    def _note_followed(self, node: ast.AST, events: list[Event], worlds: Worlds) -> None:
        """Note looks of which it is known when they happen; a generator runs on when others have done more."""
        function = self._program.function(node)
        later = isinstance(function, FUNCTIONS) and _yields(function)
        if later and _yields(node) and any(world.state == "scaled" for world in worlds):
            self._findings.wrong.append(node)  # who goes on there may look at gradients
        if not later or any(world.state in ("scaled", "scaled before", "true") for world in worlds):
            self._readers.followed.update(events)

    def _is_look(self, node: ast.Attribute | ast.Name) -> bool:
        """Return whether a gradient of a parameter is read, or a function passed on that reads some."""
        if isinstance(node, ast.Name):
            return self._hands_over_a_reader(node)
        return not self._program.qualified(node) and not self._is_no_parameter(node)

    def _hands_over_a_reader(self, name: ast.Name) -> bool:
        """Return whether a name is a function that looks at gradients, and is passed to a function that may call it."""
        place = self._flow.place(name)
        if place is None or self._program.receiving_call(name) is None:
            return False
        values = self._flow.values_at(place)
        inside = [inner for value in values if _is_function(value) for inner in ast.walk(value)]
        reads = any(map(self._readers.looks_at_gradients, inside))
        return reads or (name.id in self._readers.readers and not values)

    def _call(self, call: ast.Call, worlds: Worlds, statement: ast.stmt, frame: Frame) -> Worlds:
        if dotted(call.func) in _ENDS:
            return _NOWHERE
        callee = self._flow.called(call)
        trained = self._train(call, callee, worlds, frame)
        if trained is not None:
            return trained
        if callee is not None and callee not in self._running and frame.depth < _DEPTH:
            return self._inline(call, callee, worlds, statement, frame)
        of_masters = call in self._masters and self._program.parent(call) not in self._clips
        if of_masters or self._readers.may_look(call):
            self._read(call, worlds, statement, frame)
        return worlds

    def _train(self, call: ast.Call, callee: Function | None, worlds: Worlds, frame: Frame) -> Worlds | None:
        """Carry out a call that changes gradients; return None for any other."""
        name = called_name(call)
        if name == "step" and self._is_of_optimizer(receiver(call), frame):
            return self._step(call, worlds)
        if name == "zero_grad" and self._is_of_optimizer(receiver(call), frame):
            return _in_state(worlds, "clear")
        if name == "zero_grad":  # of the model: ampx notices that true gradients went, and scaled ones may stay scaled
            return _changed(worlds, {"true": "clear", "never scaled": "clear"})
        if name == "backward" and callee is None and self._is_plain_backward(call, frame):
            return _changed(worlds, {"clear": "never scaled"})
        return self._clip(call, worlds, frame) if call in self._clips else None

    def _is_of_optimizer(self, holder: ast.expr | None, frame: Frame) -> bool:
        return holder is not None and self._readers.known_as(holder, dict(frame.names)) == self._optimizer

    def _is_plain_backward(self, call: ast.Call, frame: Frame) -> bool:
        """Return whether a backward outside of any block is always reached."""
        return receiver(call) is not None and not self._muted and not self._is_branched(call, frame)

    def _step(self, call: ast.Call, worlds: Worlds) -> Worlds:
        if call.args or call.keywords or self._muted:  # a closure
            self._findings.wrong.append(call)
        self._findings.steps = True
        if any(world.state == "never scaled" and not world.facts for world in worlds):
            self._check_scaled(call)
        return _in_state(worlds, "clear")

    def _clip(self, call: ast.Call, worlds: Worlds, frame: Frame) -> Worlds:
        """Clip master parameters, by what unscales first."""
        master = call.args[0]
        assert isinstance(master, ast.Call)
        if not self._is_of_optimizer(master.args[0], frame):
            return worlds
        if any(world.state in ("clear", "never scaled") for world in worlds):
            self._findings.wrong.append(call)
        return _in_state(worlds, "true")

    def _is_branched(self, call: ast.Call, frame: Frame) -> bool:
        """Return whether a call is not always reached."""
        return frame.branched or self._program.is_branched(call)

    def _check_scaled(self, step: ast.Call) -> None:
        """Refuse a step on gradients of a plain backward, once the optimizer is wrapped."""
        program = self._program
        for call in self._readers.initialized:
            if program.function(call) is program.function(step) and program.order(step) < program.order(call):
                return
        code = program.code(step)
        raise NeedsHumanError(
            step,
            f"`{code}` also steps on gradients of a loss that did not go through `amp.scale_loss`",
            "ampx steps on scaled gradients only: scale that loss, too, and migrate again.",
        )

    def _inline(self, call: ast.Call, callee: Function, worlds: Worlds, statement: ast.stmt, frame: Frame) -> Worlds:
        """Go through a function that is called."""
        inner = self._readers.names_in(call, callee, dict(frame.names))
        own = tuple((parameter, place) for parameter, place in inner.items() if place == self._optimizer)
        after: set[World] = set()
        for world in worlds:
            state: State = "scaled before" if world.state == "scaled" else world.state
            branched = self._is_branched(call, frame)
            key = callee, own, state, self._muted, branched
            if key not in self._seen:
                exits = Exits()
                self._running.append(callee)
                self._bubbling.append([])
                ends = self._block(callee.body, frozenset({World(state)}), Frame(own, frame.depth + 1, branched), exits)
                self._running.pop()
                self._seen[key] = ends | exits.returns, self._bubbling.pop()
            ends, reads = self._seen[key]
            if reads:
                self._read(reads[0], frozenset({world}), statement, frame)
            for end in ends:
                after.add(World(world.state if end.state == "scaled before" else end.state, world.facts))
        return frozenset(after)

    def _read(self, node: ast.AST, worlds: Worlds, statement: ast.stmt, frame: Frame) -> None:
        """Note that gradients are looked at."""
        states = set() if self._muted else {world.state for world in worlds}
        if "scaled before" in states:
            self._bubbling[-1].append(node)
        if "scaled" in states:
            anchor = self._anchor(statement)
            self._findings.exposed.setdefault(anchor, node)
            self._findings.names[anchor] = self._named(node, anchor, frame)

    def _anchor(self, statement: ast.stmt) -> ast.stmt:
        """Return the statement before which gradients are made true: the outermost loop that only looks at them."""
        anchor = statement
        for outer in self._program.around(statement):
            if isinstance(outer, (*FUNCTIONS, ast.Module)) or outer in self._readers.regions:
                break
            if isinstance(outer, (ast.For, ast.AsyncFor, ast.While)):
                if self._readers.leads_to_a_block(outer):
                    break
                anchor = outer
        while self._is_elif(anchor):
            anchor = self._program.statement(self._program.parent(anchor))
        return anchor

    def _is_elif(self, statement: ast.stmt) -> bool:
        parent = self._program.parent(statement)
        is_other = isinstance(parent, ast.If) and parent.orelse == [statement]
        return is_other and self._program.code(statement).startswith("elif")

    def _named(self, node: ast.AST, anchor: ast.stmt, frame: Frame) -> Place:
        """Return what the optimizer is called at a statement, as a place."""
        for parameter, place in frame.names:
            if place == self._optimizer:
                return parameter
        owner, text = self._optimizer
        root = text.partition(".")[0].partition("[")[0]
        cls = self._program.enclosing_class(anchor)
        if root == "self" and cls is not None and self._flow.family(cls) is owner:
            return self._optimizer
        scope = self._program.scope(anchor).find(root)
        if scope is not None and owner in (scope, None):
            return self._optimizer
        raise NeedsHumanError(node, f"`{text}` has no name where its gradients are read", _ADVICE)

    def _is_no_parameter(self, gradient: ast.Attribute) -> bool:
        """Return whether a gradient is of a tensor that the script made, such as an input, and trains nowhere."""
        place = self._flow.place(gradient.value)
        bindings = self._flow.bindings_at(place)
        if not bindings or not all(self._is_new(binding.value) for binding in bindings):
            return False
        for use in self._flow.uses_at(place):
            for outer in self._program.around(use):
                if isinstance(outer, ast.Call) and any("optim" in name for name in self._program.qualified(outer.func)):
                    return False
                if isinstance(outer, ast.stmt):
                    break
        return True

    def _is_new(self, value: ast.expr | None) -> bool:
        """Return whether an expression makes a tensor of its own."""
        if isinstance(value, ast.BinOp):
            return True
        if isinstance(value, ast.Attribute):
            return value.attr == "data"
        if not isinstance(value, ast.Call):
            return False
        if any(_NEW_TENSORS.fullmatch(name) for name in self._program.qualified(value.func)):
            return True
        function = value.func
        if isinstance(function, ast.Attribute) and function.attr in _SAME:
            return self._is_new(function.value)
        return isinstance(function, ast.Attribute) and function.attr in _COPIES

    # -- tests -----------------------------------------------------------------------------------------------

    def _assume(self, worlds: Worlds, test: ast.expr, holds: bool) -> Worlds:
        """Return the worlds in which a test has this outcome."""
        facts = frozenset(fact for fact in self._facts(test, holds) if fact[0] in self._tests)
        return frozenset(
            World(world.state, world.facts | facts)
            for world in worlds
            if not any((text, not truth) in world.facts for text, truth in facts)
        )

    def _facts(self, test: ast.expr, holds: bool) -> Iterator[Fact]:
        """Yield what is known when a test holds, or does not, of tests whose outcome stays."""
        for part, text, outcome in decided(test, holds):
            if isinstance(part, (ast.Name, ast.Attribute, ast.Compare)) and self._stays(part):
                yield text, outcome

    def _stays(self, test: ast.expr) -> bool:
        """Return whether a test has one outcome while a function runs: of names that no loop changes."""
        for node in ast.walk(test):
            if isinstance(node, (ast.Call, ast.Subscript, ast.Await, ast.Yield)):
                return False
            place = self._flow.place(node) if isinstance(node, (ast.Name, ast.Attribute)) else None
            if any(self._program.loops(binding.node) for binding in self._flow.bindings_at(place)):
                return False
        return True


def _in_state(worlds: Worlds, state: State) -> Worlds:
    return frozenset(World(state, world.facts) for world in worlds)


def _changed(worlds: Worlds, states: Mapping[State, State]) -> Worlds:
    """Return the worlds with some states in place of others."""
    return frozenset(World(states.get(world.state, world.state), world.facts) for world in worlds)


def _yields(node: ast.AST) -> bool:
    return any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node))


def _is_function(value: ast.expr) -> bool:
    """Return whether a value is a function that is made in place."""
    return isinstance(value, ast.Lambda) or called_name(value) in ("partial", "attrgetter")


def _reads_gradient(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Load)


def _events(node: ast.AST) -> Iterator[Event]:
    """Yield the calls, the names and the looks at gradients in a statement, each after what it contains."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Lambda):  # who gets it may call it at once
            yield from (event for event in _events(child.body) if not isinstance(event, ast.Call))
        elif not isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            yield from _events(child)
    if isinstance(node, (ast.Call, ast.Name)) or _reads_gradient(node):
        yield node
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute) and node.target.attr == "grad":
        yield node.target


def _written(fact: Fact) -> str:
    test, holds = fact
    if holds:
        return test
    return f"{test.removesuffix(' is None')} is not None" if test.endswith(" is None") else f"not ({test})"
