"""`ampx run` in JAX: a script that knows nothing of ampx trains in mixed precision."""

from __future__ import annotations

from ampx.run import Automation

from .manager import automate


class JaxAutomation(Automation):
    """Patches the framework: see `automate`."""

    automate = staticmethod(automate)
