"""Which instruction set variant of the CPU kernels runs, and the like limits of the libraries beside them."""

from __future__ import annotations

from collections.abc import Mapping

# Names a variant of ``csrc/``; unset, the best one of the machine is taken.
ISA_VARIABLE = "BACKFILL_CPU_ISA"

# What each library calls the set, which it reads when it is loaded: oneDNN, torch's own kernels, MKL.
_LIMITS = {
    "generic": ("SSE41", "default", "SSE4_2"),
    "avx2": ("AVX2", "avx2", "AVX2"),
    "avx512": ("AVX512_CORE", "avx512", "AVX512"),
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512", "AVX512"),
}
_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")


def library_limits(current: Mapping[str, str]) -> dict[str, str]:
    """What keeps torch's libraries to the variant that ``current`` names, so that one machine computes as
    another would; nothing for the best one, for no name and for an unknown one."""
    limits = _LIMITS.get(current.get(ISA_VARIABLE, ""), ())
    return dict(zip(_VARIABLES, limits, strict=False))
