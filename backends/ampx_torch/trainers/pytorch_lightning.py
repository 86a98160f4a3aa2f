"""Precision plugins for the Trainer of `pytorch_lightning`, and for its Fabric, `lightning_fabric`."""

from __future__ import annotations

from lightning_fabric.plugins.precision import Precision as FabricPrecision
from pytorch_lightning.plugins.precision import Precision

from .precision import ForFabric, ForTrainer


class AmpxPrecision(ForTrainer, Precision):
    """Has the Trainer cast, scale and step by ampx: `pytorch_lightning.Trainer(plugins=AmpxPrecision(amp))`."""

    package = "pytorch_lightning; ampx_torch.trainers.lightning has the one for lightning"


class AmpxFabricPrecision(ForFabric, FabricPrecision):
    """Has Fabric cast, scale and step by ampx: `lightning_fabric.Fabric(plugins=AmpxFabricPrecision(amp))`."""

    package = "lightning_fabric; ampx_torch.trainers.lightning has the one for lightning"
