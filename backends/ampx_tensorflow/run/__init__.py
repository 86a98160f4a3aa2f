"""`ampx run` in TensorFlow: a script that knows nothing of ampx trains in mixed precision.

A model that Keras compiles and trains by itself is cast by its layers' policies, as by hand: all but those that give
the outputs. Everything else is cast by the graph rewriter, and outside of graphs product by product, so that the script
sees float32 everywhere: loops over `GradientTape`, models with a training step of their own, graphs of TensorFlow 1.

The script is not ours to edit: TensorFlow is patched, and every patch ends with the region that `automate` opens:

- `manager`: how optimizers of Keras are made and applied;
- `gradients`: `tf.GradientTape`, so that the loss is scaled, and the script sees true gradients only;
- `models`: how Keras compiles and fits models;
- `operations`: products outside of graphs, and what computed in which dtype;
- `tf1`: optimizers and sessions of TensorFlow 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ampx.run import Run

from .gradients import tapes_watched
from .manager import KerasManager, optimizers_managed, rewrites_started
from .models import models_cast
from .operations import products_cast
from .tf1 import graphs_managed


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Patch TensorFlow for a script that is not edited: see `ampx.run`."""
    patches = (rewrites_started, optimizers_managed, tapes_watched, models_cast, products_cast, graphs_managed)
    with KerasManager(run).region(*patches):
        yield
