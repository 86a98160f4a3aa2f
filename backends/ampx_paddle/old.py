"""Where `ampx_paddle.fluid` stood: pickles of then name modules in here."""

from __future__ import annotations

from . import fluid as fluid
