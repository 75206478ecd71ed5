"""Statistics of a batch whose tokens are on several ranks, and random numbers of its samples, are those of one rank."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.distributed as dist
from expert_jobs import steps_over_rows
from rank_jobs import by_data_and_sequence, counts_over, drawn_without_a_seed
from shard_specs import ATTENTION, decoder
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.parallel.context import TokenRanks
from dovetail.parallel.pair import Pair

ROUTER = "kind: sigmoid_router, balance_bias: true, balance_loss: 0.7, z_loss: 0.1, noise: 0.3, capacity: 0.5"
EXPERTS = decoder(f"{ATTENTION}, dropout: 0.2", ffn=f"kind: moe, experts: 6, hidden: 20, router: {{{ROUTER}}}")
DROPPING = decoder(f"{ATTENTION}, dropout: 0.2", ffn="kind: glu, hidden: 44, dropout: 0.2")


@pytest.mark.parametrize(("data", "sequence"), [(2, 1), (1, 2)])
def test_tokens_before_a_chunk_are_counted_row_by_row(pair: Pair, data: int, sequence: int) -> None:
    for got, want in pair.run(counts_over, data, sequence):
        assert got == want


LAYOUTS = {
    "whole": lambda rows: TokenLayout.whole(len(rows), 7),
    "padded": lambda rows: TokenLayout.padded(rows, 7),
    "flat": TokenLayout.flat,
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_on_several_ranks_have_the_numbers_of_the_whole_batch(
    make: Callable[[list[int]], TokenLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [7, 3, 5, 7, 1, 2]
    whole, group = make(lengths).sample, cast("dist.ProcessGroup", object())
    for ranks in (1, 2, 3):
        found = list[Tensor]()
        for rank in range(ranks):
            monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
            own = make(lengths[rank * 6 // ranks : (rank + 1) * 6 // ranks])
            found.append(TokenRanks(group).added_to(Ctx(layout=own)).layout.sample)
        assert torch.cat(found).equal(whole)


@pytest.mark.slow
def test_rows_and_sequences_are_split_together() -> None:
    with Pair(ranks=4) as four:
        for got, want in four.run(counts_over, 2, 2):
            assert got == want
        for gaps in four.run(by_data_and_sequence, EXPERTS):
            assert {"loss layers.0.ffn.router.balance", "change of layers.1.ffn.router.load"} < set(gaps)
            assert max(gaps.values()) < 1e-9, max(gaps.items(), key=lambda item: item[1])


@pytest.mark.parametrize("how", ["tp", "fsdp"])
def test_a_seed_that_nobody_gave_is_the_first_rank_s(pair: Pair, how: str) -> None:
    assert max(pair.run(drawn_without_a_seed, DROPPING, how)) < 1e-9


def test_training_steps_over_rows_are_those_of_one_rank(pair: Pair) -> None:
    for gaps in pair.run(steps_over_rows, EXPERTS):
        assert any("router.balance" in name for name in gaps)
        assert max(gaps.values()) < 1e-9, max(gaps.items(), key=lambda item: item[1])
