"""A discriminator of two normal distributions, ideal and fitted; and diffusion back to two points in one dimension."""

import itertools

import torch
from torch.distributions import Normal

SAMPLES, PATHS, STEPS, MOST = 2000, 12, 40, 3.0


def data():
    """Curves over x, and paths over the steps."""
    draw = torch.Generator().manual_seed(0)
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)
    p, q = Normal(1.0, 1.0).log_prob(x).exp(), Normal(-1.0, 1.0).log_prob(x).exp()
    samples = torch.randn(2, SAMPLES, generator=draw, dtype=torch.float64) + torch.tensor([[1.0], [-1.0]])
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # of a logistic regression
    optimizer = torch.optim.LBFGS([weights], line_search_fn="strong_wolfe", max_iter=50)

    def loss():
        optimizer.zero_grad()
        real, made = weights[0] + weights[1] * samples
        value = torch.nn.functional.softplus(-real).mean() + torch.nn.functional.softplus(made).mean()
        value.backward()
        return value

    optimizer.step(loss)
    fitted = torch.sigmoid(weights[0] + weights[1] * x).detach()

    noise = torch.linspace(MOST, 0.05, STEPS + 1, dtype=torch.float64)  # standard deviations, falling
    paths = [MOST * torch.randn(PATHS, generator=draw, dtype=torch.float64)]
    for now, then in itertools.pairwise(noise):
        guess = torch.tanh(paths[-1] / now**2)  # the mean of x0 given x, where x0 is −1 or 1
        paths.append(guess + (then / now) * (paths[-1] - guess))
    return {
        "x": x.tolist(),
        "p": p.tolist(),
        "q": q.tolist(),
        "ideal": (p / (p + q)).tolist(),
        "fitted": fitted.tolist(),
        "paths": torch.stack(paths, -1).tolist(),
    }


def draw(figure, data):
    """Two panels."""
    curve, paths = figure.subplots(1, 2)
    curve.fill_between(data["x"], data["p"], color="#2f5fb3", alpha=0.3, linewidth=0, label="data p")
    curve.fill_between(data["x"], data["q"], color="#d9822b", alpha=0.3, linewidth=0, hatch="//", label="samples q")
    curve.plot(data["x"], data["ideal"], color="#2f5fb3", label="p / (p + q)")
    curve.plot(data["x"][::3], data["fitted"][::3], "s", color="#d9822b", markersize=4, label="fitted")
    curve.set(xlabel="x", ylabel="probability", title="a discriminator", ylim=(0, 1.05))
    curve.legend(frameon=False, loc="upper left", fontsize=9)
    for row in data["paths"]:
        paths.plot(row, color="#2f5fb3", linewidth=1)
        paths.plot(len(row) - 1, row[-1], "o", color="#d9822b", markersize=4)
    for place in (-1, 1):
        paths.axhline(place, color="#8a90a0", linestyle=":")
    paths.set(xlabel="step", ylabel="x", title="from noise to data")
