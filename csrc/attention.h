// Attention over a flat batch: cuts it into independent items and shares them among the threads. How it is
// cut changes no result (softmax.h).
#pragma once

#include "decode_tiles.h"
#include "parallel.h"
#include "prefill.h"

namespace backfill::BACKFILL_VARIANT {

// Shorter calls run on the calling thread alone: waking the others takes longer.
constexpr double kParallelNanoseconds = 6000;
constexpr int64_t kMinSplit = 256;  // fewest keys in a part of a split context
constexpr int64_t kItemsPerThread = 4;
// Of a decode item's chunk: with those of the next one it fits a core's own cache.
constexpr int64_t kMostChunkBytes = 128 << 10;

// A sequence whose own keys are split: for each kv head, the partial results of their chunks in order.
struct Split {
  int32_t seq, num_chunks, first_part;
};

struct Plan {
  Item* items;
  Split* splits;
  float* partials;  // [part, query head of the group, partial_size]
  float* shared;    // of shared keys: [sequence, query head, partial_size]
  int64_t num_items, num_splits, num_parts;
};

struct Totals {
  int64_t decode_keys = 0, decode_seqs = 0, prefill_seqs = 0;
  double nanoseconds = 0;
};

BACKFILL_INLINE int64_t num_rows(const AttentionArgs& args, int64_t seq) {
  return args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq];
}

// Keys with which the sequence begins that other decodes read with it.
BACKFILL_INLINE int64_t shared_keys(const AttentionArgs& args, int64_t seq) {
  return args.sharing.lens == nullptr ? 0 : args.sharing.lens[seq];
}

BACKFILL_INLINE double prefill_nanoseconds(const AttentionArgs& args, int64_t rows, int64_t keys) {
  return 0.01 * (double)(rows * keys * args.num_heads * args.shape.head_dim);
}

// Times are rough figures of one core, which suffice to decide whether to wake other threads.
BACKFILL_INLINE Totals measure(const AttentionArgs& args, int64_t element_bytes) {
  Totals totals;
  const PoolShape& shape = args.shape;
  for (int64_t seq = 0; seq < args.num_seqs; seq++) {
    const int64_t rows = num_rows(args, seq), context = args.seq_lens[seq];
    if (rows == 1) {
      const int64_t keys = context - shared_keys(args, seq);
      totals.decode_seqs++;
      totals.decode_keys += keys;
      totals.nanoseconds += 0.1 * (double)(keys * shape.num_kv_heads * shape.head_dim * 2 * element_bytes);
    } else if (rows > 1) {
      totals.prefill_seqs++;
      totals.nanoseconds += prefill_nanoseconds(args, rows, context);
    }
  }
  for (int64_t i = 0; i < args.sharing.num_runs; i++) {
    const SharedRun& run = args.sharing.runs[i];
    totals.nanoseconds += prefill_nanoseconds(args, run.last - run.first, run.end - run.begin);
  }
  return totals;
}

// Most key/value heads and keys of one decode item.
struct DecodeSize {
  int64_t heads, keys;
};

// All heads of an item are read in the order of memory, so it has many, where items are enough for the threads.
BACKFILL_INLINE DecodeSize decode_size(const AttentionArgs& args, const Totals& totals, int64_t element_bytes,
                                       int threads) {
  const int64_t kv_heads = args.shape.num_kv_heads, items = threads * kItemsPerThread;
  const int64_t fitting = kMostChunkBytes / (2 * kChunk * args.shape.row_size * element_bytes);
  const bool are_few = totals.decode_seqs < items && totals.decode_keys < items * kMinSplit;
  const int64_t parts =
      threads > 1 && are_few ? kv_heads : ceil_divide(kv_heads, larger<int64_t>(1, fitting));
  const int64_t heads = ceil_divide(kv_heads, parts);
  const int64_t share = totals.decode_keys * parts / items;
  return {heads, threads == 1 ? larger<int64_t>(1, totals.decode_keys) : larger(kMinSplit, share)};
}

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
        plan.items[plan.num_items++] = {Work::kPrefill,
                                        (int32_t)seq,
                                        (int32_t)g,
                                        1,
                                        (int32_t)larger<int64_t>(0, end - step),
                                        (int32_t)end,
                                        0};
  }
}

// Sharers of one item: those of all items fill tiles of queries alike.
BACKFILL_INLINE int64_t sharers_per_item(const AttentionArgs& args, const SharedRun& run, int threads) {
  const int64_t heads = args.shape.num_kv_heads, group = args.num_heads / heads,
                sharers = run.last - run.first;
  const int64_t most = larger<int64_t>(1, max_prefill_queries(args.shape.head_dim) / group);
  const int64_t tiles = ceil_divide(sharers * group, kTileQueries);
  const int64_t wanted = threads == 1 ? 1 : ceil_divide(2 * threads, heads * args.sharing.num_runs);
  return ceil_divide(sharers, larger(ceil_divide(sharers, most), smaller(wanted, tiles)));
}

// Returns: whether the level has items.
BACKFILL_INLINE bool plan_shared(const AttentionArgs& args, int64_t level, int threads, Plan& plan) {
  for (int64_t i = 0; i < args.sharing.num_runs; i++) {
    const SharedRun& run = args.sharing.runs[i];
    if (run.level != level) continue;
    const int32_t step = (int32_t)sharers_per_item(args, run, threads);
    for (int32_t begin = run.first; begin < run.last; begin += step)
      for (int64_t g = 0; g < args.shape.num_kv_heads; g++)
        plan.items[plan.num_items++] = {
            Work::kShared, (int32_t)i, (int32_t)g, 1, begin, (int32_t)smaller(run.last, begin + step), 0};
  }
  return plan.num_items > 0;
}

// How the keys of a decode that it does not share are cut.
struct DecodeCut {
  int64_t shared, num_chunks, num_items, keys_per_item;
  bool is_split;
};

BACKFILL_INLINE DecodeCut decode_cut(const AttentionArgs& args, int64_t seq, int64_t most_keys) {
  const int64_t shared = shared_keys(args, seq), keys = args.seq_lens[seq] - shared;
  const int64_t items = ceil_divide(keys, most_keys);
  return {shared, ceil_divide(keys, kChunk), items,
          items == 0 ? kChunk : round_up(ceil_divide(keys, items), kChunk),
          items > 1 || (items == 0 && shared > 0)};
}

BACKFILL_INLINE void plan_decode(const AttentionArgs& args, const DecodeSize& size, Plan& plan) {
  for (int64_t seq = 0; seq < args.num_seqs; seq++) {
    if (num_rows(args, seq) != 1) continue;
    const DecodeCut cut = decode_cut(args, seq, size.keys);
    const int64_t context = args.seq_lens[seq];
    if (cut.is_split)
      plan.splits[plan.num_splits++] = {(int32_t)seq, (int32_t)cut.num_chunks, (int32_t)plan.num_parts};
    for (int64_t g = 0; g < args.shape.num_kv_heads; g += size.heads) {
      const int64_t heads = smaller(size.heads, args.shape.num_kv_heads - g);
      for (int64_t begin = cut.shared; begin < context; begin += cut.keys_per_item)
        plan.items[plan.num_items++] = {cut.is_split ? Work::kDecodePart : Work::kDecode,
                                        (int32_t)seq,
                                        (int32_t)g,
                                        (int32_t)heads,
                                        (int32_t)begin,
                                        (int32_t)smaller(context, begin + cut.keys_per_item),
                                        (int32_t)(plan.num_parts + (begin - cut.shared) / kChunk)};
      if (cut.is_split) plan.num_parts += heads * cut.num_chunks;
    }
  }
}

// Allocates every item, split and partial result that the functions above make.
BACKFILL_INLINE Plan empty_plan(const AttentionArgs& args, const Totals& totals, int64_t decode_keys,
                                int threads) {
  int64_t items = 0, splits = 0, parts = 0;
  for (int64_t seq = 0; seq < args.num_seqs; seq++) {
    const int64_t rows = num_rows(args, seq);
    if (rows == 1) {
      const DecodeCut cut = decode_cut(args, seq, decode_keys);
      items += cut.num_items;
      if (cut.is_split) splits++, parts += cut.num_chunks;
    } else if (rows > 1) {
      items += ceil_divide(rows, rows_per_item(args, totals, rows, threads));
    }
  }
  for (int64_t i = 0; i < args.sharing.num_runs; i++) {
    const SharedRun& run = args.sharing.runs[i];
    items += ceil_divide(run.last - run.first, sharers_per_item(args, run, threads));
  }
  const int64_t item_bytes = round_up(items * args.shape.num_kv_heads * (int64_t)sizeof(Item), 64);
  const int64_t split_bytes = round_up(splits * (int64_t)sizeof(Split), 64);
  const int64_t partial_floats = parts * args.num_heads * partial_size(args.shape.head_dim);
  const int64_t shared_floats =
      args.sharing.num_runs == 0 ? 0 : args.num_seqs * args.num_heads * partial_size(args.shape.head_dim);
  char* memory = static_cast<char*>(
      scratch(kPlan, item_bytes + split_bytes + (partial_floats + shared_floats) * (int64_t)sizeof(float)));
  float* partials = reinterpret_cast<float*>(memory + item_bytes + split_bytes);
  return {reinterpret_cast<Item*>(memory),
          reinterpret_cast<Split*>(memory + item_bytes),
          partials,
          partials + partial_floats,
          0,
          0,
          0};
}

// Query rows of a sequence, or decodes of a run.
template <class T, class Kv, bool Tiled>
void run_rows(const AttentionArgs& args, const Plan& plan, const Item& item) {
  const QueryRows rows = item.work == Work::kPrefill
                             ? QueryRows::of_sequence(args, item.seq, item.kv_head, item.begin, item.end)
                             : QueryRows::of_run(args, args.sharing.runs[item.seq], item.kv_head, item.begin,
                                                 item.end, plan.shared);
  PrefillItem<T, Kv, Tiled>(rows).run();
}

// Where a decode's chunks have their partial results, and what it goes on from.
BACKFILL_INLINE DecodeResults decode_results(const AttentionArgs& args, const Plan& plan, const Item& item) {
  const int64_t group = args.num_heads / args.shape.num_kv_heads, shared = shared_keys(args, item.seq);
  const int64_t chunk_floats = group * partial_size(args.shape.head_dim);
  if (item.work == Work::kDecodePart)
    return {plan.partials + item.part * chunk_floats,
            ceil_divide(args.seq_lens[item.seq] - shared, kChunk) * chunk_floats, nullptr};
  return {nullptr, 0,
          item.begin > 0 ? row_partial(args, plan.shared, item.seq, item.kv_head * group) : nullptr};
}

// Returns: the item that it has taken from the queue for its thread, or null.
template <class T, class Kv>
const Item* run_item(const AttentionArgs& args, const Plan& plan, const Item& item, ItemQueue& queue) {
  const bool is_decode = item.work == Work::kDecode || item.work == Work::kDecodePart;
  Reads<Kv> reads(args, item, queue);
#if defined(__AMX_BF16__)
  if constexpr (kPaired<T>)
    if (uses_tiles<T>(args)) {
      if (is_decode)
        decode_tiles(args, item, decode_results(args, plan, item), reads);
      else
        run_rows<T, Kv, true>(args, plan, item);
      return reads.following();
    }
#endif
  if (is_decode)
    DecodeItem<T, Kv>(args, item).run(decode_results(args, plan, item), reads);
  else
    run_rows<T, Kv, false>(args, plan, item);
  return reads.following();
}

template <class T, class Kv>
void run_items(const AttentionArgs& args, const Plan& plan, int threads) {
  ItemQueue queue(plan.items, plan.num_items, threads);
  on_threads(threads, [&](int64_t, int64_t) {
    const Item* following = nullptr;
    while (const Item* item = following != nullptr ? following : queue.take())
      following = run_item<T, Kv>(args, plan, *item, queue);
  });
}

template <class T>
void merge_split(const AttentionArgs& args, const Plan& plan, const Split& split) {
  const int64_t dim = args.shape.head_dim, size = partial_size(dim);
  const int64_t group = args.num_heads / args.shape.num_kv_heads, stride = group * size;
  T* out = static_cast<T*>(args.out) + args.cu_seqlens_q[split.seq] * args.num_heads * dim;
  for (int64_t head = 0; head < args.num_heads; head++, out += dim) {
    const int64_t first = split.first_part + head / group * split.num_chunks;
    float* partials = plan.partials + (first * group + head % group) * size;
    if (shared_keys(args, split.seq) > 0)
      merge_partials(row_partial(args, plan.shared, split.seq, head), partials, split.num_chunks, stride, out,
                     dim);
    else
      merge_partials(partials, partials + stride, split.num_chunks - 1, stride, out, dim);
  }
}

// Rows of T, KV of T or int8.
template <class T, class Kv>
void attention(const AttentionArgs& args) {
  const Totals totals = measure(args, sizeof(Kv));
  const int threads = totals.nanoseconds < kParallelNanoseconds ? 1 : max_threads();
  const DecodeSize size = decode_size(args, totals, sizeof(Kv), threads);
  Plan plan = empty_plan(args, totals, size.keys, threads);
  for (int64_t level = 0; plan_shared(args, level, threads, plan); level++) {
    run_items<T, Kv>(args, plan, threads);
    plan.num_items = 0;
  }
  plan_prefill(args, totals, threads, plan);
  plan_decode(args, size, plan);
  run_items<T, Kv>(args, plan, threads);
  if (plan.num_splits == 0) return;
  on_threads(threads, [&](int64_t thread, int64_t num_threads) {
    for (int64_t i = thread; i < plan.num_splits; i += num_threads)
      merge_split<T>(args, plan, plan.splits[i]);
  });
}

}  // namespace backfill::BACKFILL_VARIANT
