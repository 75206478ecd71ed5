"""Decode greedily by llama.cpp, in its own environment (benchmarks/peers/make llama.cpp), as a process that takes requests.

    python llama_cpp_worker.py DIR --threads 2 --dtype bf16 --rows 8 --capacity 200

DIR holds a Llama in Hugging Face layout. It is written as GGUF without a vocabulary, so that tokens go in and out as ids. Then
lines of JSON come in on stdin, and one goes out for each:

    {"prompt": [[…], …]}     feed a prompt to each row; its first token      {"tokens": […], "seconds": …}
    {"steps": 32}            decode so many tokens of each row, greedily     {"tokens": [[…], …], "seconds": …}
    {"back": 128}            forget all but the first tokens of each row     {}
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np
from write_gguf import TYPES, write_gguf


class Decoder:
    """A model of llama.cpp with its cache, of which each row is a sequence."""

    def __init__(self, path: Path, rows: int, capacity: int, threads: int, vocab: int, wide_cache: bool) -> None:
        llama_cpp.llama_log_set(QUIET, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise SystemExit("llama.cpp could not load the model")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = rows * capacity, 2048, 2048, rows
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = False
        if wide_cache:
            settings.type_k = settings.type_v = TYPES["f32"].value
        self.context = llama_cpp.llama_init_from_model(model, settings)
        if not self.context:
            raise SystemExit("llama.cpp could not make a context")
        self.rows, self.vocab, self.lengths, self.last = rows, vocab, [0] * rows, [0] * rows

    def feed(self, tokens: list[list[int]]) -> list[int]:
        """Feed tokens to each row; return the greedy next token of each."""
        count = sum(map(len, tokens))
        batch = llama_cpp.llama_batch_init(count, 0, 1)
        index, ends = 0, []
        for row, ids in enumerate(tokens):
            for i, token in enumerate(ids):
                batch.token[index], batch.pos[index] = token, self.lengths[row] + i
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
                batch.logits[index] = i == len(ids) - 1
                index += 1
            ends.append(index - 1)
            self.lengths[row] += len(ids)
        batch.n_tokens = count
        if llama_cpp.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp could not decode")
        logits = [llama_cpp.llama_get_logits_ith(self.context, end) for end in ends]
        llama_cpp.llama_batch_free(batch)
        self.last = [int(np.ctypeslib.as_array(one, (self.vocab,)).argmax()) for one in logits]
        return self.last

    def back(self, length: int) -> None:
        """Forget all but the first tokens of each row."""
        memory = llama_cpp.llama_get_memory(self.context)
        for row in range(self.rows):
            llama_cpp.llama_memory_seq_rm(memory, row, length, -1)
            self.lengths[row] = length


@llama_cpp.llama_log_callback
def QUIET(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Print nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=list(TYPES), default="bf16")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--capacity", type=int, default=512)
    flags = parser.parse_args()
    vocab = json.loads((flags.directory / "config.json").read_text())["vocab_size"]
    path = write_gguf(flags.directory, flags.directory / f"model-{flags.dtype}.gguf", flags.dtype)
    decoder = Decoder(path, flags.rows, flags.capacity, flags.threads, vocab, flags.dtype == "f32")
    built = llama_cpp.llama_print_system_info().decode(errors="replace")
    cache = "f32" if flags.dtype == "f32" else "f16 (its default)"
    settings = {"gguf": flags.dtype, "kv_cache": cache, "threads": flags.threads, "n_batch": 2048, "built": built}
    print(json.dumps({"version": llama_cpp.__version__, "settings": settings}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, object] = {}
        if "prompt" in asked:
            begin = time.perf_counter()
            first = decoder.feed(asked["prompt"])
            answer = {"seconds": time.perf_counter() - begin, "tokens": first}
        elif "back" in asked:
            decoder.back(asked["back"])
            decoder.last = first  # type: ignore[possibly-undefined]
        else:
            begin, made = time.perf_counter(), []
            for _ in range(asked["steps"]):
                made.append(decoder.feed([[token] for token in decoder.last]))
            answer = {"seconds": time.perf_counter() - begin, "tokens": [list(row) for row in zip(*made, strict=True)]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
