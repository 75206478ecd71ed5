"""Plans for serving: bytes are those of real weights and pools, times those of a roofline by hand, and a real run is slower."""

from __future__ import annotations

import dataclasses as dc
import json
import time

import pytest
import torch

import dovetail as dt
from dovetail.account import account
from dovetail.base.errors import SpecError, UsageError
from dovetail.cli import main
from dovetail.planning.device import Device, Efficiency, Latency, device_named
from dovetail.planning.serving import (
    HEADROOM,
    Load,
    capacity,
    prefill_seconds,
    read_bytes,
    replicas,
    state_bytes,
    step_seconds,
    token_flops,
    weight_bytes,
)

SPEC = "{width: 48, vocab: 90, layers: [{repeat: 3, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 80}}]}"
HYBRID = """
width: 48
vocab: 90
layers:
- {mixer: {kind: mamba2, state_size: 8, head: 12, inner: 96}, ffn: {hidden: 80}}
- {mixer: {heads: 4, head: 12, mask: [causal, {kind: window, size: 16}]}, ffn: {kind: moe, experts: 6, hidden: 40}}
"""
PLAIN = Load(prompt=40, answer=20, weights="fp32", cache="fp32", gap=10.0)
SLOW = Device("a device of round numbers", 1e9, {"float32": 1e9}, 1e6, 4, 1e6, 1e5, Latency(1e-3, 1e-2), 0.0, 1e6)


@pytest.mark.parametrize("text", [SPEC, HYBRID])
def test_bytes_are_those_of_weights_and_of_a_pool(text: str) -> None:
    spec = dt.from_yaml(text)
    model = dt.build(spec)
    assert weight_bytes(spec, PLAIN) == sum(p.nbytes for p in model.parameters())
    for n in (1, 16, 50):
        assert state_bytes(spec, n, "fp32") == account(spec, n, "fp32").state_bytes(n)
    assert state_bytes(dt.from_yaml(SPEC), 50, "bf16") == 50 * 3 * 2 * 2 * 12 * 2  # layers, k and v, KV heads, head, bytes


def test_a_step_is_a_roofline() -> None:
    spec = dt.from_yaml(SPEC)
    per_layer = 48 * (72 + 24 + 24) + 72 * 48 + 3 * 48 * 80
    matrices = 3 * per_layer + 48 * 90  # the tied head, too
    assert read_bytes(spec, PLAIN, rows=7) == 4 * matrices
    state = 50 * 3 * 2 * 2 * 12 * 4
    seconds, bound = step_seconds(spec, SLOW, PLAIN, 1, 7)
    assert bound == "bandwidth of memory"
    assert seconds == pytest.approx((4 * matrices + 7 * state) / 1e6)
    flops = 2 * matrices + 4 * 72 * 51 * 3  # the query of token 51 sees 51 keys
    assert token_flops(spec, 50) == flops
    fast = dc.replace(SLOW, bandwidth=1e12)
    assert step_seconds(spec, fast, PLAIN, 1, 7) == (pytest.approx(7 * flops / 1e9), "products")
    reduced = 2 * 3 * (1e-3 + 7 * 48 * 4 / 1e6)  # two per layer; half of the payload goes each way on two ranks
    seconds, bound = step_seconds(spec, fast, PLAIN, 2, 7)
    assert (seconds, bound) == (pytest.approx(7 * flops / 2e9 + reduced), "links between the ranks")
    assert prefill_seconds(spec, fast, PLAIN, 1) == pytest.approx((40 * 2 * matrices + 3 * 4 * 72 * 40 * 41 / 2) / 1e9)


def test_a_batch_reads_the_experts_that_it_meets() -> None:
    spec = dt.from_yaml(HYBRID)
    bank = 3 * 48 * 40 * 6 * 4
    one, many = read_bytes(spec, PLAIN, 1), read_bytes(spec, PLAIN, 10_000)
    assert many - one == pytest.approx(bank * (1 - 2 / 6))
    assert read_bytes(spec, PLAIN, 2) - one == pytest.approx(bank * (1 / 3 - 1 / 9))


def test_rows_are_bounded_by_memory_and_by_the_gap() -> None:
    spec = dt.from_yaml(SPEC)
    weights, state = weight_bytes(spec, PLAIN), state_bytes(spec, 50, "fp32")
    small = dc.replace(SLOW, memory=weights + 5.5 * state, node=1)
    (one,), refused = replicas(spec, small, PLAIN, None)
    assert (one.rows, one.limit, refused) == (5, "memory of the KV cache", [])
    quick = dc.replace(PLAIN, gap=step_seconds(spec, small, PLAIN, 1, 3)[0])
    (one,), _ = replicas(spec, small, quick, None)
    assert (one.rows, one.limit) == (3, "bandwidth of memory")
    assert one.requests(quick) == pytest.approx(1 / (one.prefill + 20 * one.step / 3))
    _, refused = replicas(spec, dc.replace(small, memory=weights), PLAIN, None)
    assert "take" in refused[0].reason
    found, refused = replicas(spec, SLOW, PLAIN, None)
    assert [one.tensor for one in found] == [1, 2], "4 ranks cannot share 2 KV heads"
    assert refused[0].tensor == 4


def test_the_ranks_of_a_replica_share_the_weights_and_hold_more_rows() -> None:
    """Of n ranks, n times the memory less the weights is left for rows: two ranks hold more than twice the rows of one."""
    spec = dt.from_yaml(SPEC)
    state, weights = state_bytes(spec, 50, "fp32"), weight_bytes(spec, PLAIN)
    device = dc.replace(SLOW, memory=weights + 10 * state)
    rows = [replica.rows for replica in replicas(spec, device, PLAIN, None)[0]]
    assert rows[:2] == [10, 20 + int(weights // state)]


def test_users_need_replicas() -> None:
    spec = dt.from_yaml(SPEC)
    (one, *_), _ = replicas(spec, SLOW, PLAIN, 1)
    rate = one.requests(PLAIN)
    need = capacity(one, PLAIN, users=3600 * 10 * rate, active=0.1, each=1.0, price=2.0)
    assert need.requests == pytest.approx(rate)
    assert (need.replicas, need.gpus) == (-(-1 // HEADROOM) + 1, 3)
    assert need.dollars_per_million_tokens == pytest.approx(6 / (rate * 20 * 3600) * 1e6)


def ended(*argv: str) -> object:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as exit:
        main(list(argv))
    return exit.value.code


@pytest.mark.slow
def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("plan", "llama-3-8b", "--serve", "--users", "1M", "--price", "2.5", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["best"]["rows"] > 100
    assert data["capacity"]["gpus"] == data["capacity"]["replicas"] * data["best"]["tensor"]
    assert ended("plan", "deepseek-v3", "--serve") == 1, "no replica fits into a node"
    for wrong, text in (
        (["--serve", "--gpus", "8"], "--gpus: is a flag of plans for training"),
        (["--users", "1M", "--gpus", "8"], "--users: is a flag of plans for serving"),
        ([], "--gpus: give the number of GPUs"),
    ):
        assert ended("plan", "llama-3-8b", *wrong) == 2
        assert text in capsys.readouterr().err


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(SpecError, match="generate"):
        dt.plan_serving("bert-base")
    with pytest.raises(UsageError, match="active"):
        dt.plan_serving("llama-3-8b", active=2.0)
    with pytest.raises(SpecError, match="longest sequence"):
        dt.plan_serving("gpt2", prompt=1024, answer=256)


@pytest.mark.slow
def test_a_real_run_is_slower_than_its_bound() -> None:
    """Decoding on this machine, with its bandwidth and FLOP/s measured beside: below the bound, and not by orders."""
    torch.set_num_threads(1)
    spec = dt.from_yaml("{width: 512, vocab: 8000, layers: [{repeat: 6, mixer: {heads: 8, kv_heads: 2}, ffn: {hidden: 1408}}]}")
    load = Load(prompt=64, answer=64, weights="fp32", cache="fp32", gap=10.0)
    matrix, vector, square = torch.ones(4096, 8192), torch.ones(8192), torch.randn(1024, 1024)

    def fastest(run: object) -> float:
        assert callable(run)
        times = list[float]()
        for _ in range(7):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return min(times)

    bandwidth = matrix.nbytes / fastest(lambda: torch.mv(matrix, vector))
    peak = 2 * 1024**3 / fastest(lambda: square @ square)
    here = Device("this machine", 8e9, {"float32": peak}, bandwidth, 1, 1e9, 1e9, Latency(0, 0), 0.0, 1e9, Efficiency())
    model = dt.build(spec)
    for rows in (1, 8):
        pool = dt.Pool(spec, rows, 160)
        tokens = torch.randint(0, 8000, (rows, 96))
        every = list(range(rows))
        with torch.inference_mode():
            step = pool.step(every, [96] * rows)
            model.next_logits(tokens, dt.Ctx(layout=step.layout, views=step.views))

            def one() -> None:
                step = pool.step(every, [1] * rows)  # noqa: B023  called at once
                model.next_logits(tokens[:, :1], dt.Ctx(layout=step.layout, views=step.views))  # noqa: B023

            measured = fastest(one)
        bound, _ = step_seconds(spec, here, load, 1, rows)
        assert bound / 1.25 < measured < 12 * bound, (rows, measured / bound)


@pytest.mark.slow
def test_devices_of_the_table_serve() -> None:
    assert device_named("h100").usable == pytest.approx(76e9)
    plan = dt.plan_serving("llama-3-70b", weights="int4", cache="int8")
    assert plan.best is not None
    assert plan.best.tensor == 1, "four bits fit on one GPU"
    assert "assumed" in str(plan)
