// The product of bf16 rows and codes (quantized.h) in AMX tiles.
//
// Codes are unpacked beside the products, 32 inputs ahead of them: vectors make the next tiles while AMX multiplies.
// A row's result is, to the bit, that of the unpacked weight rounded to bf16.
//
// A tile has pairs of inputs side by side, and conversion to bf16 puts two vectors of floats one behind the other. So
// lanes of words are [8 outputs][2], the even and the odd input of a pair: for every 32 inputs codes [2 halves]
// [32 / inputs of two words][2 groups of 8 outputs][16], a word having its inputs of as many neighbouring pairs.
#pragma once

#include "linear_tiles.h"
#include "quantized.h"

namespace backfill::BACKFILL_VARIANT {
#if defined(__AMX_BF16__)
constexpr bool kPairsCodes = true;

// 32 inputs of half a panel, those from `within` of a block, as a tile.
using UnpackPairs = void (*)(const char* block, int64_t within, int half, bf16* tile);

// Group: 16, else 32. A larger one has a block of its own, laid out as one of 32, and no units.
template <int Bits, class Scale, bool HasOffsets, int Group>
void unpack_pairs(const char* block, int64_t within, int half, bf16* tile) {
  constexpr bool kInUnits = sizeof(Scale) == 1;
  constexpr int kParts = Group == 16 ? 2 : 1;              // groups in 32 inputs
  constexpr int kPairs = 32 / Bits, kSpans = 16 / kPairs;  // pairs of a word; words of a lane
  constexpr int64_t kCodes = kPanel * 32 * Bits / 8, kAhead = 4 * kCodes;
  alignas(64) static constexpr int32_t kTwice[2][16] = {
      {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7},
      {8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15}};
  const BlockLayout layout = block_layout(Bits, Group, sizeof(Scale), HasOffsets);
  const char* codes = block + layout.codes + within / 32 * kCodes + half * kCodes / 2;
  for (int64_t line = 0; line < kCodes / 2 + 64; line += 64) __builtin_prefetch(codes + kAhead + line);
  for (int part = 0; part < kParts; part++) {
    const auto [scale, offset] =
        factors_at<Bits, Scale, HasOffsets>(block, layout, (kInUnits ? within / Group : 0) + part, 16 * half);
    Floats scales[2], offsets[2];
    for (int i = 0; i < 2; i++) {
      scales[i] = _mm512_permutexvar_ps(_mm512_load_si512(kTwice[i]), scale);
      offsets[i] = _mm512_permutexvar_ps(_mm512_load_si512(kTwice[i]), offset);
    }
#pragma GCC unroll 4
    for (int span = part * kSpans / kParts; span < (part + 1) * kSpans / kParts; span++) {
      Words words[2];
      std::memcpy(words, codes + span * (int64_t)sizeof words, sizeof words);
#pragma GCC unroll 8
      for (int pair = 0; pair < kPairs; pair++) {
        Floats weights[2];
        for (int i = 0; i < 2; i++)
          weights[i] = multiply_add(offsets[i], codes_of<Bits>(words[i], pair), scales[i]);
        const auto rounded = _mm512_cvtne2ps_pbh(weights[1], weights[0]);
        std::memcpy(tile + (span * kPairs + pair) * 32, &rounded, sizeof rounded);
      }
    }
  }
}

template <int Bits, class Scale>
UnpackPairs unpack_pairs_of(const QuantizedFormat& format) {
  if (format.group == 16)
    return format.has_offsets ? unpack_pairs<Bits, Scale, true, 16> : unpack_pairs<Bits, Scale, false, 16>;
  return format.has_offsets ? unpack_pairs<Bits, Scale, true, 32> : unpack_pairs<Bits, Scale, false, 32>;
}

template <int Bits>
UnpackPairs unpack_pairs_of(const QuantizedFormat& format) {
  return format.scale_bytes == 4   ? unpack_pairs_of<Bits, float>(format)
         : format.scale_bytes == 2 ? unpack_pairs_of<Bits, uint16_t>(format)
                                   : unpack_pairs_of<Bits, int8_t>(format);
}

// A thread's weight, and of it the part that is multiplied now: unpacked as far as the product has asked.
class PairedCodes {
 public:
  PairedCodes(const LinearArgs& args, const QuantizedFormat& format)
      : unpack_(format.bits == 4 ? unpack_pairs_of<4>(format) : unpack_pairs_of<8>(format)),
        panels_(static_cast<const char*>(args.weight)),
        layout_(block_layout(format.bits, format.group, format.scale_bytes, format.has_offsets)),
        panel_bytes_(args.in_features / layout_.inputs * layout_.bytes),
        tiles_(static_cast<bf16*>(scratch(kTiles, std::min(kManyRows, args.in_features * kInputBytes)))) {}

  // Sums are loaded and stored once a step, so steps are long; those of few rows were fastest at this length.
  int64_t step(int64_t num_row_groups) const {
    return (num_row_groups == 1 ? kFewRows : kManyRows) / kInputBytes;
  }

  PairedCodes* tiles(int64_t panel, int64_t first, int64_t inputs) {
    block_ = panels_ + panel * panel_bytes_ + first / layout_.inputs * layout_.bytes;
    within_ = first % layout_.inputs;
    left_ = inputs;
    next_ = tiles_;
    return this;
  }

  const bf16* tiles() const { return tiles_; }

  // Of the next 32 inputs the left half of the outputs, then the right one. Nothing once all are unpacked.
  BACKFILL_INLINE void unpack_next(int half) {
    if (left_ == 0) return;
    unpack_(block_, within_, half, next_ + half * kTile);
    publish(next_);
    if (half == 0) return;
    left_ -= kChunkInputs;
    next_ += 2 * kTile;
    within_ += kChunkInputs;
    if (within_ == layout_.inputs) within_ = 0, block_ += layout_.bytes;
  }

  // Unpacking reads the weight, and prefetches it.
  Prefetcher prefetcher(int64_t, int64_t) const { return Prefetcher(nullptr, 1, 0); }

 private:
  static constexpr int64_t kInputBytes = kPanel * sizeof(bf16), kFewRows = 36 << 10, kManyRows = 96 << 10;

  UnpackPairs unpack_;
  const char* panels_;
  BlockLayout layout_;
  int64_t panel_bytes_, within_ = 0, left_ = 0;
  bf16 *tiles_, *next_ = nullptr;
  const char* block_ = nullptr;
};

inline void paired_linear(const LinearArgs& args, const QuantizedFormat& format) {
  for_each_part<TileProduct>(args, [&](const LinearPart& part) {
    multiply_part<TileProduct>(args, part, PairedCodes(args, format));
  });
}
#else
constexpr bool kPairsCodes = false;
#endif

}  // namespace backfill::BACKFILL_VARIANT
