// Weights of 4 or 8 bits: y = x * weight^T where an output's weight is code * scale + offset, with a scale and an
// offset for each group of inputs.
//
// They are packed into the panels of linear.h. A panel is a row of blocks, each for a group of inputs, or for two
// groups of 16: scales [groups][32], offsets [groups][32] if there are any, then for every 32 inputs codes
// [2][32 / inputs of a word][16], a word of 32 bits having neighbouring inputs of an output; of 8 inputs, the
// first four are the lower halves of its bytes. Scales and offsets of one byte are in units: a block has 256
// inputs, and the units of its scales [32] and offsets [32] come first. For AMX words have other inputs, see
// quantized_tiles.h.
//
// Without the integer product of linear_integers.h a panel is unpacked a few hundred inputs at a time, into tiles of
// floats that the product of linear_vectors.h reads: a row's result is, to the bit, that of the unpacked weight.
#pragma once

#include "linear_vectors.h"

namespace backfill::BACKFILL_VARIANT {

// Of IEEE's half precision, finite: its exponent is put right by a product, which also serves subnormals.
BACKFILL_INLINE Floats widen_half(Halves bits) {
  const Words word = words_of(bits);
  const Floats magnitude = (Floats)((word & 0x7fff) << 13) * broadcast(0x1p112f);
  return (Floats)((Words)magnitude | (word & 0x8000) << 16);
}

BACKFILL_INLINE Floats load_half(const char* p) {
  Halves bits;
  std::memcpy(&bits, p, sizeof bits);
#if defined(__AVX512F__)
  return _mm512_cvtph_ps((__m256i)bits);
#else
  return widen_half(bits);
#endif
}

template <class Scale>
BACKFILL_INLINE Floats load_scales(const char* p) {
  if constexpr (sizeof(Scale) == 4) return load(reinterpret_cast<const float*>(p));
  if constexpr (sizeof(Scale) == 2) return load_half(p);
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return floats_of(ints_of(bytes));
}

struct FactorsAt {
  Floats scale, offset;
};

constexpr int64_t kUnitInputs = 256;  // of a block of scales in units

// Of a format, what a block of a panel has.
struct BlockLayout {
  int64_t inputs, groups;
  int64_t scales, codes, bytes;  // where they begin, and of all
};

BACKFILL_INLINE BlockLayout block_layout(int bits, int64_t group, int64_t scale_bytes, bool has_offsets) {
  const int64_t factors = has_offsets ? 2 : 1;
  BlockLayout block{};
  block.inputs = scale_bytes == 1 ? kUnitInputs : std::max<int64_t>(group, 32);
  block.groups = block.inputs / group;
  block.scales = scale_bytes == 1 ? factors * kPanel * 2 : 0;
  block.codes = block.scales + factors * block.groups * kPanel * scale_bytes;
  block.bytes = block.codes + block.inputs * kPanel * bits / 8;
  return block;
}

// Of a group of a block, for kLanes outputs.
template <int Bits, class Scale, bool HasOffsets>
BACKFILL_INLINE FactorsAt factors_at(const char* block, const BlockLayout& layout, int64_t group,
                                     int64_t lane) {
  constexpr bool kInUnits = sizeof(Scale) == 1;
  const char* scales = block + layout.scales + (group * kPanel + lane) * (int64_t)sizeof(Scale);
  FactorsAt at{load_scales<Scale>(scales), {}};
  if constexpr (kInUnits) at.scale = at.scale * load_half(block + lane * 2);
  if constexpr (HasOffsets) {
    at.offset = load_scales<Scale>(scales + layout.groups * kPanel * (int64_t)sizeof(Scale));
    if constexpr (kInUnits) at.offset = at.offset * load_half(block + (kPanel + lane) * 2);
  } else if constexpr (Bits == 4) {
    at.offset = at.scale * -8.0f;
  }
  return at;
}

// Of variants that have no integer product, see linear_integers.h.
#if !defined(__AVX2__) || defined(__AMX_BF16__)
// The codes of input `index` of each word, as floats: 4 bits are 0 to 15, 8 bits -128 to 127.
template <int Bits>
BACKFILL_INLINE Floats codes_of(Words words, int index) {
  if constexpr (Bits == 8) return floats_of((Ints)(words << (24 - 8 * index)) >> 24);
  const int shift = index % 4 * 8 + index / 4 * 4;
#if defined(__AVX512F__)
  alignas(64) static constexpr float kValues[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return _mm512_permutexvar_ps((__m512i)(words >> shift), _mm512_load_ps(kValues));
#else
  return floats_of((Ints)(words >> shift & 15));
#endif
}

// Inputs [first, first + inputs) of a panel, in 32s, as tiles of floats.
using Unpack = void (*)(const char* panel, int64_t group, int64_t first, int64_t inputs, float* tiles);

// Group: 16, 32, or 0 for any other.
template <int Bits, class Scale, bool HasOffsets, int Group>
void unpack(const char* panel, int64_t group, int64_t first, int64_t inputs, float* tiles) {
  constexpr int kParts = Group == 16 ? 2 : 1;  // groups in 32 inputs
  constexpr int kVectors = 16 / kLanes, kPerWord = 32 / Bits, kWords = 32 / kPerWord;
  constexpr int64_t kCodes = kPanel * 32 * Bits / 8, kAhead = 4 * kCodes;
  const BlockLayout layout = block_layout(Bits, Group == 0 ? group : Group, sizeof(Scale), HasOffsets);
  for (int64_t k = first; k < first + inputs; k += 32, tiles += 32 * kPanel) {
    const char* block = panel + k / layout.inputs * layout.bytes;
    const int64_t within = k % layout.inputs;
    const char* codes = block + layout.codes + within / 32 * kCodes;
    for (int64_t line = 0; line < kCodes + 64; line += 64) __builtin_prefetch(codes + kAhead + line);
    for (int half = 0; half < 2; half++) {
      for (int v = 0; v < kVectors; v++) {
        const int64_t lane = 16 * half + v * kLanes;
        for (int part = 0; part < kParts; part++) {
          // Loaded here, because stores to the tiles might change them as far as the compiler knows.
          const auto [scale, offset] = factors_at<Bits, Scale, HasOffsets>(
              block, layout, Group == 0 ? 0 : within / Group + part, lane);
#pragma GCC unroll 8
          for (int word = part * kWords / kParts; word < (part + 1) * kWords / kParts; word++) {
            Words bits;
            std::memcpy(&bits, codes + ((half * kWords + word) * 16 + v * kLanes) * 4, sizeof bits);
#pragma GCC unroll 8
            for (int i = 0; i < kPerWord; i++) {
              // Two tiles of 16 inputs: [input / 16][half][input % 16][16].
              const int input = word * kPerWord + i;
              store(tiles + (input / 16 * 2 + half) * kTileFloats + input % 16 * 16 + v * kLanes,
                    multiply_add(offset, codes_of<Bits>(bits, i), scale));
            }
          }
        }
      }
    }
  }
}

template <int Bits, class Scale, bool HasOffsets>
Unpack unpack_of(int64_t group) {
  return group == 16   ? unpack<Bits, Scale, HasOffsets, 16>
         : group == 32 ? unpack<Bits, Scale, HasOffsets, 32>
                       : unpack<Bits, Scale, HasOffsets, 0>;
}

template <int Bits, class Scale>
Unpack unpack_of(const QuantizedFormat& format) {
  return format.has_offsets ? unpack_of<Bits, Scale, true>(format.group)
                            : unpack_of<Bits, Scale, false>(format.group);
}

template <int Bits>
Unpack unpack_of(const QuantizedFormat& format) {
  return format.scale_bytes == 4   ? unpack_of<Bits, float>(format)
         : format.scale_bytes == 2 ? unpack_of<Bits, uint16_t>(format)
                                   : unpack_of<Bits, int8_t>(format);
}

// Gives the tiles of one thread, in memory of its own.
class QuantizedWeight {
 public:
  QuantizedWeight(const LinearArgs& args, const QuantizedFormat& format)
      : unpack_(format.bits == 4 ? unpack_of<4>(format) : unpack_of<8>(format)),
        panels_(static_cast<const char*>(args.weight)),
        group_(format.group) {
    const BlockLayout block = block_layout(format.bits, group_, format.scale_bytes, format.has_offsets);
    panel_bytes_ = args.in_features / block.inputs * block.bytes;
    tiles_ = static_cast<float*>(scratch(kTiles, std::min(kManyRows, args.in_features * kInputBytes)));
  }

  // For few rows tiles stay in the first-level cache; for many, sums are loaded and stored less often.
  int64_t step(int64_t num_row_groups) const {
    return (num_row_groups == 1 ? kFewRows : kManyRows) / kInputBytes;
  }

  const float* tiles(int64_t panel, int64_t first, int64_t inputs) const {
    unpack_(panels_ + panel * panel_bytes_, group_, first, inputs, tiles_);
    return tiles_;
  }

  // Unpacking reads the weight, and prefetches it.
  Prefetcher prefetcher(int64_t, int64_t) const { return Prefetcher(nullptr, 1, 0); }

 private:
  static constexpr int64_t kInputBytes = kPanel * sizeof(float), kFewRows = 16 << 10, kManyRows = 96 << 10;

  Unpack unpack_;
  const char* panels_;
  int64_t group_, panel_bytes_;
  float* tiles_;
};

// Rows of T.
template <class T>
void unpacked_linear(const LinearArgs& args, const QuantizedFormat& format) {
  using Product = VectorProduct<T, float>;
  for_each_part<Product>(args, [&](const LinearPart& part) {
    multiply_part<Product>(args, part, QuantizedWeight(args, format));
  });
}
#endif

}  // namespace backfill::BACKFILL_VARIANT
