"""`"module:name"` in `allow` and `deny` of `ampx run`: the models that the script calls are prepared by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Final

from ampx.backend import CastPlan
from ampx.errors import UnsupportedOpError
from ampx.modules import some_names
from ampx.run import Run
from ampx_torch.casting.module_rules import attach, match_names, own_rule
from ampx_torch.casting.oplists import TorchPlan
from ampx_torch.lent_hooks import lend
from ampx_torch.names import Names, called_models

if TYPE_CHECKING:
    from .manager import TorchManager

# A pattern may be about a model that is first called behind the first step.
_PATIENCE: Final = 3


class ModuleRules:
    """The rules about names of modules, and the models that were called so far."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._names: Names = {}
        self._plan: TorchPlan | None = None
        self._hits: set[str] = set()
        self._lent = ExitStack()
        self.waits = False  # some pattern may match no module: `check` has to look

    def start(self, plan: CastPlan | None) -> None:
        """Put the rules of a session on the models that were called so far, and from now on on others."""
        if isinstance(plan, TorchPlan) and plan.patterns:
            self._plan = plan
            self.waits = True
            self._attach(self._names)
            plan.resolved.update(pattern for _, pattern in plan.patterns)  # `check` sees to it

    def take(self, names: Names) -> None:
        """Put the rules on a model that is about to be called for the first time."""
        self._names |= names
        self._attach(names)

    def _attach(self, names: Names) -> None:
        if self._plan is not None:
            try:
                rules, hits = match_names(((name, module) for module, name in names.items() if name), self._plan)
            except UnsupportedOpError as error:
                self._run.reject(error)
            copied = {module: rule for module in names if (rule := own_rule(module)) is not None}
            for module, handles in attach(copied | rules).items():
                self._lent.callback(lend(module, handles))
            self._hits |= hits

    def close(self) -> None:
        """Take the rules off all models."""
        self._lent.close()

    def check(self, steps: int) -> None:
        """Stop the script where a pattern matches no module of the models that it called in the first steps."""
        if self._plan is None or not self.waits or steps < _PATIENCE:
            return
        self.waits = False
        missing = [f"{kind}='module:{pattern}'" for kind, pattern in self._plan.patterns if pattern not in self._hits]
        shown = some_names([name for name in self._names.values() if name])
        if missing:
            hint = "".join(self._plan.meant(pattern) for _, pattern in self._plan.patterns if pattern not in self._hits)
            self._run.reject(
                UnsupportedOpError(
                    f"{', '.join(missing)} matches no module of the models called in {steps} steps; accepted: patterns "
                    f"of names, which are {shown}. Correct it.{hint}"
                )
            )


@contextmanager
def modules_ruled(manager: TorchManager) -> Iterator[None]:
    """Look at the models that the script calls, where there are rules about modules."""
    settings = manager.run.settings
    if not any(entry.startswith("module:") or not entry.isidentifier() for entry in (*settings.allow, *settings.deny)):
        yield
        return
    with closing(manager.rules), called_models(manager.rules.take):
        yield
