"""allow and deny: every entry is honoured or refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import ampx
from ampx_torch.casting.oplists import PYTHON_WRAPPERS

LOW = torch.bfloat16


@pytest.fixture(autouse=True)
def restored():
    torch.set_num_threads(1)
    yield
    ampx.shutdown()


def init(**options):
    return ampx.init("torch", dtype="bfloat16", device="cpu", **options)


@pytest.fixture
def low():
    return torch.rand(2, 4, dtype=LOW)


@pytest.fixture
def full():
    return torch.rand(2, 4)


# -- operations ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [torch.softmax, F.softmax, torch.Tensor.softmax, "softmax", "aten::softmax", torch.ops.aten.softmax],
    ids=str,
)
def test_every_spelling_denies_every_way_to_call_an_operation(entry, low):
    init(deny=[entry])
    calls = [torch.softmax(low, -1), F.softmax(low, -1), low.softmax(-1), nn.Softmax(-1)(low)]
    assert [result.dtype for result in calls] == [torch.float32] * 4
    torch.testing.assert_close(calls[0], torch.softmax(low.float(), -1), rtol=0, atol=0)


@pytest.mark.parametrize("entry", [torch.matmul, torch.Tensor.matmul, "aten::matmul"], ids=str)
def test_deny_takes_an_operation_off_the_native_list(entry, full):
    init(deny=[entry])
    assert (full @ full.T).dtype == torch.float32
    assert torch.mm(full, full.T).dtype == LOW


def test_allow_adds_to_the_native_list(full):
    init(allow=[F.layer_norm])
    assert nn.LayerNorm(4)(full).dtype == LOW


def test_allow_takes_an_operation_off_the_native_float32_list(full, low):
    init(allow=[F.mse_loss])
    assert F.mse_loss(full, full).dtype == LOW
    assert F.l1_loss(low, low).dtype == torch.float32


def test_gradients_flow_through_rules(full):
    amp = init(deny=[F.linear])
    layer = nn.Linear(4, 3)
    loss = layer(full).square().sum()
    with amp.autocast(False):
        loss.backward()
    expected = nn.Linear(4, 3)
    expected.load_state_dict(layer.state_dict())
    ampx.shutdown()
    expected(full).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected.weight.grad, rtol=0, atol=0)


def test_rules_leave_other_dtypes_alone(full):
    init(deny=["softmax"], allow=["layer_norm"])
    assert torch.softmax(full.double(), -1).dtype == torch.float64
    assert F.layer_norm(full.double(), [4]).dtype == torch.float64


def test_rules_do_not_act_in_regions_that_are_off(low):
    amp = init(deny=["softmax"])
    with amp.autocast(False):
        assert torch.softmax(low, -1).dtype == LOW


def test_a_region_of_another_dtype_keeps_the_rules(full):
    amp = init(allow=["layer_norm"])
    with amp.autocast(dtype="float16"):
        assert F.layer_norm(full, [4]).dtype == torch.float16


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_rules_without_process_wide_casting_act_inside_regions_only(low, dtype):
    amp = init(deny=["softmax"], process_wide=False)
    with amp.autocast(dtype=dtype):
        assert torch.softmax(low, -1).dtype == torch.float32
    with torch.autocast("cpu", LOW):
        assert torch.softmax(low, -1).dtype == LOW


def test_batch_norm_keeps_its_running_statistics_under_a_rule():
    init(allow=[F.batch_norm])
    norm, x = nn.BatchNorm1d(3), torch.randn(8, 3) + 5
    assert norm(x).dtype == LOW
    torch.testing.assert_close(norm.running_mean, x.mean(0) * 0.1, rtol=1e-2, atol=1e-2)


def native_dtypes(low, full):
    with torch.autocast("cpu", LOW):
        return [
            result.dtype
            for result in (
                torch.softmax(low, -1),
                F.layer_norm(full, [4]),
                F.linear(full, full),
                F.mse_loss(low, low),
                torch.matmul(full, full.T),
            )
        ]


def test_shutdown_brings_the_native_lists_back(low, full):
    before = native_dtypes(low, full)
    init(deny=["softmax", "linear", "matmul"], allow=["layer_norm", "mse_loss"])
    assert native_dtypes(low, full) == [torch.float32, LOW, torch.float32, LOW, torch.float32]
    ampx.shutdown()
    assert native_dtypes(low, full) == before


def test_operations_of_other_libraries_can_be_named(full):
    library = torch.library.Library("ampx_test", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    try:
        init(allow=["ampx_test::double"])
        assert torch.ops.ampx_test.double(full).dtype == LOW
    finally:
        ampx.shutdown()
        library._destroy()


ROW, IMAGE, TARGET = torch.rand(2, 4), torch.rand(2, 4, 4, 4), torch.randint(0, 4, (2,))
ARGUMENTS = {
    F.adaptive_avg_pool2d: (IMAGE, 2),
    F.adaptive_avg_pool3d: (IMAGE, 2),
    F.batch_norm: (IMAGE, torch.zeros(4), torch.ones(4)),
    F.cosine_embedding_loss: (ROW, ROW, torch.ones(2)),
    F.cross_entropy: (ROW, TARGET),
    F.ctc_loss: (torch.rand(3, 1, 4).log(), torch.ones(1, 2).long(), torch.tensor([3]), torch.tensor([2])),
    F.embedding: (TARGET, ROW.T.contiguous()),
    F.grid_sample: (IMAGE, torch.rand(2, 2, 2, 2), "bilinear", "zeros", False),
    F.group_norm: (IMAGE, 2),
    F.instance_norm: (IMAGE,),
    F.kl_div: (ROW, ROW, None, None, "sum"),
    F.layer_norm: (ROW, [4]),
    F.margin_ranking_loss: (ROW, ROW, ROW),
    F.multi_margin_loss: (ROW, TARGET),
    F.nll_loss: (ROW, TARGET),
    F.rms_norm: (ROW, [4]),
    F.softmax: (ROW, -1),
    F.log_softmax: (ROW, -1),
    F.triplet_margin_loss: (ROW, ROW, ROW),
    torch.einsum: ("ij,kj", ROW, ROW),
}


@pytest.mark.parametrize("function", PYTHON_WRAPPERS, ids=lambda result: result.__name__)
def test_python_functions_that_are_accepted_reach_their_operation(function):
    arguments = ARGUMENTS.get(function, (ROW, ROW) if "loss" in function.__name__ else (ROW,))
    if function in (F.binary_cross_entropy, F.binary_cross_entropy_with_logits, torch.cdist):
        arguments = (ROW, ROW)
    dtypes = set()
    for rule in ({"allow": [function]}, {"deny": [function]}):
        init(**rule)
        try:
            dtypes.add(function(*arguments).dtype)
        except NotImplementedError as error:
            assert "BFloat16" in str(error)  # noqa: PT017 - torch has no such kernel, so the rule reached it
            dtypes.add(LOW)
    assert dtypes == {LOW, torch.float32}


# -- modules ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x, fail=False):
        self.seen = [self.first(x).dtype, self.norm(self.first(x)).dtype, self.head(x).dtype]
        if fail:
            raise ZeroDivisionError
        return self.head(self.norm(self.first(x)))


def test_denied_classes_compute_in_float32(full):
    init(deny=[nn.LayerNorm])
    model = Block()
    model(full)
    assert model.seen == [LOW, torch.float32, LOW]


def test_rules_cover_subclasses_and_the_nearest_class_wins(full):
    class Mine(nn.Linear):
        pass

    class Yours(Mine):
        pass

    init(deny=[nn.Linear, Yours], allow=[Mine])
    assert [kind(4, 4)(full).dtype for kind in (nn.Linear, Mine, Yours)] == [torch.float32, LOW, torch.float32]


def test_a_denied_module_covers_what_it_contains_but_an_allowed_one_inside_wins(full):
    class Inner(nn.Linear):
        pass

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.inner = nn.Linear(4, 4), Inner(4, 4)

        def forward(self, x):
            return self.plain(x).dtype, self.inner(x).dtype, self.plain(x).dtype

    init(deny=[Outer], allow=[Inner])
    assert Outer()(full) == (torch.float32, LOW, torch.float32)


@pytest.mark.parametrize("prepared", [False, True])
def test_casting_is_restored_after_an_exception_in_a_denied_module(full, prepared):
    amp = init(deny=[Block])
    model = Block()
    if prepared:
        amp.prepare(model)
    with pytest.raises(ZeroDivisionError):
        model(full, fail=True)
    assert model.seen == [torch.float32] * 3
    assert (full @ full.T).dtype == LOW


def test_casting_is_restored_where_an_interrupt_left_a_denied_module():
    class Interrupted(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Interrupted()

        def forward(self, x):
            with pytest.raises(KeyboardInterrupt):
                self.inner(x)
            return x

    amp = init(deny=[Outer], allow=[Interrupted, nn.Linear])
    x = torch.ones(2, 2)
    Outer()(x)
    assert (x @ x).dtype == LOW
    with amp.autocast(False):
        assert nn.Linear(2, 2)(x).dtype == torch.float32


class Keyword(nn.Module):
    def forward(self, x, *, other=None, mask=None):
        return x if other is None else x + other * other


def test_keyword_tensors_of_a_class_rule_are_not_silently_left_out(low):
    init(deny=[Keyword])
    with pytest.raises(ampx.UnsupportedOpError, match="keyword"):
        Keyword()(low, other=low)
    assert Keyword()(low, other=low.float(), mask=torch.ones(2) > 0).dtype == torch.float32
    assert torch.is_autocast_enabled("cpu")


def test_keyword_tensors_are_cast_after_prepare(low):
    amp = init(deny=[Keyword])
    model = amp.prepare(Keyword())
    # Squared in bfloat16 and in float32 the values differ.
    assert torch.equal(model(low, other=low), low.float() + low.float() * low.float())


def test_patterns_act_on_the_modules_that_prepare_finds(full):
    amp = init(deny=["head.*", "module:norm"])
    model = amp.prepare(Block())
    other = Block()
    model(full)
    other(full)
    assert model.seen == [LOW, torch.float32, torch.float32]
    assert other.seen == [LOW, LOW, LOW]


def test_a_name_goes_before_a_class(full):
    amp = init(deny=[nn.Linear], allow=["first"])
    model = amp.prepare(Block())
    model(full)
    assert model.seen == [LOW, LOW, torch.float32]


def test_preparing_twice_changes_nothing(full):
    amp = init(deny=["first"])
    model = amp.prepare(Block())
    hooks = [len(model.first._forward_pre_hooks), len(model.first._forward_hooks)]
    assert amp.prepare(model) is model
    assert [len(model.first._forward_pre_hooks), len(model.first._forward_hooks)] == hooks == [1, 1]


def test_patterns_see_through_wrappers(full):
    amp = init(deny=["first"])
    model = nn.ModuleDict({"module": Block()})
    amp.prepare(model)
    model["module"](full)
    assert model["module"].seen[0] == torch.float32


def test_several_models_share_one_list_of_patterns(full):
    amp = init(deny=["first", "0"])
    block, sequence = Block(), nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ampx.UnsupportedOpError, match="matches no module"):
        amp.prepare(block)
    amp.prepare([block, sequence])
    assert sequence(full).dtype == torch.float32


def test_a_name_is_about_every_model_and_one_with_a_class_in_front_about_later_ones_of_it(full):
    for denied, dtypes in (("head.0", [torch.float32] * 2), ("module:Block:head.0", [LOW, torch.float32])):
        blocks = [Block(), Block()]
        init(deny=[denied]).prepare(blocks)
        for block in blocks:
            block(full)
        assert [block.seen[2] for block in blocks] == dtypes


@pytest.mark.parametrize("copier", ["deepcopy", "pickle"])
def test_rules_travel_with_copies_of_a_model_and_sleep_without_the_session(full, copier):
    import copy
    import pickle

    amp = init(deny=["first"])
    model = amp.prepare(Block())
    twin = copy.deepcopy(model) if copier == "deepcopy" else pickle.loads(pickle.dumps(model))
    twin(full)
    assert twin.seen[0] == torch.float32
    for others in ([], [nn.LayerNorm]):
        init(deny=others)
        twin(full)
        assert twin.seen[0] == LOW


def test_a_copy_with_sleeping_hooks_obeys_the_class_rules_of_a_new_session(full):
    amp = init(deny=["first"])
    model = amp.prepare(Block())
    init(deny=[nn.Linear])
    model(full)
    assert model.seen[0] == torch.float32


def test_a_denied_module_inside_a_fused_transformer_layer_is_reached(full):
    layer = nn.TransformerEncoderLayer(4, 1, 4, batch_first=True).eval()
    calls = []
    layer.linear1.register_forward_hook(lambda module, args, output: calls.append(output.dtype))
    init(deny=[nn.Linear])
    with torch.no_grad():
        layer(full[None])
    assert calls == [torch.float32]
    assert not torch.backends.mha.get_fastpath_enabled()
    ampx.shutdown()
    assert torch.backends.mha.get_fastpath_enabled()


def test_module_rules_leave_no_hooks_behind():
    from torch.nn.modules import module

    def hooks():
        return {name: len(value) for name, value in vars(module).items() if name.startswith("_global") and value}

    before = hooks()
    init(deny=[nn.LayerNorm])
    assert hooks() != before
    ampx.shutdown()
    assert hooks() == before


def test_checkpointing_a_denied_module_recomputes_in_float32(full):
    from torch.utils.checkpoint import checkpoint

    init(deny=[Block])
    model, seen = Block(), []
    y = checkpoint(model, full.requires_grad_(), use_reentrant=False)
    seen.append(list(model.seen))
    with torch.autocast("cpu", enabled=False):
        y.sum().backward()
    assert [*seen, model.seen] == [[torch.float32] * 3] * 2


# -- refusals --------------------------------------------------------------------------------------


def silly(x):
    return x


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deny": [F.normalize]}, "float_function"),
        ({"deny": [torch.norm]}, "float_function"),
        ({"deny": [silly]}, "float_function"),
        ({"deny": [len]}, "float_function"),
        ({"deny": [3]}, "int is nothing that torch casts"),
        ({"deny": ["normalize"]}, "Pass the function itself"),
        ({"deny": ["aten::no_such_operation"]}, "no single operation"),
        ({"deny": [""]}, "empty"),
        ({"deny": [torch.zeros]}, "nothing to cast"),
        ({"deny": [torch.Tensor.relu_]}, "in place"),
        ({"deny": [torch.reshape]}, "view"),
        ({"deny": [nn.Module]}, "class of all modules"),
        ({"deny": [nn.Linear(1, 1)]}, "Pass its class"),
        ({"allow": [nn.LayerNorm]}, "layer_norm"),
        ({"allow": [torch.softmax], "deny": ["softmax"]}, "in allow and in deny"),
        ({"allow": [nn.Linear], "deny": [nn.Linear]}, "in allow and in deny"),
        ({"allow": ["a.*"], "deny": ["a.*"]}, "in allow and in deny"),
        ({"deny": [torch.softmax], "level": "O2"}, "casts parameters"),
    ],
    ids=str,
)
def test_entries_that_cannot_be_honoured_are_refused_by_init(options, message):
    with pytest.raises(ampx.UnsupportedOpError, match=message):
        init(**options)
    assert not torch.is_autocast_enabled("cpu")


def test_a_pattern_that_matches_nothing_is_refused_by_prepare():
    amp = init(deny=["encoder.*"])
    with pytest.raises(ampx.UnsupportedOpError, match=r"encoder\.\*.*matches no module.*first, norm, head"):
        amp.prepare(Block())


def test_a_pattern_that_no_model_was_prepared_for_is_refused_by_wrap_optimizer():
    amp = init(deny=["first"])
    model = Block()
    with pytest.raises(ampx.UnsupportedOpError, match=r"name 'first', for no operation but for modules.*prepare"):
        amp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    amp.prepare(model)
    amp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("entry", ["sofmax", "Softmax", "aten::sofmax", "log_sofmax"])
def test_an_entry_that_is_almost_an_operation_is_answered_with_its_name(entry):
    name = r"log_softmax" if entry.startswith("log") else "softmax"
    for search in (
        lambda amp: amp.prepare(Block()),
        lambda amp: amp.wrap_optimizer(torch.optim.SGD([torch.ones(1)], lr=0.1)),
    ):
        with pytest.raises(ampx.UnsupportedOpError, match=rf"{entry}.* Did you mean '{name}'\?$"):
            search(init(deny=[entry]))


@pytest.mark.parametrize("entry", ["module:sofmax", "encoder.layers"])
def test_an_entry_that_names_modules_is_answered_with_no_operation(entry):
    with pytest.raises(ampx.UnsupportedOpError, match=r"prepare\(\[first, second\]\)\.$"):
        init(deny=[entry]).prepare(Block())


def test_a_module_in_both_lists_by_two_patterns_is_refused():
    amp = init(deny=["f*"], allow=["*t"])
    with pytest.raises(ampx.UnsupportedOpError, match=r"'first'.*narrower"):
        amp.prepare(Block())


def test_a_name_of_an_operation_and_a_module_is_refused():
    amp = init(deny=["norm"])
    with pytest.raises(ampx.UnsupportedOpError, match="module:norm"):
        amp.prepare(Block())


def test_op_lists_do_not_reset_a_compiler_that_has_compiled_nothing(monkeypatch):
    """Where there is a GPU, a reset imports the whole of inductor."""
    torch.compiler.reset()
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(True))
    init(allow=["exp"])
    ampx.shutdown()
    assert resets == []


@pytest.mark.gpu
@pytest.mark.parametrize("entry", [torch.softmax, F.layer_norm, "exp"], ids=str)
def test_allow_takes_operations_off_the_float32_list_of_cuda(entry):
    ampx.init("torch", dtype="float16", device="cuda", allow=[entry])
    x = torch.rand(2, 4, device="cuda")
    function = getattr(torch, entry) if isinstance(entry, str) else entry
    arguments = {torch.softmax: (-1,), F.layer_norm: ([4],)}.get(function, ())
    assert function(x, *arguments).dtype == torch.float16
