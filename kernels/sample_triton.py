"""kernels/sample.py in Triton: two launches, whatever is asked for.

First launch: a program reads a chunk of a row and notes its largest logit and its mass relative to that. A truncated
draw also gets the largest logit of every group of GROUP neighbours.

Second launch: a program per row merges the chunks. Without truncation it finds the chunk that u (or the largest logit)
falls into and reads that chunk once more; what the other chunks hold is known.

With truncation it looks for the cut without sorting: it tries logits t, counting what lies at or above t and adding its
mass, first in doubling steps down from the largest until there is enough, then by bisection. Both ends of the bracket
move on to the nearest logit that occurs, so that it closes on ties too. Only groups whose largest logit is at or
above the lowest t so far are read: they are few where the distribution is peaked, and their list is in the order of
ids, so the draw walks down the same list.

What is kept is decided by comparing logits, whose order no rounding changes; only top-p also needs sums of masses.
Sums over chunks and tiles are float64. All run in an order that depends on sizes and alignment alone.
"""

# Launch options and loops over tensors are unknown to a type checker that sees a plain function.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from covey.kernels.head_triton import _log1p

CHUNK = 4096  # logits of a program of the first launch: all are loaded before the first is used
CHUNK_WARPS = 4
DRAW_WARPS = 8  # of a program that merges chunks and reads one
GROUP = 32  # neighbours with a common maximum: a cache line of 128 bytes
TILE = 4096  # logits that the truncated draw holds at a time
TILE_WARPS = 8
LISTED = 2048  # group maxima that it looks at together
# Two such programs fit a multiprocessor with so many registers per thread; the option is NVIDIA's only.
REGISTERS = {"maxnreg": 128} if torch.version.cuda else {}

FAR = tl.constexpr(2**30)  # beyond every id
FIRST = tl.constexpr(4.0)  # nats below the largest logit: the first t
DEEPEST = tl.constexpr(128.0)  # the last of the doubling steps; float32 masses are 0 from 104 on
LAST = tl.constexpr(1.0 - 2.0**-53)  # the largest float64 below 1


def sample(
    logits_BV: Tensor,
    uniform_B: Tensor,
    temperature: float,
    top_k: int,
    share: float,
    least: float,
    id_B: Tensor,
    logp_B: Tensor,
) -> None:
    """Fills id_B and logp_B. share: of the total mass that top-p must reach (1: off); least: how far below the largest
    logit min-p cuts (-inf: off)."""
    rows, vocab = logits_BV.shape
    assert vocab < FAR.value - CHUNK
    if not rows:
        return
    row = logits_BV.stride(0) if rows > 1 else vocab
    greedy = temperature == 0
    temperature = 1.0 if greedy else float(temperature)
    truncated = top_k > 0 or share < 1 or least > -torch.inf
    chunk = min(CHUNK, max(GROUP, 1 << (vocab - 1).bit_length()))
    chunks, groups = -(-vocab // chunk), -(-vocab // GROUP)
    chunk_BC2 = logits_BV.new_empty(rows, chunks, 2)
    group_BG = logits_BV.new_empty(rows, groups) if truncated else None
    with torch.cuda.device_of(logits_BV):
        _chunks[(rows * chunks,)](
            logits_BV, chunk_BC2, group_BG, 1.0 / temperature, vocab, row, chunks, chunk, GROUP,
            num_warps=CHUNK_WARPS,
        )  # fmt: skip
        merged = triton.next_power_of_2(chunks)
        if group_BG is None:
            _draw[(rows,)](
                logits_BV, uniform_B, chunk_BC2, id_B, logp_B, 1.0 / temperature,
                vocab, row, chunks, merged, chunk, greedy, num_warps=DRAW_WARPS,
            )  # fmt: skip
            return
        tile = min(TILE, triton.next_power_of_2(vocab)) // GROUP
        _draw_truncated[(rows,)](
            logits_BV, uniform_B, chunk_BC2, group_BG, torch.empty_like(group_BG, dtype=torch.int32), id_B, logp_B,
            temperature, 1.0 / temperature, least, top_k, share, least > -torch.inf,
            vocab, row, chunks, merged, groups, min(LISTED, triton.next_power_of_2(groups)),
            GROUP, max(1, tile), num_warps=TILE_WARPS, **REGISTERS,
        )  # fmt: skip


@triton.jit
def _chunks(
    logits_ptr,
    chunk_ptr,  # [B, C, 2]: largest logit, sum of exp((logit - largest) / T)
    group_ptr,  # [B, G]: largest logits; None: not asked for
    inverse_temperature,
    V: tl.constexpr,
    ROW: tl.constexpr,  # stride
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    program = tl.program_id(0)
    row, chunk = (program // CHUNKS).to(tl.int64), program % CHUNKS
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * ROW + at, mask=at < V, other=float("-inf"))
    if group_ptr is not None:
        PER: tl.constexpr = CHUNK // GROUP
        GROUPS: tl.constexpr = (V + GROUP - 1) // GROUP
        top_G = tl.max(tl.reshape(x, (PER, GROUP)), 1)
        group = chunk * PER + tl.arange(0, PER)
        tl.store(group_ptr + row * GROUPS + group, top_G, mask=group < GROUPS)
        top = tl.max(top_G, 0)
    else:
        top = tl.max(x, 0)
    mass = tl.sum(tl.exp((x - _finite(top)) * inverse_temperature), 0)
    chunk_ptr += program.to(tl.int64) * 2
    tl.store(chunk_ptr, top)
    tl.store(chunk_ptr + 1, mass)


@triton.jit
def _draw(
    logits_ptr,
    uniform_ptr,
    chunk_ptr,
    id_ptr,
    logp_ptr,
    inverse_temperature,
    V: tl.constexpr,
    ROW: tl.constexpr,
    CHUNKS: tl.constexpr,
    MERGED: tl.constexpr,  # a power of 2
    CHUNK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c, top_C, mass_C, best = _merge(chunk_ptr + row * CHUNKS * 2, inverse_temperature, CHUNKS, MERGED)
    target = tl.sum(mass_C, 0) * tl.load(uniform_ptr + row).to(tl.float64)
    if GREEDY:
        chosen = _first_equal(top_C, c, best, CHUNKS - 1)
    else:
        chosen = _first_above(mass_C, c, target)
        target -= tl.sum(tl.where(c < chosen, mass_C, 0.0), 0)
    at = chosen * CHUNK + tl.arange(0, CHUNK)
    logits_ptr += row * ROW
    x = tl.load(logits_ptr + at, mask=at < V, other=float("-inf"))
    mass = tl.exp((x - _finite(best)) * inverse_temperature).to(tl.float64)
    y = _first_equal(x, at, best, V - 1) if GREEDY else _first_above(mass, at, target)
    others = tl.sum(tl.where(c == chosen, 0.0, mass_C), 0) + tl.sum(tl.where(at == y, 0.0, mass), 0)
    tl.store(id_ptr + row, y.to(tl.int64))
    tl.store(logp_ptr + row, _log_prob(tl.load(logits_ptr + y), best, others, inverse_temperature))


@triton.jit
def _draw_truncated(
    logits_ptr,
    uniform_ptr,
    chunk_ptr,
    group_ptr,
    list_ptr,  # int32 [B, G], scratch
    id_ptr,
    logp_ptr,
    temperature,
    inverse_temperature,
    least,
    TOP_K: tl.constexpr,
    SHARE: tl.constexpr,
    MIN_P: tl.constexpr,
    V: tl.constexpr,
    ROW: tl.constexpr,
    CHUNKS: tl.constexpr,
    MERGED: tl.constexpr,
    GROUPS: tl.constexpr,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,  # groups
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * ROW
    group_ptr += row * GROUPS
    list_ptr += row * GROUPS
    _, _, mass_C, best = _merge(chunk_ptr + row * CHUNKS * 2, inverse_temperature, CHUNKS, MERGED)
    total = tl.sum(mass_C, 0)
    sound = (total > 0.0) & (total < float("inf"))  # not for NaN either
    floor = best + float("inf")
    listed = 0
    if TOP_K:
        cut, room, total, floor, listed = _search(
            logits_ptr, group_ptr, list_ptr, sound, best, TOP_K, True, floor, listed,
            temperature, inverse_temperature, V, GROUPS, LISTED, GROUP, TILE,
        )  # fmt: skip
    else:
        cut, room = best + float("-inf"), V
    if SHARE < 1:
        lower, lower_room = cut, room
        cut, room, total, floor, listed = _search(
            logits_ptr, group_ptr, list_ptr, sound, best, total * SHARE, False, floor, listed,
            temperature, inverse_temperature, V, GROUPS, LISTED, GROUP, TILE,
        )  # fmt: skip
        room = tl.where(cut > lower, room, tl.where(cut < lower, lower_room, tl.minimum(room, lower_room)))
        cut = tl.maximum(cut, lower)
    if MIN_P:
        room = tl.where(best + least > cut, V, room)
        cut = tl.maximum(best + least, cut)
    listed = _list(group_ptr, list_ptr, cut, GROUPS, LISTED)

    # Downwards the list for the mass of all that is kept, and again for the token where it exceeds u times that.
    zero = tl.full((), 0.0, tl.float64)
    total, ties, first = zero, 0, 0
    while first < listed:
        at, mass, ties = _kept_tile(
            logits_ptr, list_ptr, listed, first, best, cut, room, ties, inverse_temperature, V, GROUP, TILE
        )
        total += tl.sum(mass, 0)
        first += TILE
    target = total * tl.minimum(tl.load(uniform_ptr + row).to(tl.float64), LAST)
    before, others, ties, first, y = zero, zero, 0, 0, -1
    while first < listed:
        at, mass, ties = _kept_tile(
            logits_ptr, list_ptr, listed, first, best, cut, room, ties, inverse_temperature, V, GROUP, TILE
        )
        tile_mass = tl.sum(mass, 0)
        if (y < 0) & (before + tile_mass > target):
            y = _first_above(mass, at, target - before)
            others += tl.sum(tl.where(at == y, 0.0, mass), 0)
        else:
            others += tile_mass
        before += tile_mass
        first += TILE
    y = tl.maximum(y, 0)
    logp = _log_prob(tl.load(logits_ptr + y), best, others, inverse_temperature)
    tl.store(id_ptr + row, y.to(tl.int64))
    tl.store(logp_ptr + row, tl.where(sound, logp, float("nan")))


@triton.jit
def _search(
    logits_ptr,
    group_ptr,
    list_ptr,
    sound,
    best,
    goal,
    COUNT: tl.constexpr,  # the goal is a number of tokens, not a mass
    floor,
    listed,
    temperature,
    inverse_temperature,
    V: tl.constexpr,
    GROUPS: tl.constexpr,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """The logit at which the largest ones reach the goal, how many tokens equal to it that takes, the mass of all
    these, and the list of groups at or above `floor`, which may have sunk.

    The cut lies in [low, high], or below high while `found` is false. n_low counts the logits >= low, n_high and
    mass_high are of those above the bracket.
    """
    low, high, step = best, best, best * 0.0 + FIRST * temperature
    n_low, n_high, mass_high, found = V, 0, tl.full((), 0.0, tl.float64), False
    t = best - step
    searching = sound
    while searching:
        if t < floor:
            floor = t
            listed = _list(group_ptr, list_ptr, t, GROUPS, LISTED)
        n, mass, above, below = _measure(
            logits_ptr, list_ptr, listed, best, t, inverse_temperature, V, GROUP, TILE
        )
        enough = (n >= goal) if COUNT else (mass >= goal)
        if enough:
            low, n_low = above, n
            if listed > TILE:
                floor = above
                listed = _list(group_ptr, list_ptr, above, GROUPS, LISTED)
        else:
            high, n_high, mass_high = tl.where(found, below, t), n, mass
        found = found | enough
        if found:
            middle = low + (high - low) * 0.5
            t = tl.where(middle > low, middle, high)
            searching = (low < high) & (n_low - n_high > 1)
        else:
            searching = step < DEEPEST * temperature
            step *= 2.0
            t = best - step
    # Nothing below the deepest t has any mass: without enough above, all above is kept.
    cut = tl.where(found, low, high)
    each = tl.exp((cut - best) * inverse_temperature).to(tl.float64)
    if COUNT:
        room = goal - n_high
    else:
        room = ((goal - mass_high) / tl.maximum(each, 1e-300)).to(tl.int32)
        room += (room * each < goal - mass_high).to(tl.int32)
        room = tl.maximum(tl.minimum(room, n_low - n_high), 1)
    mass_high = tl.where(found, mass_high + room * each, mass_high)
    return cut, tl.where(found, room, V), mass_high, floor, listed


@triton.jit
def _list(group_ptr, list_ptr, t, GROUPS: tl.constexpr, LISTED: tl.constexpr):
    """Writes down the groups whose largest logit is at or above t, in ascending order, and returns their number."""
    tl.debug_barrier()  # all warps have done with the list that was
    listed = 0
    for i in range(0, GROUPS, LISTED):
        group = i + tl.arange(0, LISTED)
        top = tl.load(group_ptr + group, mask=group < GROUPS, other=float("-inf"))
        high = (top >= t) & (group < GROUPS)
        place = listed + tl.cumsum(high.to(tl.int32), 0)
        tl.store(list_ptr + place - 1, group, mask=high)
        listed += tl.sum(high.to(tl.int32), 0)
    tl.debug_barrier()
    return listed


@triton.jit
def _tile(logits_ptr, list_ptr, listed, first, V: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Ids and logits [TILE, GROUP] of listed groups from `first` on; -inf beyond the list."""
    slot = first + tl.arange(0, TILE)
    group = tl.load(list_ptr + slot, mask=slot < listed, other=0)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits_ptr + at, mask=(slot < listed)[:, None] & (at < V), other=float("-inf"))
    return at, x


@triton.jit
def _measure(
    logits_ptr,
    list_ptr,
    listed,
    best,
    t,
    inverse_temperature,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of the listed logits: number and mass of those >= t, the smallest of them, and the largest of the others."""
    n = tl.zeros((TILE, GROUP), tl.int32)
    mass = tl.zeros((TILE, GROUP), best.dtype)
    above, below = mass + float("inf"), mass + float("-inf")
    first = 0
    while first < listed:
        _, x = _tile(logits_ptr, list_ptr, listed, first, V, GROUP, TILE)
        over = x >= t
        n += over.to(tl.int32)
        mass += tl.where(over, tl.exp((x - best) * inverse_temperature), 0.0)
        above = tl.minimum(above, tl.where(over, x, float("inf")))
        below = tl.maximum(below, tl.where(over, float("-inf"), x))
        first += TILE
    return (
        tl.sum(n),
        tl.sum(tl.sum(mass, 1).to(tl.float64), 0),
        tl.min(above),
        tl.max(below),
    )


@triton.jit
def _kept_tile(
    logits_ptr,
    list_ptr,
    listed,
    first,
    best,
    cut,
    room,
    ties,
    inverse_temperature,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Ids and masses (0 if not kept) of a tile in the order of ids, and the number of logits equal to the cut so far,
    of which the first `room` are kept."""
    at, x = _tile(logits_ptr, list_ptr, listed, first, V, GROUP, TILE)
    at, x = tl.reshape(at, (TILE * GROUP,)), tl.reshape(x, (TILE * GROUP,))
    tied = (x == cut).to(tl.int32)
    kept = (x > cut) | ((tied > 0) & (ties + tl.cumsum(tied, 0) <= room))
    mass = tl.where(kept, tl.exp((x - best) * inverse_temperature), 0.0).to(tl.float64)
    return at, mass, ties + tl.sum(tied, 0)


@triton.jit
def _finite(top):
    """What to subtract: not -inf, because -inf less -inf is NaN."""
    return tl.where(top > float("-inf"), top, 0.0)


@triton.jit
def _merge(chunk_ptr, inverse_temperature, CHUNKS: tl.constexpr, MERGED: tl.constexpr):
    """Places, largest logits and masses (float64, relative to the largest of all) of a row's chunks; and the latter."""
    c = tl.arange(0, MERGED)
    top_C = tl.load(chunk_ptr + 2 * c, mask=c < CHUNKS, other=float("-inf"))
    mass_C = tl.load(chunk_ptr + 2 * c + 1, mask=c < CHUNKS, other=0.0)
    best = tl.max(top_C, 0)
    below_C = top_C - _finite(best)
    return c, top_C, mass_C.to(tl.float64) * tl.exp(below_C * inverse_temperature).to(tl.float64), best


@triton.jit
def _first_equal(x, place, best, last):
    """The first place of the largest; some place up to the last if not all numbers are finite."""
    return tl.minimum(tl.min(tl.where(x == best, place, FAR), 0), last)


@triton.jit
def _first_above(mass, place, target):
    """The first place where the cumulative mass exceeds the target, if rounding leaves none the last with any mass."""
    over = (tl.cumsum(mass, 0) > target) & (mass > 0.0)
    first = tl.min(tl.where(over, place, FAR), 0)
    last = tl.max(tl.where(mass > 0.0, place, 0), 0)
    return tl.where(first < FAR, first, last)


@triton.jit
def _log_prob(x_y, best, others, inverse_temperature):
    """-log(1 + others / m_y) for others, the mass of all tokens but y relative to the largest logit."""
    leads = x_y >= best
    below = tl.where(leads, 0.0, (x_y - best) * inverse_temperature)
    others = others.to(x_y.dtype)
    logp = below - tl.where(leads, _log1p(others), tl.log(others + tl.exp(below)))
    return tl.where(tl.abs(best) < float("inf"), logp, float("nan"))
