"""Mamba-2: Mamba with one decay a head; z, x, B, C and Δ in one matrix, x, B and C in one convolution (Dao & Gu 2024)."""

from __future__ import annotations

from typing import Any

from dovetail.core.errors import SpecError
from dovetail.model import Model
from dovetail.port.convert import CHANNELS, STACK
from dovetail.port.dialect.mamba import MAMBA
from dovetail.port.space import Expand, selective
from dovetail.port.table import Config, Row, Same, Settings, look

MIXER = "layers.{}.mixer"
LIMIT = "time_step_limit"


class Heads:
    """Heads are as many as fill the inner width."""

    names = ("num_heads",)

    def give(self, spec: Model) -> dict[str, Any]:
        inner, head = look(spec, "layers.*.mixer.inner"), look(spec, "layers.*.mixer:mamba2.head")
        return {"num_heads": inner // head} if isinstance(inner, int) and isinstance(head, int) else {}

    def take(self, config: Config) -> Settings:
        count, head = config.get("num_heads"), config.get("head_dim")
        inner = Expand("expand", "inner").take(config)["inner"]
        if isinstance(count, int) and isinstance(head, int) and count * head != inner:
            raise SpecError("config.num_heads", f"{count} heads of {head} do not fill the inner width, {inner}")
        return {}


class NoLimit:
    """The step width may be anything above 0."""

    names = (LIMIT,)

    def give(self, spec: Model) -> dict[str, Any]:
        return {}

    def take(self, config: Config) -> Settings:
        said = config.get(LIMIT)
        if said is None:
            return {}
        low, high = said if isinstance(said, (list, tuple)) and len(said) == 2 else (said, None)
        high = high.get("__float__") if isinstance(high, dict) else high
        if low != 0 or high not in (float("inf"), "Infinity"):
            raise SpecError(f"config.{LIMIT}", f"{said!r} is unsupported", "supported: [0, Infinity]")
        return {}


MAMBA2 = MAMBA.but(
    "mamba2",
    architecture="Mamba2ForCausalLM",
    layer={"mixer": {"kind": "mamba2", "bias": False}},
    without=tuple(row.theirs for row in selective(MIXER, MIXER)),
    fields=(
        Same("head_dim", "layers.*.mixer.head"),
        Heads(),
        NoLimit(),
        Same("n_groups", "layers.*.mixer.groups"),
        Same("layer_norm_epsilon", "norm.eps", "layers.*.norm.eps", "layers.*.mixer.norm.eps"),
        Expand("expand", "layers.*.mixer.inner"),
    ),
    tensors=(
        Row(f"{MIXER}.in_proj.weight", *(f"{MIXER}.{name}.weight" for name in ("z", "x", "b", "c", "dt")), convert=STACK),
        Row(f"{MIXER}.conv1d.weight", *(f"{MIXER}.conv_{name}" for name in "xbc"), convert=STACK.then(CHANNELS)),
        Row(f"{MIXER}.conv1d.bias", *(f"{MIXER}.conv_{name}_bias" for name in "xbc"), convert=STACK),
        Row(f"{MIXER}.dt_bias", f"{MIXER}.dt_bias"),
        Row(f"{MIXER}.A_log", f"{MIXER}.a_log"),
        Row(f"{MIXER}.D", f"{MIXER}.skip"),
        Row(f"{MIXER}.norm.weight", f"{MIXER}.norm.scale"),
        Row(f"{MIXER}.out_proj.weight", f"{MIXER}.o.weight"),
    ),
    fixed={"use_bias": False},  # theirs has two biases on Δ, of which only the sum counts
    infinite=frozenset({LIMIT}),
    ignored=("chunk_size", "time_step_rank"),
    defaults={"initializer_range": 0.1, "head_dim": 64, "n_groups": 8, "state_size": 128, "tie_word_embeddings": False},
)
