from typing import Optional
import torch
def run(model, opt, scaler: Optional[torch.amp.GradScaler]):
    scaler.scale(model(torch.ones(1, 8)).sum()).backward()
    scaler.step(opt)
    scaler.update()
