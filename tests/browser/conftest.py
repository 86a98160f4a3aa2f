"""A browser for the tests of this folder; where there is none, they fail and say what is missing."""

import pytest

import browser


@pytest.fixture(scope="session")
def window():
    """Return a browser window of 1280 by 800 pixels."""
    try:
        window = browser.Browser()
    except browser.NoBrowserError as error:
        pytest.fail(str(error), pytrace=False)
    yield window
    window.close()
