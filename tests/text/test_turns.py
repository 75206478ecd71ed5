"""Turns: exactly the answers are learned, with the token that ends them; what cannot be encoded exactly is refused."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken

from dovetail.base.errors import FileError
from dovetail.text.chat import ChatTemplate
from dovetail.text.conversation import Completion, Conversation, Encoded, TurnEncoder
from dovetail.text.learn import learn
from dovetail.text.tokenizer import END, Tokenizer

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "And 4 + 4?"},
    {"role": "assistant", "content": "8, <b>of course</b>"},
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn("What is 2 + 3? It is 5. user system assistant of course brief\n" * 30, 320)


@pytest.fixture(scope="module")
def chatml(tokenizer: Tokenizer) -> TurnEncoder:
    special = tokenizer.with_special(["<|im_start|>", "<|im_end|>"])
    return TurnEncoder(special, frozenset({special.id_of("<|im_end|>")}), ChatTemplate(CHATML, "here"))


def learned(encoder: TurnEncoder, one: Encoded) -> list[str]:
    """The text of each run of learned tokens, special tokens included."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], one.answer.astype(int), [0]])))
    runs = [one.ids[start:stop].tolist() for start, stop in edges.reshape(-1, 2)]
    return [encoder.tokenizer.engine.decode(run, skip_special_tokens=False) for run in runs]


def test_every_answer_is_learned_with_its_end_of_turn_token_and_nothing_else(chatml: TurnEncoder) -> None:
    (one,) = chatml.encode([("x:1", Conversation(MESSAGES))])
    assert learned(chatml, one) == ["It is 5.<|im_end|>", "8, <b>of course</b><|im_end|>"]
    assert one.answer[-1]  # the line end behind the last answer is never generated
    whole = chatml.tokenizer.prompt(chatml.template.render(MESSAGES, prompt=False), add_special=False)  # type: ignore[union-attr]
    assert one.ids.tolist() == whole[: len(one.ids)]


TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "<|call|>{{ call.function.name }}<|args|>{{ call.function.arguments | tojson }}<|end_call|>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(name: str, **arguments: int) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_template_renders_the_tools_of_each_row(tokenizer: Tokenizer) -> None:
    special = tokenizer.with_special(["<|im_start|>", "<|im_end|>", "<|call|>", "<|args|>", "<|end_call|>"])
    listed = "{% for t in tools or [] %}tool {{ t.function.name }}\n{% endfor %}" + TOOLS
    encoder = TurnEncoder(special, frozenset({special.id_of("<|im_end|>")}), ChatTemplate(listed, "here"))
    rows = [Conversation(MESSAGES, tools=tools) for tools in ((), (call("add"),), (call("add"), call("sub")), (call("add"),))]
    texts = [
        special.engine.decode(one.ids.tolist(), skip_special_tokens=False)
        for one in encoder.encode([("x", one) for one in rows])
    ]
    assert [text.partition("<|im_start|>")[0] for text in texts] == ["", "tool add\n", "tool add\ntool sub\n", "tool add\n"]
    assert len({text.partition("<|im_start|>")[2] for text in texts}) == 1
    prompts = [special.engine.decode(ids, skip_special_tokens=False) for ids in encoder.prompts([*rows[:2]])]
    assert [text.startswith("tool add") for text in prompts] == [False, True]
    deaf = TurnEncoder(special, frozenset({special.id_of("<|im_end|>")}), ChatTemplate(CHATML, "here"))
    with pytest.raises(FileError, match="here: the chat template does not render tools"):
        deaf.encode([("x", rows[1])])


@pytest.mark.parametrize("content", ["", "Let me add.", "a <|end_call|> in between"])
@pytest.mark.parametrize("calls", [1, 3])
def test_an_answer_with_special_tokens_inside_is_learned_whole(tokenizer: Tokenizer, content: str, calls: int) -> None:
    """A seeded bug learned tool calls up to the first special token in them."""
    special = tokenizer.with_special(["<|im_start|>", "<|im_end|>", "<|call|>", "<|args|>", "<|end_call|>"])
    encoder = TurnEncoder(special, frozenset({special.id_of("<|im_end|>")}), ChatTemplate(TOOLS, "here"))
    answer = {"role": "assistant", "content": content, "tool_calls": [call("add", a=i, b=2) for i in range(calls)]}
    messages = (*MESSAGES[:2], answer, {"role": "tool", "content": "5"}, {"role": "assistant", "content": "It is 5."})
    (one,) = encoder.encode([("x:1", Conversation(messages))])
    written = "".join(f'<|call|>add<|args|>{{"a": {i}, "b": 2}}<|end_call|>' for i in range(calls))
    assert learned(encoder, one) == [f"{content}{written}<|im_end|>", "It is 5.<|im_end|>"]
    (other,) = encoder.encode([("x:1", Conversation(messages[:3]))])
    assert learned(encoder, other) == [f"{content}{written}<|im_end|>"]


def test_what_is_before_an_answer_is_the_prompt_of_generation(chatml: TurnEncoder) -> None:
    (one,) = chatml.encode([("x:1", Conversation(MESSAGES, first=4))])
    (prompt,) = chatml.prompts([Conversation(MESSAGES[:4])])
    assert one.ids[~one.answer].tolist() == prompt
    assert learned(chatml, one) == ["8, <b>of course</b><|im_end|>"]


def test_many_conversations_are_rendered_at_once_and_stay_in_order(chatml: TurnEncoder) -> None:
    rows = [
        ("x:1", Conversation(({"role": "user", "content": str(i)}, {"role": "assistant", "content": f"{i}."})))
        for i in range(300)
    ]
    assert [learned(chatml, one) for one in chatml.encode(rows)] == [[f"{i}.<|im_end|>"] for i in range(300)]


def test_the_plain_template_needs_no_special_token_but_the_end(tokenizer: Tokenizer) -> None:
    encoder = TurnEncoder(tokenizer).plain()
    (one,) = encoder.encode([("x:1", Conversation(MESSAGES))])
    assert learned(encoder, one) == [f" It is 5.{END}", f" 8, <b>of course</b>{END}"]


def test_a_completion_ends_with_the_end_token(tokenizer: Tokenizer) -> None:
    encoder = TurnEncoder(tokenizer)
    (one,) = encoder.encode([("x:1", Completion("What is 2 + 3?", " It is 5."))])
    assert learned(encoder, one) == [f" It is 5.{END}"]
    assert one.ids[~one.answer].tolist() == tokenizer.prompt("What is 2 + 3?")


def test_a_model_without_an_end_token_is_refused(tokenizer: Tokenizer) -> None:
    other = Tokenizer(tokenizer.engine.from_str(tokenizer.engine.to_str().replace(END, "<stop>")))
    with pytest.raises(FileError, match="has no end token"):
        TurnEncoder(other).encode([("x:1", Completion("a", " b"))])
    encoder = TurnEncoder(other, frozenset({0}))
    assert encoder.encode([("x:1", Completion("a", " b"))])[0].ids[-1] == 0


BROKEN = {
    "a special token that the tokenizer splits": (CHATML.replace("<|im_end|>", "<|eot|>"), "'<|eot|>', which the tokenizer"),
    "no end of turn": (CHATML.replace("'<|im_end|>'", "''"), "no special token ends the answer"),
    "earlier turns are shortened": (
        "{% for m in messages %}<|im_start|>{{ m.content if loop.last else m.content[:2] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}",
        "writes a turn differently",
    ),
    "earlier answers are shortened": (
        CHATML.replace(
            "message['content']",
            "(message['content'][:2] if message['role'] == 'assistant' and not loop.last else message['content'])",
        ),
        "writes a turn differently",
    ),
    "the generation prompt is another": (CHATML.replace("assistant\n", "bot\n"), "writes a turn differently"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_template_that_disagrees_is_refused(name: str, chatml: TurnEncoder) -> None:
    text, problem = BROKEN[name]
    encoder = TurnEncoder(chatml.tokenizer, chatml.stop, ChatTemplate(text, "template.jinja"))
    with pytest.raises(FileError, match=problem.replace("|", r"\|")):
        encoder.encode([("chats.jsonl:7", Conversation(MESSAGES))])


def test_an_eos_token_that_the_tokenizer_splits_is_refused(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}", "here", {"eos_token": "</s>"})
    with pytest.raises(FileError, match="'</s>', which the tokenizer"):
        TurnEncoder(tokenizer, frozenset({0}), template).encode([("x:1", Conversation(MESSAGES))])


def test_a_token_over_the_edge_of_an_answer_is_refused() -> None:
    merging = learn("abcd " * 200, 300)
    assert len(merging.prompt("abcd")) == 1
    with pytest.raises(FileError, match=r"x\.jsonl:4: the tokens of the prompt change"):
        TurnEncoder(merging).encode([("x.jsonl:4", Completion("ab", "cd"))])
    engine = learn("ab\n\ncd " * 200, 300).with_special(["<|im_start|>", "<|im_end|>"])
    engine.engine.add_tokens([AddedToken("\n\n", normalized=False)])
    encoder = TurnEncoder(engine, frozenset({engine.id_of("<|im_end|>")}), ChatTemplate(CHATML, "here"))
    chat = Conversation(({"role": "user", "content": "ab"}, {"role": "assistant", "content": "\ncd"}))
    with pytest.raises(FileError, match="its first or last token merges"):
        encoder.encode([("x:1", chat)])


def test_messages_need_a_template_and_an_answer(tokenizer: Tokenizer, chatml: TurnEncoder) -> None:
    with pytest.raises(FileError, match="has no chat template"):
        TurnEncoder(tokenizer).encode([("x:1", Conversation(MESSAGES))])
    with pytest.raises(FileError, match="x:2: has no message of the role 'assistant'"):
        chatml.encode([("x:2", Conversation(MESSAGES[:2]))])
