// The products of linear.h with vectors: bf16 weights widened to float, pairs of bf16 (AVX-512 BF16), floats.
//
// A block of rows and outputs is summed in registers over the whole depth: each row's unit is broadcast
// against the vectors of a tile's outputs. Rows are packed with those of a block side by side, [depth][rows],
// so that broadcasts read one stream.
#pragma once

#include <type_traits>

#include "linear.h"

namespace backfill::BACKFILL_VARIANT {

// Rows and vectors whose sums fill the registers, and leave some for weights and a broadcast.
constexpr int kVectorRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 3;
constexpr int kTileVectors = 16 / kLanes;
constexpr int kMostSums = kLanes == 16 ? 24 : 12;

// sums [Rows, 32] of Tiles tiles = (continues ? sums : 0) + rows * tiles^T; num_tiles: of the depth.
template <class W, int Rows, int Tiles>
BACKFILL_INLINE void multiply_block(const float* tiles, const float* rows, int64_t num_tiles, bool continues,
                                    bool prefetches, Prefetcher& prefetcher, float* sums) {
  constexpr bool kSplit = sizeof(W) == 2 && !kPaired<W>;  // a stored unit is two units
  constexpr int kVectors = Tiles * kTileVectors;
  const Words upper = Words{} + 0xffff0000u;
  const auto weights_at = [&](const float* row, int v) __attribute__((always_inline)) {
    return load(row + v / kTileVectors * kTileFloats + v % kTileVectors * kLanes);
  };
  Floats acc[Rows][kVectors];
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < kVectors; v++)
      acc[r][v] = continues ? load(sums + r * kPanel + v * kLanes) : Floats{};
  for (int64_t tile = 0; tile < num_tiles; tile++, tiles += 2 * kTileFloats) {
    if (prefetches) prefetcher.ask(tiles);
#pragma GCC unroll 4
    for (int unit = 0; unit < kTileUnits; unit++) {
      const float* row = tiles + unit * 16;
      Floats weights[kVectors];
      for (int v = 0; v < kVectors; v++) {
        weights[v] = weights_at(row, v);
        if constexpr (kSplit) weights[v] = (Floats)((Words)weights[v] << 16);
      }
      for (int r = 0; r < Rows; r++) {
        const Floats x = broadcast(rows[r]);
        for (int v = 0; v < kVectors; v++) acc[r][v] = multiply_add<kPaired<W>>(acc[r][v], x, weights[v]);
      }
      rows += Rows;
      if constexpr (kSplit) {
        for (int v = 0; v < kVectors; v++) weights[v] = (Floats)((Words)weights_at(row, v) & upper);
        for (int r = 0; r < Rows; r++) {
          const Floats x = broadcast(rows[r]);
          for (int v = 0; v < kVectors; v++) acc[r][v] = multiply_add(acc[r][v], x, weights[v]);
        }
        rows += Rows;
      }
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < kVectors; v++) store(sums + r * kPanel + v * kLanes, acc[r][v]);
}

// Of rows of Element, and tiles of W.
template <class Element, class W = Element>
class VectorProduct {
 public:
  using T = Element;
  static constexpr int64_t kRows = kVectorRows, kMaxChunk = 1536, kCachedBytes = 384 << 10;
  static constexpr double kPackCost = 0.3, kReadCost = 1.0;

  static int64_t packed_bytes(int64_t inputs) {
    // A vector is stored for each unit of kRows rows, so the last one exceeds them.
    return round_up((inputs / kPerUnit<T> * kRows + kLanes) * (int64_t)sizeof(float), 64);
  }

  static int64_t cached_bytes(int64_t inputs) { return packed_bytes(inputs); }

  static void pack(const RowsToPack<T>& rows, void* packed) {
    auto* target = static_cast<float*>(packed);
    for (int64_t k = rows.first; k < rows.first + rows.inputs; k += kLanes * kPerUnit<T>) {
      Floats square[kLanes];
      for (int r = 0; r < kLanes; r++)
        square[r] = r < rows.count ? load_units(rows.x + r * rows.x_stride + k) : Floats{};
      transpose(square);
      for (int i = 0; i < kLanes; i++, target += rows.count) store(target, square[i]);
    }
  }

  static const void* packed_at(const void* packed, int64_t rows, int64_t first) {
    return static_cast<const float*>(packed) + first / kPerUnit<T> * rows;
  }

  void multiply(const W* tiles, const InputRows<T>& rows, int64_t inputs, bool continues,
                Prefetcher& prefetcher, SumsWriter<T>&, float* sums) {
    multiply_rows<kRows>(reinterpret_cast<const float*>(tiles), rows.count,
                         static_cast<const float*>(rows.packed), inputs / kTileInputs<W>, continues,
                         prefetcher, sums);
  }

 private:
  template <int Rows>
  static BACKFILL_INLINE void multiply_rows(const float* panel, int64_t rows, const float* packed,
                                            int64_t num_tiles, bool continues, Prefetcher& prefetcher,
                                            float* sums) {
    if constexpr (Rows > 1)
      if (rows < Rows)
        return multiply_rows<Rows - 1>(panel, rows, packed, num_tiles, continues, prefetcher, sums);
    multiply_panel<Rows>(panel, packed, num_tiles, continues, prefetcher, sums);
  }

  template <int Rows>
  static __attribute__((noinline)) void multiply_panel(const float* panel, const float* packed,
                                                       int64_t num_tiles, bool continues,
                                                       Prefetcher& prefetcher, float* sums) {
    if constexpr (Rows * 2 * kTileVectors <= kMostSums) {
      multiply_block<W, Rows, 2>(panel, packed, num_tiles, continues, true, prefetcher, sums);
    } else {
      multiply_block<W, Rows, 1>(panel, packed, num_tiles, continues, true, prefetcher, sums);
      multiply_block<W, Rows, 1>(panel + kTileFloats, packed, num_tiles, continues, false, prefetcher,
                                 sums + 16);
    }
  }
};

template <class T>
void vector_linear(const LinearArgs& args) {
  for_each_part<VectorProduct<T>>(args, [&](const LinearPart& part) {
    multiply_part<VectorProduct<T>>(args, part, PlainWeight<T>(args));
  });
}

}  // namespace backfill::BACKFILL_VARIANT
