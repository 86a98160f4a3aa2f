"""The version of ampx itself."""

from __future__ import annotations

from importlib import metadata


def own_version() -> str:
    """Give the installed version; a bare source tree has none. Sync: none."""
    try:
        return metadata.version("ampx")
    except metadata.PackageNotFoundError:
        return "not installed"
