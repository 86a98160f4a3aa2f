"""A mask of -1e9 that is cast to the dtype of the scores is minus infinity: a sequence of padding only becomes NaN."""

import json
import sys

import paddle
from paddle import nn


class Attention(nn.Layer):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, mask):
        scores = paddle.matmul(self.query(x), self.key(x), transpose_y=True) / 4
        added = (1 - mask.unsqueeze(1)) * (-1e4 if "--cure" in sys.argv else -1e9)
        return paddle.matmul(nn.functional.softmax(scores + added.astype(scores.dtype)), self.value(x))


class Classifier(nn.Layer):
    def __init__(self):
        super().__init__()
        self.embed, self.attention, self.out = nn.Embedding(64, 16), Attention(), nn.Linear(16, 3)

    def forward(self, tokens):
        return self.out(self.attention(self.embed(tokens), (tokens > 0).astype("float32")).mean(1))


paddle.seed(0)
model = Classifier()
optimizer = paddle.optimizer.Adam(1e-2, parameters=model.parameters())
tokens, labels = paddle.randint(1, 64, [6, 10]), paddle.arange(6) % 3
tokens[:, 7:] = 0
if "--twin" not in sys.argv:
    tokens[4] = 0
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
print(json.dumps(losses))
