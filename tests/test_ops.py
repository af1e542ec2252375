"""The operators themselves: each combination of their flags into poisoned, fenced outputs, and torch's opcheck."""

import itertools
from contextlib import contextmanager

import oracle
import pytest
import torch
from conftest import forced_settings, load_kernel, load_part

FENCE = 64  # elements of NaN before and behind an output, which keep it 16-byte aligned
DOT_COLUMNS = 128


@contextmanager
def fenced(*shape, dtype, device, fill=float("nan")):
    """An output full of `fill`, between NaN that must still be there afterwards."""
    size = torch.Size(shape).numel()
    buffer = torch.full((size + 2 * FENCE,), float("nan"), dtype=dtype, device=device)
    out = buffer[FENCE : FENCE + size].view(shape)
    out.fill_(fill)
    yield out
    assert buffer[:FENCE].isnan().all() and buffer[FENCE + size :].isnan().all(), "written outside the output"


class Rows:
    """Operands and index tensors for T tokens with k experts each, some skipped; everything in expert order too."""

    def __init__(self, T, K, N, E, k, dtype, device, distribution="skipped"):
        self.E, self.k, self.T, self.S, self.dtype = E, k, T, T * k, dtype
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.x, self.W, ids, weights = oracle.make(T, K, N, E, k, dtype, device, distribution)
        self.dy = oracle.make(T, N, 1, 1, 1, dtype, device, seed=1).x
        self.bias = oracle.make(E, N, 1, 1, 1, dtype, device, seed=2).x
        self.ids, self.weights = ids, weights.flatten()
        self.order, self.expert = oracle.expert_order(ids, E)
        self.row_assignment = self.order.int()
        self.offs = torch.bincount(self.expert, minlength=E + 1)[:E].cumsum(0).int()
        self.token = self.order // max(k, 1)

    def product(self, bias, weights):
        """Rows of z and of weight * z, in float64."""
        z = oracle.through_experts(self.x[self.token], self.W, self.expert, self.bias if bias else None)
        return z, z * self.weights[self.order].double()[:, None] if weights else z


def dots(z, other):
    return (z * other.double()).sum(1)


def assert_dots(dot, rows, want):
    """How many columns are in each of the partial sums is the kernel's own."""
    got = dot.double().sum(0)[rows.order]
    oracle.assert_close(got[None], want[None], oracle.tolerance(rows.dtype, rows.wide))


def tolerance(rows, out):
    return oracle.tolerance(rows.dtype, out.dtype)


FLAGS = list(itertools.product([False, True], repeat=5))


@pytest.mark.parametrize("out", [None, torch.float32, torch.bfloat16], ids=str)
def test_gemm(ops, setting, out):
    """Gather, scatter, bias, weight and dot in every combination; every place of the output is written."""
    rows = Rows(40, 72, 200, 5, 3, setting.dtype, setting.device)
    if setting.dtype == torch.float64 and out is not None:
        pytest.skip("float64 operands have float64 results")
    for gather, scatter, bias, weighted, dotted in FLAGS:
        z, want = rows.product(bias, weighted)
        a = rows.x if gather else rows.x[rows.token]
        dot_with = rows.dy if scatter else rows.dy[rows.token]
        with (
            fenced(rows.S, 200, dtype=out or rows.dtype, device=setting.device) as result,
            fenced(-(-200 // DOT_COLUMNS), rows.S, dtype=rows.wide, device=setting.device, fill=0) as dot,
        ):
            ops.gemm(
                a, rows.W, rows.offs, rows.row_assignment, rows.k, gather, scatter,
                rows.bias if bias else None, rows.weights if weighted else None,
                dot_with if dotted else None, dot if dotted else None, result,
            )  # fmt: skip
            got = result[rows.order] if scatter else result
            oracle.assert_close(got, want, tolerance(rows, result), rows.expert)
            if dotted:
                want = dots(z, rows.dy[rows.token])
                assert_dots(dot, rows, want)
            else:
                assert not dot.any()


def test_gemm_without_a_result(ops, setting):
    """The row dots alone."""
    rows = Rows(40, 72, 200, 5, 3, setting.dtype, setting.device)
    for gather, scatter, bias, weighted in itertools.product([False, True], repeat=4):
        want = dots(rows.product(bias, weighted)[0], rows.dy[rows.token])
        with fenced(-(-200 // DOT_COLUMNS), rows.S, dtype=rows.wide, device=setting.device, fill=0) as dot:
            ops.gemm(
                rows.x if gather else rows.x[rows.token], rows.W, rows.offs, rows.row_assignment, rows.k, gather,
                scatter, rows.bias if bias else None, rows.weights if weighted else None,
                rows.dy if scatter else rows.dy[rows.token], dot, None,
            )  # fmt: skip
            assert_dots(dot, rows, want)


def test_gemm_of_rows_without_a_map(ops, setting):
    """No row map: rows are their own assignments, as in grouped_gemm and its gradient."""
    rows = Rows(90, 72, 136, 5, 1, setting.dtype, setting.device)
    with fenced(rows.S, 136, dtype=rows.dtype, device=setting.device) as result:
        ops.gemm(rows.x[rows.token], rows.W, rows.offs, None, 1, False, False, None, None, None, None, result)
        oracle.assert_close(result, rows.product(False, False)[0], tolerance(rows, result), rows.expert)


@pytest.mark.parametrize("columns", [1, 8, 200])
def test_gemm_into_a_transposed_result(ops, setting, columns):
    """Its columns lie one behind the other, with a gap; rows of no expert are zeros there too."""
    for out in dict.fromkeys((setting.dtype, torch.promote_types(setting.dtype, torch.float32))):
        rows = Rows(271, 72, columns, 5, 1, setting.dtype, setting.device)
        x = rows.x[rows.token]
        with fenced(columns, rows.S + 3, dtype=out, device=setting.device) as result:
            ops.gemm(x, rows.W, rows.offs, None, 1, False, False, None, None, None, None, result[:, : rows.S].t())
            oracle.assert_close(
                result[:, : rows.S].t(), rows.product(False, False)[0], tolerance(rows, result), rows.expert
            )
            assert result[:, rows.S :].isnan().all()


def test_gemm_combine(ops, setting):
    """Whatever was there before."""
    rows = Rows(40, 72, 200, 5, 3, setting.dtype, setting.device)
    for gather, bias, weighted, dotted in itertools.product([False, True], repeat=4):
        z, scaled = rows.product(bias, weighted)
        want = torch.zeros(rows.T, 200, dtype=torch.float64, device=setting.device).index_add_(0, rows.token, scaled)
        with (
            fenced(rows.T, 200, dtype=rows.wide, device=setting.device) as result,
            fenced(-(-200 // DOT_COLUMNS), rows.S, dtype=rows.wide, device=setting.device, fill=0) as dot,
        ):
            ops.gemm_combine(
                rows.x if gather else rows.x[rows.token], rows.W, rows.offs, rows.row_assignment, rows.k, gather,
                rows.bias if bias else None, rows.weights if weighted else None,
                rows.dy if dotted else None, dot if dotted else None, result,
            )  # fmt: skip
            oracle.assert_close(result, want, tolerance(rows, result))
            if dotted:
                want = dots(z, rows.dy[rows.token])
                assert_dots(dot, rows, want)
            else:
                assert not dot.any()


def test_row_dot_of_infinities(ops, setting):
    """An infinite value makes an infinite dot, and no NaN of what lies beside the matrix."""
    rows = Rows(40, 72, 200, 5, 3, setting.dtype, setting.device, "uniform")
    rows.x[7, 3] = float("inf")
    W, other = rows.W.abs().clamp(min=0.1), rows.dy.abs().clamp(min=0.1)
    dot = torch.zeros(-(-200 // DOT_COLUMNS), rows.S, dtype=rows.wide, device=setting.device)
    ops.gemm(rows.x, W, rows.offs, rows.row_assignment, rows.k, True, True, None, None, other, dot, None)
    infinite = torch.arange(rows.S, device=setting.device) // rows.k == 7
    assert (dot.sum(0)[infinite] == float("inf")).all() and dot.sum(0)[~infinite].isfinite().all()


def form_arguments(form):
    """An `oracle.Form` as the ops are told of it."""
    activation = load_kernel().Activation(form.kind, form.limit, form.alpha)
    return load_part("activation").Form.of(activation, form.gated, form.interleaved)


@pytest.mark.parametrize("form", oracle.FORMS, ids=str)
def test_gemm_activation(ops, setting, form):
    """Of the product before it is rounded, which is kept beside it or not."""
    for columns, gather, bias, kept in itertools.product((24, 200), *[[False, True]] * 3):
        rows = Rows(40, 72, columns, 5, 3, setting.dtype, setting.device)
        z, _ = rows.product(bias, False)
        width = columns // 2 if form.gated else columns
        for out in dict.fromkeys((rows.dtype, rows.wide)):
            with (
                fenced(rows.S, columns, dtype=rows.dtype, device=setting.device) as pre,
                fenced(rows.S, width, dtype=out, device=setting.device) as result,
            ):
                ops.gemm_activation(
                    rows.x if gather else rows.x[rows.token], rows.W, rows.offs, rows.row_assignment, rows.k, gather,
                    rows.bias if bias else None, *form_arguments(form), pre if kept else None, result,
                )  # fmt: skip
                oracle.assert_close(result, form(z), tolerance(rows, result), rows.expert)
                if kept:
                    oracle.assert_close(pre, z, tolerance(rows, pre), rows.expert)
                else:
                    assert pre.isnan().all()


@pytest.mark.parametrize("id_dtype", [torch.int8, torch.int64], ids=str)
@pytest.mark.parametrize("T, k, E", [(1, 1, 5), (9, 5, 300), (42, 3, 5), (43, 3, 5), (64, 2, 2)], ids=str)
def test_mlp(ops, setting, T, k, E, id_dtype):
    """Up to 128 assignments, which narrow tiles sort by themselves, and more; each way to add the rows of a token."""
    if id_dtype is torch.int8 and E > 127:
        pytest.skip("such ids are not of int8")
    H, inner, form, dtype, device = 72, 104, oracle.Form(), setting.dtype, setting.device
    up, down = Rows(T, H, 2 * inner, E, k, dtype, device), Rows(T, inner, H, E, k, dtype, device)
    ids = torch.where(oracle.is_live(up.ids, E), up.ids, -1).to(id_dtype)
    z, _ = up.product(True, False)
    h = oracle.through_experts(form(z).to(dtype), down.W, up.expert, down.bias) * up.weights[up.order].double()[:, None]
    want = torch.zeros(T, H, dtype=torch.float64, device=device).index_add_(0, up.token, h)
    read = up.x, up.W, down.W, ids, up.weights, up.bias, down.bias, *form_arguments(form)
    for out, by_rows in ((dtype, False), (up.wide, False), (dtype, True)):
        with (
            fenced(up.S, inner, dtype=dtype, device=device) as between,
            fenced(up.S, H, dtype=up.wide, device=device) as rows,
            fenced(T, H, dtype=up.wide, device=device) as sums,
            fenced(T, H, dtype=out, device=device) as result,
        ):
            sums = None if by_rows or out == up.wide else sums
            ops.mlp(*read, between, rows if by_rows else None, sums, result)
            oracle.assert_close(result, want, 2 * tolerance(up, between))  # the activation is rounded, then the result


@pytest.mark.parametrize("form", oracle.FORMS, ids=str)
def test_gemm_activation_grad(ops, setting, form):
    """Each of the three results alone and with the others; each is rounded once."""
    for N, gather in itertools.product((12, 200), (False, True)):
        rows = Rows(40, 72, N, 5, 3, setting.dtype, setting.device)
        columns = 2 * N if form.gated else N
        pre = oracle.make(rows.S, columns, 1, 1, 1, setting.dtype, setting.device, seed=3).x
        d, weighted_d = rows.product(False, True)
        (want_pre,) = oracle.gradients(form, [pre], weighted_d)
        h = form(pre.double())
        live = (rows.expert < rows.E)[:, None]
        want_weighted = torch.where(live, rows.weights[rows.order].double()[:, None] * h, 0.0)
        pre = pre.where(live, float("nan"))
        for has_dot, has_pre, has_weighted in itertools.product([False, True], repeat=3):
            with (
                fenced(-(-N // DOT_COLUMNS), rows.S, dtype=rows.wide, device=setting.device, fill=0) as dot,
                fenced(rows.S, columns, dtype=rows.dtype, device=setting.device) as d_pre,
                fenced(rows.S, N, dtype=rows.dtype, device=setting.device) as weighted,
            ):
                ops.gemm_activation_grad(
                    rows.x if gather else rows.x[rows.token], rows.W, rows.offs, rows.row_assignment, rows.k, gather,
                    rows.weights, *form_arguments(form), pre, dot if has_dot else None, d_pre if has_pre else None,
                    weighted if has_weighted else None,
                )  # fmt: skip
                if has_dot:
                    assert_dots(dot, rows, dots(d, h))
                if has_pre:
                    oracle.assert_close(d_pre, want_pre, tolerance(rows, d_pre), rows.expert)
                if has_weighted:
                    oracle.assert_close(weighted, want_weighted, tolerance(rows, weighted), rows.expert)
                assert (has_dot or not dot.any()) and (has_pre or d_pre.isnan().all())
                assert has_weighted or weighted.isnan().all()


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("wide", [False, True], ids=["own dtype", "wide"])
def test_weight_grad(ops, setting, wide, transposed):
    """Each operand gathered or not, scaled or not, stored or added to what is there, by rows or by columns."""
    rows = Rows(90, 72, 136, 5, 2, setting.dtype, setting.device)
    for gather_x, gather_dy, weighted, accumulate in itertools.product([False, True], repeat=4):
        weights = rows.weights[rows.order] if weighted else torch.ones_like(rows.weights)
        x, dy = rows.x[rows.token], rows.dy[rows.token]
        want, slack = oracle.weight_gradient(x, dy, weights, rows.expert, rows.E, transposed)
        start = 2.0 if accumulate else float("nan")
        dtype = rows.wide if wide else rows.dtype
        shape = (rows.E, 72, 136) if transposed else (rows.E, 136, 72)
        with fenced(*shape, dtype=dtype, device=setting.device, fill=start) as result:
            out = result.transpose(1, 2) if transposed else result
            ops.weight_grad(
                rows.x if gather_x else rows.x[rows.token],
                rows.dy if gather_dy else rows.dy[rows.token],
                rows.offs, rows.row_assignment, rows.k, gather_x, gather_dy,
                rows.weights if weighted else None, accumulate, out,
            )  # fmt: skip
            oracle.assert_close(out, want + start if accumulate else want, tolerance(rows, out), slack=slack)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("where", ["dy", "weight"])
def test_weight_grad_of_infinities(ops, setting, where, transposed):
    """An infinity stays one, of the right sign, and makes no NaN."""
    rows = Rows(90, 72, 136, 5, 2, setting.dtype, setting.device)
    live = rows.order[rows.expert < 5][7]
    if where == "dy":
        rows.dy[live // 2, 3] = float("-inf")
    else:
        rows.weights[live] = float("inf")
    scaled = rows.dy[rows.token].double() * rows.weights[rows.order].double()[:, None]
    want = torch.stack([scaled[rows.expert == e].T @ rows.x[rows.token].double()[rows.expert == e] for e in range(5)])
    out = torch.empty((5, 72, 136) if transposed else (5, 136, 72), dtype=rows.wide, device=setting.device)
    result = out.transpose(1, 2) if transposed else out
    ops.weight_grad(rows.x, rows.dy, rows.offs, rows.row_assignment, 2, True, True, rows.weights, False, result)
    assert want.isinf().any()
    assert torch.equal(result.where(want.isinf(), 0).double(), want.where(want.isinf(), 0))
    assert result.isfinite().logical_or(want.isinf()).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_group_ends(ops, device, dtype):
    """Running sums; what int32 cannot hold does not come back as something that it can."""
    largest = min(torch.iinfo(dtype).max, 2**40)
    for sizes in ([], [3], [0, 5, 0, 0, 2], [7, -3, -9, 4], [largest] * 3 + [1], [1] * 1024 + [0, 4], [2, 0, 1] * 1700):
        if dtype == torch.uint8 and any(size < 0 for size in sizes):
            continue
        sizes = torch.tensor(sizes, dtype=dtype, device=device)
        offs = torch.full((len(sizes) + 2,), -77, dtype=torch.int32, device=device)
        ops.group_ends(sizes, offs[1:-1])
        want = [max(-1, min(end, 2**31 - 1)) for end in itertools.accumulate(sizes.tolist())]
        assert offs.tolist() == [-77, *want, -77]


@pytest.mark.parametrize("k", [1, 2, 3, 8, 33])
def test_sum_rows(ops, device, k):
    """In slot order, in float32, rounded once: so to the last bit."""
    for T, N in ((0, 8), (1, 1), (37, 130), (300, 7)):
        rows = torch.randn(T * k, N, device=device)
        want = torch.zeros(T, N, device=device)
        for slot in rows.view(T, k, N).unbind(1):
            want = want + slot
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with fenced(T, N, dtype=dtype, device=device) as result:
                ops.sum_rows(rows, k, result)
                assert torch.equal(result, want.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "offs",
    [
        (50, -3, 20, 90, 200),
        (-1, -(2**31), 0, 10, 2**31 - 1),
        (2**31 - 1, 0, 0, 0, 0),
        (1000, 2000, 3000, 4000, 5000),
        (-5, -4, -3, -2, -1),
        # Those that fall between what a block looks at together.
        (*range(0, 256, 2), -7, *range(100), *[2**31 - 1] * 2, *range(100, 31, -1)),
        (*range(128), *[3] * 128, *range(110, 238), *range(-64, 64)),
    ],
    ids=lambda offs: f"{len(offs)} from {offs[0]}",
)
@pytest.mark.parametrize("tokens", [10, 36, 60])  # few rows an expert take other tiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wrong_offsets_become_a_running_maximum(ops, dtype, tokens, offs):
    """Clamped to the rows: nothing outside an output is written, and what is written follows the clamped offsets."""
    E = len(offs)
    rows = Rows(tokens, 72, 136, E, 2, dtype, "cuda", "uniform")
    clamped = torch.tensor(offs).cummax(0).values.clamp(0, rows.S)
    sizes = clamped.diff(prepend=clamped.new_zeros(1))
    rows.expert = oracle.row_experts(sizes, rows.S).cuda()
    rows.offs = torch.tensor(offs, dtype=torch.int32, device="cuda")
    _, want = rows.product(False, True)
    with fenced(rows.S, 136, dtype=dtype, device="cuda") as result:
        ops.gemm(
            rows.x, rows.W, rows.offs, rows.row_assignment, 2, True, False, None, rows.weights, None, None, result
        )  # fmt: skip
        oracle.assert_close(result, want, tolerance(rows, result), rows.expert)
    with fenced(rows.T, 136, dtype=torch.float32, device="cuda") as result:
        ops.gemm_combine(
            rows.x, rows.W, rows.offs, rows.row_assignment, 2, True, None, rows.weights, None, None, result
        )  # fmt: skip
        summed = torch.zeros_like(want[: rows.T]).index_add_(0, rows.token, want)
        oracle.assert_close(result, summed, tolerance(rows, result))
    with fenced(E, 136, 72, dtype=dtype, device="cuda") as result:
        ops.weight_grad(rows.x, rows.dy, rows.offs, rows.row_assignment, 2, True, True, None, False, result)
        want = torch.zeros(E, 136, 72, dtype=torch.float64, device="cuda")
        for e in range(E):
            mine = rows.token[rows.expert == e]
            want[e] = rows.dy[mine].double().T @ rows.x[mine].double()
        oracle.assert_close(result, want, tolerance(rows, result))


@pytest.mark.gpu(memory=30)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sizes_up_to_2_31(ops, hooks, dtype):
    """Counting past the last row or column, as loops by tile do, must not wrap where there are as many as there can be.

    All rows are one row of ones, so that a group's weight gradient is its number of rows.
    """
    most, E = 2**31 - 1, 1024
    ones = torch.ones(1, 8, device="cuda", dtype=dtype).expand(most, 8)
    offs = torch.arange(1, E + 1, device="cuda").mul(2**21).clamp(max=most).int()
    names = [s.config for s in forced_settings() if s.dtype == dtype and s.config.startswith("weight_grad")]
    for name in [(), *((name,) for name in names)]:
        with hooks.forced(*name), fenced(E, 8, 8, dtype=torch.float32, device="cuda") as result:
            ops.weight_grad(ones, ones, offs, None, 1, False, False, None, False, result)
            assert (result[:-1] == 2**21).all() and (result[-1] == 2**21 - 1).all(), name
    offs[:] = most  # all in the first group
    W = torch.ones(E, 1, 8, device="cuda", dtype=dtype)
    with fenced(most, 1, dtype=dtype, device="cuda") as result:
        ops.gemm(ones, W, offs, None, 1, False, False, None, None, None, None, result)
        assert result.min() == result.max() == 8
    W = torch.randn(1, most, 1, device="cuda", dtype=dtype)
    offs = torch.ones(1, device="cuda", dtype=torch.int32)
    with fenced(1, most, dtype=dtype, device="cuda") as result:
        ops.gemm(ones[:1, :1], W, offs, None, 1, False, False, None, None, None, None, result)
        assert torch.equal(result[0], W[0, :, 0])


def samples(name, device):
    """Arguments for opcheck: plain, strided, empty, and with every optional argument."""
    for T, dtype, distribution in (
        (9, torch.float32, "uniform"),
        (9, torch.bfloat16, "skipped"),
        (9, torch.float32, "all_skipped"),
        (0, torch.float32, "uniform"),
    ):
        rows = Rows(T, 16, 24, 3, 2, dtype, device, distribution)
        strided = torch.cat([rows.x, rows.x], 1)[:, :16].requires_grad_()
        W = rows.W.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        index = rows.offs, rows.row_assignment, 2

        def new(*shape, dtype=torch.float32):
            return torch.zeros(shape, dtype=dtype, device=device)

        match name:
            case "gemm":
                yield rows.x, rows.W, *index, True, False, None, None, None, None, new(rows.S, 24, dtype=dtype)
                yield (
                    strided, W, *index, True, True, rows.bias, rows.weights, rows.dy, new(1, rows.S), new(rows.S, 24)
                )  # fmt: skip
                yield strided, W, *index, True, True, None, None, rows.dy, new(1, rows.S), None
                plain = strided[rows.token]
                yield plain, W, rows.offs, None, 1, False, False, None, None, None, None, new(rows.S, 24, dtype=dtype)
            case "gemm_combine":
                yield rows.x, rows.W, *index, True, None, None, None, None, new(T, 24)
                yield strided, W, *index, True, rows.bias, rows.weights, rows.dy, new(1, rows.S), new(T, 24)
                yield strided[rows.token], W, *index, False, None, rows.weights, None, None, new(T, 24)
            case "gemm_activation":
                for form, width in ((oracle.Form(), 12), (oracle.Form("gelu", gated=False), 24)):
                    of = form_arguments(form)
                    yield rows.x, rows.W, *index, True, None, *of, None, new(rows.S, width, dtype=dtype)
                    pre = new(rows.S, 24, dtype=dtype)
                    yield strided, W, *index, True, rows.bias, *of, pre, new(rows.S, width)
            case "gemm_activation_grad":
                of = form_arguments(oracle.Form("clamped_swiglu", interleaved=True))
                pre = oracle.make(rows.S, 48, 1, 1, 1, dtype, device).x
                results = new(1, rows.S), new(rows.S, 48, dtype=dtype), new(rows.S, 24, dtype=dtype)
                yield rows.x, rows.W, *index, True, rows.weights, *of, pre, *results
                for i in range(3):
                    one = [result if i == j else None for j, result in enumerate(results)]
                    yield strided, W, *index, True, rows.weights, *of, pre, *one
            case "mlp":
                ids = oracle.make_ids(T, 3, 2, distribution, torch.Generator(device).manual_seed(0))
                down, of = oracle.make(1, 12, 16, 3, 1, dtype, device).W, form_arguments(oracle.Form())
                given, h = (ids, rows.weights), new(rows.S, 12, dtype=dtype)
                yield rows.x, rows.W, down, *given, None, None, *of, h, None, new(T, 16), new(T, 16, dtype=dtype)
                yield strided, W, down, *given, rows.bias, None, *of, h, new(rows.S, 16), None, new(T, 16)
            case "weight_grad":
                yield rows.x, rows.dy, *index, True, True, rows.weights, False, new(3, 24, 16, dtype=dtype)
                yield strided, rows.dy, *index, True, True, None, True, new(3, 16, 24).transpose(1, 2)
                yield strided[rows.token], rows.dy[rows.token], *index, False, False, None, False, new(3, 24, 16)
            case "route":
                ids = oracle.make_ids(T, 3, 2, distribution, torch.Generator(device).manual_seed(0))
                for E in (3, 2000):
                    yield ids, E, new(rows.S, dtype=torch.int32), new(E, dtype=torch.int32)
            case "group_ends":
                yield torch.full((T,), 2, device=device), new(T, dtype=torch.int32)
            case "sum_rows":
                yield torch.randn(rows.S, 24, device=device).requires_grad_(), 2, new(T, 24, dtype=dtype)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "name",
    [
        "gemm",
        "gemm_activation",
        "gemm_activation_grad",
        "gemm_combine",
        "mlp",
        "weight_grad",
        "sum_rows",
        "route",
        "group_ends",
    ],
)
def test_opcheck(ops, device, name):
    """Schema, autograd registration, fake kernels and AOT dispatch."""
    for arguments in samples(name, device):
        torch.library.opcheck(getattr(ops, name).default, arguments)
