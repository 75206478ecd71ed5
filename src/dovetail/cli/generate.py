"""Generate text from a prompt, streamed to stdout.

The most probable token is taken unless --temperature is given. Generation ends at an end-of-sequence token of the model
(generation_config.json) or after --max-tokens. A decoder continues the prompt; an encoder–decoder takes it as its source; with
--chat the prompt is a user message, rendered by the model's chat template.

    dovetail generate llama-tiny-trained "Once upon" --temperature 0.8 --top-p 0.95 --seed 7
    dovetail generate Qwen3-0.6B "Why is the sky blue?" --chat
"""

from __future__ import annotations

import dataclasses as dc
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from dovetail.cli.output import print_json, print_note, print_text

if TYPE_CHECKING:
    from dovetail.io.untrusted import Directory
    from dovetail.model import Model
    from dovetail.text.tokenizer import Tokenizer


@dc.dataclass
class Command:
    """The model, the prompt, and the sampling."""

    directory: tyro.conf.Positional[Path]
    """A model directory with a tokenizer.json: ours, or in Hugging Face layout."""
    prompt: tyro.conf.Positional[str]
    """The prompt."""
    max_tokens: int = 128
    """The largest number of tokens to generate."""
    temperature: float = 0.0
    """0 takes the most probable token; 1 samples from the model's probs as they are."""
    top_p: float = 1.0
    """Sample from the fewest tokens whose probs sum to this."""
    top_k: int | None = None
    """Sample from this many of the most probable tokens."""
    seed: int = 0
    """The seed of the sampling."""
    chat: bool = False
    """Render the prompt with the model's chat template, as a user message."""
    system: str | None = None
    """With --chat: a system message before it."""
    json: bool = False
    """Print one JSON object on stdout at the end."""

    def run(self) -> int | None:
        """Load, generate, and print tokens/s on stderr."""
        from dovetail.cli.loading import shown_loading
        from dovetail.core.errors import SpecError
        from dovetail.core.finite import check_weights
        from dovetail.generation import Sampling, check_generates, generate_tokens
        from dovetail.io.untrusted import Directory
        from dovetail.port.load import load, origin
        from dovetail.text.stream import TextStream
        from dovetail.text.tokenizer import Tokenizer

        if self.max_tokens < 1:
            raise SpecError("--max-tokens", f"{self.max_tokens} is not 1 or more")
        sampling = Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed)
        where = Directory(self.directory)
        spec = origin(where).spec
        check_generates(spec)
        tokenizer = Tokenizer.load(self.directory)
        settings = _settings(where)
        prompt, echo = self._prompt(spec, tokenizer)
        if prompt and max(prompt) >= spec.vocab:
            raise SpecError("vocab", f"{spec.vocab} is too small for token id {max(prompt)} of the tokenizer")
        max_tokens = _max_tokens(spec, len(prompt), self.max_tokens)
        with shown_loading(self.directory.name) as watch:
            model = load(self.directory, watch=watch)
        check_weights(model, spec)
        stream = TextStream(tokenizer, prompt if echo else ())
        tokens, text, begin = [], "", time.monotonic()
        self._stream(self.prompt if echo else "")
        for token in generate_tokens(model, prompt, max_tokens, sampling, stop=settings.stop, start=settings.start):
            tokens.append(token)
            text += self._stream(stream.push(token) if token not in settings.stop else "")
        text += self._stream(stream.end())
        seconds = max(time.monotonic() - begin, 1e-9)
        finish = "end" if tokens and tokens[-1] in settings.stop else "length"
        if self.json:
            report = {"prompt": self.prompt, "text": text, "tokens": tokens, "prompt_tokens": len(prompt), "finish": finish}
            print_json({**report, "tokens_per_second": round(len(tokens) / seconds, 2)})
        else:
            print()
            print_note(f"{len(tokens)} tokens, {len(tokens) / seconds:.1f} tokens/s ({finish})")
        return 0

    def _prompt(self, spec: Model, tokenizer: Tokenizer) -> tuple[list[int], bool]:
        """Return the token ids of the prompt, and whether the generated text continues it (and the prompt is printed first)."""
        if not self.chat:
            return tokenizer.prompt(self.prompt), spec.encoder is None
        from dovetail.text.chat import ChatTemplate

        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        text = ChatTemplate.load(self.directory).render([*system, {"role": "user", "content": self.prompt}])
        return tokenizer.prompt(text, add_special=False), False

    def _stream(self, text: str) -> str:
        if text and not self.json:
            print_text(text)
        return text


@dc.dataclass(frozen=True)
class Settings:
    """Generation settings of a model directory: end-of-sequence tokens, and the first decoder tokens of an encoder–decoder."""

    stop: frozenset[int]
    start: tuple[int, ...]


def _settings(where: Directory) -> Settings:
    from dovetail.port.load import CONFIG_FILE
    from dovetail.port.write import GENERATION_FILE, KEPT_CONFIG

    config: dict[str, Any] = {}
    for name in (KEPT_CONFIG, CONFIG_FILE, GENERATION_FILE):  # a later file overrides an earlier one
        values = where.json(name) if where.has(name) else {}
        config |= {key: value for key, value in values.items() if value is not None}
    stop, start = _ids(config.get("eos_token_id")), _ids(config.get("decoder_start_token_id"))
    forced = _ids(config.get("forced_bos_token_id"))
    return Settings(frozenset(stop), (*(start or _ids(config.get("bos_token_id"))), *forced))


def _ids(value: Any) -> tuple[int, ...]:
    """Return the token ids of a config field: an id, a list of ids, or None."""
    return tuple(one for one in (value if isinstance(value, list) else [value]) if type(one) is int)


def _max_tokens(spec: Model, prompt: int, wanted: int) -> int:
    """Return how many tokens can be generated behind a prompt of so many before a table of positions ends."""
    from dovetail.account import longest_length
    from dovetail.core.errors import SpecError

    longest = longest_length(spec)
    if longest is None or spec.encoder is not None:
        return wanted
    if prompt >= longest:
        raise SpecError("prompt", f"has {prompt} tokens; the model takes at most {longest}", "shorten it")
    return min(wanted, longest - prompt)
