// The items that attention is cut into, the queue from which threads take them, and the KV that decodes among them
// read ahead.
#pragma once

#include "simd.h"

namespace backfill::BACKFILL_VARIANT {

enum class Work : int32_t { kPrefill, kShared, kDecode, kDecodePart };

struct Item {
  Work work;
  int32_t seq;                    // of kShared: the run in place of a sequence
  int32_t kv_head, num_kv_heads;  // more than one of decodes only
  int32_t begin, end;  // query rows of the sequence (prefill), sharers of the batch (shared) or keys (decode)
  int32_t part;        // index of the first chunk's partial result
};

class ItemQueue {
 public:
  ItemQueue(const Item* items, int64_t count, int64_t num_threads)
      : items_(items), count_(count), num_threads_(num_threads) {}

  // Null when none is left.
  const Item* take() {
    const int64_t i = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
    return i < count_ ? items_ + i : nullptr;
  }

  // To be begun later: null too where another thread might then have none. Decodes are last in the queue, so after a
  // decode it is one.
  const Item* take_early() {
    return count_ - __atomic_load_n(&next_, __ATOMIC_RELAXED) < num_threads_ ? nullptr : take();
  }

 private:
  const Item* items_;
  int64_t count_, num_threads_;
  int64_t next_ = 0;
};

// Fetches the KV that a decode reads next while it computes, and beside its last chunk what the decode that the
// thread takes next begins with. Fetches are spread over the arithmetic: a core tracks few cache misses at a time,
// and waits where a burst exceeds them.
//
// By passes: keys of a head, its values, keys of the next head, 16 KiB each with heads of 64 in 16 bits, into the
// first-level cache. Or by chunks, into the second level: blocks are fetched in the order of memory, K and V of all
// heads, so that the hardware reads ahead too. With vectors of 32 bytes, passes of 16 and 32 KiB take 0.7 to 0.8 of the
// time (Zen 3); other vectors were not compared.
template <class Kv>
class Reads {
 public:
  static constexpr bool kByPasses = kLanes == 8;

  Reads(const AttentionArgs& args, const Item& item, ItemQueue& queue)
      : args_(args), item_(item), queue_(queue) {}

  // The chunk that begins at `position` is computed now, with `num_fetches` calls of fetch.
  void begin_chunk(int64_t position, int64_t num_fetches) {
    begin_following(position, [&](const Item& item, int64_t key) { begin(item, key, num_fetches); });
  }

  // By passes: the keys of the item's head `head` in that chunk are scored now, and their values are fetched.
  void begin_keys(int64_t position, int64_t head, int64_t num_fetches) {
    begin_pass(item_, position, head, true, num_fetches);
  }

  // Their values are summed now, and the keys after these are fetched.
  void begin_values(int64_t position, int64_t head, int64_t num_fetches) {
    if (head + 1 < item_.num_kv_heads) return begin_pass(item_, position, head + 1, false, num_fetches);
    begin_following(position,
                    [&](const Item& item, int64_t key) { begin_pass(item, key, 0, false, num_fetches); });
  }

  BACKFILL_INLINE void fetch() {
    for (due_ += lines_per_fetch_; due_ >= kUnit; due_ -= kUnit, line_ += kLine) {
      if (line_ >= run_end_ && !next_run()) {
        lines_per_fetch_ = due_ = 0;
        return;
      }
      __builtin_prefetch(line_, 0, kByPasses ? 3 : 2);
    }
  }

  // What the thread has taken.
  const Item* following() const { return following_; }

 private:
  static constexpr int64_t kLine = 64, kUnit = 256;

  // Of the chunk after that at `position`, or of the first one of the following item.
  template <class Begin>
  void begin_following(int64_t position, const Begin& begin) {
    lines_per_fetch_ = 0;
    const int64_t next = position + kChunk;
    if (next < item_.end) return begin(item_, next);
    following_ = queue_.take_early();
    if (following_ != nullptr) begin(*following_, following_->begin);
  }

  int64_t head_bytes() const { return args_.shape.block_size * args_.shape.row_size * (int64_t)sizeof(Kv); }

  void begin(const Item& item, int64_t first_key, int64_t num_fetches) {
    values_ = args_.shape.num_kv_heads * head_bytes();
    run_bytes_ = item.num_kv_heads * head_bytes();
    is_whole_ = run_bytes_ == values_;
    if (is_whole_) run_bytes_ *= 2;
    begin_runs(item, first_key, item.kv_head * head_bytes(), 2 * item.num_kv_heads * head_bytes(),
               num_fetches);
  }

  // Of the keys of the item's head `head`, or of its values.
  void begin_pass(const Item& item, int64_t first_key, int64_t head, bool values, int64_t num_fetches) {
    const int64_t first = item.kv_head + head + (values ? args_.shape.num_kv_heads : 0);
    run_bytes_ = head_bytes();
    is_whole_ = true;
    begin_runs(item, first_key, first * head_bytes(), head_bytes(), num_fetches);
  }

  // first_byte: of a block's first run. block_bytes: that are fetched of each block.
  void begin_runs(const Item& item, int64_t first_key, int64_t first_byte, int64_t block_bytes,
                  int64_t num_fetches) {
    const PoolShape& shape = args_.shape;
    const int64_t last_key = smaller<int64_t>(item.end, first_key + kChunk);
    const int32_t* refs = args_.block_table + args_.block_table_offsets[item.seq];
    pool_ = static_cast<const char*>(args_.pool) + (shape.layer_offset * (int64_t)sizeof(Kv) + first_byte);
    block_ = refs + first_key / shape.block_size;
    last_block_ = refs + ceil_divide(last_key, shape.block_size);
    values_follow_ = false;
    line_ = run_end_ = nullptr;
    lines_per_fetch_ = ceil_divide((last_block_ - block_) * block_bytes * kUnit, kLine * num_fetches);
    due_ = 0;
  }

  // False when all is fetched.
  bool next_run() {
    if (values_follow_) {
      line_ = run_end_ - run_bytes_ + values_;
      values_follow_ = false;
    } else if (block_ == last_block_) {
      return false;
    } else {
      line_ = pool_ + (int64_t)(*block_++ >> 1) * args_.shape.block_stride * (int64_t)sizeof(Kv);
      values_follow_ = !is_whole_;
    }
    run_end_ = line_ + run_bytes_;
    return true;
  }

  const AttentionArgs& args_;
  const Item& item_;
  ItemQueue& queue_;
  const Item* following_ = nullptr;
  int64_t lines_per_fetch_ = 0, due_ = 0;  // in 1 / kUnit
  const char *pool_, *line_, *run_end_;
  const int32_t *block_, *last_block_;
  int64_t values_;     // bytes from K of the first head to its V
  int64_t run_bytes_;  // that are fetched in one go: K or V of the item's heads, or all of a block
  bool is_whole_;      // what is fetched of a block is one run
  bool values_follow_;
};

}  // namespace backfill::BACKFILL_VARIANT
