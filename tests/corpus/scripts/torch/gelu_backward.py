"""GPT-2's GELU cubes its input: the cube of 200 is beyond 65504, the output is right, and the gradient is NaN.

So is the cube of 60 in the twin, which does no harm: the slope of the cube, 3 x^2, is finite there.
"""

import json
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64,
    n_embd=32,
    n_head=2,
    n_layer=2,
    n_positions=16,
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
    bos_token_id=0,
    eos_token_id=0,
)
model = GPT2LMHeadModel(config)
with torch.no_grad():
    model.transformer.h[1].mlp.c_fc.bias[3] = 60.0 if "--twin" in sys.argv else 200.0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(64, (4, 16))
losses = []
for _ in range(8):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
