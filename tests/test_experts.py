"""experts_forward and the layer of the kernels library, on modules like those of transformers, which is not needed."""

from functools import partial
from pathlib import Path

import kernels
import oracle
import problems
import pytest
import torch
from conftest import Setting
from functorch.compile import make_boxed_func
from kernels import Mode
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

LAYER = "GroupedGemmMoeExperts"
KNOWN = (
    oracle.Form(),
    oracle.Form(interleaved=True),
    oracle.Form("silu", gated=False),
    oracle.Form("relu", gated=False),
)
ACTIVATIONS = {"silu": nn.SiLU, "relu": nn.ReLU}  # torch's own that the package has


@kernels.use_kernel_forward_from_hub(LAYER)
class Experts(nn.Module):
    """What a model's experts are to the function: weights, an activation, and flags where they are not False."""

    def __init__(self, act_fn, w_up, w_down, bias_up=None, bias_down=None, gated=True, transposed=False, **others):
        super().__init__()
        up = "gate_up_proj" if gated else "up_proj"
        if transposed:
            w_up, w_down = w_up.transpose(1, 2), w_down.transpose(1, 2)
        given = {up: w_up, "down_proj": w_down, f"{up}_bias": bias_up, "down_proj_bias": bias_down, "act_fn": act_fn}
        flags = {"has_bias": bias_up is not None, "is_transposed": transposed}
        for name, value in (given | flags | others).items():
            if value is not None:
                setattr(self, name, value)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("the layer's own forward was called")


def named(name):
    """A function or class under another full name, as if transformers were there."""

    def rename(thing):
        thing.__module__, _, thing.__qualname__ = name.partition(":")
        return thing

    return rename


class OwnGate(Experts):
    def _apply_gate(self, z):
        gate, up = z.to(torch.promote_types(z.dtype, torch.float32)).chunk(2, -1)  # as some do
        return self.act_fn(gate) * (up + 1)


class GptOssGate(Experts):
    @named("transformers.models.gpt_oss.modeling_gpt_oss:GptOssExperts._apply_gate")
    def _apply_gate(self, z):
        return oracle.Form("clamped_swiglu", interleaved=True, limit=float(self.limit), alpha=self.alpha)(z)


class OtherSilu(nn.SiLU):
    """May do anything."""


def rms_norm(rows):
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)


def direction(rows):
    """A norm that is NaN of rows of nothing but 0."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))  # as autocast has it on some devices
    return (wide / wide.norm(dim=-1, keepdim=True)).to(rows.dtype)


def wide_softplus(z, beta):
    wide = z.to(torch.promote_types(z.dtype, torch.float32))  # as above
    return F.softplus(wide, beta).to(z.dtype)


def softplus_gate(z):
    gate, up = z.chunk(2, -1)
    return F.softplus(gate) * (up + 1)


def interleaved_softplus(z):
    return F.softplus(z[..., ::2]) * z[..., 1::2]


def beta_gate(z):
    gate, up = z.chunk(2, -1)
    return F.softplus(gate, beta=2) * up


OWN = {  # what the package does not have: (the class, its arguments, what it computes between the products)
    "gate": (OwnGate, {"act_fn": nn.Softplus()}, softplus_gate),
    "act_fn": (Experts, {"act_fn": nn.Softplus(), "is_concatenated": False}, interleaved_softplus),
    "subclass": (Experts, {"act_fn": OtherSilu()}, oracle.Form()),
    "function": (Experts, {"act_fn": partial(F.softplus, beta=2)}, beta_gate),
    "ungated": (Experts, {"act_fn": nn.Softplus(), "gated": False}, F.softplus),
    "no limit": (
        GptOssGate,
        {"act_fn": None, "limit": float("inf"), "alpha": 1.5},
        oracle.Form("clamped_swiglu", interleaved=True, limit=float("inf"), alpha=1.5),
    ),
    "tensor": (
        GptOssGate,
        {"act_fn": None, "limit": torch.tensor(0.5), "alpha": 1.5},
        oracle.Form("clamped_swiglu", interleaved=True, limit=0.5, alpha=1.5),
    ),
}


def single(device):
    return Setting(device, torch.float32)


def made(place, gated=True, biased=True, T=40, H=32, inner=24, E=5, k=3, distribution="skipped"):
    """(x, w_up, w_down, topk_weights, bias_up, bias_down), expert_ids."""
    shape = T, H, inner, E, k, place.dtype, place.device, distribution
    problem = problems.build("moe_mlp" + "+bias" * biased, oracle.make(*shape), form=oracle.Form("silu", gated))
    return list(problem.tensors.values()), oracle.make(*shape).ids


def one_by_one(between, tensors, ids, norm=None):
    """The definition in float64: z to h by `between`, results by `norm`, the biases where they are."""
    x, w_up, w_down, weights, *biases = tensors
    bias_up, bias_down = biases or (None, None)
    order, expert = oracle.expert_order(ids, len(w_up))
    h = between(oracle.gather_gemm(x, w_up, ids, bias_up))
    rows = oracle.through_experts(h, w_down, expert, bias_down)
    return oracle.combine((norm or (lambda r: r))(rows)[order.argsort()], weights, ids, len(w_up))


def check(kernel, tensors, ids, module, want, kinks=False):
    """Result and gradients by their norms: in narrow dtypes each step between the products rounds once more.

    Where there are `kinks`, that may put a value on the other side of one: its slope is then another, and not compared.
    """
    dtype = tensors[0].dtype
    leaves = [t.detach().requires_grad_() for t in tensors]
    x, w_up, w_down, weights, *biases = leaves
    y = kernel.experts_forward(module(w_up, w_down, *biases), x, ids, weights)
    assert y.dtype == dtype and y.is_contiguous()
    found, exact = [y], [want(*tensors)]
    if not (kinks and dtype.itemsize == 2):
        generator = torch.Generator(y.device).manual_seed(1)
        dy = torch.randn(y.shape, generator=generator, device=y.device).to(dtype)
        found += torch.autograd.grad(y, leaves, dy)
        exact += oracle.gradients(want, tensors, dy)
    limit = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 8 * torch.finfo(dtype).eps / 2)
    for got, wanted in zip(found, exact, strict=True):
        assert (got.double() - wanted).norm() <= limit * wanted.norm()
    assert not y[(~oracle.is_live(ids, len(w_up))).all(1)].any()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("transposed", [False, True], ids=["stored", "transposed"])
@pytest.mark.parametrize("extras", ["", "+bias"], ids=["plain", "bias"])
@pytest.mark.parametrize("form", KNOWN, ids=str)
def test_known_activations_are_fused(kernel, ops, place, form, extras, transposed):
    """In the precision of `moe_mlp`, without a copy, and with the weights read where they are."""
    given = oracle.make(40, 32, 24, 5, 3, place.dtype, place.device, "skipped")
    flags = {"gated": form.gated, "transposed": transposed} | ({"is_concatenated": False} if form.interleaved else {})

    def call(kernel, x, w_up, w_down, weights, **biases):
        module = Experts(ACTIVATIONS[form.kind](), w_up, w_down, **biases, **flags)
        return kernel.experts_forward(module, x, given.ids, weights)

    problem = problems.build("moe_mlp" + extras, given, form=form)._replace(call=call)
    if transposed:
        stored = {n: t.mT.contiguous().mT for n, t in problem.tensors.items() if t.dim() == 3}
        problem = problem._replace(tensors=problem.tensors | stored)
    with problems.Calls(ops) as seen:
        y = problem.call(kernel, **problem.tensors)
    assert seen.names() == ["mlp"]
    ((_, arguments),) = seen.calls
    assert all(arguments[w].data_ptr() == problem.tensors[w].data_ptr() for w in ("w_up", "w_down"))
    assert y.dtype == place.dtype
    problems.check(kernel, problem)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", OWN)
def test_other_activations_are_the_modules(kernel, ops, place, name, biased):
    cls, options, between = OWN[name]
    tensors, ids = made(place, options.get("gated", True), biased)
    with problems.Calls(ops) as seen:
        check(
            kernel,
            tensors,
            ids,
            lambda *weights: cls(options["act_fn"], *weights, **{n: o for n, o in options.items() if n != "act_fn"}),
            lambda *tensors: one_by_one(between, tensors, ids),
            kinks=cls is GptOssGate,
        )
    assert "gemm_activation" not in seen.names()


@pytest.mark.parametrize("act_fn", [nn.SiLU(), OtherSilu()], ids=["fused", "own"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_results_of_each_expert_may_be_normalised(kernel, ops, place, act_fn, biased):
    tensors, ids = made(place, biased=biased)
    with problems.Calls(ops) as seen:
        check(
            kernel,
            tensors,
            ids,
            lambda *weights: Experts(act_fn, *weights, has_post_expert_norm=True, post_expert_norm=rms_norm),
            lambda *tensors: one_by_one(oracle.Form(), tensors, ids, rms_norm),
        )
    assert ("gemm_activation" in seen.names()) == (type(act_fn) is nn.SiLU)


def test_a_gate_is_known_by_its_name(kernel, ops, place):
    """gpt-oss's with other numbers than its own; it is not called."""
    form = oracle.Form("clamped_swiglu", interleaved=True, limit=0.5, alpha=1.25)
    tensors, ids = made(place)
    with problems.Calls(ops) as seen:
        check(
            kernel,
            tensors,
            ids,
            lambda *weights: GptOssGate(None, *weights, limit=0.5, alpha=1.25),
            lambda *tensors: one_by_one(form, tensors, ids),
            kinks=True,
        )
    assert "gemm_activation" in seen.names()


VARIETIES = {
    "fused": lambda *weights: Experts(nn.SiLU(), *weights),
    "function": lambda *weights: Experts(F.silu, *weights),
    "own": lambda *weights: OwnGate(nn.Softplus(), *weights),
    "own function": lambda *weights: Experts(partial(wide_softplus, beta=2), *weights),
    "known gate": lambda *weights: GptOssGate(None, *weights, limit=0.5, alpha=1.25),
    "normalised": lambda *weights: Experts(nn.SiLU(), *weights, has_post_expert_norm=True, post_expert_norm=direction),
}


@pytest.mark.parametrize("outside", [-1, 5, 2**40])
@pytest.mark.parametrize("variety", VARIETIES)
def test_sentinels_are_skipped(kernel, device, variety, outside):
    """Whatever stands in their weights: the rest has the bits that it has with weights of 0 there."""
    (x, w_up, w_down, weights, *biases), ids = made(single(device), k=2, distribution="uniform")
    dead = torch.rand(ids.shape, device=device) < 0.3
    dead[0] = True
    ids = torch.where(dead, outside, ids)
    results = []
    for filler in (0.0, float("nan")):
        leaves = [t.detach().requires_grad_() for t in (x, w_up, w_down, weights.masked_fill(dead, filler), *biases)]
        y = kernel.experts_forward(VARIETIES[variety](*leaves[1:3], *leaves[4:]), leaves[0], ids, leaves[3])
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for zero, nan in zip(*results, strict=True):
        assert zero.isfinite().all() and torch.equal(zero, nan)
    assert not results[0][0][0].any() and not results[0][4][dead].any()


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("variety", VARIETIES)
def test_few_tokens(kernel, device, variety, tokens):
    tensors, ids = made(single(device), T=tokens, distribution="uniform")
    leaves = [t.detach().requires_grad_() for t in tensors]
    x, w_up, w_down, weights, *biases = leaves
    y = kernel.experts_forward(VARIETIES[variety](w_up, w_down, *biases), x, ids, weights)
    assert y.shape == x.shape
    found = torch.autograd.grad(y.sum(), leaves)
    assert all(g.shape == t.shape and bool(g.any()) == bool(tokens) for g, t in zip(found, leaves, strict=True))


@pytest.mark.parametrize("variety", VARIETIES)
def test_meta_tensors(kernel, variety):
    tensors, ids = made(single("cpu"))
    x, w_up, w_down, weights, *biases = (t.to("meta") for t in tensors)
    y = kernel.experts_forward(VARIETIES[variety](w_up, w_down, *biases), x.bfloat16(), ids.to("meta"), weights)
    assert y.is_meta and y.shape == x.shape and y.dtype == torch.bfloat16


@pytest.mark.parametrize("variety", VARIETIES)
def test_dtypes(kernel, device, variety):
    """The weights' dtype is what is multiplied, autocast's under autocast; the result has the tokens' dtype."""
    (x, w_up, w_down, weights, *biases), ids = made(single(device), k=2)
    wide = [w_up, w_down, *biases]
    narrow = [t.bfloat16() for t in wide]

    def run(x, given):
        return kernel.experts_forward(VARIETIES[variety](*given), x, ids, weights)

    want = run(x.bfloat16(), narrow)
    mixed = run(x, narrow)
    with torch.autocast(device, torch.bfloat16):
        cast = [run(x, wide), run(x, narrow)]
    assert want.dtype == torch.bfloat16 and mixed.dtype == torch.float32
    assert torch.equal(mixed.bfloat16(), want)
    for y in cast:
        assert y.dtype == torch.float32 and torch.equal(y, mixed)
    with torch.autocast(device, torch.float16):
        y = run(x, narrow)
    assert torch.equal(y.half(), run(x.half(), [t.half() for t in narrow]))  # the tokens are not rounded twice
    assert (want.double() - run(x, wide).double()).norm() < 0.02 * want.double().norm()
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        run(x, [t.to(torch.float8_e4m3fn) for t in wide])


@pytest.mark.parametrize("missing", ["gate_up_proj", "up_proj", "down_proj"])
def test_a_module_must_have_the_weights(kernel, device, missing):
    (x, w_up, w_down, weights, *_), ids = made(single(device), k=2)
    module = Experts(nn.SiLU(), w_up, w_down, gated=missing != "up_proj", has_gate=missing != "up_proj")
    delattr(module, missing)
    with pytest.raises(TypeError, match=f"module must have .*{missing}.*, got Experts"):
        kernel.experts_forward(module, x, ids, weights)


@pytest.mark.parametrize("variety", VARIETIES)
def test_compiled_in_one_graph(kernel, ops, device, dynamo, variety):
    """Forward and backward; eager's ops and bits for two sizes of T, of which the second makes T dynamic."""
    seen = []

    def recorded(graph, inputs):
        # An op that was made functional is the first argument of what stands for it.
        operators = [op for node in graph.graph.nodes for op in (node.target, *node.args)]
        seen.append([op._opname for op in operators if getattr(op, "namespace", None) == ops.name])
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=recorded, bw_compiler=lambda graph, inputs: make_boxed_func(graph))
    for tokens in (40, 23):
        tensors, ids = made(single(device), k=2, T=tokens)
        results = []
        for compiled in (False, True):
            leaves = [t.detach().requires_grad_() for t in tensors]
            x, w_up, w_down, weights, *biases = leaves
            module = VARIETIES[variety](w_up, w_down, *biases)

            def call(x, ids, weights, module=module):
                return kernel.experts_forward(module, x, ids, weights)

            if compiled:
                y = torch.compile(call, backend=backend, fullgraph=True)(x, ids, weights)
            else:
                with problems.Calls(ops) as calls:
                    y = call(x, ids, weights)
            results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
        assert seen[-1] == calls.names()
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(eager, graph)


# The kernels library's layers


@pytest.fixture
def mapping(kernel, device):
    layer = kernels.LocalLayerRepository(Path(kernel.__file__).parent, layer_name=LAYER)
    with kernels.use_kernel_mapping({LAYER: {device: layer}}, inherit_mapping=False):
        yield


@pytest.mark.parametrize(
    "mode",
    [Mode.INFERENCE, Mode.TRAINING, Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING | Mode.TORCH_COMPILE],
    ids=["inference", "training", "inference and compile", "training and compile"],
)
def test_kernelized(kernel, device, dynamo, mapping, mode):
    """In a model, in each mode and without a fallback, to the bits of the function."""
    (x, w_up, w_down, weights, *biases), ids = made(single(device), k=2)
    parameters = [nn.Parameter(t) for t in (w_up, w_down, *biases)]
    model = nn.ModuleDict({"experts": Experts(nn.SiLU(), *parameters)})
    with pytest.raises(AssertionError, match="own forward"):
        model["experts"](x, ids, weights)
    kernels.kernelize(model, mode=mode, device=device, use_fallback=False)

    def call(x, ids, weights):
        return model["experts"](x, ids, weights)

    run = torch.compile(call, backend="aot_eager", fullgraph=True) if Mode.TORCH_COMPILE in mode else call
    want = kernel.experts_forward(model["experts"], x, ids, weights)
    if Mode.INFERENCE in mode:
        with torch.no_grad():
            assert torch.equal(run(x, ids, weights), want)
        return
    y = run(x, ids, weights)
    assert torch.equal(y, want)
    for got, wanted in zip(*(torch.autograd.grad(t.square().sum(), parameters) for t in (y, want)), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", [LAYER, "GroupedGemmMoeMLP"])
def test_layers_keep_the_rules(kernel, name):
    """A layer promises what it can do, and has nothing else that a module has not."""
    layer = getattr(kernel.layers, name)
    assert layer.can_torch_compile is True and layer.has_backward is True
    assert set(vars(layer)) - set(vars(nn.Module)) <= {"forward", "can_torch_compile", "has_backward"}
    assert layer.__init__ is nn.Module.__init__
