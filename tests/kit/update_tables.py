"""Rewrite the generated tables of a checkout: `python update_tables.py CHECKOUT`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from ampx.cli.capability_table import BEGIN, END, Declared, to_markdown
from tested_table import compact_table, make_rows, read_all, read_gpu, reasons_table
from version_records import ranges, to_json, to_markdown as versions_table

EVIDENCE: Final = Path("docs", "evidence")
RESULTS: Final = Path("benchmarks", "results")


def render(root: Path) -> dict[Path, str]:
    """Return the text of every file that is generated, or has a generated table, as it should be."""
    evidence, gpu = read_all(root / EVIDENCE), read_gpu(root / RESULTS)
    if not evidence:
        raise SystemExit(
            f"{str(root)!r} has no {EVIDENCE.as_posix()}/*.json; accepted: the root of a checkout of ampx. Pass that."
        )
    rows = [row for name, shown in evidence.items() for row in make_rows(name, shown, gpu.get(name, ()))]
    declared = to_markdown(
        [
            Declared(name, "", "", shown.declared, offers=tuple(shown.declared["offers"]))
            for name, shown in evidence.items()
        ]
    )
    readme, page = root / "README.md", root / "docs" / "reference" / "capabilities.md"
    versions = root / "docs" / "reference" / "versions.md"
    text = _replace(page, page.read_text(encoding="utf-8"), *_marked("ampx tested", compact_table(rows)))
    return {
        readme: _replace(readme, readme.read_text(encoding="utf-8"), BEGIN, END, declared),
        page: _replace(page, text, *_marked("ampx not supported", reasons_table(rows))),
        versions: _replace(
            versions, versions.read_text(encoding="utf-8"), *_marked("ampx versions", versions_table(root))
        ),
        root / "ampx" / "tested_versions.json": to_json(ranges(root)),
    }


def update(root: Path) -> list[Path]:
    """Write the files whose tables have changed, and give them. Raises: as `render`."""
    changed = [(path, text) for path, text in render(root).items() if path.read_text(encoding="utf-8") != text]
    for path, text in changed:
        path.write_text(text, encoding="utf-8")
    return [path for path, _ in changed]


def _marked(name: str, table: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    return begin, end, f"{begin}\n{table}\n{end}"


def _replace(path: Path, text: str, begin: str, end: str, block: str) -> str:
    before, opened, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise SystemExit(
            f"{path.name} has no table between {begin} and {end}; accepted: both marks, each once. Put them back."
        )
    return before + block + after


if __name__ == "__main__":
    written = update(Path(sys.argv[1]))
    print(f"written: {', '.join(map(str, written))}" if written else "the tables are up to date")
