"""The conformance kit: prove that a backend does what ampx promises.

```python
from ampx.testing import BackendSuite, Harness, PluginSuite


class MyHarness(Harness):
    framework = "mine"
    plugin = "ampx_mine"
    ...  # the abstract methods: what only tests need


class TestBackend(BackendSuite):
    harness = MyHarness


class TestPlugin(PluginSuite):
    plugin, framework, modules = "ampx_mine", "mine", ("mine",)
```

Importing this package imports pytest and hypothesis. It registers no pytest plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .suite import BackendSuite as BackendSuite

pytest.register_assert_rewrite(
    "ampx.testing.kit",
    "ampx.testing.bench",
    "ampx.testing.value_bench",
    "ampx.testing.checks",
    "ampx.testing.refusals",
    "ampx.testing.reference",
)

from .bench import Bench as Bench  # noqa: E402  (asserts are rewritten only in modules imported after this)
from .harness import Harness as Harness, ValueHarness as ValueHarness  # noqa: E402
from .kit.fuzz import FuzzSuite as FuzzSuite  # noqa: E402
from .kit.plugins import PluginSuite as PluginSuite  # noqa: E402


def __getattr__(name: str) -> Any:
    """Load `BackendSuite` when it is asked for: it tests every feature, of which some may have been taken out."""
    if name != "BackendSuite":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ampx.rooms import parts_needed

    with parts_needed("ampx.testing.BackendSuite"):
        from .suite import BackendSuite
    return BackendSuite
