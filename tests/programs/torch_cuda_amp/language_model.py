"""A small transformer on a text that ships with Python: accumulation, clipping, a warm-up, a checkpoint half-way."""

import argparse
import json
import pydoc
import warnings

import torch
from torch import nn
from torch.nn import functional

warnings.simplefilter("ignore", FutureWarning)


class GPT(nn.Module):
    def __init__(self, vocabulary, width=64, heads=4, length=48):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.pos = nn.Parameter(torch.zeros(1, length, width))
        self.ln1, self.ln2, self.lnf = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.heads = heads

    def forward(self, index, targets):
        batch, length = index.shape
        x = self.tok(index) + self.pos[:, :length]
        q, k, v = self.qkv(self.ln1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, -1))
        x = x + self.mlp(self.ln2(x))
        logits = self.head(self.lnf(x))
        return functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-amp", action="store_true")
    parser.add_argument("--max-iters", type=int, default=50)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    args = parser.parse_args()
    torch.manual_seed(1337)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    text = pydoc.__doc__ * 4
    chars = sorted(set(text))
    data = torch.tensor([chars.index(c) for c in text])
    model = GPT(len(chars)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    scaler = torch.cuda.amp.GradScaler(enabled=not args.no_amp)

    losses = []
    for it in range(args.max_iters):
        total = 0.0
        for _ in range(args.gradient_accumulation_steps):
            start = torch.randint(len(data) - 49, (8,))
            x = torch.stack([data[s : s + 48] for s in start]).to(device)
            y = torch.stack([data[s + 1 : s + 49] for s in start]).to(device)
            with torch.cuda.amp.autocast(enabled=not args.no_amp):
                loss = model(x, y) / args.gradient_accumulation_steps
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        warmup.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        if it == args.max_iters // 2:  # a checkpoint, loaded at once
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scaler.load_state_dict(saved["scaler"])
        if it % 10 == 0:
            print(f"iter {it}: loss {total:.4f}, scale {scaler.get_scale()}")
    print(json.dumps({"losses": losses, "metric": sum(losses[-10:]) / 10}))


if __name__ == "__main__":
    main()
