"""A tiny T5 by hand, with a schedule of transformers and clipping."""

import json

import torch
from transformers import T5Config, T5ForConditionalGeneration, get_linear_schedule_with_warmup

torch.manual_seed(0)
config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=8)
losses = []
for _ in range(4):
    tokens = torch.randint(1, 32, (4, 8))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
