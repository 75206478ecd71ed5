"""Attention as a smoother: noisy points on a circle of angles, read with three scales."""

import torch

import dovetail as dt

SCALES = (1.0, 30.0, 10_000.0)


def data():
    """The points, the curve, and the output of attention and its error by scale."""
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(60, 1, generator=draw, dtype=torch.float64).sort(0).values * 2 * torch.pi
    y = curve(x) + 0.4 * torch.randn(60, 1, generator=draw, dtype=torch.float64)
    grid = torch.linspace(0, 2 * torch.pi, 241, dtype=torch.float64)[:, None]
    fits = {str(scale): dt.attention(circle(grid), circle(x), y, scale=scale) for scale in SCALES}
    errors = {scale: float((fit - curve(grid)).pow(2).mean().sqrt()) for scale, fit in fits.items()}
    return {
        "x": x[:, 0].tolist(),
        "y": y[:, 0].tolist(),
        "grid": grid[:, 0].tolist(),
        "curve": curve(grid)[:, 0].tolist(),
        "fits": {scale: fit[:, 0].tolist() for scale, fit in fits.items()},
        "errors": errors,
    }


def curve(x):
    """A curve with the period 2π."""
    return x.sin() + 0.5 * (2 * x).cos()


def circle(x):
    """Points of length 1, by their angle."""
    return torch.cat([x.cos(), x.sin()], -1)


def draw(figure, data):
    """One panel per scale."""
    for axes, (scale, fit) in zip(figure.subplots(1, 3, sharey=True), data["fits"].items(), strict=True):
        axes.plot(data["x"], data["y"], ".", color="#8a90a0", markersize=4, label="values")
        axes.plot(data["grid"], data["curve"], "--", color="black", linewidth=1, label="curve")
        axes.plot(data["grid"], fit, color="#d9822b", linewidth=2, label="attention")
        axes.set(title=f"scale {float(scale):g}\nerror {data['errors'][scale]:.2f}", xlabel="angle")
    figure.axes[0].legend(frameon=False, fontsize=7)
