"""The translation recipe of 2017, whole: post-norm, sinusoidal positions, label smoothing, warm-up, and beam search.

    x ← LayerNorm(x + f(x))                                           after attention, cross-attention and ReLU feed-forward
    loss = −Σ_w q_w log p_w        q = 1 − ε on the right word, ε / vocabulary on every word                          ε = 0.1
    lr   = peak · min(t / T, √(T / t))                                T steps of warm-up, then the inverse square root
    score(y) = Σ log p(yᵢ | y₁ … yᵢ₋₁) / n                            beam search keeps the b best unfinished translations

The languages are made. Verbs stand last in the target, after the object; adjectives follow their noun and agree with it in
gender and number; the verb agrees with the subject, also if a noun of another number is nearer ("the dogs near the cat saw").
Every sentence can be said in two ways: after `ya` each noun has one spelling, after `so` any of three. Half of the verbs take
`so` more often, yet the most probable sentence always begins with `ya`. Greedy search takes the more probable first word, a
beam the more probable sentence; the reference is the most probable translation.          Vaswani et al. 2017; Szegedy et al.
2016 (label smoothing); Papineni et al. 2002 (BLEU)

    python recipes/translate_2017.py [--seeds 3] [--quick] [--out translate_2017]   minutes on two cores; seconds with --quick
    python recipes/translate_2017.py --quick --fault unordered                      no positions in the encoder: the goals fail
"""

from __future__ import annotations

import dataclasses as dc
import math
import random
import sys
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import dovetail as dt

Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold
NOUNS = {"dog": "tulo", "cat": "miro", "bird": "pavo", "horse": "reno", "queen": "sela", "river": "duna", "star": "luna"}
ADJECTIVES = {"big": "gran", "old": "vet", "red": "rub", "wise": "sap"}
VERBS = {"saw": "vid", "heard": "aud", "found": "trov", "met": "renk", "loved": "ama", "feared": "tim"}
OFTEN_SO = {"saw", "found", "loved"}  # these verbs begin with `so` in 6 of 10 sentences, the others in 3
ENDINGS = ("k", "p", "x")  # of a noun after `so`
ATTENTION = "heads: 4, position: none, bias: true, out_bias: true"
SIDE = """width: %d, vocab: %d, embed: {kind: tokens, scale_by_width: true}, norm: null, dropout: %g, position: %s, head: %s,
init: {kind: normal, spread: 0.05}, layers: [{repeat: 2, wire: {kind: post_norm, dropout: %g}, norm: layernorm,
ffn: {kind: mlp, act: relu, hidden: %d}, mixer: {%s, mask: %s}%s}]"""


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    width: int = 64
    steps: int = 900
    batch: int = 96
    peak: float = 3e-3  # learning rate, after a tenth of the steps
    dropout: float = 0.1
    smoothing: float = 0.1
    tested: int = 96  # sentences that training has not seen
    beams: tuple[int, ...] = (1, 2, 4, 8)
    goal: float = 0.9  # of exact matches with four beams


QUICK = Setup(width=48, steps=220, batch=64, peak=5e-3, tested=24, beams=(1, 4), goal=0.7)
BEAMS = 4  # of the figures


class Noun(NamedTuple):
    """A noun with what stands beside it."""

    word: str
    plural: bool
    adjective: str = ""
    near: tuple[str, bool] | None = None  # another noun, and whether it is plural


class Sentence(NamedTuple):
    """Who did what to whom."""

    subject: Noun
    verb: str
    object: Noun


def sentence(draw: random.Random) -> Sentence:
    """A random sentence."""

    def noun(near: bool) -> Noun:
        other = (draw.choice(list(NOUNS)), draw.random() < 0.5) if near and draw.random() < 0.5 else None
        adjective = draw.choice(list(ADJECTIVES)) if draw.random() < 0.5 else ""
        return Noun(draw.choice(list(NOUNS)), draw.random() < 0.5, adjective, other)

    return Sentence(noun(True), draw.choice(list(VERBS)), noun(False))


def source(said: Sentence) -> str:
    """The sentence in the first language: subject, verb, object."""

    def phrase(noun: Noun) -> str:
        near = f" near the {noun.near[0]}{'s' * noun.near[1]}" if noun.near else ""
        return f"the {noun.adjective} {noun.word}{'s' * noun.plural}{near}".replace("  ", " ")

    return f"{phrase(said.subject)} {said.verb} {phrase(said.object)}"


def target(said: Sentence, draw: random.Random | None = None) -> str:
    """The sentence in the second language: subject, object, verb; the most probable translation, or one that is drawn."""
    often = draw is not None and draw.random() < (0.6 if said.verb in OFTEN_SO else 0.3)

    def spelled(word: str, plural: bool) -> str:
        return NOUNS[word] + "n" * plural + (draw.choice(ENDINGS) if often and draw else "")

    def phrase(noun: Noun) -> list[str]:
        agreed = ADJECTIVES[noun.adjective] + NOUNS[noun.word][-1] + "n" * noun.plural if noun.adjective else ""
        near = [spelled(*noun.near), "apud"] if noun.near else []
        return [*near, spelled(noun.word, noun.plural), agreed]

    verb = VERBS[said.verb] + ("ent" if said.subject.plural else "et")
    return " ".join(word for word in ["so" if often else "ya", *phrase(said.subject), *phrase(said.object), verb] if word)


def bleu(translations: list[str], references: list[str]) -> float:
    """Corpus BLEU: min(1, e^{1 − r/c}) times the geometric mean of the clipped precisions of 1 to 4 words."""
    both, logs = [(one.split(), other.split()) for one, other in zip(translations, references, strict=True)], 0.0
    for n in range(1, 5):
        grams = [[Counter(zip(*(words[i:] for i in range(n)), strict=False)) for words in pair] for pair in both]
        matches = sum((one & other).total() for one, other in grams)
        logs += math.log(max(matches, 1e-9) / max(sum(one.total() for one, _ in grams), 1)) / 4
    words, expected = (sum(len(pair[side]) for pair in both) for side in (0, 1))
    return min(1.0, math.exp(1 - expected / max(words, 1))) * math.exp(logs)


def build(setup: Setup, seed: int, fault: str | None, tokenizer: Any) -> dt.Transformer:
    """The encoder–decoder of 2017, with a vocabulary of both languages."""

    def side(position: str, head: str, mask: str, cross: str) -> str:
        sizes = setup.width, tokenizer.size, setup.dropout, position, head, setup.dropout, 4 * setup.width
        return SIDE % (*sizes, ATTENTION, mask, cross)

    encoder = side("none" if fault == "unordered" else "sinusoidal", "null", "full", "")
    cross = ", cross: {kind: cross_attention, heads: 4, bias: true, out_bias: true}"
    decoder = side("sinusoidal", "{kind: lm, tied: false}", "causal", cross)
    return dt.build(f"{{encoder: {{{encoder}}}, {decoder}}}", seed=seed, tokenizer=tokenizer)


def padded(rows: list[Tensor], value: int = 0) -> Tensor:
    """(rows, n), padded on the right."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def train(setup: Setup, model: dt.Transformer, tokenizer: Any, tested: set[str], seed: int) -> list[float]:
    """Train on drawn sentences, without those that are tested; return the loss of each step."""
    draw, warmup, losses = random.Random(seed), setup.steps // 10, list[float]()
    optimizer = torch.optim.Adam(model.parameters(), setup.peak, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / warmup, math.sqrt(warmup / (t + 1))))
    torch.manual_seed(seed)  # of dropout
    encode, end = tokenizer.encode, torch.tensor([tokenizer.id_of("<|end|>")])
    for step in range(setup.steps):
        said = [one for one in (sentence(draw) for _ in range(setup.batch)) if source(one) not in tested]
        sources, targets = [encode(source(one)) for one in said], [encode(target(one, draw)) for one in said]
        mask = padded([torch.ones_like(row) for row in sources])
        inputs = padded([torch.cat([end, row]) for row in targets])
        labels = padded([torch.cat([row, end]) for row in targets], -100)
        model.train()
        logits = model(inputs, source=padded(sources), source_mask=mask)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=setup.smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 100 == 99:
            print(f"  seed {seed}, step {step + 1}: loss {losses[-1]:.3f}", file=sys.stderr, flush=True)
    model.eval()
    return losses


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Train on drawn translations; translate other sentences with more and more beams."""
    draw = random.Random(10**6 + seed)
    said = [sentence(draw) for _ in range(setup.tested)]
    references = [target(one) for one in said]
    shown = [sentence(draw) for _ in range(4000)]
    words = {word for one in shown for text in (source(one), target(one, draw)) for word in text.split()}
    tokenizer = dt.learn_tokenizer(" ".join(sorted(words) * 3), 600, "wordpiece")
    model = build(setup, seed, fault, tokenizer)
    losses = train(setup, model, tokenizer, {source(one) for one in said}, seed)
    texts = {beams: [dt.generate(model, source(one), beams=beams, max_tokens=16).text for one in said] for beams in setup.beams}
    scores = {beams: bleu(found, references) for beams, found in texts.items()}
    matches = {beams: [one == other for one, other in zip(found, references, strict=True)] for beams, found in texts.items()}
    exact = {beams: sum(hits) / len(hits) for beams, hits in matches.items()}

    def agreement(found: list[str], attracted: bool) -> float:
        """The fraction of verbs of the right word and number, where a noun of another number is nearer or where none is."""
        rows = [
            text.split()[-1:] == right.split()[-1:]
            for one, text, right in zip(said, found, references, strict=True)
            if attracted == bool(one.subject.near and one.subject.near[1] != one.subject.plural)
        ]
        return sum(rows) / len(rows)

    figures: Figures = {
        f"exact match, {BEAMS} beams": (exact[BEAMS], setup.goal, None),
        f"BLEU, {BEAMS} beams": (scores[BEAMS], setup.goal, None),
        "exact match, greedy": (exact[1], 0.2, 0.75),
        f"exact match gained by {BEAMS} beams": (exact[BEAMS] - exact[1], 0.15, None),
        f"BLEU gained by {BEAMS} beams": (scores[BEAMS] - scores[1], 0.1, None),
        "verb agrees, a noun of another number nearer": (agreement(texts[BEAMS], True), setup.goal, None),
        "verb agrees, elsewhere": (agreement(texts[BEAMS], False), setup.goal, None),
    }
    longest = max(said, key=lambda one: len(source(one)))
    drawn, tap = (source(longest), target(longest)), "layers.1.cross.pattern"
    read, written = (tokenizer.encode(text) for text in drawn)
    inputs = torch.cat([torch.tensor([tokenizer.id_of("<|end|>")]), written[:-1]])
    pattern = model.trace(inputs[None], tap, source=read[None])[tap][0].mean(0)
    return figures, {"losses": losses, "bleu": scores, "exact": exact, "pattern": pattern, "texts": drawn}


def draw(figure: Any, runs: list[Any]) -> None:
    """Draw BLEU and exact match by beams, the loss, and what the words of one translation attend to."""
    beams, losses, pattern = figure.subplots(1, 3, width_ratios=[3, 3, 3.6])
    for run in runs:
        for name, label, color in (("bleu", "BLEU", "#2f5fb3"), ("exact", "exact match", "#d9822b")):
            label = label if run is runs[0] else None
            beams.plot(list(run[name]), list(run[name].values()), color=color, marker="o", ms=3, lw=1.3, label=label)
        losses.plot(run["losses"], color="#2f5fb3", lw=0.8)
    beams.set(xlabel="beams", xscale="log", ylim=(0, 1.03), title="against the most probable translation")
    beams.set_xticks(list(runs[0]["bleu"]), map(str, runs[0]["bleu"]))
    beams.minorticks_off()
    beams.legend(frameon=False, loc="lower right")
    losses.set(xlabel="step", ylabel="nats per token", title="loss, labels smoothed")
    pattern.imshow(runs[0]["pattern"], cmap="Blues", vmin=0)
    read, written = (text.split() for text in runs[0]["texts"])
    pattern.set_xticks(range(len(read)), read, rotation=60, ha="right")
    pattern.set_yticks(range(len(written)), written)
    pattern.set(title="cross-attention, mean of the heads")


RECIPE = dt.Recipe(
    experiment, draw, full=Setup(), quick=QUICK, faults={"unordered": f"exact match, {BEAMS} beams"}, size=(13, 4.2)
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
