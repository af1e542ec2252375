"""Sizes, layouts and memory at their edges. Results and gradients are held against the oracle throughout."""

from contextlib import contextmanager
from functools import partial

import oracle
import problems
import pytest
import torch

DTYPES = (torch.float32, torch.bfloat16)
EVERY = ("moe", "moe_mlp", "grouped_gemm", "grouped_mm")  # the functions that do a whole layer, or a whole group


@pytest.mark.parametrize("N", [1, 2, 3, 7, 8, 9, 15, 31, 63, 64, 65, 127, 129, 255, 257, 2816])
def test_out_features(kernel, device, N):
    for dtype in DTYPES:
        for function in ("moe", "grouped_gemm", "gather_gemm+bias", "gather_gemm+activation", "moe_mlp+bias"):
            problems.check(kernel, problems.make(function, 37, 24, N, 5, 2, dtype, device))


@pytest.mark.parametrize("K", [1, 2, 3, 7, 8, 9, 15, 17, 31, 33, 63, 65, 100, 127, 129, 1025])
def test_in_features(kernel, device, K):
    for dtype in DTYPES:
        for function in ("moe", "grouped_gemm", "gemm_combine+bias", "moe_mlp+bias"):
            problems.check(kernel, problems.make(function, 37, K, 12, 5, 2, dtype, device))


@pytest.mark.parametrize("T", [0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 600])
def test_tokens(kernel, device, T):
    """One expert with T rows, so that the rows end at, before and behind the edge of a tile."""
    for dtype in DTYPES:
        for function in ("moe", "grouped_gemm", "gather_gemm", "gemm_combine", "moe_mlp"):
            problems.check(kernel, problems.make(function, T, 40, 24, 3, 1, dtype, device, "single"))


@pytest.mark.parametrize("E", [1, 2, 31, 33, 255, 256, 257, 1023, 1024, 1025, 2048, 4097])
def test_experts(kernel, device, E):
    """The first and the last expert are used, and most experts of the large E are empty."""
    for dtype in DTYPES:
        inputs = oracle.make(64, 8, 8, E, min(2, E), dtype, device)
        inputs.ids[0, -1], inputs.ids[0, 0] = 0, E - 1
        for function in ("moe", "grouped_gemm", "moe_mlp+bias"):
            problem = problems.build(function, inputs)
            problems.check(kernel, problem)
            _, gradients = problems.run(kernel, problem, only=problem.of_each_expert())
            assert all(gradient[0].any() and gradient[-1].any() for gradient in gradients.values())


@pytest.mark.parametrize("k", [0, 1, 2, 3, 7, 8, 9, 10, 14, 22, 32, 33, 64])
def test_experts_a_token(kernel, device, k):
    """Each slot counts, in the result and in the gradient of the routing weights; so does k = E."""
    for dtype in DTYPES:
        for function in ("moe", "gather_gemm", "gemm_combine+bias", "moe_mlp+bias"):
            problem = problems.make(function, 19, 16, 8, 64, k, dtype, device)
            problems.check(kernel, problem)
            with problems.deterministic():
                _, gradients = problems.run(kernel, problem)
            if "weights" in gradients:
                assert gradients["weights"].shape == (19, k) and (gradients["weights"] != 0).all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("T, distribution", [(0, "uniform"), (8, "all_skipped")])
@pytest.mark.parametrize("function", problems.FUNCTIONS)
def test_nothing_to_do(kernel, place, function, T, distribution):
    problem = problems.make(function, T, 32, 24, 4, 2, place.dtype, place.device, distribution)
    y = problems.check(kernel, problem)
    assert not y.any()
    assert not y.numel() or y.stride() == (y.shape[1], 1)


def behind(values, pad):
    """The same values as a view with NaN all around: behind each row, after the last and before the first."""
    *lead, rows, columns = values.shape
    buffer = values.new_full((*lead, rows + 2, columns + pad), float("nan"))
    view = buffer[..., 1:-1, pad // 2 : pad // 2 + columns]
    view.copy_(values)
    return view


@pytest.mark.parametrize("pad", [64, 6], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("K, N", [(1, 1), (7, 9), (33, 65), (72, 136), (100, 257)])
def test_nothing_beyond_an_operand_counts(kernel, setting, K, N, pad):
    """NaN right behind every row of every operand and of the incoming gradient: a tile that overlaps it masks it."""
    for function in ("moe", "gather_gemm+bias", "gemm_combine+bias", "gather_gemm+activation", "moe_mlp+bias"):
        problem = problems.make(function, 70, K, N, 4, 2, setting.dtype, setting.device, "skipped")
        dy = problem.incoming(problem.call(kernel, **problem.tensors))
        surrounded = {name: behind(t, pad) for name, t in problem.tensors.items()}
        problems.check(kernel, problem._replace(tensors=surrounded), behind(dy, pad))
        for name, t in problem.tensors.items():
            if t.dim() == 3:
                surrounded[name] = behind(t.transpose(1, 2), pad).transpose(1, 2)
        problems.check(kernel, problem._replace(tensors=surrounded), behind(dy, pad))


@pytest.mark.parametrize("function", problems.FUNCTIONS)
def test_nan_behind_skipped_ids_stays_there(kernel, place, function):
    """NaN in tokens, rows and routing weights that only skipped ids lead to."""
    inputs = oracle.make(60, 40, 24, 5, 3, place.dtype, place.device, "skipped")
    live = oracle.is_live(inputs.ids, 5)
    inputs.x[~live.any(1)] = float("nan")
    problem = problems.build(function, inputs._replace(weights=inputs.weights.where(live, float("nan"))))
    for name in ("a", "h"):
        if name in problem.tensors:
            problem.tensors[name][int(live.sum()) :] = float("nan")
    problems.check(kernel, problem)


@pytest.mark.parametrize("function", problems.FUNCTIONS)
def test_unused_expert_may_hold_anything(kernel, place, function):
    problem = problems.make(function, 40, 40, 24, 6, 2, place.dtype, place.device, "empty_last")
    for name in problem.of_each_expert():
        problem.tensors[name][4:] = float("nan")
    y, gradients = problems.run(kernel, problem)
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("function", problems.FUNCTIONS)
def test_every_element_is_written(kernel, place, function, k):
    """With memory from torch.empty full of NaN, nothing of it is left, and nothing changes."""
    problem = problems.make(function, 40, 40, 24, 6, k, place.dtype, place.device, "skipped")
    want_y, want = problems.run(kernel, problem)
    with problems.deterministic():
        y, gradients = problems.run(kernel, problem)
    oracle.assert_close(y, want_y.double(), oracle.tolerance(place.dtype, y.dtype))
    for name, gradient in gradients.items():
        oracle.assert_close(gradient, want[name].double(), oracle.tolerance(place.dtype, gradient.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dirty_allocator(kernel, dtype):
    """Blocks that come back from the caching allocator full of NaN leave no trace in empty experts or dead rows."""
    E, N, K, S = 256, 64, 64, 72
    sizes = torch.zeros(E, dtype=torch.int32, device="cuda")
    sizes[::64] = 10
    for _ in range(4):
        a = torch.randn(S, K, device="cuda", dtype=dtype, requires_grad=True)
        W = torch.randn(E, N, K, device="cuda", dtype=dtype, requires_grad=True)
        for shape in ((E, N, K), (S, N), (S, K)):
            junk = [torch.full(shape, float("nan"), device="cuda", dtype=dtype) for _ in range(3)]
            del junk
        y = kernel.grouped_gemm(a, W, sizes)
        y.sum().backward()
        assert (W.grad[sizes == 0] == 0).all() and (y[40:] == 0).all() and (a.grad[40:] == 0).all()
        assert y.isfinite().all() and W.grad.isfinite().all() and a.grad.isfinite().all()


ROWS = {  # views of [rows, columns] with the values of `t`, or of its first row or column
    "transposed": lambda t: t.T.contiguous().T,
    "sliced": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "every other row": lambda t: t.repeat_interleave(2, 0)[::2],
    "every other column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "one row": lambda t: t[:1].expand_as(t),
    "one column": lambda t: t[:, :1].expand_as(t),
    "one number": lambda t: t[:1, :1].expand_as(t),
    **{f"misaligned by {n}": partial(problems.misaligned, offset=n) for n in (1, 2, 3, 5, 7)},
}
WEIGHTS = {  # views of [E, N, K]
    "transposed": lambda W: W.transpose(1, 2).contiguous().transpose(1, 2),
    "transposed and sliced": lambda W: (
        torch.cat([W, W], 1).transpose(1, 2).contiguous().transpose(1, 2)[:, : W.shape[1]]
    ),
    "sliced": lambda W: torch.cat([W, W], 2)[:, :, : W.shape[2]],
    "half of the rows": lambda W: torch.cat([W, W], 1)[:, W.shape[1] :],
    "every other expert": lambda W: W.repeat_interleave(2, 0)[::2],
    "every other column": lambda W: W.repeat_interleave(2, 2)[..., ::2],
    "experts in the middle": lambda W: W.transpose(0, 1).contiguous().transpose(0, 1),
    "experts inside": lambda W: W.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "one expert": lambda W: W[:1].expand_as(W),
    "one row": lambda W: W[:, :1].expand_as(W),
    "one column": lambda W: W[:, :, :1].expand_as(W),
    "misaligned": problems.misaligned,
    "misaligned and transposed": lambda W: problems.misaligned(W.transpose(1, 2).contiguous(), 3).transpose(1, 2),
}


@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("function", problems.FUNCTIONS)
def test_layout_of_rows(kernel, device, function, layout):
    """Tokens or rows, routing weights and biases as any view."""
    for dtype in DTYPES:
        problem = problems.make(function, 30, 64, 40, 5, 3, dtype, device)
        views = {name: ROWS[layout](t) if t.dim() == 2 else t for name, t in problem.tensors.items()}
        problems.check(kernel, problem._replace(tensors=views))


@pytest.mark.parametrize("layout", WEIGHTS)
@pytest.mark.parametrize("function", ["moe", "grouped_gemm", "gather_gemm", "gemm_combine", "moe_mlp"])
def test_layout_of_weights(kernel, device, function, layout):
    for dtype in DTYPES:
        problem = problems.make(function, 30, 64, 40, 5, 3, dtype, device)
        views = {name: WEIGHTS[layout](t) if t.dim() == 3 else t for name, t in problem.tensors.items()}
        problems.check(kernel, problem._replace(tensors=views))


@pytest.mark.parametrize(
    "layout", ["transposed", "transposed and sliced", "sliced", "every other expert", "one expert"]
)
def test_weights_are_read_in_place(kernel, ops, device, layout):
    """One unit stride in the last two dimensions is enough, whichever it is: no copy, forward or backward."""
    problem = problems.make("moe", 30, 64, 40, 5, 3, torch.bfloat16, device)
    leaf = WEIGHTS[layout](problem.tensors["W"]).detach().requires_grad_()
    with problems.Calls(ops) as calls:
        problems.run(kernel, problem._replace(tensors=problem.tensors | {"W": leaf}), only=("x", "weights"))
    read = [arguments["w"] for _, arguments in calls.calls if "w" in arguments]
    assert len(read) == 2 and all(w.data_ptr() == leaf.data_ptr() for w in read)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("E", [8, 200, 256, 300])
def test_ids_of_any_integer_dtype_and_layout(kernel, device, dtype, E):
    """A dtype that cannot hold E, or not E - 1, is no less right for the ids that it holds."""
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(min(E, torch.iinfo(dtype).max + 1), (30, 2), generator=generator, device=device)
    if dtype.is_signed:
        ids[3] = -1
    inputs = oracle.make(30, 16, 24, E, 2, device=device)._replace(ids=ids)
    want = oracle.moe(*inputs)
    narrow = ids.to(dtype)
    for view in (narrow, narrow.T.contiguous().T, narrow.repeat_interleave(2, 1)[:, ::2]):
        oracle.assert_close(kernel.moe(*inputs._replace(ids=view)), want, 1e-5)
    one = narrow[:1, :1].expand(30, 2)
    oracle.assert_close(kernel.moe(*inputs._replace(ids=one)), oracle.moe(*inputs._replace(ids=one.long())), 1e-5)


def sampled(kernel, function, x, W, ids, weights):
    """Runs on all tokens and checks a few of them, at both ends, in the middle and around the 2^31st element.

    There is one expert a token, and ids ascend, so that rows are tokens for every function. The incoming gradient is 0
    but for these tokens, so that their own problem has the same gradients.
    """
    T = len(x)
    edge = min(2**31 // max(x.shape[1], W.shape[1]), T - 2)
    chosen = torch.tensor(sorted({0, 1, T // 2, edge - 1, edge, edge + 1, T - 2, T - 1}), device=x.device)
    few = problems.build(function, oracle.Inputs(x[chosen], W, ids[chosen], weights[chosen]))
    of_each_expert = few.of_each_expert()
    tensors = {"x": x, "a": x, "h": x, "weights": weights} | {name: few.tensors[name] for name in of_each_expert}
    leaves = {name: tensors[name].detach().requires_grad_() for name in few.tensors}
    sizes = torch.bincount(ids[:, 0], minlength=len(W))
    routed = (kernel.route(ids, len(W)),) if function in ("gather_gemm", "gemm_combine") else ()
    match function:
        case "moe":
            y = kernel.moe(leaves["x"], leaves["W"], ids, leaves["weights"])
        case "grouped_gemm":
            y = kernel.grouped_gemm(*leaves.values(), sizes)
        case "grouped_mm":
            y = kernel.grouped_mm(leaves["a"], leaves["W"].mT, offs=sizes.cumsum(0).int())
        case "moe_mlp":
            y = kernel.moe_mlp(leaves["x"], leaves["w_up"], leaves["w_down"], ids, leaves["weights"])
        case "gather_gemm":
            y = kernel.gather_gemm(*leaves.values(), *routed)
        case "gemm_combine":
            y = kernel.gemm_combine(leaves["h"], leaves["W"], *routed, leaves["weights"])
    cancels = function == "moe_mlp"  # so few rows make so few values
    few.check_result(y.detach()[chosen], cancels)
    few_dy = few.incoming(y[chosen])
    dy = torch.zeros_like(y)
    dy[chosen] = few_dy
    rest = torch.ones(T, dtype=torch.bool, device=x.device)
    rest[chosen] = False
    got = torch.autograd.grad(y, list(leaves.values()), dy)
    del y, dy
    got = dict(zip(few.tensors, got, strict=True))
    for name in few.tensors:
        if name not in of_each_expert:
            assert got[name].abs().amax(1)[rest].max() == 0, name
            got[name] = got[name][chosen]
    few.check_gradients(got, few_dy, cancels)


@pytest.mark.gpu(memory=70)
@pytest.mark.parametrize("K, N", [(32, 1024), (1024, 32)], ids=["results", "rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [*EVERY, "gather_gemm", "gemm_combine"])
def test_more_than_2_31_elements(kernel, function, dtype, K, N):
    """T * K, S * K, T * N and S * N, each past 2^31."""
    T, E = 2_400_000, 8
    x, W, ids, weights = oracle.make(T, K, N, E, 1, dtype, "cuda")
    sampled(kernel, function, x, W, ids.sort(0).values, weights)


@pytest.mark.parametrize("function", [*EVERY, "gather_gemm", "gemm_combine"])
def test_sampled_tokens(kernel, place, function):
    """The two tests around this one, at a size for any machine."""
    x, W, ids, weights = oracle.make(300, 72, 40, 8, 1, place.dtype, place.device)
    sampled(kernel, function, x, W, ids.sort(0).values, weights)


@pytest.mark.gpu(memory=10)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [*EVERY, "gather_gemm", "gemm_combine"])
def test_more_tiles_than_65535(kernel, function, dtype):
    """Tiles of 128 rows: more than the second dimension of a launch has blocks."""
    x, W, ids, weights = oracle.make(9_000_000, 8, 8, 8, 1, dtype, "cuda")
    sampled(kernel, function, x, W, ids.sort(0).values, weights)


@pytest.mark.gpu(memory=60)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_than_2_31_weights(kernel, dtype, transposed):
    """E * N * K past 2^31: the last expert is right, and the gradient of all others is exactly 0."""
    E, N, K, T = 40, 8192, 8192, 128
    W = torch.zeros((E, K, N) if transposed else (E, N, K), device="cuda", dtype=dtype)
    W[-1].normal_(std=K**-0.5)
    W = (W.transpose(1, 2) if transposed else W).requires_grad_()
    x = torch.randn(T, K, device="cuda", dtype=dtype)
    weights = torch.rand(T, 1, device="cuda")
    sizes = torch.zeros(E, dtype=torch.int64, device="cuda")
    sizes[-1] = T
    ids = torch.full((T, 1), E - 1, device="cuda")
    last = W.detach()[-1:]
    arithmetic = 3e-5  # longer sums than oracle.tolerance speaks of
    by_group = kernel.grouped_mm(x, W.mT, offs=sizes.cumsum(0).int())
    for y, scale in (
        (kernel.grouped_gemm(x, W, sizes), None),
        (by_group, None),
        (kernel.moe(x, W, ids, weights), weights),
    ):
        want = oracle.moe(x, last, torch.zeros_like(ids), torch.ones_like(weights) if scale is None else scale)
        oracle.assert_close(y, want, oracle.tolerance(dtype, y.dtype) + arithmetic)
        dy = torch.randn_like(y).to(dtype).to(y.dtype)
        (gradient,) = torch.autograd.grad(y, W, dy)
        assert not gradient[:-1].any()
        scales = torch.ones_like(weights) if scale is None else scale
        want, slack = oracle.weight_gradient(x, dy.to(dtype), scales.flatten(), torch.zeros_like(ids), 1, transposed)
        oracle.assert_close(gradient[-1:], want, oracle.tolerance(dtype, dtype), slack=slack)


def check_among(kernel, function, used, E, inputs):
    """All ids go to a few of many experts: they are right, and the gradients of the others exactly 0."""
    x, few_W, ids, weights = inputs
    few = problems.build(function, inputs)
    counts = few_W.new_zeros(E, 0, 0)  # stands for the weights where only their number is asked
    many = problems.build(function, oracle.Inputs(x, counts, used[ids], weights))
    names = few.of_each_expert()
    tensors = dict(few.tensors)
    for name in names:
        tensors[name] = few.tensors[name].new_zeros(E, *few.tensors[name].shape[1:])
        for e, of_expert in zip(used.tolist(), few.tensors[name], strict=True):
            tensors[name][e] = of_expert
    y, gradients = problems.run(kernel, many._replace(tensors=tensors))
    few.check_result(y, cancels=True)
    for name in names:
        mine = [gradients[name][e].clone() for e in used.tolist()]
        for e in used.tolist():
            gradients[name][e] = 0
        assert not gradients[name].any(), name
        gradients[name] = torch.stack(mine)
    few.check_gradients(gradients, few.incoming(y), cancels=True)


@pytest.mark.parametrize("function", EVERY)
def test_70000_experts(kernel, device, function):
    for dtype in DTYPES:
        used = torch.tensor([0, 1, 255, 1024, 32768, 65535, 65536, 69_999], device=device)
        check_among(kernel, function, used, 70_000, oracle.make(64, 16, 8, len(used), 2, dtype, device))


@pytest.mark.gpu(memory=75)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_than_2_31_weights_of_mlps(kernel, dtype):
    """Of each of the two matrices."""
    used = torch.tensor([0, 1050, 2099], device="cuda")
    check_among(kernel, "moe_mlp", used, 2100, oracle.make(128, 1024, 1024, len(used), 2, dtype, "cuda"))


EXTREMES = {  # T, K, N, E, k, distribution
    "K = N = 1": (300, 1, 1, 5, 2, "uniform"),
    "one row": (1, 40, 24, 3, 1, "uniform"),
    "one row of one feature": (1, 1, 1, 1, 1, "uniform"),
    "all rows on one expert": (700, 40, 24, 6, 2, "single"),
    "64 experts a token": (40, 16, 8, 64, 64, "uniform"),
}


@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("function", EVERY)
def test_extremes(kernel, place, function, case):
    *shape, distribution = EXTREMES[case]
    problem = problems.make(function, *shape, place.dtype, place.device, distribution)
    problems.check(kernel, problem, cancels=True)


@pytest.mark.parametrize("function", EVERY)
def test_as_many_tokens_as_experts(kernel, device, function):
    """1,024 of them, each token with an expert of its own."""
    for dtype in DTYPES:
        inputs = oracle.make(1024, 16, 8, 1024, 1, dtype, device)
        ids = inputs.ids.flatten().argsort().argsort()[:, None]
        problems.check(kernel, problems.build(function, inputs._replace(ids=ids)), cancels=True)


@pytest.mark.gpu(memory=12)
@pytest.mark.parametrize("T, K, N, E, k", [(4096, 64, 64, 64, 64), (4096, 64, 64, 70_000, 2)], ids=["k", "E"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", ["moe", "moe_mlp"])
def test_peak_memory(kernel, function, dtype, T, K, N, E, k):
    """What the README says of a forward: the result, its float32 sums, an MLP's activation, and words.

    16 bytes for each assignment and expert of each product, and a MiB for what the allocator rounds up of each tensor.
    """
    x, W, ids, weights = oracle.make(T, K, N, E, 1, dtype, "cuda")
    ids = torch.randint(E, (T, k), device="cuda")
    problem = problems.build(function, oracle.Inputs(x, W, ids, weights.expand(T, k).contiguous()))
    peak = problems.peak_memory(lambda: problem.call(kernel, **problem.tensors))
    if function == "moe":
        products, results = 1, 4 * T * N
    else:
        products, results = 2, (4 + dtype.itemsize) * T * K + dtype.itemsize * T * k * N
    assert peak <= results + products * 16 * (T * k + E) + 6 * 2**20, peak - results


@contextmanager
def memory_for(more):
    """This process may allocate no more on the GPU than it has, and `more` bytes; other processes notice nothing."""
    torch.cuda.empty_cache()
    reserved, total = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((reserved + more) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.gpu(memory=6)
@pytest.mark.parametrize("function", EVERY)
def test_out_of_memory(kernel, function):
    """torch's own error, from the forward and from the backward; the next call is right, even before there is more."""
    small = problems.make(function, 40, 64, 32, 5, 2, device="cuda")
    for K, N, backward in ((8, 1024, False), (1024, 8, True)):
        problem = problems.make(function, 2**18, K, N, 4, 1, device="cuda")  # a GiB of results, or of gradients to rows
        leaves = problem.leaves(problem.tensors if backward else ())
        y = problem.call(kernel, **leaves).sum() if backward else None
        with memory_for(200 * 2**20):
            with pytest.raises(torch.OutOfMemoryError):
                if backward:
                    y.backward()
                else:
                    problem.call(kernel, **leaves)
            problems.check(kernel, small)
        problems.check(kernel, small)
        del problem, leaves, y


def test_float32_near_zero(kernel, device):
    """Products keep subnormal numbers; a GPU's additions to a token's row may take them for 0, the sign apart."""
    x = torch.full((40, 16), 3e-40, device=device)
    W = torch.eye(16, device=device).repeat(2, 1, 1)
    assert torch.equal(kernel.grouped_gemm(x, W, torch.tensor([10, 30], device=device)), x)
    y = kernel.moe(x, W, torch.zeros(40, 1, dtype=torch.int64, device=device), torch.ones(40, 1, device=device))
    assert torch.equal(y, x) or (device == "cuda" and not y.any())


@pytest.mark.parametrize("function", ["moe", "grouped_gemm", "gather_gemm", "gemm_combine"])
def test_empty_rows_of_any_stride(kernel, place, function):
    """torch calls an empty tensor contiguous whatever its strides: no kernel may ask more of it."""
    device, dtype = place.device, place.dtype
    W = torch.randn(3, 8, 8, device=device, dtype=dtype, requires_grad=True)
    rows = torch.empty(8, 0, device=device, dtype=dtype).t().requires_grad_()
    ids = torch.empty(0, 2, dtype=torch.int64, device=device)
    weights = torch.empty(2, 0, device=device).t().requires_grad_()
    if function == "moe":
        y = kernel.moe(rows, W, ids, weights)
    elif function == "grouped_gemm":
        y = kernel.grouped_gemm(rows, W, torch.zeros(3, dtype=torch.int64, device=device))
    elif function == "gather_gemm":
        y = kernel.gather_gemm(rows, W, kernel.route(ids, 3))
    else:
        y = kernel.gemm_combine(rows, W, kernel.route(ids, 3), weights)
    assert y.shape == (0, 8)
    y.backward(torch.empty(8, 0, device=device, dtype=y.dtype).t())
    assert rows.grad.shape == (0, 8) and W.grad.shape == W.shape and not W.grad.any()
