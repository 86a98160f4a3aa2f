"""Train a convolutional network on handwritten digits with Gluon."""

import argparse
import json

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits


def parse_args():
    parser = argparse.ArgumentParser(description="Train digits with Gluon.")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def get_data(batch_size, seed):
    digits = load_digits()
    images = (digits.images / 16.0).astype("float32")[:, None]
    labels = digits.target.astype("float32")
    order = np.random.RandomState(seed).permutation(len(images))
    train, test = order[:1347], order[1347:]
    train_set = gluon.data.ArrayDataset(images[train], labels[train])
    train_data = gluon.data.DataLoader(train_set, batch_size, shuffle=True, last_batch="discard")
    return train_data, images[test], labels[test]


def get_network():
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(nn.Conv2D(16, kernel_size=3, padding=1, use_bias=False))
        net.add(nn.BatchNorm())
        net.add(nn.Activation("relu"))
        net.add(nn.MaxPool2D(2))
        net.add(nn.Conv2D(32, kernel_size=3, padding=1, activation="relu"))
        net.add(nn.MaxPool2D(2))
        net.add(nn.Flatten())
        net.add(nn.Dense(64, activation="relu"))
        net.add(nn.Dense(10))
    return net


def evaluate(net, images, labels, ctx):
    metric = mx.metric.Accuracy()
    output = net(mx.nd.array(images, ctx=ctx))
    metric.update([mx.nd.array(labels, ctx=ctx)], [output.astype("float32")])
    return metric.get()[1]


def main():
    args = parse_args()
    mx.random.seed(args.seed)
    np.random.seed(args.seed)
    ctx = mx.gpu(0) if mx.context.num_gpus() else mx.cpu()
    train_data, test_images, test_labels = get_data(args.batch_size, args.seed)

    net = get_network()
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": args.lr})
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

    losses = []
    for epoch in range(args.epochs):
        total = 0.0
        for data, label in train_data:
            data = data.as_in_context(ctx)
            label = label.as_in_context(ctx)
            with autograd.record():
                loss = loss_fn(net(data), label)
            loss.backward()
            trainer.step(args.batch_size)
            losses.append(float(loss.mean().astype("float32").asscalar()))
            total += losses[-1]
        print(f"[Epoch {epoch}] train loss {total / len(train_data):.4f}")
    accuracy = evaluate(net, test_images, test_labels, ctx)
    print(f"test accuracy {accuracy:.4f}")
    print(json.dumps({"losses": losses, "metric": float(accuracy)}))


if __name__ == "__main__":
    main()
