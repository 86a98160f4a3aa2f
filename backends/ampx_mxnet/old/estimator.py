"""Gluon's Estimator, whose own loop runs backward without scaling the loss."""

from __future__ import annotations

import importlib
from typing import Any

import ampx
from ampx_mxnet.compat import mx
from ampx_mxnet.dtypes import cast

# Not an import statement, which would stand before that of `compat`.
native: Any = importlib.import_module("mxnet.gluon.contrib.estimator")


class BatchProcessor(native.BatchProcessor):
    """Trains on a batch as gluon's own does, through `scale_loss`; for an Estimator with a wrapped trainer."""

    def fit_batch(
        self, estimator: Any, train_batch: Any, batch_axis: int = 0
    ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Run forward and backward on one batch.

        Args:
            estimator: The Estimator; its trainer comes from `wrap_optimizer`.
            train_batch: Data and labels.
            batch_axis: The axis to split for the contexts.

        Returns:
            Data, labels, predictions and losses by context; predictions in float32, as metrics want them.

        Raises:
            NotWrappedError: The trainer is not wrapped.
        """
        data, labels = self._get_data_and_label(train_batch, estimator.context, batch_axis)
        with mx.autograd.record():
            predictions = [estimator.net(batch) for batch in data]
            losses = [estimator.loss(*pair) for pair in zip(predictions, labels, strict=True)]
        with ampx.scale_loss(losses, estimator.trainer) as scaled:
            mx.autograd.backward(scaled)
        return data, labels, cast(predictions, "float32"), losses

    def evaluate_batch(
        self, estimator: Any, val_batch: Any, batch_axis: int = 0
    ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Run forward on one batch; predictions in float32."""
        data, labels, predictions, losses = super().evaluate_batch(estimator, val_batch, batch_axis)
        return data, labels, cast(predictions, "float32"), losses
