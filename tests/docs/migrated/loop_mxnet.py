import ampx
from ampx_mxnet.compat import mx

ampx.init("mxnet", level="O0", loss_scale="dynamic")  # on a GPU, or for bfloat16: ampx.init("mxnet")
network = mx.gluon.nn.Dense(1, in_units=4)
network.initialize()
trainer = mx.gluon.Trainer(network.collect_params(), "sgd", {"learning_rate": 0.1})
assert ampx.wrap_optimizer(trainer, in_place=True) is trainer
for factor in (1.0, float("inf")):
    with mx.autograd.record():
        loss = network(mx.nd.ones((2, 4))) * factor
        with ampx.scale_loss(loss, trainer) as scaled:
            mx.autograd.backward(scaled)
    trainer.step(2)
assert trainer.loss_scale == 32768.0
