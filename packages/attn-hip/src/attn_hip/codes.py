"""Why a path of ``fa2`` is not chosen."""

from __future__ import annotations

from attn_core.reasons import Code, Stage

DRIVER = Code(
    "fa2.driver",
    Stage.AVAILABILITY,
    "needs the driver of {limit} in this process",
    meaning="The library that loads and launches kernels was not found; for ROCm it is the libamdhip64 that "
    "torch has loaded, and ATTN_HIP_RUNTIME names another.",
)
DEVICE_COMPILER = Code(
    "fa2.device-compiler",
    Stage.AVAILABILITY,
    "needs {limit}, or code objects built ahead of time",
    meaning="The package carries no code objects for the device, the cache holds none, and no compiler was "
    "found; 'attn build --arch ...' makes them on another machine.",
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
DEVICE_BUILD = Code(
    "fa2.device-build",
    Stage.PREPARE,
    "needs its kernels for {limit} to build",
    meaning="The device compiler failed; the message quotes its first error and names the log.",
)
LOAD = Code(
    "fa2.load",
    Stage.PREPARE,
    "needs its kernels for {limit} to load",
    meaning="The driver refused a code object; the message is the driver's.",
)
CAPTURE = Code(
    "fa2.capture",
    Stage.PREPARE,
    "needs one call before graph capture, to load {limit}",
    meaning="Code cannot be loaded while a stream is captured; append and sampling have no plan() that does.",
)
MIXED_TYPES = Code(
    "fa2.mixed-types",
    Stage.CAPABILITY,
    "on a GPU takes k/v of q's type {limit} or of an 8-bit type",
    meaning="The GPU kernels multiply what they read as q's type; an fp8 cache is widened to it.",
)
CACHE_STRIDE = Code(
    "fa2.cache-stride",
    Stage.CAPABILITY,
    "appends to a cache with stride {limit} over head_dim",
    meaning="The elements of a head of the cache are not next to each other.",
)
SOFT_CAP = Code(
    "fa2.soft-cap",
    Stage.CAPABILITY,
    "on a GPU takes logits_soft_cap up to {limit}",
    meaning="The GPU kernels' tanh is off by up to 1e-7 near 0, which the cap multiplies: logits far below a "
    "large cap would lose their digits.",
)
CODES = (
    DRIVER, DEVICE_COMPILER, COMPILER, CACHE, BUILD, DEVICE_BUILD, LOAD, CAPTURE, MIXED_TYPES, CACHE_STRIDE,
    SOFT_CAP,
)  # fmt: skip
