"""The kit can fail: every mutant is rejected, and every kit test, refusal and plugin test rejects a mutant."""

import os
import sys
from collections import Counter

import pytest

from ampx.optimizer import GenericOptimizer
from ampx.protocol import ScaleGroup
from ampx.scaling import ScaleLoss
from ampx.testing import BackendSuite, FuzzSuite, PluginSuite
from ampx.testing.refusals import REFUSALS
from judging import judge, list_tests, suite_for
from toy import framework
from toy.explicit import BareToy, ExplicitToy
from toy.misreading import left_open
from toy.mutants import MUTANTS
from toy.mutation import HalfToy, patched, verbs

# What runs here are the kit's tests again, of which the measured run is tests/conformance/test_toy.py.
pytestmark = pytest.mark.no_cover

ABILITIES = sorted(REFUSALS)


def verdict(mutant, test, base=BackendSuite, **attributes):
    suite = suite_for(mutant, base, **attributes)
    try:
        return judge(suite, test, mutant.patches())
    finally:
        framework.set_casting(framework.CastingState())
        left_open.close()


class Judgements:
    """What the kit's tests say of mutants: no test judges one twice, and those most likely to reject it come first."""

    def __init__(self):
        self._tests = list_tests(BackendSuite)
        # Where mutants end that another test rejects, too, which takes a tenth of the time.
        self._last = [name for name in self._tests if "random_patterns" in name or "resumed" in name]
        self._rejects = {}

    def rejects(self, test, mutant):
        if (test, mutant) not in self._rejects:
            self._rejects[test, mutant] = verdict(mutant, test) == "failed"
        return self._rejects[test, mutant]

    def test_that_rejects(self, mutant):
        frequent = Counter(test for (test, _), rejects in self._rejects.items() if rejects)
        order = sorted(self._tests, key=lambda test: (test in self._last, -frequent[test]))
        return next((test for test in order if self.rejects(test, mutant)), None)

    def mutant_that_is_rejected_by(self, test):
        order = sorted(MUTANTS, key=lambda mutant: not self._rejects.get((test, mutant)))
        return next((mutant for mutant in order if self.rejects(test, mutant)), None)


judgements = Judgements()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_rejected(mutant):
    assert judgements.test_that_rejects(mutant)


@pytest.mark.parametrize("test", list_tests(BackendSuite))
def test_every_kit_test_rejects_a_mutant(test):
    assert judgements.mutant_that_is_rejected_by(test)


@pytest.mark.parametrize("ability", ABILITIES)
def test_every_refusal_rejects_a_mutant(ability):
    def refusal(suite):
        if suite.declares(ability):
            pytest.skip("declared")
        REFUSALS[ability](suite)

    assert [mutant.name for mutant in MUTANTS if verdict(mutant, refusal) == "failed"]


@pytest.mark.parametrize("base", [None, HalfToy, ExplicitToy, BareToy])
def test_what_is_no_mutant_is_not_rejected(base):
    assert judgements.test_that_rejects(verbs(f"Sound{base.__name__}", base) if base else verbs("Sound")) is None


def scale_of_now(true, self):
    member = self._optimizers[0].ampx_member
    return member.group.ledger.factor(member.group, self._loss_id)


def close_at_once(true, self, outcome):
    if outcome is not None:
        self.ledger.settle(self, [outcome])


# Mistakes that show only in an order of calls.
ORDERS = [
    patched("ThawsTheScale", ScaleLoss, "_choose_scale", scale_of_now),
    patched("WaitsForNobody", ScaleGroup, "close", close_at_once),
    patched("DividesLeftovers", GenericOptimizer, "ampx_before_backward", lambda true, *args: None),
]
NUMBERS = (
    *(
        "NeverUnscales",
        "UnscalesTwice",
        "AlwaysFinite",
        "NeverSkips",
        "CountsSkips",
        "UnscalesAgain",
        "IgnoresClipping",
    ),
    *("LateUpdate", "IgnoresHysteresis", "IgnoresMinScale", "MovesStaticScales", "ForgetsTracker", "KeepsGradients"),
    *("OverwritesGradients", "SharesOneScale", "KeepsFailedBodies", "NestsAnything", "LeaksAutocast", "StepsEagerly"),
    *("IgnoresLossId", "SendsNoEvents"),
)


@pytest.mark.parametrize(
    "mutant", [*ORDERS, *(mutant for mutant in MUTANTS if mutant.name in NUMBERS)], ids=lambda mutant: mutant.name
)
def test_the_fuzzer_rejects_mistakes_in_numbers_and_in_the_order_of_calls(mutant):
    (test,) = list_tests(FuzzSuite)
    assert verdict(mutant, test, FuzzSuite, steps=2000) == "failed"


HOOK = """
import ampx
@ampx.hookimpl
def ampx_register_backends(register):
    register({name!r}, load, roots={roots}, requires="ampx")
def load():
    from toy.implicit import ImplicitToy
    return ImplicitToy()
"""
SOUND = HOOK.format(name="toy", roots=("toy",))
# Importing in a fresh process is slow: only these are watched there.
WATCHED = {"sound", "heavy", "silent", "noisy", "reseeding"}
PLUGINS = {
    "heavy": "import toy.framework\n" + SOUND,
    "silent": "import ampx\n@ampx.hookimpl\ndef ampx_register_backends(register): pass\n",
    "noisy": "import os\nos.environ['KIT_NOISE'] = '1'\n" + SOUND,
    "reseeding": SOUND.replace("    return", "    import random\n    random.seed(1)\n    return"),
    "misnamed": HOOK.format(name="toys", roots=("toy",)),
    "rootless": HOOK.format(name="toy", roots=()),
    "unmarked": SOUND.replace("@ampx.hookimpl", ""),
    "misspelt": SOUND + "@ampx.hookimpl\ndef ampx_events(event): pass\n",
    "empty": SOUND.replace("return ImplicitToy()", "return ImplicitToy"),
}


IN_A_PROCESS = {
    "test_importing_the_plugin_imports_no_framework",
    "test_importing_the_plugin_changes_nothing",
    "test_using_the_backend_changes_nothing",
}


@pytest.fixture(scope="module")
def plugin_verdicts(tmp_path_factory):
    """Names of the plugin tests that each plugin fails."""
    failed = {}
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("plugins")
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.syspath_prepend(folder)
        for name, text in {"sound": SOUND, **PLUGINS}.items():
            module = f"kit_plugin_{name}"
            (folder / f"{module}.py").write_text(text)
            attributes = {"plugin": module, "framework": "toy", "modules": ("toy.framework", "numpy")}
            suite = type(name, (PluginSuite,), attributes)
            tests = [test for test in list_tests(suite) if name in WATCHED or test not in IN_A_PROCESS]
            failed[name] = {test for test in tests if judge(suite, test) == "failed"}
            sys.modules.pop(module, None)
    return failed


def test_a_sound_plugin_is_not_rejected(plugin_verdicts):
    assert not plugin_verdicts["sound"]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_every_bad_plugin_is_rejected(plugin_verdicts, plugin):
    assert plugin_verdicts[plugin]


@pytest.mark.parametrize("test", list_tests(PluginSuite))
def test_every_plugin_test_rejects_a_bad_plugin(plugin_verdicts, test):
    assert [plugin for plugin, failed in plugin_verdicts.items() if test in failed]
