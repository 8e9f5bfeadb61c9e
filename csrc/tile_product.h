// The matrix products inside prefill attention, A [rows, depth] * B [depth, queries].
//
// depth is counted in units (simd.h). Queries are columns, so the softmax between the two products of
// attention is vertical: no sums across a vector, no shuffles.
// B and C have kTileQueries columns; A is packed as the instruction set wants it:
//   vectors:  A(row, k) at a[row * row_step + k * depth_step]; each unit is broadcast against B's queries;
//   AMX:      A row-major with rows `row_step` units apart; rows, depth and queries padded to whole tiles.
// Sums begin at zero and run over depth in order (softmax.h). `Fold` then stores or folds them into C.
#pragma once

#include <type_traits>

#include "softmax.h"

namespace backfill::BACKFILL_VARIANT {

constexpr int kTileQueries = 64;

#if defined(__AMX_BF16__)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

// Whether all attention of a call runs in tiles. Decode reads keys and values in the blocks as tiles; a shape
// that it cannot read is computed with vectors, by prefill too, so that both sum alike.
template <class T>
BACKFILL_INLINE bool uses_tiles(const AttentionArgs& args) {
  const PoolShape& shape = args.shape;
  return kHasTiles && kPaired<T> && shape.head_dim % 32 == 0 && shape.head_dim <= 128 &&
         shape.block_size % 16 == 0 && args.num_heads / shape.num_kv_heads <= 8;
}

// What rows, depth (in units) and queries are padded to.
template <bool Tiled>
constexpr int kRowPadding = Tiled ? 32 : 4;
template <bool Tiled>
constexpr int kDepthPadding = Tiled ? 16 : 1;
template <bool Tiled>
constexpr int kQueryPadding = Tiled ? 32 : kLanes;

// C = sums.
struct StoreSums {
  BACKFILL_INLINE void operator()(float* c, int64_t, Floats sums) const { store(c, sums); }
};

// C = C * before[query] + sums * chunk[query].
struct FoldSums {
  const float *before, *chunk;

  BACKFILL_INLINE void operator()(float* c, int64_t query, Floats sums) const {
    store(c, folded(load(c), sums, {load(before + query), load(chunk + query)}));
  }
};

template <bool Paired, int Rows, int Vectors, class Fold>
BACKFILL_INLINE void product_block(const float* a, int64_t row_step, int64_t depth_step, const float* b,
                                   int64_t depth, float* c, int64_t query, const Fold& fold) {
  Floats acc[Rows][Vectors] = {};
  for (int64_t k = 0; k < depth; k++, b += kTileQueries, a += depth_step) {
    Floats b_row[Vectors];
    for (int v = 0; v < Vectors; v++) b_row[v] = load(b + v * kLanes);
    for (int r = 0; r < Rows; r++) {
      const Floats unit = broadcast(a[r * row_step]);
      for (int v = 0; v < Vectors; v++) acc[r][v] = multiply_add<Paired>(acc[r][v], unit, b_row[v]);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) fold(c + r * kTileQueries + v * kLanes, query + v * kLanes, acc[r][v]);
}

// rows: a multiple of 4. queries: a multiple of kLanes.
template <bool Paired, class Fold>
void vector_product(const float* a, int64_t row_step, int64_t depth_step, const float* b, int64_t depth,
                    float* c, int64_t rows, int64_t queries, const Fold& fold) {
  constexpr int kVectors = kLanes == 16 ? 4 : 2;
  for (int64_t row = 0; row < rows; row += 4) {
    const float* a_rows = a + row * row_step;
    float* c_rows = c + row * kTileQueries;
    int64_t query = 0;
    for (; query + kVectors * kLanes <= queries; query += kVectors * kLanes)
      product_block<Paired, 4, kVectors>(a_rows, row_step, depth_step, b + query, depth, c_rows + query,
                                         query, fold);
    for (; query < queries; query += kLanes)
      product_block<Paired, 4, 1>(a_rows, row_step, depth_step, b + query, depth, c_rows + query, query,
                                  fold);
  }
}

#if defined(__AMX_BF16__)

// GCC's tile intrinsics do not tell the optimiser which memory they read. Without this, stores before a tile
// load may be moved after it or dropped.
BACKFILL_INLINE void publish(const void* written) { __asm__ volatile("" ::"r"(written) : "memory"); }

// Holds the tile registers, all 16 rows of 64 bytes, while it lives.
template <bool Tiled>
class TileRegisters {
 public:
  TileRegisters() {
    if constexpr (Tiled) {
      alignas(64) uint8_t config[64] = {1};
      for (int tile = 0; tile < 8; tile++) {
        config[16 + 2 * tile] = 64;
        config[48 + tile] = 16;
      }
      publish(config);
      _tile_loadconfig(config);
    }
  }
  ~TileRegisters() {
    if constexpr (Tiled) _tile_release();
  }
};

// Stores a block of 32 x 32 sums from the tile registers, `stride` floats between rows.
BACKFILL_INLINE void store_tiles(float* c, int64_t stride) {
  const int64_t bytes = stride * (int64_t)sizeof(float);
  _tile_stored(0, c, bytes);
  _tile_stored(1, c + 16, bytes);
  _tile_stored(2, c + 16 * stride, bytes);
  _tile_stored(3, c + 16 * stride + 16, bytes);
}

// rows and queries: multiples of 32; depth: a multiple of 16.
template <class Fold>
BACKFILL_INLINE void tile_product(const float* a, int64_t row_step, const float* b, int64_t depth, float* c,
                                  int64_t rows, int64_t queries, const Fold& fold) {
  constexpr int64_t kStride = kTileQueries * sizeof(float);
  constexpr bool kFolds = !std::is_same_v<Fold, StoreSums>;
  const int64_t a_stride = row_step * (int64_t)sizeof(float);
  alignas(64) float sums[kFolds ? 32 * 32 : 1];
  publish(b);
  for (int64_t query = 0; query < queries; query += 32) {
    for (int64_t row = 0; row < rows; row += 32) {
      float* target = c + row * kTileQueries + query;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      const float* a_upper = a + row * row_step;
      const float* a_lower = a_upper + 16 * row_step;
      const float* b_rows = b + query;
      for (int64_t k = 0; k < depth; k += 16, b_rows += 16 * kTileQueries) {
        _tile_loadd(4, a_upper + k, a_stride);
        _tile_loadd(6, b_rows, kStride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b_rows + 16, kStride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a_lower + k, a_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      if constexpr (kFolds) {
        store_tiles(sums, 32);
        publish(sums);
        for (int64_t i = 0; i < 32; i++)
          for (int64_t j = 0; j < 32; j += kLanes)
            fold(target + i * kTileQueries + j, query + j, load(sums + i * 32 + j));
      } else {
        store_tiles(target, kTileQueries);
      }
    }
  }
  publish(c);
}

#else

template <bool Tiled>
struct TileRegisters {
  TileRegisters() {}
};

#endif

template <class T, bool Tiled, class Fold>
BACKFILL_INLINE void product(const float* a, int64_t row_step, int64_t depth_step, const float* b,
                             int64_t depth, float* c, int64_t rows, int64_t queries, const Fold& fold) {
#if defined(__AMX_BF16__)
  if constexpr (Tiled) return tile_product(a, row_step, b, depth, c, rows, queries, fold);
#endif
  vector_product<kPaired<T>>(a, row_step, depth_step, b, depth, c, rows, queries, fold);
}

}  // namespace backfill::BACKFILL_VARIANT
