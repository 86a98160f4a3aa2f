"""Somebody who has nothing but a Python, and installs ampx from an index in a folder."""

import base64
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path


def packed(name, folder, *, alone=False):
    """Make a wheel of an installed distribution where there is none, and unless `alone` of those that it needs."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:  # for another system or Python
        return
    *_, tag = re.findall(r"^Tag: (.+)$", distribution.read_text("WHEEL"), flags=re.M)
    target = folder / f"{re.sub(r'[-_.]+', '_', distribution.name)}-{distribution.version}-{tag}.whl"
    if target.exists():
        return
    own = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")  # written by who installs it
    files = [
        path for path in distribution.files if not {"..", "__pycache__"} & set(path.parts) and path.suffix != ".pyc"
    ]
    contents = {str(path): path.locate().read_bytes() for path in files if path.name not in own}
    write_wheel(target, next(path.parent for path in files if path.name == "WHEEL"), contents)
    for requirement in () if alone else distribution.requires or ():
        if "extra ==" not in requirement:
            packed(re.match(r"[\w.-]+", requirement)[0], folder)


def write_wheel(target, info, contents):
    """Write a wheel of files, with the list of them that it must have."""
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(target, "w") as wheel:
        for name, content in contents.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            rows.writerow([name, f"sha256={digest}", len(content)])
            wheel.writestr(name, content)
        rows.writerow([f"{info}/RECORD", "", ""])
        wheel.writestr(f"{info}/RECORD", record.getvalue())


class Stranger:
    """Somebody with an empty virtual environment, an index in a folder, and no network."""

    def __init__(self, folder, index, *, has_framework=False):
        """Make the environment; with `has_framework` all is in it that is in this one, but ampx."""
        self.index = index
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin, self.home = folder / "bin", folder
        if has_framework:
            (installed,) = folder.glob("lib/python*/site-packages")
            for path in Path(sysconfig.get_path("purelib")).iterdir():
                if not path.name.startswith(("ampx", "_virtualenv")):
                    (installed / path.name).symlink_to(path)

    def pip(self, *arguments):
        return self._printed("pip", *arguments)

    def install(self, *arguments):
        self.pip("install", *arguments)

    def ampx(self, *arguments, code=0):
        return self._printed("ampx", *arguments, code=code)

    def run(self, program, *arguments):
        """Run a program of the environment, with pip as it is in this one, and return how it ended."""
        command = [program, *arguments]
        if program == "pip":
            command[:1] = [sys.executable, "-m", "pip", "--isolated", "--python", self.bin / "python"]
        if (program, *arguments[:1]) == ("pip", "install"):
            command += ["--quiet", "--no-compile", "--no-index", "--find-links", self.index]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP"))}
        environment.update(COLUMNS="200", NO_COLOR="1", PATH=f"{self.bin}{os.pathsep}{os.environ['PATH']}")
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}  # one after the other, as in a terminal
        return subprocess.run([*map(str, command)], cwd=self.home, env=environment, text=True, check=False, **streams)

    def _printed(self, *command, code=0):
        done = self.run(*command)
        assert done.returncode == code, done.stdout
        return done.stdout
