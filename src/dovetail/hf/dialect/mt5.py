"""mT5: T5 1.1 in many languages, whose logits are not scaled (Xue et al. 2020)."""

from __future__ import annotations

from dovetail.hf.dialect.t5 import T5
from dovetail.hf.field import Copy
from dovetail.hf.table import Form, Row

MT5 = T5.variant(
    "mt5",
    forms=(
        Form(
            architecture="MT5ForConditionalGeneration",
            auto="AutoModelForSeq2SeqLM",
            tensors=(Row("lm_head.weight", "head.out.weight"),),
            fields=(Copy("tie_word_embeddings", "head.tied"),),
        ),
        Form(architecture="MT5Model", auto="AutoModel", answer="last_hidden_state", head={"head": None}),
    ),
    defaults={"dropout_rate": 0.1, "feed_forward_proj": "gated-gelu"},
)
