"""A script for Lightning's Trainer that knows nothing of ampx: accumulation, clipping, a scheduler."""

import json
import sys

import lightning
import torch

NAMES = {"float32": "32-true", "float16": "16-mixed", "bfloat16": "bf16-mixed"}


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.dtypes, self.losses, self.norms = set(), [], []

    def training_step(self, batch, index):
        hidden = self.body[0](batch[0])
        self.dtypes.add(str(hidden.dtype))
        loss = torch.nn.functional.mse_loss(self.body[1:](hidden).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(precision="float32", devices="1", strategy="auto"):
    torch.manual_seed(0)
    model = Model()
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4)
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(devices),
        strategy=strategy,
        precision=NAMES[precision],
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    rate = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None  # of this process
    return {"losses": model.losses, "norms": model.norms, "dtypes": sorted(model.dtypes), "rate": rate}


if __name__ == "__main__":
    result = main(*sys.argv[1:])
    print(json.dumps(result), flush=True)
