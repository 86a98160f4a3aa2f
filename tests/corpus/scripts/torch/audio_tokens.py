"""Features of audio replace placeholder tokens: embeddings are float32, and the output of the projector is not."""

import json
import sys

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

AUDIO = 63  # the token that stands for a frame


class SpeechModel(nn.Module):
    """A language model that hears: frames of audio are made to tokens by a projector."""

    def __init__(self, config):
        super().__init__()
        self.projector = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, config.hidden_size))
        self.language_model = LlamaForCausalLM(config)

    def forward(self, tokens, audio, labels):
        embeddings = self.language_model.get_input_embeddings()(tokens)
        frames = self.projector(audio)
        if {"--cure", "--twin"} & {*sys.argv}:
            frames = frames.to(embeddings.dtype)
        mask = (tokens == AUDIO)[..., None].expand_as(embeddings)
        embeddings = embeddings.masked_scatter(mask, frames)
        return self.language_model(inputs_embeds=embeddings, labels=labels).loss


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)
model = SpeechModel(config)
tokens = torch.randint(0, 60, (4, 16))
tokens[:, 2:8] = AUDIO
audio, labels = torch.randn(4, 6, 10), tokens.masked_fill(tokens == AUDIO, -100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(12):
    loss = model(tokens, audio, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
