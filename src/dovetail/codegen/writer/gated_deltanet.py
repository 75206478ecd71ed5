"""Gated DeltaNet: a memory that fades and is corrected."""

from __future__ import annotations

from dovetail.codegen.code import Call, fill
from dovetail.codegen.registry import Here, Mixed, writes
from dovetail.codegen.writer.mamba2 import define_conv
from dovetail.codegen.writer.precision import define_at_least_fp32
from dovetail.ops.form import CHUNK
from dovetail.ops.scan.underflow import LEAST
from dovetail.parts.mixer.gated_deltanet import EPS

FADED = '''
def $name(log: Tensor) -> Tensor:
    """e^log, and nothing where less than e^-$least would be left."""
    return F.threshold(log.clamp(min=-$least - 1.0).exp(), math.exp(-$least), 0.0)
'''

SCAN = '''
def $name(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """A matrix memory that is corrected: a token writes what its key did not yet recall.

    S~_t = e^(g_t) S_(t-1)      S_t = S~_t + k_t (beta_t (v_t - S~_t^T k_t))^T      y_t = S_t^T q_t
    In chunks of $chunk tokens, whose corrections w solve one triangular system.
    q, k (B, N, H, S), v (B, N, H, K), g, beta (B, N, H) -> y (B, N, H, K)
    """
    n = q.shape[1]
    size = min($chunk, n)
    rest = -n % size  # padded behind with tokens that write nothing and fade nothing
    q, k, v = (F.pad(t, (0, 0, 0, 0, 0, rest)) for t in (q, k, v))
    g, beta = (F.pad(t, (0, 0, 0, rest)) for t in (g, beta))
    # each (B, chunks, H, size, .)
    q, k, v, g, beta = (t.unflatten(1, (-1, size)).transpose(2, 3) for t in (q, k, v, g, beta))
    between = g[..., :, None].expand(*g.shape, size).tril(-1).cumsum(-2)
    fade = faded(between).tril()  # what is left at token i of what token j wrote
    since = faded(g.cumsum(-1))  # what is left at token i of what came before the chunk
    pairs = (k * beta[..., None]) @ k.transpose(-1, -2) * fade
    wanted = torch.cat([v * beta[..., None], k * (beta * since)[..., None]], -1)
    solved = torch.linalg.solve_triangular(pairs, wanted, upper=False, unitriangular=True)
    fresh, recalled = solved.split([v.shape[-1], k.shape[-1]], -1)
    keys = (k * fade[..., -1, :, None]).transpose(-1, -2)
    memory, memories, corrections = torch.zeros_like(keys[:, 0] @ v[:, 0]), [], []
    chunks = (t.unbind(1) for t in (fresh, recalled, keys, since[..., -1:, None]))
    for new, known, key, left in zip(*chunks, strict=True):
        memories.append(memory)  # (B, H, S, K), as it was before the chunk
        corrections.append(new - known @ memory)
        memory = left * memory + key @ corrections[-1]
    inside = (q @ k.transpose(-1, -2) * fade) @ torch.stack(corrections, 1)
    y = inside + (q * since[..., None]) @ torch.stack(memories, 1)
    return y.transpose(2, 3).flatten(1, 2)[:, :n]
'''

UNIT = '''
def $name(x: Tensor) -> Tensor:
    """Scaled to length 1 over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + $tiny)
'''

DELTA = '''
class $name(nn.Module):
    """A matrix memory that fades, and that a token corrects where its key recalls wrongly."""

    def __init__(self, width: int, heads: int, key_heads: int, key: int, value: int):
        super().__init__()
        self.key, self.value = key, value
        self.q = nn.Linear(width, key_heads * key, bias=False)
        self.k = nn.Linear(width, key_heads * key, bias=False)
        self.v = nn.Linear(width, heads * value, bias=False)
        self.z = nn.Linear(width, heads * value, bias=False)
        self.b = nn.Linear(width, heads, bias=False)
        self.a = nn.Linear(width, heads, bias=False)
        self.o = nn.Linear(heads * value, width, bias=False)
        self.conv_q = nn.Parameter(torch.randn(key_heads * key, $taps) * 0.02)
        self.conv_k = nn.Parameter(torch.randn(key_heads * key, $taps) * 0.02)
        self.conv_v = nn.Parameter(torch.randn(heads * value, $taps) * 0.02)
        self.fade_bias = nn.Parameter(torch.ones(heads))
        self.a_log = nn.Parameter(torch.linspace(1, 16, heads).log())
        self.norm = $norm

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        kept = wide(x.dtype)
        q = F.silu(causal_conv(self.q(x), self.conv_q)).unflatten(-1, (-1, self.key))
        k = F.silu(causal_conv(self.k(x), self.conv_k)).unflatten(-1, (-1, self.key))
        v = F.silu(causal_conv(self.v(x), self.conv_v)).unflatten(-1, (-1, self.value))
        q, k = of_length_one(q.to(kept)) * self.key**-0.5, of_length_one(k.to(kept))
        share = v.shape[2] // k.shape[2]  # heads that share one q and k  #? share
        q, k = q.repeat_interleave(share, 2), k.repeat_interleave(share, 2)  # (B, N, H, S)  #? share
        beta = self.b(x).to(kept).sigmoid()  # (B, N, H): how much is corrected
        fade = -self.a_log.to(kept).exp() * F.softplus(self.a(x).to(kept) + self.fade_bias)
        y = delta_scan(q, k, v.to(kept), fade, beta).to(x.dtype)  # (B, N, H, K)
        return self.o(self.norm(y).flatten(-2) * F.silu(self.z(x)))
'''


@writes("gated_deltanet")
def gated_deltanet(here: Here) -> Mixed:
    """The mixer, its convolution and its scan."""
    part, file = here.part, here.file
    define_at_least_fp32(file)
    define_conv(file)
    file.define("faded", fill(FADED, least=LEAST))
    file.define("of_length_one", fill(UNIT, tiny=EPS))
    file.define("delta_scan", fill(SCAN, chunk=CHUNK))
    file.letter(H="heads", K="size of a head", S="size of a key", C="channels")
    sizes = {"width": here.size("embed"), "heads": part.heads, "key_heads": part.groups()}
    sizes |= {"key": here.size("key"), "value": here.size("value")}
    norm = here.write("norm").change(dim="value").flat()
    text = fill(DELTA, {"share": part.groups() != part.heads}, taps=part.conv_size, norm=norm)
    return Mixed(Call.to(file.define("GatedDelta", text), **sizes))
