"""The list of work of kernels/decode_attention_triton.py, made on the device by one kernel.

An item is what one query tile and one key-value head have to read: the own keys of a row, or the keys of a prompt for
the rows in a tile of its group's seats. All keys of all items, cut into blocks of BLOCK_N, stand in one line: prompts
first, then rows, the heads of each side by side. Program p of the attention takes the `width` blocks from p * width on,
so that all programs read the same amount; where an item is cut, its pieces leave partial results. Items without keys
have no place in the line. The piece of item i for program p has slot i + p, which no other piece has, for along the
line one of the two grows from piece to piece. So the pieces of a program, like those of an item, are consecutive slots.

    pieces [slots, FIELDS]     owner (row, or -1 - tile), head, first place, keys, first row of its results, and for
                               prompts the first key's position
    spans [programs, 2]        the program's first slot, and the one after its last
    joins [B * m, 4]           what to add up for a row and head: the own pieces' first row of results, their number,
                               the prompt pieces' first row, their number
    live [tiles * seats]       the row in a seat, -1 for none or an idle one
    lowest [tiles * seats]     with a window, the first position of the prompt which that row sees

Every program counts all blocks for itself, rather than waiting for others, and writes the list of one tile or row.
"""
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

FIELDS = 6
FAR = tl.constexpr(1 << 30)


@triton.jit
def plan_kernel(
    own_start_ptr, own_length_ptr, prefix_start_ptr, prefix_length_ptr, rows_ptr, group_ptr,
    pieces_ptr, spans_ptr, joins_ptr, live_ptr, lowest_ptr, place_ptr, position_ptr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, CHAIRS: tl.constexpr, HEADS: tl.constexpr, PAD: tl.constexpr,
    SEATS: tl.constexpr, TILES: tl.constexpr, PROGRAMS: tl.constexpr, WINDOW: tl.constexpr, FIELDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TILES: tl.constexpr, BLOCK_SEATS: tl.constexpr,
    BLOCK_CHAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """CHAIRS of a group are SEATS in each of its TILES; program x writes tile x or row x - GROUPS * TILES."""
    every: tl.constexpr = GROUPS * TILES
    me = tl.program_id(0)
    row = tl.arange(0, BLOCK_ROWS)
    own = tl.load(own_length_ptr + row, mask=row < ROWS, other=0).to(tl.int32)
    if WINDOW > 0:
        own = tl.minimum(own, WINDOW)
    own_blocks = (own + BLOCK_N - 1) // BLOCK_N

    tile = tl.arange(0, BLOCK_TILES)
    seat = tl.arange(0, BLOCK_SEATS)
    chair = (tile % TILES)[:, None] * SEATS + seat[None, :]
    taken = (tile < every)[:, None] & (seat < SEATS)[None, :] & (chair < CHAIRS)
    member = tl.load(rows_ptr + (tile // TILES)[:, None] * CHAIRS + chair, mask=taken, other=-1)
    length = tl.load(own_length_ptr + member, mask=member >= 0, other=0).to(tl.int32)
    prefix = tl.load(prefix_length_ptr + tile // TILES, mask=tile < every, other=0).to(tl.int32)
    hidden = tl.zeros_like(prefix)  # positions that no row of the tile sees
    if WINDOW > 0:
        shortest = tl.min(tl.where(length > 0, length, FAR), axis=1)
        hidden = tl.minimum(tl.maximum(prefix + shortest - WINDOW, 0), prefix)
    prefix_keys = tl.where(tl.max(length, axis=1) > 0, prefix - hidden, 0)
    prefix_blocks = (prefix_keys + BLOCK_N - 1) // BLOCK_N

    items = tl.sum((prefix_blocks > 0).to(tl.int32), axis=0) * HEADS  # of prompts
    ahead = tl.sum(prefix_blocks, axis=0) * HEADS
    total = ahead + tl.sum(own_blocks, axis=0) * HEADS
    width = tl.maximum((total + PROGRAMS - 1) // PROGRAMS, 1)
    if me == 0:
        program = tl.arange(0, BLOCK_PROGRAMS)
        free = (program < PROGRAMS) & (program * width >= total)
        tl.store(spans_ptr + 2 * program, tl.zeros_like(program), mask=free)
        tl.store(spans_ptr + 2 * program + 1, tl.zeros_like(program), mask=free)

    if me < every:
        _list_tile(
            me, tile, prefix_keys, prefix_blocks, hidden, own_length_ptr, prefix_start_ptr, prefix_length_ptr, rows_ptr,
            pieces_ptr, spans_ptr, live_ptr, lowest_ptr, width, total, CHAIRS, HEADS, PAD, SEATS, TILES, WINDOW,
            FIELDS, BLOCK_N, BLOCK_SEATS, BLOCK_HEADS,
        )  # fmt: skip
    else:
        at = me - every
        origin = (every * HEADS + PROGRAMS) * (
            SEATS * PAD
        )  # the slots of prompts are below every * HEADS + PROGRAMS
        mine = _list_row(
            at, row, own, own_blocks, items, ahead, origin, own_start_ptr, own_length_ptr,
            pieces_ptr, spans_ptr, joins_ptr, width, total, HEADS, PAD, FIELDS, BLOCK_N, BLOCK_HEADS,
        )  # fmt: skip
        group = tl.load(group_ptr + at).to(tl.int32)
        _join_prompt(
            at, group, mine, tile, prefix_blocks, rows_ptr, joins_ptr, width,
            CHAIRS, HEADS, PAD, SEATS, TILES, BLOCK_CHAIRS, BLOCK_HEADS,
        )  # fmt: skip
        stored = tl.load(own_length_ptr + at).to(tl.int32) - 1
        start = tl.load(own_start_ptr + at).to(tl.int32)
        prompt = tl.load(prefix_length_ptr + group, mask=group >= 0, other=0).to(tl.int32)
        tl.store(place_ptr + at, tl.where(stored < 0, -1, start + stored).to(tl.int64))
        tl.store(position_ptr + at, tl.where(stored < 0, 0, prompt + stored).to(tl.int64))


@triton.jit
def _list_tile(
    me, tile, keys_of_tiles, blocks_of_tiles, hidden_of_tiles, own_length_ptr, prefix_start_ptr, prefix_length_ptr,
    rows_ptr, pieces_ptr, spans_ptr, live_ptr, lowest_ptr, width, total,
    CHAIRS: tl.constexpr, HEADS: tl.constexpr, PAD: tl.constexpr, SEATS: tl.constexpr, TILES: tl.constexpr,
    WINDOW: tl.constexpr, FIELDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SEATS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """The pieces of a prompt for one tile, and who sits in it."""
    before, rank, blocks = _place_in_line(me, tile, blocks_of_tiles)
    keys = tl.sum(tl.where(tile == me, keys_of_tiles, 0), axis=0)
    hidden = tl.sum(tl.where(tile == me, hidden_of_tiles, 0), axis=0)
    start = tl.load(prefix_start_ptr + me // TILES).to(tl.int32)
    head = tl.arange(0, BLOCK_HEADS)
    _write_pieces(
        pieces_ptr, spans_ptr, -1 - me, rank * HEADS + head, before * HEADS + head * blocks, blocks, keys,
        start + hidden, hidden, 0, 0, SEATS * PAD, width, total, HEADS, FIELDS, BLOCK_N, BLOCK_HEADS,
    )  # fmt: skip
    seat = tl.arange(0, BLOCK_SEATS)
    chair = me % TILES * SEATS + seat
    taken = (seat < SEATS) & (chair < CHAIRS)
    member = tl.load(rows_ptr + me // TILES * CHAIRS + chair, mask=taken, other=-1)
    length = tl.load(own_length_ptr + member, mask=member >= 0, other=0).to(tl.int32)
    tl.store(live_ptr + me * SEATS + seat, tl.where(length > 0, member, -1), mask=seat < SEATS)
    if WINDOW > 0:
        lowest = tl.load(prefix_length_ptr + me // TILES).to(tl.int32) + length - WINDOW
        tl.store(lowest_ptr + me * SEATS + seat, lowest, mask=seat < SEATS)


@triton.jit
def _list_row(
    me, row, keys_of_rows, blocks_of_rows, items_before, blocks_before, origin, own_start_ptr, own_length_ptr,
    pieces_ptr, spans_ptr, joins_ptr, width, total,
    HEADS: tl.constexpr, PAD: tl.constexpr, FIELDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """The pieces of a row's own keys, and which parts to add up; how many blocks a head has."""
    before, rank, blocks = _place_in_line(me, row, blocks_of_rows)
    keys = tl.sum(tl.where(row == me, keys_of_rows, 0), axis=0)
    head = tl.arange(0, BLOCK_HEADS)
    item = items_before + rank * HEADS + head
    start = blocks_before + before * HEADS + head * blocks
    end_of_row = tl.load(own_start_ptr + me).to(tl.int32) + tl.load(own_length_ptr + me).to(tl.int32)
    _write_pieces(
        pieces_ptr, spans_ptr, me, item, start, blocks, keys, end_of_row - keys, 0, origin, items_before, PAD,
        width, total, HEADS, FIELDS, BLOCK_N, BLOCK_HEADS,
    )  # fmt: skip
    joins = joins_ptr + (me * HEADS + head) * 4
    tl.store(joins, origin + (item + start // width - items_before) * PAD, mask=head < HEADS)
    tl.store(joins + 1, _count(start, blocks, width), mask=head < HEADS)
    return blocks


@triton.jit
def _join_prompt(
    me, group, own_blocks, tile, blocks_of_tiles, rows_ptr, joins_ptr, width,
    CHAIRS: tl.constexpr, HEADS: tl.constexpr, PAD: tl.constexpr, SEATS: tl.constexpr, TILES: tl.constexpr,
    BLOCK_CHAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Which parts a row has to add up of its prompt."""
    chair = tl.arange(0, BLOCK_CHAIRS)
    member = tl.load(rows_ptr + group * CHAIRS + chair, mask=(chair < CHAIRS) & (group >= 0), other=-1)
    mine = tl.max(tl.where(member == me, chair, -1), axis=0)
    before, rank, blocks = _place_in_line(group * TILES + mine // SEATS, tile, blocks_of_tiles)
    blocks = tl.where((mine >= 0) & (own_blocks > 0), blocks, 0)
    head = tl.arange(0, BLOCK_HEADS)
    start = before * HEADS + head * blocks
    slot = rank * HEADS + head + start // width
    joins = joins_ptr + (me * HEADS + head) * 4
    tl.store(joins + 2, slot * (SEATS * PAD) + mine % SEATS * PAD, mask=head < HEADS)
    tl.store(joins + 3, _count(start, blocks, width), mask=head < HEADS)


@triton.jit
def _place_in_line(me, owner, blocks_of_owners):
    """Blocks per head before this owner's, how many owners with blocks there are before it, and its own blocks."""
    earlier = owner < me
    before = tl.sum(tl.where(earlier, blocks_of_owners, 0), axis=0)
    rank = tl.sum((earlier & (blocks_of_owners > 0)).to(tl.int32), axis=0)
    return before, rank, tl.sum(tl.where(owner == me, blocks_of_owners, 0), axis=0)


@triton.jit
def _count(start, blocks, width):
    """How many pieces items [heads] of `blocks` blocks from `start` on fall into."""
    return tl.where(blocks > 0, (start + blocks - 1) // width - start // width + 1, 0)


@triton.jit
def _write_pieces(
    pieces_ptr, spans_ptr, owner, item, start, blocks, keys, place, position, origin, items_before, results,
    width, total,
    HEADS: tl.constexpr, FIELDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """The pieces of the items [heads] of one owner, which take `blocks` blocks each from `start` on."""
    head = tl.arange(0, BLOCK_HEADS)
    end = start + blocks
    first = start // width
    count = tl.where(head < HEADS, _count(start, blocks, width), 0)
    for j in range(0, tl.max(count, axis=0)):
        program = first + j
        inside = j < count
        low, high = tl.maximum(start, program * width), tl.minimum(end, (program + 1) * width)
        slot = item + program
        done = (low - start) * BLOCK_N
        entry = pieces_ptr + slot * FIELDS
        tl.store(entry, tl.zeros_like(slot) + owner, mask=inside)
        tl.store(entry + 1, head, mask=inside)
        tl.store(entry + 2, place + done, mask=inside)
        tl.store(entry + 3, tl.minimum(keys, (high - start) * BLOCK_N) - done, mask=inside)
        tl.store(entry + 4, origin + (slot - items_before) * results, mask=inside)
        tl.store(entry + 5, position + done, mask=inside)
        tl.store(spans_ptr + 2 * program, slot, mask=inside & (low == program * width))
        is_last = (high == (program + 1) * width) | (high == total)
        tl.store(spans_ptr + 2 * program + 1, slot + 1, mask=inside & is_last)
