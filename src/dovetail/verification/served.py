"""A server as the second side: its first token and its log-probs against ours. Nothing else of it can be seen.

    POST {url}/completions   {"prompt": [ids], "max_tokens": 1, "temperature": 0, "logprobs": 5}

Two forms of answer are read: OpenAI's (`top_logprobs`: a text and a number each, the text being `token_id:7` where a server is
asked for ids) and llama.cpp's (`content`: entries with an id). Texts are turned into ids by the tokenizer of the first side.

What a server's numbers are in is not known. Its log-probs may be off by what our own bfloat16 run of this very model is off,
times a factor with which clean servers pass; more than that is no rounding.
"""

from __future__ import annotations

import dataclasses as dc
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dovetail.core.errors import FileError
from dovetail.text.tokenizer import Tokenizer
from dovetail.verification.prompt import Prompt
from dovetail.verification.sides import Local, run
from dovetail.verification.walk import EXACT, Told, Word

TOP, SECONDS, LARGEST = 5, 120, 2**20  # log-probs asked for; patience; bytes of an answer
ROOM = 4.0  # times our own bfloat16 error
LEAST = 0.02  # in log-prob: what any server may be off
BY_ID = re.compile(r"token_id:(\d+)")


@dc.dataclass(frozen=True)
class Row:
    """One prompt: the first token of either side, and how far the server's log-probs are from ours."""

    ours: int
    theirs: int | None  # None: its text is not one token of ours
    text: str  # as the server writes it
    gap: float
    allowed: float
    close: bool  # our two best tokens are nearer than rounding can tell apart

    @property
    def apart(self) -> bool:
        """Whether this is more than rounding."""
        return not self.gap <= self.allowed or (self.ours != self.theirs and not self.close)


@dc.dataclass(frozen=True)
class Served:
    """What a server's answers showed."""

    a: str
    b: str
    tokens: int
    rows: list[Row]

    @property
    def word(self) -> Word:
        """The verdict in one word."""
        return "structural" if any(row.apart for row in self.rows) else "equal"

    def data(self) -> dict[str, Any]:
        """For machines."""
        rows = [{**dc.asdict(row), "apart": row.apart} for row in self.rows]
        return {"a": self.a, "b": self.b, "verdict": self.word, "prompts": len(rows), "tokens": self.tokens, "rows": rows}


def compare(
    a: Local,
    url: str,
    prompt: Prompt,
    *,
    model: str | None = None,
    tokenizer: Tokenizer | None = None,
    told: Told = lambda note: None,
) -> Served:
    """Ask the server what comes first after each prompt, and hold it to what the first side says."""
    told(f"{a.label}, float64")
    exact = _last(a, prompt, EXACT)
    told(f"{a.label}, bfloat16")
    coarse = _last(a, prompt, torch.bfloat16)
    rows = []
    for i, ids in enumerate(prompt.inputs.tolist()):
        told(f"{url}, prompt {i + 1} of {prompt.batch}")
        rows.append(_held(exact[i], coarse[i], ask(url, ids, model), tokenizer))
    return Served(a.label, url, prompt.n, rows)


def _last(side: Local, prompt: Prompt, dtype: torch.dtype) -> Tensor:
    """(batch, vocab) log-probs of what comes after each prompt."""
    answer = run(side, prompt, dtype, lambda module: (), {}).taps["answer"]
    return answer[:, -1].to(EXACT).log_softmax(-1)


def _held(exact: Tensor, coarse: Tensor, said: list[tuple[str, int | None, float]], tokenizer: Tokenizer | None) -> Row:
    best = int(exact.argmax())
    known = [(_id(text, number, tokenizer), logprob) for text, number, logprob in said]
    gaps = [(abs(logprob - exact[number].item()), number) for number, logprob in known if _in(number, exact)]
    asked = torch.tensor([best, *(number for _, number in gaps)])
    allowed = max(LEAST, ROOM * (exact - coarse)[asked].abs().max().item())
    first, second = exact.topk(2).values.tolist()
    gap = max((gap for gap, _ in gaps), default=float("inf"))
    return Row(best, known[0][0], said[0][0], gap, allowed, first - second <= 2 * allowed)


def _in(number: int | None, logprobs: Tensor) -> bool:
    return number is not None and 0 <= number < logprobs.shape[0]


def _id(text: str, number: int | None, tokenizer: Tokenizer | None) -> int | None:
    """The id of a token that a server names by id or by text."""
    if number is not None:
        return number
    if (found := BY_ID.fullmatch(text)) is not None:
        return int(found.group(1))
    ids = [] if tokenizer is None else tokenizer.encode(text).tolist()
    return ids[0] if len(ids) == 1 else None


# -- the wire -------------------------------------------------------------------------------------------------------


def ask(url: str, ids: list[int], model: str | None) -> list[tuple[str, int | None, float]]:
    """(text, id where it is told, log-prob) of the likeliest first tokens, the chosen one first."""
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": TOP}
    if model is not None:
        body["model"] = model
    answer = _post(url, {**body, "return_tokens_as_token_ids": True})
    try:
        return _read(answer["choices"][0]["logprobs"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{url}: the answer holds no log-probs that can be read ({error!r})") from error


def _read(said: Mapping[str, Any]) -> list[tuple[str, int | None, float]]:
    if "content" in said:  # llama.cpp, and OpenAI's chat form
        entry = said["content"][0]
        entries = [entry, *(one for one in entry.get("top_logprobs", ()) if one.get("token") != entry.get("token"))]
        return [(str(one["token"]), one.get("id"), float(one["logprob"])) for one in entries]
    chosen, top = str(said["tokens"][0]), dict((said.get("top_logprobs") or [{}])[0])
    first = (chosen, None, float(said["token_logprobs"][0]))
    return [first, *((str(text), None, float(number)) for text, number in top.items() if text != chosen)]


def _post(url: str, body: Mapping[str, Any]) -> Any:
    if urlsplit(url).scheme not in ("http", "https"):
        raise FileError(f"{url}: only http:// and https:// are asked")
    place = url.rstrip("/") + "/completions"
    request = urllib.request.Request(place, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            text = response.read(LARGEST + 1)
    except urllib.error.HTTPError as error:
        if error.code in (400, 422) and "return_tokens_as_token_ids" in body:  # a strict server: ask without
            return _post(url, {name: value for name, value in body.items() if name != "return_tokens_as_token_ids"})
        raise FileError(f"{place}: answered {error.code}: {error.read(300).decode(errors='replace')}") from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise FileError(f"{place}: could not be asked ({error})") from error
    if len(text) > LARGEST:
        raise FileError(f"{place}: the answer is longer than {LARGEST:,} bytes")
    try:
        return json.loads(text)
    except ValueError as error:
        raise FileError(f"{place}: the answer is no JSON ({error})") from error


def view(found: Served) -> Group:
    """For people."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("prompt", "first token, A", "first token, B", "log-prob gap", "allowed", ""):
        table.add_column(name, justify="left" if not name else "right")
    for i, row in enumerate(found.rows):
        style = "bold red" if row.apart else ""
        theirs = row.text if row.theirs is None else str(row.theirs)
        mark = Text("✗" if row.apart else "✓", "red" if row.apart else "green")
        numbers = (str(i), str(row.ours), theirs, f"{row.gap:.4f}", f"{row.allowed:.4f}")
        table.add_row(*(Text(text, style) for text in numbers), mark)
    good = found.word == "equal"
    near = "first tokens agree, log-probs as near as rounding lets them be"
    says = f": {near}" if good else ": more than rounding; a server's layers cannot be seen"
    verdict = Text.assemble((found.word, "bold green" if good else "bold red"), says)
    return Group(Text.assemble(("A ", "bold"), found.a), Text.assemble(("B ", "bold"), found.b), Text(), table, Text(), verdict)
