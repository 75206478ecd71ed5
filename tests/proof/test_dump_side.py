"""A dump against a model that runs here: clean dumps in every form of an engine are equal, seeded bugs are found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dumps import Taps, flat, like_vllm, write_dump
from models import llama
from torch import nn

import dovetail
from dovetail.base.errors import DovetailError, FileError
from dovetail.proof.compare.check import Verdict
from dovetail.proof.compare.dump import Dump
from dovetail.proof.compare.dump_check import verify_dump
from dovetail.proof.compare.sides import NativeSide
from dovetail.proof.compare.transformers_side import TransformersSide

LAYERS = range(3)
ROWS = torch.randint(0, 62, (2, 21), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return llama(tmp_path_factory.mktemp("llama"))


def dumped(places: tuple[Path, Path], place: Path, plant: Callable[[Any], None] = lambda model: None, **more: Any) -> Verdict:
    dtype = more.pop("dtype", torch.float32)
    model = TransformersSide(places[1]).load_module(dtype)
    with torch.no_grad():
        plant(model)
    return verify_dump(NativeSide(places[0]), Dump(write_dump(place / "dump", model, ROWS, **more)))


def test_a_dump_with_names_of_a_checkpoint_is_equal(places: tuple[Path, Path], tmp_path: Path) -> None:
    verdict = dumped(places, tmp_path, steps=3)
    assert verdict.status == "equal"
    assert [one.name for one in verdict.passes] == ["forward", "decode B"]
    assert {len(one.comparison.taps) for one in verdict.passes} == {65}  # 20 per layer, the embedding, the last norm, the head
    assert not verdict.comparison.missing
    assert max(tap.exact for one in verdict.passes for tap in one.comparison.taps) > 0  # it was compared, in float32


def test_a_dump_in_bfloat16_is_rounding(places: tuple[Path, Path], tmp_path: Path) -> None:
    assert dumped(places, tmp_path, dtype=torch.bfloat16).status == "rounding"


def engine(taps: Taps) -> Taps:
    return flat(like_vllm(taps, LAYERS))


def split(taps: Taps, rank: int) -> Taps:
    """Half of every sharded tensor; of a fused one, half of each of its parts."""
    parts = {"qkv_proj": (48, 16, 16), "gate_up_proj": (44, 44), "logits": (62,)}
    found = dict(taps)
    for name, x in taps.items():
        widths = parts.get(name.rpartition(".")[2])
        if widths is not None:
            found[name] = torch.cat([part.chunk(2, -1)[rank] for part in x.split(widths, -1)], -1)
    return found


SHARDING = {"*.qkv_proj": -1, "*.gate_up_proj": -1, "logits": -1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_flat_padded_and_sharded_tensors_are_matched(places: tuple[Path, Path], tmp_path: Path, ranks: int) -> None:
    more: dict[str, Any] = {"ranks": split, "sharding": SHARDING} if ranks == 2 else {}
    verdict = dumped(places, tmp_path, change=engine, steps=2, **more)
    assert verdict.status == "equal"
    compared = {tap.address for tap in verdict.comparison.taps}
    assert {
        f"layers.{i}.{path}" for i in LAYERS for path in ("mixer.q", "mixer.k", "mixer.v", "ffn.gate", "ffn.up")
    } <= compared
    assert {f"layers.{i}" for i in LAYERS} <= compared


def renamed(taps: Taps) -> Taps:
    """Names of no checkpoint, with the pairs of queries and keys interleaved."""
    names = {"input_layernorm": "attn_norm", "self_attn.q_proj": "Qcur", "self_attn.k_proj": "Kcur", "self_attn.v_proj": "Vcur"}
    names |= {"self_attn.o_proj.in": "kqv_out", "self_attn.o_proj": "attn_out", "post_attention_layernorm": "ffn_norm"}
    names |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj.in": "ffn_swiglu", "": "l_out"}
    found: Taps = {"result_output": taps["logits"], "result_norm": taps["model.norm"], "inp_embd": taps["model.embed_tokens"]}
    for i in LAYERS:
        for theirs, name in names.items():
            x = taps[f"model.layers.{i}.{theirs}".rstrip(".")]
            if name in ("Qcur", "Kcur"):
                x = x.unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3)
            found[f"{name}-{i}"] = x
    return found


def test_names_of_no_checkpoint_are_matched_by_value(places: tuple[Path, Path], tmp_path: Path) -> None:
    verdict = dumped(places, tmp_path, change=renamed)
    assert verdict.status == "equal"
    compared = {tap.address for tap in verdict.comparison.taps}
    paths = ("mixer.q", "mixer.k", "mixer.o.in", "mixer.o", "ffn.down.in", "ffn.gate", "ffn.up")
    assert {f"layers.{i}.{path}" for i in LAYERS for path in paths} <= compared


# -- seeded bugs ----------------------------------------------------------------------------------------------------


def swapped(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = mlp.up_proj.weight.data.clone(), mlp.gate_proj.weight.data.clone()


def perturbed(model: Any) -> None:
    model.model.layers[2].self_attn.o_proj.weight *= 1 + 0.01 * torch.randn(48, 48, generator=torch.Generator().manual_seed(0))


def other_eps(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-3


def other_base(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq.copy_(500_000.0 ** -(torch.arange(0, 8, 2) / 8))


def unscaled(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 1.0


def late(model: Any) -> None:
    """Queries of layer 1 stand one position further than keys do."""
    import transformers.models.llama.modeling_llama as code

    attention, apply = model.model.layers[1].self_attn, code.apply_rotary_pos_emb
    rotary = model.model.rotary_emb

    def rotated(module: nn.Module, args: Any, kwargs: Any) -> None:
        def shifted(q: Any, k: Any, cos: Any, sin: Any, **more: Any) -> Any:
            positions = torch.arange(1, q.shape[2] + 1)[None]
            return apply(q, k, *rotary(q, positions), **more)[0], apply(q, k, cos, sin, **more)[1]

        code.apply_rotary_pos_emb = shifted

    def restored(module: nn.Module, args: Any, result: Any) -> None:
        code.apply_rotary_pos_emb = apply

    attention.register_forward_pre_hook(rotated, with_kwargs=True)
    attention.register_forward_hook(restored)


def no_residual(model: Any) -> None:
    """Layer 1 does not add its input to the output of attention."""
    layer, inputs = model.model.layers[1], dict[str, Any]()
    layer.register_forward_pre_hook(lambda m, args, kwargs: inputs.update(x=[*args, *kwargs.values()][0]), with_kwargs=True)
    layer.self_attn.register_forward_hook(lambda m, args, result: (result[0] - inputs["x"], *result[1:]))


def no_branch(model: Any) -> None:
    layer = model.model.layers[0]
    layer.self_attn.o_proj.register_forward_hook(lambda m, a, y: torch.zeros_like(y))


BUGS = {
    "gate and up": (swapped, "layers.1", "gate and up swapped"),
    "perturbed": (perturbed, "layers.2", None),
    "eps": (other_eps, "layers.1", "norm's eps"),
    "rope base": (other_base, "layers.0", "rope base"),
    "scale": (unscaled, "layers.1", "score scale"),
    "late": (late, "layers.1", "position offset"),
    "residual": (no_residual, "layers.1", None),
    "branch": (no_branch, "layers.0", "weight missing"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "plain") for name in BUGS),
        *(pytest.param(name, "engine", marks=pytest.mark.slow) for name in BUGS),
        *(pytest.param(name, "renamed", marks=pytest.mark.slow) for name in BUGS if name != "branch"),
    ],
)
def test_a_bug_is_found_in_its_layer(places: tuple[Path, Path], tmp_path: Path, name: str, form: str) -> None:
    plant, layer, cause = BUGS[name]
    verdict = dumped(places, tmp_path, plant, change={"plain": lambda taps: taps, "engine": engine, "renamed": renamed}[form])
    assert (verdict.status, verdict.layer) == ("structural", layer)
    if cause is not None:
        assert verdict.cause is not None
        assert verdict.cause.name == cause


@pytest.mark.quick(1)
@pytest.mark.parametrize("names", [("ffn_a", "ffn_b"), ("ffn_b", "ffn_a")])
def test_one_layer_that_fits_two_names_does_not_decide(
    places: tuple[Path, Path], tmp_path: Path, names: tuple[str, str]
) -> None:
    """With gate and up swapped in layer 1, the values of that layer are those of the other name."""

    def change(taps: Taps) -> Taps:
        found = renamed(taps)
        for i in LAYERS:
            for name, other in zip(names, ("ffn_gate", "ffn_up"), strict=True):
                found[f"{name}-{i}"] = found.pop(f"{other}-{i}")
        return found

    verdict = dumped(places, tmp_path, swapped, change=change)
    assert (verdict.layer, verdict.cause and verdict.cause.name) == ("layers.1", "gate and up swapped")


def test_a_layer_that_no_value_matches_is_named(places: tuple[Path, Path], tmp_path: Path) -> None:
    """Without names of modules, a layer whose output resembles nothing of ours cannot be matched; the verdict says so."""
    verdict = dumped(places, tmp_path, no_branch, change=renamed)
    assert (verdict.status, verdict.layer) == ("structural", "layers.1")
    (note,) = verdict.notes
    assert note == "no tensor of the dump could be matched with the output of layers.0: the difference may begin there"


def test_a_bug_in_cached_decoding_is_a_bug_of_the_decode_pass(places: tuple[Path, Path], tmp_path: Path) -> None:
    def plant(model: Any) -> None:
        def wrong(module: nn.Module, args: Any, result: Any) -> Any:
            return result * 1.1 if args[0].shape[1] == 1 else result

        model.model.layers[1].self_attn.o_proj.register_forward_hook(wrong)

    verdict = dumped(places, tmp_path, plant, steps=3)
    assert (verdict.status, verdict.deciding.name, verdict.layer) == ("structural", "decode B", "layers.1")


def test_positions_other_than_0_1_2_are_reported(places: tuple[Path, Path], tmp_path: Path) -> None:
    place = write_dump(tmp_path / "dump", TransformersSide(places[1]).load_module(torch.float32), ROWS)
    data = json.loads((place / "dump.json").read_text())
    data["passes"][0]["positions"] = [p + 1 for p in data["passes"][0]["positions"]]
    (place / "dump.json").write_text(json.dumps(data))
    result = dovetail.verify(str(places[0]), f"dump:{place}")
    assert result.status == "equal"
    assert "token 0 has position 1" in str(result)


def test_nan_in_a_dump_is_equal_to_nothing(places: tuple[Path, Path], tmp_path: Path) -> None:
    def change(taps: Taps) -> Taps:
        taps["model.layers.1"][0, 3, 5] = float("nan")
        return taps

    verdict = dumped(places, tmp_path, change=change)
    assert (verdict.status, verdict.layer) == ("non-finite", "layers.1")


# -- untrusted input ------------------------------------------------------------------------------------------------

DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "format": (lambda data: data.update(format="other"), "its format is 'other'"),
    "unknown key": (lambda data: data.update(extra=1), "unknown key 'extra'"),
    "path": (lambda data: data["passes"][0].update(files=["../secret.safetensors"]), "is a path, not the name"),
    "absolute path": (lambda data: data["passes"][0].update(files=["/etc/passwd"]), "is a path, not the name"),
    "lengths": (lambda data: data["passes"][0]["ids"].pop(), "one entry per token"),
    "negative": (lambda data: data["passes"][0]["ids"].__setitem__(0, -1), "whole numbers from 0"),
    "no pass": (lambda data: data.update(passes=[]), "1 to 4,096 forward passes"),
    "sharding": (lambda data: data.update(sharding={"*": 0}), "maps patterns of names to -1"),
    "dtype": (lambda data: data.update(dtype="int8"), "is not a dtype"),
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_a_damaged_dump_is_refused(tmp_path: Path, name: str) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2, 3)}, tmp_path / "0.safetensors")
    one = {"files": ["0.safetensors"], "ids": [1, 2], "sequences": [0, 0], "positions": [0, 1]}
    data: dict[str, Any] = {"format": "dovetail-dump-1", "engine": "", "dtype": "float32", "passes": [one]}
    damage, message = DAMAGE[name]
    damage(data)
    (tmp_path / "dump.json").write_text(json.dumps(data))
    with pytest.raises(DovetailError, match=re.escape(message)):
        Dump(tmp_path)


def test_a_dump_can_be_the_second_side_only(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="second side only"):
        dovetail.verify(f"dump:{tmp_path}", str(tmp_path))


def test_pickles_of_another_dumper_are_refused(tmp_path: Path) -> None:
    (tmp_path / "step=0___rank=0___dump_index=7___name=hidden.pt").write_bytes(b"PK")
    with pytest.raises(FileError, match="is a pickle"):
        Dump(tmp_path)


def test_a_link_out_of_the_dump_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    (tmp_path / "dump" / "0.safetensors").symlink_to(tmp_path / "secret.safetensors")
    one = {"files": ["0.safetensors"], "ids": [1], "sequences": [0], "positions": [0]}
    data = {"format": "dovetail-dump-1", "engine": "", "dtype": "float32", "passes": [one]}
    (tmp_path / "dump" / "dump.json").write_text(json.dumps(data))
    with pytest.raises(FileError, match="link out of the directory"):
        Dump(tmp_path / "dump")
