"""The package `apex` as scripts knew it, on today's PyTorch, on CUDA devices and on the CPU.

`install()` lets an unedited script import it under its old name; `from ampx_apex.apex import amp` works without.
Importing this package imports no framework.
"""

from __future__ import annotations

from .aliases import (
    ApexPartMissingError as ApexPartMissingError,
    ApexPresentError as ApexPresentError,
    install as install,
    uninstall as uninstall,
)
