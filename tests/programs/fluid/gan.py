"""A generative adversarial network on handwritten digits: two programs, two optimizers, shared parameters by name."""

import argparse
import json

import numpy as np
import paddle.fluid as fluid
from sklearn.datasets import load_digits

NOISE_SIZE = 16

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--epoch", type=int, default=8)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--use_amp", action="store_true")
args = parser.parse_args()


def attr(name):
    return fluid.ParamAttr(name=name, initializer=fluid.initializer.NormalInitializer(scale=0.08))


def generator(noise):
    hidden = fluid.layers.fc(noise, 128, param_attr=attr("g_w0"), bias_attr="g_b0")
    hidden = fluid.layers.batch_norm(
        hidden,
        act="relu",
        param_attr="g_bn_w",
        bias_attr="g_bn_b",
        moving_mean_name="g_bn_mean",
        moving_variance_name="g_bn_variance",
    )
    return fluid.layers.fc(hidden, 64, act="tanh", param_attr=attr("g_w1"), bias_attr="g_b1")


def discriminator(images):
    images = fluid.layers.reshape(x=images, shape=[-1, 1, 8, 8])
    conv = fluid.layers.conv2d(images, 16, 4, stride=2, padding=1, param_attr=attr("d_conv"), bias_attr="d_conv_b")
    hidden = fluid.layers.leaky_relu(conv, alpha=0.2)
    hidden = fluid.layers.fc(hidden, 64, param_attr=attr("d_w0"), bias_attr="d_b0")
    hidden = fluid.layers.leaky_relu(hidden, alpha=0.2)
    return fluid.layers.fc(hidden, 1, param_attr=attr("d_w1"), bias_attr="d_b1")


def loss(logit, label):
    return fluid.layers.mean(fluid.layers.sigmoid_cross_entropy_with_logits(x=logit, label=label))


def make_optimizer():
    optimizer = fluid.optimizer.Adam(learning_rate=2e-3, beta1=0.5)
    if args.use_amp:
        optimizer = fluid.contrib.mixed_precision.decorate(optimizer, init_loss_scaling=1024.0)
    return optimizer


def main():
    d_program, dg_program, startup = fluid.Program(), fluid.Program(), fluid.Program()
    startup.random_seed = args.seed
    with fluid.program_guard(d_program, startup):
        image = fluid.layers.data(name="img", shape=[64], dtype="float32")
        label = fluid.layers.data(name="label", shape=[1], dtype="float32")
        d_loss = loss(discriminator(image), label)
        d_parameters = [p.name for p in d_program.all_parameters()]
        make_optimizer().minimize(d_loss, startup, parameter_list=d_parameters)
    with fluid.program_guard(dg_program, startup):
        noise = fluid.layers.data(name="noise", shape=[NOISE_SIZE], dtype="float32")
        g_img = generator(noise)
        g_program = dg_program.clone(for_test=True)
        g_parameters = [p.name for p in dg_program.all_parameters()]
        dg_logit = discriminator(g_img)
        dg_loss = loss(dg_logit, fluid.layers.fill_constant([args.batch_size, 1], "float32", 1.0))
        make_optimizer().minimize(dg_loss, startup, parameter_list=g_parameters)

    exe = fluid.Executor(fluid.CUDAPlace(0) if fluid.is_compiled_with_cuda() else fluid.CPUPlace())
    exe.run(startup)
    rng = np.random.RandomState(args.seed)
    images = (load_digits().images / 8.0 - 1.0).astype("float32").reshape(-1, 64)
    real = np.ones([args.batch_size, 1], "float32")
    fake = np.zeros([args.batch_size, 1], "float32")
    losses = []
    for pass_id in range(args.epoch):
        order = rng.permutation(len(images))
        for start in range(0, len(order) - args.batch_size + 1, args.batch_size):
            noise_data = rng.normal(size=[args.batch_size, NOISE_SIZE]).astype("float32")
            generated = exe.run(g_program, feed={"noise": noise_data}, fetch_list=[g_img])[0]
            batch = images[order[start : start + args.batch_size]]
            real_loss = exe.run(d_program, feed={"img": batch, "label": real}, fetch_list=[d_loss])[0][0]
            fake_loss = exe.run(d_program, feed={"img": generated, "label": fake}, fetch_list=[d_loss])[0][0]
            g_loss = exe.run(dg_program, feed={"noise": noise_data}, fetch_list=[dg_loss])[0][0]
            losses.append(float(real_loss + fake_loss + g_loss))
        print(f"pass {pass_id}: D loss {real_loss + fake_loss:.3f}, G loss {g_loss:.3f}")
    noise_data = rng.normal(size=[256, NOISE_SIZE]).astype("float32")
    generated = exe.run(g_program, feed={"noise": noise_data}, fetch_list=[g_img])[0]
    distance = float(np.abs(generated.mean(0) - images.mean(0)).mean())
    print(f"mean image differs by {distance:.4f}")
    print(json.dumps({"losses": losses, "metric": distance}))


if __name__ == "__main__":
    main()
