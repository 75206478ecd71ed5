"""Let a model go on from a text, or answer it; the text streams to stdout as it is written.

The likeliest token is taken unless --temperature is given. It ends at the model's end token (generation_config.json) or after
--max-tokens. An encoder–decoder answers the prompt; with --chat the prompt is a message, put into the model's chat template.

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
    """Which model, from what, how."""

    directory: tyro.conf.Positional[Path]
    """A model directory with a tokenizer.json: ours, or in Hugging Face layout."""
    prompt: tyro.conf.Positional[str]
    """What to go on from, or to answer."""
    max_tokens: int = 128
    """The most tokens to write."""
    temperature: float = 0.0
    """0 takes the likeliest token; 1 draws each as often as the model says."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose shares add up to this."""
    top_k: int | None = None
    """Draw from this many of the likeliest."""
    seed: int = 0
    """What is drawn follows from it."""
    chat: bool = False
    """Put the prompt into the model's chat template, as a message of the user's."""
    system: str | None = None
    """With --chat: a message before it that tells the model how to be."""
    json: bool = False
    """One JSON object on stdout, at the end."""

    def run(self) -> int | None:
        """Read, write, and say how fast on stderr."""
        from dovetail.cli.loading import shown_loading
        from dovetail.core.errors import SpecError
        from dovetail.core.finite import check_weights
        from dovetail.generation import Sampling, check_generates, write
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
            raise SpecError("vocab", f"the tokenizer gives id {max(prompt)}; the model knows {spec.vocab} tokens")
        count = _room(spec, len(prompt), self.max_tokens)
        with shown_loading(self.directory.name) as watch:
            model = load(self.directory, watch=watch)
        check_weights(model, spec)
        stream = TextStream(tokenizer, prompt if echo else ())
        tokens, text, begin = [], "", time.monotonic()
        self._show(self.prompt if echo else "")
        for token in write(model, prompt, count, sampling, stop=settings.stop, start=settings.start):
            tokens.append(token)
            text += self._show(stream.push(token) if token not in settings.stop else "")
        text += self._show(stream.end())
        seconds = max(time.monotonic() - begin, 1e-9)
        ended = "end" if tokens and tokens[-1] in settings.stop else "length"
        if self.json:
            report = {"prompt": self.prompt, "text": text, "tokens": tokens, "prompt_tokens": len(prompt), "finish": ended}
            print_json({**report, "tokens_per_second": round(len(tokens) / seconds, 2)})
        else:
            print()
            print_note(f"{len(tokens)} tokens, {len(tokens) / seconds:.1f} tokens/s ({ended})")
        return 0

    def _prompt(self, spec: Model, tokenizer: Tokenizer) -> tuple[list[int], bool]:
        """The ids the model reads, and whether its text goes on from the prompt's."""
        if not self.chat:
            return tokenizer.prompt(self.prompt), spec.encoder is None
        from dovetail.text.chat import ChatTemplate

        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        text = ChatTemplate.load(self.directory).render([*system, {"role": "user", "content": self.prompt}])
        return tokenizer.prompt(text, add_special=False), False

    def _show(self, text: str) -> str:
        if text and not self.json:
            print_text(text)
        return text


@dc.dataclass(frozen=True)
class Settings:
    """What a directory says about writing: the tokens that end a text, and those an encoder–decoder begins with."""

    stop: frozenset[int]
    start: tuple[int, ...]


def _settings(where: Directory) -> Settings:
    from dovetail.port.load import CONFIG_FILE
    from dovetail.port.write import GENERATION_FILE, KEPT_CONFIG

    said: dict[str, Any] = {}
    for name in (KEPT_CONFIG, CONFIG_FILE, GENERATION_FILE):  # the last one that speaks is right
        found = where.json(name) if where.has(name) else {}
        said |= {key: value for key, value in found.items() if value is not None}
    ends, begins = _ids(said.get("eos_token_id")), _ids(said.get("decoder_start_token_id"))
    forced = _ids(said.get("forced_bos_token_id"))
    return Settings(frozenset(ends), (*(begins or _ids(said.get("bos_token_id"))), *forced))


def _ids(said: Any) -> tuple[int, ...]:
    """An id, a list of ids, or nothing."""
    return tuple(one for one in (said if isinstance(said, list) else [said]) if type(one) is int)


def _room(spec: Model, read: int, wanted: int) -> int:
    """How many tokens can be written before a table of positions ends."""
    from dovetail.account import longest_length
    from dovetail.core.errors import SpecError

    longest = longest_length(spec)
    if longest is None or spec.encoder is not None:
        return wanted
    if read >= longest:
        raise SpecError("prompt", f"is of {read} tokens; the model takes no more than {longest}")
    return min(wanted, longest - read)
