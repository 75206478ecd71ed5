"""The error of int4 by the size of a group, with and without an outlier, and the levels of int4 and NF4."""

import torch

from dovetail.ops.formats.kinds import NF4, Int4

GROUPS = (16, 32, 64, 128, 256, 512, 1024)


def data():
    """Relative errors by group size; levels as fractions of the largest."""
    w = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0))
    outlier = w.clone()
    outlier[:, 7] = 8.0
    errors = {}
    for name, matrix in (("one outlier per row", outlier), ("no outlier", w)):
        errors[name] = [
            float((Int4(group=g).decode(Int4(group=g).encode(matrix), 1024) - matrix).norm() / matrix.norm()) for g in GROUPS
        ]
    levels = {"int4": (Int4().levels(None) / 8).tolist(), "NF4": NF4().levels(None).tolist()}
    return {"errors": errors, "levels": levels}


def draw(figure, data):
    """Two panels: errors, and levels over the density of weights."""
    errors, levels = figure.subplots(1, 2)
    for (name, row), (style, color) in zip(data["errors"].items(), (("s--", "#d9822b"), ("o-", "#2f5fb3")), strict=True):
        errors.semilogx(GROUPS, row, style, base=2, color=color, label=name, markersize=4)
    errors.set(xlabel="weights per scale", ylabel="error ÷ weights", title="int4, rounded to nearest", ylim=(0, None))
    errors.set_xticks(GROUPS, [f"{g:,}" for g in GROUPS])
    errors.legend(frameon=False, loc="upper left")
    x = torch.linspace(-1, 1, 201)
    density = torch.exp(-((2.8 * x) ** 2) / 2)
    levels.fill_between(x.tolist(), (1.3 + 0.9 * density).tolist(), 1.3, color="#8a90a0", alpha=0.35, linewidth=0)
    levels.text(0.42, 1.75, "weights", fontsize=9)
    for place, (name, color) in zip((0.7, 0.0), (("int4", "#2f5fb3"), ("NF4", "#d9822b")), strict=True):
        levels.vlines(data["levels"][name], place, place + 0.42, color=color, linewidth=1.8)
        levels.text(-1.08, place + 0.2, name, ha="right", va="center", fontsize=9)
    levels.set(title="16 levels", xlabel="part of the largest weight", xlim=(-1.4, 1.1), ylim=(-0.1, 2.3))
    levels.set_yticks([])
