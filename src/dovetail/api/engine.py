"""engine: the native engine of a model directory, in this process or in one of its own.

client = await start_engine("Qwen3-0.6B", rows=8)          python -m dovetail.api.engine FD '{"directory": …, "rows": 8}'
"""

from __future__ import annotations

import functools
import gc
import json
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from dovetail.adapters.storage import Stored, check_base
from dovetail.api.models import load
from dovetail.core.errors import DovetailError
from dovetail.core.finite import check_weights
from dovetail.embedding import Embedder
from dovetail.generation import Vocabulary, generates
from dovetail.port.adapter import family_of, read_any
from dovetail.serving.draft_ahead import own_drafter
from dovetail.serving.engine import Engine
from dovetail.serving.packed import pack
from dovetail.serving.pooled import PooledEngine
from dovetail.serving.process import Loop
from dovetail.serving.speculate import Drafter, DraftModel, PromptLookup
from dovetail.serving.wire import encode
from dovetail.serving.worker import QUEUED, ProcessClient, start_process
from dovetail.text.grammar import Grammars
from dovetail.transformer import Transformer

E = TypeVar("E", Engine, PooledEngine)


def load_engine(
    directory: str | Path,
    *,
    rows: int = 8,
    longest: int = 4096,
    dtype: str | None = None,
    threads: int | None = None,
    speculate: str | None = None,
    drafts: int = 4,
    adapters: Mapping[str, str] = MappingProxyType({}),
    compiled: bool = False,
    **options: Any,
) -> Engine | PooledEngine:
    """Return the engine of a model directory; the other options are those of `Engine`. A model that does not generate has one
    for embeddings and scores alone, without these options. Up to `drafts` tokens are guessed at once: `speculate` is `lookup`,
    which guesses them from those before, `mtp`, the model's own multi-token prediction, one token per depth, or the directory
    of a smaller model with the same vocabulary. `adapters` are directories by the names that requests give. `compiled` decodes
    by a compiled graph, which is made first, and holds the weights a second time."""
    if threads is not None:
        torch.set_num_threads(threads)
    model = load(directory, dtype=dtype).eval()
    check_weights(model, model.spec)
    pack(model)
    if not generates(model.spec):
        return _with_adapters(PooledEngine(model, longest), directory, adapters)
    drafter = None if speculate is None else _drafter(speculate, model, rows, longest, drafts, dtype)
    vocabulary = model.vocabulary or Vocabulary()
    tokenizer, vocab = vocabulary.tokenizer, model.spec.vocab
    options["grammars"] = None if tokenizer is None else Grammars(tokenizer, vocab, vocabulary.stop)
    options["compiled"] = load(directory, dtype=dtype).eval() if compiled else None
    engine = Engine(model, rows=rows, longest=longest, start=vocabulary.start, drafter=drafter, drafts=drafts, **options)
    return _with_adapters(engine, directory, adapters)


def _with_adapters(engine: E, directory: str | Path, adapters: Mapping[str, str]) -> E:
    for name, place in adapters.items():
        stored = read_adapter(engine, directory, place)
        engine.load_adapter(name, stored.kind, stored.tensors)
    return engine


def read_adapter(engine: Engine | PooledEngine, base: str | Path, directory: str | Path) -> Stored:
    """Read an adapter directory, ours or peft's, for the model of an engine; FileError where it was trained on another base."""
    stored = read_any(directory, engine.model.part, family_of(base))
    check_base(engine.model, stored, str(directory))
    return stored


def _drafter(speculate: str, model: Transformer, rows: int, longest: int, drafts: int, dtype: str | None) -> Drafter:
    if speculate == "lookup":
        return PromptLookup()
    if speculate == "mtp":
        return own_drafter(model, rows=rows, longest=longest, drafts=drafts)
    smaller = load(speculate, dtype=dtype).eval()
    check_weights(smaller, smaller.spec)
    pack(smaller)
    return DraftModel(smaller, rows=rows, longest=longest, target=model)


async def start_engine(directory: str | Path, *, rows: int = 8, queued: int = QUEUED, **options: Any) -> ProcessClient:
    """Start the engine of a model directory in a process of its own; return when its model is loaded. The options are those of
    `load_engine`, and `pooling` of embeddings. Raises EngineDead with the reason where the model cannot be served."""
    given = {"directory": str(directory), "rows": rows, **options}
    return await start_process("dovetail.api.engine", given, running=rows, queued=queued)


def main() -> int:
    """Load, report that the engine is ready, serve until the other side of the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group: the parent decides when to close
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        given = json.loads(sys.argv[2])
        pooling = given.pop("pooling", None)
        engine = load_engine(**given)
        embedder = Embedder(engine.model, pooling)
    except (DovetailError, OSError, RuntimeError) as error:
        message = str(error) if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}"
        sock.sendall(encode({"fatal": message[:2000]}))
        return 1
    gc.collect()
    gc.freeze()  # the model stays: no step waits until the collector has searched it
    ready = {"longest": engine.longest, "vocab": engine.model.part.vocab, "ranks": embedder.ranks}
    sock.sendall(encode({"ready": ready}))
    Loop(engine, sock, functools.partial(read_adapter, engine, given["directory"]), embedder).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
