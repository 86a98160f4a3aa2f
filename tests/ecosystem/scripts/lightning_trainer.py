"""Trainer of lightning: a module with a scheduler, accumulation and clipping."""

import json

import lightning
import torch


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.losses = []

    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.body(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


lightning.seed_everything(0)
model = Model()
inputs = torch.randn(32, 8)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.mean(1, keepdim=True)), 4)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=1,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader)
print(json.dumps(model.losses))
