"""Python in a process of its own: what a script does to itself stays there."""

import functools
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import forks

# What tests set for others, beside what was there at the start; libraries add variables that are for this one.
AT_START = frozenset(os.environ)
SET_BY_TESTS = (*forks.READ_LATER, "DNNL_", "MXNET_", "ONEDNN_")
# Runs of a diagnosis are copies of the process that has the framework, and not of one that imports it again.
QUIET = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "AMPX_FRESH_RUNS": "1"}


class Started:
    """A Python that runs."""

    def __init__(self, command, *, cwd=None, text="", fresh=False, nests=False, read_later=(), **environment):
        """Start Python with these arguments.

        It is a copy of a process that has the framework, unless `fresh` asks for a new Python, or a variable of the
        environment does, because frameworks read it while they are imported: all but those that `read_later` names.
        With `nests`, what it runs with Python by `subprocess.run` is a copy, too: trials, and looks at frameworks.
        """
        self.command = [*map(str, command)]
        self._folder = tempfile.TemporaryDirectory(prefix="ampx-process-")
        Path(self._folder.name, "stdin").write_text(text)
        early = environment if environment.keys() & {*forks.READ_BEFORE} else {}
        server = None if fresh else _server(**early)
        environment = _environment(**environment)
        if server is not None and server.fits(self.command, environment, read_later):
            self._wait = server.start(self.command, cwd, environment, self._folder.name, nests)
        else:
            self._wait = self._start_new(cwd, environment)

    def _start_new(self, cwd, environment):
        with self._stream("stdin", "r") as stdin, self._stream("stdout") as out, self._stream("stderr") as err:
            command = [sys.executable, *self.command]
            process = subprocess.Popen(command, cwd=cwd, env=environment, stdin=stdin, stdout=out, stderr=err)

        def wait(timeout):
            try:
                return process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return None

        return wait

    def _stream(self, name, mode="w"):
        return Path(self._folder.name, name).open(mode)

    def wait(self, timeout=240):
        """Return how it ended, with code None where that took longer than so many seconds."""
        code = self._wait(timeout)
        with self._folder, self._stream("stdout", "r") as out, self._stream("stderr", "r") as err:
            return subprocess.CompletedProcess(self.command, code, out.read(), err.read())


def run_python(*command, timeout=240, check=False, **options):
    """Run Python with these arguments, and options of `Started`; with `check`, expect it to end well."""
    done = Started(command, **options).wait(timeout)
    assert done.returncode is not None, f"it ran longer than {timeout} s: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def finish(ranks, timeout=150):
    """Wait for all of some that talk to one another, so many seconds together; return how they ended."""
    deadline = time.monotonic() + timeout
    return [rank.wait(max(0.0, deadline - time.monotonic())) for rank in ranks]


@functools.cache
def _server(**environment):
    """Return the process that has the framework installed here, or None where processes cannot be copied."""
    if sys.platform != "linux":
        return None
    framework = next((name for name in forks.FRAMEWORKS if importlib.util.find_spec(name)), None)
    return forks.Server([*forks.FRAMEWORKS.get(framework, forks.KIT), *forks.COMMON], _environment(**environment))


def _environment(**extra):
    handed_on = {name: os.environ[name] for name in os.environ if name in AT_START or name.startswith(SET_BY_TESTS)}
    return {**handed_on, **QUIET, **extra}


def last_json(*command, **options):
    """Run Python, and read the JSON of the last line that it prints."""
    return json.loads(run_python(*command, check=True, **options).stdout.splitlines()[-1])


def native(head):
    """Return what runs a script of a plain framework behind some lines, and returns exit code, output and errors."""

    def run(script, *, timeout=120):
        done = run_python("-c", head + script, timeout=timeout)
        return done.returncode, done.stdout, done.stderr

    return run


def run_here(trial, folder):
    """Run a trial of `ampx compare`, `diagnose` or `tune` in this process, by what its own process would run."""
    from ampx.errors import TrialError
    from ampx.numerics import child

    request, answer = Path(folder, "request"), Path(folder, "answer")
    request.write_bytes(pickle.dumps((trial, answer)))
    # A script's folder takes the first place of the path, and keeps it: here that of the tests' own kit.
    with mock.patch.object(sys, "path", list(sys.path)):
        code = child.main(str(request))
    if code:  # what it says is on the standard error
        raise TrialError(f"{trial.program.name} was refused, or ended with exit code {code}")
    return pickle.loads(answer.read_bytes())
