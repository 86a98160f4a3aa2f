"""Every test of apex.amp starts as a fresh process would."""

import pytest

from ampx_torch.apex.amp import _amp_state, registry
from ampx_torch.apex.amp.properties import Properties


@pytest.fixture(autouse=True)
def _fresh():
    yield
    registry.forget()
    _amp_state.session = _amp_state.handle = None
    _amp_state.opt_properties, _amp_state.initialized, _amp_state.loss_scalers = Properties(), False, []
    _amp_state.optimizers.clear()
    _amp_state.models.clear()
