"""What tests showed of one framework, in a file: what it declares, what it refuses, and what is tested."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from ampx.policy import Dtype, OptLevel

SCHEMA: Final = "ampx.evidence/1"
ASPECTS: Final = ("casting", "scaling", "master weights", "distributed", "state")
# What a test can show, from the most to the least; nothing but "tested" is shown where the cell's device is there.
Word = Literal["tested", "simulated", "compiled for CUDA", "lowered for CUDA", "rewritten for GPU"]
WORDS: Final[tuple[Word, ...]] = get_args(Word)
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
    # The tests that showed a cell, `device/dtype/level/aspect`, by what they showed of it.
    shown: dict[Word, dict[str, set[str]]] = field(default_factory=dict)

    def add(self, word: Word, cell: str, test: str) -> None:
        """Put a test on record."""
        self.shown.setdefault(word, {}).setdefault(cell, set()).add(test)

    def tests(self, word: Word, cell: str) -> set[str]:
        """Return the tests that showed a cell."""
        return self.shown.get(word, {}).get(cell, set())

    def cells(self) -> list[tuple[Word, str]]:
        """Return every cell that some test showed, and with which word."""
        return [(word, cell) for word in WORDS for cell in sorted(self.shown.get(word, {})) if self.tests(word, cell)]

    @classmethod
    def read(cls, path: Path) -> Evidence:
        """Read a file; without one nothing is known."""
        if not path.exists():
            return cls()
        data = json.loads(path.read_text(encoding="utf-8"))
        evidence = cls(data["declared"], data["refused"])
        for word in WORDS:
            for cell, tests in data.get(word, {}).items():
                for test in tests:
                    evidence.add(word, cell, test)
        return evidence

    def write(self, path: Path) -> None:
        """Write a file."""
        data: dict[str, Any] = {
            "schema": SCHEMA,
            "framework": path.stem,
            "declared": self.declared,
            "refused": dict(sorted(self.refused.items())),
            "tested": {},
        }
        for word, cell in self.cells():
            data.setdefault(word, {})[cell] = sorted(self.tests(word, cell))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
