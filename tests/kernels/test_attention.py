"""Packed attention with shared prefixes against softmax over an explicit mask, in float64."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.kernels import attention as module
from covey.kernels import attention_tiles
from covey.kernels.attention import attention, attention_backward, attention_plan, pick_kind
from covey.kernels.attention_tiles import TileLists

LAYOUTS = {
    "one": [(0, 5, 0, 0)],
    "documents": [(0, 4, 0, 0), (4, 5, 0, 0), (5, 12, 0, 0)],
    "group": [(0, 3, 0, 0), (3, 5, 0, 3), (5, 9, 0, 3), (9, 10, 0, 3)],
    "two groups": [(0, 3, 0, 0), (3, 5, 0, 3), (5, 9, 0, 0), (9, 10, 5, 9), (10, 14, 5, 9)],
    "empty segment": [(0, 3, 0, 0), (3, 3, 0, 3), (3, 6, 0, 3)],
}


def distances(segments):
    """[T, T]: how far key j is before query i, counted through the prefix; -1 where i must not see j."""
    tokens = segments[-1][1]
    distance = torch.full((tokens, tokens), -1)
    for start, end, prefix_start, prefix_end in segments:
        i, own = torch.arange(start, end)[:, None], torch.arange(start, end)
        distance[start:end, start:end] = torch.where(own <= i, i - own, -1)
        distance[start:end, prefix_start:prefix_end] = (
            i - start + prefix_end - torch.arange(prefix_start, prefix_end)
        )
    return distance


def explicit(q, k, v, segments, scale, window=0, softcap=0.0):
    """softmax(scale q k^T + mask) v with the mask written down pair by pair."""
    n = q.shape[1]
    distance = distances(segments)
    hidden = (distance < 0) | (distance >= (window or math.inf))
    k, v = (x.repeat_interleave(n // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ind,jnd->nij", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden.to(q.device), float("-inf"))
    return torch.einsum("nij,jnd->ind", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)


@pytest.mark.parametrize("family_tokens", [0, 512], ids=["by segment", "by family"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_an_explicit_mask(layout, heads, family_tokens, monkeypatch):
    monkeypatch.setattr(module, "FAMILY_TOKENS", family_tokens)
    segments = LAYOUTS[layout]
    tokens, (n, m) = segments[-1][1], heads
    q, k, v = (torch.randn(tokens, h, 8, dtype=torch.float64, requires_grad=True) for h in (n, m, m))
    do = torch.randn(tokens, n, 8, dtype=torch.float64)
    plan = attention_plan(torch.tensor(segments, dtype=torch.int32), q.device)
    expected, expected_lse = explicit(q, k, v, segments, 0.3)
    with torch.no_grad():
        o, lse = attention(q, k, v, plan, 0.3)
        grads = attention_backward(do, q, k, v, o, lse, plan, 0.3)
    torch.testing.assert_close(o, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=0, atol=1e-12)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, (q, k, v), do), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_allowed_pairs_of_two_documents():
    """B23: documents of 4 and 3 tokens allow 10 + 6 = 16 pairs; plain causal attention over 7 tokens would be 28."""
    plan = attention_plan(torch.tensor([[0, 4, 0, 0], [4, 7, 0, 0]], dtype=torch.int32), torch.device("cpu"))
    assert sum(int(block.allowed.sum()) for block in plan.blocks) == 16


@pytest.mark.parametrize("family_tokens", [0, 512], ids=["by segment", "by family"])
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (3, 0.0), (6, 0.7), (0, 2.0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_window_and_softcap(layout, window, softcap, family_tokens, monkeypatch):
    monkeypatch.setattr(module, "FAMILY_TOKENS", family_tokens)
    segments = LAYOUTS[layout]
    q, k, v = (torch.randn(segments[-1][1], h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    do = torch.randn_like(q)
    plan = attention_plan(torch.tensor(segments, dtype=torch.int32), q.device)
    expected, expected_lse = explicit(q, k, v, segments, 0.9, window, softcap)
    with torch.no_grad():
        o, lse = attention(q, k, v, plan, 0.9, window=window, softcap=softcap)
        grads = attention_backward(do, q, k, v, o, lse, plan, 0.9, window=window, softcap=softcap)
    torch.testing.assert_close(o, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=0, atol=1e-12)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, (q, k, v), do), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


# The Triton kernels


def families(*sizes):
    """Segments of prompts (length, completions' lengths), one after the other."""
    segments, at = [], 0
    for prompt, completions in sizes:
        prefix = (at, at + prompt)
        segments.append((*prefix, 0, 0))
        at += prompt
        for length in completions:
            segments.append((at, at + length, *prefix))
            at += length
    return segments


TRITON_LAYOUTS = {  # in tiles of 16 tokens and 16 keys
    "1": families((1, [])),
    "tile - 1": families((15, [])),
    "tile": families((16, [])),
    "tile + 1": families((17, [])),
    "prime": families((37, [])),
    "documents": families((5, []), (16, []), (1, []), (19, [])),
    "one completion": families((7, [9])),
    "tiles of everything": families((16, [16, 17])),
    "prompt tile + 1": families((17, [1, 15, 2])),
    "long completions": families((3, [33, 20])),
    "long prompt": families((34, [1, 3, 2, 1])),
    "two prompts": families((13, [8, 3]), (20, [1, 5, 7, 2])),
    "empty segments": families((6, [0, 11, 0]), (0, []), (9, [0])),
    "empty prompt": families((0, [5, 7])),
    "mixed": families((4, []), (18, [3, 12]), (2, []), (1, [1, 1, 1])),
    "prompt apart": [(0, 7, 0, 0), (7, 12, 0, 0), (12, 15, 0, 7), (15, 17, 0, 0), (17, 22, 0, 7)],
    "prefix within a segment": [(0, 20, 0, 0), (20, 26, 2, 19), (26, 30, 2, 19), (30, 37, 0, 9)],
    "prefix over two segments": [(0, 4, 0, 0), (4, 9, 0, 0), (9, 16, 0, 9), (16, 20, 4, 9)],
    "prefix of a prefix": [(0, 5, 0, 0), (5, 12, 0, 5), (12, 30, 5, 12), (30, 33, 5, 12)],
    "completions first": [(0, 5, 9, 16), (5, 9, 9, 16), (9, 16, 0, 0), (16, 20, 9, 16)],
}


class Buffers:
    """q, k, v side by side in one buffer, their gradients in another, o and do in wider ones; NaN all around."""

    def __init__(self, tokens, n, m, d, dtype=torch.float64, device="cpu"):
        self.tokens, self.shape = tokens, (n, m, m)
        heads = n + 2 * m
        self.inputs, self.grads = (self._nan(tokens + 2, heads * d + 8, dtype, device) for _ in range(2))
        self.outputs, self.do_buffer = (self._nan(tokens + 2, n * d + 8, dtype, device) for _ in range(2))
        self.q, self.k, self.v = self.heads(self.inputs, heads, d).split(self.shape, dim=1)
        self.dq, self.dk, self.dv = self.heads(self.grads, heads, d).split(self.shape, dim=1)
        self.o, self.do = self.heads(self.outputs, n, d), self.heads(self.do_buffer, n, d)
        self.written = [self.heads(self.grads, heads, d), self.o]
        for x in (self.q, self.k, self.v, self.do):
            x.copy_(torch.randn(x.shape, dtype=torch.float64))

    @staticmethod
    def _nan(rows, columns, dtype, device):
        return torch.full((rows, columns), float("nan"), dtype=dtype, device=device)

    def heads(self, buffer, heads, d):
        return buffer[1 : 1 + self.tokens, 8 : 8 + heads * d].unflatten(1, (heads, d))

    def run(self, plan, scale, **options):
        """Fills o, dq, dk, dv and returns lse; everything around them must stay as it was."""
        o, lse = attention(self.q, self.k, self.v, plan, scale, out=self.o, **options)
        assert o is self.o
        out = self.dq, self.dk, self.dv
        attention_backward(self.do, self.q, self.k, self.v, o, lse, plan, scale, out=out, **options)
        for buffer, view in zip((self.grads, self.outputs), self.written, strict=True):
            assert view.isfinite().all()
            assert buffer.isnan().sum() == buffer.numel() - view.numel()
        return lse


def autograd(b, segments, scale, **options):
    """o, lse, dq, dk, dv by autograd, in the dtype of the buffers."""
    q, k, v = (x.clone().requires_grad_() for x in (b.q, b.k, b.v))
    o, lse = explicit(q, k, v, segments, scale, **options)
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), b.do)]


def check_kernels(segments, n, m, d, scale=0.3, **options):
    """o, lse, dq, dk, dv of the real kernels in float64 against autograd over the explicit mask."""
    b = Buffers(segments[-1][1], n, m, d)
    plan = attention_plan(torch.tensor(segments, dtype=torch.int32), b.q.device, kind="triton")
    lse = b.run(plan, scale, **options)
    exact = autograd(b, segments, scale, **options)
    for name, mine, theirs in zip(
        ("o", "lse", "dq", "dk", "dv"), (b.o, lse, b.dq, b.dk, b.dv), exact, strict=True
    ):
        torch.testing.assert_close(
            mine, theirs, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


SHAPES = [(1, 1, 16), (2, 1, 24), (4, 1, 16), (7, 1, 16), (2, 2, 64), (4, 2, 96)]  # n, m, d


@pytest.mark.parametrize("layout", TRITON_LAYOUTS)
def test_triton_layouts(layout):
    check_kernels(TRITON_LAYOUTS[layout], *SHAPES[list(TRITON_LAYOUTS).index(layout) % len(SHAPES)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_shapes(shape):
    check_kernels(families((17, [3, 19]), (5, [])), *shape)


@pytest.mark.parametrize("window", [1, 5, 16, 33])
@pytest.mark.parametrize(
    "layout", ["prime", "long prompt", "long completions", "prefix within a segment", "completions first"]
)
def test_triton_window(layout, window):
    check_kernels(TRITON_LAYOUTS[layout], 2, 1, 16, window=window)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.5), (0, 30.0), (11, 0.5)])
def test_triton_softcap(window, softcap):
    check_kernels(families((17, [3, 19])), 4, 2, 16, scale=1.5, window=window, softcap=softcap)


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (64, 32)], ids=str)
@pytest.mark.parametrize("window", [0, 21])
def test_triton_tiles_need_not_be_square(sizes, window, monkeypatch):
    from covey.kernels import attention_triton as kernels

    tile = kernels.Tile(*sizes, warps=1, stages=1)
    monkeypatch.setattr(kernels, "_launch", lambda q, k: kernels.Launch(tile, tile, tile))
    check_kernels(families((37, [35, 18]), (50, [])), 2, 1, 16, window=window)


@pytest.mark.parametrize("options", [{}, {"window": 25}, {"softcap": 0.5}], ids=str)
def test_triton_forward_ahead(options, monkeypatch):
    from covey.kernels import attention_triton as kernels

    tile = kernels.INTERPRETED._replace(rows=32)
    launch = kernels.Launch(tile._replace(ahead=True), tile, tile)
    monkeypatch.setattr(kernels, "_launch", lambda q, k: launch)
    check_kernels(families((37, [35, 1]), (50, [])), 2, 1, 24, **options)


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("layout", ["long prompt", "two prompts", "prefix within a segment", "prompt apart"])
def test_triton_shares_out_long_queries(layout, window, monkeypatch):
    """With many processors a key tile's queries are split, and the parts summed."""
    from covey.kernels import attention_triton as kernels

    segments = TRITON_LAYOUTS[layout]
    monkeypatch.setattr(attention_tiles, "SPLIT_BLOCKS", 1)
    monkeypatch.setattr(kernels, "_processors", lambda device: 1000)
    tile = kernels.Tile(rows=16, keys=16, warps=1, stages=1)
    monkeypatch.setattr(kernels, "_launch", lambda q, k: kernels.Launch(tile, tile, tile))
    work = TileLists([list(s) for s in segments], torch.device("cpu")).keys(16, 8, 1, 1000, window)
    assert work.places > 1
    check_kernels(segments, 2, 1, 16, window=window)


def test_triton_float32_is_as_exact_as_float32():
    segments = families((17, [3, 19]))
    wide = Buffers(segments[-1][1], 4, 2, 24)
    narrow = Buffers(segments[-1][1], 4, 2, 24, dtype=torch.float32)
    table = torch.tensor(segments, dtype=torch.int32)
    for name in ("q", "k", "v", "do"):
        getattr(narrow, name).copy_(getattr(wide, name))
        getattr(wide, name).copy_(getattr(narrow, name))
    wide.run(attention_plan(table, wide.q.device), 0.3)
    lse = narrow.run(attention_plan(table, wide.q.device, kind="triton"), 0.3)
    assert lse.dtype == torch.float32
    for name in ("o", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(narrow, name).double(), getattr(wide, name), rtol=1e-5, atol=1e-5)


def test_triton_twice_is_bit_equal():
    segments = families((17, [3, 19]))
    b = Buffers(segments[-1][1], 4, 2, 16)
    plan = attention_plan(torch.tensor(segments, dtype=torch.int32), b.q.device, kind="triton")
    first = [b.run(plan, 0.3), *(x.clone() for x in (b.o, b.dq, b.dk, b.dv))]
    second = [b.run(plan, 0.3), b.o, b.dq, b.dk, b.dv]
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_a_window_that_hides_nothing_is_none():
    segments = families((6, [5, 3]))
    plan = attention_plan(torch.tensor(segments, dtype=torch.int32), torch.device("cpu"), kind="triton")
    assert plan.longest == 11
    q, k, v = (torch.randn(14, 1, 16, dtype=torch.float64) for _ in range(3))
    o, lse = attention(q, k, v, plan, 1.0)
    wide, wide_lse = attention(q, k, v, plan, 1.0, window=11)
    assert torch.equal(o, wide) and torch.equal(lse, wide_lse)
    assert plan.tiles is not None and len(plan.tiles._queries) == 1  # the same work list


@pytest.mark.parametrize("kind", ["dense", "triton"])
def test_no_tokens(kind):
    plan = attention_plan(torch.zeros(0, 4, dtype=torch.int32), torch.device("cpu"), kind=kind)
    q, k = torch.zeros(0, 4, 16), torch.zeros(0, 2, 16)
    o, lse = attention(q, k, k, plan, 1.0)
    dq, dk, dv = attention_backward(o, q, k, k, o, lse, plan, 1.0)
    assert o.shape == dq.shape == (0, 4, 16) and lse.shape == (4, 0) and dk.shape == dv.shape == (0, 2, 16)


# Work lists


@st.composite
def segment_lists(draw):
    """Segments whose prefix is any stretch of tokens outside of themselves."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=7))
    segments, at, tokens = [], 0, sum(lengths)
    for length in lengths:
        before = draw(st.booleans())
        low, high = (0, at) if before else (at + length, tokens)
        a, b = sorted(draw(st.tuples(st.integers(low, high), st.integers(low, high))))
        whole = [s[:2] for s in segments]  # mostly what real batches have: an earlier segment
        prefix = draw(st.sampled_from([(0, 0), (a, b), *whole, *whole]))
        segments.append((at, at + length, *prefix))
        at += length
    return segments


@settings(deadline=None, max_examples=60)
@given(
    segments=segment_lists(),
    tokens=st.sampled_from([4, 16]),
    window=st.sampled_from([0, 1, 7, 30]),
    processors=st.sampled_from([1, 50]),
)
def test_work_lists_hold_every_pair_once(segments, tokens, window, processors):
    lists = TileLists([list(s) for s in segments], torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_tiles, "SPLIT_BLOCKS", 2)
        work = lists.keys(tokens, 4, 2, processors, window)
    pairs, slots = Counter(), Counter()
    for start, end, first, last, place in work.items.tolist():
        assert 0 < end - start <= tokens
        slots[place] += 1
        for low, high, shift in work.runs[first:last].tolist():
            for i in range(low, high):
                for j in range(start, end):
                    if 0 <= i - j + shift < (window or math.inf):
                        pairs[i, j] += 1
    distance = distances(segments) if segments[-1][1] else torch.zeros(0, 0)
    expected = ((distance >= 0) & (distance < (window or math.inf))).nonzero().tolist()
    assert pairs == Counter(map(tuple, expected))
    assert all(slots[place] == 1 for place in range(work.places)) and set(slots) <= {-1, *range(work.places)}
    assert sorted(p for _, _, a, b in work.sums.tolist() for p in range(a, b)) == list(range(work.places))

    queries = Counter()
    own = {i: tuple(s) for s in segments for i in range(s[0], s[1])}
    for start, end, *rest in lists.queries(tokens, window).tolist():
        assert 0 < end - start <= tokens
        for i in range(start, end):
            queries[i] += 1
            assert tuple(rest) == (own[i][0], *own[i][2:])
    assert queries == Counter(range(segments[-1][1]))


def test_work_lists_start_with_the_longest():
    """A prompt of 32 tokens with 4 completions of 64: its first key tile is seen by all 288 tokens."""
    lists = TileLists([list(s) for s in families((32, [64] * 4))], torch.device("cpu"))
    work = lists.keys(16, 16, 1, 1)
    lengths = [sum(e - s for s, e, _ in work.runs[a:b].tolist()) for _, _, a, b, _ in work.items.tolist()]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 288 and work.places == 0
    assert len(work.runs) == len(work.items)  # siblings follow their prompt: one run each
    seen = [end - own + pe - ps for _, end, own, ps, pe in lists.queries(16).tolist()]
    assert seen == sorted(seen, reverse=True) and seen[0] == 96


# Choosing


def test_kinds_on_a_cpu(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delenv("COVEY_KERNELS", raising=False)
    assert pick_kind(cpu, torch.float32, 64) == pick_kind(cpu, torch.float32, 64, softcap=50.0) == "dense"
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    assert pick_kind(cpu, torch.float64, 64) == pick_kind(cpu, torch.float32, 256, window=5) == "triton"
    assert pick_kind(cpu, torch.float32, 512) == "dense"
    monkeypatch.setenv("COVEY_KERNELS", "reference")
    assert pick_kind(cpu, torch.float32, 64) == "dense"


def test_kind_by_argument():
    segments = torch.tensor([[0, 4, 0, 0]], dtype=torch.int32)
    cpu = torch.device("cpu")
    assert attention_plan(segments, cpu).kind == "dense"
    assert attention_plan(segments, cpu, flash=True).kind == "flash"
    assert attention_plan(segments, cpu, flash=True, kind="triton").kind == "triton"


def test_wrong_arguments():
    segments = torch.tensor(families((6, [5])), dtype=torch.int32)
    cpu = torch.device("cpu")
    q, k = torch.zeros(11, 4, 16), torch.zeros(11, 2, 16)
    for kind in ("flash", "cudnn"):
        plan = attention_plan(segments, cpu, kind=kind)
        with pytest.raises(ValueError, match="no sliding window"):
            attention(q, k, k, plan, 1.0, window=4)
        with pytest.raises(ValueError, match="no soft-cap"):
            attention_backward(q, q, k, k, q, q[..., 0].t(), plan, 1.0, softcap=1.0)
    plan = attention_plan(segments, cpu, kind="triton")
    with pytest.raises(ValueError, match="or more"):
        attention(q, k, k, plan, 1.0, window=-1)
    with pytest.raises(ValueError, match=r"not torch.float32 \(11, 4, 16\)"):
        attention(q, k, k, plan, 1.0, out=q.double())
    with pytest.raises(ValueError, match="stride"):
        attention(q, k, k, plan, 1.0, out=torch.zeros(11, 16, 4).transpose(1, 2))
    with pytest.raises(ValueError, match="not 16 and 66"):
        attention(torch.zeros(11, 66, 16), k[:, :1], k[:, :1], plan, 1.0)
    with pytest.raises(ValueError, match="are 17 calls"):
        attention_plan(torch.tensor(families(*[(i, []) for i in range(1, 18)])), cpu, kind="cudnn")


# cuDNN


def fake_cudnn(q, k, v, bias, compute_lse, dropout, causal, debug, *, scale):
    """What the documentation of the operator says it does, for [B, h, S, d] tensors."""
    assert bias is None and compute_lse and dropout == 0.0 and not debug
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), float("-inf"))
    o = (torch.softmax(scores, -1) @ v).transpose(1, 2).contiguous().transpose(1, 2)
    return o, torch.logsumexp(scores, -1, keepdim=True), None, None, 0, 0, None, None, None


def fake_cudnn_backward(
    do, q, k, v, o, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale
):
    assert (
        lse.shape == (*q.shape[:3], 1) and lse.is_contiguous() and (max_q, max_k) == (q.shape[2], k.shape[2])
    )
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    p = (q @ wide_k.transpose(2, 3) * scale - lse).exp()
    if causal:
        p = p.tril()
    ds = p * (do @ wide_v.transpose(2, 3) - (do * o).sum(-1, keepdim=True)) * scale
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (ds.transpose(2, 3) @ q, p.transpose(2, 3) @ do))
    return ds @ wide_k, dk, dv


@pytest.mark.parametrize(
    "layout",
    [
        families((5, []), (5, []), (5, [])),
        families((7, [])),
        families((4, [3, 3, 3])),
        families((4, [4, 4])),
        families((2, [3, 5]), (3, [4])),
        families((0, []), (3, [0, 2])),
    ],
    ids=str,
)
def test_cudnn_calls_add_up(layout, monkeypatch):
    b = Buffers(layout[-1][1], 4, 2, 8)
    plan = attention_plan(torch.tensor(layout, dtype=torch.int32), b.q.device, kind="cudnn")
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", fake_cudnn)
        patch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", fake_cudnn_backward)
        lse = b.run(plan, 0.3)
    exact = autograd(b, layout, 0.3)
    for mine, theirs in zip((b.o, lse, b.dq, b.dk, b.dv), exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_cudnn_calls_of_a_group():
    """One prompt with equal completions is three calls: prompt, completions among themselves, completions on prompt."""
    plan = attention_plan(torch.tensor(families((6, [4] * 5))), torch.device("cpu"), kind="cudnn").cudnn
    assert plan is not None
    assert [(c.batch, c.start, c.queries) for c in plan.own] == [(1, 0, 6), (5, 6, 4)]
    assert [(c.batch, c.start, c.queries, c.key_start, c.keys) for c in plan.cross] == [(1, 6, 20, 0, 6)]


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (28, 4)])
@pytest.mark.parametrize("layout", [*LAYOUTS, "long"])
def test_flash_is_as_exact_as_bf16_allows(layout, heads):
    segments = LAYOUTS.get(layout) or [
        (0, 300, 0, 0),
        (300, 700, 0, 300),
        (700, 701, 0, 300),
        (701, 900, 0, 0),
    ]
    tokens, (n, m) = segments[-1][1], heads
    q64, k64, v64, do64 = wide = [
        torch.randn(tokens, h, 64, dtype=torch.float64).bfloat16().double() for h in (n, m, m, n)
    ]
    table = torch.tensor(segments, dtype=torch.int32)
    plan = attention_plan(table, torch.device("cpu"))
    o, lse = attention(q64, k64, v64, plan, 0.125)
    exact = [o, *attention_backward(do64, q64, k64, v64, o, lse, plan, 0.125)]
    results = {}
    for flash in (True, False):
        q, k, v, do = (x.to("cuda", torch.bfloat16) for x in wide)
        plan = attention_plan(table, q.device, flash=flash)
        o, lse = attention(q, k, v, plan, 0.125)
        results[flash] = [o, *attention_backward(do, q, k, v, o, lse, plan, 0.125)]
    for stock, dense, true in zip(results[True], results[False], exact, strict=True):
        error, baseline = ((x.cpu().double() - true).pow(2).mean().sqrt() for x in (stock, dense))
        # The dense path works in float32 and rounds once, so it is the smallest error that bf16 outputs can have;
        # FlashAttention also rounds p to bf16 before its second product, and the merge rounds o once more.
        assert error <= 3 * baseline + 1e-12


def rms(x):
    return x.double().pow(2).mean().sqrt().item()


def wide_and_narrow(segments, n, m, d, dtype=torch.bfloat16):
    """The same values in float64 and in `dtype`, on the GPU."""
    narrow = Buffers(segments[-1][1], n, m, d, dtype=dtype, device="cuda")
    wide = Buffers(segments[-1][1], n, m, d, device="cuda")
    for name in ("q", "k", "v", "do"):
        getattr(wide, name).copy_(getattr(narrow, name))
    return wide, narrow


LONG = families((300, [400, 1, 200]), (129, []), (70, [64, 30, 257]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"window": 100}, {"softcap": 20.0}, {"window": 64, "softcap": 5.0}], ids=str
)
@pytest.mark.parametrize(
    "shape", [(8, 8, 64), (8, 2, 128), (28, 4, 128), (12, 4, 96), (8, 4, 256), (4, 1, 24)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_error_is_within_that_of_eager_torch(shape, options, dtype):
    """Eager torch rounds the scores, p and every gradient to 16 bit; these kernels only p, ds and the results."""
    wide, narrow = wide_and_narrow(LONG, *shape, dtype=dtype)
    table, scale = torch.tensor(LONG, dtype=torch.int32), shape[2] ** -0.5
    wide.run(attention_plan(table, wide.q.device), scale, **options)
    narrow.run(attention_plan(table, wide.q.device, kind="triton"), scale, **options)
    eager = dict(zip(("o", "lse", "dq", "dk", "dv"), autograd(narrow, LONG, scale, **options), strict=True))
    for name in ("o", "dq", "dk", "dv"):
        exact, mine = getattr(wide, name), getattr(narrow, name).double()
        error, allowed = mine - exact, eager[name].double() - exact
        assert rms(error) <= 2 * rms(allowed), name
        assert error.abs().max() <= 2 * allowed.abs().max(), name
        assert error.mean().abs() <= 0.1 * rms(error), name


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_gpu_random_layouts(seed):
    """As test_flash_is_as_exact_as_bf16_allows: three times the smallest error that bf16 results can have."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    sizes = [(draw(0, 700), [draw(0, 900) for _ in range(draw(0, 9))]) for _ in range(draw(1, 6))]
    segments = families(*sizes, (draw(1, 300), []))
    m, group, d = draw(1, 5), (1, 2, 4, 7)[draw(0, 4)], (64, 128)[draw(0, 2)]
    options = {"window": draw(1, 600)} if draw(0, 3) == 0 else {}
    wide, narrow = wide_and_narrow(segments, m * group, m, d)
    table = torch.tensor(segments, dtype=torch.int32)
    wide.run(attention_plan(table, wide.q.device), 0.1, **options)
    narrow.run(attention_plan(table, wide.q.device), 0.1, **options)
    names = ("o", "dq", "dk", "dv")
    baseline = [rms(getattr(narrow, name) - getattr(wide, name)) for name in names]
    lse = narrow.run(attention_plan(table, wide.q.device, kind="triton"), 0.1, **options)
    assert lse.isfinite().all()
    for name, smallest in zip(names, baseline, strict=True):
        assert rms(getattr(narrow, name) - getattr(wide, name)) <= 3 * smallest + 1e-12, (name, sizes)


@pytest.mark.gpu
def test_gpu_runs_are_bit_equal():
    segments = families((512, [700] * 8))
    b = Buffers(segments[-1][1], 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    plan = attention_plan(torch.tensor(segments, dtype=torch.int32), b.q.device, kind="triton")
    first = [b.run(plan, 0.1), *(x.clone() for x in (b.o, b.dq, b.dk, b.dv))]
    assert plan.tiles is not None and any(
        work.places for work in plan.tiles._keys.values()
    )  # parts are summed
    for _ in range(20):
        second = [b.run(plan, 0.1), b.o, b.dq, b.dk, b.dv]
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["flash", "triton", "cudnn"])
@pytest.mark.parametrize(
    "sizes", [[(512, [])] * 4, [(200, [320] * 5)], [(1000, [])]], ids=["equal", "group", "one"]
)
def test_gpu_kinds_agree(sizes, kind):
    segments = families(*sizes)
    wide, narrow = wide_and_narrow(segments, 8, 2, 128)
    table = torch.tensor(segments, dtype=torch.int32)
    lse = wide.run(attention_plan(table, wide.q.device), 0.1)
    other = narrow.run(attention_plan(table, wide.q.device, kind=kind), 0.1)
    torch.testing.assert_close(other.double(), lse, rtol=0, atol=1e-4)
    for name in ("o", "dq", "dk", "dv"):
        exact = getattr(wide, name)
        assert rms(getattr(narrow, name) - exact) <= 0.01 * rms(exact), name


@pytest.mark.gpu
def test_gpu_offsets_beyond_32_bits():
    """Tokens 300,000 elements apart: the last ones start beyond 2^31 elements."""
    tokens, row = 8192, 300_000
    buffer = torch.zeros(tokens, row, dtype=torch.bfloat16, device="cuda")
    q, k, v = (buffer[:, i * 1000 : i * 1000 + 256].unflatten(1, (2, 128)) for i in range(3))
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape, device="cuda"))
    segments = torch.tensor(families((4000, [2000, tokens - 6000])), dtype=torch.int32)
    plan = attention_plan(segments, q.device, kind="triton")
    near_q, near_k, near_v = (x.contiguous() for x in (q, k, v))
    o, lse = attention(near_q, near_k, near_v, plan, 0.1)
    far_o, far_lse = attention(q, k, v, plan, 0.1)
    assert torch.equal(o, far_o) and torch.equal(lse, far_lse)
    do = torch.randn_like(o)
    out = tuple(buffer[:, i * 1000 : i * 1000 + 256].unflatten(1, (2, 128)) for i in range(3, 6))
    grads = attention_backward(do, near_q, near_k, near_v, o, lse, plan, 0.1)
    attention_backward(do, q, k, v, o, lse, plan, 0.1, out=out)  # type: ignore[arg-type]
    assert all(torch.equal(x, y) for x, y in zip(grads, out, strict=True))
