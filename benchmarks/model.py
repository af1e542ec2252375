"""Times a model of transformers with its experts on the package and on transformers' own implementations.

The model is a Qwen3-MoE of a few layers with random weights, nothing is downloaded. Training is a forward and backward;
generate takes a prompt and adds tokens to it one at a time, greedily. The implementations run in turn in one process,
each median is of five runs or more. One that fails is left out, and why is kept: batched_mm copies the weights of every
assignment, for which no GPU has the memory in training. In generate transformers itself takes batched_mm where it was
told grouped_mm, once it decodes on a GPU.
"""

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import arguments
import compare
import package
import torch
from shapes import DTYPES
from timing import medians_ms, peak_bytes

OURS = "grouped_gemm_moe"
EAGER = "eager"
IMPLEMENTATIONS = (EAGER, OURS, "grouped_mm", "batched_mm")
NEAR = 3e-2  # the logits of the middle token, relative Frobenius norm: undecided routers send some tokens elsewhere
TRAIN, GENERATE = "training step", "generate"
SIZES = {  # of Qwen3-30B-A3B on a GPU, with a twelfth of its layers and of its vocabulary
    "cuda": {
        **{"hidden_size": 2048, "num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8},
        **{"num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        **{"vocab_size": 12672, "max_position_embeddings": 4096},
    },
    "cpu": {
        **{"hidden_size": 64, "num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        **{"vocab_size": 256, "max_position_embeddings": 64},
    },
}
DTYPE = {"cuda": "bf16", "cpu": "fp32"}


@dataclass(frozen=True)
class Task:
    """prompt: the tokens that a sequence begins with, or all of them; new: those that are generated."""

    name: str
    sequences: int
    prompt: int
    new: int = 0

    @property
    def tokens(self) -> int:
        """Those that a rate counts."""
        return self.sequences * (self.new or self.prompt)


TASKS = {
    "cuda": (Task(TRAIN, 4, 2048), Task(GENERATE, 1, 16, 64), Task(GENERATE, 16, 16, 64)),
    "cpu": (Task(TRAIN, 2, 16), Task(GENERATE, 2, 4, 4)),
}


def main() -> int:
    args = arguments.parser(__doc__).parse_args()
    try:
        model = make(args.device)
    except ImportError as error:
        print(f"there is no transformers with experts functions: {error}", file=sys.stderr)
        return 2
    rows = []
    for task in TASKS[args.device]:
        rows += measure(model, task, args.device)
        compare.write(args.json, rows)
    return report(rows)


def make(device: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(OURS, package.load().experts_forward)
    config = Qwen3MoeConfig(**SIZES[device], pad_token_id=0, bos_token_id=1, eos_token_id=None)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[DTYPE[device]], experts_implementation=OURS)
    for parameter in model.parameters():  # as they come, experts say so little that their absence is no error
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


def measure(model: torch.nn.Module, task: Task, device: str) -> list[dict]:
    """A row an implementation. Those that fail, or say something else than the model's own loop, have no times."""
    ids = torch.randint(2, model.config.vocab_size, (task.sequences, task.prompt), device=device)
    runs, rows = {}, {}
    want = logits(model, EAGER, ids)
    for name in IMPLEMENTATIONS:
        rows[name] = {**describe(model, task, name, device), "ms": None, "bytes_peak": None, "left_out": None}
        run = partial(WORK[task.name], model, name, ids, task)
        try:
            check_near(logits(model, name, ids), want)
            run()
            free_memory(model)
            rows[name]["bytes_peak"] = peak_bytes(run, device)
            runs[name] = run
        except Exception as error:
            rows[name]["left_out"] = type(error).__name__
            print(f"  {name} is left out of {task.name}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
        free_memory(model)  # behind the handler: until then the error holds what its frames hold
    for name, ms in medians_ms(runs, device).items():
        rows[name]["ms"] = ms
    free_memory(model)
    return list(rows.values())


def describe(model: torch.nn.Module, task: Task, name: str, device: str) -> dict:
    import transformers

    config = model.config
    sizes = {
        **{"T": task.sequences * task.prompt, "H": config.hidden_size, "I": config.moe_intermediate_size},
        **{"E": config.num_experts, "k": config.num_experts_per_tok, "layers": config.num_hidden_layers},
    }
    of_task = {"sequences": task.sequences, "prompt": task.prompt, "new": task.new, "tokens": task.tokens}
    versions = {"transformers": transformers.__version__, "dtype": DTYPE[device]}
    return {"task": task.name, "experts": name, **of_task, **sizes, **versions}


@torch.no_grad()
def logits(model: torch.nn.Module, experts: str, ids: torch.Tensor) -> torch.Tensor:
    model.set_experts_implementation(experts)
    return model(ids).logits.float()


def check_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """A wrong answer is not worth timing."""
    error = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())
    if not error <= NEAR:
        raise AssertionError(f"the logits are off by {error:.2g} (relative Frobenius norm)")


def training_step(model: torch.nn.Module, experts: str, ids: torch.Tensor, task: Task) -> None:
    model.set_experts_implementation(experts)
    model.train()
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids).loss.backward()


def generate(model: torch.nn.Module, experts: str, ids: torch.Tensor, task: Task) -> None:
    model.set_experts_implementation(experts)
    model.eval()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": task.new, "do_sample": False}
    found = model.generate(ids, **options)
    if found.shape[1] != task.prompt + task.new:
        raise AssertionError(f"{found.shape[1] - task.prompt} tokens were generated instead of {task.new}")


WORK: dict[str, Callable] = {TRAIN: training_step, GENERATE: generate}


def free_memory(model: torch.nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()


def report(rows: list[dict]) -> int:
    """Prints tokens a second; the exit status, which is 1 only where ours was left out."""
    for row in rows:
        which = f"{row['task']}, {row['sequences']} of {row['prompt']}"
        said = (
            f"left out: {row['left_out']}" if row["ms"] is None else f"{row['tokens'] / row['ms'] * 1e3:,.0f} tokens/s"
        )
        print(f"{which:32}{row['experts']:20}{said}")
    return int(any(row["experts"] == OURS and row["ms"] is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
