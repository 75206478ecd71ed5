"""Decay factors: e^log, and exactly 0 where it is too small to change any sum."""

from math import exp

import torch

from dovetail.ops.scan.pieces import exp_or_zero, zero_if_tiny


def test_it_is_the_exponential_and_nothing_below_e_to_the_minus_40() -> None:
    log = torch.tensor([0.0, -1.0, -39.0, -41.0, -500.0, -torch.inf], dtype=torch.float64)
    assert torch.allclose(
        exp_or_zero(log), torch.tensor([1.0, exp(-1), exp(-39), 0.0, 0.0, 0.0], dtype=torch.float64), rtol=1e-15
    )
    assert zero_if_tiny(torch.tensor([0.5, 1e-17, 1e-18])).tolist() == [0.5, torch.tensor(1e-17).item(), 0.0]


def test_no_result_is_subnormal() -> None:
    left = exp_or_zero(-200 * torch.rand(1000))
    assert bool(((left == 0) | (left > torch.finfo(torch.float32).tiny)).all())


def test_its_gradient_is_finite() -> None:
    log = torch.tensor([0.0, -1.0, -1000.0, -torch.inf], requires_grad=True)
    (grad,) = torch.autograd.grad(exp_or_zero(log).sum(), log)
    assert torch.allclose(grad, torch.tensor([1.0, exp(-1), 0.0, 0.0]))
