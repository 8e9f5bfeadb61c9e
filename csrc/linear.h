// y [rows, out] = x [rows, in] * weight^T + bias, for a weight packed into panels.
//
// A panel holds 32 outputs: [in / 32][2][16][16] units of 32 bits (simd.h), for every 16 units of inputs two
// tiles of 16 outputs. A unit of a bf16 weight is two neighbouring inputs, as tdpbf16ps and vdpbf16ps read
// them; without either the halves are widened to floats by a shift and a mask. A float weight has
// [in / 16][2][16][16].
//
// This file divides the work: threads share rows and panels, as many rows as the second-level cache holds stay
// there while all panels are read, and deep layers are multiplied in chunks of their depth.
// A `Product` (linear_vectors.h, linear_tiles.h) multiplies a few rows and a panel. It sums a row's
// inputs in one fixed order, so a result depends neither on the number of rows nor on its row's index.
//
// A gated weight has panels of gates and of what they multiply in turn. The sums of a panel of gates wait for those of
// the next panel, in the second-level cache: what comes between, twice as wide as the result, is never written as rows.
//
// With few rows, memory bandwidth bounds the product. Hardware prefetching reaches two thirds of it
// (measured), so panels are prefetched in software, while others are multiplied.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "parallel.h"
#include "rowwise.h"
#include "scratch.h"
#include "simd.h"

namespace backfill::BACKFILL_VARIANT {

constexpr int64_t kPanel = 32;                    // outputs of a panel
constexpr int64_t kTileUnits = 16;                // units of inputs of a tile
constexpr int64_t kTileFloats = kTileUnits * 16;  // a tile's 32-bit units
constexpr int64_t kSumsSize = 512 << 10;          // sums kept in memory between chunks of the depth

constexpr int64_t kChunkInputs = 32;  // what a chunk of the depth is a multiple of

// Inputs of a tile: what in_features is a multiple of.
template <class T>
constexpr int64_t kTileInputs = kTileUnits * 4 / (int64_t)sizeof(T);

// Prefetches a thread's panels, which are contiguous.
class Prefetcher {
 public:
  // Each panel is read `num_reads` times, and the prefetch of the next one is spread over these reads: memory
  // then delivers while the product computes. It is never further ahead of what is read than two panels.
  Prefetcher(const void* end, int64_t num_reads, int64_t panel_bytes, int64_t round_bytes = kAhead)
      : end_((const char*)end),
        farthest_(2 * panel_bytes + kAhead),
        round_lines_((round_bytes + kLine - 1) / kLine),
        lines_(std::max<int64_t>(1, round_lines_ / num_reads)) {}

  // Called once for every `round_bytes` read, by default two tiles.
  BACKFILL_INLINE void ask(const void* reading) {
    const char* nearest = (const char*)reading + kAhead;
    int64_t lines = lines_;
    if (next_ < nearest) {
      next_ = nearest;
      lines = round_lines_;
    }
    if (next_ + lines * kLine > end_ || next_ > (const char*)reading + farthest_) return;
    for (int64_t line = 0; line < lines; line++, next_ += kLine) __builtin_prefetch(next_);
  }

 private:
  static constexpr int64_t kLine = 64, kAhead = 2 * kTileFloats * 4;

  const char* next_ = nullptr;
  const char* end_;
  int64_t farthest_, round_lines_, lines_;
};

// Adds the bias to a block's sums [rows, 32], multiplies them by silu of those of gates if there are any, and writes
// them, with AMX while the next block is multiplied: written at once, they would stall the tiles (2,048 rows of 576
// inputs took a third less without writing).
template <class T>
class SumsWriter {
 public:
  // `gates`: null, or sums as many; `gate_bias` is theirs.
  void begin(const float* sums, const T* bias, const float* gates, const T* gate_bias, T* y, int64_t y_stride,
             int64_t rows, int64_t columns) {
    finish();
    sums_ = sums;
    gates_ = gates;
    y_ = y;
    y_stride_ = y_stride;
    rows_ = rows;
    columns_ = columns;
    load_bias(bias, bias_);
    load_bias(gate_bias, gate_bias_);
  }

  BACKFILL_INLINE void write_row() {
    if (rows_ == 0) return;
    for (int v = 0; v < kVectors; v++) {
      const int64_t left = columns_ - v * kLanes;
      if (left <= 0) break;
      Floats sums = load(sums_ + v * kLanes) + bias_[v];
      if (gates_ != nullptr) {
        const Floats gate = load(gates_ + v * kLanes) + gate_bias_[v];
        sums = silu<T>(rounded_like(gate, y_)) * rounded_like(sums, y_);
      }
      if (left >= kLanes)
        store(y_ + v * kLanes, sums);
      else
        store(y_ + v * kLanes, sums, left);
    }
    sums_ += kPanel;
    if (gates_ != nullptr) gates_ += kPanel;
    y_ += y_stride_;
    rows_--;
  }

  void finish() {
    while (rows_ > 0) write_row();
  }

 private:
  static constexpr int kVectors = kPanel / kLanes;

  void load_bias(const T* bias, Floats* loaded) const {
    for (int v = 0; v < kVectors; v++) {
      const int64_t left = columns_ - v * kLanes;
      loaded[v] = bias == nullptr || left <= 0 ? Floats{} : load(bias + v * kLanes, left);
    }
  }

  const float *sums_ = nullptr, *gates_ = nullptr;
  T* y_ = nullptr;
  int64_t y_stride_ = 0, rows_ = 0, columns_ = 0;
  Floats bias_[kVectors] = {}, gate_bias_[kVectors] = {};
};

// The rows and panels that one thread multiplies.
struct LinearPart {
  int64_t first_row, last_row, first_panel, last_panel;
};

// `gates`: sums of the panel before this one, of a gated weight.
template <class T>
BACKFILL_INLINE void begin_writing(SumsWriter<T>& writer, const LinearArgs& args, const float* sums,
                                   const float* gates, int64_t row, int64_t rows, int64_t panel) {
  const auto* bias = static_cast<const T*>(args.bias);
  const int64_t width = args.is_gated ? args.out_features / 2 : args.out_features;
  const int64_t column = (args.is_gated ? panel / 2 : panel) * kPanel;
  const T* gate_bias = bias == nullptr || gates == nullptr ? nullptr : bias + column;
  if (bias != nullptr) bias += args.is_gated ? width + column : column;
  writer.begin(sums, bias, gates, gate_bias, static_cast<T*>(args.out) + row * width + column, width, rows,
               std::min(kPanel, width - column));
}

// A weight whose tiles lie in memory as the products read them.
template <class T>
class PlainWeight {
 public:
  explicit PlainWeight(const LinearArgs& args)
      : weight_(static_cast<const T*>(args.weight)), depth_(args.in_features) {}

  // Inputs that `tiles` gives at once, with so many groups of rows.
  int64_t step(int64_t) const { return depth_; }

  // Inputs [first, first + inputs) of a panel.
  const T* tiles(int64_t panel, int64_t first, int64_t) const {
    return weight_ + (panel * depth_ + first) * kPanel;
  }

  Prefetcher prefetcher(int64_t last_panel, int64_t num_reads) const {
    const int64_t panel = depth_ * kPanel;
    return Prefetcher(weight_ + last_panel * panel, num_reads, panel * (int64_t)sizeof(T));
  }

 private:
  const T* weight_;
  int64_t depth_;
};

// Inputs of a few rows, as they lie in x and as a product has packed them.
template <class T>
struct InputRows {
  const T* x;
  int64_t x_stride, count;
  const void* packed;
};

// Rows [count, depth] of x, of which inputs [first, first + inputs) are packed.
template <class T>
struct RowsToPack {
  const T* x;
  int64_t x_stride, count, depth, first, inputs;
  int64_t next_count;  // rows after these, of the same call
};

// Of one call; sizes in bytes are multiples of 64.
//   T                              type of x and out
//   kRows                          rows multiplied at once
//   kCachedBytes, kMaxChunk        bytes of rows that stay in the second-level cache; inputs of a chunk of rows
//                                  that do not
//   kPackCost, kReadCost           cost of packing kRows rows, and of the first read of a panel; the unit is
//                                  a product of kRows rows and a panel
//   packed_bytes(inputs)           what `pack` makes of kRows rows
//   cached_bytes(inputs)           what is read of kRows rows for each panel
//   pack(RowsToPack, packed)
//   packed_at(packed, rows, first)                        where input `first` of packed rows is
//   multiply(tiles, InputRows, inputs, continues, prefetcher, writer, sums [kRows, 32])
template <class Product, class Weight>
void multiply_part(const LinearArgs& args, const LinearPart& part, Weight weight) {
  using T = typename Product::T;
  constexpr int64_t kRows = Product::kRows;
  const auto* x = static_cast<const T*>(args.x);
  const int64_t depth = args.in_features, row_groups = (part.last_row - part.first_row + kRows - 1) / kRows;
  // Rows that stay in the cache whole are not divided: panels are then read, and prefetched, in order.
  const bool fits = row_groups * Product::cached_bytes(depth) <= Product::kCachedBytes;
  const int64_t num_chunks = fits ? 1 : (depth + Product::kMaxChunk - 1) / Product::kMaxChunk;
  const int64_t chunk = round_up((depth + num_chunks - 1) / num_chunks, kChunkInputs);
  const int64_t group_bytes = Product::packed_bytes(chunk);
  const int64_t most_groups = std::max<int64_t>(1, Product::kCachedBytes / Product::cached_bytes(chunk));
  const int64_t num_blocks = (row_groups + most_groups - 1) / most_groups;
  const int64_t block = kRows * ((row_groups + num_blocks - 1) / num_blocks);
  const int64_t step = weight.step(row_groups);
  const bool sums_wait = num_chunks > 1, in_steps = step < chunk, gated = args.is_gated;
  const int64_t panel_sums = block * kPanel, num_panels = part.last_panel - part.first_panel;
  const int64_t group =
      sums_wait ? std::min(num_panels, std::max<int64_t>(2, kSumsSize / panel_sums & -2)) : num_panels;
  // Sums of whole panels in turn. Those of a pair may still be written while the next pair is multiplied.
  const int64_t num_kept = gated ? 4 : in_steps ? 2 : 0;
  const int64_t packed_bytes = block / kRows * group_bytes;
  const int64_t num_sums = sums_wait  ? group * panel_sums
                           : num_kept ? num_kept * panel_sums
                                      : 2 * kRows * kPanel;
  auto* packed = static_cast<char*>(scratch(kWork, packed_bytes + num_sums * sizeof(float)));
  auto* all_sums = reinterpret_cast<float*>(packed + packed_bytes);
  Product product;
  SumsWriter<T> writer;
  int64_t turn = 0;

  // One function: as a lambda that was not inlined, the inner loops took up to a tenth longer.
  for (int64_t first_row = part.first_row; first_row < part.last_row; first_row += block) {
    const int64_t last_row = std::min(first_row + block, part.last_row);
    for (int64_t first = part.first_panel; first < part.last_panel; first += group) {
      const int64_t last = std::min(first + group, part.last_panel);
      for (int64_t k = 0; k < depth; k += chunk) {
        const int64_t length = std::min(chunk, depth - k);
        Prefetcher prefetcher = weight.prefetcher(last, (last_row - first_row + kRows - 1) / kRows);
        for (int64_t index = first; index < last; index++) {
          for (int64_t done = 0; done < length; done += step) {
            const int64_t inputs = std::min(step, length - done);
            auto* tiles = weight.tiles(index, k + done, inputs);
            for (int64_t row = first_row; row < last_row; row += kRows, turn ^= 1) {
              const int64_t rows = std::min(kRows, last_row - row), offset = row - first_row;
              const T* x_rows = x + row * args.x_stride + k;
              char* packed_rows = packed + offset / kRows * group_bytes;
              if (index == first && done == 0)
                Product::pack(RowsToPack<T>{x + row * args.x_stride, args.x_stride, rows, depth, k, length,
                                            std::min(kRows, part.last_row - row - rows)},
                              packed_rows);
              float* sums = all_sums + (sums_wait  ? (index - first) * panel_sums + offset * kPanel
                                        : num_kept ? index % num_kept * panel_sums + offset * kPanel
                                                   : turn * kRows * kPanel);
              product.multiply(tiles,
                               InputRows<T>{x_rows + done, args.x_stride, rows,
                                            Product::packed_at(packed_rows, rows, done)},
                               inputs, k + done > 0, prefetcher, writer, sums);
              if (k + done + inputs == depth && (!gated || index & 1))
                begin_writing(writer, args, sums, gated ? sums - panel_sums : nullptr, row, rows, index);
            }
          }
        }
      }
      if (sums_wait || num_kept) writer.finish();  // before sums are overwritten
    }
  }
  writer.finish();
}

// The thread's part in the grid of threads with the least cost. Of `unit` panels all or none are a thread's.
template <class Product>
LinearPart part_of(int64_t thread, int64_t num_threads, int64_t rows, int64_t num_panels, int64_t unit) {
  constexpr int64_t kRows = Product::kRows;
  const int64_t num_blocks = (rows + kRows - 1) / kRows;
  double best_cost = 0.0;
  int64_t across = 0;
  for (int64_t rows_parts = 1; rows_parts <= num_threads; rows_parts++) {
    const int64_t blocks = (num_blocks + rows_parts - 1) / rows_parts;
    const int64_t panel_parts = num_threads / rows_parts;
    const int64_t panels = unit * ((num_panels / unit + panel_parts - 1) / panel_parts);
    const double cost =
        (double)(blocks * panels) + Product::kPackCost * (double)blocks + Product::kReadCost * (double)panels;
    if (across == 0 || cost < best_cost) best_cost = cost, across = rows_parts;
  }
  const int64_t down = num_threads / across;
  if (thread >= across * down) return {0, 0, 0, 0};
  const int64_t i = thread / down, j = thread % down;
  const int64_t num_units = num_panels / unit;
  return {num_blocks * i / across * kRows, std::min(rows, num_blocks * (i + 1) / across * kRows),
          num_units * j / down * unit, num_units * (j + 1) / down * unit};
}

// Runs `multiply` with each thread's part.
template <class Product, class Multiply>
void for_each_part(const LinearArgs& args, const Multiply& multiply) {
  if (args.rows == 0) return;
  const int64_t num_panels = (args.out_features + kPanel - 1) / kPanel, unit = args.is_gated ? 2 : 1;
  on_threads(max_threads(), [&](int64_t thread, int64_t threads) {
    const LinearPart part = part_of<Product>(thread, threads, args.rows, num_panels, unit);
    if (part.first_row < part.last_row && part.first_panel < part.last_panel) multiply(part);
  });
}

}  // namespace backfill::BACKFILL_VARIANT
