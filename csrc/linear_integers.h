// The product of linear.h with integers: codes of a weight (quantized.h), and rows rounded to codes of 8 bits.
//
// In each group of inputs, 32 or the weight's 16, a row has a scale of its own: its greatest magnitude / 127. Of
// an output and a group, products of codes are summed in integers, exactly, and added as one float:
//
//   sum += sum of row code * (code - zero) * (row scale * scale)
//   sum += (row scale * sum of row codes) * (offset + zero * scale)      where the weight has offsets
//
// Where the greatest magnitude of a group is large beside the rest of the row, the scale is that of the rest, and
// a code that needs more than 8 bits is 128 * high + low: words of codes with a `high` are multiplied twice.
//
// So a row's result depends on no other row, and has one order of sums.
#pragma once

#include "linear.h"
#include "quantized.h"
#include "row_codes.h"

namespace backfill::BACKFILL_VARIANT {
#if defined(__AVX2__) && !defined(__AMX_BF16__)
constexpr bool kSumsIntegers = true;

typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));

// What stands for zero in bytes_of().
#if defined(__AVX512VNNI__)
template <int Bits>
constexpr int32_t kZero = Bits == 4 ? 8 : 128;
#else
template <int Bits>
constexpr int32_t kZero = Bits == 4 ? 8 : 0;
#endif

// Of a word of codes, those that one add() multiplies: of 4 bits the lower or the upper halves of its bytes.
template <int Bits>
BACKFILL_INLINE Words bytes_of(Words word, int index) {
  if constexpr (Bits == 4) return word >> (4 * index) & 0x0f0f0f0f;
  return kZero<8> == 0 ? word : word ^ 0x80808080;
}

#if defined(__AVX512F__)
BACKFILL_INLINE Shorts multiply_bytes(Words magnitudes, Words signed_bytes) {
  return (Shorts)_mm512_maddubs_epi16((__m512i)magnitudes, (__m512i)signed_bytes);
}

BACKFILL_INLINE Ints sums_of_pairs(Shorts shorts) {
  return (Ints)_mm512_madd_epi16((__m512i)shorts, _mm512_set1_epi16(1));
}

BACKFILL_INLINE Words magnitudes_of(Words bytes) { return (Words)_mm512_abs_epi8((__m512i)bytes); }

BACKFILL_INLINE Words with_signs_of(Words signs, Words bytes) {
  return (Words)_mm512_mask_sub_epi8((__m512i)bytes, _mm512_movepi8_mask((__m512i)signs),
                                     _mm512_setzero_si512(), (__m512i)bytes);
}
#else
BACKFILL_INLINE Shorts multiply_bytes(Words magnitudes, Words signed_bytes) {
  return (Shorts)_mm256_maddubs_epi16((__m256i)magnitudes, (__m256i)signed_bytes);
}

BACKFILL_INLINE Ints sums_of_pairs(Shorts shorts) {
  return (Ints)_mm256_madd_epi16((__m256i)shorts, _mm256_set1_epi16(1));
}

BACKFILL_INLINE Words magnitudes_of(Words bytes) { return (Words)_mm256_abs_epi8((__m256i)bytes); }

BACKFILL_INLINE Words with_signs_of(Words signs, Words bytes) {
  return (Words)_mm256_sign_epi8((__m256i)bytes, (__m256i)signs);
}
#endif

// Sums over a group, of an output in each lane. `start` is -zero * the sum of the row's codes. Products of high
// codes come first.
template <int Bits>
struct GroupSums {
#if defined(__AVX512VNNI__)
  Ints sums;

  BACKFILL_INLINE void begin_high() { sums = Ints{}; }

  BACKFILL_INLINE void end_high(int32_t start) { sums = sums * kHigh + start; }

  BACKFILL_INLINE void begin(int32_t start) { sums = start - Ints{}; }

  BACKFILL_INLINE void add(Words bytes, uint32_t row) {
    sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, _mm512_set1_epi32((int)row));
  }

  BACKFILL_INLINE Ints end() const { return sums; }
#else
  // Of 4 bits a group's sums of half of its products are at most 8 * 2 * 15 * 127: they fit into 16 bits.
  using Sums = std::conditional_t<Bits == 4, Shorts, Ints>;
  Sums sums;
  Ints before;

  BACKFILL_INLINE void begin_high() { sums = Sums{}; }

  BACKFILL_INLINE void end_high(int32_t start) {
    before = (Bits == 4 ? sums_of_pairs((Shorts)sums) : (Ints)sums) * kHigh + start;
    sums = Sums{};
  }

  BACKFILL_INLINE void begin(int32_t start) {
    before = start - Ints{};
    sums = Sums{};
  }

  // Else GCC 12 multiplies all words of a group, keeps the products in memory, and then sums them.
  BACKFILL_INLINE void add(Words bytes, uint32_t row) {
    const Words codes = row - Words{};
    if constexpr (Bits == 4)
      sums += multiply_bytes(bytes, codes);
    else
      sums += sums_of_pairs(multiply_bytes(magnitudes_of(bytes), with_signs_of(bytes, codes)));
    asm("" : "+v"(sums));
  }

  BACKFILL_INLINE Ints end() const { return (Bits == 4 ? sums_of_pairs((Shorts)sums) : (Ints)sums) + before; }
#endif
};

// Codes of a part of a panel, and for its groups of inputs [2][32] scales and offsets.
struct CodeTiles {
  const char* codes;
  int64_t left;  // inputs until the next block's header
  int64_t block_inputs, header_bytes;
  const float* factors;
  bool has_offsets;  // else those of `factors` are not set
};

// Those of inputs [first, first + inputs) of a panel. Of a group that is larger than 32 inputs, for every 32.
using LoadFactors = void (*)(const char* panel, const QuantizedFormat& format, int64_t first, int64_t inputs,
                             float* factors);

template <int Bits, class Scale, bool HasOffsets>
void load_factors(const char* panel, const QuantizedFormat& format, int64_t first, int64_t inputs,
                  float* factors) {
  const BlockLayout layout = block_layout(Bits, format.group, sizeof(Scale), HasOffsets);
  const int64_t step = smaller<int64_t>(format.group, kChunkInputs);
  const char* block = panel + first / layout.inputs * layout.bytes;
  int64_t group = first % layout.inputs / format.group, within = first % format.group;
  for (int64_t k = 0; k < inputs; k += step, within += step, factors += 2 * kPanel) {
    if (within == format.group) within = 0, group++;
    if (group == layout.groups) group = 0, block += layout.bytes;
    for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
      const FactorsAt at = factors_at<Bits, Scale, HasOffsets>(block, layout, group, lane);
      store(factors + lane, at.scale);
      if constexpr (HasOffsets)
        store(factors + kPanel + lane,
              Bits == 4 ? multiply_add(at.offset, at.scale, broadcast(8.0f)) : at.offset);
    }
  }
}

// Gives the tiles of one thread.
template <int Bits>
class CodesWeight {
 public:
  CodesWeight(const LinearArgs& args, const QuantizedFormat& format)
      : panels_(static_cast<const char*>(args.weight)),
        format_(format),
        layout_(block_layout(Bits, format.group, format.scale_bytes, format.has_offsets)),
        panel_bytes_(args.in_features / layout_.inputs * layout_.bytes),
        load_factors_(format.has_offsets ? load_factors_of<true>(format.scale_bytes)
                                         : load_factors_of<false>(format.scale_bytes)) {
    const int64_t num_steps = (args.in_features + kMaxStep - 1) / kMaxStep;
    step_ = round_up((args.in_features + num_steps - 1) / num_steps, kChunkInputs);
    const int64_t num_groups = step_ / smaller<int64_t>(format.group, kChunkInputs);
    factors_ = static_cast<float*>(scratch(kTiles, num_groups * 2 * kPanel * sizeof(float)));
  }

  // Codes of a step stay in the first-level cache while rows are multiplied.
  int64_t step(int64_t) const { return step_; }

  const CodeTiles* tiles(int64_t panel, int64_t first, int64_t inputs) {
    const char* start = panels_ + panel * panel_bytes_;
    load_factors_(start, format_, first, inputs, factors_);
    const int64_t within = first % layout_.inputs;
    tiles_ = {start + first / layout_.inputs * layout_.bytes + layout_.codes + within * kPanel * Bits / 8,
              layout_.inputs - within,
              layout_.inputs,
              layout_.codes,
              factors_,
              format_.has_offsets};
    return &tiles_;
  }

  Prefetcher prefetcher(int64_t last_panel, int64_t num_reads) const {
    return Prefetcher(panels_ + last_panel * panel_bytes_, num_reads, step_ * layout_.bytes / layout_.inputs,
                      kChunkInputs * layout_.bytes / layout_.inputs);
  }

 private:
  static constexpr int64_t kMaxStep = Bits == 4 ? 768 : 512;

  template <bool HasOffsets>
  static LoadFactors load_factors_of(int64_t scale_bytes) {
    return scale_bytes == 4   ? load_factors<Bits, float, HasOffsets>
           : scale_bytes == 2 ? load_factors<Bits, uint16_t, HasOffsets>
                              : load_factors<Bits, int8_t, HasOffsets>;
  }

  const char* panels_;
  QuantizedFormat format_;
  BlockLayout layout_;
  int64_t panel_bytes_, step_;
  LoadFactors load_factors_;
  float* factors_;
  CodeTiles tiles_{};
};

// Rows whose sums fill the registers.
constexpr int kIntegerRows = kLanes == 16 ? 6 : 4;
constexpr int kIntegerVectors = 2;
static_assert(kIntegerRows <= kMostRows);

// sums [Rows, kIntegerVectors * kLanes] = (continues ? sums : 0) + the product with the outputs from `first` of
// a panel.
template <int Bits, int Inputs, bool HasOffsets, int Rows>
__attribute__((noinline)) void multiply_codes(const CodeTiles& tiles, const uint32_t* rows, int64_t inputs,
                                              int64_t first, bool continues, Prefetcher& prefetcher,
                                              float* sums) {
  constexpr int kPerWord = Bits == 4 ? 2 : 1;  // words of a row that a word of codes meets
  constexpr int kCodeWords = Inputs / 4 / kPerWord, kHalf = 16 * kChunkInputs / 8 * Bits;
  constexpr int kWordBytes = 16 * 4;  // of a word of each output of a half
  constexpr int kGroups = kChunkInputs / Inputs;
  const char* codes = tiles.codes + first / 16 * kHalf + first % 16 * 4;
  const float* factors = tiles.factors + first;
  int64_t left = tiles.left;
  const auto load_words = [](const char* of_group, int64_t word, int v) __attribute__((always_inline)) {
    Words loaded;
    std::memcpy(&loaded, of_group + v * kLanes / 16 * kHalf + word * kWordBytes + v * kLanes % 16 * 4,
                sizeof loaded);
    return loaded;
  };
  Floats acc[Rows][kIntegerVectors];
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < kIntegerVectors; v++)
      acc[r][v] = continues ? load(sums + r * kPanel + v * kLanes) : Floats{};
  for (int64_t k = 0; k < inputs; k += kChunkInputs, codes += 2 * kHalf, left -= kChunkInputs) {
    if (left == 0) codes += tiles.header_bytes, left = tiles.block_inputs;
    if (first == 0) prefetcher.ask(codes);
    for (int group = 0; group < kGroups; group++, factors += 2 * kPanel, rows += group_words<Inputs>(Rows)) {
      const auto* scales = reinterpret_cast<const float*>(rows + 1);
      const auto* starts = reinterpret_cast<const int32_t*>(scales) + 2 * Rows;
      const uint32_t* row_codes = rows + 1 + 3 * Rows;  // [Rows][Inputs / 4]
      const char* words = codes + group * kCodeWords * kWordBytes;
      GroupSums<Bits> group_sums[Rows][kIntegerVectors];
      if (rows[0] == 0) {
        for (int r = 0; r < Rows; r++)
          for (int v = 0; v < kIntegerVectors; v++) group_sums[r][v].begin(starts[r]);
      } else {
        for (int r = 0; r < Rows; r++)
          for (int v = 0; v < kIntegerVectors; v++) group_sums[r][v].begin_high();
        const uint32_t* high = rows + rows[0];
        for (uint32_t left = *high++; left > 0; left--, high += 1 + Rows) {
          Words bytes[kIntegerVectors];
          for (int v = 0; v < kIntegerVectors; v++)
            bytes[v] = bytes_of<Bits>(load_words(words, *high / kPerWord, v), *high % kPerWord);
          for (int r = 0; r < Rows; r++)
            for (int v = 0; v < kIntegerVectors; v++) group_sums[r][v].add(bytes[v], high[1 + r]);
        }
        for (int r = 0; r < Rows; r++)
          for (int v = 0; v < kIntegerVectors; v++) group_sums[r][v].end_high(starts[r]);
      }
#pragma GCC unroll 8
      for (int word = 0; word < kCodeWords; word++) {
        Words loaded[kIntegerVectors];
        for (int v = 0; v < kIntegerVectors; v++) loaded[v] = load_words(words, word, v);
#pragma GCC unroll 2
        for (int i = 0; i < kPerWord; i++, row_codes++) {
          Words bytes[kIntegerVectors];
          for (int v = 0; v < kIntegerVectors; v++) bytes[v] = bytes_of<Bits>(loaded[v], i);
          for (int r = 0; r < Rows; r++)
            for (int v = 0; v < kIntegerVectors; v++)
              group_sums[r][v].add(bytes[v], row_codes[r * (Inputs / 4)]);
        }
      }
      for (int v = 0; v < kIntegerVectors; v++) {
        const Floats scale = load(factors + v * kLanes), offset = load(factors + kPanel + v * kLanes);
        for (int r = 0; r < Rows; r++) {
          const Floats sum = floats_of(group_sums[r][v].end());
          acc[r][v] = multiply_add(acc[r][v], sum, scale * broadcast(scales[r]));
          if constexpr (HasOffsets) acc[r][v] = multiply_add(acc[r][v], broadcast(scales[Rows + r]), offset);
        }
      }
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < kIntegerVectors; v++) store(sums + r * kPanel + v * kLanes, acc[r][v]);
}

// Of rows in groups of Inputs, packed as row_codes.h says.
template <class Element, int Bits, int Inputs>
class IntegerProduct {
 public:
  using T = Element;
  static constexpr int64_t kRows = kIntegerRows, kMaxChunk = 1536, kCachedBytes = 384 << 10;
  static constexpr double kPackCost = 1.2, kReadCost = 1.0;

  static int64_t packed_bytes(int64_t inputs) {
    return round_up(inputs / Inputs * (group_words<Inputs>(kRows) + most_high_words<Inputs>(kRows)) * 4, 64);
  }

  // There are few high codes.
  static int64_t cached_bytes(int64_t inputs) {
    return round_up(inputs / Inputs * group_words<Inputs>(kRows) * 4, 64);
  }

  static void pack(const RowsToPack<T>& rows, void* packed) {
    pack_rows<Inputs, kZero<Bits>>(rows, static_cast<uint32_t*>(packed));
  }

  static const void* packed_at(const void* packed, int64_t rows, int64_t first) {
    return static_cast<const uint32_t*>(packed) + first / Inputs * group_words<Inputs>(rows);
  }

  void multiply(const CodeTiles* tiles, const InputRows<T>& rows, int64_t inputs, bool continues,
                Prefetcher& prefetcher, SumsWriter<T>&, float* sums) {
    multiply_rows<kRows>(*tiles, rows.count, static_cast<const uint32_t*>(rows.packed), inputs, continues,
                         prefetcher, sums);
  }

 private:
  template <int Rows>
  static BACKFILL_INLINE void multiply_rows(const CodeTiles& tiles, int64_t rows, const uint32_t* packed,
                                            int64_t inputs, bool continues, Prefetcher& prefetcher,
                                            float* sums) {
    if constexpr (Rows > 1)
      if (rows < Rows)
        return multiply_rows<Rows - 1>(tiles, rows, packed, inputs, continues, prefetcher, sums);
    const auto multiply = tiles.has_offsets ? multiply_codes<Bits, Inputs, true, Rows>
                                            : multiply_codes<Bits, Inputs, false, Rows>;
    for (int first = 0; first < kPanel; first += kIntegerVectors * kLanes)
      multiply(tiles, packed, inputs, first, continues, prefetcher, sums + first);
  }
};

template <class T, int Bits, int Inputs>
void multiply_integers(const LinearArgs& args, const QuantizedFormat& format) {
  using Product = IntegerProduct<T, Bits, Inputs>;
  for_each_part<Product>(args, [&](const LinearPart& part) {
    multiply_part<Product>(args, part, CodesWeight<Bits>(args, format));
  });
}

template <class T>
void integer_linear(const LinearArgs& args, const QuantizedFormat& format) {
  const auto multiply =
      format.bits == 4 ? (format.group == 16 ? multiply_integers<T, 4, 16> : multiply_integers<T, 4, 32>)
                       : (format.group == 16 ? multiply_integers<T, 8, 16> : multiply_integers<T, 8, 32>);
  multiply(args, format);
}
#else
constexpr bool kSumsIntegers = false;
#endif

}  // namespace backfill::BACKFILL_VARIANT
