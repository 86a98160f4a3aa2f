"""The suite of interrupted steps: the toys pass, and what forgets that it was interrupted does not."""

from typing import Any, ClassVar

import pytest
from interrupted_steps import InterruptedStepSuite

from ampx.protocol import Member
from judging import judge, suite_for
from toy.explicit import ExplicitToy
from toy.harness import ExplicitToyHarness, ImplicitToyHarness
from toy.mutation import patched


class TestImplicit(InterruptedStepSuite):
    """Only lines of core are interrupted: how the toy keeps several losses apart is not written for it."""

    harness = ImplicitToyHarness
    packages, stride, few = ("ampx",), 3, 5
    cases: ClassVar[Any] = {name: case for name, case in InterruptedStepSuite.cases.items() if "losses" not in case}


class TestExplicit(InterruptedStepSuite):
    harness = ExplicitToyHarness
    packages, stride, few = ("ampx",), 3, 5


def nothing(true, self, *args):
    """Do nothing."""


MUTANTS = [
    patched("ForgetsThatItChanges", Member, "begin_change", nothing),
    patched("ForgetsThatValuesChange", Member, "begin_change", nothing, ExplicitToy),
]


@pytest.mark.no_cover
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_forgets_that_it_was_interrupted_is_rejected(mutant):
    suite = suite_for(mutant, InterruptedStepSuite, packages=("ampx",), stride=3, thinned=1)
    tests = [
        lambda suite, name=name: suite.test_a_second_step_is_the_step_or_is_refused(name)
        for name in ("plain", "overflow", "list")
    ]
    assert "failed" in [judge(suite, test, mutant.patches()) for test in tests]
