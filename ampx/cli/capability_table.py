"""The table of what the backends declare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ampx.plugins import is_installed

from .frameworks import KNOWN
from .probe import TIME_LIMIT, probe

SCHEMA = "ampx.backends/1"
BEGIN, END = "<!-- ampx backends -->", "<!-- /ampx backends -->"
# What the backends of ampx can do and no code asks for, by framework: for the manual.
FACTS: Final[dict[str, tuple[str, ...]]] = {
    "torch": ("closures", "sparse", "distributed", "device scale"),
    "tensorflow": ("sparse", "distributed", "device scale", "traceable"),
    "mxnet": ("sparse", "distributed"),
    "paddle": ("closures", "sparse", "distributed"),
    "jax": ("distributed", "device scale", "traceable", "state values"),
}
HEADINGS = ("framework", "devices", "dtypes", "levels", "what you get")
# What a reader gets of each ability.
WORDS: Final[dict[str, str]] = {
    "op_lists": "your own lists of operations",
    "clipping": "clipping",
    "per_loss_scales": "a loss scale for each loss",
    "vector_losses": "losses of any shape",
    "sees_backward": "an error where `backward` misses the loss scale",
    "closures": "closures, as for LBFGS",
    "sparse": "sparse gradients",
    "distributed": "several processes",
    "device scale": "steps that do not wait for the GPU",
    "traceable": "compiled whole steps",
    "state values": "the loss scale inside the optimizer state",
    "probe": "`compare`, `diagnose`, `tune`",
    "converter": "conversion for inference",
    "automation": "`ampx run`",
    "demo": "`ampx demo`",
}


@dataclass(frozen=True)
class Declared:
    """One registered framework."""

    framework: str
    requires: str
    plugin: str  # the plugin that registers it
    capabilities: dict[str, Any] | None  # what the backend declares, by field; None where it cannot be loaded
    problem: str | None = None  # why it cannot
    offers: tuple[str, ...] = ()  # the contracts that it offers to features

    @property
    def facts(self) -> tuple[str, ...]:
        """What the manual says of it beyond what it declares."""
        return FACTS.get(self.framework, ())


def collect(time_limit: float = TIME_LIMIT) -> tuple[list[Declared], dict[str, str]]:
    """Load every registered backend, each in a process of its own."""
    scan = probe("plugins", time_limit=time_limit)
    broken = dict(scan.get("broken", {}))
    if "error" in scan:
        broken["(all)"] = f"looking for plugins failed: {scan['error']}"
    order = list(KNOWN)
    registered = sorted(
        scan.get("registered", ()),
        key=lambda registration: (
            order.index(registration["name"]) if registration["name"] in order else len(order),
            registration["name"],
        ),
    )
    return [_declared(registration, time_limit) for registration in registered], broken


def _declared(registration: dict[str, Any], time_limit: float) -> Declared:
    missing = [root for root in registration["roots"][:1] if not is_installed(root)]
    if missing:
        answer: dict[str, Any] = {"error": f"{missing[0]} is not installed"}
    else:
        answer = probe("capabilities", registration["name"], time_limit=time_limit)
    return Declared(
        registration["name"],
        registration["requires"],
        registration["plugin"],
        answer.get("capabilities"),
        answer.get("error"),
        tuple(answer.get("offers", ())),
    )


def cells(backend: Declared) -> tuple[str, ...]:
    """Return one framework's row: a column for each choice, and what else a reader gets in the last."""
    declared = backend.capabilities
    if declared is None:
        return (backend.framework, f"unavailable ({backend.problem})", *[""] * (len(HEADINGS) - 2))
    abilities = [name for name, value in declared.items() if value is True]
    words = [WORDS.get(ability, ability) for ability in (*abilities, *backend.facts, *backend.offers)]
    return (
        backend.framework,
        ", ".join(declared["devices"]),
        ", ".join(declared["dtypes"]) or "none",
        ", ".join(declared["levels"]),
        ", ".join(words) or "nothing more",
    )


def to_markdown(declared: list[Declared]) -> str:
    """Return the table for the README, one line a framework, between its markers."""
    rows = [HEADINGS, tuple("---" for _ in HEADINGS), *map(cells, declared)]
    lines = [f"| {' | '.join(cell.replace('|', '/') or ' ' for cell in row)} |" for row in rows]
    return "\n".join([BEGIN, *lines, END])


def to_json(declared: list[Declared], broken: dict[str, str]) -> dict[str, Any]:
    """Return everything that is declared."""
    return {
        "schema": SCHEMA,
        "backends": [
            {
                "framework": backend.framework,
                "requires": backend.requires,
                "plugin": backend.plugin,
                "available": backend.capabilities is not None,
                "problem": backend.problem,
                "capabilities": backend.capabilities,
                "offers": list(backend.offers),
                "facts": list(backend.facts),
            }
            for backend in declared
        ],
        "broken": broken,
    }
