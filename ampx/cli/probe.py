"""Look at a framework or at the plugins in a process of their own.

An import can raise, crash, hang or print; none of that may reach the command that asked.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TIME_LIMIT = 120.0  # seconds; a first import may have to compile bytecode for thousands of files

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from ampx.cli import probe_child
probe_child.run(sys.argv[2], json.loads(sys.argv[3]))
"""


def probe(question: str, *arguments: Any, time_limit: float = TIME_LIMIT, what: str = "the import") -> dict[str, Any]:
    """Ask a child process a function of `probe_child`; whatever happens is an answer, `{"error": why}` at worst.

    The arguments are plain JSON types; `what` says in messages what the child does.
    """
    with tempfile.TemporaryDirectory(prefix="ampx-") as folder:
        answer, noise = Path(folder, "answer.json"), Path(folder, "stderr.txt")
        command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), question, json.dumps([str(answer), *arguments])]
        with noise.open("wb") as stderr:
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    timeout=time_limit,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return {"error": f"no answer within {time_limit:g} s; the process was ended"}
        if answer.exists():
            result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return result
        last = noise.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    return {"error": f"{what} {_ending(done.returncode)}" + (f": {last}" if last else "")}


def _ending(code: int) -> str:
    if code < 0:
        try:
            return f"crashed with {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"ended the interpreter with exit code {code}"
