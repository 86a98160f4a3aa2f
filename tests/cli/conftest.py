"""Run the installed command, with chosen modules and plugins put in front of the real ones."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from processes import run_python


class Command:
    """The `ampx` script of this environment.

    Attributes:
        folder: Modules and distributions put here come first on the path of the command.
        start: How Python starts it.
        fresh: Whether that is a new Python.
    """

    start = ("-c", "import sys; from ampx.cli import main; sys.exit(main())")
    fresh = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str, code: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        environment = {"PYTHONPATH": self._path(), "COLUMNS": "200", "NO_COLOR": "1", **environment}
        done = run_python(*self.start, *arguments, cwd=self.folder, fresh=self.fresh, nests=True, **environment)
        assert code is None or done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    def _path(self) -> str:
        return os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))

    def add_module(self, name: str, text: str) -> None:
        """Put a package in front of everything installed."""
        package = self.folder / name
        package.mkdir()
        (package / "__init__.py").write_text(text, encoding="utf-8")

    def add_plugin(self, name: str, module: str) -> None:
        """Put a distribution on the path that declares an entry point of the group `ampx`."""
        info = self.folder / f"{name}_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[ampx]\n{name} = {module}\n", encoding="utf-8")


@pytest.fixture
def ampx_command(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.fixture
def installed_command(ampx_command: Command) -> Command:
    """The script as it is installed, in a new process."""
    ampx_command.start, ampx_command.fresh = (str(Path(sys.executable).with_name("ampx")),), True
    return ampx_command


@pytest.fixture
def migrate():
    """Return a function that tells what `ampx migrate` makes of a text; it checks what must hold for every text."""
    from ampx.migrate.engine import migrate

    def run(before):
        compile(before, "before", "exec")
        report = migrate(Path("script.py"), before.encode())
        after = report.after.decode()
        compile(after, "after", "exec")
        assert (report.status == "changed") == (after != before)
        again = migrate(Path("script.py"), report.after)
        assert again.after == report.after, "a second run changes something"
        return report.status, after, [(finding.line, finding.kind, finding.what) for finding in report.findings]

    return run


@pytest.fixture
def check_documented():
    """Return a function that compares a document with the page of schemas: its keys, and those of the lists in it."""
    page = (Path(__file__).parents[2] / "docs/reference/json.md").read_text(encoding="utf-8")

    def check(document):
        schema = document["schema"]
        section = page.partition(f"Schema `{schema}`:\n\n")[2].partition("\n## ")[0]
        rows = [row.split("|") for row in section.splitlines() if row.startswith("| ")][2:]
        assert {"schema", *re.findall("`([a-z_0-9]+)`", "".join(row[1] for row in rows))} == set(document)
        words = set(re.findall("`([a-z_0-9]+)`", page))
        inner = [entry for value in document.values() if isinstance(value, list) for entry in value]
        assert {key for entry in inner if isinstance(entry, dict) for key in entry} <= words

    return check


@pytest.fixture
def png_size():
    """Return a function that reads width and height of a PNG."""

    def read(path: Path) -> tuple[int, int]:
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert data[12:16] == b"IHDR"
        assert data[-8:-4] == b"IEND"
        return struct.unpack(">II", data[16:24])

    return read
