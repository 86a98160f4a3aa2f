"""Train a small transformer to continue text, in PyTorch with ampx: `transformer.py` and a few lines."""

import argparse
import pydoc_data.topics

import torch
from torch import nn

import ampx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--length", type=int, default=128, help="characters of a sample")
parser.add_argument(
    "--dtype", default="auto", help="float32, bfloat16, float16, or auto: what this machine is made for"
)
options = parser.parse_args()
torch.manual_seed(0)
amp = ampx.init(framework="torch", dtype=options.dtype)

text = "".join(pydoc_data.topics.topics.values())  # the language reference, which comes with Python
alphabet = sorted(set(text))
position_of = {character: position for position, character in enumerate(alphabet)}
characters = torch.tensor([position_of[character] for character in text])


class Transformer(nn.Module):
    """A causal language model of characters."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(alphabet), width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(alphabet))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens) + self.position, mask=self.mask, is_causal=True))


model = Transformer(options.width, options.length)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
optimizer = ampx.wrap_optimizer(optimizer)
for step in range(options.steps):
    starts = torch.randint(len(characters) - options.length, (options.batch_size,))
    batch = torch.stack([characters[start : start + options.length + 1] for start in starts])
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    with ampx.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    if step % 10 == 0 or step == options.steps - 1:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
print(f"in {amp.effective.dtype or 'float32'}: {optimizer.last_step}")
