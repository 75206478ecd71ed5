"""engine: the native engine of a model directory, in this process or in one of its own.

client = await start_engine("Qwen3-0.6B", EngineOptions(rows=8))      python -m dovetail.api.engine FD '{"directory": …, …}'
"""

from __future__ import annotations

import dataclasses as dc
import functools
import gc
import json
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch

from dovetail.api.engine_options import EngineOptions
from dovetail.api.models import load
from dovetail.base.errors import DovetailError, UsageError
from dovetail.base.keywords import checks_keywords
from dovetail.base.limits import QUEUED
from dovetail.decoding.embedding import Embedder
from dovetail.decoding.eviction import given_eviction
from dovetail.decoding.generation import Vocabulary, generates
from dovetail.hf.adapter import family_of, read_any
from dovetail.model.transformer import Transformer
from dovetail.nn.finite import check_weights
from dovetail.serving.draft_ahead import own_drafter
from dovetail.serving.embedding_engine import PooledEngine
from dovetail.serving.engine import Engine
from dovetail.serving.lookahead import Lookahead
from dovetail.serving.packed import pack
from dovetail.serving.process import Loop
from dovetail.serving.request import encode
from dovetail.serving.speculate import Drafter, DraftModel, PromptLookup
from dovetail.serving.worker import ProcessClient, start_process
from dovetail.text.grammar import Grammars
from dovetail.weights.adapters.storage import Stored, check_base

E = TypeVar("E", Engine, PooledEngine)
TRACEBACK = 4000  # characters


def load_engine(directory: str | Path, options: EngineOptions = EngineOptions()) -> Engine | PooledEngine:
    """Return the engine of a model directory. A model that does not generate has one for embeddings and scores only, which
    reads `longest`, `dtype`, `threads` and `adapters`."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load(directory, dtype=options.dtype).eval()
    check_weights(model, model.spec)
    pack(model)
    if not generates(model.spec):
        _check_pooled(options)
        return _with_adapters(PooledEngine(model, options.longest), directory, options.adapters)
    vocabulary = model.vocabulary or Vocabulary()
    tokenizer = vocabulary.tokenizer
    engine = Engine(
        model,
        rows=options.rows,
        longest=options.longest,
        budget=options.budget,
        pages=options.pages,
        cache=options.cache,
        evict=given_eviction(options.evict, options.evict_to),
        share=options.share,
        start=vocabulary.start,
        drafter=_drafter(model, options),
        drafts=options.drafts,
        grammars=None if tokenizer is None else Grammars(tokenizer, model.spec.vocab, vocabulary.stop),
        compiled=load(directory, dtype=options.dtype).eval() if options.compiled else None,
    )
    return _with_adapters(engine, directory, options.adapters)


def _check_pooled(options: EngineOptions) -> None:
    default = EngineOptions()
    for name in (
        "budget",
        "pages",
        "cache",
        "evict",
        "evict_to",
        "share",
        "speculate",
        "drafts",
        "compiled",
    ):  # of the decode state and of generation
        if getattr(options, name) != getattr(default, name):
            raise UsageError(f"{name}: the model does not generate, so it has no use for it; leave it out")


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


def _drafter(model: Transformer, options: EngineOptions) -> Drafter | None:
    if options.speculate is None:
        return None
    if options.speculate == "lookup":
        return PromptLookup()
    if options.speculate == "lookahead":
        return Lookahead(model)
    if options.speculate == "mtp":
        return own_drafter(model, rows=options.rows, longest=options.longest, drafts=options.drafts)
    smaller = load(options.speculate, dtype=options.dtype).eval()
    check_weights(smaller, smaller.spec)
    pack(smaller)
    return DraftModel(smaller, rows=options.rows, longest=options.longest, target=model)


@checks_keywords
async def start_engine(
    directory: str | Path, options: EngineOptions = EngineOptions(), *, queued: int = QUEUED
) -> ProcessClient:
    """Start the engine of a model directory in a process of its own; return when its model is loaded. Up to `queued`
    continuations wait. Raises EngineDead with the reason where the model cannot be served."""
    given = {"directory": str(directory), **dc.asdict(options)}
    return await start_process("dovetail.api.engine", given, running=options.rows, queued=queued)


def main() -> int:
    """Load, report that the engine is ready, serve until the other side of the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group: the parent decides when to close
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        given = json.loads(sys.argv[2])
        directory, options = given.pop("directory"), EngineOptions(**given)
        engine = load_engine(directory, options)
        embedder = Embedder(engine.model, options.pooling)
    except (DovetailError, OSError, RuntimeError) as error:
        message = str(error) if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}"
        sock.sendall(encode({"fatal": message[:2000]}))
        return 1
    gc.collect()
    gc.freeze()  # the model stays: no step waits until the collector has searched it
    ready = {"longest": engine.longest, "vocab": engine.model.part.vocab, "ranks": embedder.ranks}
    sock.sendall(encode({"ready": ready}))
    try:
        Loop(engine, sock, functools.partial(read_adapter, engine, directory), embedder).run()
    except Exception:
        sock.sendall(encode({"fatal": f"the engine's process has failed: {traceback.format_exc()[-TRACEBACK:]}"}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
