"""Which framework of a script is automated, and when."""

import contextlib
import sys
import textwrap
import warnings
from types import MappingProxyType

import pytest

import ampx
from ampx.plugins import Registry
from ampx.run import Automation, RunSettings, supervisor
from ampx.run.program import Program


class Noting(Automation):
    """Notes what happens to a pretended backend."""

    def automate(self, run):
        return self.backend.automate(run)


class Automated:
    """Stands for a backend: it only notes what happens to it."""

    offers = MappingProxyType({"automation": Noting})
    capabilities = ampx.Capabilities(levels=frozenset({"O0", "O1"}))

    def __init__(self, seen, refuses=None):
        self.seen, self.refuses = seen, refuses

    @contextlib.contextmanager
    def automate(self, run):
        self.seen.append(f"enter {run.framework}")
        if self.refuses is ampx.UnsupportedByBackendError:
            raise self.refuses("no")
        sys.modules[run.framework].run = run
        try:
            yield
        finally:
            self.seen.append(f"leave {run.framework}")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Two pretended frameworks, of which the second imports the first, and a function that runs a script."""
    (tmp_path / "lowframe.py").write_text("ready = True\n")
    (tmp_path / "highframe.py").write_text("import lowframe\nassert not hasattr(lowframe, 'run')\nready = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    registry, seen = Registry(entry_points=[]), []
    backends = {"lowframe": Automated(seen), "highframe": Automated(seen)}

    class Plugin:
        @staticmethod
        @ampx.hookimpl
        def ampx_register_backends(register):
            register("lowframe", lambda: None, roots=("lowframe",), requires="lowframe")
            register("highframe", lambda: None, roots=("highframe",), requires="highframe")

        @staticmethod
        @ampx.hookimpl
        def ampx_register_names(register):
            register("lowframe", lambda: None, names=("oldframe",))

    registry.register_plugin(Plugin, "pretended")
    monkeypatch.setattr(registry, "load", lambda name: backends[name])
    monkeypatch.setattr(supervisor, "default_registry", lambda: registry)

    def run(text, framework=None):
        (tmp_path / "script.py").write_text(textwrap.dedent(text))
        return supervisor.supervise(Program(str(tmp_path / "script.py")), RunSettings(), framework)

    yield run, seen, backends
    for name in ("lowframe", "highframe", "oldframe"):
        sys.modules.pop(name, None)


def test_a_framework_is_automated_when_its_import_is_complete_and_left_at_the_end(world):
    run, seen, _ = world
    done = run("import lowframe\nassert lowframe.ready\nlowframe.run.recorder.notes.append('seen')\n1 / 0")
    assert isinstance(done.error, ZeroDivisionError)
    assert seen == ["enter lowframe", "leave lowframe"]
    assert done.recorder.notes == ["seen"]


def test_the_outermost_import_is_waited_for(world):
    run, seen, _ = world
    assert run("import highframe").error is None
    assert sorted(seen[:2]) == ["enter highframe", "enter lowframe"]


def test_modules_keep_their_true_loader(world):
    run, _, _ = world
    done = run(
        """
        import importlib.machinery, lowframe
        for loader in (lowframe.__loader__, lowframe.__spec__.loader):
            assert type(loader) is importlib.machinery.SourceFileLoader, loader
        """
    )
    assert done.error is None


def test_only_the_framework_that_was_named_is_automated(world):
    run, seen, _ = world
    run("import highframe", framework="lowframe")
    assert seen == ["enter lowframe", "leave lowframe"]


def test_a_script_may_import_a_framework_that_cannot_be_automated(world):
    run, _, backends = world
    backends["lowframe"].refuses = ampx.UnsupportedByBackendError
    done = run("import lowframe\nprint('on')")
    assert done.error is None
    assert done.recorder.notes == ["The script imports lowframe, which `ampx run` cannot automate."]
    with pytest.raises(ampx.UnsupportedByBackendError):
        run("import lowframe", framework="lowframe")


def test_a_refusal_that_the_script_swallows_is_a_refusal(world):
    run, _, _ = world
    done = run(
        """
        import lowframe
        try:
            lowframe.run.refuse("it cannot be done")
        except Exception:
            pass
        """
    )
    assert done.error is None
    assert str(done.refusal).endswith("script.py:4: it cannot be done.")


def test_a_stand_in_is_asked_of_its_framework(world, tmp_path):
    """The script imports an old name first; the framework is imported and automated, and its finder answers."""
    run, seen, backends = world
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "oldframe.py").write_text("provided = True\n")

    @contextlib.contextmanager
    def automate(name):
        seen.append("enter")
        sys.path.append(str(tmp_path / "elsewhere"))
        yield
        sys.path.remove(str(tmp_path / "elsewhere"))

    backends["lowframe"].automate = automate
    done = run("import oldframe\nassert oldframe.provided\nimport sys\nassert 'lowframe' in sys.modules")
    assert done.error is None
    assert seen == ["enter"]


def test_a_framework_that_its_backend_imports_first_is_automated_when_the_backend_is_there(world):
    """As in a script that begins with `ampx.init("lowframe")`: the framework is complete before its backend is."""
    run, seen, backends = world
    loads = []

    def load(name):
        loads.append(name)
        assert loads.count(name) == 1 or name in sys.modules
        if name not in sys.modules:
            __import__(name)
            assert not seen, "automated while its backend was being loaded"
        return backends[name]

    registry = supervisor.default_registry()
    registry.load = load
    done = run("from ampx.run import supervisor\nsupervisor.default_registry().load('lowframe')")
    assert done.error is None
    assert seen == ["enter lowframe", "leave lowframe"]
    assert registry.load is load


def test_an_option_that_the_framework_cannot_honour_stops_the_script_at_its_import(world, monkeypatch):
    run, seen, _ = world
    monkeypatch.setattr(Automated, "capabilities", ampx.Capabilities())  # level O0 only
    monkeypatch.setattr(Automated, "name", "lowframe", raising=False)
    done = run("import lowframe\nlowframe.trained = True")
    assert seen == []
    assert done.error is done.misuse
    assert str(done.misuse).endswith(
        "level='O1' is not supported by backend 'lowframe'; supported: O0. Choose one of these."
    )


def test_the_watch_ends_with_the_run(world):
    run, _, _ = world
    before = list(sys.meta_path)
    run("import lowframe")
    assert sys.meta_path == before


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_the_first_process_of_a_job_warns_for_all(world, monkeypatch, rank, times):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    run, _, _ = world
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run("import lowframe, warnings, ampx\nwarnings.warn('slow', ampx.PrecisionWarning)")
    assert [str(warning.message) for warning in caught] == ["slow"] * times
