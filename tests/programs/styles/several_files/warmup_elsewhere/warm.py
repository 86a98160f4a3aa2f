import torch.nn.functional as F
def warm_up(model, optimizer, data):
    for x, y in data[:2]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
