"""Linear state spaces: convolution = chunks = recurrence, across documents, padding and calls, and = scipy.signal."""

import numpy as np
import pytest
import torch
from scipy.signal import dlsim, lfilter

from dovetail.nn.layout import TokenLayout
from dovetail.nn.rows import sequence_rows
from dovetail.ops import implementation
from dovetail.ops.scan import state_space
from dovetail.ops.scan.state_space import space_scan

ROWS, N, CHANNELS, STATE = 2, 41, 3, 4
PLACES = [
    TokenLayout.whole(ROWS, N),
    TokenLayout.whole(ROWS, N, start=3),
    TokenLayout.packed([(5, 8, 20), (4, 1, 3, 30)], N),
    TokenLayout.padded([13, 6], N, left=True),
    TokenLayout.padded([13, 1], N),
    TokenLayout.of(torch.arange(7, 7 + N).expand(ROWS, N), torch.tensor([[-1] * 10 + [0] * 31, [0] * 20 + [-1] * 21])),
]


def some(n: int = N) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    log_a = torch.complex(*(torch.rand(CHANNELS, STATE, dtype=torch.float64) * k for k in (-0.3, 2.0)))
    b, c = (torch.randn(CHANNELS, STATE, dtype=torch.complex128) for _ in range(2))
    return torch.randn(ROWS, n, CHANNELS, dtype=torch.float64), log_a, b, c


@pytest.mark.parametrize("size", [1, 2, 5, 64])
@pytest.mark.parametrize("layout", PLACES)
def test_every_form_is_the_recurrence(size: int, layout: TokenLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    seq, carry = sequence_rows(layout), torch.randn(ROWS, CHANNELS, STATE, dtype=torch.complex128)
    monkeypatch.setattr(implementation, "CHUNK", size)
    got, left = space_scan(*some(), seq, carry)
    with implementation.using("reference"):
        want, kept = space_scan(*some(), seq, carry)
    assert ((got - want) * layout.real[..., None]).abs().max() < 1e-12
    assert (left - kept).abs().max() < 1e-12


def test_a_convolution_is_the_kernel_of_the_recurrence() -> None:
    u, log_a, b, c = some()
    empty = torch.zeros(ROWS, CHANNELS, STATE, dtype=torch.complex128)
    by_fft, left = state_space.convolved(u, log_a, b, c, empty)
    in_chunks, kept = state_space.chunked(u, log_a, b, c, None, None, empty)
    assert (by_fft - in_chunks).abs().max() < 1e-12
    assert (left - kept).abs().max() < 1e-12


@pytest.mark.parametrize("n", [9, 200])
def test_it_is_the_system_that_scipy_simulates(n: int) -> None:
    u, log_a, b, c = some(n)
    got, _ = space_scan(u, log_a, b, c, sequence_rows(TokenLayout.whole(ROWS, n)), None)
    for channel in range(CHANNELS):
        real, imag = log_a[channel].exp().real.numpy(), log_a[channel].exp().imag.numpy()
        matrix = np.block([[np.diag(real), -np.diag(imag)], [np.diag(imag), np.diag(real)]])
        column = np.concatenate([b[channel].real.numpy(), b[channel].imag.numpy()])[:, None]
        row = np.concatenate([c[channel].real.numpy(), -c[channel].imag.numpy()])[None]
        # scipy reads before it writes, so its answers come one later
        _, y, _ = dlsim((matrix, column, row, np.zeros((1, 1)), 1.0), np.append(u[0, :, channel].numpy(), 0.0))
        assert np.abs(y[1:, 0] - got[0, :, channel].numpy()).max() < 1e-10


@pytest.mark.parametrize("n", [6, 100])
def test_the_impulse_of_the_concepts(n: int) -> None:
    log_a, b, c = (torch.tensor([[complex(v)]], dtype=torch.complex128) for v in (np.log(0.9), 0.5, 1.0))
    u = torch.zeros(1, n, 1, dtype=torch.float64)
    u[0, 0] = 1.0
    y, _ = space_scan(u, log_a, b, c, sequence_rows(TokenLayout.whole(1, n)), None)
    assert np.allclose(y[0, :6, 0], [0.5, 0.45, 0.405, 0.3645, 0.32805, 0.295245], atol=1e-12)
    assert np.allclose(y[0, :, 0], lfilter([0.5], [1, -0.9], u[0, :, 0].numpy()), atol=1e-12)


def test_phases_stay_exact_over_long_sequences_in_float32() -> None:
    u, log_a, b, c = some(4096)
    slow = torch.complex(log_a.real * 0.01, log_a.imag)
    want, _ = space_scan(u, slow, b, c, sequence_rows(TokenLayout.whole(ROWS, 4096)), None)
    got, left = space_scan(u.float(), slow, b, c, sequence_rows(TokenLayout.whole(ROWS, 4096)), None)
    assert got.dtype == torch.float32
    assert left.dtype == torch.complex64
    assert (got - want).abs().max() < 1e-5 * want.abs().max()
