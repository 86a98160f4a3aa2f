import torch
import torch.nn.functional as F

def train_one_epoch(model, optimizer, loader, epoch, scaler=None):
    trace = []
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=scaler is not None):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        trace.append(loss.item())
    return trace

@torch.no_grad()
def evaluate(model, loader):
    return sum(F.cross_entropy(model(x), y).item() for x, y in loader)
