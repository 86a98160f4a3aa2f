"""The scripts of the corpus in processes that have their libraries already; nothing is downloaded."""

import importlib.util
import sys
from pathlib import Path

import forks
import pytest

import processes

sys.path.insert(0, str(Path(__file__).parent))

from corpus import FRAMEWORKS, cases, imported

processes.QUIET.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")


def is_installed(module):
    return importlib.util.find_spec(module.partition(".")[0]) is not None


FRAMEWORK = next((name for name in FRAMEWORKS if is_installed(name)), None)
# A process that has what is installed of the libraries, of which those that train are copies.
LIBRARIES = [name for case in cases(FRAMEWORK) for name in imported([case.script])] if FRAMEWORK else []
if FRAMEWORK:
    before = forks.FRAMEWORKS[FRAMEWORK]
    forks.FRAMEWORKS[FRAMEWORK] = tuple(dict.fromkeys([*before, *filter(is_installed, LIBRARIES)]))


def pytest_generate_tests(metafunc):
    """Run a case where its libraries are; all but the quick ones by `make test-all`."""
    if "case" in metafunc.fixturenames:
        here = [case for case in cases(FRAMEWORK)] if FRAMEWORK else []
        here = [case for case in here if all(map(is_installed, imported([case.script])))]
        marks = {case.name: () if case.quick else (pytest.mark.nightly,) for case in here}
        metafunc.parametrize("case", [pytest.param(case, id=case.name, marks=marks[case.name]) for case in here])
