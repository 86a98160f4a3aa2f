"""A generative adversarial network on handwritten digits: two trainers, automatic mixed precision."""

import argparse
import json

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp
from mxnet.gluon import nn
from sklearn.datasets import load_digits


def get_generator():
    net = nn.HybridSequential(prefix="generator_")
    with net.name_scope():
        net.add(nn.Dense(128, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.Dense(128, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.Dense(64, activation="tanh"))
    return net


def get_discriminator():
    net = nn.HybridSequential(prefix="discriminator_")
    with net.name_scope():
        net.add(nn.Conv2D(16, 4, 2, 1, use_bias=False), nn.LeakyReLU(0.2))
        net.add(nn.Conv2D(32, 4, 2, 1, use_bias=False), nn.LeakyReLU(0.2))
        net.add(nn.Dense(1))
    return net


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--nz", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--amp", action="store_true")
    opt = parser.parse_args()

    if opt.amp:
        amp.init()
    mx.random.seed(opt.seed)
    np.random.seed(opt.seed)
    ctx = mx.gpu(0) if mx.context.num_gpus() else mx.cpu()

    images = (load_digits().images / 8.0 - 1.0).astype("float32")[:, None]
    train_data = gluon.data.DataLoader(images, opt.batch_size, shuffle=True, last_batch="discard")

    net_g, net_d = get_generator(), get_discriminator()
    net_g.initialize(mx.init.Normal(0.05), ctx=ctx)
    net_d.initialize(mx.init.Normal(0.05), ctx=ctx)
    trainer_g = gluon.Trainer(net_g.collect_params(), "adam", {"learning_rate": opt.lr, "beta1": opt.beta})
    trainer_d = gluon.Trainer(net_d.collect_params(), "adam", {"learning_rate": opt.lr, "beta1": opt.beta})
    if opt.amp:
        amp.init_trainer(trainer_g)
        amp.init_trainer(trainer_d)
    loss = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    real_label = mx.nd.ones((opt.batch_size,), ctx=ctx)
    fake_label = mx.nd.zeros((opt.batch_size,), ctx=ctx)

    losses = []
    for epoch in range(opt.epochs):
        for batch in train_data:
            data = batch.as_in_context(ctx)
            noise = mx.nd.random.normal(0, 1, shape=(opt.batch_size, opt.nz), ctx=ctx)
            # update the discriminator: maximize log(D(x)) + log(1 - D(G(z)))
            with autograd.record():
                err_d_real = loss(net_d(data), real_label)
                fake = net_g(noise).reshape((-1, 1, 8, 8))
                err_d_fake = loss(net_d(fake.detach()), fake_label)
                err_d = err_d_real + err_d_fake
                if opt.amp:
                    with amp.scale_loss(err_d, trainer_d) as scaled_loss:
                        autograd.backward(scaled_loss)
                else:
                    err_d.backward()
            trainer_d.step(opt.batch_size)
            # update the generator: maximize log(D(G(z)))
            with autograd.record():
                fake = net_g(noise).reshape((-1, 1, 8, 8))
                err_g = loss(net_d(fake), real_label)
                if opt.amp:
                    with amp.scale_loss(err_g, trainer_g) as scaled_loss:
                        autograd.backward(scaled_loss)
                else:
                    err_g.backward()
            trainer_g.step(opt.batch_size)
            losses.append(float(err_d.mean().asscalar()) + float(err_g.mean().asscalar()))
        print(f"epoch {epoch} discriminator {err_d.mean().asscalar():.4f} generator {err_g.mean().asscalar():.4f}")
    fake = net_g(mx.nd.random.normal(0, 1, shape=(256, opt.nz), ctx=ctx)).astype("float32").asnumpy()
    distance = float(np.abs(fake.mean(0) - images.mean(0).ravel()).mean())
    print(f"mean image differs by {distance:.4f}")
    print(json.dumps({"losses": losses, "metric": distance}))


if __name__ == "__main__":
    main()
