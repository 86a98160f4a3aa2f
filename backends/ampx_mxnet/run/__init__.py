"""`ampx run` in MXNet: a script that knows nothing of ampx trains in mixed precision.

Only here, beside `casting`, does this backend patch MXNet: the script is not ours to edit, and every patch ends with
the region that `automate` gives. What is patched, one module each:

- `managing`: `gluon.Trainer.__init__`, so that every trainer of the script gets a loss scale;
- `differentiating`: the two functions that run backward, so that the loss is scaled;
- `reading`: the ways to a gradient, so that the script sees true gradients only;
- `sampling`: the call of blocks, to tell what ran in which dtype.

`ampx_mxnet.amp` stands in for MXNet's own amp meanwhile: a script that uses that runs on ampx.
"""

from __future__ import annotations

from .patches import automate as automate
