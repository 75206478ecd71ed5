"""Dialect: one table that says how a family of Hugging Face models is read and written.

    spec      plain data of the model with one layer: what no config of the family changes
    forms     its model classes (language model, classifier …), each with a head and further tensors
    fields    config fields <-> paths of our spec
    tensors   tensor names of a checkpoint <-> paths of ours, where `{}` is the layer
    ahead     how its files store multi-token prediction

A dialect can express a spec if the config written from the spec reads back as the same spec. There is no second list of what is
supported: the path at which the two specs differ is the error.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.convert import IDENTITY, UNSTACK, Conversion, Interleave
from dovetail.hf.field import ABSENT, SIZES, Config, Field, value_at
from dovetail.model.model import Model

# fields of any config that do not change what the model computes: provenance, tokens, training, generation, output format
HOUSEKEEPING = frozenset(
    {
        *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "_num_labels"),
        *("architectures", "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "bos_token_id"),
        *("chunk_size_feed_forward", "cls_token_id", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype"),
        *("early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty"),
        *("finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label", "label2id"),
        *("length_penalty", "max_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams"),
        *("num_labels", "num_return_sequences", "output_attentions", "output_hidden_states", "output_past", "output_scores"),
        *("pad_token_id", "prefix", "problem_type", "remove_invalid_values", "repetition_penalty", "return_dict"),
        *("return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature"),
        *("tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config"),
        *("transformers_version", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache", "xla_device"),
    }
)
# fields of any config that older versions wrote with the one value that changes nothing
UNUSED: Mapping[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}


LAYERNORM = (("weight", "scale"), ("bias", "shift"))  # the leaves of a LayerNorm: their name, our name
LAYER = "layers.{}"
NUMBERED = {"{expert}": 0, "{branch}": 1}  # placeholders for a number in a tensor's name, and the first number


class Row:
    """One tensor of a checkpoint, our tensors that it holds, and the conversion between them.

    `{}` in a name is the layer, or the depth of multi-token prediction; `{after}` is the depth counted on from the layers. A
    path with `{all}` is one of every layer, all of which one tensor holds. A name with `{expert}` or `{branch}` is one tensor
    per expert (from 0) or per branch (from 1). `interleave` is a path of our spec whose value is the number of blocks in which
    our tensors alternate. `fused` is the parameter of a module of transformers that holds the tensors of all experts, where
    files hold them apart or under another name; those of several rows are concatenated along out. The row applies to a layer
    that has a value at `where` and none at `unless`: `layers.{}.ffn:glu`, `layers.{}.mixer.q_rank`.
    """

    def __init__(
        self,
        hf_name: str,
        *paths: str,
        convert: Conversion | None = None,
        interleave: str | None = None,
        where: str | None = None,
        unless: str | None = None,
        fused: str | None = None,
    ) -> None:
        self.fused = fused
        self.hf_name, self.paths, self.interleave, self.where, self.unless = hf_name, paths, interleave, where, unless
        self.numbered = any(mark in hf_name for mark in NUMBERED)
        self.convert = convert or (UNSTACK if self.numbered else IDENTITY)

    def applies(self, spec: Model, layer: int) -> bool:
        """Whether the row applies to a layer."""
        required, forbidden = (
            None if pattern is None else value_at(spec, pattern.replace("{}", str(layer))) not in (ABSENT, None)
            for pattern in (self.where, self.unless)
        )
        return required is not False and forbidden is not True

    def conversion(self, spec: Model, layer: int) -> Conversion:
        """The conversion for a layer of a spec with every size written out."""
        return (
            self.convert if self.interleave is None else Interleave(value_at(spec, self.interleave.replace("{}", str(layer))))
        )


def numbered(name: str, count: int) -> tuple[str, ...]:
    """`count` names for a name with a placeholder for a number; else the one name."""
    for mark, first in NUMBERED.items():
        if mark in name:
            return tuple(name.replace(mark, str(first + i)) for i in range(count))
    return (name,)


def rows(
    hf_module: str, module: str, *leaves: str | tuple[str, str], convert: Conversion | None = None, where: str | None = None
) -> tuple[Row, ...]:
    """Rows for several leaves of one module, by default its weight and bias:
    rows("h.{}.ln_1", "layers.{}.norm", ("weight", "scale"), ("bias", "shift"))."""
    pairs = [(leaf, leaf) if isinstance(leaf, str) else leaf for leaf in leaves or ("weight", "bias")]
    return tuple(Row(f"{hf_module}.{hf_leaf}", f"{module}.{leaf}", convert=convert, where=where) for hf_leaf, leaf in pairs)


# (path, value, requirement) where their code refuses a spec that their config can express
Limit = Callable[[Model], tuple[str, Any, str] | None]


@dc.dataclass(frozen=True)
class Skip:
    """Tensors of a checkpoint that are not imported; a load reports them."""

    pattern: str  # of their names
    reason: str


@dc.dataclass(frozen=True, kw_only=True, eq=False)  # compared by identity
class Form:
    """One model class of a family: its head, and the tensors it has besides the family's."""

    architecture: str  # the class of transformers
    auto: str = "AutoModelForCausalLM"  # the auto class that finds it
    answer: str = "logits"  # the field of its output that our model computes
    head: Any = None  # plain data that replaces fields of the family's spec
    prefix: str = ""  # of the names of the family's tensors
    tensors: tuple[Row, ...] = ()
    required: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    skips: tuple[Skip, ...] = ()  # tensors of other model classes of the family


@dc.dataclass(frozen=True, kw_only=True)
class Ahead:
    """Multi-token prediction in a family's files. A depth has a block as the layers have, one more of them in the config."""

    count: str  # the config field with the number of depths
    marker: str  # a tensor of each depth: a checkpoint has as many depths as it has of these
    default: int = 0  # of transformers, where a config does not have the field
    most: int | None = None  # the greatest number of depths that the names allow
    copies: Mapping[str, str] = dc.field(default_factory=dict)  # tensors of each depth that are second copies -> path of ours


def ahead_rows(rows: Sequence[Row], hf_block: str, *own: tuple[str, str]) -> tuple[Row, ...]:
    """The rows of a depth of multi-token prediction: those of a layer, with names that begin with `hf_block`, and its own, each
    a name and a path inside the depth."""

    def moved(path: str | None) -> str | None:
        return None if path is None else path.replace(LAYER, "mtp.{}.block")

    blocks = [
        Row(
            row.hf_name.replace(LAYER, hf_block),
            *(path.replace(LAYER, "mtp.{}.block") for path in row.paths),
            convert=row.convert,
            interleave=moved(row.interleave),
            where=moved(row.where),
            unless=moved(row.unless),
        )
        for row in rows
        if row.paths[0].startswith(f"{LAYER}.")
    ]
    return (*blocks, *(Row(name, f"mtp.{{}}.{path}") for name, path in own))


INV_FREQ = Skip("*.rotary_emb.inv_freq", "rotary frequencies, computed from the config")


@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Dialect:
    """One family; see the top of the file."""

    name: str  # its model_type
    forms: tuple[Form, ...]  # a config without `architectures` means the first
    spec: Mapping[str, Any]
    fields: tuple[Field, ...]
    tensors: tuple[Row, ...]
    layers: str = "num_hidden_layers"  # the config field with the number of layers
    required: tuple[str, ...] = (*(size.names[0] for size in SIZES), "num_hidden_layers")  # config fields without a default
    defaults: Mapping[str, Any] = dc.field(default_factory=dict)  # values of config fields that are left out
    encoder: str | None = None  # the config field with the number of encoder layers
    # config fields that, left out, have the value of another field, or one computed from the config
    fallbacks: Mapping[str, str | Callable[[Config], Any]] = dc.field(default_factory=dict)
    aliases: Mapping[str, str] = dc.field(default_factory=dict)  # older names of config fields -> their present names
    fixed: Mapping[str, Any] = dc.field(default_factory=dict)  # config fields with one supported value
    ignored: frozenset[str] = HOUSEKEEPING  # config fields that do not change what the model computes
    refused: Mapping[str, str] = dc.field(default_factory=dict)  # model class that is not supported -> why, and what to do
    skips: tuple[Skip, ...] = ()  # tensors of a checkpoint that are not imported
    copies: Mapping[str, str] = dc.field(default_factory=dict)  # name patterns of second copies -> the path of ours they equal
    ahead: Ahead | None = None  # multi-token prediction, where its files may have it
    reset: Mapping[str, Any] = dc.field(default_factory=dict)  # config fields about skipped tensors, and the value to write
    legacy_suffixes: Mapping[str, str] = dc.field(default_factory=dict)  # older endings of tensor names -> present ones
    infinite: frozenset[str] = frozenset()  # config fields whose numbers may be infinite
    limits: tuple[Limit, ...] = ()

    def variant(
        self,
        name: str,
        *,
        architecture: str | None = None,
        spec: Mapping[str, Any] | None = None,
        layer: Mapping[str, Any] | None = None,
        without: Sequence[str] = (),
        fields: Sequence[Field] = (),
        tensors: Sequence[Row] = (),
        fixed: Mapping[str, Any] | None = None,
        ignored: Sequence[str] = (),
        **other: Any,
    ) -> Dialect:
        """A family that differs from this one. `spec` and `layer` replace values of its spec and of its layer; `without` names
        config fields and tensors that it does not have; `fields` and `tensors` are added, replacing those of the same name."""
        known = {name for field in self.fields for name in field.names} | {row.hf_name for row in self.tensors}
        for unknown in set(without) - known - self.fixed.keys():
            raise SpecError(name, f"`without` names {unknown!r}, which is not a field or tensor of {self.name}")
        own = {**self.spec, **(spec or {})}
        if layer is not None:
            own["layers"] = [_overlaid(self.spec["layers"][0], layer)]
        replaced = {field for new in fields for field in new.names} | {*without, *ignored, *(fixed or ())}
        new_names = {row.hf_name for row in tensors}
        forms = self.forms
        if architecture is not None:
            forms = (dc.replace(self.forms[0], architecture=architecture),)
        changes: dict[str, Any] = {
            "name": name,
            "forms": forms,
            "spec": own,
            "fields": (*(field for field in self.fields if replaced.isdisjoint(field.names)), *fields),
            "tensors": (*(row for row in self.tensors if row.hf_name not in new_names | set(without)), *tensors),
            "fixed": {**{key: value for key, value in self.fixed.items() if key not in replaced}, **(fixed or {})},
            "ignored": self.ignored | set(ignored),
            "required": tuple(key for key in self.required if key not in without),
            "refused": {},
            **other,
        }
        return dc.replace(self, **changes)


def _overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data with some values replaced; a part of the same kind keeps its other fields."""
    merged = dict(below)
    for key, value in above.items():
        old = {"kind": merged[key]} if isinstance(merged.get(key), str) else merged.get(key)
        same = isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("kind", old.get("kind")) == old.get("kind")
        merged[key] = _overlaid(old, value) if same else value  # type: ignore[arg-type]
    return merged
