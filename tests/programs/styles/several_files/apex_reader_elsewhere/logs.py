def norms(model):
    return [p.grad.norm().item() for p in model.parameters()]
