// Compiled once per instruction set, with BACKFILL_VARIANT naming the namespace it goes to.
#include "attention.h"
#include "linear_integers.h"
#include "linear_tiles.h"
#include "linear_vectors.h"
#include "quantized_tiles.h"
#include "rotary.h"
#include "rowwise.h"
#include "sampling.h"
#include "scoring.h"

namespace backfill::BACKFILL_VARIANT {

extern const KernelTable table;  // constants are private to a file unless declared so
const KernelTable table = {
    {norm<bf16>, norm<float>},
    {silu_and_mul<bf16>, silu_and_mul<float>},
    {{rotate_and_write_kv<bf16, bf16>, rotate_and_write_kv<bf16, int8_t>},
     {rotate_and_write_kv<float, float>, rotate_and_write_kv<float, int8_t>}},
    {{attention<bf16, bf16>, attention<bf16, int8_t>}, {attention<float, float>, attention<float, int8_t>}},
#if defined(__AMX_BF16__)
    {tile_linear, vector_linear<float>},
    {paired_linear, unpacked_linear<float>},
#elif defined(__AVX2__)
    {vector_linear<bf16>, vector_linear<float>},
    {integer_linear<bf16>, integer_linear<float>},
#else
    {vector_linear<bf16>, vector_linear<float>},
    {unpacked_linear<bf16>, unpacked_linear<float>},
#endif
    {sample<bf16>, sample<float>},
    {score<bf16>, score<float>},
    kSumsIntegers,
    kPairsCodes,
};

}  // namespace backfill::BACKFILL_VARIANT
