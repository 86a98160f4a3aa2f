"""T5's feed-forward output is beyond 65504, as in the published float16 failures of T5."""

import json
import sys

import torch
from transformers.models.t5.modeling_t5 import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
config = T5Config(
    vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
)
model = T5ForConditionalGeneration(config)
with torch.no_grad():
    feed_forward = model.encoder.block[1].layer[1].DenseReluDense
    feed_forward.wi.weight.mul_(30)
    feed_forward.wo.weight.mul_(30 if "--twin" in sys.argv else 2e4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens, labels = torch.randint(1, 64, (4, 12)), torch.randint(1, 64, (4, 6))
losses = []
for _ in range(8):
    loss = model(input_ids=tokens, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
