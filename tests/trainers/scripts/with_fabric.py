"""A script for Lightning Fabric that knows nothing of ampx: accumulation, clipping, a scheduler."""

import json
import sys

import torch
from lightning.fabric import Fabric

NAMES = {"float32": "32-true", "float16": "16-mixed", "bfloat16": "bf16-mixed"}


def main(precision="float32"):
    torch.manual_seed(0)
    fabric = Fabric(accelerator="gpu" if torch.cuda.is_available() else "cpu", devices=1, precision=NAMES[precision])
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    dtypes = set()
    model[0].register_forward_hook(lambda module, inputs, output: dtypes.add(str(output.dtype)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer = fabric.setup(model, optimizer)
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4)
    losses, norms = [], []
    for index, (batch, target) in enumerate(fabric.setup_dataloaders(loader)):
        loss = torch.nn.functional.mse_loss(model(batch), target)
        fabric.backward(loss / 2)
        if index % 2:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "dtypes": sorted(dtypes), "rate": scheduler.get_last_lr()[0]}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
