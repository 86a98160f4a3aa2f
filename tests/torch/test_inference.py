"""`ampx.convert` in PyTorch: what stays in float32, what is shared, what is refused, and that `tune` says the same."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from torch import nn

import ampx

LOW = torch.float16


def dtypes(model):
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


def test_a_convolutional_network_is_half_and_its_norms_and_counters_are_not():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    model(torch.randn(16, 3, 8, 8) + 1)  # running statistics
    batch = torch.randn(4, 3, 8, 8)
    low = ampx.convert(model, batches=[batch])
    assert dtypes(low) == {
        **{name: LOW for name in ("0.weight", "0.bias", "4.weight", "4.bias")},
        **{f"1.{name}": torch.float32 for name in ("weight", "bias", "running_mean", "running_var")},
        "1.num_batches_tracked": torch.int64,
    }
    assert torch.equal(low[1].running_mean, model[1].running_mean)
    assert model.training
    assert not low.training
    assert not any(parameter.requires_grad for parameter in low.parameters())
    expected = copy.deepcopy(model).eval()(batch)
    torch.testing.assert_close(low(batch), expected, rtol=0.01, atol=0.01)
    assert low(batch.half()).dtype == torch.float32


def test_the_network_computes_between_its_layers_in_the_low_dtype():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4))
    low, seen = ampx.convert(model, batches=[torch.ones(2, 4)]), []
    for layer in low:
        layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    low(torch.ones(2, 4))
    assert seen == [LOW] * 4


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.norm = nn.LayerNorm(4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.norm(self.embedding(tokens)))

    tokens = torch.tensor([[1, 2, 9]])
    low = ampx.convert(Tied(), batches=[tokens])
    assert low.head.weight is low.embedding.weight
    assert low.head.weight.dtype == LOW
    kept = ampx.convert(Tied(), batches=[tokens], deny=["module:head"])
    assert kept.head.weight is kept.embedding.weight
    assert kept.embedding.weight.dtype == torch.float32


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    tokens: torch.Tensor
    name: str = "answer"


class Mixed(nn.Module):
    """Weights of its own, buffers of every kind, named inputs and outputs that are no tensors."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, torch.finfo(torch.float32).min]))
        self.register_buffer("offset", torch.rand(4))
        self.register_buffer("index", torch.arange(4))

    def forward(self, x, *, shift=None):
        scores = (x * self.scale + self.offset + self.mask).softmax(-1)
        return {"answer": Answer(scores, self.index + 1), "rest": [scores if shift is None else scores + shift, None]}


def test_custom_layers_buffers_and_outputs_of_any_structure():
    model, batch = Mixed(), {"x": torch.rand(2, 4), "shift": torch.ones(4, dtype=torch.int64)}
    low = ampx.convert(model, batches=[batch])
    assert dtypes(low) == {"scale": LOW, "offset": LOW, "mask": torch.float32, "index": torch.int64}
    answer = low(**batch)
    assert answer["answer"].logits.dtype == answer["rest"][0].dtype == torch.float32
    assert answer["answer"].tokens.tolist() == [1, 2, 3, 4]
    assert (answer["answer"].name, answer["rest"][1]) == ("answer", None)
    with pytest.raises(ampx.ConversionError, match=r"output\['answer'\].logits of batch 0"):
        ampx.convert(model, batches=[batch], tolerance=1e-9)


def test_a_transformer_takes_no_shortcut_around_its_layers():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, batch = nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 32)
    low = ampx.convert(model, batches=[batch])
    assert low.layers[0].norm1.weight.dtype == torch.float32
    assert low.layers[0].self_attn.in_proj_weight.dtype == LOW


class Planted(nn.Module):
    """One layer whose values float16 does not hold, between layers that it does."""

    def __init__(self):
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        with torch.no_grad():
            self.wide.weight.copy_(torch.eye(8) * 2.0**15)
            self.wide.bias.fill_(2.0**14)

    def forward(self, x):
        return self.last(torch.log1p(self.wide(self.first(x).abs() + 4)))


def test_what_float16_does_not_hold_is_refused_with_the_layers_that_tune_finds():
    model, batch = Planted(), torch.randn(16, 8)
    with pytest.raises(ampx.ConversionError, match="not finite") as refusal:
        ampx.convert(model, batches=[batch])
    policy = ampx.tune(
        lambda model: model(batch).square().mean(), model, dtype="float16", for_inference=True, repeats=0, device="cpu"
    )
    assert [choice.entry for choice in policy.deny] == ["module:wide"]
    assert "deny=['module:wide']" in str(refusal.value)
    low = ampx.convert(model, batches=[batch], deny=["module:wide"])
    assert (low.wide.weight.dtype, low.last.weight.dtype) == (torch.float32, LOW)


def test_a_module_that_mixes_dtypes_by_hand_is_named():
    class Projects(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x):
            return torch.full((4, 4), 0.25) @ (x @ self.weight)

    model = nn.Sequential(nn.Linear(4, 4), Projects())
    with pytest.raises(ampx.ConversionError, match="does not run in float16") as refusal:
        ampx.convert(model, batches=[torch.ones(4, 4)])
    assert "deny=['module:1']" in str(refusal.value)
    assert isinstance(refusal.value.__cause__, RuntimeError)
    ampx.convert(model, batches=[torch.ones(4, 4)], deny=["module:1"])


def test_classes_are_denied_too():
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Flatten(), nn.Linear(6, 2))
    low = ampx.convert(model, batches=[torch.ones(2, 2, 3)], deny=[nn.Conv1d])
    assert (low[0].weight.dtype, low[2].weight.dtype) == (torch.float32, LOW)


def test_a_converted_model_is_saved_copied_and_pickled():
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), torch.randn(2, 64)
    low = ampx.convert(model, batches=[batch])
    for other in (copy.deepcopy(low), pickle.loads(pickle.dumps(low))):
        assert torch.equal(other(batch), low(batch))
    fresh = ampx.convert(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), batches=[batch])
    fresh.load_state_dict(low.state_dict())
    assert torch.equal(fresh(batch), low(batch))
    sizes = []
    for each in (model, low):
        file = io.BytesIO()
        torch.save(each.state_dict(), file)
        sizes.append(file.tell())
    assert sizes[0] - sizes[1] >= 64 * 64 * 2


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: nn.Linear(2, 2).half(), ampx.InvalidOptionError, "weights in low precision"),
        (lambda: nn.Linear(2, 2, device="meta"), ampx.InvalidOptionError, "not all here"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), ampx.InvalidOptionError, "model.module"),
        (lambda: torch.nn.functional.relu, ampx.InvalidOptionError, "nn.Module"),
    ],
)
def test_what_is_no_float32_model_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        ampx.convert(make(), batches=[torch.ones(2, 2)], framework="torch")


def test_a_batch_that_is_no_list_and_an_output_without_a_tensor_are_refused():
    with pytest.raises(ampx.InvalidOptionError, match=r"batches=\[batch\]"):
        ampx.convert(nn.Linear(2, 2), batches=(torch.ones(2, 2),))

    class Says(nn.Linear):
        def forward(self, x):
            return "nothing"

    with pytest.raises(ampx.InvalidOptionError, match="returned no tensor"):
        ampx.convert(Says(2, 2), batches=[torch.ones(2, 2)])


def test_integer_outputs_are_compared_by_the_share_that_differs():
    class Chooses(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    model = Chooses(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0], [1.0 + 2.0**-12, 0.0]]))  # which is larger, float16 cannot tell
    with pytest.raises(ampx.ConversionError, match="off by 1 "):
        ampx.convert(model, batches=[torch.ones(4, 2)])
