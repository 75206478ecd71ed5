"""Grammars by llguidance, and the child process that compiles those of clients first.

    python -I grammar_check.py SECONDS MEMORY      a JSON object per line:
        {"tokenizer": …, "stop": […], "limits": {…}}        -> {"ready": true}
        {"format": "regex", "text": …}                      -> {"source": …} or {"error": …}

A grammar is untrusted code. llguidance bounds its size and the work per token; what these bounds leave is the time and the
memory of compilation, and a crash. The child limits its memory and the CPU time of each grammar, so that the system ends it.

This file imports llguidance (extra `grammar`) and the standard library, and no module of ours: the child runs it by its path.
"""

from __future__ import annotations

import json
import math
import resource
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


def main() -> None:
    """Set the limits, then answer line by line."""
    seconds, memory = (int(text) for text in sys.argv[1:3])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    given = json.loads(sys.stdin.readline())
    tokenizer = open_tokenizer(given["tokenizer"], given["stop"])
    _answer({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, most))
        try:
            source = source_of(asked["format"], asked["text"])
            open_matcher(tokenizer, source, given["limits"])
            _answer({"source": source})
        except MemoryError:
            _answer({"error": f"it takes more than {memory >> 20} MB of memory"})
        except ValueError as error:
            _answer({"error": str(error)[:400]})


def _answer(data: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(data) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
