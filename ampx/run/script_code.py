"""Code of the script that a backward calls, as hooks and custom functions: it sees gradients without the loss scale."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class ScriptCode(threading.local):
    """Whether the calling thread runs such code."""

    runs = False

    @contextmanager
    def switched(self, runs: bool) -> Iterator[None]:
        """Note that such code runs inside, or with False a backward that it calls in its turn."""
        before, self.runs = self.runs, runs
        try:
            yield
        finally:
            self.runs = before

    def call(
        self,
        function: Callable[..., Any],
        gradients: Sequence[Any],
        divide: Callable[[Any], Any],
        multiply: Callable[[Any, Sequence[Any]], Any],
    ) -> Any:
        """Call what may not be linear in gradients with unscaled ones, and return its result with the loss scale.

        Args:
            function: Takes the gradients one by one.
            gradients: They carry the loss scale; what is no gradient stays as it is.
            divide: Returns one of them without the loss scale.
            multiply: Returns a result with the loss scale; it also gets what `function` was called with.
        """
        shown = [divide(gradient) for gradient in gradients]
        with self.switched(True):
            result = function(*shown)
        return multiply(result, shown)
