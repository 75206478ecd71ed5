"""Generate text from a prompt, streamed to stdout.

The most probable token is chosen unless --temperature is given. Generation ends at an end-of-sequence token of the model
(generation_config.json) or after --max-tokens. A decoder continues the prompt; an encoder–decoder takes it as its source; with
--chat the prompt is a user message, rendered by the model's chat template.

    dovetail generate llama-tiny-trained "Once upon" --temperature 0.8 --top-p 0.95 --seed 7
    dovetail generate Qwen3-0.6B "Why is the sky blue?" --chat
    dovetail generate Qwen3-0.6B "A person as JSON: " --json-schema person.json
"""

from __future__ import annotations

import dataclasses as dc
from typing import Literal

import tyro

from dovetail.cli.flags import InDir, InFile, NewTokens, SamplingFlags
from dovetail.cli.output import print_json, print_note, print_text
from dovetail.cli.printing import options


@dc.dataclass
class Command(SamplingFlags):
    """The model, the prompt, and the sampling."""

    directory: tyro.conf.Positional[InDir]
    """A model directory with a tokenizer.json: ours, or in Hugging Face layout."""
    prompt: tyro.conf.Positional[str]
    """The prompt."""
    max_tokens: NewTokens = 128
    """The largest number of tokens to generate."""
    beams: int | None = None
    """Beam search with N beams; the text is printed at the end."""
    chat: bool = False
    """Render the prompt with the model's chat template, as a user message."""
    system: str | None = None
    """With --chat: a system message before it."""
    compiled: bool = False
    """Decode with compiled graphs: compiling takes seconds to minutes, so it pays off for long texts."""
    cache: Literal["int8", "int4", "fp8"] | None = None
    """Store the KV cache in fewer bits."""
    json_schema: InFile | None = None
    """A JSON schema: the text is a JSON value of it."""
    regex: str | None = None
    """A regular expression: the text matches it as a whole."""
    json: bool = False
    """Print one JSON object on stdout at the end."""

    def run(self) -> int:
        """Load, generate, and print tokens/s on stderr."""
        from dovetail.api.generate import check_model, check_options, constraint_of, generate
        from dovetail.api.models import load
        from dovetail.cli.loading import shown_loading
        from dovetail.core.limits import GRAMMAR_CHARACTERS
        from dovetail.disk.untrusted import read_regular

        chosen = options(
            self, "directory", "prompt", "chat", "system", "compiled", "cache", "json", "load", "json_schema", "regex"
        )
        check_options(**chosen)  # before the weights are read
        schema = None
        if self.json_schema is not None:
            schema = read_regular(self.json_schema, GRAMMAR_CHARACTERS, "a JSON schema")
        constraint_of(schema, self.regex, beams=self.beams)
        check_model(self.directory)
        with shown_loading(self.directory.name) as watch:
            model = load(self.directory, watch=watch)
        if self.compiled:
            print_note("compiling the steps of decoding: seconds to minutes")
        result = generate(
            model,
            self.prompt,
            **chosen,
            chat=self.chat,
            system=self.system,
            compiled=self.compiled,
            cache=self.cache,
            json_schema=schema,
            regex=self.regex,
            on_text=None if self.json else print_text,
        )
        if self.json:
            print_json(result.to_dict())
        else:
            print()
            compiled = f"; compiled in {result.compile_seconds:.0f} s" * self.compiled
            print_note(f"{len(result.tokens)} tokens, {result.tokens_per_second:.1f} tokens/s ({result.finish}){compiled}")
        return 0
