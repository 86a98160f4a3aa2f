"""What finds a planted fault: `ampx.diagnose` and what each framework has of its own, side by side, and their cost.

The faults and the clean models are those of `tests/kit/planted_<framework>.py`, as in the tests. Every tool sees
the same batch, from the same weights, in the same dtype and with the same loss scale, forward and backward. Run it as
parts of `run.py`:
`python benchmarks/run.py --framework torch --only debuggers_torch`; without arguments this file prints the rules.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _paired import Ratio, paired

import ampx
from ampx.backend import offer
from ampx.numerics.probe import Probe, Watching
from ampx.plugins import default_registry

RULES = """\
A tool names the place if its exception or message holds the name of the planted module, or file and line of the
planted code. A name that is a number counts only where the tool says that it is a module. Of a tool that prints all
modules that ran, the last one counts: there it stops. A fault that came with the batch or the weights has its place
where it enters. A line counts only if it belongs to one module of the model. A tool names the kind if its own words,
without the source that a traceback quotes and without the tool's own name, hold a word for it: "inf" without NaN is
enough for an overflow, the name of the operation for a sum, a logarithm and a division, an input or weight that is
called not finite for data and weights. Of ampx only the fields of the diagnosis count, not its text. A tool accuses a
clean model if it stops or complains."""

WORDS = {
    "overflow": r"(?i)overflow|\binf\b|infinity",
    "sum": r"(?i)\bsum|reducesum|cumsum|reduce_sum",
    "epsilon": r"epsilon|underflow|flush",
    "mask": r"mask|constant",
    "logarithm": r"\blog(?!g)|Log(?!g)|[sS]qrt",
    "digits": r"(?i)cancel|significand|digits",
    "division": r"\bdiv|Div|divide|RealDiv",
    "data": r"\b(?:nan|inf)\s+input|input\S* (?:is|are) not finite",
    "weights": r"\b(?:nan|inf)\s+weight|weight\S* (?:is|are) not finite",
    "learning rate": r"learning rate",
}


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        name: Its name in the tests.
        make: Makes the model and the step, a function of the model that returns the loss.
        kind: What is planted.
        modules: The modules it is planted in: naming any of them will do.
        direction: In which pass; None where the tests leave it open.
        code: Returns the functions of the model that hold the planted operation, none where it is the framework's.
        options: What `ampx.init` and `ampx.diagnose` are told beyond the dtype.
    """

    name: str
    make: Callable[[], tuple[Any, Callable[[Any], Any]]]
    kind: str
    modules: tuple[str, ...]
    direction: str | None
    code: Callable[[Any], Sequence[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Said:
    """What a tool said of a batch: in its own words, in its traceback, and the module that it names as such."""

    words: str
    trace: str = ""
    module: str | None = None

    @property
    def anything(self) -> bool:
        return bool(self.words or self.trace)


@dataclass(frozen=True)
class Tool:
    """A tool other than ampx.

    Attributes:
        name: In the table.
        look: Computes a batch under the tool: takes model, step, dtype and loss scale, and the options of the fault.
        region: Makes the region in which a step of a model costs what it costs.
        missing: Why it cannot be tried here; empty where it can.
    """

    name: str
    look: Callable[..., Said] | None = None
    region: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None
    missing: str = ""


def planted(framework: str) -> types.ModuleType:
    """Return the module of `tests/kit` that holds the faults of a framework and the clean models."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "kit"))
    return importlib.import_module(f"planted_{framework}")


def written(*functions: Any) -> Iterator[Any]:
    """Yield the functions that have code of their own; of a class its methods, of a bound method its class's."""
    for function in functions:
        owner = function if isinstance(function, type) else getattr(function, "__self__", None)
        if hasattr(function, "__code__"):
            yield function
        elif isinstance(owner, type):
            yield from (each.__func__ for each in vars(owner).values() if isinstance(each, staticmethod))


def heard(compute: Callable[[], object], *, low_level: bool = False) -> Said:
    """Run something; return what it printed, warned and raised.

    Args:
        compute: What to run.
        low_level: Hear what is printed below Python, too.
    """
    out = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        below = stack.enter_context(_printed_below()) if low_level else []
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(out))
        failure = None
        try:
            compute()
        except Exception as error:
            failure = error
    said = [str(each.message) for each in caught] + [out.getvalue(), *below]
    trace = ""
    if failure is not None:
        said.append(str(failure))
        trace = "".join(traceback.format_exception(failure))
    return Said("\n".join(filter(None, map(str.strip, said))), trace)


@contextlib.contextmanager
def _printed_below() -> Iterator[list[str]]:
    lines: list[str] = []
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            for number, copy in enumerate(kept, 1):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            lines.append(file.read().decode(errors="replace"))


_QUOTED = re.compile(r'^ *File "[^"]*", line \d+.*\n(?: {4}.*\n?)?(?: *[~^]+ *\n?)?', re.MULTILINE)


def names_place(said: Said, modules: Sequence[str], code: Sequence[Any]) -> bool:
    """Return whether a tool named the planted place, by `RULES`."""
    if said.module in modules:
        return True
    text = (said.words + said.trace).replace("most recent call last", "")
    words = [module for module in modules if re.search("[a-z]", module)]
    if any(re.search(rf"(?<![\w.]){re.escape(module)}(?![\w.])", text) for module in words):
        return True
    for function in code:
        name = os.path.basename(function.__code__.co_filename)
        lines = {line for _, _, line in function.__code__.co_lines() if line}
        if any(re.search(rf"{re.escape(name)}\"?(?:, line |:){line}\b", text) for line in lines):
            return True
    return False


def names_kind(said: Said, kind: str) -> bool:
    """Return whether a tool named the planted kind, by `RULES`."""
    words = _QUOTED.sub("", said.words)
    for own in ("DebugUnderflowOverflow", "inf/nan", "nan/inf", "infinity or nan", "nan or inf"):
        words = re.sub(own, "", words, flags=re.IGNORECASE)
    if kind == "overflow" and re.search(r"\bnan\b", words, re.IGNORECASE) and "num_nan=0" not in words:
        return False
    return re.search(WORDS[kind], words) is not None


Timed = Callable[[], tuple[Any, Callable[[Any], Any], Callable[[], object]]]


def compared(
    framework: str,
    faults: Sequence[Fault],
    clean: Sequence[Callable[[], tuple[Any, Callable[[Any], Any]]]],
    tools: Sequence[Tool],
    timed: Timed,
    pairs: int,
    advance: Callable[[], object],
) -> list[dict[str, object]]:
    """Try all tools on all faults and clean models, and time a step under each.

    Args:
        framework: Name of the framework.
        faults: The planted faults.
        clean: Makes the models, and steps, in which there is nothing to find.
        tools: The tools besides ampx.
        timed: Makes a model, its step for `diagnose`, and a function that trains it by one step.
        pairs: How many pairs are timed.
        advance: Called after each fault and each timing.
    """
    counts, rows = named(framework, faults, clean, tools, advance)
    return [*costs(framework, counts, tools, timed, pairs, advance), *rows]


def named(
    framework: str,
    faults: Sequence[Fault],
    clean: Sequence[Callable[[], tuple[Any, Callable[[Any], Any]]]],
    tools: Sequence[Tool],
    advance: Callable[[], object],
    device: str = "cpu",
) -> tuple[dict[str, dict[str, int]], list[dict[str, object]]]:
    """Return what each tool names, in numbers and fault by fault."""
    names = ["ampx.diagnose", *(tool.name for tool in tools if not tool.missing)]
    total = {"faults": len(faults), "clean": len(clean)}
    counts = {name: {"places": 0, "kinds": 0, "noticed": 0, "accused": 0, **total} for name in names}
    rows: list[dict[str, object]] = []
    for fault in faults:
        model, step = fault.make()
        diagnosis = ampx.diagnose(step, model, dtype="float16", framework=framework, device=device, **fault.options)
        seen = diagnosis.first_nonfinite
        place = seen is not None and seen.module in fault.modules and fault.direction in (None, seen.direction)
        results = {"ampx.diagnose": (diagnosis.kind != "healthy", place, diagnosis.kind == fault.kind)}
        for tool in tools:
            if tool.look is not None:
                model, step = fault.make()
                said = tool.look(model, step, "float16", diagnosis.scale, **fault.options)
                place = said.anything and names_place(said, fault.modules, fault.code(model))
                results[tool.name] = (said.anything, place, said.anything and names_kind(said, fault.kind))
        for name, (noticed, place, kind) in results.items():
            for key, value in (("noticed", noticed), ("places", place), ("kinds", kind)):
                counts[name][key] += bool(value)
        where = f"{fault.kind}, {fault.direction or 'forward'}"
        rows.append({"fault": fault.name, "planted": where} | {name: _cell(*results[name]) for name in results})
        advance()
    for make in clean:
        model, step = make()
        diagnosis = ampx.diagnose(step, model, dtype="float16", framework=framework, device=device)
        counts["ampx.diagnose"]["accused"] += diagnosis.kind != "healthy"
        for tool in tools:
            if tool.look is not None:
                model, step = make()
                counts[tool.name]["accused"] += tool.look(model, step, "float16", diagnosis.scale).anything
    return counts, rows


def costs(
    framework: str,
    counts: Mapping[str, Mapping[str, int]],
    tools: Sequence[Tool],
    timed: Timed,
    pairs: int,
    advance: Callable[[], object],
) -> list[dict[str, object]]:
    """Time a step under each tool, and return a row of each with its counts."""
    summary: list[dict[str, object]] = []
    for name, numbers in counts.items():
        chosen = next((tool for tool in tools if tool.name == name), None)
        ratio = _diagnosed(framework, timed, pairs) if chosen is None else _under(chosen, timed, pairs)
        summary.append({"tool": name, **numbers, "once": chosen is None, **ratio.to_json()})
        advance()
    for operations in (False, True):
        name = f"watch, {'modules and operations' if operations else 'modules'}"
        summary.append({"tool": name, "once": False, **_watched(framework, timed, operations, pairs).to_json()})
        advance()
    return [*summary, *({"tool": tool.name, "missing": tool.missing} for tool in tools if tool.missing)]


def _cell(noticed: bool, place: bool, kind: bool) -> str:
    return " and ".join(["place"] * place + ["kind"] * kind) or ("that there is one" if noticed else "nothing")


def _diagnosed(framework: str, timed: Timed, pairs: int) -> Ratio:
    model, step, _ = timed()
    train = timed()[2]
    return paired(
        lambda: ampx.diagnose(step, model, dtype="bfloat16", framework=framework, device="cpu"),
        train,
        pairs=max(pairs // 4, 4),
        warmup=1,
    )


def _under(tool: Tool, timed: Timed, pairs: int) -> Ratio:
    assert tool.region is not None
    region = tool.region
    model, _, train = timed()
    plain = timed()[2]

    def checked() -> None:
        with region(model):
            train()

    return paired(checked, plain, pairs=pairs, warmup=2)


def _watched(framework: str, timed: Timed, operations: bool, pairs: int) -> Ratio:
    backend = default_registry().load(framework)
    model, _, train = timed()
    plain = timed()[2]
    watching = Watching(dtype="bfloat16", operations=operations)

    def watched() -> None:
        with offer(backend, Probe).watch(model, watching) as watch:
            train()
        watch.readings()

    return paired(watched, plain, pairs=pairs, warmup=2)


if __name__ == "__main__":
    print(__doc__, RULES, "MXNet has no such tool of its own.", sep="\n")
