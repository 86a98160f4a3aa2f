"""What a backend declares, it has written."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import ampx
from ampx.testing.base import KitTests


class VerbTests(KitTests):
    """Verbs that have a default, which refuses."""

    def test_the_verbs_of_what_is_declared_are_written(self) -> None:
        """A declared capability whose verb still refuses is named by its verb, before anything runs."""
        kind = type(self.backend)
        for ability, names in self._wanted():
            for name in names:
                verb = getattr(ampx.GenericBackend, name)
                if getattr(kind, name) is verb:
                    purpose = (inspect.getdoc(verb) or "").splitlines()[0]
                    raise NotImplementedError(
                        f"{kind.__name__}.{name}: {purpose} Wanted because {ability} is declared."
                    )

    def _wanted(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Return what is declared, with the verbs that it needs; not `clip`, since a wrapper may clip by itself."""
        can = self.backend.capabilities
        if can.gradients == "implicit" and isinstance(self.backend, ampx.GenericBackend):
            yield 'gradients="implicit"', ("gradients", "zero_gradients")
        if can.levels - {"O0"}:
            yield "a level above O0", ("activate", "deactivate")
        if can.levels & {"O2", "O3"}:
            yield "level O2 or O3", ("prepare",)
        if can.op_lists:
            yield "op_lists", ("check_plan",)
        if can.sees_backward:
            yield "sees_backward", ("watch_backward",)
