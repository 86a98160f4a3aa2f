"""`python -m ampx.cli`, for where the `ampx` script is not on the path."""

from __future__ import annotations

import sys

from . import main

sys.exit(main())
