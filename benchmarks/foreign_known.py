"""Labels for failures that `foreign.py` finds: the script in foreign_failures/ that shows a failure alone, and what it is.

wrong result        nothing documents it, and nothing warns
unused weights      no result depends on them
documented limit    the documentation or the design says so
ours                the law asks too much
open                not looked into
"""

from __future__ import annotations

import re
from typing import Any

BUG, UNUSED, LIMIT, OURS, OPEN = "wrong result", "unused weights", "documented limit", "ours", "open"
# what fails in a causal language model, as "model type, law, detail"; the script that shows it without us; and what it is
KNOWN: tuple[tuple[str, str, str], ...] = (
    (r".* every_weight no gradient: [^ ]*indexer", "deepseek_indexer", LIMIT),
    (r"big_bird every_weight", "big_bird_pooler", UNUSED),
    (r"(falcon_mamba|mamba|jamba|zamba) chunked in chunks", "mamba_chunks", BUG),
    (r"bamba chunked", "bamba_step", BUG),
    (r"(nemotron_h|zamba2) chunked", "nemotron_h_step", BUG),
    (r"moshi chunked", "moshi_window", BUG),
    (r"git chunked", "git_mask", BUG),
    (r"(roberta.*|camembert|data2vec-text|xlm-roberta.*|xmod) chunked row 1", "roberta_left_padded_decode", BUG),
    (
        r"(bart|bigbird_p.*|blenderbot.*|marian|mbart|mvp|pegasus|plbart|trocr|whisper) (padded|chunked) row 1",
        "bart_left_padding",
        LIMIT,
    ),
    (r"llama4 padded document", "llama4_packed", BUG),
    (r".* padded document 1 packed", "bamba_packed", LIMIT),
    (r".* padded ValueError: `causal_conv1d_fn` can't keep", "causal_conv1d_packed", LIMIT),
    (r"rwkv chunked", "rwkv_step", BUG),
    (r"roformer .* by (up to )?[0-9.]+e-(0[6-9]|[1-9]\d) of", "", OURS),  # a table of float32 is no exact rotation
    (r"cpmant", "cpmant_prompt", LIMIT),
    (r"prophetnet", "prophetnet_streams", BUG),
    (r"xlnet (chunked|padded) RuntimeError", "xlnet_mask", BUG),
    (r"(xlnet|roc_bert) every_weight", "other_inputs", LIMIT),
    (r"reformer", "reformer_chunks", LIMIT),
    (r"recurrent_gemma padded row 1", "recurrent_gemma_padding", BUG),
    (r"rwkv padded row 1", "rwkv_mask", LIMIT),
    (r"xlm padded row 1", "xlm_mask", BUG),
    (r"hrm_text gradient", "hrm_text_gradient", LIMIT),
    (r"deepseek_v4 (chunked|padded) row 1", "deepseek_v4_padding", BUG),
    (r"deepseek_v4 every_weight", "deepseek_v4_hash", LIMIT),
    (r"longcat_flash every_weight", "longcat_flash_experts", UNUSED),
    (r"blt (chunked|padded)", "blt_patches", BUG),
    (r"zaya every_weight", "", OURS),  # a random router of one expert for each token leaves some without any
)


# the same for the other roles of foreign_roles.py
BARTS = "bart|bigbird_pegasus|blenderbot|blenderbot-small|led|marian|mbart|mvp|pegasus|pegasus_x|plbart"
LEFT_PADDED = r"(%s) (padded|chunked) row 1, \d+ padded on the left"
KNOWN_BY_ROLE: dict[str, tuple[tuple[str, str, str], ...]] = {
    "causal": KNOWN,
    "decoder": (
        (LEFT_PADDED % BARTS, "bart_left_padding", LIMIT),
        (r"(m2m_100|nllb-moe|seamless_m4t.*) chunked row 1", "m2m_100_left_padded_decode", BUG),
        (r"prophetnet", "prophetnet_streams", BUG),
        (r"led every_weight no gradient: [^ ]*_global", "encoder_inputs", LIMIT),
        # rotated queries meet unrotated keys of the source, and `foreign_roles.py` gives no decoder_position_ids
        (r"t5gemma2 (padded|chunked) row 1", "", OURS),
        (r"t5gemma2 every_weight no gradient: [^ ]*multi_modal", "encoder_inputs", LIMIT),
        (r"encoder-decoder", "", OURS),  # its decoder is a config of its own, which is not made one here
    ),
    "encoder": (
        (r"convbert padded", "convbert_padding", BUG),
        (r"mobilebert padded", "mobilebert_padding", BUG),
        (r"mpnet padded row 1", "mpnet_padding_id", BUG),
        (r"(big_bird|fnet|layoutlm|squeezebert) every_weight no gradient: [^ ]*pooler", "encoder_poolers", UNUSED),
        (r"(longformer|luke) every_weight", "encoder_inputs", LIMIT),
        (r"roc_bert every_weight", "other_inputs", LIMIT),
        (r"reformer", "reformer_chunks", LIMIT),
        (r"roformer .* by (up to )?[0-9.]+e-(0[6-9]|[1-9]\d) of", "", OURS),
    ),
    # an encoder with a table of positions, and without position_ids in the forward of the whole model
    "source": ((LEFT_PADDED % f"{BARTS}|prophetnet|encoder-decoder", "bart_left_padding", LIMIT),),
}


def known(role: str, kind: str, law: dict[str, Any]) -> tuple[str, str]:
    """(script, what it is) of a failure; nothing and `open` where it was not looked into."""
    failure = f"{kind} {law['law']} {law['detail']}"
    patterns = KNOWN_BY_ROLE.get(role, ())
    return next(((script, what) for pattern, script, what in patterns if re.match(pattern, failure)), ("", OPEN))
