"""Products with NF4 matrices against float64 products with what bitsandbytes dequantises.

In CI the Triton kernels run in the interpreter, on the CPU: in float64, or in float32 and float16 for their roundings.
"""

import random
from typing import Any

import pytest
import torch
from bitsandbytes import functional as bnb
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.kernels import nf4_matmul as module
from covey.kernels.gated_mlp import gated
from covey.kernels.lora_linear import LoraGroup, LoraPart
from covey.kernels.nf4 import NF4, Nested
from covey.kernels.nf4_matmul import nf4_matmul, nf4_matmul_reference

REFERENCES = module, ("nf4_matmul_reference",)
F64, NAN = torch.float64, float("nan")
CANARY = 12345.0


def launch_with(monkeypatch: pytest.MonkeyPatch, **changes) -> None:
    """Other launch parameters in the interpreter."""
    from covey.kernels import nf4_matmul_triton

    launch = nf4_matmul_triton.INTERPRETED._replace(**changes)
    monkeypatch.setattr(nf4_matmul_triton, "launch_for", lambda *arguments: launch)


def alone(x: torch.Tensor, margin: int = 3) -> torch.Tensor:
    """x, a matrix or a vector, as a view into a larger buffer, between NaNs (255 in bytes)."""
    rows = x if x.dim() == 2 else x.view(1, -1)
    shape = rows.shape[0] + 2, rows.shape[1] + margin
    poison = 255 if x.dtype == torch.uint8 else NAN
    view = torch.full(shape, poison, dtype=x.dtype, device=x.device)[1:-1, : rows.shape[1]]
    view.copy_(rows)
    return view if x.dim() == 2 else view[0]


def quantised(w: torch.Tensor, blocksize: int = 64, *, nested: bool = True, dtype=torch.float32, place=alone):
    """NF4 of bitsandbytes, with its tensors at a place of their own, and what bitsandbytes dequantises it to."""
    packed, state = bnb.quantize_4bit(w, blocksize=blocksize, compress_statistics=nested, quant_type="nf4")
    inner = None
    if nested:
        assert state.state2 is not None and state.offset is not None
        inner = Nested(place(state.state2.absmax), state.state2.code, state.offset)
    state.dtype = dtype if dtype != F64 else torch.float32  # it rounds to this
    with torch.compiler.set_stance("force_eager"):
        dense = bnb.dequantize_4bit(packed, state).view(w.shape)
    shape = w.shape[0], w.shape[1]
    return NF4(place(packed.view(-1)), place(state.absmax), shape, dtype, blocksize, inner), dense.double()


class Group:
    """Linears in NF4, an adapter on those with ranks, a bias: random, every tensor between poisoned memory.

    aligned: rows begin at multiples of 16 bytes, as in a policy.
    """

    def __init__(
        self,
        sizes,
        k,
        ranks=(),
        *,
        nested=True,
        bias=False,
        dtype=F64,
        device="cpu",
        spread=1.0,
        aligned=False,
        seed=0,
    ):
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device=device)

        def place(x):
            return alone(x, margin=64 - x.shape[-1] % 64 if aligned else 3)

        pairs = [quantised(normal(n, k) * spread, nested=nested, dtype=dtype, place=place) for n in sizes]
        self.weights, self.w = [pair[0] for pair in pairs], torch.cat([pair[1] for pair in pairs])
        self.scale, self.dtype, self.aligned = 0.7, dtype, aligned
        self.bias = place(normal(len(self.w)).to(dtype)) if bias else None
        parts, at = [], 0
        for i in random.Random(seed).sample(range(len(ranks)), len(ranks)):  # who has which ranks
            if ranks[i]:
                start, b = sum(sizes[:i]), place(normal(sizes[i], ranks[i]).to(dtype))
                parts.append(LoraPart(slice(start, start + sizes[i]), slice(at, at + ranks[i]), b, None))
                at += ranks[i]
        self.lora = LoraGroup(place((normal(at, k) / k**0.5).to(dtype)), None, tuple(parts)) if at else None

    def merged(self):
        """W + s B A in float64."""
        w = self.w.clone()
        if self.lora is not None:
            for part in self.lora.parts:
                w[part.outputs] += self.scale * part.b.double() @ self.lora.a.double()[part.ranks]
        return w

    def input(self, rows, seed=1):
        generator = torch.Generator(self.w.device).manual_seed(seed)
        x = torch.randn(rows, self.w.shape[1], generator=generator, device=self.w.device)
        return alone(x.to(self.dtype), margin=64 if self.aligned else 3)

    def run(self, x, **options):
        return nf4_matmul(x, self.weights, self.lora, self.scale, self.bias, **options)

    def expected(self, x):
        y = x.double() @ self.merged().t()
        return y if self.bias is None else y + self.bias.double()


def close(y: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(y, expected.to(y.dtype), rtol=1e-10, atol=1e-10)


# In float64


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("rows", "sizes", "k"),
    [
        (1, (16,), 64),  # a single unit
        (1, (21, 7, 33), 128),
        (3, (50,), 320),
        (8, (1, 1), 192),
        (9, (16, 31), 256),
        (33, (5,), 128),
        (70, (19,), 64),  # more rows than a program takes
    ],
    ids=str,
)
def test_products(rows, sizes, k, nested, implementation):
    group = Group(sizes, k, nested=nested)
    x = group.input(rows)
    close(group.run(x), group.expected(x))


LAUNCHES = [
    {"outputs": 32, "columns": 128, "warps": 2},
    {"outputs": 64, "columns": 256, "warps": 2},  # two sets of rows in a warp
    {"outputs": 128, "columns": 64, "warps": 4},
    {"outputs": 16, "columns": 256},
]


@pytest.mark.parametrize("resident", [1, 4, 100])
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: "-".join(map(str, launch.values())))
def test_any_launch_is_the_same_product(launch, resident, kernels, monkeypatch):
    launch_with(monkeypatch, resident=resident, **launch)
    group = Group((40, 25), 512, (3, 20), bias=True)
    x = group.input(2)
    close(group.run(x), group.expected(x))


def test_columns_that_a_unit_does_not_divide(kernels, monkeypatch):
    """448 is 3.5 units of 128 and 7 of 64."""
    launch_with(monkeypatch, columns=256)
    group = Group((20,), 448)
    x = group.input(2)
    close(group.run(x), group.expected(x))


@pytest.mark.parametrize("ranks", [(4, 4, 4), (0, 5, 0), (3, 0, 17), (1, 16, 2)], ids=str)
def test_adapters(ranks, implementation):
    group = Group((21, 7, 33), 128, ranks)
    x = group.input(3)
    close(group.run(x), group.expected(x))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
def test_activations(kind, implementation):
    group = Group((37, 37), 128, (4, 4), bias=True, spread=0.3)
    x = group.input(3)
    gate, up = group.expected(x).chunk(2, 1)
    if kind == "silu":
        expected = torch.nn.functional.silu(gate) * up
    else:
        expected = torch.nn.functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up
    close(group.run(x, activation=kind), expected)


def test_writes_nothing_beside_its_output(implementation):
    group = Group((21, 7), 128, (4, 0), bias=True)
    x = group.input(3)
    buffer = torch.full((5, 28 + 7), CANARY, dtype=F64)
    out = buffer[1:4, 3:31]
    assert group.run(x, out=out) is out
    close(out, group.expected(x))
    out.fill_(CANARY)
    assert (buffer == CANARY).all()


@settings(deadline=None, max_examples=12)
@given(
    rows=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    blocks=st.integers(1, 6),
    data=st.data(),
)
def test_any_shape(rows, sizes, blocks, data):
    ranks = data.draw(st.lists(st.integers(0, 6), min_size=len(sizes), max_size=len(sizes)))
    resident, bias = data.draw(st.integers(1, 9)), data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COVEY_KERNELS", "triton")
        for reference in REFERENCES[1]:
            patch.setattr(module, reference, None)
        launch_with(patch, resident=resident)
        group = Group(sizes, 64 * blocks, ranks, bias=bias, seed=rows)
        x = group.input(rows)
        close(group.run(x), group.expected(x))


def test_no_rows(implementation):
    group = Group((21, 7), 128, (4, 0))
    assert group.run(group.input(0)).shape == (0, 28)


@pytest.mark.parametrize(("k", "blocksize", "nested"), [(96, 64, True), (128, 128, True), (64, 64, False)])
def test_what_goes_through_torch(k, blocksize, nested, monkeypatch):
    """Rows that are no whole blocks, larger blocks, nested beside plain scales: no kernel, the same product."""
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    pairs = [quantised(torch.randn(6, k), blocksize), quantised(torch.randn(5, k), blocksize, nested=nested)]
    x = torch.randn(3, k, dtype=F64)
    y = nf4_matmul(x, [weight for weight, _ in pairs])
    close(y, x @ torch.cat([dense for _, dense in pairs]).t())


# Roundings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("nested", [True, False])
def test_weights_are_decoded_bit_by_bit(nested, dtype, implementation, monkeypatch):
    """One-hot inputs pick out columns of W."""
    if implementation == "triton":
        launch_with(monkeypatch, outputs=32, columns=128, warps=2)
    group = Group((37,), 128, nested=nested, dtype=dtype)
    one = torch.eye(128, dtype=dtype)
    for first in (0, 64):
        y = group.run(one[first : first + 64])
        assert torch.equal(y.t(), group.w[:, first : first + 64].to(dtype))


def test_float32(implementation):
    group = Group((21, 7, 33), 512, (4, 4, 4), bias=True, dtype=torch.float32)
    x = group.input(5)
    y, expected = group.run(x), group.expected(x)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_fused_is_rounded_like_one_after_the_other(kernels):
    """In float16: z, y, act(gate) and the product."""
    group = Group((37, 37), 128, (4, 4), bias=True, dtype=torch.float16, spread=0.3)
    x = group.input(3)
    y = group.run(x)
    assert torch.equal(group.run(x, activation="silu"), gated(y[:, :37], y[:, 37:], "silu"))

    assert group.lora is not None
    z = (x.double() @ group.lora.a.double().t() * group.scale).half()
    adapted = torch.cat([z[:, p.ranks].double() @ p.b.double().t() for p in _in_order(group.lora.parts)], 1)
    assert group.bias is not None
    exact = x.double() @ group.w.t() + adapted + group.bias.double()
    error, step = (y.double() - exact).abs(), torch.finfo(torch.float16).eps * exact.abs()
    assert (error <= 0.51 * step + 1e-4).all(), "half a unit of the last place, and float32's sums"


def _in_order(parts):
    return sorted(parts, key=lambda part: part.outputs.start)


# Mistakes


def test_mistakes_are_sentences(implementation):
    group = Group((8, 8), 64, (2, 2), bias=True)
    x, w, lora = group.input(2), group.weights, group.lora
    assert lora is not None and group.bias is not None
    elsewhere = LoraGroup(lora.a, None, (LoraPart(slice(4, 12), slice(0, 2), lora.parts[0].b, None),))
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((x, []), "for weights"),
        ((x[:, :32], w), "for weights"),
        ((x[0], w), "for weights"),
        ((x, w, None, 1.0, group.bias[:5]), "bias"),
        ((x, w, None, 1.0, group.bias.float()), "bias"),
        ((x, w, LoraGroup(lora.a.float(), None, lora.parts)), "A: torch.float32"),
        ((x, w, LoraGroup(lora.a[:, :32], None, lora.parts)), "A: torch.float64"),
        ((x, w, elsewhere), "are not those"),
    ]
    for arguments, match in cases:
        with pytest.raises(ValueError, match=match):
            nf4_matmul(*arguments)
    for options, match in (
        ({"activation": "relu"}, "one of silu"),
        ({"out": torch.zeros(2, 16)}, "out: torch.float32"),
        ({"activation": "silu", "out": torch.zeros(2, 16, dtype=F64)}, "out"),
    ):
        with pytest.raises(ValueError, match=match):
            group.run(x, **options)
    with pytest.raises(ValueError, match="two alike"):
        nf4_matmul(x, w[:1], activation="silu")


# On a GPU, in bfloat16

BF16 = torch.bfloat16
GPU = {"device": "cuda", "dtype": BF16, "aligned": True}
QKV = (1536, 256, 256), 1536, (16, 16, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("shuffles", [True, False], ids=["shuffles", "gather"])
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
def test_gpu_decodes_bit_by_bit(rows, shuffles, kernels, monkeypatch):
    from covey.kernels import nf4_matmul_triton

    if not shuffles:
        monkeypatch.setattr(nf4_matmul_triton, "_shuffles", lambda: False)
    for k, nested in ((256, True), (448, False)):
        group = Group((300, 45), k, nested=nested, **GPU)
        one = torch.eye(k, dtype=BF16, device="cuda")
        for first in range(0, k, rows):
            y = group.run(one[first : first + rows])
            assert torch.equal(y.t(), group.w[:, first : first + rows].to(BF16))


def as_good_as_eager(mine: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    assert mine.isfinite().all()
    error, allowed = mine.double() - exact, eager.double() - exact
    assert error.abs().max() <= 1.5 * allowed.abs().max()
    assert error.square().mean().sqrt() <= 1.5 * allowed.square().mean().sqrt()
    if error.numel() > 10_000:
        assert error.mean().abs() <= 0.1 * error.square().mean().sqrt()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 16, 31, 64, 100])
def test_bfloat16_is_about_as_good_as_eager_torch(rows, kernels):
    group = Group(*QKV, bias=True, **GPU, spread=0.02)
    x = group.input(rows)
    eager = nf4_matmul_reference(x, group.weights, group.lora, group.scale, group.bias)
    as_good_as_eager(group.run(x), eager, group.expected(x))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 40])
def test_gpu_without_alignment(rows, kernels):
    group = Group((1001, 77), 896, (7, 0), **{**GPU, "aligned": False}, spread=0.02)
    x = group.input(rows)
    eager = nf4_matmul_reference(x, group.weights, group.lora, group.scale)
    as_good_as_eager(group.run(x), eager, group.expected(x))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 33, 64])
def test_gpu_activation(rows, kernels):
    group = Group((8960, 8960), 1536, (16, 16), **GPU, spread=0.03)
    x = group.input(rows)
    gate, up = group.expected(x).chunk(2, 1)
    eager = nf4_matmul_reference(x, group.weights, group.lora, group.scale, activation="silu")
    as_good_as_eager(group.run(x, activation="silu"), eager, torch.nn.functional.silu(gate) * up)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 33, 64])
def test_gpu_long_sums(rows, kernels):
    group = Group((1536,), 8960, (16,), **GPU, spread=0.01)
    x = group.input(rows)
    eager = nf4_matmul_reference(x, group.weights, group.lora, group.scale)
    as_good_as_eager(group.run(x), eager, group.expected(x))


@pytest.mark.gpu
def test_gpu_float32_and_float16(kernels):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
        group = Group((300, 45), 512, (8, 8), bias=True, **{**GPU, "dtype": dtype})
        for rows in (1, 20, 64):
            x = group.input(rows)
            expected = group.expected(x)
            error = (group.run(x).double() - expected).abs().max()
            assert error <= tolerance * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
def test_repeats_are_bit_equal(rows, kernels):
    group = Group(*QKV, bias=True, **GPU, spread=0.02)
    x = group.input(rows)
    first = group.run(x)
    for _ in range(20):
        assert torch.equal(group.run(x), first)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_graph_reads_the_adapter_of_the_day(rows, kernels):
    """Captured once, replayed for other inputs and adapters: bit-equal to the same call outside of a graph."""
    group = Group(*QKV, bias=True, **GPU, spread=0.02)
    x, out = group.input(rows), torch.empty(rows, 2048, dtype=BF16, device="cuda")
    group.run(x, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group.run(x, out=out)
    assert group.lora is not None
    seen = []
    for seed in range(3):
        x.copy_(group.input(rows, seed))
        group.lora.a.normal_(std=0.02)
        for part in group.lora.parts:
            part.b.normal_()
        out.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, group.run(x))
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])
