"""Tools by `dovetail serve`, a real process, and the official client. A constraint makes texts with calls certain, so that the
model need not have learned to call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from real_server import Real, real_server, write_directory

pytest.importorskip("llguidance")
TEMPLATE = """{% if tools %}{% for t in tools %}tool: {{ t.function | tojson }}
{% endfor %}write <tool_call>{}</tool_call>
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }} {{ c.function.arguments.city }}</tool_call>{% endfor %}{{ '\\n' }}{% endfor %}assistant:"""
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Ulm"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Looks it up.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "sun", "parameters": {"$ref": "#/$defs/place", "$defs": {"place": PARAMETERS}}}},
]
ASKED = [{"role": "user", "content": "the cat"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture(scope="module")
def real(trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with real_server(write_directory(*trained, tmp_path_factory.mktemp("tools") / "small", TEMPLATE)) as one:
        yield one


def streamed(real: Real, **fields: Any) -> tuple[str, dict[int, dict[str, str]], str | None]:
    """The content, the calls by index, and the finish reason of a stream."""
    content, calls, finish = "", dict[int, dict[str, str]](), None
    stream = real.openai.chat.completions.create(model=real.model, messages=ASKED, stream=True, temperature=0, **fields)
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            own = calls.setdefault(call.index, {"name": "", "arguments": ""})
            own["name"] += call.function.name or ""
            own["arguments"] += call.function.arguments or ""
        finish = choice.finish_reason or finish
    return content, calls, finish


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "finish"),
    [
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "weather"}}, "stop"),
        ({"type": "function", "function": {"name": "sun"}}, "stop"),
    ],
    ids=["required", "named", "named with a reference"],
)
def test_a_tool_that_must_be_called_is_called_by_its_schema(real: Real, choice: Any, finish: str) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 500}
    answer = real.openai.chat.completions.create(model=real.model, messages=ASKED, temperature=0, **fields).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name in (("weather", "sun") if choice == "required" else (choice["function"]["name"],))
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Ulm")
    assert (answer.message.content, answer.finish_reason) == (None, finish)
    content, calls, ended = streamed(real, **fields)
    assert (content, ended) == ("", finish)
    assert calls == {0: {"name": call.function.name, "arguments": call.function.arguments}}


@pytest.mark.quick(1)
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_the_model_chooses_are_found_in_its_text(real: Real, parallel: bool) -> None:
    text = f"Sure. {CALL}\n{CALL.replace('weather', 'sun')}"
    fields = {"tools": TOOLS, "parallel_tool_calls": parallel, "max_tokens": 250, "extra_body": {"guided_choice": [text]}}
    answer = real.openai.chat.completions.create(model=real.model, messages=ASKED, temperature=0, **fields).choices[0]
    names = [call.function.name for call in answer.message.tool_calls]
    assert names == (["weather", "sun"] if parallel else ["weather"])
    assert len({call.id for call in answer.message.tool_calls}) == len(names)
    assert (answer.message.content, answer.finish_reason) == ("Sure.", "tool_calls")
    content, calls, finish = streamed(real, **fields)
    assert (content, finish) == ("Sure.", "tool_calls")
    assert [calls[i]["name"] for i in range(len(names))] == names


def test_text_without_a_call_and_no_tools_are_plain_answers(real: Real) -> None:
    for fields in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        answer = real.chat(messages=ASKED, guided_choice=["<tool_call>no</tool_call> "], max_tokens=100, **fields).json()
        choice = answer["choices"][0]
        assert choice["message"]["content"] == "<tool_call>no</tool_call> "
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


def test_the_template_gets_the_tools_and_the_calls_of_the_history(real: Real) -> None:
    called = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    history = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    ids = real.http.post("/tokenize", json={"messages": history, "tools": TOOLS}).json()["tokens"]
    text = real.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert "Looks it up." in text
    assert "<tool_call>weather Ulm</tool_call>" in text
    assert "tool: rain" in text
    shown, hidden = (
        real.chat(messages=history, tools=TOOLS, tool_choice=choice, max_tokens=1).json()["usage"]["prompt_tokens"]
        for choice in ("auto", "none")
    )
    assert shown == len(ids) > hidden


REFUSED = {
    "an unknown tool": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "wether"}}},
    "required without tools": {"tool_choice": "required"},
    "an unknown choice": {"tools": TOOLS, "tool_choice": "all"},
    "two of one name": {"tools": [TOOLS[0], TOOLS[0]]},
    "no function": {"tools": [{"type": "function"}]},
    "another kind": {"tools": [{"type": "web_search"}]},
    "a bad name": {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    "many": {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(200)]},
    "two constraints": {"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"},
    "functions": {"functions": [{"name": "f"}]},
    "arguments that are no object": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]
    },
    "a message of nothing": {"messages": [{"role": "user"}]},
    "a remote schema": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "http://127.0.0.1:1/schema"}}}],
        "tool_choice": "required",
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_tools_that_are_refused(real: Real, name: str) -> None:
    answer = real.chat(**{"messages": ASKED, **REFUSED[name]})
    assert answer.status_code == 400, answer.text


def test_a_template_without_tools_refuses_them(served) -> None:
    body = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 2}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "does not render tools" in answer.json()["error"]["message"]
    answer = served.http.post("/v1/chat/completions", json={**body, "tool_choice": "auto"})
    assert "does not render tools" in answer.json()["error"]["message"]
