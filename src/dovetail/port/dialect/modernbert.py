"""ModernBERT: an encoder with rope, gated ffns, windows in most layers, and no norm before its first (Warner et al. 2024)."""

from __future__ import annotations

from typing import Any

from dovetail.core.errors import SpecError
from dovetail.model import Model
from dovetail.port.classes import Classes
from dovetail.port.convert import STACK
from dovetail.port.layer import FULL, LAYER_TYPES, SLIDING, LayerTypes, RotaryByType
from dovetail.port.table import (
    ACTIVATIONS,
    HOUSEKEEPING,
    LAYERNORM,
    Config,
    Dialect,
    Field,
    Form,
    Named,
    Row,
    Same,
    Settings,
    look,
    rows,
)

NORM = {"kind": "layernorm", "shift": False}
MIXER = {"kind": "attention", "mask": "everything"}
WINDOW, PERIOD = "local_attention", "global_attn_every_n_layers"


class Local(LayerTypes):
    """Windows that reach half of `local_attention` to either side; the first layer reads what the embedding's norm gave."""

    def __init__(self) -> None:
        super().__init__("num_hidden_layers", self.every_third)
        self.names = (LAYER_TYPES, WINDOW, PERIOD)

    @staticmethod
    def every_third(config: Config, layer: int) -> str:
        """The first of three layers is full."""
        every = config.get(PERIOD, 3)
        if type(every) is not int or every < 1:
            raise SpecError(f"config.{PERIOD}", f"{every!r} is not a whole number above 0")
        return SLIDING if layer % every else FULL

    def give(self, spec: Model) -> dict[str, Any]:
        sizes = [look(block, "mixer.mask:window.size") for block in spec.layers]
        found = [size for size in sizes if isinstance(size, int)]
        words = [SLIDING if isinstance(size, int) else FULL for size in sizes]
        return {LAYER_TYPES: words, **({WINDOW: 2 * (min(found) - 1)} if found else {})}

    def take(self, config: Config) -> Settings:
        reach = config.get(WINDOW, 128)
        if type(reach) is not int or reach < 0:
            raise SpecError(f"config.{WINDOW}", f"{reach!r} is not a whole number from 0")
        masks = {FULL: "everything", SLIDING: {"kind": "window", "size": reach // 2 + 1}}
        found: Settings = {f"layers.{i}.mixer.mask": masks[word] for i, word in enumerate(self.words(config))}
        return {"layers.0.wire.first_norm": False, **found}


TYPES = Local()
ROPES = RotaryByType(
    TYPES, {FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)}, scaled=(FULL, SLIDING)
)
TRANSFORM = (*rows("head.dense", "head.dense", "weight", "bias"), *rows("head.norm", "head.norm", *LAYERNORM))
LAYER_OF_ITS_OWN = (
    Named("classifier_activation", "head.act", ACTIVATIONS),
    Same("classifier_bias", "head.dense_bias"),
    Same("norm_eps", "head.norm.eps"),
    Same("norm_bias", "head.norm.shift"),
)
CLASSIFIER = {"act": "gelu", "norm": NORM, "dense_bias": False}


def classified(kind: str, head: dict[str, Any], *fields: Field) -> Form:
    """A form with classes."""
    return Form(
        architecture=f"ModernBertFor{kind}Classification",
        auto=f"AutoModelFor{kind}Classification",
        head={"head": {**CLASSIFIER, **head}},
        prefix="model.",
        tensors=(*TRANSFORM, *rows("classifier", "head.out", "weight", "bias")),
        fields=(*LAYER_OF_ITS_OWN, Classes(), Same("classifier_dropout", "head.dropout"), *fields),
    )


class Pooling(Same):
    """Which vector of a row is classified."""

    WORDS = {"cls": "first", "mean": "mean"}

    def give(self, spec: Model) -> dict[str, Any]:
        words = [word for word, how in self.WORDS.items() if how == look(spec, self.ours[0])]
        return {self.names[0]: words[0]} if words else {}

    def take(self, config: Config) -> Settings:
        word = config.get(self.names[0], "cls")
        if word not in tuple(self.WORDS):
            raise SpecError(f"config.{self.names[0]}", f"{word!r} is not known", f"known: {', '.join(self.WORDS)}")
        return {self.ours[0]: self.WORDS[word]}


MODERNBERT = Dialect(
    name="modernbert",
    forms=(
        Form(architecture="ModernBertModel", auto="AutoModel", answer="last_hidden_state", head={"head": None}),
        Form(
            architecture="ModernBertForMaskedLM",
            auto="AutoModelForMaskedLM",
            head={"head": {"kind": "masked", "norm": NORM, "dense_bias": False}},
            prefix="model.",
            tensors=(*TRANSFORM, Row("decoder.weight", "head.table"), Row("decoder.bias", "head.bias")),
            fields=(*LAYER_OF_ITS_OWN, Same("decoder_bias", "head.bias"), Same("tie_word_embeddings", "head.tied")),
        ),
        classified("Sequence", {"kind": "classifier"}, Pooling("classifier_pooling", "head.how")),
        classified("Token", {"kind": "token_classifier"}),
    ),
    spec={
        "embed_norm": NORM,
        "norm": NORM,
        "layers": [{"norm": NORM, "wire": "pre", "mixer": MIXER, "ffn": {"kind": "glu", "act": "gelu"}}],
        "init": {"kind": "normal", "residual": False},
    },
    layers="num_hidden_layers",
    required=("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    fields=(
        Same("vocab_size", "vocab"),
        Same("hidden_size", "width"),
        Same("intermediate_size", "layers.*.ffn.hidden"),
        Same("num_attention_heads", "layers.*.mixer.heads"),
        Same("norm_eps", "norm.eps", "embed_norm.eps", "layers.*.norm.eps"),
        Same("norm_bias", "norm.shift", "embed_norm.shift", "layers.*.norm.shift"),
        Same("attention_bias", "layers.*.mixer.bias", "layers.*.mixer.out_bias"),
        Same("mlp_bias", "layers.*.ffn.bias"),
        Same("embedding_dropout", "dropout"),
        Same("mlp_dropout", "layers.*.ffn.dropout"),
        Same("initializer_range", "init.spread"),
        Named("hidden_activation", "layers.*.ffn.act", ACTIVATIONS),
        TYPES,
        ROPES,
    ),
    fixed={"attention_dropout": 0.0},  # theirs drops the pattern and also what is added, ours knows no such pair
    ignored=HOUSEKEEPING
    | {
        "classifier_activation",
        "classifier_bias",
        "classifier_dropout",
        "classifier_pooling",
        "cls_token_id",
        "decoder_bias",
        "deterministic_flash_attn",
        "gradient_checkpointing",
        "initializer_cutoff_factor",
        "layer_norm_eps",  # of old files; norm_eps is the one that is read
        "position_embedding_type",
        "reference_compile",
        "repad_logits_with_grad",
        "sep_token_id",
        "sparse_pred_ignore_index",
        "sparse_prediction",
        "tie_word_embeddings",
    },
    tensors=(
        Row("embeddings.tok_embeddings.weight", "embed.table"),
        *rows("embeddings.norm", "embed_norm", *LAYERNORM),
        *rows("layers.{}.attn_norm", "layers.{}.mixer_norm", *LAYERNORM),
        *(
            Row(f"layers.{{}}.attn.Wqkv.{leaf}", *(f"layers.{{}}.mixer.{name}.{leaf}" for name in "qkv"), convert=STACK)
            for leaf in ("weight", "bias")
        ),
        *rows("layers.{}.attn.Wo", "layers.{}.mixer.o", "weight", "bias"),
        *rows("layers.{}.mlp_norm", "layers.{}.ffn_norm", *LAYERNORM),
        *(
            Row(f"layers.{{}}.mlp.Wi.{leaf}", *(f"layers.{{}}.ffn.{name}.{leaf}" for name in ("gate", "up")), convert=STACK)
            for leaf in ("weight", "bias")
        ),
        *rows("layers.{}.mlp.Wo", "layers.{}.ffn.down", "weight", "bias"),
        *rows("final_norm", "norm", *LAYERNORM),
    ),
)
