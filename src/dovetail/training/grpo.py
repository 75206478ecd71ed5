"""GRPO: the model answers each prompt several times; answers better than the mean of their group become more probable.

    Aᵢ = (rᵢ − mean r) / (std r + 1e-4)                    over the `group` answers of one prompt; r: a verifiable reward
    ρₜ = π(yₜ | …) / π_old(yₜ | …)                         π_old: as the token was sampled, by this model in this process
    loss = Σₜ −min(ρₜ A, clip(ρₜ, 1 ± ε) A) + kl·(e^(log π₀ − log π) − (log π₀ − log π) − 1)       over all answer tokens
                                             Shao et al. 2024; the mean over tokens of Yu et al. 2025 (DAPO); Schulman 2020

Sampler and trainer are one model, so π_old is the log-prob that the sampler had: it is not computed again. Decoding and a whole
pass round differently, by no more than law 21's bound. The rollouts of a step are a function of (seed, step) and the weights,
so that a killed run resumes to the same weights. With kl > 0 a copy of the initial weights, in the precision of the run, stays
in memory; it reads the same pieces of a batch as the model, so that the divergence of the first step is 0.

Shapes: tokens, labels, old (batch, n); advantages (batch,). batch = prompts × group.
"""

from __future__ import annotations

import copy
import dataclasses as dc
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dovetail.base.errors import UsageError
from dovetail.data.chats import PromptRow, read_prompts
from dovetail.data.corpus import Batch
from dovetail.data.rows import held_out_rows
from dovetail.model.model import Model, ModelModule
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.text.conversation import Conversation, Encoded
from dovetail.training.objective import NOT_A_SETTING, Setup, TuningData, context
from dovetail.training.rollout import SampledAnswer, checked, reward_named, roll_out
from dovetail.training.rows import FRACTION, row_source
from dovetail.training.source import BatchShape, Note, Rows, Source, check_vocab
from dovetail.training.step import seed_of
from dovetail.training.tuning import TuningObjective, packed_batch, turn_encoder

EPSILON = 1e-4  # added to the standard deviation of rewards
HELD_OUT = 1_000_003  # added to the seed of held-out rollouts


@dc.dataclass(frozen=True)
class Sampler:
    """Prompts, and how they are answered and rewarded."""

    prompts: list[PromptRow]
    ids: list[list[int]]
    tokenizer: Any
    stop: frozenset[int]
    reward: Any
    group: int
    max_tokens: int
    temperature: float
    length: int

    def answers(self, model: ModelModule, rows: Rows, group: int, seed: int) -> list[SampledAnswer]:
        """Sample `group` answers to each of some prompts."""
        chosen = [self.ids[row] for row in rows]
        return roll_out(model, chosen, group, self.max_tokens, self.temperature, self.stop, seed)

    def rewards(self, rows: Rows, rollouts: list[SampledAnswer], group: int) -> Tensor:
        """(rows · group,) the rewards of answers."""
        values = list[float]()
        for i, rollout in enumerate(rollouts):
            one = self.prompts[rows[i // group]]
            prompt = str(one.prompt.messages[-1]["content"]) if isinstance(one.prompt, Conversation) else one.prompt
            values.append(checked(self.reward, prompt, self.tokenizer.decode(rollout.tokens), one.fields, one.where))
        return torch.tensor(values)

    def batch(self, model: ModelModule, rows: Rows, seed: int) -> Batch:
        """The batch of rollouts of some prompts."""
        rollouts = self.answers(model, rows, self.group, seed)
        rewards = self.rewards(rows, rollouts, self.group)
        encoded = [_encoded(self.ids[rows[i // self.group]], one) for i, one in enumerate(rollouts)]
        tokens, labels, layout = packed_batch([[one] for one in encoded], self.length)
        old = torch.zeros(labels.shape)
        old[labels != IGNORED] = torch.tensor([value for rollout in rollouts for value in rollout.log_probs])
        extra = {"advantages": advantages(rewards, self.group), "old": old}
        figures = {"reward": float(rewards.mean()), "answer_tokens": float((labels != IGNORED).sum() / len(labels))}
        return Batch(tokens, labels, layout, extra=extra, figures=figures)


def advantages(rewards: Tensor, group: int) -> Tensor:
    """(rows,) how much better each answer is than the mean of its group, in standard deviations."""
    grouped = rewards.view(-1, group)
    return ((grouped - grouped.mean(-1, keepdim=True)) / (grouped.std(-1, keepdim=True) + EPSILON)).flatten()


@dc.dataclass(frozen=True)
class Grpo(TuningObjective):
    """Group relative policy optimization."""

    name, task = "grpo", "answering with a higher reward"
    settings = ("template", "reward", "group", "max_tokens", "temperature")
    tuning_rate: ClassVar[float] = 1e-6

    clip_ratio: float = 0.2  # ε: how far the ratio of a token may move
    kl: float = 0.0  # weight of the divergence from the initial weights
    sampler: Sampler | None = dc.field(default=None, metadata=NOT_A_SETTING)
    first: Any = dc.field(default=None, metadata=NOT_A_SETTING)  # the model with its initial weights, where kl > 0

    def token_losses(self, policy: Tensor, old: Tensor, advantages: Tensor, reference: Tensor | None) -> Tensor:
        """(batch, n) the loss of each token, from log-probs (batch, n) and advantages (batch, 1)."""
        ratio = (policy - old).exp()
        losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - self.clip_ratio, 1 + self.clip_ratio) * advantages)
        if reference is None or self.kl == 0:
            return losses
        apart = reference - policy
        return losses + self.kl * (apart.exp() - apart - 1)

    def __call__(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
        assert self.sampler is not None, "a run prepares the objective"
        ctx = context(batch, seed, training)
        policy = model.log_probs(batch.tokens, batch.labels, ctx, self.sampler.temperature)
        wanted = batch.labels != IGNORED
        reference = None if self.first is None else self._log_probs(self.first, batch)
        old, scale = batch.extra["old"].to(policy.dtype), batch.extra["advantages"].to(policy.dtype)[:, None]
        losses = self.token_losses(policy, old, scale, reference)
        count = wanted.sum()
        return LossSum(losses.masked_fill(~wanted, 0).sum() + ctx.with_added(losses.new_zeros(())) * count, count)

    @torch.no_grad()
    def _log_probs(self, model: ModelModule, batch: Batch) -> Tensor:
        assert self.sampler is not None, "a run prepares the objective"
        return model.log_probs(batch.tokens, batch.labels, context(batch, 0, False), self.sampler.temperature)

    def evaluate(self, model: ModelModule, batch: Batch, seed: int) -> dict[str, LossSum]:
        """The mean reward of one answer per held-out prompt; the `loss` is its negative."""
        assert self.sampler is not None, "a run prepares the objective"
        rows = batch.extra["row"].cpu().numpy()
        rewards = self.sampler.rewards(rows, self.sampler.answers(model, rows, 1, seed + HELD_OUT), 1)
        count = torch.tensor(len(rewards))
        return {"loss": LossSum(-rewards.sum(), count), "reward": LossSum(rewards.sum(), count)}

    def prepare(self, source: Source, setup: Setup) -> tuple[Self, Source]:
        if setup.ranks.count > 1:
            raise UsageError("grpo: samples and trains in one process; run it on one rank")
        assert source.table is not None, "a source of rows"
        assert isinstance(source.table.make, PromptBatches), "a source of prompts"
        sampler = source.table.make.sampler
        with setup.computing():  # the copies that it computes with, so that the reference has the precision of the model
            first = copy.deepcopy(setup.model).requires_grad_(False).eval() if self.kl else None
        prompts = source.batch

        def batch(step: int) -> Batch:
            rows = prompts(step).extra["row"].numpy()
            with setup.computing():
                return sampler.batch(setup.model, rows, seed_of(setup.seed, step))

        return dc.replace(self, sampler=sampler, first=first), source._replace(batch=batch)

    @classmethod
    def read(cls, path: Path, spec: Model, shape: BatchShape, note: Note, data: TuningData) -> Source:
        options = data.options
        group, max_tokens = int(options.get("group", 8)), int(options.get("max_tokens", 64))
        temperature = float(options.get("temperature", 1.0))
        if group < 2 or shape.batch % group:
            raise UsageError(f"--group: {group} answers per prompt do not divide a batch of {shape.batch}; give 2 or more")
        if temperature <= 0:
            raise UsageError(f"--temperature: {temperature} is not above 0; GRPO samples")
        encoder = turn_encoder(data.vocabulary, options.get("template"), data.origin)
        check_vocab(encoder.tokenizer.size, spec, data.origin)
        prompts, sha256 = read_prompts(path)
        ids = encoder.prompts([prompt.prompt for prompt in prompts])
        kept = [i for i, one in enumerate(ids) if len(one) + max_tokens <= shape.length]
        if len(kept) < len(ids):
            what = (
                f"{len(ids) - len(kept):,} of {len(ids):,} prompts leave no room for {max_tokens:,} tokens in {shape.length:,}"
            )
            if not kept:
                raise UsageError(f"--length: {what}; give a larger --length")
            note(f"{path}: {what}, and are left out")
        prompts, ids = [prompts[i] for i in kept], [ids[i] for i in kept]
        stop, reward = frozenset({encoder.end}) | encoder.stop, reward_named(options.get("reward"))
        sampler = Sampler(prompts, ids, encoder.tokenizer, stop, reward, group, max_tokens, temperature, shape.length)
        settings = {"chats": str(path)}
        parts, fewer = held_out_rows(len(ids), FRACTION), shape._replace(batch=shape.batch // group)
        names = [prompt.where for prompt in prompts]
        return row_source(path, PromptBatches(sampler), *parts, fewer, encoder.tokenizer, settings, sha256, names)


@dc.dataclass(frozen=True)
class PromptBatches:
    """Makes the batch of some prompts, whose answers are sampled when it is trained on."""

    sampler: Sampler

    def __call__(self, rows: Rows) -> Batch:
        """Tokens (batch, n) of the prompts, and their rows."""
        examples = [Encoded(np.array(self.sampler.ids[row]), np.zeros(len(self.sampler.ids[row]), bool)) for row in rows]
        tokens, labels, layout = packed_batch([[example] for example in examples], self.sampler.length)
        return Batch(tokens, labels, layout, extra={"row": torch.from_numpy(np.asarray(rows))})


def _encoded(prompt: list[int], rollout: SampledAnswer) -> Encoded:
    ids = np.array([*prompt, *rollout.tokens], np.int64)
    return Encoded(ids, np.arange(len(ids)) >= len(prompt))
