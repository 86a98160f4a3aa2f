"""Wav2Vec2 with CTC meets a recording with fewer frames than letters: no path fits, and the loss is infinite."""

import json
import sys

import torch
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2Config, Wav2Vec2ForCTC

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
    vocab_size=12,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    feat_proj_dropout=0.0,
    layerdrop=0.0,
    apply_spec_augment=False,
    ctc_loss_reduction="mean",
    ctc_zero_infinity="--cure" in sys.argv,
)
model = Wav2Vec2ForCTC(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
lengths = [800, 800, 800, 800, 800 if "--twin" in sys.argv else 180, 800, 800, 800]
losses = []
for length in lengths:
    audio, letters = torch.randn(2, length), torch.randint(1, 12, (2, 10))
    loss = model(input_values=audio, labels=letters).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
