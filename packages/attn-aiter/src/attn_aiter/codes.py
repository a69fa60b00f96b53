"""Every cause this backend gives for declining, in one place. Text is built from these and nowhere else."""

from __future__ import annotations

from attn_core.reasons import Code, Stage

_A, _C, _PF, _P = Stage.AVAILABILITY, Stage.CAPABILITY, Stage.PREFERENCE, Stage.PREPARE

WRONG_ARCH = Code(
    "aiter.arch",
    _A,
    "has kernels for {limit}",
    quiet=True,
    meaning="AITER is built for AMD Instinct only; on other devices the package is not even looked for.",
)
NOT_INSTALLED = Code(
    "aiter.not-installed",
    _A,
    "needs amd-aiter {limit} or newer",
    meaning="No module named aiter can be found.",
)
FOREIGN = Code(
    "aiter.foreign-package",
    _A,
    "needs the module aiter of the distribution {limit}",
    meaning="PyPI has an unrelated package whose module is called aiter too.",
)
VERSION_UNKNOWN = Code(
    "aiter.version-unknown",
    _A,
    "needs metadata that says amd-aiter {limit} or newer",
    meaning="The module is there but its version is not: a bare source tree, or damaged metadata.",
)
TOO_OLD = Code(
    "aiter.too-old",
    _A,
    "needs amd-aiter {limit} or newer",
    meaning="Older releases were never compared with the others; min_version lowers the floor.",
)

SIGNATURE = Code(
    "aiter.signature",
    _C,
    "needs an AITER with {limit}",
    meaning="The installed function lacks a parameter, wants one more, or is not there.",
)
SOFT_CAP = Code(
    "aiter.soft-cap",
    _C,
    "computes {limit} wrongly",
    meaning="Known defect of this release on this device; an explicit backend raises.",
)
WINDOW_ZERO = Code(
    "aiter.window-zero",
    _C,
    "does not serve {limit}",
    meaning="AITER hands a row that sees its own key only to a kernel without windows, which refuses it.",
)
ONE_ROW = Code(
    "aiter.one-row",
    _C,
    "computes a request of one query row wrongly for {limit}",
    meaning="Known defect of the variable-length kernel (ROCm/aiter#2229).",
)
CAP_AND_WINDOW = Code(
    "aiter.cap-and-window",
    _C,
    "takes a soft cap or a window, not both",
    meaning="The decode kernel masks before it caps, so masked keys keep the weight exp(-cap).",
)
FP8_ENCODING = Code(
    "aiter.fp8-encoding",
    _C,
    "reads {limit} on this device",
    meaning="The two fp8 encodings differ by a factor of two; foreign bytes are refused, never reread.",
)
FP8_OUT = Code("aiter.fp8-out", _C, "writes {limit} here", meaning="fp8 inputs give a bfloat16 output only.")
FP8_LSE = Code(
    "aiter.fp8-lse", _C, "returns no log-sum-exp for fp8 inputs", meaning="The fp8 kernels do not write one."
)
CAUSAL_ONLY = Code(
    "aiter.causal-only",
    _C,
    "computes causal attention only",
    quiet=True,
    meaning="The kernel has no other mask.",
)
KV_SHORTER = Code(
    "aiter.kv-shorter-than-q",
    _C,
    "needs at least as many keys as query rows in every request",
    quiet=True,
    meaning="Rows without a key come out as NaN.",
)
LATENT_HEADS = Code(
    "aiter.latent-heads",
    _C,
    "takes {limit}",
    meaning="The latent kernels are written for DeepSeek's sizes.",
)
LATENT_ROWS = Code(
    "aiter.latent-rows",
    _C,
    "takes up to {limit} query rows, the same for every request",
    meaning="More rows have no kernel, or one that answers wrongly (ROCm/aiter#5679).",
)
LATENT_MASK = Code(
    "aiter.latent-mask",
    _C,
    "computes several query rows causally only",
    meaning="One row sees every key with either mask.",
)
EMPTY_REQUEST = Code(
    "aiter.empty-request",
    _C,
    "needs at least one key in every request",
    meaning="The decode kernel reads before its first partition for an empty request.",
)
WORKSPACE = Code(
    "aiter.workspace",
    _C,
    "needs a larger float_workspace_buffer",
    meaning="Partial results of every 256 keys go there; the kernel writes past a buffer that is too small.",
)
APPEND_LAYOUT = Code(
    "aiter.append-layout",
    _C,
    "writes {limit} only",
    quiet=True,
    meaning="The kernel takes one page stride and computes the rest; another layout would be corrupted.",
)

PAGE_ROUTE = Code(
    "aiter.page-route",
    _PF,
    "is routed at page_size {limit}",
    meaning="The page size has a kernel but is served faster another way; a preference, not a limit.",
)
GATHER_SHORT = Code(
    "aiter.gather-short-query",
    _PF,
    "does not repay copying the KV cache for q_len up to {limit}",
    meaning="The flat gather costs O(kv) whatever the query length.",
)
RAGGED_SHORT = Code(
    "aiter.ragged-short-query",
    _PF,
    "is slower on ragged KV for q_len up to {limit}",
    meaning="Measured crossover of ragged prefill; no copy is involved.",
)
DECODE_SHORT = Code(
    "aiter.decode-short-kv",
    _PF,
    "is slower for kv_len up to {limit}",
    meaning="Both known rows say never: no decode gate, by measurement.",
)
GRAPH_CAPACITY = Code(
    "aiter.graph-capacity",
    _PF,
    "is captured by itself only when the wrapper states max_seq_len",
    quiet=True,
    meaning="Grid and workspace are captured at capacity; without max_seq_len that is the whole cache.",
)
UNIFIED_BY_NAME = Code(
    "aiter.unified-by-name",
    _PF,
    "serves when named",
    quiet=True,
    meaning="Nobody has measured this path against the others; a threshold row of 'never' lets auto use it.",
)
APPEND_BY_NAME = Code(
    "aiter.append-by-name",
    _PF,
    "serves when named",
    quiet=True,
    meaning="auto appends natively; a threshold row of 'never' lets it use AITER.",
)

IMPORT_FAILED = Code(
    "aiter.import-failed", _P, "needs to import", meaning="import aiter raised, or tried to end the process."
)
BUILD_FAILED = Code(
    "aiter.build-failed",
    _P,
    "needs to build its kernel",
    meaning="The first call of a kernel variant, which compiles it, failed.",
)
SOFTSIGN = Code(
    "aiter.softsign",
    _P,
    "needs {limit} unset",
    meaning="The variable turns AITER's tanh soft cap into another function.",
)

CODES = tuple(value for value in dict(globals()).values() if isinstance(value, Code))
