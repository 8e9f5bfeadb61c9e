// The product of linear.h in AMX tiles, for bf16.
//
// Rows are read where they lie: packing them as tiles took longer than it saved. Results are written while
// others are computed.
#pragma once

#include "linear.h"
#include "tile_product.h"

#if defined(__AMX_BF16__)

namespace backfill::BACKFILL_VARIANT {

constexpr int64_t kTileRows = 32;  // rows multiplied at once
constexpr int64_t kUnroll = 32;    // inputs consumed by one round of tile products
constexpr int64_t kTile = 16 * kUnroll;

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

// sums [32, 32] = (continues ? sums : 0) + rows * panel^T. `prepare(panel, half)` is called before that half of 32
// inputs is loaded, which earlier calls have finished.
template <bool Lower, class Prepare>
BACKFILL_INLINE void multiply_panel(const bf16* panel, const InputRows<bf16>& rows, int64_t inputs,
                                    bool continues, const Prepare& prepare, SumsWriter<bf16>& writer,
                                    float* sums) {
  constexpr int64_t kSumsStride = kPanel * sizeof(float), kTileStride = kUnroll * sizeof(bf16);
  const int64_t row_bytes = rows.x_stride * (int64_t)sizeof(bf16);
  const int64_t writes = (kTileRows * kUnroll + inputs - 1) / inputs;
  const bf16 *upper = rows.x, *lower = upper + 16 * rows.x_stride;
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
  for (int64_t k = 0; k < inputs; k += kUnroll, panel += 2 * kTile) {
    for (int64_t i = 0; i < writes; i++) writer.write_row();
    _tile_loadd(4, upper + k, row_bytes);
    if constexpr (Lower) _tile_loadd(5, lower + k, row_bytes);
    prepare(panel, 0);
    _tile_loadd(6, panel, kTileStride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Lower) _tile_dpbf16ps(2, 5, 6);
    prepare(panel, 1);
    _tile_loadd(7, panel + kTile, kTileStride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Lower) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kSumsStride);
  _tile_stored(1, sums + 16, kSumsStride);
  if constexpr (Lower) {
    _tile_stored(2, lower_sums, kSumsStride);
    _tile_stored(3, lower_sums + 16, kSumsStride);
  }
  publish(sums);
}

class TileProduct {
 public:
  using T = bf16;
  static constexpr int64_t kRows = kTileRows, kMaxChunk = 1536, kCachedBytes = 1 << 20;
  static constexpr double kPackCost = 8.0, kReadCost = 2.0;

  static int64_t packed_bytes(int64_t) { return 0; }

  static int64_t cached_bytes(int64_t inputs) { return inputs * kRows * (int64_t)sizeof(bf16); }

  // Prefetches the rows after these.
  static void pack(const RowsToPack<bf16>& rows, void*) {
    const bf16* next = rows.x + rows.count * rows.x_stride + rows.first;
    for (int64_t row = 0; row < rows.next_count; row++, next += rows.x_stride)
      for (int64_t k = 0; k < rows.inputs; k += kUnroll) _mm_prefetch(next + k, _MM_HINT_T1);
  }

  static const void* packed_at(const void* packed, int64_t, int64_t) { return packed; }

  BACKFILL_INLINE void multiply(const bf16* panel, const InputRows<bf16>& rows, int64_t inputs,
                                bool continues, Prefetcher& prefetcher, SumsWriter<bf16>& writer,
                                float* sums) {
    const auto prefetch = [&](const bf16* at, int half) __attribute__((always_inline)) {
      if (half == 0) prefetcher.ask(at);
    };
    multiply_rows(panel, rows, inputs, continues, prefetch, writer, sums);
  }

  // Of codes that are unpacked meanwhile, see quantized_tiles.h.
  template <class Codes>
  BACKFILL_INLINE void multiply(Codes* codes, const InputRows<bf16>& rows, int64_t inputs, bool continues,
                                Prefetcher&, SumsWriter<bf16>& writer, float* sums) {
    codes->unpack_next(0);
    codes->unpack_next(1);
    const auto unpack = [&](const bf16*, int half)
                            __attribute__((always_inline)) { codes->unpack_next(half); };
    multiply_rows(codes->tiles(), rows, inputs, continues, unpack, writer, sums);
  }

 private:
  template <class Prepare>
  BACKFILL_INLINE void multiply_rows(const bf16* panel, const InputRows<bf16>& rows, int64_t inputs,
                                     bool continues, const Prepare& prepare, SumsWriter<bf16>& writer,
                                     float* sums) {
    const int64_t upper = std::min<int64_t>(rows.count, 16);
    tiles_.configure(upper, rows.count - upper);
    if (rows.count > 16)
      multiply_panel<true>(panel, rows, inputs, continues, prepare, writer, sums);
    else
      multiply_panel<false>(panel, rows, inputs, continues, prepare, writer, sums);
  }

  PanelTiles tiles_;
};

inline void tile_linear(const LinearArgs& args) {
  for_each_part<TileProduct>(
      args, [&](const LinearPart& part) { multiply_part<TileProduct>(args, part, PlainWeight<bf16>(args)); });
}

}  // namespace backfill::BACKFILL_VARIANT

#endif
