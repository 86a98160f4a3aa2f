"""Products that TensorFlow's rewriter does not see are cast, and what computed in which dtype is counted.

The rewriter sees graphs only, and none that XLA compiles, and some dtypes it casts on no such device. What it does not
cast is cast one by one, where Python calls the same operations: float32 operands become low precision and the result
float32 again, as a script sees them under the rewriter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import context

from ampx.policy import Dtype
from ampx.run import Recorder, Sampler
from ampx_tensorflow import products, retracing
from ampx_tensorflow.casting import compute_dtype
from ampx_tensorflow.contexts import compiles

_IN_GRAPHS: Final = re.compile("MatMul|Einsum|Conv[23]D|Conv2d|RNN|LSTM|GRU")


class Operations(Sampler):
    """Casts products that are not rewritten from `start` on, and counts these and those of graphs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._on = self._casts = self._in_graphs = self._resting = False
        self._collecting = False
        self._sampled_runs = 0
        self._only_graphs = True
        self._traced_anew = ExitStack()

    def start(self, casts: bool = True) -> None:
        """Count from now on, collecting the graphs that TensorFlow rewrites, and cast as the session says."""
        self._casts = casts
        if self._on:
            return
        self._on = True
        self._collecting = self.recorder.sampling
        if self._collecting:
            context.enable_graph_collection()

    def cast_in_graphs(self) -> None:
        """Cast products one by one in graphs, too, which are not rewritten; those of functions are made anew."""
        if not self._in_graphs:
            self._in_graphs = True
            self._traced_anew.enter_context(retracing.anew())

    def after_step(self) -> None:
        """Count the products of graphs where enough was seen."""
        if not self.recorder.sampling:
            self.take_down()

    def take_down(self) -> None:
        """Count the products of the graphs that TensorFlow has made since the last call."""
        if not self._collecting:
            return
        for graphs in context.export_run_metadata().function_graphs:  # which also ends the collection
            self.count_graph(graphs.post_optimization_graph)
        self._collecting = self.recorder.sampling
        if self._collecting:
            context.enable_graph_collection()

    def stop(self) -> None:
        """Leave TensorFlow as it was."""
        self.take_down()
        if self._collecting:
            context.disable_graph_collection()
        self._on = self._collecting = self._in_graphs = False
        self._traced_anew.close()
        if self._only_graphs:
            self.recorder.sampled_steps = 1  # a graph is counted once, not once a step

    def run_session(self, run: Callable[..., Any], session: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a session of TensorFlow 1, counting products in the first runs that have any."""
        # A MonitoredSession passes options that ask for nothing, and metadata that stays empty.
        asked = kwargs.get("options")
        own = len(args) > 2 or (asked is not None and bool(asked.ListFields()))
        if own or not self._on or self._sampled_runs >= self.recorder.sampled_steps:
            return run(session, *args, **kwargs)
        v1 = tf.compat.v1
        metadata, options = v1.RunMetadata(), v1.RunOptions(output_partition_graphs=True)
        result = run(session, *args, **{**kwargs, "options": options, "run_metadata": metadata})
        before = self.recorder.ops.total()
        for graph in metadata.partition_graphs:
            self.count_graph(graph)
        if self.recorder.ops.total() > before:
            self._sampled_runs += 1
            self._only_graphs = False
        return result

    def count_graph(self, graph: Any) -> None:
        """Count the products of a graph after rewriting: each once, however often a loop in it runs."""
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        if sum(not node.op.endswith(("Arg", "Retval")) for node in nodes) <= 2:
            return  # TensorFlow makes such a graph, twice, for an operation outside of graphs
        for node in nodes:
            if _IN_GRAPHS.search(node.op) and "T" in node.attr:
                name = node.op.removeprefix("_Mkl").removeprefix("_").removeprefix("Native")
                self.recorder.count_op(name, tf.dtypes.as_dtype(node.attr["T"].type).name)

    @property
    def applies(self) -> bool:
        """Whether products are looked at one by one."""
        return self._on and (self._in_graphs or tf.executing_eagerly() or compiles())

    def dtype(self) -> Dtype:
        """Return the dtype of products that are looked at one by one."""
        return compute_dtype() if self._casts and not self._resting else "float32"

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Return a region that casts nothing: the gradient of a product that was cast is low precision by itself."""
        before, self._resting = self._resting, True
        try:
            yield
        finally:
            self._resting = before

    def count_product(self, kind: str, dtype: str) -> None:
        """Count a product outside of graphs each time, and one that XLA compiles once a trace."""
        if not self.recorder.sampling:
            return
        if tf.executing_eagerly():
            self._only_graphs = False
            self.recorder.count_op(kind, dtype)
        elif compiles():
            self.recorder.count_op(kind, dtype)


@contextmanager
def products_cast(operations: Operations) -> Iterator[None]:
    """Patch TensorFlow's functions of products."""
    with products.cast(operations.dtype, lambda: operations.applies, operations.count_product):
        yield
