"""Source: what a run trains on, from a text file or from token shards; training/rows.py has labeled rows and pairs,
training/tuning.py chats, completions and preferences.

    text       a tokenizer of the spec's vocabulary size is trained on it; the last 5 % of its tokens are held out
    shards     directories of `dovetail data build`, each with a weight; their tokenizer; documents that were held out

The batch of a step is a pure function of (seed, step), and so are a rank's rows of it: a run resumes at any step, on any number
of ranks.
"""

from __future__ import annotations

import dataclasses as dc
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dovetail.account import longest_length
from dovetail.base.errors import FileError, SpecError
from dovetail.data.bits import bits_per_byte
from dovetail.data.corpora import ShardedTokens
from dovetail.data.corpus import Batch, Corpus, read_corpus
from dovetail.data.loader import Loader, evaluation, rows_of_rank
from dovetail.data.manifest import HELD_OUT
from dovetail.data.stream import Stream
from dovetail.model.model import Model
from dovetail.text.learn import learn
from dovetail.text.tokenizer import Tokenizer

ROWS_NAMED = 16  # of a batch, in a message
EVAL_BATCHES = 8  # of held-out data, at an eval
TokenizerKind = Literal["byte_pair", "wordpiece", "unigram", "characters", "words"]
Note = Callable[[str], None]


class BatchShape(NamedTuple):
    """The shape of a batch, and the share of this rank."""

    batch: int  # sequences of all ranks
    length: int
    seed: int
    rank: int = 0
    ranks: int = 1

    def rows(self) -> slice:
        """This rank's rows of a batch."""
        return rows_of_rank(self.batch, self.rank, self.ranks)


Rows = NDArray[np.int64]  # numbers of rows


@dc.dataclass
class Table:
    """The rows of a file, and values (count, …) that are added to each, by name: a batch has those of its rows as `extra`."""

    make: Callable[[Rows], Batch]  # without what is added
    count: int
    columns: dict[str, Tensor] = dc.field(default_factory=dict)

    def __call__(self, rows: Rows) -> Batch:
        """The batch of some rows."""
        batch = self.make(rows)
        return dc.replace(batch, extra={**batch.extra, **{name: values[rows] for name, values in self.columns.items()}})


class HeldOut(Sequence[Batch]):
    """Batches of held-out rows, made when they are read: what is added to the rows later is in them."""

    def __init__(self, table: Callable[[Rows], Batch], rows: Rows, batch: int) -> None:
        self.table, self.rows, self.batch = table, rows, batch

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch)

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self.table(self.rows[i * self.batch : (i + 1) * self.batch])


class Source(NamedTuple):
    """Batches, held-out batches, and the tokenizer that made them."""

    batch: Callable[[int], Batch]  # of a step: this rank's rows
    held_out: Sequence[Batch]
    tokenizer: Tokenizer | None  # None for images
    name: str  # the files, or the directories
    settings: Mapping[str, Any]  # under the names of flags
    sha256: str  # of the data
    tokens: int  # to train on, or rows: see `unit`
    held_out_tokens: int
    where: Callable[[int], str]  # of a step: the place of its batch in the data, of all ranks
    held_out_bytes: int = 0
    unit: str = "tokens"  # what the two are counted in
    classes: Sequence[str] = ()  # the labels, where they are words
    epoch: int | None = None  # steps after which every row was trained on once, where rows are taken in turn
    table: Table | None = None  # the rows themselves, where they are
    files: Mapping[str, str] = {}  # to write beside the weights, by name: the chat template that the rows were rendered by

    def bits_per_byte(self, loss: float) -> float:
        """The held-out loss, in nats per token, as bits per byte of text."""
        if not math.isfinite(loss):
            return math.nan
        return bits_per_byte(loss, 1, self.held_out_tokens, self.held_out_bytes)

    def recorded(self) -> dict[str, Any]:
        """What identifies the data, and what a held-out loss needs to be compared."""
        found: dict[str, Any] = {"name": self.name, "sha256": self.sha256, f"held_out_{self.unit}": self.held_out_tokens}
        if self.tokenizer is not None:
            found["tokenizer"] = hashlib.sha256(self.tokenizer.to_json().encode()).hexdigest()
        if self.held_out_bytes:
            found["held_out_bytes"] = self.held_out_bytes
        return {**found, "classes": list(self.classes)} if self.classes else found


def from_text(
    path: Path, spec: Model, kind: TokenizerKind | Tokenizer, shape: BatchShape, note: Note, special: Sequence[str] = ()
) -> Source:
    """Train a tokenizer of some kind on a text file, or take one that is given, and sample sequences of the text. `special`
    are tokens that the objective adds."""
    content = read_corpus(path)
    tokenizer, settings = tokenizer_for(path, content, spec, kind, note, special)
    corpus = Corpus.cut(tokenizer.encode(content), shape.length, name=str(path))
    digest = hashlib.sha256(content.encode()).hexdigest()

    def batch(step: int) -> Batch:
        whole = corpus.batch(shape.seed, step, shape.batch, shape.length)
        return whole if shape.ranks == 1 else whole.some_rows(shape.rows())

    return Source(
        batch,
        list(corpus.validation(shape.batch, shape.length, EVAL_BATCHES)),
        tokenizer,
        str(path),
        {"text": str(path), **settings},
        digest,
        len(corpus.train),
        len(corpus.held_out),
        lambda step: named_rows(
            [(str(path), start) for start in corpus.starts(shape.seed, step, shape.batch, shape.length).tolist()]
        ),
        len(tokenizer.decode(corpus.held_out).encode()),
    )


def from_shards(
    places: Sequence[str], spec: Model, shape: BatchShape, masks: bool = True, special: Sequence[str] = ()
) -> Source:
    """Read directories of token shards, `DIR` or `DIR=WEIGHT` each; held-out documents are those of the first. `masks` keeps
    the documents of a row apart; `special` are tokens that the objective adds."""
    pairs = [_weighted(place) for place in places]
    sources = [(ShardedTokens(place), weight) for place, weight in pairs]
    first = sources[0][0]
    for tokens, _ in sources[1:]:
        if tokens.manifest.tokenizer != first.manifest.tokenizer:
            raise FileError(f"{tokens.directory}: its tokenizer is not that of {first.directory}; build both with one")
    tokenizer = Tokenizer.load(first.directory).with_special(special)
    check_vocab(max(tokenizer.size, first.manifest.tokenizer.vocab), spec, str(first.directory), special)
    loader = Loader(
        Stream(sources, shape.length, shape.seed), batch=shape.batch, rank=shape.rank, world=shape.ranks, masks=masks
    )
    held_out = ShardedTokens(first.directory, HELD_OUT)

    def where(step: int) -> str:
        number, start = loader.stream.places(step * shape.batch, shape.batch)
        names = [sources[i][0].name for i in number.tolist()]
        samples = f"of samples {step * shape.batch:,} to {(step + 1) * shape.batch - 1:,}"
        return f"{samples} ({named_rows(list(zip(names, start.tolist(), strict=True)))})"

    return Source(
        lambda step: loader.batch_at(step * shape.batch),
        list(evaluation(held_out, shape.length, shape.batch, most=EVAL_BATCHES, masks=masks)),
        tokenizer,
        ", ".join(str(place) for place, _ in pairs),
        {"data": [f"{place}={weight}" for place, weight in pairs]},
        hashlib.sha256(" ".join(tokens.fingerprint for tokens, _ in sources).encode()).hexdigest(),
        sum(tokens.tokens for tokens, _ in sources),
        held_out.tokens,
        where,
        held_out.bytes,
    )


def corpus_for(specs: Sequence[Model], path: str | Path, tokenizer: Tokenizer | None, length: int, remedy: str) -> Corpus:
    """Return the text of a file, tokenized for models of these specs. `remedy` says what to do about a token that one lacks;
    {size} in it is the size of the tokenizer."""
    if tokenizer is None:
        raise FileError(f"{path}: the model has no tokenizer to read it; load it from a directory with a tokenizer.json")
    ids = tokenizer.encode(read_corpus(Path(path)))
    for spec in specs:
        longest = longest_length(spec)
        if longest is not None and length > longest:
            raise SpecError("--length", f"{length} tokens; the limit of the model is {longest}")
        if len(ids) and int(ids.max()) >= spec.vocab:
            problem = f"the text has token {int(ids.max())}; the vocabulary has {spec.vocab} tokens"
            raise SpecError("vocab", problem, remedy.format(size=tokenizer.size))
    return Corpus.cut(ids, length, name=str(path))


def tokenizer_for(
    path: Path, text: str, spec: Model, kind: TokenizerKind | Tokenizer, note: Note, special: Sequence[str] = ()
) -> tuple[Tokenizer, dict[str, Any]]:
    """Return a tokenizer with the special tokens, and its setting: one of a kind that is trained on the text, or the one that
    is given, of the initial weights, which needs none."""
    if isinstance(kind, Tokenizer):
        tokenizer = kind.with_special(special)
        check_vocab(tokenizer.size, spec, "the initial weights", special)
        return tokenizer, {}
    note(f"{path}: {len(text):,} characters; training a tokenizer of {spec.vocab} tokens")
    return learn(text, spec.vocab - len(special), kind).with_special(special), {"tokenizer": kind}


def check_vocab(size: int, spec: Model, owner: str, special: Sequence[str] = ()) -> None:
    """Raise SpecError where a tokenizer has more tokens than the spec."""
    if size > spec.vocab:
        added = f", with {len(special)} that the objective adds" if special else ""
        raise SpecError("vocab", f"{spec.vocab}; the tokenizer of {owner} has {size} tokens{added}", f"--set vocab={size}")


def named_rows(starts: Sequence[tuple[str, int]]) -> str:
    """The files, and the first token of each row of a batch, for a message."""
    by_file: dict[str, list[int]] = {}
    for name, start in starts[:ROWS_NAMED]:
        by_file.setdefault(name, []).append(start)
    files = "; ".join(f"{name} from tokens {', '.join(map(str, some))}" for name, some in by_file.items())
    return files + (f" and {len(starts) - ROWS_NAMED} more rows" if len(starts) > ROWS_NAMED else "")


def _weighted(place: str) -> tuple[Path, float]:
    """`DIR` or `DIR=WEIGHT`."""
    name, equals, weight = place.rpartition("=")
    if not equals:
        return Path(place), 1.0
    try:
        found = float(weight)
    except ValueError as error:
        raise FileError(f"{place}: {weight!r} is not a weight; give DIR or DIR=WEIGHT") from error
    if not 0 < found < math.inf:
        raise FileError(f"{place}: the weight {weight} is not above 0")
    return Path(name), found
