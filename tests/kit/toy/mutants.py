"""Toys with one mistake each. Every one must be rejected by the kit, and every kit test must reject one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import ampx
from ampx.backend import LossInfo, reject_unknown
from ampx.numerics.overflow import OverflowTrace
from ampx.optimizer import GenericOptimizer
from ampx.protocol import Member
from ampx.scale_state import LossScale
from ampx.scaling import ScaleLoss
from ampx.session import Amp, sessions
from ampx.shipping import convert as shipping
from ampx.shipping.convert import OutputError
from toy import framework
from toy.automation import ToyAutomation, ToyManager
from toy.explicit import BareToy, ExplicitToy
from toy.framework import FLOATING
from toy.implicit import ImplicitToy, ToyOptimizer
from toy.inference import ToyConverter
from toy.misconverting import asked, in_place, names_nothing, norms_too
from toy.misreading import (
    blinkered,
    cast_as_now,
    draws_another_mask,
    forces_forward,
    inf_is_finite,
    keeps_buffers,
    keeps_forcing,
    no_inputs,
    one_name_a_class,
    replays_anything,
    samples_each_tensor,
    sees_forward,
    watches_named_models,
    watches_on,
    watches_rounded,
)
from toy.mutation import (
    DiesWithItsSession,
    ForgetsTracker,
    HalfToy,
    Late,
    MarksEverySecondLoss,
    Mutant,
    ReportsNumbers,
    SharesOneScale,
    blind,
    cast_everything,
    configured,
    counts_skips,
    forgets_overflow,
    leaky,
    ledger,
    never_skips,
    own_group,
    patched,
    quiet,
    room,
    spoiled,
    stays,
    unscales_again,
    verbs,
    wrapper,
)
from toy.numerics import ToyProbe
from toy.verbs import casting_of


def _wrap_simply(self: ImplicitToy, optimizer: Any, member: Member, options: Any) -> GenericOptimizer:
    reject_unknown(self.name, options, ())
    return GenericOptimizer(self, optimizer, member, options)


def _drop_loss_id(true: Any, self: Amp, loss: Any, opt: Any, loss_id: object = 0) -> Any:
    return true(self, loss, opt)


class Eager:
    """A gate that is always open."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate

    def __getattr__(self, name: str) -> Any:
        """Look everything up on the true gate."""
        return getattr(self.gate, name)

    def step(self, *args: Any) -> bool:
        """Step whatever happened."""
        self.gate.scheduler.step(*args)
        return True


def _mute(amp: Amp) -> Amp:
    amp.effective = replace(amp.effective, reason="")
    return amp


def _tell_listeners(name: str, event: ampx.Event) -> None:
    session = sessions.get(name)
    if session is not None:
        session.emit(event)


def _tell_twice(name: str, event: ampx.Event) -> None:
    sessions.emit(name, event)
    sessions.emit(name, event)


def _real(dtype: str) -> str:
    return "float32" if dtype.startswith("float8") else dtype


Toy = ImplicitToy
MUTANTS: Final[list[Mutant]] = [
    # Harnesses that prove nothing.
    blind("DeafHarness", loss=lambda self, p, g: framework.pull(p, [[0.0] * len(slopes) for slopes in g])),
    blind("SlowHarness", optimizer=lambda self, p, momentum: framework.Optimizer(p, 0.25, momentum / 2)),
    blind("ClaimsToWatch", guards_raw_steps=True, watches_others=True, watches_true=True),
    # Scaling and unscaling.
    verbs("NeverUnscales", unscale=lambda self, grads, scale: Toy.unscale(self, grads, 1.0)),
    verbs("UnscalesTwice", unscale=lambda self, grads, scale: Toy.unscale(self, grads, scale * scale)),
    verbs("AlwaysFinite", unscale=lambda self, grads, scale: Toy.unscale(self, grads, scale)._replace(finite=True)),
    verbs("NeverFinite", unscale=lambda self, grads, scale: Toy.unscale(self, grads, scale)._replace(finite=False)),
    verbs("NeverScales", scale=lambda self, loss, scale: loss.to("float32") * 1.0),
    verbs("ScalesInTheLossDtype", scale=lambda self, loss, scale: loss * scale),
    verbs("TakesTheLargestScale", smallest=lambda self, scales: max(scales)),
    verbs("SeesNoBackward", watch_backward=lambda self, loss, scaled: lambda: None),
    verbs("SeesTheWrongBackward", watch_backward=lambda self, loss, scaled: Toy.watch_backward(self, scaled, loss)),
    Mutant("MarksEverySecondLoss", MarksEverySecondLoss),
    wrapper("NeverSkips", step=never_skips),
    wrapper("CountsSkips", step=counts_skips),
    wrapper("UnscalesAgain", ampx_unscale=unscales_again),
    wrapper("ForgetsOverflow", ampx_unscale=forgets_overflow, _look_again=lambda self: None),
    # Clipping.
    verbs("IgnoresClipping", clip=lambda self, grads, max_norm, max_value: (grads, None)),
    spoiled(
        "TellsEveryNorm", lambda optimizer: optimizer.__dict__.update(_max_grad_norm=optimizer._max_grad_norm or 1e30)
    ),
    # The scale's trace.
    ledger("LateUpdate", Late),
    configured("IgnoresHysteresis", hysteresis=1),
    configured("IgnoresMaxScale", max_scale=2.0**100),
    configured("IgnoresMinScale", min_scale=2.0**-100),
    configured("MovesStaticScales", dynamic=True),
    configured("NeverBacksOff", backoff_factor=1.0),
    configured("GrowsAtOnce", growth_interval=1),
    configured("CollapsesAtOnce", max_consecutive_skips=1),
    spoiled("IgnoresOwnLossScale", lambda optimizer: optimizer.ampx_member.group.load(LossScale(), {})),
    # Windows, groups, losses.
    verbs("KeepsGradients", zero_gradients=lambda self, optimizer: None),
    verbs("InventsGradients", gradients=lambda self, optimizer: [p.grad for p in optimizer.parameters]),
    wrapper("OverwritesGradients", ampx_before_backward=lambda self, loss_id, scale: self.optimizer.zero_grad()),
    wrapper("ForgetsFactors", ampx_after_backward=lambda self, loss_id: self.ampx_member.drop_factors()),
    spoiled("OwnScaleForEveryMember", own_group),
    Mutant("SharesOneScale", SharesOneScale),
    verbs("OneScaleForAllLosses", wrap_optimizer=_wrap_simply),
    wrapper("KeepsFailedBodies", ampx_abandon_backward=lambda self, loss_id: None),
    # Reports.
    ledger("ReportsNumbers", ReportsNumbers),
    spoiled("SendsNoEvents", lambda optimizer: setattr(optimizer.ampx_member.group, "emit", None)),
    wrapper("NamesNobody", ampx_culprits=lambda self: ()),
    verbs("FindsNothing", nonfinite_parameters=lambda self, optimizer, model: []),
    Mutant("TracesNothing", patches=lambda: [mock.patch.object(OverflowTrace, "first", None)]),
    ledger("ForgetsTracker", ForgetsTracker),
    # The protocol.
    spoiled("StepsAnyGradients", lambda optimizer: setattr(optimizer.ampx_member, "check_step", lambda: None)),
    spoiled("NestsAnything", lambda optimizer: setattr(optimizer.ampx_member, "check_enter", lambda: None)),
    patched("AlwaysCompletes", Member, "leave", lambda true, self, region, completed: true(self, region, True)),
    wrapper("IgnoresArguments", step=lambda self, grads=None: ToyOptimizer.step(self)),
    verbs("AcceptsAnyOptimizer", is_optimizer=lambda self, candidate: True),
    verbs("AcceptsAnyOption", wrap_optimizer=lambda self, *args: ToyOptimizer(self, *args)),
    verbs("AcceptsAnyLoss", inspect_loss=lambda self, loss, check_nan: LossInfo(1, "float32", True, True, False)),
    verbs("AlwaysChecksNan", inspect_loss=lambda self, loss, check_nan: Toy.inspect_loss(self, loss, True)),
    # Casting.
    verbs("CastsIntegers", cast=cast_everything),
    verbs("NeverCasts", cast=lambda self, tree, dtype: tree),
    verbs("CastsToFloat16", cast=lambda self, tree, dtype: Toy.cast(self, tree, "float16")),
    verbs(
        "ComputesInFloat16",
        autocast=lambda self, plan, enabled: Toy.autocast(self, replace(plan, dtype="float16"), enabled),
    ),
    verbs("LeaksAutocast", autocast=lambda self, plan, enabled: leaky(casting_of(plan, enabled), lambda failed: True)),
    verbs(
        "DoesNotRestoreOnException",
        autocast=lambda self, plan, enabled: leaky(casting_of(plan, enabled), lambda failed: failed),
    ),
    verbs("AlwaysCasts", autocast=lambda self, plan, enabled: Toy.autocast(self, plan, True)),
    verbs("NeverActivates", activate=lambda self, plan: None),
    verbs("NeverDeactivates", deactivate=lambda self, plan: None),
    verbs("BreaksThreads", enter_thread=lambda self, plan: self.deactivate(plan)),
    verbs("PromotesNothing", widest=lambda self, tree, at_least: at_least),
    spoiled("CastsTheUpdate", lambda optimizer: optimizer.__dict__.update(_plan=None)),
    verbs("IgnoresOpLists", check_plan=lambda self, plan: replace(plan, allow=(), deny=())),
    # Sessions and capabilities.
    verbs("ClaimsStateValues", state_handle=lambda self, state, call: None),
    Mutant("DiesWithItsSession", DiesWithItsSession),
    verbs("RenamesDevices", device=lambda self, name: replace(Toy.device(self, name), name=f"{name}!")),
    verbs("KnowsEveryDevice", device=lambda self, name: Toy.device(self, "cpu")),
    verbs("OverstatesDevices", device=lambda self, name: replace(Toy.device(self, name), native=frozenset(FLOATING))),
    verbs("WantsEverything", device=lambda self, name: replace(Toy.device(self, name), preferred="float32")),
    # The precision debugger.
    room(
        "MissesTheBackwardPass",
        ToyProbe,
        watch=lambda self, *args: blinkered(ToyProbe.watch(self, *args), sees_forward),
    ),
    room(
        "CountsInfAsFinite", ToyProbe, watch=lambda self, *args: blinkered(ToyProbe.watch(self, *args), inf_is_finite)
    ),
    room("WatchesOutputsOnly", ToyProbe, watch=lambda self, *args: blinkered(ToyProbe.watch(self, *args), no_inputs)),
    room(
        "NamesModelsByTheirClass",
        ToyProbe,
        watch=lambda self, *args: blinkered(ToyProbe.watch(self, *args), one_name_a_class),
    ),
    room("SamplesEachTensor", ToyProbe, watch=samples_each_tensor),
    room("ReadsOnBehindTheRegion", ToyProbe, watch=watches_on),
    room("WatchesWithRounding", ToyProbe, watch=watches_rounded),
    room(
        "IgnoresPatterns",
        ToyProbe,
        watch=lambda self, model, watching: ToyProbe.watch(self, model, replace(watching, modules=())),
    ),
    room("WatchesNamedModelsOnly", ToyProbe, watch=watches_named_models),
    room(
        "SeesNoOperation",
        ToyProbe,
        watch=lambda self, model, w: ToyProbe.watch(self, model, replace(w, operations=False)),
    ),
    room("ForcesNothing", ToyProbe, force=lambda self, model, dtypes: nullcontext()),
    room("ForcesForwardOnly", ToyProbe, force=forces_forward),
    room(
        "FirstPatternHolds",
        ToyProbe,
        force=lambda self, model, d: ToyProbe.force(self, model, dict(reversed(d.items()))),
    ),
    room("KeepsForcing", ToyProbe, force=keeps_forcing),
    room(
        "SimulatesNothing",
        ToyProbe,
        force=lambda self, m, d: ToyProbe.force(self, m, {k: _real(v) for k, v in d.items()}),
    ),
    room("DrawsAnotherMask", ToyProbe, replay=draws_another_mask),
    room(
        "KeepsTheScale",
        ToyProbe,
        replay=lambda self, m, step, plan, s=1.0: ToyProbe.replay(self, m, lambda x: step(x) * s, plan),
    ),
    room("KeepsBuffers", ToyProbe, replay=keeps_buffers),
    room(
        "ReplaysAsCast",
        ToyProbe,
        replay=lambda self, m, step, plan, s=1.0: ToyProbe.replay(self, m, cast_as_now(step), plan, s),
    ),
    room("ReplaysAnything", ToyProbe, replay=replays_anything),
    # Conversion for inference.
    room("ConvertsInPlace", ToyConverter, convert=in_place),
    room("ConvertsNorms", ToyConverter, convert=norms_too),
    room("ConvertsNothing", ToyConverter, convert=asked(dtype="float32")),
    room("ConvertsTheReference", ToyConverter, convert=asked(dtype="float16")),
    room("ConvertsWhatIsDenied", ToyConverter, convert=asked(deny=())),
    room("ConvertsOutputs", ToyConverter, convert=asked(keep_io=False)),
    room("NamesNoLayers", ToyConverter, convert=names_nothing),
    patched("ComparesNothing", OutputError, "agrees", lambda true, self, tolerance: True),
    patched("SaysNothing", shipping.callers, "warn", lambda true, *args: None),
    # Automation.
    room("AutomatesNothing", ToyAutomation, automate=lambda self, run: nullcontext()),
    room("KeepsTheSession", ToyAutomation, automate=lambda self, run: ToyAutomation.automate(stays(run))),
    patched("KnowsTheFirstRate", ToyManager, "rates_of", lambda true, self, raw: [0.5]),
    # Backends that do what they do not declare.
    verbs("ClaimsBackward", ExplicitToy, capabilities=replace(ExplicitToy.capabilities, sees_backward=True)),
    verbs("OffersWhatIsNone", offers={**Toy.offers, "probe": "toy.numerics:Nothing"}),
    verbs("QuietOpLists", ExplicitToy, check_plan=lambda self, plan: plan),
    verbs("QuietClipping", BareToy, clip=lambda self, grads, max_norm, max_value: (grads, 1.0)),
    verbs("QuietBackward", ExplicitToy, watch_backward=lambda self, loss, scaled: lambda: None),
    # Mistakes of the core.
    patched("RefusesNothing", ampx.Backend, "refuse", quiet, ExplicitToy),
    patched("RefusesNothingOfBare", ampx.Backend, "refuse", quiet, BareToy),
    patched("SwallowsWrapErrors", Amp, "wrap_optimizer", quiet),
    patched("SwallowsScaleErrors", Amp, "scale_loss", quiet),
    patched("SwallowsLossErrors", ScaleLoss, "__enter__", quiet),
    patched("SwallowsUnscaleErrors", Amp, "unscale", quiet),
    patched("SwallowsLoadErrors", Amp, "load_state_dict", quiet),
    patched("SwallowsInitErrors", ampx, "init", quiet),
    patched("SwallowsInitErrorsOfBare", ampx, "init", quiet, BareToy),
    patched("SwallowsInitErrorsOfHalf", ampx, "init", quiet, HalfToy),
    patched("SwallowsUnscaleErrorsOfExplicit", Amp, "unscale", quiet, ExplicitToy),
    patched("SwallowsClipErrorsOfExplicit", Amp, "clip_grad_norm", quiet, ExplicitToy),
    patched("SwallowsWrapErrorsOfBare", Amp, "wrap_optimizer", quiet, BareToy),
    patched("SwallowsClipErrorsOfBare", Amp, "clip_grad_norm", quiet, BareToy),
    patched("AnswersWithoutSession", ampx, "state_dict", quiet),
    patched("IgnoresLossId", Amp, "scale_loss", lambda true, self, loss, opt, **_: true(self, loss, opt)),
    patched(
        "IgnoresLossIdOfExplicit",
        Amp,
        "scale_loss",
        lambda true, self, loss, opt, **_: true(self, loss, opt),
        ExplicitToy,
    ),
    patched("CastsAfterShutdown", Amp, "restore_casting", lambda true, self: None),
    patched("StepsEagerly", Amp, "gate", lambda true, self, scheduler, opt: Eager(true(self, scheduler, opt))),
    patched("KeepsListeners", Amp, "on_event", lambda true, *args: true(*args) and (lambda: None)),
    patched("LoadsNothing", Amp, "load_state_dict", lambda true, *args: None),
    patched("IgnoresEnabled", ampx, "init", lambda true, *args, **options: true(*args, **{**options, "enabled": True})),
    patched(
        "IgnoresLossScale", ampx, "init", lambda true, *args, **options: true(*args, **{**options, "loss_scale": 1.0})
    ),
    patched("ExplainsNothing", ampx, "init", lambda true, *args, **options: _mute(true(*args, **options))),
    spoiled("TellsNoPlugins", lambda optimizer: setattr(optimizer.ampx_member.group, "emit", _tell_listeners)),
    spoiled("TellsTwice", lambda optimizer: setattr(optimizer.ampx_member.group, "emit", _tell_twice)),
]
