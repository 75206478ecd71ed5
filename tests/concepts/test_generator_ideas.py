"""Numbers of other generators: the KL of a VAE, and the best discriminator of a GAN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence


def test_the_kl_of_a_code_is_0_894_by_formula_and_by_sampling() -> None:
    mu, sigma = 1.10, 0.52
    formula = 0.5 * (mu**2 + sigma**2 - math.log(sigma**2) - 1)
    assert formula == pytest.approx(0.894, abs=0.0005)
    code, prior = Normal(torch.tensor(mu), torch.tensor(sigma)), Normal(torch.tensor(0.0), torch.tensor(1.0))
    assert float(kl_divergence(code, prior)) == pytest.approx(formula, abs=1e-6)
    torch.manual_seed(0)
    z = code.sample((400_000,))
    assert float((code.log_prob(z) - prior.log_prob(z)).mean()) == pytest.approx(formula, abs=0.005)


def value(d: Tensor, p: Tensor, q: Tensor, x: Tensor) -> float:
    """E_p[log D] + E_q[log(1 − D)]."""
    return float(torch.trapezoid(p * d.log() + q * (1 - d).log(), x))


def test_the_best_discriminator_is_p_over_p_plus_q_and_its_value_2_jsd_minus_log_4() -> None:
    x = torch.linspace(-9, 9, 9001, dtype=torch.float64)
    p, q = (Normal(mean, 1.0).log_prob(x).exp() for mean in (1.0, -1.0))
    best, mean = p / (p + q), (p + q) / 2
    jsd = float(torch.trapezoid(p * (p / mean).log() + q * (q / mean).log(), x)) / 2
    assert value(best, p, q, x) == pytest.approx(2 * jsd - math.log(4), abs=1e-9)
    for shift in (-0.1, 0.1):  # any other one is worse
        assert value((best.logit() + shift).sigmoid(), p, q, x) < value(best, p, q, x)
    assert value(torch.full_like(x, 0.5), p, p, x) == pytest.approx(-math.log(4), abs=1e-9)
