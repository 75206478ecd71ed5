"""Fast kernels against the reference: decode W, then multiply."""

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import StateError
from dovetail.decoding.steps import Decoder
from dovetail.nn.linear import Linear, offers
from dovetail.ops import few_rows
from dovetail.ops.attend import using
from dovetail.ops.formats import kernels
from dovetail.ops.formats.kinds import NF4, Int4, Int8
from dovetail.weights.quantization.leaf import store_quantized
from dovetail.weights.quantization.recipe import candidates, leaf_at, put_leaf


def leaf_of(format, out: int = 96, inp: int = 128, bias: bool = True) -> Linear:
    generator = torch.Generator().manual_seed(0)
    leaf = Linear((out, inp), bias=bias)
    leaf.weight = torch.nn.Parameter(torch.randn(out, inp, generator=generator).bfloat16())
    leaf.bias = torch.nn.Parameter(torch.randn(out, generator=generator).bfloat16()) if bias else None
    return store_quantized(leaf, format, format.encode(leaf.weight.detach())).leaf


WHOLE_STEPS = [Int8(group=64), Int8(group=128), Int4(group=16, zero_point=True), Int4(group=8)]
PACKED = [Int8(), Int4(group=32), Int4(group=64), Int4(group=32, zero_point=True), Int4(group=128, zero_point=True)]


SIZES = [(96, 128), (90, 384), (7, 256)]  # outputs and inputs


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", kernels.KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_a_kernel_is_as_exact_as_the_reference(kernel, dtype, size):
    out, inp = size
    compared = 0
    for format in (*PACKED, *WHOLE_STEPS):
        if not kernel.takes(format, size, dtype):
            continue
        leaf = leaf_of(format, out, inp).to(dtype)
        operands = kernels.prepared(kernel, format, leaf.storage.stored(leaf), inp)
        for rows in (1, 2, 5, 16, 17, 40, 130):
            if kernel.rows is not None and rows > kernel.rows:
                continue
            x = torch.randn(rows, inp, generator=torch.Generator().manual_seed(1)).to(dtype)
            x[0, 3], x[-1, -1] = 300.0, 1e-3  # one large value, beside which the others count
            weight = format.decode(leaf.storage.stored(leaf), inp).double()
            exact = x.double() @ weight.T
            with torch.no_grad():
                fast = kernels.product(kernel, format, operands, x, out).double()
            slow = (x.float() @ format.decode(leaf.storage.stored(leaf), inp).to(dtype).float().T).to(dtype).double()
            error, scale = (fast - exact).abs(), exact.abs().amax(1, keepdim=True)
            bound = 4 * (slow - exact).abs().amax(1, keepdim=True) + 4 * torch.finfo(dtype).eps * scale
            rounded = kernel.rounding(dtype) * x.double().abs().amax(1, keepdim=True) * weight.abs().sum(1)
            assert (error <= bound + rounded).all(), (format, rows)
            assert (error < (0.02 if dtype == torch.bfloat16 else 1e-5) * scale).all()
            compared += 1
    if isinstance(kernel, kernels.FewRows) and few_rows.ready():
        assert compared >= 40, "this kernel takes every format, dtype and number of rows"


def test_a_leaf_uses_a_kernel_unless_the_reference_is_asked_for():
    leaf, x = leaf_of(Int8()), torch.randn(3, 128).bfloat16()
    with torch.no_grad():
        assert kernels.offered(Int8(), leaf.storage.shape, x) is not None
        fast = leaf(x)
        with using("reference"):
            assert kernels.offered(Int8(), leaf.storage.shape, x) is None
            assert (leaf(x) - fast).abs().max() < 0.02 * fast.abs().max()


@pytest.mark.skipif(not few_rows.ready(), reason=f"the kernel in C++ is not used here: {few_rows.state()}")
def test_what_is_not_a_number_stays_so():
    x = torch.ones(3, 128, dtype=torch.bfloat16)
    x[1, 5] = float("nan")
    x[2, 7] = float("inf")
    for format in (Int8(), Int4(group=32)):
        with torch.no_grad():
            y = leaf_of(format)(x)
        assert y.isfinite().all(1).tolist() == [True, False, False]
    y = torch.ops.dovetail.few_rows_linear(x, torch.ones(4, 128, dtype=torch.bfloat16), None, None, 16)
    assert y.isfinite().all(1).tolist() == [True, False, False]


@pytest.mark.skipif(not few_rows.ready(), reason=f"the kernel in C++ is not used here: {few_rows.state()}")
@pytest.mark.parametrize("size", [*SIZES, (16, 44), (33, 70)], ids=str)
def test_the_kernel_multiplies_by_bfloat16(size):
    out, inp = size
    w = torch.randn(out, inp, generator=torch.Generator().manual_seed(0)).bfloat16()
    for rows in (1, 3, 16, 50, 100):
        x = torch.randn(rows, inp, generator=torch.Generator().manual_seed(1)).bfloat16()
        exact = x.double() @ w.double().T
        y = torch.ops.dovetail.few_rows_linear(x, w, None, None, 16).double()
        assert (y - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.skipif(not few_rows.ready(), reason=f"the kernel in C++ is not used here: {few_rows.state()}")
def test_operands_that_do_not_fit_are_refused():
    op, x = torch.ops.dovetail.few_rows_linear, torch.ones(2, 128, dtype=torch.bfloat16)
    codes, scale = torch.ones(4, 128, dtype=torch.int8), torch.ones(4, 1, dtype=torch.bfloat16)
    zero = torch.ones(4, 2, dtype=torch.uint8)
    for arguments, message in (
        ((x, codes[:, :64].contiguous(), scale, None, 8), "numbers of inputs differ"),
        ((x, codes, None, None, 8), "scale: is missing"),
        ((x, codes, scale[:2], None, 8), "scale"),
        ((x, codes, scale.float(), None, 8), "scale: bfloat16"),
        ((x, codes, torch.ones(4, 3, dtype=torch.bfloat16), None, 8), "group"),
        ((x, codes, scale, zero, 8), "zero"),
        ((x.double(), codes, scale, None, 8), "x: bfloat16"),
        ((x.float(), torch.ones(4, 128, dtype=torch.bfloat16), None, None, 16), "x: bfloat16"),
        ((x.T, codes, scale, None, 8), "contiguous"),
        ((x, codes, scale, None, 3), "bits"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_a_product_of_integers_is_the_reference(dtype, rows):
    """Integers are summed exactly, so that the two differ by the rounding of the reference's sums alone."""
    format = Int8(dynamic=True)
    leaf = leaf_of(format).to(dtype)
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0] = 0 if rows > 1 else x[0]  # a token without a largest value
    largest = x.double().abs().amax(-1, keepdim=True)
    step = torch.where(largest > 0, largest, 1.0) / 127
    exact = (x.double() / step).round() * step @ format.decode(leaf.storage.stored(leaf), 128).double().T + leaf.bias.double()
    with torch.no_grad():
        assert isinstance(kernels.offered(format, leaf.storage.shape, x), kernels.Integers)
        fast = leaf(x).double()
        with using("reference"):
            slow = leaf(x).double()
    eps = torch.finfo(dtype).eps
    assert (fast - exact).abs().max() <= 4 * eps * exact.abs().max()
    assert (slow - exact).abs().max() <= 64 * eps * exact.abs().max()
    plain = x.double() @ format.decode(leaf.storage.stored(leaf), 128).double().T + leaf.bias.double()
    assert (plain - exact).abs().max() > 1e-3, "activations are rounded"


def test_the_gradient_passes_through_rounded_activations():
    leaf = leaf_of(Int8(dynamic=True)).float()
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1), requires_grad=True)
    leaf(x).sum().backward()
    assert torch.allclose(x.grad, leaf.dense().sum(0).expand(3, -1), rtol=1e-5, atol=1e-5)
    assert not offers("matrix", None, leaf), "x Wᵀ is no product with a matrix"
    assert offers("grouped", None, leaf)


def test_kernels_offer_themselves_only_where_they_run(monkeypatch):
    x = torch.zeros(2, 128, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(few_rows, "_state", "the processor has no AMX")
        assert kernels.offered(Int4(group=16), (96, 128), x) is None
        assert kernels.offered(Int8(group=32), (96, 128), x) is None
        assert kernels.offered(Int8(), (96, 128), x.float()) is None
        assert kernels.offered(Int8(), (96, 128), torch.zeros(17, 128, dtype=torch.bfloat16)) is None
        assert isinstance(kernels.offered(Int8(), (96, 128), x), kernels.TorchPacked)
    assert kernels.offered(NF4(), (96, 128), x) is None
    assert kernels.offered(Int8(group=32), (96, 128), x) is None
    assert kernels.offered(Int4(group=44), (96, 44), x[:, :44]) is None
    assert kernels.offered(Int8(), (96, 128), x.clone().requires_grad_()) is None
    assert kernels.offered(Int8(), (96, 128), x.double()) is None


@pytest.mark.skipif(not few_rows.ready(), reason=f"the kernel in C++ is not used here: {few_rows.state()}")
@pytest.mark.parametrize("format", [Int8(), Int4(group=32, zero_point=True)], ids=str)
def test_a_step_of_qlora_multiplies_by_the_kernel_and_has_the_gradient_of_the_decoded_matrix(format, monkeypatch):
    leaf = leaf_of(format)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    seen, product = [], kernels.product
    monkeypatch.setattr(kernels, "product", lambda kernel, *rest: seen.append(kernel) or product(kernel, *rest))
    leaf(x).sum().backward()
    assert [type(kernel) for kernel in seen] == [kernels.FewRows]
    assert torch.allclose(x.grad.float(), leaf.dense().float().sum(0).expand(3, -1), rtol=2e-2, atol=2e-1)


def test_native_code_is_loaded_from_a_directory_of_this_user_only(monkeypatch, tmp_path):
    if few_rows.state():
        pytest.skip(few_rows.state())
    compiler = few_rows.shutil.which("g++")
    monkeypatch.setenv("XDG_CACHE_HOME", "here")  # a relative path would be one of the working directory
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert few_rows._directory() == tmp_path / "home/.cache/dovetail"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert few_rows._directory().stat().st_mode & 0o777 == 0o700
    (tmp_path / "dovetail").chmod(0o777)
    with pytest.raises(PermissionError, match="chmod 700"):
        few_rows._directory()
    (tmp_path / "dovetail").chmod(0o700)
    monkeypatch.setattr(few_rows, "SOURCE", tmp_path / "broken.cpp")
    few_rows.SOURCE.write_text("int f() { return nothing; }")
    with pytest.raises(RuntimeError, match=r"broken\.cpp"):
        few_rows._compiled(compiler)
    assert not list((tmp_path / "dovetail").iterdir()), "a compilation that failed leaves nothing"
    few_rows.SOURCE.write_text('extern "C" int f() { return 7; }')
    path = few_rows._compiled(compiler)
    path.write_bytes(b"")
    path.chmod(0o777)
    assert few_rows._compiled(compiler) == path
    assert path.stat().st_size, "what others could have written is compiled again"


def test_new_codes_are_used_after_they_are_put():
    leaf, x = leaf_of(Int8(), bias=False), torch.ones(1, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        before = leaf(x)
        leaf.storage.put(leaf, "weight_scale", leaf.storage.stored(leaf)["weight_scale"] * 2)
        assert torch.equal(leaf(x), before * 2)


@pytest.mark.parametrize("format", PACKED, ids=str)
def test_new_codes_are_used_after_they_are_loaded(format):
    leaf, other, x = leaf_of(format), leaf_of(format), torch.ones(1, 128, dtype=torch.bfloat16)
    for name, tensor in format.encode(torch.randn(96, 128, generator=torch.Generator().manual_seed(2))).items():
        other.storage.put(other, name, tensor)
    with torch.no_grad():
        assert not torch.equal(leaf(x), other(x))
        leaf.load_state_dict(other.state_dict())
        assert torch.equal(leaf(x), other(x))


@pytest.mark.slow
@pytest.mark.timeout(900)  # two graphs with all choices of kernels
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own freezing
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("format", [Int8(), Int4(group=32, zero_point=True)], ids=str)
def test_a_compiled_step_reads_the_codes_and_never_decodes_them(format, monkeypatch):
    spec = "width: 64\nvocab: 62\nlayers: [{mixer: {heads: 4, kv_heads: 2, head: 16}, ffn: {hidden: 96}}]\n"
    model = dt.build(spec, dtype="bfloat16")
    for path in candidates(model.spec):
        put_leaf(model, model.spec, path, format, format.encode(leaf_at(model, path).weight.detach()))
    tokens = torch.randint(0, 62, (2, 5), generator=torch.Generator().manual_seed(0))
    want = run(model, tokens, compiled=False)

    def decoded(*_):
        raise AssertionError("W is decoded")

    monkeypatch.setattr(type(format), "value", decoded)
    got = run(model, tokens, compiled=True)
    assert (got - want).abs().max() < 0.02 * want.abs().max()  # sums of bfloat16 in another order
    decoder = Decoder(model, dt.Pool(model.spec, 2, 16, dtype=torch.bfloat16), compiled=True)
    model.load_state_dict(model.state_dict())
    with torch.no_grad(), pytest.raises(StateError, match="have changed"):
        decoder.step(tokens, [0, 1])


@torch.no_grad()
def run(model, tokens, compiled: bool) -> torch.Tensor:
    decoder = Decoder(model, dt.Pool(model.spec, 2, 16, dtype=torch.bfloat16), compiled=compiled)
    steps = [decoder.step(tokens, [0, 1])]
    return torch.stack([*steps, *(decoder.step(torch.full((2, 1), i), [0, 1]) for i in range(4))]).float()


@pytest.mark.parametrize("cache", ["int8", "fp8", "int4"])
def test_a_cache_in_fewer_bits_reads_back_within_half_a_step(cache):
    model = dt.build(
        "width: 32\nvocab: 62\nlayers: [{repeat: 2, mixer: {heads: 4, kv_heads: 2, head: 8}, ffn: {hidden: 48}}]\n"
    )
    tokens = torch.randint(0, 62, (2, 12), generator=torch.Generator().manual_seed(0))
    outputs, sizes, entries = {}, {}, {}
    for kind in (None, cache):
        for layout in ("contiguous", "paged"):
            pool = dt.Pool(model.spec, 2, 16, layout=layout, cache=kind)
            pieces = []
            with torch.no_grad():
                for part in (tokens[:, :7], tokens[:, 7:8], tokens[:, 8:]):
                    step = pool.step([0, 1], [part.shape[1]] * 2)
                    pieces.append(model(part, dt.Ctx(layout=step.layout, views=step.views)))
                    entries[kind, layout] = step.views[0]["mixer"].stored().entries()[0]
            outputs[kind, layout], sizes[kind, layout] = torch.cat(pieces, 1), pool.bytes()
    assert torch.equal(outputs[cache, "contiguous"], outputs[cache, "paged"])
    exact, kept = entries[None, "contiguous"], entries[cache, "contiguous"]
    for one, other in zip(exact, kept, strict=True):  # of the first layer, whose inputs are the same
        step = {
            "int8": one.abs().amax(-1) / 127,
            "fp8": one.abs().amax(-1) / 8,
            "int4": (one.amax(-1).clamp(min=0) - one.amin(-1).clamp(max=0)) / 15,
        }
        assert ((one - other).abs() <= 0.51 * step[cache][..., None] * 1.01).all()
        assert not torch.equal(one, other)
    assert sizes[cache, "contiguous"] < 0.6 * sizes[None, "contiguous"]
    gap = (outputs[cache, "contiguous"] - outputs[None, "contiguous"]).abs().max() / outputs[None, "contiguous"].abs().max()
    assert gap < {"int8": 0.02, "fp8": 0.08, "int4": 0.3}[cache]


@pytest.mark.parametrize("cache", ["int8", "int4"])
def test_roll_back_and_fork_of_a_cache_in_fewer_bits(cache):
    mixer = "{heads: 4, kv_heads: 2, head: 8, mask: {kind: window, size: 4}}"
    model = dt.build(f"width: 32\nvocab: 62\nlayers: [{{mixer: {mixer}, ffn: {{hidden: 48}}}}]\n")
    tokens = torch.randint(0, 62, (1, 12), generator=torch.Generator().manual_seed(0))

    def feed(pool: dt.Pool, row: int, begin: int, end: int) -> torch.Tensor:
        step = pool.step([row], [end - begin])
        with torch.no_grad():
            return model(tokens[:, begin:end], dt.Ctx(layout=step.layout, views=step.views))

    for layout in ("contiguous", "paged", "ring"):
        pool = dt.Pool(model.spec, 2, 16, layout=layout, cache=cache)
        feed(pool, 0, 0, 6)
        pool.mark(0)
        pool.fork(0, 1)
        want = feed(pool, 0, 6, 9)
        reached = pool.rollback(0, 6)
        assert torch.allclose(feed(pool, 0, reached, 9)[:, -3:], want, atol=1e-6)
        assert torch.allclose(feed(pool, 1, 6, 9), want, atol=1e-6)
