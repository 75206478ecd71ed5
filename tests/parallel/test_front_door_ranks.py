"""Tensor parallel is never left out where a call has no Ctx: two ranks compute what one computes."""

from front_door_jobs import default_calls, rows_of_a_batch

from dovetail.parallel.pair import Pair

SPEC = """
width: 24
vocab: 90
layers:
- repeat: 2
  wire: {dropout: 0.25}
  mixer: {heads: 6, kv_heads: 2, head: 4, dropout: 0.1}
  ffn: {hidden: 40, dropout: 0.2}
"""


def test_calls_without_a_ctx_equal_one_rank(pair: Pair) -> None:
    for gaps in pair.run(default_calls, SPEC):
        assert {name: gap for name, gap in gaps.items() if gap > 1e-10} == {}


def test_rows_without_a_ctx_draw_the_dropout_of_the_whole_batch(pair: Pair) -> None:
    assert max(pair.run(rows_of_a_batch, SPEC)) < 1e-10
