"""A recurrent language model on English text, with accumulated and clipped gradients and automatic mixed precision."""

import argparse
import json
import math
import re
from pydoc_data import topics

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp
from mxnet.gluon import nn, rnn

parser = argparse.ArgumentParser(description="Recurrent language model")
parser.add_argument("--emsize", type=int, default=32)
parser.add_argument("--nhid", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--bptt", type=int, default=12)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--vocabulary", type=int, default=500)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--amp", action="store_true")
args = parser.parse_args()


def read_corpus():
    text = " ".join(topics.topics[name] for name in sorted(topics.topics))
    words = re.findall(r"[a-z]+", text.lower())[:40000]
    names, counts = np.unique(words, return_counts=True)
    kept = names[np.argsort(-counts, kind="stable")][: args.vocabulary - 1]
    index = {word: position + 1 for position, word in enumerate(kept)}
    return np.array([index.get(word, 0) for word in words], dtype="float32")


class RNNModel(gluon.HybridBlock):
    def __init__(self, vocab_size, num_embed, num_hidden, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.encoder = nn.Embedding(vocab_size, num_embed)
            self.cell = rnn.GRUCell(num_hidden, input_size=num_embed)
            self.decoder = nn.Dense(vocab_size, in_units=num_hidden, flatten=False)

    def hybrid_forward(self, _, inputs):
        embedded = self.encoder(inputs)
        output, _ = self.cell.unroll(args.bptt, embedded, layout="TNC", merge_outputs=True)
        return self.decoder(output)


def main():
    if args.amp:
        amp.init()
    mx.random.seed(args.seed)
    np.random.seed(args.seed)
    context = mx.gpu(0) if mx.context.num_gpus() else mx.cpu()
    corpus = read_corpus()
    columns = corpus[: len(corpus) // args.batch_size * args.batch_size].reshape(args.batch_size, -1).T
    model = RNNModel(args.vocabulary, args.emsize, args.nhid)
    model.initialize(mx.init.Xavier(), ctx=context)
    model.collect_params().setattr("grad_req", "add")
    trainer = gluon.Trainer(model.collect_params(), "adam", {"learning_rate": args.lr}, update_on_kvstore=False)
    if args.amp:
        amp.init_trainer(trainer)
    criterion = gluon.loss.SoftmaxCrossEntropyLoss()

    losses = []
    position = 0
    for step in range(args.steps):
        total = 0.0
        for _ in range(args.accumulate):
            data = mx.nd.array(columns[position : position + args.bptt], ctx=context)
            target = mx.nd.array(columns[position + 1 : position + 1 + args.bptt], ctx=context)
            position = (position + args.bptt) % (len(columns) - args.bptt - 1)
            with autograd.record():
                output = model(data)
                loss = criterion(output.reshape((-1, args.vocabulary)), target.reshape((-1,))).mean()
                loss = loss / args.accumulate
                if args.amp:
                    with amp.scale_loss(loss, trainer) as scaled_loss:
                        autograd.backward(scaled_loss)
                else:
                    autograd.backward(loss)
            total += float(loss.astype("float32").asscalar())
        if args.amp:
            amp.unscale(trainer)
        grads = [parameter.grad(context) for parameter in model.collect_params().values()]
        gluon.utils.clip_global_norm(grads, args.clip, check_isfinite=False)
        trainer.step(1)
        model.collect_params().zero_grad()
        losses.append(total)
        if step % 20 == 19:
            print(f"[step {step + 1}] loss {total:.3f}, perplexity {math.exp(total):.1f}")
    final = float(np.mean(losses[-10:]))
    print(f"training loss {final:.4f}")
    print(json.dumps({"losses": losses, "metric": final}))


main()
