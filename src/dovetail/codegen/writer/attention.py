"""Self-attention and cross attention.

The emitted kernel is the one that Dovetail selects for ordinary lengths: `F.scaled_dot_product_attention` with its causal flag
or a dense mask; the equation is written out where a soft-cap, a sink or a prefix comes between scores and softmax.
"""

from __future__ import annotations

from dovetail.codegen.code import BODY, Call, fill, signature, wrapped
from dovetail.codegen.registry import Context, MixerCode, PositionCode, writes
from dovetail.codegen.writer.mask import mask_function

OTHERWISE = {"causal": "CausalAttention", "all": "FullAttention", None: "MaskedAttention"}  # where several are in one file

ATTENTION = '''
class $name(nn.Module):
    """$doc

    z = softmax(q k^T * scale, over the visible keys) v
    Several query heads share one KV head (grouped-query attention).  #? grouped
    """

    $init
        super().__init__()
        self.head = head
        self.scale = $scale
        self.mask = mask  #? dense
        self.slots = heads // kv_heads + 2  # queries of a group, its key, its value  #? packed
        self.qkv = nn.Linear(width, kv_heads * self.slots * head, bias=$bias)  #? packed
        self.q = nn.Linear(width, heads * head, bias=$bias)  #? not packed
        self.k = nn.Linear($source, $kv_heads * head, bias=$bias)  #? not packed
        self.v = nn.Linear($source, $kv_heads * head, bias=$bias)  #? not packed not k_is_v
        self.o = nn.Linear(heads * head, width, bias=$out_bias)
        self.q_norm = $q_norm  #? norm
        self.k_norm = $k_norm  #? norm
        self.v_norm = $v_norm  #? v_norm
        self.gate = nn.Linear(width, heads * head, bias=False)  #? gate
        self.sink = nn.Parameter(torch.zeros(heads))  # a logit without a value  #? sink
        self.prefix_k = nn.Parameter(torch.empty($prefix, $kv_heads * head))  # every query sees them  #? prefix
        self.prefix_v = nn.Parameter(torch.empty($prefix, $kv_heads * head))  #? prefix
        self.position = position  #? position
        self.dropout = nn.Dropout($dropout)  #? dropout written

    $forward  # (B, N, D) -> (B, N, D)
        groups = self.qkv(x).unflatten(-1, (-1, self.slots, self.head))  # (B, N, $G, slots, K)  #? packed
        q = groups[..., :-2, :].flatten(-3, -2)  # (B, N, H, K)  #? packed
        k, v = groups[..., -2, :], groups[..., -1, :]  # (B, N, $G, K)  #? packed
        q = self.q(x).unflatten(-1, (-1, self.head))  # (B, N, H, K)  #? not packed
        k = self.k($read).unflatten(-1, (-1, self.head))  # (B, $M, $G, K)  #? not packed
        v = self.v($read).unflatten(-1, (-1, self.head))  # (B, $M, $G, K)  #? not packed not k_is_v
        v = k  # before the norm and the rotation of keys  #? k_is_v
        v = self.v_norm(v)  #? v_norm
        q, k = $turned_q, $turned_k  #? turn after
        q, k = self.q_norm(q), self.k_norm(k)  #? norm not whole
        q = self.q_norm(q.flatten(-2)).unflatten(-1, (-1, self.head))  # over all heads at once  #? norm whole
        k = self.k_norm(k.flatten(-2)).unflatten(-1, (-1, self.head))  #? norm whole
        q, k = $turned_q, $turned_k  #? turn not after
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, N, K)
        visible = self.mask(x.shape[1], x.device)  # (N, N)  #? dense
        prefix_k = self.prefix_k.unflatten(-1, (-1, self.head)).transpose(0, 1)  # ($G, $prefix, K)  #? prefix
        prefix_v = self.prefix_v.unflatten(-1, (-1, self.head)).transpose(0, 1)  #? prefix
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)  # KV heads serve several heads  #? written grouped
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)  #? written grouped
        scores = (q @ k.transpose(-1, -2)).to(at_least_fp32(q.dtype)) * self.scale  # (B, H, N, $M)  #? written
        scores = $softcap * torch.tanh(scores / $softcap)  #? written softcap
        scores = scores + $added  #? written biased
        scores = scores.masked_fill(~visible, -torch.inf)  #? written dense
        own = q.unflatten(1, (len(prefix_k), -1)) @ prefix_k[:, None].transpose(-1, -2)  #? written prefix
        own = own.flatten(1, 2).to(scores.dtype) * self.scale  # (B, H, N, $prefix)  #? written prefix
        own = $softcap * torch.tanh(own / $softcap)  #? written prefix softcap
        scores = torch.cat([scores, own], -1)  #? written prefix
        sink = self.sink[:, None, None].expand(*scores.shape[:-1], 1).to(scores.dtype)  #? sink
        scores = torch.cat([scores, sink], -1)  # one more column, without a value  #? sink
        probs = torch.softmax(scores, -1)  #? written not sink
        probs = torch.softmax(scores, -1)[..., :-1]  #? written sink
        probs, own = probs.split([v.shape[-2], $prefix], -1)  #? written prefix
        probs = self.dropout(probs)  #? written dropout
        z = probs.to(v.dtype) @ v  # (B, H, N, K)  #? written
        own = own.to(v.dtype).unflatten(1, (len(prefix_v), -1))  #? written prefix
        z = z + (own @ prefix_v[:, None]).flatten(1, 2)  #? written prefix
        k = torch.cat([prefix_k.expand(len(x), -1, -1, -1), k], 2)  # (B, $G, $prefix + $M, K)  #? not written prefix
        v = torch.cat([prefix_v.expand(len(x), -1, -1, -1), v], 2)  #? not written prefix
        visible = F.pad(visible, ($prefix, 0), value=True)  # every query sees the prefix  #? not written prefix
        bias = $added.to(q.dtype)  #? not written biased not prefix
        bias = F.pad($added, ($prefix, 0)).to(q.dtype)  #? not written biased prefix
        bias = torch.where(visible, bias, -torch.inf)  # (1, H, N, N)  #? not written biased dense
        $attend  #? not written
        z = z.transpose(1, 2).flatten(-2)  # (B, N, H * K)
        z = z * torch.sigmoid(self.gate(x))  #? gate
        return self.o(z)
'''


def _scale(context: Context) -> str:
    """The factor of the scores."""
    return "head**-0.5" if context.part.scale is None else f"{context.part.scale}"


def kernel(flag: str | None, biased: bool, grouped: bool, dropout: float) -> Call:
    """The call of torch's attention, with the mask as a flag where possible."""
    mask = {"attn_mask": "bias"} if biased else {"is_causal": True} if flag == "causal" else {}
    if flag is None and not biased:
        mask = {"attn_mask": "visible"}
    dropped = f"{dropout} if self.training else 0.0" if dropout else None
    gqa = True if grouped else None
    call = Call.to("F.scaled_dot_product_attention", **mask, scale="self.scale", enable_gqa=gqa, dropout_p=dropped)
    return Call(call.name, (("", "q"), ("", "k"), ("", "v"), *call.args))


def _written(context: Context, cross: bool) -> MixerCode:
    part, file = context.part, context.file
    if part.earlier is not None:
        context.refuse("earlier", "a file cannot yet pass values from layer to layer")
    if part.prefix and cross:
        context.refuse("prefix", "a file cannot yet put a prefix before the keys of an encoder")
    placed: PositionCode = context.write("position")
    flag, biased, grouped = part.mask.flag(), bool(placed.bias), part.groups() != part.heads
    written = part.softcap is not None or part.sink
    flag = None if part.prefix and not written else flag  # says nothing of a prefix
    dense = flag is None or (flag == "causal" and (biased or written))
    flags = {
        "dense": dense,
        "packed": part.packed,
        "norm": part.qk_norm is not None,
        "whole": part.qk_norm_whole,
        "after": part.qk_norm_after,
        "v_norm": part.v_norm is not None,
        "k_is_v": part.k_is_v,
        "gate": part.gate,
        "sink": part.sink,
        "prefix": part.prefix > 0,
        "softcap": part.softcap is not None,
        "position": placed.module is not None or bool(placed.given),
        "dropout": bool(part.dropout),
        "written": written,
        "biased": biased,
        "grouped": grouped,
        "turn": placed.turn is not None,
    }
    if written:
        file.define_at_least_fp32()
    turn = placed.turn or (lambda x: x)
    norms: dict[str, str] = dict.fromkeys(("q_norm", "k_norm", "v_norm"), "")
    if part.v_norm is not None:
        norms["v_norm"] = context.write("v_norm").change(dim="head").flat()
    if part.qk_norm is not None:
        heads = {"q_norm": "heads", "k_norm": "kv_heads" if grouped or part.packed else "heads"}
        for name in heads:
            dim = f"{heads[name]} * head" if part.qk_norm_whole else "head"
            norms[name] = context.write(name, part.qk_norm).change(dim=dim).flat()
    sizes = {"width": context.size("embed"), "heads": part.heads}
    if grouped or part.packed:
        sizes["kv_heads"] = part.groups()
    sizes["head"] = context.size("head")
    if cross:
        sizes["source"] = context.size("encoder")
    given = [f"{name}: int" for name in sizes]
    arguments: dict[str, object] = dict(sizes)
    if dense:
        given, arguments = [*given, "mask: Callable"], {**arguments, "mask": mask_function(context.below("mask"))}
    if flags["position"]:  # a table that a stack shares is in its first layer only
        holder = "position: nn.Module | None = None" if placed.given else "position: nn.Module"
        given, arguments = [*given, holder], {**arguments, "position": placed.module}
    inputs = {**({"encoder_output": "encoder_output"} if cross else {}), **placed.given}
    file.letter(H="heads", K="head size", **({"G": "KV heads"} if grouped else {}))
    if cross:
        file.letter(M="source tokens")
    text = fill(
        ATTENTION,
        flags,
        doc=_doc(cross),
        init=signature("__init__", given),
        forward=signature("forward", ["x: Tensor", *(f"{name}: Tensor" for name in inputs)], "Tensor"),
        scale=_scale(context),
        bias=part.bias,
        out_bias=part.out_bias,
        source="source" if cross else "width",
        read="encoder_output" if cross else "x",
        kv_heads="kv_heads" if grouped or part.packed else "heads",
        G="G" if grouped else "H",
        M="M" if cross else "N",
        turned_q=turn("q"),
        turned_k=turn("k"),
        softcap=part.softcap,
        prefix=part.prefix,
        added=placed.bias,
        dropout=part.dropout,
        attend=wrapped("z = ", kernel(flag, biased, grouped, part.dropout), "  # (B, H, N, K)", BODY),
        **norms,
    )
    name, other = ("CrossAttention", "") if cross else ("Attention", OTHERWISE[flag])
    return MixerCode(Call.to(file.define(name, text, other), **arguments), inputs)


def _doc(cross: bool) -> str:
    if cross:
        return "Cross attention: queries from the decoder, keys and values from the encoder output."
    return "Scaled dot-product attention: a weighted mean of the values of the visible tokens."


@writes("attention")
def attention(context: Context) -> MixerCode:
    """Self-attention."""
    return _written(context, cross=False)


@writes("cross_attention")
def cross_attention(context: Context) -> MixerCode:
    """Cross attention."""
    return _written(context, cross=True)
