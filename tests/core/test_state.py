"""The portable state: what goes out comes back, and nothing else comes in."""

import copy
import json
import math

import pytest

import ampx
from ampx import InvalidStateError, LossScale, LossScaleState, StateError, UnknownSchemaError
from ampx.saved_state import dump_state, parse_state

# No field has its default, so a forgotten one shows.
CONFIG = LossScale(4096.0, 3.0, 0.25, 7, 4, 2.0, 2.0**20, True, 9)
STATES = {0: LossScaleState(512.0, 3, 2, 5), 4: LossScaleState(1.5, 6, 4, 0)}
SAVED = {
    "schema": "ampx.loss_scale/1",
    "framework": "alpha",
    "groups": [
        {
            "config": {
                "init_scale": 4096.0,
                "growth_factor": 3.0,
                "backoff_factor": 0.25,
                "growth_interval": 7,
                "hysteresis": 4,
                "min_scale": 2.0,
                "max_scale": 2.0**20,
                "dynamic": True,
                "max_consecutive_skips": 9,
            },
            "losses": [
                {
                    "loss_id": 0,
                    "scale": 512.0,
                    "growth_tracker": 3,
                    "hysteresis_tracker": 2,
                    "consecutive_skips": 5,
                },
                {
                    "loss_id": 4,
                    "scale": 1.5,
                    "growth_tracker": 6,
                    "hysteresis_tracker": 4,
                    "consecutive_skips": 0,
                },
            ],
        }
    ],
}


def test_the_written_form_is_this():
    assert dump_state("alpha", [(CONFIG, STATES)]) == SAVED


def test_every_field_survives_json_at_a_value_that_is_not_its_default():
    assert parse_state(json.loads(json.dumps(SAVED))) == [(CONFIG, STATES)]


def changed(path, value):
    state = copy.deepcopy(SAVED)
    *parents, last = path
    place = state
    for key in parents:
        place = place[key]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return state


CONFIG_PATH = ("groups", 0, "config")
LOSS_PATH = ("groups", 0, "losses", 0)
BAD_SCALES = [0, -1.0, math.inf, -math.inf, math.nan, "512", True, None, [512.0], 1e39, 1e-45, KeyError]
BAD_COUNTS = [-1, 1.0, math.inf, math.nan, "3", True, None, 2**31, KeyError]
HUGE = pytest.param(10**400, id="huge")


@pytest.mark.parametrize("state", [None, [], "state", 3, {}, {"schema": "ampx.loss_scale/2", "groups": []}])
def test_another_schema_is_refused(state):
    with pytest.raises(UnknownSchemaError, match="import_state") as caught:
        parse_state(state)
    assert type(caught.value) is UnknownSchemaError
    assert isinstance(caught.value, StateError)


@pytest.mark.parametrize("value", [*BAD_SCALES, HUGE])
def test_an_absurd_scale_is_refused(value):
    with pytest.raises(InvalidStateError, match="scale"):
        parse_state(changed((*LOSS_PATH, "scale"), value))


@pytest.mark.parametrize("name", ["growth_tracker", "hysteresis_tracker", "consecutive_skips"])
@pytest.mark.parametrize("value", BAD_COUNTS)
def test_an_absurd_counter_is_refused(name, value):
    with pytest.raises(InvalidStateError, match=name):
        parse_state(changed((*LOSS_PATH, name), value))


@pytest.mark.parametrize("name", SAVED["groups"][0]["config"])
@pytest.mark.parametrize("value", ["2", None, -1, math.nan, math.inf, KeyError])
def test_an_absurd_configuration_is_refused(name, value):
    with pytest.raises(InvalidStateError, match=name):
        parse_state(changed((*CONFIG_PATH, name), value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("groups",), KeyError),
        (("groups",), None),
        (("groups",), "groups"),
        (("groups",), {}),
        (("groups", 0), []),
        (("groups", 0, "config"), None),
        (("groups", 0, "config", "extra"), 1),
        (("groups", 0, "losses"), []),
        (("groups", 0, "losses"), {}),
        (("groups", 0, "losses", 0), 5),
        ((*LOSS_PATH, "loss_id"), KeyError),
        ((*LOSS_PATH, "loss_id"), "0"),
        ((*LOSS_PATH, "loss_id"), True),
        ((*LOSS_PATH, "loss_id"), -1),
        ((*LOSS_PATH, "loss_id"), 4),  # twice
    ],
)
def test_a_malformed_state_is_refused(path, value):
    with pytest.raises(InvalidStateError):
        parse_state(changed(path, value))


@pytest.mark.parametrize("scale", [128.0, 2.0**-40])
def test_a_static_loss_scale_is_what_the_state_says(scale):
    losses = [{**SAVED["groups"][0]["losses"][0], "loss_id": loss_id, "scale": scale} for loss_id in (0, 1)]
    config = {**SAVED["groups"][0]["config"], "init_scale": 1.0, "dynamic": False}
    ((read, states),) = parse_state({**SAVED, "groups": [{"config": config, "losses": losses}]})
    assert read == ampx.LossScale(**{**config, "init_scale": scale})
    assert {state.scale for state in states.values()} == {scale}


def test_static_loss_scales_that_differ_by_loss_are_refused():
    losses = [{**SAVED["groups"][0]["losses"][0], "loss_id": loss_id, "scale": 2.0**loss_id} for loss_id in (0, 1)]
    config = {**SAVED["groups"][0]["config"], "dynamic": False}
    with pytest.raises(ampx.InvalidStateError, match=r"losses is \[1\.0, 2\.0\]; accepted: one scale for all losses"):
        parse_state({**SAVED, "groups": [{"config": config, "losses": losses}]})


def test_a_scale_between_two_float32_values_becomes_one():
    ((_, states),) = parse_state(changed((*LOSS_PATH, "scale"), 16777217.0))
    assert states[0].scale == 16777216.0


# -- through a session ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        {"schema": "other"},
        changed((*LOSS_PATH, "scale"), -1.0),
        {**SAVED, "groups": []},
        {**SAVED, "groups": SAVED["groups"] * 2 + [{"config": {}}]},
        {**SAVED, "groups": SAVED["groups"] * 3},
        changed(("groups",), [SAVED["groups"][0], {"config": {}, "losses": []}]),
    ],
)
def test_a_refused_state_changes_nothing(alpha, make_trainer, state):
    amp = ampx.init("alpha")
    first, second = make_trainer(alpha), make_trainer(alpha, loss_scale=LossScale(init_scale=8))
    first.step(math.inf)
    before = amp.state_dict()
    if state.get("groups") == []:
        with pytest.warns(ampx.AmpxWarning, match="disabled"):
            amp.load_state_dict(state)
    else:
        with pytest.raises(StateError):
            amp.load_state_dict(state)
    assert amp.state_dict() == before
    assert (first.opt.loss_scale, second.opt.loss_scale) == (32768.0, 8.0)


def test_a_state_of_another_kind_of_scale_leaves_the_present_one_with_a_warning(alpha, make_trainer):
    ampx.init("alpha", loss_scale=128)
    trainer = make_trainer(alpha)
    with pytest.warns(ampx.AmpxWarning, match="dynamic loss scale and this run has a static") as caught:
        ampx.load_state_dict(SAVED)
    assert caught[0].filename == __file__
    assert trainer.opt.loss_scale == 128.0


def test_warnings_as_errors_do_not_leave_half_a_state_loaded(alpha, make_trainer):
    amp = ampx.init("alpha")
    first, _ = make_trainer(alpha), make_trainer(alpha, loss_scale=128)
    with pytest.raises(ampx.AmpxWarning):  # the test run turns warnings into errors
        amp.load_state_dict({**SAVED, "groups": SAVED["groups"] * 2})
    assert first.opt.loss_scale == 65536.0


def test_a_session_state_goes_through_json_into_another_framework(alpha, beta, make_trainer):
    scale = LossScale(init_scale=64, growth_interval=2, hysteresis=2)
    there = ampx.init("alpha")
    trainer = make_trainer(alpha, loss_scale=scale)
    for gradient in (1.0, 1.0, 1.0, math.inf):
        trainer.step(gradient)
    saved = json.loads(json.dumps(there.state_dict()))
    here = ampx.init("beta")
    other = make_trainer(beta)
    here.load_state_dict(saved)
    for gradient in (math.inf, 1.0, 1.0):
        assert trainer.step(gradient) == other.step(gradient)
    # 64 → growth to 128, one overflow tolerated, the second halves it, two finite steps grow it
    assert other.opt.loss_scale == 128.0
