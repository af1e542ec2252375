// The CUDA implementations of the ops: tensors become problems (problem.h), a configuration is picked, kernels are
// started on the caller's stream. Arguments are checked in Python; here stands only what would otherwise touch memory
// that isn't the operands'.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <optional>
#include <stdexcept>
#include <string>

#include "launch.h"
#include "registration.h"
#include "schedule.cuh"

namespace moe {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

void check(bool holds, const char* message) {
  if (!holds) throw std::runtime_error(std::string("grouped-gemm-moe: ") + message);
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next call would find it too
  throw std::runtime_error(std::string("grouped-gemm-moe: ") + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

DType dtype(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return DType::float32;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    default: throw std::runtime_error("grouped-gemm-moe: float32, bfloat16 or float16 expected on CUDA");
  }
}

int size(const Tensor& tensor, int dimension) {
  const int64_t size = tensor.size(dimension);
  check(size <= INT_MAX, "no dimension may pass 2^31 - 1");
  return int(size);
}

// The device and stream of a call, and what of the GPU decides which kernel runs.
struct Launch {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;
  int sms;
  Gpu gpu;

  explicit Launch(const Tensor& tensor) : guard(tensor.get_device_index()) {
    const int device = tensor.get_device_index();
    void* current = nullptr;
    check(aoti_torch_get_current_cuda_stream(device, &current) == AOTI_TORCH_SUCCESS, "no CUDA stream");
    stream = static_cast<cudaStream_t>(current);
    const auto get = [&](cudaDeviceAttr attribute) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, attribute, device));
      return value;
    };
    sms = get(cudaDevAttrMultiProcessorCount);
    gpu.capability = 10 * get(cudaDevAttrComputeCapabilityMajor) + get(cudaDevAttrComputeCapabilityMinor);
    gpu.shared_per_block = get(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    gpu.shared_per_sm = get(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    gpu.shared_reserved = get(cudaDevAttrReservedSharedMemoryPerBlock);
  }
};

// Test hooks.
std::atomic<uint64_t> forced_configs{0};
std::atomic<int> forced_blocks{INT_MAX};

const Config& config_of(const Call& call, const Launch& launch) {
  const int index = pick_config(call, launch.gpu, forced_configs.load());
  check(index >= 0, "this GPU has too little shared memory");
  return kConfigs[index];
}

// Whether any 16 bytes that begin at a multiple of 16 from the start of a row can be moved at once.
bool vectorizable(const Tensor& tensor, int64_t contiguous_dimension) {
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (i != contiguous_dimension && tensor.size(i) > 1) {
      aligned &= tensor.stride(i) * int64_t(tensor.element_size()) % 16 == 0;
    }
  }
  return aligned;
}

// Whether a kernel may move an operand in whole 16-byte chunks: its rows consist of them.
bool chunked(const Tensor& tensor, int64_t contiguous_dimension) {
  return tensor.size(contiguous_dimension) * int64_t(tensor.element_size()) % 16 == 0 &&
         vectorizable(tensor, contiguous_dimension);
}

bool chunked_if_there(const MaybeTensor& matrix) { return !matrix || chunked(*matrix, 1); }

// Whether the copy engine can bring boxes of an operand that is chunked(): a tensor map has no size and no stride of 0.
bool boxed(const Tensor& tensor) {
  bool has = true;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    const int64_t bytes = tensor.stride(i) * int64_t(tensor.element_size());
    has &= tensor.size(i) > 0 && (tensor.size(i) == 1 || (0 < bytes && bytes < (int64_t(1) << 40)));
  }
  return has;
}

int64_t row_stride(const Tensor& tensor) {
  check(tensor.dim() == 2 && (tensor.numel() == 0 || tensor.size(1) <= 1 || tensor.stride(1) == 1),
        "rows must be contiguous");
  return tensor.stride(0);
}

uint32_t row_bytes(const Tensor& tensor, int64_t stride) {
  const int64_t bytes = stride * int64_t(tensor.element_size());
  check(bytes < (int64_t(1) << 32), "rows must be less than 4 GiB apart");
  return uint32_t(bytes);
}

Rows rows(const Tensor& tensor, bool gather) {
  return {static_cast<const char*>(tensor.data_ptr()), row_bytes(tensor, row_stride(tensor)), gather};
}

bool flat(const Tensor& tensor, ScalarType type, int64_t count) {
  return tensor.scalar_type() == type && tensor.numel() == count && tensor.is_contiguous();
}

bool fits(const Tensor& tensor, int64_t rows, int64_t columns) {
  return tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns;
}

RowMap row_map(const MaybeTensor& row_assignment, int64_t top_k, int64_t S) {
  check(!row_assignment || flat(*row_assignment, ScalarType::Int, S), "row_assignment must be contiguous int32 [S]");
  const RowMap map{row_assignment ? static_cast<const int*>(row_assignment->data_ptr()) : nullptr, top_k > 0 ? int(top_k) : 1};
  check(S % map.top_k == 0, "every token must have top_k rows");
  return map;
}

const float* weights(const MaybeTensor& row_weight, int64_t S) {
  check(!row_weight || flat(*row_weight, ScalarType::Float, S), "row_weight must be contiguous float32 [S]");
  return row_weight ? static_cast<const float*>(row_weight->data_ptr()) : nullptr;
}

// The tiles of one call; `scratch` owns the memory that `schedule` points into. The caching allocator hands it on in
// stream order, so it may go out of scope while the kernels still run.
struct Tiles {
  Tensor scratch;
  Schedule schedule;
};

Tiles schedule(const Tensor& offs, int S, int E, const Tiling& tiling, const Clear& clear, const Launch& launch) {
  check(flat(offs, ScalarType::Int, E), "offs must be contiguous int32 [E]");
  Tiles tiles{torch::stable::new_empty(offs, {schedule_words(S, E, tiling.rows)}), {}};
  check(build_schedule(static_cast<const int*>(offs.data_ptr()), S, E, tiling, clear, launch.sms,
                       static_cast<int*>(tiles.scratch.data_ptr()), launch.stream, &tiles.schedule));
  return tiles;
}

int block_count(const Config& config, const Launch& launch) {
  return std::min(launch.sms * std::max(blocks_on(config, launch.gpu), 1), forced_blocks.load());
}

template <typename Problem>
void run(const Config& config, DType type, const Problem& problem, const Launch& launch) {
  const int blocks = block_count(config, launch);
  if (config.path == Path::wgmma) {
    return check(type == DType::bfloat16 ? wgmma::launch_bfloat16(config, problem, blocks, launch.stream)
                                         : wgmma::launch_float16(config, problem, blocks, launch.stream));
  }
  switch (type) {
    case DType::float32: return check(simt::launch(config, problem, blocks, launch.stream));
    case DType::bfloat16: return check(mma::launch_bfloat16(config, problem, blocks, launch.stream));
    case DType::float16: return check(mma::launch_float16(config, problem, blocks, launch.stream));
  }
}

// The operands of a product of S rows. Without rows or columns there is nothing to launch, and nothing else is looked at.
GemmProblem product(const Tensor& a, const Tensor& w, int64_t S, const MaybeTensor& row_assignment, int64_t top_k,
                    bool gather) {
  check(w.dim() == 3 && dtype(a) == dtype(w), "w must be [E, N, K] in the type of a");
  GemmProblem p{};
  p.E = size(w, 0), p.N = size(w, 1), p.K = size(w, 2);
  check(S <= INT_MAX, "no more than 2^31 - 1 rows");
  p.S = int(S);
  if (S == 0 || p.N == 0) return p;
  check(a.dim() == 2 && a.size(1) == p.K, "a and w must agree in K");
  p.map = row_map(row_assignment, top_k, S);
  check(a.size(0) == (gather ? S / p.map.top_k : S), "a must have a row for each row or token");
  p.a = rows(a, gather);
  p.w = static_cast<const char*>(w.data_ptr());
  p.w_expert_bytes = w.stride(0) * int64_t(w.element_size());
  p.w_major = p.K <= 1 || w.stride(2) == 1 ? Major::k : Major::mn;
  check(p.w_major == Major::k || p.N <= 1 || w.stride(1) == 1, "w must be contiguous in K or in N");
  p.w_row_bytes = row_bytes(w, w.stride(p.w_major == Major::k ? 1 : 2));
  return p;
}

void add_bias(GemmProblem& p, const MaybeTensor& bias, const Tensor& w) {
  if (!bias) return;
  check(fits(*bias, p.E, p.N) && dtype(*bias) == dtype(w), "bias must be [E, N] in the type of w");
  p.epilogue.bias = bias->data_ptr();
  p.epilogue.bias_stride = row_stride(*bias);
}

void set_out(Epilogue& e, const Tensor& out) {
  e.out = out.data_ptr(), e.out_stride = row_stride(out), e.out_type = dtype(out), e.out_vector = vectorizable(out, 1);
}

// Of rows by row, which may be contiguous in the other dimension too.
void set_rows_out(Epilogue& e, const Tensor& out) {
  e.out_turned = out.dim() == 2 && out.size(1) > 1 && out.stride(1) != 1 && out.stride(0) == 1;
  if (!e.out_turned) return set_out(e, out);
  e.out = out.data_ptr(), e.out_stride = out.stride(1), e.out_type = dtype(out);
}

float* row_dots(const GemmProblem& p, const Tensor& dot) {
  check(flat(dot, ScalarType::Float, pieces(p.N, kTile) * int64_t(p.S)), "dot must be contiguous float32 [ceil(N / 128), S]");
  return static_cast<float*>(dot.data_ptr());
}

int64_t row_count(const Tensor& a, const MaybeTensor& row_assignment) {
  return row_assignment ? row_assignment->numel() : a.size(0);
}

// boxed_too: whether 16 bytes of all other matrices may be moved at once.
const Config& gemm_config(const GemmProblem& p, const Tensor& a, const Tensor& w, bool boxed_too, const Launch& launch) {
  // Where gate and up lie side by side in memory, the halves that are brought apart have to begin at 16 bytes too.
  const bool halves = !p.split || p.w_major == Major::k || p.N / 2 * int64_t(w.element_size()) % 16 == 0;
  const bool aligned = chunked(a, 1) && chunked(w, p.w_major == Major::k ? 2 : 1) && halves;
  const bool boxes = boxed_too && boxed(w) && (p.a.gather || boxed(a));
  const Epilogue& e = p.epilogue;
  const bool plain = e.out && !e.dot_with && e.through != Through::activation_grad && p.E <= kNarrowExperts &&
                     p.S <= kNarrowRows;
  return config_of({Op::gemm, dtype(a), aligned, boxes, plain, p.w_major == Major::k, rows_of_tile(p)}, launch);
}

// Without offs narrow tiles find their rows among p.ids. clear: what the product itself adds to.
void multiply(const Config& config, GemmProblem& p, DType type, const Tensor* offs, const Clear& clear, const Launch& launch) {
  const Epilogue& e = p.epilogue;
  const bool cover_rest = (e.out || e.d_pre) && e.destination != Destination::token;
  Tiles tiles;
  if (config.narrow()) {
    check(!offs || flat(*offs, ScalarType::Int, p.E), "offs must be contiguous int32 [E]");
    p.offs = offs ? static_cast<const int*>(offs->data_ptr()) : nullptr;
    p.groups = p.E + cover_rest;
    if (clear.count) check(cudaMemsetAsync(clear.data, 0, clear.count * sizeof(float), launch.stream));
  } else {
    check(offs && !p.early && !p.clear.count, "only narrow tiles begin early, clear, or do without offs");
    tiles = schedule(*offs, p.S, p.E, {kTile, config.short_rows(), cover_rest}, clear, launch);
    p.schedule = tiles.schedule;
  }
  const int columns = tile_columns(config, e.through, p.w_major);
  p.gap = p.split ? (p.N - columns) / 2 : 0;
  p.raster = raster_of(p, columns, block_count(config, launch) / config.cluster());
  run(config, type, p, launch);
}

// What becomes of the products; whether 16 bytes of its matrices may be moved at once.
bool set_results(GemmProblem& p, const Tensor& w, const MaybeTensor& bias, const MaybeTensor& row_weight,
                 const MaybeTensor& dot_with, const MaybeTensor& dot, Destination destination, const MaybeTensor& out) {
  Epilogue& e = p.epilogue;
  const bool combine = destination == Destination::token;
  const int64_t tokens = p.S / p.map.top_k, targets = combine ? tokens : p.S;
  e.destination = destination;
  if (out) {
    check(fits(*out, targets, p.N), "out has the wrong shape");
    destination == Destination::row && !dot_with && !bias ? set_rows_out(e, *out) : set_out(e, *out);
    e.out_vector &= !combine || p.N % 4 == 0;
    check(!combine || (e.out_type == DType::float32 && e.out_stride == p.N),
          "rows are added up in float32, in a contiguous tensor");
  }
  e.row_weight = weights(row_weight, p.S);
  add_bias(p, bias, w);
  if (dot_with && dot) {
    check(fits(*dot_with, destination == Destination::row ? p.S : tokens, p.N) && dtype(*dot_with) == dtype(w),
          "dot_with must have a row for each row of the result, in the type of w");
    e.dot_with = dot_with->data_ptr();
    e.dot_with_stride = row_stride(*dot_with);
    e.dot_vector = vectorizable(*dot_with, 1);
    e.dot = row_dots(p, *dot);
  }
  return !(bias && e.dot_with) && (e.out_turned || chunked_if_there(out)) && chunked_if_there(bias) &&
         (!e.dot_with || chunked(*dot_with, 1));
}

Clear sums_of(const GemmProblem& p) { return {static_cast<float*>(p.epilogue.out), int64_t(p.S / p.map.top_k) * p.N}; }

void grouped_product(const Tensor& a, const Tensor& w, const Tensor& offs, const MaybeTensor& row_assignment, int64_t top_k,
                     bool gather, const MaybeTensor& bias, const MaybeTensor& row_weight, const MaybeTensor& dot_with,
                     const MaybeTensor& dot, Destination destination, const MaybeTensor& out) {
  GemmProblem p = product(a, w, row_count(a, row_assignment), row_assignment, top_k, gather);
  const bool combine = destination == Destination::token;
  if (p.S == 0 || p.N == 0) {
    if (combine && out->numel() > 0) torch::stable::zero_(*const_cast<Tensor*>(&*out));
    return;
  }
  const bool boxes = set_results(p, w, bias, row_weight, dot_with, dot, destination, out);
  const Launch launch(a);
  multiply(gemm_config(p, a, w, boxes, launch), p, dtype(a), &offs, combine ? sums_of(p) : Clear{}, launch);
}

void gemm(const Tensor& a, const Tensor& w, const Tensor& offs, const MaybeTensor& row_assignment, int64_t top_k,
          bool gather, bool scatter, const MaybeTensor& bias, const MaybeTensor& row_weight, const MaybeTensor& dot_with,
          const MaybeTensor& dot, const MaybeTensor& out) {
  grouped_product(a, w, offs, row_assignment, top_k, gather, bias, row_weight, dot_with, dot,
                  scatter ? Destination::assignment : Destination::row, out);
}

void gemm_combine(const Tensor& a, const Tensor& w, const Tensor& offs, const Tensor& row_assignment, int64_t top_k,
                  bool gather, const MaybeTensor& bias, const MaybeTensor& row_weight, const MaybeTensor& dot_with,
                  const MaybeTensor& dot, const Tensor& out) {
  grouped_product(a, w, offs, row_assignment, top_k, gather, bias, row_weight, dot_with, dot, Destination::token, out);
}

Activation activation(int64_t kind, bool gated, bool interleaved, double limit, double alpha, double up_offset) {
  check(0 <= kind && kind <= int64_t(ActivationKind::relu2), "no such activation");
  // Without a gate what is activated has the factor 0 + 1.
  return {ActivationKind(kind), gated, interleaved && gated, float(limit), float(alpha), gated ? float(up_offset) : 1.f};
}

bool halves_vectorizable(const Tensor& tensor, const Activation& f) {
  return vectorizable(tensor, 1) && (!f.gated || f.interleaved || tensor.size(1) % 8 == 0);
}

// What becomes of products that are activated, as set_results().
bool set_activated_results(GemmProblem& p, const Tensor& w, const MaybeTensor& bias, const Activation& f,
                           const MaybeTensor& pre, const Tensor& out) {
  Epilogue& e = p.epilogue;
  e.through = Through::activation;
  e.activation = f;
  check(!f.gated || p.N % 2 == 0, "gate and up must have as many columns");
  p.split = f.gated && !f.interleaved;
  check(fits(out, p.S, f.gated ? p.N / 2 : p.N), "out must have a row for each row and a column for each result");
  set_out(e, out);
  add_bias(p, bias, w);
  e.pre_vector = !bias || halves_vectorizable(*bias, e.activation);
  if (pre) {
    check(fits(*pre, p.S, p.N) && dtype(*pre) == dtype(w), "pre must have a row for each row of products, in the type of w");
    e.pre = pre->data_ptr(), e.pre_stride = row_stride(*pre);
    e.pre_vector &= halves_vectorizable(*pre, e.activation);
  }
  return chunked(out, 1) && chunked_if_there(bias) && chunked_if_there(pre);
}

void gemm_activation(const Tensor& a, const Tensor& w, const Tensor& offs, const MaybeTensor& row_assignment, int64_t top_k,
                     bool gather, const MaybeTensor& bias, int64_t kind, bool gated, bool interleaved, double limit,
                     double alpha, double up_offset, const MaybeTensor& pre, const Tensor& out) {
  GemmProblem p = product(a, w, row_count(a, row_assignment), row_assignment, top_k, gather);
  if (p.S == 0 || p.N == 0) return;
  const Activation f = activation(kind, gated, interleaved, limit, alpha, up_offset);
  const bool boxes = set_activated_results(p, w, bias, f, pre, out);
  const Launch launch(a);
  multiply(gemm_config(p, a, w, boxes, launch), p, dtype(a), &offs, {}, launch);
}

void gemm_activation_grad(const Tensor& a, const Tensor& w, const Tensor& offs, const Tensor& row_assignment, int64_t top_k,
                          bool gather, const Tensor& row_weight, int64_t kind, bool gated, bool interleaved, double limit,
                          double alpha, double up_offset, const Tensor& pre, const MaybeTensor& dot,
                          const MaybeTensor& d_pre, const MaybeTensor& weighted) {
  GemmProblem p = product(a, w, row_assignment.numel(), row_assignment, top_k, gather);
  if (p.S == 0 || p.N == 0) return;
  Epilogue& e = p.epilogue;
  e.through = Through::activation_grad;
  e.activation = activation(kind, gated, interleaved, limit, alpha, up_offset);
  e.row_weight = weights(row_weight, p.S);
  const int64_t columns = gated ? 2 * int64_t(p.N) : p.N;
  check(columns <= INT_MAX, "no dimension may pass 2^31 - 1");
  check(fits(pre, p.S, columns) && dtype(pre) == dtype(a), "pre must be what was activated, in the type of a");
  e.pre = pre.data_ptr(), e.pre_stride = row_stride(pre);
  e.pre_vector = halves_vectorizable(pre, e.activation);
  if (d_pre) {
    check(fits(*d_pre, p.S, columns) && dtype(*d_pre) == dtype(a), "d_pre must be like pre");
    e.d_pre = d_pre->data_ptr(), e.d_pre_stride = row_stride(*d_pre);
    e.pre_vector &= halves_vectorizable(*d_pre, e.activation);
  }
  if (weighted) {
    check(fits(*weighted, p.S, p.N) && dtype(*weighted) == dtype(a), "weighted must have the activation's shape and type");
    set_out(e, *weighted);
  }
  if (dot) e.dot = row_dots(p, *dot);
  const bool rows = p.N * int64_t(pre.element_size()) % 16 == 0;  // either half of what was activated begins at 16 bytes
  const bool boxes = rows && chunked(pre, 1) && chunked_if_there(d_pre) && chunked_if_there(weighted);
  const Launch launch(a);
  multiply(gemm_config(p, a, w, boxes, launch), p, dtype(a), &offs, {}, launch);
}

// The kernel's output rows follow its operand `a`, contiguous ones its operand `b`: the operands change places where the
// caller's gradient is laid out [E, K, N].
void weight_grad(const Tensor& x, const Tensor& dy, const Tensor& offs, const MaybeTensor& row_assignment, int64_t top_k,
                 bool gather_x, bool gather_dy, const MaybeTensor& row_weight, bool accumulate, const Tensor& out) {
  check(out.dim() == 3 && x.dim() == 2 && dy.dim() == 2 && out.size(1) == dy.size(1) && out.size(2) == x.size(1) &&
            dtype(x) == dtype(dy),
        "out must be [E, N, K] where dy has N columns and x has K, of one type");
  WeightGradProblem p{};
  const bool transposed = out.size(2) > 1 && out.stride(2) != 1;
  check(!transposed || out.size(1) <= 1 || out.stride(1) == 1, "out must be contiguous in K or in N");
  const int64_t S = row_count(x, row_assignment);
  check(S <= INT_MAX, "no more than 2^31 - 1 rows");
  p.E = size(out, 0), p.M = size(out, transposed ? 2 : 1), p.N = size(out, transposed ? 1 : 2);
  p.map = row_map(row_assignment, top_k, S);
  check(S == 0 || (x.size(0) == (gather_x ? S / p.map.top_k : S) && dy.size(0) == (gather_dy ? S / p.map.top_k : S)),
        "x and dy must have a row for each row or token");
  p.a = transposed ? rows(x, gather_x) : rows(dy, gather_dy);
  p.b = transposed ? rows(dy, gather_dy) : rows(x, gather_x);
  p.row_weight = weights(row_weight, S);
  p.out = out.data_ptr();
  p.out_type = dtype(out);
  p.out_expert_stride = out.stride(0);
  p.out_stride = out.stride(transposed ? 2 : 1);
  p.out_vector = vectorizable(out, transposed ? 1 : 2);
  p.accumulate = accumulate;
  if (out.numel() == 0) return;

  const Launch launch(out);
  const bool aligned = chunked(x, 1) && chunked(dy, 1);
  const bool narrow = p.out_type == dtype(x) || p.out_type == DType::float32;
  const bool boxes = narrow && chunked(out, transposed ? 1 : 2) && boxed(out);
  const Config& config = config_of({Op::weight_grad, dtype(x), aligned, boxes}, launch);
  const Tiles tiles = schedule(offs, int(S), p.E, {}, {}, launch);
  p.schedule = tiles.schedule;
  run(config, dtype(x), p, launch);
}

void sum_rows(const Tensor& from, int64_t top_k, const Tensor& out, const Launch& launch) {
  check(from.dim() == 2 && out.dim() == 2 && from.size(1) == out.size(1) && from.size(0) == out.size(0) * top_k,
        "rows must be [T * top_k, N] and out [T, N]");
  SumRowsProblem p{};
  p.T = out.size(0), p.N = out.size(1), p.top_k = int(top_k);
  p.rows = from.data_ptr(), p.rows_stride = row_stride(from), p.rows_type = dtype(from);
  p.out = out.data_ptr(), p.out_stride = row_stride(out), p.out_type = dtype(out);
  p.vector = vectorizable(from, 1) && vectorizable(out, 1);
  check(launch_sum_rows(p, launch.sms, launch.stream));
}

void sum_rows_op(const Tensor& from, int64_t top_k, const Tensor& out) { sum_rows(from, top_k, out, Launch(out)); }

IdType id_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Char: return IdType::int8;
    case ScalarType::Byte: return IdType::uint8;
    case ScalarType::Short: return IdType::int16;
    case ScalarType::Int: return IdType::int32;
    case ScalarType::Long: return IdType::int64;
    default: throw std::runtime_error("grouped-gemm-moe: ids and sizes must be int8, uint8, int16, int32 or int64");
  }
}

void group_ends(const Tensor& sizes, const Tensor& offs) {
  const int64_t E = sizes.numel();
  check(E <= INT_MAX && sizes.is_contiguous(), "sizes must be contiguous, and fewer than 2^31");
  check(flat(offs, ScalarType::Int, E), "offs must be contiguous int32 [E]");
  const Launch launch(sizes);
  check(launch_group_ends(sizes.data_ptr(), id_type(sizes), int(E), static_cast<int*>(offs.data_ptr()), launch.stream));
}

void route(const Tensor& ids, int64_t num_experts, const Tensor& row_assignment, const Tensor& offs, const Launch& launch) {
  const int64_t S = ids.numel();
  check(S <= INT_MAX, "no more than 2^31 - 1 rows");
  check(1 <= num_experts && num_experts <= INT_MAX, "num_experts must be at least 1 and less than 2^31");
  check(ids.is_contiguous(), "ids must be contiguous");
  check(flat(row_assignment, ScalarType::Int, S) && flat(offs, ScalarType::Int, num_experts),
        "row_assignment must be int32 [S] and offs int32 [E]");
  RouteProblem p{};
  p.S = int(S), p.E = int(num_experts);
  p.ids = ids.data_ptr(), p.id_type = id_type(ids);
  p.row_assignment = static_cast<int*>(row_assignment.data_ptr());
  p.offs = static_cast<int*>(offs.data_ptr());
  MaybeTensor scratch;
  if (const int64_t words = route_words(p.S, p.E)) scratch = torch::stable::new_empty(offs, {words});
  check(launch_route(p, scratch ? static_cast<int*>(scratch->data_ptr()) : nullptr, launch.stream));
}

void route_op(const Tensor& ids, int64_t num_experts, const Tensor& row_assignment, const Tensor& offs) {
  route(ids, num_experts, row_assignment, offs, Launch(ids));
}

// The forward of an MLP of which nothing is kept for a backward. Where both products are of narrow tiles the first one clears
// what the second one adds to, the second one begins beside its end, and few assignments are not sorted by a launch of their
// own.
void mlp(const Tensor& x, const Tensor& w_up, const Tensor& w_down, const Tensor& ids, const Tensor& row_weight,
         const MaybeTensor& bias_up, const MaybeTensor& bias_down, int64_t kind, bool gated, bool interleaved, double limit,
         double alpha, double up_offset, const Tensor& h, const MaybeTensor& rows, const MaybeTensor& sums, const Tensor& out) {
  check(ids.dim() == 2 && ids.is_contiguous(), "ids must be contiguous [T, k]");
  const int64_t S = ids.numel(), top_k = ids.size(1);
  GemmProblem up = product(x, w_up, S, {}, top_k, true), down = product(h, w_down, S, {}, top_k, false);
  check(up.E == down.E, "w_up and w_down must be of as many experts");
  if (S == 0 || down.N == 0) {
    if (out.numel() > 0) torch::stable::zero_(*const_cast<Tensor*>(&out));
    return;
  }
  const Launch launch(x);
  const Tensor& written = rows ? *rows : sums ? *sums : out;
  const Destination destination = rows ? Destination::assignment : Destination::token;
  const bool boxes_down = set_results(down, w_down, bias_down, row_weight, {}, {}, destination, written);
  const Config& config_down = gemm_config(down, h, w_down, boxes_down, launch);
  const Config* config_up = nullptr;  // of no columns there is no first product
  if (up.N > 0) {
    const Activation f = activation(kind, gated, interleaved, limit, alpha, up_offset);
    const bool boxes_up = set_activated_results(up, w_up, bias_up, f, {}, h);
    config_up = &gemm_config(up, x, w_up, boxes_up, launch);
  }

  const bool beside = config_up && config_up->narrow() && config_down.narrow();
  MaybeTensor row_assignment, offs;
  if (beside && S <= kFewRows) {
    up.ids = down.ids = ids.data_ptr();
    up.id_type = down.id_type = id_type(ids);
  } else {
    row_assignment = torch::stable::new_empty(ids, {S}, ScalarType::Int);
    offs = torch::stable::new_empty(ids, {int64_t(up.E)}, ScalarType::Int);
    route(ids, up.E, *row_assignment, *offs, launch);
    up.map = down.map = row_map(row_assignment, top_k, S);
  }
  const Tensor* const sorted = offs ? &*offs : nullptr;
  const Clear clear = rows ? Clear{} : sums_of(down);
  down.early = beside;
  if (beside) up.clear = clear;
  if (config_up) multiply(*config_up, up, dtype(x), sorted, {}, launch);
  multiply(config_down, down, dtype(x), sorted, beside ? Clear{} : clear, launch);
  if (rows || sums) sum_rows(written, rows ? top_k : 1, out, launch);
}

// Columns as _testing.py names them.
Tensor config_table(const Tensor&) {
  constexpr int kColumns = 9;
  Tensor table = torch::stable::empty({kConfigCount, kColumns}, ScalarType::Long);
  int64_t* row = static_cast<int64_t*>(table.data_ptr());
  for (const Config& c : kConfigs) {
    const int64_t values[kColumns] = {int64_t(c.op), int64_t(c.path),  c.tile_rows,     c.tile_columns, c.tile_k,
                                      c.stages,      c.shared_bytes(), c.blocks_per_sm, c.vectorized};
    for (const int64_t value : values) *row++ = value;
  }
  return table;
}

bool config_runs_on(const Tensor&, int64_t index, int64_t capability, int64_t per_block, int64_t per_sm, int64_t reserved) {
  check(0 <= index && index < kConfigCount, "no such configuration");
  return runs_on(kConfigs[index], {int(capability), int(per_block), int(per_sm), int(reserved)});
}

void force(const Tensor&, int64_t configs, int64_t blocks) {
  check(configs >> kConfigCount == 0, "no such configuration");
  forced_configs.store(uint64_t(configs));
  forced_blocks.store(blocks > 0 ? int(blocks) : INT_MAX);
}

}  // namespace
}  // namespace moe

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("gemm", TORCH_BOX(&moe::gemm));
  ops.impl("gemm_activation", TORCH_BOX(&moe::gemm_activation));
  ops.impl("gemm_activation_grad", TORCH_BOX(&moe::gemm_activation_grad));
  ops.impl("gemm_combine", TORCH_BOX(&moe::gemm_combine));
  ops.impl("mlp", TORCH_BOX(&moe::mlp));
  ops.impl("weight_grad", TORCH_BOX(&moe::weight_grad));
  ops.impl("sum_rows", TORCH_BOX(&moe::sum_rows_op));
  ops.impl("route", TORCH_BOX(&moe::route_op));
  ops.impl("group_ends", TORCH_BOX(&moe::group_ends));
}

// The test hooks tell of the library, not of a GPU, and answer on a machine without one.
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("config_table", TORCH_BOX(&moe::config_table));
  ops.impl("config_runs_on", TORCH_BOX(&moe::config_runs_on));
  ops.impl("force", TORCH_BOX(&moe::force));
}
