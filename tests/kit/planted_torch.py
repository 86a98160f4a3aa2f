"""Small models in PyTorch with one planted fault each, and clean ones: for `diagnose`'s tests and benchmark."""

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint


class Lambda(nn.Module):
    """A module with a function that it is passed."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def linear(size, weight=None):
    """A linear layer that computes in float16; with a weight, it multiplies by that."""
    layer = nn.Linear(size, size, bias=False)
    if weight is not None:
        layer.weight.data = torch.eye(size) * weight
    return layer


def sized(scale, *layers, size=8):
    """A model of layers and a batch of numbers of one magnitude; the loss is the mean of what comes out."""
    model = nn.Sequential(*layers)
    batch = torch.full((4, size), float(scale))
    return model, lambda m: m(batch).float().mean()


class Scores(nn.Module):
    """Attention scores, without a division by the root of their size."""

    def __init__(self):
        super().__init__()
        self.query, self.key = linear(64, 1.0), linear(64, 1.0)
        self.product = Lambda(lambda q, k: q @ k.transpose(-1, -2))

    def forward(self, x):
        return torch.softmax(self.product(self.query(x), self.key(x)).float(), -1)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Sequential(linear(8, weight), nn.ReLU()) for weight in (1.0, 1e4, 2.0)])

    def forward(self, x):
        return sum(branch(x) for branch in self.branches)


def masked(x):
    """Scores of a sequence that consists of padding only."""
    padding = torch.ones(x.shape[-1]).to(x.dtype)
    return torch.softmax(x + padding * -1e9, -1)


def broken_sample():
    model, _ = sized(1.0, linear(8), nn.ReLU(), linear(8))
    batch = torch.ones(4, 8)
    batch[2, 3] = math.nan
    return model, lambda m: m(batch).float().mean()


def exploded():
    model, step = sized(1.0, linear(8), linear(8), nn.ReLU(), linear(8))
    for parameter in model.parameters():
        parameter.data.fill_(1e15)
    return model, step


def broken_weights():
    model, step = sized(1.0, linear(8), linear(8))
    model[1].weight.data[0, 0] = math.nan
    return model, step


def standardised(x):
    """Standardise by the variance that is a difference of large numbers."""
    variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
    return x / torch.sqrt(variance)


def rotated(x):
    """Rotate by angles of late positions."""
    positions = torch.arange(100_000, 100_008).to(x.dtype)
    return x * torch.sin(positions * x[:1])


def similar(x):
    """Return the cosine of the angle to a small vector, bounded as `cosine_similarity` is."""
    small = x * 1e-4
    return (x * small).sum(-1) / ((small * small).sum(-1).sqrt() * (x * x).sum(-1).sqrt()).clamp(min=1e-8)


def uneven(model):
    """The model, and a batch of numbers around 30 that differ little."""
    batch = 30 + torch.linspace(-0.1, 0.1, 32).reshape(4, 8)
    return model, lambda m: m(batch).float().mean()


# By name what makes it, and what is to be named: kind, direction and module.
FAULTS = {
    "a middle layer": (
        lambda: sized(10.0, linear(8, 10.0), linear(8, 1e3), linear(8, 1e-4)),
        "overflow",
        "forward",
        "1",
    ),
    "attention scores": (lambda: sized(60.0, Scores(), size=64), "overflow", "forward", "0.product"),
    "a sum": (lambda: sized(100.0, linear(1024, 1.0), Lambda(lambda x: x.sum(-1)), size=1024), "sum", "forward", "1"),
    "backward": (
        lambda: sized(1e-3, linear(8, 1.0), linear(8, 1.0), Lambda(lambda x: x.float() * 1e9)),
        "overflow",
        "backward",
        "2",
    ),
    "an epsilon": (
        lambda: sized(0.0, linear(8, 1.0), Lambda(lambda x: x / (x.abs().sum(-1, keepdim=True) + 1e-8))),
        "epsilon",
        "forward",
        "1",
    ),
    "a mask constant": (lambda: sized(1.0, linear(8, 1.0), Lambda(masked)), "mask", "forward", "1"),
    "a logarithm of 0": (
        lambda: sized(
            1.0, linear(8, 1.0), Lambda(lambda x: torch.log(torch.softmax(x * torch.arange(8).to(x.dtype) * 5, -1)))
        ),
        "logarithm",
        "forward",
        "1",
    ),
    "a variance as a difference": (
        lambda: uneven(nn.Sequential(linear(8, 1.0), Lambda(standardised))),
        "digits",
        "forward",
        "1",
    ),
    "a mask of float32's lowest number": (
        lambda: sized(
            1.0,
            linear(8, 1.0),
            Lambda(lambda x: torch.softmax(x + (torch.ones(8) * torch.finfo(torch.float32).min).to(x.dtype), -1)),
        ),
        "mask",
        "forward",
        "1",
    ),
    "a position beyond the dtype": (lambda: sized(1.0, linear(8, 1.0), Lambda(rotated)), "overflow", "forward", "1"),
    "logsumexp by hand": (
        lambda: sized(12.0, linear(8, 1.0), Lambda(lambda x: x.exp().sum(-1).log())),
        "overflow",
        "forward",
        "1",
    ),
    "a temperature of 1e-4": (
        lambda: sized(10.0, linear(8, 1.0), Lambda(lambda x: torch.softmax(x / 1e-4, -1))),
        "overflow",
        "forward",
        "1",
    ),
    "cosine similarity": (lambda: sized(1.0, linear(8, 1.0), Lambda(similar)), "epsilon", "forward", "1"),
    "a constant image": (
        lambda: sized(1.0, linear(8, 1.0), Lambda(lambda x: (x - x.mean()) / (x.var() + 1e-8).sqrt())),
        "epsilon",
        "forward",
        "1",
    ),
    "the focal factor of a sure prediction": (
        lambda: sized(
            10.0, linear(8, 1.0), Lambda(lambda x: ((1 - torch.sigmoid(x)) ** 0.5) * -torch.log(torch.sigmoid(x)))
        ),
        "digits",  # of the difference, which is why the root is at zero
        "backward",
        "1",
    ),
    "NaN in one sample": (broken_sample, "data", "forward", "0"),
    "an exploded learning rate": (exploded, "learning rate", "forward", "3"),
    "weights that are NaN": (broken_weights, "weights", "forward", "1"),
    "a sensitive normalization": (
        lambda: sized(300.0, linear(8, 1.0), Lambda(lambda x: x * x / (x * x).sum(-1, keepdim=True))),
        "overflow",
        "forward",
        "1",
    ),
    "a custom function": (lambda: sized(12.0, linear(8, 1.0), Lambda(Exponential.apply)), "overflow", "forward", "1"),
    "one of several branches": (
        lambda: sized(10.0, linear(8, 1.0), Branches(), Lambda(lambda x: x / 1e3)),
        "overflow",
        "forward",
        "1.branches.1.0",
    ),
    "a division by 0 in any precision": (
        lambda: sized(1.0, linear(8, 1.0), Lambda(lambda x: x / (x - x))),
        "division",
        "forward",
        "1",
    ),
    "the derivative of a root at 0": (
        lambda: sized(0.0, linear(8, 1.0), Lambda(lambda x: x.float().abs().sqrt()), linear(8, 1.0)),
        "logarithm",
        "backward",
        "1",
    ),
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        mask = torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1)
        return self.inner(x, x, x, attn_mask=mask, need_weights=True)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(16, 16, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU())

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)


def regression(*layers, shape=(4, 6, 16)):
    return lambda: (nn.Sequential(*layers), lambda m: m(torch.randn(shape)).float().square().mean())


def classification():
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 10))
    labels = torch.arange(6)
    return model, lambda m: F.cross_entropy(m(labels), labels)


CLEAN = {
    "layers": regression(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)),
    "convolutions": regression(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), shape=(2, 3, 8, 8)),
    "a masked attention": regression(Attention()),
    "a transformer": regression(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)),
    "a recurrent network": regression(Recurrent()),
    "dropout": regression(nn.Linear(16, 16), nn.Dropout(0.5), nn.LayerNorm(16)),
    "a classifier": classification,
    "checkpoints": regression(Checkpointed(), Checkpointed()),
    "a bounded exponential": regression(nn.Linear(16, 16), nn.Softplus(), Lambda(lambda x: torch.exp(-x))),
    "a mask that fits": regression(
        nn.Linear(16, 16), Lambda(lambda x: torch.softmax(x.masked_fill(x > 0.5, -1e4), -1))
    ),
    "a norm with an epsilon that fits": regression(
        nn.Linear(16, 16), Lambda(lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-3))
    ),
}
