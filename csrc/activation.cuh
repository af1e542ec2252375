// The activation of an expert MLP and its gradient: of a value, and of rows of products that are staged in shared memory.
#pragma once

#include "config.h"
#include "epilogue.cuh"
#include "load.cuh"
#include "ptx/math.cuh"

namespace moe {

// kExact: to float32's precision, for float32 operands; else to 1e-7 of 1, as the instructions have it.
template <bool kExact>
__device__ __forceinline__ float exponential(float x) {
  return kExact ? expf(x) : ptx::exp2_approx(x * 1.4426950f);
}
template <bool kExact>
__device__ __forceinline__ float sigmoid(float x) {
  const float below = 1.f + exponential<kExact>(-x);
  return kExact ? 1.f / below : ptx::reciprocal_approx(below);
}

// The normal distribution function; where it need not be exact, by Abramowitz and Stegun 7.1.26.
template <bool kExact>
__device__ __forceinline__ float normal_distribution(float x) {
  if (kExact) return 0.5f * erfcf(x * -0.70710678f);
  const float u = fabsf(x) * 0.70710678f, t = ptx::reciprocal_approx(fmaf(0.3275911f, u, 1.f));
  const float tail = 0.5f * t * exponential<false>(-u * u) *
                     fmaf(fmaf(fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f), t, -0.284496736f), t, 0.254829592f);
  return x < 0.f ? tail : 1.f - tail;
}

// What decides which instructions an activation takes: values, or compile-time constants, with which many of them are computed
// side by side.
struct Form {
  ActivationKind kind;
  bool gated;
};
template <ActivationKind kKind, bool kGated>
struct ConstantForm {
  static constexpr ActivationKind kind = kKind;
  static constexpr bool gated = kGated;
};

// Calls use with the form as a constant.
template <typename Use>
__device__ __forceinline__ void with_form(const Activation& f, Use use) {
  const auto with_kind = [&](auto gated) {
    constexpr bool kGated = decltype(gated)::value != 0;
    switch (f.kind) {
      case ActivationKind::silu: return use(ConstantForm<ActivationKind::silu, kGated>{});
      case ActivationKind::gelu: return use(ConstantForm<ActivationKind::gelu, kGated>{});
      case ActivationKind::gelu_tanh: return use(ConstantForm<ActivationKind::gelu_tanh, kGated>{});
      case ActivationKind::relu: return use(ConstantForm<ActivationKind::relu, kGated>{});
      case ActivationKind::relu2: return use(ConstantForm<ActivationKind::relu2, kGated>{});
    }
  };
  f.gated ? with_kind(Constant<true>{}) : with_kind(Constant<false>{});
}

struct ValueAndSlope {
  float value, slope;
};

template <bool kExact>
__device__ __forceinline__ ValueAndSlope activation(ActivationKind kind, float alpha, float x) {
  switch (kind) {
    case ActivationKind::silu: {
      const float s = sigmoid<kExact>(alpha * x), value = x * s;
      return {value, fmaf(alpha * value, 1.f - s, s)};
    }
    case ActivationKind::gelu: {
      const float phi = normal_distribution<kExact>(x);
      return {x * phi, fmaf(x * 0.39894228f, exponential<kExact>(-0.5f * x * x), phi)};
    }
    case ActivationKind::gelu_tanh: {  // (1 + tanh(z)) / 2 = sigmoid(2 z)
      const float a = 1.5957691f, b = 0.044715f, s = sigmoid<kExact>(a * x * fmaf(b * x, x, 1.f)), value = x * s;
      return {value, fmaf(value * (1.f - s) * a, fmaf(3.f * b * x, x, 1.f), s)};
    }
    case ActivationKind::relu: return {ptx::max_or_nan(x, 0.f), x <= 0.f ? 0.f : 1.f};
    case ActivationKind::relu2: {
      const float positive = ptx::max_or_nan(x, 0.f);
      return {positive * positive, 2.f * positive};
    }
  }
  return {};
}

// What is not a number stays so.
__device__ __forceinline__ float at_most(float x, float limit) { return ptx::min_or_nan(x, limit); }
__device__ __forceinline__ float within(float x, float limit) { return ptx::max_or_nan(at_most(x, limit), -limit); }

// Whether something is asked for; asked anew each time, or the compiler makes the code around once for each answer.
__device__ __forceinline__ bool asked(bool flag) { return ptx::keep(int(flag)); }
__device__ __forceinline__ bool asked(const void* pointer) { return ptx::keep(pointer); }

// Four results' columns of a row before the activation; without a gate `up` is of no meaning.
template <typename T>
struct Halves {
  Four<T> gate, up;
};

// Of eight neighbouring columns that are gate and up in turn.
template <typename T>
__device__ __forceinline__ Halves<T> parted(const Four<T>& low, const Four<T>& high) {
  return {{low.value[0], low.value[2], high.value[0], high.value[2]}, {low.value[1], low.value[3], high.value[1], high.value[3]}};
}

// Of results `column` to column + 3, where there are `half` results a row; those at or past `valid` are 0.
template <typename T>
__device__ __forceinline__ Halves<T> load_halves(const Activation& f, bool gated, const T* row, int column, int half, int valid,
                                                 bool vector) {
  if (!gated || !asked(f.interleaved)) {
    Halves<T> halves{load_4(row + column, valid, vector)};
    if (gated) halves.up = load_4(row + half + column, valid, vector);
    return halves;
  }
  return parted(load_4(row + 2 * column, 2 * valid, vector), load_4(row + 2 * column + 4, 2 * valid - 4, vector));
}

template <typename T>
__device__ __forceinline__ void store_halves(const Activation& f, bool gated, T* row, const Halves<float>& halves, int column,
                                             int half, int valid, bool vector) {
  const Four<float>&gate = halves.gate, &up = halves.up;
  if (!gated || !asked(f.interleaved)) {
    store_4(row + column, gate, valid, vector);
    if (gated) store_4(row + half + column, up, valid, vector);
    return;
  }
  store_4(row + 2 * column, {gate.value[0], up.value[0], gate.value[1], up.value[1]}, 2 * valid, vector);
  store_4(row + 2 * column + 4, {gate.value[2], up.value[2], gate.value[3], up.value[3]}, 2 * valid - 4, vector);
}

// Rows of products in shared memory, kPitch apart; kSwizzled: so turned that warps write pairs of four rows at once.
template <int kPitch, bool kSwizzled>
struct StagedRows {
  float* data;
  __device__ __forceinline__ float* at(int row, int column) const {
    return data + row * kPitch + (kSwizzled ? column ^ row % 4 * 8 : column);
  }
  __device__ __forceinline__ Four<float> four(int row, int column) const { return load_4(at(row, column), 4, true); }
};

template <typename Staged>
__device__ __forceinline__ Halves<float> load_staged(const Activation& f, bool gated, Staged staged, int row, int column,
                                                     int half) {
  if (!gated) return {staged.four(row, column)};
  if (!asked(f.interleaved)) return {staged.four(row, column), staged.four(row, half + column)};
  return parted(staged.four(row, 2 * column), staged.four(row, 2 * column + 4));
}

// How many results so many products make.
__device__ __forceinline__ int results(bool gated, int products) { return gated ? products / 2 : products; }

// Activates staged rows, of which the tile's `row` is the first; a staged row holds 2 * kHalf products. `column` is that of the
// tile's first product, `columns` how many of its products are inside of the matrix, N how many a row of it has. By kThreads
// threads, of which this is number `thread`. kVector: in all matrices four neighbouring values are there or none, and may be
// moved at once.
template <int kThreads, int kHalf, bool kVector, typename T, typename Staged, typename FormOf>
__device__ __forceinline__ void activate_rows(FormOf form, const Epilogue& to, int expert, int N, int row, int column,
                                              int columns, Staged staged, int rows, int thread) {
  constexpr int kLanes = 8;  // take a row together, four results each at a time
  constexpr int kUnrolled = kVector && kHalf <= 64 ? 2 * kHalf / (kLanes * 4) : 1;
  const Activation& f = to.activation;
  const int half = results(form.gated, N), first = results(form.gated, column), width = results(form.gated, columns);
  const bool vector = kVector || to.pre_vector;
#pragma unroll 1
  for (int own = thread / kLanes; own < rows; own += kThreads / kLanes) {
#pragma unroll kUnrolled
    for (int step = 0; step < results(form.gated, 2 * kHalf) / (kLanes * 4); ++step) {
      const int at = (step * kLanes + thread % kLanes) * 4, valid = kVector ? 4 : width - at;
      if (at >= width) break;
      Halves<float> z = load_staged(f, form.gated, staged, own, at, kHalf);
      if (asked(to.bias) && expert >= 0) {
        const T* bias = static_cast<const T*>(to.bias) + expert * to.bias_stride;
        const Halves<T> added = load_halves(f, form.gated, bias, first + at, half, valid, vector);
#pragma unroll
        for (int j = 0; j < 4; ++j) z.gate.value[j] += float(added.gate.value[j]), z.up.value[j] += float(added.up.value[j]);
      }
      if (asked(to.pre)) {
        T* pre = static_cast<T*>(to.pre) + int64_t(row + own) * to.pre_stride;
        store_halves(f, form.gated, pre, z, first + at, half, valid, vector);
      }
      Four<float>& activated = z.gate;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        activated.value[j] = activation<sizeof(T) == 4>(form.kind, f.alpha, at_most(z.gate.value[j], f.limit)).value;
        if (form.gated) activated.value[j] *= within(z.up.value[j], f.limit) + f.up_offset;
      }
      typed(to.out, to.out_type, [&](auto* out) {
        store_4(out + int64_t(row + own) * to.out_stride + first + at, activated, valid, kVector || to.out_vector);
      });
    }
  }
}

// Leads staged rows, gradients to `columns` results from `column` on, through the activation. `row` is that of the first one
// of S, all of them of one expert, or of none (-1); N counts the results of a row; assignment and row_weight are those of the
// staged rows.
template <int kThreads, int kColumns, int kTogether, bool kVector, typename T, typename Staged, typename FormOf>
__device__ __forceinline__ void activation_grad_rows(FormOf form, const Epilogue& to, int expert, int S, int N, int row,
                                                     int column, int columns, Staged staged, const int* assignment,
                                                     const float* row_weight, int rows, int thread) {
  // A warp takes a row at a time, its lanes four columns each. The loads of kTogether rows are in flight before the first is
  // needed.
  constexpr int kWarps = kThreads / 32;
  const Activation& f = to.activation;
  const int lane = thread % 32, warp = thread / 32;
  const bool live = lane * 4 < columns;
  const int own = column + (live ? lane * 4 : 0), valid = kVector ? 4 : columns - lane * 4;
  const bool vector = kVector || to.pre_vector;
#pragma unroll 1
  for (int first = warp; first < rows; first += kWarps * kTogether) {
    Halves<T> pre[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int64_t from = row + min(first + i * kWarps, rows - 1);
      pre[i] = {};  // of rows of no expert
      if (expert < 0) continue;
      pre[i] = load_halves(f, form.gated, static_cast<const T*>(to.pre) + from * to.pre_stride, own, N, valid, vector);
    }
    float sum[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int at = min(first + i * kWarps, rows - 1);  // the last row may be led through more than once
      const Four<float> d = staged.four(at, lane * 4);
      const float weight = row_weight[at];
      Halves<float> d_pre;
      Four<float> weighted;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float gate = float(pre[i].gate.value[j]), up = float(pre[i].up.value[j]), scaled = weight * d.value[j];
        const ValueAndSlope of = activation<sizeof(T) == 4>(form.kind, f.alpha, at_most(gate, f.limit));
        const float factor = form.gated ? within(up, f.limit) + f.up_offset : 1.f, activated = of.value * factor;
        sum[i] = live && j < valid ? fmaf(d.value[j], activated, sum[i]) : sum[i];
        d_pre.gate.value[j] = gate > f.limit ? 0.f : scaled * factor * of.slope;
        d_pre.up.value[j] = fabsf(up) > f.limit ? 0.f : scaled * of.value;
        weighted.value[j] = weight * activated;
      }
      if (live && asked(to.d_pre)) {
        T* gradient = static_cast<T*>(to.d_pre) + int64_t(row + at) * to.d_pre_stride;
        store_halves(f, form.gated, gradient, d_pre, own, N, valid, vector);
      }
      if (live && asked(to.out)) {
        T* out = static_cast<T*>(to.out) + int64_t(row + at) * to.out_stride;
        store_4(out + own, weighted, valid, kVector || to.out_vector);
      }
    }
    if (!to.dot) continue;
    const int at = first + sum_over_lanes(sum) * kWarps;
    if (lane % (32 / kTogether) == 0 && at < rows) to.dot[int64_t(column / kColumns) * S + assignment[at]] = sum[0];
  }
}

}  // namespace moe
