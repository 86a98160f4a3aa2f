"""One training step through ampx in PyTorch against the same network in Keras 3 on its torch engine, both in bfloat16.

Keras trains with `train_on_batch` and the `mixed_bfloat16` policy; it computes the loss in bfloat16's own layers'
output cast to float32, and looks at no gradient. Same weights, same data, plain SGD; the losses are compared first.
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from _paired import limited, paired
from recipes import by_ampx
from whole_step import check
from workloads import Workload, mlp

SIZES = ((32, 64, 64, 32, 200), (1024, 4096, 1024, 256, 24))
"""Inputs, first and second hidden layer, batch, pairs."""


def measure(inputs: int, hidden: int, outputs: int, batch: int, pairs: int) -> dict[str, object]:
    """Time one multilayer perceptron in both.

    Raises:
        AssertionError: They do not train alike, so that a ratio would mean nothing.
    """
    torch.manual_seed(0)
    workload = Workload(
        f"MLP {inputs}-{hidden}-{outputs}-10, batch {batch}, SGD",
        lambda: mlp(inputs, hidden, outputs),
        lambda: (torch.randn(batch, inputs), torch.randint(0, 10, (batch,))),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )
    model = workload.model()
    data = workload.batch()
    policy = keras.DTypePolicy("mixed_bfloat16")
    layers = [keras.layers.Dense(units, activation, dtype=policy) for units, activation in _layers(hidden, outputs)]
    theirs = keras.Sequential([keras.Input((inputs,)), *layers])
    for layer, linear in zip(layers, (module for module in model if hasattr(module, "weight")), strict=True):
        layer.set_weights([linear.weight.detach().T.numpy(), linear.bias.detach().numpy()])
    theirs.compile(
        keras.optimizers.SGD(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
    )
    ours = by_ampx(workload, model, workload.optimizer(list(model.parameters())), "bfloat16", False)

    def keras_off() -> None:
        torch.set_autocast_enabled("cpu", False)  # Keras casts by itself

    try:
        ours.before()
        our_losses = [ours.step(data).item() for _ in range(4)]
        keras_off()
        their_losses = [float(theirs.train_on_batch(*data)) for _ in range(4)]
        check(our_losses[:1], their_losses[:1], "bfloat16")
        result = paired(
            lambda: ours.step(data),
            lambda: theirs.train_on_batch(*data),
            pairs=pairs,
            before_a=ours.before,
            before_b=keras_off,
        )
    finally:
        ours.close()
    return {"against": "Keras 3 on torch", "workload": workload.name, "dtype": "bfloat16", **result.to_json()}


def _layers(hidden: int, outputs: int) -> list[tuple[int, str | None]]:
    return [(hidden, "relu"), (outputs, "relu"), (10, None)]


STEPS = len(SIZES)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure every size."""
    rows = []
    for *size, pairs in limited(SIZES):
        rows.append(measure(*size, max(pairs // (4 if quick else 1), 8)))
        advance()
    return rows


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for row in run("--quick" in sys.argv):
        print(row)
