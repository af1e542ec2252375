"""Faults that users of such kernels met in the systems around them: training loops, compilers, graphs, devices.

Faults of sizes, layouts, memory and skipped ids are in test_edges.py, of wrong calls in test_arguments.py, of gradients
in test_gradients.py, of bits that change between runs in test_determinism.py, of tile shapes in test_configs.py.
"""

import contextlib
import io
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import oracle
import problems
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._sympy.numbers import int_oo

FUNCTIONS = problems.FUNCTIONS
CAST = [function for function in FUNCTIONS if function != "grouped_mm"]  # by autocast; the other is as torch's


# Activations between two products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_feed_a_second_product(kernel, device, dtype):
    """Halves of a result, as operands and through an activation; gradients come back to both as slices."""
    E, S, K, F = 4, 30, 16, 24
    inputs = oracle.make(S, K, 2 * F, E, 1, dtype, device)
    a, up = (t.requires_grad_() for t in (inputs.x, inputs.W))
    down = oracle.make(0, F, K, E, 1, dtype, device, seed=1).W.requires_grad_()
    sizes = torch.tensor([7, 0, 20, 3], device=device)

    def layer(gemm, a, up, down):
        gate, value = gemm(a, up, sizes).chunk(2, -1)
        return gemm(torch.nn.functional.silu(gate) * value, down, sizes) + gemm(value, down, sizes)

    y = layer(kernel.grouped_gemm, a, up, down)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, (a, up, down), dy)
    want = oracle.gradients(lambda *t: layer(oracle.grouped_gemm, *t), (a, up, down), dy)
    # In bfloat16 each step between the products rounds once more, forward and backward.
    limit = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps / 2
    for g, w, t in zip(got, want, (a, up, down), strict=True):
        assert g.shape == t.shape and g.dtype == dtype
        assert (g.double() - w).norm() <= limit * w.norm()


# Expert parallelism


@pytest.mark.kernels_ci
@pytest.mark.parametrize("sentinel", [-1, "experts", 2**40])
def test_shards_with_sentinels_sum_to_the_whole(kernel, device, sentinel):
    """Each rank holds some experts, and gives every other id a sentinel; gradients are those of the whole too."""
    x, W, ids, weights = oracle.make(30, 32, 16, 8, 4, device=device)
    whole = problems.build("moe", oracle.Inputs(x, W, ids, weights))
    dy = torch.randn(30, 16, device=device)
    y, dx, dweights = 0, 0, 0
    for first, last in ((0, 3), (3, 4), (4, 8)):
        outside = last - first if sentinel == "experts" else sentinel
        local = torch.where((ids >= first) & (ids < last), ids - first, outside)
        shard = problems.build("moe", oracle.Inputs(x, W[first:last], local, weights))
        part = problems.check(kernel, shard, dy)
        _, gradients = problems.run(kernel, shard, dy)
        y, dx, dweights = y + part, dx + gradients["x"], dweights + gradients["weights"]
        assert not gradients["weights"][local != ids - first].any()
    want = whole.gradients(dy)
    oracle.assert_close(y, whole.want(x, W, weights), 1e-5)
    oracle.assert_close(dx, want["x"].value, 1e-5)
    oracle.assert_close(dweights, want["weights"].value, 1e-5)


# Training loops


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", CAST)
def test_autocast(kernel, device, function, autocast_dtype):
    """Computes in autocast's dtype whatever mix of dtypes comes in; gradients go back in each input's own."""
    base = problems.make(function, 20, 32, 16, 4, 2, autocast_dtype, device)
    operands = [name for name in base.tensors if name != "weights"]
    for wide in itertools.chain.from_iterable(itertools.combinations(operands, n) for n in range(len(operands) + 1)):
        given = {name: t.float() if name in wide else t for name, t in base.tensors.items()}
        problem = base._replace(tensors=given)
        leaves = problem.leaves()
        with torch.autocast(device, dtype=autocast_dtype):
            y = problem.call(kernel, **leaves)
        summed = function in problems.LINEAR and "weights" in base.tensors
        assert y.dtype == (torch.float32 if summed else autocast_dtype)
        base.check_result(y)
        dy = problem.incoming(y)
        got = torch.autograd.grad(y, list(leaves.values()), dy)  # outside of autocast, as trainers do
        want = problem.gradients(dy)
        for (name, leaf), g in zip(leaves.items(), got, strict=True):
            assert g.dtype == leaf.dtype, name
            narrow = torch.float32 if name == "weights" else autocast_dtype
            problem.compare(g, want[name], narrow, problem.groups.get(name))


HALF, BRAIN = torch.float16, torch.bfloat16
REGIONS = {  # autocast regions from the outermost on, each a dtype or None where it is disabled; the last one counts
    "one": [BRAIN],
    "nested": [BRAIN, HALF],
    "disabled": [None],
    "disabled inside": [BRAIN, None],
    "enabled again": [BRAIN, None, HALF],
}


def autocast_regions(device, dtypes):
    stack = contextlib.ExitStack()
    for dtype in dtypes:
        stack.enter_context(torch.autocast(device, dtype=dtype or BRAIN, enabled=dtype is not None))
    return stack


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("function", CAST)
def test_autocast_regions(kernel, device, function, region):
    """The bits of a call on operands that are cast before it, but for routing weights, wherever the backward runs."""
    problem = problems.make(function, 20, 32, 16, 4, 2, device=device)
    narrow = REGIONS[region][-1] or torch.float32
    cast = problem._replace(tensors={n: t if n == "weights" else t.to(narrow) for n, t in problem.tensors.items()})
    want, gradients = problems.run(kernel, cast)
    for backward in ([], [None], [BRAIN], [HALF]):
        leaves = problem.leaves()
        with autocast_regions(device, REGIONS[region]):
            y = problem.call(kernel, **leaves)
        assert y.dtype == want.dtype and torch.equal(y, want)
        with autocast_regions(device, backward):
            y.backward(cast.incoming(y))
        for name, leaf in leaves.items():
            assert leaf.grad.dtype == leaf.dtype and torch.equal(leaf.grad, gradients[name].to(leaf.dtype)), name


def test_autocast_leaves_grouped_mm_alone(kernel, device):
    """As torch's function: the operands' dtype, forward and backward, and no mixture of dtypes."""
    problem = problems.make("grouped_mm", 20, 32, 16, 4, 2, device=device)
    want, gradients = problems.run(kernel, problem)
    with torch.autocast(device, dtype=BRAIN):
        y, got = problems.run(kernel, problem)
        with pytest.raises(RuntimeError, match="mat_b must be torch.float32"):
            problem.call(kernel, problem.tensors["a"], problem.tensors["W"].bfloat16())
    assert torch.equal(y, want) and all(torch.equal(got[name], gradients[name]) for name in got)


def test_autocast_leaves_float64_alone(kernel):
    problem = problems.make("moe", 20, 32, 16, 4, 2, torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        problems.check(kernel, problem)


def test_current_weights_are_used(kernel, device):
    """After an in-place optimiser step, with the storage swapped, and with a new parameter at an old address."""
    x, W, ids, weights = oracle.make(20, 32, 16, 4, 2, device=device)
    want = oracle.moe(x, W, ids, weights)
    parameter = torch.nn.Parameter(W.clone())
    oracle.assert_close(kernel.moe(x, parameter, ids, weights), want, 1e-5)
    with torch.no_grad():
        parameter.mul_(2)
    oracle.assert_close(kernel.moe(x, parameter, ids, weights), 2 * want, 1e-5)
    parameter.data = W * 3
    oracle.assert_close(kernel.moe(x, parameter, ids, weights), 3 * want, 1e-5)
    for factor in (5, 7):
        del parameter
        parameter = torch.nn.Parameter(W * factor)
        oracle.assert_close(kernel.moe(x, parameter, ids, weights), factor * want, 1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["hooks", "reentrant"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_activation_checkpointing(kernel, device, function, use_reentrant):
    """The forward runs again in backward, and gives the same gradients."""
    problem = problems.make(function, 20, 32, 16, 4, 2, device=device, distribution="skipped")
    _, want = problems.run(kernel, problem)
    leaves, runs = problem.leaves(), []

    def layer(*tensors):
        runs.append(torch.is_grad_enabled())
        return problem.call(kernel, **dict(zip(leaves, tensors, strict=True)))

    y = torch.utils.checkpoint.checkpoint(layer, *leaves.values(), use_reentrant=use_reentrant)
    y.backward(problem.incoming(y))
    assert runs == [not use_reentrant, True]
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, want[name]), name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_selective_checkpointing(kernel, device, function):
    """Whatever a policy says of the package's operators, for they return nothing that could be saved."""
    checkpoint = torch.utils.checkpoint
    problem = problems.make(function, 20, 32, 16, 4, 2, device=device, distribution="skipped")
    _, want = problems.run(kernel, problem)
    for own in checkpoint.CheckpointPolicy.MUST_SAVE, checkpoint.CheckpointPolicy.MUST_RECOMPUTE:
        leaves = problem.leaves()

        def policy(ctx, op, *args, own=own, **kwargs):
            return own if "grouped_gemm_moe" in op.name() else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

        y = checkpoint.checkpoint(
            lambda *tensors, leaves=leaves: problem.call(kernel, **dict(zip(leaves, tensors, strict=True))),
            *leaves.values(),
            use_reentrant=False,
            context_fn=partial(checkpoint.create_selective_checkpoint_contexts, policy),
        )
        y.backward(problem.incoming(y))
        for name, leaf in leaves.items():
            assert torch.equal(leaf.grad, want[name]), name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_saved_tensors_may_be_moved(kernel, device, function):
    """Hooks that keep what is saved elsewhere, and give back another tensor, which here is always contiguous."""
    problem = problems.make(function, 20, 32, 16, 4, 2, device=device, distribution="skipped")
    views = {n: t.mT.contiguous().mT if t.dim() == 3 else t for n, t in problem.tensors.items()}
    for given in (problem, problem._replace(tensors=views)):
        with torch.autograd.graph.save_on_cpu():
            problems.check(kernel, given)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_inference_mode(kernel, device, function):
    """In it, and of tensors made in it outside of it."""
    problem = problems.make(function, 20, 32, 16, 4, 2, device=device)
    want = problem.call(kernel, **problem.tensors)
    with torch.inference_mode():
        y = problem.call(kernel, **problem.leaves())
        made = {name: t.clone() for name, t in problem.tensors.items()}
    assert y.is_inference() and torch.equal(y, want)
    assert torch.equal(problem.call(kernel, **made), want)


def test_local_shards_of_a_distributed_weight(kernel, mesh):
    """to_local() is what the message about a DTensor advises; its gradient comes back as a DTensor."""
    from torch.distributed.tensor import DTensor, Shard

    problem = problems.make("moe", 20, 32, 16, 4, 2)
    want, gradients = problems.run(kernel, problem)
    weight = torch.nn.Parameter(DTensor.from_local(problem.tensors["W"], mesh, [Shard(0)]))
    y = problem.call(kernel, **problem.tensors | {"W": weight.to_local()})
    y.backward(problem.incoming(y))
    assert torch.equal(y, want) and isinstance(weight.grad, DTensor)
    assert torch.equal(weight.grad.to_local(), gradients["W"])


def test_fully_sharded_layer(kernel, mesh):
    """FSDP2 hands a layer plain weights for as long as it runs, and takes the gradients back."""
    from torch.distributed.fsdp import fully_shard

    plain, sharded = Experts(kernel, "cpu"), fully_shard(Experts(kernel, "cpu"), mesh=mesh)
    x, _, ids, weights = oracle.make(30, 16, 1, 4, 2)
    results = []
    for layer in (plain, sharded):
        y = layer(x, ids, weights)
        y.square().sum().backward()
        gradients = [p.grad for p in layer.parameters()]
        results.append([y, *(g if layer is plain else g.to_local() for g in gradients)])
    assert all(map(torch.equal, *results))


def test_training_learns(kernel, device):
    """A few optimiser steps through all three gradients fit a layer to another one."""
    x, W, ids, weights = oracle.make(128, 16, 16, 4, 2, device=device)
    target = oracle.moe(x, W, ids, weights).float()
    learnt = [(t + 0.3 * torch.randn_like(t)).requires_grad_() for t in (W, weights)]
    optimiser = torch.optim.Adam(learnt, lr=0.03)
    losses = []
    for _ in range(60):
        loss = (kernel.moe(x, learnt[0], ids, learnt[1]) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 10


def tangent(total, t):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(total(forward_ad.make_dual(t, torch.ones_like(t)))).tangent


TRANSFORMS = {  # of a scalar function of a tensor, each for all of what torch.func and torch.autograd have
    "grad": lambda total, t: torch.func.grad(total)(t),
    "vjp": lambda total, t: torch.func.vjp(total, t)[1](torch.ones((), device=t.device))[0],
    "jvp": lambda total, t: torch.func.jvp(total, (t,), (torch.ones_like(t),))[1],
    "vmap": lambda total, t: torch.func.vmap(total)(torch.stack([t, t])),
    "functionalize": lambda total, t: torch.func.functionalize(total)(t),
    "forward mode": tangent,
    "vmap of a backward": lambda total, t: torch.func.vmap(
        lambda d, y: torch.autograd.grad(y, t, d, retain_graph=True), (0, None)
    )(torch.ones(2, device=t.device), total(t.requires_grad_())),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", [function for function in FUNCTIONS if function != "grouped_mm"])
def test_transforms_are_refused_by_name(kernel, device, function, transform):
    """grouped_mm has them: test_grouped_mm.py."""
    problem = problems.make(function, 6, 8, 6, 3, 2, device=device)
    for name, tensor in problem.tensors.items():
        call = partial(lambda name, t: problem.call(kernel, **problem.tensors | {name: t}).sum(), name)
        with pytest.raises(NotImplementedError, match="of grouped_gemm_moe's functions only grouped_mm supports that"):
            TRANSFORMS[transform](call, tensor.clone())


def scalar_of_its_first_tensor(kernel, function, device):
    """A function of one tensor, that tensor, and the gradient there."""
    problem = problems.make(function, 6, 8, 6, 3, 2, device=device)
    name, tensor = next(iter(problem.tensors.items()))

    def total(t):
        return problem.call(kernel, **problem.tensors | {name: t}).square().sum()

    leaf = tensor.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(leaf), leaf)
    return total, tensor, gradient


@pytest.mark.parametrize(
    "transform, of_gradient",
    [("grad", torch.clone), ("vjp", torch.clone), ("jvp", torch.sum), ("forward mode", torch.sum)],
    ids=["grad", "vjp", "jvp", "forward mode"],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_transforms_are_right_or_refused(kernel, device, dynamo, function, transform, of_gradient):
    """The compiler asks no Function for its rules, and would take the ops for constants."""
    total, tensor, gradient = scalar_of_its_first_tensor(kernel, function, device)
    for fullgraph in (False, True):
        compiled = torch.compile(TRANSFORMS[transform], backend="aot_eager", fullgraph=fullgraph)
        try:
            got = compiled(total, tensor.clone())
        except (NotImplementedError, torch._dynamo.exc.Unsupported):
            continue
        torch.testing.assert_close(got, of_gradient(gradient), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_functions_of_dual_tensors_are_right_or_refused(kernel, device, dynamo, function):
    """A GPU's ops drop tangents, and the compiler sees none: compiled for these tensors, or before for others."""
    total, tensor, gradient = scalar_of_its_first_tensor(kernel, function, device)
    for compiled_before in (False, True):
        dynamo.reset()
        broken, whole = (torch.compile(total, backend="aot_eager", fullgraph=full) for full in (False, True))
        if compiled_before:
            torch.testing.assert_close(broken(tensor), whole(tensor))
        with pytest.raises(torch._dynamo.exc.Unsupported):
            tangent(whole, tensor)
        try:
            got = tangent(broken, tensor)
        except NotImplementedError:
            continue
        torch.testing.assert_close(got, gradient.sum(), rtol=1e-4, atol=1e-4)


BATCHED = {  # of a function of a tensor: what torch.autograd does by its own vmap
    "gradients": lambda call, t: torch.autograd.grad(
        y := call(t.requires_grad_()), t, torch.stack([y, y]).detach(), is_grads_batched=True
    ),
    "jacobian": lambda call, t: torch.autograd.functional.jacobian(call, t, vectorize=True),
    "jacobian, forward": lambda call, t: torch.autograd.functional.jacobian(
        call, t, vectorize=True, strategy="forward-mode"
    ),
    "hessian": lambda call, t: torch.autograd.functional.hessian(lambda t: call(t).square().sum(), t, vectorize=True),
}


@pytest.mark.parametrize("batched", BATCHED)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_batched_gradients_are_refused(kernel, device, function, batched):
    """By name: they come as a kind of tensor whose samples torch keeps to itself."""
    problem = problems.make(function, 6, 8, 6, 3, 2, device=device)
    name = function.split("+")[0]
    refusal = (
        f"{name}\\b.* must not be given a batch|of grouped_gemm_moe's functions only grouped_mm|second derivatives"
    )
    for name, tensor in problem.tensors.items():
        call = partial(lambda name, t: problem.call(kernel, **problem.tensors | {name: t}), name)
        with pytest.raises(RuntimeError, match=refusal):
            BATCHED[batched](call, tensor.clone())


def test_transforms_of_what_has_no_gradient_are_refused(kernel, device):
    """route and weight_grad, which would drop a tangent without a word."""
    x, W, ids, _ = oracle.make(6, 8, 6, 3, 2, device=device)
    routing = kernel.route(ids, 3)
    refusal = pytest.raises(NotImplementedError, match="only grouped_mm supports that")
    with refusal:
        torch.func.vmap(lambda ids: kernel.route(ids, 3).offs)(torch.stack([ids, ids]))
    for call in (lambda t: kernel.weight_grad(t, x, routing), lambda t: kernel.weight_grad(x, t, routing)):
        with refusal:
            torch.func.jvp(call, (x,), (x,))
        with refusal:
            tangent(call, x)


# Compilers


@pytest.mark.kernels_ci
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meta_tensors_tell_shape_strides_and_dtype(kernel, device, function, dtype, out_dtype):
    for T in (0, 33):
        plain = problems.make(function, T, 64, 48, 8, 2, dtype, device)
        (name, rows), *_ = plain.tensors.items()
        transposed = {
            n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in plain.tensors.items() if t.dim() == 3
        }
        for views in ({}, transposed, {name: torch.cat([rows, rows], 1)[:, :64]}):
            options = problems.with_out_dtype(function, dtype, out_dtype)
            real = plain._replace(tensors=plain.tensors | views)
            meta = real._replace(tensors={name: t.to("meta") for name, t in real.tensors.items()})
            real_leaves, meta_leaves = real.leaves(), meta.leaves()
            y = real.call(kernel, **real_leaves, **options)
            fake = meta.call(kernel, **meta_leaves, **options)
            assert (fake.shape, fake.stride(), fake.dtype) == (y.shape, y.stride(), y.dtype)
            assert fake.device.type == "meta"
            got = torch.autograd.grad(y, list(real_leaves.values()), torch.ones_like(y))
            faked = torch.autograd.grad(fake, list(meta_leaves.values()), torch.ones_like(fake))
            for g, f in zip(got, faked, strict=True):
                assert (f.shape, f.stride(), f.dtype) == (g.shape, g.stride(), g.dtype)


def count_first(ids, E):
    """How many tokens have each expert as their first, by operators that no compiler has to ask for a size."""
    return (ids[:, :1] == torch.arange(E, device=ids.device)).sum(0)


LAYERS = {  # of tokens, a weight [E, N, K], ids and routing weights, so that they may follow the ids
    "moe": lambda kernel, x, W, ids, weights: kernel.moe(x, W, ids, weights),
    "moe_mlp": lambda kernel, x, W, ids, weights: kernel.moe_mlp(x, W, W.mT, ids, weights, gated=False),
    "grouped_gemm": lambda kernel, x, W, ids, weights: kernel.grouped_gemm(x, W, count_first(ids, len(W))),
    "grouped_mm": lambda kernel, x, W, ids, weights: kernel.grouped_mm(x, W.mT, count_first(ids, len(W)).cumsum(0)),
    "pieces": lambda kernel, x, W, ids, weights: kernel.gemm_combine(
        kernel.gather_gemm(x, W, (routing := kernel.route(ids, len(W))), activation="silu", gated=False),
        W.mT,
        routing,
        weights,
    ),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("layer", LAYERS)
def test_one_graph_for_all_token_counts(kernel, device, dynamo, layer, backend):
    """No recompilation as T varies: one static graph and one dynamic graph at most, and nothing between graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    x, W, ids, weights = oracle.make(512, 32, 16, 8, 2, device=device)
    call = partial(LAYERS[layer], kernel)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for T in (64, 65, 100, 7, 512, 33, 2):
        results = []
        for function in (compiled, call):
            leaves = [t.clone().requires_grad_() for t in (x[:T], W, weights[:T])]
            y = function(*leaves[:2], ids[:T], leaves[2])
            y.square().sum().backward()
            results.append([y, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
        for got, want in zip(*results, strict=True):
            oracle.assert_close(got, want.double(), 1e-6)
    assert counter.frame_count <= 2


def test_one_graph_for_all_numbers_of_experts(kernel, device, dynamo):
    """The sort, too, takes E as a symbol."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kernel.moe, backend=counter, fullgraph=True)
    for E in (5, 300, 40, 1100):
        x, W, ids, weights = oracle.make(30, 16, 8, E, 2, device=device, distribution="skipped")
        torch._dynamo.mark_dynamic(W, 0)
        oracle.assert_close(compiled(x, W, ids, weights), oracle.moe(x, W, ids, weights), 1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_in_one_graph(kernel, device, dynamo, function, out_dtype):
    """Forward and backward through AOT autograd with static and dynamic sizes: the bits of eager."""
    options = problems.with_out_dtype(function, torch.float32, out_dtype)
    problem = problems.make(function, 33, 24, 16, 5, 2, device=device, distribution="skipped")
    y, want = problems.run(kernel, problem, **options)
    for dynamic in (False, True):
        compiled = torch.compile(
            lambda **tensors: problem.call(kernel, **tensors, **options),
            backend="aot_eager",
            fullgraph=True,
            dynamic=dynamic,
        )
        leaves = problem.leaves()
        got = compiled(**leaves)
        assert torch.equal(got, y)
        gradients = torch.autograd.grad(got, list(leaves.values()), problem.incoming(y))
        for name, gradient in zip(leaves, gradients, strict=True):
            assert torch.equal(gradient, want[name]), name


@pytest.mark.parametrize(
    "function", ["moe", "grouped_gemm", "grouped_mm", "gather_gemm+bias", "gemm_combine+bias", "moe_mlp+bias"]
)
def test_compiled_by_inductor(kernel, device, dynamo, function):
    """The compiler that torch.compile takes by itself, which may fuse what lies around the products."""
    problem = problems.make(function, 33, 24, 16, 5, 2, device=device, distribution="skipped")
    y = problem.call(kernel, **problem.tensors)
    compiled = torch.compile(lambda **tensors: problem.call(kernel, **tensors).relu(), fullgraph=True)
    leaves = problem.leaves()
    got = compiled(**leaves)
    oracle.assert_close(got, y.relu().double(), 1e-6)
    gradients = torch.autograd.grad(got, list(leaves.values()), problem.incoming(y))
    _, want = problems.run(kernel, problem, problem.incoming(y) * (y > 0))
    for name, gradient in zip(leaves, gradients, strict=True):
        oracle.assert_close(gradient, want[name].double(), 1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_autograd(kernel, device, dynamo, function):
    """The backward as a graph, of a call in another graph and of one in none."""
    problem = problems.make(function, 20, 32, 16, 4, 2, device=device, distribution="skipped")
    y, want = problems.run(kernel, problem)
    dy = problem.incoming(y)

    def call(**leaves):
        return problem.call(kernel, **leaves)

    def step(forward, leaves):
        forward(**leaves).backward(dy)

    for forward in (call, torch.compiler.disable(call)):
        leaves = problem.leaves()
        dynamo.utils.counters.clear()
        with dynamo.config.patch(compiled_autograd=True):
            torch.compile(step, backend="aot_eager")(forward, leaves)
        assert dynamo.utils.counters["compiled_autograd"]["captures"] == 1
        for name, leaf in leaves.items():
            assert torch.equal(leaf.grad, want[name]), name


def test_compiled_under_autocast(kernel, device, dynamo):
    """The region is part of the graph: another one compiles anew, and each has the bits of eager."""
    problem = problems.make("moe_mlp+bias", 20, 32, 16, 4, 2, device=device)
    compiled = torch.compile(lambda **tensors: problem.call(kernel, **tensors), backend="aot_eager", fullgraph=True)
    for dtype in (torch.bfloat16, None, torch.float16):
        with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            want, y = problem.call(kernel, **problem.tensors), compiled(**problem.leaves())
        assert y.dtype == (dtype or torch.float32) and torch.equal(y, want)


def test_compiled_and_checkpointed(kernel, device, dynamo):
    problem = problems.make("moe_mlp+bias", 20, 32, 16, 4, 2, device=device)
    _, want = problems.run(kernel, problem)
    leaves = problem.leaves()

    def layer(*tensors):
        return problem.call(kernel, **dict(zip(leaves, tensors, strict=True)))

    compiled = torch.compile(
        lambda *tensors: torch.utils.checkpoint.checkpoint(layer, *tensors, use_reentrant=False),
        backend="aot_eager",
        fullgraph=True,
    )
    y = compiled(*leaves.values())
    y.backward(problem.incoming(y))
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, want[name]), name


class Experts(torch.nn.Module):
    """Layers one after the other: all functions."""

    def __init__(self, kernel, device, layers=tuple(LAYERS)):
        super().__init__()
        self.kernel, self.layers = kernel, layers
        self.weights = torch.nn.ParameterList(
            oracle.make(0, 16, 16, 4, 2, device=device, seed=i).W for i in range(len(layers))
        )

    def forward(self, x, ids, weights):
        for layer, W in zip(self.layers, self.weights, strict=True):
            x = LAYERS[layer](self.kernel, x, W, ids, weights)
        return x


def test_symbolic_trace(kernel, device):
    """torch.fx keeps the calls of the package's functions, which want tensors."""
    x, W, ids, weights = oracle.make(30, 16, 16, 4, 2, device=device)
    sizes = torch.tensor([10, 0, 15, 5], device=device)

    def layer(x, W, ids, weights, sizes):
        routing = kernel.route(ids, 4)
        x = kernel.moe(x, W, ids, weights)
        x = kernel.moe_mlp(x, W, W.mT, ids, weights, activation="gelu", gated=False)
        x = kernel.gemm_combine(kernel.gather_gemm(x, W, routing), W, routing, weights)
        x = kernel.grouped_mm(kernel.grouped_gemm(x, W, sizes), W, offs=sizes.cumsum(0))
        return x, kernel.weight_grad(x, x, routing)

    results = []
    for function in (layer, torch.fx.symbolic_trace(layer)):
        leaves = [t.clone().requires_grad_() for t in (x, W)]
        y, dW = function(*leaves, ids, weights, sizes)
        results.append([y, dW, *torch.autograd.grad(y.square().sum(), leaves)])
    assert all(map(torch.equal, *results))


def test_symbolic_trace_by_another_name(kernel):
    """It does not see that, and the function says so."""
    moe, grouped_mm = kernel.moe, kernel.grouped_mm
    for call in (lambda a, b, c, d: moe(a, b, c, d), lambda a, b, c: grouped_mm(a, b, c)):
        with pytest.raises(TypeError, match="must be a tensor, but it is of type Proxy of torch.fx: call"):
            torch.fx.symbolic_trace(call)


DIMS = {
    "bounded": torch.export.Dim("T", min=2, max=4096),
    "unbounded": torch.export.Dim("T"),
    "found": torch.export.Dim.AUTO,
}


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_export(kernel, device, dynamo, strict, dim):
    """Of a layer for inference, with any number of tokens, saved and loaded."""
    layer = Experts(kernel, device).eval()
    x, _, ids, weights = oracle.make(30, 16, 1, 4, 2, device=device)
    sizes = ({0: DIMS[dim]},) * 3
    with torch.no_grad():
        program = torch.export.export(layer, (x[:9], ids[:9], weights[:9]), dynamic_shapes=sizes, strict=strict)
    assert {found.upper for found in program.range_constraints.values()} == {4096 if dim == "bounded" else int_oo}
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for exported in (program, program.run_decompositions(), torch.export.load(file)):
        for T in (2, 9, 30):
            with torch.no_grad():
                got = exported.module()(x[:T], ids[:T], weights[:T])
                assert torch.equal(got, layer(x[:T], ids[:T], weights[:T]))


# Threads


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_threads(kernel, device, deterministic):
    """Forward and backward in several threads at once, as torch.nn.DataParallel runs them."""
    many = [problems.make(function, 60, 40, 24, 5, 2, device=device) for function in FUNCTIONS] * 4
    with problems.deterministic() if deterministic else contextlib.nullcontext():
        want = [problems.run(kernel, problem) for problem in many]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(partial(problems.run, kernel), many))
    for (y, gradients), (right, wanted) in zip(found, want, strict=True):
        assert torch.equal(y, right)
        assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)


# GPU: synchronisation, graphs, streams, devices


@pytest.mark.gpu
@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_host_never_waits(kernel, function, k):
    problem = problems.make(function, 100, 72, 64, 8, k, torch.bfloat16, "cuda")
    problems.run(kernel, problem)
    leaves = problem.leaves()
    dy = problem.incoming(problem.call(kernel, **problem.tensors))
    with problems.no_waiting():
        torch.autograd.grad(problem.call(kernel, **leaves), list(leaves.values()), dy)


@pytest.mark.gpu
@pytest.mark.parametrize("function, launches", [("moe", 4), ("grouped_gemm", 3), ("grouped_mm", 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_launches(kernel, dtype, function, launches):
    """For moe the two of the routing, the schedule and the product."""
    problem = problems.make(function, 4096, 72, 64, 8, 2, dtype, "cuda")
    found = problems.launches(lambda: problem.call(kernel, **problem.tensors))
    assert 0 < len(found) <= launches, found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graph_replays_with_other_routing(kernel, dtype):
    """Captured after one warm-up; every replay uses the ids, tokens and weights of its moment, however skewed."""
    E = 16
    x, W, ids, weights = oracle.make(256, 128, 136, E, 4, dtype, "cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        kernel.moe(x, W, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.moe(x, W, ids, weights)
    for fill in (None, 0, E - 1, E, -1, None):
        ids.copy_(torch.randint(0, E, ids.shape, device="cuda")) if fill is None else ids.fill_(fill)
        x.normal_()
        weights.uniform_()
        graph.replay()
        oracle.assert_close(y, oracle.moe(x, W, ids, weights), oracle.tolerance(dtype, y.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("k, deterministic", [(2, False), (3, False), (3, True)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_is_captured(kernel, function, k, deterministic):
    """Forward and backward in one graph, replayed on other numbers."""
    problem = problems.make(function, 150, 72, 136, 6, k, torch.bfloat16, "cuda", "skipped")
    leaves = problem.leaves()
    dy = problem.incoming(problem.call(kernel, **problem.tensors))

    def step():
        y = problem.call(kernel, **leaves)
        return y, *torch.autograd.grad(y, list(leaves.values()), dy)

    with problems.deterministic() if deterministic else contextlib.nullcontext():
        with torch.cuda.stream(torch.cuda.Stream()):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            for leaf in leaves.values():
                leaf.copy_(torch.rand_like(leaf) + 0.1)
        graph.replay()
        want = step()
    for got, of_now in zip(captured, want, strict=True):
        oracle.assert_close(got, of_now.double(), oracle.tolerance(torch.bfloat16, got.dtype))


def in_default_pool():
    """Bytes that are allocated outside of the private pools of graphs."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["allocated_size"] for segment in segments if tuple(segment["segment_pool_id"]) == (0, 0))


def copies(inputs):
    """Leaves of their own, all but the ids requiring gradients."""
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]


def layer_step(kernel, layer, backward, dy, x, W, ids, weights):
    y = LAYERS[layer](kernel, x, W, ids, weights)
    if not backward:
        return [y]
    gradients = torch.autograd.grad(y, (x, W, weights), dy.to(y.dtype), allow_unused=True)
    return [y, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("layer", LAYERS)
def test_graph_of_another_shape_than_the_warm_up(kernel, layer, backward, dtype):
    """Captured after a call whose sizes take other kernels, without waiting and from the graph's own memory; replayed
    with other routing and values to the bits of eager calls."""
    T, K, N, E = 160, 72, 136, 6
    columns = K if layer in ("moe_mlp", "pieces") else N
    unaligned = copies(oracle.make(45, 33, 17, E, 3, dtype, "cuda"))
    dy = torch.randn(T, columns, device="cuda", dtype=dtype)
    with torch.cuda.stream(torch.cuda.Stream()):
        layer_step(kernel, layer, backward, torch.ones(45, 33 if columns == K else 17, device="cuda"), *unaligned)
    inputs = copies(oracle.make(T, K, N, E, 2, dtype, "cuda"))
    first = torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        dy.clone()  # while there is a graph torch keeps a generator's state in memory of its own
    torch.cuda.synchronize()
    before = in_default_pool()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), problems.no_waiting():
        captured = layer_step(kernel, layer, backward, dy, *inputs)
    assert in_default_pool() <= before
    for seed, distribution in enumerate(("uniform", "skewed", "single", "skipped", "all_skipped", "empty_first")):
        fresh = oracle.make(T, K, N, E, 2, dtype, "cuda", distribution, seed)
        with torch.no_grad():
            for old, new in zip(inputs, fresh, strict=True):
                old.copy_(new)
        graph.replay()
        want = layer_step(kernel, layer, backward, dy, *copies(inputs))
        assert len(captured) == len(want) and all(map(torch.equal, captured, want)), distribution


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_reduce_overhead(kernel, dynamo, layer):
    """The compiler's own graphs, of forward and backward, which it skips for functions that it does not trust."""
    T, K, N, E = 160, 72, 136, 6
    dynamo.utils.counters.clear()
    compiled = torch.compile(partial(LAYERS[layer], kernel), mode="reduce-overhead", fullgraph=True)
    for seed, distribution in enumerate(("uniform", "uniform", "skewed", "skipped", "all_skipped")):
        inputs = oracle.make(T, K, N, E, 2, torch.bfloat16, "cuda", distribution, seed)
        results = []
        for call in (partial(LAYERS[layer], kernel), compiled):
            torch.compiler.cudagraph_mark_step_begin()
            x, W, ids, weights = copies(inputs)
            y = call(x, W, ids, weights)
            gradients = torch.autograd.grad(y.square().sum(), (x, W, weights), allow_unused=True)
            results.append([t.detach().clone() for t in (y, *gradients) if t is not None])
        for want, got in zip(*results, strict=True):
            oracle.assert_close(got, want.double(), oracle.tolerance(torch.bfloat16, got.dtype))
    assert not dynamo.utils.counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
def test_graphed_training_step(kernel):
    """Forward and backward in graphs, replayed with other routing."""
    x, W, ids, weights = oracle.make(128, 64, 72, 8, 2, torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in (x, W, weights)]
    step = torch.cuda.make_graphed_callables(
        lambda x, W, weights, ids: kernel.moe(x, W, ids, weights), (*leaves, ids)
    )  # fmt: skip
    for seed in (1, 2):
        problem = problems.make("moe", 128, 64, 72, 8, 2, torch.bfloat16, "cuda", "skewed", seed)
        ids = oracle.make(128, 64, 72, 8, 2, torch.bfloat16, "cuda", "skewed", seed).ids
        given = problem.leaves()
        y = step(given["x"], given["W"], given["weights"], ids)
        oracle.assert_close(y, problem.want(*problem.tensors.values()), 1e-5)
        dy = problem.incoming(y)
        got = torch.autograd.grad(y, list(given.values()), dy)
        problem.check_gradients(dict(zip(given, got, strict=True)), dy)


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
def test_current_stream(kernel, function):
    """On a side stream the work waits for what was queued there before it, and for nothing else."""
    problem = problems.make(function, 200, 128, 136, 8, 2, device="cuda")
    want = problems.run(kernel, problem)
    scratch = problem._replace(tensors={name: torch.zeros_like(t) for name, t in problem.tensors.items()})
    dy = problem.incoming(want[0])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for name, tensor in problem.tensors.items():
            scratch.tensors[name].copy_(tensor)
        y, gradients = problems.run(kernel, scratch, dy)
    side.synchronize()
    assert torch.equal(y, want[0])
    for name, gradient in gradients.items():
        assert torch.equal(gradient, want[1][name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_is_handed_on_in_the_order_of_streams(kernel, function):
    """A call on a side stream still runs when its inputs have been deleted, as record_stream allows, and other work has
    filled all the memory that was free."""
    problem = problems.make(function, 200, 128, 136, 8, 2, device="cuda")
    y, gradients = problems.run(kernel, problem)
    given = {name: t.clone() for name, t in problem.tensors.items()}
    dy = problem.incoming(y)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        got, of_side = problems.run(kernel, problem._replace(tensors=given), dy)
    for t in given.values():
        t.record_stream(side)
    shapes = [(t.shape, t.dtype) for t in (*given.values(), y, dy)]
    given.clear()
    filled = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for shape, dtype in shapes * 4]
    side.synchronize()
    assert all(t.isnan().all() for t in filled)
    assert torch.equal(got, y)
    assert all(torch.equal(of_side[name], gradients[name]) for name in gradients)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_device_of_the_tensors(kernel, dtype):
    """Right on a device that is not the current one, which stays current; two devices in one call are refused."""
    assert torch.cuda.current_device() == 0
    for function in FUNCTIONS:
        problem = problems.make(function, 100, 128, 64, 8, 2, dtype, "cuda:1")
        y = problems.check(kernel, problem)
        assert y.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    x, W, ids, weights = oracle.make(100, 128, 64, 8, 2, dtype, "cuda:1")
    with pytest.raises(ValueError, match="cuda:0"):
        kernel.moe(x.to("cuda:0"), W, ids, weights)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel(kernel):
    """A thread for each of two GPUs, of which one is current."""
    layer = Experts(kernel, "cuda:0", ("moe", "moe_mlp", "pieces"))  # those that see a token by itself
    x, _, ids, weights = oracle.make(64, 16, 1, 4, 2, device="cuda:0")
    results = []
    for module in (layer, torch.nn.DataParallel(layer, [0, 1])):
        layer.zero_grad()
        y = module(x, ids, weights)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
    for want, got in zip(*results, strict=True):
        oracle.assert_close(got, want.double(), 1e-5)
