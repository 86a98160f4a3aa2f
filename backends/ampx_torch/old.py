"""Where `ampx_torch.apex` stood: pickles of then name modules in here."""

from __future__ import annotations

from . import apex as apex

__path__: list[str] = []  # a package, of whose modules none has a file
