"""Libraries that people train JAX with."""

import pytest
from commands import EveryCommand

pytest.importorskip("diffrax", reason="Diffrax, and with it the other libraries, is not installed")


class TestLibraries(EveryCommand):
    framework = "jax"
    scripts = (
        "diffrax_neural_ode",
        "equinox_module",
        "flax_linen",
        "flax_nnx",
        "optax_by_hand",
        "optimistix_inner_solve",
    )
