"""`[tool.ampx]` of pyproject.toml: the values that options have where the command line does not give them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampx.errors import InvalidOptionError


def find_table(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the nearest pyproject.toml of a folder and those around it that has `[tool.ampx]`, with that table."""
    for path in (here / "pyproject.toml" for here in (folder, *folder.parents)):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if "tool.ampx" in text:  # reading TOML takes longer than most commands need to start
            from tomlkit import parse
            from tomlkit.exceptions import ParseError

            try:
                table = parse(text).unwrap().get("tool", {}).get("ampx")
            except ParseError as error:
                raise InvalidOptionError(f"{path} is no TOML: {error}; accepted: TOML. Mend that line.") from error
            if isinstance(table, dict):
                return path, table
    return None


def defaults(commands: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the defaults of every command, as the parser of the command line takes them.

    A key of `[tool.ampx]` is an option of all commands that have one of that name; a key of `[tool.ampx.lint]` is of
    `ampx lint`.

    Raises:
        InvalidOptionError: The file is no TOML, or no command has such an option.
    """
    nearest = find_table(folder)
    if nearest is None:
        return {}
    path, table = nearest
    options = {name: _options(command) for name, command in commands.items()}
    shared = {key: value for key, value in table.items() if key not in commands}
    every = {key for names in options.values() for key in names}
    _check(path, "[tool.ampx]", shared, {*every, *commands})
    values: dict[str, dict[str, Any]] = {}
    for command, names in options.items():
        own = table.get(command, {})
        _check(path, f"[tool.ampx.{command}]", own, names)
        merged = {**{key: value for key, value in shared.items() if key in names}, **own}
        values[command] = {names[key].name: _value(names[key], value) for key, value in merged.items()}
    return values


def _options(command: Any) -> dict[str, Any]:
    """Return the options of a command by their long names, without the dashes."""
    longest = {max(option.opts, key=len): option for option in command.params if option.param_type_name == "option"}
    return {name.removeprefix("--"): option for name, option in longest.items() if name.startswith("--")}


def _check(path: Path, where: str, table: Any, accepted: Any) -> None:
    unknown = sorted(set(table) - set(accepted)) if isinstance(table, dict) else [repr(table)]
    if unknown:
        raise InvalidOptionError(
            f"{where} of {path} has {', '.join(unknown)}; accepted: {', '.join(sorted(accepted))}. Remove or correct "
            f"it."
        )


def _value(option: Any, value: Any) -> Any:
    """Return a value as the option takes it: a list for one that may be repeated, else items with commas between."""
    if option.multiple:
        return value if isinstance(value, list) else [value]
    return ",".join(map(str, value)) if isinstance(value, list) else value
