"""Libraries that people train Keras with."""

import pytest
from commands import EveryCommand

pytest.importorskip("keras_hub", reason="KerasHub is not installed")


class TestLibraries(EveryCommand):
    framework = "tensorflow"
    scripts = ("keras_hub_by_hand", "keras_hub_fit")
