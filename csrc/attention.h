// Attention over a flat batch: cuts it into independent items and shares them among the threads. How it is
// cut changes no result (softmax.h).
#pragma once

#include "decode_tiles.h"
#include "parallel.h"
#include "prefill.h"

namespace backfill::BACKFILL_VARIANT {

// Shorter calls run on the calling thread alone: waking the others takes longer.
constexpr double kParallelNanoseconds = 6000;
constexpr int64_t kMinSplit = 256;   // fewest keys in a part of a split context
constexpr int64_t kMaxSplit = 8192;  // most keys in a part: their scores fit a core's own cache
constexpr int64_t kItemsPerThread = 4;

enum class Work : int32_t { kPrefill, kDecode, kDecodePart };

struct Item {
  Work work;
  int32_t seq, kv_head;
  int32_t begin, end;  // query rows of the sequence (prefill) or keys (decode)
  int32_t part;        // index of the first chunk's partial result
};

// A sequence whose context is split: for each kv head, the partial results of its chunks in order.
struct Split {
  int32_t seq, num_chunks, first_part;
};

struct Plan {
  Item* items;
  Split* splits;
  float* partials;
  int64_t num_items, num_splits, num_parts;
};

struct Totals {
  int64_t decode_keys = 0, decode_seqs = 0, prefill_seqs = 0;
  double nanoseconds = 0;
};

BACKFILL_INLINE int64_t num_rows(const AttentionArgs& args, int64_t seq) {
  return args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq];
}

// Times are rough figures of one core, which suffice to decide whether to wake other threads.
BACKFILL_INLINE Totals measure(const AttentionArgs& args, int64_t element_bytes) {
  Totals totals;
  const PoolShape& shape = args.shape;
  for (int64_t seq = 0; seq < args.num_seqs; seq++) {
    const int64_t rows = num_rows(args, seq), context = args.seq_lens[seq];
    if (rows == 1) {
      totals.decode_seqs++;
      totals.decode_keys += context;
      totals.nanoseconds += 0.1 * (double)(context * shape.num_kv_heads * shape.head_dim * 2 * element_bytes);
    } else if (rows > 1) {
      totals.prefill_seqs++;
      totals.nanoseconds += 0.01 * (double)(rows * context * args.num_heads * shape.head_dim);
    }
  }
  return totals;
}

// Most keys of one decode item.
BACKFILL_INLINE int64_t split_size(const Totals& totals, int64_t num_kv_heads, int threads) {
  if (threads == 1) return kMaxSplit;
  const int64_t share = totals.decode_keys * num_kv_heads / (threads * kItemsPerThread);
  return smaller(kMaxSplit, larger(kMinSplit, share));
}

BACKFILL_INLINE int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Query rows of one prefill item: few enough that every thread gets several, and at least a tile of queries.
BACKFILL_INLINE int64_t rows_per_item(const AttentionArgs& args, const Totals& totals, int64_t rows,
                                      int threads) {
  const int64_t group = args.num_heads / args.shape.num_kv_heads;
  const int64_t most = larger<int64_t>(1, max_prefill_queries(args.shape.head_dim) / group);
  const int64_t least = smaller(most, ceil_divide(kTileQueries, group));
  const int64_t wanted =
      threads == 1 ? 1
                   : ceil_divide(kItemsPerThread * threads, args.shape.num_kv_heads * totals.prefill_seqs);
  return larger(least, smaller(most, ceil_divide(rows, wanted)));
}

// Long items first, so that the threads finish together: prefill before decode, late rows before early.
BACKFILL_INLINE void plan_prefill(const AttentionArgs& args, const Totals& totals, int threads, Plan& plan) {
  for (int64_t seq = 0; seq < args.num_seqs; seq++) {
    const int64_t rows = num_rows(args, seq);
    if (rows <= 1) continue;
    const int64_t step = rows_per_item(args, totals, rows, threads);
    for (int64_t end = rows; end > 0; end -= smaller(end, step))
      for (int64_t g = 0; g < args.shape.num_kv_heads; g++)
        plan.items[plan.num_items++] = {Work::kPrefill, (int32_t)seq,
                                        (int32_t)g,     (int32_t)larger<int64_t>(0, end - step),
                                        (int32_t)end,   0};
  }
}

BACKFILL_INLINE void plan_decode(const AttentionArgs& args, int64_t most_keys, Plan& plan) {
  for (int64_t seq = 0; seq < args.num_seqs; seq++) {
    if (num_rows(args, seq) != 1) continue;
    const int64_t context = args.seq_lens[seq], chunks = ceil_divide(context, kChunk);
    const int64_t count = ceil_divide(context, most_keys);
    if (count > 1) plan.splits[plan.num_splits++] = {(int32_t)seq, (int32_t)chunks, (int32_t)plan.num_parts};
    const int64_t step = round_up(ceil_divide(context, count), kChunk);
    for (int64_t g = 0; g < args.shape.num_kv_heads; g++) {
      for (int64_t begin = 0; begin < context; begin += step)
        plan.items[plan.num_items++] = {count > 1 ? Work::kDecodePart : Work::kDecode,
                                        (int32_t)seq,
                                        (int32_t)g,
                                        (int32_t)begin,
                                        (int32_t)smaller(context, begin + step),
                                        (int32_t)(plan.num_parts + begin / kChunk)};
      if (count > 1) plan.num_parts += chunks;
    }
  }
}

// Allocates every item, split and partial result that `plan_prefill` and `plan_decode` make.
BACKFILL_INLINE Plan empty_plan(const AttentionArgs& args, const Totals& totals, int64_t most_keys,
                                int threads) {
  int64_t items = 0, splits = 0, parts = 0;
  for (int64_t seq = 0; seq < args.num_seqs; seq++) {
    const int64_t rows = num_rows(args, seq);
    if (rows == 1) {
      const int64_t count = ceil_divide(args.seq_lens[seq], most_keys);
      items += count;
      if (count > 1) splits++, parts += ceil_divide(args.seq_lens[seq], kChunk);
    } else if (rows > 1) {
      items += ceil_divide(rows, rows_per_item(args, totals, rows, threads));
    }
  }
  const int64_t heads = args.shape.num_kv_heads, group = args.num_heads / heads;
  const int64_t item_bytes = round_up(items * heads * (int64_t)sizeof(Item), 64);
  const int64_t split_bytes = round_up(splits * (int64_t)sizeof(Split), 64);
  const int64_t partial_bytes =
      parts * heads * group * partial_size(args.shape.head_dim) * (int64_t)sizeof(float);
  char* memory = static_cast<char*>(scratch(kPlan, item_bytes + split_bytes + partial_bytes));
  return {reinterpret_cast<Item*>(memory),
          reinterpret_cast<Split*>(memory + item_bytes),
          reinterpret_cast<float*>(memory + item_bytes + split_bytes),
          0,
          0,
          0};
}

template <class T, class Kv>
void run_item(const AttentionArgs& args, const Plan& plan, const Item& item) {
  const int64_t group = args.num_heads / args.shape.num_kv_heads;
  float* partials = item.work == Work::kDecodePart
                        ? plan.partials + item.part * group * partial_size(args.shape.head_dim)
                        : nullptr;
#if defined(__AMX_BF16__)
  if constexpr (kPaired<T>)
    if (uses_tiles<T>(args)) {
      if (item.work == Work::kPrefill)
        return PrefillItem<T, Kv, true>(args, item.seq, item.kv_head, item.begin, item.end).run();
      return decode_tiles<Kv>(args, item.seq, item.kv_head, item.begin, item.end, partials);
    }
#endif
  if (item.work == Work::kPrefill)
    return PrefillItem<T, Kv, false>(args, item.seq, item.kv_head, item.begin, item.end).run();
  DecodeItem<T, Kv>(args, item.seq, item.kv_head).run(item.begin, item.end, partials);
}

template <class T>
void merge_split(const AttentionArgs& args, const Plan& plan, const Split& split) {
  const int64_t dim = args.shape.head_dim, size = partial_size(dim);
  const int64_t group = args.num_heads / args.shape.num_kv_heads;
  T* out = static_cast<T*>(args.out) + args.cu_seqlens_q[split.seq] * args.num_heads * dim;
  for (int64_t head = 0; head < args.num_heads; head++) {
    const int64_t first = split.first_part + head / group * split.num_chunks;
    float* partials = plan.partials + (first * group + head % group) * size;
    merge_partials(partials, split.num_chunks, group * size, out + head * dim, dim);
  }
}

// Rows of T, KV of T or int8.
template <class T, class Kv>
void attention(const AttentionArgs& args) {
  const Totals totals = measure(args, sizeof(Kv));
  const int threads = totals.nanoseconds < kParallelNanoseconds ? 1 : max_threads();
  const int64_t most_keys = split_size(totals, args.shape.num_kv_heads, threads);
  Plan plan = empty_plan(args, totals, most_keys, threads);
  plan_prefill(args, totals, threads, plan);
  plan_decode(args, most_keys, plan);
  int64_t next = 0;
  on_threads(threads, [&](int64_t, int64_t) {
    for (;;) {
      const int64_t i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (i >= plan.num_items) break;
      run_item<T, Kv>(args, plan, plan.items[i]);
    }
  });
  if (plan.num_splits == 0) return;
  on_threads(threads, [&](int64_t thread, int64_t num_threads) {
    for (int64_t i = thread; i < plan.num_splits; i += num_threads)
      merge_split<T>(args, plan, plan.splits[i]);
  });
}

}  // namespace backfill::BACKFILL_VARIANT
