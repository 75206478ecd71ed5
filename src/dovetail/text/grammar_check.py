"""Grammars by llguidance, and the child process that compiles those of clients first.

    python -I grammar_check.py MEMORY TIMEOUT      a JSON object per line:
        {"tokenizer": …, "stop": […], "limits": {…}}                    -> {"ready": true}
        {"id": 7, "format": "regex", "text": …, "seconds": 0.25}        -> {"id": 7, "source": …}, or instead of the source
                                                                           "error": reason, "slow": true (CPU time) or
                                                                           "late": true (TIMEOUT)

A grammar is untrusted code. llguidance bounds its size and the work per token; what these bounds leave is the time and the
memory of compilation, and a crash. So each grammar is compiled by a fork of this process, which has read the tokenizer. The
fork limits its CPU time and the memory that it may add, and ends with its answer. Several run at once.

This file imports llguidance (extra `grammar`) and the standard library, and no module of ours: the child runs it by its path.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

WHITESPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}  # bounded: a model may repeat spaces without end
FORMATS: Mapping[str, Callable[[str], str]] = {  # format of a text -> llguidance's grammar
    "json": lambda text: LLMatcher.grammar_from_json_schema(text, defaults=WHITESPACE),  # type: ignore[arg-type]
    "regex": LLMatcher.grammar_from_regex,
    "choice": lambda text: grammar_from("choice", text),
    "grammar": lambda text: grammar_from("grammar", text),
}
NO_TEXT = "NoExtension"  # llguidance's reason where no text fits


def source_of(form: str, text: str) -> str:
    """Return llguidance's grammar of a text; ValueError where it cannot be read."""
    return FORMATS[form](text)


def open_tokenizer(tokenizer: str, stop: Sequence[int]) -> LLTokenizer:
    """Return the tokenizer of a tokenizer.json with these end tokens."""
    return LLTokenizer(tokenizer, eos_token=list(stop))


def open_matcher(tokenizer: LLTokenizer, source: str, limits: Mapping[str, Any]) -> LLMatcher:
    """Compile a grammar and compute its first mask; ValueError with the reason where it is refused."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False, **limits))
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        error = matcher.get_error().removesuffix("<non-verbose/>").strip()
        raise ValueError("no text fits it" if error.startswith(NO_TEXT) else error)
    for token in tokenizer.eos_tokens:
        mask = mask[: token // 8] + bytes([mask[token // 8] & ~(1 << token % 8)]) + mask[token // 8 + 1 :]
    if not any(mask):
        raise ValueError("no text fits it but the empty one")
    return matcher


def compiled(asked: Mapping[str, Any], tokenizer: LLTokenizer, limits: Mapping[str, Any], memory: int) -> dict[str, Any]:
    """Limit this process, a fork, and compile a grammar."""
    signal.setitimer(signal.ITIMER_PROF, asked["seconds"])  # ends the process; the next line bounds it, too
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(asked["seconds"]) + 1, math.ceil(asked["seconds"]) + 2))
    most = _address_space() + memory
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        source = source_of(asked["format"], asked["text"])
        open_matcher(tokenizer, source, limits)
    except MemoryError:
        return {"error": _too_large(memory)}
    except (ValueError, RecursionError) as error:
        return {"error": str(error)[:400]}
    return {"source": source}


def _address_space() -> int:
    """The bytes of address space that this process has."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return 4 << 30


def _too_large(memory: int) -> str:
    return f"it takes more than {memory >> 20} MB of memory to compile; simplify it"


class Fork:
    """A grammar that is being compiled."""

    def __init__(self, asked: Mapping[str, Any], work: Callable[[], dict[str, Any]], timeout: float) -> None:
        self.id, self.answer, self.end = asked["id"], bytearray(), time.monotonic() + timeout
        self.source, sink = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(sink)
            return
        try:
            for other in (self.source, 0, 1):
                os.close(other)
            with open(sink, "wb") as answer:
                answer.write(json.dumps(work()).encode())
        finally:
            os._exit(0)

    def ended(self, memory: int) -> dict[str, Any]:
        """The answer, when the pipe has closed or the time is over."""
        os.close(self.source)
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        try:
            return {"id": self.id, **json.loads(self.answer)}
        except ValueError:
            by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            known: dict[int, dict[str, Any]] = {
                signal.SIGPROF: {"slow": True},
                signal.SIGXCPU: {"slow": True},
                signal.SIGKILL: {"late": True},
            }
            return {"id": self.id, **known.get(by, {"error": _too_large(memory)})}


def main() -> None:
    """Read the tokenizer; then compile grammars until stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group: the parent decides when this one ends
    memory, timeout = (int(text) for text in sys.argv[1:3])
    lines, forks = bytearray(), dict[int, Fork]()
    while b"\n" not in lines:
        lines += os.read(0, 1 << 20)
    first, _, lines = lines.partition(b"\n")
    given = json.loads(first)
    tokenizer = open_tokenizer(given["tokenizer"], given["stop"])
    _answer({"ready": True})
    while True:
        while b"\n" in lines:
            line, _, lines = lines.partition(b"\n")
            asked = json.loads(line)
            fork = Fork(asked, lambda asked=asked: compiled(asked, tokenizer, given["limits"], memory), timeout)
            forks[fork.source] = fork
        soonest = min((fork.end for fork in forks.values()), default=None)
        wait = None if soonest is None else max(0.0, soonest - time.monotonic())
        for ready in select.select([0, *forks], [], [], wait)[0]:
            data = os.read(ready, 1 << 20)
            if ready == 0 and not data:
                for fork in forks.values():
                    os.kill(fork.pid, signal.SIGKILL)
                return
            if ready == 0:
                lines += data
            elif data:
                forks[ready].answer += data
            else:
                _answer(forks.pop(ready).ended(memory))
        for late in [fork for fork in forks.values() if fork.end <= time.monotonic()]:
            _answer(forks.pop(late.source).ended(memory))


def _answer(data: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(data) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
