// Operators on independent rows: RMS norm, residual add with RMS norm, SiLU with product.
#pragma once

#include "parallel.h"

namespace backfill::BACKFILL_VARIANT {

BACKFILL_INLINE float inverse_rms(float sum_of_squares, int64_t size, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares / (float)size + eps);
}

template <class T>
BACKFILL_INLINE void scale_row(const T* x, const T* weight, T* out, int64_t size, float scale) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  if (i < size) store(out + i, load(x + i, size - i) * scale * load(weight + i, size - i), size - i);
}

template <class T>
BACKFILL_INLINE float row_squares(const T* x, int64_t size) {
  Floats total{}, other{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const Floats a = load(x + i), b = load(x + i + kLanes);
    total = multiply_add(total, a, a);
    other = multiply_add(other, b, b);
  }
  for (; i < size; i += kLanes) {
    const Floats a = load(x + i, size - i);
    total = multiply_add(total, a, a);
  }
  return sum(total + other);
}

// The sum is rounded to T before it is squared: the residual stream is what later layers see.
template <class T>
BACKFILL_INLINE float add_row(const T* x, T* residual, int64_t size) {
  Floats total{}, other{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const Floats a = rounded_like(load(x + i) + load(residual + i), x);
    const Floats b = rounded_like(load(x + i + kLanes) + load(residual + i + kLanes), x);
    store(residual + i, a);
    store(residual + i + kLanes, b);
    total = multiply_add(total, a, a);
    other = multiply_add(other, b, b);
  }
  for (; i < size; i += kLanes) {
    const int64_t n = size - i;
    const Floats a = rounded_like(load(x + i, n) + load(residual + i, n), x);
    store(residual + i, a, n);
    total = multiply_add(total, a, a);
  }
  return sum(total + other);
}

template <class T>
void norm(const NormArgs& args) {
  const T* x = static_cast<const T*>(args.x);
  const T* weight = static_cast<const T*>(args.weight);
  T* residual = static_cast<T*>(args.residual);
  T* out = static_cast<T*>(args.out);
  const int64_t size = args.size;
  for_each_row(args.rows, size, [&](int64_t row) {
    const T* source = x + row * args.x_stride;
    float squares;
    if (residual == nullptr) {
      squares = row_squares(source, size);
    } else {
      squares = add_row(source, residual + row * size, size);
      source = residual + row * size;
    }
    scale_row(source, weight, out + row * size, size, inverse_rms(squares, size, args.eps));
  });
}

template <class T>
BACKFILL_INLINE Floats silu(Floats x) {
  // exp2's argument is capped so that 1 + e^-x stays finite; silu is then 0 to within float32.
  const Floats t = x * -1.44269504089f;
  return x * reciprocal(1.0f + exp2<kExpDegree<T>>(t > 126.0f ? broadcast(126.0f) : t));
}

template <class T>
void silu_and_mul(const SiluArgs& args) {
  const T* gate_up = static_cast<const T*>(args.gate_up);
  T* out = static_cast<T*>(args.out);
  const int64_t size = args.size;
  for_each_row(args.rows, size, [&](int64_t row) {
    const T* gate = gate_up + row * args.stride;
    const T* up = gate + size;
    T* target = out + row * size;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(target + i, silu<T>(load(gate + i)) * load(up + i));
    if (i < size) store(target + i, silu<T>(load(gate + i, size - i)) * load(up + i, size - i), size - i);
  });
}

}  // namespace backfill::BACKFILL_VARIANT
