"""Whoever has a release with which tests of ampx are known to fail is told once; nobody else is told anything."""

import importlib.metadata
import warnings

import pytest

import ampx
from ampx import plugins
from ampx.cli.doctor import examine_framework
from ampx.cli.frameworks import Framework
from ampx.plugins import VersionRange, known_failure, release, version_ranges

RANGES = {"alpha": {"alpha": VersionRange("1.0.0", "2.1.0", "2.2.0"), "helper": VersionRange("0.1", "0.3")}}
SAID = (
    "alpha 2.3.1 is installed, and tests of ampx fail with 2.2.0; tested: 1.0.0 to 2.1.0. "
    "Run `pip install 'alpha>=1.0.0,<=2.1.0'`, or look for a newer release of ampx"
)


@pytest.fixture
def install(monkeypatch):
    """Return a function that says which distributions are installed."""
    monkeypatch.setattr(plugins, "version_ranges", lambda: RANGES)

    def installed(**versions):
        def version(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return installed


def test_init_warns_once_of_a_release_that_fails(alpha, install):
    install(alpha="2.3.1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            ampx.init("alpha")
    assert [str(each.message) for each in caught] == [f"{SAID}."]
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("version", "fails"),
    [
        *((version, True) for version in ("2.2.0", "2.2", "2.10.0", "2.2.0+cpu", "2.2.0rc1", "3")),
        *((version, False) for version in ("2.1.9", "2.1.0.1", "1.0", "0.9")),
    ],
)
def test_releases_are_compared_by_their_numbers(version, fails, install):
    install(alpha=version)
    assert (known_failure("alpha") is not None) == fails


def test_a_release_that_nobody_tried_and_a_framework_that_is_unknown_are_no_failure(alpha, beta, install):
    install(alpha="2.1.5", helper="9.0", beta="1.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ampx.init("alpha")
        ampx.init("beta")


def test_builds_of_a_release_for_one_kind_of_device_count_as_the_release(install):
    install(**{"alpha-cpu": "2.2.0"})
    message = known_failure("alpha")
    assert message is not None
    assert "pip install 'alpha-cpu>=1.0.0,<=2.1.0'" in message


def test_doctor_says_the_same_as_init(install):
    install(alpha="2.3.1")
    ready = {"devices": [], "init": {"level": "O1"}}
    for module_is_there, expected in ((True, SAID), (False, None)):
        framework = Framework("alpha", "alpha", module_is_there, {}, "a plugin")
        assert examine_framework(framework, ask=lambda *_, **__: ready)["known_failure"] == expected


def test_ranges_on_file_are_in_order():
    everything = version_ranges()
    assert set(everything) == {"torch", "tensorflow", "paddle", "jax", "mxnet"}
    for ranges in everything.values():
        for tested in ranges.values():
            order = [release(version) for version in (tested.lowest, tested.highest, tested.fails) if version]
            assert order == sorted(order)
