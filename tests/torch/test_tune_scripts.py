"""What `ampx tune` keeps in float32 of scripts as people write them; what is right stands beside each."""

from __future__ import annotations

import pytest

import ampx
from ampx.numerics.tune_script import tune_script
from ampx.run import RunSettings
from ampx.run.program import Program
from processes import run_here

TRAINING = """
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(100):
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
"""
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
"""

# Truth: nothing needs float32. Gradients of a sum over 256 pictures do not fit with the first loss scale.
AUTOENCODER = """
class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.mean, self.logvar = nn.Linear(784, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.decoder, self.out = nn.Linear(8, 64), nn.Linear(64, 784)

    def forward(self, x):
        hidden = F.relu(self.encoder(x))
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        deviation = torch.exp(0.5 * logvar)
        sample = mean + torch.randn_like(deviation) * deviation
        return torch.sigmoid(self.out(F.relu(self.decoder(sample)))), mean, logvar

def loss_of(model):
    x = (torch.rand(256, 784) < 0.3).float()
    y, mean, logvar = model(x)
    divergence = -0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
    return F.binary_cross_entropy(y.float(), x, reduction="sum") + divergence

model = Autoencoder()
"""

# Truth: `attention` needs float32. float16 holds no -1e9, which PyTorch says by an exception.
MASK = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -1e9).softmax(-1) @ v

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.attention = nn.Embedding(20, 16), nn.LayerNorm(16), Attention()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x))
        return self.head(x + self.mlp(x))

def loss_of(model):
    tokens = torch.randint(0, 20, (8, 12))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

model = Model()
"""

# Truth: `rotary` needs float32, or its twin nothing. Positions behind 256 are no numbers of bfloat16, so that tokens
# are turned by other angles; their weight in the first losses is small.
ROTARY = """
class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inverse", 1.0 / 10000.0 ** (torch.arange(0, 32, 2).float() / 32))

    def forward(self, x):
        positions = torch.arange(x.shape[1], dtype=POSITIONS)
        angles = positions[:, None] * self.inverse.to(positions.dtype)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.rotary = Rotary()

    def forward(self, x):
        q, k, v = (part[:, None] for part in (self.rotary(self.query(x)), self.rotary(self.key(x)), self.value(x)))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.attention = nn.Embedding(32, 32), nn.LayerNorm(32), Attention()
        self.head = nn.Linear(32, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attention(self.norm(x)))

def loss_of(model):
    tokens = torch.randint(0, 32, (2, 600))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

model = Model()
"""

# Truth: float32 fails, by a learning rate that is too large.
EXPLODES = """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

def loss_of(model):
    x = torch.randn(32, 8) * 1e6
    return (model(x) - 100 * x[:, :1]).square().mean()
"""


@pytest.fixture
def tuned(tmp_path):
    """Return a function that tunes a script, and returns policy and report."""

    def tune(text, dtype, steps=4, training=TRAINING):
        (tmp_path / "train.py").write_text(HEAD + text + training)
        program, settings = Program(str(tmp_path / "train.py")), RunSettings(dtype, device="cpu")
        options = {"framework": "torch", "steps": steps, "repeats": 0}
        return tune_script(program, settings, run=lambda trial: run_here(trial, tmp_path), **options)

    return tune


def entries(policy):
    return [choice.entry for choice in policy.deny]


def test_a_loss_scale_that_is_too_large_is_blamed_before_any_module(tuned):
    policy, report = tuned(AUTOENCODER, "float16")
    assert entries(policy) == []
    assert (policy.dtype, policy.loss_scale, policy.agrees) == ("float16", "dynamic", True)
    assert report["runs"] <= 6


def test_a_module_that_raises_in_low_precision_stays_in_float32(tuned):
    policy, _ = tuned(MASK, "float16")
    assert entries(policy) == ["module:attention", "module:attention.*"]
    reason = "not reached in float16; without this entry the script raises RuntimeError: value cannot"
    assert reason in policy.deny[0].reason


def test_positions_that_bfloat16_rounds_are_found_though_losses_agree(tuned):
    policy, _ = tuned(ROTARY.replace("POSITIONS", "x.dtype"), "bfloat16")
    assert entries(policy) == ["module:attention.rotary"]
    assert "without this entry the output of 'attention.rotary' is " in policy.deny[0].reason


def test_the_same_model_with_positions_in_float32_needs_nothing(tuned):
    policy, _ = tuned(ROTARY.replace("POSITIONS", "torch.float32"), "bfloat16")
    assert entries(policy) == []
    assert policy.tolerance < 0.05


def test_float32_that_fails_itself_ends_the_search_in_a_sentence(tuned):
    training = TRAINING.replace("Adam", "SGD").replace("1e-3", "1e4")
    with pytest.raises(ampx.TrialError, match=r"train\.py fails in float32 itself: its loss is (inf|nan) in step \d, "):
        tuned(EXPLODES, "float16", training=training)
