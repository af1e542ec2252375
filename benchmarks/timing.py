"""Medians of several candidates measured in turn, so that a GPU that slows down slows all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

MIN_ROUNDS, MAX_ROUNDS = 5, 101
BUDGET_S = {"cpu": 0.2, "cuda": 1.0}  # for one call of medians_ms
LEAD_CYCLES = 4_000_000  # about 2 ms


def medians_ms(
    candidates: Mapping[str, Callable[[], object]], device: str, budget_s: float | None = None
) -> dict[str, float]:
    """The median time of each candidate in milliseconds, over as many rounds as the budget allows, five at least.

    A candidate must have run before, so that nothing is compiled or loaded here. On a GPU the times are those of the
    device: before each run it pauses, so that the host gets ahead however long the candidate before kept it, and reads
    other memory through the L2 cache. It does not write there: the run would have to wait for these writes to leave.
    """
    one_round = _GpuRound(candidates) if device == "cuda" else _CpuRound(candidates)
    one_round()
    one_round.finish()
    start = time.perf_counter()
    one_round()
    one_round.finish()
    budget_s = BUDGET_S[device] if budget_s is None else budget_s
    rounds = int(budget_s / (time.perf_counter() - start))
    rounds = max(MIN_ROUNDS, min(rounds, MAX_ROUNDS))
    times = [one_round() for _ in range(rounds)]
    one_round.finish()
    return {name: statistics.median(one_round.milliseconds(t[name]) for t in times) for name in candidates}


class _GpuRound:
    """Runs each candidate once; hands back unread events, for reading them would wait for the device."""

    def __init__(self, candidates):
        self.candidates = candidates
        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        self.other_memory = torch.zeros(l2_bytes, device="cuda")  # float32: four times as many bytes
        self.sum = torch.zeros((), device="cuda")

    def __call__(self):
        events = {}
        for name, run in self.candidates.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(LEAD_CYCLES)
            torch.sum(self.other_memory, 0, out=self.sum)
            start.record()
            run()
            end.record()
            events[name] = start, end
        return events

    @staticmethod
    def finish():
        torch.cuda.synchronize()

    @staticmethod
    def milliseconds(events):
        start, end = events
        return start.elapsed_time(end)


class _CpuRound:
    def __init__(self, candidates):
        self.candidates = candidates

    def __call__(self):
        times = {}
        for name, run in self.candidates.items():
            start = time.perf_counter()
            run()
            times[name] = time.perf_counter() - start
        return times

    @staticmethod
    def finish():
        pass

    @staticmethod
    def milliseconds(seconds):
        return seconds * 1e3


def peak_bytes(run: Callable[[], object], device: str) -> int | None:
    """What a run allocates at its peak beyond what was there before it, its result included. None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def saved_bytes(forward: Callable[[], torch.Tensor], device: str) -> int | None:
    """What a forward leaves for its backward beside its arguments and its result. None on a CPU."""
    if device != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    result = forward()
    return torch.cuda.memory_allocated() - before - result.untyped_storage().nbytes()


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """The replay of a CUDA graph of `run`, which is kept, for the graph reads what belongs to it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return partial(_replay, graph, run)


def _replay(graph, _):
    graph.replay()
