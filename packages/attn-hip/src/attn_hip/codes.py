"""Why a path of ``fa2`` is not chosen."""

from __future__ import annotations

from attn_core.reasons import Code, Stage

DEVICE = Code(
    "fa2.device",
    Stage.AVAILABILITY,
    "device kernels for {limit} are not part of this version",
    meaning="This version computes on the host CPU only; other backends serve GPUs.",
)
COMPILER = Code(
    "fa2.compiler",
    Stage.AVAILABILITY,
    "needs {limit} to build its CPU kernels on first use",
    meaning="No C++ compiler was found and the cache holds no build; 'attn build' makes one ahead of time.",
)
CACHE = Code(
    "fa2.cache",
    Stage.PREPARE,
    "needs {limit} for built kernels",
    meaning="The cache directory cannot be used; ATTN_CACHE_DIR names another.",
)
BUILD = Code(
    "fa2.build",
    Stage.PREPARE,
    "needs its CPU kernels to build",
    meaning="The compiler failed; the message quotes its first error and names the log.",
)
CACHE_STRIDE = Code(
    "fa2.cache-stride",
    Stage.CAPABILITY,
    "appends to a cache with stride {limit} over head_dim",
    meaning="The elements of a head of the cache are not next to each other.",
)
CODES = (DEVICE, COMPILER, CACHE, BUILD, CACHE_STRIDE)
