#include "sharing.h"

#include <algorithm>

namespace backfill {

namespace {

// Fewest queries of a key/value head that are computed faster together, keys in the cache: some 40, with AMX 20.
constexpr int64_t kEfficientQueries = 40;

// The block table of a decode.
struct Table {
  const int32_t *begin, *end;
  int32_t seq, len;
};

std::vector<Table> sorted_tables(const AttentionArgs& args) {
  std::vector<Table> tables;
  for (int64_t seq = 0; seq < args.num_seqs; seq++) {
    const int32_t len = args.seq_lens[seq];
    if (args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq] != 1 || len < kChunk) continue;
    const int32_t* begin = args.block_table + args.block_table_offsets[seq];
    tables.push_back(
        {begin, begin + (len + args.shape.block_size - 1) / args.shape.block_size, (int32_t)seq, len});
  }
  std::sort(tables.begin(), tables.end(), [](const Table& a, const Table& b) {
    const auto [x, y] = std::mismatch(a.begin, a.end, b.begin, b.end);
    return x == a.end || y == b.end ? a.len < b.len : *x < *y;
  });
  return tables;
}

// Keys that two sequences have in the same blocks, in whole chunks.
int32_t common_keys(const Table& a, const Table& b, int64_t block_size) {
  const int64_t blocks = std::mismatch(a.begin, a.end, b.begin, b.end).first - a.begin;
  const int64_t keys = std::min<int64_t>({blocks * block_size, a.len, b.len});
  return (int32_t)(keys / kChunk * kChunk);
}

}  // namespace

int64_t min_sharers(int64_t num_heads, int64_t num_kv_heads, int64_t num_threads) {
  const int64_t rows = kEfficientQueries * std::max(num_kv_heads, num_threads);
  return std::max<int64_t>(2, (rows + num_heads - 1) / num_heads);
}

SharedBlocks::SharedBlocks(const AttentionArgs& args, int64_t min_sharers) {
  const std::vector<Table> tables = sorted_tables(args);
  const int32_t count = (int32_t)tables.size();
  std::vector<int32_t> common(count + 1, 0);  // of a sequence and the one before it
  for (int32_t i = 1; i < count; i++)
    common[i] = common_keys(tables[i - 1], tables[i], args.shape.block_size);

  std::vector<SharedRun> above = {{0, count, 0, 0, -1}};
  while (!above.empty()) {
    std::vector<SharedRun> level;
    for (const SharedRun& run : above)
      for (int32_t first = run.first, last; first < run.last; first = last) {
        int32_t end = INT32_MAX;
        for (last = first + 1; last < run.last && common[last] > run.end; last++)
          end = std::min(end, common[last]);
        if (last - first >= min_sharers) level.push_back({first, last, run.end, end, run.level + 1});
      }
    runs_.insert(runs_.end(), level.begin(), level.end());
    above = std::move(level);
  }
  if (runs_.empty()) return;
  lens_.resize(args.num_seqs, 0);
  for (const Table& table : tables) sharers_.push_back(table.seq);
  for (const SharedRun& run : runs_)
    for (int32_t i = run.first; i < run.last; i++) lens_[sharers_[i]] = run.end;
}

Sharing SharedBlocks::view() const {
  return {runs_.data(), sharers_.data(), lens_.data(), (int64_t)runs_.size()};
}

}  // namespace backfill
