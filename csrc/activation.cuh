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

// Calls use with the kind as a compile-time constant, with which many values are computed side by side.
template <typename Use>
__device__ __forceinline__ void with_kind(ActivationKind kind, Use use) {
  switch (kind) {
    case ActivationKind::silu: return use(Constant<ActivationKind::silu>{});
    case ActivationKind::gelu: return use(Constant<ActivationKind::gelu>{});
    case ActivationKind::gelu_tanh: return use(Constant<ActivationKind::gelu_tanh>{});
    case ActivationKind::relu: return use(Constant<ActivationKind::relu>{});
    case ActivationKind::relu2: return use(Constant<ActivationKind::relu2>{});
  }
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

// Four results' columns of a row before the activation; without a gate `up` is 0, to which 1 is added (up_offset).
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
    halves.up = gated ? load_4(row + half + column, valid, vector) : Four<T>{};
    return halves;
  }
  return parted(load_4(row + 2 * column, 2 * valid, vector), load_4(row + 2 * column + 4, 2 * valid - 4, vector));
}

template <typename T>
__device__ __forceinline__ Eight<T> interleaved(const Halves<T>& halves) {
  const Four<T>&gate = halves.gate, &up = halves.up;
  return {{gate.value[0], up.value[0], gate.value[1], up.value[1]}, {gate.value[2], up.value[2], gate.value[3], up.value[3]}};
}

template <typename T>
__device__ __forceinline__ void store_halves(const Activation& f, bool gated, T* row, const Halves<float>& halves, int column,
                                             int half, int valid, bool vector) {
  if (!gated || !asked(f.interleaved)) {
    store_4(row + column, halves.gate, valid, vector);
    if (gated) store_4(row + half + column, halves.up, valid, vector);
    return;
  }
  const Eight<float> eight = interleaved(halves);
  store_4(row + 2 * column, eight.low, 2 * valid, vector);
  store_4(row + 2 * column + 4, eight.high, 2 * valid - 4, vector);
}

template <bool kExact>
__device__ __forceinline__ Four<float> activate(ActivationKind kind, const Activation& f, const Halves<float>& z) {
  Four<float> activated;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float of_gate = activation<kExact>(kind, f.alpha, at_most(z.gate.value[j], f.limit)).value;
    activated.value[j] = of_gate * (within(z.up.value[j], f.limit) + f.up_offset);
  }
  return activated;
}

// Leads gradients to four results through their activation, which is computed once more.
struct Gradients {
  Halves<float> pre;
  Four<float> activated;
};
template <bool kExact, typename T>
__device__ __forceinline__ Gradients activation_gradients(ActivationKind kind, const Activation& f, const Halves<T>& pre,
                                                          const Four<float>& gradient) {
  Gradients to;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float gate = float(pre.gate.value[j]), up = float(pre.up.value[j]);
    const ValueAndSlope of = activation<kExact>(kind, f.alpha, at_most(gate, f.limit));
    const float factor = within(up, f.limit) + f.up_offset;
    to.pre.gate.value[j] = gate > f.limit ? 0.f : gradient.value[j] * factor * of.slope;
    to.pre.up.value[j] = fabsf(up) > f.limit ? 0.f : gradient.value[j] * of.value;
    to.activated.value[j] = of.value * factor;
  }
  return to;
}

// Rows of products in shared memory, kPitch apart.
template <int kPitch>
struct StagedRows {
  const float* data;
  __device__ __forceinline__ Four<float> four(int row, int column) const { return load_4(data + row * kPitch + column, 4, true); }
};

template <typename Staged>
__device__ __forceinline__ Halves<float> load_staged(const Activation& f, bool gated, Staged staged, int row, int column,
                                                     int half) {
  if (!gated) return {staged.four(row, column), {}};
  if (!asked(f.interleaved)) return {staged.four(row, column), staged.four(row, half + column)};
  return parted(staged.four(row, 2 * column), staged.four(row, 2 * column + 4));
}

// How many results so many products make.
__device__ __forceinline__ int results(bool gated, int products) { return gated ? products / 2 : products; }

// Activates staged rows, of which the tile's `row` is the first; a staged row holds 2 * kHalf products. `column` is that of the
// tile's first product, `columns` how many of its products are inside of the matrix, N how many a row of it has. By kThreads
// threads, of which this is number `thread`.
template <int kThreads, int kHalf, typename T, typename Staged>
__device__ __forceinline__ void activate_rows(const Epilogue& to, int expert, int N, int row, int column,
                                              int columns, Staged staged, int rows, int thread) {
  constexpr int kLanes = 8;  // take a row together, four results each at a time
  const Activation& f = to.activation;
  const int half = results(f.gated, N), first = results(f.gated, column), width = results(f.gated, columns);
#pragma unroll 1
  for (int own = thread / kLanes; own < rows; own += kThreads / kLanes) {
#pragma unroll 1
    for (int at = thread % kLanes * 4; at < width; at += kLanes * 4) {
      const int valid = width - at;
      Halves<float> z = load_staged(f, f.gated, staged, own, at, kHalf);
      if (asked(to.bias) && expert >= 0) {
        const T* bias = static_cast<const T*>(to.bias) + expert * to.bias_stride;
        const Halves<T> added = load_halves(f, f.gated, bias, first + at, half, valid, to.pre_vector);
        add(z.gate, added.gate), add(z.up, added.up);
      }
      if (asked(to.pre)) {
        T* pre = static_cast<T*>(to.pre) + int64_t(row + own) * to.pre_stride;
        store_halves(f, f.gated, pre, z, first + at, half, valid, to.pre_vector);
      }
      const Four<float> activated = activate<sizeof(T) == 4>(f.kind, f, z);
      typed(to.out, to.out_type, [&](auto* out) {
        store_4(out + int64_t(row + own) * to.out_stride + first + at, activated, valid, to.out_vector);
      });
    }
  }
}

// Leads staged rows, gradients to `columns` results from `column` on, through the activation. `row` is that of the first one
// of S, all of them of one expert, or of none (-1); N counts the results of a row; assignment and row_weight are those of the
// staged rows.
template <int kThreads, int kTogether, typename T, typename Staged>
__device__ __forceinline__ void activation_grad_rows(const Epilogue& to, int expert, int S, int N, int row,
                                                     int column, int columns, Staged staged, const int* assignment,
                                                     const float* row_weight, int rows, int thread) {
  // A warp takes a row at a time, its lanes four columns each. The loads of kTogether rows are in flight before the first is
  // needed.
  constexpr int kWarps = kThreads / 32;
  const Activation& f = to.activation;
  const int lane = thread % 32, warp = thread / 32, valid = columns - lane * 4;
  const bool live = valid > 0;
  const int own = column + (live ? lane * 4 : 0);
#pragma unroll 1
  for (int first = warp; first < rows; first += kWarps * kTogether) {
    const auto place = [&](int i) { return min(first + i * kWarps, rows - 1); };  // the last row may be led more than once
    Halves<T> pre[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      pre[i] = {};  // of rows of no expert
      if (expert < 0) continue;
      const T* from = static_cast<const T*>(to.pre) + int64_t(row + place(i)) * to.pre_stride;
      pre[i] = load_halves(f, f.gated, from, own, N, valid, to.pre_vector);
    }
    float sum[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int at = place(i);
      const Four<float> d = staged.four(at, lane * 4);
      const float weight = row_weight[at];
      const Gradients of = activation_gradients<sizeof(T) == 4>(f.kind, f, pre[i], weight * d);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i] = j < valid ? fmaf(d.value[j], of.activated.value[j], sum[i]) : sum[i];
      if (live && asked(to.d_pre)) {
        T* d_pre = static_cast<T*>(to.d_pre) + int64_t(row + at) * to.d_pre_stride;
        store_halves(f, f.gated, d_pre, of.pre, own, N, valid, to.pre_vector);
      }
      if (live && asked(to.out)) {
        T* out = static_cast<T*>(to.out) + int64_t(row + at) * to.out_stride;
        store_4(out + own, weight * of.activated, valid, to.out_vector);
      }
    }
    if (!to.dot) continue;
    const int at = first + sum_over_lanes(sum) * kWarps;
    if (lane % (32 / kTogether) == 0 && at < rows) to.dot[int64_t(column / kTile) * S + assignment[at]] = sum[0];
  }
}

}  // namespace moe
