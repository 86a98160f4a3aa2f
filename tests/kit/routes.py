"""The route of a newcomer: files of docs/evidence/route hold what is typed, what was printed, and exit codes.

    $ a command
    what it prints, standard output and standard error
    [exit 1]

`python tests/kit/routes.py FOLDER FRAMEWORK...` goes them in empty environments and writes them anew; FOLDER has, in a
folder named after each framework, the wheels that pip may take.
"""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from strangers import Stranger

ROUTES = Path(__file__).parents[2] / "docs" / "evidence" / "route"


@dataclass(frozen=True)
class Step:
    """A command of a route, what it printed, and its exit code."""

    command: str
    printed: str = ""
    code: int = 0

    def __str__(self):
        return f"$ {self.command}\n{self.printed}" + (f"[exit {self.code}]\n" if self.code else "")


def read(framework):
    """Return the steps of a framework's route."""
    text = (ROUTES / f"{framework}.txt").read_text()
    steps = re.findall(r"^\$ (.+)\n((?:(?!\$ |\[exit \d).*\n)*)(?:\[exit (\d+)\]\n)?", text, flags=re.M)
    steps = [Step(command, printed, int(code or 0)) for command, printed, code in steps]
    assert "".join(map(str, steps)) == text
    return steps


def go(framework, stranger):
    """Take a framework's steps; yield each as the file has it, and as it is now."""
    script = ROUTES / f"digits_{framework}.py"
    (stranger.home / script.name).write_text(script.read_text())
    for step in read(framework):
        done = stranger.run(*shlex.split(step.command))
        yield step, Step(step.command, _plain(done.stdout, stranger.home), done.returncode)


# Lines that TensorFlow logs at its start, with times and numbers of processes.
LOGGED = r"[IWEF]\d{4} |WARNING: All log messages"


def _plain(text, home):
    """Return an output as the file keeps it: without the places of this machine."""
    lines = text.replace(f"{home}/", "").replace(str(home), ".").splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines if not re.match(LOGGED, line))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for framework in sys.argv[2:]:
        stranger = Stranger(folder / f"home-{framework}", folder / framework)
        lines = []
        for _, step in go(framework, stranger):
            print(step, flush=True)
            lines.append(str(step))
        (ROUTES / f"{framework}.txt").write_text("".join(lines))
