"""Libraries of images for PyTorch: those that need torchvision."""

import pytest
from commands import EveryCommand

pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture(autouse=True)
def _works():
    try:
        pytest.importorskip("timm", reason="timm is not installed")
    except RuntimeError as error:  # torchvision for CUDA beside PyTorch for CPUs: its operators are missing
        pytest.skip(f"timm cannot be imported in plain Python: {error}")


class TestLibraries(EveryCommand):
    framework = "torch"
    scripts = (
        "timm_classifier",
        "torchvision_classifier",
    )
