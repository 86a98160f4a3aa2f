"""`ampx run` in PyTorch: a script that knows nothing of ampx trains in mixed precision.

The only package of this backend that patches torch: the script is not ours to edit, and every patch ends with the
region that `automate` gives. What is patched, one module each:

- `managing`: `torch.optim.Optimizer.__init__`, so that every optimizer of the script gets a loss scale;
- `differentiating`: `torch.autograd.backward`, so that the loss is scaled for the optimizers it reaches;
- `reading`: `torch.Tensor.grad` and hooks on gradients, so that the script sees true gradients only;
- `native`: `torch.autocast` and `GradScaler`, which are refused, or carried out by ampx.
"""

from __future__ import annotations

from .patches import automate as automate
