"""`dovetail chat` and `dt.chat`: a conversation of several turns, its commands, and where it does not fit."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import InputError
from dovetail.cli import main
from dovetail.decoding.generation import Vocabulary
from dovetail.text.chat import ChatTemplate
from dovetail.text.learn import learn
from dovetail.text.tokenizer import END

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SPEC = "{width: 28, vocab: 290, layers: [{repeat: 2, mixer: {heads: 2, head: 14}, ffn: {hidden: 44}}]}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = learn("user: why? assistant: it was the age of wisdom, so it was\nsystem: be brief\n" * 20, 290)
    model = dt.build(dt.from_yaml(SPEC).set("vocab", tokenizer.size), seed=3)
    model.vocabulary = Vocabulary(
        tokenizer=tokenizer, stop=frozenset([tokenizer.id_of(END)]), chat_template=ChatTemplate(TEMPLATE, "of the test")
    )
    folder = tmp_path_factory.mktemp("chat") / "small"
    dt.save(model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_turn_is_traced_and_patched(place: Path) -> None:
    """The traced answer is that of a fork without listeners; a patch holds for one turn."""
    plain, looked = dt.chat(place, max_tokens=8), dt.chat(place, max_tokens=8)
    seen = dt.look.Trace("layers.1.in[pos=-1]", "head.logits")
    first = [plain.ask("why?").tokens, looked.ask("why?", trace=seen).tokens]
    assert first[0] == first[1]
    assert seen["layers.1.in"].shape == (1, 1, 28)
    assert len(seen["head.logits"][0]) == len(first[0])
    model = dt.load(place)
    both = model.trace(["why? it was", "why?"], "layers.1.in[pos=-1]")["layers.1.in"]
    torch.testing.assert_close(both[1:], model.trace(["why?"], "layers.1.in[pos=-1]")["layers.1.in"], rtol=1e-4, atol=1e-5)
    second = [plain.ask("it was?").tokens, looked.ask("it was?", patch={"layers.*.in[step=1:]": 0.0}).tokens]
    assert second[0][0] == second[1][0]
    assert second[0] != second[1]


def test_a_turn_sees_all_turns_before_it_and_computes_its_own_tokens(place: Path) -> None:
    talk = dt.chat(place, system="be brief", max_tokens=20)
    heard: list[str] = []
    answers = [talk.ask(text, heard.append) for text in ("why?", "why it was?", "it was?")]
    assert "".join(heard) == "".join(answer.text for answer in answers)
    model, said = dt.load(place), [{"role": "system", "content": "be brief"}]
    for text, answer in zip(("why?", "why it was?", "it was?"), answers, strict=True):
        said.append({"role": "user", "content": text})
        assert model.vocabulary is not None
        assert model.vocabulary.chat_template is not None
        prompt = model.vocabulary.chat_template.render(said)
        assert answer.tokens == dt.generate(model, prompt, max_tokens=20).tokens
        said.append({"role": "assistant", "content": answer.text})
    assert talk.messages == said
    assert talk.engine.hits >= 16 * (answers[1].prompt_tokens // 16 - 1)  # what was said before is in the cache


def test_turns_can_be_undone_and_forgotten(place: Path) -> None:
    talk = dt.chat(place, max_tokens=6)
    assert not talk.undo()
    first = talk.ask("why?").text
    talk.ask("it was?")
    assert talk.undo()
    assert len(talk.messages) == 2
    talk.forget()
    assert talk.messages == []
    assert talk.ask("why?").text == first


def test_the_oldest_turns_are_left_out_where_they_do_not_fit(place: Path) -> None:
    talk = dt.chat(place, system="be brief", max_tokens=8, longest=96)
    for _ in range(8):
        talk.ask("why it was? why?")
    assert talk.left_out > 2
    assert len(talk.messages) == 17
    with pytest.raises(InputError, match="room for 88; shorten it"):
        talk.ask("why? " * 200)
    assert len(talk.messages) == 17  # the message that did not fit is not part of it


def test_an_interrupted_answer_ends_there_and_stays(place: Path) -> None:
    talk, heard = dt.chat(place, max_tokens=50), list[str]()

    def interrupt(piece: str) -> None:
        heard.append(piece)
        if len(heard) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.ask("why?", interrupt)
    assert talk.messages[-1] == {"role": "assistant", "content": "".join(heard)}
    assert not talk.engine.busy
    talk.ask("it was?")
    assert len(talk.messages) == 4


def run(*args: str) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(list(args))
    return end.value.code


def test_b2_lines_of_stdin_are_messages_and_no_commands(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("why?\n\n/save precious.txt\n/bye\nwhy?\n"))
    (tmp_path / "precious.txt").write_text("precious")
    assert run("chat", str(place), "--max-tokens=5", "--system=be brief") == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 4, "each line is a message, and none a command"
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
    assert (tmp_path / "precious.txt").read_text() == "precious"
    monkeypatch.setattr(sys, "stdin", io.StringIO("why?\n/undo\n"))
    assert run("chat", str(place), "--max-tokens=5", "--json") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in answers] == ["why?", "/undo"]


@pytest.mark.slow
def test_a_terminal_has_commands_shows_a_prompt_and_ends_with_ctrl_d(place: Path, tmp_path: Path) -> None:
    said = tmp_path / "said.jsonl"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dovetail", "chat", str(place), "--max-tokens=5"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True) as child:
        os.close(theirs)
        shown = b""
        saves = [f"/save {name}\n".encode() for name in (said, said)]
        for line in (b"why?\n", *saves, b"/undo\n", b"/nonsense\n", b"\x04"):
            shown += _until(ours, "› ".encode())
            os.write(ours, line)
        assert child.wait(60) == 0
    os.close(ours)
    for text in ("5 tokens", "said.jsonl: written", "said.jsonl: exists already; choose another path", "turn is forgotten"):
        assert text in shown.decode()
    assert [one["role"] for one in json.loads(said.read_text())["messages"]] == ["user", "assistant"]


def _until(fd: int, wanted: bytes) -> bytes:
    read, end = b"", time.monotonic() + 60
    while wanted not in read:
        assert time.monotonic() < end, read
        read += os.read(fd, 4096)
    return read


def test_a_model_without_a_template_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = dt.build(dt.from_yaml(SPEC))
    tokenizer = learn("it was the age of wisdom\n" * 20, 290)
    model.vocabulary = Vocabulary(tokenizer=tokenizer)
    dt.save(model, tmp_path / "plain")
    assert run("chat", str(tmp_path / "plain")) == 4
    shown = capsys.readouterr()
    assert "has no chat template" in shown.err
    assert len([line for line in shown.err.splitlines() if "dovetail:" in line]) == 1
