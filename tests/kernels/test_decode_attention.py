"""Attention of a decoding step on a shared pool against softmax over the listed keys, in float64.

In CI the Triton kernels run in the interpreter, on the CPU, with blocks of 16 keys and few programs.
"""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.kernels import decode_attention as module
from covey.kernels.decode_attention import (
    DecodePlan,
    DecodeTables,
    decode_attention,
    decode_attention_reference,
    rope_store,
    store,
)
from covey.kernels.rope import rope_tables

REFERENCES = module, ("decode_attention_reference", "rope_reference", "_store_reference")
F64, NAN = torch.float64, float("nan")
CANARY = 12345.0


def launch_with(monkeypatch: pytest.MonkeyPatch, **changes) -> None:
    """Other launch parameters in the interpreter: `resident` programs, `keys` of a block."""
    from covey.kernels import decode_attention_triton

    launch = decode_attention_triton.INTERPRETED._replace(**changes)
    monkeypatch.setattr(decode_attention_triton, "launch_for", lambda *arguments: launch)


class Scene:
    """Prompts and rows with random keys and values, scattered over a pool that is NaN everywhere else.

    layout: (prompt length, own lengths of its rows) per group, prompt length None for rows without a group.
    pool: how K and V lie in memory. Rows are numbered at random; seats of a group may be empty.
    """

    def __init__(
        self,
        layout,
        n,
        m,
        d,
        pool="interleaved",
        dtype=F64,
        device="cpu",
        seats=0,
        seed=0,
        max_own=0,
        max_prefix=0,
    ):
        self.heads, self.dice, self.device, self.dtype = (n, m, d), random.Random(seed), device, dtype
        rows = sum(len(own) for _, own in layout)
        groups = [g for g in layout if g[0] is not None]
        seats = seats or max([1, *(len(own) for _, own in groups)])
        self.max_own = max_own or max([1, *(x for _, own in layout for x in own)]) + 3
        self.max_prefix = max_prefix or max([1, *(prompt for prompt, _ in groups)]) + 2
        places = rows * (self.max_own + 2) + max(1, len(groups)) * (self.max_prefix + 2) + 1
        self.k_pool, self.v_pool = pools(pool, places, m, d, dtype, device)
        self.tables = DecodeTables.idle(
            rows, max(1, len(groups)), seats, self.max_own, self.max_prefix, device
        )
        self.q = torch.randn(rows, n, d, dtype=F64, device=device).to(dtype)
        self.fill(layout)

    def fill(self, layout) -> None:
        """Puts other prompts and rows into the same tables and pools; q stays."""
        t = self.tables
        for pool in (self.k_pool, self.v_pool):
            pool.fill_(NAN)
        ranges = [self.max_own] * len(self.q) + [self.max_prefix] * len(t.prefix_start)
        order = self.dice.sample(range(len(ranges)), len(ranges))
        starts, at = [0] * len(ranges), 1
        for i in order:
            starts[i] = at
            at += ranges[i] + 1
        numbers = self.dice.sample(range(len(self.q)), len(self.q))
        own_length, group_of_row = [0] * len(self.q), [-1] * len(self.q)
        t.rows_of_group.fill_(-1)
        t.prefix_length.fill_(0)
        group = 0
        for prompt, own in layout:
            mine = [numbers.pop() for _ in own]
            for row, length in zip(mine, own, strict=True):
                own_length[row] = length
                group_of_row[row] = -1 if prompt is None else group
            if prompt is None:
                continue
            chairs = self.dice.sample(range(t.rows_of_group.shape[1]), len(mine))
            for chair, row in zip(chairs, mine, strict=True):
                t.rows_of_group[group, chair] = row
            t.prefix_length[group] = prompt
            group += 1
        t.own_length.copy_(torch.tensor(own_length))
        t.group_of_row.copy_(torch.tensor(group_of_row))
        t.own_start.copy_(torch.tensor(starts[: len(self.q)]))
        t.prefix_start.copy_(torch.tensor(starts[len(self.q) :]))
        for start, length in zip(starts, own_length + t.prefix_length.tolist(), strict=True):
            for pool in (self.k_pool, self.v_pool):
                pool[start : start + length] = torch.randn(
                    length, *pool.shape[1:], dtype=F64, device=self.device
                ).to(self.dtype)

    def keys_of(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of row b in the order of their positions: [positions, m, d]."""
        t, parts = self.tables, []
        if (g := int(t.group_of_row[b])) >= 0:
            parts.append((int(t.prefix_start[g]), int(t.prefix_length[g])))
        parts.append((int(t.own_start[b]), int(t.own_length[b])))
        k, v = (torch.cat([x[s : s + length] for s, length in parts]) for x in (self.k_pool, self.v_pool))
        return k, v

    def expected(self, scale, window=0, softcap=0.0, dtype=F64) -> torch.Tensor:
        """softmax(scale q k^T) v over the listed keys, row by row."""
        (n, m, _), out = self.heads, torch.zeros_like(self.q, dtype=dtype)
        for b in range(len(self.q)):
            if not self.tables.own_length[b]:
                continue
            k, v = (x[-window:].to(dtype).repeat_interleave(n // m, 1) for x in self.keys_of(b))
            scores = torch.einsum("nd,jnd->nj", self.q[b].to(dtype), k) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out[b] = torch.einsum("nj,jnd->nd", torch.softmax(scores, -1), v)
        return out

    def attend(self, scale, **options) -> torch.Tensor:
        return decode_attention(self.q, self.k_pool, self.v_pool, self.tables, scale, **options)


def pools(kind: str, places: int, m: int, d: int, dtype=F64, device="cpu"):
    if kind == "interleaved":
        both = torch.empty(places, 2, m, d, dtype=dtype, device=device)
        return both[:, 0], both[:, 1]
    if kind == "layers":
        every = torch.full((3, 2, places, m, d), NAN, dtype=dtype, device=device)
        return every[1, 0], every[1, 1]
    assert kind == "odd strides"  # places of another stride in K than in V, heads apart
    k = torch.full((places, m + 1, d + 8), NAN, dtype=dtype, device=device)
    v = torch.full((places, 2 * m, d), NAN, dtype=dtype, device=device)
    return k[:, 1:, 4 : d + 4], v[:, ::2]


LAYOUTS = {  # in blocks of 16 keys
    "one row": [(None, [1])],
    "no groups": [(None, [1, 15, 16, 17, 37])],
    "one group": [(20, [3, 16, 1])],
    "one row in a group": [(16, [17])],
    "block edges": [(15, [15, 16]), (16, [17, 31]), (17, [32, 33])],
    "empty prompt": [(0, [5, 18])],
    "a token each": [(1, [1, 1]), (None, [1])],
    "idle rows": [(19, [0, 7, 0, 21]), (None, [0, 4]), (33, [0, 0])],
    "all idle": [(19, [0, 0]), (None, [0])],
    "mixed": [(47, [1, 2, 3, 5, 7]), (None, [41, 0]), (0, [3]), (13, [29, 11])],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_the_listed_keys(layout, implementation):
    scene = Scene(LAYOUTS[layout], 4, 2, 16)
    torch.testing.assert_close(scene.attend(0.3), scene.expected(0.3), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "heads", [(1, 1, 24), (2, 1, 16), (4, 1, 24), (7, 1, 16), (14, 2, 24), (3, 3, 64)], ids=str
)
def test_heads(heads, implementation):
    scene = Scene([(35, [3, 17, 9]), (None, [20])], *heads, seats=4)
    torch.testing.assert_close(scene.attend(0.3), scene.expected(0.3), rtol=0, atol=1e-10)


@pytest.mark.parametrize("pool", ["interleaved", "layers", "odd strides"])
def test_pools_of_any_stride(pool, implementation):
    scene = Scene([(18, [3, 17])], 4, 2, 24, pool)
    packed = torch.full((3, 9, 30), NAN, dtype=F64)
    packed[1:, 2:6, 3:27] = scene.q
    scene.q = packed[1:, 2:6, 3:27]
    torch.testing.assert_close(scene.attend(0.3), scene.expected(0.3), rtol=0, atol=1e-10)
    whole = torch.full((2, 6, 40), CANARY, dtype=F64)
    out = whole[:, 1:5, 8:32]
    assert scene.attend(0.3, out=out) is out
    torch.testing.assert_close(out, scene.expected(0.3), rtol=0, atol=1e-10)
    out.fill_(CANARY)
    assert (whole == CANARY).all()


# Rows of a group at different positions; windows that end in the own tokens, at the prompt's end, within, before it.
@pytest.mark.parametrize("window", [1, 5, 17, 20, 30, 53, 54])
@pytest.mark.parametrize("softcap", [0.0, 0.5])
def test_window_and_softcap(window, softcap, implementation):
    scene = Scene([(35, [1, 19, 4, 0]), (16, [0]), (None, [23])], 4, 2, 16)
    options = {"window": window, "softcap": softcap}
    torch.testing.assert_close(
        scene.attend(0.9, **options), scene.expected(0.9, **options), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("resident", [1, 2, 3, 7, 24, 50])
@pytest.mark.parametrize("window", [0, 40])
def test_any_number_of_programs(resident, window, kernels, monkeypatch):
    """From everything in one program to a program for every block, and more of them than blocks."""
    launch_with(monkeypatch, resident=resident)
    scene = Scene([(50, [3, 16]), (None, [33, 0])], 2, 1, 16)
    mine, expected = scene.attend(0.3, window=window), scene.expected(0.3, window)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("window", [0, 25])
@pytest.mark.parametrize(("tile_rows", "tiles"), [(4, 5), (8, 3), (16, 2), (64, 1)])
def test_large_groups_take_several_tiles(tile_rows, tiles, window, kernels, monkeypatch):
    """5 rows of 3 query heads each, padded to 4."""
    from covey.kernels import decode_attention_triton

    monkeypatch.setattr(decode_attention_triton, "TILE_ROWS", tile_rows)
    scene = Scene([(20, [3, 0, 17, 9, 1]), (18, [2])], 3, 1, 16)
    work = DecodePlan(scene.tables, 3, 1, 16, F64).work
    assert work is not None and work.tiles == tiles
    mine, expected = scene.attend(0.3, window=window), scene.expected(0.3, window)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("parts", [1, 2, 16])
def test_many_parts_are_joined(parts, kernels, monkeypatch):
    from covey.kernels import decode_attention_triton

    monkeypatch.setattr(decode_attention_triton, "MANY_PARTS", parts)
    launch_with(monkeypatch, resident=20)
    scene = Scene([(90, [100, 1])], 1, 1, 16)
    torch.testing.assert_close(scene.attend(0.3), scene.expected(0.3), rtol=0, atol=1e-10)


def test_large_scores(implementation):
    """Scores up to about +-2000, and parts of which one outweighs the others by e^1000."""
    scene = Scene([(40, [20, 3])], 2, 1, 16)
    scene.q *= 100
    torch.testing.assert_close(scene.attend(1.0), scene.expected(1.0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("window", [0, 21])
def test_a_plan_follows_the_tables(window, implementation):
    """One plan, refreshed for other contents of the same tables; what it leaves behind is never read."""
    scene = Scene([(35, [3, 17, 9]), (20, [2, 0, 1])], 2, 1, 16, max_own=40, max_prefix=50)
    plan = DecodePlan(scene.tables, 2, 1, 16, F64, window)
    for layout in (
        [(35, [3, 17, 9]), (20, [2, 0, 1])],
        [(1, [40, 1, 0]), (None, [5, 0, 0])],
        [(None, [0] * 6)],
        [(50, [1]), (49, [7, 8, 9]), (None, [1, 40])],
    ):
        scene.fill(layout)
        if plan.work is not None:
            for numbers in (
                plan.work.pieces,
                plan.work.spans,
                plan.work.joins,
                plan.work.live,
                plan.work.lowest,
            ):
                numbers.fill_(-(2**20))
            plan.work.parts.fill_(NAN)
            plan.work.lse.fill_(NAN)
        plan.refresh()
        mine = scene.attend(0.3, window=window, plan=plan)
        torch.testing.assert_close(mine, scene.expected(0.3, window), rtol=0, atol=1e-10)
        assert torch.equal(scene.attend(0.3, window=window, plan=plan), mine), "the next layer's turn"
        for b, own in enumerate(scene.tables.own_length.tolist()):
            start, keys = int(scene.tables.own_start[b]), len(scene.keys_of(b)[0])
            assert int(plan.place_B[b]) == (start + own - 1 if own else -1)
            assert int(plan.position_B[b]) == (keys - 1 if own else 0)


def test_int64_tables(kernels):
    scene = Scene([(35, [3, 17]), (None, [4])], 2, 1, 16)
    t = scene.tables
    wide = DecodeTables(
        t.own_start.long(), t.own_length.long(), t.prefix_start.long(), t.prefix_length.long(),
        t.rows_of_group.long(), t.group_of_row.long(), t.max_own, t.max_prefix,
    )  # fmt: skip
    mine = decode_attention(scene.q, scene.k_pool, scene.v_pool, wide, 0.3)
    torch.testing.assert_close(mine, scene.expected(0.3), rtol=0, atol=1e-10)


def test_float32_is_as_exact_as_float32(kernels):
    scene = Scene([(35, [3, 17, 9]), (None, [20])], 4, 2, 24, dtype=torch.float32)
    mine = scene.attend(0.3)
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine.double(), scene.expected(0.3), rtol=1e-5, atol=1e-5)


def test_a_window_that_hides_nothing_is_none(kernels):
    scene = Scene([(6, [5, 3])], 2, 1, 16)
    longest = scene.max_own + scene.max_prefix
    plan = DecodePlan(scene.tables, 2, 1, 16, F64)
    assert plan.window == 0 == DecodePlan(scene.tables, 2, 1, 16, F64, longest).window
    plan.refresh()
    assert torch.equal(scene.attend(1.0, window=longest, plan=plan), scene.attend(1.0))


# The list of work


@st.composite
def layouts(draw):
    lengths = st.integers(0, 70)
    groups = draw(
        st.lists(
            st.tuples(st.one_of(st.none(), lengths), st.lists(lengths, max_size=3)), min_size=1, max_size=3
        )
    )
    return groups if any(own for _, own in groups) else [*groups, (None, [draw(lengths)])]


@settings(deadline=None, max_examples=25)
@given(
    layout=layouts(),
    heads=st.sampled_from([1, 3]),
    resident=st.sampled_from([1, 5, 13]),
    window=st.sampled_from([0, 1, 23, 60]),
)
def test_the_list_holds_every_key_once_and_evenly(layout, heads, resident, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COVEY_KERNELS", "triton")
        for reference in REFERENCES[1]:
            patch.setattr(module, reference, None)
        launch_with(patch, resident=resident)
        scene = Scene(layout, 2 * heads, heads, 16, max_own=71, max_prefix=71, seed=len(layout))
        plan = DecodePlan(scene.tables, 2 * heads, heads, 16, F64, window)
        plan.refresh()
    work, t = plan.work, scene.tables
    assert work is not None and work.tiles == 1
    pieces, reads, loads, results = work.pieces.tolist(), Counter(), [], Counter()
    for first, last in work.spans.tolist():
        loads.append(sum(-(-piece[3] // 16) for piece in pieces[first:last]))
        for owner, head, place, keys, result, position in pieces[first:last]:
            assert keys > 0 and (owner >= 0 or place == t.prefix_start[-1 - owner] + position)
            reads.update(
                (owner < 0, -1 - owner if owner < 0 else owner, head, place + j) for j in range(keys)
            )
            results.update(range(result, result + work.pad * (work.seats if owner < 0 else 1)))
    expected = Counter()
    for b, (start, own) in enumerate(zip(t.own_start.tolist(), t.own_length.tolist(), strict=True)):
        shown = min(own, window or own)
        expected.update((False, b, h, start + j) for h in range(heads) for j in range(own - shown, own))
    for g, (start, length) in enumerate(zip(t.prefix_start.tolist(), t.prefix_length.tolist(), strict=True)):
        own = [int(t.own_length[row]) for row in t.rows_of_group[g].tolist() if row >= 0]
        own = [x for x in own if x]
        low = max(0, length + min(own) - window) if own and window else 0
        expected.update(
            (True, g, h, start + j) for h in range(heads) for j in range(low, length if own else 0)
        )
    assert reads == expected
    assert max(loads) <= -(-sum(loads) // len(loads)), "the same for all programs, the last ones excepted"
    assert all(count == 1 for count in results.values()) and all(r < len(work.lse) for r in results)


# Storing


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotation as a product of complex numbers."""
    half = cos.shape[-1]
    z = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)
    return torch.cat((z.real, z.imag, x[..., 2 * half :]), -1)


def angles(rows: int, rotated: int, dtype=F64, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    inv_freq = 100.0 ** -(torch.arange(0, rotated, 2, dtype=F64, device=device) / rotated)
    return rope_tables(torch.randint(0, 500, (rows,), device=device), inv_freq, 1.2, dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pool", ["interleaved", "layers", "odd strides"])
@pytest.mark.parametrize("shape", [(4, 2, 16, 16), (7, 1, 24, 8), (2, 2, 10, 4), (3, 3, 6, 6)], ids=str)
def test_rope_store(shape, pool, dtype, implementation):
    n, m, d, rotated = shape
    packed = torch.randn(5, n + 2 * m, d + 3, dtype=F64)
    q, k, v = packed[..., 1 : d + 1].split((n, m, m), dim=1)
    before, (cos, sin) = packed.clone(), angles(5, rotated)
    cos[3] = sin[3] = NAN  # of a row that is not stored
    k_pool, v_pool = pools(pool, 12, m, d)
    k_pool.fill_(CANARY)
    v_pool.fill_(CANARY)
    place = torch.tensor([[7, 0], [11, 0], [0, 0], [-1, 0], [3, 0]], dtype=dtype)[:, 0]
    rope_store(q, k, v, cos, sin, k_pool, v_pool, place)

    kept = [0, 1, 2, 4]
    at = place[kept].long()
    old_q, old_k, old_v = before[..., 1 : d + 1].split((n, m, m), dim=1)
    for x, old in ((q[kept], old_q), (k_pool[at], old_k)):
        torch.testing.assert_close(x, turned(old[kept], cos[kept], sin[kept]), rtol=1e-12, atol=1e-12)
    assert torch.equal(v_pool[at], old_v[kept])
    others = [i for i in range(12) if i not in at.tolist()]
    assert (k_pool[others] == CANARY).all() and (v_pool[others] == CANARY).all()
    packed[kept, :n, 1 : d + 1] = before[kept, :n, 1 : d + 1]
    assert torch.equal(packed, before), "of k, v, the margins and the row without a place nothing changed"


def test_store_leaves_the_keys_as_they_are(implementation):
    k, v = torch.randn(4, 2, 24, dtype=F64), torch.randn(4, 2, 24, dtype=F64)
    k_pool, v_pool = (torch.full((9, 2, 24), CANARY, dtype=F64) for _ in range(2))
    store(k, v, k_pool, v_pool, torch.tensor([8, -1, 2, 0]))
    for x, pool in ((k, k_pool), (v, v_pool)):
        assert torch.equal(pool[[8, 2, 0]], x[[0, 2, 3]])
        assert (pool[[1, 3, 4, 5, 6, 7]] == CANARY).all()


def test_nothing_to_store(implementation):
    q, k, pool = torch.empty(0, 4, 16), torch.empty(0, 2, 16), torch.zeros(3, 2, 16)
    rope_store(q, k, k, *angles(0, 16, torch.float32), pool, pool, torch.empty(0, dtype=torch.int64))
    store(k, k, pool, pool, torch.empty(0, dtype=torch.int64))
    assert not pool.any()


def test_a_step_extends_what_the_next_one_sees(implementation):
    """Three tokens of two rows, stored where the plan says, against attention over all of them at once."""
    scene = Scene([(5, [0, 0])], 4, 2, 16)
    own, plan = scene.tables.own_length, DecodePlan(scene.tables, 4, 2, 16, F64)
    inv_freq = torch.tensor([1.0, 0.3])
    for step in range(3):
        own += 1
        plan.refresh()
        assert plan.position_B.tolist() == [5 + step] * 2
        scene.q, k, v = (torch.randn(2, heads, 16, dtype=F64) for heads in (4, 2, 2))
        cos, sin = rope_tables(plan.position_B, inv_freq, 1.0, F64)
        rope_store(scene.q, k, v, cos, sin, scene.k_pool, scene.v_pool, plan.place_B)
        torch.testing.assert_close(scene.keys_of(1)[0][-1], turned(k, cos, sin)[1], rtol=0, atol=1e-12)
        assert torch.equal(scene.keys_of(1)[1][-1], v[1])
        mine = scene.attend(0.3, plan=plan)
        torch.testing.assert_close(mine, scene.expected(0.3), rtol=0, atol=1e-10)


# Mistakes


def test_mistakes_are_sentences(implementation):
    scene = Scene([(5, [2, 1])], 4, 2, 16)
    q, k, t = scene.q, scene.k_pool, scene.tables
    wide = k[:1].as_strided((1, 2, 16), (2**24, 16, 1))
    for arguments, match in (
        ((q[:1], k, k, t), "for 2 rows"),
        ((q[:, :3], k, k, t), "on a pool"),
        ((q.float(), k, k, t), "on a pool"),
        ((q[..., :8], k, k, t), "keys of 16"),
        ((q, k, k[:4], t), "are not"),
        ((q, k.transpose(1, 2), k.transpose(1, 2), t), "not contiguous in the head"),
        ((q, wide, wide, t), "elements apart"),
    ):
        with pytest.raises(ValueError, match=match):
            decode_attention(*arguments, 1.0)
    for options, match in (
        ({"window": -1}, "or more"),
        ({"softcap": -1.0}, "or more"),
        ({"out": q.float()}, "out is torch.float32"),
        ({"plan": DecodePlan(t, 4, 2, 16, torch.float32)}, "the plan is for"),
        ({"plan": DecodePlan(t, 4, 2, 16, F64), "window": 2}, "the plan is for"),
        ({"plan": DecodePlan(DecodeTables.idle(2, 1, 1, 9, 9, "cpu"), 4, 2, 16, F64)}, "the plan is for"),
    ):
        with pytest.raises(ValueError, match=match):
            scene.attend(1.0, **options)
    with pytest.raises(ValueError, match="1 or more"):
        DecodeTables.idle(0, 1, 1, 1, 1, "cpu")
    with pytest.raises(ValueError, match="3 query heads"):
        DecodePlan(t, 3, 2, 16, F64)
    cos, sin = angles(2, 16)
    x, place = torch.randn(2, 2, 16, dtype=F64), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="tables"):
        rope_store(q, x, x, cos[:1], sin, k, k, place)
    with pytest.raises(ValueError, match="beside keys"):
        rope_store(q[:1], x, x, cos, sin, k, k, place)
    with pytest.raises(ValueError, match="places"):
        rope_store(q, x, x, cos, sin, k, k, place[:1])
    with pytest.raises(ValueError, match="for a pool"):
        store(x[:, :1], x[:, :1], k, k, place)


def test_wide_heads_go_through_torch(monkeypatch):
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    scene = Scene([(5, [2, 1])], 1, 1, 260)
    assert DecodePlan(scene.tables, 1, 1, 260, F64).work is None
    torch.testing.assert_close(scene.attend(0.1), scene.expected(0.1), rtol=0, atol=1e-10)


# On a GPU, in bfloat16


def big_scene(heads, seed=0, **options) -> Scene:
    """Groups of 8 with prompts and rows of up to some hundred tokens, idle rows, rows without a group."""
    dice = random.Random(seed)
    layout = [(dice.randrange(1, 700), [dice.randrange(0, 900) for _ in range(8)]) for _ in range(5)]
    layout += [(None, [1, 0, 333]), (0, [64, 65]), (128, [0] * 8)]
    return Scene(
        layout, *heads, dtype=torch.bfloat16, device="cuda", seed=seed, max_own=900, max_prefix=700, **options
    )


GPU_HEADS = [
    (32, 8, 128),
    (12, 2, 128),
    (28, 4, 128),
    (32, 8, 64),
    (14, 2, 64),
    (16, 8, 256),
    (8, 1, 256),
    (9, 3, 80),
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 300, "softcap": 20.0}], ids=str)
@pytest.mark.parametrize("heads", GPU_HEADS, ids=str)
def test_bfloat16_is_about_as_good_as_eager_torch(heads, options, kernels):
    scene = big_scene(heads)
    scale = heads[2] ** -0.5
    mine = scene.attend(scale, **options)
    exact, eager = scene.expected(scale, **options), scene.expected(scale, **options, dtype=torch.bfloat16)
    error, allowed = mine.double() - exact, eager.double() - exact
    assert error.abs().max() <= 2 * allowed.abs().max()
    assert error.square().mean().sqrt() <= 2 * allowed.square().mean().sqrt()
    assert error.mean().abs() <= 0.1 * error.square().mean().sqrt()
    assert not mine[scene.tables.own_length == 0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 4, 64)], ids=str)
def test_float32_on_a_gpu(heads, kernels):
    layout = [(100, [3, 0, 50, 17]), (None, [65])]
    scene = Scene(layout, *heads, dtype=torch.float32, device="cuda")
    torch.testing.assert_close(scene.attend(0.1).double(), scene.expected(0.1), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("heads", [(32, 8, 128), (12, 2, 128), (32, 8, 64)], ids=str)
def test_a_graph_follows_the_tables(heads, window, kernels):
    """Captured once, replayed for other tables, pools and queries: bit-equal to the same calls outside of a graph."""
    scene = big_scene(heads)
    n, m, d = heads
    plan = DecodePlan(scene.tables, n, m, d, torch.bfloat16, window)
    k, v = (torch.randn(len(scene.q), m, d, device="cuda").bfloat16() for _ in range(2))
    out, inv_freq = torch.empty_like(scene.q), 1e4 ** -(torch.arange(0, d, 2, device="cuda") / d)

    def step():
        plan.refresh()
        cos, sin = rope_tables(plan.position_B, inv_freq, 1.0, torch.bfloat16)
        rope_store(scene.q, k, v, cos, sin, scene.k_pool, scene.v_pool, plan.place_B)
        scene.attend(d**-0.5, window=window, plan=plan, out=out)

    queries = scene.q.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for layout in (
        [(64, [1, 2, 3, 0, 5, 6, 7, 8]), (None, [9] * 45)],
        [(700, [900] * 8), (699, [899, 0, 1]), (None, [0] * 42)],
        [(None, [0] * 53)],
    ):
        scene.fill(layout)
        torch.cuda.synchronize()
        results = []
        for run in (graph.replay, step):
            scene.q.copy_(queries)
            out.fill_(NAN)
            run()
            torch.cuda.synchronize()
            results.append((out.clone(), scene.q.clone(), scene.k_pool.clone(), scene.v_pool.clone()))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a.nan_to_num(CANARY), b.nan_to_num(CANARY))
        assert out.isfinite().all()
        expected = scene.expected(d**-0.5, window)
        torch.testing.assert_close(out.double(), expected, rtol=0.03, atol=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", GPU_HEADS, ids=str)
def test_repeats_are_bit_equal(heads, kernels):
    scene = big_scene(heads, seed=3)
    first = scene.attend(0.1)
    for _ in range(20):
        assert torch.equal(scene.attend(0.1), first)


@pytest.mark.gpu
def test_the_reference_agrees_on_a_gpu(kernels, monkeypatch):
    scene = big_scene((12, 2, 128), seed=4)
    mine = scene.attend(0.1, window=500)
    wide = decode_attention_reference(
        scene.q.double(), scene.k_pool.double(), scene.v_pool.double(), scene.tables, 0.1, 500
    )
    torch.testing.assert_close(mine.double(), wide, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(kernels):
    """A prompt at the beginning, and a row behind the first 2^31 elements of the pool."""
    n, m, d, far = 8, 2, 64, 2**23
    k_pool, v_pool = torch.empty(far + 8, 2, m, d, device="cuda", dtype=torch.bfloat16).unbind(1)
    tables = DecodeTables.idle(1, 1, 1, 8, 8, "cuda")
    for name, value in (("own_start", far + 3), ("own_length", 3), ("prefix_start", 0), ("prefix_length", 3)):
        getattr(tables, name).fill_(value)
    tables.rows_of_group.fill_(0)
    tables.group_of_row.fill_(0)
    q, (cos, sin) = torch.randn(1, n, d, device="cuda").bfloat16(), angles(1, d, torch.float32, "cuda")
    k, v = (torch.randn(6, m, d, device="cuda").bfloat16() for _ in range(2))
    store(k, v, k_pool, v_pool, torch.tensor([0, 1, 2, far + 3, far + 4, -1], device="cuda"))
    rope_store(q, k[5:], v[5:], cos, sin, k_pool, v_pool, torch.tensor([far + 5], device="cuda"))
    mine = decode_attention(q, k_pool, v_pool, tables, 0.125)
    k = torch.cat((k[:5].double(), turned(k[5:].double(), cos.double(), sin.double())))
    scores = torch.einsum("nd,jnd->nj", q[0].double(), k.repeat_interleave(4, 1)) * 0.125
    expected = torch.einsum("nj,jnd->nd", torch.softmax(scores, -1), v.double().repeat_interleave(4, 1))
    torch.testing.assert_close(mine[0].double(), expected, rtol=0.02, atol=0.02)
