"""Each public function as one kind of object: its tensors, how to call it, and its oracle."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import oracle
import rounding
import torch
from torch.utils._python_dispatch import TorchDispatchMode

LINEAR = (
    "moe",
    "grouped_gemm",
    "grouped_mm",
    "gather_gemm",
    "gather_gemm+bias",
    "gemm_combine",
    "gemm_combine+bias",
)
FUNCTIONS = (*LINEAR, "gather_gemm+activation", "moe_mlp+bias")


def with_out_dtype(function, dtype, out_dtype):
    """The options for a result in out_dtype of operands in dtype; none where the function does not take it, or None."""
    taken = {"grouped_gemm": (), "grouped_mm": (dtype, oracle.accumulator(dtype))}.get(function, (out_dtype,))
    return {"out_dtype": out_dtype} if out_dtype in taken and out_dtype is not None else {}


class Problem(NamedTuple):
    tensors: dict[str, torch.Tensor]  # the differentiable arguments
    call: Callable  # call(kernel, **tensors, **options) -> result
    want: Callable  # want(*tensors) -> result in float64
    groups: dict[str, torch.Tensor]  # the expert of each row, for the result ("y") and for the tensors with rows
    dtype: torch.dtype  # of the operands
    weighted_rows: Callable | None = None  # of the tensors' rows and dy's: x, dy, routing weight and expert of each
    estimates: Callable | None = None  # of the tensors, `every` and dy or None: as in rounding.py

    def leaves(self, only=None):
        """The tensors, requiring gradients: all of them or those named. Their strides and storage stay."""
        names = self.tensors if only is None else only
        return {n: t.detach().requires_grad_(n in names) for n, t in self.tensors.items()}

    def of_each_expert(self):
        """The names of the tensors that hold something for each expert."""
        return [name for name in self.tensors if name.startswith(("W", "w_", "bias"))]

    def incoming(self, like, seed=1):
        """A random gradient for the result, exact in the operands' dtype, which the backward casts it to."""
        generator = torch.Generator(like.device).manual_seed(seed)
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        noise = torch.randn(like.shape, generator=generator, device=like.device, dtype=wide)
        return noise.to(self.dtype).to(like.dtype)

    def result(self, cancels=False):
        """The result as an `Estimate`."""
        tensors = self.tensors.values()
        if self.estimates:
            return self.estimates(*tensors, every=cancels)["y"]
        want = self.want(*tensors)
        return rounding.Estimate(want, torch.zeros_like(want), self.want(*absolutes(tensors)))

    def gradients(self, dy, by_columns=False, cancels=False):
        """The gradients by name, each an `Estimate`.

        Narrow operands: a row's weight * dy is rounded to their dtype before it is multiplied for W and bias, where the
        gradient of W is stored by columns weight * x instead: see `oracle.weight_gradient`.
        """
        names, tensors = zip(*self.tensors.items(), strict=True)
        if self.estimates:
            return self.estimates(*tensors, every=cancels, dy=dy)
        values = oracle.gradients(self.want, tensors, dy)
        # These functions are sums of products: of absolute values they are the sums of |terms|.
        terms = oracle.gradients(self.want, absolutes(tensors), dy.abs())
        found = {
            name: rounding.Estimate(value, torch.zeros_like(value), term)
            for name, value, term in zip(names, values, terms, strict=True)
        }
        if self.dtype.itemsize == 2 and self.weighted_rows:
            x, dy, weights, expert = self.weighted_rows(*tensors, dy)
            given = dy.to(self.dtype), weights, expert, len(found["W"].value)
            value, slack = oracle.weight_gradient(x.to(self.dtype), *given, by_columns)
            found["W"] = found["W"]._replace(value=value, slack=slack)
            if "bias" in names:
                ones = x.new_ones(len(x), 1)
                value, slack = (t[..., 0] for t in oracle.weight_gradient(ones, *given, False))
                found["bias"] = found["bias"]._replace(value=value, slack=slack)
        return found

    def check_result(self, y, cancels=False):
        """A result against the oracle's; for `cancels` see `check`."""
        self.compare(y, self.result(cancels), y.dtype, self.groups["y"], cancels)

    def check_gradients(self, got, dy, cancels=False):
        """Gradients by name against the oracle's."""
        by_columns = "W" in got and got["W"].shape[2] > 1 and got["W"].stride(2) != 1
        want = self.gradients(dy, by_columns, cancels)
        for name, gradient in got.items():
            dtype = self.tensors[name].dtype
            assert gradient.dtype == dtype, name
            try:
                self.compare(gradient, want[name], dtype, self.groups.get(name), cancels)
            except AssertionError as error:
                raise AssertionError(f"gradient of {name}: {error}") from None

    def compare(self, got, want, dtype, groups, cancels=False):
        """`dtype` is what the value was rounded to last, which may since have been cast to a wider one."""
        floor = oracle.cancellation(want.terms, want.value, self.dtype, dtype) if cancels else None
        oracle.assert_close(got, want.value, oracle.tolerance(self.dtype, dtype), groups, want.slack, floor)


def absolutes(tensors):
    return [t.detach().abs() for t in tensors]


def make(function, T, K, N, E, k, dtype=torch.float32, device="cpu", distribution="uniform", seed=0):
    return build(function, oracle.make(T, K, N, E, k, dtype, device, distribution, seed), seed)


def build(function, inputs, seed=0, form=None, index=lambda t: t):
    """The problem of calling `function` on `inputs`. grouped_gemm and gemm_combine get rows in expert order.

    An MLP has W's in-features in and out, and W's out-features between. The ids, or group sizes or ends, are handed
    over as `index` makes them, and follow the tensors to their device, so that a problem can be moved.
    """
    x, W, ids, weights = inputs
    given = None if function.startswith("grouped") else index(ids)
    dtype, E = x.dtype, len(W)
    order, expert = oracle.expert_order(ids, E)
    by_token = ids[:, 0] if ids.shape[1] else torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    by_token = torch.where(oracle.is_live(by_token, E), by_token, E)
    generator = torch.Generator(x.device).manual_seed(seed + 1)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=x.device, dtype=weights.dtype)

    function, *extras = function.split("+")
    bias = {"bias": normal(*W.shape[:2]).to(dtype)} if "bias" in extras else {}

    match function:
        case "moe":
            return Problem(
                {"x": x, "W": W, "weights": weights},
                lambda kernel, x, W, weights, **options: kernel.moe(x, W, given.to(x.device), weights, **options),
                lambda x, W, weights: oracle.moe(x, W, ids, weights),
                {"y": by_token, "x": by_token},
                dtype,
                lambda x, W, weights, dy: (
                    *(t.repeat_interleave(ids.shape[1], 0) for t in (x, dy)),
                    weights.flatten(),
                    ids.flatten(),
                ),
            )
        case "grouped_gemm" | "grouped_mm":
            sizes = torch.bincount(expert, minlength=E + 1)[:E]
            given_sizes, given_ends = index(sizes), index(sizes.cumsum(0).int())
            calls = {
                "grouped_gemm": lambda kernel, a, W: kernel.grouped_gemm(a, W, given_sizes.to(a.device)),
                "grouped_mm": lambda kernel, a, W, **options: kernel.grouped_mm(
                    a, W.mT, offs=given_ends.to(a.device), **options
                ),
            }
            return Problem(
                {"a": x[order // max(ids.shape[1], 1)], "W": W},
                calls[function],
                lambda a, W: oracle.grouped_gemm(a, W, sizes),
                {"y": expert, "a": expert},
                dtype,
            )
        case "gather_gemm" if "activation" in extras:
            form = form or (oracle.Form() if W.shape[1] % 2 == 0 else oracle.Form("gelu", gated=False))
            return Problem(
                {"x": x, "W": W, **bias},
                lambda kernel, x, W, **options: kernel.gather_gemm(
                    x, W, kernel.route(given.to(x.device), E), **form_options(kernel, form), **options
                ),
                lambda x, W, bias=None: oracle.gather_gemm(x, W, ids, bias, form),
                {"y": expert, "x": by_token},
                dtype,
                estimates=lambda x, W, bias=None, **how: rounding.gather_gemm(form, x, W, ids, bias, dtype, **how),
            )
        case "moe_mlp":
            form = form or oracle.Form()
            inner = W.shape[1]
            w_up = torch.cat([W, (normal(*W.shape) / max(x.shape[1], 1) ** 0.5).to(dtype)], 1) if form.gated else W
            w_down = (normal(E, x.shape[1], inner) / max(inner, 1) ** 0.5).to(dtype)
            biases = {
                name: normal(*w.shape[:2]).to(dtype)
                for name, w in (("bias_up", w_up), ("bias_down", w_down))
                if name in extras or "bias" in extras
            }
            return Problem(
                {"x": x, "w_up": w_up, "w_down": w_down, "weights": weights, **biases},
                lambda kernel, x, w_up, w_down, weights, **options: kernel.moe_mlp(
                    x, w_up, w_down, given.to(x.device), weights, **form_options(kernel, form), **options
                ),
                lambda x, w_up, w_down, weights, *given: oracle.moe_mlp(
                    x, w_up, w_down, ids, weights, **dict(zip(biases, given, strict=True)), form=form
                ),
                {"y": by_token, "x": by_token},
                dtype,
                estimates=lambda x, w_up, w_down, weights, *given, **how: rounding.moe_mlp(
                    form, x, w_up, w_down, weights, dict(zip(biases, given, strict=True)), ids, dtype, **how
                ),
            )
        case "gather_gemm":
            return Problem(
                {"x": x, "W": W, **bias},
                lambda kernel, x, W, bias=None, **options: kernel.gather_gemm(
                    x, W, kernel.route(given.to(x.device), E), bias=bias, **options
                ),
                lambda x, W, bias=None: oracle.gather_gemm(x, W, ids, bias),
                {"y": expert, "x": by_token},
                dtype,
            )
        case "gemm_combine":
            return Problem(
                {"h": x[order // max(ids.shape[1], 1)], "W": W, "weights": weights, **bias},
                lambda kernel, h, W, weights, bias=None, **options: kernel.gemm_combine(
                    h, W, kernel.route(given.to(h.device), E), weights, bias=bias, **options
                ),
                lambda h, W, weights, bias=None: oracle.gemm_combine(h, W, ids, weights, bias),
                {"y": by_token, "h": expert},
                dtype,
                lambda h, W, weights, *bias_dy: (
                    h,
                    bias_dy[-1][order // max(ids.shape[1], 1)],
                    weights.flatten()[order],
                    expert,
                ),
            )


def form_options(kernel, form):
    """An `oracle.Form` as the functions take it."""
    activation = kernel.Activation(form.kind, form.limit, form.alpha)
    return {"activation": activation, "gated": form.gated, "interleaved": form.interleaved}


def run(kernel, problem, dy=None, only=None, **options):
    """The result, and the gradients of sum(result * dy) to the tensors named in `only` (all), by name."""
    leaves = problem.leaves(only)
    y = problem.call(kernel, **leaves, **options)
    asked = {n: t for n, t in leaves.items() if t.requires_grad}
    dy = problem.incoming(y) if dy is None else dy
    found = torch.autograd.grad(y, list(asked.values()), dy) if asked else ()
    return y.detach(), dict(zip(asked, found, strict=True))


def check(kernel, problem, dy=None, cancels=False, **options):
    """The result and every gradient against the oracle; the result's dtype is left to the caller.

    `cancels` allows for results of so few values, of any sizes and seed, that the terms of all of them may cancel.
    """
    y, gradients = run(kernel, problem, dy, **options)
    problem.check_result(y, cancels)
    problem.check_gradients(gradients, problem.incoming(y) if dy is None else dy, cancels)
    return y


def misaligned(t, offset=1):
    """A contiguous copy of t that begins `offset` elements behind the start of an allocation."""
    return torch.cat([t.new_zeros(offset), t.flatten()])[offset:].view_as(t)


@contextmanager
def no_waiting():
    """What would have the host wait for the GPU raises; inside of a capture too."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def launches(run):
    """The names of the kernels that a second call of run() starts on the GPU."""
    run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def peak_memory(run):
    """The bytes that a second call of run() allocates on the GPU at most, beside what is there."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextmanager
def deterministic(fill=True):
    """Deterministic algorithms; with `fill` torch also fills what torch.empty returns with NaN, as is its default."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


class Calls(TorchDispatchMode):
    """Records the package's operators that run, by name, with their arguments by name."""

    def __init__(self, ops):
        super().__init__()
        self.namespace = ops.name
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == self.namespace:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            self.calls.append((func._schema.name.split("::")[1], given | (kwargs or {})))
        return func(*args, **(kwargs or {}))

    def names(self):
        return [name for name, _ in self.calls]
