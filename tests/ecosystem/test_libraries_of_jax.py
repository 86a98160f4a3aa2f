"""Libraries that people train JAX with."""

import pytest
from commands import EveryCommand

pytest.importorskip("diffrax", reason="Diffrax, and with it the other libraries, is not installed")


class TestLibraries(EveryCommand):
    framework = "jax"
    exact = False  # XLA fuses a program otherwise that a step of ampx is part of
    scripts = (
        "diffrax_neural_ode",
        "equinox_module",
        "flax_linen",
        "flax_nnx",
        "optax_by_hand",
        "optimistix_inner_solve",
    )
