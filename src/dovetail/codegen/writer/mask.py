"""Masks: which keys a query sees, as an expression of their positions q (N, 1) and k (1, N)."""

from __future__ import annotations

from dovetail.codegen.code import STEP, WIDTH, fill
from dovetail.codegen.registry import Context, MaskCode, writes

FUNCTION = '''
def $name(n: int, device: torch.device) -> Tensor:
    """$shape, true where a query may attend to a key."""
    at = torch.arange(n, device=device)
    q, k = at[:, None], at[None, :]  #? not by_key
    k = at[None, :]  #? by_key
    $lines
'''

PICKED = '''
def $name(q: Tensor, k: Tensor, size: int, count: int, seed: int) -> Tensor:
    """Each block of `size` tokens picks `count` blocks at or before it, by a hash of its number."""
    a, b, found = q // size, k // size, False
    for pick in range(count):
        found = found | (hashed(a, pick, seed) % (a + 1) == b)
        found = found | (hashed(b, pick, seed) % (b + 1) == a)
    return found
'''

HASHED = '''
def $name(block: Tensor, pick: int, seed: int) -> Tensor:
    """A 31-bit mix of whole numbers."""
    mixed = block * 0x9E3779B1 + pick * 0x85EBCA6B + seed * 0xC2B2AE35 + 0x27D4EB2F
    mixed = mixed & 0x7FFFFFFF
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0x7FFFFFFF
    return mixed ^ (mixed >> 15)
'''


def mask_function(context: Context) -> str:
    """The name of a function of the file that gives the whole mask."""
    mask: MaskCode = context.written()
    ending = "[None]" if mask.by_head else ".expand(n, n)" if mask.by_key else ""
    line = f"return ({mask.expression}){ending}" if ending else f"return {mask.expression}"
    if STEP + len(line) > WIDTH and mask.terms:
        first, *others = mask.terms
        joined = [
            f"visible = {first}",
            *(f"visible = visible {mask.sign} ({term})" for term in others),
            f"return visible{ending}",
        ]
        line = f"\n{' ' * STEP}".join(joined)
    shape = "(1, H, N, N)" if mask.by_head else "(N, N)"
    return context.file.define(f"{mask.name}_mask", fill(FUNCTION, {"by_key": mask.by_key}, shape=shape, lines=line))


@writes("full")
def full(context: Context) -> MaskCode:
    """Every token."""
    return MaskCode("full", "k >= 0", by_key=True)


@writes("causal")
def causal(context: Context) -> MaskCode:
    """The token itself and those before it."""
    return MaskCode("causal", "k <= q")


@writes("window")
def window(context: Context) -> MaskCode:
    """The nearest tokens, and the first ones."""
    near = f"(q - k).abs() < {context.part.size}"
    kept = f"({near}) | (k < {context.part.keep})" if context.part.keep else near
    return MaskCode(f"window{context.part.size}", kept)


@writes("prefix")
def prefix(context: Context) -> MaskCode:
    """The first tokens."""
    return MaskCode("prefix", f"k < {context.part.length}", by_key=True)


@writes("global_tokens")
def global_tokens(context: Context) -> MaskCode:
    """The first tokens see every token, and every token sees them."""
    return MaskCode("global", f"(q < {context.part.tokens}) | (k < {context.part.tokens})")


@writes("block_local")
def block_local(context: Context) -> MaskCode:
    """The token's own block and its neighbors."""
    size = context.part.size
    return MaskCode("block", f"(q // {size} - k // {size}).abs() <= {context.part.back}")


@writes("strided")
def strided(context: Context) -> MaskCode:
    """Every step-th token."""
    return MaskCode("strided", f"(q - k) % {context.part.step} == 0")


@writes("dilated")
def dilated(context: Context) -> MaskCode:
    """A window with holes."""
    step, most = context.part.step, context.part.size * context.part.step
    return MaskCode("dilated", f"((q - k) % {step} == 0) & ((q - k).abs() < {most})")


@writes("random_blocks")
def random_blocks(context: Context) -> MaskCode:
    """A few hashed blocks for each block of tokens."""
    part = context.part
    context.file.define("hashed", fill(HASHED))
    name = context.file.define("picked", fill(PICKED))
    return MaskCode("random", f"{name}(q, k, {part.size}, {part.count}, {part.seed})")


def _joined(context: Context, sign: str, word: str) -> MaskCode:
    parts: list[MaskCode] = [context.write(f"masks.{i}", mask) for i, mask in enumerate(context.part.masks)]
    if len(parts) == 1:
        return parts[0]
    names = list(dict.fromkeys(part.name for part in parts))
    terms = tuple(part.expression for part in parts)
    expression = f" {sign} ".join(f"({term})" for term in terms)
    by_head, by_key = any(part.by_head for part in parts), all(part.by_key for part in parts)
    return MaskCode(word.join(names), expression, by_head, by_key, terms, sign)


@writes("all_of")
def all_of(context: Context) -> MaskCode:
    """The keys that all of the masks allow."""
    return _joined(context, "&", "_")


@writes("any_of")
def any_of(context: Context) -> MaskCode:
    """The keys that any of the masks allows."""
    return _joined(context, "|", "_or_")


@writes("by_head")
def by_head(context: Context) -> MaskCode:
    """Heads take the masks in turn."""
    parts: list[MaskCode] = [context.write(f"masks.{i}", mask) for i, mask in enumerate(context.part.masks)]
    if any(part.by_head for part in parts):
        context.refuse("masks", "masks by head inside masks by head have no writer yet")
    name = context.file.define("in_turn", fill(IN_TURN))
    each = ", ".join(part.expression for part in parts)
    context.file.letter(H="heads")
    return MaskCode("by_head", f"{name}({context.size('heads')}, {each})", by_head=True)


IN_TURN = '''
def $name(heads: int, *masks: Tensor) -> Tensor:
    """(H, N, N): head h sees by mask h mod len(masks)."""
    masks = torch.broadcast_tensors(*masks)
    return torch.stack([masks[head % len(masks)] for head in range(heads)])
'''
