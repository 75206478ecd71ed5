"""Random programs of models, tokenizers and loaders (checks/programs): a few pass here, and bugs that they
found are found again when they are put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from checks.programs.frame import run, sample
from checks.programs.kinds import kind_of
from dovetail.data.loader import Loader
from dovetail.decoding import steps
from dovetail.nn.declared_tensors import adapted_leaves
from dovetail.nn.fused import fuse
from dovetail.text.tokenizer import Tokenizer
from dovetail.weights.adapters import attach as attaching, multi_lora

MOST = 500  # programs until a bug must be found
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(("kind", "programs"), [("model", 6), ("tokenizer", 15), ("loader", 15)])
def test_a_few_programs_pass(kind: str, programs: int) -> None:
    for number in range(programs):
        program = sample(kind_of(kind), 0, number)
        assert run(kind_of(kind), program) is None, program


def joined_in_inference_mode(patch: Patch) -> None:
    """A15."""
    patch.setattr(steps, "fuse", fuse.__wrapped__)  # type: ignore[attr-defined]


def banks_take_all_adapters(patch: Patch) -> None:
    """A18."""
    place = multi_lora.Bank._place

    def bare(self: multi_lora.Bank) -> None:
        for _, leaf in list(adapted_leaves(self.model)):
            leaf.adapter = None
        place(self)

    patch.setattr(multi_lora.Bank, "_place", bare)
    patch.setattr(multi_lora, "check_bare", lambda *_: None)


def decoding_with_dropout(patch: Patch) -> None:
    """A19."""
    patch.setattr(steps, "evaluating", lambda model: nullcontext())


def detach_unfreezes_all(patch: Patch) -> None:
    """A22."""
    detach = attaching.detach

    def unfrozen(model: Any) -> None:
        detach(model)
        model.requires_grad_(True)

    patch.setattr(attaching, "detach", unfrozen)
    patch.setattr("checks.programs.model.detach", unfrozen)


def prompts_toggle_a_flag(patch: Patch) -> None:
    """A21, and the seeded bug that leaves special tokens recognized."""

    def prompt(self: Tokenizer, text: str, *, add_special: bool = True, recognized: bool = True) -> list[int]:
        self.engine.encode_special_tokens = not recognized
        return self.engine.encode(text, add_special_tokens=add_special).ids

    patch.setattr(Tokenizer, "prompt", prompt)


def batches_read_ahead_stay(patch: Patch) -> None:
    """A22."""

    def batches(self: Loader) -> Iterator[Any]:
        following = self.position
        while True:
            batch = self.batch_at(following if self.workers else self.position)
            following += self.batch
            self.position += self.batch
            yield batch

    patch.setattr(Loader, "__iter__", batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bug"),
    [
        ("model", joined_in_inference_mode),
        ("model", banks_take_all_adapters),
        ("model", decoding_with_dropout),
        ("model", detach_unfreezes_all),
        ("tokenizer", prompts_toggle_a_flag),
        ("loader", batches_read_ahead_stay),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_a_bug_that_is_put_back_is_found(kind: str, bug: Any, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    assert any(run(kind_of(kind), sample(kind_of(kind), 0, number)) is not None for number in range(MOST))
