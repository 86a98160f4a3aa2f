"""`ampx migrate` on scripts for MXNet, Paddle and TensorFlow: what they become, and what is left to a human."""

import textwrap

import pytest

# Name, before, after. The right-hand sides are written by hand.
CASES = [
    (
        "MXNet's recipe",
        """\
        import mxnet as mx
        from mxnet import autograd, gluon
        from mxnet.contrib import amp

        amp.init()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        amp.init_trainer(trainer)
        with autograd.record():
            loss = loss_fn(net(x), y)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(batch_size)
        """,
        """\
        import ampx
        import ampx_mxnet.compat  # noqa: F401 -- before mxnet, which needs two names that NumPy 1.24 took away
        import mxnet as mx
        from mxnet import autograd, gluon

        ampx.init("mxnet", loss_scale="dynamic")
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        trainer = ampx.wrap_optimizer(trainer)
        with autograd.record():
            loss = loss_fn(net(x), y)
            with ampx.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(batch_size)
        """,
    ),
    (
        "MXNet 2's name, a trainer that others hold, a conversion",
        """\
        from mxnet import amp

        def start(trainer):
            amp.init(target_dtype="bfloat16")
            amp.init_trainer(trainer)

        def check(trainer):
            amp.unscale(trainer)

        low = amp.convert_hybrid_block(net)
        """,
        """\
        import ampx
        import ampx_mxnet.amp
        import ampx_mxnet.compat  # noqa: F401 -- before mxnet, which needs two names that NumPy 1.24 took away

        def start(trainer):
            ampx.init("mxnet", dtype="bfloat16", loss_scale="dynamic")
            ampx.wrap_optimizer(trainer, in_place=True)

        def check(trainer):
            ampx.unscale(trainer)

        low = ampx_mxnet.amp.convert_hybrid_block(net)
        """,
    ),
    (
        "Paddle's GradScaler",
        """\
        import paddle

        optimizer = paddle.optimizer.Adam(parameters=model.parameters())
        scaler = paddle.amp.GradScaler(init_loss_scaling=1024, decr_every_n_nan_or_inf=2)
        with paddle.amp.auto_cast():
            loss = model(x)
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.minimize(optimizer, scaled)
        optimizer.clear_grad()
        """,
        """\
        import ampx
        import paddle

        optimizer = paddle.optimizer.Adam(parameters=model.parameters())
        scaler = ampx.init(
            "paddle",
            level="O0",
            loss_scale=ampx.LossScale(init_scale=1024, hysteresis=2),
            nan_loss="skip",
        )
        optimizer = ampx.wrap_optimizer(optimizer)
        with paddle.amp.auto_cast():
            loss = model(x)
        with ampx.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.clear_grad()
        """,
    ),
    (
        "Paddle's GradScaler, static and switched",
        """\
        import paddle

        optimizer = paddle.optimizer.Adam(parameters=model.parameters())
        scaler = paddle.amp.GradScaler(enable=args.amp, init_loss_scaling=256.0, use_dynamic_loss_scaling=False)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        """,
        """\
        import ampx
        import paddle

        optimizer = paddle.optimizer.Adam(parameters=model.parameters())
        scaler = ampx.init("paddle", level="O0", loss_scale=256.0, nan_loss="skip", enabled=bool(args.amp))
        optimizer = ampx.wrap_optimizer(optimizer)
        with ampx.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        """,
    ),
    (
        "fluid",
        """\
        import numpy as np
        import paddle.fluid as fluid
        from paddle.fluid.contrib.mixed_precision.decorator import decorate

        sgd = decorate(fluid.optimizer.SGD(0.1), init_loss_scaling=128.0)
        sgd.minimize(loss)
        """,
        """\
        import numpy as np
        import ampx_paddle.fluid

        ampx_paddle.fluid.install()
        import paddle.fluid as fluid
        from paddle.fluid.contrib.mixed_precision.decorator import decorate

        sgd = decorate(fluid.optimizer.SGD(0.1), init_loss_scaling=128.0)
        sgd.minimize(loss)
        """,
    ),
    (
        "the graph rewrite of TensorFlow 1",
        """\
        import tensorflow.compat.v1 as tf

        opt = tf.train.AdamOptimizer(0.1)
        opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt, loss_scale="dynamic")
        train = opt.minimize(loss)
        """,
        """\
        import ampx_tensorflow
        import tensorflow.compat.v1 as tf

        opt = tf.train.AdamOptimizer(0.1)
        opt = ampx_tensorflow.enable_mixed_precision_graph_rewrite(opt, loss_scale="dynamic")
        train = opt.minimize(loss)
        """,
    ),
    (
        "Keras 2's LossScaleOptimizer in a loop",
        """\
        import tensorflow as tf
        from tensorflow.keras import mixed_precision

        mixed_precision.set_global_policy("mixed_float16")
        optimizer = mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
        with tf.GradientTape() as tape:
            loss = model(x)
            scaled = optimizer.get_scaled_loss(loss)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, variables))
        optimizer.apply_gradients(zip(gradients, variables))
        """,
        """\
        import ampx
        import tensorflow as tf
        from tensorflow.keras import mixed_precision

        mixed_precision.set_global_policy("mixed_float16")
        ampx.init("tensorflow", level="O0", loss_scale="dynamic")
        optimizer = ampx.wrap_optimizer(
            tf.keras.optimizers.SGD(0.1),
            loss_scale=ampx.LossScale(init_scale=2.0**15),
        )
        with tf.GradientTape() as tape:
            loss = model(x)
            scaled = optimizer.get_scaled_loss(loss)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, variables))
        optimizer.apply_gradients(zip(gradients, variables))
        """,
    ),
    (
        "Keras 3's LossScaleOptimizer",
        """\
        import keras

        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 2.0**12, dynamic_growth_steps=100)
        """,
        """\
        import ampx
        import keras

        ampx.init("tensorflow", level="O0", loss_scale="dynamic")
        optimizer = ampx.wrap_optimizer(
            keras.optimizers.SGD(0.1),
            loss_scale=ampx.LossScale(init_scale=2.0**12, growth_interval=100),
        )
        """,
    ),
    (
        "Keras' experimental names, two optimizers, a static scale",
        """\
        import tensorflow as tf

        policy = tf.keras.mixed_precision.experimental.Policy("mixed_float16")
        tf.keras.mixed_precision.experimental.set_policy(policy)
        a = tf.keras.mixed_precision.experimental.LossScaleOptimizer(first, loss_scale=128)
        b = tf.keras.mixed_precision.LossScaleOptimizer(second, initial_scale=2.0**30, dynamic_growth_steps=500)
        """,
        """\
        import ampx
        import tensorflow as tf

        policy = tf.keras.mixed_precision.Policy("mixed_float16")
        tf.keras.mixed_precision.set_global_policy(policy)
        ampx.init("tensorflow", level="O0", loss_scale="dynamic")
        a = ampx.wrap_optimizer(first, loss_scale=128)
        b = ampx.wrap_optimizer(
            second,
            loss_scale=ampx.LossScale(init_scale=2.0**30, growth_interval=500, max_scale=2.0**127),
        )
        """,
    ),
]


@pytest.mark.parametrize(("before", "after"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_it_becomes(before, after, migrate):
    status, migrated, findings = migrate(textwrap.dedent(before))
    assert migrated == textwrap.dedent(after)
    assert status == "changed"
    assert [finding for finding in findings if finding[1] == "todo"] == []


@pytest.mark.parametrize(
    ("before", "line", "what"),
    [
        (
            "from mxnet.contrib import amp\namp.init(target_precision_ops=['dot'])\n",
            2,
            "`target_precision_ops` takes the place of MXNet's own list",
        ),
        ("from mxnet.contrib import amp\nstart = amp.init\n", 2, "`amp.init` has no counterpart that is known"),
        (
            "import paddle\no = make()\ns = paddle.amp.GradScaler(use_dynamic_loss_scaling=flag)\n"
            "s.scale(l).backward()\ns.step(o)\n",
            3,
            "`use_dynamic_loss_scaling=flag` is decided at run time",
        ),
        (
            "import paddle.fluid as fluid\nwith fluid.dygraph.amp_guard():\n    pass\n",
            2,
            "`fluid.dygraph.amp_guard` is fluid's eager mode",
        ),
        (
            "import paddle\nfrom paddle.fluid.contrib.mixed_precision.fp16_utils import rewrite_program\n"
            "rewrite_program(main)\n",
            3,
            "`paddle.fluid.contrib.mixed_precision.fp16_utils.rewrite_program` is not in `ampx_paddle.fluid`",
        ),
        (
            "import tensorflow as tf\nfor o in all:\n    o = tf.keras.mixed_precision.LossScaleOptimizer(o)\n",
            3,
            "an optimizer is wrapped in a loop",
        ),
        (
            "import tensorflow as tf\nx = tf.keras.mixed_precision.experimental.Policy(name, loss_scale=8)\n",
            2,
            "`tf.keras.mixed_precision.experimental.Policy` is gone from Keras",
        ),
    ],
)
def test_what_is_not_understood_leaves_the_file_alone(before, line, what, migrate):
    status, _, findings = migrate(before)
    assert status == "blocked"
    assert findings == [(line, "todo", what)]
