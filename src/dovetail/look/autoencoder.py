"""Sparse autoencoders: an activation as a sum of a few features, each a direction (TopK).

    z = TopK(ReLU((x − b_dec) W_enc + b_enc), k)          x (…, embed) -> z (…, features), at most k of them not 0
    x̂ = z W_dec + b_dec                                   the rows of W_dec have length 1
    loss = ‖x − x̂‖² / Var x + 1/32 · the same of x − x̂, reconstructed by features that are dead      (AuxK)

A directory of one has the layout of SAELens: `cfg.json` and `sae_weights.safetensors`. Gao et al. 2024.

    sae = train_sae("acts", "layers.3.in", features=4096, k=32)       the directory of a stream, or a tensor (…, embed)
    sae.measure(model, ids)                                           explained variance, loss recovered, dead features, L0
    model.generate(ids, 20, patch=sae.steer(17, 8.0))                 plus 8 times the direction of feature 17
"""

from __future__ import annotations

import dataclasses as dc
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.base.errors import FileError, InputError
from dovetail.base.limits import MB
from dovetail.disk.replace import replacing
from dovetail.disk.shape import check_shape
from dovetail.disk.tensors import TensorFile, write_tensors
from dovetail.disk.untrusted import Directory
from dovetail.look.intervention import Replacement, steer
from dovetail.look.streaming import read_stream
from dovetail.look.tracer import trace
from dovetail.model.model import ModelModule

CONFIG, WEIGHTS, ARCHITECTURE = "cfg.json", "sae_weights.safetensors", "topk"
FORMAT = "6.0.0"  # of SAELens; it rewrites the config of an earlier one, and drops the address
AUX_WEIGHT, AUX_FEATURES = 1 / 32, 2  # Gao et al.; dead features that reconstruct the residual, in units of k
DEAD_STEPS = 100  # without an activation, after which a feature counts as dead in training


class SAE(nn.Module):
    """A TopK sparse autoencoder of the activation at an address. As a patch it replaces it by its reconstruction."""

    def __init__(self, address: str, width: int, features: int, k: int) -> None:
        super().__init__()
        if not 0 < k <= features:
            raise InputError(f"k: {k} of {features} features; give a number from 1 to {features}")
        self.address, self.k = address, k
        self.W_enc = nn.Parameter(torch.zeros(width, features))
        self.b_enc = nn.Parameter(torch.zeros(features))
        self.W_dec = nn.Parameter(torch.zeros(features, width))
        self.b_dec = nn.Parameter(torch.zeros(width))

    def activations(self, x: Tensor) -> Tensor:
        """The activations of all features (…, features) before TopK."""
        return ((x.to(self.b_dec) - self.b_dec) @ self.W_enc + self.b_enc).relu()

    def encode(self, x: Tensor) -> Tensor:
        """The features (…, features) of an activation (…, embed): at most k of each are not 0."""
        return _top(self.activations(x), self.k)

    def decode(self, z: Tensor) -> Tensor:
        """The activation (…, embed) that features add up to."""
        return z @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def steer(self, feature: int, by: float) -> Mapping[str, Replacement]:
        """A patch that adds `by` times the direction of a feature."""
        return {self.address: steer(self.W_dec[feature].detach(), by)}

    @torch.no_grad()
    def measure(self, model: ModelModule, ids: Tensor, loss: Callable[[Tensor], Tensor] | None = None) -> Quality:
        """How well it stands in for the activation on these rows (rows, n). `loss` is a function of the model's output; None:
        the loss of the next token."""

        def measured(patch: Mapping[str, Replacement]) -> float:
            run = trace(model, ids, "head.logits", self.address, patch=patch)
            logits = run["head.logits"]
            each = F.cross_entropy(logits[:, :-1].flatten(0, -2), ids[:, 1:].flatten()) if loss is None else loss(logits)
            return float(each)

        x = trace(model, ids, self.address)[self.address].to(self.b_dec).flatten(0, -2)
        z = self.encode(x)
        explained = 1 - float((x - self.decode(z)).square().sum() / (x - x.mean(0)).square().sum())
        active = z > 0
        dead = int((~active.any(0)).sum())
        plain, replaced, zero = measured({}), measured({self.address: self}), measured({self.address: 0.0})
        return Quality(explained, float(active.sum(-1).float().mean()), dead, plain, replaced, zero)

    def save(self, directory: str | Path) -> None:
        """Write it as a directory, as a whole or not at all; another of its kind is replaced."""
        config = {
            "architecture": ARCHITECTURE,
            "d_in": self.W_enc.shape[0],
            "d_sae": self.W_enc.shape[1],
            "k": self.k,
            "dtype": str(self.b_dec.dtype).removeprefix("torch."),
            "device": "cpu",
            "apply_b_dec_to_input": True,
            "normalize_activations": "none",
            "reshape_activations": "none",
            "rescale_acts_by_decoder_norm": False,
            "metadata": {"sae_lens_version": FORMAT, "hook_name": self.address},
        }
        with replacing(directory, _check_is_one) as fresh:
            (fresh / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
            write_tensors(fresh / WEIGHTS, tensors := self.state_dict(), tensors.items())


@dc.dataclass(frozen=True)
class Quality:
    """How well a sparse autoencoder stands in for an activation."""

    explained: float  # variance: 1 − ‖x − x̂‖² / ‖x − mean‖²
    l0: float  # active features per token
    dead: int  # features that no token activates
    loss: float
    loss_replaced: float  # with the reconstruction in place of the activation
    loss_zero: float  # with zeros in its place

    @property
    def recovered(self) -> float:
        """The loss recovered: 1 where the reconstruction does no harm, 0 where it is as bad as zeros."""
        return (self.loss_zero - self.loss_replaced) / (self.loss_zero - self.loss)


def _top(x: Tensor, k: int) -> Tensor:
    top = x.topk(min(k, x.shape[-1]), -1)
    return torch.zeros_like(x).scatter(-1, top.indices, top.values)


# -- training ---------------------------------------------------------------------------------------------------------


def train_sae(
    activations: Tensor | str | Path,
    address: str,
    *,
    features: int,
    k: int,
    steps: int = 2000,
    batch: int = 1024,
    lr: float = 1e-3,
    seed: int = 0,
    progress: Callable[[int, int, float], None] | None = None,
) -> SAE:
    """Train on activations (…, embed) of an address, or on a stream on disk, from which each batch is sampled uniformly.
    `progress` is called with the step, the number of steps and the fraction of variance that is not explained."""
    if not isinstance(activations, Tensor):
        activations = Path(activations)
        pieces = [piece[address].flatten(0, -2) for piece in _with(activations, address)]
    else:
        pieces = [activations.detach().flatten(0, -2)]
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0)
    draw = torch.Generator().manual_seed(seed)
    sample = _batch(pieces, ends, 4 * batch, draw)
    mean, scale = sample.mean(0), float((sample - sample.mean(0)).square().mean().sqrt())
    if not 0 < scale < math.inf:
        raise InputError(f"{address}: the activations are all equal, or not finite; there are no features to find")
    sae = SAE(address, sample.shape[-1], features, k).to(sample.device)
    with torch.no_grad():
        sae.W_dec.copy_(F.normalize(torch.randn(sae.W_dec.shape, generator=draw), dim=-1))
        sae.W_enc.copy_(sae.W_dec.T)
    optimizer = torch.optim.Adam(sae.parameters(), lr, betas=(0.9, 0.999))
    idle = torch.zeros(features, dtype=torch.int64, device=sample.device)  # steps since a feature was active
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, 5 * (1 - step / steps))  # the last fifth decays to 0
        x = (_batch(pieces, ends, batch, draw) - mean) / scale  # trained in units of the standard deviation
        error = _step(sae, x, idle)
        error.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            sae.W_dec.copy_(F.normalize(sae.W_dec, dim=-1))
        if progress is not None and (step % 50 == 49 or step == steps - 1):
            progress(step + 1, steps, float(error.detach()))
    with torch.no_grad():  # back to the unit of the activation
        sae.b_enc.mul_(scale)
        sae.b_dec.mul_(scale).add_(mean)
    return sae.requires_grad_(False)


def _step(sae: SAE, x: Tensor, idle: Tensor) -> Tensor:
    """The loss of a batch; `idle` is brought up to date."""
    every = sae.activations(x)
    z = _top(every, sae.k)
    left = x - sae.decode(z)
    idle += 1
    idle[(z > 0).any(0)] = 0
    loss = left.square().mean()
    if bool((dead := idle > DEAD_STEPS).any()):
        revived = _top(every * dead, AUX_FEATURES * sae.k) @ sae.W_dec
        loss = loss + AUX_WEIGHT * (left.detach() - revived).square().mean()
    return loss


def _with(directory: Path, address: str) -> list[dict[str, Tensor]]:
    pieces = list(read_stream(directory))
    if not pieces or any(address not in piece for piece in pieces):
        known = ", ".join(sorted(set(pieces[0]) - {"ids"})) if pieces else "nothing"
        raise FileError(f"{directory}: holds no activations of {address}; it has those of {known}")
    return pieces


def _batch(pieces: Sequence[Tensor], ends: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """(count, embed) activations sampled uniformly from all pieces, as float32."""
    index = torch.randint(int(ends[-1]), (count,), generator=draw).sort().values
    of = torch.bucketize(index, ends, right=True)
    local = index - (ends - torch.tensor([len(piece) for piece in pieces]))[of]
    numbers, counts = of.unique_consecutive(return_counts=True)
    parts = zip(numbers.tolist(), local.split(counts.tolist()), strict=True)
    return torch.cat([pieces[number][rows.to(pieces[number].device)].to(torch.float32) for number, rows in parts])


# -- on disk ----------------------------------------------------------------------------------------------------------


def _check_is_one(directory: Path) -> None:
    if not (directory / CONFIG).is_file() or not (directory / WEIGHTS).is_file():
        raise FileError(f"{directory}: exists and is not a sparse autoencoder; choose another directory")


def load_sae(directory: str | Path) -> SAE:
    """Read a TopK sparse autoencoder of ours or of SAELens."""
    where = Directory(directory)
    config = where.json(CONFIG, MB)
    shown = str(where.place / CONFIG)
    check_shape(config, {"architecture": str, "d_in": int, "d_sae": int, "k": int, "metadata": {"hook_name": str}}, shown)
    for name, value in {
        "architecture": ARCHITECTURE,
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
    }.items():
        if config.get(name, value) != value:
            raise FileError(f"{shown}: {name} is {config[name]!r}; only {value!r} is read here")
    with TensorFile(where.path(WEIGHTS), where.place / WEIGHTS) as file:
        tensors = {name: file.read(name).to(torch.float32, copy=True) for name in file.entries}
    with torch.device("meta"):
        sae = SAE(config["metadata"]["hook_name"], config["d_in"], config["d_sae"], config["k"])
    expected = {name: tensor.shape for name, tensor in sae.state_dict().items()}
    if {name: tensor.shape for name, tensor in tensors.items()} != expected:
        raise FileError(f"{where.place / WEIGHTS}: its tensors are not those that {CONFIG} describes")
    if config.get("rescale_acts_by_decoder_norm"):  # each activation is in units of its feature's length
        length = tensors["W_dec"].norm(dim=-1)
        tensors["W_enc"], tensors["b_enc"] = tensors["W_enc"] * length, tensors["b_enc"] * length
        tensors["W_dec"] = tensors["W_dec"] / length[:, None]
    sae.load_state_dict(tensors, assign=True)
    return sae.requires_grad_(False)
