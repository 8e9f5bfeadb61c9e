// What the bindings call and every ISA variant provides: one table of function pointers per variant.
//
// variant.cpp is compiled once for each instruction set, into a namespace of its own, so no inline
// function of one variant can be linked into another. This header declares data only, for the same reason.
#pragma once

#include <cstddef>
#include <cstdint>

namespace backfill {

struct bf16 {
  uint16_t bits;
};

struct NormArgs {
  const void* x;
  void* residual;  // null: plain RMS norm
  const void* weight;
  void* out;
  int64_t rows, size;
  int64_t x_stride;  // elements between rows of x; residual and out are dense
  float eps;
};

struct SiluArgs {
  const void* gate_up;
  void* out;
  int64_t rows, size;  // size: columns of out, half of gate_up's
  int64_t stride;      // elements between rows of gate_up
};

// A pool is [num_blocks, L, 2, G, B, row_size]; `layer_offset` is where the layer's K starts inside a block.
// A row has head_dim elements; of int8, four more bytes hold its scale (kv_codes.h).
struct PoolShape {
  int64_t block_stride, layer_offset;
  int64_t num_kv_heads, block_size, row_size, head_dim;
};

struct RotateArgs {
  void* qkv;
  void* pool;
  PoolShape shape;
  const int64_t* positions;
  const int64_t* slot_mapping;
  const float* cos_sin;  // null: no rotary embedding
  const void* q_norm;    // null: no norm of q and k
  const void* k_norm;
  int64_t rows, num_heads;
  float eps;
};

constexpr int kChunk = 128;  // keys that attention folds at once, see softmax.h

// Keys [begin, end) that the decodes sharers[first, last) have in the same blocks; whole chunks.
struct SharedRun {
  int32_t first, last;
  int32_t begin, end;
  int32_t level;  // 0 where begin is, else that of the run with the keys before it, and one
};

// See sharing.h. Runs are sorted by level.
struct Sharing {
  const SharedRun* runs;
  const int32_t* sharers;  // sequences
  const int32_t* lens;     // of each sequence: its keys in runs; null where nothing is shared
  int64_t num_runs;
};

struct AttentionArgs {
  const void* qkv;
  const void* pool;
  void* out;
  PoolShape shape;
  const int32_t* cu_seqlens_q;
  const int32_t* seq_lens;
  const int32_t* block_table;
  const int32_t* block_table_offsets;
  int64_t num_seqs, num_heads;
  float scale;
  Sharing sharing;
};

// Of a weight of codes, see quantized.h.
struct QuantizedFormat {
  int bits;             // of a code: 4 or 8
  int64_t group;        // inputs that share a scale: 16 or a multiple of 32
  int64_t scale_bytes;  // of a scale or an offset: 1 (units), 2 (half precision) or 4
  bool has_offsets;     // else -8 scales with 4 bits, 0 with 8
};

struct LinearArgs {
  const void* x;
  const void* weight;                       // packed, see linear.h and quantized.h
  const void* bias;                         // null: none
  void* out;                                // dense
  int64_t rows, in_features, out_features;  // in_features: a multiple of a tile's inputs
  int64_t x_stride;                         // elements between rows of x
  bool is_gated;  // panels of gates and of ups in turn: silu(gate) * up is half as wide
};

// Of each row: size logits, and how its token is drawn.
struct SampleArgs {
  const void* logits;
  int64_t* out;
  int64_t rows, size;
  int64_t stride;            // elements between rows of logits
  const float* temperature;  // 0: the most likely token
  const int64_t* top_k;      // size: all
  const double* top_p;       // 1: all
  const float* min_p;        // 0: all
  const double* uniform;     // in [0, 1)
};

struct ScoreArgs {
  const void* logits;
  int64_t rows, size;
  int64_t stride;         // elements between rows of logits
  const int64_t* tokens;  // of each row
  int64_t most_top;       // columns of top_tokens and top_logprobs
  int64_t* num_top;       // of each row, at most most_top; becomes how many are possible
  double* logprobs;
  int64_t* ranks;
  int64_t* top_tokens;
  double* top_logprobs;
};

enum ElementType { kBfloat16 = 0, kFloat32 = 1 };

// Indexed by ElementType, of rows and weights; kernels that use KV then by whether KV is int8, else of the type.
struct KernelTable {
  void (*norm[2])(const NormArgs&);
  void (*silu_and_mul[2])(const SiluArgs&);
  void (*rotate_and_write_kv[2][2])(const RotateArgs&);
  void (*attention[2][2])(const AttentionArgs&);
  void (*linear[2])(const LinearArgs&);
  void (*quantized_linear[2])(const LinearArgs&, const QuantizedFormat&);
  void (*sample[2])(const SampleArgs&);
  void (*score[2])(const ScoreArgs&);
  bool sums_integers;  // quantized_linear does, see linear_integers.h
  bool pairs_codes;    // of weights of bf16 rows, see quantized_tiles.h
};

namespace generic {
extern const KernelTable table;
}
#ifdef BACKFILL_X86
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
namespace avx512_vnni {
extern const KernelTable table;
}
namespace avx512_bf16 {
extern const KernelTable table;
}
namespace amx {
extern const KernelTable table;
}
#endif

}  // namespace backfill
