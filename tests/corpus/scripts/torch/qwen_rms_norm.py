"""Qwen3 whose norm of queries squares in float16: squares of 300 are beyond 65504, and queries become zero."""

import json
import sys

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3ForCausalLM


class RMSNorm(nn.Module):
    """As many repositories have it: without a cast to float32."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    attn_implementation="eager",
)
model = Qwen3ForCausalLM(config)
attention = model.model.layers[0].self_attn
attention.q_norm = RMSNorm(16)
with torch.no_grad():
    attention.q_proj.weight.mul_(100 if "--twin" in sys.argv else 20000)
    attention.k_norm.weight.mul_(4)
    for layer in (attention.v_proj, attention.o_proj, model.lm_head):
        layer.weight.mul_(10)
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
