// The product of linear.h in AMX tiles, for bf16.
//
// With many rows, tiles must come from the caches, and results are written while others are computed. Few
// rows are not packed.
#pragma once

#include "linear.h"
#include "tile_product.h"

#if defined(__AMX_BF16__)

namespace backfill::BACKFILL_VARIANT {

constexpr int64_t kTileRows = 32;  // rows multiplied at once
constexpr int64_t kUnroll = 32;    // inputs consumed by one round of tile products
constexpr int64_t kTile = 16 * kUnroll;
constexpr int64_t kFewRows = 64;

// Tiles 0 to 3: sums of (upper rows, lower rows) x (left, right half of the panel). Tiles 4, 5: rows of x.
// Tiles 6, 7: the panel's halves. `upper` and `lower` are the rows in use, at most 16 each.
class PanelTiles {
 public:
  ~PanelTiles() { _tile_release(); }

  void configure(int64_t upper, int64_t lower) {
    if (upper == upper_ && lower == lower_) return;
    upper_ = upper;
    lower_ = lower;
    alignas(64) uint8_t config[64] = {1};
    const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int tile = 0; tile < 8; tile++) {
      config[16 + 2 * tile] = 64;
      config[48 + tile] = (uint8_t)std::max<int64_t>(rows[tile], 1);
    }
    publish(config);
    _tile_loadconfig(config);
  }

 private:
  int64_t upper_ = -1, lower_ = -1;
};

// 32 rows as tiles of 32 inputs, `step` apart.
struct RowTiles {
  const bf16 *upper, *lower;
  int64_t stride, step;
};

// sums [32, 32] = (continues ? sums : 0) + rows * panel^T
template <bool Lower>
BACKFILL_INLINE void multiply_panel(const bf16* panel, RowTiles rows, int64_t depth, bool continues,
                                    Prefetcher& prefetcher, SumsWriter<bf16>& writer, float* sums) {
  constexpr int64_t kSumsStride = kPanel * sizeof(float), kTileStride = kUnroll * sizeof(bf16);
  const int64_t row_bytes = rows.stride * (int64_t)sizeof(bf16);
  const int64_t writes = (kTileRows * kUnroll + depth - 1) / depth;
  float* lower_sums = sums + 16 * kPanel;
  if (continues) {
    _tile_loadd(0, sums, kSumsStride);
    _tile_loadd(1, sums + 16, kSumsStride);
    if constexpr (Lower) {
      _tile_loadd(2, lower_sums, kSumsStride);
      _tile_loadd(3, lower_sums + 16, kSumsStride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Lower) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t k = 0; k < depth; k += kUnroll, panel += 2 * kTile) {
    prefetcher.ask(panel);
    for (int64_t i = 0; i < writes; i++) writer.write_row();
    _tile_loadd(4, rows.upper, row_bytes);
    _tile_loadd(6, panel, kTileStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + kTile, kTileStride);
    _tile_dpbf16ps(1, 4, 7);
    rows.upper += rows.step;
    if constexpr (Lower) {
      _tile_loadd(5, rows.lower, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      rows.lower += rows.step;
    }
  }
  _tile_stored(0, sums, kSumsStride);
  _tile_stored(1, sums + 16, kSumsStride);
  if constexpr (Lower) {
    _tile_stored(2, lower_sums, kSumsStride);
    _tile_stored(3, lower_sums + 16, kSumsStride);
  }
  publish(sums);
}

BACKFILL_INLINE void multiply_panel(const bf16* panel, int64_t num_rows, const RowTiles& rows, int64_t depth,
                                    bool continues, Prefetcher& prefetcher, SumsWriter<bf16>& writer,
                                    float* sums) {
  if (num_rows > 16)
    multiply_panel<true>(panel, rows, depth, continues, prefetcher, writer, sums);
  else
    multiply_panel<false>(panel, rows, depth, continues, prefetcher, writer, sums);
}

class TileProduct {
 public:
  using T = bf16;
  static constexpr int64_t kRows = kTileRows, kMaxChunk = 1536, kPackedBytes = 512 << 10;
  static constexpr double kPackCost = 8.0, kReadCost = 2.0;

  TileProduct() { tiles_.configure(16, 16); }

  static int64_t packed_bytes(int64_t inputs) { return inputs * kRows * (int64_t)sizeof(bf16); }

  // Packs rows as contiguous tiles, [inputs / 32][upper, lower][16][32], and prefetches the rows after them.
  static void pack(const bf16* x, int64_t x_stride, int64_t rows, int64_t next_rows, int64_t inputs,
                   void* packed_rows) {
    auto* packed = static_cast<bf16*>(packed_rows);
    constexpr int64_t kAtOnce = 4 * kUnroll;
    for (int64_t first = 0; first < inputs; first += kAtOnce) {
      const int64_t last = std::min(first + kAtOnce, inputs);
      for (int64_t row = 0; row < rows; row++)
        for (int64_t k = first; k < last; k += kUnroll)
          _mm512_store_si512(packed + k * kRows + row * kUnroll, _mm512_loadu_si512(x + row * x_stride + k));
    }
    const bf16* next = x + rows * x_stride;
    for (int64_t row = 0; row < next_rows; row++, next += x_stride)
      for (int64_t k = 0; k < inputs; k += kUnroll) _mm_prefetch(next + k, _MM_HINT_T1);
    publish(packed);
  }

  static const void* packed_at(const void* packed, int64_t, int64_t first) {
    return static_cast<const bf16*>(packed) + first * kRows;
  }

  BACKFILL_INLINE void multiply(const bf16* panel, int64_t rows, const void* packed_rows, int64_t inputs,
                                bool continues, Prefetcher& prefetcher, SumsWriter<bf16>& writer,
                                float* sums) {
    auto* packed = static_cast<const bf16*>(packed_rows);
    multiply_panel(panel, rows, {packed, packed + kTile, kUnroll, 2 * kTile}, inputs, continues, prefetcher,
                   writer, sums);
  }

 private:
  PanelTiles tiles_;
};

// Each panel is read from memory once and multiplied with all rows, which are not packed.
inline void multiply_few_rows(const LinearArgs& args, const LinearPart& part) {
  const auto* x = static_cast<const bf16*>(args.x);
  const int64_t panel_size = args.in_features * kPanel, x_stride = args.x_stride;
  const auto* weight = static_cast<const bf16*>(args.weight);
  alignas(64) float sums[2][kTileRows * kPanel];
  PanelTiles tiles;
  SumsWriter<bf16> writer;
  Prefetcher prefetcher(weight + part.last_panel * panel_size,
                        (part.last_row - part.first_row + kTileRows - 1) / kTileRows,
                        panel_size * (int64_t)sizeof(bf16));
  int turn = 0;
  for (int64_t index = part.first_panel; index < part.last_panel; index++) {
    for (int64_t row = part.first_row; row < part.last_row; row += kTileRows, turn ^= 1) {
      const int64_t rows = std::min(kTileRows, part.last_row - row), upper = std::min<int64_t>(rows, 16);
      tiles.configure(upper, rows - upper);
      const bf16* x_rows = x + row * x_stride;
      multiply_panel(weight + index * panel_size, rows, {x_rows, x_rows + 16 * x_stride, x_stride, kUnroll},
                     args.in_features, false, prefetcher, writer, sums[turn]);
      begin_writing(writer, args, sums[turn], row, rows, index);
    }
  }
  writer.finish();
}

inline void tile_linear(const LinearArgs& args) {
  for_each_part<TileProduct>(args, [&](const LinearPart& part) {
    if (args.rows <= kFewRows)
      multiply_few_rows(args, part);
    else
      multiply_part<TileProduct>(args, part, PlainWeight<bf16>(args));
  });
}

}  // namespace backfill::BACKFILL_VARIANT

#endif
