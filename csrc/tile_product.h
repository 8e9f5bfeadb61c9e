// The matrix product inside prefill attention:
//   C [rows, queries] = scale * C + A [rows, depth] * B [depth, queries].
//
// depth is counted in units (simd.h). Queries are columns, so the softmax between the two products of
// attention is vertical: no sums across a vector, no shuffles.
// B and C have kTileQueries columns; A is packed as the instruction set wants it:
//   vectors:  A(row, k) at a[row * row_step + k * depth_step]; each unit is broadcast against B's queries;
//   AMX:      A row-major with rows `row_step` units apart; rows, depth and queries padded to whole tiles.
#pragma once

#include "simd.h"

namespace backfill::BACKFILL_VARIANT {

constexpr int kTileQueries = 64;

#if defined(__AMX_BF16__)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

template <class T>
constexpr bool kTiled = kHasTiles && kPaired<T>;

// What rows, depth (in units) and queries are padded to.
template <class T>
constexpr int kRowPadding = kTiled<T> ? 32 : 4;
template <class T>
constexpr int kDepthPadding = kTiled<T> ? 16 : 1;
template <class T>
constexpr int kQueryPadding = kTiled<T> ? 32 : kLanes;

template <bool Paired, int Rows, int Vectors>
BACKFILL_INLINE void product_block(const float* a, int64_t row_step, int64_t depth_step, const float* b,
                                   int64_t depth, float* c, const float* scale) {
  Floats acc[Rows][Vectors];
  for (int v = 0; v < Vectors; v++) {
    const Floats factor = scale == nullptr ? Floats{} : load(scale + v * kLanes);
    for (int r = 0; r < Rows; r++)
      acc[r][v] = scale == nullptr ? Floats{} : load(c + r * kTileQueries + v * kLanes) * factor;
  }
  for (int64_t k = 0; k < depth; k++, b += kTileQueries, a += depth_step) {
    Floats b_row[Vectors];
    for (int v = 0; v < Vectors; v++) b_row[v] = load(b + v * kLanes);
    for (int r = 0; r < Rows; r++) {
      const Floats unit = broadcast(a[r * row_step]);
      for (int v = 0; v < Vectors; v++) acc[r][v] = multiply_add<Paired>(acc[r][v], unit, b_row[v]);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vectors; v++) store(c + r * kTileQueries + v * kLanes, acc[r][v]);
}

// rows: a multiple of 4. queries: a multiple of kLanes.
template <bool Paired>
void vector_product(const float* a, int64_t row_step, int64_t depth_step, const float* b, int64_t depth,
                    float* c, int64_t rows, int64_t queries, const float* scale) {
  constexpr int kVectors = kLanes == 16 ? 4 : 2;
  for (int64_t row = 0; row < rows; row += 4) {
    const float* a_rows = a + row * row_step;
    float* c_rows = c + row * kTileQueries;
    int64_t query = 0;
    for (; query + kVectors * kLanes <= queries; query += kVectors * kLanes)
      product_block<Paired, 4, kVectors>(a_rows, row_step, depth_step, b + query, depth, c_rows + query,
                                         scale == nullptr ? nullptr : scale + query);
    for (; query < queries; query += kLanes)
      product_block<Paired, 4, 1>(a_rows, row_step, depth_step, b + query, depth, c_rows + query,
                                  scale == nullptr ? nullptr : scale + query);
  }
}

#if defined(__AMX_BF16__)

// GCC's tile intrinsics do not tell the optimiser which memory they read. Without this, stores before a tile
// load may be moved after it or dropped.
BACKFILL_INLINE void publish(const void* written) { __asm__ volatile("" ::"r"(written) : "memory"); }

// Holds the tile registers, all 16 rows of 64 bytes, while it lives. oneDNN configures its own.
class TileRegisters {
 public:
  TileRegisters() {
    alignas(64) uint8_t config[64] = {1};
    for (int tile = 0; tile < 8; tile++) {
      config[16 + 2 * tile] = 64;
      config[48 + tile] = 16;
    }
    publish(config);
    _tile_loadconfig(config);
  }
  ~TileRegisters() { _tile_release(); }
};

BACKFILL_INLINE void scale_rows(float* c, int64_t rows, int64_t queries, const float* scale) {
  for (int64_t query = 0; query < queries; query += kLanes) {
    const Floats factor = load(scale + query);
    for (int64_t row = 0; row < rows; row++) {
      float* target = c + row * kTileQueries + query;
      store(target, load(target) * factor);
    }
  }
}

// rows and queries: multiples of 32; depth: a multiple of 16.
BACKFILL_INLINE void tile_product(const float* a, int64_t row_step, const float* b, int64_t depth, float* c,
                                  int64_t rows, int64_t queries, const float* scale) {
  constexpr int64_t kStride = kTileQueries * sizeof(float);
  const int64_t a_stride = row_step * (int64_t)sizeof(float);
  if (scale != nullptr) scale_rows(c, rows, queries, scale);
  publish(c);
  for (int64_t query = 0; query < queries; query += 32) {
    for (int64_t row = 0; row < rows; row += 32) {
      float* upper = c + row * kTileQueries + query;
      float* lower = upper + 16 * kTileQueries;
      if (scale == nullptr) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      } else {
        _tile_loadd(0, upper, kStride);
        _tile_loadd(1, upper + 16, kStride);
        _tile_loadd(2, lower, kStride);
        _tile_loadd(3, lower + 16, kStride);
      }
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
      _tile_stored(0, upper, kStride);
      _tile_stored(1, upper + 16, kStride);
      _tile_stored(2, lower, kStride);
      _tile_stored(3, lower + 16, kStride);
    }
  }
}

#else

struct TileRegisters {
  TileRegisters() {}
};

#endif

template <class T>
BACKFILL_INLINE void product(const float* a, int64_t row_step, int64_t depth_step, const float* b,
                             int64_t depth, float* c, int64_t rows, int64_t queries, const float* scale) {
#if defined(__AMX_BF16__)
  if constexpr (kTiled<T>) return tile_product(a, row_step, b, depth, c, rows, queries, scale);
#endif
  vector_product<kPaired<T>>(a, row_step, depth_step, b, depth, c, rows, queries, scale);
}

}  // namespace backfill::BACKFILL_VARIANT
