// Rows of a linear layer rounded to codes, for the product of integers (linear_integers.h).
//
// In each group of inputs, 32 or the weight's 16, a row has a scale of its own. A code is low + 128 * high, both of
// 8 bits. Mostly the scale is the group's greatest magnitude / 127, and no code has a high part. Where that
// magnitude is large beside the row, a few inputs would make the others coarse: words of four inputs with a
// magnitude of more than kMostOfMean times the root of the row's mean of squares may then have high parts, and
// the scale is that of the group's other words.
#pragma once

#include <cmath>

#include "linear.h"

namespace backfill::BACKFILL_VARIANT {

constexpr float kMostOfMean = 8.0f;
constexpr int kHigh = 128;
constexpr float kLeastRounded = 1e-30f;  // a group of less is zero

// Words of a packed group of rows: where its high codes are, in words from here, or 0, [rows] scales, sums (scale *
// sum of codes) and starts (-zero * sum of codes), and [Inputs / 4][rows] words of low codes.
template <int Inputs>
constexpr int64_t group_words(int64_t rows) {
  return 1 + rows * (Inputs / 4 + 3);
}

// High codes of a group lie behind all groups: a count, and for each word that has some its index and [rows] words.
template <int Inputs>
constexpr int64_t most_high_words(int64_t rows) {
  return 1 + Inputs / 4 * (1 + rows);
}

BACKFILL_INLINE float float_of(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

BACKFILL_INLINE void store_bytes(Ints codes, uint32_t* target, int64_t stride) {
  const Bytes bytes = lowest_bytes((Words)codes);
  uint32_t words[kLanes / 4];
  std::memcpy(words, &bytes, sizeof words);
  for (int i = 0; i < kLanes / 4; i++) target[i * stride] = words[i];
}

template <int... I>
BACKFILL_INLINE Ints largest_of_four(Ints v, Lanes<I...> lanes) {
  const Ints of_two = larger(v, exchange_halves<1>(v, lanes));
  return larger(of_two, exchange_halves<2>(of_two, lanes));
}

// The greatest magnitude of those words that have none above `most`.
template <int Vectors>
BACKFILL_INLINE float magnitude_of_rest(const Floats* values, float most) {
  Ints rest{};
  for (int v = 0; v < Vectors; v++) {
    const Ints of_words = largest_of_four((Ints)values[v] & 0x7fffffff, typename CountLanes<kLanes>::type{});
    rest = larger(rest, (Floats)of_words > broadcast(most) ? Ints{} : of_words);
  }
  return float_of(max_of(rest));
}

// Packs a group of a row, but for its high codes. Returns which words of them are not zero, as bits; if none, none
// is set.
template <int Inputs, int32_t Zero, class T>
BACKFILL_INLINE uint32_t pack_group(const T* x, int64_t rows, float most, uint32_t* group,
                                    uint32_t (&high)[Inputs / 4]) {
  constexpr int kVectors = Inputs / kLanes;
  Floats values[kVectors];
  Ints largest{};  // as bits, so that infinities and NaN are the greatest
  for (int v = 0; v < kVectors; v++) {
    values[v] = load(x + v * kLanes);
    largest = larger(largest, (Ints)values[v] & 0x7fffffff);
  }
  const float magnitude = float_of(max_of(largest));
  const bool is_zero = magnitude<kLeastRounded, has_high = magnitude> most && !is_zero;
  float scale = magnitude / 127;
  if (has_high) scale = larger(magnitude_of_rest<kVectors>(values, most), magnitude / kHigh) / 127;
  const Floats inverse = broadcast(is_zero ? 0.0f : 1.0f / scale);
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to nearest even
  Words total{};                                // wraps for a row that is no number
  for (int v = 0; v < kVectors; v++) {
    Ints codes = (Ints)multiply_add(magic, values[v], inverse) - (Ints)magic;
    total += (Words)codes;
    if (has_high) {
      const Ints more = ((codes > 127) | (codes < -127)) & (codes + kHigh / 2) >> 7;
      codes -= more * kHigh;
      store_bytes(more, high + v * kLanes / 4, 1);
    }
    store_bytes(codes, group + (3 + v * kLanes / 4) * rows, rows);
  }
  const uint32_t codes_sum = sum(total), start = -Zero * codes_sum;
  const float scaled = scale * (float)(int32_t)codes_sum;
  std::memcpy(group, &scale, 4);
  std::memcpy(group + rows, &scaled, 4);
  std::memcpy(group + 2 * rows, &start, 4);
  uint32_t which = 0;
  for (int word = 0; has_high && word < Inputs / 4; word++) which |= (uint32_t)(high[word] != 0) << word;
  return which;
}

// All instruction sets sum in 32 lanes: they round alike.
template <class T>
BACKFILL_INLINE float mean_of_squares(const T* x, int64_t depth) {
  constexpr int kParts = 32 / kLanes;
  Floats squares[kParts]{};
  for (int64_t k = 0; k < depth; k += 32) {
    for (int part = 0; part < kParts; part++) {
      const Floats values = load(x + k + part * kLanes);
      squares[part] = multiply_add(squares[part], values, values);
    }
  }
  for (int parts = kParts / 2; parts > 0; parts /= 2)
    for (int part = 0; part < parts; part++) squares[part] += squares[part + parts];
  return sum(squares[0]) / (float)depth;
}

constexpr int kMostRows = 8;  // that pack_rows packs

// Zero: what stands for zero in the codes of the weight.
template <int Inputs, int32_t Zero, class T>
void pack_rows(const RowsToPack<T>& rows, uint32_t* group) {
  constexpr int kWords = Inputs / 4;
  float most[kMostRows];
  for (int64_t r = 0; r < rows.count; r++)
    most[r] = kMostOfMean * std::sqrt(mean_of_squares(rows.x + r * rows.x_stride, rows.depth));
  uint32_t* listed = group + rows.inputs / Inputs * group_words<Inputs>(rows.count);
  for (int64_t k = rows.first; k < rows.first + rows.inputs; k += Inputs) {
    uint32_t high[kMostRows][kWords], which[kMostRows], of_any = 0;
    for (int64_t r = 0; r < rows.count; r++)
      of_any |= which[r] = pack_group<Inputs, Zero>(rows.x + r * rows.x_stride + k, rows.count, most[r],
                                                    group + 1 + r, high[r]);
    *group = of_any == 0 ? 0 : (uint32_t)(listed - group);
    if (of_any != 0) *listed++ = __builtin_popcount(of_any);
    for (; of_any != 0; of_any &= of_any - 1) {
      const int word = __builtin_ctz(of_any);
      *listed++ = word;
      for (int64_t r = 0; r < rows.count; r++) *listed++ = which[r] >> word & 1 ? high[r][word] : 0;
    }
    group += group_words<Inputs>(rows.count);
  }
}

}  // namespace backfill::BACKFILL_VARIANT
