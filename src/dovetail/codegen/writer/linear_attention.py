"""Linear attention: weights are products of features, so the past is one matrix per head. Gated DeltaNet: a recurrent state
with decay, updated by the delta rule."""

from __future__ import annotations

from dovetail.codegen.code import Call, fill
from dovetail.codegen.registry import Context, FeatureCode, MixerCode, writes
from dovetail.codegen.writer.mamba import define_conv, define_decay_scan
from dovetail.ops.implementation import CHUNK
from dovetail.ops.scan.pieces import LEAST
from dovetail.parts.mixer.gated_deltanet import EPS

RANDOM = '''
class $name(nn.Module):
    """Positive random features; on average their products are the weights of softmax."""

    def __init__(self, head: int, features: int, draw: int):
        super().__init__()
        self.head, self.features, self.draw = head, features, draw

    def directions(self, like: Tensor) -> Tensor:  # (features, head)
        """Random directions, every `head` of them orthogonal."""
        chance = torch.Generator().manual_seed(self.draw)
        shape = (-(-self.features // self.head), self.head, self.head)
        q, r = torch.linalg.qr(torch.randn(shape, generator=chance, dtype=torch.float64))
        turned = (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT.flatten(0, 1)
        length = torch.randn(self.features, self.head, generator=chance, dtype=torch.float64)
        return (turned[: self.features] * length.norm(dim=1, keepdim=True)).to(like)

    def exponent(self, x: Tensor, directions: Tensor) -> Tensor:
        x = x * self.head**-0.25
        return x @ directions.T - x.square().sum(-1, keepdim=True) / 2

    def query(self, q: Tensor) -> Tensor:  # (..., head) -> (..., features)
        exponent = self.exponent(q, self.directions(q))
        return (exponent - exponent.amax(-1, keepdim=True)).exp() * self.features**-0.5

    def key(self, k: Tensor) -> Tensor:  # (..., head) -> (..., features)
        directions = self.directions(k)
        middle = directions.square().sum(-1).amax() / 4  # keeps features from overflowing
        exponent = (self.exponent(k, directions) - middle).clamp_min(-60.0)  # or from underflowing
        return exponent.exp() * self.features**-0.5
'''

LINEAR = '''
class $name(nn.Module):
    """Attention whose weights are products of features: the past is one matrix per head.

    y_t = (sum over s <= t of k_s v_s^T)^T q_t / (sum over s <= t of k_s)^T q_t
    """

    $init
        super().__init__()
        self.head = head
        self.q = nn.Linear(width, heads * head, bias=$bias)
        self.k = nn.Linear(width, heads * head, bias=$bias)
        self.v = nn.Linear(width, heads * head, bias=$bias)
        self.o = nn.Linear(heads * head, width, bias=$bias)
        self.feature = feature  #? module

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        q = self.q(x).unflatten(-1, (-1, self.head)).to(at_least_fp32(x.dtype))  # (B, N, H, K)
        k = self.k(x).unflatten(-1, (-1, self.head)).to(q.dtype)
        v = self.v(x).unflatten(-1, (-1, self.head)).to(q.dtype)
        q, k = $query, $key  # (B, N, H, S), at least 0
        v = F.pad(v, (0, 1), value=1.0)  # one more column: the sum of the weights
        y = decay_scan(q, k, v, q.new_zeros(q.shape[:3]))  # no decay
        y = (y[..., :-1] / torch.where(y[..., -1:] > 0, y[..., -1:], 1.0)).to(x.dtype)
        return self.o(y.flatten(-2))
'''


@writes("elu_features")
def elu_features(context: Context) -> FeatureCode:
    """elu(x) + 1."""
    return FeatureCode("F.elu({}) + 1.0".format, "F.elu({}) + 1.0".format)


@writes("relu_features")
def relu_features(context: Context) -> FeatureCode:
    """max(x, 0) and a little."""
    floored = f"F.relu({{}}) + {context.part.floor}".format
    return FeatureCode(floored, floored)


@writes("random_features")
def random_features(context: Context) -> FeatureCode:
    """Random directions from a seed, and the feature maps of queries and keys."""
    sizes = {"head": context.size("head"), "features": context.size("features"), "draw": context.part.draw}
    call = Call.to(context.file.define("RandomFeatures", fill(RANDOM)), **sizes)
    return FeatureCode("self.feature.query({})".format, "self.feature.key({})".format, call)


@writes("linear_attention")
def linear(context: Context) -> MixerCode:
    """The mixer, its features and its scan."""
    part, file = context.part, context.file
    define_decay_scan(file)
    feature: FeatureCode = context.write("feature")
    file.letter(H="heads", K="head size", S="features of a query or key")
    sizes = {"width": context.size("embed"), "heads": part.heads, "head": context.size("head")}
    given = [f"{name}: int" for name in sizes] + (["feature: nn.Module"] if feature.module else [])
    text = fill(
        LINEAR,
        {"module": feature.module},
        init=f"def __init__(self, {', '.join(given)}):",
        bias=part.bias,
        query=feature.query("q"),
        key=feature.key("k"),
    )
    return MixerCode(Call.to(file.define("LinearAttention", text), **sizes, feature=feature.module))


FADED = '''
def $name(log: Tensor) -> Tensor:
    """e^log, and 0 below e^-$least."""
    return F.threshold(log.clamp(min=-$least - 1.0).exp(), math.exp(-$least), 0.0)
'''

SCAN = '''
def $name(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule: each token writes the difference to what its key already recalls.

    S~_t = e^(g_t) S_(t-1)      S_t = S~_t + k_t (beta_t (v_t - S~_t^T k_t))^T      y_t = S_t^T q_t
    In chunks of $chunk tokens, whose corrections w solve one triangular system.
    q, k (B, N, H, S), v (B, N, H, K), g, beta (B, N, H) -> y (B, N, H, K)
    """
    n = q.shape[1]
    size = min($chunk, n)
    rest = -n % size  # right padding: tokens that write nothing and do not decay
    q, k, v = (F.pad(t, (0, 0, 0, 0, 0, rest)) for t in (q, k, v))
    g, beta = (F.pad(t, (0, 0, 0, rest)) for t in (g, beta))
    # each (B, chunks, H, size, .)
    q, k, v, g, beta = (t.unflatten(1, (-1, size)).transpose(2, 3) for t in (q, k, v, g, beta))
    between = g[..., :, None].expand(*g.shape, size).tril(-1).cumsum(-2)
    fade = faded(between).tril()  # decay from token j to token i
    since = faded(g.cumsum(-1))  # decay from the chunk's begin to token i
    pairs = (k * beta[..., None]) @ k.transpose(-1, -2) * fade
    wanted = torch.cat([v * beta[..., None], k * (beta * since)[..., None]], -1)
    solved = torch.linalg.solve_triangular(pairs, wanted, upper=False, unitriangular=True)
    fresh, recalled = solved.split([v.shape[-1], k.shape[-1]], -1)
    keys = (k * fade[..., -1, :, None]).transpose(-1, -2)
    state, states, corrections = torch.zeros_like(keys[:, 0] @ v[:, 0]), [], []
    chunks = (t.unbind(1) for t in (fresh, recalled, keys, since[..., -1:, None]))
    for new, known, key, left in zip(*chunks, strict=True):
        states.append(state)  # (B, H, S, K), before the chunk
        corrections.append(new - known @ state)
        state = left * state + key @ corrections[-1]
    inside = (q @ k.transpose(-1, -2) * fade) @ torch.stack(corrections, 1)
    y = inside + (q * since[..., None]) @ torch.stack(states, 1)
    return y.transpose(2, 3).flatten(1, 2)[:, :n]
'''

UNIT = '''
def $name(x: Tensor) -> Tensor:
    """L2 normalization over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + $tiny)
'''

DELTA = '''
class $name(nn.Module):
    """Gated DeltaNet: a matrix-valued recurrent state with decay, updated by the delta rule."""

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
        acc = at_least_fp32(x.dtype)
        q = F.silu(causal_conv(self.q(x), self.conv_q)).unflatten(-1, (-1, self.key))
        k = F.silu(causal_conv(self.k(x), self.conv_k)).unflatten(-1, (-1, self.key))
        v = F.silu(causal_conv(self.v(x), self.conv_v)).unflatten(-1, (-1, self.value))
        q, k = of_length_one(q.to(acc)) * self.key**-0.5, of_length_one(k.to(acc))
        share = v.shape[2] // k.shape[2]  # heads that share one q and k  #? share
        q, k = q.repeat_interleave(share, 2), k.repeat_interleave(share, 2)  # (B, N, H, S)  #? share
        beta = self.b(x).to(acc).sigmoid()  # (B, N, H): step size of the update
        fade = -self.a_log.to(acc).exp() * F.softplus(self.a(x).to(acc) + self.fade_bias)
        y = delta_scan(q, k, v.to(acc), fade, beta).to(x.dtype)  # (B, N, H, K)
        return self.o(self.norm(y).flatten(-2) * F.silu(self.z(x)))
'''


@writes("gated_deltanet")
def gated_deltanet(context: Context) -> MixerCode:
    """The mixer, its convolution and its scan."""
    part, file = context.part, context.file
    file.define_at_least_fp32()
    define_conv(file)
    file.define("faded", fill(FADED, least=LEAST))
    file.define("of_length_one", fill(UNIT, tiny=EPS))
    file.define("delta_scan", fill(SCAN, chunk=CHUNK))
    file.letter(H="heads", K="head size", S="key size", C="channels")
    sizes = {"width": context.size("embed"), "heads": part.heads, "key_heads": part.groups()}
    sizes |= {"key": context.size("key"), "value": context.size("value")}
    norm = context.write("norm").change(dim="value").flat()
    text = fill(DELTA, {"share": part.groups() != part.heads}, taps=part.conv_size, norm=norm)
    return MixerCode(Call.to(file.define("GatedDelta", text), **sizes))
