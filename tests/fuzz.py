#!/usr/bin/env python3
"""Calls of the public functions, drawn by hypothesis without end and held against the float64 oracle.

    python tests/fuzz.py --minutes 10                 on a GPU where there is one, with a seed that is printed
    python tests/fuzz.py --minutes 10 --seed 7        the same calls again, as far as time reaches
    python tests/fuzz.py --case '{"function": ...}'   one call: the line that is printed for a failure

A case is what JSON can say: the function, its sizes and options, the kernel configurations to force, and how each
tensor lies in memory. What lies between the values of an input is NaN. Every tensor of an op, also what the package
makes by itself, is moved between NaN, and nothing but the results may be written. The oracle and the tolerances are
those of all tests.

The build is found as the tests find theirs. tests/test_fuzz.py runs a share of this.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import shlex
import sys
import time
from pathlib import Path

import forms
import hypothesis
import oracle
import problems
import torch
from conftest import DEVICES, DTYPES, load_kernel, load_part
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
BATCH = 100  # cases that are drawn from one seed
FENCE = 64  # elements before and behind a tensor of an op, which leave its alignment as it was

budget = settings(
    max_examples=100, deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)

# Cases

features = st.integers(1, 150) | st.integers(1, 20).map(lambda n: 8 * n)  # 16 bytes can be moved at once in some
sizes = st.fixed_dictionaries(
    {
        "T": st.integers(0, 140),
        "K": features,
        "N": features,
        "E": st.integers(1, 20),
        "k": st.integers(1, 6),
        "distribution": st.sampled_from(oracle.DISTRIBUTIONS),
        "seed": st.integers(0, 2**31),
    }
)
devices = st.sampled_from(DEVICES)
device_and_dtype = devices.flatmap(lambda device: st.tuples(st.just(device), st.sampled_from(DTYPES[device])))
functions = st.sampled_from(problems.FUNCTIONS)


def layouts(dims, repeats=False):
    """Where the values of a tensor of so many dimensions lie: these in any order, with gaps, at any offset.

    With `repeats` some dimensions may have stride 0.
    """
    apart = st.lists(st.sampled_from((0, 1, 2, 3, 8, 16)), min_size=dims, max_size=dims)
    return st.fixed_dictionaries(
        {
            "order": st.permutations(range(dims)),
            "gaps": apart,
            "starts": apart,
            "steps": st.lists(st.sampled_from((1, 1, 2)), min_size=dims, max_size=dims),
            "repeated": st.lists(st.sampled_from(range(dims)), unique=True) if repeats else st.just([]),
        }
    )


def placed(t, layout):
    """A view with t's values, between NaN; integers lie between zeros. A repeated dimension has the first of them.

    Errors of equal terms of a sum would not cancel, as the tolerances want them to. So values that are repeated have
    few digits, and sums of nothing but products of such are exact.
    """
    if layout is None:
        return t
    shape = t.shape
    if layout["repeated"]:
        t = with_few_digits(t)
    for d in layout["repeated"]:
        t = t.narrow(d, 0, min(t.shape[d], 1))
    order, steps, starts = layout["order"], layout["steps"], layout["starts"]
    lengths = [starts[d] + steps[d] * t.shape[d] + layout["gaps"][d] for d in order]
    buffer = torch.full(lengths, poison(t.dtype), dtype=t.dtype, device=t.device)
    view = buffer.permute([order.index(d) for d in range(t.dim())])
    for d in range(t.dim()):
        view = view.narrow(d, starts[d], steps[d] * t.shape[d])
    view = view[tuple(slice(None, None, step) for step in steps)]
    view.copy_(t)
    return view.expand(shape)


def with_few_digits(t):
    mantissa, exponent = t.double().frexp()
    return torch.ldexp((mantissa * 8).round() / 8, exponent).to(t.dtype)


def poison(dtype):
    return float("nan") if dtype.is_floating_point else 0


FORMS = {str(form): form for form in oracle.FORMS}
GROUPED_MM = {f"grouped_mm {form}{extra}": (form, extra) for form in forms.FORMS for extra in ("", "+bias")
              if not extra or form in forms.FORMS[:2]}  # fmt: skip
MLP = ("moe_mlp", "moe_mlp+bias_up", "moe_mlp+bias_down")
EVERY = (*problems.FUNCTIONS, *MLP, *GROUPED_MM, "weight_grad")
ACTIVATED = (*MLP, "moe_mlp+bias", "gather_gemm+activation", "gather_gemm+activation+bias")


@functools.cache
def dims_of(function):
    """How many dimensions each of a function's tensors has, the incoming gradient ("dy") and the ids included."""
    if function == "weight_grad":
        return {"ids": 2, "x": 2, "dy": 2, "weights": 2}
    case = {"function": function, "T": 1, "K": 2, "N": 2, "E": 1, "k": 1, "M": 1, "distribution": "uniform", "seed": 0}
    problem = make_problem(case, torch.float32, "cpu")
    result = problem.want(*problem.tensors.values())
    index = 1 if "grouped" in function else 2
    return {"ids": index, "dy": result.dim()} | {name: t.dim() for name, t in problem.tensors.items()}


@st.composite
def cases(draw, device, functions=EVERY):
    function = draw(st.sampled_from(functions))
    dtype = draw(st.sampled_from(DTYPES[device]))
    case = {"function": function, "device": device, "dtype": name_of(dtype), **draw(sizes)}
    if device == "cuda":
        # Tiles have up to 128 rows and up to 256 columns, and a schedule looks at 1024 groups at a time.
        case["T"] = draw(st.just(case["T"]) | st.integers(0, 600))
        case["N"] = draw(st.just(case["N"]) | st.integers(150, 600))
        most = min(1200, 8_000_000 // (case["K"] * case["N"]))  # for the oracle's sake, which has each in float64
        case["E"] = draw(st.just(case["E"]) | st.integers(20, max(most, 20)))
        configs = tuple(config.name for config in load_part("_testing").configs_here())
        case["configs"] = draw(st.lists(st.sampled_from(configs), unique=True, max_size=2))
        case["blocks"] = draw(st.sampled_from((0, 1, 3)))
    case["deterministic"] = draw(st.booleans())
    case["index_dtype"] = name_of(draw(st.sampled_from(INTEGERS)))
    case["between"] = draw(st.sampled_from((0, 1, 8)))
    # What `oracle.tolerance` speaks of: float64 is rounded to float32 nowhere.
    results = (oracle.accumulator(dtype), torch.bfloat16, torch.float16)
    dims = dims_of(function)
    # What is activated shall not lie in the middle between two values all the time: one operand always varies.
    varies = ("ids", "w_up", "w_down", "W") if function in ACTIVATED else ("ids",)
    case["layouts"] = {name: draw(st.none() | layouts(n, repeats=name not in varies)) for name, n in dims.items()}
    if "weights" in dims:
        case["weights_dtype"] = name_of(draw(st.sampled_from(tuple(dict.fromkeys((*results, torch.float64))))))
    if function in ACTIVATED:
        # Without an even number of columns there is no gate.
        fit = [name for name, form in FORMS.items() if not form.gated or "mlp" in function or case["N"] % 2 == 0]
        case["form"] = draw(st.sampled_from(fit))
    if function in GROUPED_MM:
        case["M"] = draw(features)
    if function == "weight_grad":
        for option in ("gather_x", "gather_dy", "weighted", "accumulate", "by_columns", "wide"):
            case[option] = draw(st.booleans())
        return case
    case["out_dtype"] = name_of(draw(st.none() | st.sampled_from(results)))
    if function.startswith("moe_mlp"):
        # Rows that are rounded to something narrow before they are added have tests of their own.
        exact = case["k"] <= 2 or (dtype.itemsize > 2 and case["out_dtype"] in (None, name_of(dtype)))
        case["combine"] = draw(st.sampled_from((None, "ordered", "rounded") if exact else (None, "ordered")))
        case["buffers"] = draw(st.sampled_from((None, "own dtype", "wide")))
    return case


def name_of(dtype):
    return None if dtype is None else str(dtype).removeprefix("torch.")


def dtype_of(name):
    return None if name is None else getattr(torch, name)


# Running one


def as_given(t, dtype, E, layout):
    """Ids, sizes or ends in the dtype, if it holds them; an id that is skipped may be any other such id."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max

    def held(t):
        return (t >= low) & (t <= high)

    if t.dim() == 2:
        t = t.where(oracle.is_live(t, E) | held(t), -1 if dtype.is_signed else E)
    return placed(t.to(dtype) if bool(held(t).all()) else t, layout)


def make_problem(case, dtype, device):
    """The problem of any function but weight_grad."""
    function, E = case["function"], case["E"]
    drawn = {name: case[name] for name in ("T", "K", "N", "E", "k", "distribution", "seed")}
    inputs = oracle.make(**drawn, dtype=dtype, device=device)
    index = functools.partial(
        as_given,
        dtype=dtype_of(case.get("index_dtype", "int64")),
        E=E,
        layout=case.get("layouts", {}).get("ids"),
    )
    if function in GROUPED_MM:
        return grouped_mm(*GROUPED_MM[function], inputs, case, index)
    return problems.build(function, inputs, case["seed"], FORMS.get(case.get("form")), index)


def grouped_mm(form, extra, inputs, case, index):
    """A form of grouped_mm as a problem, the groups being as large as experts have rows."""
    x, W, ids, _ = inputs
    shapes = forms.shapes(form, ids.numel(), len(W), case["M"], case["N"], case["K"])
    generator = torch.Generator(x.device).manual_seed(case["seed"])

    def normal(shape):
        return torch.randn(shape, generator=generator, device=x.device, dtype=torch.float64).to(x.dtype)

    tensors = {name: normal(shape) for name, shape in zip("ab", shapes, strict=True)}
    if extra:
        tensors["bias"] = normal((len(W), case["N"]))
    _, expert = oracle.expert_order(ids, len(W))
    ends = torch.bincount(expert, minlength=len(W) + 1)[: len(W)].cumsum(0).int()
    offs = None if form == "3d x 3d" else index(ends)
    return problems.Problem(
        tensors,
        lambda kernel, a, b, **options: kernel.grouped_mm(a, b, offs=offs, **options),
        lambda a, b, bias=None: forms.loop(
            a.double(), b.double(), ends.tolist(), None if bias is None else bias.double()
        ),
        {"y": None},
        x.dtype,
    )


class Between(TorchDispatchMode):
    """Moves every tensor of the package's ops between NaN for the time of the call, where it lies as it lay: what is
    read outside of it shows, and nothing outside of a result may be written. Rows of results that may lie apart from
    each other lie `apart` elements apart."""

    APART = {
        "gemm": ("out",),
        "gemm_activation": ("pre", "out"),
        "gemm_activation_grad": ("d_pre", "weighted"),
        "sum_rows": ("out",),
    }

    def __init__(self, namespace, apart=0):
        super().__init__()
        self.namespace, self.apart = namespace, apart

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != self.namespace:
            return func(*args, **(kwargs or {}))
        op = func._schema.name.split("::")[1]
        given, results = list(args), []
        for i, (argument, t) in enumerate(zip(func._schema.arguments, args, strict=False)):
            if isinstance(t, torch.Tensor) and t.numel():
                apart = self.apart if argument.name in self.APART.get(op, ()) else 0
                given[i], buffer = between(t, apart)
                if argument.alias_info is not None and argument.alias_info.is_write:
                    results.append((argument.name, t, given[i], buffer, buffer.clone()))
        returned = func(*given, **(kwargs or {}))
        for name, t, result, buffer, before in results:
            before.as_strided(result.shape, result.stride(), result.storage_offset()).copy_(result)
            if not torch.equal(before.view(torch.uint8), buffer.view(torch.uint8)):
                raise AssertionError(f"{op} has written outside of {name}")
            t.copy_(result)
        return returned


def between(t, apart=0):
    """t's values, strides and alignment in a buffer that has poison all around, and the buffer."""
    strides = (t.shape[1] + apart, 1) if apart else t.stride()
    span = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, strides, strict=True))
    start = FENCE + t.data_ptr() % 16 // t.element_size()
    buffer = torch.full((start + span + FENCE,), poison(t.dtype), dtype=t.dtype, device=t.device)
    view = buffer.as_strided(t.shape, strides, start)
    if apart:
        view.copy_(t)
    else:  # with what lies between the values
        buffer[start : start + span].copy_(t.as_strided((span,), (1,)))
    return view, buffer


@contextlib.contextmanager
def circumstances(case):
    """What is set during a call and its backward."""
    with contextlib.ExitStack() as stack:
        if case["device"] == "cuda":
            stack.enter_context(load_part("_testing").forced(*case["configs"], blocks=case["blocks"]))
        if case["deterministic"]:
            stack.enter_context(problems.deterministic())
        stack.enter_context(Between(load_part("_ops").ops.name, case["between"]))
        yield


def run_case(kernel, case):
    """One call with its gradients; raises AssertionError where something is wrong."""
    if case["function"] == "weight_grad":
        return run_weight_grad(kernel, case)
    function, dtype, layouts = case["function"], dtype_of(case["dtype"]), case["layouts"]
    problem = make_problem(case, dtype, case["device"])
    tensors = dict(problem.tensors)
    if "weights" in tensors:
        tensors["weights"] = tensors["weights"].to(dtype_of(case["weights_dtype"]))
    problem = problem._replace(tensors={name: placed(t, layouts[name]) for name, t in tensors.items()})
    options = problems.with_out_dtype(function.split()[0], dtype, dtype_of(case["out_dtype"]))
    buffers = {}
    if function.startswith("moe_mlp"):
        options["combine"] = case["combine"]
        if case["buffers"]:
            wide = dtype if case["buffers"] == "own dtype" else torch.promote_types(dtype, torch.float32)
            buffers = {name: torch.zeros_like(tensors[name], dtype=wide) for name in ("w_up", "w_down")}
            options["weight_grads"] = tuple(buffers.values())

    with circumstances(case):
        leaves = problem.leaves()
        y = problem.call(kernel, **leaves, **options)
        dy = placed(problem.incoming(y), layouts["dy"])
        asked = {name: leaf for name, leaf in leaves.items() if name not in buffers}
        gradients = torch.autograd.grad(y, list(asked.values()), dy)
        with torch.no_grad():
            without = problem.call(kernel, **leaves, **options)
    assert y.dtype == without.dtype == options.get("out_dtype", y.dtype)
    for result in y, without:
        problem.check_result(result, cancels=True)
    problem.check_gradients(dict(zip(asked, gradients, strict=True)), dy, cancels=True)
    wanted = problem.gradients(dy, cancels=True) if buffers else {}
    for name, buffer in buffers.items():
        problem.compare(buffer, wanted[name], buffer.dtype, None, cancels=True)


def run_weight_grad(kernel, case):
    dtype, device, layouts, E, k = dtype_of(case["dtype"]), case["device"], case["layouts"], case["E"], case["k"]
    drawn = {name: case[name] for name in ("T", "K", "E", "k", "distribution", "seed")}
    x, _, ids, weights = oracle.make(**drawn, N=1, dtype=dtype, device=device)
    dy = oracle.make(case["T"], case["N"], 1, 1, 1, dtype, device, seed=case["seed"] + 1).x
    weights = weights.to(dtype_of(case["weights_dtype"])) if case["weighted"] else torch.ones_like(weights)
    order, expert = oracle.expert_order(ids, E)
    token = order // k
    x, dy = (placed(t if case[f"gather_{name}"] else t[token], layouts[name]) for name, t in (("x", x), ("dy", dy)))
    weights = placed(weights, layouts["weights"])
    wide = torch.promote_types(dtype, torch.float32) if case["wide"] else dtype
    shape = (E, case["K"], case["N"]) if case["by_columns"] else (E, case["N"], case["K"])
    before = oracle.make(E * shape[1], shape[2], 1, 1, 1, wide, device, seed=case["seed"] + 2).x.view(shape)
    before = before.transpose(1, 2) if case["by_columns"] else before
    out = before.clone() if case["accumulate"] else torch.full_like(before, float("nan"))
    with circumstances(case):
        kernel.weight_grad(
            x,
            dy,
            kernel.route(as_given(ids, dtype_of(case["index_dtype"]), E, layouts["ids"]), E),
            weights if case["weighted"] else None,
            gather_x=case["gather_x"],
            gather_dy=case["gather_dy"],
            out=out,
            accumulate=case["accumulate"],
        )
    x, dy = (t[token] if case[f"gather_{name}"] else t for name, t in (("x", x), ("dy", dy)))
    weights, by_columns = weights.flatten()[order], out.shape[2] > 1 and out.stride(2) != 1
    want, slack = oracle.weight_gradient(x, dy, weights, expert, E, by_columns)
    terms, _ = oracle.weight_gradient(x.abs(), dy.abs(), weights.abs(), expert, E, by_columns)
    if case["accumulate"]:
        want, terms = want + before.double(), terms + before.double().abs()
    floor = oracle.cancellation(terms, want, dtype, wide)
    oracle.assert_close(out, want, oracle.tolerance(dtype, wide), slack=slack, floor=floor)


# Without end


def hunt(kernel, device, seed, enough, functions=EVERY):
    """How many cases ran until enough(how many), and those that failed, as small as hypothesis could make them."""
    ran, failed = 0, []
    wrong = None  # the last case of this batch that failed: the smallest one, once the batch has ended

    def one(case):
        nonlocal ran, wrong
        if enough(ran) and wrong is None:
            return  # a failure, though, is made small
        ran += 1
        try:
            run_case(kernel, case)
        except Exception:
            wrong = case
            raise

    how = settings(budget, max_examples=BATCH, print_blob=False, report_multiple_bugs=False)
    for batch in itertools.count():
        if enough(ran):
            break
        wrong = None
        try:
            hypothesis.seed(seed + (batch << 32))(how(hypothesis.given(cases(device, functions))(one)))()
        except Exception as error:
            if wrong is None:  # not of a case
                raise
            failed.append(wrong)
            print(f"{type(error).__name__}: {error}\n{reproducer(wrong)}", flush=True)
            if "CUDA error" in str(error):
                break  # the GPU answers no more in this process
    return ran, failed


def reproducer(case):
    return f"python tests/fuzz.py --case {shlex.quote(json.dumps(case))}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[-1])
    parser.add_argument("--seed", type=int, help="one of its own unless given")
    parser.add_argument("--case", type=json.loads, help="run this one alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the counts go too")
    args = parser.parse_args()
    if args.case:
        run_case(load_kernel(), args.case)
        print("This case is right.")
        return 0
    seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    kernel, end = load_kernel(), time.monotonic() + 60 * args.minutes
    ran, failed = hunt(kernel, args.device, seed, lambda ran: time.monotonic() >= end)
    print(f"{ran} cases on {args.device} in {args.minutes:g} minutes from seed {seed}: {len(failed)} failures")
    if args.json:
        counts = {"seed": seed, "minutes": args.minutes, "cases": ran, "failures": len(failed)}
        args.json.write_text(json.dumps(counts))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
