import pytorch_lightning
import torch

import ampx


class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.network = torch.nn.Linear(4, 1)

    def configure_optimizers(self):
        return ampx.wrap_optimizer(torch.optim.SGD(self.parameters(), lr=0.01))

    def training_step(self, batch, index):
        optimizer = self.optimizers(use_pl_optimizer=False)
        loss = self.network(batch[0]).square().mean() * (float("inf") if index == 1 else 1.0)
        with ampx.scale_loss(loss, optimizer) as scaled:
            self.manual_backward(scaled)
        optimizer.step()
        optimizer.zero_grad()


ampx.init("torch", dtype="bfloat16", device="cpu", loss_scale="dynamic")
module = Module()
data = torch.utils.data.TensorDataset(torch.ones(4, 4))
trainer = pytorch_lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
assert trainer.optimizers[0].loss_scale == 32768.0
