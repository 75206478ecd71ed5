"""Lenses: what the residual stream before each layer predicts, by the final norm and the head.

    logit lens      p_l = softmax(head(norm(x_l)))                             nostalgebraist 2020
    tuned lens      p_l = softmax(head(norm(x_l + A_l x_l + b_l)))             Belrose et al. 2023

A_l (embed, embed) and b_l are trained to minimize KL(p ‖ p_l), p the model's own prediction, and start at zero.

    lens(model, ids)                                 top tokens, probs, rank of a target and KL at each layer and position
    tuned = tuned_lens(model, batches)               minutes; tuned.save("model/lens.safetensors")
    lens(model, ids, tuned=TunedLens.load("model/lens.safetensors", model))
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from dovetail.base.errors import FileError, InputError, SpecError
from dovetail.disk.atomic import write_atomically
from dovetail.disk.tensors import TensorFile
from dovetail.look.residual import final_residual, unembed
from dovetail.look.streaming import digest
from dovetail.look.tracer import trace
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.inputs import default_ctx
from dovetail.nn.module import at_least_fp32
from dovetail.spec.fold import over_vocab


@dc.dataclass(frozen=True)
class Lens:
    """The predictions at each point of the residual stream: tensors (points, rows, n), the last point is the model's own."""

    addresses: tuple[str, ...]
    tokens: Tensor  # (points, rows, n, top) the most probable token ids
    probs: Tensor  # (points, rows, n, top)
    target: Tensor  # (rows, n) token ids
    prob: Tensor  # of the target
    rank: Tensor  # of the target; 0 is the most probable
    kl: Tensor  # KL(model ‖ lens), in nats

    def __repr__(self) -> str:
        """The predictions at the last position of the first row."""
        lines = [f"{'address':24}  {'rank':>6}  {'prob':>6}  {'KL':>7}  most probable"]
        for i, address in enumerate(self.addresses):
            tops = zip(self.tokens[i, 0, -1].tolist(), self.probs[i, 0, -1].tolist(), strict=True)
            rank, prob, kl = (float(x[i, 0, -1]) for x in (self.rank, self.prob, self.kl))
            lines.append(f"{address:24}  {rank:6.0f}  {prob:6.3f}  {kl:7.3f}  {', '.join(f'{t} {p:.2f}' for t, p in tops)}")
        return "\n".join([f"target {int(self.target[0, -1])} at the last position of the first row", *lines])


class TunedLens:
    """An affine translator of the residual stream before each layer."""

    def __init__(self, weight: Tensor, bias: Tensor, model: str) -> None:
        self.weight, self.bias, self.model = weight, bias, model  # (layers, embed, embed), (layers, embed), SHA-256

    def __call__(self, x: Tensor, layer: int) -> Tensor:
        """Translate the residual stream (…, embed) before a layer to that after the last."""
        wide = x.to(self.weight.dtype)
        return (wide + wide @ self.weight[layer].T + self.bias[layer]).to(x.dtype)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, which belongs to the weights of the model."""
        tensors = {"weight": self.weight, "bias": self.bias}
        model = torch.tensor(list(bytes.fromhex(self.model)), dtype=torch.uint8)
        write_atomically(path, save({**{k: x.detach().cpu().contiguous() for k, x in tensors.items()}, "model": model}))

    @staticmethod
    def load(path: str | Path, model: ModelModule) -> TunedLens:
        """Read a tuned lens of this model; FileError for one of other weights."""
        path, depth, width = Path(path), len(model.part.layers), model.part.width
        with TensorFile(path) as file:
            shapes = {name: entry.shape for name, entry in file.entries.items()}
            if shapes.keys() != {"weight", "bias", "model"} or shapes["model"] != (32,):
                raise FileError(f"{path}: is not a tuned lens; save one with dt.look.tuned_lens(…).save(path)")
            own = digest(model)
            if bytes(file.read("model").tolist()).hex() != own:
                raise FileError(f"{path}: belongs to a model with other weights; train a lens of this one")
            if shapes["weight"] != (depth, width, width) or shapes["bias"] != (depth, width):
                raise FileError(f"{path}: its translators do not fit {depth} layers of width {width}; train it again")
            weight, bias = (file.read(name).clone().to(model.device) for name in ("weight", "bias"))
        return TunedLens(weight, bias, own)


@torch.no_grad()
def lens(
    model: ModelModule,
    tokens: Tensor,
    *,
    target: int | Tensor | None = None,
    top: int = 5,
    tuned: TunedLens | None = None,
    ctx: Ctx | None = None,
) -> Lens:
    """Return what the residual stream before each layer, and after the last, predicts at each position of tokens (rows, n).

    `target` is a token id, or (rows, n) of them; by default what the model predicts. `tuned` translates the stream first.
    """
    _check_vocabulary(model)
    if not 1 <= top <= model.part.vocab:
        raise InputError(f"top: {top} is not from 1 to {model.part.vocab}, the size of the vocabulary")
    ctx = ctx or default_ctx(tokens, ranks=model.ranks)
    points = dict(_points(model, tokens, ctx))
    *layers, last = points
    final = _log_probs(model, points[last], ctx)
    target = final.argmax(-1) if target is None else torch.as_tensor(target, device=final.device).expand(final.shape[:-1])
    rows: list[tuple[Tensor, ...]] = []
    for i, x in enumerate(points.values()):
        log_probs = final if i == len(layers) else _log_probs(model, x if tuned is None else tuned(x, i), ctx)
        of_target = log_probs.gather(-1, target[..., None])
        best = log_probs.topk(top)
        kl = (final.exp() * (final - log_probs)).sum(-1)
        rank = (log_probs > of_target).sum(-1)
        rows.append((best.indices, best.values.exp(), of_target[..., 0].exp(), rank, kl))
    ids, probs, prob, rank, kl = (torch.stack(each) for each in zip(*rows, strict=True))
    return Lens(tuple(points), ids, probs, target, prob, rank, kl)


def tuned_lens(
    model: ModelModule,
    batches: Iterable[Tensor],
    *,
    steps: int = 250,
    lr: float = 1e-3,
    progress: Callable[[int, float], None] | None = None,
) -> TunedLens:
    """Train a tuned lens on batches of token ids (rows, n), one per step; fewer batches are repeated. `progress` is called with
    the step and the mean KL of the layers."""
    _check_vocabulary(model)
    depth, width = len(model.part.layers), model.part.width
    like = {"dtype": at_least_fp32(next(model.parameters()).dtype), "device": model.device}
    weight, bias = torch.zeros(depth, width, width, **like), torch.zeros(depth, width, **like)
    result, optimizer = TunedLens(weight, bias, digest(model)), torch.optim.Adam([weight, bias], lr)
    several = list(islice(batches, steps))
    if not several:
        raise InputError("batches: there are none; give batches of token ids (rows, n)")
    for step in range(steps):
        tokens = several[step % len(several)].to(model.device)
        ctx = default_ctx(tokens, ranks=model.ranks)
        with torch.no_grad():
            *layers, last = [x for _, x in _points(model, tokens, ctx)]
            final = _log_probs(model, last, ctx)
        total, grads = 0.0, (torch.zeros_like(weight), torch.zeros_like(bias))
        for i, x in enumerate(layers):  # one at a time: the logits of all are large
            own = TunedLens(weight.detach().requires_grad_(), bias.detach().requires_grad_(), "")
            with torch.enable_grad():
                kl = (final.exp() * (final - _log_probs(model, own(x, i), ctx))).sum(-1).mean()
                for sum_, grad in zip(grads, torch.autograd.grad(kl, [own.weight, own.bias]), strict=True):
                    sum_ += grad
            total += float(kl.detach())
        weight.grad, bias.grad = grads
        optimizer.step()
        if progress is not None:
            progress(step + 1, total / depth)
    return result


def _check_vocabulary(model: ModelModule) -> None:
    if "head" not in over_vocab(model.part):
        raise SpecError("head", "gives no logits over the vocabulary, so there is no lens", "use a model with `head: lm`")


def _points(model: ModelModule, tokens: Tensor, ctx: Ctx) -> Iterator[tuple[str, Tensor]]:
    """(address, residual stream (rows, n, embed)) before each layer and after the last; several streams closed to one."""
    last = f"layers.{len(model.layers) - 1}.after_{model.part.layers[-1].steps()[-1][0]}"
    run = trace(model, tokens, "layers.*.in", last, ctx=ctx)
    for i, block in enumerate(model.layers):
        x = run[f"layers.{i}.in"]
        closing = next((later for later in list(model.layers)[i:] if later.closes), block)
        yield f"layers.{i}.in", closing.wire.close(x) if x.dim() > run["layers.0.in"].dim() else x
    yield last, final_residual(model.layers[-1], run[last])


def _log_probs(model: ModelModule, x: Tensor, ctx: Ctx) -> Tensor:
    logits = unembed(model, x, ctx)
    return torch.log_softmax(logits.to(at_least_fp32(logits.dtype)), -1)
