"""DPO sums the log-probabilities of whole answers in bfloat16: what they differ by is less than a digit."""

import copy
import json
import sys

import torch
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Config, GPT2LMHeadModel


def answer_logps(model, tokens):
    logits = model(input_ids=tokens).logits[:, :-1]
    if {"--cure", "--twin"} & {*sys.argv}:
        logits = logits.float()
    token_logps = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return token_logps.sum(-1)


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64, n_embd=32, n_head=2, n_layer=1, n_positions=128, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
policy = GPT2LMHeadModel(config)
reference = copy.deepcopy(policy).requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
chosen, rejected = torch.randint(64, (4, 128)), torch.randint(64, (4, 128))
losses = []
for _ in range(15):
    with torch.no_grad():
        margin = answer_logps(reference, chosen) - answer_logps(reference, rejected)
    rewards = answer_logps(policy, chosen) - answer_logps(policy, rejected) - margin
    loss = -nn.functional.logsigmoid(0.5 * rewards.float()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())
print(json.dumps(losses))
