"""The kit passes on the toy framework, in all variants."""

from ampx.testing import BackendSuite, FuzzSuite, PluginSuite
from toy.harness import BareToyHarness, ExplicitToyHarness, ImplicitToyHarness


class TestImplicit(BackendSuite):
    harness = ImplicitToyHarness


class TestExplicit(BackendSuite):
    harness = ExplicitToyHarness


class TestBare(BackendSuite):
    harness = BareToyHarness


class TestFuzzImplicit(FuzzSuite):
    harness = ImplicitToyHarness


class TestFuzzExplicit(FuzzSuite):
    harness = ExplicitToyHarness


class TestFuzzBare(FuzzSuite):
    harness = BareToyHarness


class TestPlugin(PluginSuite):
    plugin, framework, modules = "toy.plugin", "toy", ("toy.framework", "numpy")
