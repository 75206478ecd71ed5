"""DINOv2: ViT with a learned scale per branch (LayerScale), and gated FFNs in its largest model (Oquab et al. 2023)."""

from __future__ import annotations

from dovetail.hf.convert import CONCAT
from dovetail.hf.dialect.vit import ATTENTION, EMBEDDINGS, MIXER, Image
from dovetail.hf.field import ACTIVATIONS, Copy
from dovetail.hf.gated import Activation, MlpRatio
from dovetail.hf.table import HOUSEKEEPING, LAYERNORM, Dialect, Form, Row, Skip, rows

NORM = {"kind": "layernorm", "eps": 1e-6}
IN = "encoder.layer.{}.mlp.weights_in"


DINOV2 = Dialect(
    name="dinov2",
    forms=(Form(architecture="Dinov2Model", auto="AutoModel", answer="pooler_output"),),
    spec={
        "embed": {"kind": "patches", "patch": 14},
        "position": {"kind": "learned", "length": 257},
        "layers": [{"norm": NORM, "wire": {"kind": "pre_norm", "layer_scale": 1.0}, "mixer": MIXER, "ffn": {"kind": "mlp"}}],
        "norm": NORM,
        "head": {"kind": "pooled_embedding", "pooling": "first"},
        "init": {"kind": "normal", "residual": False},
    },
    required=("hidden_size", "num_hidden_layers", "num_attention_heads"),
    defaults={"image_size": 224, "patch_size": 14, "num_channels": 3, "mlp_ratio": 4},
    fields=(
        Copy("hidden_size", "width"),
        Image(),
        MlpRatio(),
        Copy("num_attention_heads", "layers.*.mixer.heads"),
        Copy("qkv_bias", "layers.*.mixer.bias"),
        Copy("layerscale_value", "layers.*.wire.layer_scale"),
        Copy("layer_norm_eps", "norm.eps", "layers.*.norm.eps"),
        Copy("hidden_dropout_prob", "dropout"),
        Copy("attention_probs_dropout_prob", "layers.*.mixer.dropout"),
        Copy("initializer_range", "init.spread"),
        Activation("hidden_act", "layers.*.ffn.act", ACTIVATIONS),
    ),
    fixed={"drop_path_rate": 0.0},
    ignored=HOUSEKEEPING | {"apply_layernorm", "out_features", "out_indices", "reshape_hidden_states", "stage_names"},
    tensors=(
        *EMBEDDINGS,
        *ATTENTION,
        *rows("encoder.layer.{}.norm1", "layers.{}.mixer_norm", *LAYERNORM),
        *rows("encoder.layer.{}.norm2", "layers.{}.ffn_norm", *LAYERNORM),
        Row("encoder.layer.{}.layer_scale{branch}.lambda1", "layers.{}.wire.scale"),
        *rows("encoder.layer.{}.mlp.fc1", "layers.{}.ffn.up", where="layers.{}.ffn:mlp"),
        *rows("encoder.layer.{}.mlp.fc2", "layers.{}.ffn.down", where="layers.{}.ffn:mlp"),
        *(
            Row(f"{IN}.{leaf}", f"layers.{{}}.ffn.gate.{leaf}", f"layers.{{}}.ffn.up.{leaf}", convert=CONCAT)
            for leaf in ("weight", "bias")
        ),
        *rows("encoder.layer.{}.mlp.weights_out", "layers.{}.ffn.down", where="layers.{}.ffn:glu"),
        *rows("layernorm", "norm", *LAYERNORM),
    ),
    skips=(Skip("embeddings.mask_token", "the patch embedding that pretraining masks with"),),
    reset={"use_mask_token": False},
)
