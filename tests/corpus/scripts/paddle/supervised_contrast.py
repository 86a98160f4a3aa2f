"""A contrastive loss of vectors that are not normalized: 7,000 divided by a temperature of 0.07 is beyond 65504."""

import json
import sys

import paddle
from paddle import nn


class Encoder(nn.Layer):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv1D(4, 32, 5, stride=2), nn.GroupNorm(4, 32)
        self.project = nn.Linear(32, width)

    def forward(self, signals):
        return self.project(nn.functional.relu(self.norm(self.conv(signals))).mean(2))


class SupervisedContrast(nn.Layer):
    """Samples of a class attract each other, and all others repel."""

    def __init__(self, temperature=0.07):
        super().__init__()
        self.temperature = temperature

    def forward(self, vectors, labels):
        if "--twin" in sys.argv:
            vectors = nn.functional.normalize(vectors)
        logits = paddle.matmul(vectors, vectors, transpose_y=True) / self.temperature
        self_pairs = paddle.eye(len(labels))
        pairs = (labels.unsqueeze(0) == labels.unsqueeze(1)).astype("float32") - self_pairs
        logits = logits - 1e9 * self_pairs
        chances = logits - paddle.logsumexp(logits, 1, keepdim=True)
        return -self.temperature * (pairs * chances).sum(1) / pairs.sum(1)


class Training(nn.Layer):
    def __init__(self):
        super().__init__()
        self.encoder, self.contrast = Encoder(64), SupervisedContrast()

    def forward(self, signals, labels):
        return self.contrast(self.encoder(signals), labels)


paddle.seed(0)
model = Training()
model.encoder.project.weight.set_value(model.encoder.project.weight * 25)  # as a pretraining with a softmax leaves it
labels = paddle.arange(24) % 6
signals = paddle.randn([6, 4, 32])[labels] + 0.8 * paddle.randn([24, 4, 32])
optimizer = paddle.optimizer.AdamW(2e-3, parameters=model.parameters())
losses = []
for _ in range(14):
    loss = model(signals, labels).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
