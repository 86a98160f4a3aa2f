"""The opt levels and what overrides them: the table is apex's, written out here."""

import copy
import inspect

import pytest
import torch
from torch import nn

import ampx
from ampx.errors import AlreadyWrappedError, InvalidOptionError, ProtocolError, UnsupportedByBackendError
from ampx_torch.apex import amp

NAMES = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
TABLE = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
}


def make():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def properties():
    return tuple(getattr(amp._amp_state.opt_properties, name) for name in NAMES)


@pytest.mark.parametrize("opt_level", TABLE)
def test_a_level_has_the_properties_of_the_table(opt_level):
    amp.initialize(*make(), opt_level=opt_level, verbosity=0)
    assert properties() == TABLE[opt_level]
    assert amp._amp_state.opt_properties.enabled is True
    assert amp._amp_state.opt_properties.opt_level == opt_level


def test_o1_is_the_default():
    amp.initialize(*make(), verbosity=0)
    assert properties() == TABLE["O1"]


@pytest.mark.parametrize(
    ("opt_level", "overrides", "expected"),
    [
        ("O0", {"loss_scale": "dynamic"}, {"loss_scale": "dynamic"}),
        ("O0", {"loss_scale": "128.0"}, {"loss_scale": 128.0}),
        ("O0", {"cast_model_type": False}, {"cast_model_type": False}),
        ("O1", {"loss_scale": 128}, {"loss_scale": 128.0}),
        ("O1", {"loss_scale": "128"}, {"loss_scale": 128.0}),
        ("O1", {"cast_model_type": torch.float32}, {"cast_model_type": torch.float32}),
        ("O1", {"cast_model_type": False}, {"cast_model_type": False}),
        ("O1", {"patch_torch_functions": False}, {"patch_torch_functions": False}),
        ("O2", {"keep_batchnorm_fp32": False}, {"keep_batchnorm_fp32": False}),
        ("O2", {"keep_batchnorm_fp32": "False"}, {"keep_batchnorm_fp32": False}),
        ("O2", {"keep_batchnorm_fp32": "True"}, {"keep_batchnorm_fp32": True}),
        ("O2", {"master_weights": False, "loss_scale": 8.0}, {"master_weights": False, "loss_scale": 8.0}),
        ("O2", {"cast_model_type": torch.bfloat16}, {"cast_model_type": torch.bfloat16}),
        ("O3", {"keep_batchnorm_fp32": True}, {"keep_batchnorm_fp32": True}),
        (
            "O3",
            {"keep_batchnorm_fp32": "True", "master_weights": True},
            {"keep_batchnorm_fp32": True, "master_weights": True},
        ),
        ("O3", {"loss_scale": "dynamic"}, {"loss_scale": "dynamic"}),
    ],
)
def test_an_override_changes_its_property_alone(opt_level, overrides, expected):
    amp.initialize(*make(), opt_level=opt_level, verbosity=0, **overrides)
    assert dict(zip(NAMES, properties(), strict=True)) == {
        **dict(zip(NAMES, TABLE[opt_level], strict=True)),
        **expected,
    }


@pytest.mark.parametrize(
    ("opt_level", "overrides", "words"),
    [
        ("O4", {}, r"opt_level='O4'.*'O0', 'O1', 'O2', 'O3'"),
        ("01", {}, r"opt_level='01'.*the letter O"),
        (1, {}, r"opt_level=1 "),
        ("O1", {"cast_model_type": torch.float16}, r"cast_model_type=torch.float16.*opt_level='O1'.*O2"),
        ("O1", {"keep_batchnorm_fp32": True}, r"keep_batchnorm_fp32=True.*opt_level='O1'"),
        ("O1", {"keep_batchnorm_fp32": "False"}, r"keep_batchnorm_fp32='False'.*opt_level='O1'"),
        ("O1", {"master_weights": True}, r"master_weights=True.*opt_level='O1'"),
        ("O1", {"master_weights": False}, r"master_weights=False.*opt_level='O1'"),
        ("O0", {"patch_torch_functions": True}, r"patch_torch_functions=True.*opt_level='O0'.*Use opt_level='O1'"),
        ("O2", {"patch_torch_functions": True}, r"patch_torch_functions=True.*opt_level='O2'"),
        ("O2", {"keep_batchnorm_fp32": "yes"}, r"keep_batchnorm_fp32='yes'.*'True' and 'False'"),
        ("O2", {"master_weights": 1}, r"master_weights=1 .*accepted: True, False"),
        ("O2", {"cast_model_type": "half"}, r"cast_model_type='half'.*torch.float16"),
        ("O2", {"loss_scale": "static"}, r"loss_scale='static'.*'dynamic'"),
        ("O2", {"loss_scale": -1}, r"loss_scale=-1 .*positive"),
        ("O2", {"loss_scale": 0.0}, r"loss_scale=0.0 "),
        ("O2", {"loss_scale": True}, r"loss_scale=True "),
    ],
)
def test_what_does_not_go_with_a_level_is_an_error_that_scripts_can_catch_as_before(opt_level, overrides, words):
    model, optimizer = make()
    for kind in (RuntimeError, InvalidOptionError):
        with pytest.raises(kind, match=words):
            amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **overrides)
    assert type(optimizer) is torch.optim.SGD
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("num_losses", [0, -1, 1.5, True])
def test_the_number_of_losses_is_a_positive_integer(num_losses):
    with pytest.raises(InvalidOptionError, match="num_losses="):
        amp.initialize(*make(), num_losses=num_losses)


# -- what the levels do ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("opt_level", "overrides", "linear", "norm"),
    [
        ("O0", {}, torch.float32, torch.float32),
        ("O1", {}, torch.float32, torch.float32),
        ("O2", {}, torch.float16, torch.float32),
        ("O2", {"keep_batchnorm_fp32": "False"}, torch.float16, torch.float16),
        ("O2", {"cast_model_type": torch.bfloat16}, torch.bfloat16, torch.float32),
        ("O2", {"cast_model_type": False}, torch.float32, torch.float32),
        ("O3", {}, torch.float16, torch.float16),
        ("O3", {"keep_batchnorm_fp32": True}, torch.float16, torch.float32),
    ],
)
def test_a_level_casts_the_model(opt_level, overrides, linear, norm):
    model, optimizer = amp.initialize(*make(), opt_level=opt_level, verbosity=0, **overrides)
    assert model[0].weight.dtype == model[2].weight.dtype == model[3].bias.dtype == linear
    assert model[1].weight.dtype == model[1].running_mean.dtype == norm
    assert model[1].num_batches_tracked.dtype == torch.int64
    masters = bool(amp._amp_state.opt_properties.master_weights)
    expected = torch.float32 if masters else linear
    assert {parameter.dtype for parameter in list(amp.master_params(optimizer))[:2]} == {expected}


@pytest.mark.parametrize("opt_level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("way", ["call", "forward"])
def test_a_cast_model_takes_any_batch_and_gives_float32(opt_level, way):
    class Batch:
        def __init__(self, images):
            self.images = images

        def to(self, dtype):
            return Batch(self.images.to(dtype))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch, names, *, extra):
            assert extra["mask"].dtype == torch.bool
            assert names == ["a"]
            seen = {self.linear.weight.dtype, batch.images.dtype, extra["x"][0].dtype}
            assert len(seen) == 1
            return {"logits": self.linear(batch.images) + extra["x"][0], "index": extra["mask"]}

    model = Model()
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    run = model if way == "call" else model.forward
    extra = {"x": (torch.ones(4, dtype=torch.float64),), "mask": torch.ones(1, dtype=torch.bool)}
    output = run(Batch(torch.ones(2, 4)), ["a"], extra=extra)
    assert output["logits"].dtype == torch.float32
    assert output["index"].dtype == torch.bool


@pytest.mark.parametrize("opt_level", TABLE)
def test_outputs_are_cast_to_what_was_asked_for(opt_level):
    model = amp.initialize(nn.Linear(4, 2), opt_level=opt_level, cast_model_outputs=torch.bfloat16, verbosity=0)
    assert model(torch.ones(1, 4)).dtype == torch.bfloat16


def test_a_copy_of_a_cast_model_computes_with_its_own_weights():
    """An average of weights is such a copy."""
    model = amp.initialize(nn.Linear(2, 1, bias=False), opt_level="O2", verbosity=0)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.fill_(1.0)
        twin.weight.fill_(2.0)
    assert model(torch.ones(1, 2)).item() == 2.0
    assert twin(torch.ones(1, 2)).item() == 4.0


def test_a_cast_model_is_saved_and_loaded_whole_and_keeps_its_signature(tmp_path):
    model = amp.initialize(nn.Linear(2, 1, bias=False), opt_level="O2", verbosity=0)
    assert list(inspect.signature(model.forward).parameters) == ["input"]
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    x = torch.ones(1, 2)
    assert torch.equal(loaded(x), model(x))
    with torch.no_grad():
        loaded.weight.zero_()
    assert loaded(x).item() == 0.0 != model(x).item()


# -- what comes in and what goes out -----------------------------------------------------------------


def test_what_was_passed_comes_back_in_the_same_containers():
    def pair():
        model = nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = pair()
    assert amp.initialize(model, verbosity=0) is model
    result = amp.initialize(model, optimizer, verbosity=0)
    assert result[0] is model
    assert result[1] is optimizer
    models, optimizers = zip(*(pair() for _ in range(3)), strict=True)
    models, optimizers = list(models), [optimizers[0], list(optimizers[1:])]
    result = amp.initialize(models, optimizers, verbosity=0)
    assert result[0] is models
    assert result[1] is optimizers
    for own in (optimizers[0], *optimizers[1]):
        assert isinstance(own, torch.optim.SGD)
        with amp.scale_loss(models[0](torch.ones(1, 2)).sum() * 0, own) as scaled_loss:
            scaled_loss.backward()


def test_disabled_changes_nothing():
    model, optimizer = make()
    before = model(torch.ones(3, 4))
    result = amp.initialize(model, optimizer, enabled=False, opt_level="O2")
    assert result == (model, optimizer)
    assert type(optimizer) is torch.optim.SGD
    assert torch.equal(model(torch.ones(3, 4)), before)
    loss = model(torch.ones(3, 4)).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    with amp.disable_casts():
        assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}})
    assert amp.half_function(lambda x: x.dtype)(torch.ones(1)) == torch.float32


def test_disabled_ends_what_an_earlier_call_began():
    amp.initialize(*make(), opt_level="O1", verbosity=0)
    amp.initialize(*make(), enabled=False)
    assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_verbosity_0_says_nothing(capsys):
    amp.initialize(*make(), opt_level="O1", verbosity=0)
    assert capsys.readouterr().out == ""
    amp.initialize(*make(), opt_level="O1")
    assert "opt_level=O1" in capsys.readouterr().out


def test_a_model_in_low_precision_is_refused_unless_that_is_allowed(monkeypatch):
    model = nn.Linear(2, 2).half()
    with pytest.raises(RuntimeError, match=r"weight is torch\.float16.*Remove \.half\(\)"):
        amp.initialize(model)
    monkeypatch.setattr(amp._amp_state, "allow_incoming_model_not_fp32", True)
    amp.initialize(model, verbosity=0)


def test_a_model_that_is_wrapped_already_is_refused():
    with pytest.raises(RuntimeError, match=r"DataParallel.*amp\.initialize first"):
        amp.initialize(nn.DataParallel(nn.Linear(2, 2)))


@pytest.mark.parametrize(("models", "optimizers"), [("model", None), (nn.Linear(1, 1), "optimizer"), (3, None)])
def test_what_is_no_model_and_no_optimizer_is_refused(models, optimizers):
    with pytest.raises(TypeError, match="initialize got"):
        amp.initialize(models, optimizers)


def test_an_optimizer_is_initialized_once():
    model, optimizer = make()
    with pytest.raises(AlreadyWrappedError, match="initialize got an optimizer"):
        amp.initialize(model, [optimizer, optimizer])
    amp.initialize(model, optimizer, verbosity=0)
    with pytest.raises(RuntimeError, match="initialize got an optimizer"):  # the type that apex raised
        amp.initialize(model, optimizer)
    with pytest.raises(AlreadyWrappedError):
        ampx.wrap_optimizer(optimizer)


def test_lbfgs_has_no_master_weights():
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedByBackendError, match="LBFGS"):
        amp.initialize(model, torch.optim.LBFGS(model.parameters()), opt_level="O2")
    assert model.weight.dtype == torch.float32


def test_scale_loss_needs_initialize():
    with pytest.raises(RuntimeError, match=r"amp\.initialize"), amp.scale_loss(torch.ones(()), []):
        pass
    model, optimizer = amp.initialize(*make(), verbosity=0)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(3, 4)).sum()
    with pytest.raises(ProtocolError, match=r"SGD, which amp\.initialize did not return"), amp.scale_loss(loss, other):
        pass
    wrong_id = amp.scale_loss(loss, optimizer, loss_id=1)
    with pytest.raises(InvalidOptionError, match=r"loss_id=1 .*num_losses=1") as raised, wrong_id:
        pass
    assert isinstance(raised.value, IndexError)  # the type that apex raised
