"""The instruction set variant of the CPU kernels, and the matching limits of torch's libraries."""

from __future__ import annotations

from collections.abc import Mapping

# Names a variant of ``csrc/``. Without it the machine's best one runs.
ISA_VARIABLE = "BACKFILL_CPU_ISA"

# Each library's name of the instruction set; it reads its variable when it is loaded. In the order of
# ``_VARIABLES``: oneDNN, torch's own kernels, MKL.
_LIMITS = {
    "generic": ("SSE41", "default", "SSE4_2"),
    "avx2": ("AVX2", "avx2", "AVX2"),
    "avx512": ("AVX512_CORE", "avx512", "AVX512"),
    "avx512_vnni": ("AVX512_CORE_VNNI", "avx512", "AVX512"),
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512", "AVX512"),
}
_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")


def library_limits(current: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that limit torch's libraries to the variant that ``current`` names.

    With them one machine computes as another would. Empty for the best variant, for no name and for an
    unknown one.
    """
    limits = _LIMITS.get(current.get(ISA_VARIABLE, ""), ())
    return dict(zip(_VARIABLES, limits, strict=False))
