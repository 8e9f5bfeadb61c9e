// Rows of KV, of T or int8, as the arithmetic on T reads them.
//
// A row of int8 is the K or V of a token and head: head_dim codes, then the float32 that multiplies them, which
// is the row's largest magnitude / 127. Products are of codes, which bf16 holds exactly. The scale of a key
// multiplies its score, before the scale of softmax; that of a value multiplies the key's weight, before the
// weight is rounded. All kernels read rows so, and never what was rounded: decode and prefill agree to the bit.
#pragma once

#include <type_traits>

#include "simd.h"

namespace backfill::BACKFILL_VARIANT {

constexpr float kMaxCode = 127.0f;
constexpr float kLeastMagnitude = 1e-30f;  // rows below it are zero: 127 / magnitude stays finite

// KV of Kv has scales, one for K and one for V of each key.
template <class Kv>
constexpr bool kHasScales = sizeof(Kv) == 1;

// Without products of bf16, a stored unit (32 bits) of bf16 is split into its even and its odd element.
template <class T, class Kv>
constexpr bool kSplit = sizeof(Kv) == 2 && !kPaired<T>;

// Units that a row has once it is read: 32 bits of T as stored, or of converted codes.
template <class T, class Kv>
BACKFILL_INLINE int64_t stored_units(int64_t head_dim) {
  if constexpr (std::is_same_v<T, Kv>) return head_dim * (int64_t)sizeof(T) / 4;
  return head_dim / kPerUnit<T>;
}

// `count` of them exist, which may be none.
BACKFILL_INLINE Floats load_codes(const int8_t* p, int64_t count) {
  Bytes codes{};
#if defined(__AVX512F__)
  codes = (Bytes)_mm_maskz_loadu_epi8(first_lanes(larger<int64_t>(0, count)), p);
#else
  if (count >= kLanes)
    std::memcpy(&codes, p, sizeof codes);
  else if (count > 0)
    std::memcpy(&codes, p, count);
#endif
  return floats_of(ints_of(codes));
}

// Code `i` of the four in each lane.
BACKFILL_INLINE Floats code_of(Words four, int i) { return floats_of((Ints)(four << (24 - 8 * i)) >> 24); }

// Units of bf16 of numbers that bf16 holds exactly.
BACKFILL_INLINE Floats exact_pair(Floats first, Floats second) {
  return (Floats)((Words)first >> 16 | ((Words)second & 0xffff0000u));
}

// The scale that follows the codes of a row.
BACKFILL_INLINE float scale_of(const int8_t* row, int64_t head_dim) {
  float scale;
  std::memcpy(&scale, row + head_dim, sizeof scale);
  return scale;
}

// Elements [d, d + kLanes) of a row; those past the head are zero.
template <class T>
BACKFILL_INLINE Floats load_elements(const T* row, int64_t d, int64_t head_dim) {
  return load(row + d, head_dim - d);
}

BACKFILL_INLINE Floats load_elements(const int8_t* row, int64_t d, int64_t head_dim) {
  return load_codes(row + d, head_dim - d);
}

// The same for products of bf16.
BACKFILL_INLINE Halves load_bits(const bf16* row, int64_t d, int64_t head_dim) {
  return load_bits(row + d, head_dim - d);
}

BACKFILL_INLINE Halves load_bits(const int8_t* row, int64_t d, int64_t head_dim) {
  return narrow(load_elements(row, d, head_dim));
}

// kLanes of a row's `units` from `unit` on; those past the head are zero.
template <class T, class Kv>
BACKFILL_INLINE Floats load_stored(const Kv* row, int64_t unit, int64_t units) {
  if constexpr (std::is_same_v<T, Kv>) {
    return load(reinterpret_cast<const float*>(row) + unit, units - unit);
  } else if constexpr (kPaired<T>) {
#if defined(__AVX512BF16__)
    const Floats low = load_elements(row, 2 * unit, 2 * units);
    const Floats high = load_elements(row, 2 * unit + kLanes, 2 * units);
    return (Floats)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#endif
  } else {
    return load_elements(row, unit, units);
  }
}

template <class T>
BACKFILL_INLINE void write_row(const T* x, T* row, int64_t head_dim) {
  std::memcpy(row, x, head_dim * sizeof(T));
}

template <class T>
BACKFILL_INLINE void write_row(const T* x, int8_t* row, int64_t head_dim) {
  Ints top{};  // bits of magnitudes, which order as integers: NaN is above all, so that it is kept
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const Ints bits = (Ints)load(x + d, head_dim - d) & 0x7fffffff;
    top = bits > top ? bits : top;
  }
  int32_t highest = 0;
  for (int i = 0; i < kLanes; i++) highest = larger(highest, top[i]);
  float magnitude;
  std::memcpy(&magnitude, &highest, sizeof magnitude);
  const bool is_zero = magnitude < kLeastMagnitude;
  const float scale = is_zero ? 0.0f : magnitude / kMaxCode;
  const float inverse = is_zero ? 0.0f : kMaxCode / magnitude;
  const Floats magic = broadcast(12582912.0f);  // adding it leaves the rounded code in the low bits
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const Words bits = (Words)(load(x + d, head_dim - d) * inverse + magic);
    const Bytes codes = lowest_bytes(bits);
    std::memcpy(row + d, &codes, smaller<int64_t>(kLanes, head_dim - d));
  }
  std::memcpy(row + head_dim, &scale, sizeof scale);
}

}  // namespace backfill::BACKFILL_VARIANT
