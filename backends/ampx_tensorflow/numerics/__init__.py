"""The verbs of the precision debugger in TensorFlow: watch, force and replay."""

from __future__ import annotations

from .forcing import SIMULATED as SIMULATED, force as force
from .replaying import clock as clock, replay as replay
from .watching import watch as watch
