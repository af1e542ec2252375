"""Every tile configuration forced in turn over shapes, dtypes and epilogues. The automatic choice would hide most."""

import oracle
import problems
import pytest
import torch
from conftest import forced_settings, forcing

pytestmark = pytest.mark.gpu

SHAPES = [  # T, K, N, E, k, distribution
    (1, 1, 1, 1, 1, "uniform"),
    (7, 9, 5, 3, 2, "repeated"),
    (65, 64, 64, 4, 2, "empty_first"),
    (130, 128, 128, 1, 1, "single"),
    (300, 256, 272, 8, 4, "uniform"),
    (300, 248, 264, 5, 3, "skewed"),
    (129, 257, 131, 6, 2, "skipped"),
    (513, 72, 520, 4, 2, "empty_last"),
    (90, 1032, 40, 3, 2, "empty_middle"),
    (40, 40, 24, 300, 8, "uniform"),
    (1500, 64, 72, 2, 1, "single"),
]


@pytest.fixture(params=forced_settings(), ids=str)
def forced(request):
    with forcing(request.param) as setting:
        yield setting


@pytest.mark.parametrize("function", problems.FUNCTIONS)
def test_every_shape(kernel, forced, function):
    """Plain, gathered and combined; with weights, bias and row dots; row and column results: with all gradients."""
    for *shape, distribution in SHAPES:
        problem = problems.make(function, *shape, forced.dtype, forced.device, distribution)
        try:
            problems.check(kernel, problem)
        except AssertionError as error:
            raise AssertionError(f"{shape} {distribution}: {error}") from None


@pytest.mark.parametrize("function", ["moe", "gather_gemm", "gemm_combine"])
def test_every_result_dtype(kernel, forced, function):
    for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
        problem = problems.make(function, 150, 136, 200, 5, 3, forced.dtype, forced.device, "skipped")
        problems.check(kernel, problem, out_dtype=out_dtype)


@pytest.mark.parametrize("function", ["moe", "grouped_gemm", "gather_gemm", "gemm_combine"])
def test_transposed_and_misaligned_operands(kernel, forced, function):
    """The weight of the backward and of [E, K, N] storage; rows off 16 bytes by their start or by their stride."""
    for K, N in ((136, 200), (64, 67), (33, 64)):
        problem = problems.make(function, 150, K, N, 5, 2, forced.dtype, forced.device)
        for change in (
            lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
            problems.misaligned,
            lambda t: torch.nn.functional.pad(t, (0, 3))[..., : t.shape[-1]],
        ):
            views = {name: change(t) for name, t in problem.tensors.items()}
            problems.check(kernel, problem._replace(tensors=views))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_every_scale(kernel, forced, scale):
    """A wrong tile cannot hide under an absolute tolerance: errors are judged by expert and column block."""
    inputs = oracle.make(300, 256, 272, 8, 4, forced.dtype, forced.device)
    x = (inputs.x.float() * scale).to(forced.dtype)
    problems.check(kernel, problems.build("moe", inputs._replace(x=x)))


@pytest.mark.parametrize("function", problems.FUNCTIONS)
def test_same_bits(kernel, forced, function):
    problem = problems.make(function, 1000, 264, 272, 8, 2, forced.dtype, forced.device, "skewed")
    want, gradients = problems.run(kernel, problem)
    for _ in range(5):
        y, again = problems.run(kernel, problem)
        assert torch.equal(y, want)
        for name in gradients:
            assert torch.equal(again[name], gradients[name]), name


def test_forcing_ends(kernel, hooks):
    """Afterwards the choice is automatic again, also when the name was wrong."""
    every = [config.name for config in hooks.configs()]
    assert len(set(every)) == len(every)
    names = {setting.config for setting in forced_settings()}
    assert names
    problem = problems.make("moe", 100, 264, 136, 4, 2, torch.bfloat16, "cuda")
    want = problem.call(kernel, **problem.tensors)
    for name in names:
        with hooks.forced(name):
            problem.call(kernel, **problem.tensors)
    with pytest.raises(ValueError, match="no such tile"):
        with hooks.forced("no such tile"):
            pass
    assert torch.equal(problem.call(kernel, **problem.tensors), want)


def test_a_whole_path_is_forced(kernel, hooks):
    """The product and both of its gradients, if a configuration of each op is named."""
    names = [config.name for config in hooks.configs_here() if config.path == "mma"]
    problem = problems.make("moe", 100, 264, 136, 4, 2, torch.bfloat16, "cuda")
    with hooks.forced(*names):
        found = problems.launches(lambda: problems.run(kernel, problem))
    assert any("mma::" in name for name in found), found
    assert not any("wgmma::" in name for name in found), found


@pytest.mark.parametrize(
    "dtype, E, rows, by_columns, wanted",
    [
        (torch.bfloat16, 8, 4, False, "mma 8x16"),
        (torch.float16, 8, 5, False, "mma 32x64"),
        (torch.bfloat16, 8, 4, True, "mma 32x64"),
        (torch.bfloat16, 8, 16, False, "mma 32x64"),
        (torch.bfloat16, 8, 17, False, None),
        (torch.float32, 8, 1, False, "fp32 32x64"),
        (torch.float32, 8, 17, True, None),
        (torch.bfloat16, 512, 1, False, "mma 8x16"),
        (torch.bfloat16, 513, 1, False, None),
    ],
    ids=str,
)
def test_few_rows_take_narrow_tiles(kernel, hooks, dtype, E, rows, by_columns, wanted):
    """By the averages of rows, the limit of experts, and how W lies; row dots and gradients stay with the wide ones."""
    tiles = {f"{config.path} {config.tile_m}x{config.tile_n}": config.name for config in hooks.configs_here()}
    problem = problems.make("grouped_gemm", E * rows, 136, 264, E, 1, dtype, "cuda")
    leaves = problem.leaves()
    if by_columns:
        W = leaves["W"].detach().transpose(1, 2).contiguous().transpose(1, 2)
        leaves["W"] = W.requires_grad_()

    def narrow(call, *forced):
        with hooks.forced(*forced):
            return sorted(name for name in problems.launches(call) if "narrow" in name)

    def forward():
        return problem.call(kernel, **leaves)

    found = narrow(forward)
    assert found == (narrow(forward, tiles[wanted]) if wanted else [])
    assert len(found) == (wanted is not None)
    dots = problems.make("moe", E * rows, 136, 264, E, 1, dtype, "cuda")
    y = dots.call(kernel, **(given := dots.leaves()))
    assert narrow(lambda: torch.autograd.grad(y.sum(), list(given.values()), retain_graph=True)) == []


def test_all_rows_at_one_expert_of_many(kernel):
    """Their tiles are shared among the blocks as those of many experts are."""
    for dtype in (torch.float32, torch.bfloat16):
        problems.check(kernel, problems.make("moe", 300, 136, 264, 64, 3, dtype, "cuda", "single"))


def test_shared_memory_of_this_gpu(hooks):
    """The table behind Config.selectable_on, which is otherwise what CUDA's documentation says."""
    properties = torch.cuda.get_device_properties()
    known = hooks.SHARED_MEMORY[10 * properties.major + properties.minor]
    found = properties.shared_memory_per_multiprocessor, properties.shared_memory_per_block_optin
    assert tuple(size // 1024 for size in found) == known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(2048, 1024, 1024, 8, 2), (2600, 1032, 4300, 2, 2)], ids=str)
def test_large_shape_runs_by_default(kernel, sizes, dtype):
    """The second one has so many columns that row tiles are taken in groups."""
    problem = problems.make("moe", *sizes, dtype, "cuda")
    problems.check(kernel, problem)
