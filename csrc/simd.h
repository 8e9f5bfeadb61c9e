// Vectors of kLanes floats. They use the compiler's vector extensions, so that one source serves every
// instruction set; intrinsics appear only where an instruction has no portable spelling.
//
// "Unit": the 32 bits that one lane multiplies in a step of a dot product. With AVX-512 BF16 a unit of a bf16
// operand is a pair of neighbours (vdpbf16ps adds both products); otherwise it is one float.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

#define BACKFILL_INLINE inline __attribute__((always_inline))

namespace backfill::BACKFILL_VARIANT {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

template <class T>
constexpr bool kPaired = false;
template <>
constexpr bool kPaired<bf16> = kHasPairs;

// Elements of T in a unit of an operand of T.
template <class T>
constexpr int kPerUnit = kPaired<T> ? 2 : 1;

template <class A>
BACKFILL_INLINE A smaller(A a, A b) {
  return a < b ? a : b;
}

template <class A>
BACKFILL_INLINE A larger(A a, A b) {
  return a > b ? a : b;
}

BACKFILL_INLINE int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

BACKFILL_INLINE int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// ---- Loads and stores. The forms with a count touch only that many elements; absent lanes are zero. ----

BACKFILL_INLINE Floats broadcast(float x) { return x - Floats{}; }

// Conversions that GCC spells in pieces, bytes even one by one. The narrow ones drop the upper bits; `halves_of`
// is of numbers below 2^16.
#if defined(__AVX512F__)
BACKFILL_INLINE Words words_of(Halves halves) { return (Words)_mm512_cvtepu16_epi32((__m256i)halves); }
BACKFILL_INLINE Ints ints_of(Bytes bytes) { return (Ints)_mm512_cvtepi8_epi32((__m128i)bytes); }
BACKFILL_INLINE Halves halves_of(Words words) { return (Halves)_mm512_cvtepi32_epi16((__m512i)words); }
BACKFILL_INLINE Bytes lowest_bytes(Words words) { return (Bytes)_mm512_cvtepi32_epi8((__m512i)words); }
#elif defined(__AVX2__)
BACKFILL_INLINE Words words_of(Halves halves) { return (Words)_mm256_cvtepu16_epi32((__m128i)halves); }

BACKFILL_INLINE Ints ints_of(Bytes bytes) {
  int64_t bits;
  std::memcpy(&bits, &bytes, sizeof bits);
  return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bits));
}

BACKFILL_INLINE Halves halves_of(Words words) {
  const __m256i all = (__m256i)words;
  return (Halves)_mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

BACKFILL_INLINE Bytes lowest_bytes(Words words) {
  const __m256i lowest = _mm256_shuffle_epi8((__m256i)words, _mm256_set1_epi32(0x0c080400));
  const int64_t bits = _mm_cvtsi128_si64(
      _mm_unpacklo_epi32(_mm256_castsi256_si128(lowest), _mm256_extracti128_si256(lowest, 1)));
  Bytes bytes;
  std::memcpy(&bytes, &bits, sizeof bytes);
  return bytes;
}
#else
BACKFILL_INLINE Words words_of(Halves halves) { return __builtin_convertvector(halves, Words); }
BACKFILL_INLINE Ints ints_of(Bytes bytes) { return __builtin_convertvector(bytes, Ints); }
BACKFILL_INLINE Halves halves_of(Words words) { return __builtin_convertvector(words, Halves); }
BACKFILL_INLINE Bytes lowest_bytes(Words words) { return __builtin_convertvector(words, Bytes); }
#endif

BACKFILL_INLINE Floats floats_of(Ints ints) { return __builtin_convertvector(ints, Floats); }

BACKFILL_INLINE Floats widen(Halves bits) { return (Floats)(words_of(bits) << 16); }

BACKFILL_INLINE Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

BACKFILL_INLINE Halves load_bits(const bf16* p) {
  Halves bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}

BACKFILL_INLINE Floats load(const bf16* p) { return widen(load_bits(p)); }

#if defined(__AVX512F__)
BACKFILL_INLINE __mmask16 first_lanes(int64_t n) { return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1); }

BACKFILL_INLINE Floats load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }

BACKFILL_INLINE Halves load_bits(const bf16* p, int64_t n) {
  return (Halves)_mm256_maskz_loadu_epi16(first_lanes(n), p);
}

BACKFILL_INLINE void store(float* p, Floats v, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
#else
BACKFILL_INLINE Floats load(const float* p, int64_t n) {
  if (n >= kLanes) return load(p);
  Floats v{};
  std::memcpy(&v, p, n * sizeof *p);
  return v;
}

BACKFILL_INLINE Halves load_bits(const bf16* p, int64_t n) {
  if (n >= kLanes) return load_bits(p);
  Halves bits{};
  std::memcpy(&bits, p, n * sizeof *p);
  return bits;
}

BACKFILL_INLINE void store(float* p, Floats v, int64_t n) {
  std::memcpy(p, &v, smaller<int64_t>(n, kLanes) * sizeof *p);
}
#endif

BACKFILL_INLINE Floats load(const bf16* p, int64_t n) { return widen(load_bits(p, n)); }

// Round to nearest even, as torch does.
BACKFILL_INLINE Halves narrow(Floats v) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh(v);
#else
  const Words bits = (Words)v;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return halves_of(rounded);
#endif
}

BACKFILL_INLINE void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

BACKFILL_INLINE void store(bf16* p, Floats v) {
  const Halves bits = narrow(v);
  std::memcpy(p, &bits, sizeof bits);
}

BACKFILL_INLINE void store(bf16* p, Floats v, int64_t n) {
  const Halves bits = narrow(v);
#if defined(__AVX512F__)
  _mm256_mask_storeu_epi16(p, first_lanes(n), (__m256i)bits);
#else
  std::memcpy(p, &bits, smaller<int64_t>(n, kLanes) * sizeof *p);
#endif
}

// ---- Arithmetic ----

BACKFILL_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }

BACKFILL_INLINE Floats rounded_like(Floats v, const float*) { return v; }
BACKFILL_INLINE Floats rounded_like(Floats v, const bf16*) { return widen(narrow(v)); }

// acc + a * b, or, for paired units, acc + a.low * b.low + a.high * b.high. Written out, and contraction by
// the compiler is off (CMakeLists.txt): a sum is rounded alike in every kernel that takes part in it.
template <bool Paired = false>
BACKFILL_INLINE Floats multiply_add(Floats acc, Floats a, Floats b) {
#if defined(__AVX512BF16__)
  if constexpr (Paired) return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#endif
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, acc);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, acc);
#else
  return a * b + acc;
#endif
}

// 1 / x to 2^-23, of normal numbers. A division takes three times as long with AVX-512.
BACKFILL_INLINE Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
  const Floats near = _mm512_rcp14_ps(x);
  return multiply_add(near, near, 1.0f - x * near);
#else
  return 1.0f / x;
#endif
}

// 2^x by range reduction to [-1/2, 1/2] and a polynomial. Degree 6 is accurate to 2e-7 relative, degree 4
// to 6e-5, enough where the result is rounded to bf16. Results below 2^-126 are 0; x must be < 127.
template <int Degree>
BACKFILL_INLINE Floats exp2(Floats x) {
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it leaves round(x) in the low bits
  const Floats shifted = x + magic;
  const Floats f = x - (shifted - magic);
  Floats p = broadcast(0.00961812910763f);
  if (Degree == 6)
    p = multiply_add(p, multiply_add(broadcast(0.00133335581464f), broadcast(0.000154035303934f), f), f);
  p = multiply_add(broadcast(0.0555041086648f), p, f);
  p = multiply_add(broadcast(0.240226506959f), p, f);
  p = multiply_add(broadcast(0.69314718056f), p, f);
  p = multiply_add(broadcast(1.0f), p, f);
  return x < -126.0f ? Floats{} : (Floats)((Words)p + ((Words)shifted << 23));
}

template <class T>
constexpr int kExpDegree = kPaired<T> ? 4 : 6;

// ---- Units ----

// kLanes consecutive units of a row of T; `n` is how many exist.
template <class T>
BACKFILL_INLINE Floats load_units(const T* row, int64_t n) {
  if constexpr (kPaired<T>)
    return load(reinterpret_cast<const float*>(row), n);
  else
    return load(row, n);
}

template <class T>
BACKFILL_INLINE Floats load_units(const T* row) {
  if constexpr (kPaired<T>)
    return load(reinterpret_cast<const float*>(row));
  else
    return load(row);
}

// Lane i pairs a[i] (low half) with b[i].
BACKFILL_INLINE Floats interleave(Halves a, Halves b) { return (Floats)(words_of(a) | (words_of(b) << 16)); }

// ---- Shuffles across lanes ----

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define BACKFILL_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef BACKFILL_SHUFFLE
#define BACKFILL_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

template <int... I>
struct Lanes {};

template <int N, int... I>
struct CountLanes : CountLanes<N - 1, N - 1, I...> {};
template <int... I>
struct CountLanes<0, I...> {
  using type = Lanes<I...>;
};

template <int Half, class Vector, int... I>
BACKFILL_INLINE Vector exchange_halves(Vector v, Lanes<I...>) {
  return BACKFILL_SHUFFLE(v, v, (I ^ Half)...);
}

// Of all lanes, by halves: of floats this is the order of the sum.
template <int Half = kLanes / 2, class Vector, class Combine>
BACKFILL_INLINE Vector combine_lanes(Vector v, const Combine& combine) {
  if constexpr (Half == 0)
    return v;
  else
    return combine_lanes<Half / 2>(combine(v, exchange_halves<Half>(v, typename CountLanes<kLanes>::type{})),
                                   combine);
}

template <class Vector>
BACKFILL_INLINE auto sum(Vector v) {
  return combine_lanes(v, [](Vector a, Vector b) __attribute__((always_inline)) { return a + b; })[0];
}

template <class Vector>
BACKFILL_INLINE auto max_of(Vector v) {
  return combine_lanes(v, [](Vector a, Vector b) __attribute__((always_inline)) { return larger(a, b); })[0];
}

// The two halves of exchanging a's lanes with bit S set for b's lanes with bit S clear.
template <int S, class Vector, int... I>
BACKFILL_INLINE Vector exchange_low(Vector a, Vector b, Lanes<I...>) {
  return BACKFILL_SHUFFLE(a, b, ((I & S) ? kLanes + (I ^ S) : I)...);
}

template <int S, class Vector, int... I>
BACKFILL_INLINE Vector exchange_high(Vector a, Vector b, Lanes<I...>) {
  return BACKFILL_SHUFFLE(a, b, ((I & S) ? kLanes + I : (I ^ S))...);
}

template <int S, class Vector>
BACKFILL_INLINE Vector low(Vector a, Vector b) {
  return exchange_low<S>(a, b, typename CountLanes<kLanes>::type{});
}

template <int S, class Vector>
BACKFILL_INLINE Vector high(Vector a, Vector b) {
  return exchange_high<S>(a, b, typename CountLanes<kLanes>::type{});
}

// Transposes a kLanes x kLanes square in place.
template <int S = kLanes / 2>
BACKFILL_INLINE void transpose(Floats* v) {
  if constexpr (S > 0) {
    for (int i = 0; i < kLanes; i++) {
      if (i & S) continue;
      const Floats a = v[i], b = v[i + S];
      v[i] = low<S>(a, b);
      v[i + S] = high<S>(a, b);
    }
    transpose<S / 2>(v);
  }
}

// Lane i of the result is what all lanes of v[i] give, combined by halves. Overwrites v [kLanes].
template <int S = kLanes / 2, class Vector, class Combine>
BACKFILL_INLINE Vector combine_each(Vector* v, const Combine& combine) {
  if constexpr (S == 0) {
    return v[0];
  } else {
    for (int i = 0; i < S; i++) v[i] = combine(low<S>(v[i], v[i + S]), high<S>(v[i], v[i + S]));
    return combine_each<S / 2>(v, combine);
  }
}

}  // namespace backfill::BACKFILL_VARIANT
