"""Precision plugins for the Trainer and for Fabric of the package `lightning`."""

from __future__ import annotations

from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import Precision

from .precision import ForFabric, ForTrainer


class AmpxPrecision(ForTrainer, Precision):
    """Has the Trainer cast, scale and step by ampx: `lightning.Trainer(plugins=AmpxPrecision(amp))`."""

    package = "lightning; ampx_torch.trainers.pytorch_lightning has the one for pytorch_lightning"


class AmpxFabricPrecision(ForFabric, FabricPrecision):
    """Has Fabric cast, scale and step by ampx: `lightning.Fabric(plugins=AmpxFabricPrecision(amp))`."""

    package = "lightning; ampx_torch.trainers.pytorch_lightning has the one for lightning_fabric"
