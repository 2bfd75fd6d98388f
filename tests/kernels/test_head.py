"""Selected log-probs and entropies against float64 softmax: values, gradients, chunks, memory, confident tokens.

`head` runs the torch path and, in Triton's interpreter, the kernel with blocks of 16 logits.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from covey.kernels.head import (
    chunk_rows,
    head_logits,
    logit_gradients_reference,
    selected_logprobs_backward,
    selected_logprobs_forward,
    selected_logprobs_reference,
    target_logp,
)

INF = float("inf")
# The kernel computes on the padding between rows too, whatever is there; NumPy, in the interpreter, minds.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture(params=["reference", "triton"])
def head(request, monkeypatch) -> str:
    monkeypatch.setenv("COVEY_KERNELS", request.param)
    if request.param == "triton":
        from covey.kernels import head_triton

        monkeypatch.setattr(head_triton, "BLOCK", 16)
    return request.param


def gradients_of_logits(
    head: str, z: Tensor, target: Tensor, temperature: float = 1.0, **kwargs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Everything that the middle of the head computes from a copy of the products h W^T."""
    softcap, scale = kwargs.get("softcap"), kwargs.get("scale", 1.0)
    z = z.clone()
    if head == "reference":
        results = logit_gradients_reference(
            z, target, temperature,
            softcap=softcap, scale=scale, entropy=True, gradient=True, entropy_gradient=True,
        )  # fmt: skip
    else:
        from covey.kernels import head_triton

        dentropy = torch.empty_like(z)
        logp, entropy, dz = head_triton.logit_gradients(
            z, target, temperature,
            softcap=softcap, scale=scale, entropy=True, gradient=True, dtype=z.dtype, dentropy_MV=dentropy,
        )  # fmt: skip
        results = logp, entropy, dz, dentropy
    logp, entropy, dz, dentropy = results
    assert entropy is not None and dz is not None and dentropy is not None
    return logp, entropy, dz, dentropy


class Selected(torch.autograd.Function):
    """The two passes as one differentiable function, as policies/decoder.py uses them."""

    @staticmethod
    def forward(ctx, h, w, target, temperature, softcap, scale):
        logp, entropy, u, u_entropy = selected_logprobs_forward(
            h, w, target, temperature,
            entropy=True, gradient=True, entropy_gradient=True, softcap=softcap, scale=scale,
        )  # fmt: skip
        ctx.save_for_backward(u, u_entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, *grads):
        u, u_entropy = ctx.saved_tensors
        return selected_logprobs_backward(grads[0], u, grads[1], u_entropy), None, None, None, None, None


# Gradients


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_matches_autograd_in_any_chunks(head, chunk, temperature):
    h = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(37, 6, dtype=torch.float64)
    target = torch.randint(37, (7,))
    g, g_entropy = torch.randn(2, 7, dtype=torch.float64)  # non-uniform upstream gradients of both signs
    g[3] = g_entropy[4] = 0
    logp, entropy = selected_logprobs_reference(h, w, target, temperature)
    (dh,) = torch.autograd.grad(logp, h, g, retain_graph=True)
    (dh_both,) = torch.autograd.grad([logp, entropy], h, [g, g_entropy])
    with torch.no_grad():
        mine, my_entropy, u, u_entropy = selected_logprobs_forward(
            h, w, target, temperature, entropy=True, gradient=True, entropy_gradient=True, chunk=chunk
        )
    torch.testing.assert_close(mine, logp.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(my_entropy, entropy.detach(), rtol=0, atol=1e-12)
    assert u is not None and u_entropy is not None
    torch.testing.assert_close(selected_logprobs_backward(g, u), dh, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        selected_logprobs_backward(g, u, g_entropy, u_entropy), dh_both, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    ("softcap", "scale", "temperature"),
    [(None, 1.0, 1.0), (2.5, 1.0, 0.6), (None, 0.25, 1.0), (1.5, 3.0, 1.3)],
)
@pytest.mark.parametrize("use", ["logp", "entropy", "both"])
def test_each_output_has_its_gradient(head, use, softcap, scale, temperature):
    """Against finite differences and against autograd of the reference, each output alone and both together."""
    h = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(19, 3, dtype=torch.float64)
    target = torch.randint(19, (2,))

    def outputs(x):
        return Selected.apply(x, w, target, temperature, softcap, scale)

    which = {"logp": slice(1), "entropy": slice(1, 2), "both": slice(2)}[use]
    assert torch.autograd.gradcheck(lambda x: outputs(x)[which], (h,))
    exact = selected_logprobs_reference(h, w, target, temperature, softcap=softcap, scale=scale)
    mine = outputs(h)
    torch.testing.assert_close(mine, exact, rtol=0, atol=1e-12)
    c = list(torch.randn(2, 2, dtype=torch.float64))[which]
    torch.testing.assert_close(
        torch.autograd.grad(mine[which], h, c), torch.autograd.grad(exact[which], h, c), rtol=0, atol=1e-12
    )


def test_outputs_not_asked_for_are_none_and_change_nothing(head):
    h, w, target = torch.randn(3, 5), torch.randn(21, 5), torch.tensor([0, 7, 20])
    whole = selected_logprobs_forward(h, w, target, 1.0, entropy=True, gradient=True, entropy_gradient=True)
    for flags in range(8):
        entropy, gradient, entropy_gradient = (bool(flags >> i & 1) for i in range(3))
        some = selected_logprobs_forward(
            h, w, target, 1.0, entropy=entropy, gradient=gradient, entropy_gradient=entropy_gradient
        )
        for given, asked, full in zip(some, (True, entropy, gradient, entropy_gradient), whole, strict=True):
            assert (given is not None) == asked
            if given is not None:
                torch.testing.assert_close(given, full, rtol=1e-6, atol=1e-7)


def test_cap_and_scale_of_the_logits():
    h, w = torch.randn(4, 5), torch.randn(9, 5)
    expected = 3 * torch.tanh(0.5 * (h @ w.t()) / 3)
    torch.testing.assert_close(head_logits(h, w, softcap=3.0, scale=0.5), expected)


# Precision


@pytest.mark.parametrize("margin", [5.0, 16.0, 20.0, 40.0])
def test_confident_tokens_keep_value_and_gradient(head, margin):
    """z = (margin, 0), y = 0, q = 1 / (1 + e^margin), in float32 and to 1e-5 of themselves, far below its eps:

    log p = log(1 - q), d log p / dz_0 = q, d entropy / dz_0 = -q (1 - q) margin.
    """
    logp, entropy, dz, dentropy = gradients_of_logits(head, torch.tensor([[margin, 0.0]]), torch.tensor([0]))
    q = 1 / (1 + math.exp(margin))
    sides = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(logp.double().item(), math.log1p(-q), rtol=1e-5, atol=0)
    torch.testing.assert_close(dz.double(), q * sides, rtol=1e-5, atol=0)
    torch.testing.assert_close(dentropy.double(), -q * (1 - q) * margin * sides, rtol=1e-5, atol=0)
    assert abs(entropy.item() - (-(1 - q) * math.log1p(-q) - q * math.log(q))) < 1e-7
    # And the unlikely one of the two: log p = -margin - log(1 + e^-margin).
    logp, _, dz, _ = gradients_of_logits(head, torch.tensor([[margin, 0.0]]), torch.tensor([1]))
    torch.testing.assert_close(logp.double().item(), -margin + math.log1p(-q), rtol=1e-6, atol=0)
    torch.testing.assert_close(dz.double(), -(1 - q) * sides, rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.6, 1.3])
@pytest.mark.parametrize("margin", [17.0, 25.0, 40.0])
def test_confident_tokens_keep_value_at_a_temperature_on_a_gpu(margin, temperature):
    """As above with z / temperature, whose division may be fused with a subtraction that must give exactly 0."""
    z = torch.tensor([[3.3 + margin * temperature, 3.3]], device="cuda")
    logp, _, dz, _ = gradients_of_logits("triton", z, torch.tensor([0], device="cuda"), temperature)
    exact = (z.double()[0, 0] - z.double()[0, 1]).item() / temperature
    q = 1 / (1 + math.exp(exact))
    torch.testing.assert_close(logp.double().item(), math.log1p(-q), rtol=2e-5, atol=0)
    torch.testing.assert_close(
        dz.double().cpu() * temperature, q * torch.tensor([[1.0, -1.0]]).double(), rtol=2e-5, atol=0
    )


def test_closed_forms(head):
    def logp_of(*z: float) -> float:
        value = gradients_of_logits(head, torch.tensor([z]), torch.tensor([0]))[0].item()
        assert value == pytest.approx(target_logp(torch.tensor([z]), torch.tensor([0])).item(), abs=5e-7)
        return value

    assert abs(logp_of(*[0.0] * 64) + 4.158883) < 1e-6  # -ln 64
    assert abs(logp_of(20.06, 20.0) + 0.663597) < 1e-6  # B22; bf16 logits would give -0.693147
    assert abs(logp_of(30.1, 30.0, 29.9) + 1.001943) < 2e-6  # B22; -0.978814
    assert logp_of(3.0, -INF) == 0.0
    assert logp_of(3.0) == 0.0
    uniform = gradients_of_logits(head, torch.zeros(1, 64), torch.tensor([5]))
    assert abs(uniform[1].item() - 4.158883) < 1e-6
    assert uniform[3].abs().max() < 1e-8  # no direction raises the largest entropy


def test_float32_logits_are_worth_it(head, monkeypatch):
    """B22: 200 positions of 1000 logits, spread 6: below 1e-5 here, past 1e-2 if the logits come in bfloat16."""
    rows = 200
    if head == "triton":  # 8 of them in the interpreter
        from covey.kernels import head_triton

        monkeypatch.setattr(head_triton, "BLOCK", 256)
        rows = 8
    z = 6 * torch.randn(rows, 1000, dtype=torch.float64)
    target = torch.randint(1000, (rows,))
    exact = z.log_softmax(1).gather(1, target[:, None])[:, 0]
    mine = gradients_of_logits(head, z.float(), target)[0].double()
    rounded = gradients_of_logits(head, z.bfloat16().float(), target)[0].double()
    assert (mine - exact).abs().max() < 1e-5
    assert 1e-2 < (rounded - exact).abs().max() < 0.1


def test_vanishing_probabilities_give_no_nan(head):
    """Logits of -inf, and those whose probability is 0 in float64: as if their columns were not there."""
    z = torch.randn(3, 21, dtype=torch.float64)
    gone = [2, 5, 18]
    z[:, gone] = torch.tensor([-INF, -1e4, -800.0], dtype=torch.float64)
    keep = [i for i in range(21) if i not in gone]
    target = torch.tensor([0, 4, 20])
    logp, entropy, dz, dentropy = gradients_of_logits(head, z, target, 0.7)
    short = z[:, keep].clone().requires_grad_()
    table = (short / 0.7).log_softmax(1)
    chosen = table.gather(1, torch.tensor([[0], [3], [17]]))[:, 0]
    plain_entropy = -(table.exp() * table).sum(1)
    (dlogp,) = torch.autograd.grad(chosen.sum(), short, retain_graph=True)
    (dplain,) = torch.autograd.grad(plain_entropy.sum(), short)
    for mine, theirs in (
        (logp, chosen.detach()),
        (entropy, plain_entropy.detach()),
        (dz[:, keep], dlogp),
        (dentropy[:, keep], dplain),
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert not dz[:, gone].any() and not dentropy[:, gone].any()


def test_impossible_and_only_targets(head):
    z = torch.tensor([[1.0, -INF, 0.0], [-INF, -INF, -3.0], [1e4, 0.0, -1e4]])
    logp, entropy, dz, dentropy = gradients_of_logits(head, z, torch.tensor([1, 2, 0]))
    assert logp.tolist() == [-INF, 0.0, 0.0]
    assert dz[0, 1] == 1 and not dz[1:].any() and not dentropy[1:].any() and not entropy[1:].any()
    assert not (dz.isnan().any() or dentropy.isnan().any() or entropy.isnan().any())


def test_nan_is_not_hidden(head):
    for at in range(3):
        z = torch.tensor([[1.0, 2.0, 0.0]])
        z[0, at] = float("nan")
        logp, entropy, _, _ = gradients_of_logits(head, z, torch.tensor([0]))
        assert logp.isnan().all() and entropy.isnan().all()


# Shapes, strides, chunks and memory


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 48, 257])
def test_sizes_around_the_block(head, vocab):
    z = 3 * torch.randn(3, vocab, dtype=torch.float64)
    target = torch.tensor([0, vocab // 2, vocab - 1])
    logp, entropy, dz, dentropy = gradients_of_logits(head, z, target, 0.8, softcap=4.0)
    x = z.clone().requires_grad_()
    table = (4 * torch.tanh(x / 4) / 0.8).log_softmax(1)
    chosen = table.gather(1, target[:, None])[:, 0]
    plain_entropy = -(table.exp() * table).sum(1)
    torch.testing.assert_close(logp, chosen.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, plain_entropy.detach(), rtol=0, atol=1e-12)
    (dlogp,) = torch.autograd.grad(chosen.sum(), x, retain_graph=True)
    (dplain,) = torch.autograd.grad(plain_entropy.sum(), x)
    torch.testing.assert_close(dz, dlogp, rtol=0, atol=1e-12)
    torch.testing.assert_close(dentropy, dplain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_gradients_take_the_place_of_the_logits(dtype, monkeypatch):
    """Rows with poisoned padding in a larger storage: the same results, and not a byte changed around the rows."""
    from covey.kernels import head_triton

    monkeypatch.setattr(head_triton, "BLOCK", 16)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    storage = torch.full((2 + 5 + 2, 80), float("nan"), dtype=wide)
    storage[:2] = storage[-2:] = 7.0
    z = storage[2:7, :67]
    z.copy_(2 * torch.randn(5, 67))
    target = torch.tensor([0, 66, 16, 15, 40])
    expected = gradients_of_logits("reference", z.double(), target)
    dentropy = torch.full((5, 80), float("nan"), dtype=dtype)[:, :67]
    logp, entropy, dz = head_triton.logit_gradients(
        z, target, 1.0,
        softcap=None, scale=1.0, entropy=True, gradient=True, dtype=dtype, dentropy_MV=dentropy,
    )  # fmt: skip
    assert entropy is not None and dz is not None and dz.dtype == dtype
    assert dz.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    relative = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-11 + 1e-5}[dtype]
    smallest = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-6}[dtype]
    for mine, theirs in zip((logp, entropy, dz, dentropy), expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=relative, atol=smallest)
    assert (storage[:2] == 7).all() and (storage[-2:] == 7).all()


def test_strided_and_offset_arguments(head):
    h = torch.randn(6, 10, dtype=torch.float64)[::2, 1:9]
    w = torch.randn(9, 50, dtype=torch.float64).t()[3:40, 1:]
    target = torch.tensor([[5, 1], [36, 1], [0, 1]])[:, 0]
    expected = selected_logprobs_reference(h, w, target)
    mine = selected_logprobs_forward(h, w, target, 1.0, entropy=True, gradient=True, chunk=2)
    torch.testing.assert_close(mine[:2], expected, rtol=0, atol=1e-12)
    assert mine[2] is not None and mine[2].shape == h.shape


def test_no_rows(head):
    logp, entropy, u, u_entropy = selected_logprobs_forward(
        torch.zeros(0, 6), torch.zeros(9, 6), torch.zeros(0, dtype=torch.int64), 1.0,
        entropy=True, gradient=True, entropy_gradient=True,
    )  # fmt: skip
    assert entropy is not None and u is not None and u_entropy is not None
    assert logp.shape == (0,) and entropy.shape == (0,) and u.shape == (0, 6) and u_entropy.shape == (0, 6)


def test_a_target_outside_of_the_vocabulary_is_never_read(monkeypatch):
    from covey.kernels import head_triton

    for target in (-100, 9):
        logp, _, _ = head_triton.logit_gradients(
            torch.zeros(1, 9), torch.tensor([target]), 1.0,
            softcap=None, scale=1.0, entropy=False, gradient=False, dtype=torch.float32, dentropy_MV=None,
        )  # fmt: skip
        assert logp.isnan().all()


def test_half_precision_weights(head):
    """float16 tensors: log-probs are those of float32 logits, u is rounded once."""
    h, w = torch.randn(4, 16).half(), torch.randn(37, 16).half()
    target = torch.randint(37, (4,))
    x = h.double().requires_grad_()
    logp, entropy = selected_logprobs_reference(x, w.double(), target)
    du = torch.autograd.grad(logp.sum(), x, retain_graph=True)[0]
    dentropy = torch.autograd.grad(entropy.sum(), x)[0]
    mine = selected_logprobs_forward(
        h, w, target, 1.0, entropy=True, gradient=True, entropy_gradient=True, chunk=3
    )
    assert [t.dtype for t in mine if t is not None] == 2 * [torch.float32] + 2 * [torch.float16]
    for got, exact, tolerance in zip(
        mine, (logp, entropy, du, dentropy), (2e-6, 2e-6, 3e-3, 3e-3), strict=True
    ):
        assert got is not None
        torch.testing.assert_close(got.double(), exact.detach(), rtol=1e-6, atol=tolerance)


def test_rows_per_chunk():
    assert chunk_rows(8192, 128256) == 1024
    assert chunk_rows(8192, 151936) == 1024
    assert chunk_rows(8192, 262144) == 1024
    assert chunk_rows(8192, 32000) == 4096
    assert chunk_rows(1500, 151936) == 768  # two alike, not 1024 and 476
    assert chunk_rows(1100, 151936) == 640
    assert chunk_rows(100, 1000) == 128 and chunk_rows(0, 1000) == 0


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_values_and_memory_of_chunks(head, dtype, tolerance, monkeypatch):
    """B22: chunks of 1, 7, 256 and all rows give the same numbers, and nothing is ever larger than a chunk.

    The tolerance is relative to the largest number: a gradient is a sum of 500 terms, rounded in any order.
    """
    rows = 300
    if head == "triton":  # of which the interpreter does 50 in a second
        from covey.kernels import head_triton

        monkeypatch.setattr(head_triton, "BLOCK", 256)
        rows = 9
    h, w = torch.randn(rows, 8, dtype=dtype), torch.randn(500, 8, dtype=dtype)
    target = torch.randint(500, (rows,))
    g, g_entropy = torch.randn(2, rows, dtype=dtype)
    kept = []
    for chunk in (1, 7, 256, rows):
        with LargestTensor() as largest:
            logp, entropy, u, u_entropy = selected_logprobs_forward(
                h, w, target, 0.9, entropy=True, gradient=True, entropy_gradient=True, chunk=chunk
            )
            assert u is not None
            dh = selected_logprobs_backward(g, u, g_entropy, u_entropy)
        assert largest.bytes <= dtype.itemsize * max(512 * min(chunk, rows), w.numel())
        kept.append((logp, entropy, dh))
    for other in kept[1:]:
        for mine, first in zip(other, kept[0], strict=True):
            torch.testing.assert_close(mine, first, rtol=0, atol=tolerance * first.abs().max().item())


# On a GPU


def eager(h: Tensor, w: Tensor, target: Tensor, temperature: float, softcap: float | None):
    """(logp, entropy, d sum logp / dh, d sum entropy / dh) as plain torch gives them in the tensors' dtype."""
    x = h.clone().requires_grad_()
    logits = (x @ w.t()).to(torch.float64 if h.dtype == torch.float64 else torch.float32)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    table = (logits / temperature).log_softmax(1)
    logp = table.gather(1, target[:, None])[:, 0]
    entropy = -(table.exp() * table).sum(1)
    (du,) = torch.autograd.grad(logp.sum(), x, retain_graph=True)
    (dentropy,) = torch.autograd.grad(entropy.sum(), x)
    return logp.detach(), entropy.detach(), du, dentropy


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("vocab", [1000, 32003, 151936])
def test_gpu_error_is_within_that_of_eager_torch(vocab, softcap, dtype, monkeypatch):
    """Largest and root-mean-square error against float64, at most 1.5 times eager torch's; unbiased; repeatable."""
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    h = torch.randn(300, 256, device="cuda").to(dtype)
    w = (torch.randn(vocab, 256, device="cuda") / 4).to(dtype)
    target = torch.randint(vocab, (300,), device="cuda")
    target[::3] = (h[::3].float() @ w.float().t()).argmax(1)  # as in training, many targets lead
    exact = eager(h.double(), w.double(), target, 0.9, softcap)
    theirs = eager(h, w, target, 0.9, softcap)

    def run(chunk):
        return selected_logprobs_forward(
            h, w, target, 0.9,
            entropy=True, gradient=True, entropy_gradient=True, softcap=softcap, chunk=chunk,
        )  # fmt: skip

    mine = run(300)
    # float32 rounds to about 1e-6 whichever way it is done; below that the ratio says nothing.
    for got, plain, true in zip(mine, theirs, exact, strict=True):
        assert got is not None
        ours, eagers = got.double() - true, plain.double() - true
        size = true.abs().max().item()
        assert ours.abs().max() <= 1.5 * eagers.abs().max() + 2e-6 * size
        rms = ours.square().mean().sqrt()
        assert rms <= 1.5 * eagers.square().mean().sqrt() + 1e-6 * size
    for got, again, parts in zip(mine, run(300), run(77), strict=True):
        assert got is not None and again is not None and parts is not None
        assert torch.equal(got, again)
        coarse = 2e-2 if got.dtype == torch.bfloat16 else 2e-3 if got.dtype == torch.float16 else 1e-5
        torch.testing.assert_close(parts, got, rtol=coarse, atol=coarse * got.abs().max().item())


@pytest.mark.gpu
def test_gpu_in_place_gradients_have_no_race(monkeypatch):
    """Many rows at once, 20 runs, bf16 over float32: all bits equal and all as the torch path has them."""
    from covey.kernels import head_triton

    z = 4 * torch.randn(512, 50_016, device="cuda")
    target = torch.randint(50_000, (512,), device="cuda")
    _, _, expected, _ = logit_gradients_reference(
        z[:, :50_000].clone(), target, entropy=False, gradient=True, entropy_gradient=False
    )
    assert expected is not None
    first = None
    for _ in range(20):
        scratch = z.clone()
        _, _, dz = head_triton.logit_gradients(
            scratch[:, :50_000], target, 1.0,
            softcap=None, scale=1.0, entropy=False, gradient=True, dtype=torch.bfloat16, dentropy_MV=None,
        )  # fmt: skip
        assert dz is not None
        first = dz.clone() if first is None else first
        assert torch.equal(dz, first)
    assert first is not None
    torch.testing.assert_close(first.float(), expected, rtol=2**-8 + 1e-4, atol=1e-12)


@pytest.mark.gpu
def test_gpu_offsets_beyond_32_bits():
    """8200 rows of 262 144: the last rows begin past element 2^31."""
    from covey.kernels import head_triton

    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free GPU memory")
    rows, vocab = 8200, 262_144
    z = torch.zeros(rows, vocab, device="cuda")
    z[-1, 7] = 3.0
    target = torch.full((rows,), 7, device="cuda")
    logp, _, dz = head_triton.logit_gradients(
        z, target, 1.0,
        softcap=None, scale=1.0, entropy=False, gradient=True, dtype=torch.bfloat16, dentropy_MV=None,
    )  # fmt: skip
    assert dz is not None
    last = math.exp(3) / (math.exp(3) + vocab - 1)
    assert abs(logp[-1].item() - math.log(last)) < 1e-5 and abs(logp[-2].item() + math.log(vocab)) < 1e-5
    assert dz[-1, 7].item() == pytest.approx(1 - last, rel=1e-2)
    assert dz[-1, 8].item() == pytest.approx(-last / math.exp(3), rel=1e-2)
    assert dz[-2, -1].item() == pytest.approx(-1 / vocab, rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [256, 1024])
def test_gpu_memory_is_one_chunk_of_logits(chunk, monkeypatch):
    """B22: 4 x 1024 tokens, vocabulary 151 936. All logits in float32 are 2.318 GiB; 256 rows of them 148.4 MiB."""
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    h = torch.randn(4096, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(151_936, 64, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(151_936, (4096,), device="cuda")

    def run():
        return selected_logprobs_forward(h, w, target, 1.0, entropy=True, gradient=True, chunk=chunk)

    run()  # compiles, and cuBLAS takes its workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logp, _, u, _ = run()
    assert u is not None
    selected_logprobs_backward(torch.ones_like(logp), u)
    extra = torch.cuda.max_memory_allocated() - before
    logits = chunk * 151_936 * 4
    assert logits <= extra < logits + (8 << 20)
