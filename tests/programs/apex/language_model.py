"""A character language model with gradient accumulation and clipping, as fine-tuning scripts had."""

import argparse
import json
import math
import pydoc_data.topics
import random

import numpy as np
import torch
import torch.nn as nn


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, norm):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = norm(width), norm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        weights = torch.softmax(scores.masked_fill(mask, -10000.0), dim=-1).to(v.dtype)
        x = x + self.proj(torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class CharModel(nn.Module):
    def __init__(self, vocab, width, heads, layers, length, norm):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList([DecoderLayer(width, heads, norm) for _ in range(layers)])
        self.norm = norm(width)
        self.head = nn.Linear(width, vocab)
        self.register_buffer("mask", torch.ones(length, length).triu(1).bool())

    def forward(self, inputs, labels):
        x = self.embed(inputs) + self.position
        for layer in self.layers:
            x = layer(x, self.mask)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1))


def set_seed(args):
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)


def load_text(args):
    text = " ".join(pydoc_data.topics.topics[name] for name in ("assignment", "atom-literals", "calls", "with"))
    chars = sorted(set(text))
    index = {char: i for i, char in enumerate(chars)}
    ids = torch.tensor([index[char] for char in text])
    count = (len(ids) - 1) // args.block_size
    inputs = ids[: count * args.block_size].view(count, -1)
    labels = ids[1 : count * args.block_size + 1].view(count, -1)
    return inputs, labels, len(chars)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_gpu_train_batch_size", default=16, type=int)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", default=2e-3, type=float)
    parser.add_argument("--weight_decay", default=0.01, type=float)
    parser.add_argument("--adam_epsilon", default=1e-8, type=float)
    parser.add_argument("--max_grad_norm", default=1.0, type=float)
    parser.add_argument("--num_train_epochs", default=12, type=int)
    parser.add_argument("--warmup_steps", default=5, type=int)
    parser.add_argument("--block_size", default=64, type=int)
    parser.add_argument("--logging_steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16", action="store_true", help="Whether to use 16-bit precision through NVIDIA apex")
    parser.add_argument("--fp16_opt_level", "--opt-level", dest="fp16_opt_level", type=str, default=None)
    args = parser.parse_args()
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.fp16_opt_level is not None:
        args.fp16 = True
    set_seed(args)

    try:
        from apex.normalization import FusedLayerNorm as LayerNorm
        from apex.optimizers import FusedAdam
    except ImportError:
        print("Better speed can be achieved with apex.")
        from torch.nn import LayerNorm
        from torch.optim import AdamW as FusedAdam

    inputs, labels, vocab = load_text(args)
    model = CharModel(vocab, 48, 4, 2, args.block_size, LayerNorm).to(args.device)

    no_decay = ["bias", "norm"]
    named = list(model.named_parameters())
    optimizer_grouped_parameters = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": args.weight_decay},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = FusedAdam(optimizer_grouped_parameters, lr=args.learning_rate, eps=args.adam_epsilon)

    if args.fp16:
        try:
            from apex import amp
        except ImportError as error:
            raise ImportError("Please install apex to use fp16 training.") from error
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level or "O1")

    size = args.per_gpu_train_batch_size
    total = len(inputs) // size // args.gradient_accumulation_steps * args.num_train_epochs
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / args.warmup_steps, max(0.05, (total - step) / total)),
    )

    history, tr_loss, global_step = [], 0.0, 0
    model.zero_grad()
    for epoch in range(args.num_train_epochs):
        order = torch.randperm(len(inputs))
        for step in range(len(inputs) // size // args.gradient_accumulation_steps * args.gradient_accumulation_steps):
            batch = order[step * size : (step + 1) * size]
            model.train()
            loss = model(inputs[batch].to(args.device), labels[batch].to(args.device))
            if args.gradient_accumulation_steps > 1:
                loss = loss / args.gradient_accumulation_steps
            if args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            tr_loss += loss.item()
            if (step + 1) % args.gradient_accumulation_steps == 0:
                if args.fp16:
                    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                model.zero_grad()
                global_step += 1
                history.append(tr_loss)
                tr_loss = 0.0
                if global_step % args.logging_steps == 0:
                    print(f"epoch {epoch} step {global_step} loss {history[-1]:.4f}")

    model.eval()
    with torch.no_grad():
        perplexity = math.exp(float(model(inputs[:size].to(args.device), labels[:size].to(args.device))))
    print(f"perplexity = {perplexity:.3f}")
    print(json.dumps({"losses": history, "metric": perplexity}))


if __name__ == "__main__":
    main()
