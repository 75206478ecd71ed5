"""Contextual embeddings: one word in two senses has one row in the table, and hidden states that separate by sense.

    table     E[bank] (width,)                     the same vector in "the bank paid the loan" and "the river bank is wet"
    state     h_l (n, width) after layer l         mixes in the other tokens: two groups of vectors, one per sense

An encoder of two layers learns to fill masked words of a made language. A sentence has a topic, most of its words are of the
topic, and one word, the ambiguous one, is in sentences of both topics. No label says which topic it is. The sense is then read
from the vector of the ambiguous word by the nearest of two centroids, which are from other sentences (Peters et al. 2018;
Devlin et al. 2018; Ethayarajh 2019). Before that a text has to be tokens: five tokenizers of 1,000 tokens are trained on the
help texts of Python and compared on a part that they have not seen, in bytes per token and unknown tokens.

    python recipes/contextual.py [--seeds 3] [--quick] [--out contextual]        a minute on two cores; seconds with --quick
    python recipes/contextual.py --quick --fault unmixed                         the mixers add 0: no context, no senses
"""

from __future__ import annotations

import dataclasses as dc
import sys
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

import dovetail as dt


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    per_topic: int = 16  # words of each topic
    neutral: int = 16  # words of both topics
    length: int = 10
    of_topic: float = 0.5  # the fraction of words that are of the topic
    width: int = 32
    steps: int = 900
    tested: int = 256
    vocab: int = 1000
    characters: int = 150_000  # of the text that tokenizers are trained on


QUICK = Setup(steps=300, characters=60_000)
MASK, AMBIGUOUS, FIRST = 0, 1, 2  # token ids: the mask, the word with two senses, the first word of the first topic
KINDS = ("characters", "byte_pair", "unigram", "wordpiece", "words")
BLUE, ORANGE, GREY = "#2f5fb3", "#d9822b", "#8a90a0"


def sentences(setup: Setup, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Ids (count, length), the topic of each, and the position of its ambiguous word."""
    topic = torch.randint(2, (count,), generator=draw)
    shape, neutral = (count, setup.length), FIRST + 2 * setup.per_topic
    word = FIRST + setup.per_topic * topic[:, None] + torch.randint(setup.per_topic, shape, generator=draw)
    other = torch.randint(neutral, neutral + setup.neutral, shape, generator=draw)
    ids = torch.where(torch.rand(shape, generator=draw) < setup.of_topic, word, other)
    position = torch.randint(setup.length, (count,), generator=draw)
    ids[torch.arange(count), position] = AMBIGUOUS
    return ids, topic, position


def train(setup: Setup, seed: int) -> dt.Transformer:
    """An encoder that predicts masked words."""
    spec = dt.from_yaml(
        f"{{width: {setup.width}, vocab: {FIRST + 2 * setup.per_topic + setup.neutral},"
        " layers: [{repeat: 2, mixer: {kind: attention, heads: 4, mask: full}, ffn: {hidden: 64}}]}"
    )
    model, draw = dt.build(spec, seed=seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 0.005)
    for step in range(setup.steps):
        ids, _, _ = sentences(setup, 64, draw)
        masked = torch.rand(ids.shape, generator=draw) < 0.2
        loss = model.loss(torch.where(masked, MASK, ids), torch.where(masked, ids, -100))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"  seed {seed}, step {step}: loss {loss.detach():.3f}", file=sys.stderr, flush=True)
    return model


def sense_accuracy(vectors: Tensor, topic: Tensor) -> float:
    """The accuracy of the nearest centroid, which are those of the first half of the sentences, on the other half."""
    half = len(vectors) // 2
    centroids = torch.stack([vectors[:half][topic[:half] == sense].mean(0) for sense in (0, 1)])
    # a tie is no answer: each sense has half of it
    near = torch.cdist(vectors[half:].double(), centroids.double())
    margin = near[:, 0] - near[:, 1]
    right = torch.where(margin.abs() < 1e-5, 0.5, ((margin > 0).long() == topic[half:]).double())
    return float(right.mean())


def cosine_gap(vectors: Tensor, topic: Tensor) -> float:
    """The mean cosine of two occurrences of one sense, less that of two of different senses."""
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    cosine, same = unit @ unit.T, topic[:, None] == topic
    return float(cosine[same & ~torch.eye(len(topic), dtype=torch.bool)].mean() - cosine[~same].mean())


def tokenizers(setup: Setup, seed: int) -> dict[str, tuple[float, float]]:
    """Bytes per token, and the fraction of tokens that are unknown, of each kind on a tenth of the text."""
    names = sorted(topics)
    held_out = "\n".join(topics[name] for name in names[seed::10])
    text = "\n".join(topics[name] for number, name in enumerate(names) if number % 10 != seed % 10)[: setup.characters]
    result = dict[str, tuple[float, float]]()
    for kind in KINDS:
        tokenizer = dt.learn_tokenizer(text, setup.vocab, kind)
        ids = tokenizer.encode(held_out)
        unknown = [number for number in range(3) if "unknown" in tokenizer.label(number)]
        missing = sum(int((ids == number).sum()) for number in unknown)
        result[kind] = len(held_out.encode()) / len(ids), missing / len(ids)
    return result


Figures = dict[str, tuple[float, float | None, float | None]]


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Train the encoder and read the senses at each depth; train and compare the tokenizers."""
    model = train(setup, seed)
    ids, topic, position = sentences(setup, setup.tested, torch.Generator().manual_seed(10**6 + seed))
    patch = {"layers.*.mixer_add": 0.0} if fault == "unmixed" else {}
    run = model.trace(ids, "embedded", "layers.*.after_ffn", patch=patch)
    rows = torch.arange(len(ids))
    table, first, last = [states[rows, position] for states in run.values()]
    figures: Figures = {
        "table: largest difference between two occurrences": (float((table - table[0]).abs().max()), None, 1e-6),
        "table: accuracy of the sense": (sense_accuracy(table, topic), 0.45, 0.55),
        "layer 0: accuracy of the sense": (sense_accuracy(first, topic), None, None),
        "layer 1: accuracy of the sense": (sense_accuracy(last, topic), 0.9, None),
        "layer 1: cosine within a sense − between senses": (cosine_gap(last, topic), 0.1, None),
    }
    pieces = tokenizers(setup, seed)
    size, unknown = ({kind: values[index] for kind, values in pieces.items()} for index in (0, 1))
    figures |= {f"{kind}: bytes per token": (size[kind], None, None) for kind in KINDS}
    figures |= {
        "byte_pair: bytes per token ÷ characters": (size["byte_pair"] / size["characters"], 2.0, None),
        "byte_pair and unigram: unknown tokens": (unknown["byte_pair"] + unknown["unigram"], None, 0.0),
        "words: fraction of unknown tokens": (unknown["words"], 0.02, None),
    }
    return figures, (table, last, topic, pieces)


def projected(vectors: Tensor) -> Tensor:
    """(n, 2) the first two principal components."""
    centered = vectors - vectors.mean(0)
    return centered @ torch.linalg.svd(centered, full_matrices=False).Vh[:2].T


def draw(figure, runs: list[Any]) -> None:
    """Draw the vectors of the ambiguous word of the first seed, and the tokenizers."""
    before, after, tokens = figure.subplots(1, 3, width_ratios=(2, 2, 3))
    table, last, topic, pieces = runs[0]
    for panel, vectors, title in (
        (before, table - table.mean(0), "the word's row of the table"),
        (after, last, "its states after layer 1"),
    ):
        points = projected(vectors)
        for sense, color in enumerate((BLUE, ORANGE)):
            panel.scatter(*points[topic == sense].T, s=8, color=color, label=f"topic {sense}")
        panel.set(title=title, xlabel="first component", ylabel="second component")
    before.set(xlim=(-1, 1), ylim=(-1, 1), xticks=(-1, 0, 1), yticks=(-1, 0, 1))
    after.legend(frameon=False)
    for number, kind in enumerate(KINDS):
        size, unknown = pieces[kind]
        tokens.barh(number, size, color=BLUE if not unknown else GREY)
        tokens.text(size, number, f" {size:.2f}" + (f", {unknown:.1%} unknown" if unknown else ""), va="center")
    tokens.set(
        yticks=range(len(KINDS)), yticklabels=KINDS, xlabel="bytes per token", title="tokenizers of 1,000 tokens", xlim=(0, 7)
    )


RECIPE = dt.Recipe(experiment, draw, full=Setup(), quick=QUICK, faults={"unmixed": "layer 1: accuracy of the sense"})

if __name__ == "__main__":
    sys.exit(RECIPE.main())
