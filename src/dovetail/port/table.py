"""Dialect: what a family of models is called elsewhere, as one table of a page.

    spec      the family as plain data with one layer: all that its config cannot change
    forms     what it is made for (language model, classifier …): their class, its head and further tensors
    fields    their config's fields <-> paths of our spec
    tensors   their tensors' names <-> ours, `{}` being the number of the layer

A spec can be written in a dialect if the config made from it, read back, gives the same spec: no second list of what is
allowed, and where something is lost the path at which the two part is the error.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dovetail.core.errors import SpecError
from dovetail.core.part import KINDS, Part
from dovetail.model import Model
from dovetail.port.convert import KEEP, SPREAD, Convert, Woven

Config = Mapping[str, Any]
Settings = dict[str, Any]  # path pattern of our spec -> plain data


# their word -> our kind; where two words mean the same, the first is written
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "identity",
}
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


LAYERNORM = (("weight", "scale"), ("bias", "shift"))  # their leaves of a LayerNorm, and ours


class _Absent:
    """Stands for a path that a spec does not have."""


ABSENT = _Absent()


def look(spec: Any, pattern: str) -> Any:
    """What stands at the first place a pattern matches; ABSENT where there is none. `layers.*.mixer` looks into the first
    layer that has it, `layers.3.mixer` into that one, `layers.*.mixer:attention` into the first whose mixer is attention."""
    return _look(spec, pattern.split(".")) if pattern else spec


def _look(here: Any, names: list[str]) -> Any:
    if not names:
        return here
    (name, _, kind), rest = names[0].partition(":"), names[1:]
    if isinstance(here, tuple):
        among = here if name == "*" else here[int(name) : int(name) + 1] if name.isdigit() else ()
        return next((found for one in among if (found := _look(one, rest)) is not ABSENT), ABSENT)
    below = getattr(here, name) if isinstance(here, Part) and name in here.__dataclass_fields__ else ABSENT
    return ABSENT if kind and not is_kind(below, kind) else _look(below, rest)


def is_kind(value: Any, kind: str) -> bool:
    """Whether a value is a part of this kind."""
    return isinstance(value, Part) and type(value) is KINDS[kind]


class Field(Protocol):
    """Some of their config's fields, and what they say about our spec."""

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of their config that this one reads."""
        ...

    def give(self, spec: Model) -> dict[str, Any]:
        """What the spec says, in their words; nothing where they have no word for it."""
        ...

    def take(self, config: Config) -> Settings:
        """What the config says, in ours; nothing where it is silent."""
        ...


class Same:
    """A value that means the same there and here, at one or several of our paths."""

    def __init__(self, theirs: str, *ours: str) -> None:
        self.names, self.ours = (theirs,), ours

    def give(self, spec: Model) -> dict[str, Any]:
        value = look(spec, self.ours[0])
        return {} if value is ABSENT else {self.names[0]: value}

    def take(self, config: Config) -> Settings:
        value = config.get(self.names[0])
        return {} if value is None else dict.fromkeys(self.ours, value)


class Named(Same):
    """A part that has another name there; several of their names may mean the same, the first is the one we write."""

    def __init__(self, theirs: str, ours: str, words: Mapping[str, str], *, also: Sequence[str] = ()) -> None:
        super().__init__(theirs, ours, *also)
        self.words = words  # their word -> our kind

    def give(self, spec: Model) -> dict[str, Any]:
        part = look(spec, self.ours[0])
        words = [word for word, kind in self.words.items() if isinstance(part, Part) and type(part) is KINDS[kind]]
        return {self.names[0]: words[0]} if words else {}

    def take(self, config: Config) -> Settings:
        word = config.get(self.names[0])
        if word is None:
            return {}
        if not isinstance(word, str) or word not in self.words:
            raise SpecError(f"config.{self.names[0]}", f"{word!r} is not known", f"known: {', '.join(self.words)}")
        return dict.fromkeys(self.ours, self.words[word])


def fits(value: Any, data: Any) -> bool:
    """Whether a value is what the plain data says; of a part, whether it is of that kind and has the fields that are named."""
    if not isinstance(value, Part) or not isinstance(data, Mapping):
        return bool(value == data)
    named = {name: item for name, item in data.items() if name != "kind"}
    return type(value) is KINDS[data["kind"]] and all(look(value, name) == item for name, item in named.items())


class Switch(Same):
    """A field of theirs that chooses between two values of ours."""

    def __init__(self, theirs: str, ours: str, *, on: Any, off: Any) -> None:
        super().__init__(theirs, ours)
        self.values = {True: on, False: off}

    def give(self, spec: Model) -> dict[str, Any]:
        value = look(spec, self.ours[0])
        fitting = [chosen for chosen, ours in self.values.items() if fits(value, ours)]
        return {self.names[0]: fitting[0]} if fitting else {}

    def take(self, config: Config) -> Settings:
        chosen = config.get(self.names[0])
        if chosen is not None and not isinstance(chosen, bool):
            raise SpecError(f"config.{self.names[0]}", f"{chosen!r} is not true or false")
        return {} if chosen is None else {self.ours[0]: self.values[chosen]}


class Through(Same):
    """A number that stands there in another form: its inverse, its root."""

    def __init__(self, theirs: str, *ours: str, there: Callable[[Any], Any], back: Callable[[Any], Any]) -> None:
        super().__init__(theirs, *ours)
        self.there, self.back = there, back

    def give(self, spec: Model) -> dict[str, Any]:
        return {name: value if value is None else self.there(value) for name, value in super().give(spec).items()}

    def take(self, config: Config) -> Settings:
        value = config.get(self.names[0])
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value == 0):
            raise SpecError(f"config.{self.names[0]}", f"{value!r} is not a number other than 0")
        return {} if value is None else dict.fromkeys(self.ours, self.back(value))


class Nullable(Same):
    """A value whose null means null here too, rather than what the family usually has."""

    def take(self, config: Config) -> Settings:
        return dict.fromkeys(self.ours, config[self.names[0]]) if self.names[0] in config else {}


class Follows(Same):
    """A value that other config fields imply: it is written, and any other value is an error."""

    def __init__(self, theirs: str, ours: str, *, said: Callable[[Config], Any], unsupported: str = "") -> None:
        """`unsupported` says what a different value would ask for."""
        super().__init__(theirs, ours)
        self.said, self.unsupported = said, unsupported

    def take(self, config: Config) -> Settings:
        value, implied = config.get(self.names[0]), self.said(config)
        if value is not None and value != implied:
            problem = f"{value!r} is unsupported" + (f": {self.unsupported}" if self.unsupported else "")
            raise SpecError(f"config.{self.names[0]}", problem, f"the other fields imply {implied!r}")
        return {}


class Only:
    """A field of older files that can have one value; it is read, and not written."""

    def __init__(self, theirs: str, value: Any) -> None:
        self.names, self.value = (theirs,), value

    def give(self, spec: Model) -> dict[str, Any]:
        return {}

    def take(self, config: Config) -> Settings:
        value = config.get(self.names[0])
        if value not in (None, self.value):
            raise SpecError(f"config.{self.names[0]}", f"{value!r} is unsupported", f"supported: {self.value!r}")
        return {}


class Row:
    """Their tensor, ours that lie in it, and how. `{}` is the number of the layer; a name of theirs with `{expert}` stands for
    one tensor an expert (from 0), with `{branch}` for one a branch (from 1). `woven` names a number of our spec: ours lie in
    turns, so many times a piece of each. `where` names what a layer must have for the row to stand, `unless` what it must not:
    `layers.{}.ffn:glu`, `layers.{}.mixer.q_rank`."""

    def __init__(
        self,
        theirs: str,
        *ours: str,
        convert: Convert | None = None,
        woven: str | None = None,
        where: str | None = None,
        unless: str | None = None,
    ) -> None:
        self.theirs, self.ours, self.woven, self.where, self.unless = theirs, ours, woven, where, unless
        self.numbered = any(mark in theirs for mark in NUMBERED)
        self.convert = convert or (SPREAD if self.numbered else KEEP)

    def stands(self, spec: Model, layer: int) -> bool:
        """Whether a layer has what the row is about."""
        there, not_there = (
            None if pattern is None else look(spec, pattern.replace("{}", str(layer))) not in (ABSENT, None)
            for pattern in (self.where, self.unless)
        )
        return there is not False and not_there is not True

    def conversion(self, spec: Model, layer: int) -> Convert:
        """How ours lie in theirs in this layer of a spec whose sizes are all written out."""
        return self.convert if self.woven is None else Woven(look(spec, self.woven.replace("{}", str(layer))))


NUMBERED = {"{expert}": 0, "{branch}": 1}  # what stands for a number in a name, and the first one


def numbered(name: str, count: int) -> tuple[str, ...]:
    """A name for each of `count`, where it is numbered; else the one name."""
    for mark, first in NUMBERED.items():
        if mark in name:
            return tuple(name.replace(mark, str(first + i)) for i in range(count))
    return (name,)


def rows(
    theirs: str, ours: str, *pairs: str | tuple[str, str], convert: Convert | None = None, where: str | None = None
) -> tuple[Row, ...]:
    """Rows for several leaves of one module: rows("h.{}.ln_1", "layers.{}.norm", ("weight", "scale"), ("bias", "shift"))."""
    named = [(pair, pair) if isinstance(pair, str) else pair for pair in pairs]
    return tuple(Row(f"{theirs}.{there}", f"{ours}.{here}", convert=convert, where=where) for there, here in named)


Limit = Callable[[Model], tuple[str, Any, str] | None]  # (path, value, what is asked) where they refuse what they can say


@dc.dataclass(frozen=True, kw_only=True, eq=False)  # each is itself alone
class Form:
    """What a family's model is made for: one of their classes, its head, and the tensors it adds to the family's own."""

    architecture: str  # their class
    auto: str = "AutoModelForCausalLM"  # their class that finds it
    answer: str = "logits"  # what of its output is ours
    head: Any = None  # plain data laid over the family's spec
    prefix: str = ""  # before the names of the family's own tensors
    tensors: tuple[Row, ...] = ()
    required: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()


@dc.dataclass(frozen=True)
class Skip:
    """Tensors of a checkpoint that are not imported; a load reports them."""

    pattern: str  # of their names; `{layers}` is the number of layers
    reason: str
    marker: str | None = None  # a tensor that must be in the checkpoint for the skip to apply


INV_FREQ = Skip("*.rotary_emb.inv_freq", "rotary frequencies, computed from the config")


@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Dialect:
    """One family; see the head of the file."""

    name: str  # their model_type
    forms: tuple[Form, ...]  # the first is meant where a config does not say
    spec: Mapping[str, Any]
    layers: str  # their field that counts the layers
    fields: tuple[Field, ...]
    required: tuple[str, ...]  # fields without which a config says too little
    tensors: tuple[Row, ...]
    defaults: Mapping[str, Any] = dc.field(default_factory=dict)  # what a config means that leaves a field out
    encoder: str | None = None  # their field that counts the encoder's layers
    like: Mapping[str, str] = dc.field(default_factory=dict)  # fields that, left out, are as another of theirs
    aliases: Mapping[str, str] = dc.field(default_factory=dict)  # older names of config fields -> their present names
    fixed: Mapping[str, Any] = dc.field(default_factory=dict)  # fields that can have one value only
    ignored: frozenset[str] = HOUSEKEEPING  # fields that change nothing the model computes
    skips: tuple[Skip, ...] = ()  # tensors of a checkpoint that are not imported
    copies: Mapping[str, str] = dc.field(default_factory=dict)  # patterns of second copies -> our path that they must equal
    reset: Mapping[str, Any] = dc.field(default_factory=dict)  # fields about skipped tensors, with the value that is written
    older: Mapping[str, str] = dc.field(default_factory=dict)  # endings of names in old files, and those of now
    infinite: frozenset[str] = frozenset()  # fields whose numbers may be infinite
    limits: tuple[Limit, ...] = ()

    def but(
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
        """A family that differs from this one in a few words: `spec` and `layer` are laid over its spec and its layer,
        `without` names fields and tensors it does not have, `fields` and `tensors` those it has instead or besides."""
        for absent in set(without) - {n for field in self.fields for n in field.names} - {row.theirs for row in self.tensors}:
            if absent not in self.fixed:
                raise SpecError(name, f"`without` names {absent!r}, which is no field or tensor of {self.name}")
        own = {**self.spec, **(spec or {})}
        if layer is not None:
            own["layers"] = [_laid_over(self.spec["layers"][0], layer)]
        told = {field for new in fields for field in new.names} | {*without, *ignored, *(fixed or ())}
        kept_fields = [field for field in self.fields if told.isdisjoint(field.names)]
        new_names = {row.theirs for row in tensors}
        kept_rows = [row for row in self.tensors if row.theirs not in new_names and row.theirs not in without]
        forms = self.forms
        if architecture is not None:
            forms = (dc.replace(self.forms[0], architecture=architecture),)
        changes: dict[str, Any] = {
            "name": name,
            "forms": forms,
            "spec": own,
            "fields": (*kept_fields, *fields),
            "tensors": (*kept_rows, *tensors),
            "fixed": {**{key: value for key, value in self.fixed.items() if key not in told}, **(fixed or {})},
            "ignored": self.ignored | set(ignored),
            "required": tuple(key for key in self.required if key not in without),
            **other,
        }
        return dc.replace(self, **changes)


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data with some of it replaced; a part of the same kind keeps the fields that are not named."""
    made = dict(below)
    for key, value in above.items():
        old = {"kind": made[key]} if isinstance(made.get(key), str) else made.get(key)
        same = isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("kind", old.get("kind")) == old.get("kind")
        made[key] = _laid_over(old, value) if same else value  # type: ignore[arg-type]
    return made
