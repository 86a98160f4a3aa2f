"""Train a small network on scikit-learn's digits, ship it in float32 and low precision: size, error, speed.

    python benchmarks/shipped.py --out FOLDER

The network has a convolution, normalization and two wide dense layers. Per dtype and runtime the two models take turns
being timed; where ONNX packages are installed, the exported files are, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import platform
import warnings
from pathlib import Path

import numpy as np
import torch
from _paired import Ratio, paired
from sklearn.datasets import load_digits
from torch import nn

import ampx

SEED, EPOCHS, ROWS = 0, 8, 256


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 64, width),
        nn.LayerNorm(width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, 10),
    )


def trained(width: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the network, and images and labels that it has not seen."""
    torch.manual_seed(SEED)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    model = network(width)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(1347).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval(), x[1347:], y[1347:]


def exported(model: nn.Module, batch: torch.Tensor, file: Path) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (batch,), file, dynamo=True, external_data=False, verbose=False, dynamic_shapes=({0: "n"},)
        )


def error(value: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(value - reference) / np.linalg.norm(reference))


def row(
    name: str, dtype: str, files: tuple[Path, Path], off: float, accuracy: float, speed: Ratio
) -> dict[str, object]:
    sizes = [file.stat().st_size for file in files]
    return {
        "runtime": name,
        "dtype": dtype,
        "bytes_float32": sizes[0],
        "bytes": sizes[1],
        "error": off,
        "accuracy": accuracy,
        "time": speed.to_json(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    onnx = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
    model, images, labels = trained(options.width)
    batch, rows = images[:ROWS], []
    with torch.no_grad():
        reference = model(images).numpy()
    base = options.out / "float32.pt"
    torch.save(model.state_dict(), base)
    if onnx:
        exported(model, batch, options.out / "float32.onnx")
    for dtype in ("float16", "bfloat16"):
        low = ampx.convert(model, dtype, batches=[images])
        file = options.out / f"{dtype}.pt"
        torch.save(low.state_dict(), file)
        with torch.no_grad():
            values = low(images).numpy()
            speed = paired(lambda low=low: low(batch), lambda: model(batch), pairs=options.pairs)
        right = float((values.argmax(-1) == labels.numpy()).mean())
        rows.append(row("PyTorch", dtype, (base, file), error(values, reference), right, speed))
        if onnx and dtype == "float16":  # ONNX Runtime's CPU provider has no kernels for bfloat16
            import onnxruntime

            settings = onnxruntime.SessionOptions()
            settings.intra_op_num_threads = 1
            files = options.out / "float32.onnx", options.out / "float16.onnx"
            exported(low, batch, files[1])
            wide, half = (
                onnxruntime.InferenceSession(file, settings, providers=["CPUExecutionProvider"]) for file in files
            )
            name = wide.get_inputs()[0].name
            (values,) = half.run(None, {half.get_inputs()[0].name: images.numpy()})
            feed = {name: batch.numpy()}
            speed = paired(
                lambda half=half, feed=feed: half.run(None, feed),
                lambda wide=wide, feed=feed: wide.run(None, feed),
                pairs=options.pairs,
            )
            right = float((values.argmax(-1) == labels.numpy()).mean())
            rows.append(row("ONNX Runtime", dtype, files, error(values, reference), right, speed))
    accuracy = float((reference.argmax(-1) == labels.numpy()).mean())
    result = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "accuracy": accuracy}
    (options.out / "shipped.json").write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")
    print(json.dumps({**result, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
