"""Files of tuning rows: what is read, and that every bad row is named by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.base.errors import FileError
from dovetail.base.limits import CHAT_MESSAGES
from dovetail.data.chats import read_answers, read_judged, read_preferences, read_prompts, read_rows
from dovetail.text.conversation import Completion, Conversation

USER, GOOD, BAD = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "assistant", "content": "no"},
)


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_answers_are_messages_or_completions(tmp_path: Path) -> None:
    rows = [{"messages": [USER, GOOD]}, {"prompt": "a", "completion": " b"}, {"prompt": [USER], "completion": "yes"}]
    found, _ = read_answers(write(tmp_path / "a.jsonl", *rows, ""))
    assert [row.examples for row in found] == [
        (Conversation((USER, GOOD)),),
        (Completion("a", " b"),),
        (Conversation((USER, GOOD), 1),),
    ]
    assert [row.where.rpartition(":")[2] for row in found] == ["1", "2", "3"]


def test_preferences_have_a_prompt_or_begin_alike(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "chosen": " b", "rejected": " c"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ]
    found, _ = read_preferences(write(tmp_path / "a.jsonl", *rows))
    pair = (Conversation((USER, GOOD), 1), Conversation((USER, BAD), 1))
    assert [row.examples for row in found] == [(Completion("a", " b"), Completion("a", " c")), pair, pair]
    assert read_rows(tmp_path / "a.jsonl")[0] == found


def test_prompts_carry_their_fields(tmp_path: Path) -> None:
    found, _ = read_prompts(write(tmp_path / "a.jsonl", {"prompt": "2+2=", "answer": "4"}, {"prompt": [USER]}))
    assert [one.prompt for one in found] == ["2+2=", Conversation((USER,))]
    assert found[0].fields["answer"] == "4"


BAD_ROWS = {
    "not json": ("{", "is not JSON"),
    "no object": ("[]", "is not a JSON object"),
    "nothing to learn": ({"text": "a"}, "has neither"),
    "no completion": ({"prompt": "a"}, '"completion" is missing'),
    "empty": ({"prompt": "a", "completion": ""}, '"completion" is empty'),
    "a number": ({"prompt": "a", "completion": 4}, '"completion" is int'),
    "no messages": ({"messages": []}, '"messages" is empty; give a list of messages'),
    "tools that are no list": ({"messages": [USER, GOOD], "tools": "add"}, '"tools" is not a list of objects'),
    "no role": ({"messages": [{"content": "a"}]}, 'message 1 of "messages": its "role" is missing'),
    "content is a list": (
        {"messages": [USER, {"role": "assistant", "content": []}]},
        'message 2 of "messages": its "content" is empty',
    ),
    "too many": ({"messages": [USER] * (CHAT_MESSAGES + 1)}, "the limit is 1,000"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_by_its_line(name: str, tmp_path: Path) -> None:
    row, problem = BAD_ROWS[name]
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}, row)
    with pytest.raises(FileError, match=r"a\.jsonl:2: ") as refused:
        read_answers(path)
    assert problem in str(refused.value)


def test_other_kinds_of_rows_are_refused_likewise(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b", "label": 1})
    with pytest.raises(FileError, match=r'a\.jsonl:1: its "label" is int; give true or false'):
        read_judged(path)
    path = write(tmp_path / "b.jsonl", {"chosen": [GOOD], "rejected": [BAD]})
    with pytest.raises(FileError, match="begin differently"):
        read_preferences(path)
    with pytest.raises(FileError, match='"chosen" is missing'):
        read_preferences(write(tmp_path / "c.jsonl", {"prompt": "a", "rejected": "b"}))
