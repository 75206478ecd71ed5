"""Every family that is more than a decoder: random tiny encoders, encoder–decoders and image models made by transformers, in
each of their forms, and ours with the same weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hf_form import FormPair, check_answers, check_form_gradients, check_form_there_and_back, check_greedy_from_sources

Draw = random.Random
Fields = dict[str, Any]
ACTS = ["gelu", "gelu_new", "relu", "silu"]
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


ENCODER = ("AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification", "AutoModelForTokenClassification")
FAMILIES: dict[str, tuple[Callable[[Draw], Fields], tuple[str, ...]]] = {
    "bert": (bert, ENCODER),
    "t5": (t5, ("AutoModelForSeq2SeqLM",)),
    "roberta": (roberta, ENCODER),
    "distilbert": (distilbert, ENCODER),
    "bart": (bart, ("AutoModelForSeq2SeqLM",)),
}
QUICK, ALL = 2, 20  # random configs of each family; the forms take turns, and every form is among the quick ones once
CASES = [
    pytest.param(family, forms[seed % len(forms)], seed, marks=[pytest.mark.slow] if seed >= max(QUICK, len(forms)) else [])
    for family, (_, forms) in FAMILIES.items()
    for seed in range(ALL)
]


@pytest.mark.parametrize(("family", "auto", "seed"), CASES)
def test_ours_is_theirs(family: str, auto: str, seed: int) -> None:
    """Answers and hidden states with padding, there and back by files, greedy tokens where it writes any, and gradients."""
    fields = FAMILIES[family][0](Draw(f"{family} {seed}"))
    pair = FormPair(family, auto, fields, seed)
    question = pair.question([17, 9, 1])
    check_answers(pair, question)
    check_form_there_and_back(pair, question)
    if pair.spec.encoder is not None:
        check_greedy_from_sources(pair, [9, 4, 6], left=family == "t5")
    check_form_gradients(pair, question)
