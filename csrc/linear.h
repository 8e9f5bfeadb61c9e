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

#include "tile_product.h"

namespace backfill::BACKFILL_VARIANT {

constexpr int64_t kPanel = 32;         // outputs of a panel; also the rows multiplied at once
constexpr int64_t kUnroll = 32;        // inputs consumed by one round of tile products
constexpr int64_t kStreamedBytes = 1 << 20;
constexpr int64_t kGroupBytes = 600 << 10;  // of panels that stay in L2 while the rows pass

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
                                int64_t columns, bool streams) {
  const int64_t left = std::min<int64_t>(columns, kLanes), right = columns - left;
  const Floats left_bias = bias == nullptr ? Floats{} : load(bias, left);
  const Floats right_bias = bias == nullptr ? Floats{} : load(bias + kLanes, right);
  for (int64_t row = 0; row < rows; row++, sums += kPanel, y += y_stride) {
    const Floats a = load(sums) + left_bias, b = load(sums + kLanes) + right_bias;
    if (columns == kPanel) {
      const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
      if (streams)
        _mm512_stream_si512((__m512i*)y, both);
      else
        _mm512_storeu_si512(y, both);
    } else {
      store(y, a, left);
      store(y + kLanes, b, right);
    }
  }
}

inline void linear(const LinearArgs& args) {
  if (args.rows == 0) return;
  const auto* x = static_cast<const bf16*>(args.x);
  const auto* weight = static_cast<const bf16*>(args.weight);
  const auto* bias = static_cast<const bf16*>(args.bias);
  auto* y = static_cast<bf16*>(args.out);
  const int64_t num_panels = (args.out_features + kPanel - 1) / kPanel;
  // Past the caches by non-temporal stores, where the output would not stay there: rows far apart fall into
  // few cache sets, and each line would be read before it is written.
  const bool streams = args.rows * args.out_features * (int64_t)sizeof(bf16) > kStreamedBytes &&
                       args.out_features % kPanel == 0 && (uintptr_t)y % 64 == 0;
  const int64_t panel_bytes = args.in_features * kPanel * (int64_t)sizeof(bf16);
#pragma omp parallel
  {
    alignas(64) float sums[kPanel * kPanel];
    PanelTiles tiles;
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t end = num_panels * (thread + 1) / num_threads;
    const int64_t num_row_blocks = (args.rows + kPanel - 1) / kPanel;
    const int64_t group = std::max<int64_t>(1, std::min(num_row_blocks, kGroupBytes / panel_bytes));
    Prefetcher prefetcher(weight + end * args.in_features * kPanel, num_row_blocks);
    for (int64_t first = num_panels * thread / num_threads; first < end; first += group) {
      const int64_t last = std::min(first + group, end);
      for (int64_t row = 0; row < args.rows; row += kPanel) {
        const int64_t rows = std::min(kPanel, args.rows - row);
        const int64_t upper = std::min<int64_t>(rows, 16), lower = rows - upper;
        const bf16* x_rows = x + row * args.x_stride;
        tiles.configure(upper, lower);
        for (int64_t index = first; index < last; index++) {
          const bf16* panel = weight + index * args.in_features * kPanel;
          const int64_t column = index * kPanel;
          if (lower > 0)
            multiply_panel<true>(panel, x_rows, args.x_stride, args.in_features, prefetcher, sums);
          else
            multiply_panel<false>(panel, x_rows, args.x_stride, args.in_features, prefetcher, sums);
          store_sums(sums, bias == nullptr ? nullptr : bias + column, y + row * args.out_features + column,
                     args.out_features, rows, std::min(kPanel, args.out_features - column), streams);
        }
      }
    }
    if (streams) _mm_sfence();  // the barrier does not order non-temporal stores
  }
}

}  // namespace backfill::BACKFILL_VARIANT

#endif
