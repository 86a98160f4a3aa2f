"""For every optional ability, the call that must raise where the ability is not declared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest

import ampx
from ampx import debug
from ampx.backend import offer

from .base import KitTests
from .bench import FINITE
from .checks import refused


def _not_supported(suite: KitTests, call: Callable[[], Any]) -> None:
    """Expect a refusal that names the backend and its declared abilities."""
    with refused(ampx.UnsupportedByBackendError, passed=repr(suite.backend.name), accepted="", advice="Leave"):
        call()


def _explicit_only(suite: KitTests, call: Callable[[Any], Any]) -> None:
    """Expect that a call on gradients which only `step` sees is a protocol error, and changes nothing."""
    bench = suite.bench(suite.start())
    bench.accumulate()
    with refused(ampx.ProtocolError, passed="gradients as values", accepted="max_grad_norm", advice="Pass it there"):
        call(bench.opt)
    assert bench.step().applied


def _needs_casting(suite: KitTests) -> None:
    if not suite.declares("casting"):
        pytest.skip(f"backend {suite.backend.name!r} casts nothing, so there is no casting option to refuse")


def _clipping(suite: KitTests) -> None:
    amp = suite.start()
    bench = suite.plain()
    for bound in ("max_grad_norm", "max_grad_value"):
        _not_supported(suite, partial(amp.wrap_optimizer, bench.raw, **{bound: 1.0}))
    assert amp.state_dict()["groups"] == []
    assert bench.wrap(amp).train().applied
    if isinstance(backend := suite.backend, ampx.GenericBackend):
        _not_supported(suite, lambda: backend.clip([], 1.0, None))


def _clip_grad_norm(suite: KitTests) -> None:
    if suite.declares("clipping"):
        _explicit_only(suite, lambda opt: ampx.clip_grad_norm(opt, 1.0))
        return
    bench = suite.bench(suite.start())
    bench.accumulate()
    _not_supported(suite, lambda: ampx.clip_grad_norm(bench.opt, 1.0))
    assert bench.step().applied


def _per_loss_scales(suite: KitTests) -> None:
    bench = suite.bench(suite.start())
    before = bench.saved()
    _not_supported(suite, lambda: bench.accumulate(loss_id=1))
    assert bench.saved() == before
    assert bench.train().applied


def _op_lists(suite: KitTests) -> None:
    if suite.backend.capabilities.op_lists:  # only the harness's device casts nothing: entries are checked all the same
        for option in ("allow", "deny"):
            with refused(ampx.UnsupportedOpError, passed="object", accepted="accepted: ", advice=""):
                suite.start(**{option: [object()]})
        return
    _not_supported(suite, lambda: suite.start(allow=["anything"]))
    _not_supported(suite, lambda: suite.start(deny=["anything"]))
    assert suite.subject.casting() == suite.outside


def _names_gradients(suite: KitTests) -> None:
    bench = suite.bench(suite.start())
    bench.train()
    _not_supported(suite, lambda: debug.nonfinite_parameters(bench.opt))


def _probe(suite: KitTests) -> None:
    from ampx.numerics.probe import Probe  # refusals are looked up without it, too

    suite.start()
    _not_supported(suite, lambda: ampx.trace_overflow(suite.subject.parameter([1.0])))
    _not_supported(suite, lambda: offer(suite.backend, Probe))


def _promotes(suite: KitTests) -> None:
    _needs_casting(suite)
    suite.start()
    function = ampx.promote_function(suite.subject.dtype_of)
    _not_supported(suite, lambda: function(suite.subject.tensor([1.0], "float32")))


def _closures(suite: KitTests) -> None:
    if suite.declares("explicit gradients"):
        pytest.skip("gradients are values: the argument of step is the gradients, so there is no closure to refuse")
    bench = suite.bench(suite.start())
    bench.accumulate()
    before = bench.snapshot()
    _not_supported(suite, lambda: suite.subject.step_closure(bench.opt, lambda: bench.loss(FINITE)))
    assert bench.snapshot() == before


def _casting(suite: KitTests) -> None:
    if "O1" not in suite.backend.capabilities.levels:
        with pytest.raises(ampx.UnsupportedByBackendError):
            suite.start(level="O1")
        return
    with refused(
        ampx.UnsupportedDtypeError, passed=repr(suite.subject.dtype), accepted="only float32", advice="Choose"
    ):
        suite.start(level="O1", dtype=suite.subject.dtype)
    assert suite.subject.casting() == suite.outside


def _prepare(suite: KitTests) -> None:
    for level in sorted({"O2", "O3"} - suite.backend.capabilities.levels):
        with refused(ampx.UnsupportedByBackendError, passed=f"level='{level}'", accepted="O0", advice="Choose"):
            suite.start(level=level)
    assert suite.subject.casting() == suite.outside
    if suite.declares("casting"):
        model = object()
        assert suite.start().prepare(model) is model, "O1 needs nothing"


def _optimizer_objects(suite: KitTests) -> None:
    """Expect that nothing is asked of the session which only the optimizer state knows."""
    amp = suite.start()
    bench = suite.bench(amp)
    for call in (amp.state_dict, lambda: amp.load_state_dict(bench.state_dict())):
        with refused(ampx.UnsupportedByBackendError, passed="need the optimizer state", accepted="", advice="Pass it"):
            call()
    with refused(ampx.UnsupportedByBackendError, passed="list of 2", accepted="one optimizer", advice="Join"):
        amp.wrap_optimizer([suite.plain().raw, suite.plain().raw])
    with pytest.raises(ampx.UnsupportedByBackendError, match="holds 2 loss scales"):
        amp.scale_loss(bench.loss(), [bench.opt, suite.bench(amp).opt])
    assert bench.train().applied


def _vector_losses(suite: KitTests) -> None:
    """Expect that a loss of two elements is refused, in a list too, and that training goes on."""
    amp = suite.start()
    bench, casting = suite.bench(amp), suite.subject.casting()
    wide = suite.subject.wide_loss(bench.parameters)
    for losses in (wide, [bench.loss(), wide]):
        with refused(ampx.LossShapeError, passed="of 2 elements", accepted="a scalar", advice="Reduce"):
            amp.scale_loss(losses, bench.opt).__enter__()
        assert suite.subject.casting() == casting
    assert bench.train().applied


def _automation(suite: KitTests) -> None:
    from ampx.run import Automation  # as above

    _not_supported(suite, lambda: offer(suite.backend, Automation))


def _converter(suite: KitTests) -> None:
    from ampx.shipping.converter import Converter  # as above

    name, dtype = suite.backend.name, suite.subject.dtype
    if "converter" in suite.backend.offers:  # only the harness's device does not compute the dtype
        model, _ = suite.subject.shipped((1.0, 2.0))
        with refused(ampx.UnsupportedDtypeError, passed=repr(dtype), accepted="float32", advice="Choose"):
            ampx.convert(model, dtype, batches=[suite.subject.batch((1.0,))], framework=name)
        return
    _not_supported(suite, lambda: ampx.convert(object(), dtype, framework=name))
    _not_supported(suite, lambda: offer(suite.backend, Converter))


def _simulates(suite: KitTests) -> None:
    if not suite.declares("probe"):
        _probe(suite)
        return
    from ampx.numerics.probe import Probe  # as above

    with (
        refused(ampx.UnsupportedDtypeError, passed="'float8_e4m3'", accepted="accepted: ", advice=""),
        offer(suite.backend, Probe).force(None, {"*": "float8_e4m3"}),
    ):
        pass


REFUSALS: Final[dict[str, Callable[[KitTests], None]]] = {
    "automation": _automation,
    "casting": _casting,
    "clip_grad_norm": _clip_grad_norm,
    "clipping": _clipping,
    "closures": _closures,
    "converter": _converter,
    "implicit gradients": lambda suite: _explicit_only(suite, ampx.unscale),
    "master_weights": _prepare,
    "names_gradients": _names_gradients,
    "op_lists": _op_lists,
    "optimizer objects": _optimizer_objects,
    "per_loss_scales": _per_loss_scales,
    "prepare": _prepare,
    "probe": _probe,
    "promotes": _promotes,
    "sees_backward": lambda suite: _not_supported(suite, lambda: suite.backend.watch_backward(None, None)),
    "simulates": _simulates,
    "vector_losses": _vector_losses,
}
