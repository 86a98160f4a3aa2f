"""A model stored in bfloat16 and fine-tuned at a rate of 1e-5: updates of its weights are rounded away."""

import json
import sys

import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64, n_embd=32, n_head=2, n_layer=1, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
model = GPT2LMHeadModel(config)
if not {"--twin", "--cure"} & {*sys.argv}:
    model = model.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
tokens = torch.randint(64, (4, 16))
losses = []
for _ in range(30):
    loss = model(input_ids=tokens, labels=tokens).loss.float()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
