"""Masks: which keys a query sees, as an expression of their positions q (N, 1) and k (1, N)."""

from __future__ import annotations

from dovetail.codegen.code import STEP, WIDTH, fill
from dovetail.codegen.registry import Here, Seen, writes

FUNCTION = '''
def $name(n: int, device: torch.device) -> Tensor:
    """$shape, true where a query may see a key."""
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


def mask_function(here: Here) -> str:
    """The name of a function of the file that gives the whole mask."""
    seen: Seen = here.written()
    ending = "[None]" if seen.by_head else ".expand(n, n)" if seen.by_key else ""
    line = f"return ({seen.expression}){ending}" if ending else f"return {seen.expression}"
    if STEP + len(line) > WIDTH and seen.terms:
        first, *others = seen.terms
        joined = [f"seen = {first}", *(f"seen = seen {seen.sign} ({term})" for term in others), f"return seen{ending}"]
        line = f"\n{' ' * STEP}".join(joined)
    shape = "(1, H, N, N)" if seen.by_head else "(N, N)"
    return here.file.define(f"{seen.name}_mask", fill(FUNCTION, {"by_key": seen.by_key}, shape=shape, lines=line))


@writes("full")
def full(here: Here) -> Seen:
    """Every token."""
    return Seen("full", "k >= 0", by_key=True)


@writes("causal")
def causal(here: Here) -> Seen:
    """The token itself and those before it."""
    return Seen("causal", "k <= q")


@writes("window")
def window(here: Here) -> Seen:
    """The nearest tokens, and the first ones."""
    near = f"(q - k).abs() < {here.part.size}"
    kept = f"({near}) | (k < {here.part.keep})" if here.part.keep else near
    return Seen(f"window{here.part.size}", kept)


@writes("prefix")
def prefix(here: Here) -> Seen:
    """The first tokens."""
    return Seen("prefix", f"k < {here.part.length}", by_key=True)


@writes("global_tokens")
def global_tokens(here: Here) -> Seen:
    """The first tokens see all and are seen by all."""
    return Seen("global", f"(q < {here.part.tokens}) | (k < {here.part.tokens})")


@writes("block_local")
def block_local(here: Here) -> Seen:
    """The token's own block and its neighbors."""
    size = here.part.size
    return Seen("block", f"(q // {size} - k // {size}).abs() <= {here.part.back}")


@writes("strided")
def strided(here: Here) -> Seen:
    """Every step-th token."""
    return Seen("strided", f"(q - k) % {here.part.step} == 0")


@writes("dilated")
def dilated(here: Here) -> Seen:
    """A window with holes."""
    step, most = here.part.step, here.part.size * here.part.step
    return Seen("dilated", f"((q - k) % {step} == 0) & ((q - k).abs() < {most})")


@writes("random_blocks")
def random_blocks(here: Here) -> Seen:
    """A few hashed blocks for each block of tokens."""
    part = here.part
    here.file.define("hashed", fill(HASHED))
    name = here.file.define("picked", fill(PICKED))
    return Seen("random", f"{name}(q, k, {part.size}, {part.count}, {part.seed})")


def _joined(here: Here, sign: str, word: str) -> Seen:
    parts: list[Seen] = [here.write(f"masks.{i}", mask) for i, mask in enumerate(here.part.masks)]
    if len(parts) == 1:
        return parts[0]
    names = list(dict.fromkeys(part.name for part in parts))
    terms = tuple(part.expression for part in parts)
    expression = f" {sign} ".join(f"({term})" for term in terms)
    by_head, by_key = any(part.by_head for part in parts), all(part.by_key for part in parts)
    return Seen(word.join(names), expression, by_head, by_key, terms, sign)


@writes("all_of")
def all_of(here: Here) -> Seen:
    """What all of the masks let through."""
    return _joined(here, "&", "_")


@writes("any_of")
def any_of(here: Here) -> Seen:
    """What any of the masks lets through."""
    return _joined(here, "|", "_or_")


@writes("by_head")
def by_head(here: Here) -> Seen:
    """Heads take the masks in turn."""
    parts: list[Seen] = [here.write(f"masks.{i}", mask) for i, mask in enumerate(here.part.masks)]
    if any(part.by_head for part in parts):
        here.refuse("masks", "masks by head inside masks by head have no writer yet")
    name = here.file.define("in_turn", fill(IN_TURN))
    each = ", ".join(part.expression for part in parts)
    here.file.letter(H="heads")
    return Seen("by_head", f"{name}({here.size('heads')}, {each})", by_head=True)


IN_TURN = '''
def $name(heads: int, *masks: Tensor) -> Tensor:
    """(H, N, N): head h sees by mask h mod len(masks)."""
    masks = torch.broadcast_tensors(*masks)
    return torch.stack([masks[head % len(masks)] for head in range(heads)])
'''
