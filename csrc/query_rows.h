// The query rows of a prefill item: rows of one sequence, or decodes that share the keys of a run (sharing.h).
//
// A query is one (query row, query head of the key/value head's group). Queries of a row are neighbours.
#pragma once

#include "partials.h"

namespace backfill::BACKFILL_VARIANT {

struct QueryRows {
  const AttentionArgs& args;
  int64_t group;           // query heads of a key/value head
  int64_t seq, kv_head;    // whose keys they see
  int64_t count;           // rows
  int64_t begin, end;      // keys; those before `begin` were seen before
  int64_t first_row;       // of a sequence: in the batch
  int64_t first_position;  // of a sequence
  const int32_t* sharers;  // of a run: the sequences, else null
  float* partials;         // of a run: what was seen before, see partials.h; replaced by what is seen

  // Rows [begin, end) of a sequence.
  static QueryRows of_sequence(const AttentionArgs& args, int64_t seq, int64_t kv_head, int64_t begin,
                               int64_t end) {
    const int64_t first = args.cu_seqlens_q[seq], rows = args.cu_seqlens_q[seq + 1] - first;
    const int64_t position = args.seq_lens[seq] - rows + begin,
                  group = args.num_heads / args.shape.num_kv_heads;
    return {args,          group,    seq,     kv_head, end - begin, 0, position + end - begin,
            first + begin, position, nullptr, nullptr};
  }

  // Decodes sharers[first, last).
  static QueryRows of_run(const AttentionArgs& args, const SharedRun& run, int64_t kv_head, int64_t first,
                          int64_t last, float* partials) {
    const int32_t* sharers = args.sharing.sharers + first;
    const int64_t group = args.num_heads / args.shape.num_kv_heads;
    return {args, group, sharers[0], kv_head, last - first, run.begin, run.end, 0, 0, sharers, partials};
  }

  // Of the batch.
  BACKFILL_INLINE int64_t row_of(int64_t query) const {
    const int64_t row = query / group;
    return sharers == nullptr ? first_row + row : args.cu_seqlens_q[sharers[row]];
  }

  BACKFILL_INLINE int64_t head_of(int64_t query) const { return kv_head * group + query % group; }

  // The last key that a query sees.
  BACKFILL_INLINE int64_t position_of(int64_t query) const {
    return sharers == nullptr ? first_position + query / group : end - 1;
  }

  template <class T>
  BACKFILL_INLINE const T* query(int64_t index) const {
    const int64_t heads = args.num_heads + 2 * args.shape.num_kv_heads;
    return static_cast<const T*>(args.qkv) + (row_of(index) * heads + head_of(index)) * args.shape.head_dim;
  }

  template <class T>
  BACKFILL_INLINE T* out(int64_t query) const {
    return static_cast<T*>(args.out) +
           (row_of(query) * args.num_heads + head_of(query)) * args.shape.head_dim;
  }

  BACKFILL_INLINE float* partial_of(int64_t query) const {
    return row_partial(args, partials, sharers[query / group], head_of(query));
  }
};

}  // namespace backfill::BACKFILL_VARIANT
