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
// sum of codes) and starts (-zero * sum of codes), and [rows][Inputs / 4] words of low codes.
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

BACKFILL_INLINE void store_bytes(Ints codes, uint32_t* target) {
  const Bytes bytes = lowest_bytes((Words)codes);
  std::memcpy(target, &bytes, sizeof bytes);
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

// combine_each of the first `count` vectors. Few are combined one by one, as those that remain of a row of 18 groups;
// else the others, which are not set, are filled.
template <class Vector, class Combine>
BACKFILL_INLINE Vector combine_some(Vector* v, int64_t count, const Combine& combine) {
  if (count > kLanes / 4) {
    for (int64_t i = count; i < kLanes; i++) v[i] = v[0];
    return combine_each(v, combine);
  }
  Vector all{};
  for (int64_t i = 0; i < count; i++) all[i] = combine_lanes(v[i], combine)[0];
  return all;
}

// Of up to kLanes groups of a row.
struct GroupScales {
  alignas(64) float scales[kLanes], inverses[kLanes];
  Ints may_be_high;  // the scale is that of the words without high codes
};

// most: magnitudes above it may have high codes.
template <int Inputs, class T>
BACKFILL_INLINE GroupScales scales_of(const T* x, int64_t count, float most) {
  constexpr int kVectors = Inputs / kLanes;
  GroupScales of;
  Ints largest[kLanes];  // as bits, so that infinities and NaN are the greatest
  for (int64_t g = 0; g < count; g++) {
    Ints bits{};
    for (int v = 0; v < kVectors; v++)
      bits = larger(bits, (Ints)load(x + g * Inputs + v * kLanes) & 0x7fffffff);
    largest[g] = bits;
  }
  const Floats magnitudes = (Floats)combine_some(
      largest, count, [](Ints a, Ints b) __attribute__((always_inline)) { return larger(a, b); });
  const Ints is_zero = magnitudes < broadcast(kLeastRounded);
  of.may_be_high = (magnitudes > broadcast(most)) & ~is_zero;
  store(of.scales, magnitudes / 127);
  for (int64_t g = 0; g < count; g++) {
    if (!of.may_be_high[g]) continue;
    Floats values[kVectors];
    for (int v = 0; v < kVectors; v++) values[v] = load(x + g * Inputs + v * kLanes);
    of.scales[g] = larger(magnitude_of_rest<kVectors>(values, most), magnitudes[g] / kHigh) / 127;
  }
  store(of.inverses, is_zero ? Floats{} : 1.0f / load(of.scales));
  return of;
}

// Packs up to kLanes groups of row `row` of `rows`. Words of high codes, mostly zeros, go to `high` where any row of
// the group may have some.
template <int Inputs, int32_t Zero, class T>
BACKFILL_INLINE void pack_groups(const T* x, int64_t count, const GroupScales& of, Ints any_high, int64_t row,
                                 int64_t rows, uint32_t* packed, uint32_t (*high)[Inputs / 4]) {
  constexpr int kVectors = Inputs / kLanes;
  const int64_t size = group_words<Inputs>(rows);
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to nearest even
  Words totals[kLanes];
  for (int64_t g = 0; g < count; g++) {
    const Floats inverse = broadcast(of.inverses[g]);
    uint32_t* words = packed + g * size + 1 + 3 * rows + row * (Inputs / 4);
    Words total{};  // wraps for a row that is no number
    for (int v = 0; v < kVectors; v++) {
      Ints codes = (Ints)multiply_add(magic, load(x + g * Inputs + v * kLanes), inverse) - (Ints)magic;
      total += (Words)codes;
      if (any_high[g]) {
        const Ints more = ((codes > 127) | (codes < -127)) & (codes + kHigh / 2) >> 7;
        codes -= more * kHigh;
        store_bytes(more, high[g] + v * kLanes / 4);
      }
      store_bytes(codes, words + v * kLanes / 4);
    }
    totals[g] = total;
  }
  const Words sums =
      combine_some(totals, count, [](Words a, Words b) __attribute__((always_inline)) { return a + b; });
  alignas(64) float scaled[kLanes];
  store(scaled, load(of.scales) * floats_of((Ints)sums));
  packed += 1 + row;
  for (int64_t g = 0; g < count; g++, packed += size) {
    const uint32_t start = -Zero * sums[g];
    std::memcpy(packed, of.scales + g, 4);
    std::memcpy(packed + rows, scaled + g, 4);
    std::memcpy(packed + 2 * rows, &start, 4);
  }
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
void pack_rows(const RowsToPack<T>& rows, uint32_t* packed) {
  constexpr int kWords = Inputs / 4;
  const int64_t size = group_words<Inputs>(rows.count), end = rows.first + rows.inputs;
  uint32_t* listed = packed + rows.inputs / Inputs * size;
  float most[kMostRows];
  for (int64_t r = 0; r < rows.count; r++)
    most[r] = kMostOfMean * std::sqrt(mean_of_squares(rows.x + r * rows.x_stride, rows.depth));
  GroupScales scales[kMostRows];
  for (int64_t k = rows.first; k < end; k += kLanes * Inputs) {
    const int64_t count = smaller<int64_t>(kLanes, (end - k) / Inputs);
    uint32_t high[kMostRows][kLanes][kWords];
    Ints any_high{};
    for (int64_t r = 0; r < rows.count; r++) {
      scales[r] = scales_of<Inputs>(rows.x + r * rows.x_stride + k, count, most[r]);
      any_high |= scales[r].may_be_high;
    }
    for (int64_t r = 0; r < rows.count; r++)
      pack_groups<Inputs, Zero>(rows.x + r * rows.x_stride + k, count, scales[r], any_high, r, rows.count,
                                packed, high[r]);
    for (int64_t g = 0; g < count; g++, packed += size) {
      uint32_t* num_words = listed;
      *packed = 0;
      for (int word = 0; any_high[g] && word < kWords; word++) {
        uint32_t any = 0;
        for (int64_t r = 0; r < rows.count; r++) any |= high[r][g][word];
        if (any == 0) continue;
        if (*packed == 0) *packed = (uint32_t)(listed - packed), *listed++ = 0;
        ++*num_words;
        *listed++ = word;
        for (int64_t r = 0; r < rows.count; r++) *listed++ = high[r][g][word];
      }
    }
  }
}

}  // namespace backfill::BACKFILL_VARIANT
