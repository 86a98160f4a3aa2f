"""Times of what takes less than a clock can tell, and random numbers that go on as before."""

import os
import random
import time
from contextlib import suppress

import numpy as np
import pytest

from ampx.numerics.randomness import random_numbers_kept
from ampx.numerics.timing import MOST, SECONDS, busy, timed


@pytest.mark.parametrize(("seconds", "fewest", "most"), [(0.0, 2, MOST), (SECONDS * 1.5, 1, 1)])
def test_what_takes_little_is_called_often_and_what_takes_long_once(seconds, fewest, most):
    events = []

    def compute():
        events.append("computed")
        time.sleep(seconds)

    measured = timed(compute, lambda: events.append("waited"))
    assert fewest <= events.count("computed") <= most
    assert events.index("waited") == len(events) - 1
    assert measured >= seconds


@pytest.mark.parametrize(("load", "processors", "expected"), [(0.9, 2, []), (3.7, 2, ["3.7 on 2"]), (3.7, 8, [])])
def test_other_work_on_the_machine_is_said(load, processors, expected, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    sentences = busy()
    assert len(sentences) == len(expected)
    assert all(words in sentence for words, sentence in zip(expected, sentences, strict=True))


def test_the_time_that_devices_take_counts():
    assert timed(lambda: time.sleep(SECONDS), lambda: time.sleep(SECONDS)) >= 2 * SECONDS


@pytest.mark.parametrize("error", [None, KeyError])
def test_random_numbers_go_on_as_before_the_region(error):
    def draw():
        return random.random(), np.random.random()

    random.seed(1)
    np.random.seed(1)
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    with suppress(KeyError), random_numbers_kept():
        assert draw() == expected
        if error is not None:
            raise error
    assert draw() == expected
