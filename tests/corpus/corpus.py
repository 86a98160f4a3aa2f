"""Training scripts that fail of their precision, each with a healthy twin, and what is true of them.

A case is a file `scripts/FRAMEWORK/CASE.py`, as a user would have it: it builds a small model of a library, trains it
for a few steps in float32 on one fixed batch or a few, and prints its losses as JSON. It knows nothing of ampx; the
commands run it. Three arguments change it: none makes it fail in low precision (or, where the truth says so, in
float32 as well), `--twin` makes it healthy by data or weights of a usual size or by the right formula, and `--cure`,
where the cure is an edit and no module to keep in float32, makes that edit.

The truth stands in `scripts/FRAMEWORK/truth.toml`, a table for each case, and is written and committed before a tool
of ours sees the case:

- `dtype`: the precision in which it fails;
- `kinds`: what it is, in the words of `ampx.diagnose`; several only where each is equally true;
- `modules`: the modules that make the fault, any of them; `""` for the lines of the script outside of all modules;
- `code`: a piece of the line at fault, which the place that a tool names must hold where there, or by it, is no module;
- `deny`: what to keep in float32, that cures it; `operations` are an equally true choice;
- `edit`: what `--cure` edits;
- `no_cure`: a piece of advice that was measured not to cure it;
- `gradient`: modules of whose outputs the gradient is the first value to be wrong, where every output is right;
- `float32`: "fails" where precision is innocent;
- `tolerance`: how far the losses of a healthy run may be from float32's, relative to the largest; 0.05 if not named;
- `scale`: a loss scale at which no step is lost to settling; 128 if not named;
- `quick`: whether every run of the tests has it, and not `make test-all` only: of PyTorch a few, since the rules are
  core's, and other frameworks show in scripts of their own tests that `diagnose` gets from them what it needs;
- `held_out`: written after the tools, by one who had not read them, when the rules were found on the other cases. The
  page says how the tools did at the first run over these; rules were changed since for some of them;
- `healthy_by_run`: it fails in the framework's own mixed precision only. `ampx run` casts less of it, and trains it
  as in float32, as was measured: a tool that names a fault in it accuses it, as it would a twin;
- `seen`: what `native_FRAMEWORK.py` measured of it, with the framework's own mixed precision and without ampx.

`score.py` runs tools over cases and twins and judges what they say:

- **right and curing**: kind and place are true, and what is advised, carried out, makes the run healthy: the printed
  entries of `deny` by `ampx run --policy`, an edit by `--cure`;
- **right without cure**: kind and place are true, and the advice does not help, or there is none;
- **silent**: nothing is said of the fault, nor anything false;
- **wrong**: a kind or a place is named that is not true, or it is said that all agrees, or that precision is innocent;
- **accused**: a fault is named of a twin.

What `tune` keeps in float32 is true if it is one of `deny` or `operations`, or in a module at fault; or if its reason
says that it is kept for what fails behind it, and names there a module at fault or the line that holds `code`. Where it
finds nothing to keep and stays in float32, it is right without cure if it names these as what fails in the dtype, and
wrong if it names others.

The advice of `compare` is carried out, too. It is right if the value that it says differs first is of a module at fault
or inside of it, or is one of `gradient`; where no module is at fault, if it names no output of any and does not rely on
the dtype. Where float32 itself fails it is right if it says so. It is wrong if it names another, or names none and
relies on the dtype.

A run is healthy if its losses, without those of skipped steps, are finite and those of float32 within the tolerance.
"""

import ast
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
FRAMEWORKS = ("torch", "jax", "tensorflow", "paddle", "mxnet")


@dataclass(frozen=True)
class Case:
    """A script and the truth about it; see above for the fields."""

    framework: str
    name: str
    dtype: str
    kinds: tuple[str, ...]
    modules: tuple[str, ...] = ()
    code: str = ""
    deny: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    edit: str = ""
    no_cure: str = ""
    gradient: tuple[str, ...] = ()
    float32: str = "healthy"
    tolerance: float = 0.05
    scale: float = 128.0
    seen: str = ""
    quick: bool = False
    held_out: bool = False
    healthy_by_run: bool = False

    @property
    def script(self) -> Path:
        return SCRIPTS / self.framework / f"{self.name}.py"


def cases(framework):
    """Return the cases of a framework, in the order of its file."""
    tables = tomllib.loads((SCRIPTS / framework / "truth.toml").read_text())
    return [
        Case(
            framework, name, **{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
        )
        for name, table in tables.items()
    ]


def imported(scripts):
    """Return the modules that scripts import, without those of Python: a process may import them beforehand."""
    lines = [line for script in scripts for line in ast.parse(script.read_text()).body]
    names = [line.module for line in lines if isinstance(line, ast.ImportFrom)]
    names += [alias.name for line in lines if isinstance(line, ast.Import) for alias in line.names]
    return [name for name in dict.fromkeys(names) if name not in sys.stdlib_module_names]


def options_of(script):
    """Walk over the arguments that a script is run with, and print which they are: none, `--cure`, `--twin`."""
    text = Path(script).read_text()
    for option in ("", "--cure", "--twin"):
        if option in text:
            print("--", option or "fails", flush=True)
            yield [option] if option else []


def losses_of(printed):
    """Return the losses that a script printed on its last line."""
    return [float(loss) for loss in json.loads(printed.splitlines()[-1])]


def applied(losses):
    """Return the losses without those of skipped steps: behind one, the same weights see the same batch again."""
    return [loss for position, loss in enumerate(losses) if position == 0 or loss != losses[position - 1]]


def is_healthy(losses, reference, tolerance):
    """Return whether losses are those of float32, as far as they go, and at least for half of the steps."""
    losses, reference = applied(losses), applied(reference)
    if len(losses) < len(reference) / 2 or not all(map(math.isfinite, losses)):
        return False
    errors = [abs(loss - exact) for loss, exact in zip(losses, reference, strict=False)]
    return max(errors) <= tolerance * max(map(abs, reference[: len(errors)]))
