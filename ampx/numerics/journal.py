"""What an interrupted search has measured so far, so that the next one goes on from there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

SCHEMA: Final = "ampx.tune.journal/2"
_BLOCK: Final = 2**20  # bytes of a file that are read at once: a checkpoint may be larger than memory


class Journal:
    """A file with a line for each verdict of a search; without a path nothing is kept.

    It is of no use to a search that asks another question, of another script say: `begin` leaves it out then.
    """

    def __init__(self, path: Path | None, start: str = "") -> None:
        """Begin with nothing known.

        Args:
            path: The file.
            start: A digest of what every run starts from.
        """
        self._path, self._start = path, start
        self._head = ""
        self._goes_on = False

    def begin(self, question: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the verdicts on this question by what was kept in float32; begin anew where it is another one.

        Args:
            question: All that the verdicts depend on, as plain JSON types.
        """
        self._head = json.dumps({"schema": SCHEMA, "question": question, "start": self._start}, sort_keys=True)
        lines = [] if self._path is None or not self._path.is_file() else self._path.read_text("utf-8").splitlines()
        self._goes_on = lines[:1] == [self._head]
        verdicts: dict[str, dict[str, Any]] = {}
        for line in lines[1:] if self._goes_on else ():
            with suppress(ValueError):  # the last line may be half written
                verdicts.update(json.loads(line))
        return verdicts

    def note(self, kept: str, verdict: Mapping[str, Any]) -> None:
        """Add a verdict, of plain JSON types."""
        self._write([*([] if self._goes_on else [self._head]), json.dumps({kept: verdict})])
        self._goes_on = True

    def end(self) -> None:
        """Remove the file: the search has its answer."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _write(self, lines: Iterable[str]) -> None:
        """Write lines to the disk; a search goes on where that cannot be done."""
        if self._path is None:
            return
        with suppress(OSError), self._path.open("a" if self._goes_on else "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())


def digest_of(path: Path | None) -> str:
    """Return a digest of a file's bytes, or of all files in a folder; empty where there is none."""
    if path is None or not path.exists():
        return ""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        digest.update(f"\0{file.relative_to(path)}\0".encode())
        if file.is_file():
            with file.open("rb") as stream:
                while block := stream.read(_BLOCK):
                    digest.update(block)
    return digest.hexdigest()
