"""Random numbers that a replay puts back, as far as they are no framework's own."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Return a region after which the random numbers of Python, and of NumPy where it is in use, go on as before."""
    python, numpy = random.getstate(), sys.modules.get("numpy.random")
    arrays = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(arrays)
