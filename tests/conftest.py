"""What tests showed goes on file, and the files are compared with what the tests of this run showed."""

import pathlib

import pytest

from ampx.cli.evidence import ASPECTS, COMBINATIONS
from ampx.testing.evidence import EvidencePlugin

ROOT = pathlib.Path(__file__).parents[1]


def pytest_addoption(parser):
    parser.addoption(
        "--regenerate",
        action="store_true",
        help="write tests/states and docs/evidence anew from what the tests of this run show",
    )


def pytest_configure(config):
    plugin = EvidencePlugin(ROOT / "docs" / "evidence", config.getoption("--regenerate"))
    config.pluginmanager.register(plugin, "ampx evidence")


@pytest.fixture
def covers(record_property):
    """Put on record what a test shows, at its end; `where` is device/dtype/level as `ampx.init` takes them."""

    def record(aspect, framework, where):
        assert aspect in ASPECTS
        assert tuple(where.split("/")[1:]) in COMBINATIONS
        record_property("ampx.tested", [framework, f"{where}/{aspect}"])

    return record
