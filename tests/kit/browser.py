"""A real browser without a window: the Chromium of Qt WebEngine, which comes from the package index as a wheel."""

import json
import os
from dataclasses import dataclass

# Chromium's sandbox does not start for root, as whom containers run. What is opened here was built by ourselves.
os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--disable-gpu --disable-background-networking")
os.environ.setdefault("QT_LOGGING_RULES", "*=false")

# What a loaded page looks like from inside. Addresses are absolute, as the browser resolved them.
PROBE = """(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const wide = all("body *").filter((e) => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1);
  return JSON.stringify({
    title: document.title,
    text: document.body.innerText,
    anchors: all("[id], a[name]").map((e) => e.id || e.name),
    links: all("a[href], area[href], link[href]").map((e) => e.href),
    broken_images: [...document.images].filter((e) => !e.complete || !e.naturalWidth).map((e) => e.src),
    width: document.documentElement.scrollWidth,
    window_width: innerWidth,
    room: document.documentElement.clientWidth,
    beyond_the_edge: wide.slice(0, 3).map((e) => e.outerHTML.slice(0, 100)),
  });
})()"""


class NoBrowserError(Exception):
    """The browser cannot be loaded; the text says what is missing."""


@dataclass(frozen=True)
class Page:
    """What the browser saw of a page: `requests` are the addresses that it asked for, `messages` those of its console.

    `width` pixels of content are shown on `room` pixels: what the window has without a vertical scroll bar.
    """

    scrolls_sideways = property(lambda self: self.width > self.room)

    title: str
    text: str
    anchors: list[str]
    links: list[str]
    broken_images: list[str]
    width: int
    window_width: int
    room: int
    beyond_the_edge: list[str]
    messages: list[str]
    requests: list[str]


class Browser:
    """One window of a browser."""

    def __init__(self, width=1280, height=800):
        try:
            from PySide6 import QtCore, QtWebEngineCore, QtWebEngineWidgets, QtWidgets
        except ImportError as error:  # the wheel is absent, or a shared library of the operating system is
            raise NoBrowserError(
                f"Qt WebEngine cannot be loaded: {error}. It is the package PySide6-WebEngine, and needs libraries of "
                "the operating system; Debian has them in libasound2, libdbus-1-3, libegl1, libfontconfig1, libnss3, "
                "libxcomposite1, libxdamage1, libxkbcommon0, libxkbfile1, libxrandr2 and libxtst6."
            ) from None
        self._messages, self._requests = messages, requests = [], []
        self._core = QtCore
        self._application = QtWidgets.QApplication.instance() or QtWidgets.QApplication(["browser"])

        class Tab(QtWebEngineCore.QWebEnginePage):
            def javaScriptConsoleMessage(self, level, message, line, source):  # noqa: N802 -- Qt's name
                messages.append(f"{level.name.removesuffix('MessageLevel')}: {message} ({source}:{line})")

        class Requests(QtWebEngineCore.QWebEngineUrlRequestInterceptor):
            def interceptRequest(self, request):  # noqa: N802 -- Qt's name
                requests.append(request.requestUrl().toString())

        # A profile without a name keeps nothing on the disk.
        self._view = QtWebEngineWidgets.QWebEngineView()
        self._profile = QtWebEngineCore.QWebEngineProfile(self._view)
        self._interceptor = Requests(self._profile)
        self._profile.setUrlRequestInterceptor(self._interceptor)
        self._tab = Tab(self._profile, self._view)
        self._tab.renderProcessTerminated.connect(lambda status, code: messages.append(f"Error: {status} {code}"))
        self._view.setPage(self._tab)
        self._view.resize(width, height)
        self._view.show()

    def open(self, address, *, settle=0.0, timeout=30):
        """Load a page and return what is to be seen of it, `settle` seconds later where scripts have work to do."""
        self._messages.clear()
        self._requests.clear()
        loaded = self._wait(self._tab.loadFinished, lambda: self._tab.load(self._core.QUrl(address)), timeout)
        if not loaded:
            self._messages.append(f"Error: {address} did not load")
        if settle:
            self._pause(settle)
        return Page(**self.evaluate(PROBE), messages=list(self._messages), requests=list(self._requests))

    def resize(self, width, height=800):
        """Make the window as wide as so many pixels: 1280 of a laptop, 390 of a phone."""
        self._view.resize(width, height)
        self._pause(0.1)

    def evaluate(self, script, timeout=30):
        """Run JavaScript in the page, and return the value of the JSON that it evaluates to."""
        answers = []
        loop = self._core.QEventLoop()

        def receive(answer):
            answers.append(answer)
            loop.quit()

        self._tab.runJavaScript(script, receive)
        if not answers:
            self._run(loop, timeout)
        return json.loads(answers[0])

    def picture(self, path):
        """Save what the window shows, as a PNG."""
        self._pause(0.3)
        assert self._view.grab().save(str(path))

    def close(self):
        """Close the window; Qt wants the page to go before its profile."""
        self._view.setPage(None)
        self._tab.deleteLater()
        self._view.close()
        self._application.processEvents()

    def _wait(self, signal, act, timeout):
        loop = self._core.QEventLoop()
        values = []

        def receive(value):
            values.append(value)
            loop.quit()

        signal.connect(receive)
        try:
            act()
            self._run(loop, timeout)
        finally:
            signal.disconnect(receive)
        return values[0]

    def _run(self, loop, timeout):
        timer = self._core.QTimer(singleShot=True, interval=int(1000 * timeout))
        timed_out = []
        timer.timeout.connect(lambda: (timed_out.append(True), loop.quit()))
        timer.start()
        loop.exec()
        timer.stop()
        assert not timed_out, f"the browser did not answer in {timeout} s"

    def _pause(self, seconds):
        loop = self._core.QEventLoop()
        self._core.QTimer.singleShot(int(1000 * seconds), loop.quit)
        loop.exec()
