"""The built manual in a real browser: no broken link, no error on the console, no page that scrolls sideways."""

import functools
import http.server
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

ROOT = Path(__file__).parents[2]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Build the manual, and return its folder."""
    folder = tmp_path_factory.mktemp("manual")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", ROOT / "docs", folder]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def site(built):
    """Return the address at which the built manual is served on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=built)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def pages(window, site, built):
    """Return every page of the manual as the browser saw it, by its address; first those that can be clicked to."""
    seen, waiting = {}, [site + "index.html"]
    while waiting:
        address = waiting.pop()
        seen[address] = window.open(address)
        for link in seen[address].links:
            target = urldefrag(link).url
            if target in seen or target in waiting or not target.startswith(site):
                continue
            if target.endswith(".html") and path_of(target, built).is_file():
                waiting.append(target)
    return seen


def path_of(address, built):
    return built / unquote(urlsplit(address).path).lstrip("/")


def test_every_page_can_be_reached_from_the_first(pages, site, built):
    reached = {path_of(address, built) for address in pages}
    # What Sphinx makes for its own use is no page of the manual.
    built_pages = {path for path in built.rglob("*.html") if not path.relative_to(built).parts[0].startswith("_")}
    assert len(reached) > 45
    assert sorted(built_pages - reached - {built / f"{old}.html" for old in redirects()}) == []


def redirects():
    """Return the new address of each old page."""
    return dict(map(str.split, (ROOT / "docs" / "redirects.txt").read_text().splitlines()))


def test_old_addresses_lead_to_the_new_ones(window, pages, site):
    for old, new in redirects().items():
        window.open(f"{site}{old}.html", settle=0.5)
        assert window.evaluate("JSON.stringify(location.href)") == site + new
        page, _, anchor = new.partition("#")
        assert {anchor} <= {"", *pages[site + page].anchors}


def broken_links(pages, others, site, built):
    """Return which links of some pages lead nowhere, where they and others are all the pages there are."""
    anchors = {address: {"", *page.anchors} for address, page in {**others, **pages}.items()}

    def leads_somewhere(link):
        target, anchor = urldefrag(link)
        if not target.startswith(site):
            # Other sites are not asked: this must work without a network. They have to be addresses at all.
            return urlsplit(link).scheme in ("https", "mailto") and len(urlsplit(link).netloc + urlsplit(link).path) > 1
        return unquote(anchor) in anchors[target] if target in anchors else path_of(target, built).is_file()

    return [(address, link) for address, page in pages.items() for link in page.links if not leads_somewhere(link)]


def test_no_link_is_broken(pages, site, built):
    assert sum(len(page.links) for page in pages.values()) > 5000
    assert broken_links(pages, {}, site, built) == []


def test_no_picture_is_missing(pages):
    assert {address: page.broken_images for address, page in pages.items() if page.broken_images} == {}


def test_no_page_asks_another_site(pages, site):
    others = {
        address: [request for request in page.requests if not request.startswith((site, "data:"))]
        for address, page in pages.items()
    }
    assert {address: requests for address, requests in others.items() if requests} == {}


@pytest.fixture(scope="session")
def narrow_pages(window, pages):
    """Return every page of the manual as it is on a phone."""
    window.resize(390)
    seen = {address: window.open(address) for address in pages}
    window.resize(1280)  # for who comes after
    return seen


@pytest.mark.parametrize(("of", "width"), [("pages", 1280), ("narrow_pages", 390)])
def test_no_page_scrolls_sideways_or_writes_an_error_to_the_console(of, width, request):
    seen = request.getfixturevalue(of)
    assert {page.window_width for page in seen.values()} == {width}
    assert {address: page.beyond_the_edge for address, page in seen.items() if page.scrolls_sideways} == {}
    assert {address: page.messages for address, page in seen.items() if page.messages} == {}


@pytest.mark.parametrize("word", ["overflow", "GradScaler", "bfloat16"])
def test_the_search_finds_what_the_manual_speaks_of(window, site, word):
    page = window.open(f"{site}search.html?q={word}", settle=2)
    assert page.messages == []
    hits = window.evaluate("JSON.stringify([...document.querySelectorAll('#search-results li')].map(e => e.innerText))")
    assert len([hit for hit in hits if word.lower() in hit.lower()]) > 5


@pytest.mark.parametrize("word", ["clip", "NaN", "scheduler", "float16"])
def test_the_search_finds_how_tos_before_the_rules_of_lint(window, site, word):
    window.open(f"{site}search.html?q={word}", settle=2)
    hits = window.evaluate("JSON.stringify([...document.querySelectorAll('#search-results li a')].map(e => e.href))")
    places = [hit.removeprefix(site).partition("/")[0] for hit in hits if "reference/lint" not in hit]
    before = hits[: next((index for index, hit in enumerate(hits) if "reference/lint" in hit), len(hits))]
    assert "how-to" in places
    assert any("/how-to/" in hit for hit in before), hits[:5]


def test_a_diff_is_coloured(window, site):
    window.open(site + "index.html")
    colors = window.evaluate(
        "JSON.stringify(['.gi', '.gd'].map(e => getComputedStyle(document.querySelector(e)).backgroundColor))"
    )
    assert len({*colors, "rgba(0, 0, 0, 0)", "transparent"}) == 4, colors


def test_the_sidebar_has_the_groups_of_the_landing_page(window, site):
    window.open(site + "index.html")
    texts = "JSON.stringify([...document.querySelectorAll('{}')].map(e => e.textContent.trim()))"
    groups = window.evaluate(texts.format(".sidebar-tree .caption"))
    assert groups == window.evaluate(texts.format("#all-pages td:first-child strong")) != []


def test_faults_are_noticed(window, pages, site, built):
    """A page that has each of them shows that the tests above would fail."""
    path = built / "_faulty.html"
    path.write_text(
        "<title>faulty</title><body><div style='width:3000px'>wide</div><img src='absent.png'>"
        "<a href='absent.html'>x</a><a href='index.html#absent'>x</a><a href='index.html#ampx'>right</a>"
        "<a href='http://127.0.0.1/'>x</a><script>console.error('broken'); undefined_function()</script></body>"
    )
    page = window.open(site + path.name)
    assert page.scrolls_sideways
    assert "wide" in page.beyond_the_edge[0]
    assert page.broken_images == [site + "absent.png"]
    broken = broken_links({page.title: page}, pages, site, built)
    assert [link.removeprefix(site) for _, link in broken] == ["absent.html", "index.html#absent", "http://127.0.0.1/"]
    assert site + "absent.png" in page.requests
    assert [message.partition(" ")[0] for message in page.messages] == ["Error:", "Error:"]
