"""`ampx run` in TensorFlow: a script that knows nothing of ampx trains in mixed precision.

A model that Keras compiles and trains by itself is cast by its layers' policies, as by hand: all but those that give
the outputs. Everything else is cast by the graph rewriter, and product by product outside of graphs and where it casts
nothing, so that the script sees float32 everywhere: loops over `GradientTape`, models with a training step of their
own, graphs of TensorFlow 1.

The script is not ours to edit: TensorFlow is patched, and every patch ends with the region that `automate` opens:

- `manager`: how optimizers of Keras are made and applied;
- `gradients`: `tf.GradientTape`, so that the loss is scaled, and the script sees unscaled gradients only;
- `own_gradients`: gradient functions that the script wrote, which get unscaled gradients;
- `debugging`: TensorFlow's own debuggers, which see the loss scale;
- `models`: how Keras compiles and fits models;
- `operations`: products that are not rewritten, and what computed in which dtype;
- `observing`: functions that are called, where somebody looks on;
- `tf1`: optimizers and sessions of TensorFlow 1, and optimizers of Keras 2, where their former names are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

from ampx.backend import MODULE, CastPlan
from ampx.modules import module_dtypes
from ampx.policy import Dtype
from ampx.rooms import import_part, is_there
from ampx.run import Automation, Run
from ampx_tensorflow import devices, numerics
from ampx_tensorflow.numerics import forcing
from ampx_tensorflow.numerics.watching import uncompiled

from .debugging import debuggers_noted
from .gradients import tapes_watched
from .manager import KerasManager, optimizers_managed
from .models import models_cast
from .operations import products_cast
from .own_gradients import own_gradients_true


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Patch TensorFlow for a script that is not edited: see `ampx.run`."""
    run.refuse_preparation()
    refuse_operations(run)
    run.backward = "gradients = scaled.gradient(tape, variables)"
    former = import_part("ampx_tensorflow.run.tf1", "ampx run") if is_there("ampx_tensorflow.old") else None
    manager = KerasManager(run)
    patches = (
        *((former.rewrites_started, former.own_scaling_noted) if former else ()),
        optimizers_managed,
        lambda _: own_gradients_true(manager.own_gradients),
        lambda _: debuggers_noted(manager.debuggers),
        tapes_watched,
        models_cast,
        lambda _: products_cast(manager.operations),
        *((former.graphs_managed,) if former else ()),
    )
    with ExitStack() as stack:
        if run.settings.watched:
            stack.enter_context(uncompiled())
        if run.recorder.observer is not None:
            stack.enter_context(manager.observing.counting(manager.count_one_by_one))
        elif run.recorder.curve is not None:
            stack.enter_context(manager.observing.drawing(run.recorder.curve, manager.counters))
        manager.forced = forced_dtypes(run)
        if manager.forced:
            stack.enter_context(modules_forced(run, manager.forced))
        manager.forces = forcing.is_active()
        stack.enter_context(manager.region(*patches))
        yield


def refuse_operations(run: Run) -> None:
    """Refuse entries that name operations: here neither layers nor the rewriter can keep them.

    Raises:
        RunRefusedError: There is one.
    """
    entries = (*run.settings.allow, *run.settings.deny)
    names = ", ".join(repr(entry) for entry in entries if not entry.startswith(MODULE))
    if names:
        run.refuse(
            f"allow and deny name {names}; accepted by ampx run in TensorFlow: names of modules, as 'module:name'. "
            f"Only functions that ampx.prepare is passed know operations",
            where="",
        )


def forced_dtypes(run: Run) -> dict[str, str]:
    """Return the dtypes of modules that the settings name, in every model; what is denied comes last, and holds."""
    if run.settings.dtype == "float32":
        return {}
    low = devices.describe(run.settings.device).preferred if run.settings.dtype == "auto" else run.settings.dtype
    allowed = run.settings.allow if low else ()
    dtypes = module_dtypes(CastPlan(run.settings.device, cast(Dtype, low), allow=allowed, deny=run.settings.deny))
    return {each: dtype for pattern, dtype in dtypes.items() for each in (pattern, f"*:{pattern}")}


@contextmanager
def modules_forced(run: Run, dtypes: dict[str, str]) -> Iterator[None]:
    """Compute modules in dtypes of their own; note patterns that matched none."""
    with numerics.force(None, dtypes) as forced:
        yield
        unmatched = forced.unmatched()
        for pattern in unmatched:
            if f"*:{pattern}" in unmatched:
                run.recorder.note(f"'module:{pattern}' matched no module that was called")


class TensorFlowAutomation(Automation):
    """Patches the framework: see `automate`."""

    automate = staticmethod(automate)
