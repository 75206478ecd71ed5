"""Objectives: from a model and a batch to a loss, passed to the training loop.

    next_token     −log p(xᵢ₊₁ | x₁ … xᵢ)                                    causal models
    MaskedTokens   −log p(xᵢ | the text with some tokens masked)             bidirectional models (Devlin et al. 2018)
    seq2seq        −log p(yᵢ₊₁ | y₁ … yᵢ, source)                            encoder–decoders
    classify       −log p(class | x)                                         heads with one output per row

Those of text alone for encoder–decoders are in training/denoising.py, those of pairs in training/pairs.py and
training/pairs.py, that of tags in training/tagging.py; a spec's choice among them is in training/task.py. With depths of
multi-token prediction (`mtp`), their loss is added in training.

Shapes: tokens, labels (batch, n); source (batch, m); classes (batch,). Padding never counts in a loss.
"""

from __future__ import annotations

import dataclasses as dc
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor

from dovetail.base.errors import SpecError, UsageError, names_or_nearest
from dovetail.data.corpus import Batch
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.draws import Draws
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.nn.random import draw, streams, words
from dovetail.spec.fold import over_vocab
from dovetail.text.tokenizer import MASK, Tokenizer

if TYPE_CHECKING:
    from dovetail.decoding.generation import Vocabulary
    from dovetail.model.transformer import Transformer
    from dovetail.training.ranks import JobRanks
    from dovetail.training.source import BatchShape, Note, Source, TokenizerKind

NOT_A_SETTING = {"setting": False}  # the metadata of a field that a run sets itself
STREAMS = ("masked tokens", "random tokens")
LARGEST = 700.0  # nats whose exponential is finite
Reads = Literal["text", "task", "labels", "tags", "pairs", "chats"]
SEQUENCES: frozenset[Reads] = frozenset({"text", "task"})  # of which every row has `length` tokens, and no epoch ends
RunSide = Callable[[Tensor, Tensor, Ctx], Tensor]  # tokens, labels and the Ctx of one side of a batch -> (batch, …)


class TuningData(NamedTuple):
    """What decides how tuning rows are read, beside their file: the tokenizer and chat template of a model, and settings."""

    vocabulary: Vocabulary
    origin: str  # the model directory
    options: Mapping[str, Any]


class Setup(NamedTuple):
    """A run before its first step."""

    model: Transformer  # with its initial weights
    place: Path | None  # the run directory
    seed: int
    ranks: JobRanks
    computing: Callable[[], AbstractContextManager[Any]]  # the context in which the model runs in the run's precision
    load: Callable[[str | Path], Transformer]  # the model of a directory


class Objective(ABC):
    """(model, batch, seed, training) -> LossSum. Every random number comes from `seed`; dropout is applied in training only."""

    name: ClassVar[str]
    task: ClassVar[str]  # "predicting the next token"
    reads: ClassVar[Reads] = "text"  # the data that it is trained on
    generates: ClassVar[bool] = (
        False  # whether the model learns to continue a prompt: every token is predicted from those before
    )
    packs: ClassVar[bool] = True  # whether a row may hold several documents
    tuning_rate: ClassVar[float] = 2e-5  # the learning rate at which all weights of a pretrained model are tuned
    # the part that may replace one of the initial weights, and is then initialized anew
    fresh: ClassVar[str | None] = None
    settings: ClassVar[tuple[str, ...]] = ()  # of how its data is read; its fields are the settings of the loss
    by_row: ClassVar[bool] = True  # whether the loss of a batch is the sum over its rows: pieces of a batch, and ranks, add up

    @abstractmethod
    def __call__(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
        """Return the loss of the batch summed over its labels, and their number."""

    def evaluate(self, model: ModelModule, batch: Batch, seed: int) -> dict[str, LossSum]:
        """Return the `loss` of a held-out batch, and other sums with their counts, by name."""
        return {"loss": self(model, batch, seed, False)}

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics beside the loss, from the means of what `evaluate` returned for all held-out batches."""
        return {name: mean for name, mean in means.items() if name != "loss"}

    @classmethod
    def check(cls, spec: Model) -> None:
        """Raise SpecError unless the spec can be trained by it."""
        raise NotImplementedError

    @classmethod
    def of(cls, spec: Model, tokenizer: Tokenizer | None, length: int) -> Self:
        """Return the objective for a spec, its tokenizer and sequences of `length` tokens."""
        return cls()

    @classmethod
    def spec_for(cls, spec: Model) -> Model:
        """The spec that is trained, from that of the initial weights: a reward model has another head."""
        return spec

    @classmethod
    def read(cls, path: Path, spec: Model, shape: BatchShape, note: Note, data: TuningData) -> Source:
        """Read a file of tuning rows, for objectives that read `chats`."""
        raise NotImplementedError

    @classmethod
    def read_pairs(cls, path: Path, spec: Model, kind: TokenizerKind | Tokenizer, shape: BatchShape, note: Note) -> Source:
        """Read a file of pairs of texts, for objectives that read `pairs`; the tokenizer is given, or of a kind to train."""
        raise NotImplementedError

    def configured(self, options: Mapping[str, Any]) -> Self:
        """The objective with settings by name; raise UsageError for one that it does not have."""
        fields = [field.name for field in dc.fields(self) if field.metadata != NOT_A_SETTING] if dc.is_dataclass(self) else []
        for name in options:
            if name not in (*fields, *self.settings):
                known = names_or_nearest(name, [*fields, *self.settings], "settings")
                raise UsageError(f"--{name.replace('_', '-')}: {self.name} has no such setting; {known}")
        own = {name: value for name, value in options.items() if name in fields}
        return cast(Self, dc.replace(cast(Any, self), **own)) if own else self

    def prepare(self, source: Source, setup: Setup) -> tuple[Self, Source]:
        """What is done once before the first step, with the model as it starts: a resumed run does it, too, before its
        checkpoint is restored. Return the objective and the source to train with."""
        return self, source

    @classmethod
    def special(cls, length: int) -> tuple[str, ...]:
        """The special tokens that it adds to a tokenizer, for sequences of `length` tokens."""
        return ()

    def generation(self) -> dict[str, int]:
        """The content of generation_config.json: the first and the last token of what the model generates."""
        return {}


class Labeled(Objective):
    """An objective whose loss is that of the model's head on labels, one per token or one per row."""

    accuracy: ClassVar[bool] = True  # whether `evaluate` also counts the labels that are the most probable answer

    def arguments(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> tuple[Tensor, Tensor, Ctx]:
        """Return what `model.loss_sum` takes: tokens, labels and the Ctx."""
        return batch.tokens, batch.labels, context(batch, seed, training)

    def __call__(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
        return model.loss_sum(*self.arguments(model, batch, seed, training))

    def evaluate(self, model: ModelModule, batch: Batch, seed: int) -> dict[str, LossSum]:
        if not self.accuracy:
            return super().evaluate(model, batch, seed)
        return with_accuracy(model.loss_and_hits(*self.arguments(model, batch, seed, False)))


class ByToken(Labeled):
    """An objective whose loss is a sum over tokens, each with its label: rows can be cut, and a batch sent through stages."""


def perplexity(means: Mapping[str, float]) -> float:
    """The perplexity: e to the mean loss."""
    return math.exp(min(means["loss"], LARGEST))


def context(batch: Batch, seed: int, training: bool) -> Ctx:
    """Return the Ctx of a batch."""
    # auxiliary losses (balance of experts) are part of training; held-out data is measured by the objective alone
    return Ctx(layout=batch.layout, draws=Draws(seed) if training else None, losses=Losses() if training else None)


class PairSide(NamedTuple):
    """One of the two texts of each row, and its labels if it has some."""

    tokens: Tensor
    labels: Tensor
    layout: TokenLayout


def sides(batch: Batch) -> tuple[PairSide, PairSide]:
    """The two texts of each row of a batch: its tokens and its source."""
    assert batch.source is not None, "a batch of two texts per row has a source"
    assert batch.source_layout is not None, "a batch of two texts per row has the layout of its source"
    labels = batch.extra.get("source_labels", batch.labels)
    return PairSide(batch.tokens, batch.labels, batch.layout), PairSide(batch.source, labels, batch.source_layout)


def run_side(batch: Batch, side: PairSide, seed: int, training: bool, run: RunSide) -> tuple[Tensor, Tensor]:
    """What `run` computes of one side, and the losses that parts add to the pass, ()."""
    ctx = context(dc.replace(batch, layout=side.layout), seed, training)
    found = run(side.tokens, side.labels, ctx)
    return found, ctx.with_added(found.new_zeros(()))


def run_sides(
    batch: Batch, both: tuple[PairSide, PairSide], seed: int, training: bool, run: RunSide
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """What `run` computes of both sides, and the mean of the losses that parts add to the two passes."""
    (first, added), (second, more) = (run_side(batch, side, seed, training, run) for side in both)
    return (first, second), torch.stack([added, more]).mean()


def with_accuracy(found: tuple[LossSum, Tensor]) -> dict[str, LossSum]:
    """The loss, and the fraction of labels that are the most probable answer."""
    loss, hits = found
    return {"loss": loss, "accuracy": LossSum(hits.float(), loss.num_labels)}


def _without_padding(labels: Tensor, batch: Batch) -> Tensor:
    return labels.masked_fill(~batch.layout.real, IGNORED)


def check_reads_pairs(spec: Model, what: str) -> None:
    """Raise SpecError for a spec that is not an encoder–decoder of text, whose encoder reads `what`."""
    check_reads_text(spec)
    if spec.encoder is None:
        raise SpecError("encoder", f"there is none to read {what}", "use a preset with one: t5-tiny")
    if "embed" not in over_vocab(spec.encoder):
        raise SpecError("encoder.embed", f"{spec.encoder.embed.kind} does not read tokens", "--set encoder.embed=tokens")
    if spec.order() != "causal":
        raise SpecError("layers", "the next token of the target is visible to a bidirectional decoder", "use a causal mask")


def check_reads_text(spec: Model) -> None:
    """Raise SpecError unless the spec reads tokens and predicts them."""
    tokens = over_vocab(spec)
    if "embed" not in tokens:
        raise SpecError("embed", f"{spec.embed.kind} does not read tokens", "--set embed=tokens")
    if "head" not in tokens:
        raise SpecError("head", "training on text needs logits over the vocabulary at every position", "--set head=lm")
    if spec.order() == "ahead":
        raise SpecError("layers", "a prefix mask shows later tokens, which are the labels", "use a causal mask")


class NextToken(ByToken):
    """Language modeling: labels (batch, n) are the tokens shifted by one."""

    name, task, generates = "next_token", "predicting the next token", True
    accuracy = False

    def arguments(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> tuple[Tensor, Tensor, Ctx]:
        return batch.tokens, _without_padding(batch.labels, batch), context(batch, seed, training)

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        return {"perplexity": perplexity(means)}

    @classmethod
    def check(cls, spec: Model) -> None:
        check_reads_text(spec)
        if spec.encoder is not None:
            raise SpecError("encoder", "the next token of a text needs no source", "use the objective span_corruption")
        if spec.order() != "causal":
            raise SpecError("layers", "the next token is visible to a bidirectional model", "use the objective masked_tokens")


class Classify(Labeled):
    """Classification: labels (batch,) are one class per row, of text or of an image."""

    name, task, reads = "classification", "predicting the class", "labels"

    @classmethod
    def check(cls, spec: Model) -> None:
        if spec.encoder is not None:
            raise SpecError("encoder", "a class is predicted from one input, which has no source", "use a spec without one")
        if spec.head is None or not spec.head.pools() or spec.head.criterion != "cross_entropy":
            remedy = '--set "head={kind: classifier, classes: 10}"'
            raise SpecError("head", "classification needs logits over classes, one per row", remedy)


class Seq2Seq(Labeled):
    """Sequence to sequence. Tokens are the target behind its start token; the source is encoded first."""

    name, task = "seq2seq", "predicting the target from the source"

    def arguments(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> tuple[Tensor, Tensor, Ctx]:
        """Return tokens, labels and the Ctx with the encoder output."""
        assert batch.source is not None, "a seq2seq batch has a source"
        assert batch.source_layout is not None, "a seq2seq batch has the layout of its source"
        ctx = context(batch, seed, training)
        encoder_output, encoder_layout = model.encode(batch.source, dc.replace(ctx, layout=batch.source_layout))
        ctx = dc.replace(ctx, encoder_output=encoder_output, encoder_layout=encoder_layout)
        return batch.tokens, _without_padding(batch.labels, batch), ctx

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        return {"perplexity": perplexity(means), **super().metrics(means)}


@dc.dataclass(frozen=True)
class MaskedTokens(ByToken):
    """Masked language modeling. A fraction of the tokens is predicted; of these most are replaced by the mask, some by random
    tokens, and some stay, so that the model learns from tokens that it sees, too."""

    name, task = "masked_tokens", "predicting masked tokens"

    mask: int  # the id of the mask token
    vocab: int  # random tokens are drawn from 0 … vocab − 1
    fraction: float = 0.15  # of all tokens that are predicted
    masked: float = 0.8  # of those: replaced by the mask
    replaced: float = 0.1  # of those: replaced by a random token

    def arguments(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> tuple[Tensor, Tensor, Ctx]:
        """Return the corrupted tokens, and as labels those that were chosen; the labels of the batch are not used."""
        return *self.corrupt(batch.tokens, batch.layout, seed), context(batch, seed, training)

    def corrupt(self, tokens: Tensor, layout: TokenLayout, seed: int) -> tuple[Tensor, Tensor]:
        """Return the input of the model (batch, n) and its labels (batch, n): −100 where a token is not predicted."""
        bits, other = (draw(s, layout.sample, layout.order) for s in streams(torch.tensor(seed), STREAMS))
        first, choice = (word * 2.0**-32 for word in words(bits))
        chosen, random = (first < self.fraction) & layout.real, words(other)[0] % self.vocab
        inputs = torch.where(chosen & (choice < self.masked), self.mask, tokens)
        replaced = chosen & (choice >= self.masked) & (choice < self.masked + self.replaced)
        inputs = torch.where(replaced, random, inputs)
        return inputs, tokens.masked_fill(~chosen, IGNORED)

    @classmethod
    def check(cls, spec: Model) -> None:
        check_reads_text(spec)
        if spec.encoder is not None:
            raise SpecError("encoder", "masked tokens are predicted in place, without a decoder", "use the objective denoising")
        if spec.order() != "both":
            raise SpecError("layers", "a causal model does not see the tokens after a mask", "--set layers.*.mixer.mask=full")

    @classmethod
    def of(cls, spec: Model, tokenizer: Tokenizer | None, length: int) -> Self:
        assert tokenizer is not None, "text has a tokenizer"
        return cls(mask=tokenizer.id_of(MASK), vocab=tokenizer.size)


next_token, seq2seq, classify = NextToken(), Seq2Seq(), Classify()
