"""Streaming without end: what a KV cache of fixed size may forget, and what it must keep.

    document     h x₁ x₂ x₃ …      h names one of a few languages; x(t+1) = πₕ(x(t)) with probability k, else any symbol
    cache        h . . . │ dropped │ the last tokens           sinks: the first four and a window
                         │ dropped │ the last tokens           oldest: a window
                 h . .     .    .     . . . . . . .            attended: what collected the most attention, and the newest half

Every token attends to the first one, as in large models, where the first tokens collect attention that goes nowhere else and a
window without them collapses (Xiao et al. 2023, StreamingLLM). A model this small has no reason to do so; here the first token
says which language it is, so each token has one. The model is trained on documents of 64 tokens and reads 50,000. The loss is
compared with that by the probabilities that the document was drawn from, the least there is. A full cache fails past the length
of training, since its distances are new; a window forgets h; a cache that keeps h at a distance no larger than itself goes on
for ever. H2O (Zhang et al. 2023) finds h by itself, by the attention that it gets.

    python recipes/stream_forever.py [--seeds 3] [--quick] [--out stream_forever]     minutes on two cores
    python recipes/stream_forever.py --quick --fault sinks_dropped                    the first tokens are evicted: a goal fails
"""

from __future__ import annotations

import dataclasses as dc
import gc
import itertools
import math
import sys
from typing import Any

import torch
from torch import Tensor

import dovetail as dt

POLICIES = {"oldest": "#d9822b", "attended": "#8a90a0", "sinks": "#2f5fb3"}


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    symbols: int = 16
    languages: int = 4
    keep: float = 0.8  # how often a token follows from the one before it
    trained: int = 64  # tokens of a document in training
    length: int = 50_000  # tokens of the stream
    full: int = 2_000  # tokens that are read with a full cache
    entries: int = 24  # of the cache
    steps: int = 300
    batch: int = 64
    lr: float = 0.005


QUICK = Setup(length=1_000, full=400, steps=80, batch=48)


class Languages:
    """Permutations of the symbols, one per language, and documents of them."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.draw = setup, torch.Generator().manual_seed(seed)
        self.next = torch.stack([torch.randperm(setup.symbols, generator=self.draw) for _ in range(setup.languages)])

    def documents(self, rows: int, length: int, shuffled: bool = False) -> tuple[Tensor, Tensor]:
        """Ids (rows, length) and their languages (rows,); `shuffled`: the fault, which names any language."""
        setup, draw = self.setup, self.draw
        language = torch.randint(setup.languages, (rows,), generator=draw)
        named = torch.randint(setup.languages, (rows,), generator=draw) if shuffled else language
        ids = torch.randint(setup.symbols, (rows, length), generator=draw)
        follows = torch.rand(rows, length, generator=draw) < setup.keep
        for t in range(2, length):
            ids[:, t] = torch.where(follows[:, t], self.next[language, ids[:, t - 1]], ids[:, t])
        ids[:, 0] = setup.symbols + named
        return ids, language

    def least(self, ids: Tensor, language: Tensor) -> Tensor:
        """The loss (rows, n − 1) of each next token by the probabilities that the document was drawn from."""
        other = (1 - self.setup.keep) / self.setup.symbols
        before = ids[:, :-1].clamp_max(self.setup.symbols - 1)
        likely = self.next[language[:, None], before] == ids[:, 1:]
        likely[:, 0] = False  # the first symbol is any
        losses = torch.where(likely, -math.log(self.setup.keep + other), -math.log(other))
        losses[:, 0] = math.log(self.setup.symbols)
        return losses


def train(setup: Setup, data: Languages, seed: int, shuffled: bool) -> dt.Transformer:
    """A model of one layer."""
    spec = dt.from_yaml(
        f"{{width: 64, vocab: {setup.symbols + setup.languages}, head: {{kind: lm, tied: false}},"
        " layers: [{mixer: {heads: 2}, ffn: {hidden: 256}}]}"
    )
    model = dt.build(spec, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), setup.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, setup.lr, setup.steps, pct_start=0.1)
    for step in range(setup.steps):
        ids, language = data.documents(setup.batch, setup.trained, shuffled)
        loss = model.loss(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            say(f"seed {seed}, step {step}: loss {loss.item():.3f}, least {data.least(ids, language).mean().item():.3f}")
    return model


def live_bytes() -> int:
    """The bytes of all tensors that Python holds now."""
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def stream(model: dt.Transformer, ids: Tensor, what: str, **evict: Any) -> tuple[Tensor, list[int]]:
    """The loss (n − 1,) of each token of a long document, and the bytes in memory along it."""
    sizes = list[int]()

    def watch(done: int, of: int) -> None:
        if done == of or len(sizes) < 10 * done // of:
            sizes.append(live_bytes())
            say(f"{what}: {done:,} of {of:,} tokens")

    return model.losses(ids, watch=watch, **evict)[0], sizes


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[dict[str, tuple[float, float | None, float | None]], Any]:
    """Train, then read one long document with each policy."""
    data = Languages(setup, seed)
    model = train(setup, data, seed, shuffled=fault == "shuffled")
    ids, language = data.documents(1, setup.length, shuffled=fault == "shuffled")
    least = data.least(ids, language)[0]
    curves = {"a full cache": stream(model, ids[:, : setup.full], "a full cache")[0]}
    sizes = list[int]()
    for policy in POLICIES:
        chosen = "oldest" if fault == "sinks_dropped" and policy == "sinks" else policy
        curves[policy], sizes = stream(model, ids, policy, evict=chosen, evict_to=setup.entries)
    excess = {name: curve - least[: len(curve)] for name, curve in curves.items()}
    last = {name: float(curve[-len(curve) // 5 :].mean()) for name, curve in excess.items()}
    figures = {
        "sinks and a window, last fifth: loss above the least": (last["sinks"], None, 0.12),
        "least attended evicted (H2O), last fifth: loss above the least": (last["attended"], None, 0.12),
        "oldest evicted, last fifth: loss above the least": (last["oldest"], 0.5, None),
        "a full cache, last fifth: loss above the least": (last["a full cache"], 0.3, None),
        "bytes of memory per token read (sinks); 4 are its loss": ((sizes[-1] - sizes[0]) / (0.9 * setup.length), None, 6.0),
    }
    return figures, {"excess": excess, "trained": setup.trained, "entries": setup.entries}


def draw(figure: Any, runs: list[Any]) -> None:
    """The loss above the least by position, the mean of groups of tokens that grow with the position."""
    axes = figure.subplots(1, 1)
    for run in runs:
        for name, curve in run["excess"].items():
            edges = torch.unique(torch.logspace(math.log10(4), math.log10(len(curve)), 26).long()).tolist()
            spans = list(itertools.pairwise(edges))
            means = [float(curve[a:b].mean()) for a, b in spans]
            style = "--" if name == "a full cache" else "-" if name != "attended" else ":"
            label = name if run is runs[0] else None
            width = 3.5 if name == "attended" else 1.8
            middles = [math.sqrt(a * b) for a, b in spans]
            axes.plot(middles, means, style, color=POLICIES.get(name, "#333333"), label=label, linewidth=width, alpha=0.85)
    axes.set_xscale("log")
    axes.axvline(runs[0]["entries"], color="#cccccc", linewidth=1)
    axes.axvline(runs[0]["trained"], color="#cccccc", linewidth=1)
    top = axes.get_ylim()[1]
    axes.text(runs[0]["entries"], top, " entries of the cache", rotation=90, va="top", ha="right", fontsize=8, color="#777777")
    axes.text(runs[0]["trained"], top, " length of training", rotation=90, va="top", ha="right", fontsize=8, color="#777777")
    axes.set_xlabel("position in the stream")
    axes.set_ylabel("loss above the least\nnats per token")
    axes.set_title("A window that forgets the first token never recovers; one that keeps it streams for ever")
    axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.4), frameon=False)


def say(text: str) -> None:
    """Progress."""
    print(f"  {text}", file=sys.stderr, flush=True)


RECIPE = dt.Recipe(
    experiment,
    draw,
    full=Setup(),
    quick=QUICK,
    faults={
        "sinks_dropped": "sinks and a window, last fifth: loss above the least",
        "shuffled": "least attended evicted (H2O), last fifth: loss above the least",
    },
    size=(9, 4.2),
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
