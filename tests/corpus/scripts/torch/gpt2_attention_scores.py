"""GPT-2 without the division by the root of the head's size: attention scores are beyond 65504."""

import json
import sys

import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64,
    n_embd=32,
    n_head=2,
    n_layer=2,
    n_positions=32,
    scale_attn_weights=False,
    attn_implementation="eager",
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
model = GPT2LMHeadModel(config)
with torch.no_grad():  # queries and keys
    model.transformer.h[1].attn.c_attn.weight[:, :64].mul_(100 if "--twin" in sys.argv else 2000)
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
