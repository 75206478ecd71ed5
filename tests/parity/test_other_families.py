"""Every family that is more than a decoder: random tiny encoders, encoder–decoders and image models made by transformers, in
each of their forms, and ours with the same weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hf_form import FormPair, check_answers, check_form_gradients, check_form_there_and_back, check_greedy_from_sources
from test_families import FAMILIES as DECODERS

from dovetail.hf.dialect import DIALECTS

Draw = random.Random
Fields = dict[str, Any]
ACTS = ["gelu", "gelu_new", "relu", "silu"]
ORIGINAL = "original_max_position_embeddings"
NO_TOKENS = {f"{name}_token_id": None for name in ("pad", "bos", "eos")}


def some(draw: Draw) -> bool:
    return draw.random() < 0.5


def sizes(draw: Draw) -> Fields:
    """All different."""
    heads = draw.choice([2, 3, 5])
    return {
        "vocab_size": draw.choice([59, 62, 71]),
        "hidden_size": heads * draw.choice([4, 7, 9]),
        "num_attention_heads": heads,
        "num_hidden_layers": draw.choice([2, 3]),
        "intermediate_size": draw.choice([37, 44]),
        **NO_TOKENS,
    }


def bert(draw: Draw) -> Fields:
    return {
        **sizes(draw),
        "hidden_act": draw.choice(ACTS),
        "max_position_embeddings": 23,
        "type_vocab_size": draw.choice([1, 2, 3]),
        "layer_norm_eps": draw.choice([1e-12, 1e-2]),
        "hidden_dropout_prob": draw.choice([0.0, 0.1]),
        "attention_probs_dropout_prob": draw.choice([0.0, 0.2]),
        "classifier_dropout": draw.choice([None, 0.3]),
        "num_labels": draw.choice([2, 3, 5]),
    }


def t5(draw: Draw) -> Fields:
    gated = draw.choice(["relu", "gelu", "silu", "gated-gelu", "gated-silu", "gated-relu"])
    return {
        "vocab_size": draw.choice([59, 62, 71]),
        "d_model": draw.choice([28, 36]),
        "d_kv": draw.choice([6, 10]),
        "d_ff": draw.choice([37, 44]),
        "num_heads": draw.choice([3, 5]),
        "num_layers": 3,
        "num_decoder_layers": draw.choice([1, 2]),  # their cache has room for no more than the encoder's
        "relative_attention_num_buckets": draw.choice([8, 12, 32]),
        "relative_attention_max_distance": draw.choice([18, 40]),
        "layer_norm_epsilon": draw.choice([1e-6, 1e-2]),
        "dropout_rate": draw.choice([0.0, 0.1]),
        "feed_forward_proj": gated,
        **({} if some(draw) else {"tie_word_embeddings": False}),
        **NO_TOKENS,
    }


def electra(draw: Draw) -> Fields:
    made = bert(draw)
    return {**made, "embedding_size": draw.choice([10, made["hidden_size"]])}


def albert(draw: Draw) -> Fields:
    made = {name: value for name, value in bert(draw).items() if name != "classifier_dropout"}
    return {**made, "embedding_size": draw.choice([10, made["hidden_size"]]), "classifier_dropout_prob": 0.3}


def qwen2_vl_text(draw: Draw) -> Fields:
    made, pairs = sizes(draw), draw.choice([(1, 2, 3), (2, 1, 1), (1, 1, 2)])
    made["hidden_size"] = made["num_attention_heads"] * 2 * sum(pairs)
    rope = {name: value for name, value in draw.choice(ROPES).items() if name != "truncate"}
    return {
        **made,
        "num_key_value_heads": draw.choice([1, made["num_attention_heads"]]),
        "hidden_act": draw.choice(ACTS),
        "rms_norm_eps": draw.choice([1e-6, 1e-2]),
        "attention_dropout": draw.choice([0.0, 0.2]),
        "use_sliding_window": some(draw),
        "sliding_window": 5,
        "max_window_layers": draw.choice([0, 1]),
        "max_position_embeddings": 96,
        "rope_parameters": {**rope, "rope_theta": draw.choice([500.0, 10000.0]), "mrope_section": list(pairs)},
    }


def mt5(draw: Draw) -> Fields:
    return {**t5(draw), "feed_forward_proj": draw.choice(["gated-gelu", "gated-silu", "relu"])}


def roberta(draw: Draw) -> Fields:
    return {**bert(draw), "pad_token_id": draw.choice([0, 1, 3]), "max_position_embeddings": 27}


def distilbert(draw: Draw) -> Fields:
    made = bert(draw)
    names = {"dim": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
    own = {"hidden_dim": "intermediate_size", "activation": "hidden_act", "dropout": "hidden_dropout_prob", **names}
    kept = {name: made[name] for name in ("vocab_size", "max_position_embeddings", "num_labels", *NO_TOKENS)}
    return {**kept, **{mine: made[theirs] for mine, theirs in own.items()}, "seq_classif_dropout": 0.3}


def bart(draw: Draw) -> Fields:
    return {
        "vocab_size": draw.choice([59, 62, 71]),
        "d_model": draw.choice([24, 36]),
        "encoder_layers": 3,
        "decoder_layers": draw.choice([1, 2]),
        "encoder_attention_heads": draw.choice([3, 4]),
        "decoder_attention_heads": draw.choice([2, 6]),
        "encoder_ffn_dim": 37,
        "decoder_ffn_dim": 44,
        "max_position_embeddings": 71,
        "activation_function": draw.choice(ACTS),
        "scale_embedding": some(draw),
        "dropout": draw.choice([0.0, 0.1]),
        "activation_dropout": draw.choice([0.0, 0.2]),
        **NO_TOKENS,
    }


def image(draw: Draw, **more: Any) -> Fields:
    """Channels and squares of several sizes."""
    patch = draw.choice([3, 4])
    made = {name: value for name, value in sizes(draw).items() if name != "vocab_size" and name not in NO_TOKENS}
    return {
        **made,
        "image_size": patch * draw.choice([2, 3, 5]),
        "patch_size": patch,
        "num_channels": draw.choice([1, 2, 3]),
        "qkv_bias": some(draw),
        "hidden_act": draw.choice(ACTS),
        "layer_norm_eps": draw.choice([1e-12, 1e-2]),
        "attention_probs_dropout_prob": draw.choice([0.0, 0.2]),
        **more,
    }


def vit(draw: Draw) -> Fields:
    return image(draw, num_labels=draw.choice([2, 3, 5]), hidden_dropout_prob=draw.choice([0.0, 0.1]))


def dinov2(draw: Draw) -> Fields:
    made = image(draw, mlp_ratio=draw.choice([1, 2, 3]), use_swiglu_ffn=some(draw), use_mask_token=some(draw))
    made.pop("intermediate_size")
    return {**made, "layerscale_value": draw.choice([1.0, 0.3])}


ROPES: tuple[Fields, ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", "factor": 4.0, ORIGINAL: 16, "low_freq_factor": 0.5, "high_freq_factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 24, "beta_fast": 4.0, "beta_slow": 0.3},
)


def modernbert(draw: Draw) -> Fields:
    made = sizes(draw)
    layers, heads = 3, made["num_attention_heads"]
    flags = {name: some(draw) for name in ("norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "classifier_bias")}
    return {
        **made,
        **flags,
        "num_hidden_layers": layers,
        "hidden_size": heads * draw.choice([4, 6, 10]),
        "hidden_activation": draw.choice(ACTS),
        "classifier_activation": draw.choice(ACTS),
        "classifier_pooling": draw.choice(["cls", "mean"]),
        "classifier_dropout": draw.choice([0.0, 0.2]),
        "embedding_dropout": draw.choice([0.0, 0.2]),
        "mlp_dropout": draw.choice([0.0, 0.2]),
        "norm_eps": draw.choice([1e-5, 1e-2]),
        "local_attention": draw.choice([4, 6, 10]),
        "layer_types": draw.choice([None, [draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]]),
        "rope_parameters": {
            kind: {**draw.choice(ROPES), "rope_theta": draw.choice([500.0, 10000.0])}
            for kind in ("sliding_attention", "full_attention")
        },
        "max_position_embeddings": 96,
        "num_labels": draw.choice([2, 3, 5]),
        "tie_word_embeddings": some(draw),
    }


def test_every_family_is_compared_with_the_reference() -> None:
    """A family that is registered and not drawn here is not compared with anything."""
    assert set(DECODERS) | set(FAMILIES) == set(DIALECTS)
    for family, (_, autos) in FAMILIES.items():
        assert sorted(autos) == sorted(form.auto for form in DIALECTS[family].forms)


ENCODER = ("AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification", "AutoModelForTokenClassification")
SEQ2SEQ = ("AutoModelForSeq2SeqLM", "AutoModel")
FAMILIES: dict[str, tuple[Callable[[Draw], Fields], tuple[str, ...]]] = {
    "bert": (bert, (*ENCODER, "AutoModelForNextSentencePrediction")),
    "t5": (t5, SEQ2SEQ),
    "roberta": (roberta, ENCODER),
    "distilbert": (distilbert, ENCODER),
    "bart": (bart, SEQ2SEQ),
    "vit": (vit, ("AutoModel", "AutoModelForImageClassification")),
    "modernbert": (modernbert, ENCODER),
    "dinov2": (dinov2, ("AutoModel",)),
    "electra": (electra, ENCODER),
    "albert": (albert, ENCODER),
    "mt5": (mt5, SEQ2SEQ),
    "xlm-roberta": (roberta, ENCODER),
    "camembert": (roberta, ENCODER),
    "qwen2_vl_text": (qwen2_vl_text, ("AutoModel",)),
}
QUICK, ALL = 1, 20  # random configs of each family; the forms take turns, and every form is among the quick ones once
CASES = [
    pytest.param(family, forms[seed % len(forms)], seed, marks=[pytest.mark.slow] if seed >= max(QUICK, len(forms)) else [])
    for family, (_, forms) in FAMILIES.items()
    for seed in range(ALL)
]


@pytest.mark.quick(22)
@pytest.mark.filterwarnings("ignore:embeddings.mask_token:dovetail.hf.tensors.DroppedTensors")  # of pretraining alone
@pytest.mark.parametrize(("family", "auto", "seed"), CASES)
def test_ours_is_theirs(family: str, auto: str, seed: int) -> None:
    """Answers and hidden states with padding, there and back by files, greedy tokens where it writes any, and gradients."""
    fields = FAMILIES[family][0](Draw(f"{family} {seed}"))
    pair = FormPair(family, auto, fields, seed)
    question = pair.question([17, 9, 1])
    check_answers(pair, question)
    check_form_there_and_back(pair, question, frozenset({"embeddings.mask_token"}))
    if auto == "AutoModelForSeq2SeqLM":
        check_greedy_from_sources(pair, [9, 4, 6], left=family in ("t5", "mt5"))
    check_form_gradients(pair, question)
