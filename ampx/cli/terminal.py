"""How the commands talk: in colour or not, with or without progress, in lines for a log."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import typer

if TYPE_CHECKING:
    from rich.console import Console

_LABEL: Final = re.compile(r" *[a-z -]{1,17}: +")  # "  last finite:      ", "note: "
_CODE: Final = re.compile(r" {4,8}\S")
COLORS: Final = {"auto": None, "always": True, "never": False}  # None: as the terminal and NO_COLOR say


class Progress(Protocol):
    """Shows what is done now."""

    def __call__(self, text: str, left: int | None = None, /) -> object:
        """Show a text, and the time left where `left` says how many such calls are to come, this one included."""


@dataclass
class Terminal:
    """What the options of a command say about its output.

    Attributes:
        colored: Whether to colour; None: where the output is a terminal.
        quiet: Whether progress and remarks are left out.
    """

    colored: bool | None = None
    quiet: bool = False

    def console(self, *, stderr: bool = False, width: int | None = None) -> Console:
        """Return a console for tables; progress on the standard error stays off where that is no terminal."""
        from rich.console import Console

        options: dict[str, Any] = {"stderr": stderr, "highlight": False, "width": width}
        if self.colored is None:
            return Console(**options)
        if not self.colored:
            return Console(color_system=None, **options)
        return Console(color_system="standard", no_color=False, force_terminal=None if stderr else True, **options)

    def say(self, text: str) -> None:
        """Print a result in words; on a terminal its lines are broken between words."""
        columns = shutil.get_terminal_size().columns
        typer.echo("\n".join(folded(line, columns) for line in text.split("\n")) if sys.stdout.isatty() else text)

    def remark(self, text: str) -> None:
        """Print what is worth knowing beside the result."""
        if not self.quiet:
            typer.echo(text)

    def error(self, text: str) -> None:
        """Print why a command ends."""
        typer.secho(f"ampx: {text}", fg="red", err=True, color=self.colored)

    @contextmanager
    def progress(self, text: str | None = None) -> Iterator[Progress]:
        """Yield what shows what is done now: a bar with the time left on a terminal, else a line each, for a log.

        Args:
            text: What the bar says first; a log is told nothing of it.
        """
        from rich.progress import BarColumn, Progress as Bars, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        console = self.console(stderr=True)
        shown = console.is_terminal and not self.quiet
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        remaining, began, done = TimeRemainingColumn(), time.monotonic(), 0
        with Bars(
            *columns,
            remaining,
            console=console,
            transient=True,
            disable=not shown,
            speed_estimate_period=float("inf"),  # runs take minutes: all of them count for the time left
        ) as bars:
            task = bars.add_task(text or "Starting …", total=None)

            def show(text: str, left: int | None = None) -> None:
                nonlocal done
                bars.update(task, description=text, completed=done, total=None if left is None else done + left)
                done += left is not None
                if not (shown or self.quiet):
                    typer.echo(f"[{time.monotonic() - began:.0f} s] {text}", err=True)

            yield show


terminal: Final = Terminal()


def folded(line: str, columns: int) -> str:
    """Return a line broken between words, the rest below where its text begins; a line of code stays whole."""
    if len(line) <= columns or _CODE.match(line):
        return line
    label, text = _LABEL.match(line), line.lstrip()
    behind = label.end() if label else len(line) - len(text) + (2 if text != line else 0)
    return textwrap.fill(line, columns, subsequent_indent=" " * behind, break_long_words=False, break_on_hyphens=False)
