"""Plugins are found lazily, one at a time, and a broken one harms nobody else."""

import os
import pkgutil
import subprocess
import sys
import textwrap
import types

import pytest

import ampx
from ampx.backend import CONTRACTS, Contract
from ampx.plugins import Registry


class Dist:
    """What importlib.metadata.EntryPoint has, with a load that counts."""

    def __init__(self, name, load, value="a_module"):
        self.name, self.value, self.group, self.loads = name, value, "ampx", 0
        self._load = load

    def load(self):
        self.loads += 1
        return self._load()


def module(name, **functions):
    plugin_module = types.ModuleType(name)
    for key, function in functions.items():
        setattr(plugin_module, key, function)
    return plugin_module


def backend_of(framework):
    class Given(ampx.GenericBackend):
        name = framework
        capabilities = ampx.Capabilities()

        def device(self, name):
            return ampx.Device("cpu", reason="it is a test")

        def is_optimizer(self, candidate):
            return False

        def autocast(self, plan, enabled):
            raise NotImplementedError

        cast = inspect_loss = scale = unscale = apply = autocast

    return Given


def plugin(framework, load=None, roots=None, name=None):
    @ampx.hookimpl
    def ampx_register_backends(register):
        register(framework, load or backend_of(framework), roots=roots or (framework,), requires=f"{framework}>=2")

    return module(name or f"ampx_{framework}", ampx_register_backends=ampx_register_backends)


def raising(error):
    def load():
        raise error

    return load


def test_nothing_is_scanned_before_it_is_asked_for_and_only_once():
    scanned = []

    class Lazy:
        def __iter__(self):
            scanned.append("scan")
            return iter([Dist("good", lambda: plugin("good"))])

    registry = Registry(Lazy())
    assert scanned == []
    assert registry.names() == registry.names() == ["good"]
    assert scanned == ["scan"]


def test_only_the_asked_for_backend_is_loaded_and_only_once():
    loaded = []

    def load(framework):
        def make():
            loaded.append(framework)
            return backend_of(framework)()

        return make

    registry = Registry([Dist(name, lambda name=name: plugin(name, load(name))) for name in ("one", "two")])
    assert registry.names() == ["one", "two"]
    assert loaded == []
    assert registry.load("two") is registry.load("two")
    assert loaded == ["two"]


@ampx.hookimpl
def ampx_register_backend(register):
    """Misspelt: the s is missing."""


@ampx.hookimpl
def ampx_register_backends_wrong(register):
    """Renamed below: a hook with arguments that the hook does not have."""


def wrong_arguments():
    @ampx.hookimpl
    def ampx_register_backends(register, colour):
        register("wrong", backend_of("wrong"), roots=("wrong",), requires="wrong")

    return module("wrong_arguments", ampx_register_backends=ampx_register_backends)


def raising_hook(error):
    @ampx.hookimpl
    def ampx_register_backends(register):
        register("half", backend_of("half"), roots=("half",), requires="half")
        raise error

    return module("raising_hook", ampx_register_backends=ampx_register_backends)


def registering(*args, **kwargs):
    @ampx.hookimpl
    def ampx_register_backends(register):
        register(*args, **kwargs)

    return module("registering", ampx_register_backends=ampx_register_backends)


BROKEN = {
    "import": raising(ImportError("no such thing")),
    "syntax": raising(SyntaxError("invalid")),
    "value": raising(ValueError("boom")),
    "exit": raising(SystemExit(3)),
    "misspelt": lambda: module("misspelt", ampx_register_backend=ampx_register_backend),
    "arguments": wrong_arguments,
    "hook raises": lambda: raising_hook(KeyError("boom")),
    "hook exits": lambda: raising_hook(SystemExit(3)),
    "no arguments": lambda: registering(),
    "load is no function": lambda: registering("bad", None, roots=("bad",), requires="bad"),
    "name is no string": lambda: registering(3, print, roots=("bad",), requires="bad"),
    "roots is a string": lambda: registering("bad", print, roots="bad", requires="bad"),
    "roots are no strings": lambda: registering("bad", print, roots=(3,), requires="bad"),
    "taken": lambda: plugin("good", name="thief"),
}


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_named_and_breaks_nobody_else(name, position):
    if name == "taken" and position == 0:
        pytest.skip("the first to claim a name has it")
    points = [Dist("good", lambda: plugin("good"))]
    points.insert(position, Dist("bad", BROKEN[name], "bad_module"))
    registry = Registry(points)
    assert registry.names() == ["good"]
    assert registry.load("good").name == "good"
    assert list(registry.broken) == ["bad"]
    expected = ampx.DuplicateBackendError if name == "taken" else ampx.PluginError
    with pytest.raises(expected, match="'bad'") as caught:
        registry.load("bad")
    assert type(caught.value) is expected
    assert "accepted:" in str(caught.value)


@pytest.mark.parametrize("name", [name for name in BROKEN if name not in ("import", "syntax", "value", "exit")])
def test_a_broken_plugin_registered_by_hand_raises_and_leaves_no_trace(name):
    registry = Registry([Dist("good", lambda: plugin("good"))])
    broken = BROKEN[name]()
    plugins = len(registry.manager.get_plugins())
    with pytest.raises((ampx.PluginError, ampx.DuplicateBackendError)):
        registry.register_plugin(broken, "bad")
    assert registry.names() == ["good"]
    assert len(registry.manager.get_plugins()) == plugins


def test_two_claims_of_one_name_name_both_plugins():
    registry = Registry([Dist("first", lambda: plugin("same")), Dist("second", lambda: plugin("same", name="other"))])
    assert registry.load("same").name == "same"
    with pytest.raises(
        ampx.DuplicateBackendError, match=r"(?s)'second' \(module other\).*'first' \(module ampx_same\)"
    ):
        registry.load("second")


def test_one_plugin_cannot_claim_a_name_twice():
    @ampx.hookimpl
    def ampx_register_backends(register):
        for _ in range(2):
            register("twice", backend_of("twice"), roots=("twice",), requires="twice")

    registry = Registry([])
    with pytest.raises(ampx.DuplicateBackendError):
        registry.register_plugin(module("twice", ampx_register_backends=ampx_register_backends))
    assert registry.names() == []


def test_two_distributions_may_use_one_entry_point_name():
    registry = Registry(
        [Dist("same", lambda: plugin("one"), "ampx_one"), Dist("same", lambda: plugin("two"), "ampx_two")]
    )
    assert registry.names() == ["one", "two"]
    assert registry.broken == {}


def test_registering_a_plugin_twice_is_refused():
    registry = Registry([])
    first = plugin("one")
    registry.register_plugin(first)
    with pytest.raises(ampx.AmpxError, match="already"):
        registry.register_plugin(first)
    assert registry.load("one").name == "one"


@pytest.mark.parametrize("registers", [False, True])
def test_a_hook_that_would_never_be_called_is_refused(registers):
    listening = plugin("one") if registers else types.ModuleType("listening")
    listening.ampx_event = lambda event: None
    registry = Registry([])
    with pytest.raises(ampx.PluginError, match=r"has ampx_event without @ampx\.hookimpl.*accepted: .*Correct"):
        registry.register_plugin(listening)
    assert registry.names() == []
    with pytest.raises(ampx.PluginError, match="has no hook of ampx"):
        registry.register_plugin(types.ModuleType("empty"))


@pytest.mark.parametrize("value", ["bad", "bad,other", " other , bad "])
def test_disabled_plugins_are_not_even_imported(monkeypatch, value):
    monkeypatch.setenv("AMPX_DISABLE_PLUGINS", value)
    good, bad = Dist("good", lambda: plugin("good")), Dist("bad", lambda: plugin("bad"))
    registry = Registry([good, bad])
    assert registry.names() == ["good"]
    assert (good.loads, bad.loads) == (1, 0)
    off = r"accepted: good \(switched off by AMPX_DISABLE_PLUGINS: bad\)\. .* take it out of AMPX_DISABLE_PLUGINS"
    with pytest.raises(ampx.UnknownFrameworkError, match=off):
        registry.load("bad")


def test_a_lazy_module_inside_a_plugin_is_not_triggered():
    class Lazy:
        def __getattr__(self, name):
            raise RuntimeError("imported for nothing")

    good = plugin("good")
    good.heavy = Lazy()
    registry = Registry([Dist("good", lambda: good)])
    assert registry.names() == ["good"]


# -- loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'goneware'", name="goneware")])
def test_an_absent_framework_is_said_to_be_absent(error):
    registry = Registry([Dist("goneware", lambda: plugin("goneware", raising(error)))])
    with pytest.raises(ampx.FrameworkNotInstalledError, match=r"goneware>=2.*pip install 'goneware>=2'") as caught:
        registry.load("goneware")
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "goneware"


def test_what_a_backend_needs_beside_its_framework_is_said_to_be_absent():
    error = ModuleNotFoundError("No module named 'waresolver'", name="waresolver")
    needing = plugin("goneware", raising(error), ("goneware", "waresolver"))
    with pytest.raises(ampx.FrameworkNotInstalledError, match=r"pip install 'goneware>=2' waresolver`"):
        Registry([Dist("goneware", lambda: needing)]).load("goneware")


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'dependency'", name="dependency"),
        ModuleNotFoundError("No module named 'json._speedups'", name="json._speedups"),
        ImportError("libcuda.so: cannot open shared object file"),
        ImportError("cannot import name 'float8' from 'json'", name="json"),  # there, but too old
        OSError("libcuda.so"),
        RuntimeError("driver"),
        AttributeError("numpy.bool"),
        SystemExit(1),
    ],
    ids=lambda error: f"{type(error).__name__}-{getattr(error, 'name', '')}",
)
def test_a_broken_framework_does_not_look_absent(error):
    registry = Registry([Dist("fw", lambda: plugin("fw", raising(error), roots=("json",)))])
    with pytest.raises(ampx.BackendLoadError) as caught:
        registry.load("fw")
    assert type(caught.value) is ampx.BackendLoadError
    assert caught.value.__cause__ is error


def test_a_refusal_of_the_plugin_itself_reaches_the_user():
    error = ampx.UnsupportedByBackendError("not on this engine")
    registry = Registry([Dist("fw", lambda: plugin("fw", raising(error)))])
    with pytest.raises(ampx.UnsupportedByBackendError) as caught:
        registry.load("fw")
    assert caught.value is error


def test_a_failed_load_is_tried_again():
    outcomes = [raising(RuntimeError("driver")), backend_of("fw")]
    registry = Registry([Dist("fw", lambda: plugin("fw", lambda: outcomes.pop(0)()))])
    with pytest.raises(ampx.BackendLoadError):
        registry.load("fw")
    assert registry.load("fw").name == "fw"


class Incomplete(backend_of("fw")):
    capabilities = None


@pytest.mark.parametrize("load", [lambda: None, lambda: ampx.Backend, backend_of("other"), Incomplete, ampx.Backend])
def test_what_is_no_backend_of_that_name_is_refused(load):
    registry = Registry([Dist("fw", lambda: plugin("fw", load))])
    with pytest.raises(ampx.BackendLoadError, match="fw"):
        registry.load("fw")


@pytest.mark.parametrize(
    "offers",
    [None, ("probe",), {"probes": "module:Probe"}, {1: "module:Probe"}, {"probe": "module"}, {"probe": 1}],
)
def test_offers_under_names_that_no_feature_asks_for_are_refused(offers):
    load = type("Offering", (backend_of("fw"),), {"offers": offers})
    with pytest.raises(ampx.BackendLoadError, match="a mapping from probe, converter, automation, demo to 'module:"):
        Registry([Dist("fw", lambda: plugin("fw", load))]).load("fw")


def test_what_is_offered_is_not_imported_with_the_backend():
    load = type("Offering", (backend_of("fw"),), {"offers": {"probe": "nowhere:Probe", "demo": ampx.Backend}})
    assert Registry([Dist("fw", lambda: plugin("fw", load))]).load("fw").offers["probe"] == "nowhere:Probe"


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_has_the_name_under_which_it_is_offered(name):
    contract = pkgutil.resolve_name(CONTRACTS[name])
    assert issubclass(contract, Contract)
    assert contract.name == name


@pytest.mark.parametrize("name", ["torhc", "", None, 3, ["good"]])
def test_an_unknown_framework_names_the_known_and_the_broken(name):
    registry = Registry([Dist("good", lambda: plugin("good")), Dist("bad", BROKEN["value"])])
    with pytest.raises(ampx.UnknownFrameworkError, match=r"accepted: good \(broken plugins: bad\)"):
        registry.load(name)


# -- guessing -------------------------------------------------------------------------------------------


def test_the_only_imported_framework_is_guessed(monkeypatch):
    registry = Registry([Dist(name, lambda name=name: plugin(name)) for name in ("here", "there", "blocked")])
    with pytest.raises(ampx.AmbiguousFrameworkError, match=r"no supported framework is imported.*blocked, here, there"):
        registry.guess()
    monkeypatch.setitem(sys.modules, "blocked", None)
    monkeypatch.setitem(sys.modules, "here", types.ModuleType("here"))
    assert registry.guess() == "here"
    monkeypatch.setitem(sys.modules, "there", types.ModuleType("there"))
    with pytest.raises(ampx.AmbiguousFrameworkError, match="imported are here, there"):
        registry.guess()


@pytest.mark.parametrize(("installed", "named"), [(("there",), "there"), ((), "blocked")])
def test_where_none_is_imported_the_one_that_is_installed_is_proposed(installed, named, tmp_path, monkeypatch):
    registry = Registry([Dist(name, lambda name=name: plugin(name)) for name in ("here", "there", "blocked")])
    for name in installed:
        (tmp_path / f"{name}.py").write_text("raise AssertionError('it is looked for, and not imported')")
    (tmp_path / "here").mkdir()  # an empty folder is no framework
    monkeypatch.syspath_prepend(tmp_path)
    message = (
        rf"\(installed here: {installed[0] if installed else 'none'}\)\. Name one: ampx.init\(framework='{named}'\)"
    )
    with pytest.raises(ampx.AmbiguousFrameworkError, match=message):
        registry.guess()


def test_the_package_of_a_plugin_is_no_imported_framework(monkeypatch):
    registry = Registry([Dist("alpha", lambda: plugin("alpha", roots=("alpha", "ampx_alpha")))])
    monkeypatch.setitem(sys.modules, "ampx_alpha", types.ModuleType("ampx_alpha"))
    assert registry.imported() == []
    monkeypatch.setitem(sys.modules, "alpha", types.ModuleType("alpha"))
    assert registry.imported() == ["alpha"]


def test_backends_lists_the_broken_with_the_reason(monkeypatch):
    registry = Registry([Dist("good", lambda: plugin("good")), Dist("bad", BROKEN["value"])])
    monkeypatch.setattr("ampx.plugins._default", [registry])
    listed = ampx.backends()
    assert listed["good"] == "registered"
    assert listed["bad"].startswith("broken: ")
    assert "boom" in listed["bad"]


def test_an_interrupt_while_plugins_are_found_ends_the_program_and_a_second_question_finds_all():
    """Ctrl-C is the user's word, also where a slow plugin is being imported; nothing may be missing afterwards."""
    presses = [KeyboardInterrupt()]

    def slow():
        if presses:
            raise presses.pop()
        return plugin("slow")

    registry = Registry([Dist("one", lambda: plugin("one")), Dist("slow", slow), Dist("two", lambda: plugin("two"))])
    with pytest.raises(KeyboardInterrupt):
        registry.names()
    assert registry.names() == ["one", "slow", "two"]
    assert registry.broken == {}


# -- for real -------------------------------------------------------------------------------------------


def test_installed_distributions_are_found_in_a_fresh_process(tmp_path):
    for name, body in {
        "nice": """
            import ampx
            @ampx.hookimpl
            def ampx_register_backends(register):
                register("nice", None_of_your_business, roots=("niceware",), requires="niceware")
            def None_of_your_business():
                import niceware
            """,
        "nasty": "raise SystemExit('nasty')",
    }.items():
        (tmp_path / f"plugin_{name}.py").write_text(textwrap.dedent(body))
        info = tmp_path / f"plugin_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plugin-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[ampx]\n{name} = plugin_{name}\n")
    program = """
        import sys, ampx
        assert "plugin_nice" not in sys.modules
        found = ampx.backends()
        assert found["nice"] == "registered", found
        assert "SystemExit" in found["nasty"], found
        try:
            ampx.init("nice")
        except ampx.FrameworkNotInstalledError as error:
            assert "niceware" in str(error)
        else:
            raise AssertionError("nobody complained")
        """
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": path, "AMPX_DISABLE_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
