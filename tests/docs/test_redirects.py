"""The addresses of pages that are no more lead to pages that are."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
REDIRECTS = [line.split() for line in (DOCS / "redirects.txt").read_text().splitlines()]


def anchors(page):
    """Return the anchors of a page: its labels, and its headings as Sphinx writes them in addresses."""
    headings = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in re.findall(r"^##+ (.*)$", page, flags=re.M)]
    return {*re.findall(r"^\((\S+)\)=$", page, flags=re.M), *(heading.replace(" ", "-") for heading in headings)}


@pytest.mark.parametrize(("old", "new"), REDIRECTS)
def test_an_old_address_leads_to_a_page_of_today(old, new):
    assert not (DOCS / f"{old}.md").exists(), "this page would never be seen: a redirect is written over it"
    path, _, anchor = new.partition("#")
    assert path.endswith(".html")
    page = DOCS / path.replace(".html", ".md")
    assert page.exists()
    assert not anchor or anchor in anchors(page.read_text())


def test_no_address_is_redirected_twice():
    assert len(dict(REDIRECTS)) == len(REDIRECTS)
