"""Give a small random model opinions: a clear top-1 token at every position, so that rounding does not change it.

    logits = model(tokens)        top-1 of position i is π(token i)

π is a random permutation of the vocabulary, or the identity where a tied table cannot express one.

A random model's two best logits are often closer than the rounding of bfloat16, so that a comparison of greedy tokens is a coin
toss. Here all weights are random first (norms and biases as well, whose initial values hide bugs), then trained for a few steps
on random tokens, until the margin of the top-1 token is several times the distance of bfloat16 from float32. Where that takes
long, since a branch amplifies rounding, layers train no more, and their matrices that write to the residual stream are halved.
"""

from __future__ import annotations

import dataclasses as dc
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import DovetailError
from dovetail.hf.tensors import ties_of
from dovetail.model.construction import build, generator
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.spec.fold import declared, over_vocab

BATCH, LENGTH, EVERY, MOST_STEPS = 12, 20, 20, 800
# rows and tokens, and the margin over the largest difference between bfloat16 and float32 (below 2 a token may flip): a few
# positions often, and many before a model passes, since one in some thousand may be less clear
EXAMINED, CONFIRMED = ((8, 64), 5.0), ((64, 64), 2.5)
RATE, PATIENCE, HALVED_EVERY = 0.01, 300, 40
STARTS = 3  # random weights to begin with: one in some thousand does not settle


@dc.dataclass(frozen=True)
class Opinion:
    """How clear the top-1 tokens of a model are."""

    margin: float  # the least difference of the two largest logits
    rounding: float  # the largest difference of a logit between bfloat16 and float32
    steps: int  # of training


def with_peaked_logits(spec: Model, seed: int = 0) -> tuple[ModelModule, Opinion | None]:
    """Build a model with random weights and opinions, a function of (spec, seed). Without an opinion where the model has no
    logits over a vocabulary. Raises DovetailError where no clear margin is reached, from any of a few random weights."""
    last = None
    for start in range(STARTS):
        model = build(spec, seed=seed)
        randomize(model, seed, start)
        if not predicts_tokens(spec):
            return model, None
        clear, last = _trained(model, seed)
        if clear:
            return model.requires_grad_(True), last
    raise DovetailError(f"no clear margin of the top-1 token after {MOST_STEPS} steps ({last}); try another seed")


def _trained(model: ModelModule, seed: int) -> tuple[bool, Opinion]:
    """Train the model; return whether its opinions became clear, and how clear they are."""
    spec = model.part
    target = torch.randperm(spec.vocab, generator=generator(seed, "opinions"))
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    opinion = Opinion(0.0, 0.0, 0)
    for step in range(MOST_STEPS + 1):
        inputs = RandomInputs.random(spec, seed, step)
        if step % EVERY == 0:
            for size, safety in (EXAMINED, CONFIRMED):
                fresh = RandomInputs.random(spec, seed, -1 - step, *size)
                opinion, right = examine(model, fresh, target, step)
                if not (right and opinion.margin >= safety * opinion.rounding):
                    break
            else:
                return True, opinion
            if step >= PATIENCE and (step - PATIENCE) % HALVED_EVERY == 0:
                halve_branches(model)
                target = torch.arange(spec.vocab) if table_alone(spec) else target
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(inputs.run(model).flatten(0, -2), target[inputs.tokens].flatten()).backward()
        optimizer.step()
    return False, opinion


def predicts_tokens(spec: Model) -> bool:
    """Whether the head has logits over the vocabulary."""
    return spec.embed.causal() and "head" in over_vocab(spec)


def table_alone(spec: Model) -> bool:
    """Whether the head's only matrix is the embedding's table."""
    matrices = [d.path for d in declared(spec) if d.path.startswith("head.") and d.weight.inp]
    return matrices == ["head.out.weight"] and "head.out.weight" in ties_of(spec)


@torch.no_grad()
def randomize(model: ModelModule, seed: int, start: int = 0) -> None:
    """Random weights far from their initial values, each a function of (seed, start, path): vectors near their initial value,
    matrices of unit gain."""
    for d in declared(model.part):
        if d.weight.stored and not d.weight.buffer:
            weight = tensor_at(model, d.path)
            noise = torch.randn(weight.shape, generator=generator(seed, d.path + f", start {start}" * (start > 0)))
            weight.copy_(weight + 0.2 * noise if weight.dim() == 1 else noise / sqrt(weight.shape[-1]))


@torch.no_grad()
def halve_branches(model: ModelModule) -> None:
    """Halve every matrix of a layer that writes to the residual stream, and train layers no more."""
    for d in declared(model.part):
        if "layers." in d.path and d.weight.stored and not d.weight.buffer:
            weight = tensor_at(model, d.path)
            weight.requires_grad_(False)
            if d.weight.out[-1:] == ("embed",) and d.weight.inp:
                weight.mul_(0.5)


@dc.dataclass(frozen=True)
class RandomInputs:
    """Random tokens, and a random source for an encoder."""

    tokens: Tensor
    source: Tensor | None

    @classmethod
    def random(cls, spec: Model, seed: int, index: int, batch: int = BATCH, length: int = LENGTH) -> RandomInputs:
        """Tokens (batch, length), a function of (seed, index)."""
        draws = generator(seed, f"tokens {index}")
        tokens = torch.randint(spec.vocab, (batch, length), generator=draws)
        source = None if spec.encoder is None else torch.randint(spec.encoder.vocab, (batch, length + 3), generator=draws)
        return cls(tokens, source)

    def run(self, model: ModelModule) -> Tensor:
        """The logits (batch, length, vocab)."""
        ctx = Ctx(layout=_whole(self.tokens))
        if self.source is not None:
            output, layout = model.encode(self.source, Ctx(layout=_whole(self.source)))
            ctx = dc.replace(ctx, encoder_output=output, encoder_layout=layout)
        return model(self.tokens, ctx)


def _whole(tokens: Tensor) -> TokenLayout:
    return TokenLayout.whole(tokens.shape[0], tokens.shape[1])


@torch.no_grad()
def examine(model: ModelModule, inputs: RandomInputs, target: Tensor, steps: int) -> tuple[Opinion, bool]:
    """The least margin of the top-1 token and the rounding of bfloat16; and whether every top-1 token is the one intended."""
    logits, rounded = inputs.run(model), inputs.run(in_bfloat16(model)).to(torch.float32)
    best, tokens = logits.topk(2, -1)
    margin, rounding = (best[..., 0] - best[..., 1]).min().item(), (logits - rounded).abs().max().item()
    return Opinion(margin, rounding, steps), bool((tokens[..., 0] == target[inputs.tokens]).all())


@torch.no_grad()
def in_bfloat16(model: ModelModule) -> ModelModule:
    """The same model in bfloat16, with its constants computed anew."""
    rounded = build(model.part, dtype=torch.bfloat16)
    rounded.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()})
    return rounded
