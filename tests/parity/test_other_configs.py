"""Configs of encoders, encoder–decoders and image models as they lie on the hub, old names of tensors, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_form import FormPair
from hf_pair import apart
from hypothesis import given, settings, strategies as st

from dovetail.base.errors import DovetailError, FileError, SpecError
from dovetail.files.spec import load_spec
from dovetail.hf.hf import export_tensors, from_hf, import_tensors, to_hf
from dovetail.hf.tensors import DroppedTensors
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.spec.fold import parameters

HUB: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "hub_configs.json").read_text())
HUB["vit-base-patch16-224"]["id2label"] = {str(i): f"class {i}" for i in range(1000)}
# as transformers counts them, and: BART's bias of all logits, 1.1's own table; less DINOv2's square for pretraining
COUNTS = {
    "bert-base-uncased": 109_514_298,
    "all-MiniLM-L6-v2": 22_713_216,
    "roberta-base": 124_697_433,
    "distilbert-base-uncased-finetuned-sst-2-english": 66_955_010,
    "t5-small": 60_506_624,
    "flan-t5-small": 76_961_152,
    "bart-large-cnn": 406_340_696,
    "vit-base-patch16-224": 86_567_656,
    "dinov2-base": 86_579_712,
    "ModernBERT-base": 149_655_232,
}


@pytest.mark.parametrize("name", HUB)
def test_configs_of_the_hub_are_read(name: str) -> None:
    assert parameters(from_hf(HUB[name])) == COUNTS[name]


@pytest.mark.parametrize("name", HUB)
def test_what_is_written_is_plain_data_of_the_same_form(name: str) -> None:
    spec = from_hf(HUB[name])
    ported = to_hf(spec, HUB[name]["model_type"])
    assert [ported.form.architecture] == HUB[name]["architectures"]
    assert from_hf(json.loads(json.dumps(ported.config))) == spec


def test_tensors_under_their_old_names_are_read() -> None:
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 44, "vocab_size": 62}
    pair = FormPair("bert", "AutoModelForMaskedLM", sizes, 0)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    files = {}
    for name, tensor in pair.files.items():
        ending = next((end for end in old if name.endswith(end)), "")
        files[name.removesuffix(ending) + old.get(ending, "")] = tensor
    assert sum(name.endswith("gamma") for name in files) == 26
    files |= {"cls.seq_relationship.weight": torch.ones(2, 24), "bert.pooler.dense.bias": torch.ones(24)}
    wanted = import_tensors(pair.spec, pair.files)
    with pytest.warns(DroppedTensors, match="1 tensor"):
        got = import_tensors(pair.spec, files)
    assert got.keys() == wanted.keys()
    assert all(got[path].equal(tensor) for path, tensor in wanted.items())
    with pytest.raises(FileError, match=r"cls\.other: has no place"):
        import_tensors(pair.spec, {**files, "cls.other": torch.ones(1)})


def test_a_table_of_its_own_reaches_their_t5(tmp_path: Any) -> None:
    """Theirs ties what it makes itself, and keeps apart what a file holds twice."""
    spec = load_spec("t5-tiny").set("head.tied", False).set("head.scale", 1.0)
    ours = build(spec, seed=3)
    tensors = export_tensors(spec, {name: p.detach() for name, p in ours.named_parameters()})
    transformers.T5Config(**{k: v for k, v in to_hf(spec).config.items() if k != "model_type"}).save_pretrained(tmp_path)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(None, config=tmp_path, state_dict=tensors).eval()
    assert not theirs.lm_head.weight.equal(theirs.shared.weight)
    source, target = torch.arange(18).view(2, 9), torch.arange(10).view(2, 5)
    with torch.no_grad():
        encoder_output, layout = ours.encode(source, Ctx(layout=TokenLayout.whole(2, 9)))
        got = ours(target, Ctx(layout=TokenLayout.whole(2, 5), encoder_output=encoder_output, encoder_layout=layout))
        assert apart(got, theirs(input_ids=source, decoder_input_ids=target).logits) <= 1e-5


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("bert-base-uncased", {"is_decoder": True}, "config.is_decoder: True is unsupported"),
        ("bert-base-uncased", {"tie_word_embeddings": False}, "config.tie_word_embeddings"),
        ("bert-base-uncased", {"architectures": ["BertForPreTraining"]}, "config.architectures"),
        ("bert-base-uncased", {"position_embedding_type": "relative_key"}, "config.position_embedding_type"),
        ("roberta-base", {"pad_token_id": None}, "config.pad_token_id: None is not a whole number"),
        ("roberta-base", {"max_position_embeddings": 2}, "position.length"),
        ("t5-small", {"feed_forward_proj": "gated-mish"}, "config.feed_forward_proj: 'gated-mish' is unsupported"),
        ("flan-t5-small", {"num_layers": 0}, "config.num_layers"),
        ("t5-small", {"is_encoder_decoder": False}, "config.is_encoder_decoder"),
        ("bart-large-cnn", {"normalize_before": True}, "config.normalize_before"),
        ("vit-base-patch16-224", {"image_size": [224, 192]}, "config.image_size: [224, 192]"),
        ("vit-base-patch16-224", {"pooler_output_size": 12}, "config.pooler_output_size: 12 is unsupported"),
        ("vit-base-patch16-224", {"id2label": 7}, "config.id2label: 7 is not a mapping"),
        ("dinov2-base", {"drop_path_rate": 0.2}, "config.drop_path_rate"),
        ("dinov2-base", {"mlp_ratio": 2.5}, "config.mlp_ratio: 2.5"),
        ("ModernBERT-base", {"attention_dropout": 0.1}, "config.attention_dropout"),
        ("ModernBERT-base", {"local_attention": -1}, "config.local_attention: -1"),
        ("ModernBERT-base", {"layer_types": ["full_attention"]}, "config.layer_types"),
    ],
)
def test_what_is_not_known_in_a_config_is_named(name: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        from_hf({**HUB[name], **change})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("preset", "family", "sets", "path"),
    [
        ("bert-tiny", "bert", {"embed.types": 0}, "embed.types"),
        ("bert-tiny", "bert", {"layers.*.wire": "pre_norm"}, "layers.0.wire"),
        ("bert-tiny", "bert", {"head": "reward"}, "head"),
        ("bert-tiny", "distilbert", {}, "embed.types"),
        ("t5-tiny", "t5", {"encoder.layers.*.ffn.act": "gelu"}, "encoder.layers.0.ffn.act"),
        ("t5-tiny", "t5", {"head.scale": 0.5}, "head.scale"),
        ("t5-tiny", "t5", {"encoder.embed.shared": False}, "encoder.embed.shared"),
        ("vit-tiny", "vit", {"position.length": 60}, "position.length"),
        ("vit-tiny", "vit", {"embed.class_token": False}, "embed.class_token"),
        ("transformer-2017-tiny", "bart", {}, "position"),
    ],
)
def test_what_a_family_cannot_say_is_named_by_the_part(preset: str, family: str, sets: dict[str, Any], path: str) -> None:
    spec = load_spec(preset)
    for where, value in sets.items():
        spec = spec.set(where, value)
    with pytest.raises(SpecError) as refused:
        to_hf(spec, family)
    assert refused.value.path == path


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(HUB)), value=PLAIN)
def test_any_value_is_read_or_refused(data: st.DataObject, name: str, value: Any) -> None:
    config = HUB[name]
    field = data.draw(st.sampled_from(sorted(config)))
    shallow = {
        key: 2 for key in ("num_hidden_layers", "n_layers", "num_layers", "decoder_layers", "encoder_layers") if key in config
    }
    try:
        spec = from_hf({**config, **shallow, field: value})
    except DovetailError:
        return
    assert isinstance(spec, Model)
