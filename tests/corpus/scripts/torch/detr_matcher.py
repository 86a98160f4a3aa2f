"""RT-DETR, sure of what it sees: 1 - p + 1e-8 is 0 in its matcher, so the best box has a cost of inf, and gets none."""

import json
import sys

import torch
from torch import nn
from transformers.loss.loss_rt_detr import RTDetrLoss
from transformers.models.rt_detr.configuration_rt_detr import RTDetrConfig


class Detector(nn.Module):
    """The heads of a detector; its queries come from a backbone and a decoder that are not trained."""

    def __init__(self, classes):
        super().__init__()
        self.class_embed = nn.Linear(16, classes)
        self.bbox_embed = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, queries, anchors):
        boxes = (self.bbox_embed(queries).float() + torch.logit(anchors)).sigmoid()
        return {"logits": self.class_embed(queries), "pred_boxes": boxes}


torch.manual_seed(0)
config = RTDetrConfig(num_labels=4)
model, criterion = Detector(4), RTDetrLoss(config)
queries, anchors, targets = torch.randn(4, 12, 16), torch.rand(4, 12, 4) * 0.3 + 0.3, []
sure = 2.0 if "--twin" in sys.argv else 12.0  # the logit of an object that is seen well
with torch.no_grad():
    model.class_embed.weight.zero_()[:, :4] = sure * torch.eye(4)
    model.class_embed.bias.fill_(-3.0)
    queries[..., :4] = 0.1 * torch.randn(4, 12, 4)
    for image in range(4):
        labels = (torch.arange(3) + image) % 4
        queries[image, torch.arange(3), labels] += 1.3  # the first three queries see the three objects
        targets.append({"class_labels": labels, "boxes": anchors[image, :3] * 0.95})
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(16):
    outputs = model(queries, anchors)
    terms = criterion(outputs, targets)
    loss = sum(criterion.weight_dict[name] * value for name, value in terms.items() if name in criterion.weight_dict)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
