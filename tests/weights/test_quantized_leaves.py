"""Formats and quantized leaves: sizes, saving and loading, casts, refusals."""

from math import prod
from pathlib import Path

import pytest
import torch
import yaml

import dovetail as dt
from dovetail.base.errors import DovetailError, FileError, SpecError
from dovetail.disk.model_files import QUANTIZATION_FILE
from dovetail.hf.load import opened
from dovetail.nn.ctx import Ctx
from dovetail.nn.declared_tensors import check_declared
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.ops.formats.format import format_from
from dovetail.ops.formats.kinds import FP8, NF4, Int4, Int8
from dovetail.proof.laws.mutant import BASE
from dovetail.weights.quantization.recipe import candidates, quantize, recipe_of, select

FORMATS = [
    *(Int8(), Int8(group=64), Int4(), Int4(group=128), Int4(zero_point=True)),
    *(NF4(), NF4(double=True), FP8(), FP8(per="tensor")),
]
SMALL = [Int8(), Int4(group=4), Int4(group=4, zero_point=True), NF4(group=4), NF4(group=4, double=True), FP8()]


def logits(model: dt.Transformer) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12)[None], Ctx(layout=TokenLayout.whole(1, 12)))


def quantized(format, text: str = BASE) -> dt.Transformer:
    model = dt.build(text)
    quantize(model, model.spec, select(model.spec, format))
    return model


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_bytes_are_those_of_theory_within_one_percent(format):
    shape = (2, 704, 2048)
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tensors = format.encode(w)
    declared = format.tensors(shape)
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {n: (t.shape, t.dtype) for n, t in declared.items()}
    theory = prod(shape) * format.bits_per_weight(shape[-1]) / 8
    assert sum(t.nbytes for t in tensors.values()) == pytest.approx(float(theory), rel=0.01)


@pytest.mark.parametrize("format", SMALL, ids=str)
def test_a_saved_model_loads_bit_for_bit_and_stays_small(format, tmp_path: Path):
    model = quantized(format)
    dt.save(model, tmp_path / "m")
    loaded = dt.load(tmp_path / "m")
    assert recipe_of(loaded) == recipe_of(model) != {}
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(("field", "value"), [("width", -1), ("layers.0.mixer.head", -1), ("layers.0.ffn.hidden", 0)])
def test_an_edited_spec_beside_packed_weights_is_refused_by_its_field(field: str, value: int, tmp_path: Path):
    """Sizes of packed tensors were computed from the spec before it was checked."""
    dt.save(quantized(Int8()), tmp_path / "m")
    place = tmp_path / "m" / "dovetail.yaml"
    inner = spec = yaml.safe_load(place.read_text())
    *above, last = field.split(".")
    for key in above:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    place.write_text(yaml.safe_dump(spec))
    with pytest.raises(SpecError, match=last):
        dt.load(tmp_path / "m")


def test_dense_readers_get_the_decoded_weights(tmp_path: Path):
    model = quantized(Int4(group=4, zero_point=True))
    dt.save(model, tmp_path / "m")
    with opened(tmp_path / "m") as files:
        for path, tensor in files.tensors:
            assert torch.equal(tensor, tensor_at(model, path)), path


def test_a_cast_changes_the_dense_dtype_and_no_code():
    model = quantized(FP8())
    before = {name: tensor.clone() for name, tensor in model.named_buffers() if "weight_" in name}
    model.to(torch.bfloat16)
    after = dict(model.named_buffers())
    assert all(
        torch.equal(after[name].float(), tensor.float()) and after[name].dtype == tensor.dtype
        for name, tensor in before.items()
    )
    assert tensor_at(model, "layers.0.mixer.q.weight").dtype == torch.bfloat16
    assert logits(model).dtype == torch.bfloat16


def test_a_group_of_zeros_stays_zero():
    for format in SMALL:
        w = torch.zeros(3, 8)
        w[0, :4] = torch.tensor([1.0, -2.0, 0.5, 0.0])
        again = format.decode(format.encode(w), 8)
        assert torch.equal(again[1:], torch.zeros(2, 8))
        assert again.isfinite().all()


def test_router_head_and_embedding_stay_as_they_are():
    spec = dt.build(BASE).spec.set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20})
    names = {path.partition(".")[2].partition(".")[2] for path in candidates(spec)}
    assert names == {*(f"mixer.{x}" for x in "qkvo"), *(f"ffn.bank.{x}" for x in ("gate", "up", "down"))}


def test_refusals_name_the_path_and_what_to_do(tmp_path: Path):
    spec = dt.build(BASE).spec
    with pytest.raises(SpecError, match=r"layers.0.mixer.q: 28 inputs are not a multiple of the group of 64 \(choose another"):
        select(spec, Int4())
    with pytest.raises(SpecError, match=r"no leaf of this model matches"):
        select(spec, Int8(), skip=["*.mixer.qq"])
    with pytest.raises(SpecError, match="did you mean int4"):
        format_from("int44")
    with pytest.raises(SpecError, match=r"format.gruop: int4 has no such field \(did you mean group"):
        format_from({"kind": "int4", "gruop": 3})
    model = quantized(Int8())
    with pytest.raises(
        SpecError, match=r"layers.0.mixer.q: is stored as QuantizedStorage, where the spec declares a plain linear leaf"
    ):
        check_declared(model, model.spec)


def test_a_damaged_recipe_is_refused(tmp_path: Path):
    dt.save(quantized(Int4(group=4)), tmp_path / "m")
    file = tmp_path / "m" / QUANTIZATION_FILE
    text = file.read_text()
    for changed, match in {
        text.replace("layers.0.mixer.q,", "layers.9.mixer.q,"): "layers.9.mixer.q is not a leaf of this spec",
        text.replace("group: 4", "group: 7"): "72 inputs are not a multiple|44 inputs are not a multiple",
        text.replace("group: 4", "group: 2"): r"is \[",
        text.replace("kind: int4", "kind: nf44"): "did you mean nf4",
        "formats: 3\n": "holds no list called formats",
    }.items():
        assert changed != text
        file.write_text(changed)
        with pytest.raises((FileError, SpecError), match=match):
            dt.load(tmp_path / "m")


def test_scales_that_are_not_finite_are_refused(tmp_path: Path):
    model = quantized(Int8())
    model.get_buffer("layers.0.mixer.q.weight_scale")[0] = float("nan")
    with pytest.raises(DovetailError, match=r"layers.0.mixer.q.weight_scale holds nan"):
        dt.save(model, tmp_path / "m")
