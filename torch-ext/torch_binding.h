// The schemas of the ops, the same for every backend.
//
// Every op writes into tensors that its caller allocated, so none of them returns a tensor that
// depends on the routing, and running out of memory is reported by torch itself. The CUDA
// implementations are registered in csrc/register.cu, the CPU ones in Python (reference.py).

#pragma once

namespace grouped_gemm_moe {

inline constexpr const char* kSchemas[] = {
    // One product a live row, read and written through the row map where asked.
    "gemm(Tensor a, Tensor w, Tensor offs, Tensor? row_assignment, int top_k, bool gather, bool scatter, "
    "Tensor? bias, Tensor? row_weight, Tensor? dot_with, Tensor(a!)? dot, Tensor(b!)? out) -> ()",

    // The same product, weighted and summed into the row of its token.
    "gemm_combine(Tensor a, Tensor w, Tensor offs, Tensor row_assignment, int top_k, bool gather, "
    "Tensor? bias, Tensor? row_weight, Tensor? dot_with, Tensor(a!)? dot, Tensor(b!) out) -> ()",

    // The activation of the product, by row, and to `pre` what it is the activation of. The activation: activation.py.
    "gemm_activation(Tensor a, Tensor w, Tensor offs, Tensor? row_assignment, int top_k, bool gather, Tensor? bias, "
    "int kind, bool gated, bool interleaved, float limit, float alpha, float up_offset, "
    "Tensor(a!)? pre, Tensor(b!) out) -> ()",

    // Both products of an MLP, of which nothing is kept for a backward: h [S, I] is between them. The rows of a token are
    // added in slot order by way of `rows`, or else in any order by way of `sums`, unless `out` has the type of sums.
    "mlp(Tensor x, Tensor w_up, Tensor w_down, Tensor ids, Tensor row_weight, Tensor? bias_up, Tensor? bias_down, "
    "int kind, bool gated, bool interleaved, float limit, float alpha, float up_offset, "
    "Tensor(a!) h, Tensor(b!)? rows, Tensor(c!)? sums, Tensor(d!) out) -> ()",

    // Behind the product d, the gradient to the activation: from `pre` the activation h once more, <d, h> a row, the
    // weighted gradient to `pre`, and the weighted h.
    "gemm_activation_grad(Tensor a, Tensor w, Tensor offs, Tensor row_assignment, int top_k, bool gather, "
    "Tensor row_weight, int kind, bool gated, bool interleaved, float limit, float alpha, float up_offset, Tensor pre, "
    "Tensor(a!)? dot, Tensor(b!)? d_pre, Tensor(c!)? weighted) -> ()",

    // Per expert, the sum over its rows of the outer products dy x.
    "weight_grad(Tensor x, Tensor dy, Tensor offs, Tensor? row_assignment, int top_k, bool gather_x, bool gather_dy, "
    "Tensor? row_weight, bool accumulate, Tensor(a!) out) -> ()",

    // The top_k rows of each token, added in slot order.
    "sum_rows(Tensor rows, int top_k, Tensor(a!) out) -> ()",

    // The stable sort of the assignments by expert, and where each expert ends in it. A SymInt, so that one compiled graph
    // serves all numbers of experts.
    "route(Tensor ids, SymInt num_experts, Tensor(a!) row_assignment, Tensor(b!) offs) -> ()",

    // The running sum of group sizes.
    "group_ends(Tensor sizes, Tensor(a!) offs) -> ()",

    // Test hooks of a library with kernels, answered on the CPU: its configurations, whether one runs on a
    // GPU, and the choice of some by their bits and of the most blocks that run at once (0: as many as fit).
    "config_table(Tensor like) -> Tensor",
    "config_runs_on(Tensor like, int index, int capability, int per_block, int per_sm, int reserved) -> bool",
    "force(Tensor like, int configs, int blocks) -> ()",
};

}  // namespace grouped_gemm_moe
