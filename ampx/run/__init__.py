"""What the core and a backend share while `ampx run` trains an unedited script.

`ampx run` makes one `Run` for each framework that the script imports, and calls the backend's `automate(run)` as
soon as the import is complete. What the backend patches there asks the `Run` for the session, tells its `Recorder`
what it sees, and refuses through it what it cannot do safely. Nothing here imports a framework.

The contract of `automate(run)`, which a backend offers as `Automation`:

- `ampx run` enters the region when the script has imported the framework, and leaves it when the script has ended.
  The backend patches its framework there and nowhere else: the script is not ours to edit. Leaving the region restores
  everything, whatever happened inside, and ends the session with `run.close()`.
- Every optimizer (or trainer) that the script makes inside is managed: from then on `run.session()` has started
  casting, the optimizer is wrapped as `wrap_optimizer` does, and `run.recorder.add_optimizer` was told. The script's
  object keeps its class, so that `isinstance` and subclasses of the script's own go on to work.
- The framework's backward scales the loss for the optimizers that it reaches, inside
  `run.recorder.phase("backward")`. The optimizer's step unscales, skips and moves the scale, inside
  `run.recorder.phase("step")`, and `run.recorder.stepped(group)` follows. What the script reads between the two,
  gradients that it clips for instance, is unscaled.
- While `run.recorder.sampling`, `run.recorder.count_op` is told what ran in which dtype.
- Where `run.recorder.takes_gradients` is there and the backend can tell, it is called with the shapes of what an
  optimizer trains, and samples of the gradients and of the weights before the step, in every step: `ampx diagnose`
  names risks by them, and weights that a run rounds. Each parameter has a name that no other one of the run has.
- `Manager.rates_of` returns an optimizer's learning rates, where the framework says them: by them `ampx diagnose` finds
  the step in which a script's schedule decided by a number that came out otherwise in low precision. It is asked where
  there is an observer only.
- What cannot be automated safely is refused by `run.refuse(reason)`: mixed precision of the script's own (unless
  `run.settings.replace_native`, where the backend can put ampx underneath), gradients that come by ways which it does
  not see, closures that it cannot see through. Errors of ampx that come from the script's calls are refusals, too.
  Errors of the framework reach the script as they are.
- A session that the script starts itself, by an old recipe or by ampx, is recorded and not touched: the backend calls
  `run.record_own_sessions` on entering, does nothing of its own while `run.stood_down`, and goes on to time and count.
- Where a framework has no such moments (`fit` of Keras, a compiled step of JAX), the backend does what has the same
  effect, and uses the one phase `"train"`.
- Where the lines of code of `Run.explain` do not fit the framework, the backend sets `run.lines`.

The kit tests it (`ampx.testing.kit.automation`); `tests/kit/toy/automation.py` is the smallest example.
"""

from __future__ import annotations

from ampx.callers import (
    is_script_code as is_script_code,
    is_script_function as is_script_function,
    script_line as script_line,
)

from .backward import ScriptBackward as ScriptBackward
from .imports import ImportAlias as ImportAlias, ImportWatch as ImportWatch, spec_of as spec_of
from .manager import (
    Managed as Managed,
    Manager as Manager,
    Sampler as Sampler,
    asked_by_script as asked_by_script,
    asking_code as asking_code,
)
from .patches import patched as patched
from .recorder import (
    GRADIENT_SAMPLES as GRADIENT_SAMPLES,
    LossCurve as LossCurve,
    Recorder as Recorder,
    SampledGradient as SampledGradient,
    with_weights as with_weights,
)
from .run import Automation as Automation, Run as Run, RunSettings as RunSettings
from .script_code import ScriptCode as ScriptCode
