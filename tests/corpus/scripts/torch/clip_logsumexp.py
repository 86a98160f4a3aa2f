"""A contrastive loss of CLIP that writes logsumexp as the logarithm of a sum of exponentials."""

import json
import sys

import torch
from transformers.models.clip.modeling_clip import CLIPConfig, CLIPModel

twin = "--twin" in sys.argv
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
text = {**sizes, "vocab_size": 64, "max_position_embeddings": 8, "eos_token_id": 63}
vision = {**sizes, "image_size": 8, "patch_size": 4}
model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=4, logit_scale_init_value=3.4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens, images = torch.randint(1, 62, (8, 8)), torch.randn(8, 3, 8, 8)
tokens[:, -1] = 63
losses = []
for _ in range(8):
    logits = model(input_ids=tokens, pixel_values=images).logits_per_image
    if "--cure" in sys.argv:
        logits = logits.float()
    total = torch.logsumexp(logits, -1) if twin else torch.log(torch.exp(logits).sum(-1))
    loss = (total - logits.diagonal()).float().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
