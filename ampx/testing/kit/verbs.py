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
        """Return what is declared, with the verbs that it needs."""
        can, kind = self.backend.capabilities, type(self.backend)
        if can.gradients == "implicit" and isinstance(self.backend, ampx.GenericBackend):
            yield 'gradients="implicit"', ("gradients", "zero_gradients")
        if can.levels - {"O0"}:
            yield "a level above O0", ("activate", "deactivate")
        if can.levels & {"O2", "O3"}:
            yield "level O2 or O3", ("prepare",)
        if can.clipping and kind.wrap_optimizer is ampx.GenericBackend.wrap_optimizer:  # else a wrapper may clip
            yield "clipping", ("clip",)
        if can.per_loss_scales:
            yield "per_loss_scales", ("wrap_optimizer",)
        if can.op_lists:
            yield "op_lists", ("check_plan",)
        if can.sees_backward:
            yield "sees_backward", ("watch_backward",)
