"""Python in a process of its own: what a script does to itself stays there."""

import json
import os
import subprocess
import sys

QUIET = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def run_python(*command, timeout=240, check=False, cwd=None, **environment):
    """Run Python with these arguments; with `check`, expect it to end well."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=cwd,
        env={**os.environ, **QUIET, **environment},
    )
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def last_json(*command, **options):
    """Run Python, and read the JSON of the last line that it prints."""
    return json.loads(run_python(*command, check=True, **options).stdout.splitlines()[-1])


def native(head):
    """Return what runs a script of a plain framework behind some lines, and returns exit code, output and errors."""

    def run(script, *, timeout=120):
        done = run_python("-c", head + script, timeout=timeout)
        return done.returncode, done.stdout, done.stderr

    return run
