"""A library scales the loss for apex, by a class of its own."""
import torch
import torch.nn as nn
from apex import amp
from somebodys_training_library import ApexScaler

model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
loss_scaler = ApexScaler()
for _ in range(3):
    loss = model(torch.randn(4, 8)).sum()
    loss_scaler(loss, optimizer)
    optimizer.zero_grad()
