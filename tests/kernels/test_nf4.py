"""NF4 against bitsandbytes and against NumPy's float32, whose product and sum are rounded one after the other."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from bitsandbytes import functional as bnb

from covey.kernels import nf4
from covey.kernels.nf4 import NF4, Nested, dequantize_nf4, dequantize_nf4_reference, quantize_nf4_reference
from covey.policies.weight import NF4Weight

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# More blocks than share one absmax2, rows that are whole blocks, rows that are not, a single row, fewer elements than
# a block, and numbers of columns that only 8, 4 or 2 divide.
SHAPES = ((80, 256), (24, 192), (5, 104), (9, 100), (7, 66), (1, 4096), (1, 2), (3, 6))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CPU = torch.device("cpu")


def random_weight(shape: tuple[int, int], blocksize: int = 64, *, nested: bool = True, seed: int = 0) -> NF4:
    """Any bytes are valid: with all of them, scales are also odd numbers that no real matrix would give."""
    random = np.random.default_rng(seed)
    blocks = -(-shape[0] * shape[1] // blocksize)

    def bytes_(n: int) -> torch.Tensor:
        return torch.from_numpy(random.integers(256, size=n, dtype=np.uint8))

    def floats(*n: int) -> torch.Tensor:
        return torch.from_numpy(random.uniform(0.01, 0.1, size=n).astype(np.float32))

    packed = bytes_((shape[0] * shape[1] + 1) // 2)
    if not nested:
        return NF4(packed, floats(blocks), shape, torch.float32, blocksize)
    inner = Nested(floats(-(-blocks // 256)), bnb.create_dynamic_map(), floats()[()])
    return NF4(packed, bytes_(blocks), shape, torch.float32, blocksize, inner)


def from_bnb(packed: torch.Tensor, state: bnb.QuantState) -> NF4:
    assert state.shape is not None and state.dtype is not None and state.blocksize is not None
    inner = None
    if state.nested:
        assert state.state2 is not None and state.offset is not None
        inner = Nested(state.state2.absmax, state.state2.code, state.offset)
    n, k = state.shape
    return NF4(packed.view(-1), state.absmax, (n, k), state.dtype, state.blocksize, inner)


def scales(weight: NF4) -> np.ndarray:
    if weight.nested is None:
        return weight.absmax.numpy()
    absmax2, code, offset = (
        x.cpu().numpy() for x in (weight.nested.absmax, weight.nested.code, weight.nested.offset)
    )
    product = code[weight.absmax.cpu().numpy()] * absmax2[np.arange(len(weight.absmax)) // 256]
    assert product.dtype == np.float32
    return product + offset


def oracle(weight: NF4) -> torch.Tensor:
    """float32 [N, K]."""
    packed = weight.packed.numpy()
    q = np.stack((packed // 16, packed % 16), axis=1).reshape(-1)[: weight.shape[0] * weight.shape[1]]
    values = np.array(nf4.CODE, np.float32)[q] * scales(weight)[np.arange(len(q)) // weight.blocksize]
    assert values.dtype == np.float32
    return torch.from_numpy(values).view(weight.shape)


def through_kernel(weight: NF4, out: torch.Tensor) -> None:
    """Past the dispatch, which keeps bfloat16 from Triton's interpreter."""
    from covey.kernels import nf4_triton

    scales = weight.absmax, weight.nested, weight.blocksize, nf4.NESTED_BLOCK
    nf4_triton.dequantize(weight.packed, *scales, nf4.code_book(out.device), out)


def bits(x: torch.Tensor) -> torch.Tensor:
    """So that comparisons see the sign of a zero."""
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def assert_same_bits(x: torch.Tensor, y: torch.Tensor) -> None:
    assert x.dtype == y.dtype and torch.equal(bits(x), bits(y))


@pytest.fixture(params=["reference", "triton"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COVEY_KERNELS", request.param)
    return request.param


def test_nibbles_by_hand(implementation: str):
    # 0xF0 = (15, 0), 0x7E = (7, 14), 0x81 = (8, 1); codes 15, 0 and 7 are 1, -1 and 0.
    weight = NF4(
        torch.tensor([0xF0, 0x7E, 0x81], dtype=torch.uint8), torch.tensor([2.0]), (1, 6), torch.float32
    )
    expected = [[2.0, -2.0, 0.0, 2 * nf4.CODE[14], 2 * nf4.CODE[8], 2 * nf4.CODE[1]]]
    assert_same_bits(dequantize_nf4(weight), torch.tensor(expected))


def test_nested_scale_by_hand(implementation: str):
    # Three blocks of 32 in rows of 48. D[255] = 1, D[127] = 0, so the scales are 4 + 8, 0 + 8, 4 + 8.
    code = bnb.create_dynamic_map()
    assert code[127] == 0 and code[255] == 1
    inner = Nested(torch.tensor([4.0]), code, torch.tensor(8.0))
    absmax = torch.tensor([255, 127, 255], dtype=torch.uint8)
    packed = torch.full((48,), 0xFF, dtype=torch.uint8)
    weight = NF4(packed, absmax, (2, 48), torch.float32, 32, inner)
    assert dequantize_nf4(weight).tolist() == [[12.0] * 32 + [8.0] * 16, [8.0] * 16 + [12.0] * 32]


def test_tables_are_those_of_bitsandbytes():
    assert_same_bits(nf4.code_book(CPU), bnb.get_4bit_type("nf4", device="cpu"))
    assert_same_bits(nf4.dynamic_code(CPU), bnb.create_dynamic_map())


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_values_have_two_roundings(blocksize: int, nested: bool, implementation: str):
    for shape in SHAPES:
        weight = random_weight(shape, blocksize, nested=nested)
        expected = oracle(weight)
        for dtype in DTYPES:
            out = torch.full(shape, torch.nan, dtype=dtype)
            if (
                dtype == torch.bfloat16 and implementation == "triton"
            ):  # interpreted, it truncates when it stores
                through_kernel(weight, out)
                assert torch.equal(bits(out), (bits(expected) >> 16).short())
            else:
                assert dequantize_nf4(weight, out) is out
                assert_same_bits(out, expected.to(dtype))


def test_the_oracle_would_catch_a_fused_multiply_add():
    weight = random_weight((64, 256))
    assert weight.nested is not None
    absmax2 = weight.nested.absmax.double().repeat_interleave(256)[: len(weight.absmax)]
    product = weight.nested.code.double()[weight.absmax.int()] * absmax2  # exact: 24 + 24 bits
    fused = (product + weight.nested.offset.double()).float().numpy()
    assert 0.05 < (fused != scales(weight)).mean() < 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_equals_bitsandbytes(blocksize: int, nested: bool, dtype: torch.dtype, implementation: str):
    for shape in ((24, 192), (9, 100), (2, 4096)):
        w = torch.randn(shape).to(dtype)
        packed, state = bnb.quantize_4bit(
            w, blocksize=blocksize, compress_statistics=nested, quant_type="nf4"
        )
        with torch.compiler.set_stance("force_eager"):  # with AVX-512 it compiles what it runs from 2048 on
            theirs = bnb.dequantize_4bit(packed, state)
        assert_same_bits(dequantize_nf4(from_bnb(packed, state)), theirs)


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((5, 104), 120, 16),  # aligned as the real ones are
        ((5, 104), 108, 4),  # the row stride allows units of 4 only
        ((5, 104), 105, 3),  # an odd stride
        ((9, 100), 116, 0),
        ((7, 66), 66, 5),
        ((3, 130), 147, 17),
        ((1, 64), 64, 7),
        ((33, 192), 256, 64),  # several programs
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_writes_nothing_beside_its_view(shape, stride, offset, dtype, implementation: str, monkeypatch):
    if implementation == "triton":
        from covey.kernels import nf4_triton

        monkeypatch.setattr(nf4_triton, "TILE", 128)
    weight = random_weight(shape)
    buffer = torch.full((offset + shape[0] * stride + 9,), torch.nan, dtype=dtype)
    view = buffer[offset:].as_strided(shape, (stride, 1))
    dequantize_nf4(weight, view)
    assert_same_bits(view.contiguous(), oracle(weight).to(dtype))
    view.fill_(torch.nan)
    assert buffer.isnan().all()


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_reads_nothing_beside_its_bytes(offset: int, implementation: str):
    """Packed bytes that start anywhere, between scales and bytes that would show in the result."""
    weight = random_weight((6, 72), 32)
    assert weight.nested is not None
    padded = torch.full((len(weight.packed) + 2 * offset,), 0xFF, dtype=torch.uint8)
    padded[offset:-offset] = weight.packed
    poisoned = torch.full((3,), torch.nan)
    poisoned[1:2] = weight.nested.absmax
    inner = Nested(poisoned[1:2], weight.nested.code, weight.nested.offset)
    shifted = NF4(padded[offset:-offset], weight.absmax, weight.shape, weight.dtype, 32, inner)
    assert_same_bits(dequantize_nf4(shifted), oracle(weight))


def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch):
    weight = random_weight((13, 104))
    for chunk in (1, 3, 21, 22):
        monkeypatch.setitem(nf4.CHUNK, "cpu", chunk)
        assert_same_bits(dequantize_nf4_reference(weight), oracle(weight))


def test_odd_columns_and_empty_matrices(implementation: str):
    for shape in ((5, 33), (3, 7), (1, 1)):  # the kernel leaves these to the reference
        assert_same_bits(dequantize_nf4(random_weight(shape)), oracle(random_weight(shape)))
    for shape in ((0, 64), (4, 0)):
        assert dequantize_nf4(random_weight(shape, nested=False)).shape == shape


def test_refuses_what_it_cannot_write():
    weight = random_weight((4, 64))
    for out, message in (
        (torch.empty(4, 63), "out"),
        (torch.empty(64, 4).t(), "strides"),
        (torch.empty(1, 64).expand(4, 64), "strides"),
        (torch.empty(4, 64, dtype=torch.float64), "float64"),
    ):
        with pytest.raises(ValueError, match=message):
            dequantize_nf4(weight, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_quantises_like_bitsandbytes_on_a_cpu(blocksize: int, dtype: torch.dtype):
    for shape in ((64, 192), (9, 100), (5, 33)):
        w = torch.randn(shape).to(dtype)
        packed, state = bnb.quantize_4bit(w, blocksize=blocksize, quant_type="nf4")
        mine = quantize_nf4_reference(w, blocksize, nested=False)
        assert torch.equal(mine.packed, packed.view(-1))
        assert_same_bits(mine.absmax, state.absmax)


def test_quantises_scales_to_the_nearest_code():
    """bitsandbytes' CPU code sometimes takes the neighbour; on no scale is it nearer than ours."""
    w = torch.randn(512, 320)
    packed, state = bnb.quantize_4bit(w, blocksize=64, compress_statistics=True, quant_type="nf4")
    mine = quantize_nf4_reference(w)
    theirs = from_bnb(packed, state)
    assert mine.nested is not None and theirs.nested is not None
    assert torch.equal(mine.packed, theirs.packed)
    assert_same_bits(mine.nested.absmax, theirs.nested.absmax)
    assert_same_bits(mine.nested.offset, theirs.nested.offset)
    truth = quantize_nf4_reference(w, nested=False).absmax
    error, their_error = ((nf4.absmax_reference(x).double() - truth.double()).abs() for x in (mine, theirs))
    assert (error <= their_error + 1e-6).all()
    assert (mine.absmax == theirs.absmax).float().mean() > 0.99


def through_quantize(w: torch.Tensor, blocksize: int, monkeypatch: pytest.MonkeyPatch) -> NF4:
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    return nf4.quantize_nf4(w, blocksize, nested=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernel has the hardware's reciprocal")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_the_kernel_quantises_like_bitsandbytes_on_a_cpu(blocksize: int, dtype: torch.dtype, monkeypatch):
    for shape in ((64, 192), (9, 100), (5, 33), (1, 1)):
        w = torch.randn(shape).to(dtype)
        packed, state = bnb.quantize_4bit(w, blocksize=blocksize, quant_type="nf4")
        mine = through_quantize(w, blocksize, monkeypatch)
        assert torch.equal(mine.packed, packed.view(-1))
        assert_same_bits(mine.absmax, state.absmax)


# Between two codes, as bitsandbytes' CUDA code compares (csrc/kernels.cu, float literals).
MIDPOINTS = [
    "-0.8480964004993439", "-0.6106329262256622", "-0.4599952697753906", "-0.33967943489551544", "-0.23460740596055984",
    "-0.13791173323988914", "-0.045525018125772476", "0.03979014977812767", "0.1202552504837513", "0.2035212516784668",
    "0.2920137718319893", "0.3893125355243683", "0.5016634166240692", "0.6427869200706482", "0.8614784181118011",
]  # fmt: skip


def float32_literal(decimal: str) -> float:
    """Rounded once, as a compiler does. Half of the midpoints are halfway between two float32 within 16 digits."""
    near = np.float32(decimal)
    candidates = (np.nextafter(near, np.float32(-1)), near, np.nextafter(near, np.float32(1)))
    return min((float(x) for x in candidates), key=lambda x: abs(Fraction(x) - Fraction(decimal)))


def test_the_kernel_counts_midpoints_exactly(monkeypatch: pytest.MonkeyPatch):
    """Every code, every midpoint and their neighbours in float32, in blocks whose largest magnitude is 1."""
    code = torch.tensor(nf4.CODE)
    middle = torch.tensor([float32_literal(x) for x in MIDPOINTS])
    torch.testing.assert_close(middle, (code[1:] + code[:-1]) / 2, rtol=0, atol=6e-8)
    points = torch.cat((code, middle))
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    points = torch.cat((points, torch.nextafter(points, up), torch.nextafter(points, down)))
    points = points[points.abs() <= 1]
    w = torch.cat((torch.tensor([1.0]), points, torch.zeros(-(1 + len(points)) % 128)))
    expected = (w[:, None] > middle).sum(1)  # exactly between two codes, the smaller one
    mine = through_quantize(w.view(1, -1), 128, monkeypatch)
    q = torch.stack((mine.packed >> 4, mine.packed & 15), 1).view(-1)
    assert torch.equal(q.long(), expected)


@pytest.mark.parametrize("size", [1, 255, 5000])
def test_scales_are_searched_for_to_the_nearest_code(size: int):
    """Within the table's ends: the search takes -1 for the smallest code."""
    code = nf4.dynamic_code(torch.device("cpu"))
    x = torch.cat((torch.rand(size) * 2 - 1, torch.randn(size) * 1e-3, code, torch.tensor([-1.0, 1.0, 0.0])))
    found = code[nf4._searched(x.clamp(-1, 1), code).int()]
    nearest = (x.clamp(-1, 1)[:, None] - code).abs().amin(1)
    torch.testing.assert_close((x.clamp(-1, 1) - found).abs(), nearest, rtol=1e-5, atol=0)


def test_weights_write_into_a_stacked_buffer(implementation: str):
    """q, k and v below each other, with columns for something else at the right."""
    parts = [torch.randn(n, 128) for n in (32, 8, 8)]
    buffer = torch.full((48, 128 + 16), torch.nan)
    expected = []
    row = 0
    for w in parts:
        weight = NF4Weight(w, torch.float32)
        n, k = weight.shape
        view = buffer[row : row + n, :k]
        assert weight.dense_into(view) is view
        packed, state = bnb.quantize_4bit(w, blocksize=64, compress_statistics=True, quant_type="nf4")
        expected.append(bnb.dequantize_4bit(packed, state))
        assert_same_bits(weight.dense(), expected[-1])
        row += n
    assert_same_bits(buffer[:, :128].contiguous(), torch.cat(expected))
    assert buffer[:, 128:].isnan().all()


def to_cuda(weight: NF4) -> NF4:
    inner = weight.nested and Nested(*(x.cuda() for x in weight.nested))
    return NF4(
        weight.packed.cuda(), weight.absmax.cuda(), weight.shape, weight.dtype, weight.blocksize, inner
    )


@pytest.mark.gpu
@pytest.mark.parametrize("lookup", ["gather", "load"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_gpu_has_two_roundings(blocksize: int, nested: bool, lookup: str, monkeypatch: pytest.MonkeyPatch):
    from covey.kernels import nf4_triton

    monkeypatch.setattr(nf4_triton, "LOOKUP", lookup)
    for shape in (*SHAPES, (1024, 4096), (40, 14336), (33, 896)):
        weight = random_weight(shape, blocksize, nested=nested)
        expected = oracle(weight)
        on_gpu = to_cuda(weight)
        for dtype in DTYPES:
            buffer = torch.full((shape[0] + 1, shape[1] + 16), torch.nan, dtype=dtype, device="cuda")
            view = buffer[: shape[0], : shape[1]]
            through_kernel(on_gpu, view)
            assert_same_bits(view.contiguous().cpu(), expected.to(dtype))
            view.fill_(torch.nan)
            assert buffer.isnan().all()
            assert_same_bits(dequantize_nf4_reference(on_gpu, view).contiguous().cpu(), expected.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (3584, 3584), (896, 4864), (5, 33)])
def test_gpu_equals_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype):
    w = torch.randn(shape, device="cuda").mul_(0.02).to(dtype)
    for nested in (True, False):
        packed, state = bnb.quantize_4bit(w, blocksize=64, compress_statistics=nested, quant_type="nf4")
        mine = dequantize_nf4(from_bnb(packed, state))
        assert_same_bits(mine, bnb.dequantize_4bit(packed, state))
        assert_same_bits(mine, dequantize_nf4(from_bnb(packed, state)))


@pytest.mark.gpu
def test_gpu_offsets_beyond_int32():
    weight = random_weight((4200, 64))
    stride = 1 << 19  # 4200 rows: 2.2e9 elements
    buffer = torch.zeros(4200 * stride, dtype=torch.bfloat16, device="cuda")
    view = buffer.view(4200, stride)[:, -64:]
    dequantize_nf4(to_cuda(weight), view)
    assert_same_bits(view.contiguous().cpu(), oracle(weight).bfloat16())
    view.zero_()
    assert not buffer.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (3584, 3584), (896, 4864), (5, 33), (1, 1)])
def test_gpu_quantises_like_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype):
    w = torch.randn(shape, device="cuda").mul_(0.02).to(dtype)
    w[: shape[0] // 3] *= 1e-3
    w.view(-1)[:100] = 0
    theirs = from_bnb(*bnb.quantize_4bit(w, blocksize=64, compress_statistics=True, quant_type="nf4"))
    mine = NF4Weight(w, dtype).nf4
    assert mine.nested is not None and theirs.nested is not None
    assert torch.equal(mine.packed, theirs.packed)
    assert torch.equal(mine.absmax, theirs.absmax)
    for x, y in zip(mine.nested, theirs.nested, strict=True):
        assert_same_bits(x, y)
    for blocksize in BLOCKSIZES:
        packed, state = bnb.quantize_4bit(w, blocksize=blocksize, quant_type="nf4")
        plain = nf4.quantize_nf4(w, blocksize, nested=False)
        assert torch.equal(plain.packed, packed.view(-1))
        assert_same_bits(plain.absmax, state.absmax)
