"""Train a small convolutional network on handwritten digits."""

import argparse
import json

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional
from sklearn.datasets import load_digits


class LeNet(nn.Layer):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2D(1, 16, 3, padding=1),
            nn.BatchNorm2D(16),
            nn.ReLU(),
            nn.MaxPool2D(2, 2),
            nn.Conv2D(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2D(2, 2),
        )
        self.fc = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, num_classes))

    def forward(self, inputs):
        return self.fc(paddle.flatten(self.features(inputs), 1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    paddle.seed(args.seed)

    digits = load_digits()
    order = np.random.RandomState(args.seed).permutation(len(digits.target))
    images = paddle.to_tensor((digits.images[order] / 16.0).astype("float32")).unsqueeze(1)
    labels = paddle.to_tensor(digits.target[order]).unsqueeze(1)
    train_dataset = paddle.io.TensorDataset([images[:1347], labels[:1347]])
    train_loader = paddle.io.DataLoader(train_dataset, batch_size=args.batch_size, shuffle=False, drop_last=True)

    model = LeNet()
    scheduler = paddle.optimizer.lr.StepDecay(args.lr, step_size=3, gamma=0.5)
    clip = nn.ClipGradByGlobalNorm(5.0)
    optimizer = paddle.optimizer.Adam(learning_rate=scheduler, parameters=model.parameters(), grad_clip=clip)
    losses = []
    for epoch in range(args.epochs):
        model.train()
        for batch_id, (x, y) in enumerate(train_loader()):
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(loss.item())
            if batch_id % 10 == 0:
                print(f"epoch: {epoch}, batch_id: {batch_id}, loss is: {losses[-1]:.4f}")
        scheduler.step()

    model.eval()
    with paddle.no_grad():
        predicted = model(images[1347:]).argmax(1)
    accuracy = (predicted == labels[1347:].squeeze(1)).astype("float32").mean().item()
    print(f"test accuracy: {accuracy:.4f}")
    print(json.dumps({"losses": losses, "metric": accuracy}))


if __name__ == "__main__":
    main()
