"""`decorate`: an optimizer whose `minimize` casts the program, scales the loss, checks, and skips."""

from __future__ import annotations

from typing import Any, NoReturn

import paddle

import ampx
from ampx.errors import NotInitializedError, ProtocolError, UnsupportedByBackendError
from ampx.events import StepResult
from ampx_fluid.fluid.missing import refuse_missing
from ampx_fluid.fluid.optimizer import find_parameters
from ampx_fluid.fluid.programs import raw
from ampx_paddle.graph_rewrite import cast_program
from ampx_paddle.static import StaticOptimizer

from .fp16_lists import AutoMixedPrecisionLists

__all__ = ["OptimizerWithMixedPrecision", "decorate"]


class _Chosen:
    """The dtype of decorated optimizers, as passed to `install`."""

    dtype: str = "auto"


def choose_dtype(dtype: str) -> None:
    """Set what decorated optimizers compute in."""
    _Chosen.dtype = dtype


def decorate(
    optimizer: Any,
    amp_lists: AutoMixedPrecisionLists | None = None,
    init_loss_scaling: float = 2**15,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
    use_dynamic_loss_scaling: bool = True,
    use_pure_fp16: bool = False,
    use_fp16_guard: bool | None = None,
    use_bf16: bool = False,
) -> OptimizerWithMixedPrecision:
    """Return an optimizer that trains its program in mixed precision.

    Args:
        optimizer: An optimizer of fluid or Paddle.
        amp_lists: Changes to the lists of operators.
        init_loss_scaling: The first loss scale.
        incr_every_n_steps: Finite steps in a row before it grows.
        decr_every_n_nan_or_inf: Skipped steps in a row before it falls; one step with finite gradients between them
            starts the count anew.
        incr_ratio: It grows by this factor.
        decr_ratio: It falls by this factor, to 1 at least.
        use_dynamic_loss_scaling: False: it stays, and steps that are not finite are skipped all the same.
        use_pure_fp16: False: parameters stay in float32.
        use_fp16_guard: None or False: the whole program is cast.
        use_bf16: True asks for bfloat16 whatever the device prefers.

    Returns:
        An object with `minimize`, `get_loss_scaling` and `get_scaled_loss`.

    Raises:
        UnsupportedByBackendError: Pure float16 or its guard is asked for.
        UnsupportedDtypeError: The device cannot compute in the dtype that was asked for.
        InvalidOptionError: A number is not accepted.
    """
    if use_pure_fp16 or use_fp16_guard:
        raise UnsupportedByBackendError(
            "decorate got use_pure_fp16 or use_fp16_guard; accepted: float32 parameters, with the whole program cast. "
            "Leave them out."
        )
    if paddle.in_dynamic_mode():
        raise ProtocolError(
            "decorate was called in eager mode; accepted: static graphs, as in fluid. Call "
            "ampx_paddle.fluid.install() or paddle.enable_static() first, or use ampx.init and ampx.wrap_optimizer."
        )
    config = ampx.LossScale.static(float(init_loss_scaling))
    if use_dynamic_loss_scaling:
        config = ampx.LossScale(
            init_scale=float(init_loss_scaling),
            growth_interval=incr_every_n_steps,
            growth_factor=incr_ratio,
            backoff_factor=decr_ratio,
            hysteresis=decr_every_n_nan_or_inf,
            min_scale=min(1.0, float(init_loss_scaling)),
        )
    session = _session("bfloat16" if use_bf16 else _Chosen.dtype)
    wrapped = session.wrap_optimizer(optimizer, loss_scale=config)
    return OptimizerWithMixedPrecision(wrapped, session, amp_lists or AutoMixedPrecisionLists())


def _session(dtype: Any) -> ampx.Amp:
    """Return the running session, or one that casts nothing by itself: `minimize` casts what is built already."""
    try:
        return ampx.current("paddle")
    except NotInitializedError:
        return ampx.init("paddle", dtype=dtype, process_wide=False, nan_loss="skip")


class OptimizerWithMixedPrecision:
    """What `decorate` returns."""

    def __init__(self, optimizer: StaticOptimizer, session: ampx.Amp, lists: AutoMixedPrecisionLists) -> None:
        self.optimizer = optimizer  # what `ampx.wrap_optimizer` made of the script's optimizer
        self._session = session
        self._lists = lists

    def minimize(
        self, loss: Any, startup_program: Any = None, parameter_list: Any = None, no_grad_set: Any = None
    ) -> tuple[None, list[tuple[Any, Any]]]:
        """Cast the loss's program; add scaling, backward, check and update to it, once.

        The startup program initialises the loss scale too; `parameter_list` has parameters or their names.
        """
        program = loss.block.program
        parameters = find_parameters(loss, parameter_list)
        with paddle.static.program_guard(program, raw(startup_program)):
            self._cast(program)
            return self.optimizer.minimize(loss, raw(startup_program), parameters, no_grad_set)

    def get_loss_scaling(self) -> Any:
        """Return the loss scale as a value of the program, to fetch."""
        return self._built().ampx_values["scale"]

    def get_scaled_loss(self) -> Any:
        """Return the scaled loss as a value of the program, to fetch."""
        return self._built().ampx_values["scaled_loss"]

    def _built(self) -> StaticOptimizer:
        if not self.optimizer.ampx_values:
            raise ProtocolError(
                "the loss scale was asked for before minimize, which makes it; accepted: after it. Call minimize first."
            )
        return self.optimizer

    @property
    def last_step(self) -> StepResult | None:
        """What the last run of the program did; None before the first. Sync: some on an accelerator."""
        return self.optimizer.last_step

    @property
    def loss_scale(self) -> float:
        """The current loss scale. Sync: one on an accelerator."""
        return self.optimizer.loss_scale

    def amp_init(self, place: Any, scope: Any = None, test_program: Any = None, use_fp16_test: bool = False) -> None:
        """Do nothing, because parameters stay in float32; a clone for tests is cast if `use_fp16_test`."""
        if test_program is not None and use_fp16_test:
            self._cast(raw(test_program))

    def _cast(self, program: Any) -> None:
        lists, plan = self._lists, self._session.plan
        if plan is not None:
            cast_program(program, plan.dtype, lists.white, lists.black, lists.black_varnames)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: scaling, check and update belong together."""
        raise UnsupportedByBackendError(
            "backward and apply_gradients of a decorated optimizer are not offered one by one; accepted: minimize. "
            "Call that; it returns the pairs of parameters and gradients, and optimizers take grad_clip."
        )

    apply_gradients = apply_optimize = backward


__getattr__ = refuse_missing(__name__)
