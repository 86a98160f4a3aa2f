"""What tests showed of one framework, in a file: what it declares, what it refuses, and what is tested."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ampx.policy import Dtype, OptLevel

SCHEMA: Final = "ampx.evidence/1"
ASPECTS: Final = ("casting", "scaling", "master weights", "distributed", "state")
COMBINATIONS: Final[tuple[tuple[Dtype, OptLevel], ...]] = (
    ("float32", "O0"),
    *(("float16", level) for level in ("O1", "O2", "O3")),
    *(("bfloat16", level) for level in ("O1", "O2", "O3")),
)


@dataclass
class Evidence:
    """What is known of one framework."""

    declared: dict[str, Any] = field(default_factory=dict)  # the fields of its `Capabilities`
    # The message of each refusal, by what was asked for: `device/dtype/level`, or a capability.
    refused: dict[str, str] = field(default_factory=dict)
    # The tests that showed a cell, by cell: `device/dtype/level/aspect`.
    tested: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Evidence:
        """Read a file; without one nothing is known."""
        if not path.exists():
            return cls()
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(data["declared"], data["refused"], {cell: set(tests) for cell, tests in data["tested"].items()})

    def write(self, path: Path) -> None:
        """Write a file."""
        data = {
            "schema": SCHEMA,
            "framework": path.stem,
            "declared": self.declared,
            "refused": dict(sorted(self.refused.items())),
            "tested": {cell: sorted(tests) for cell, tests in sorted(self.tested.items()) if tests},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
