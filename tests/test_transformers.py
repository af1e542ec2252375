"""Models of transformers with their experts on the package, beside the same models with transformers' own loop."""

import copy
import importlib
import inspect
import os
import re
from pathlib import Path

import kernels
import oracle
import problems
import pytest
import torch
from conftest import load_kernel

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
moe = pytest.importorskip("transformers.integrations.moe", reason="this transformers has no experts functions")

NAME = "grouped_gemm_moe"
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DEEPSEEK = {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
YARN = {"max_position_embeddings": 131072}
MODELS = {  # the configuration's class and what it takes beside SIZES; hidden and inner sizes differ
    "mixtral": ("MixtralConfig", {"intermediate_size": 24, "num_local_experts": 6}),
    "qwen2_moe": ("Qwen2MoeConfig", {"moe_intermediate_size": 24, "num_experts": 6, "intermediate_size": 40}),
    "qwen3_moe": ("Qwen3MoeConfig", {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe": ("OlmoeConfig", {"intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}),
    "deepseek_v3": ("DeepseekV3Config", {"moe_intermediate_size": 24, "n_routed_experts": 6, **DEEPSEEK, **LATENT}),
    "glm4_moe": ("Glm4MoeConfig", {"moe_intermediate_size": 24, "n_routed_experts": 6, **DEEPSEEK}),
    "gpt_oss": ("GptOssConfig", {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3, **YARN}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["moe", "full_attention", "moe"],
            "n_routed_experts": 6,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "aria": ("AriaTextConfig", {"intermediate_size": 24, "moe_num_experts": 6, "moe_topk": 2}),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    """As a user has it: under a name that models may ask for."""
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, load_kernel().experts_forward)


@pytest.fixture
def calls(monkeypatch):
    """The experts modules that come to the function."""
    seen = []

    def function(module, *args, **kwargs):
        seen.append(module)
        return load_kernel().experts_forward(module, *args, **kwargs)

    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, NAME, function)
    return seen


def make(name, device):
    """A tiny model whose experts are no small part of what it says, on the package."""
    config, options = MODELS[name]
    if not hasattr(transformers, config):
        pytest.skip(f"transformers {transformers.__version__} has no {config}")
    config = getattr(transformers, config)(**{**SIZES, "num_experts_per_tok": 2, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=NAME).to(device).eval()
    if not experts_of(model):
        pytest.skip(f"transformers {transformers.__version__} has experts of another kind there")
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    return model


def experts_of(model):
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def text(device, length=11):
    return torch.randint(3, SIZES["vocab_size"], (2, length), generator=torch.Generator().manual_seed(1)).to(device)


def in_turn(model, run):
    """What run() gives on the package and with the models' own loop."""
    found = []
    for implementation in (NAME, "eager"):
        model.set_experts_implementation(implementation)
        found.append(run())
    model.set_experts_implementation(NAME)
    return found


def assert_near(got, want, limit, name=""):
    got, want = got.detach(), want.detach()
    error = float((got - want).abs().max() / want.abs().max())
    assert error <= limit, f"{name}: {error:.3g}"


@pytest.mark.parametrize("name", MODELS)
def test_logits(calls, device, name):
    model = make(name, device)
    ids = text(device)
    with torch.no_grad():
        got, want = in_turn(model, lambda: model(ids).logits)
        assert calls == experts_of(model) != []
        assert_near(got, want, 1e-5)
        for experts in experts_of(model):
            experts.down_proj.zero_()
        assert (model(ids).logits - want).abs().max() > 0.1 * want.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_training(device, name):
    """The loss and the gradient of every parameter, the routers' among them."""
    model = make(name, device).train()
    ids = text(device)

    def step():
        model.zero_grad(set_to_none=True)
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss, {n: p.grad for n, p in model.named_parameters()}

    (loss, got), (eager_loss, want) = in_turn(model, step)
    assert_near(loss, eager_loss, 1e-5)
    for parameter, gradient in want.items():
        assert (gradient is None) == (got[parameter] is None), parameter
        if gradient is not None:
            assert_near(got[parameter], gradient, 1e-5, parameter)
    assert all(p.grad is not None for experts in experts_of(model) for p in experts.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_experts_in_bfloat16(device, name):
    """Result and gradients are no further from those in float64 than what the model's loop rounds is."""
    model = make(name, device).bfloat16()
    experts = experts_of(model)[0]
    wide = copy.deepcopy(experts).double()
    x, _, ids, weights = oracle.make(60, 32, 8, 6, 3, device=device)
    x, dy = x.bfloat16(), oracle.make(60, 32, 8, 6, 3, device=device, seed=1).x.bfloat16()
    model.set_experts_implementation("eager")
    experts.config, wide.config = model.config, copy.copy(model.config)

    def run(module, x, weights):
        leaves = [x.detach().requires_grad_(), weights.detach().requires_grad_(), *module.parameters()]
        y = module(leaves[0], ids, leaves[1])
        return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    exact = run(wide, x.double(), weights.double())
    ours, eager = in_turn(model, lambda: run(experts, x, weights))
    for got, loop, want in zip(ours, eager, exact, strict=True):
        assert got.dtype == loop.dtype
        assert (got.double() - want).norm() <= (loop.double() - want).norm()
        assert (got.double() - want).norm() <= 4 * torch.finfo(torch.bfloat16).eps * want.norm()


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_bfloat16(device, name):
    """As near to those in float32 as with the model's loop, for the middle one of the tokens.

    A token whose router is undecided may go to other experts after any rounding, and be far off either way.
    """
    model = make(name, device)
    ids = text(device)
    with torch.no_grad():
        exact = model(ids).logits
        found = in_turn(model.bfloat16(), lambda: model(ids).logits)
    ours, eager = (((logits.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).median() for logits in found)
    assert ours <= 1.25 * eager and ours <= 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("name", MODELS)
def test_generate(calls, device, name):
    """Greedy decoding, a token of each sequence at a time, says the same."""
    model = make(name, device)
    ids = text(device, 5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    got, want = in_turn(model, lambda: model.generate(ids, **options))
    assert got.shape == (2, 13) and torch.equal(got, want)
    assert len(calls) == 8 * len(experts_of(model))


@pytest.mark.parametrize("name", MODELS)
def test_compiled(device, dynamo, name):
    """The whole model in one graph."""
    model = make(name, device)
    ids = text(device)
    with torch.no_grad():
        want = model(ids).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_near(compiled(ids).logits, want, 1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_experts_compiled_by_inductor(device, dynamo, name):
    """Forward and backward, by the compiler that torch.compile takes by itself."""
    experts = experts_of(make(name, device))[0]
    x, _, ids, weights = oracle.make(40, 32, 8, 6, 3, device=device)
    results = []
    for run in (experts, torch.compile(experts, fullgraph=True)):
        y = run(x, ids, weights)
        results.append((y, *torch.autograd.grad(y.square().sum(), list(experts.parameters()))))
    for want, got in zip(*results, strict=True):
        assert_near(got, want, 1e-5)


# Expert parallelism

EXPERTS = "model.layers.*.mlp.experts"
SHARDED = {f"{EXPERTS}.gate_up_proj": "grouped_gemm", f"{EXPERTS}.down_proj": "grouped_gemm"}
DISPATCHED = SHARDED | {EXPERTS: "ep_dispatch_experts"}
PLANS = {
    "all-to-all": DISPATCHED,
    "masked": SHARDED | {EXPERTS: "moe_tp_experts", "model.layers.*.mlp.gate": "ep_router"},
}
IMPLEMENTATIONS = {"all-to-all": "all_to_all", "masked": "all_reduce"}  # of one plan, from 5.24 on


def share_out(model, mesh, plan):
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    if "ep_implementation" not in inspect.signature(apply_expert_parallelism).parameters:
        apply_expert_parallelism(model, mesh, mesh, PLANS[plan])
        return
    layers = range(model.config.num_hidden_layers)
    by_name = {name.replace("*", str(layer)): style for name, style in DISPATCHED.items() for layer in layers}
    apply_expert_parallelism(model, mesh, mesh, by_name, ep_implementation=IMPLEMENTATIONS[plan])


def training_step(model):
    ids = text("cpu")
    output = model(ids, labels=ids)
    output.loss.backward()
    return {"logits": output.logits.detach()} | {name: p.grad for name, p in model.named_parameters()}


def rank_of_two(rank, plan, folder):
    """A rank's training step, with the gradients of all experts."""
    from torch.distributed.tensor import DTensor

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, load_kernel().experts_forward)
    model = make("qwen3_moe", "cpu")
    share_out(model, mesh, plan)
    assert [experts.num_experts for experts in experts_of(model)] == [3, 3]
    found = training_step(model)
    found = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in found.items()}
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("plan", PLANS)
def test_expert_parallel(tmp_path, plan):
    """transformers' two ways to share out experts, on two ranks, are the loop in one process."""
    pytest.importorskip("transformers.distributed.expert_parallel", reason="this transformers shares out no experts")
    torch.multiprocessing.spawn(rank_of_two, (plan, tmp_path), nprocs=2)
    model = make("qwen3_moe", "cpu")
    model.set_experts_implementation("eager")
    want = training_step(model)
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.pt")
        assert got.keys() == want.keys()
        for name, wanted in want.items():
            assert_near(got[name], wanted, 1e-5, name)


# Every experts class of the installed transformers


def experts_classes():
    """(module, class) of each that its decorator gives to such functions, from the sources."""
    found = re.compile(r"^@use_experts_implementation\b(?:\([^)]*\))?\nclass (\w+)", re.M)
    files = sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
    return [
        (f"models.{file.parent.name}.{file.stem}", name) for file in files for name in found.findall(file.read_text())
    ]


class Config:
    """Small sizes under whatever name a class asks for them."""

    _experts_implementation = "eager"
    hidden_act = mlp_hidden_act = activation = hidden_activation = "silu"
    swiglu_limit = 0.75
    swiglu_alpha = 1.25
    moe_latent_size = None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if "eps" in name:
            return 1e-6
        if "softcap" in name:
            return 1.5
        if "expert" in name:
            return 6
        if "intermediate" in name or "inner" in name or "ffn" in name:
            return 24
        if "hidden" in name or "dim" in name or "size" in name:
            return 32
        raise AttributeError(name)


OWN_GATES = {"Inkling2Experts", "Inkling2LoopExperts"}  # which no activation of moe_mlp is: tanh of both sides


@pytest.mark.parametrize("module, name", experts_classes(), ids=lambda part: part.rsplit(".")[-1])
def test_every_experts_class(ops, device, module, name):
    """The activation of each is known; one that is not in the package's list makes this fail, but is right."""
    cls = getattr(importlib.import_module(f"transformers.{module}"), name)
    experts = cls(Config()).to(device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    x, _, ids, weights = oracle.make(40, 32, 8, 6, 3, device=device)
    results, fused = [], []
    for function in (load_kernel().experts_forward, cls.forward.__wrapped__):
        leaves = [x.detach().requires_grad_(), weights.detach().requires_grad_(), *experts.parameters()]
        with problems.Calls(ops) as seen:
            y = function(experts, leaves[0], ids, leaves[1])
        fused.append("gemm_activation" in seen.names())
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for got, want in zip(*results, strict=True):
        assert_near(got, want, 1e-5)
    assert fused == [name not in OWN_GATES, False]


FUSED = {
    "silu",
    "swish",
    "relu",
    "relu2",
    "quick_gelu",
    "gelu",
    "gelu_python",
    "gelu_new",
    "gelu_fast",
    "gelu_accurate",
}
FUSED |= {"gelu_pytorch_tanh", "gelu_python_tanh"}


@pytest.mark.parametrize("act", sorted(transformers.activations.ACT2CLS))
def test_every_activation(ops, device, act):
    """With a gate as Mixtral has it: fused where the package knows the activation, by the module elsewhere."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = Config()
    config.hidden_act = act
    experts = MixtralExperts(config).to(device)
    for parameter in (experts.gate_up_proj, experts.down_proj):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator(device).manual_seed(0))
    x, _, ids, weights = oracle.make(40, 32, 8, 6, 3, device=device)
    results, fused = [], []
    for function in (load_kernel().experts_forward, MixtralExperts.forward.__wrapped__):
        with problems.Calls(ops) as seen:
            y = function(experts, x, ids, weights)
        fused.append("gemm_activation" in seen.names())
        results.append((y, *torch.autograd.grad(y.square().sum(), [experts.gate_up_proj, experts.down_proj])))
    for got, want in zip(*results, strict=True):
        assert_near(got, want, 1e-5)
    assert fused == [act in FUSED, False]


# The kernels library's layers


def local_layer(name):
    return kernels.LocalLayerRepository(Path(load_kernel().__file__).parent, layer_name=name)


@pytest.mark.parametrize("mode", ["TRAINING", "INFERENCE"])
def test_kernelized_model(device, monkeypatch, mode):
    """Two kinds of experts in models that know nothing of the package but the layer's name."""
    layer = local_layer("GroupedGemmMoeExperts")
    for name in ("qwen3_moe", "gpt_oss"):
        model = make(name, device)
        model.set_experts_implementation("eager")
        want = model(text(device)).logits
        cls = type(experts_of(model)[0])
        monkeypatch.setattr(cls, "kernel_layer_name", None, raising=False)
        monkeypatch.setattr(cls, "kernel_condition", None, raising=False)
        kernels.replace_kernel_forward_from_hub(cls, "GroupedGemmMoeExperts")
        with kernels.use_kernel_mapping({"GroupedGemmMoeExperts": {device: layer}}, inherit_mapping=False):
            kernels.kernelize(model, mode=getattr(kernels.Mode, mode), device=device)
        for experts in experts_of(model):
            assert experts.forward.__func__ is load_kernel().layers.GroupedGemmMoeExperts.forward
        assert_near(model(text(device)).logits, want, 1e-5)


@pytest.mark.parametrize("mode", ["TRAINING", "INFERENCE"])
def test_kernelized_by_the_name_that_transformers_has(device, mode):
    """gpt-oss as it is: its class of router and experts has a layer's name already."""
    model = make("gpt_oss", device)
    model.set_experts_implementation("eager")
    blocks = [module for module in model.modules() if hasattr(module, "router") and hasattr(module, "experts")]
    if getattr(type(blocks[0]), "kernel_layer_name", None) != "MegaBlocksMoeMLP":
        pytest.skip(f"transformers {transformers.__version__} takes no layers of this version of kernels")
    ids = text(device)

    def run():
        model.zero_grad(set_to_none=True)
        output = model(ids, labels=ids, output_router_logits=True)
        output.loss.backward()
        found = [output.logits, output.aux_loss, *output.router_logits, *(p.grad for p in model.parameters())]
        return [t.detach() for t in found]

    want = run()
    mapping = {"MegaBlocksMoeMLP": {device: local_layer("GroupedGemmMoeMLP")}}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=getattr(kernels.Mode, mode), device=device)
    for block in blocks:
        assert block.forward.__func__ is load_kernel().layers.GroupedGemmMoeMLP.forward
    for got, wanted in zip(run(), want, strict=True):
        assert_near(got, wanted, 1e-5)
