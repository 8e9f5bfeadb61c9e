#include "isa.h"

#if defined(BACKFILL_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace backfill {

namespace {

#ifdef BACKFILL_X86

// Linux gives a process the use of the tile registers only on request, because they enlarge every
// signal frame. Threads started later inherit the permission.
bool tiles_permitted() {
#ifdef __linux__
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

void add_x86(std::vector<Isa>& found) {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2"))
    return;
  found.push_back({"avx2", &avx2::table});
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return;
  // On the one processor of Intel's that was measured (two cores with AMX), products of pairs by vdpbf16ps take
  // 1.6 times as long as FMA with widened weights: 224 against 365 GFLOP/s. On AMD's the order is by the
  // manufacturer's figures, which give both instructions one rate.
  const bool has_bytes = __builtin_cpu_supports("avx512vnni"), halves = __builtin_cpu_is("intel");
  const bool has_pairs = has_bytes && __builtin_cpu_supports("avx512bf16");
  if (has_pairs && halves) found.push_back({"avx512_bf16", &avx512_bf16::table});
  found.push_back({"avx512", &avx512::table});
  if (has_bytes) found.push_back({"avx512_vnni", &avx512_vnni::table});
  if (has_pairs && !halves) found.push_back({"avx512_bf16", &avx512_bf16::table});
  if (!has_pairs) return;
  if (__builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && tiles_permitted())
    found.push_back({"amx", &amx::table});
}

#endif

std::vector<Isa> detect() {
  std::vector<Isa> found = {{"generic", &generic::table}};
#ifdef BACKFILL_X86
  add_x86(found);
#endif
  return found;
}

}  // namespace

const std::vector<Isa>& supported_isas() {
  static const std::vector<Isa> isas = detect();
  return isas;
}

}  // namespace backfill
