"""Outside tasks: a model of any spec for lm-eval, whose tasks then run on it (extra `eval`).

    evaluate_tasks(model, ["arithmetic"], "my-tasks")       tasks of lm-eval from YAML and JSON below a directory

    log p(continuation | context) = Σ log p(tokenᵢ | tokens before it)

A context that is too long is cut from the left.

Requests of equal length form a batch and no token is padding, so that what a request is scored with does not depend on the
others. Contexts are encoded as prompts, with the special tokens of the tokenizer, as by lm-eval's own model of transformers.
Nothing is downloaded: a task that names a data set of the hub needs it in the cache.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from dovetail.base.errors import FileError, InputError, install_command
from dovetail.decoding.generation import check_generates, generate_tokens, token_limit
from dovetail.model.transformer import Transformer
from dovetail.nn.module import at_least_fp32, evaluating
from dovetail.text.tokenizer import Tokenizer

BATCH, LENGTH, NEW_TOKENS = 16, 2048, 256  # defaults; the last two are those of lm-eval
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


class TaskScore(NamedTuple):
    """What a model reaches in a task: a metric, and its value for each item, in the order of the items."""

    task: str
    metric: str
    value: float
    higher_is_better: bool
    items: tuple[float, ...]


def evaluate_tasks(
    model: Transformer,
    tasks: Sequence[str],
    directory: str | Path | None = None,
    *,
    limit: int | None = None,
    batch: int = BATCH,
) -> dict[str, Any]:
    """Run tasks of lm-eval on a model with a tokenizer and return its report; `directory` holds tasks of your own, `limit` is
    the number of items of each."""
    for name in OFFLINE:
        os.environ.setdefault(name, "1")
    evaluator, manager = _module("lm_eval.evaluator"), _module("lm_eval.tasks")
    include = None if directory is None else str(directory)
    return evaluator.simple_evaluate(
        model=adapter()(model, batch),
        tasks=list(tasks),
        limit=limit,
        task_manager=manager.TaskManager(include_path=include, include_defaults=include is None),
        log_samples=True,
        bootstrap_iters=0,
        verbosity="ERROR",
    )


def task_scores(report: Mapping[str, Any]) -> Iterator[TaskScore]:
    """Yield the metrics of a report of lm-eval that are a mean over items."""
    for task, samples in report["samples"].items():
        for metric, higher in report["higher_is_better"][task].items():
            ordered = sorted(samples, key=lambda sample: sample["doc_id"])
            values = [sample.get(metric) for sample in ordered]
            if values and all(isinstance(value, int | float) for value in values):
                items = tuple(float(value) for value in values)
                yield TaskScore(task, metric, sum(items) / len(items), bool(higher), items)


@functools.cache
def adapter() -> Any:
    """The class of lm-eval's models that runs ours: `adapter()(model)`."""
    base = _module("lm_eval.api.model").TemplateLM

    class SpecLM(base):
        """A model of any spec."""

        def __init__(self, model: Transformer, batch: int = BATCH, length: int = LENGTH) -> None:
            super().__init__()
            check_generates(model.part)
            vocabulary = model.vocabulary
            if vocabulary is None or vocabulary.tokenizer is None:
                raise InputError("model: has no tokenizer, so it reads no tasks; build it with tokenizer=…")
            self.model, self.batch, self.max_length = model, batch, 1 + token_limit(model.part, 1, length - 1)
            self.encoder: Tokenizer = vocabulary.tokenizer
            self.stop, self.first = vocabulary.stop, (*vocabulary.start, *sorted(vocabulary.stop))

        @property
        def eot_token_id(self) -> int:
            if not self.first:
                raise FileError("the model has no token that begins or ends a text, which a task without a context needs")
            return self.first[-1]

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if not self.first else self.first[0]

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
            begun = bool(self.first) and string.startswith(self.encoder.decode([self.first[0]], skip_special=False))
            special = not begun if add_special_tokens is None else add_special_tokens
            return self.encoder.prompt(string, add_special=special)

        def _loglikelihood_tokens(self, requests: Sequence[Any], **options: Any) -> list[tuple[float, bool]]:
            """(log-probability, whether it is the greedy one) of the continuation of each (…, context ids, its ids)."""
            inputs = [((*context, *targets)[-(self.max_length + 1) :], len(targets)) for _, context, targets in requests]
            if longest := max((n for _, n in inputs if n > self.max_length), default=0):
                raise InputError(f"a continuation has {longest} tokens; the model reads {self.max_length}")
            scores: list[tuple[float, bool]] = [(0.0, False)] * len(inputs)
            by_length: dict[int, list[int]] = {}
            for i, (ids, _) in enumerate(inputs):
                by_length.setdefault(len(ids), []).append(i)
            for rows in by_length.values():
                for begin in range(0, len(rows), self.batch):
                    some = rows[begin : begin + self.batch]
                    for i, score in zip(some, self._scored([inputs[i] for i in some]), strict=True):
                        scores[i] = score
            return scores

        @torch.inference_mode()
        def _scored(self, rows: Sequence[tuple[Sequence[int], int]]) -> Iterator[tuple[float, bool]]:
            """The scores of rows of equal length, each with its number of targets."""
            ids = torch.tensor([list(row) for row, _ in rows], device=self.model.device)
            with evaluating(self.model):
                logits = self.model(ids[:, :-1])
            losses = F.log_softmax(logits.to(at_least_fp32(logits.dtype)), -1)
            for row, (_, n) in enumerate(rows):
                targets = ids[row, -n:]
                chosen = losses[row, -n:].gather(-1, targets[:, None])
                yield float(chosen.sum()), bool((losses[row, -n:].argmax(-1) == targets).all())

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            windows = _module("lm_eval.utils")
            totals: list[float] = []
            for request in requests:
                pieces = windows.get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
                scored = self._loglikelihood_tokens([("", *windows.make_disjoint_window(piece)) for piece in pieces])
                totals.append(sum(score for score, _ in scored))
            return totals

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return [self._generated(*request.args) for request in requests]

        def _generated(self, context: str, options: Mapping[str, Any]) -> str:
            """The greedy continuation up to one of the strings that end it."""
            given = _module("lm_eval.models.utils").normalize_gen_kwargs(dict(options), NEW_TOKENS)
            if given.get("do_sample") or given.get("temperature"):
                raise InputError("generation_kwargs: a task that samples is not run; set do_sample: false")
            until = [given["until"]] if isinstance(given.get("until"), str) else list(given.get("until") or ())
            limit, tokens, text = int(given["max_gen_toks"]), list[int](), ""
            if limit >= self.max_length:
                raise InputError(f"generation_kwargs: {limit} new tokens leave no context; the model reads {self.max_length}")
            prompt = self.tok_encode(context)[-(self.max_length - limit) :]
            for token in generate_tokens(self.model, prompt, limit, stop=self.stop):
                if token in self.stop:
                    break
                tokens.append(token)
                text = self.encoder.decode(tokens)
                if any(end in text for end in until if end):
                    break
            for end in filter(None, until):
                text = text.split(end)[0]
            return text

    return SpecLM


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FileError(f"tasks of lm-eval are run by lm-eval ({error}): {install_command('eval')}") from None
