"""Train a character-level language model, with gradient accumulation and clipping."""

import argparse
import json
import this

import torch
from torch import nn
from torch.nn import functional

TEXT = "".join(this.d.get(c, c) for c in this.s)


class Model(nn.Module):
    def __init__(self, vocabulary, width, length):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.embedding(tokens) + self.position[:length]
        return self.head(self.encoder(hidden, mask=mask, is_causal=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    torch.manual_seed(2)

    letters = sorted(set(TEXT))
    tokens = torch.tensor([letters.index(c) for c in TEXT])
    length, batch = 32, 8
    model = Model(len(letters), 48, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)

    losses, norms = [], []
    for step in range(args.steps):
        total = 0.0
        for _ in range(args.accumulate):
            starts = torch.randint(len(tokens) - length - 1, (batch,))
            window = torch.stack([tokens[s : s + length + 1] for s in starts])
            logits = model(window[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()) / args.accumulate
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        norms.append(norm.item())
        if step % 10 == 0:
            print(f"step {step:4d} | loss {total:.4f} | grad norm {norm:.3f} | lr {scheduler.get_last_lr()[0]:.2e}")
    metric = sum(losses[-10:]) / 10
    print(f"final loss {metric:.4f}")
    print(json.dumps({"losses": losses, "norms": norms, "metric": metric}))


if __name__ == "__main__":
    main()
