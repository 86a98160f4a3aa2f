"""Start Python programs as copies of a process that has the framework already, which importing would cost seconds.

A copy has in `sys.modules` what a new Python has. What was imported beforehand comes back, whole packages at a time,
when the program first imports it: import hooks see it then, as they see an import from a file.
Run as a script, this is that process: it reads requests from its standard input, and ends with it.
"""

import atexit
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from types import ModuleType

# By framework: what its programs import.
FRAMEWORKS = {
    "torch": ("torch", "torch._dynamo", "torch.utils.data"),
    "jax": ("jax", "flax.nnx", "flax.linen", "optax"),
    "tensorflow": ("tensorflow", "keras", "tf_keras"),
    "paddle": ("paddle",),
    "mxnet": ("mxnet",),
}
# What the kit needs, where there is no framework.
KIT = ("pytest", "hypothesis")
# Names of NumPy without which MXNet cannot be imported, where they are missing; its backend restores them, too.
REMOVED_FROM_NUMPY = {"bool": bool, "int": int}
COMMON = (
    *("numpy", "sklearn.datasets", "sklearn.model_selection", "matplotlib.figure"),
    *("typer", "typer._adapters", "rich.console", "rich.table"),
)
# Read while a program runs, and by no framework while it is imported.
READ_LATER = (
    *("AMPX_", "COLUMNS", "NO_COLOR", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "TF_CONFIG", "XLA_FLAGS"),
    *("GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "PADDLE_"),
)
# Read by what runs before a framework is imported: copies with a value come from a process that was started with it.
READ_BEFORE = ("CORPUS_SIMULATES",)
STREAMS = ("stdin", "stdout", "stderr")
WRITING = os.O_WRONLY | os.O_CREAT | os.O_APPEND  # two of them may go to one file


class Server:
    """The process that has the framework, as its parent sees it."""

    def __init__(self, modules, environment):
        self._environment = environment
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._close)

    def fits(self, command, environment, read_later):
        """Return whether a copy does what a new Python would."""
        before = self._environment
        other = {name for name in {*before, *environment} if before.get(name) != environment.get(name)}
        return is_plain(command) and all(name.startswith((*READ_LATER, *read_later)) for name in other)

    def start(self, command, cwd, environment, streams, nests):
        """Start a program, whose streams are files in a folder; return what waits for its end so many seconds."""
        streams = {name: os.path.join(streams, name) for name in STREAMS}
        request = {"command": command, "environment": environment, "streams": streams, "nests": nests}
        number = self._ask({**request, "cwd": os.path.abspath(cwd or ".")})
        return lambda timeout: self._ask({"wait": number, "timeout": timeout})

    def _ask(self, request):
        answer = ask(self._process.stdin, self._process.stdout, request)
        if answer == "":
            raise RuntimeError(f"the process that has the framework ended with {self._process.wait()}")
        return answer

    def _close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def is_plain(command):
    """Return whether the arguments of Python have no options but those that a copy carries out."""
    return not command[0].startswith("-") or command[0] in ("-c", "-m", "-W")


def ask(requests, replies, request):
    """Send a request, and return the answer; "" where nobody answers."""
    requests.write(json.dumps(request) + "\n")
    requests.flush()
    answer = replies.readline()
    return json.loads(answer) if answer else answer


def serve(requests, replies):
    """Start and wait for what is asked for. In a copy: return its request."""
    for line in requests:
        request = json.loads(line)
        waits = "wait" in request
        answer = wait(request["wait"], request["timeout"]) if waits else os.fork()
        if answer == 0 and not waits:
            replies.close()
            return request
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
    return None


def wait(child, timeout):
    """Return the exit code of a copy, or None where it took too long and was ended."""
    deadline, pause = time.monotonic() + timeout, 0.002
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def set_at_start():
    """Return the variables that are not from who started this process: `sitecustomize` has set them, say."""
    passed = {os.fsdecode(entry.partition(b"=")[0]) for entry in Path("/proc/self/environ").read_bytes().split(b"\0")}
    return {name: value for name, value in os.environ.items() if name not in passed}


def become(request, variables):
    """Take over streams, folder and environment, with `variables` where it has none of the name."""
    for number, name in enumerate(STREAMS):
        if name in request["streams"]:
            opened = os.open(request["streams"][name], WRITING if number else os.O_RDONLY)
            os.dup2(opened, number)
            os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 -- as long as the process
    os.chdir(request["cwd"])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update({**variables, **request["environment"]})
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in before]


def nest():
    """Have Python, where this copy runs it by `subprocess.run` or goes on as it, be a copy, too. There: its request."""
    ends = [os.fdopen(end, mode) for pipe in (os.pipe(), os.pipe()) for end, mode in zip(pipe, "rw", strict=True)]
    asked, requests, replies, answers = ends
    if os.fork() == 0:
        requests.close()
        request = serve(asked, answers)
        if request is None:
            os._exit(0)
        return request
    run = subprocess.run

    def run_copy(command, *, env=None, timeout=None, check=False, **streams):
        if command[0] != sys.executable or not is_plain(command[1:]) or streams.keys() - {*STREAMS}:
            return run(command, env=env, timeout=timeout, check=check, **streams)
        paths = {name: os.devnull if to == subprocess.DEVNULL else to.name for name, to in streams.items()}
        request = {"command": command[1:], "cwd": os.getcwd(), "environment": env or {**os.environ}, "streams": paths}
        number = ask(requests, replies, {**request, "nests": False})
        code = ask(requests, replies, {"wait": number, "timeout": timeout or 240})
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        completed = subprocess.CompletedProcess(command, code)
        if check:
            completed.check_returncode()
        return completed

    subprocess.run = run_copy
    os.execv = lambda path, command: end(run_copy(command).returncode)
    return None


def lacking():
    """Return the names of NumPy without which MXNet cannot be imported."""
    return REMOVED_FROM_NUMPY.keys() - vars(importlib.import_module("numpy"))


def import_early(name):
    """Import a module, and leave NumPy as it was."""
    missing = lacking() if name == "mxnet" else ()
    numpy = sys.modules.get("numpy")
    for removed in missing:
        setattr(numpy, removed, REMOVED_FROM_NUMPY[removed])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except ImportError:
        pass
    finally:
        for removed in missing:
            delattr(numpy, removed)


class Preloaded(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Takes modules out of `sys.modules`, and provides each package again when it is imported."""

    def __init__(self, names):
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._attributes = {}

    def find_spec(self, fullname, path, target=None):
        if fullname not in self._modules or (fullname.partition(".")[0] == "mxnet" and lacking()):
            return None
        before = self._modules[fullname].__spec__
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=before.origin)
        spec.submodule_search_locations = before.submodule_search_locations
        spec.has_location = before.has_location
        return spec

    def create_module(self, spec):
        package = spec.name.partition(".")[0]
        for name in [name for name in self._modules if name.partition(".")[0] == package]:
            sys.modules[name] = self._modules.pop(name)
        module = sys.modules.pop(spec.name)
        self._attributes[spec.name] = module.__spec__, module.__loader__
        return module

    def exec_module(self, module):
        module.__spec__, module.__loader__ = self._attributes.pop(module.__name__)


def run_as_python_does(command):
    """Run `-c code`, `-m module` or a file, with the rest as its arguments, as `__main__`; return the exit code."""
    if command[0] == "-W":
        warnings.simplefilter(command[1])
        command = command[2:]
    kind = command[0] if command[0] in ("-c", "-m") else "file"
    target, arguments = (command[0], command[1:]) if kind == "file" else (command[1], command[2:])
    sys.argv = ["-c" if kind == "-c" else target, *arguments]
    sys.path[0] = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.realpath(target)))
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        if kind == "-m":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            main.__dict__.update(__builtins__=__builtins__, **({"__file__": target} if kind == "file" else {}))
            text = Path(target).read_bytes() if kind == "file" else target
            exec(compile(text, target if kind == "file" else "<string>", "exec"), main.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames))
        return 1
    return 0


def end(code):
    """End as Python does, but leave the objects of the framework to the system: taking them apart takes a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    before, variables = set(sys.modules), set_at_start()
    for name in sys.argv[1:]:
        import_early(name)
    gc.collect()
    gc.freeze()  # else a collection in a copy would write to all pages
    request = serve(sys.stdin, os.fdopen(os.dup(1), "w"))
    if request is not None:
        become(request, variables)
        if request["nests"] and (nested := nest()) is not None:
            request = nested
            become(request, variables)
        imported = set(sys.modules) - before
        sys.meta_path.insert(
            0, Preloaded({name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names})
        )
        end(run_as_python_does(request["command"]))
