"""Directories: what transformers saved we load, import and export; what we export transformers loads, bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from draws import llama_like
from hf_form import FormPair
from hf_pair import Pair, apart
from safetensors.torch import load_file, save_file
from test_families import FAMILIES
from test_other_families import FAMILIES as OTHERS

import dovetail
from dovetail.files.model_dir import INDEX_FILE, WEIGHTS_FILE, save
from dovetail.files.spec import load_spec
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import from_hf
from dovetail.hf.resolved import explicit
from dovetail.hf.survey import REFERENCE_VERSION, survey
from dovetail.hf.tensors import count_ahead
from dovetail.hf.write import KEPT_CONFIG, export_directory, import_directory
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at


@pytest.fixture(scope="module")
def pair() -> Pair:
    return a_pair("qwen2")


def a_pair(family: str) -> Pair:
    return Pair(family, FAMILIES[family](random.Random(f"{family} 0")), 0)


def tensors_of(place: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(place.glob("*.safetensors")) for name, t in load_file(file).items()}


def answers(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, Ctx(layout=TokenLayout.whole(*tokens.shape)))


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_there_and_back_by_directories(family: str, tmp_path: Path) -> None:
    pair = a_pair(family)
    pair.theirs.save_pretrained(tmp_path / "theirs")
    tokens = torch.tensor(pair.prompts([9, 9]))
    ours = dovetail.load(tmp_path / "theirs")
    assert not any(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers()))
    assert answers(ours, tokens).equal(answers(pair.ours, tokens))
    assert import_directory(tmp_path / "theirs", tmp_path / "ours") == (pair.spec, [])
    assert answers(dovetail.load(tmp_path / "ours"), tokens).equal(answers(pair.ours, tokens))
    assert export_directory(tmp_path / "ours", tmp_path / "back").dialect == family
    wanted, got = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "back")
    assert got.keys() == wanted.keys()
    assert all(got[name].equal(wanted[name]) and got[name].dtype == wanted[name].dtype for name in wanted)
    old, new = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "back"))
    assert explicit(from_hf(new)) == explicit(from_hf(count_ahead(old, DIALECTS[family], wanted)))
    assert new.get("max_position_embeddings") == old.get("max_position_embeddings")
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", experts_implementation="eager").eval()
    with torch.no_grad():
        assert again(input_ids=tokens).logits.equal(pair.theirs(input_ids=tokens).logits)
    assert dovetail.load(tmp_path / "back").part == pair.spec  # dovetail.yaml and config.json agree


FORMS = [(family, auto) for family, (_, autos) in OTHERS.items() for auto in autos]


@pytest.mark.quick(9)
@pytest.mark.filterwarnings("ignore:embeddings.mask_token:dovetail.hf.tensors.DroppedTensors")  # of pretraining alone
@pytest.mark.parametrize(("family", "auto"), FORMS)
def test_other_families_there_and_back_by_directories(family: str, auto: str, tmp_path: Path) -> None:
    pair = FormPair(family, auto, OTHERS[family][0](random.Random(f"{family} {auto}")), 0)
    pair.theirs.save_pretrained(tmp_path / "theirs")
    ours = dovetail.load(tmp_path / "theirs")
    wanted = dict(pair.ours.state_dict())
    assert ours.state_dict().keys() == wanted.keys()
    assert all(tensor.equal(wanted[name]) for name, tensor in ours.state_dict().items())
    import_directory(tmp_path / "theirs", tmp_path / "ours")
    assert export_directory(tmp_path / "ours", tmp_path / "back").form.architecture == type(pair.theirs).__name__
    files, back = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "back")
    assert set(files) - set(back) <= {"embeddings.mask_token"}  # of training alone
    assert all(tensor.equal(files[name]) for name, tensor in back.items())
    again = type(pair.theirs).from_pretrained(tmp_path / "back")
    assert all(again.state_dict()[name].equal(tensor) for name, tensor in pair.theirs.state_dict().items() if name in back)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_shards_and_dtypes_are_kept(pair: Pair, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = type(pair.theirs)(pair.theirs.config).to(dtype)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    assert (tmp_path / "theirs" / INDEX_FILE).is_file()
    loaded = dovetail.load(tmp_path / "theirs")
    assert {weight.dtype for weight in loaded.parameters()} == {dtype}
    export_directory(tmp_path / "theirs", tmp_path / "back", shard=10_000)
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert INDEX_FILE in names
    assert WEIGHTS_FILE not in names
    wanted, got = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "back")
    assert all(got[name].equal(wanted[name]) and got[name].dtype == dtype for name in wanted)
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert again.dtype == dtype
    assert all(one.equal(two) for one, two in zip(again.parameters(), theirs.parameters(), strict=True))


def test_a_model_made_here_is_read_there(tmp_path: Path) -> None:
    spec = load_spec("llama-tiny")
    model = build(spec, seed=3)
    save(model, spec, tmp_path / "ours", beside={"tokenizer.json": "{}"})
    ported = export_directory(tmp_path / "ours", tmp_path / "theirs")
    assert (ported.dialect, ported.form.architecture) == ("llama", "LlamaForCausalLM")
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    tokens = torch.arange(22).reshape(2, 11)
    with torch.no_grad():
        assert apart(theirs(input_ids=tokens).logits, answers(model, tokens)) <= 1e-5
    assert (tmp_path / "theirs" / "tokenizer.json").read_text() == "{}"


def test_a_tied_table_is_one_parameter_however_often_it_is_stored(tmp_path: Path) -> None:
    pair = Pair("llama", {**llama_like(random.Random(1)), "tie_word_embeddings": True}, 1)
    pair.theirs.save_pretrained(tmp_path / "a")
    files = tensors_of(tmp_path / "a")
    table = files["model.embed_tokens.weight"]
    for copy in (None, table.clone()):
        stored = files if copy is None else {**files, "lm_head.weight": copy}
        save_file(stored, tmp_path / "a" / WEIGHTS_FILE, metadata={"format": "pt"})
        loaded = dovetail.load(tmp_path / "a")
        assert tensor_at(loaded, "head.out.weight") is tensor_at(loaded, "embed.table")
        assert tensor_at(loaded, "embed.table").equal(table)


def test_ids_and_what_stands_beside_come_along(pair: Pair, tmp_path: Path) -> None:
    pair.theirs.save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": 5, "max_position_embeddings": 4321}))
    (tmp_path / "a" / "generation_config.json").unlink()
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE"):
        (tmp_path / "a" / name).write_text(name)
    (tmp_path / "a" / "modeling_own.py").write_text("raise SystemExit")
    import_directory(tmp_path / "a", tmp_path / "b")
    beside = {"tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json", KEPT_CONFIG}
    assert {path.name for path in (tmp_path / "b").iterdir()} == beside | {"dovetail.yaml", WEIGHTS_FILE}
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text()) == {"eos_token_id": 5}
    export_directory(tmp_path / "b", tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert (config["eos_token_id"], config["max_position_embeddings"]) == (5, 4321)


def test_the_reference_is_the_one_that_is_named() -> None:
    assert transformers.__version__ == REFERENCE_VERSION


def test_the_survey_counts_the_lines_of_each_file() -> None:
    rows = {row.model_type: row for row in survey()}
    assert set(rows) >= set(FAMILIES) | {"llama", "gpt2"}
    home = Path(dovetail.__file__).parent / "hf" / "dialect"
    for name in ("llama", "gpt2", "mistral"):
        assert rows[name].lines == len((home / f"{name}.py").read_text().splitlines())
    assert all(row.lines > 5 for row in rows.values())
