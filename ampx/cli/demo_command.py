"""What `ampx demo` does between its options and its tables: for one framework, and with `--all` for every one."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import ampx
from ampx.backend import offer
from ampx.errors import AmbiguousFrameworkError, FrameworkNotInstalledError, InvalidOptionError
from ampx.plugins import default_registry, is_installed

from .demo import (
    SCHEMA,
    Demo,
    Run,
    casts_nothing,
    choose_dtypes,
    equals_float32,
    load_digits,
    plan_runs,
    report,
    train_all,
    write as write,
)
from .frameworks import KNOWN, Framework, find_frameworks
from .probe import probe
from .terminal import terminal


def find_framework(name: str | None) -> str:
    """Return the framework to use: the one named, or the only one installed whose backend has a demo."""
    registry = default_registry()
    if name is not None:
        return registry.registration(name).name
    registered = registry.names()
    installed = [name for name in registered if is_installed(registry.registration(name).roots[0])]
    if len(installed) > 1:  # a backend need not have a demo; only itself can tell
        installed = [name for name in installed if probe("has_demo", name).get("demo")] or installed
    if len(installed) == 1:
        return installed[0]
    if not installed:
        raise FrameworkNotInstalledError(
            f"no framework was named, and none with a backend is installed; accepted: {', '.join(registered)}. "
            f"Install one, such as with `pip install 'ampx-precision[torch]'`."
        )
    raise AmbiguousFrameworkError(
        f"no framework was named, and {', '.join(installed)} are installed; accepted: one of them. "
        f"Say which: ampx demo --framework {installed[0]}."
    )


def refuse_both(framework: str | None) -> None:
    """Check that `--all` did not come with a framework."""
    if framework is not None:
        raise InvalidOptionError(
            f"--all and --framework {framework} were both given; accepted: one of them. Leave one out."
        )


def make_folder(folder: Path) -> None:
    """Make the folder for the results, before anything is computed for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InvalidOptionError(
            f"--out {str(folder)!r} cannot be made or written: {error.strerror}; accepted: a folder that you may write "
            f"to. Pass another."
        ) from error


def parse_seeds(text: str) -> list[int]:
    """Read `--seeds`."""
    try:
        seeds = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise InvalidOptionError(
            f"--seeds {text!r} is no list of seeds; accepted: whole numbers from 0, separated by commas. "
            f"Pass for example --seeds 0,1,2."
        )
    return seeds


def train(
    framework: str, dtypes: Sequence[str], seeds: Sequence[int], epochs: int, batch_size: int
) -> tuple[dict[str, Any], list[str]]:
    """Train every run under a progress bar.

    Sync: as the backend's trainer.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = terminal.console(stderr=True)
    shown = console.is_terminal and not terminal.quiet
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        opening = progress.add_task(f"importing {framework} …", total=None)
        backend = default_registry().load(framework)
        trainer = offer(backend, Demo)
        chosen = choose_dtypes(backend, dtypes)
        data = load_digits()
        runs = plan_runs(chosen, seeds, epochs, batch_size, len(data.train_images), scaled=casts_nothing(backend))
        progress.remove_task(opening)

        def start(run: Run) -> Callable[[], None]:
            if not (shown or terminal.quiet):
                console.print(f"training in {run.label}, seed {run.seed} …")
            steps = run.epochs * (len(data.train_images) // run.batch_size)
            task = progress.add_task(f"{run.label}, seed {run.seed}", total=steps)
            return lambda: progress.advance(task)

        results, notes = [], []
        for result, warned in train_all(trainer, data, runs, start):
            results.append(result)
            notes += warned
    return report(framework, runs, results), notes


COMPARISON_SCHEMA: Final = "ampx.demo-comparison/1"
TIME_LIMIT: Final = 3600.0  # seconds for one framework
_TRACES = ("losses", "scales")


@dataclass(frozen=True)
class Outcome:
    """What became of one framework."""

    framework: str
    # `"ran"`; `"earlier"`: not importable here, and a result of an earlier run was found; `"failed"`; `"absent"`: not
    # installed; `"no backend"`; `"no demo"`: its backend has no trainer.
    state: Literal["ran", "earlier", "failed", "absent", "no backend", "no demo"]
    report: dict[str, Any] | None = None  # as of `demo.report`, where there is one
    detail: str = ""  # why, where from, or how to install
    notes: tuple[str, ...] = ()  # warnings about precision


def train_everywhere(folder: Path, options: Mapping[str, Any], on_start: Callable[[str], object]) -> list[Outcome]:
    """Train with every framework that is installed, one after the other; look up the others in the folder."""
    scan = probe("plugins")
    broken = {**scan.get("broken", {}), **({"(plugins)": scan["error"]} if "error" in scan else {})}
    outcomes = [Outcome(name, "failed", detail=f"its plugin is broken: {error}") for name, error in broken.items()]
    earlier = find_earlier(folder)
    for framework in find_frameworks(scan.get("registered", ())):
        if framework.name in broken:
            continue
        if framework.installed and framework.plugin is not None:
            on_start(framework.name)
            outcomes.append(_train(framework.name, folder, options))
        elif framework.name in earlier:
            path, report = earlier.pop(framework.name)
            outcomes.append(Outcome(framework.name, "earlier", report, _source(path, report, folder, options)))
        elif framework.installed:
            outcomes.append(Outcome(framework.name, "no backend", detail="no plugin registers one"))
        else:
            outcomes.append(Outcome(framework.name, "absent", detail=_how_to_install(framework)))
    _check_any(outcomes, folder)
    return outcomes


def _check_any(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Raise where no framework has anything to show."""
    if not any(outcome.report is not None or outcome.state == "failed" for outcome in outcomes):
        advice = "; ".join(f"{outcome.framework}: {outcome.detail}" for outcome in outcomes)
        raise FrameworkNotInstalledError(
            f"--all found no framework with a backend, and {str(folder)!r} holds no result of an earlier run; "
            f"accepted: at least one of either. Install one ({advice})."
        )


def find_earlier(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Find the latest result of each framework in a folder or one folder below."""
    earlier: dict[str, tuple[Path, dict[str, Any]]] = {}
    paths = [path for pattern in ("results.json", "*/results.json") for path in folder.glob(pattern)]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(report, dict) and report.get("schema") == SCHEMA:
            earlier[report["framework"]] = path, report
    return earlier


def write_comparison(folder: Path, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Write comparison.json and, where there is something to draw, comparison.png; return what the JSON holds."""
    from .plot import draw_all

    comparison = {
        "schema": COMPARISON_SCHEMA,
        "ampx": ampx.__version__,
        "frameworks": [
            {
                "framework": outcome.framework,
                "state": outcome.state,
                "detail": outcome.detail,
                "runs": [_summary(run, outcome.report["runs"]) for run in outcome.report["runs"]]
                if outcome.report
                else [],
            }
            for outcome in outcomes
        ],
    }
    (folder / "comparison.json").write_text(json.dumps(comparison, indent=1) + "\n", encoding="utf-8")
    reports = [outcome.report for outcome in outcomes if outcome.report is not None]
    if reports:
        draw_all(reports, folder / "comparison.png")
    return comparison


def _summary(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kept = {name: value for name, value in run.items() if name not in _TRACES}
    return {**kept, "equals_float32": equals_float32(run, runs)}


def _train(name: str, folder: Path, options: Mapping[str, Any]) -> Outcome:
    answer = probe("demo", name, dict(options), time_limit=TIME_LIMIT, what="the training")
    if "refused" in answer:
        return Outcome(name, "no demo", detail=answer["refused"])
    if "error" in answer:
        return Outcome(name, "failed", detail=answer["error"])
    (folder / name).mkdir(exist_ok=True)
    write(folder / name, answer["report"])
    return Outcome(name, "ran", answer["report"], notes=tuple(f"{name}: {note}" for note in answer["notes"]))


def _source(path: Path, report: Mapping[str, Any], folder: Path, options: Mapping[str, Any]) -> str:
    """Say where an earlier result comes from, and in what it differs from this run's."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    differences = [
        f"{name.replace('_', ' ')} {report[name]} instead of {options[name]}"
        for name in ("epochs", "batch_size")
        if report[name] != options[name]
    ]
    if report["ampx"] != ampx.__version__:
        differences.append(f"ampx {report['ampx']} instead of {ampx.__version__}")
    trained = f"this is the result of {when} in {path.relative_to(folder).as_posix()}"
    return trained + (f", with {' and '.join(differences)}" if differences else "")


def _how_to_install(framework: Framework) -> str:
    """Return the line that installs a framework: an extra of ampx, or what its plugin requires."""
    if framework.name in KNOWN:
        return f"pip install 'ampx-precision[{framework.name}]'"
    return f"pip install '{framework.requires}'" if framework.requires else "ampx has no backend for it"
