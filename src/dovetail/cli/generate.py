"""Generate text from a prompt, streamed to stdout.

The most probable token is chosen unless --temperature is given. Generation ends at an end-of-sequence token of the model
(generation_config.json) or after --max-tokens. A decoder continues the prompt; an encoder–decoder takes it as its source; with
--chat the prompt is a user message, rendered by the model's chat template.

    dovetail generate llama-tiny-trained "Once upon" --temperature 0.8 --top-p 0.95 --seed 7
    dovetail generate Qwen3-0.6B "Why is the sky blue?" --chat
    dovetail generate Qwen3-0.6B "A person as JSON: " --json-schema person.json
"""

from __future__ import annotations

from typing import Annotated

from dovetail.base.option import Option
from dovetail.cli.command import Options, call
from dovetail.cli.output import print_json, print_note, print_text

Json = Annotated[bool, Option("Print one JSON object on stdout at the end.")]


def run(given: Options, json: Json = False) -> None:
    """Load, generate, and print tokens/s on stderr."""
    from dovetail.api.generate import generate

    if given.get("compiled"):
        print_note("compiling the steps of decoding: seconds to minutes")
    result = call(generate, {**given, "on_text": None if json else print_text})
    if json:
        print_json(result.to_dict())
        return
    print()
    compiled = f"; compiled in {result.compile_seconds:.0f} s" if given.get("compiled") else ""
    print_note(f"{len(result.tokens)} tokens, {result.tokens_per_second:.1f} tokens/s ({result.finish}){compiled}")
