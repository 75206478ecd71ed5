"""Tool calls in text: the format of a template by its markers, calls however the text is cut, and text that is no call."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dovetail.base.errors import UsageError
from dovetail.serving.http.tool_stream import ToolStream
from dovetail.text.tool_calls.parser import parser_named, parser_of, parsers

TOOLS = ("weather", "time")
BERN = {"city": "Bern 🙂", "days": [1, {"a": "</tool"}]}
HERMES = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
LLAMA = '{"name": "%s", "parameters": %s}'
DATA = json.dumps(BERN, ensure_ascii=False)
CASES = {
    "hermes": [
        ("Sure. " + HERMES % ("weather", DATA), "Sure.", [("weather", BERN)]),
        (HERMES % ("weather", DATA) + "\n" + HERMES % ("time", "{}"), "", [("weather", BERN), ("time", {})]),
        ("2 < 3 <tool", "2 < 3 <tool", []),
        ("plain text  \n", "plain text  \n", []),
        ('<tool_call>{"name": "weather"', '<tool_call>{"name": "weather"', []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        (HERMES % ("unknown", "{}"), HERMES % ("unknown", "{}"), []),
        (HERMES % ("time", "3"), HERMES % ("time", "3"), []),
        ("<tool_call>" + "[" * 20_000 + "</tool_call>", "<tool_call>" + "[" * 20_000 + "</tool_call>", []),
    ],
    "llama3": [
        (LLAMA % ("weather", DATA), "", [("weather", BERN)]),
        ("<|python_tag|>" + LLAMA % ("time", "{}") + "; " + LLAMA % ("weather", DATA), "", [("time", {}), ("weather", BERN)]),
        ("Sure. " + LLAMA % ("time", "{}"), "Sure. " + LLAMA % ("time", "{}"), []),
        ('{"a": 1}', '{"a": 1}', []),
        ('{"name": "time"', '{"name": "time"', []),
        (LLAMA % ("unknown", "{}"), LLAMA % ("unknown", "{}"), []),
        ("<|py no", "<|py no", []),
    ],
}


@pytest.mark.parametrize(("name", "number"), [(name, i) for name, cases in CASES.items() for i in range(len(cases))])
def test_calls_and_content_however_the_text_is_cut(name: str, number: int) -> None:
    text, want, calls = CASES[name][number]
    parser, rng = parser_named(name), random.Random(number)
    for longest in (len(text), 1, 1, 1, 7) if len(text) < 1000 else (len(text), 4000):
        stream, content, found, begin = ToolStream(parser, TOOLS, None, "tool_calls"), "", list[dict[str, Any]](), 0
        while begin < len(text):
            end = min(len(text), begin + rng.randint(0, longest))  # a token may have no text yet
            shown, new = stream.push(text[begin:end], end == len(text))
            content, found, begin = content + shown, found + new, end
        assert (content, stream.rest) == (want, "")
        assert [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in found] == calls
        assert [one["index"] for one in found] == list(range(len(calls)))


@pytest.mark.parametrize("name", CASES)
@given(st.text(" \n\t", max_size=3), st.text(" \n\t", max_size=3), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_white_space_around_calls_changes_nothing(name: str, before: str, after: str, count: int) -> None:
    call = {"hermes": HERMES, "llama3": LLAMA}[name] % ("weather", DATA)
    split = parser_named(name).split((before + call + after) * count, start=True, final=True, tools=TOOLS)
    assert split.content.strip() == ""
    assert [(one.name, json.loads(one.arguments)) for one in split.calls] == [("weather", BERN)] * count


def test_content_before_a_call_is_not_held_back() -> None:
    split = parser_named("hermes").split("Sure, I look <", start=True, final=False, tools=TOOLS)
    assert (split.content, split.rest) == ("Sure, I look", " <")


def test_a_template_has_the_format_of_its_markers() -> None:
    qwen = '{% if tools %}… <tool_call>\n{"name": <function-name>}\n</tool_call>{% endif %}'
    llama = 'Respond in the format {"name": function name, "parameters": dictionary}.{{ "<|start_header_id|>" }}'
    found = [parser_of(template) for template in (qwen, llama, "{{ messages }}")]
    assert [None if one is None else one.name for one in found] == ["hermes", "llama3", None]
    assert set(parsers()) == {"hermes", "llama3"}
    with pytest.raises(UsageError, match="did you mean hermes"):
        parser_named("hermse")
