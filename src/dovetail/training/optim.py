"""The optimizer of a model: AdamW for every weight, or Muon for its matrices and AdamW for the rest, as the spec declares them.

    weight decay     matrices and tables; norms, biases and gates do not decay
    Muon             matrices that tokens are multiplied by, but for those over the vocabulary
    learning rate    lr(step) · scale, where the initialization declares the scale (µP: base_width / inputs)

AdamW is torch's, fused. Muon is momentum, orthogonalized matrix by matrix:

    B ← μ·B + (1 − μ)·g        D = μ·B + (1 − μ)·g  (Nesterov)        O = NS₅(D) ≈ U·Vᵀ of D = U·S·Vᵀ
    W ← (1 − lr·λ)·W − lr·0.2·√max(out, inp)·O

    NS: X ← D/‖D‖; five times X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ        on (…, rows, columns), rows ≤ columns

Each singular value s of X becomes a·s + b·s³ + c·s⁵, which five times brings every s from 0.01 to 1 to between 0.68 and 1.14.
The factor 0.2·√max(out, inp) gives the update the root mean square of AdamW's, so that both take one learning rate and weight
decay. Every expert, and each of the queries, keys and values of a packed weight, is a matrix of its own (spec/weight.py).
Loshchilov & Hutter 2019 (AdamW); Jordan et al. 2024, Liu et al. 2025 (Muon; Moonlight).

Train some weights of a model alone: those whose paths match a pattern. All others take no gradient and stay as they are.

    prefix tuning    graft `prefix: 16` into the attention of a model, then train `layers.*.mixer.prefix_*`     Li & Liang 2021
    BitFit           train `*.bias`                                                                   Ben Zaken et al. 2021

The weights that stay need no gradient and no state of the optimizer. Checkpoints contain them; an adapter's do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from dovetail.model.model import Model, ModelModule
from dovetail.nn.declared_tensors import held
from dovetail.nn.module import tensor_at
from dovetail.spec.fold import Declared, check_patterns, declared
from dovetail.spec.weight import matrices
from dovetail.training.plan import OptimizerKind

# -- Muon -------------------------------------------------------------------------------------------------------------


A, B, C = 3.4445, -4.7750, 2.0315  # of the polynomial: steep at 0, so that small singular values grow fast
STEPS = 5
RMS = 0.2  # root mean square of AdamW's update, about
SMALLEST = 1e-7  # norm that a matrix is divided by


class Muon(torch.optim.Optimizer):
    """Muon over declared matrices. A group has `declared` beside `params`: the declaration of each. `dtype` is that of the
    orthogonalization, by default the weight's."""

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            for weight, d in zip(group["params"], group["declared"], strict=True):
                if weight.grad is not None:
                    self._update(weight, weight.grad, d, group)

    def _update(self, weight: Tensor, gradient: Tensor, d: Declared, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(state["momentum"], group["momentum"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        pairs = zip(*(matrices(tensor, d.weight, d.scope) for tensor in (weight, direction)), strict=True)
        for matrix, part in pairs:
            flat = part.flatten(len(d.weight.batch), -2)  # (batch…, out, inp)
            update = orthogonal(flat, group["dtype"]).to(weight.dtype).reshape(part.shape)
            matrix.add_(update, alpha=-group["lr"] * RMS * sqrt(max(flat.shape[-2:])))


def orthogonal(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(…, out, inp) with every singular value brought near 1, in `dtype`."""
    x = matrix.to(dtype or matrix.dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(SMALLEST)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * (gram @ gram)) @ x
    return x.mT if tall else x


# -- the optimizer of a model -----------------------------------------------------------------------------------------


FUSED = ("cpu", "cuda", "mps", "xpu")  # devices with a fused AdamW
STATE = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), Muon: ("momentum",)}  # tensors of the weight's shape, zero at first


def by_muon(d: Declared) -> bool:
    """Whether Muon updates the weight: a matrix that tokens are multiplied by, and not the head's over the vocabulary."""
    return d.weight.matmul and bool(d.weight.out) and "vocab" not in d.weight.out and min(d.weight.shape(d.scope)[-2:]) > 1


class Optimizer:
    """The optimizers of a model's learned weights, under one learning rate."""

    def __init__(
        self,
        model: ModelModule,
        kind: OptimizerKind = "adamw",
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        orthogonal_dtype: torch.dtype | None = None,
    ) -> None:
        found = {d.path: d for d in held(model, model.part) if d.trained}
        self.weights: dict[str, Tensor] = {path: tensor_at(model, path) for path in found}
        matrices = [d for d in found.values() if kind == "muon" and by_muon(d)]
        rest = [d for d in found.values() if kind != "muon" or not by_muon(d)]
        self.parts: list[torch.optim.Optimizer] = []
        if rest:
            groups = list(self._groups(rest, weight_decay, 1.0))
            fused = model.device.type in FUSED
            self.parts.append(torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=fused))
        if matrices:
            # n inputs: an update of AdamW has a spectral norm of order n · lr, one of Muon of order √n · lr
            groups = list(self._groups(matrices, weight_decay, 0.5))
            self.parts.append(Muon(groups, lr=0.0, momentum=momentum, dtype=orthogonal_dtype))

    def _groups(self, some: Iterable[Declared], weight_decay: float, power: float) -> Iterator[dict[str, Any]]:
        """One group of weights for each weight decay and scale of the learning rate, raised to a power."""
        groups: dict[tuple[float, float], list[Declared]] = {}
        for d in some:
            decay = weight_decay if d.weight.decays else 0.0
            groups.setdefault((decay, d.scope.init.lr_scale(d.weight, d.scope) ** power), []).append(d)
        for (decay, scale), members in groups.items():
            params = [self.weights[d.path] for d in members]
            yield {"params": params, "declared": members, "weight_decay": decay, "scale": scale}

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * group["scale"]

    def step(self) -> None:
        """Update every weight from its gradient."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the optimizer's state by name, allocated where it is not yet: a checkpoint saves or loads these."""
        paths = {weight: path for path, weight in self.weights.items()}
        result: dict[str, Tensor] = {}
        for part in self.parts:
            for weight in (weight for group in part.param_groups for weight in group["params"]):
                held = part.state[weight]
                if not held:
                    held.update({name: torch.zeros_like(weight) for name in STATE[type(part)]})
                    if isinstance(part, torch.optim.AdamW):
                        held["step"] = torch.zeros((), dtype=torch.float32)
                result |= {f"{paths[weight]}.{name}": tensor for name, tensor in held.items()}
        return result


def weights_named(spec: Model, patterns: Sequence[str]) -> list[Declared] | None:
    """The weights that some pattern matches, in module order; None without a pattern. Raises SpecError for one that matches
    none."""
    if not patterns:
        return None
    weights = [d for d in declared(spec) if d.weight.learned]
    check_patterns(patterns, [d.path for d in weights], "matches no weight of the model")
    return [d for d in weights if any(fnmatchcase(d.path, pattern) for pattern in patterns)]


def train_only(model: ModelModule, weights: Sequence[Declared]) -> None:
    """Let these weights alone take gradients. Of a pipeline, another stage may have some of them."""
    paths = {d.path for d in weights}
    model.requires_grad_(False)
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if path in paths:
            parameter.requires_grad_(True)
