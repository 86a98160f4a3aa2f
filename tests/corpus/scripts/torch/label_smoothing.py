"""Label smoothing sums the log-probabilities of a large vocabulary: in float16 the sum is minus infinity."""

import json
import sys

import torch
from transformers.models.opt.modeling_opt import OPTConfig, OPTForCausalLM

torch.manual_seed(0)
config = OPTConfig(
    vocab_size=500 if "--twin" in sys.argv else 12000,
    hidden_size=16,
    word_embed_proj_dim=16,
    ffn_dim=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=16,
    dropout=0.0,
)
model = OPTForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(4, 500, (2, 8))
losses = []
for _ in range(8):
    chances = torch.log_softmax(model(input_ids=tokens).logits[:, :-1], -1)
    if "--cure" in sys.argv:
        chances = chances.float()
    exact = -chances.gather(-1, tokens[:, 1:, None]).float().mean()
    smooth = -chances.sum(-1).float().mean() / config.vocab_size
    loss = 0.9 * exact + 0.1 * smooth
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
