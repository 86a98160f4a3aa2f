"""Put on PYTHONPATH: every Python gets the simulated GPU of Paddle or MXNet, which their float16 needs.

Scripts of PyTorch make their tensors on the GPU that is there, or on the simulated one; those of JAX do so themselves.
"""

import importlib.util
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "kit"))
framework = os.environ.get("CORPUS_SIMULATES", "")
if framework and importlib.util.find_spec(framework):
    simulated = importlib.import_module(f"simulated_{framework}")
    simulated.start(ROOT / ".pytest_cache" / "simulated-cuda")
    if framework == "paddle":
        sys.modules["paddle"].set_device("gpu")
if os.environ.get("CORPUS_DEVICE") == "torch":
    if os.environ.get("AMPX_SIMULATE_CUDA"):
        importlib.import_module("simulated_cuda").start(ROOT / ".pytest_cache" / "simulated-cuda")
    importlib.import_module("torch").set_default_device("cuda")
