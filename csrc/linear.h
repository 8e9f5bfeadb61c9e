// y [rows, out] = x [rows, in] * weight^T + bias in AMX tiles, for a weight packed into panels.
//
// A panel holds 32 outputs: [in / 2][32][2], pairs of inputs side by side as tdpbf16ps reads them. With few
// rows the product is as fast as memory delivers the weight; the hardware's own prefetching reaches two
// thirds of that (measured), so each panel is asked for ahead while its first rows are multiplied.
// A row's result depends on neither the number of rows nor its place among them: the order of its sums is
// fixed.
#pragma once

#include "kernels.h"

#if defined(__AMX_BF16__)

#include <omp.h>

#include <algorithm>

#include "scratch.h"
#include "tile_product.h"

namespace backfill::BACKFILL_VARIANT {

constexpr int64_t kPanel = 32;         // outputs of a panel; also the rows multiplied at once
constexpr int64_t kUnroll = 32;        // inputs consumed by one round of tile products
constexpr int64_t kFewRows = 64;
constexpr int64_t kMaxChunk = 2304;        // inputs of a chunk
constexpr int64_t kPackedSize = 256 << 10;  // elements of packed rows, which stay in L2
constexpr int64_t kSumsSize = 512 << 10;
constexpr int64_t kPackCost = 2, kReadCost = 2;

// Tiles 0 to 3: sums of (upper rows, lower rows) x (left, right half of the panel); 4, 5: rows of x; 6, 7: the
// panel's halves. `upper` and `lower` rows, at most 16 each, are in use.
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

// Asks for a thread's panels, which lie one after another, ahead of their use.
class Prefetcher {
 public:
  // Each panel is read `num_reads` times, so that is over how many reads asking for the following ones is
  // spread: memory then delivers while the tiles compute.
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

template <bool Lower>
BACKFILL_INLINE void multiply_panel(const bf16* panel, const bf16* x, int64_t x_stride, int64_t depth,
                                    Prefetcher& prefetcher, float* sums) {
  constexpr int64_t kSumsStride = kPanel * sizeof(float), kPanelStride = kPanel * 2 * sizeof(bf16);
  const int64_t x_bytes = x_stride * (int64_t)sizeof(bf16);
  const bf16* x_lower = x + 16 * x_stride;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Lower) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += kUnroll, panel += kUnroll * kPanel) {
    prefetcher.ask(panel);
    _tile_loadd(4, x + k, x_bytes);
    _tile_loadd(6, panel, kPanelStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 32, kPanelStride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Lower) {
      _tile_loadd(5, x_lower + k, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kSumsStride);
  _tile_stored(1, sums + 16, kSumsStride);
  if constexpr (Lower) {
    _tile_stored(2, sums + 16 * kPanel, kSumsStride);
    _tile_stored(3, sums + 16 * kPanel + 16, kSumsStride);
  }
  publish(sums);
}

BACKFILL_INLINE void store_sums(const float* sums, const bf16* bias, bf16* y, int64_t y_stride, int64_t rows,
                                int64_t columns) {
  const int64_t left = std::min<int64_t>(columns, kLanes), right = columns - left;
  const Floats left_bias = bias == nullptr ? Floats{} : load(bias, left);
  const Floats right_bias = bias == nullptr ? Floats{} : load(bias + kLanes, right);
  for (int64_t row = 0; row < rows; row++, sums += kPanel, y += y_stride) {
    const Floats a = load(sums) + left_bias, b = load(sums + kLanes) + right_bias;
    if (columns == kPanel) {
      const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
      _mm512_storeu_si512(y, both);
    } else {
      store(y, a, left);
      store(y + kLanes, b, right);
    }
  }
}

// Some rows times some panels, on one thread.
struct LinearPart {
  int64_t first_row, last_row, first_panel, last_panel;
};

// Few rows: each panel comes from memory and is multiplied with all of them.
inline void multiply_few_rows(const LinearArgs& args, const LinearPart& part) {
  const auto* x = static_cast<const bf16*>(args.x);
  const auto* weight = static_cast<const bf16*>(args.weight);
  const auto* bias = static_cast<const bf16*>(args.bias);
  auto* y = static_cast<bf16*>(args.out);
  alignas(64) float sums[kPanel * kPanel];
  PanelTiles tiles;
  const int64_t num_row_blocks = (args.rows + kPanel - 1) / kPanel;
  const int64_t panel_size = args.in_features * kPanel;
  Prefetcher prefetcher(weight + part.last_panel * panel_size, num_row_blocks);
  for (int64_t index = part.first_panel; index < part.last_panel; index++) {
    const bf16* panel = weight + index * panel_size;
    const int64_t column = index * kPanel;
    for (int64_t row = 0; row < args.rows; row += kPanel) {
      const int64_t rows = std::min(kPanel, args.rows - row);
      const int64_t upper = std::min<int64_t>(rows, 16), lower = rows - upper;
      const bf16* x_rows = x + row * args.x_stride;
      tiles.configure(upper, lower);
      if (lower > 0)
        multiply_panel<true>(panel, x_rows, args.x_stride, args.in_features, prefetcher, sums);
      else
        multiply_panel<false>(panel, x_rows, args.x_stride, args.in_features, prefetcher, sums);
      store_sums(sums, bias == nullptr ? nullptr : bias + column, y + row * args.out_features + column,
                 args.out_features, rows, std::min(kPanel, args.out_features - column));
    }
  }
}

// Rows as tiles one after another: [depth / 32][upper, lower][16][32].
BACKFILL_INLINE void pack_rows(const bf16* x, int64_t x_stride, int64_t rows, int64_t depth, bf16* packed) {
  constexpr int64_t kAtOnce = 4 * kUnroll;
  for (int64_t first = 0; first < depth; first += kAtOnce) {
    const int64_t last = std::min(first + kAtOnce, depth);
    for (int64_t row = 0; row < rows; row++)
      for (int64_t k = first; k < last; k += kUnroll)
        _mm512_store_si512(packed + k * kPanel + row * kUnroll, _mm512_loadu_si512(x + row * x_stride + k));
  }
}

// Writes a block's sums while the next block is multiplied: the tiles would wait for it.
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

template <bool Lower>
BACKFILL_INLINE void multiply_packed(const bf16* panel, const bf16* x, int64_t depth, bool continues,
                                     Prefetcher& prefetcher, SumsWriter& writer, float* sums) {
  constexpr int64_t kSumsStride = kPanel * sizeof(float), kPanelStride = kPanel * 2 * sizeof(bf16);
  constexpr int64_t kRowsStride = kUnroll * sizeof(bf16), kTile = 16 * kUnroll;
  const int64_t writes = (kPanel * kUnroll + depth - 1) / depth;
  if (continues) {
    _tile_loadd(0, sums, kSumsStride);
    _tile_loadd(1, sums + 16, kSumsStride);
    if constexpr (Lower) {
      _tile_loadd(2, sums + 16 * kPanel, kSumsStride);
      _tile_loadd(3, sums + 16 * kPanel + 16, kSumsStride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Lower) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t k = 0; k < depth; k += kUnroll, panel += kUnroll * kPanel, x += 2 * kTile) {
    prefetcher.ask(panel);
    for (int64_t i = 0; i < writes; i++) writer.write_row();
    _tile_loadd(4, x, kRowsStride);
    _tile_loadd(6, panel, kPanelStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 32, kPanelStride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Lower) {
      _tile_loadd(5, x + kTile, kRowsStride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kSumsStride);
  _tile_stored(1, sums + 16, kSumsStride);
  if constexpr (Lower) {
    _tile_stored(2, sums + 16 * kPanel, kSumsStride);
    _tile_stored(3, sums + 16 * kPanel + 16, kSumsStride);
  }
  publish(sums);
}

// Many rows: blocks of rows, packed, stay in L2, a panel in L1 while they pass. Deep layers go in chunks of
// their depth, between which the sums wait in memory; the order of a sum does not change by it.
inline void multiply_many_rows(const LinearArgs& args, const LinearPart& part) {
  const auto* weight = static_cast<const bf16*>(args.weight);
  const auto* bias = static_cast<const bf16*>(args.bias);
  const int64_t depth = args.in_features, num_chunks = (depth + kMaxChunk - 1) / kMaxChunk;
  const int64_t chunk = round_up((depth + num_chunks - 1) / num_chunks, kUnroll);
  const int64_t num_rows = part.last_row - part.first_row;
  const int64_t block = std::min(round_up(num_rows, kPanel), std::max(kPanel, kPackedSize / chunk / kPanel * kPanel));
  const int64_t block_sums = block * kPanel;
  const int64_t group = num_chunks == 1 ? part.last_panel - part.first_panel
                                        : std::max<int64_t>(1, kSumsSize / block_sums);
  const int64_t packed_bytes = block * chunk * (int64_t)sizeof(bf16);
  char* work = (char*)scratch(kWork, packed_bytes + (num_chunks == 1 ? 2 * kPanel * kPanel : group * block_sums) * sizeof(float));
  auto* packed = (bf16*)work;
  auto* all_sums = (float*)(work + packed_bytes);
  PanelTiles tiles;
  tiles.configure(16, 16);
  SumsWriter writer;
  int64_t turn = 0;
  for (int64_t first_row = part.first_row; first_row < part.last_row; first_row += block) {
    const int64_t last_row = std::min(first_row + block, part.last_row);
    for (int64_t first = part.first_panel; first < part.last_panel; first += group) {
      const int64_t last = std::min(first + group, part.last_panel);
      for (int64_t k = 0; k < depth; k += chunk) {
        const int64_t length = std::min(chunk, depth - k);
        for (int64_t row = first_row; row < last_row; row += kPanel)
          pack_rows(static_cast<const bf16*>(args.x) + row * args.x_stride + k, args.x_stride,
                    std::min(kPanel, last_row - row), length, packed + (row - first_row) * chunk);
        publish(packed);
        Prefetcher prefetcher(weight + last * depth * kPanel, (last_row - first_row + kPanel - 1) / kPanel);
        for (int64_t index = first; index < last; index++) {
          const bf16* panel = weight + (index * depth + k) * kPanel;
          const int64_t column = index * kPanel, columns = std::min(kPanel, args.out_features - column);
          for (int64_t row = first_row; row < last_row; row += kPanel) {
            const int64_t rows = std::min(kPanel, last_row - row);
            const bf16* x_rows = packed + (row - first_row) * chunk;
            float* sums = num_chunks == 1 ? all_sums + (turn++ & 1) * kPanel * kPanel : all_sums + (index - first) * block_sums + (row - first_row) * kPanel;
            if (rows > 16)
              multiply_packed<true>(panel, x_rows, length, k > 0, prefetcher, writer, sums);
            else
              multiply_packed<false>(panel, x_rows, length, k > 0, prefetcher, writer, sums);
            if (k + length == depth)
              writer.begin(sums, bias == nullptr ? nullptr : bias + column,
                         static_cast<bf16*>(args.out) + row * args.out_features + column, args.out_features, rows,
                         columns);
          }
        }
      }
    }
  }
  writer.finish();
}

// How a grid of threads shares the product: the thread's part.
BACKFILL_INLINE LinearPart part_of(int64_t thread, int64_t num_threads, int64_t rows, int64_t num_panels) {
  const int64_t num_blocks = (rows + kPanel - 1) / kPanel;
  int64_t best_cost = INT64_MAX, across = 1;
  for (int64_t rows_parts = 1; rows_parts <= num_threads; rows_parts++) {
    const int64_t blocks = (num_blocks + rows_parts - 1) / rows_parts;
    const int64_t panel_parts = num_threads / rows_parts, panels = (num_panels + panel_parts - 1) / panel_parts;
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
#pragma omp parallel
  {
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    if (args.rows <= kFewRows)
      multiply_few_rows(args, {0, args.rows, num_panels * thread / num_threads, num_panels * (thread + 1) / num_threads});
    else
      multiply_many_rows(args, part_of(thread, num_threads, args.rows, num_panels));
  }
}

}  // namespace backfill::BACKFILL_VARIANT

#endif
