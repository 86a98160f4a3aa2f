"""What other tools say of a script, as text: the part that the scripts `others_FRAMEWORK.py` share.

    python tests/corpus/others_torch.py set_detect_anomaly float16 SCRIPT [--twin]

runs the script in the framework's own mixed precision under the tool. The last line that it prints is JSON: the module
that the tool names, or the last line of the script in what it says, whether it blames anything, and its words.
"""

import contextlib
import io
import json
import re
import runpy
import sys
import traceback
import warnings


def said_by(script, options):
    """Run a script; return all that is printed, with warnings and the traceback of what it raises."""
    sys.argv, said = [script, *options], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("always")
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception:
            traceback.print_exc()
    return said.getvalue()


def lines_in(script, text):
    """Return the numbers of the lines of the script that a text of tracebacks names, in its order."""
    return re.findall(rf'File "{re.escape(script)}", line (\d+)', text)


def answer(script, text, *, blamed, module=None, line=None):
    """Print what `score.py` reads."""
    place = f"{script}:{line}" if blamed and line else ""
    print(json.dumps({"module": module, "line": place, "blamed": blamed, "said": text[-1500:]}))
