"""route: the stable sort by expert, exact for every size, number of experts, dtype and id."""

import copy
import io
import pickle

import numpy as np
import oracle
import problems
import pytest
import torch

DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
# One pass of the GPU's sort has up to 1023 experts, its tiles have 2048 ids.
EXPERTS = (1, 2, 127, 128, 255, 256, 1023, 1024, 1025, 5000, 70000, 2**20 + 3)
SIZES = (0, 1, 31, 33, 511, 2048, 2049, 100003)
DEAD = (-1, -2, -(2**31), -(2**31) - 1, -(2**40), 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**40, 2**62)


def mixed_ids(S, E, dtype, seed=0):
    """Live ids, every fourth or so replaced by one outside [0, E), on either side, that dtype holds; on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(dtype)
    dead = {E, E + 1, info.min, info.max, *DEAD}
    dead = sorted(v for v in dead if info.min <= v <= info.max and not 0 <= v < E)
    ids = torch.randint(min(E, info.max + 1), (S,), generator=generator)
    if dead:
        outside = torch.tensor(dead)[torch.randint(len(dead), (S,), generator=generator)]
        ids = torch.where(torch.rand(S, generator=generator) < 0.25, outside, ids)
    return ids.to(dtype)


def assert_sorted(row_assignment, offs, ids, E):
    """Against a stable sort in int64 of the ids on the CPU."""
    order, expert = oracle.expert_order(ids.long(), E)
    assert torch.equal(row_assignment.cpu(), order.int())
    assert torch.equal(offs.cpu(), torch.bincount(expert, minlength=E + 1)[:E].cumsum(0).int())


def check(kernel, ids, E, device, k=1):
    """The routing of ids, given on the CPU."""
    routing = kernel.route(ids.view(-1, k).to(device), E)
    assert_sorted(routing.row_assignment, routing.offs, ids, E)
    assert (routing.top_k, routing.num_tokens) == (k, ids.numel() // k)
    for t in (routing.row_assignment, routing.offs):
        assert t.dtype == torch.int32 and t.is_contiguous() and t.device.type == device
    assert isinstance(routing, kernel.Routing)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("distribution", oracle.DISTRIBUTIONS)
@pytest.mark.parametrize("E, k", [(1, 1), (8, 2), (255, 3), (256, 3), (40000, 2)])
def test_any_distribution_over_experts(kernel, device, E, k, distribution):
    if distribution in ("uniform", "skewed") and E > 1000:
        pytest.skip("the other distributions cover it")
    ids = oracle.make_ids(61, E, k, distribution, torch.Generator().manual_seed(0))
    check(kernel, ids, E, device, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("E", EXPERTS)
def test_any_dtype_and_number_of_experts(kernel, device, E, dtype):
    check(kernel, mixed_ids(4099, E, dtype), E, device)


@pytest.mark.parametrize("S", SIZES)
@pytest.mark.parametrize("E", [1, 128, 1023, 1024, 70000, 2**20 + 3])
def test_any_size(kernel, device, E, S):
    check(kernel, mixed_ids(S, E, torch.int64), E, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_many_blocks_as_there_are(kernel, device, dtype):
    """The most ids for which blocks take no more than their least, one more, and many more."""
    for S, E in ((2**19, 128), (2**19 + 1, 128), (2**18 + 1, 1022), (2**19 + 1, 1025), (3_000_001, 128)):
        check(kernel, mixed_ids(S, E, dtype), E, device)


@pytest.mark.parametrize("E", [2, 128, 1023, 1024, 70000])
def test_orders_in_which_ids_may_come(kernel, device, E):
    """All equal, live or dead; sorted either way; each unlike its neighbours; equal in runs around a warp's length."""
    S = 10007
    place = torch.arange(S)
    for ids in (
        *(torch.full((S,), e) for e in (0, E // 2, E - 1, E, -1, 2**40)),
        place * E // S,
        (S - 1 - place) * E // S,
        place % E,
        place * 7919 % (E + 1) - 1,
        *(place // run % (E + 1) for run in (2, 31, 32, 33)),
    ):
        check(kernel, ids, E, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("E", [5, 100, 300, 70000])
def test_no_id_wraps_around(kernel, device, dtype, E):
    info = torch.iinfo(dtype)
    ends = (info.min, info.min + 1, info.max - 1, info.max)
    interesting = (-1, 0, 1, E - 1, E, E + 1, 2 * E, E - 2**8, E - 2**16, E - 2**32, *ends, *DEAD)
    values = [v for v in interesting if info.min <= v <= info.max]
    check(kernel, torch.tensor(values, dtype=dtype), E, device)


@pytest.mark.parametrize("T, k", [(0, 2), (3, 0), (0, 0)])
@pytest.mark.parametrize("E", [4, 3000])
def test_nothing_to_sort(kernel, device, T, k, E):
    routing = kernel.route(torch.zeros(T, k, dtype=torch.int64, device=device), E)
    assert routing.row_assignment.shape == (0,)
    assert routing.offs.tolist() == [0] * E
    assert (routing.top_k, routing.num_tokens) == (k, T)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "misaligned"])
def test_any_layout(kernel, device, layout):
    for dtype in DTYPES:
        ids = mixed_ids(300 * 4, 50, dtype).view(300, 4).to(device)
        view = {
            "transposed": lambda t: t.T.contiguous().T,
            "sliced": lambda t: torch.cat([t, t], 1)[:, 2:6],
            "expanded": lambda t: t[:, :1].expand(300, 4),
            "misaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(300, 4),
        }[layout](ids)
        got, want = kernel.route(view, 50), kernel.route(view.clone(memory_format=torch.contiguous_format), 50)
        assert torch.equal(got.row_assignment, want.row_assignment) and torch.equal(got.offs, want.offs)
        check(kernel, view.cpu().contiguous(), 50, device, 4)


def test_every_place_is_written_and_none_besides(ops, device):
    """Outputs are poisoned before, and fenced."""
    for S, E in ((0, 3), (1, 1), (4099, 128), (4099, 1023), (4099, 1025), (4099, 2**20 + 3)):
        ids = mixed_ids(S, E, torch.int64)
        for poison in (-1, 2**31 - 1):
            buffers = [torch.full((size + 128,), poison, dtype=torch.int32, device=device) for size in (S, E)]
            row_assignment, offs = (buffer[64:-64] for buffer in buffers)
            ops.route(ids.to(device), E, row_assignment, offs)
            assert_sorted(row_assignment, offs, ids, E)
            for buffer in buffers:
                assert (buffer[:64] == poison).all() and (buffer[-64:] == poison).all(), "written outside the output"


@pytest.mark.gpu
@pytest.mark.parametrize("E", [128, 5000])
def test_captured_and_replayed(kernel, E):
    """A graph sorts the ids of its replay, whatever they and those before them are."""
    first, second = (mixed_ids(100003, E, torch.int64, seed).view(-1, 1) for seed in (0, 1))
    ids = first.cuda()
    with torch.cuda.stream(torch.cuda.Stream()):
        kernel.route(ids, E)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing = kernel.route(ids, E)
    for given in (second, first, torch.full_like(first, E - 1), second):
        ids.copy_(given)
        graph.replay()
        assert_sorted(routing.row_assignment, routing.offs, given, E)


@pytest.mark.gpu
def test_never_waits(kernel):
    ids = mixed_ids(5000, 5000, torch.int64).view(-1, 1).cuda()
    with problems.no_waiting():
        for E in (128, 5000):
            kernel.route(ids, E)


@pytest.mark.gpu
@pytest.mark.parametrize("E", [2, 1022])
def test_counts_of_a_block_that_need_more_than_16_bits(kernel, E):
    S = 2**24 + 5
    ids = torch.full((S, 1), E - 1, dtype=torch.int16, device="cuda")
    ids[7] = 0
    routing = kernel.route(ids, E)
    assert (routing.offs[:-1] == 1).all() and routing.offs[-1] == S
    assert routing.row_assignment[0] == 7
    others = torch.arange(S, dtype=torch.int32, device="cuda")
    assert torch.equal(routing.row_assignment[1:], others[others != 7])


@pytest.mark.gpu(memory=40)
@pytest.mark.parametrize("E", [2, 1025])
def test_as_many_ids_as_there_can_be(kernel, E):
    """2**31 - 1 of them, the last expert's at the odd places."""
    S = 2**31 - 1
    ids = torch.zeros(S, 1, dtype=torch.int16, device="cuda")
    ids[1::2] = E - 1
    routing = kernel.route(ids, E)
    assert routing.offs[0] == routing.offs[-2] == 2**30 and routing.offs[-1] == S
    for row, first in ((0, 0), (2**30, 1)):
        rows = routing.row_assignment[row : row + 2**30]
        assert torch.equal(rows, torch.arange(first, S, 2, dtype=torch.int32, device="cuda"))


@pytest.mark.gpu(memory=20)
@pytest.mark.parametrize("E", [2**30 - 1, 2**30, 2**31 - 1])
def test_as_many_experts_as_there_can_be(kernel, E):
    ids = mixed_ids(4099, E, torch.int64)
    order, expert = oracle.expert_order(ids, E)
    routing = kernel.route(ids.view(-1, 1).cuda(), E)
    assert torch.equal(routing.row_assignment.cpu(), order.int())
    # Offsets rise at the experts that have ids and nowhere else.
    chosen, counts = expert[expert < E].unique(return_counts=True)
    chosen = chosen.cuda()
    assert torch.equal(routing.offs[chosen].cpu(), counts.cumsum(0).int())
    before = routing.offs[(chosen - 1).clamp(min=0)].where(chosen > 0, 0)
    assert int((routing.offs[chosen] - before).sum()) == int(routing.offs[-1]) == int((expert < E).sum())
    assert routing.offs[0] >= 0 and all((part.diff() >= 0).all() for part in routing.offs.split(2**28))


def test_number_of_experts_may_be_any_integer(kernel, place):
    """numpy's too, which configurations are full of."""
    ids = torch.tensor([[1, 0], [1, 2]], device=place.device)
    assert torch.equal(kernel.route(ids, np.int64(3)).offs, kernel.route(ids, 3).offs)


def test_copied_pickled_and_saved(kernel, device):
    """torch.load wants to be told of the class, unless what was saved is a tuple."""
    routing = kernel.route(torch.randint(-1, 5, (30, 2), device=device), 4)
    saved, plain = io.BytesIO(), io.BytesIO()
    torch.save({"routing": routing}, saved)
    torch.save(tuple(routing), plain)
    for file in (saved, plain):
        file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="Routing"):
        torch.load(saved)
    saved.seek(0)
    with torch.serialization.safe_globals([kernel.Routing]):
        loaded = torch.load(saved)["routing"]
    copies = copy.copy(routing), copy.deepcopy(routing), pickle.loads(pickle.dumps(routing))
    for found in (*copies, loaded, kernel.Routing(*torch.load(plain))):
        assert type(found) is kernel.Routing and found[2:] == routing[2:]
        assert all(map(torch.equal, found[:2], routing[:2]))
