"""What `ampx demo` does between reading its options and printing its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ampx.errors import AmbiguousFrameworkError, FrameworkNotInstalledError, InvalidOptionError
from ampx.plugins import default_registry

from .demo import Run, casts_nothing, choose_dtypes, load_digits, plan_runs, report, train_all, write as write
from .frameworks import is_installed
from .probe import probe


def find_framework(name: str | None) -> str:
    """Return the framework to use: the one named, or the only one installed whose backend has a demo.

    Raises:
        UnknownFrameworkError: No plugin registers the one named.
        FrameworkNotInstalledError: None is installed.
        AmbiguousFrameworkError: More than one is.
    """
    registry = default_registry()
    if name is not None:
        return registry.registration(name).name
    registered = registry.names()
    installed = [one for one in registered if is_installed(registry.registration(one).roots[0])]
    if len(installed) > 1:  # a backend need not have a demo; only itself can tell
        installed = [one for one in installed if probe("has_demo", one).get("demo")] or installed
    if len(installed) == 1:
        return installed[0]
    if not installed:
        raise FrameworkNotInstalledError(
            f"no framework was named, and none with a backend is installed; accepted: {', '.join(registered)}. "
            f"Install one, such as with `pip install 'ampx[torch]'`."
        )
    raise AmbiguousFrameworkError(
        f"no framework was named, and {', '.join(installed)} are installed; accepted: one of them. "
        f"Say which: ampx demo --framework {installed[0]}."
    )


def refuse_both(framework: str | None) -> None:
    """Check that `--all` did not come with a framework.

    Raises:
        InvalidOptionError: It did.
    """
    if framework is not None:
        raise InvalidOptionError(
            f"--all and --framework {framework} were both given; accepted: one of them. Leave one out."
        )


def make_folder(folder: Path) -> None:
    """Make the folder for the results, before anything is computed for it.

    Raises:
        InvalidOptionError: That is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidOptionError(
            f"--out {str(folder)!r} cannot be made: {error.strerror}; accepted: a folder that you may write to. "
            f"Pass another."
        ) from error


def parse_seeds(text: str) -> list[int]:
    """Read `--seeds`.

    Raises:
        InvalidOptionError: It is no list of whole numbers.
    """
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

    Returns:
        The report, and the warnings about precision.

    Raises:
        AmpxError: The framework cannot be used, or an option cannot be honoured.

    Sync: as the backend's trainer.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        opening = progress.add_task(f"importing {framework} …", total=None)
        backend = default_registry().load(framework)
        trainer = backend.demo()
        chosen = choose_dtypes(backend, dtypes)
        data = load_digits()
        runs = plan_runs(chosen, seeds, epochs, batch_size, len(data.train_images), scaled=casts_nothing(backend))
        progress.remove_task(opening)

        def start(run: Run) -> Callable[[], None]:
            if not console.is_terminal:
                console.print(f"training in {run.label}, seed {run.seed} …")
            steps = run.epochs * (len(data.train_images) // run.batch_size)
            task = progress.add_task(f"{run.label}, seed {run.seed}", total=steps)
            return lambda: progress.advance(task)

        results, notes = [], []
        for result, warned in train_all(trainer, data, runs, start):
            results.append(result)
            notes += warned
    return report(framework, runs, results), notes
