"""moe_mlp and the activation of gather_gemm: what is theirs alone.

The tests of every function, which loop over problems.FUNCTIONS, have them too: sizes, layouts, NaN beside operands,
incoming gradients, second derivatives, compilers, streams.
"""

import contextlib
import itertools
import math

import oracle
import problems
import pytest
import torch
from oracle import FORMS, Form


def make(
    form=None, T=40, H=24, inner=20, E=5, k=3, dtype=torch.float32, device="cpu", distribution="uniform", extra="+bias"
):
    """The problem of moe_mlp; `extra` says which biases it has."""
    return problems.build("moe_mlp" + extra, oracle.make(T, H, inner, E, k, dtype, device, distribution), form=form)


def transposed(problem):
    views = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in problem.tensors.items() if t.dim() == 3}
    return problem._replace(tensors=problem.tensors | views)


# Values


@pytest.mark.kernels_ci
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_activation(kernel, setting, form):
    """With both biases and none, with weights of both layouts."""
    for extra, distribution in (("", "uniform"), ("+bias", "skipped")):
        problem = make(form, 90, 72, 52, 5, 2, setting.dtype, setting.device, distribution, extra)
        assert problems.check(kernel, problem).dtype == setting.dtype
        problems.check(kernel, transposed(problem))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_activation_of_gathered_rows(kernel, setting, form):
    for extra, distribution in (("", "uniform"), ("+bias", "skipped")):
        inputs = oracle.make(90, 72, 104, 5, 2, setting.dtype, setting.device, distribution)
        problem = problems.build("gather_gemm+activation" + extra, inputs, form=form)
        assert problems.check(kernel, problem).dtype == setting.dtype
        problems.check(kernel, transposed(problem))


@pytest.mark.parametrize("extra", ["+bias_up", "+bias_down"])
def test_one_bias(kernel, setting, extra):
    problems.check(kernel, make(dtype=setting.dtype, device=setting.device, extra=extra))


SIZES = [  # T, H, I, E, k; tiles have 128 rows and 64, 96 or 192 columns
    (1, 1, 1, 1, 1),
    (3, 2, 3, 2, 2),
    (130, 64, 64, 1, 1),
    (129, 96, 48, 2, 2),
    (200, 100, 97, 3, 2),
    (70, 200, 193, 4, 3),
    (50, 33, 385, 4, 8),
    (300, 392, 40, 2, 1),
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(kernel, setting, sizes):
    """Odd ones and such as end at, before and behind the edge of a tile."""
    for form in (Form(), Form(interleaved=True), Form("gelu", gated=False)):
        problems.check(kernel, make(form, *sizes, setting.dtype, setting.device), cancels=True)


@pytest.mark.parametrize("distribution", oracle.DISTRIBUTIONS)
def test_any_distribution_over_experts(kernel, setting, distribution):
    problems.check(kernel, make(None, 180, 72, 40, 7, 3, setting.dtype, setting.device, distribution))


@pytest.mark.parametrize("H, inner", [(0, 4), (4, 0), (0, 0)])
def test_no_features(kernel, place, H, inner):
    """Sums of nothing are 0, and what is behind the bias is not."""
    for form in (Form(), Form("gelu", gated=False)):
        for k, options in ((2, {}), (3, {}), (3, {"combine": "ordered"})):
            problem = make(form, 6, H, inner, 3, k, place.dtype, place.device)
            problems.check(kernel, problem, **options)
            with torch.no_grad():
                problem.check_result(problem.call(kernel, **problem.tensors, **options))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_out_dtype(kernel, device, dtype, out_dtype):
    """Summed over the experts in float32 and rounded once."""
    for k in (1, 5):
        problem = make(k=k, dtype=dtype, device=device)
        assert problems.check(kernel, problem, out_dtype=out_dtype).dtype == out_dtype
        inputs = oracle.make(40, 24, 20, 5, k, dtype, device)
        problem = problems.build("gather_gemm+activation", inputs)
        assert problems.check(kernel, problem, out_dtype=out_dtype).dtype == out_dtype


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("distribution", ["repeated", "skipped"])
def test_gradcheck(kernel, form, distribution):
    for k in (1, 3):
        problem = make(form, 4, 3, 2, 3, k, torch.float64, "cpu", distribution)
        names, leaves = zip(*problem.leaves().items(), strict=True)
        assert torch.autograd.gradcheck(
            lambda *tensors, names=names, problem=problem: problem.call(
                kernel, **dict(zip(names, tensors, strict=True))
            ),
            leaves,
        )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_estimates_are_the_oracle(form):
    """Where nothing is rounded, what the other tests compare with is the oracle and its derivatives."""
    for function in ("moe_mlp+bias", "gather_gemm+activation+bias"):
        inputs = oracle.make(30, 24, 20, 5, 3, torch.float64, distribution="skipped")
        problem = problems.build(function, inputs, form=form)
        names, tensors = zip(*problem.tensors.items(), strict=True)
        want = problem.want(*tensors)
        dy = problem.incoming(want)
        oracle.assert_close(problem.result().value, want, 1e-13)
        found = problem.gradients(dy)
        for name, gradient in zip(names, oracle.gradients(problem.want, tensors, dy), strict=True):
            oracle.assert_close(found[name].value, gradient, 1e-13)
            assert not found[name].slack.any() or form.kind == "relu"


@pytest.mark.parametrize("form", [Form(), Form("gelu", gated=False), Form("clamped_swiglu", interleaved=True)], ids=str)
@pytest.mark.parametrize("combine", [None, "ordered"])
def test_equals_its_pieces(kernel, place, form, combine):
    """gather_gemm with the activation and gemm_combine behind it, to the bit where sums have an order."""
    for k in (1, 2, 3) if combine else (1, 2):
        problem = make(form, k=k, dtype=place.dtype, device=place.device, distribution="skipped")
        x, w_up, w_down, weights, bias_up, bias_down = problem.tensors.values()
        ids = oracle.make(40, 24, 20, 5, k, place.dtype, place.device, "skipped").ids
        routing = kernel.route(ids, 5)
        with problems.deterministic() if combine else contextlib.nullcontext():
            h = kernel.gather_gemm(x, w_up, routing, bias=bias_up, **problems.form_options(kernel, form))
            y = kernel.gemm_combine(h, w_down, routing, weights, bias=bias_down, out_dtype=place.dtype)
        assert torch.equal(problem.call(kernel, **problem.tensors, combine=combine), y)


# Precision


def frobenius(got, want):
    return float((got.double() - want).norm() / want.norm())


def unfused(x, w_up, w_down, weights, bias_up, bias_down, ids, form):
    """The pipeline in torch as one writes it: sort, gather, a product an expert, weight, add to the tokens."""
    order, expert = oracle.expert_order(ids, len(w_up))
    counts = torch.bincount(expert, minlength=len(w_up)).tolist()
    parts = []
    for e, rows in enumerate(x[order // ids.shape[1]].split(counts)):
        h = form(torch.nn.functional.linear(rows, w_up[e], bias_up[e]))
        parts.append(torch.nn.functional.linear(h, w_down[e], bias_down[e]))
    rows = torch.cat(parts) * weights.flatten()[order, None]
    return torch.zeros(x.shape, device=x.device).index_add(0, order // ids.shape[1], rows).to(x.dtype)


@pytest.mark.parametrize("combine, k", [(None, 2), ("rounded", 4)])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_precision(kernel, device, form, combine, k):
    """Errors against the float64 oracle: below the limits, in bfloat16 below the unfused pipeline's own too.

    Where values lie at a limit of the activation the pipeline is what counts: it too finds some of them beyond the
    limit, or not, that in float64 are not, or are.
    """
    for dtype in (torch.bfloat16, torch.float32):
        problem = make(form, 256, 128, 96, 4, k, dtype, device)
        ids = oracle.make(256, 128, 96, 4, k, dtype, device).ids
        y, gradients = problems.run(kernel, problem, combine=combine)
        dy = problem.incoming(y)
        names, tensors = zip(*problem.tensors.items(), strict=True)
        wanted = dict(zip(names, oracle.gradients(problem.want, tensors, dy), strict=True)) | {
            "y": problem.want(*tensors)
        }
        leaves = [t.detach().requires_grad_() for t in tensors]
        plain = unfused(*leaves, ids, form)
        peers = dict(zip(names, torch.autograd.grad(plain, leaves, dy), strict=True)) | {"y": plain.detach()}
        for name, got in (gradients | {"y": y}).items():
            error, of_peer = frobenius(got, wanted[name]), frobenius(peers[name], wanted[name])
            if dtype == torch.float32:
                assert error <= 1e-5, (name, error)
            else:
                assert error <= 1.02 * of_peer, (name, error, of_peer)
                assert error <= (4e-3 if name == "y" else 6e-3) or form.limit, (name, error)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_any_scale(kernel, device, scale):
    """Of the tokens: the activation is 0 or its argument nearly everywhere, or nearly linear."""
    for dtype, form in itertools.product((torch.float32, torch.bfloat16), (Form(), Form("gelu", gated=False))):
        problem = make(form, dtype=dtype, device=device)
        x = (problem.tensors["x"].float() * scale).to(dtype)
        problems.check(kernel, problem._replace(tensors=problem.tensors | {"x": x}))


def test_float32_is_not_tf32(kernel, device):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        problem = make(T=64, H=128, inner=128, device=device)
        y, gradients = problems.run(kernel, problem)
    finally:
        torch.set_float32_matmul_precision(before)
    oracle.assert_close(y, problem.want(*problem.tensors.values()), 2e-6)
    for name, want in problem.gradients(problem.incoming(y)).items():
        oracle.assert_close(gradients[name], want.value, 2e-6)


def exact_rows(values, device, dtype=torch.float32):
    """Tokens, w_up, ids and weights that make `values` what the activation is of, a token a row."""
    rows = torch.tensor(values, device=device, dtype=dtype)
    T, U = rows.shape
    eye = torch.eye(U, device=device, dtype=dtype)[None]
    ids, weights = torch.zeros(T, 1, dtype=torch.int64, device=device), torch.ones(T, 1, device=device, dtype=dtype)
    return rows.requires_grad_(), eye, ids, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu", "clamped_swiglu"])
def test_exactly_at_the_limits(kernel, device, kind, interleaved, dtype):
    """A value at its limit still has a slope, the next one beyond it has none."""
    limit = 1.5
    beyond = torch.nextafter(torch.tensor(limit, dtype=dtype), torch.tensor(2.0, dtype=dtype)).item()
    edges = (-beyond, -limit, 0.0, limit, beyond)
    form = Form(kind, True, interleaved, limit=limit)
    x, eye, ids, weights = exact_rows(list(itertools.product(edges, edges)), device, dtype)
    down = torch.ones(1, 2, 1, device=device, dtype=dtype)
    options = problems.form_options(kernel, form)
    y = kernel.moe_mlp(x, eye, down, ids, weights, **options)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    want = form(x.detach().double()).expand(-1, 2)
    oracle.assert_close(y, want, oracle.tolerance(dtype, dtype) + torch.finfo(dtype).eps)
    (slope,) = oracle.gradients(form, [x], torch.full((len(x), 1), 2.0, device=device))
    oracle.assert_close(dx, slope, oracle.tolerance(dtype, dtype) + torch.finfo(dtype).eps)
    gate, up = x.detach().double().unbind(1)
    assert (dx[gate > limit, 0] == 0).all() and (dx[up.abs() > limit, 1] == 0).all()
    inside = (gate.abs() <= limit) & (gate != 0) & (up.abs() <= limit) & (up != 0) & (up != -1)
    assert inside.any() and (dx[inside] != 0).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_large_values(kernel, device, form):
    """The activation and its slope go to their limits without a NaN on the way."""
    values = [[sign * 10.0**n, 1.0] for sign in (-1, 1) for n in range(-30, 16)]
    x, eye, ids, weights = exact_rows(values, device)
    down = torch.ones(1, 2, 1 if form.gated else 2, device=device)
    y = kernel.moe_mlp(x, eye, down, ids, weights, **problems.form_options(kernel, form))
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    want = form(x.detach().double()).sum(1, keepdim=True).expand(-1, 2)
    (slope,) = oracle.gradients(form, [x], torch.full((len(x), 1 if form.gated else 2), 2.0, device=device))
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(dx.double(), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_bad_tokens_stay_alone(kernel, setting, form, bad):
    """What belongs to other tokens does not change by a bit; a limit or a kink does not hide a NaN."""
    problem = make(form, 90, 40, 24, 4, 2, setting.dtype, setting.device)
    want, gradients = problems.run(kernel, problem)
    hit = torch.zeros(90, dtype=torch.bool, device=setting.device)
    hit[[7, 60]] = True
    x = problem.tensors["x"].clone()
    x[hit, 3] = bad
    y, got = problems.run(kernel, problem._replace(tensors=problem.tensors | {"x": x}))
    assert torch.equal(y[~hit], want[~hit])
    for name in ("x", "weights"):
        assert torch.equal(got[name][~hit], gradients[name][~hit]), name
    if bad != bad:
        assert y[hit].isnan().all() and got["weights"][hit].isnan().all()


def test_bad_tokens_of_no_expert(kernel, setting):
    """NaN in tokens and weights that only skipped ids lead to changes nothing."""
    problem = make(T=90, k=2, dtype=setting.dtype, device=setting.device, distribution="skipped")
    ids = oracle.make(90, 24, 20, 5, 2, setting.dtype, setting.device, "skipped").ids
    live = oracle.is_live(ids, 5)
    want = problems.run(kernel, problem)
    tensors = problem.tensors | {
        "x": problem.tensors["x"].where(live.any(1)[:, None], float("nan")),
        "weights": problem.tensors["weights"].where(live, float("nan")),
    }
    y, gradients = problems.run(kernel, problem._replace(tensors=tensors))
    assert torch.equal(y, want[0]) and not y[~live.any(1)].any()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, want[1][name]), name
    assert not gradients["weights"][~live].any() and not gradients["x"][~live.any(1)].any()


# What is computed and kept


@pytest.mark.parametrize("form", [Form(), Form("relu", gated=False)], ids=str)
def test_three_products_and_one(kernel, ops, form):
    """Two forward; backward two for the rows, of which one has three results, and two weight gradients."""
    problem = make(form, extra="", k=2)
    with problems.Calls(ops) as calls:
        y = problem.call(kernel, **(leaves := problem.leaves()))
    assert calls.names() == ["route", "gemm_activation", "gemm_combine"]
    with problems.Calls(ops) as calls:
        torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y))
    assert calls.names() == ["gemm_activation_grad", "gemm_combine", "weight_grad", "weight_grad"]
    results = calls.calls[0][1]
    assert all(results[name] is not None for name in ("dot", "d_pre", "weighted"))


@pytest.mark.parametrize(
    "only, results",
    [
        (("x",), ("d_pre",)),
        (("w_up",), ("d_pre",)),
        (("bias_up",), ("d_pre",)),
        (("w_down",), ("weighted",)),
        (("weights",), ("dot",)),
        (("x", "weights"), ("d_pre", "dot")),
        (("w_up", "w_down"), ("d_pre", "weighted")),
    ],
    ids=str,
)
def test_only_what_is_asked_is_written(kernel, ops, only, results):
    problem = make()
    y = problem.call(kernel, **problem.leaves(only))
    with problems.Calls(ops) as calls:
        y.sum().backward()
    (arguments,) = (given for name, given in calls.calls if name == "gemm_activation_grad")
    assert tuple(name for name in ("d_pre", "weighted", "dot") if arguments[name] is not None) == results


def saved_by(problem, kernel, leaves):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        problem.call(kernel, **leaves)
    return saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [Form(), Form("gelu", gated=False)], ids=str)
def test_memory_for_the_backward(kernel, device, form, dtype):
    """The tokens, what the activation is of, and words for each row; beside the weights themselves."""
    T, H, inner, E, k = 96, 64, 40, 4, 2
    problem = make(form, T, H, inner, E, k, dtype, device)
    leaves = problem.leaves()
    parameters = {leaf.data_ptr() for name, leaf in leaves.items() if name != "x"}
    saved = {t.data_ptr(): t.nbytes for t in saved_by(problem, kernel, leaves) if t.data_ptr() not in parameters}
    S, width = T * k, dtype.itemsize
    rows = (2 if form.gated else 1) * S * inner
    assert sum(saved.values()) <= width * (T * H + rows) + 4 * (S + E)


def test_nothing_is_kept_without_gradients(kernel, ops, device):
    problem = make(k=2, device=device)
    want = problem.call(kernel, **problem.leaves())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), problems.Calls(ops) as calls:
            assert saved_by(problem, kernel, problem.leaves()) == []
            y = problem.call(kernel, **problem.leaves())
        assert not y.requires_grad and torch.equal(y, want)
        assert calls.names() == ["mlp"] * 2  # which does not return what a backward would need
    with problems.Calls(ops) as calls:
        problem.call(kernel, **problem.tensors)
    assert calls.names() == ["mlp"]


@pytest.mark.parametrize("T", [40, 60])
@pytest.mark.parametrize("H, inner", [(72, 104), (72, 100), (76, 104)], ids=["both", "first", "second"])
def test_without_gradients_where_rows_of_16_bytes_are_those_of(kernel, place, H, inner, T):
    """Both products, or one of them: the other one takes other tiles, and neither relies on what the other one does."""
    problem = make(None, T, H, inner, 5, 3, place.dtype, place.device, "skipped")
    with torch.no_grad():
        for _ in range(2):
            problem.check_result(problem.call(kernel, **problem.tensors))


def test_no_id_wraps_around_among_few(kernel, device):
    """Of 512 experts, whose numbers the wide ids have in their lower bits."""
    problem = make(None, 16, 24, 20, 512, 7, device=device)
    x, w_up, w_down, weights, *_ = problem.tensors.values()
    ids = torch.randint(0, 512, (16, 7), device=device)
    wide = torch.tensor([2**32, 2**32 + 1, 2**63 - 512, -(2**63), -(2**32) + 5], device=device)
    none = torch.where(torch.arange(7, device=device) < len(wide), -1, ids)
    ids[:, : len(wide)] = wide
    assert torch.equal(*(kernel.moe_mlp(x, w_up, w_down, given, weights, combine="ordered") for given in (ids, none)))


@pytest.mark.gpu
def test_ids_that_were_written_just_before(kernel):
    """Many calls one behind the other, each with ids that the launch before has made, in a graph too."""
    problem = make(None, 16, 64, 48, 5, 8, torch.bfloat16, "cuda", extra="")
    x, w_up, w_down, weights, *_ = problem.tensors.values()
    drawn = torch.randint(-1, 6, (100, 16, 8), device="cuda")

    def calls():
        ids = torch.empty_like(drawn[0])
        return [kernel.moe_mlp(x, w_up, w_down, ids.copy_(given), weights, combine="ordered") for given in drawn]

    with torch.no_grad():
        want = [kernel.moe_mlp(x, w_up, w_down, given.clone(), weights, combine="ordered") for given in drawn]
        torch.cuda.synchronize()
        assert all(map(torch.equal, calls(), want))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = calls()
        for _ in range(3):
            graph.replay()
            assert all(map(torch.equal, found, want))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "T, wanted",
    [
        (16, ["narrow", "narrow", "sum_rows"]),
        (17, ["place", "narrow", "narrow", "sum_rows"]),
        (300, ["count", "place", "schedule", "gemm", "schedule", "gemm", "sum_rows"]),
    ],
    ids=str,
)
def test_few_tokens_take_few_launches(kernel, T, wanted):
    """Without gradients 128 assignments need no sort of their own, and few tokens a product no schedule."""
    problem = make(None, T, 64, 64, 16, 8, torch.bfloat16, "cuda", extra="")
    found = problems.launches(lambda: problem.call(kernel, **problem.tensors))
    assert len(found) == len(wanted) and all(name in launch for name, launch in zip(wanted, found, strict=True)), found


@pytest.mark.gpu
def test_allocates_no_more_rows(kernel):
    """Without a gradient the forward stores the activation and the sums; nothing else of S rows."""
    T, H, inner, E, k = 4096, 1024, 512, 16, 4
    problem = make(None, T, H, inner, E, k, torch.bfloat16, "cuda", extra="")
    peak = problems.peak_memory(lambda: problem.call(kernel, **problem.tensors))
    assert peak <= 2 * T * k * inner + 6 * T * H + 128 * (T * k + E) + 2**20


# Sums in order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_ordered(kernel, ops, device, k, dtype):
    """The argument does what torch's flag does, to the bit, again and again."""
    problem = make(T=200, k=k, dtype=dtype, device=device)
    with problems.deterministic():
        want, gradients = problems.run(kernel, problem)
    for _ in range(20 if device == "cuda" else 2):
        y, got = problems.run(kernel, problem, combine="ordered")
        assert torch.equal(y, want)
        for name in gradients:
            assert torch.equal(got[name], gradients[name]), name
    for flag, given in itertools.product((False, True), (None, "ordered", "rounded")):
        stored = k > 2 and (flag or given)
        with problems.deterministic() if flag else contextlib.nullcontext(), problems.Calls(ops) as calls:
            problems.run(kernel, problem, only=("x",), combine=given)
        assert calls.names().count("sum_rows") == (2 if stored else 0), (flag, given)


def test_ordered_rows_are_wide(kernel):
    """Those of float64 operands are in float64 whatever the result is."""
    problem = make(dtype=torch.float64)
    with problems.deterministic():
        want = problem.call(kernel, **problem.tensors, out_dtype=torch.float32)
    assert torch.equal(problem.call(kernel, **problem.tensors, out_dtype=torch.float32, combine="ordered"), want)


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
def test_rounded_rows(kernel, place, out_dtype):
    """Each expert's result, and its gradient to x, is what it is alone, rounded once; the sum of them is again."""
    T, k, H = 60, 5, 40
    inputs = oracle.make(T, H, 24, 7, k, place.dtype, place.device, "skipped")
    problem = problems.build("moe_mlp", inputs, form=Form())
    options = {} if out_dtype is None or place.dtype == torch.float64 else {"out_dtype": out_dtype}
    y, gradients = problems.run(kernel, problem, combine="rounded", **options)
    leaves = problem.leaves(())
    x = leaves["x"].repeat_interleave(k, 0).requires_grad_()
    routed = inputs.ids.reshape(-1, 1), inputs.weights.reshape(-1, 1)
    rows = kernel.moe_mlp(x, leaves["w_up"], leaves["w_down"], *routed, **options)
    (dx,) = torch.autograd.grad(rows, x, problem.incoming(y).repeat_interleave(k, 0))
    for got, parts in ((y, rows.detach()), (gradients["x"], dx)):
        total = torch.zeros(T, H, dtype=torch.promote_types(place.dtype, torch.float32), device=place.device)
        for part in parts.view(T, k, H).unbind(1):
            total += part
        assert torch.equal(got, total.to(got.dtype))


# Gradients added to buffers


def buffers(problem, dtype, by_columns):
    made = []
    for name in ("w_up", "w_down"):
        w = problem.tensors[name]
        shape = (w.shape[0], w.shape[2], w.shape[1]) if by_columns else w.shape
        buffer = torch.randn(shape, device=w.device).to(dtype)
        made.append(buffer.transpose(1, 2) if by_columns else buffer)
    return made


@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("wide", [False, True], ids=["own dtype", "wide"])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=str)
def test_weight_gradients_are_added(kernel, setting, which, wide, by_columns):
    """Twice, to what is there; the weights then have none, and the other gradients are as always."""
    dtype = torch.promote_types(setting.dtype, torch.float32) if wide else setting.dtype
    problem = make(dtype=setting.dtype, device=setting.device, distribution="empty_middle", k=2)
    want, gradients = problems.run(kernel, problem)
    dy = problem.incoming(want)
    exact = problem.gradients(dy)
    made = buffers(problem, dtype, by_columns)
    given = tuple(made[i] if i in which else None for i in (0, 1))
    for _ in range(2):
        before = [buffer.clone() for buffer in made]
        leaves = problem.leaves()
        y = problem.call(kernel, **leaves, weight_grads=given)
        assert torch.equal(y, want)
        y.backward(dy)
        for i, name in enumerate(("w_up", "w_down")):
            if i not in which:
                assert torch.equal(leaves[name].grad, gradients[name]) and torch.equal(made[i], before[i])
                continue
            assert leaves[name].grad is None
            slack = exact[name].slack
            sum_ = exact[name].value + before[i].double()
            oracle.assert_close(made[i], sum_, oracle.tolerance(setting.dtype, dtype), slack=slack)
            empty = (exact[name].value == 0).flatten(1).all(1)
            assert empty.any() and torch.equal(made[i][empty], before[i][empty])
        for name in set(gradients) - {"w_up", "w_down"}:
            assert torch.equal(leaves[name].grad, gradients[name]), name


def test_buffers_of_frozen_weights_are_left_alone(kernel, device):
    problem = make(device=device)
    made = buffers(problem, torch.float32, False)
    before = [buffer.clone() for buffer in made]
    problems.run(kernel, problem, only=("x", "weights"), weight_grads=tuple(made))
    assert all(map(torch.equal, made, before))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["hooks", "reentrant"])
def test_buffers_under_checkpointing(kernel, device, use_reentrant):
    """They are added to once, though the forward runs twice."""
    problem = make(device=device, k=2)
    _, gradients = problems.run(kernel, problem)
    made = [torch.zeros_like(problem.tensors[name]) for name in ("w_up", "w_down")]
    leaves = problem.leaves()

    def layer(*tensors):
        return problem.call(kernel, **dict(zip(leaves, tensors, strict=True)), weight_grads=tuple(made))

    y = torch.utils.checkpoint.checkpoint(layer, *leaves.values(), use_reentrant=use_reentrant)
    y.backward(problem.incoming(y))
    assert all(torch.equal(buffer, gradients[name]) for buffer, name in zip(made, ("w_up", "w_down"), strict=True))


def test_buffers_under_autocast(kernel, device):
    """The weights are float32 and cast; their buffers are float32 and not."""
    problem = make(device=device, extra="", k=2)
    made = [torch.zeros_like(problem.tensors[name]) for name in ("w_up", "w_down")]
    leaves = problem.leaves()
    with torch.autocast(device, dtype=torch.bfloat16):
        y = problem.call(kernel, **leaves, weight_grads=tuple(made))
    assert y.dtype == torch.bfloat16
    y.backward(dy := problem.incoming(y))
    narrow = make(dtype=torch.bfloat16, device=device, extra="", k=2)
    wanted = narrow._replace(
        tensors={n: t if n == "weights" else t.bfloat16() for n, t in problem.tensors.items()}
    ).gradients(dy)
    for name, buffer in zip(("w_up", "w_down"), made, strict=True):
        assert leaves[name].grad is None
        narrow.compare(buffer, wanted[name], torch.float32, None)


def flat_views(flat, *parts):
    """Views of a flat tensor: for each a shape and where it begins."""
    return [flat[first : first + math.prod(shape)].view(shape) for shape, first in parts]


def views_by_expert(flat, *parts):
    """The same where each row of flat is of one expert."""
    return [flat[:, first : first + math.prod(shape[1:])].view(shape) for shape, first in parts]


@pytest.mark.parametrize("by_expert", [False, True], ids=["tensors", "experts"])
def test_buffers_in_one_allocation(kernel, device, by_expert):
    """Behind each other and the weights themselves, as trainers lay them out, all in one or expert by expert."""
    problem = make(device=device, extra="", k=2)
    _, gradients = problems.run(kernel, problem)
    shapes = [problem.tensors[name].shape for name in ("w_up", "w_down")] * 2
    E = shapes[0][0]
    sizes = [math.prod(shape) // (E if by_expert else 1) for shape in shapes]
    parts = zip(shapes, itertools.accumulate(sizes[:-1], initial=0), strict=True)
    flat = torch.zeros((E, sum(sizes)) if by_expert else sum(sizes), device=device)
    *weights, up, down = (views_by_expert if by_expert else flat_views)(flat, *parts)
    leaves = problem.leaves()
    for name, w in zip(("w_up", "w_down"), weights, strict=True):
        leaves[name] = w.copy_(problem.tensors[name]).detach().requires_grad_()
    y = problem.call(kernel, **leaves, weight_grads=(up, down))
    y.backward(problem.incoming(y))
    assert torch.equal(up, gradients["w_up"]) and torch.equal(down, gradients["w_down"])


def test_buffers_that_share_memory_are_refused(kernel, ops, device):
    """One element at either end, with a weight, which autocast may read a copy of, or with each other."""
    problem = make(device=device, extra="")
    up, down = problem.tensors["w_up"], problem.tensors["w_down"]
    size = up.numel()
    flat = torch.zeros(3 * size, device=device)
    (weight,) = flat_views(flat, (up.shape, size))

    def refused(i, other, buffers, dtype=None):
        with (
            problems.Calls(ops) as calls,
            torch.autocast(device, dtype, enabled=dtype is not None),
            pytest.raises(ValueError, match=rf"weight_grads\[{i}\] must not share memory with {other},"),
        ):
            problem.call(kernel, **problem.tensors | {"w_up": weight}, weight_grads=tuple(buffers))
        assert calls.names() == []

    for dtype in (None, torch.bfloat16):
        for first in (1, size, 2 * size - 1):
            refused(0, "w_up", [*flat_views(flat, (up.shape, first)), None], dtype)
        for first in (size - down.numel() + 1, 2 * size - 1):
            refused(1, "w_up", [None, *flat_views(flat, (down.shape, first))], dtype)
        made = flat_views(torch.zeros_like(flat), (up.shape, 0), (down.shape, size - 1))
        refused(1, r"weight_grads\[0\]", made, dtype)
    E, ups, downs = len(up), up[0].numel(), down[0].numel()
    for firsts in ((0, ups - 1), (downs - 1, 0)):
        experts = torch.zeros(E, ups + downs, device=device)
        refused(1, r"weight_grads\[0\]", views_by_expert(experts, *zip((up.shape, down.shape), firsts, strict=True)))


def test_second_derivatives_are_refused(kernel, device):
    """Also where a weight's gradient has gone to a buffer."""
    problem = make(device=device)
    for given in ({}, {"weight_grads": tuple(buffers(problem, torch.float32, False))}):
        leaves = problem.leaves()
        y = problem.call(kernel, **leaves, **given)
        first = torch.autograd.grad(y.square().sum(), [leaves["x"], leaves["weights"]], create_graph=True)
        for gradient in first:
            with pytest.raises(RuntimeError, match="no second derivatives"):
                gradient.sum().backward(retain_graph=True)


# Compilers


def test_one_graph_for_all_token_counts(kernel, device, dynamo):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kernel.moe_mlp, backend=counter, fullgraph=True)
    for T in (64, 65, 100, 7, 512, 33, 2):
        problem = make(T=T, k=2, device=device)
        ids = oracle.make(T, 24, 20, 5, 2, device=device).ids
        want, gradients = problems.run(kernel, problem)
        x, w_up, w_down, weights, bias_up, bias_down = (leaves := problem.leaves()).values()
        y = compiled(x, w_up, w_down, ids, weights, bias_up=bias_up, bias_down=bias_down)
        assert torch.equal(y, want)
        y.backward(problem.incoming(y))
        for name, leaf in leaves.items():
            assert torch.equal(leaf.grad, gradients[name]), name
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "options", [{"combine": "ordered"}, {"combine": "rounded"}, {"out_dtype": torch.float32}, {}], ids=str
)
@pytest.mark.parametrize("form", [Form("clamped_swiglu", interleaved=True), Form("gelu", gated=False)], ids=str)
def test_compiled_in_one_graph(kernel, device, dynamo, form, options):
    problem = make(form, dtype=torch.bfloat16, device=device, distribution="skipped", k=3 if options else 2)
    want, gradients = problems.run(kernel, problem, **options)
    compiled = torch.compile(
        lambda **tensors: problem.call(kernel, **tensors, **options), backend="aot_eager", fullgraph=True
    )
    leaves = problem.leaves()
    y = compiled(**leaves)
    y.backward(problem.incoming(y))
    if problem.tensors["weights"].shape[1] <= 2 or "combine" in options:
        assert torch.equal(y, want)
        for name, leaf in leaves.items():
            assert torch.equal(leaf.grad, gradients[name]), name
    if options.get("combine") == "rounded":
        return  # test_rounded_rows says how exact they are
    problem.check_result(y)
    problem.check_gradients({name: leaf.grad for name, leaf in leaves.items()}, problem.incoming(y))


def test_compiled_without_gradients(kernel, device, dynamo):
    problem = make(device=device)
    want = problem.call(kernel, **problem.tensors)
    compiled = torch.compile(lambda **t: problem.call(kernel, **t), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        oracle.assert_close(compiled(**problem.leaves()), want.double(), 1e-6)


def test_compiled_with_buffers(kernel, device, dynamo):
    """A graph's backward that adds to tensors that the graph was given."""
    problem = make(device=device, k=2)
    want, gradients = problems.run(kernel, problem)
    compiled = torch.compile(lambda **t: problem.call(kernel, **t), backend="aot_eager", fullgraph=True)
    shapes = [problem.tensors[name].shape for name in ("w_up", "w_down")]
    flat = torch.ones(sum(map(math.prod, shapes)), device=device)
    made = flat_views(flat, (shapes[0], 0), (shapes[1], math.prod(shapes[0])))
    leaves = problem.leaves()
    y = compiled(**leaves, weight_grads=tuple(made))
    assert torch.equal(y, want)
    y.backward(problem.incoming(y))
    for name, buffer in zip(("w_up", "w_down"), made, strict=True):
        assert leaves[name].grad is None
        oracle.assert_close(buffer, gradients[name].double() + 1, 1e-6)


# Wrong arguments that only these two have; test_arguments.py has the others


class Wrong:
    """A value that no argument takes."""

    def __str__(self):
        return "Wrong"


def wrong_calls(kernel, device):
    """(what is given in place of the right arguments, the error, what its message says)."""
    Activation = kernel.Activation

    def ones(*shape, **options):
        return torch.ones(shape, device=device, **options)

    for wrong in (None, 3, Wrong(), ("silu", None, None)):
        yield {"activation": wrong}, TypeError, ("activation", "Activation or a str", type(wrong).__name__)
    for wrong in ("swish", "", "SILU"):
        yield {"activation": wrong}, ValueError, ("activation", "silu, gelu", repr(wrong))
        yield {"activation": Activation(wrong)}, ValueError, ("activation", "clamped_swiglu", repr(wrong))
    for wrong in (0, -1.0, float("nan"), float("inf"), 1e39, 2**128, True, "7", Wrong(), ones()):
        given = Activation("silu", limit=wrong)
        yield {"activation": given}, ValueError, ("activation.limit", "positive number of float32 or None", repr(wrong))
        given = Activation("silu", alpha=wrong)
        yield {"activation": given}, ValueError, ("activation.alpha", "positive number of float32 or None", repr(wrong))
    for kind in ("gelu", "gelu_tanh", "relu", "relu2"):
        yield {"activation": Activation(kind, alpha=1.0)}, ValueError, ("activation.alpha", f"None for {kind}", "1.0")
    ungated = {"gated": False, "w_up": ones(5, 20, 24), "bias_up": None}
    yield ungated | {"activation": "clamped_swiglu"}, ValueError, ("gated", "clamped_swiglu", "False")
    given = Activation("silu", 1.0)
    yield ungated | {"activation": given}, ValueError, ("activation.limit", "None without a gate", "1.0")
    yield ungated | {"interleaved": True}, ValueError, ("interleaved", "False without a gate", "True")
    for name, wrong in itertools.product(("gated", "interleaved"), (None, 1, "yes", Wrong())):
        yield {name: wrong}, TypeError, (name, "bool", type(wrong).__name__)
    for wrong in (1, True, "yes", Wrong()):
        yield {"combine": wrong}, ValueError, ("combine", "'ordered'", repr(wrong))

    yield {"gated": False}, ValueError, ("w_up", "[E, I, H] with I = 20", "[5, 40, 24]")
    yield {"w_up": ones(5, 20, 24), "bias_up": None}, ValueError, ("w_up", "[E, 2I, H] with 2I = 40", "[5, 20, 24]")
    yield {"w_down": ones(5, 24, 21)}, ValueError, ("w_up", "[E, 2I, H] with 2I = 42", "[5, 40, 24]")
    nothing = {"w_up": ones(0, 40, 24), "w_down": ones(0, 24, 20), "bias_up": None, "bias_down": None}
    yield nothing, ValueError, ("w_up", "at least one expert", "[0, 40, 24]")

    up, down = ones(5, 40, 24), ones(5, 24, 20)
    for wrong in (None, up, {0: up}, Wrong()):
        yield {"weight_grads": wrong}, TypeError, ("weight_grads", "tuple", type(wrong).__name__)
    for wrong in ((), (up,), (up, down, down)):
        yield {"weight_grads": wrong}, ValueError, ("weight_grads", "2 entries", str(len(wrong)))
    for wrong in (3.0, Wrong(), [up]):
        yield {"weight_grads": (wrong, None)}, TypeError, ("weight_grads[0]", "tensor", type(wrong).__name__)
    for wrong, expected, found in (
        (ones(5, 24, 40), "[5, 40, 24]", "[5, 24, 40]"),
        (ones(40, 24), "[5, 40, 24]", "[40, 24]"),
        (ones(5, 40, 24, dtype=torch.bfloat16), "torch.float32", "torch.bfloat16"),
        (ones(5, 40, 24, dtype=torch.float64), "torch.float32", "torch.float64"),
        (up.to("meta"), device, "meta"),
        (ones(5, 80, 48)[:, ::2, ::2], "contiguous", "(3840, 96, 2)"),
        (ones(1, 40, 24).expand(5, 40, 24), "overlap", "(0, 24, 1)"),
        (up.to_sparse(), "strided", "sparse"),
    ):
        yield {"weight_grads": (wrong, None)}, ValueError, ("weight_grads[0]", expected, found)
    yield {"weight_grads": (None, up)}, ValueError, ("weight_grads[1]", "[5, 24, 20]", "[5, 40, 24]")
    yield {"w_up": up, "weight_grads": (up, None)}, ValueError, ("weight_grads[0]", "another tensor", "the weight")


def test_wrong_arguments_are_refused(kernel, ops, device):
    problem = make(device=device)
    ids = oracle.make(40, 24, 20, 5, 3, device=device).ids
    right = {"topk_weights" if n == "weights" else n: t for n, t in problem.tensors.items()} | {"expert_ids": ids}
    kernel.moe_mlp(**right)
    for given, error, fragments in wrong_calls(kernel, device):
        with problems.Calls(ops) as calls, pytest.raises(error) as caught:
            kernel.moe_mlp(**right | given)
        message = str(caught.value)
        assert calls.names() == [] and "\n" not in message and len(message) < 300, message
        assert all(fragment in message for fragment in fragments), (fragments, message)


def test_wrong_activations_of_gather_gemm_are_refused(kernel, ops, device):
    x, W, ids, _ = oracle.make(40, 24, 21, 5, 3, device=device)
    routing = kernel.route(ids, 5)
    kernel.gather_gemm(x, W, routing, activation="silu", gated=False)
    for given, error, fragments in (
        ({"activation": "silu"}, ValueError, ("W", "even number", "[5, 21, 24]")),
        ({"activation": "swish"}, ValueError, ("activation", "silu, gelu", "'swish'")),
        ({"activation": 3}, TypeError, ("activation", "Activation or a str", "int")),
        ({"activation": "relu", "gated": 1}, TypeError, ("gated", "bool", "int")),
        ({"activation": "clamped_swiglu", "gated": False}, ValueError, ("gated", "clamped_swiglu", "False")),
        ({"interleaved": 2}, TypeError, ("interleaved", "bool", "int")),
    ):
        with problems.Calls(ops) as calls, pytest.raises(error) as caught:
            kernel.gather_gemm(x, W, routing, **given)
        assert calls.names() == [] and all(fragment in str(caught.value) for fragment in fragments), caught.value
