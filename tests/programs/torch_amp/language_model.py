"""Train a recurrent language model on the text of Python's own manual of style, letter by letter."""

import argparse
import contextlib
import io
import json

import torch
from torch import nn

with contextlib.redirect_stdout(io.StringIO()):
    import this  # it prints itself


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp=32, nhid=64):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, tokens):
        output, _ = self.rnn(self.encoder(tokens))
        return self.decoder(output)


class Trainer:
    def __init__(self, model, args):
        self.model = model
        self.args = args
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=10, enabled=args.amp)
        self.losses = []

    def forward_backward(self, data, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.args.amp):
            output = self.model(data)
            loss = self.criterion(output.flatten(0, 1), targets.flatten()) / self.args.accumulate
        self.scaler.scale(loss).backward()
        return loss.item()

    def update(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def run(self, columns):
        total = 0.0
        for step in range(self.args.steps * self.args.accumulate):
            start = step * self.args.bptt % (len(columns) - self.args.bptt - 1)
            data, targets = columns[start : start + self.args.bptt], columns[start + 1 : start + 1 + self.args.bptt]
            total += self.forward_backward(data, targets)
            if (step + 1) % self.args.accumulate == 0:
                self.update()
                self.losses.append(total)
                if len(self.losses) % 20 == 0:
                    print(f"| step {len(self.losses)} | loss {total:5.2f} | scale {self.scaler.get_scale()}")
                total = 0.0


def main():
    parser = argparse.ArgumentParser(description="Language model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bptt", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    letters = sorted(set(this.s))
    corpus = torch.tensor([letters.index(letter) for letter in this.s])
    columns = corpus[: len(corpus) // 8 * 8].view(8, -1).t().contiguous()
    trainer = Trainer(RNNModel(len(letters)), args)
    trainer.run(columns)
    final = sum(trainer.losses[-10:]) / 10
    print(json.dumps({"losses": trainer.losses, "metric": final}))


if __name__ == "__main__":
    main()
