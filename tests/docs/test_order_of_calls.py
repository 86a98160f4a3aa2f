"""The page of orders and the kit's suite of orders are the same table."""

import inspect
import re
from pathlib import Path

import pytest

import ampx
from ampx.testing.kit.orders import OrderTests

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "order-of-calls.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| order ", "| --- "))
]


TESTS = [inspect.getdoc(member) for name, member in vars(OrderTests).items() if name.startswith("test_")]


def test_each_row_is_a_test_and_each_test_is_a_row():
    assert [row[0] for row in ROWS] == [test.splitlines()[0] for test in TESTS]


@pytest.mark.parametrize(("row", "test"), [*zip(ROWS, TESTS, strict=True)], ids=[row[0] for row in ROWS])
def test_what_a_row_names_exists_and_what_is_reconciled_has_evidence(row, test):
    assert len(row) == 3
    _, happens, _ = row
    evidence = test.partition("Who writes it: ")[2]
    errors = set(re.findall(r"`(\w+Error)`", " ".join(row)))
    assert all(issubclass(getattr(ampx, name), ampx.AmpxError) for name in errors)
    assert ("reconciled" in happens) == bool(evidence)
    assert "reconciled" in happens or errors
    for path in re.findall(r"`(?:tests/)?((?:programs|mxnet)/[\w/]+\.py)`", evidence):
        assert (ROOT / "tests" / path).exists(), path
