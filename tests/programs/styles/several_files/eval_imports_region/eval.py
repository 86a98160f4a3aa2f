from train import evaluate, model
result = evaluate(model)
