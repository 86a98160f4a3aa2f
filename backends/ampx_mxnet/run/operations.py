"""Which layers and operators ran in which dtype, looked at in the first steps only."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ampx_mxnet.casting.hybrid import nodes
from ampx_mxnet.casting.numpy_extension import computed
from ampx_mxnet.compat import mx
from ampx_mxnet.dtypes import is_floating, name_of

from .manager import TrainerManager


@contextmanager
def blocks_watched(manager: TrainerManager) -> Iterator[None]:
    """Patch the call of blocks: a layer counts by its class, a hybridized network by the operators of its graph.

    MXNet calls its operators through functions that are made at import, and cannot be watched one by one.
    """
    true = mx.gluon.Block.__call__
    recorder = manager.run.recorder
    graphs: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def call(self: Any, *args: Any) -> Any:
        vars(computed).clear()
        result = true(self, *args)
        if manager.run.amp is None or not recorder.sampling or not isinstance(result, mx.nd.NDArray):
            return result
        # A block that is not hybridized has a graph, too, where that told the shapes of its parameters.
        active = getattr(self, "_active", False) or isinstance(self, mx.gluon.SymbolBlock)
        if active and self._cached_graph:
            graph = graphs.get(self)
            if graph is None or graph[0] is not self._cached_op:
                graph = graphs[self] = self._cached_op, list(_operators(self._cached_graph[1]))
            for name, dtype in graph[1]:
                recorder.count_op(name, dtype)
        elif not self._children and is_floating(result):
            recorder.count_op(type(self).__name__, getattr(computed, "dtype", name_of(result.dtype)))
        return result

    with mock.patch.object(mx.gluon.Block, "__call__", call):
        yield


def _operators(symbol: Any) -> Iterator[tuple[str, str]]:
    """Return the operators of a graph, and what they compute in: the dtype of casts in front of them, else float32."""
    graph = nodes(symbol)
    for node in graph:
        if node["op"] in ("null", "amp_cast", "amp_multicast"):
            continue
        sources = [graph[source[0]] for source in node["inputs"]]
        casts = {source["attrs"]["dtype"] for source in sources if source["op"] == "amp_cast"}
        yield node["op"], min(casts, default="float32")
