"""Noise that lasts over batches: its gradient is that of a new variable in every step."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Variable
from apex import amp

torch.manual_seed(0)
X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))
global_noise_data = torch.zeros([8, 8])

def fgsm(gradz, step_size):
    return step_size * torch.sign(gradz)

def train(model, optimizer, half):
    global global_noise_data
    losses = []
    for i in range(0, 64, 8):
        for j in range(2):
            noise_batch = Variable(global_noise_data[0:8], requires_grad=True)
            loss = F.cross_entropy(model(X[i:i+8] + noise_batch), Y[i:i+8])
            if half:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            pert = fgsm(noise_batch.grad, 0.01)
            global_noise_data[0:8] += pert.data
            global_noise_data.clamp_(-0.05, 0.05)

            noise_batch = Variable(global_noise_data[0:8], requires_grad=False)
            loss = F.cross_entropy(model(X[i:i+8] + noise_batch), Y[i:i+8])
            optimizer.zero_grad()
            if half:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses

model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
result = [train(model, optimizer, True), model.weight.tolist()]
