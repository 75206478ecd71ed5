"""Chat templates: messages to the one text that a model was taught to read, as its directory says.

The template is `chat_template.jinja`, or `chat_template` inside tokenizer_config.json. It is rendered by a child process that
is limited in time, memory and output (render.py).
"""

from __future__ import annotations

import dataclasses as dc
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.core.errors import FileError
from dovetail.io.untrusted import Directory

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
LARGEST = 2**20  # bytes of a template
LARGEST_CONFIG = 16 * 2**20
SECONDS, MEMORY, LONGEST = 5, 512 * 2**20, 4 * 2**20  # of rendering: time, bytes, characters

Message = Mapping[str, Any]  # role and content


@dc.dataclass(frozen=True)
class ChatTemplate:
    """A template, where it comes from, and the special tokens it may speak of (`bos_token` …)."""

    text: str
    origin: str
    tokens: Mapping[str, str] = dc.field(default_factory=dict)

    @staticmethod
    def load(directory: str | Path) -> ChatTemplate:
        """The template of a model directory."""
        where = Directory(directory)
        config = where.json(CONFIG_FILE, LARGEST_CONFIG) if where.has(CONFIG_FILE) else {}
        tokens = {name: text for name, said in config.items() if name.endswith("_token") and (text := _token(said))}
        if where.has(TEMPLATE_FILE):
            return ChatTemplate(where.text(TEMPLATE_FILE, LARGEST), str(where.place / TEMPLATE_FILE), tokens)
        text = _template(config.get("chat_template"))
        if text is None or len(text) > LARGEST:
            raise FileError(f"{where.place}: holds no chat template ({TEMPLATE_FILE}, or in {CONFIG_FILE})")
        return ChatTemplate(text, str(where.place / CONFIG_FILE), tokens)

    def render(self, messages: Sequence[Message], *, prompt: bool = True, **given: Any) -> str:
        """The text of a conversation; `prompt` adds the words that let the model answer. `given` are further names that a
        template may ask for (`tools`, `documents`, settings of its own)."""
        told = {"tools": None, "documents": None, **self.tokens, **given}
        told |= {"messages": list(messages), "add_generation_prompt": prompt}
        answer = self._ask(json.dumps({"template": self.text, "given": told, "longest": LONGEST}))
        if "text" not in answer:
            raise FileError(f"{self.origin}: the chat template cannot be rendered ({answer['error']})")
        return answer["text"]

    def _ask(self, asked: str) -> dict[str, str]:
        child = Path(__file__).with_name("render.py")
        command = [sys.executable, "-I", str(child), str(SECONDS), str(MEMORY)]
        try:
            done = subprocess.run(
                command, input=asked, capture_output=True, text=True, timeout=2 * SECONDS, env={}, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"it took more than {SECONDS} seconds"}
        try:
            answer = json.loads(done.stdout)
        except ValueError:  # it was stopped by the system
            return {"error": f"it took more than {SECONDS} seconds or {MEMORY >> 20} MB"}
        return answer


def _token(said: Any) -> str | None:
    """A special token, written as a text or as an object with one."""
    said = said.get("content") if isinstance(said, dict) else said
    return said if isinstance(said, str) else None


def _template(said: Any) -> str | None:
    """A text, or of several the one called default."""
    if isinstance(said, list):
        said = next((one.get("template") for one in said if isinstance(one, dict) and one.get("name") == "default"), None)
    return said if isinstance(said, str) else None
