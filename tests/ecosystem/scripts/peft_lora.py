"""LoRA of PEFT on a tiny GPT-2: most parameters are frozen."""

import json

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)
lora = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
model = get_peft_model(GPT2LMHeadModel(config), lora)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
model.train()
losses = []
for _ in range(4):
    tokens = torch.randint(32, (4, 8))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
