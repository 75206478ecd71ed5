"""Linear attention: weights are products of features, so the past is one matrix per head."""

from __future__ import annotations

from dovetail.codegen.code import Call, fill
from dovetail.codegen.registry import Context, FeatureCode, MixerCode, writes
from dovetail.codegen.writer.mamba2 import define_decay_scan

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
