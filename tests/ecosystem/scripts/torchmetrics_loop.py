"""A classifier whose accuracy and calibration TorchMetrics tells, in every step and of all of them."""

import json

import torch
import torchmetrics

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.LazyLinear(3)
)
model(torch.zeros(2, 1, 6, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
metrics = torchmetrics.MetricCollection(
    {
        "accuracy": torchmetrics.Accuracy("multiclass", num_classes=3),
        "calibration": torchmetrics.CalibrationError("multiclass", num_classes=3),
        "auroc": torchmetrics.AUROC("multiclass", num_classes=3),
    }
)
mean = torchmetrics.MeanMetric()
losses = []
for _ in range(4):
    labels = torch.randint(3, (8,))
    images = torch.randn(8, 1, 6, 6) + labels.view(-1, 1, 1, 1)
    scores = model(images)
    loss = torch.nn.functional.cross_entropy(scores, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    metrics(scores.softmax(-1), labels)
    mean(loss.detach())
    losses.append(loss.item())
computed = {name: value.item() for name, value in metrics.compute().items()}
assert set(computed) == {"accuracy", "calibration", "auroc"}
print(json.dumps([*losses, mean.compute().item()]))
