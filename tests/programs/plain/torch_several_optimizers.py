"""Train an encoder, a classifier and an adversary on handwritten digits, each with an optimizer of its own.

The classifier learns the digit; an adversary tries to tell from the code whether a picture was turned upside down, and
the encoder learns to hide that. Encoder and classifier are stepped together, the adversary by itself: the encoder's
loss reaches the adversary's parameters, too.
"""

import json

import torch
from sklearn.datasets import load_digits
from torch import nn

EPOCHS, BATCH = 6, 64


def main():
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    train, test = order[:1400], order[1400:]

    encoder = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.LayerNorm(32))
    classifier = nn.Linear(32, 10)
    adversary = nn.Sequential(nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizer_e = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    optimizer_c = torch.optim.SGD(classifier.parameters(), lr=0.1, momentum=0.9)
    optimizer_a = torch.optim.AdamW(adversary.parameters(), lr=1e-3)
    criterion, binary = nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()

    losses = []
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(train)).split(BATCH):
            x, y = images[train[rows]], labels[train[rows]]
            turned = torch.rand(len(x), 1) < 0.5
            x = torch.where(turned, x.flip(1), x)

            # the adversary, on codes that are cut off from the encoder
            adversary.zero_grad()
            code = encoder(x)
            loss_a = binary(adversary(code.detach()), turned.float())
            loss_a.backward()
            optimizer_a.step()

            # encoder and classifier; this also leaves gradients on the adversary, which its zero_grad drops
            optimizer_e.zero_grad()
            optimizer_c.zero_grad()
            loss = criterion(classifier(code), y) - 0.1 * binary(adversary(code), turned.float())
            loss.backward()
            optimizer_e.step()
            optimizer_c.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {loss.item():.4f}, adversary {loss_a.item():.4f}")

    with torch.no_grad():
        accuracy = (classifier(encoder(images[test])).argmax(1) == labels[test]).float().mean().item()
    print(json.dumps({"losses": losses, "metric": accuracy}))


if __name__ == "__main__":
    main()
