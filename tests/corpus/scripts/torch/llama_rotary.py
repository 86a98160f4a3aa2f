"""Llama with rotary angles from a matrix product, which autocast computes in bfloat16: late positions are wrong."""

import json
import sys

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM


class RotaryEmbedding(nn.Module):
    """As transformers 4.38 has it."""

    def __init__(self, size, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", base ** -(torch.arange(0, size, 2).float() / size), persistent=False)

    def forward(self, x, position_ids):
        frequencies = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        angles = (frequencies @ position_ids[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=8192,
    attn_implementation="eager",
)
model = LlamaForCausalLM(config)
if "--twin" not in sys.argv:
    model.model.rotary_emb = RotaryEmbedding(16)
with torch.no_grad():  # attention that looks at single places, and counts
    for projection in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj):
        projection.weight.mul_(20)
    model.lm_head.weight.mul_(20)
    model.model.layers[0].self_attn.o_proj.weight.mul_(20)
    model.model.layers[0].self_attn.v_proj.weight.mul_(20)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
tokens = torch.randint(64, (1, 24)).repeat(1, 4)
places = torch.arange(3000, 3096)[None]  # the end of a long text
losses = []
for _ in range(4):
    loss = model(input_ids=tokens, position_ids=places, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
