"""Each public function as one kind of object: its tensors, how to call it, and its oracle."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import oracle
import torch
from torch.utils._python_dispatch import TorchDispatchMode

FUNCTIONS = ("moe", "grouped_gemm", "gather_gemm", "gather_gemm+bias", "gemm_combine", "gemm_combine+bias")


class Problem(NamedTuple):
    tensors: dict[str, torch.Tensor]  # the differentiable arguments
    call: Callable  # call(kernel, **tensors, **options) -> result
    want: Callable  # want(*tensors) -> result in float64
    groups: dict[str, torch.Tensor]  # the expert of each row, for the result ("y") and for the tensors with rows
    dtype: torch.dtype  # of the operands
    weighted_rows: Callable | None = None  # of the tensors' rows and dy's: x, dy, routing weight and expert of each

    def leaves(self, only=None):
        """The tensors, requiring gradients: all of them or those named. Their strides and storage stay."""
        names = self.tensors if only is None else only
        return {n: t.detach().requires_grad_(n in names) for n, t in self.tensors.items()}

    def absolutes(self):
        """The tensors' absolute values: the oracles are sums of products, and of these give the sums of |terms|."""
        return [t.detach().abs() for t in self.tensors.values()]

    def incoming(self, like, seed=1):
        """A random gradient for the result, exact in the operands' dtype, which the backward casts it to."""
        generator = torch.Generator(like.device).manual_seed(seed)
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        noise = torch.randn(like.shape, generator=generator, device=like.device, dtype=wide)
        return noise.to(self.dtype).to(like.dtype)

    def gradients(self, dy, by_columns=False):
        """The oracle's gradients by name, and the slack of those that have any.

        Narrow operands: a row's weight * dy is rounded to their dtype before it is multiplied for W and bias, where the
        gradient of W is stored by columns weight * x instead: see `oracle.weight_gradient`.
        """
        names, tensors = zip(*self.tensors.items(), strict=True)
        want, slack = dict(zip(names, oracle.gradients(self.want, tensors, dy), strict=True)), {}
        if self.dtype.itemsize == 2 and self.weighted_rows:
            x, dy, weights, expert = self.weighted_rows(*tensors, dy)
            given = dy.to(self.dtype), weights, expert, len(want["W"])
            want["W"], slack["W"] = oracle.weight_gradient(x.to(self.dtype), *given, by_columns)
            if "bias" in names:
                ones = x.new_ones(len(x), 1)
                want["bias"], slack["bias"] = (t[..., 0] for t in oracle.weight_gradient(ones, *given, False))
        return want, slack

    def check_gradients(self, got, dy, cancels=False):
        """Gradients by name against the oracle's; for `cancels` see `check`."""
        by_columns = "W" in got and got["W"].shape[2] > 1 and got["W"].stride(2) != 1
        want, slack = self.gradients(dy, by_columns)
        if cancels:
            terms = dict(zip(self.tensors, oracle.gradients(self.want, self.absolutes(), dy.abs()), strict=True))
        for name, gradient in got.items():
            dtype = self.tensors[name].dtype
            assert gradient.dtype == dtype, name
            limit = oracle.tolerance(self.dtype, dtype)
            floor = oracle.cancellation(terms[name], want[name], self.dtype, dtype) if cancels else None
            try:
                oracle.assert_close(gradient, want[name], limit, self.groups.get(name), slack.get(name), floor)
            except AssertionError as error:
                raise AssertionError(f"gradient of {name}: {error}") from None


def make(function, T, K, N, E, k, dtype=torch.float32, device="cpu", distribution="uniform", seed=0):
    return build(function, oracle.make(T, K, N, E, k, dtype, device, distribution, seed), seed)


def build(function, inputs, seed=0):
    """The problem of calling `function` on `inputs`. grouped_gemm and gemm_combine get rows in expert order.

    The ids, or group sizes, follow the tensors to their device, so that a problem can be moved.
    """
    x, W, ids, weights = inputs
    E = len(W)
    order, expert = oracle.expert_order(ids, E)
    by_token = ids[:, 0] if ids.shape[1] else torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    by_token = torch.where(oracle.is_live(by_token, E), by_token, E)
    bias = {}
    if function.endswith("+bias"):
        generator = torch.Generator(x.device).manual_seed(seed + 1)
        bias["bias"] = torch.randn(W.shape[:2], generator=generator, device=x.device, dtype=weights.dtype).to(x.dtype)

    match function.removesuffix("+bias"):
        case "moe":
            return Problem(
                {"x": x, "W": W, "weights": weights},
                lambda kernel, x, W, weights, **options: kernel.moe(x, W, ids.to(x.device), weights, **options),
                lambda x, W, weights: oracle.moe(x, W, ids, weights),
                {"y": by_token, "x": by_token},
                x.dtype,
                lambda x, W, weights, dy: (
                    *(t.repeat_interleave(ids.shape[1], 0) for t in (x, dy)),
                    weights.flatten(),
                    ids.flatten(),
                ),
            )
        case "grouped_gemm":
            sizes = torch.bincount(expert, minlength=E + 1)[:E]
            return Problem(
                {"a": x[order // max(ids.shape[1], 1)], "W": W},
                lambda kernel, a, W: kernel.grouped_gemm(a, W, sizes.to(a.device)),
                lambda a, W: oracle.grouped_gemm(a, W, sizes),
                {"y": expert, "a": expert},
                x.dtype,
            )
        case "gather_gemm":
            return Problem(
                {"x": x, "W": W, **bias},
                lambda kernel, x, W, bias=None, **options: kernel.gather_gemm(
                    x, W, kernel.route(ids.to(x.device), E), bias=bias, **options
                ),
                lambda x, W, bias=None: oracle.gather_gemm(x, W, ids, bias),
                {"y": expert, "x": by_token},
                x.dtype,
            )
        case "gemm_combine":
            return Problem(
                {"h": x[order // max(ids.shape[1], 1)], "W": W, "weights": weights, **bias},
                lambda kernel, h, W, weights, bias=None, **options: kernel.gemm_combine(
                    h, W, kernel.route(ids.to(h.device), E), weights, bias=bias, **options
                ),
                lambda h, W, weights, bias=None: oracle.gemm_combine(h, W, ids, weights, bias),
                {"y": by_token, "h": expert},
                x.dtype,
                lambda h, W, weights, *bias_dy: (
                    h,
                    bias_dy[-1][order // max(ids.shape[1], 1)],
                    weights.flatten()[order],
                    expert,
                ),
            )


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
    want = problem.want(*problem.tensors.values())
    floor = None
    if cancels:
        floor = oracle.cancellation(problem.want(*problem.absolutes()), want, problem.dtype, y.dtype)
    oracle.assert_close(y, want, oracle.tolerance(problem.dtype, y.dtype), problem.groups["y"], floor=floor)
    problem.check_gradients(gradients, problem.incoming(y) if dy is None else dy, cancels)
    return y


def misaligned(t, offset=1):
    """A contiguous copy of t that begins `offset` elements behind the start of an allocation."""
    return torch.cat([t.new_zeros(offset), t.flatten()])[offset:].view_as(t)


@contextmanager
def no_waiting():
    """What would have the host wait for the GPU raises."""
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


@contextmanager
def deterministic():
    """Deterministic algorithms: torch then also fills what torch.empty returns with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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
