"""Gaps between a sampler and a trainer, made on purpose, for `rollouts.py`: a model samples with a KV cache, a copy of it that
differs in one thing is the trainer's. The sampler's log-probs are computed here, independently of how verify explains them.

A sampler also keeps its log-probs before temperature and truncation (`raw`), so that the share of the settings is known.
"""

from __future__ import annotations

import copy
import dataclasses as dc
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.decoding.sampling import Sampling, sample_tokens
from dovetail.decoding.steps import Decoder
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build, generator
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.linear import Linear
from dovetail.proof.compare.sides import in_dtype
from dovetail.state.pool import Pool

FAMILIES = {
    "llama": """
width: 48
vocab: 310
layers: [{repeat: 3, mixer: {heads: 6, kv_heads: 2, head: 8}, ffn: {hidden: 44}}]
head: {tied: false}
""",
    "qwen3": """
width: 40
vocab: 190
layers: [{repeat: 4, mixer: {heads: 4, kv_heads: 2, head: 12, qk_norm: rmsnorm}, ffn: {hidden: 72}}]
head: {tied: true}
""",
    "gemma": """
width: 28
vocab: 122
embed: {kind: tokens, scale_by_width: true}
norm: {kind: rmsnorm, eps: 1e-6, plus_one: true}
layers:
- repeat: 2
  wire: sandwich_norm
  norm: {kind: rmsnorm, eps: 1e-6, plus_one: true}
  mixer: {heads: 6, kv_heads: 2, head: 12, scale: 0.25, softcap: 5.0, mask: [causal, {kind: window, size: 15}]}
  ffn: {hidden: 44, act: gelu_tanh}
head: {tied: true}
""",
}
ENTROPY = 3.0  # nats per token that the logits of a model are scaled to
PROMPT, ROWS, LENGTH = 6, 12, 48
RATE = 1e-4  # of Adam: a few steps move log-probs by some hundredths, as steps of reinforcement learning do


@torch.no_grad()
def made_model(family: str, seed: int) -> ModelModule:
    """A model with weights far from initial ones, whose tokens have an entropy of about 3 nats."""
    spec = from_yaml(FAMILIES[family])
    model = build(spec, seed=seed)
    for path, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator(seed, f"far {path}"))
        weight.copy_(weight + 0.3 * noise if weight.dim() == 1 else 0.25 * noise)
    ids = torch.randint(spec.vocab, (4, 32), generator=generator(seed, "entropy"))
    gain = next(model.norm.parameters())
    offset = 1.0 if spec.norm is not None and getattr(spec.norm, "plus_one", False) else 0.0
    for _ in range(12):
        logits = model(ids, Ctx(layout=TokenLayout.whole(4, 32)))
        entropy = torch.distributions.Categorical(logits=logits.double()).entropy().mean().item()
        gain.copy_((gain + offset) * (0.8 if entropy < ENTROPY else 1.2) - offset)
        if abs(entropy - ENTROPY) < 0.3:
            break
    return model.eval()


def other_kernels(model: ModelModule, seed: int) -> ModelModule:
    """A copy whose matmuls round as another engine's may: each output is off by up to half a unit in the last place before it
    is rounded. Our own cached decoding gives the bits of the whole pass too often to stand for another engine."""
    noisy, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)

    def hook(module: Any, inputs: Any, out: Tensor) -> Tensor:
        eps = torch.finfo(out.dtype).eps
        return (out.double() * (1 + eps * (torch.rand(out.shape, generator=draw) - 0.5))).to(out.dtype)

    for module in noisy.modules():
        if isinstance(module, Linear):
            module.register_forward_hook(hook)
    return noisy


@dc.dataclass(frozen=True)
class Truncation:
    """The settings of a sampler."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0

    def recorded(self) -> dict[str, Any]:
        """As a rollout's line has them."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}


def reported(logits: Tensor, token: int, how: Truncation) -> float:
    """The log-prob of a sampled token among those that truncation keeps, from logits (vocab,). The token was kept, also where
    another one with the same logit or the last bit of a sum would decide otherwise here."""
    probs = (logits.double() / how.temperature).softmax(-1)
    probs = torch.where(probs >= how.min_p * probs.max(), probs, 0.0)
    if how.top_k is not None:
        probs = torch.where(probs >= probs.topk(how.top_k).values[-1], probs, 0.0)
    probs = probs / probs.sum()
    if how.top_p < 1:
        total = 0.0
        kept = torch.zeros_like(probs)
        for i in probs.argsort(descending=True, stable=True).tolist():
            kept[i] = probs[i]
            total += probs[i].item()
            if total >= how.top_p:
                break
        kept[token] = probs[token]
        probs = kept / kept.sum()
    return probs[token].log().item()


@torch.inference_mode()
def sampled(model: ModelModule, how: Truncation, seed: int, *, rows: int = ROWS, length: int = LENGTH) -> list[dict[str, Any]]:
    """Rollouts of a model, decoded with a KV cache in one batch; each with its `raw` log-probs."""
    spec, draw = model.part, torch.Generator().manual_seed(seed)
    ids = torch.randint(spec.vocab, (rows, PROMPT), generator=draw)
    pool = Pool(spec, rows, PROMPT + length, dtype=model.dtype)
    decoder, options = Decoder(model, pool), {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
    samplings = [Sampling(**options, min_p=how.min_p or 0.0, seed=seed * rows + i) for i in range(rows)]
    lines: list[dict[str, Any]] = [{"prompt_ids": row.tolist(), "completion_ids": [], "logprobs": [], "raw": []} for row in ids]
    for _ in range(length):
        logits = decoder.step(ids, list(range(rows))).float()
        chosen = sample_tokens(logits, samplings, [()] * rows, [line["completion_ids"] for line in lines])
        for i, (line, token) in enumerate(zip(lines, chosen, strict=True)):
            line["completion_ids"].append(token)
            line["logprobs"].append(reported(logits[i], token, how))
            line["raw"].append(logits[i].double().log_softmax(-1)[token].item())
        ids = torch.tensor(chosen)[:, None]
    return lines


def trained(model: ModelModule, lines: Sequence[dict[str, Any]], steps: int, seed: int) -> ModelModule:
    """A copy after some steps of REINFORCE on the rollouts, with random advantages."""
    newer, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    ids = torch.tensor([line["prompt_ids"] + line["completion_ids"] for line in lines])
    optimizer = torch.optim.Adam(newer.requires_grad_(True).parameters(), RATE)
    for _ in range(steps):
        advantages = torch.randn(len(ids), 1, generator=draw)
        logits = newer(ids[:, :-1], Ctx(layout=TokenLayout.whole(len(ids), ids.shape[1] - 1)))
        logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        optimizer.zero_grad(set_to_none=True)
        (-(advantages * logprobs)[:, PROMPT - 1 :].mean()).backward()
        optimizer.step()
    return newer.requires_grad_(False).eval()


def shifted(lines: list[dict[str, Any]], model: ModelModule, how: str) -> None:
    """Move the log-probs of rollouts by one, in place."""
    for line in lines:
        values = line["logprobs"]
        if how == "next":
            line["logprobs"] = [*values[1:], 0.0]
        elif how == "before":
            line["logprobs"] = [0.0, *values[:-1]]
        else:  # the logits after the token itself, as an `echo` without BOS
            ids = torch.tensor([line["prompt_ids"] + line["completion_ids"]])
            with torch.no_grad():
                logits = model(ids, Ctx(layout=TokenLayout.whole(1, ids.shape[1])))[0].double().log_softmax(-1)
            line["logprobs"] = [logits[PROMPT + i, token].item() for i, token in enumerate(line["completion_ids"])]


def with_base(model: ModelModule, base: float) -> ModelModule:
    """The same weights with another rope base."""
    spec = model.part.replace("layers.*.mixer.position.base", base)
    other = build(spec)
    other.load_state_dict(model.state_dict())
    return other.eval()


@dc.dataclass(frozen=True)
class Gap:
    """One gap: the trainer's model and its dtype, what the sampler recorded, older checkpoints, and the right answer."""

    kind: str
    family: str
    trainer: ModelModule
    lines: list[dict[str, Any]]
    older: tuple[ModelModule, ...]
    names: tuple[str, ...]  # causes that are right
    words: str  # of the description of the cause
    detail: str

    def write(self, file: Path) -> Path:
        """Write the rollouts, without what only this benchmark knows."""
        keys = ("raw",)
        text = "\n".join(json.dumps({k: v for k, v in line.items() if k not in keys}) for line in self.lines)
        file.write_text(text + "\n")
        return file


class Maker:
    """Makes gaps; two models are built of each family. The gap numbers `i` begin at another multiple of 1000 for each seed, so
    that its models, prompts and tokens are others."""

    def __init__(self, rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> None:
        self.models: dict[tuple[str, int], ModelModule] = {}
        self.rows, self.length, self.seed = rows, length, seed

    def model(self, family: str, i: int) -> ModelModule:
        """The model of a family for a gap."""
        key = (family, 2 * self.seed + i % 2)
        if key not in self.models:
            self.models[key] = made_model(*key)
        return self.models[key]

    def sample(self, model: ModelModule, how: Truncation, seed: int) -> list[dict[str, Any]]:
        """Rollouts of a model."""
        return sampled(model, how, seed, rows=self.rows, length=self.length)

    def settings(self, kind: str, family: str, i: int, how: Truncation, *, narrow: bool, recorded: bool) -> Gap:
        """A sampler with settings; in bfloat16 where `narrow`."""
        model = self.model(family, i)
        sampler = other_kernels(in_dtype(copy.deepcopy(model), torch.bfloat16) if narrow else model, i)
        lines = self.sample(sampler, how, i)
        if recorded:
            lines = [{**line, **how.recorded()} for line in lines]
        name = "temperature" if kind == "temperature" else "truncation"
        words = "T = " if kind == "temperature" else kind
        return Gap(kind, family, model, lines, (), (name,), words, f"{how}{', bfloat16' if narrow else ''}")

    def batch(self, family: str, i: int, dtype: torch.dtype) -> Gap:
        """Cached decoding in a batch against a whole pass, in one dtype."""
        model = self.model(family, i)
        model = model if dtype == torch.float32 else in_dtype(copy.deepcopy(model), dtype)
        lines = self.sample(other_kernels(model, i), Truncation(), i)
        return Gap("batch shape", family, model, lines, (), ("batch shape",), "", str(dtype))

    def bfloat16(self, family: str, i: int) -> Gap:
        """A sampler in bfloat16, a trainer in float32."""
        model = self.model(family, i)
        lines = self.sample(other_kernels(in_dtype(copy.deepcopy(model), torch.bfloat16), i), Truncation(), i)
        return Gap("bf16", family, model, lines, (), ("dtype",), "", "")

    def stale(self, family: str, i: int, steps: int, how: str) -> Gap:
        """Older weights: given as a checkpoint, shown by versions, or neither."""
        model = self.model(family, i)
        if how != "versions":
            lines = self.sample(model, Truncation(), i)
            older = (model,) if how == "older" else ()
            return Gap("stale", family, trained(model, lines, steps, i), lines, older, ("staleness",), "", f"{steps}, {how}")
        lines, newest = [], model
        for version in range(4):
            some = sampled(newest, Truncation(), 100 * i + version, rows=max(3, self.rows // 3), length=self.length)
            lines += [{**line, "weights_version": version} for line in some]
            if version < 3:
                newest = trained(newest, some, steps, i + version)
        return Gap("stale", family, newest, lines, (), ("staleness",), "", f"{steps}, {how}")

    def shift(self, family: str, i: int, how: str) -> Gap:
        """Log-probs moved by one."""
        model = self.model(family, i)
        lines = self.sample(model, Truncation(), i)
        shifted(lines, model, how)
        return Gap("shift", family, model, lines, (), ("shift",), "", how)

    def base(self, family: str, i: int, base: float) -> Gap:
        """A sampler with another rope base."""
        model = self.model(family, i)
        lines = self.sample(other_kernels(with_base(model, base), i), Truncation(), i)
        return Gap("rope base", family, model, lines, (), ("structure",), "base", f"{base:g}")


def all_gaps(maker: Maker) -> list[tuple[str, Callable[[], Gap]]]:
    """One hundred gaps of nine kinds, each made when its function is called."""
    draw, names = random.Random(maker.seed), list(FAMILIES)
    made: list[tuple[str, Callable[[], Gap]]] = []

    def add(kind: str, make: Callable[[str, int], Gap], i: int) -> None:
        family = names[i % len(names)]
        made.append((kind, lambda: make(family, 1000 * maker.seed + i)))

    def with_settings(kind: str, i: int, how: Truncation) -> None:
        narrow, recorded = i // 3 % 3 == 2, i % 4 == 0
        add(kind, lambda f, i: maker.settings(kind, f, i, how, narrow=narrow, recorded=recorded), i)

    for i in range(12):
        how = Truncation(temperature=round(draw.choice((draw.uniform(0.5, 0.9), draw.uniform(1.1, 1.6))), 2))
        with_settings("temperature", i, how)
    for i in range(12):
        how = Truncation(top_p=round(draw.uniform(0.6, 0.97), 2))
        with_settings("top_p", i, how)
    for i in range(12):
        how = Truncation(top_k=draw.randint(4, 40))
        with_settings("top_k", i, how)
    for i in range(12):
        how = Truncation(min_p=round(draw.uniform(0.01, 0.2), 3))
        with_settings("min_p", i, how)
    for i in range(10):
        add("batch shape", lambda f, i: maker.batch(f, i, torch.float32 if i % 2 else torch.bfloat16), i)
    for i in range(10):
        add("bf16", lambda f, i: maker.bfloat16(f, i), i)
    for i in range(12):
        how = ("older", "versions", "neither")[i // 3 % 3]
        steps = draw.randint(2, 12)
        add("stale", lambda f, i, how=how, steps=steps: maker.stale(f, i, steps, how), i)
    for i in range(10):
        how = ("next", "before", "echo")[i // 3 % 3]
        add("shift", lambda f, i, how=how: maker.shift(f, i, how), i)
    for i in range(10):
        base = (5e5, 1e6, 1e5, round(10 ** draw.uniform(2.5, 6.0)))[i % 4]
        add("rope base", lambda f, i, base=base: maker.base(f, i, float(base)), i)
    return made
