"""A script for Accelerate that knows nothing of ampx: accumulation, clipping, a scheduler."""

import json
import sys

import torch
from accelerate import Accelerator

NAMES = {"float32": "no", "float16": "fp16", "bfloat16": "bf16"}


def main(precision="float32"):
    torch.manual_seed(0)
    accelerator = Accelerator(
        mixed_precision=NAMES[precision], gradient_accumulation_steps=2, cpu=not torch.cuda.is_available()
    )
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    dtypes = set()
    model[0].register_forward_hook(lambda module, inputs, output: dtypes.add(str(output.dtype)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, norms = [], []
    for batch, target in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(batch), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "dtypes": sorted(dtypes), "rate": scheduler.get_last_lr()[0]}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
