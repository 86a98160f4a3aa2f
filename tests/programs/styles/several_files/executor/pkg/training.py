from typing import Optional
import torch

class Executor:
    def __init__(self, model, loss, scaler: Optional[torch.amp.GradScaler] = None):
        self.model = model
        self.loss = loss
        self.scaler = scaler

    def forward_backward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.loss(self.model(x), y)
        self.scaler.scale(loss).backward()
        return loss.item()

class TrainLoop:
    def __init__(self, executor, optimizer):
        self.executor = executor
        self.optimizer = optimizer

    def run(self, data):
        trace = []
        for x, y in data:
            trace.append(self.executor.forward_backward(x, y))
            self.executor.scaler.step(self.optimizer)
            self.executor.scaler.update()
            self.optimizer.zero_grad()
        return trace
