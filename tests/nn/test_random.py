"""Random numbers by coordinate: published test vectors, moments, and the same numbers in any slice, order or compiled graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail.nn.random import (
    GAMMA,
    LONG,
    NumberBlock,
    draw,
    mix,
    normal_block,
    normal_blocks,
    normals,
    path_hash,
    streams,
    words,
)

N = 2**20
BOUND = 5 / N**0.5  # five standard errors of a mean of N independent numbers of variance 1


def bits(n: int = N, seed: int = 3, path: str = "here") -> Tensor:
    return draw(streams(torch.tensor(seed), [path])[0], torch.arange(n))


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
        (
            1234567,
            [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821],
        ),
    ],
)
def test_published_vectors_of_splitmix64(start: int, expected: list[int]) -> None:
    counter = torch.arange(1, len(expected) + 1)
    assert [int(value) & LONG for value in mix(start + counter * GAMMA)] == expected
    if start == 0:
        assert torch.equal(draw(torch.tensor(0), counter), mix(counter * GAMMA))


@pytest.mark.parametrize(
    ("text", "expected"), [("", 0xCBF29CE484222325), ("a", 0xAF63DC4C8601EC8C), ("foobar", 0x85944171F73967E8)]
)
def test_published_vectors_of_fnv_1a(text: str, expected: int) -> None:
    assert path_hash(text) & LONG == expected


@pytest.mark.slow
def test_every_bit_is_set_half_of_the_time_and_no_two_agree() -> None:
    drawn = bits()
    signs = torch.stack([((drawn >> k) & 1) * 2 - 1 for k in range(64)]).double()
    agreement = signs @ signs.T / N
    assert signs.mean(1).abs().max() < BOUND
    assert (agreement - torch.eye(64)).abs().max() < 1.2 * BOUND  # the largest of 2,016 pairs


@pytest.mark.parametrize("lag", [1, 2, 28, 128, 4096])
def test_neighbors_are_uncorrelated(lag: int) -> None:
    first, second = normals(bits())
    for z in (first, second):
        assert abs((z[lag:] * z[:-lag]).mean().item()) < BOUND
    assert abs((first * second).mean().item()) < BOUND


@pytest.mark.parametrize("other", [{"seed": 4}, {"seed": 3 + 2**32}, {"path": "there"}, {"path": "herf"}])
def test_another_seed_or_path_is_another_stream(other: dict[str, object]) -> None:
    mine, theirs = normals(bits())[0], normals(bits(**other))[0]  # type: ignore[arg-type]
    assert abs((mine * theirs).mean().item()) < BOUND


def test_coordinates_do_not_commute() -> None:
    stream = streams(torch.tensor(0), ["here"])[0]
    a, b = torch.arange(50)[:, None], torch.arange(50)
    assert len(draw(stream, a, b).unique()) == 2500


def test_normal_moments_and_tail() -> None:
    z = torch.cat(normals(bits()))
    assert abs(z.mean().item()) < BOUND
    assert abs(z.square().mean().item() - 1) < 2**0.5 * BOUND
    assert abs(z.pow(3).mean().item()) < 15**0.5 * BOUND
    assert abs(z.pow(4).mean().item() - 3) < 96**0.5 * BOUND
    for limit, share in ((1.0, 0.3173105), (2.0, 0.0455003), (3.0, 0.0026998)):
        assert (z.abs() > limit).double().mean().item() == pytest.approx(share, abs=5 * (share / (2 * N)) ** 0.5)
    assert z.isfinite().all()


def test_sums_of_squares_of_small_tensors_have_the_chi_squared_distribution() -> None:
    """Of many paths and seeds, so that a path whose numbers spread too far would show (Kolmogorov–Smirnov)."""
    paths = [f"initial layers.{i}.mixer.{name}.weight" for i in range(25) for name in "qkvo"]
    stream = torch.cat([streams(torch.tensor(seed), paths) for seed in range(31)])
    z = torch.stack(normals(draw(stream[:, None, None], torch.arange(12)[:, None], torch.arange(14))), -1).flatten(1)
    size = torch.tensor(z.shape[1] / 2.0, dtype=torch.float64)
    below = torch.special.gammainc(size, z.square().sum(1) / 2).sort().values
    steps = torch.arange(len(below) + 1) / len(below)
    apart = max((steps[1:] - below).max().item(), (below - steps[:-1]).max().item())
    assert apart < 1.95 / len(below) ** 0.5  # exceeded with a probability of 0.001


def test_words_cover_the_range() -> None:
    for half in words(bits()):
        assert half.min() >= 0
        assert half.max() < 2**32
        assert half.double().mean().item() / 2**32 == pytest.approx(0.5, abs=BOUND / 12**0.5)


def test_a_block_is_a_piece_of_the_matrix() -> None:
    stream = streams(torch.tensor(1), ["w"])[0]
    whole = normal_block(NumberBlock(stream, torch.arange(9), 0, 15, 0.5))
    blocks = [NumberBlock(stream, torch.arange(2, 7), a, b, 0.5) for a, b in ((0, 15), (1, 4), (4, 9), (3, 4), (14, 15))]
    for block, together in zip(blocks, normal_blocks(blocks), strict=True):
        assert torch.equal(normal_block(block), whole[2:7, block.first : block.last])
        assert torch.equal(together, whole[2:7, block.first : block.last])


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_without_a_break_serves_every_seed(backend: str) -> None:
    def run(x: Tensor, seed: Tensor) -> Tensor:
        stream = streams(seed, ["layers.0.mixer.pattern"])[0]
        return draw(stream, torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1]))

    torch.compiler.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for seed in (1, 2, 3, 2**40 + 5):
        with torch._dynamo.config.patch(error_on_recompile=seed > 1):
            assert torch.equal(compiled(torch.ones(5, 70), torch.tensor(seed)), run(torch.ones(5, 70), torch.tensor(seed)))
