"""`ampx run` in PaddlePaddle: a script that knows nothing of ampx trains in mixed precision.

The only package of this backend that patches Paddle: the script is not ours to edit, and every patch ends with the
region that `automate` gives. What is patched, one module each:

- `managing`: `paddle.optimizer.Optimizer.__init__`, so that every optimizer of the script gets a loss scale;
- `differentiating`: the two functions that run backward, so that the loss is scaled;
- `reading`: `Tensor.grad` and hooks on gradients, so that the script sees true gradients only;
- `native`: Paddle's own `auto_cast`, `GradScaler` and `decorate`, which are refused;
- `static`: programs of static graphs, which are cast and scaled by `minimize`; and `import paddle.fluid`.
"""

from __future__ import annotations

from .patches import automate as automate
