"""A small serving engine in numpy with the mechanisms of large ones, in which public bugs can be seeded by number.

Pages of 16 tokens with a prefix cache (salted; a recurrent state is checkpointed at the end of each page), prefill in chunks,
continuous batching over padded rows, prompt scoring, per-request generators, n-gram speculation, aborts that free pages.

    x_t = e(token) + attention over (k, v) of pages + h_t W,   h_t = 0.9 h_(t-1) + s(token),   logits = x W_out

Noise is that of bfloat16 engines, as measured: a function of the text and of the shape of the computation (rows in the batch,
cached tokens, chunks), so that a repeat is equal and anything else is not.
"""

from __future__ import annotations

import dataclasses as dc
import queue
import threading
import time
from collections import OrderedDict
from typing import Any

import numpy as np

VOCAB, WIDTH, PAGE, CHUNK = 96, 16, 16, 64
PAGES = 160
RECENT = 0.3  # per token: by how much nearer tokens score higher
PACE = 0.004  # seconds per step with several rows: neighbors still run when a request arrives on a busy machine


class Noise:
    """Moves logits as rounding does: `exact` not at all, `float32` by 1e-6, `bfloat16` as vLLM on a small model (largest
    difference of a log-prob 0.075), `heavy` as a 0.5 B model (sd 0.05, p95 0.11, max 0.48)."""

    def __init__(self, profile: str) -> None:
        draw, size = np.random.default_rng(77), (4093, VOCAB)
        self.profile = profile
        self.table = {
            "exact": lambda: np.zeros((1, VOCAB)),
            "float32": lambda: 1e-6 * draw.standard_normal(size),
            "bfloat16": lambda: 0.009 * draw.standard_normal(size),
            "heavy": lambda: draw.laplace(0, 0.025, size),
        }[profile]()

    def __call__(self, logits: np.ndarray, text: int, shape: tuple[int, ...]) -> np.ndarray:
        moved = logits + self.table[hash((text, shape)) % len(self.table)]
        return rounded(moved) if self.profile == "bfloat16" else moved.round(9)  # the order of sums in numpy is not seen


def rounded(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16, to nearest."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32).astype(np.float64)


class Weights:
    def __init__(self) -> None:
        draw = np.random.default_rng(5)
        self.embed, self.state = draw.standard_normal((VOCAB, WIDTH)), 0.35 * draw.standard_normal((VOCAB, WIDTH))
        self.q, self.k, self.v, self.h = (draw.standard_normal((WIDTH, WIDTH)) / 4 for _ in range(4))
        self.v = self.v * 3
        self.positions = 0.7 * np.sin(np.arange(1024)[:, None] / 5 ** (np.arange(WIDTH)[None] / 4) + np.arange(WIDTH)[None])
        self.out = draw.standard_normal((WIDTH, VOCAB)) * 0.22


@dc.dataclass(eq=False)
class Sequence:
    """One running request."""

    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    salt: str = ""
    seed: int | None = None
    echo: bool = False
    listed: int = 0  # prompts that arrive together
    tokens: list[int] = dc.field(default_factory=list)  # prompt and generated
    pages: list[int] = dc.field(default_factory=list)
    state: np.ndarray = dc.field(default_factory=lambda: np.zeros(WIDTH))
    done: int = 0  # tokens whose k, v are written
    cached: int = 0
    chunks: int = 0
    aborted: bool = False
    scores: list[np.ndarray] = dc.field(default_factory=list)
    events: queue.Queue[Any] = dc.field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.random = np.random.default_rng(self.seed)


class Engine:
    """Steps all running sequences together; `bugs` are numbers of the table in docs/servers.md."""

    def __init__(self, bugs: set[str] | None = None, noise: str = "bfloat16", speculate: bool = False) -> None:
        self.bugs, self.noise, self.speculate = bugs or set(), Noise(noise), speculate
        self.w = Weights()
        self.k, self.v = np.zeros((PAGES, PAGE, WIDTH)), np.zeros((PAGES, PAGE, WIDTH))
        self.checkpoints = np.zeros((PAGES, WIDTH))
        self.free = list(range(PAGES))
        self.users = [0] * PAGES
        self.cache: OrderedDict[tuple[str, tuple[int, ...]], int] = OrderedDict()
        self.keys: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.stale: set[int] = set()  # pages that an abort freed
        self.last_scores: list[np.ndarray] = []
        self.shared_random = np.random.default_rng()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.wake = threading.Condition()
        self.stopped = False
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def submit(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            sequence.listed = len(sequences)
        with self.wake:
            self.waiting += sequences
            self.wake.notify()

    def close(self) -> None:
        with self.wake:
            self.stopped = True
            self.wake.notify()
        self.thread.join()

    def _loop(self) -> None:
        while True:
            with self.wake:
                while not (self.waiting or self.running or self.stopped):
                    self.wake.wait()
                if self.stopped:
                    return
                arrived, self.waiting = self.waiting, []
            for sequence in arrived:
                self._admit(sequence)
            self.running += arrived
            self._step()
            if len(self.running) > 1:
                time.sleep(PACE)

    # -- pages and the prefix cache

    def _admit(self, s: Sequence) -> None:
        hit = [] if s.echo and "1" not in self.bugs else self._hit(s)
        for page in hit:
            self.users[page] += 1
            if page in self.free:
                self.free.remove(page)
        s.pages, s.cached = list(hit), len(hit) * PAGE
        s.done = s.cached
        if not hit:
            return
        index = len(hit) - 1
        if "2" in self.bugs:
            index = min(s.cached // (2 * PAGE), index)  # the block size of another group of layers
        if "16" in self.bugs:
            index = index // 2
        if "3" in self.bugs and self.speculate:
            index = max(0, index - 1)
        s.state = self.checkpoints[hit[index]].copy()

    def _hit(self, s: Sequence) -> list[int]:
        """The pages of the longest cached prefix that leaves at least one token to compute."""
        pages = []
        for end in range(PAGE, len(s.prompt), PAGE):
            page = self.cache.get((s.salt, tuple(s.prompt[:end])))
            if page is None:
                break
            pages.append(page)
        return pages

    def _page(self) -> int:
        page = self.free.pop(0)
        key = self.keys.get(page)
        if key is not None and not ("15" in self.bugs and page in self.stale):
            del self.keys[page]
            self.cache.pop(key, None)
        self.users[page] = 1
        return page

    def _release(self, s: Sequence) -> None:
        for page in s.pages:
            self.users[page] -= 1
            if self.users[page] == 0:
                if s.aborted and "15" in self.bugs:
                    self.stale.add(page)
                    self.free.insert(0, page)
                else:
                    self.free.append(page)

    def _write(self, s: Sequence, end: int, decoding: bool) -> None:
        """Compute k, v and the state of the tokens up to `end`."""
        w, begin = self.w, s.done
        ids = s.tokens[begin:end]
        places = np.arange(begin, end) - (s.cached if "22a" in self.bugs else 0)
        x = w.embed[ids]
        k, v = (x + w.positions[places]) @ w.k, x @ w.v
        if decoding and "17" in self.bugs and end > 96:
            k, v = np.round(k * 1.5) / 1.5, np.round(v * 0.75) / 0.75  # an 8-bit cache without its scale
        for i, token in enumerate(ids):
            place = begin + i
            if place % PAGE == 0:
                s.pages.append(self._page())
            page = s.pages[place // PAGE]
            self.k[page, place % PAGE], self.v[page, place % PAGE] = k[i], v[i]
            s.state = 0.9 * s.state + w.state[token]
            if (place + 1) % PAGE == 0:
                self.checkpoints[page] = s.state
                key = (s.salt, tuple(s.tokens[: place + 1]))
                if place < len(s.prompt) and key not in self.cache and self.users[page] == 1:
                    self.cache[key], self.keys[page] = page, key
                    self.stale.discard(page)
        s.done = end
        filled = end % PAGE
        if "5" in self.bugs and not decoding and end == len(s.prompt) and 0 < filled <= PAGE // 2:
            self.v[s.pages[-1], filled // 2 :] = 0  # the tail begins too early
            self.k[s.pages[-1], filled // 2 :] = 0

    def _kv(self, s: Sequence) -> tuple[np.ndarray, np.ndarray]:
        pages = list(s.pages)
        if "14" in self.bugs and s.done == len(s.prompt) == 64:
            pages[3] = pages[0]
        return self.k[pages].reshape(-1, WIDTH)[: s.done], self.v[pages].reshape(-1, WIDTH)[: s.done]

    # -- a step

    def _step(self) -> None:
        batch, ready = [s for s in self.running if s.events.qsize() < 64], list[tuple[Sequence, bool]]()
        for s in batch:
            if s.done < len(s.prompt):
                end = min(s.done + CHUNK, len(s.prompt))
                if s.echo:
                    self._score(s)
                self._write(s, end, False)
                s.chunks += 1
                if s.done == len(s.prompt):
                    ready.append((s, True))
            else:
                self._write(s, len(s.tokens), True)
                ready.append((s, False))
        if ready:
            for (s, first), logits in zip(ready, self._logits(ready), strict=True):
                self._take(s, self._noisy(s, logits, len(batch), first), first, batch)
        for s in [s for s in self.running if s.aborted or len(s.tokens) - len(s.prompt) >= s.max_tokens]:
            self.running.remove(s)
            s.events.put(None)
            self._release(s)

    def _noisy(self, s: Sequence, logits: np.ndarray, rows: int, first: bool) -> np.ndarray:
        text, shape = hash(tuple(s.tokens[: s.done])), (min(rows, 8), s.cached if first else 0, s.chunks if first else 0, first)
        if "10" in self.bugs and rows > 44:
            return logits + 0.003 * np.random.default_rng(abs(text)).standard_normal(VOCAB)
        return self.noise(logits, text, shape)

    def _logits(self, ready: list[tuple[Sequence, bool]]) -> np.ndarray:
        """(rows, vocab): attention of the last token of each row over left-padded k, v."""
        kv = [self._kv(s) for s, _ in ready]
        longest, rows = max(len(k) for k, _ in kv), len(kv)
        k, v, mask = np.zeros((rows, longest, WIDTH)), np.zeros((rows, longest, WIDTH)), np.full((rows, longest), -np.inf)
        for r, (key, value) in enumerate(kv):
            k[r, longest - len(key) :], v[r, longest - len(key) :], mask[r, longest - len(key) :] = key, value, 0
        if "19" in self.bugs:
            mask[:] = 0
        if "22b" in self.bugs:
            mask[:] = mask[0]
        if "7" in self.bugs and rows > 1:
            v = np.roll(v, 1, 0)
        last = np.array([s.tokens[s.done - 1] for s, _ in ready])
        places = np.array([s.done - 1 for s, _ in ready])
        x = self.w.embed[last]
        scores = np.einsum("rd,rnd->rn", (x + self.w.positions[places]) @ self.w.q, k) + mask
        scores += RECENT * np.arange(1 - longest, 1)
        out = np.stack([self._attend(s, first, scores[r], v[r]) for r, (s, first) in enumerate(ready)])
        states = np.stack([s.state for s, _ in ready])
        if "19" in self.bugs:  # tokens of padding have passed through the recurrent state before those of the row
            pads = np.array([longest - len(key) for key, _ in kv])[:, None]
            states = states + 0.9 ** (longest - pads) * (1 - 0.9**pads) / 0.1 * self.w.state[0]
        return (x + out + states @ self.w.h) @ self.w.out

    def _attend(self, s: Sequence, first: bool, scores: np.ndarray, v: np.ndarray) -> np.ndarray:
        if "6" in self.bugs and first and s.chunks > 1:  # each chunk is normalized by itself, and none is merged
            cuts = range(CHUNK, len(scores), CHUNK)
            return np.mean([softmax(a) @ b for a, b in zip(np.split(scores, cuts), np.split(v, cuts), strict=True)], 0)
        return softmax(scores) @ v

    def _score(self, s: Sequence) -> None:
        """The log-probs (vocab,) of each prompt token given those before it."""
        if s.scores:
            return
        w, ids = self.w, s.prompt
        x, places = w.embed[ids], np.arange(len(ids))
        k, v = (x + w.positions[places]) @ w.k, x @ w.v
        scores = ((x + w.positions[places]) @ w.q) @ k.T + np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
        scores += RECENT * (places[None] - places[:, None])
        states, state = [], np.zeros(WIDTH)
        for token in ids:
            state = 0.9 * state + w.state[token]
            states.append(state)
        logits = (x + softmax(scores) @ v + np.stack(states) @ w.h) @ w.out
        noisy = [self.noise(row, hash(tuple(ids[: i + 1])), (0, 0, 1)) for i, row in enumerate(logits)]
        s.scores = [log_softmax(row) for row in noisy]
        if "1" in self.bugs and s.cached:
            s.scores[: s.cached] = self.last_scores[: s.cached]
        if "4" in self.bugs and self.speculate and len(ids) % 2 == 0:
            s.scores = s.scores[1:] + s.scores[-1:]
        self.last_scores = s.scores

    # -- sampling and speculation

    def _take(self, s: Sequence, logits: np.ndarray, first: bool, batch: list[Sequence]) -> None:
        self._emit(s, self._sample(s, logits, batch), logits)
        if not (self.speculate and s.temperature == 0):
            return
        for draft in self._drafts(s):
            if len(s.tokens) - len(s.prompt) >= s.max_tokens:
                return
            self._write(s, len(s.tokens), True)
            verified = self._noisy(s, self._logits([(s, False)])[0], 1, False)
            best = int(verified.argmax())
            accepted = best == draft
            self._emit(s, draft if "9" in self.bugs else best, verified)
            if not accepted:
                return

    def _drafts(self, s: Sequence) -> list[int]:
        """Up to three tokens that followed the last two tokens where they stood before."""
        tokens = s.tokens
        for i in range(len(tokens) - 3, 0, -1):
            if tokens[i - 1 : i + 1] == tokens[-2:]:
                return tokens[i + 1 : i + 4]
        return []

    def _sample(self, s: Sequence, logits: np.ndarray, batch: list[Sequence]) -> int:
        if s.temperature == 0:
            return int(logits.argmax())
        mixed = any(other.seed is None for other in batch)
        random = self.shared_random if "8" in self.bugs and mixed else s.random
        probs = softmax(logits / s.temperature)
        return int(min(np.searchsorted(probs.cumsum(), random.random()), VOCAB - 1))

    def _emit(self, s: Sequence, token: int, logits: np.ndarray) -> None:
        s.tokens.append(token)
        logprobs = log_softmax(logits)
        if "12" in self.bugs and self.speculate:
            logprobs = np.where(np.arange(VOCAB) == token, 0.0, -30.0)
        s.events.put((token, logprobs))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max()
    return shifted - np.log(np.exp(shifted).sum())
