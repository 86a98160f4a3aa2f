"""BERT's classes as the logarithm of a softmax: in float16 a probability below 3e-8 is zero."""

import json
import sys

import torch
from transformers.models.bert.modeling_bert import BertConfig, BertForSequenceClassification

twin = "--twin" in sys.argv
torch.manual_seed(0)
config = BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=5,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
with torch.no_grad():
    model.classifier.bias.copy_(torch.tensor([0.0, 20.0, 0.0, 0.0, 0.0]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens, labels = torch.randint(64, (8, 8)), torch.arange(8) % 5
losses = []
for _ in range(8):
    logits = model(input_ids=tokens).logits
    if "--cure" in sys.argv:
        logits = logits.float()
    chances = torch.log_softmax(logits, -1) if twin else torch.log(torch.softmax(logits, -1))
    loss = -chances[torch.arange(8), labels].float().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
