"""Programs of several losses and optimizers, old checkpoints, the registries and the older handle."""

import copy
import json
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import ampx
from ampx.errors import InvalidOptionError, InvalidStateError, ProtocolError, UnsupportedOpError
from ampx_torch.apex import amp
from ampx_torch.apex.amp.errors import CheckpointError, CheckpointWarning
from ampx_torch.apex.parallel import LARC

# -- a GAN -------------------------------------------------------------------------------------------


def set_scales(scale):
    """Begin where nothing overflows, so that no step is skipped unless the test wants it."""
    for scaler in amp._amp_state.loss_scalers:
        scaler._loss_scale = scale


class Gan:
    """Two small networks on one-dimensional data; the program of apex's own example with three losses."""

    def __init__(self):
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        self.discriminator = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
        self.steps_g = torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.999))
        self.steps_d = torch.optim.Adam(self.discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))

    def initialize(self, opt_level):
        [self.discriminator, self.generator], [self.steps_d, self.steps_g] = amp.initialize(
            [self.discriminator, self.generator],
            [self.steps_d, self.steps_g],
            opt_level=opt_level,
            num_losses=3,
            verbosity=0,
        )
        set_scales(128.0)

    def train(self, backward, steps=30, overflow_at=None):
        criterion = nn.BCEWithLogitsLoss()
        noise = torch.Generator().manual_seed(1)
        for step in range(steps):
            real = 3 + torch.randn(16, 1, generator=noise)
            latent = torch.randn(16, 2, generator=noise)
            self.discriminator.zero_grad()
            fake = self.generator(latent)
            factor = float("inf") if step == overflow_at else 1.0
            backward(criterion(self.discriminator(real), torch.ones(16, 1)), self.steps_d, 0)
            backward(factor * criterion(self.discriminator(fake.detach()), torch.zeros(16, 1)), self.steps_d, 1)
            self.steps_d.step()
            self.generator.zero_grad()
            backward(criterion(self.discriminator(fake), torch.ones(16, 1)), self.steps_g, 2)
            self.steps_g.step()

    def parameters(self):
        both = {**self.generator.state_dict(prefix="g."), **self.discriminator.state_dict(prefix="d.")}
        return torch.cat([value.flatten() for value in both.values()])


def amp_backward(loss, optimizer, loss_id):
    with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
        scaled_loss.backward()


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
def test_a_gan_with_three_losses_trains_as_in_float32(opt_level):
    exact, mixed = Gan(), Gan()
    mixed.initialize(opt_level)
    exact.train(lambda loss, optimizer, loss_id: loss.backward())
    mixed.train(amp_backward)
    # Adam moves a parameter by at most about lr a step. Its sign-like updates differ where rounding to 2**-11 turns a
    # small gradient; 30 steps of 0.01 stay within 0.3, and a tenth of that is asked for. O0 is exact.
    apart = (exact.parameters() - mixed.parameters()).abs().max().item()
    assert apart == 0.0 if opt_level == "O0" else apart < 0.03
    if opt_level != "O0":
        assert amp.state_dict() == {f"loss_scaler{i}": {"loss_scale": 128.0, "unskipped": 30} for i in range(3)}


def test_an_overflow_of_one_loss_of_a_gan_skips_one_optimizer():
    gan = Gan()
    gan.initialize("O1")
    gan.train(amp_backward, steps=2, overflow_at=1)
    assert (gan.steps_d.last_step.applied, gan.steps_g.last_step.applied) == (False, True)
    scales = [value["loss_scale"] for value in amp.state_dict().values()]
    assert scales == [128.0, 64.0, 128.0]


def test_models_initialized_one_after_the_other_train_together():
    gan, exact = Gan(), Gan()
    gan.generator, gan.steps_g = amp.initialize(gan.generator, gan.steps_g, opt_level="O1", verbosity=0)
    gan.discriminator, gan.steps_d = amp.initialize(
        gan.discriminator, gan.steps_d, opt_level="O1", verbosity=0, num_losses=3
    )
    set_scales(128.0)
    gan.train(amp_backward)
    exact.train(lambda loss, optimizer, loss_id: loss.backward())
    assert (exact.parameters() - gan.parameters()).abs().max().item() < 0.03
    assert len(amp.state_dict()) == 3
    amp_backward(gan.generator(torch.ones(1, 2)).sum() * float("inf"), gan.steps_g, 0)
    assert gan.steps_g.loss_scale == gan.steps_d.loss_scale == 64.0


def test_initialize_again_begins_anew():
    """As in a loop over folds."""
    for _ in range(2):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}}
        amp_backward(model(torch.ones(1, 2)).sum() * 2.0**-8, optimizer, 0)
        optimizer.step()
        assert optimizer.last_step.applied
        assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


# -- accumulation and clipping -----------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("delay", [False, True])
def test_accumulation_with_clipping_is_that_of_float32(opt_level, delay):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    exact = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(exact.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    for step in range(16):
        images, labels = torch.randn(8, 4), torch.randint(2, (8,))
        last = step % 4 == 3
        loss = F.cross_entropy(model(images), labels) / 4
        with amp.scale_loss(loss, optimizer, delay_unscale=delay and not last) as scaled_loss:
            scaled_loss.backward()
        (F.cross_entropy(exact(images), labels) / 4).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.25)
            torch.nn.utils.clip_grad_norm_(exact.parameters(), 0.25)
            optimizer.step()
            plain.step()
            optimizer.zero_grad()
            plain.zero_grad()
    weights, expected = model.state_dict(), exact.state_dict()
    # 4 steps of rate 0.1 with momentum on gradients of norm 0.25 that are good to some 2**-10 of it: less than
    # 4 * 4 * 0.1 * 0.25 * 2**-10 = 4e-4 apart
    assert max((weights[name] - expected[name]).abs().max().item() for name in expected) < 4e-4


def test_larc_goes_through_initialize_or_around_what_it_returned():
    result = []
    for before in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
        if before:
            optimizer = LARC(optimizer)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
        if not before:
            optimizer = LARC(optimizer)
        amp_backward(model(torch.ones(1, 4)).sum(), optimizer, 0)
        optimizer.step()
        result.append(model.weight.detach().clone())
    torch.manual_seed(0)
    exact = nn.Linear(4, 2)
    plain = LARC(torch.optim.SGD(exact.parameters(), lr=0.1, weight_decay=0.01))
    exact(torch.ones(1, 4)).sum().backward()
    plain.step()
    assert torch.equal(result[0], exact.weight)
    assert torch.equal(result[1], exact.weight)


# -- checkpoints -------------------------------------------------------------------------------------

FROM_APEX = {
    "loss_scaler0": {"loss_scale": 16384.0, "unskipped": 1200},
    "loss_scaler1": {"loss_scale": 0.5, "unskipped": 0},
}


def start(**options):
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, verbosity=0, **options)


def test_a_checkpoint_of_apex_is_loaded_and_saved_in_the_same_form():
    model, optimizer = start(num_losses=2)
    amp.load_state_dict(FROM_APEX)
    assert json.loads(json.dumps(amp.state_dict())) == FROM_APEX
    loss = model(torch.ones(1, 4)).sum()
    with amp.scale_loss(loss, optimizer, loss_id=1) as scaled_loss:
        assert scaled_loss.item() == loss.item() * 0.5
    assert amp.state_dict(destination={"more": 1}).keys() == {"more", "loss_scaler0", "loss_scaler1"}


def test_growth_goes_on_where_the_checkpoint_ended():
    model, optimizer = start()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 256.0, "unskipped": 1999}})
    amp_backward(model(torch.ones(1, 4)).sum() * 2.0**-8, optimizer, 0)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 0}}


@pytest.mark.parametrize("number", [1, 3])
def test_a_checkpoint_of_another_number_of_losses_is_loaded_as_far_as_it_goes(number):
    start(num_losses=number)
    with pytest.warns(CheckpointWarning, match=f"2 loss scales, but num_losses={number}"):
        amp.load_state_dict(FROM_APEX)
    states = list(amp.state_dict().values())
    assert states[0] == FROM_APEX["loss_scaler0"]
    assert states[2:] == [{"loss_scale": 65536.0, "unskipped": 0}] * (number - 2)


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}, "scale": 3}, CheckpointError, "'scale'"),
        ({"schema": "ampx.loss_scale/1"}, RuntimeError, "'schema'"),
        ({"loss_scaler0": {"loss_scale": 4.0}}, InvalidStateError, "unskipped"),
        ({"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}}, InvalidStateError, "scale is 0.0"),
        ({"loss_scaler0": {"loss_scale": 4.0, "unskipped": -1}}, InvalidStateError, "-1"),
        ({"loss_scaler0": 4.0}, InvalidStateError, "4.0"),
    ],
)
def test_what_is_no_checkpoint_is_refused_and_changes_nothing(state, error, words):
    start()
    with pytest.raises(error, match=words):
        amp.load_state_dict(state)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}}


def test_the_state_is_that_of_ampx_too():
    _, optimizer = start()
    amp.load_state_dict({"loss_scaler0": FROM_APEX["loss_scaler0"]})
    portable = ampx.state_dict()
    assert portable["groups"][0]["losses"][0]["scale"] == 16384.0
    assert portable["groups"][0]["losses"][0]["growth_tracker"] == 1200
    assert optimizer.loss_scale == 16384.0


# -- annotations and registries ----------------------------------------------------------------------


def dtypes(*tensors):
    return tuple(tensor.dtype for tensor in tensors)


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_annotated_functions_cast_where_operations_are_cast(opt_level):
    start(opt_level=opt_level)
    half, single = torch.ones(2, dtype=torch.float16), torch.ones(2)
    on = opt_level == "O1"
    low, wide = (torch.float16, torch.float32) if on else (None, None)
    assert amp.half_function(dtypes)(half, single) == (torch.float16, low or torch.float32)
    assert amp.float_function(dtypes)(half, single) == (wide or torch.float16, torch.float32)
    assert amp.promote_function(dtypes)(half, single) == (wide or torch.float16, torch.float32)
    assert amp.promote_function(dtypes)(half, half) == (torch.float16,) * 2
    with amp.disable_casts():
        assert amp.half_function(dtypes)(half, single) == (torch.float16, torch.float32)


def test_annotated_functions_compute_with_weights_of_any_dtype():
    """Casting goes on in a half function, as in apex; a float function computes in float32 throughout."""
    start()
    weight = torch.ones(2, 2)
    assert amp.half_function(lambda x: x @ weight)(torch.ones(2, 2)).dtype == torch.float16
    assert amp.promote_function(lambda x: x @ weight)(torch.ones(2, 2).half()).dtype == torch.float16
    assert amp.float_function(lambda x: x @ weight)(torch.ones(2, 2).half()).dtype == torch.float32


def test_annotations_cast_in_containers_and_leave_the_rest():
    start()

    @amp.half_function
    def function(pair, *, options):
        """What it does."""
        return pair[0].dtype, options["index"].dtype, options["name"]

    result = function((torch.ones(1),), options={"index": torch.ones(1, dtype=torch.int64), "name": "x"})
    assert result == (torch.float16, torch.int64, "x")
    assert function.__doc__ == "What it does."


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_what_is_no_tensor_reaches_a_low_precision_model_as_it_is(opt_level):
    class Model(nn.Linear):
        def forward(self, x, *others):
            self.others = others
            return super().forward(x)

    model, others = Model(2, 2), ("name", None, 3, nn.Identity(), torch.device("cpu"))
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=opt_level, verbosity=0)
    model(torch.ones(1, 2), *others)
    assert model.others == others


@pytest.fixture
def module():
    """A script's own module of functions."""
    kernels = types.ModuleType("kernels")
    kernels.first = lambda x, y: (x.dtype, y.dtype)
    return kernels


@pytest.mark.parametrize(
    ("register", "expected"),
    [
        (amp.register_half_function, (torch.float16, torch.float16)),
        (amp.register_float_function, (torch.float32, torch.float32)),
        (amp.register_promote_function, (torch.float32, torch.float32)),
    ],
)
def test_registered_functions_of_a_module_are_cast_from_initialize_on(module, register, expected):
    own, arguments = module.first, (torch.ones(1).half(), torch.ones(1))
    register(module, "first")
    assert module.first(*arguments) == (torch.float16, torch.float32)
    start()
    assert module.first(*arguments) == expected
    start()  # once more: it is not cast twice, and is put back as it was
    assert module.first(*arguments) == expected
    assert module.first.__wrapped__ is own
    amp._amp_state.handle._deactivate()
    assert module.first is own


def test_registered_operations_of_torch_are_cast():
    amp.register_half_function(torch, "sigmoid")
    amp.register_float_function(F, "relu")
    amp.register_promote_function(torch, "minimum")
    amp.register_float_function(torch, "mm")
    amp.register_float_function(torch, "mv")
    start()
    half, single = torch.ones(2, 2).half(), torch.ones(2, 2)
    assert torch.sigmoid(single).dtype == torch.float16
    assert F.relu(half).dtype == torch.float32
    assert torch.minimum(half, single).dtype == torch.float32
    assert torch.mm(half, half).dtype == torch.float32
    assert torch.mv(half, half[0]).dtype == torch.float32
    ampx.shutdown()
    assert F.relu(half).dtype == torch.float16


@pytest.fixture
def overrides(monkeypatch):
    """The lists by name, to be edited by one test."""
    for own in (amp.lists.functional_overrides, amp.lists.torch_overrides, amp.lists.tensor_overrides):
        for name in ("FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS", "BANNED_FUNCS"):
            monkeypatch.setattr(own, name, list(getattr(own, name)))
    return amp.lists


def test_what_a_script_moves_from_list_to_list_is_cast_so(overrides):
    """The vendor's speech synthesis does the first."""
    overrides.functional_overrides.FP32_FUNCS.remove("softmax")
    overrides.functional_overrides.FP16_FUNCS.append("softmax")
    overrides.torch_overrides.FP32_FUNCS.append("tanh")
    start()
    x = torch.ones(2, 2)
    assert F.softmax(x, -1).dtype == torch.float16
    assert F.log_softmax(x.half(), -1).dtype == torch.float32
    assert torch.tanh(x.half()).dtype == torch.float32


def test_a_function_that_a_script_takes_from_every_list_is_refused(overrides):
    overrides.functional_overrides.FP32_FUNCS.remove("softmax")
    with pytest.raises(UnsupportedOpError, match=r"'softmax' was taken from FP32_FUNCS of functional_overrides"):
        start()


def test_banned_functions_may_be_taken_from_their_list(overrides):
    overrides.functional_overrides.BANNED_FUNCS.clear()
    start()
    half = torch.full((2,), 0.5).half()
    assert F.binary_cross_entropy(half, half).dtype == torch.float32


def test_every_name_on_the_lists_is_a_function_of_its_module():
    for own in (amp.lists.functional_overrides, amp.lists.torch_overrides, amp.lists.tensor_overrides):
        for names in (own.FP16_FUNCS, own.FP32_FUNCS, own.CASTS, own.SEQUENCE_CASTS):
            assert all(callable(getattr(own.MODULE, name)) for name in names)
    assert "linear" in amp.lists.functional_overrides.FP16_FUNCS
    assert "matmul" in amp.lists.torch_overrides.FP16_FUNCS
    assert "__matmul__" in amp.lists.tensor_overrides.FP16_FUNCS


def test_what_a_script_registers_goes_before_the_lists():
    amp.register_half_function(F, "softmax")
    start()
    assert F.softmax(torch.ones(2, 2), dim=1).dtype == torch.float16


def test_an_unknown_name_cannot_be_registered(module):
    with pytest.raises(ValueError, match="'second'"):
        amp.register_half_function(module, "second")


# -- the older handle --------------------------------------------------------------------------------


def older(num_loss=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = amp.init(loss_scale=128.0, **options)
    if num_loss is not None:
        optimizer = handle.wrap_optimizer(optimizer, num_loss=num_loss)
    return handle, model, optimizer


def test_the_handle_casts_and_scales():
    handle, model, optimizer = older()
    assert handle.is_active()
    loss = model(torch.ones(1, 4)).sum()
    assert loss.dtype == torch.float32
    assert model(torch.ones(1, 4)).dtype == torch.float16
    with handle.disable_casts():
        assert not handle.is_active()
        assert model(torch.ones(1, 4)).dtype == torch.float32
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.item() == 4 * 128
        scaled_loss.backward()
    assert model.weight.grad.tolist() == [[1.0] * 4]
    optimizer.step()
    assert model.weight.tolist() == [[0.5] * 4]
    optimizer.zero_grad()
    with handle.scale_loss(model(torch.ones(1, 4)).sum() * float("inf"), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert model.weight.tolist() == [[0.5] * 4]
    handle._deactivate()
    assert not handle.is_active()


def test_a_wrapped_optimizer_takes_its_losses_in_turn():
    _, model, optimizer = older(num_loss=2)
    assert isinstance(optimizer, torch.optim.SGD)
    for _ in range(2):
        optimizer.zero_grad()
        for value in (1.0, 2.0):
            with optimizer.scale_loss(model(torch.full((1, 4), value)).sum()) as scaled_loss:
                scaled_loss.backward()
        assert model.weight.grad.tolist() == [[3.0] * 4]
        with pytest.raises(ProtocolError, match="num_loss=2"), optimizer.scale_loss(torch.ones(())):
            pass
        optimizer.step()
    assert model.weight.tolist() == [[1 - 2 * 0.5 * 3.0] * 4]
    assert sorted(optimizer.ampx_member.group.states) == [0, 1]


def test_the_two_older_ways_do_not_mix():
    handle, model, optimizer = older(num_loss=1)
    with pytest.raises(ProtocolError, match=r"optimizer\.scale_loss"):
        handle.scale_loss(model(torch.ones(1, 4)).sum(), optimizer).__enter__()
    with pytest.raises(InvalidOptionError, match="num_loss=0"):
        handle.wrap_optimizer(optimizer, num_loss=0)


def test_two_optimizers_of_a_handle_share_its_scale():
    handle, model, optimizer = older()
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    loss = model(torch.ones(1, 4)).sum()
    for item in (optimizer, other):
        with handle.scale_loss(loss, item) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
    assert optimizer.ampx_member.group is other.ampx_member.group


def test_a_disabled_handle_changes_nothing():
    handle, model, optimizer = older(enabled=False)
    assert not handle.is_active()
    loss = model(torch.ones(1, 4)).sum()
    with handle.disable_casts(), handle.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    optimizer = handle.wrap_optimizer(optimizer)
    with optimizer.scale_loss(loss) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    optimizer.step()
    assert model.weight.tolist() == [[0.5] * 4]
