"""Train a small residual network on handwritten digits with fluid and automatic mixed precision."""

import argparse
import json

import numpy as np
import paddle
import paddle.fluid as fluid
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="image classification")
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--num_epochs", type=int, default=7)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--scale_loss", type=float, default=128.0)
args = parser.parse_args()


def conv_bn_layer(input, num_filters, filter_size, stride=1, act=None):
    conv = fluid.layers.conv2d(
        input=input,
        num_filters=num_filters,
        filter_size=filter_size,
        stride=stride,
        padding=(filter_size - 1) // 2,
        act=None,
        bias_attr=False,
    )
    return fluid.layers.batch_norm(input=conv, act=act)


def basic_block(input, num_filters, stride):
    out = conv_bn_layer(input, num_filters, 3, stride, act="relu")
    out = conv_bn_layer(out, num_filters, 3)
    short = input
    if stride != 1 or input.shape[1] != num_filters:
        short = conv_bn_layer(input, num_filters, 1, stride)
    return fluid.layers.elementwise_add(x=short, y=out, act="relu")


def resnet(input, class_dim):
    conv = conv_bn_layer(input, 8, 3, act="relu")
    conv = basic_block(conv, 8, 1)
    conv = basic_block(conv, 16, 2)
    pool = fluid.layers.pool2d(input=conv, pool_type="avg", global_pooling=True)
    return fluid.layers.fc(input=pool, size=class_dim)


def reader(images, labels, batch_size):
    def batches():
        for start in range(0, len(images) - batch_size + 1, batch_size):
            yield [(images[i], labels[i]) for i in range(start, start + batch_size)]

    return batches


def main():
    digits = load_digits()
    order = np.random.RandomState(args.seed).permutation(len(digits.target))
    images = (digits.images[order] / 16.0).astype("float32").reshape(-1, 1, 8, 8)
    labels = digits.target[order].astype("int64").reshape(-1, 1)

    train_program = fluid.Program()
    startup_program = fluid.Program()
    startup_program.random_seed = args.seed
    with fluid.program_guard(train_program, startup_program):
        image = fluid.layers.data(name="pixel", shape=[1, 8, 8], dtype="float32")
        label = fluid.layers.data(name="label", shape=[1], dtype="int64")
        logits = resnet(image, 10)
        cost, predict = fluid.layers.softmax_with_cross_entropy(logits, label, return_softmax=True)
        avg_cost = fluid.layers.mean(cost)
        acc = fluid.layers.accuracy(input=predict, label=label)
        test_program = train_program.clone(for_test=True)

        steps = 1344 // args.batch_size
        optimizer = fluid.optimizer.Momentum(
            learning_rate=fluid.layers.piecewise_decay(boundaries=[5 * steps], values=[args.lr, args.lr * 0.1]),
            momentum=0.9,
            regularization=fluid.regularizer.L2Decay(1e-4),
        )
        if args.fp16:
            optimizer = fluid.contrib.mixed_precision.decorate(
                optimizer, init_loss_scaling=args.scale_loss, use_dynamic_loss_scaling=True
            )
        optimizer.minimize(avg_cost)

    place = fluid.CUDAPlace(0) if fluid.is_compiled_with_cuda() else fluid.CPUPlace()
    exe = fluid.Executor(place)
    exe.run(startup_program)
    feeder = fluid.DataFeeder(place=place, feed_list=[image, label])
    train_reader = paddle.batch(
        lambda: zip(images[:1344], labels[:1344], strict=True), batch_size=args.batch_size, drop_last=True
    )
    losses = []
    for pass_id in range(args.num_epochs):
        for data in train_reader():
            loss, accuracy = exe.run(train_program, feed=feeder.feed(data), fetch_list=[avg_cost, acc])
            losses.append(float(loss[0]))
        print(f"Pass {pass_id}, Loss {float(loss[0]):2.2}, Acc {float(accuracy[0]):2.2}")
    accuracies = []
    for data in reader(images[1344:], labels[1344:], 151)():
        accuracies.append(exe.run(test_program, feed=feeder.feed(data), fetch_list=[acc])[0][0])
    accuracy = float(np.mean(accuracies))
    print(f"Test Acc {accuracy:.4f}")
    print(json.dumps({"losses": losses, "metric": accuracy}))


main()
