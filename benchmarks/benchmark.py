"""Conformity and a first idea of speed, through `kernels benchmark`. Measurements for claims: compare.py."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class MoEBenchmark(Benchmark):
    """moe, moe_mlp and grouped_gemm in the operand dtypes, against plain torch. Sizes follow the device."""

    seed = 0

    def draw(self, dtype: torch.dtype, top_k: int) -> None:
        tokens, features, outputs, experts = (4096, 2048, 2048, 8) if self.device == "cuda" else (128, 64, 48, 8)
        self.x = torch.randn(tokens, features, device=self.device).to(dtype)
        # Outputs of about 1/8: the runner's tolerance is absolute, and a rounding to bf16 has to pass it.
        self.weight = self.draw_weight(experts, outputs, features, 0.125).to(dtype)
        self.w_up = self.draw_weight(experts, 2 * outputs, features, 1.0).to(dtype)
        self.w_down = self.draw_weight(experts, features, outputs, 0.125).to(dtype)
        self.expert_ids = torch.rand(tokens, experts, device=self.device).topk(top_k, dim=-1).indices
        self.topk_weights = torch.rand(tokens, top_k, device=self.device)
        self.group_sizes = torch.bincount(self.expert_ids[:, 0], minlength=experts)

    def draw_weight(self, experts: int, outputs: int, features: int, scale: float) -> torch.Tensor:
        return torch.randn(experts, outputs, features, device=self.device) * (scale / features**0.5)

    def run_moe(self) -> None:
        self.out = self.kernel.moe(self.x, self.weight, self.expert_ids, self.topk_weights)

    def moe_in_torch(self) -> torch.Tensor:
        return self.by_token(self.weight.shape[1], lambda rows, expert: rows @ self.weight[expert].T)

    def run_moe_mlp(self) -> None:
        self.out = self.kernel.moe_mlp(self.x, self.w_up, self.w_down, self.expert_ids, self.topk_weights)

    def moe_mlp_in_torch(self) -> torch.Tensor:
        def mlp(rows, expert):
            gate, up = (rows @ self.w_up[expert].T).chunk(2, dim=-1)
            return F.silu(gate) * up @ self.w_down[expert].T

        return self.by_token(self.x.shape[1], mlp).to(self.x.dtype)

    def by_token(self, outputs: int, compute: Callable) -> torch.Tensor:
        """The weighted sum of what is computed of each expert's rows."""
        y = torch.zeros(self.x.shape[0], outputs, device=self.device)
        for expert in range(self.weight.shape[0]):
            tokens, slots = (self.expert_ids == expert).nonzero(as_tuple=True)
            y.index_add_(0, tokens, compute(self.x[tokens], expert).float() * self.topk_weights[tokens, slots, None])
        return y

    def run_grouped_gemm(self) -> None:
        self.out = self.kernel.grouped_gemm(self.x, self.weight, self.group_sizes)

    def grouped_gemm_in_torch(self) -> torch.Tensor:
        groups = self.x.split(self.group_sizes.tolist())
        return torch.cat([group @ matrix.T for group, matrix in zip(groups, self.weight, strict=True)])

    def setup_moe_top1_bf16(self) -> None:
        self.draw(torch.bfloat16, 1)

    def setup_moe_top2_bf16(self) -> None:
        self.draw(torch.bfloat16, 2)

    def setup_moe_top2_fp16(self) -> None:
        self.draw(torch.float16, 2)

    def setup_moe_top2_fp32(self) -> None:
        self.draw(torch.float32, 2)

    def setup_moe_mlp_bf16(self) -> None:
        self.draw(torch.bfloat16, 2)

    def setup_moe_mlp_fp32(self) -> None:
        self.draw(torch.float32, 2)

    def setup_grouped_gemm_bf16(self) -> None:
        self.draw(torch.bfloat16, 1)

    def setup_grouped_gemm_fp32(self) -> None:
        self.draw(torch.float32, 1)

    benchmark_moe_top1_bf16 = benchmark_moe_top2_bf16 = benchmark_moe_top2_fp16 = benchmark_moe_top2_fp32 = run_moe
    verify_moe_top1_bf16 = verify_moe_top2_bf16 = verify_moe_top2_fp16 = verify_moe_top2_fp32 = moe_in_torch
    benchmark_moe_mlp_bf16 = benchmark_moe_mlp_fp32 = run_moe_mlp
    verify_moe_mlp_bf16 = verify_moe_mlp_fp32 = moe_mlp_in_torch
    benchmark_grouped_gemm_bf16 = benchmark_grouped_gemm_fp32 = run_grouped_gemm
    verify_grouped_gemm_bf16 = verify_grouped_gemm_fp32 = grouped_gemm_in_torch
