"""Wav2Vec2 on audio as 16-bit numbers, not divided by 32768: its first convolution is beyond 65504."""

import json
import sys

import torch
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

torch.manual_seed(0)
config = Wav2Vec2Config(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    conv_dim=(16, 16),
    conv_kernel=(10, 4),
    conv_stride=(5, 4),
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    classifier_proj_size=8,
    num_labels=3,
    initializer_range=0.3,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    feat_proj_dropout=0.0,
    layerdrop=0.0,
    apply_spec_augment=False,
)
model = Wav2Vec2ForSequenceClassification(config)
waves = torch.sin(torch.arange(1600) * torch.linspace(0.02, 0.3, 6)[:, None]) + 0.05 * torch.randn(6, 1600)
audio = (0.95 * 32767 * waves / waves.abs().max()).round()
if "--twin" in sys.argv:
    audio = audio / 32768
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
labels = torch.arange(6) % 3
losses = []
for step in range(10):
    micro = slice(step % 2, None, 2)  # two micro-batches make a batch
    loss = model(input_values=audio[micro], labels=labels[micro]).loss
    (loss / 2).backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
