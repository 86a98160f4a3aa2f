"""To torch and to third parties the wrapped optimizer is the raw one, with a step of its own."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import ampx

INF = float("inf")
KINDS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd_foreach": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "sgd_fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "adam": (torch.optim.Adam, {}),
    "adam_foreach": (torch.optim.Adam, {"foreach": True}),
    "adam_fused": (torch.optim.Adam, {"fused": True}),
    "adamw_fused": (torch.optim.AdamW, {"fused": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adagrad_fused": (torch.optim.Adagrad, {"fused": True}),
    "rmsprop": (torch.optim.RMSprop, {}),
}


def model_and_optimizer(kind, lr=0.1):
    torch.manual_seed(3)
    model = nn.Linear(3, 1)
    cls, options = KINDS[kind]
    return model, cls(model.parameters(), lr=lr, **options)


def loss_of(model, x=1.0):
    return (model(torch.full((2, 3), x)) ** 2).mean()


def test_a_state_loads_where_it_belongs_only(amp, backward):
    parameter = nn.Parameter(torch.ones(2))
    opt = ampx.wrap_optimizer(torch.optim.Adam([parameter]))
    backward(parameter.sum(), opt)
    opt.step()
    with pytest.raises(ampx.InvalidStateError, match=r"amp\.load_state_dict"):
        opt.load_state_dict(amp.state_dict())
    with pytest.raises(ampx.UnknownSchemaError, match=r"keys 'state', 'param_groups'.*to its own load_state_dict"):
        amp.load_state_dict(opt.state_dict())
    assert opt.state[parameter]["step"] == 1
    assert amp.state_dict(opt)["groups"][0]["losses"][0]["growth_tracker"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_steps_are_the_plain_optimizers_steps_bit_for_bit(kind, amp, backward, same):
    plain_model, plain = model_and_optimizer(kind)
    model, raw = model_and_optimizer(kind)
    opt = ampx.wrap_optimizer(raw)
    for x in (1.0, 0.5, -2.0):
        loss_of(plain_model, x).backward()
        plain.step()
        plain.zero_grad()
        backward(loss_of(model, x), opt)
        opt.step()
        opt.zero_grad()
    # 2**16 is a power of two: scaling and unscaling change no bit.
    assert same(model.state_dict(), plain_model.state_dict())
    assert same(opt.state_dict()["state"], plain.state_dict()["state"])


@pytest.mark.parametrize(
    ("kind", "on_device"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in KINDS if "fused" in kind)]
)
def test_overflow_leaves_weights_and_optimizer_state_bit_identical(kind, on_device, amp, backward, same):
    model, raw = model_and_optimizer(kind)
    opt = ampx.wrap_optimizer(raw, device_scale=on_device)
    backward(loss_of(model), opt)
    opt.step()
    opt.zero_grad()
    before = copy.deepcopy((model.state_dict(), opt.state_dict()))
    backward(loss_of(model, INF), opt)
    opt.step()
    assert same((model.state_dict(), opt.state_dict()), before)
    assert (opt.last_step.applied, opt.last_step.finite, opt.last_step.next_scale) == (False, False, 2.0**15)


def test_the_wrapper_is_a_torch_optimizer_with_the_raw_ones_groups_state_and_defaults(amp):
    raw = model_and_optimizer("adam")[1]
    opt = ampx.wrap_optimizer(raw)
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.param_groups is raw.param_groups
    assert opt.state is raw.state
    assert opt.defaults is raw.defaults
    assert "Adam (" in repr(opt)
    assert "init_scale=65536" in repr(opt)
    opt.param_groups = list(raw.param_groups)
    assert raw.param_groups is opt.param_groups
    assert not hasattr(opt, "no_such_attribute")


def test_state_dict_is_plain_torchs_and_loads_both_ways(amp, backward, same):
    model, raw = model_and_optimizer("adam")
    opt = ampx.wrap_optimizer(raw)
    backward(loss_of(model), opt)
    opt.step()
    saved = opt.state_dict()
    assert set(saved) == {"state", "param_groups"}
    fresh = model_and_optimizer("adam")[1]
    fresh.load_state_dict(saved)
    other = ampx.wrap_optimizer(model_and_optimizer("adam")[1])
    other.load_state_dict(state_dict=fresh.state_dict())
    assert same(other.state_dict(), saved)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["deepcopy", "pickle"])
def test_a_copy_of_model_and_optimizer_steps_as_the_original_with_its_scale_and_its_guard(
    how, on_device, amp, backward, same
):
    model, raw = model_and_optimizer("adam_fused")
    opt = ampx.wrap_optimizer(raw, device_scale=on_device, max_grad_norm=1.0)
    backward(loss_of(model, INF), opt)
    opt.step()
    opt.zero_grad()
    copied_model, copied = how((model, opt))
    assert copied.loss_scale == opt.loss_scale == 2.0**15
    for trained, its in ((model, opt), (copied_model, copied)):
        backward(loss_of(trained), its)
        with pytest.raises(ampx.RawStepError):
            its.optimizer.step()
        its.step()
        its.zero_grad()
    assert same(copied_model.state_dict(), model.state_dict())
    assert copied.last_step == opt.last_step
    # From here on each goes its own way, and the copy stays as free of syncs as the original.
    backward(loss_of(copied_model, INF), copied)
    copied.step()
    assert (copied.loss_scale, opt.loss_scale) == (2.0**14, 2.0**15)
    assert type(copied.ampx_member.group.ledger) is type(opt.ampx_member.group.ledger)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["deepcopy", "pickle"])
def test_a_copy_made_while_gradients_are_pending_starts_clean(how, amp, backward):
    model, raw = model_and_optimizer("sgd")
    opt = ampx.wrap_optimizer(raw)
    torch.optim.lr_scheduler.StepLR(opt, 1)
    backward(loss_of(model), opt)
    copied = how(opt)
    copied.zero_grad()
    copied.step()
    assert not copied.last_step.applied
    opt.step()
    assert opt.last_step.applied


def test_hooks_registered_on_the_wrapper_or_the_raw_optimizer_fire_for_applied_steps_only(amp, backward):
    model, raw = model_and_optimizer("sgd")
    opt = ampx.wrap_optimizer(raw)
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append("pre"))
    raw.register_step_post_hook(lambda *_: seen.append("post"))
    opt.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    opt.register_load_state_dict_pre_hook(lambda *_: seen.append("loading"))
    backward(loss_of(model, INF), opt)
    opt.step()
    opt.zero_grad()
    assert seen == []
    backward(loss_of(model), opt)
    opt.step()
    assert seen == ["pre", "post"]
    opt.load_state_dict(opt.state_dict())
    assert seen == ["pre", "post", "saved", "loading"]


@pytest.mark.parametrize("through", ["wrapper", "raw"])
def test_a_parameter_group_added_later_is_unscaled_checked_and_updated(through, amp, backward):
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    raw = torch.optim.SGD([first], lr=1.0)
    opt = ampx.wrap_optimizer(raw)
    backward(first.sum(), opt)
    opt.step()
    opt.zero_grad()
    (opt if through == "wrapper" else raw).add_param_group({"params": [second], "lr": 0.5})
    backward((first + second).sum(), opt)
    opt.step()
    opt.zero_grad()
    assert first.tolist() == [-1.0, -1.0]
    assert second.tolist() == [0.5, 0.5]
    backward((second * INF).sum(), opt)
    opt.step()
    assert not opt.last_step.finite
    assert second.tolist() == [0.5, 0.5]


def test_a_shallow_copy_is_refused_and_leaves_the_optimizer_as_it_was(amp, backward):
    parameter = nn.Parameter(torch.ones(1))
    opt = ampx.wrap_optimizer(torch.optim.SGD([parameter], lr=1.0))
    with pytest.raises(ampx.AlreadyWrappedError, match=r"Use the object.*deepcopy"):
        copy.copy(opt)
    backward(parameter.sum(), opt)
    opt.step()
    assert parameter.item() == 0.0


@pytest.mark.parametrize("through", ["wrapper", "raw"])
@pytest.mark.parametrize("when", ["idle", "scaled", "unscaled"])
def test_gradients_that_a_parameter_group_brings_along_are_not_stepped_scaled(when, through, amp, backward):
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = ampx.wrap_optimizer(torch.optim.SGD([first], lr=1.0))
    backward((first + second).sum(), opt)
    if when == "idle":
        opt.step()
        opt.zero_grad()  # clears nothing of the second one's
    elif when == "unscaled":
        ampx.unscale(opt)
    (opt if through == "wrapper" else opt.optimizer).add_param_group({"params": [second], "lr": 0.5})
    if when == "scaled":
        opt.step()
        assert second.tolist() == [0.5, 0.5]
        return
    with pytest.raises(ampx.ProtocolError, match=r"before add_param_group.*zero_grad"):
        opt.step() if when == "unscaled" else backward((first + second).sum(), opt)
    assert second.tolist() == [1.0, 1.0]
    opt.zero_grad()
    backward((first + second).sum(), opt)
    opt.step()
    assert second.tolist() == [0.5, 0.5]


def test_a_parameter_group_brings_gradients_along_where_losses_are_not_scaled(backward):
    ampx.init("torch", dtype="bfloat16", process_wide=False)
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = ampx.wrap_optimizer(torch.optim.SGD([first], lr=1.0))
    backward((first + second).sum(), opt)
    ampx.unscale(opt)
    opt.add_param_group({"params": [second]})
    opt.step()
    assert second.tolist() == [0.0, 0.0]


def test_a_parameter_swapped_for_another_of_the_same_kind_is_unscaled_too(amp, backward):
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    raw = torch.optim.SGD([first], lr=1.0)
    opt = ampx.wrap_optimizer(raw)
    backward(first.sum(), opt)
    opt.step()
    opt.zero_grad()
    raw.param_groups[0]["params"] = [second]
    backward(second.sum(), opt)
    opt.step()
    assert second.tolist() == [0.0, 0.0]


def test_add_param_group_behaves_as_torchs_for_named_parameters_sets_and_dict_identity(amp):
    raw = torch.optim.SGD([("a", nn.Parameter(torch.ones(1)))], lr=1.0)
    opt = ampx.wrap_optimizer(raw)
    group = {"params": [("b", nn.Parameter(torch.ones(1)))]}
    opt.add_param_group(group)
    assert raw.param_groups[1] is group
    assert group["param_names"] == ["b"]
    with pytest.raises(TypeError, match="ordered"):
        opt.add_param_group({"params": {nn.Parameter(torch.ones(1))}})


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
def test_other_dtypes_than_float32_step_as_in_plain_torch(dtype, amp, backward, same):
    def run(step):
        torch.manual_seed(5)
        parameters = [nn.Parameter(torch.randn(3, dtype=dtype)), nn.Parameter(torch.randn(3))]
        step(parameters, torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        return [parameter.detach() for parameter in parameters]

    def loss_for(parameters):
        return sum((parameter.abs() ** 2).sum() for parameter in parameters)

    def plainly(parameters, opt):
        for _ in range(2):
            opt.zero_grad()
            loss_for(parameters).backward()
            opt.step()

    def through_ampx(parameters, raw):
        opt = ampx.wrap_optimizer(raw)
        for _ in range(2):
            opt.zero_grad()
            backward(loss_for(parameters), opt)
            opt.step()
        before = [parameter.detach().clone() for parameter in parameters]
        opt.zero_grad()
        backward(loss_for(parameters) * INF, opt)
        opt.step()
        assert not opt.last_step.finite
        assert same(before, [parameter.detach() for parameter in parameters])

    assert same(run(through_ampx), run(plainly))


@pytest.mark.parametrize("kind", ["sparse_adam", "sgd", "mixed"])
def test_sparse_gradients_step_as_in_plain_torch_and_their_overflow_is_seen(kind, amp, backward, same):
    def make():
        torch.manual_seed(2)
        table, head = nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1)
        if kind == "sparse_adam":
            return table, head.requires_grad_(False), torch.optim.SparseAdam(table.parameters(), lr=0.1)
        parameters = [*table.parameters(), *(head.parameters() if kind == "mixed" else ())]
        return table, head, torch.optim.SGD(parameters, lr=0.1)

    index = torch.tensor([1, 3, 1])  # a repeated row: the gradient is not coalesced
    table, head, plain = make()
    for _ in range(2):
        plain.zero_grad()
        (head(table(index)) ** 2).mean().backward()
        plain.step()
    wrapped_table, wrapped_head, raw = make()
    opt = ampx.wrap_optimizer(raw)
    for _ in range(2):
        opt.zero_grad()
        backward((wrapped_head(wrapped_table(index)) ** 2).mean(), opt)
        opt.step()
    assert same([*wrapped_table.state_dict().values()], [*table.state_dict().values()])
    assert same(wrapped_head.state_dict(), head.state_dict())
    opt.zero_grad()
    backward((wrapped_table(index) * INF).sum(), opt)
    opt.step()
    assert not opt.last_step.finite
    assert same([*wrapped_table.state_dict().values()], [*table.state_dict().values()])


def test_sparse_gradients_that_were_never_scaled_are_refused(amp):
    table = nn.Embedding(4, 2, sparse=True)
    opt = ampx.wrap_optimizer(torch.optim.SGD(table.parameters(), lr=0.1))
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ampx.NotScaledError):
        opt.step()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")  # torch, once a process
def test_gradients_with_a_graph_of_their_own_are_unscaled(amp):
    parameter = nn.Parameter(torch.tensor([3.0]))
    opt = ampx.wrap_optimizer(torch.optim.SGD([parameter], lr=1.0))
    with ampx.scale_loss((parameter**2).sum(), opt) as scaled:
        scaled.backward(create_graph=True)
    opt.step()
    assert parameter.tolist() == [-3.0]
    parameter.grad = None


def test_distributed_checkpoint_reads_and_sets_the_state_without_counting_a_step(amp, backward, same):
    from torch.distributed.checkpoint import state_dict as dcp

    model, raw = model_and_optimizer("adam")
    opt = ampx.wrap_optimizer(raw)
    dcp.get_optimizer_state_dict(model, opt)
    assert amp.state_dict()["groups"][0]["losses"][0]["growth_tracker"] == 0
    backward(loss_of(model), opt)
    opt.step()
    opt.zero_grad()
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, opt))
    other_model, other_raw = model_and_optimizer("adam")
    other_model.load_state_dict(model.state_dict())
    other = ampx.wrap_optimizer(other_raw)
    dcp.set_optimizer_state_dict(other_model, other, saved)
    assert [loss["losses"][0]["growth_tracker"] for loss in amp.state_dict()["groups"]] == [1, 0]
    assert same(other.state_dict()["state"], opt.state_dict()["state"])
    for trained, its in ((model, opt), (other_model, other)):
        backward(loss_of(trained), its)
        its.step()
    assert same(other_model.state_dict(), model.state_dict())


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own import of its optimizers
def test_zero_redundancy_optimizer_steps_and_skips(amp, backward, tmp_path):
    from torch import distributed
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(model.weight)
        opt = ampx.wrap_optimizer(ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0))
        backward(model(torch.ones(1, 3)).sum(), opt)
        opt.step()
        assert model.weight.tolist() == [[0.0, 0.0, 0.0]]
        opt.zero_grad()
        backward(model(torch.full((1, 3), INF)).sum() * 0 + model.weight.sum() * INF, opt)
        opt.step()
        assert model.weight.tolist() == [[0.0, 0.0, 0.0]]
        assert opt.loss_scale == 2.0**15
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own import of its compiler
def test_a_compiled_step_is_the_eager_step(amp, backward, same):
    model, raw = model_and_optimizer("sgd")
    twin, twin_raw = model_and_optimizer("sgd")
    opt, twin_opt = ampx.wrap_optimizer(raw), ampx.wrap_optimizer(twin_raw)
    compiled = torch.compile(lambda: opt.step(), backend="eager")
    for x in (1.0, INF, 2.0):
        for trained, its, step in ((model, opt, compiled), (twin, twin_opt, twin_opt.step)):
            its.zero_grad()
            backward(loss_of(trained, x), its)
            step()
    assert same(model.state_dict(), twin.state_dict())
    assert opt.last_step == twin_opt.last_step


def test_a_wrapped_optimizer_and_its_parameters_are_freed_without_the_garbage_collector(amp, backward):
    gc.collect()
    gc.disable()
    try:
        model, raw = model_and_optimizer("adam")
        opt = ampx.wrap_optimizer(raw, max_grad_norm=1.0)
        backward(loss_of(model), opt)
        opt.step()
        alive = weakref.ref(model.weight)
        del model, raw, opt
        assert alive() is None
    finally:
        gc.enable()


def test_loading_a_state_saved_without_fused_keeps_skipping_overflow(amp, backward, same):
    model, raw = model_and_optimizer("adam_fused")
    opt = ampx.wrap_optimizer(raw, device_scale=True)
    backward(loss_of(model), opt)
    opt.step()
    opt.zero_grad()
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        group["fused"] = None
    opt.load_state_dict(saved)
    before = copy.deepcopy(model.state_dict())
    backward(loss_of(model, INF), opt)
    opt.step()
    opt.zero_grad()
    assert same(model.state_dict(), before)
    assert opt.loss_scale == 2.0**15
    backward(loss_of(model), opt)
    opt.step()
    assert opt.last_step.applied


def test_disabled_sessions_hand_everything_to_the_raw_optimizer(same):
    ampx.init("torch", enabled=False)
    model, raw = model_and_optimizer("adam")
    plain_model, plain = model_and_optimizer("adam")
    opt = ampx.wrap_optimizer(raw)
    loss = loss_of(model)
    with ampx.scale_loss(loss, opt) as scaled:
        assert scaled is loss
        scaled.backward()
    opt.step()
    loss_of(plain_model).backward()
    plain.step()
    assert same(model.state_dict(), plain_model.state_dict())
    assert opt.last_step.finite is None
    half = nn.Parameter(torch.ones(1, dtype=torch.float16))
    opt.add_param_group({"params": [half]})


@pytest.mark.parametrize("call", [ampx.unscale, lambda opt: ampx.clip_grad_norm(opt, 10.0)])
def test_an_object_that_stands_for_a_wrapped_optimizer_and_derives_from_it_is_seen_through(call, amp, backward):
    """Fabric and Lightning make such objects: their class is made from the optimizer's."""

    class Around:
        def __init__(self, optimizer):
            self._optimizer = optimizer
            self.__class__ = type("Around", (Around, type(optimizer)), {})

        optimizer = property(lambda self: self._optimizer)

        def step(self):
            return self._optimizer.step()

        def __getattr__(self, name):
            return getattr(self._optimizer, name)

    parameter = nn.Parameter(torch.zeros(1))
    opt = ampx.wrap_optimizer(torch.optim.SGD([parameter], lr=1.0))
    around = Around(opt)
    backward(parameter.sum(), around)
    call(around)
    parameter.grad.fill_(float("inf"))  # after it was tested
    around.step()
    assert parameter.item() == 0.0
    assert not around.last_step.applied
    around.zero_grad()
    backward(parameter.sum(), [around])
    around.step()
    assert (parameter.item(), around.last_step.scale) == (-1.0, 2.0**15)
    assert amp.state_dict(around) == amp.state_dict(opt)
