"""`ampx run` in PyTorch: a script that knows nothing of ampx trains in mixed precision.

The script is not ours to edit: torch is patched, and every patch ends with the region that `automate` opens:

- `manager`: `torch.optim.Optimizer.__init__`, so that every optimizer of the script gets a loss scale;
- `backward`: `torch.autograd.backward`, so that the loss is scaled for the optimizers it reaches;
- `gradients`: `torch.Tensor.grad` and hooks on gradients, so that the script sees true gradients only;
- `native` and `scaler`: `torch.autocast` and `GradScaler`, which are refused, or carried out by ampx;
- `old_names`: `import apex`, which ampx provides where it is missing.
"""

from __future__ import annotations

from .patches import automate as automate
