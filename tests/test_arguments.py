"""Every argument wrong in every way: refused before any operator runs, by a sentence that names the argument, what is
expected and what was found."""

import re

import oracle
import problems
import pytest
import torch

T, K, N, E, k = 20, 32, 24, 4, 2
SIZES = {"T": T, "K": K, "N": N, "E": E, "k": k, "S": T * k, "H": K, "I": N, "2I": 2 * N}
TENSORS = {  # of each function: its tensor arguments and their dimensions
    "moe": {"x": "T K", "W": "E N K", "expert_ids": "T k", "topk_weights": "T k"},
    "grouped_gemm": {"a": "S K", "W": "E N K", "group_sizes": "E"},
    "route": {"expert_ids": "T k"},
    "gather_gemm": {"x": "T K", "W": "E N K", "bias": "E N"},
    "gemm_combine": {"h": "S K", "W": "E N K", "topk_weights": "T k", "bias": "E N"},
    "moe_mlp": {
        "x": "T H",
        "w_up": "E 2I H",
        "w_down": "E H I",
        "expert_ids": "T k",
        "topk_weights": "T k",
        "bias_up": "E 2I",
        "bias_down": "E H",
    },
    "weight_grad": {"x": "T K", "dy": "T N", "topk_weights": "T k", "out": "E N K"},
}
PRODUCTS = [function for function in TENSORS if function != "route"]
ROUTED = ("gather_gemm", "gemm_combine", "weight_grad")
WITH_ENDS = (*ROUTED, "grouped_gemm", "grouped_mm")
FIXED_BY = {function: {"routing": "T k S E"} for function in ROUTED}
OPTIONAL = ("bias", "bias_up", "bias_down", "weight_grad.topk_weights", "out")
INTEGERS, WEIGHTS = ("expert_ids", "group_sizes"), ("topk_weights",)
OPERANDS = ("x", "a", "h", "W", "bias", "w_up", "w_down", "bias_up", "bias_down", "dy")
SUPPORTED = {
    INTEGERS: ("int8", "int16", "int32", "int64", "uint8"),
    WEIGHTS: ("float32", "bfloat16", "float16", "float64"),
    OPERANDS: ("float32", "bfloat16", "float16"),
}


def right(kernel, function, device):
    """Arguments by name of a right call."""
    x, W, ids, weights = oracle.make(T, K, N, E, k, device=device)
    routing = kernel.route(ids, E)
    bias = torch.ones(E, N, device=device)
    rows = x[routing.row_assignment.long() // k]
    return {
        "moe": {"x": x, "W": W, "expert_ids": ids, "topk_weights": weights},
        "grouped_gemm": {"a": rows, "W": W, "group_sizes": routing.offs.diff(prepend=routing.offs.new_zeros(1))},
        "route": {"expert_ids": ids, "num_experts": E},
        "gather_gemm": {"x": x, "W": W, "routing": routing, "bias": bias},
        "gemm_combine": {"h": rows, "W": W, "routing": routing, "topk_weights": weights, "bias": bias},
        "moe_mlp": {
            "x": x,
            "w_up": torch.cat([W, W], 1),
            "w_down": W.transpose(1, 2),
            "expert_ids": ids,
            "topk_weights": weights,
            "bias_up": torch.cat([bias, bias], 1),
            "bias_down": torch.ones(E, K, device=device),
        },
        "weight_grad": {
            "x": x,
            "dy": torch.ones(T, N, device=device),
            "routing": routing,
            "topk_weights": weights,
            "out": torch.zeros(E, N, K, device=device),
        },
    }[function]


def refused(kernel, ops, function, arguments, names, *fragments, error=ValueError, may_run=False):
    """Calls with wrong arguments; the message must hold one of `names` as a word, and every fragment."""
    plain = {n: t for n, t in arguments.items() if type(t) is torch.Tensor and not t.is_nested}
    tensors = {n: t for n, t in plain.items() if t.layout is torch.strided}
    before = {n: t.clone() for n, t in tensors.items() if t.device.type != "meta" and t.numel() < 2**20}
    with problems.Calls(ops) as calls, pytest.raises(error) as caught:
        getattr(kernel, function)(**arguments)
    assert may_run or calls.names() == [], "an operator ran before the call was refused"
    for name, copy in before.items():
        assert torch.equal(arguments[name], copy), f"{name} was written"
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300, message
    assert any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", message) for name in names), (names, message)
    for fragment in fragments:
        assert fragment in message, (fragment, message)


def every(kinds=(*INTEGERS, *WEIGHTS, *OPERANDS, "out")):
    return [(function, name) for function, tensors in TENSORS.items() for name in tensors if name in kinds]


def dims(function, name):
    return f"[{', '.join(TENSORS[function][name].split())}]"


def test_the_right_calls_are_right(kernel, device):
    """What the other tests spoil works when it is not spoilt."""
    for function in TENSORS:
        getattr(kernel, function)(**right(kernel, function, device))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("function, name", every())
def test_rank(kernel, ops, device, function, name):
    arguments = right(kernel, function, device)
    for wrong in (arguments[name][0], arguments[name][None], arguments[name].new_zeros(())):
        spoilt = arguments | {name: wrong}
        refused(kernel, ops, function, spoilt, [name], dims(function, name), str(list(wrong.shape)))


def shared_sizes():
    """Each dimension of each tensor whose size is also that of another argument."""
    for function, name in every():
        others = {n: d for n, d in (TENSORS[function] | FIXED_BY.get(function, {})).items() if n != name}
        for index, letter in enumerate(TENSORS[function][name].split()):
            sharing = [n for n, d in others.items() if letter in d.split()]
            if sharing:
                yield function, name, index, letter, sharing


@pytest.mark.parametrize("function, name, index, letter, sharing", list(shared_sizes()))
def test_sizes_that_disagree(kernel, ops, device, function, name, index, letter, sharing):
    arguments = right(kernel, function, device)
    tensor = arguments[name]
    for wrong in (tensor.narrow(index, 0, SIZES[letter] - 1), torch.cat([tensor, tensor.narrow(index, 0, 1)], index)):
        spoilt = arguments | {name: wrong}
        size = wrong.shape[index]
        names = [name, *sharing, *(f"routing.{field}" for field in ("row_assignment", "offs"))]
        refused(kernel, ops, function, spoilt, names, letter, str(size), str(SIZES[letter]))


@pytest.mark.parametrize("function, name", every())
def test_not_a_tensor(kernel, ops, device, function, name):
    arguments = right(kernel, function, device)
    for wrong in (arguments[name].tolist(), arguments[name].cpu().numpy(), 3.0, None):
        if wrong is None and (name in OPTIONAL or f"{function}.{name}" in OPTIONAL):
            continue
        spoilt = arguments | {name: wrong}
        refused(kernel, ops, function, spoilt, [name], "tensor", type(wrong).__name__, error=TypeError)


@pytest.mark.parametrize("kinds", SUPPORTED, ids=str)
def test_dtype(kernel, ops, device, kinds):
    other = {
        INTEGERS: (torch.float32, torch.float64, torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.uint64),
        WEIGHTS: (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn),
        OPERANDS: (torch.int32, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn),
    }[kinds]
    for function, name in every(kinds):
        arguments = right(kernel, function, device)
        for dtype in other:
            wrong = torch.zeros(arguments[name].shape, dtype=dtype, device=device)
            first = next(iter(TENSORS[function]))
            expected = SUPPORTED[kinds] if kinds != OPERANDS or name == first else ("float32",)
            refused(kernel, ops, function, arguments | {name: wrong}, [name], *expected, str(dtype))


@pytest.mark.parametrize("function", PRODUCTS)
def test_mixed_operand_dtypes(kernel, ops, device, function):
    arguments = right(kernel, function, device)
    first, *rest = (name for name in TENSORS[function] if name in OPERANDS)
    for name in rest:
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            spoilt = arguments | {name: arguments[name].to(dtype)}
            refused(kernel, ops, function, spoilt, [name], first, "float32", str(dtype))
    spoilt = arguments | {first: arguments[first].bfloat16()}
    refused(kernel, ops, function, spoilt, [first], "bfloat16", "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("function", PRODUCTS)
def test_float64_is_for_the_cpu(kernel, ops, function):
    arguments = right(kernel, function, "cuda")
    arguments |= {name: t.double() for name, t in arguments.items() if name in OPERANDS}
    first = next(iter(TENSORS[function]))
    refused(kernel, ops, function, arguments, [first], "float32", "float64")


@pytest.mark.parametrize("function, name", [(f, n) for f, n in every() if f != "route"])
def test_mixed_devices(kernel, ops, device, function, name):
    arguments = right(kernel, function, device)
    for other in ("meta", *(("cpu",) if device == "cuda" else ())):
        spoilt = arguments | {name: arguments[name].to(other)}
        refused(kernel, ops, function, spoilt, [name], device, other)


@pytest.mark.parametrize("function, name", every())
def test_layout(kernel, ops, device, function, name):
    arguments = right(kernel, function, device)
    tensor = arguments[name]
    refused(kernel, ops, function, arguments | {name: tensor.to_sparse()}, [name], "strided", "sparse_coo")
    if tensor.dim() == 2:
        refused(kernel, ops, function, arguments | {name: tensor.to_sparse_csr()}, [name], "strided", "sparse_csr")
    if tensor.device.type == "cpu" and tensor.is_floating_point():
        refused(kernel, ops, function, arguments | {name: tensor.to_mkldnn()}, [name], "strided", "mkldnn")


@pytest.mark.parametrize("function, name", every())
def test_distributed_tensor(kernel, ops, mesh, function, name):
    from torch.distributed.tensor import DTensor

    arguments = right(kernel, function, "cpu")
    spoilt = arguments | {name: DTensor.from_local(arguments[name], mesh)}
    with pytest.raises(TypeError, match=rf"{name}.*DTensor.*\.to_local\(\)"):
        getattr(kernel, function)(**spoilt)


@pytest.mark.parametrize("function", ["moe", "gather_gemm"])
def test_more_experts_than_int32_counts(kernel, ops, device, function):
    arguments = right(kernel, function, device)
    arguments["W"] = arguments["W"][:1].expand(2**31, N, K)
    arguments.pop("bias", None)
    if "routing" in arguments:
        offs = arguments["routing"].offs[:1].expand(2**31)
        arguments["routing"] = arguments["routing"]._replace(offs=offs)
    refused(kernel, ops, function, arguments, ["W"], "2**31", str([2**31, N, K]))


@pytest.mark.parametrize("function", PRODUCTS)
def test_tensors_that_are_not_plain(kernel, ops, device, function):
    """A tensor made of tensors would run the ops for each of them, into one result; a nested one has no shape."""
    from torch.testing._internal.two_tensor import TwoTensor

    arguments = right(kernel, function, device)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            spoilt = arguments | {name: TwoTensor(value, value.clone())}
            refused(kernel, ops, function, spoilt, [name], "plain tensor", "TwoTensor", error=TypeError)
            spoilt = arguments | {name: torch.nested.nested_tensor([value, value])}
            refused(kernel, ops, function, spoilt, [name], "strided", "nested")


@pytest.mark.parametrize("function", ["moe", "grouped_gemm"])
def test_no_expert(kernel, ops, device, function):
    arguments = right(kernel, function, device)
    arguments["W"] = arguments["W"][:0]
    if "group_sizes" in arguments:
        arguments["group_sizes"] = arguments["group_sizes"][:0]
    refused(kernel, ops, function, arguments, ["W"], "at least", str([0, N, K]))


@pytest.mark.parametrize("wrong", [0, -1, 2**31, 2**40])
def test_number_of_experts(kernel, ops, device, wrong):
    arguments = right(kernel, "route", device) | {"num_experts": wrong}
    refused(kernel, ops, "route", arguments, ["num_experts"], "at least 1", str(wrong))


@pytest.mark.parametrize("wrong", [4.0, "4", True, None, (4,)], ids=str)
def test_number_of_experts_of_another_type(kernel, ops, device, wrong):
    arguments = right(kernel, "route", device) | {"num_experts": wrong}
    refused(kernel, ops, "route", arguments, ["num_experts"], "int", type(wrong).__name__, error=TypeError)


@pytest.mark.parametrize("function", ["moe", "route", "grouped_gemm"])
def test_more_rows_than_int32_counts(kernel, ops, device, function):
    """2**31 assignments; the tensors are expanded views, and nothing of their size is made before the refusal."""
    arguments = right(kernel, function, device)
    if function == "grouped_gemm":
        arguments["a"] = arguments["a"][:1].expand(2**31, K)
        name, found = "a", [2**31, K]
    else:
        many, few = 2**16, 2**15
        arguments["expert_ids"] = arguments["expert_ids"][:1, :1].expand(many, few)
        name, found = "expert_ids", [many, few]
        if function == "moe":
            arguments["x"] = arguments["x"][:1].expand(many, K)
            arguments["topk_weights"] = arguments["topk_weights"][:1, :1].expand(many, few)
    refused(kernel, ops, function, arguments, [name], "2**31", str(found))


@pytest.mark.parametrize("function", ["moe", "gather_gemm", "gemm_combine", "moe_mlp"])
@pytest.mark.parametrize(
    "wrong", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64, "float32"]
)
def test_out_dtype(kernel, ops, device, function, wrong):
    arguments = right(kernel, function, device) | {"out_dtype": wrong}
    error = (TypeError, ValueError) if isinstance(wrong, str) else ValueError
    refused(kernel, ops, function, arguments, ["out_dtype"], "bfloat16", str(wrong), error=error)


@pytest.mark.parametrize("function", ROUTED)
def test_not_a_routing(kernel, ops, device, function):
    arguments = right(kernel, function, device)
    ids = torch.zeros(T, k, dtype=torch.int64, device=device)
    for wrong in (None, ids, tuple(arguments["routing"])):
        spoilt = arguments | {"routing": wrong}
        refused(kernel, ops, function, spoilt, ["routing"], "Routing", type(wrong).__name__, error=TypeError)


@pytest.mark.parametrize("function", ROUTED)
def test_routing_that_is_not_what_route_made(kernel, ops, device, function):
    arguments = right(kernel, function, device)
    routing = arguments["routing"]
    rows, offs = routing.row_assignment, routing.offs
    wrong = [  # field, its wrong value, what the message says
        ("row_assignment", rows.long(), ("int32", "int64")),
        ("row_assignment", rows[:-1], ("[S]", str([T * k - 1]))),
        ("row_assignment", rows[None], ("[S]", str([1, T * k]))),
        ("row_assignment", rows.to("meta"), (device, "meta")),
        ("row_assignment", rows.tolist(), ("tensor", "list")),
        ("offs", offs.float(), ("int32", "float32")),
        ("offs", offs[:-1], ("E", str(E - 1))),
        ("offs", offs.to("meta"), (device, "meta")),
    ]
    for field, value, fragments in wrong:
        spoilt = arguments | {"routing": routing._replace(**{field: value})}
        error = TypeError if isinstance(value, list) else ValueError
        names = [f"routing.{field}", *(["out"] if function == "weight_grad" else [])]
        refused(kernel, ops, function, spoilt, names, *fragments, error=error)


@pytest.mark.parametrize("function", ROUTED)
def test_routing_of_another_call(kernel, ops, device, function):
    arguments = right(kernel, function, device)
    ids = torch.zeros(T + 1, k, dtype=torch.int64, device=device)
    spoilt = arguments | {"routing": kernel.route(ids, E)}
    refused(kernel, ops, function, spoilt, ["x", "h", "topk_weights"], "42" if function == "gemm_combine" else "21")
    spoilt = arguments | {"routing": kernel.route(ids[:T], E + 1)}
    refused(kernel, ops, function, spoilt, ["W", "out", "routing.offs"], "E", "5", "4")


@pytest.mark.parametrize(
    "sizes, dtype",
    [
        ((41, 0, 0, 0), torch.int64),  # one more than there are rows
        ((10, -1, 10, 10), torch.int64),
        ((-40, 0, 40, 40), torch.int32),
        ((10, -10, 10, -10), torch.int8),
        ((2**31 - 1, 2**31 - 1, 2, 0), torch.int32),  # 0 when summed in 32 bits
        ((2**62, 2**62, 2**62, 2**62), torch.int64),  # 0 when summed in 64 bits
        ((2**32, 0, 0, 0), torch.int64),  # 0 when cut to 32 bits
        ((255, 255, 255, 255), torch.uint8),
    ],
    ids=str,
)
def test_group_sizes_on_the_cpu(kernel, ops, sizes, dtype):
    arguments = right(kernel, "grouped_gemm", "cpu") | {"group_sizes": torch.tensor(sizes, dtype=dtype)}
    refused(kernel, ops, "grouped_gemm", arguments, ["group_sizes"], str(T * k), may_run=True)


@pytest.mark.parametrize(
    "offs, found", [((10, 5, 20, 40), 5), ((-1, 5, 10, 40), -1), ((10, 20, 30, 41), 41), ((50, 20, 30, 40), 50)]
)
@pytest.mark.parametrize("function", ROUTED)
def test_offsets_on_the_cpu(kernel, ops, function, offs, found):
    """Decreasing, negative or beyond the rows."""
    arguments = right(kernel, function, "cpu")
    arguments["routing"] = arguments["routing"]._replace(offs=torch.tensor(offs, dtype=torch.int32))
    refused(kernel, ops, function, arguments, ["offs", "routing.offs"], str(T * k), str(found), may_run=True)


@pytest.mark.parametrize("function", ["moe", "moe_mlp", "route"])
def test_ids_have_no_gradient(kernel, ops, device, function):
    arguments = right(kernel, function, device)
    spoilt = arguments | {"expert_ids": arguments["expert_ids"].double().requires_grad_()}
    refused(kernel, ops, function, spoilt, ["expert_ids"], "int64", "float64")


def at_ends(kernel, function, ends, S, dtype):
    """Forward and backward with the rows of four experts ending at `ends`, whatever they are."""
    x, W, ids, weights = oracle.make(S // 2, 72, 136, 4, 2, dtype, ends.device)
    routing = kernel.route(ids, 4)._replace(offs=ends)
    x, W, weights = (t.requires_grad_() for t in (x, W, weights))
    rows, wide = (torch.ones(S, n, dtype=dtype, device=ends.device).requires_grad_() for n in (72, 136))
    results = {
        "gather_gemm": lambda: [kernel.gather_gemm(x, W, routing)],
        "gemm_combine": lambda: [kernel.gemm_combine(rows, W, routing, weights)],
        "weight_grad": lambda: [kernel.weight_grad(x, wide[: S // 2], routing, weights)],
        "grouped_gemm": lambda: [kernel.grouped_gemm(rows, W, ends.long().diff(prepend=ends.new_zeros(1)))],
        "grouped_mm": lambda: [
            kernel.grouped_mm(rows, W.mT, offs=ends),
            kernel.grouped_mm(rows.T, wide, offs=ends),
            kernel.grouped_mm(W, rows.T, offs=ends),
        ],
    }[function]()
    for y in results:
        if y.requires_grad:
            y.sum().backward()
    return results


@pytest.mark.parametrize("function", WITH_ENDS)
def test_right_ends(kernel, device, function):
    """What the next test spoils."""
    ends = torch.tensor([10, 10, 30, 40], dtype=torch.int32, device=device)
    assert all(y.isfinite().all() and y.any() for y in at_ends(kernel, function, ends, 40, torch.float32))


WRONG_OFFSETS = [
    (40, -3, 20, 90),
    (-1, -(2**31), 10, 2**31 - 1),
    (2**31 - 1, 0, 0, 0),
    (1000, 2000, 3000, 4000),
    (-4, -3, -2, -1),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offs", WRONG_OFFSETS, ids=str)
@pytest.mark.parametrize("function", WITH_ENDS)
def test_wrong_values_on_a_gpu_fault_nothing(kernel, function, offs, dtype):
    """They are not read back: numbers may be wrong, but forward and backward stay inside of the tensors.

    Few rows an expert and many, which take other tiles. tools/sanitize_sweep.py has the same for compute-sanitizer.
    """
    ends = torch.tensor(offs, dtype=torch.int32, device="cuda")
    for S in (40, 1024):
        results = at_ends(kernel, function, ends, S, dtype)
        torch.cuda.synchronize()
        assert all(y.isfinite().all() for y in results)
