"""Multi-head latent attention (MLA): keys and values of all heads from one latent per token."""

from __future__ import annotations

from dovetail.codegen.code import BODY, Call, fill, signature, wrapped
from dovetail.codegen.registry import Context, MixerCode, PositionCode, writes
from dovetail.codegen.writer.attention import kernel
from dovetail.codegen.writer.mask import mask_function

LATENT = '''
class $name(nn.Module):
    """Multi-head latent attention: keys and values of all heads come from one latent per token.

    A short rotary key, shared by all heads, carries the position; the other channels do not.
    """

    $init
        super().__init__()
        self.nope, self.rope, self.value = nope, rope, value
        self.scale = $scale
        self.mask = mask  #? dense
        self.q_down = nn.Linear(width, q_rank, bias=False)  #? q_rank
        self.q_norm = $q_norm  #? q_rank
        self.q = nn.Linear($q_source, heads * (nope + rope), bias=False)
        self.kv_down = nn.Linear(width, kv_rank, bias=False)
        self.kv_norm = $kv_norm
        self.turned = nn.Linear(width, rope, bias=False)
        self.k_up = nn.Linear(kv_rank, heads * nope, bias=False)
        self.v_up = nn.Linear(kv_rank, heads * value, bias=False)
        self.o = nn.Linear(heads * value, width, bias=False)
        self.position = position  #? position

    $forward  # (B, N, D) -> (B, N, D)
        q = self.q($q_from).unflatten(-1, (-1, self.nope + self.rope))
        q, q_turned = q.split([self.nope, self.rope], -1)  # (B, N, H, nope), (B, N, H, rope)
        q_turned = $q_turned  #? turn
        q = torch.cat([q, q_turned], -1)  #? not absorbed
        latent = self.kv_norm(self.kv_down(x))  # (B, N, kv_rank): the KV cache holds this ...
        turned = self.turned(x).unsqueeze(-2)  # (B, N, 1, rope): ... and this
        turned = $k_turned  #? turn
        k = self.k_up(latent).unflatten(-1, (-1, self.nope))  #? not absorbed
        k = torch.cat([k, turned.expand(*k.shape[:-1], -1)], -1)  # (B, N, H, nope + rope)  #? not absorbed
        v = self.v_up(latent).unflatten(-1, (-1, self.value))  # (B, N, H, value)  #? not absorbed
        # the latent is small: k_up is absorbed into q, and v_up is applied to the result  #? absorbed
        k_up = self.k_up.weight.unflatten(0, (-1, self.nope))  # (H, nope, kv_rank)  #? absorbed
        v_up = self.v_up.weight.unflatten(0, (-1, self.value))  # (H, value, kv_rank)  #? absorbed
        q = torch.cat([torch.einsum("...hi,hir->...hr", q, k_up), q_turned], -1)  #? absorbed
        v = latent.unsqueeze(-2)  # (B, N, 1, kv_rank): all heads share it  #? absorbed
        k = torch.cat([v, turned], -1)  #? absorbed
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, N, .)
        visible = self.mask(x.shape[1], x.device)  # (N, N)  #? dense
        bias = $added.to(q.dtype)  #? biased
        bias = torch.where(visible, bias, -torch.inf)  # (1, H, N, N)  #? biased dense
        $attend
        z = z.transpose(1, 2)
        z = torch.einsum("...hr,hor->...ho", z, v_up)  # (B, N, H, value)  #? absorbed
        return self.o(z.flatten(-2))
'''


@writes("mla")
def latent(context: Context) -> MixerCode:
    """Keys and values from the latents, then attention."""
    part, file = context.part, context.file
    placed: PositionCode = context.write("position")
    flag, biased = part.mask.flag(), bool(placed.bias)
    absorbed = 2 * part.kv_rank < part.nope + part.value  # fewer products over a whole sequence
    flags = {
        "dense": flag is None or (flag == "causal" and biased),
        "q_rank": part.q_rank is not None,
        "position": placed.module is not None or bool(placed.given),
        "turn": placed.turn is not None,
        "biased": biased,
        "absorbed": absorbed,
    }
    names = ("heads", "kv_rank", "q_rank", "nope", "rope", "value")
    arguments = {"width": context.size("embed"), **{name: getattr(part, name) for name in names}}
    arguments = {name: size for name, size in arguments.items() if size is not None}
    given = [f"{name}: int" for name in arguments]
    if flags["dense"]:
        given, arguments = [*given, "mask: Callable"], {**arguments, "mask": mask_function(context.below("mask"))}
    if flags["position"]:
        holder = "position: nn.Module | None = None" if placed.given else "position: nn.Module"
        given, arguments = [*given, holder], {**arguments, "position": placed.module}
    turn = placed.turn or (lambda x: x)
    file.letter(H="heads")
    text = fill(
        LATENT,
        flags,
        init=signature("__init__", given),
        forward=signature("forward", ["x: Tensor", *(f"{name}: Tensor" for name in placed.given)], "Tensor"),
        scale="(nope + rope) ** -0.5" if part.scale is None else part.scale,
        q_norm="" if part.q_rank is None else context.write("q_norm", part.norm).change(dim="q_rank").flat(),
        kv_norm=context.write("kv_norm", part.norm).change(dim="kv_rank").flat(),
        q_source="width" if part.q_rank is None else "q_rank",
        q_from="x" if part.q_rank is None else "self.q_norm(self.q_down(x))",
        q_turned=turn("q_turned"),
        k_turned=turn("turned"),
        added=placed.bias,
        attend=wrapped("z = ", kernel(flag, biased, absorbed and part.heads > 1, part.dropout), "", BODY),
    )
    return MixerCode(Call.to(file.define("LatentAttention", text), **arguments), placed.given)
