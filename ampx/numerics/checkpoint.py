"""Every run of a script starts from one checkpoint: the script resumes from it by itself, and may write it anew."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ampx.errors import InvalidOptionError

from .trial import Outcome, Trial, run_trial


@contextmanager
def started_from(
    checkpoint: Path | None, run: Callable[[Trial], Outcome] = run_trial
) -> Iterator[Callable[[Trial], Outcome]]:
    """Return what runs a trial and puts a file or folder back as it was, if there is one to be kept.

    Raises:
        InvalidOptionError: There is no such file or folder, or what runs is in that folder.
    """
    if checkpoint is None:
        yield run
        return
    checkpoint = checkpoint.absolute()
    if not checkpoint.exists() or checkpoint in (Path.cwd(), *Path.cwd().parents):
        raise InvalidOptionError(
            f"--from {str(checkpoint)!r} is no checkpoint; accepted: a file or folder from which the script resumes by "
            f"itself, or by an option of its own, and which holds nothing else. Name it."
        )
    with tempfile.TemporaryDirectory(prefix="ampx-checkpoint-") as folder:
        kept = Path(folder, "kept")
        _copy(checkpoint, kept)

        def run_from(trial: Trial) -> Outcome:
            try:
                return run(trial)
            finally:
                _put_back(kept, checkpoint)

        yield run_from


def _put_back(kept: Path, target: Path) -> None:
    """Put a file or folder back where it was written anew; whenever the process ends, there is a complete one."""
    if _written(target) == _written(kept):
        return
    fresh = target.with_name(f"{target.name}.ampx")
    _remove(fresh)
    _copy(kept, fresh)
    if target.is_dir():
        _remove(target)
    os.replace(fresh, target)


def _written(path: Path) -> dict[str, tuple[int, int]]:
    """Return of each file when it was written, and its size."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): (file.stat().st_mtime_ns, file.stat().st_size) for file in files}


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)


def _remove(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
