"""What was asked of `ampx run`, on its way from the parser to where it is done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampx.running import RunSettings
    from ampx.running.program import Program


@dataclass(frozen=True)
class RunRequest:
    """The options of `ampx run`.

    Attributes:
        program: What to run.
        settings: How.
        framework: The only framework to automate, or None.
        report: Where to write a report, or None.
        unchanged_if_refused: Run the script without ampx where it is refused.
    """

    program: Program
    settings: RunSettings
    framework: str | None = None
    report: Path | None = None
    unchanged_if_refused: bool = False


class StartProgram(BaseException):
    """Carries a request out of the command line's parser, which would catch exceptions that are the script's."""

    def __init__(self, request: RunRequest) -> None:
        """Take the request."""
        self.request = request
