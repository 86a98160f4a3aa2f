import torch
from torch.amp import GradScaler
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scaler = GradScaler("cpu")
