"""ModernBERT: an encoder with RoPE, gated FFNs, windows in most layers, and no norm before its first (Warner et al. 2024)."""

from __future__ import annotations

from dovetail.hf.classes import Classes, Pooling, classified
from dovetail.hf.convert import CONCAT
from dovetail.hf.field import ACTIVATIONS, SIZES, Choice, Copy
from dovetail.hf.layer import FULL, SLIDING, LocalAttention, RotaryByType
from dovetail.hf.table import HOUSEKEEPING, LAYERNORM, Dialect, Form, Row, rows

NORM = {"kind": "layernorm", "shift": False}
MIXER = {"kind": "attention", "mask": "full"}


TYPES = LocalAttention()
ROPES = RotaryByType(
    TYPES, {FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)}, scaled=(FULL, SLIDING)
)
TRANSFORM = (*rows("head.dense", "head.dense"), *rows("head.norm", "head.norm", *LAYERNORM))
LAYER_OF_ITS_OWN = (
    Choice("classifier_activation", "head.act", ACTIVATIONS),
    Copy("classifier_bias", "head.dense_bias"),
    Copy("norm_eps", "head.norm.eps"),
    Copy("norm_bias", "head.norm.shift"),
)
OF_HEADS = {f"classifier_{name}" for name in ("activation", "bias", "dropout", "pooling")}
OF_LOSSES = {"sparse_prediction", "sparse_pred_ignore_index"}
OF_KERNELS = {"deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"}
OLD = {"layer_norm_eps", "position_embedding_type"}  # norm_eps is the one that is read
CLASSIFIER = {"act": "gelu", "norm": NORM, "dense_bias": False}
CLASSIFIER_TENSORS = (*TRANSFORM, *rows("classifier", "head.out"))
CLASSIFIER_FIELDS = (*LAYER_OF_ITS_OWN, Classes(), Copy("classifier_dropout", "head.dropout"))


MODERNBERT = Dialect(
    name="modernbert",
    forms=(
        Form(architecture="ModernBertModel", auto="AutoModel", answer="last_hidden_state", head={"head": None}),
        Form(
            architecture="ModernBertForMaskedLM",
            auto="AutoModelForMaskedLM",
            head={"head": {"kind": "masked_lm", "norm": NORM, "dense_bias": False}},
            prefix="model.",
            tensors=(*TRANSFORM, Row("decoder.weight", "head.out.weight"), Row("decoder.bias", "head.bias")),
            fields=(*LAYER_OF_ITS_OWN, Copy("decoder_bias", "head.bias"), Copy("tie_word_embeddings", "head.tied")),
        ),
        classified(
            "ModernBert",
            "Sequence",
            "model.",
            {**CLASSIFIER, "kind": "classifier"},
            CLASSIFIER_TENSORS,
            (*CLASSIFIER_FIELDS, Pooling("classifier_pooling", "head.pooling")),
        ),
        classified(
            "ModernBert", "Token", "model.", {**CLASSIFIER, "kind": "token_classifier"}, CLASSIFIER_TENSORS, CLASSIFIER_FIELDS
        ),
    ),
    spec={
        "embed_norm": NORM,
        "norm": NORM,
        "layers": [{"norm": NORM, "wire": "pre_norm", "mixer": MIXER, "ffn": {"kind": "glu", "act": "gelu"}}],
        "init": {"kind": "normal", "residual": False},
    },
    fields=(
        *SIZES,
        Copy("norm_eps", "norm.eps", "embed_norm.eps", "layers.*.norm.eps"),
        Copy("norm_bias", "norm.shift", "embed_norm.shift", "layers.*.norm.shift"),
        Copy("attention_bias", "layers.*.mixer.bias", "layers.*.mixer.out_bias"),
        Copy("mlp_bias", "layers.*.ffn.bias"),
        Copy("embedding_dropout", "dropout"),
        Copy("mlp_dropout", "layers.*.ffn.dropout"),
        Copy("initializer_range", "init.spread"),
        Choice("hidden_activation", "layers.*.ffn.act", ACTIVATIONS),
        TYPES,
        ROPES,
    ),
    fixed={"attention_dropout": 0.0},  # theirs drops attention probs and the branch's output with one rate
    ignored=HOUSEKEEPING
    | {"decoder_bias", "initializer_cutoff_factor", "tie_word_embeddings", *OF_HEADS, *OF_LOSSES, *OF_KERNELS, *OLD},
    tensors=(
        Row("embeddings.tok_embeddings.weight", "embed.table"),
        *rows("embeddings.norm", "embed_norm", *LAYERNORM),
        *rows("layers.{}.attn_norm", "layers.{}.mixer_norm", *LAYERNORM),
        *(
            Row(f"layers.{{}}.attn.Wqkv.{leaf}", *(f"layers.{{}}.mixer.{name}.{leaf}" for name in "qkv"), convert=CONCAT)
            for leaf in ("weight", "bias")
        ),
        *rows("layers.{}.attn.Wo", "layers.{}.mixer.o"),
        *rows("layers.{}.mlp_norm", "layers.{}.ffn_norm", *LAYERNORM),
        *(
            Row(f"layers.{{}}.mlp.Wi.{leaf}", *(f"layers.{{}}.ffn.{name}.{leaf}" for name in ("gate", "up")), convert=CONCAT)
            for leaf in ("weight", "bias")
        ),
        *rows("layers.{}.mlp.Wo", "layers.{}.ffn.down"),
        *rows("final_norm", "norm", *LAYERNORM),
    ),
)
