"""The objective of a run: the one that is named, or the one that a spec learns by on its data.

--text, --data     next_token (causal), masked_tokens (bidirectional), span_corruption or denoising (encoder–decoders)
--task             answers: those of a synthetic task (causal)
--labels           classification, of text or of images
--tags             token_classification, of words
--pairs            contrastive (a pooled embedding), translation (encoder–decoders)
chats              sft, and the other methods of `dovetail tune`; one is always named
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from dovetail.base.errors import SpecError, UsageError, names_or_nearest
from dovetail.disk.model_files import GENERATION_FILE, TOKENIZER_FILE
from dovetail.model.model import Model
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.answers import Answers, from_task
from dovetail.training.denoising import Denoising, SpanCorruption
from dovetail.training.grpo import Grpo
from dovetail.training.objective import Classify, MaskedTokens, NextToken, Objective, Reads, TuningData, check_reads_text
from dovetail.training.pairs import Contrastive, Translation
from dovetail.training.preference import Dpo, Ipo, Kto, Orpo, RewardModel
from dovetail.training.rows import from_labels
from dovetail.training.source import BatchShape, Note, Source, TokenizerKind, from_shards, from_text
from dovetail.training.tagging import TokenClassification, from_tags
from dovetail.training.tuning import Distill, Sft

# by flag
READS: dict[str, Reads] = {"data": "text", **{name: name for name in get_args(Reads)}}
# of those that fit a spec and its data, the first is the default
OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind
    for kind in (
        NextToken,
        MaskedTokens,
        SpanCorruption,
        Denoising,
        Answers,
        Classify,
        TokenClassification,
        Contrastive,
        Translation,
    )
}
TUNING: dict[str, type[Objective]] = {kind.name: kind for kind in (Sft, Dpo, Ipo, Orpo, Kto, RewardModel, Grpo, Distill)}


def objective_kind(spec: Model, reads: Reads, name: str | None = None) -> type[Objective]:
    """Return the objective of this name, or the default for a spec and its data. Raises SpecError, with the reason, where the
    spec cannot be trained by it."""
    if name is not None:
        return _named(spec, reads, name)
    if reads == "text":
        check_reads_text(spec)  # its reasons hold for every objective of text
    if reads == "chats":
        raise UsageError(f"--objective: name the one to tune by: {', '.join(TUNING)}")
    errors = list[SpecError]()
    for kind in OBJECTIVES.values():
        if kind.reads == reads:
            try:
                kind.check(spec)
                return kind
            except SpecError as error:
                errors.append(error)
    raise errors[0]


def spec_for(spec: Model, name: str | None) -> tuple[Model, str | None]:
    """The spec that an objective of this name trains, from that of the initial weights; and the part that is not theirs."""
    kind = TUNING.get(name or "")
    if kind is None or kind.spec_for(spec) == spec:
        return spec, None
    return kind.spec_for(spec), kind.fresh


def _named(spec: Model, reads: Reads, name: str) -> type[Objective]:
    known = TUNING if reads == "chats" else OBJECTIVES
    if name not in {**OBJECTIVES, **TUNING}:
        raise UsageError(f"--objective: unknown objective {name!r}; {names_or_nearest(name, known, 'objectives')}")
    kind = {**OBJECTIVES, **TUNING}[name]
    if kind.reads != reads:
        raise UsageError(f"--objective: {name} is trained on {kind.reads}, not on {reads}; give --{kind.reads}")
    kind.check(spec)
    return kind


def reads_of(given: Mapping[str, object]) -> Reads:
    """Return which data was given, by its flag; raise UsageError unless it is one."""
    flags = [flag for flag, value in given.items() if value]
    if len(flags) != 1:
        what = "nothing" if not flags else " and ".join(f"--{flag}" for flag in flags)
        rows = "labeled rows (--labels), tagged words (--tags) or pairs (--pairs)"
        choices = f"a text file (--text), token shards (--data), a synthetic task (--task), {rows}"
        raise UsageError(f"give {choices}: one of them, not {what}")
    return READS[flags[0]]


def read_source(
    kind: type[Objective],
    spec: Model,
    tokenizer: TokenizerKind | Tokenizer,
    shape: BatchShape,
    note: Note,
    given: Mapping[str, Any],
    tuning: TuningData | None = None,
    classes: Sequence[str] = (),
) -> Source:
    """Read the data that was given, for an objective. The tokenizer is of a kind to train, or that of initial weights, with
    which `tuning` has the chat template and settings of tuning rows, and `classes` the names of the classes of their head."""
    if chats := given.get("chats"):
        if tuning is None:
            raise UsageError(f"--from: {kind.name} tunes a model; give its directory")
        return kind.read(Path(chats), spec, shape, note, tuning)
    if task := given.get("task"):
        return from_task(task, spec, shape)
    if places := given["data"]:
        return from_shards(places, spec, shape, masks=kind.packs, special=kind.special(shape.length))
    if labels := given["labels"]:
        return from_labels(Path(labels), spec, tokenizer, shape, note)
    if tags := given["tags"]:
        return from_tags(Path(tags), spec, tokenizer, shape, note, classes)
    if pairs := given["pairs"]:
        return kind.read_pairs(Path(pairs), spec, tokenizer, shape, note)
    return from_text(Path(given["text"]), spec, tokenizer, shape, note, kind.special(shape.length))


def generation_files(tokenizer: Tokenizer | None, objective: Objective) -> dict[str, str]:
    """The files that generation reads beside the weights, by name: the tokenizer, and the first and the last token."""
    files = {} if tokenizer is None else {TOKENIZER_FILE: tokenizer.to_json()}
    generation = objective.generation()
    return {**files, GENERATION_FILE: f"{json.dumps(generation, indent=2)}\n"} if generation else files


def text_objective(spec: Model, tokenizer: Tokenizer, length: int) -> Objective:
    """Return the objective of a spec on plain text."""
    return objective_kind(spec, "text").of(spec, tokenizer, length)
