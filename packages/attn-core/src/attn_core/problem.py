"""What is asked of a backend, apart from the batch: the facts of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch

from .batch import INT32_MAX
from .checking import whole
from .errors import needs


class Op(StrEnum):
    """Entry points a backend may serve."""

    DECODE = "decode"
    """Paged decode, one query row per request."""
    VERIFY = "verify"
    """Paged decode with ``q_len_per_req`` > 1 rows per request: a chain of draft tokens, causal."""
    PREFILL_PAGED = "prefill_paged"
    PREFILL_RAGGED = "prefill_ragged"
    PREFILL_SINGLE = "prefill_single"
    DECODE_SINGLE = "decode_single"
    APPEND = "append"
    """Write new keys and values into a paged cache."""

    @property
    def paged(self) -> bool:
        """Whether keys and values live in pages."""
        return self in (Op.DECODE, Op.VERIFY, Op.PREFILL_PAGED, Op.APPEND)


UNIFORM_OPS = (Op.DECODE, Op.VERIFY)
"""Entry points that bring the same number of query rows for every request."""


class MaskMode(StrEnum):
    """Which keys a query row may see.

    CAUSAL is bottom-right aligned: the last query row sees every key. CUSTOM is a bit per (query
    row, key) and replaces causal; it is how a tree of draft tokens is verified.
    """

    NONE = "none"
    CAUSAL = "causal"
    CUSTOM = "custom"


class PosEncoding(StrEnum):
    """Position encoding applied inside the kernel."""

    NONE = "NONE"
    ROPE_LLAMA = "ROPE_LLAMA"
    ALIBI = "ALIBI"


KV_ORDERS = ("NHD", "HND")


def check_kv_order(order: str) -> str:
    """Return ``order`` if it names a layout.

    Raises:
        ValueError: It does not.
    """
    if not isinstance(order, str) or order not in KV_ORDERS:
        raise ValueError(needs("kv_layout", "'NHD' or 'HND'", repr(order), "core.kv-layout"))
    return order


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Paged cache: NHD ``[pages, page_size, heads, dim]`` or HND ``[pages, heads, page_size, dim]``."""

    page_size: int
    order: str = "NHD"

    def __post_init__(self) -> None:
        check_kv_order(self.order)
        _positive("core.page-size", page_size=self.page_size)


@dataclass(frozen=True, slots=True)
class RaggedKV:
    """Contiguous keys and values: NHD ``[total_kv, heads, dim]`` or HND ``[heads, total_kv, dim]``."""

    order: str = "NHD"

    def __post_init__(self) -> None:
        check_kv_order(self.order)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """Everything about a call that is not its batch. Hashable; holds no tensor.

    Attributes:
        op: Entry point.
        num_qo_heads: Query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: Key/value heads.
        head_dim_qk: Elements of a query or key head.
        head_dim_vo: Elements of a value or output head.
        q_dtype: Query type.
        kv_dtype: Cache type. Its bytes are read as this type and no other.
        o_dtype: Output type.
        kv: Layout of keys and values.
        mask: Which keys a row sees.
        pos_encoding: Position encoding applied by the kernel.
        window_left: Keys to the left of the diagonal a row may see besides its own; -1 for all.
        logits_soft_cap: ``cap * tanh(x / cap)`` before the mask; 0 for none.
        sm_scale: Multiplies ``q @ k``.
        rope_scale: Position divisor of ROPE_LLAMA.
        rope_theta: Base of ROPE_LLAMA.
        needs_lse: The caller will ask for the log-sum-exp.
        use_tensor_cores: Decode was asked for on the matrix path.
        fixed_split_size: Cut every request's keys into chunks of this many pages (tokens when ragged),
            so that a request's bits do not depend on the rest of its batch; None lets the planner cut.
        disable_split_kv: Never cut; gives the same independence.
        latent: Values are the first ``head_dim_vo`` columns of the keys, in the same memory, and there is one
            key/value head: multi-head latent attention with the projections absorbed.
    """

    op: Op
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    kv: PagedKV | RaggedKV
    mask: MaskMode = MaskMode.NONE
    pos_encoding: PosEncoding = PosEncoding.NONE
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sm_scale: float = 1.0
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    needs_lse: bool = False
    use_tensor_cores: bool = False
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    latent: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _positive(
            "core.heads",
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim_qk,
            head_dim_vo=self.head_dim_vo,
        )
        if self.num_qo_heads % self.num_kv_heads:
            want = f"a multiple of num_kv_heads {self.num_kv_heads}"
            raise ValueError(needs("num_qo_heads", want, self.num_qo_heads, "core.heads"))
        if not -1 <= whole("window_left", self.window_left, "core.window") <= INT32_MAX:
            raise ValueError(needs("window_left", f"-1 to {INT32_MAX}", self.window_left, "core.window"))
        if self.logits_soft_cap and not 1e-18 <= self.logits_soft_cap <= 1e18:
            want = "0 (off) or 1e-18 to 1e18"  # beyond, x / cap leaves what float32 holds
            raise ValueError(needs("logits_soft_cap", want, self.logits_soft_cap, "core.soft-cap"))
        if self.fixed_split_size is not None:
            _positive("core.split-size", fixed_split_size=self.fixed_split_size)
        if self.latent and (self.num_kv_heads != 1 or self.head_dim_vo > self.head_dim_qk):
            got = f"{self.num_kv_heads} heads, head_dim {self.head_dim_qk} and {self.head_dim_vo}"
            want = "one key/value head whose values are part of its keys"
            raise ValueError(needs("latent", want, got, "core.latent"))
        if self.pos_encoding is PosEncoding.ROPE_LLAMA and self.head_dim_qk % 2:
            raise ValueError(
                needs("head_dim_qk", "an even number with ROPE_LLAMA", self.head_dim_qk, "core.rope")
            )
        # Routing looks the problem up on every plan; hashing all its fields each time would be most of it.
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, name) for name in _HASHED)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def gqa_group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def batch_invariant(self) -> bool:
        """Whether a request's bits must not depend on the rest of its batch."""
        return self.disable_split_kv or self.fixed_split_size is not None

    @property
    def page_size(self) -> int | None:
        """Tokens per page, or None when keys and values are not paged."""
        return self.kv.page_size if isinstance(self.kv, PagedKV) else None


_HASHED = tuple(name for name in AttentionProblem.__dataclass_fields__ if name != "_hash")


def _positive(code: str, **values: int) -> None:
    for name, value in values.items():
        if whole(name, value, code, 1) > INT32_MAX:
            raise ValueError(needs(name, f"at most {INT32_MAX}", value, code))
