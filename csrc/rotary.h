// Between the qkv projection and attention: per-head norm of q and k, rotary embedding, KV write.
//
// Each stage rounds to T, as the separate operators of a plain implementation would.
#pragma once

#include "kv_codes.h"
#include "rowwise.h"

namespace backfill::BACKFILL_VARIANT {

template <class T>
BACKFILL_INLINE void rotate_head(T* x, const float* cos_sin, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats first = load(x + i), second = load(x + half + i);
    const Floats cosine = load(cos_sin + i), sine = load(cos_sin + half + i);
    store(x + i, first * cosine - second * sine);
    store(x + half + i, second * cosine + first * sine);
  }
  if (const int64_t n = half - i; n > 0) {
    const Floats first = load(x + i, n), second = load(x + half + i, n);
    const Floats cosine = load(cos_sin + i, n), sine = load(cos_sin + half + i, n);
    store(x + i, first * cosine - second * sine, n);
    store(x + half + i, second * cosine + first * sine, n);
  }
}

// In place.
template <class T>
BACKFILL_INLINE void finish_head(T* x, const T* norm_weight, float eps, const float* cos_sin,
                                 int64_t head_dim) {
  if (norm_weight != nullptr)
    scale_row(x, norm_weight, x, head_dim, inverse_rms(row_squares(x, head_dim), head_dim, eps));
  if (cos_sin != nullptr) rotate_head(x, cos_sin, head_dim);
}

template <class T, class Kv>
void rotate_and_write_kv(const RotateArgs& args) {
  T* qkv = static_cast<T*>(args.qkv);
  Kv* pool = static_cast<Kv*>(args.pool);
  const T* q_norm = static_cast<const T*>(args.q_norm);
  const T* k_norm = static_cast<const T*>(args.k_norm);
  const PoolShape shape = args.shape;
  const int64_t dim = shape.head_dim, head_stride = shape.block_size * shape.row_size;
  const int64_t row_size = (args.num_heads + 2 * shape.num_kv_heads) * dim;
  for_each_row(args.rows, row_size, [&](int64_t row) {
    T* head = qkv + row * row_size;
    const float* cos_sin = args.cos_sin == nullptr ? nullptr : args.cos_sin + args.positions[row] * dim;
    for (int64_t h = 0; h < args.num_heads; h++, head += dim)
      finish_head(head, q_norm, args.eps, cos_sin, dim);
    const int64_t block = args.slot_mapping[row] / shape.block_size;
    const int64_t slot = args.slot_mapping[row] % shape.block_size;
    Kv* target = pool + block * shape.block_stride + shape.layer_offset + slot * shape.row_size;
    for (int64_t g = 0; g < 2 * shape.num_kv_heads; g++, head += dim, target += head_stride) {
      if (g < shape.num_kv_heads) finish_head(head, k_norm, args.eps, cos_sin, dim);
      write_row(head, target, dim);
    }
  });
}

}  // namespace backfill::BACKFILL_VARIANT
