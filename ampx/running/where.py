"""Which line of the script is running."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Final

_LIBRARIES: Final = tuple(
    {f"{Path(sysconfig.get_path(name)).resolve()}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def script_line() -> str:
    """Give the innermost line that is neither ampx's nor of an installed module, as `"train.py:12"`; "" for none.

    Sync: none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        # TensorFlow runs functions from files that it wrote: the line that called them is one of the script.
        generated = name.startswith("<") or Path(name).name.startswith("__autograph_generated_file")
        inside = package == "ampx" or package.startswith("ampx_") or generated
        if not inside and not str(Path(name).resolve()).startswith(_LIBRARIES):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
