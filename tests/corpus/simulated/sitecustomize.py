"""Put on PYTHONPATH: every Python gets the simulated GPU of Paddle or MXNet, which their float16 needs."""

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
