"""`scale_loss` inside functions that torch.func differentiates and maps: gradients are values there."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import ampx


def example_losses(model):
    """Return a function of one example's loss, and its arguments."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)

    def loss_of(parameters, x, y):
        return nn.functional.mse_loss(functional_call(model, parameters, (x,)), y)

    return loss_of, (inputs, targets)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mapped", [True, False])
def test_gradients_of_functions_train_as_in_float32(dtype, mapped):
    model = nn.Linear(4, 2)
    loss_of, batch = example_losses(model)
    expected = grad(lambda parameters: vmap(loss_of, in_dims=(None, 0, 0))(parameters, *batch).mean())(
        {name: parameter.detach() for name, parameter in model.named_parameters()}
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ampx.init("torch", dtype=dtype)
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), loss_scale=2.0**8 if mapped else None)

    def scaled_loss_of(parameters, *example):
        with ampx.scale_loss(loss_of(parameters, *example).float(), opt) as scaled:
            return scaled

    gradients = grad(scaled_loss_of)
    if mapped:
        gradients = vmap(gradients, in_dims=(None, 0, 0))
    values = gradients(before, *batch)
    for name, parameter in model.named_parameters():
        parameter.grad = values[name].mean(0) if mapped else values[name]
    opt.step()
    assert opt.last_step.applied
    for name, parameter in model.named_parameters():
        # a product of numbers rounded to 8 bits
        torch.testing.assert_close(before[name] - parameter, expected[name], rtol=2.0**-5, atol=2.0**-7)
