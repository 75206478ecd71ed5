"""`dovetail generate` on directories that transformers saved: the streamed text is that of its own greedy decoding."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import llama_like
from hf_form import FormPair
from hf_pair import Pair
from test_families import FAMILIES
from test_other_families import bart, t5
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from dovetail.base.errors import PROSE, printable
from dovetail.cli import main

NEW = 24
SOURCES = {"t5": t5, "bart": bart}
DECODERS = {"llama": llama_like, "gpt2": None, **FAMILIES}
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 40, "vocab_size": 62}


def alphabet(size: int) -> Tokenizer:
    """A tokenizer.json of one character a token, so that every id has a text of its own."""
    words = {chr(ord("A") + i) if i else " ": i for i in range(size)}
    engine = Tokenizer(models.WordLevel(words, unk_token=" "))
    engine.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    engine.decoder = decoders.Fuse()
    return engine


def model_of(family: str) -> Any:
    draw = random.Random(f"writes {family}")
    if family in SOURCES:
        return FormPair(family, "AutoModelForSeq2SeqLM", SOURCES[family](draw), 0).theirs
    return Pair(family, GPT2 if family == "gpt2" else DECODERS[family](draw), 0).theirs


def call(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["generate", *args])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.quick(6)
@pytest.mark.parametrize("family", [*DECODERS, *SOURCES])
def test_the_streamed_text_is_the_reference_s(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, answers = model_of(family), family in SOURCES
    settings = theirs.generation_config
    settings.eos_token_id, settings.pad_token_id, settings.bos_token_id = None, 0, None
    settings.decoder_start_token_id = 3 if answers else None
    settings.forced_eos_token_id = settings.forced_bos_token_id = None
    theirs.save_pretrained(tmp_path)
    engine = alphabet(theirs.config.get_text_config().vocab_size)
    engine.save(str(tmp_path / "tokenizer.json"))
    prompt = "DOVE TAIL"
    ids = torch.tensor([engine.encode(prompt).ids])
    with torch.no_grad():
        made = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)[0].tolist()
    new = made[1 if answers else ids.shape[1] :]
    assert len(new) == NEW
    wanted = engine.decode(new)
    told = json.loads(call(capsys, str(tmp_path), prompt, "--max-tokens", str(NEW), "--json"))
    assert told["tokens"] == new
    assert told["text"] == wanted
    assert told["finish"] == "length"
    assert (
        call(capsys, str(tmp_path), prompt, "--max-tokens", str(NEW))
        == f"{'' if answers else prompt}{printable(wanted, None, PROSE)}\n"
    )
    said = json.loads((tmp_path / "generation_config.json").read_text())  # now one of the tokens ends the text
    (tmp_path / "generation_config.json").write_text(json.dumps({**said, "eos_token_id": [new[9], new[9]]}))
    told = json.loads(call(capsys, str(tmp_path), prompt, "--max-tokens", str(NEW), "--json"))
    assert told["tokens"] == new[: new.index(new[9]) + 1]
    assert told["text"] == engine.decode(told["tokens"][:-1])
    assert told["finish"] == "end"
