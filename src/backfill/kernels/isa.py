"""The instruction set variant of the CPU kernels, and the matching limits of torch's libraries."""

from __future__ import annotations

from collections.abc import Collection, Mapping

# Names a variant of ``csrc/``. Without it the machine's best one runs.
ISA_VARIABLE = "BACKFILL_CPU_ISA"

_AVX2 = frozenset({"avx2", "fma", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_VNNI = _AVX512 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
# What ``csrc/isa.cpp`` asks of a processor for each variant, by the kernel's names.
_NEEDED_FLAGS: dict[str, frozenset[str]] = {
    "generic": frozenset(),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_vnni": _VNNI,
    "avx512_bf16": _BF16,
    "amx": _BF16 | {"amx_tile", "amx_bf16"},
}

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


def possible_isas(flags: Collection[str] | None) -> list[str]:
    """Variants that a processor with these flags of ``/proc/cpuinfo`` may run; all of them for None.

    Asks neither torch nor the compiled module. Only that one knows whether the system permits ``amx``.
    """
    return [isa for isa, needed in _NEEDED_FLAGS.items() if flags is None or needed <= set(flags)]


def library_limits(current: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that limit torch's libraries to the variant that ``current`` names.

    With them one machine computes as another would. Empty for the best variant, for no name and for an
    unknown one.
    """
    limits = _LIMITS.get(current.get(ISA_VARIABLE, ""), ())
    return dict(zip(_VARIABLES, limits, strict=False))
