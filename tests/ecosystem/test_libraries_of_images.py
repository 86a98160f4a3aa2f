"""Libraries of images for PyTorch: those that need torchvision."""

import pytest
from commands import EveryCommand

pytest.importorskip("timm", reason="timm is not installed")


class TestLibraries(EveryCommand):
    framework = "torch"
    scripts = (
        "timm_classifier",
        "torchvision_classifier",
    )
