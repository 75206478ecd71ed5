import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.base.errors import FileError
from dovetail.files.model_dir import WEIGHTS_FILE, save
from dovetail.files.spec import SPEC_FILE, from_yaml
from dovetail.hf.load import load
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.spec.fold import declared

SPEC = from_yaml("""
dovetail: 1
width: 28
vocab: 62
layers:
- repeat: 2
  mixer: {heads: 6, kv_heads: 2, head: 12, bias: true}
  ffn: {hidden: 44}
""")


def learned(spec):
    return [d.path for d in declared(spec) if d.weight.learned]


@pytest.fixture
def saved(tmp_path):
    save(build(SPEC, seed=3), SPEC, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_bit_for_bit_in_their_dtype(tmp_path, dtype, tied):
    spec = SPEC.replace("head.tied", tied)
    model = build(spec, dtype=dtype, seed=5)
    with torch.no_grad():
        tensor_at(model, "embed.table")[3, 4] = -0.0
        tensor_at(model, "embed.table")[5, 6] = torch.finfo(dtype).max
    save(model, spec, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert loaded.part == spec
    for path in learned(spec):
        one, two = tensor_at(model, path), tensor_at(loaded, path)
        assert one.dtype == two.dtype == dtype
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), path
    assert (loaded.head.out.weight is loaded.embed.table) == tied
    for (name, one), (_, two) in zip(model.named_buffers(), loaded.named_buffers(), strict=True):
        assert torch.equal(one, two), name
        assert one.dtype == two.dtype


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_refused_and_the_old_model_stays(saved, value):
    before = (saved / WEIGHTS_FILE).read_bytes()
    model = build(SPEC, seed=5)
    with torch.no_grad():
        tensor_at(model, "layers.1.mixer.k.weight")[2, 3] = value
    with pytest.raises(FileError, match=rf"model: layers\.1\.mixer\.k\.weight holds {value}; nothing was written"):
        save(model, SPEC, saved)
    assert (saved / WEIGHTS_FILE).read_bytes() == before
    assert {path.name for path in saved.parent.iterdir()} == {"model"}


def test_mixed_dtypes_are_kept(tmp_path):
    model = build(SPEC, dtype=torch.bfloat16)
    model.norm.to(torch.float32)
    save(model, SPEC, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert tensor_at(loaded, "norm.scale").dtype == torch.float32
    assert tensor_at(loaded, "embed.table").dtype == torch.bfloat16


def test_a_loaded_model_gives_the_same_logits_and_can_be_trained(saved):
    model, loaded = build(SPEC, seed=3), load(saved)
    tokens = torch.arange(7)[None]
    one, two = model(tokens, Ctx(layout=TokenLayout.whole(1, 7))), loaded(tokens, Ctx(layout=TokenLayout.whole(1, 7)))
    assert torch.equal(one, two)
    two.sum().backward()
    assert all(weight.grad is not None for weight in loaded.parameters())


def test_the_file_holds_the_learned_weights_alone_each_once(saved):
    assert sorted(load_file(saved / WEIGHTS_FILE)) == sorted(learned(SPEC))
    assert "head.out.weight" not in learned(SPEC)
    assert {path.name for path in saved.iterdir()} == {SPEC_FILE, WEIGHTS_FILE}
    assert {path.name for path in saved.parent.iterdir()} == {"model"}


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def drop(tensors):
    del tensors["layers.1.mixer.k.weight"]


def add(tensors):
    tensors["layers.2.mixer.k.weight"] = torch.zeros(2)


def transpose(tensors):
    tensors["layers.0.ffn.down.weight"] = tensors["layers.0.ffn.down.weight"].T.contiguous()


def whole_numbers(tensors):
    tensors["norm.scale"] = tensors["norm.scale"].long()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop, r"layers\.1\.mixer\.k\.weight is missing"),
        (add, r"layers\.2\.mixer\.k\.weight is not a weight of this spec"),
        (transpose, r"layers\.0\.ffn\.down\.weight is \[44, 28\]; the spec says \[28, 44\]"),
        (whole_numbers, r"norm\.scale holds torch\.int64"),
    ],
)
def test_a_file_that_does_not_fit_the_spec_is_refused(saved, change, says):
    rewrite(saved / WEIGHTS_FILE, change)
    with pytest.raises(FileError, match=rf"model: {says}"):
        load(saved)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_truncated_file_is_refused(saved, keep):
    path = saved / WEIGHTS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    with pytest.raises(FileError, match=r"model\.safetensors: is damaged"):
        load(saved)


def test_a_header_that_lies_about_its_size_is_refused(saved):
    path = saved / WEIGHTS_FILE
    whole = path.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + size])
    header["norm.scale"]["data_offsets"][1] += 10**12
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])
    with pytest.raises(FileError, match=r"model\.safetensors: is damaged"):
        load(saved)


@pytest.mark.parametrize("name", [WEIGHTS_FILE, SPEC_FILE])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(FileError, match=name):
        load(saved)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileError, match="nowhere: no such directory"):
        load(tmp_path / "nowhere")


def test_saving_again_replaces_the_model_with_all_its_files(saved):
    """A chat template or generation config of the old model would silently apply to the new one."""
    stale = ("chat_template.jinja", "generation_config.json", "imported_config.json", "tokenizer.json", "config.json")
    for name in stale:
        (saved / name).write_text("{}")
    model = build(SPEC, seed=4)
    save(model, SPEC, saved, beside={"tokenizer.json": "new"})
    assert torch.equal(tensor_at(load(saved), "embed.table"), tensor_at(model, "embed.table"))
    assert {path.name for path in saved.iterdir()} == {SPEC_FILE, WEIGHTS_FILE, "tokenizer.json"}
    assert (saved / "tokenizer.json").read_text() == "new"
    assert {path.name for path in saved.parent.iterdir()} == {"model"}


def test_a_directory_without_a_model_is_never_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("ten years")
    (tmp_path / "file").write_text("also mine")
    for name in ("thesis", "file"):
        with pytest.raises(FileError, match=f"{name}: exists and is not a model directory"):
            save(build(SPEC), SPEC, tmp_path / name)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "ten years"
    assert (tmp_path / "file").read_text() == "also mine"


def test_a_failed_save_leaves_the_old_model_whole(saved, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    old = (saved / WEIGHTS_FILE).read_bytes()
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(FileError, match="No space left"):
            save(build(SPEC, seed=9), SPEC, saved)
    assert (saved / WEIGHTS_FILE).read_bytes() == old
    assert {path.name for path in saved.parent.iterdir()} == {"model"}
    save(build(SPEC, seed=9), SPEC, saved)
    assert (saved / WEIGHTS_FILE).read_bytes() != old
    assert {path.name for path in saved.parent.iterdir()} == {"model"}


def test_a_link_to_a_model_directory_is_followed(saved):
    link = saved.with_name("link")
    link.symlink_to("model")
    save(build(SPEC, seed=8), SPEC, link)
    assert link.is_symlink()
    assert torch.equal(tensor_at(load(saved), "embed.table"), tensor_at(build(SPEC, seed=8), "embed.table"))
    assert {path.name for path in saved.parent.iterdir()} == {"model", "link"}


def test_a_model_that_was_set_aside_is_named_and_then_replaced(saved):
    """The process dies between the two renames of a file system that cannot exchange directories."""
    aside = saved.with_name(".model.999999999-0123abcd.old")
    saved.rename(aside)
    with pytest.raises(FileError, match=r"a replacement was interrupted; rename .*0123abcd\.old to restore it"):
        load(saved)
    save(build(SPEC, seed=8), SPEC, saved)
    assert aside.is_dir()  # deleted once there is a model again
    save(build(SPEC, seed=8), SPEC, saved)
    assert {path.name for path in saved.parent.iterdir()} == {"model"}
