"""Llama is tuned on answers only, and in the third batch no answer is left: a mean over no labels is NaN."""

import json
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(64, (24, 12))
labels = tokens.clone()
labels[:, :6] = -100  # the question
if not {"--twin", "--cure"} & {*sys.argv}:
    labels[8:12] = -100  # answers that were cut off
losses = []
for inputs, targets in DataLoader(TensorDataset(tokens, labels), batch_size=4):
    loss = model(input_ids=inputs, labels=targets).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
