// y [rows, out] = x [rows, in] * weight^T + bias in AMX tiles, for a weight packed into panels.
//
// A panel holds 32 outputs: [in / 32][2][16][16][2], for every 32 inputs two tiles of 16 outputs, pairs of
// inputs side by side as tdpbf16ps reads them. With few rows, memory bandwidth bounds the product. Hardware
// prefetching reaches two thirds of it (measured), so panels are prefetched in software, while the tiles
// compute. With many rows, tiles must come from the caches, and results are written while others are
// computed. The order of a row's sums is fixed: its result depends neither on the number of rows nor on its
// index.
#pragma once

#include "kernels.h"

#if defined(__AMX_BF16__)

#include <omp.h>

#include <algorithm>

#include "region_error.h"
#include "scratch.h"
#include "tile_product.h"

namespace backfill::BACKFILL_VARIANT {

constexpr int64_t kPanel = 32;   // outputs of a panel; also the rows multiplied at once
constexpr int64_t kUnroll = 32;  // inputs consumed by one round of tile products
constexpr int64_t kTile = 16 * kUnroll;
constexpr int64_t kFewRows = 64;
constexpr int64_t kPackedSize = 256 << 10;  // numbers of packed rows: half a MiB, to stay in L2
constexpr int64_t kMaxChunk = 1536;         // inputs multiplied before the next row or panel
constexpr int64_t kSumsSize = 512 << 10;    // sums kept in memory between chunks
// Cost of packing 32 rows, and of the first read of a panel; the unit is a product of 32 rows and a panel.
constexpr int64_t kPackCost = 8, kReadCost = 2;

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

// Prefetches a thread's panels, which are contiguous.
class Prefetcher {
 public:
  // Each panel is read `num_reads` times, and the prefetch of the next one is spread over these reads: memory
  // then delivers while the tiles compute.
  Prefetcher(const void* end, int64_t num_reads)
      : end_((const char*)end), lines_(std::max<int64_t>(1, kRoundLines / num_reads)) {}

  BACKFILL_INLINE void ask(const void* reading) {
    const char* nearest = (const char*)reading + kRoundLines * kLine;
    int64_t lines = lines_;
    if (next_ < nearest) {
      next_ = nearest;
      lines = kRoundLines;
    }
    if (next_ + lines * kLine > end_) return;
    for (int64_t line = 0; line < lines; line++, next_ += kLine) _mm_prefetch(next_, _MM_HINT_T0);
  }

 private:
  static constexpr int64_t kLine = 64, kRoundLines = kUnroll * kPanel * sizeof(bf16) / kLine;

  const char* next_ = nullptr;
  const char* end_;
  int64_t lines_;
};

// Adds the bias to a block's sums and writes them while the next block is multiplied. Written at once, they
// would stall the tiles (without any writing, 2,048 rows of 576 inputs took a third less).
class SumsWriter {
 public:
  void begin(const float* sums, const bf16* bias, bf16* y, int64_t y_stride, int64_t rows, int64_t columns) {
    finish();
    sums_ = sums;
    y_ = y;
    y_stride_ = y_stride;
    rows_ = rows;
    columns_ = columns;
    left_bias_ = bias == nullptr ? Floats{} : load(bias, columns);
    right_bias_ = bias == nullptr ? Floats{} : load(bias + kLanes, std::max<int64_t>(columns - kLanes, 0));
  }

  BACKFILL_INLINE void write_row() {
    if (rows_ == 0) return;
    const Floats a = load(sums_) + left_bias_, b = load(sums_ + kLanes) + right_bias_;
    if (columns_ == kPanel) {
      _mm512_storeu_si512(y_, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
    } else {
      store(y_, a, columns_);
      store(y_ + kLanes, b, std::max<int64_t>(columns_ - kLanes, 0));
    }
    sums_ += kPanel;
    y_ += y_stride_;
    rows_--;
  }

  void finish() {
    while (rows_ > 0) write_row();
  }

 private:
  const float* sums_ = nullptr;
  bf16* y_ = nullptr;
  int64_t y_stride_ = 0, rows_ = 0, columns_ = 0;
  Floats left_bias_{}, right_bias_{};
};

// Packs rows as contiguous tiles, [depth / 32][upper, lower][16][32], and prefetches the rows after them.
BACKFILL_INLINE void pack_rows(const bf16* x, int64_t x_stride, int64_t rows, int64_t next_rows,
                               int64_t depth, bf16* packed) {
  constexpr int64_t kAtOnce = 4 * kUnroll;
  for (int64_t first = 0; first < depth; first += kAtOnce) {
    const int64_t last = std::min(first + kAtOnce, depth);
    for (int64_t row = 0; row < rows; row++)
      for (int64_t k = first; k < last; k += kUnroll)
        _mm512_store_si512(packed + k * kPanel + row * kUnroll, _mm512_loadu_si512(x + row * x_stride + k));
  }
  const bf16* next = x + rows * x_stride;
  for (int64_t row = 0; row < next_rows; row++, next += x_stride)
    for (int64_t k = 0; k < depth; k += kUnroll) _mm_prefetch(next + k, _MM_HINT_T1);
  publish(packed);
}

// 32 rows as tiles of 32 inputs, `step` apart.
struct RowTiles {
  const bf16 *upper, *lower;
  int64_t stride, step;
};

// sums [32, 32] = (continues ? sums : 0) + rows * panel^T
template <bool Lower>
BACKFILL_INLINE void multiply_panel(const bf16* panel, RowTiles rows, int64_t depth, bool continues,
                                    Prefetcher& prefetcher, SumsWriter& writer, float* sums) {
  constexpr int64_t kSumsStride = kPanel * sizeof(float), kTileStride = kUnroll * sizeof(bf16);
  const int64_t row_bytes = rows.stride * (int64_t)sizeof(bf16);
  const int64_t writes = (kPanel * kUnroll + depth - 1) / depth;
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
                                    bool continues, Prefetcher& prefetcher, SumsWriter& writer, float* sums) {
  if (num_rows > 16)
    multiply_panel<true>(panel, rows, depth, continues, prefetcher, writer, sums);
  else
    multiply_panel<false>(panel, rows, depth, continues, prefetcher, writer, sums);
}

// The rows and panels that one thread multiplies.
struct LinearPart {
  int64_t first_row, last_row, first_panel, last_panel;
};

BACKFILL_INLINE void begin_writing(SumsWriter& writer, const LinearArgs& args, const float* sums, int64_t row,
                                   int64_t rows, int64_t panel) {
  const auto* bias = static_cast<const bf16*>(args.bias);
  const int64_t column = panel * kPanel;
  writer.begin(sums, bias == nullptr ? nullptr : bias + column,
               static_cast<bf16*>(args.out) + row * args.out_features + column, args.out_features, rows,
               std::min(kPanel, args.out_features - column));
}

// Each panel is read from memory once and multiplied with all rows, which are not packed.
inline void multiply_few_rows(const LinearArgs& args, const LinearPart& part) {
  const auto* x = static_cast<const bf16*>(args.x);
  const int64_t panel_size = args.in_features * kPanel, x_stride = args.x_stride;
  const auto* weight = static_cast<const bf16*>(args.weight);
  alignas(64) float sums[2][kPanel * kPanel];
  PanelTiles tiles;
  SumsWriter writer;
  Prefetcher prefetcher(weight + part.last_panel * panel_size, (args.rows + kPanel - 1) / kPanel);
  int turn = 0;
  for (int64_t index = part.first_panel; index < part.last_panel; index++) {
    for (int64_t row = part.first_row; row < part.last_row; row += kPanel, turn ^= 1) {
      const int64_t rows = std::min(kPanel, part.last_row - row), upper = std::min<int64_t>(rows, 16);
      tiles.configure(upper, rows - upper);
      const bf16* x_rows = x + row * x_stride;
      multiply_panel(weight + index * panel_size, rows, {x_rows, x_rows + 16 * x_stride, x_stride, kUnroll},
                     args.in_features, false, prefetcher, writer, sums[turn]);
      begin_writing(writer, args, sums[turn], row, rows, index);
    }
  }
  writer.finish();
}

// Rows are packed into tiles that stay in L2 while all panels are read. Deep layers are multiplied in chunks
// of their depth; between chunks the sums are kept in memory, in float.
inline void multiply_many_rows(const LinearArgs& args, const LinearPart& part) {
  const auto* x = static_cast<const bf16*>(args.x);
  const auto* weight = static_cast<const bf16*>(args.weight);
  const int64_t depth = args.in_features, num_chunks = (depth + kMaxChunk - 1) / kMaxChunk;
  const int64_t chunk = round_up((depth + num_chunks - 1) / num_chunks, kUnroll);
  const int64_t block = std::min(round_up(part.last_row - part.first_row, kPanel),
                                 std::max(kPanel, kPackedSize / chunk / kPanel * kPanel));
  const bool sums_wait = num_chunks > 1;
  const int64_t panel_sums = block * kPanel, num_panels = part.last_panel - part.first_panel;
  const int64_t group =
      sums_wait ? std::min(num_panels, std::max<int64_t>(1, kSumsSize / panel_sums)) : num_panels;
  const int64_t packed_bytes = block * chunk * (int64_t)sizeof(bf16);
  const int64_t num_sums = sums_wait ? group * panel_sums : 2 * kPanel * kPanel;
  auto* packed = static_cast<bf16*>(scratch(kWork, packed_bytes + num_sums * sizeof(float)));
  auto* all_sums = reinterpret_cast<float*>(packed + block * chunk);
  PanelTiles tiles;
  tiles.configure(16, 16);
  SumsWriter writer;
  int64_t turn = 0;

  // One function: as a lambda that was not inlined, the inner loops took up to a tenth longer.
  for (int64_t first_row = part.first_row; first_row < part.last_row; first_row += block) {
    const int64_t last_row = std::min(first_row + block, part.last_row);
    for (int64_t first = part.first_panel; first < part.last_panel; first += group) {
      const int64_t last = std::min(first + group, part.last_panel);
      for (int64_t k = 0; k < depth; k += chunk) {
        const int64_t length = std::min(chunk, depth - k);
        Prefetcher prefetcher(weight + last * depth * kPanel, (last_row - first_row + kPanel - 1) / kPanel);
        for (int64_t index = first; index < last; index++) {
          for (int64_t row = first_row; row < last_row; row += kPanel, turn ^= 1) {
            const int64_t rows = std::min(kPanel, last_row - row), offset = row - first_row;
            bf16* tiles_of_rows = packed + offset * chunk;
            if (index == first)
              pack_rows(x + row * args.x_stride + k, args.x_stride, rows,
                        std::min(kPanel, part.last_row - row - rows), length, tiles_of_rows);
            float* sums = all_sums + (sums_wait ? (index - first) * panel_sums + offset * kPanel
                                                : turn * kPanel * kPanel);
            multiply_panel(weight + (index * depth + k) * kPanel, rows,
                           {tiles_of_rows, tiles_of_rows + kTile, kUnroll, 2 * kTile}, length, k > 0,
                           prefetcher, writer, sums);
            if (k + length == depth) begin_writing(writer, args, sums, row, rows, index);
          }
        }
      }
      if (sums_wait) writer.finish();  // before the next group overwrites the sums
    }
  }
  writer.finish();
}

// The thread's part in the grid of threads with the least cost.
BACKFILL_INLINE LinearPart part_of(int64_t thread, int64_t num_threads, int64_t rows, int64_t num_panels) {
  const int64_t num_blocks = (rows + kPanel - 1) / kPanel;
  int64_t best_cost = INT64_MAX, across = 1;
  for (int64_t rows_parts = 1; rows_parts <= num_threads; rows_parts++) {
    const int64_t blocks = (num_blocks + rows_parts - 1) / rows_parts;
    const int64_t panel_parts = num_threads / rows_parts;
    const int64_t panels = (num_panels + panel_parts - 1) / panel_parts;
    const int64_t cost = blocks * panels + kPackCost * blocks + kReadCost * panels;
    if (cost < best_cost) best_cost = cost, across = rows_parts;
  }
  const int64_t down = num_threads / across;
  if (thread >= across * down) return {0, 0, 0, 0};
  const int64_t i = thread / down, j = thread % down;
  return {num_blocks * i / across * kPanel, std::min(rows, num_blocks * (i + 1) / across * kPanel),
          num_panels * j / down, num_panels * (j + 1) / down};
}

inline void linear(const LinearArgs& args) {
  if (args.rows == 0) return;
  const int64_t num_panels = (args.out_features + kPanel - 1) / kPanel;
  RegionError error;
#pragma omp parallel
  {
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    if (args.rows <= kFewRows) {
      const int64_t first = num_panels * thread / num_threads, last = num_panels * (thread + 1) / num_threads;
      multiply_few_rows(args, {0, args.rows, first, last});
    } else {
      const LinearPart part = part_of(thread, num_threads, args.rows, num_panels);
      if (part.first_row < part.last_row && part.first_panel < part.last_panel) {
        try {
          multiply_many_rows(args, part);
        } catch (...) {
          error.keep();
        }
      }
    }
  }
  error.rethrow();
}

}  // namespace backfill::BACKFILL_VARIANT

#endif
