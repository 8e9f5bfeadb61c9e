// The Python module: a KernelSet is one ISA variant; its methods take addresses, sizes and strides, and what holds
// them for many calls.
//
// Nothing is checked here: backfill/kernels/cpu.py and cpu_linear.py are the only callers and check all.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <optional>
#include <stdexcept>

#include "copies.h"
#include "isa.h"
#include "scratch.h"
#include "sharing.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace backfill {

namespace {

template <class T>
T* address(uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Isa& isa : supported_isas()) names.push_back(isa.name);
  return names;
}

// Addresses and sizes of a pool and of a batch, read once for the hundreds of calls that use them. They own
// nothing.
struct KvPool {
  bool is_int8;
  void* data;
  int64_t num_layers, num_kv_heads, block_size, row_size, head_dim;

  KvPool(bool is_int8, uintptr_t data, int64_t num_layers, int64_t num_kv_heads, int64_t block_size,
         int64_t row_size, int64_t head_dim)
      : is_int8(is_int8),
        data(address<void>(data)),
        num_layers(num_layers),
        num_kv_heads(num_kv_heads),
        block_size(block_size),
        row_size(row_size),
        head_dim(head_dim) {}

  PoolShape layer(int64_t index) const {
    const int64_t layer_size = 2 * num_kv_heads * block_size * row_size;
    return {num_layers * layer_size, index * layer_size, num_kv_heads, block_size, row_size, head_dim};
  }
};

struct Batch {
  const int64_t *positions, *slot_mapping;
  const int32_t *cu_seqlens_q, *seq_lens, *block_table, *block_table_offsets;
  int64_t rows, num_seqs;

  Batch(uintptr_t positions, uintptr_t slot_mapping, uintptr_t cu_seqlens_q, uintptr_t seq_lens,
        uintptr_t block_table, uintptr_t block_table_offsets, int64_t rows, int64_t num_seqs)
      : positions(address<int64_t>(positions)),
        slot_mapping(address<int64_t>(slot_mapping)),
        cu_seqlens_q(address<int32_t>(cu_seqlens_q)),
        seq_lens(address<int32_t>(seq_lens)),
        block_table(address<int32_t>(block_table)),
        block_table_offsets(address<int32_t>(block_table_offsets)),
        rows(rows),
        num_seqs(num_seqs) {}

  // Found in the first layer.
  Sharing sharing(const AttentionArgs& args) const {
    const int64_t sharers = min_sharers(args.num_heads, args.shape.num_kv_heads, max_threads());
    const std::pair<int64_t, int64_t> key = {args.shape.block_size, sharers};
    if (!shared || shared_key != key) shared.emplace(args, sharers), shared_key = key;
    return shared->view();
  }

  // Of each sequence, for tests.
  std::vector<int32_t> shared_keys(int64_t block_size, int64_t num_sharers) const {
    AttentionArgs args = {};
    args.cu_seqlens_q = cu_seqlens_q, args.seq_lens = seq_lens, args.num_seqs = num_seqs;
    args.block_table = block_table, args.block_table_offsets = block_table_offsets;
    args.shape.block_size = block_size;
    const SharedBlocks found(args, num_sharers);
    const int32_t* lens = found.view().lens;
    return lens == nullptr ? std::vector<int32_t>(num_seqs) : std::vector<int32_t>(lens, lens + num_seqs);
  }

 private:
  mutable std::optional<SharedBlocks> shared;
  mutable std::pair<int64_t, int64_t> shared_key;
};

// A packed weight, read once for all calls. It owns nothing. Sizes are those of LinearArgs.
struct Linear {
  int type;
  LinearArgs args;
  bool is_quantized;
  QuantizedFormat format;

  Linear(int type, uintptr_t weight, uintptr_t bias, int64_t in_features, int64_t out_features, bool is_gated,
         int bits, int64_t group, int64_t scale_bytes, bool has_offsets)
      : type(type),
        args{nullptr, address<void>(weight), address<void>(bias), nullptr, 0, in_features, out_features, 0,
             is_gated},
        is_quantized(bits != 0),
        format{bits, group, scale_bytes, has_offsets} {}

  int64_t width() const { return args.is_gated ? args.out_features / 2 : args.out_features; }

  void multiply(const KernelTable& table, const void* x, int64_t x_stride, void* out, int64_t rows) const {
    LinearArgs call = args;
    call.x = x, call.x_stride = x_stride, call.out = out, call.rows = rows;
    if (is_quantized)
      table.quantized_linear[type](call, format);
    else
      table.linear[type](call);
  }
};

// Of a decoder layer. The matrices are copies: they own nothing.
struct LayerWeights {
  uintptr_t input_norm;
  Linear qkv;
  uintptr_t q_norm, k_norm;
  Linear output;
  uintptr_t post_attention_norm;
  Linear gate_up, down;
};

class KernelSet {
 public:
  explicit KernelSet(const std::string& name) : isa_(find(name)) {}

  std::string isa() const { return isa_.name; }
  bool sums_integers() const { return isa_.table->sums_integers; }
  bool pairs_codes() const { return isa_.table->pairs_codes; }

  void linear(const Linear& weight, uintptr_t x, int64_t x_stride, uintptr_t out, int64_t rows) const {
    weight.multiply(*isa_.table, address<void>(x), x_stride, address<void>(out), rows);
  }

  void norm(int type, uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t out, int64_t rows,
            int64_t size, int64_t x_stride, float eps) const {
    isa_.table->norm[type]({address<void>(x), address<void>(residual), address<void>(weight),
                            address<void>(out), rows, size, x_stride, eps});
  }

  void silu_and_mul(int type, uintptr_t gate_up, uintptr_t out, int64_t rows, int64_t size,
                    int64_t stride) const {
    isa_.table->silu_and_mul[type]({address<void>(gate_up), address<void>(out), rows, size, stride});
  }

  void sample(int type, uintptr_t logits, uintptr_t out, int64_t rows, int64_t size, int64_t stride,
              uintptr_t temperature, uintptr_t top_k, uintptr_t top_p, uintptr_t min_p,
              uintptr_t uniform) const {
    isa_.table->sample[type]({address<void>(logits), address<int64_t>(out), rows, size, stride,
                              address<float>(temperature), address<int64_t>(top_k), address<double>(top_p),
                              address<float>(min_p), address<double>(uniform)});
  }

  void score(int type, uintptr_t logits, int64_t rows, int64_t size, int64_t stride, uintptr_t tokens,
             int64_t most_top, uintptr_t num_top, uintptr_t logprobs, uintptr_t ranks, uintptr_t top_tokens,
             uintptr_t top_logprobs) const {
    isa_.table->score[type]({address<void>(logits), rows, size, stride, address<int64_t>(tokens), most_top,
                             address<int64_t>(num_top), address<double>(logprobs), address<int64_t>(ranks),
                             address<int64_t>(top_tokens), address<double>(top_logprobs)});
  }

  void rotate_and_write_kv(int type, uintptr_t qkv, const KvPool& pool, const Batch& batch, int64_t layer,
                           int64_t num_heads, uintptr_t cos_sin, uintptr_t q_norm, uintptr_t k_norm,
                           float eps) const {
    isa_.table->rotate_and_write_kv[type][pool.is_int8](
        {address<void>(qkv), pool.data, pool.layer(layer), batch.positions, batch.slot_mapping,
         address<float>(cos_sin), address<void>(q_norm), address<void>(k_norm), batch.rows, num_heads, eps});
  }

  void attention(int type, uintptr_t qkv, uintptr_t out, const KvPool& pool, const Batch& batch,
                 int64_t layer, int64_t num_heads, float scale) const {
    AttentionArgs args = {address<void>(qkv),
                          pool.data,
                          address<void>(out),
                          pool.layer(layer),
                          batch.cu_seqlens_q,
                          batch.seq_lens,
                          batch.block_table,
                          batch.block_table_offsets,
                          batch.num_seqs,
                          num_heads,
                          scale,
                          {}};
    args.sharing = batch.sharing(args);
    isa_.table->attention[type][pool.is_int8](args);
  }

  // norm, qkv, rotation and write of KV, attention, output: what lies between is in scratch memory.
  void attention_block(uintptr_t x, int64_t x_stride, uintptr_t residual, int64_t rows, uintptr_t norm_weight,
                       float eps, const Linear& qkv, const Linear& output, const KvPool& pool,
                       const Batch& batch, int64_t layer, int64_t num_heads, uintptr_t cos_sin,
                       uintptr_t q_norm, uintptr_t k_norm, float scale, uintptr_t out) const {
    const int64_t heads = output.args.in_features;
    void* normed = rows_of(kNormed, qkv.type, rows, qkv.args.in_features);
    void* projected = rows_of(kProjected, qkv.type, rows, qkv.width());
    void* attended = rows_of(kAttended, qkv.type, rows, heads);
    normalise(qkv, x, x_stride, residual, norm_weight, normed, rows, eps);
    qkv.multiply(*isa_.table, normed, qkv.args.in_features, projected, rows);
    const auto address_of = [](void* memory) { return reinterpret_cast<uintptr_t>(memory); };
    rotate_and_write_kv(qkv.type, address_of(projected), pool, batch, layer, num_heads, cos_sin, q_norm,
                        k_norm, eps);
    attention(qkv.type, address_of(projected), address_of(attended), pool, batch, layer, num_heads, scale);
    output.multiply(*isa_.table, attended, heads, address<void>(out), rows);
  }

  // norm, gate_up, down.
  void mlp_block(uintptr_t x, int64_t x_stride, uintptr_t residual, int64_t rows, uintptr_t norm_weight,
                 float eps, const Linear& gate_up, const Linear& down, uintptr_t out) const {
    void* normed = rows_of(kNormed, gate_up.type, rows, gate_up.args.in_features);
    void* gated = rows_of(kProjected, gate_up.type, rows, gate_up.width());
    normalise(gate_up, x, x_stride, residual, norm_weight, normed, rows, eps);
    gate_up.multiply(*isa_.table, normed, gate_up.args.in_features, gated, rows);
    down.multiply(*isa_.table, gated, gate_up.width(), address<void>(out), rows);
  }

  // Both halves of layers, the first of which is `first` in the pool. x: what is to be added to residual, or, without
  // `adds`, the residual itself. After every `layers_apart` layers it returns if the word at `stop` (0: none) is
  // `stop_value`. Returns how many layers were computed.
  int64_t decoder_layers(const std::vector<const LayerWeights*>& layers, uintptr_t x, int64_t x_stride,
                         uintptr_t residual, bool adds, int64_t rows, float eps, const KvPool& pool,
                         const Batch& batch, int64_t first, int64_t num_heads, uintptr_t cos_sin, float scale,
                         uintptr_t out, uintptr_t stop, int64_t stop_value, int64_t layers_apart) const {
    int64_t done = 0;
    for (const LayerWeights* each : layers) {
      if (done > 0 && stop != 0 && done % layers_apart == 0 &&
          __atomic_load_n(address<int64_t>(stop), __ATOMIC_ACQUIRE) == stop_value)
        break;
      const int64_t size = each->down.width();
      const uintptr_t between = reinterpret_cast<uintptr_t>(rows_of(kHidden, each->down.type, rows, size));
      attention_block(x, x_stride, adds ? residual : 0, rows, each->input_norm, eps, each->qkv, each->output,
                      pool, batch, first++, num_heads, cos_sin, each->q_norm, each->k_norm, scale, between);
      mlp_block(between, size, residual, rows, each->post_attention_norm, eps, each->gate_up, each->down,
                out);
      x = out, x_stride = size, adds = true;
      ++done;
    }
    return done;
  }

 private:
  static const Isa& find(const std::string& name) {
    if (name.empty()) return supported_isas().back();
    std::string known;
    for (const Isa& isa : supported_isas()) {
      if (isa.name == name) return isa;
      known += (known.empty() ? "" : ", ") + isa.name;
    }
    throw std::invalid_argument("isa " + name + " is not available here; this machine has: " + known);
  }

  static void* rows_of(ScratchUse use, int type, int64_t rows, int64_t size) {
    return scratch(use, rows * size * (type == kFloat32 ? 4 : 2));
  }

  void normalise(const Linear& next, uintptr_t x, int64_t x_stride, uintptr_t residual, uintptr_t weight,
                 void* out, int64_t rows, float eps) const {
    const int64_t size = next.args.in_features;
    isa_.table->norm[next.type](
        {address<void>(x), address<void>(residual), address<void>(weight), out, rows, size, x_stride, eps});
  }

  const Isa& isa_;
};

// glibc returns freed memory above a threshold to the system; each step's activations would then cause page
// faults.
bool keep_freed_memory() {
#if defined(__GLIBC__)
  return mallopt(M_MMAP_THRESHOLD, 1 << 30) == 1 && mallopt(M_TRIM_THRESHOLD, 1 << 30) == 1;
#else
  return false;
#endif
}

void copy_blocks_at(uintptr_t destination, uintptr_t source, int64_t block_bytes,
                    const std::vector<int64_t>& destination_blocks,
                    const std::vector<int64_t>& source_blocks) {
  copy_blocks(address<void>(destination), address<void>(source), block_bytes, destination_blocks,
              source_blocks);
}

using Indices = std::vector<int64_t>;

void copy_slots_at(uintptr_t destination, const Indices& destination_blocks, uintptr_t source,
                   const Indices& source_blocks, const Indices& first, const Indices& num, int64_t num_planes,
                   int64_t block_size, int64_t slot_bytes) {
  copy_slots(address<void>(destination), destination_blocks, address<void>(source),
             {source_blocks, first, num}, {num_planes, block_size, slot_bytes});
}

void gather_slots_at(uintptr_t packed, uintptr_t pool, const Indices& blocks, const Indices& first,
                     const Indices& num, int64_t num_planes, int64_t block_size, int64_t slot_bytes) {
  gather_slots(address<void>(packed), address<void>(pool), {blocks, first, num},
               {num_planes, block_size, slot_bytes});
}

void scatter_slots_at(uintptr_t pool, uintptr_t packed, const Indices& blocks, const Indices& first,
                      const Indices& num, int64_t num_planes, int64_t block_size, int64_t slot_bytes) {
  scatter_slots(address<void>(pool), address<void>(packed), {blocks, first, num},
                {num_planes, block_size, slot_bytes});
}

}  // namespace

}  // namespace backfill

NB_MODULE(_kernels, m) {
  using backfill::KernelSet;
  m.doc() = "C++ kernels of Backfill. Import torch first: the number of threads is its OpenMP runtime's.";
  // Kernel sets live as long as the process; nanobind would report them as leaks.
  nanobind::set_leak_warnings(false);
  m.def("supported_isas", &backfill::isa_names, "ISA variants this machine runs, the fastest last.");
  m.def("keep_freed_memory", &backfill::keep_freed_memory,
        "Tell malloc to keep freed memory in the process. False where the C library has no such setting.");
  m.def("min_sharers", &backfill::min_sharers, "num_heads"_a, "num_kv_heads"_a,
        "num_threads"_a);  // for tests
  m.def("limit_scratch", &backfill::limit_scratch,
        "Let kernels that need more working memory than this raise MemoryError: for tests.");
  const auto nogil = nb::call_guard<nb::gil_scoped_release>();
  m.def("copy_blocks", &backfill::copy_blocks_at, nogil,
        "Copy whole blocks from one pool to another; neither is touched elsewhere.");
  m.def("copy_slots", &backfill::copy_slots_at, nogil,
        "Copy slots of blocks from one pool to another; neither is touched elsewhere.");
  m.def("gather_slots", &backfill::gather_slots_at, nogil, "Copy slots of a pool's blocks to dense memory.");
  m.def("scatter_slots", &backfill::scatter_slots_at, nogil,
        "Copy dense memory to slots of a pool's blocks; the pool is not touched elsewhere.");
  using Address = uintptr_t;
  nb::class_<backfill::KvPool>(m, "KvPool")
      .def(nb::init<bool, Address, int64_t, int64_t, int64_t, int64_t, int64_t>(), "is_int8"_a, "data"_a,
           "num_layers"_a, "num_kv_heads"_a, "block_size"_a, "row_size"_a, "head_dim"_a);
  nb::class_<backfill::Batch>(m, "Batch")
      .def(nb::init<Address, Address, Address, Address, Address, Address, int64_t, int64_t>(), "positions"_a,
           "slot_mapping"_a, "cu_seqlens_q"_a, "seq_lens"_a, "block_table"_a, "block_table_offsets"_a,
           "rows"_a, "num_seqs"_a)
      .def("shared_keys", &backfill::Batch::shared_keys, "block_size"_a, "min_sharers"_a);
  nb::class_<backfill::Linear>(m, "Linear")
      .def(nb::init<int, Address, Address, int64_t, int64_t, bool, int, int64_t, int64_t, bool>(), "type"_a,
           "weight"_a, "bias"_a, "in_features"_a, "out_features"_a, "is_gated"_a, "bits"_a = 0, "group"_a = 0,
           "scale_bytes"_a = 0, "has_offsets"_a = false);
  nb::class_<backfill::LayerWeights>(m, "LayerWeights")
      .def(
          "__init__",
          [](backfill::LayerWeights* self, Address input_norm, const backfill::Linear& qkv, Address q_norm,
             Address k_norm, const backfill::Linear& output, Address post_attention_norm,
             const backfill::Linear& gate_up, const backfill::Linear& down) {
            new (self) backfill::LayerWeights{input_norm,          qkv,     q_norm, k_norm, output,
                                              post_attention_norm, gate_up, down};
          },
          "input_norm"_a, "qkv"_a, "q_norm"_a, "k_norm"_a, "output"_a, "post_attention_norm"_a, "gate_up"_a,
          "down"_a);
  nb::class_<KernelSet>(m, "KernelSet")
      .def(nb::init<const std::string&>(), "isa"_a = "",
           "ValueError for an ISA this machine lacks; '' is the best.")
      .def_prop_ro("isa", &KernelSet::isa)
      .def_prop_ro("sums_integers", &KernelSet::sums_integers)
      .def_prop_ro("pairs_codes", &KernelSet::pairs_codes)
      .def("linear", &KernelSet::linear, nogil)
      .def("norm", &KernelSet::norm, nogil)
      .def("silu_and_mul", &KernelSet::silu_and_mul, nogil)
      .def("sample", &KernelSet::sample, nogil)
      .def("score", &KernelSet::score, nogil)
      .def("rotate_and_write_kv", &KernelSet::rotate_and_write_kv, nogil)
      .def("attention", &KernelSet::attention, nogil)
      .def("attention_block", &KernelSet::attention_block, nogil)
      .def("mlp_block", &KernelSet::mlp_block, nogil)
      .def("decoder_layers", &KernelSet::decoder_layers, nogil);
}
