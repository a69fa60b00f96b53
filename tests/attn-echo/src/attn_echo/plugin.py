"""Everything attn-core needs to know: one capability row, plan(), run(), and a hook that returns them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from attn_core.backend import API_VERSION, Backend, DeviceImage, Path, PlanResult, RunIO
from attn_core.batch import HostBatch
from attn_core.capability import Capability
from attn_core.hookspecs import hookimpl
from attn_core.problem import AttentionProblem, MaskMode, Op, PagedKV
from attn_core.query import Query
from attn_core.reasons import Reason
from attn_core.rules import Rule
from attn_core.target import DeviceTarget

LAST = 2000
"""Behind every other backend, the reference included: nobody gets this one who does not name it."""

CAPABILITY = Capability(
    archs=frozenset({"cpu"}),
    ops=frozenset({Op.DECODE}),
    q_dtypes=frozenset({torch.float32}),
    kv_dtypes=frozenset({torch.float32}),
    kv_orders=frozenset({"NHD"}),
    masks=frozenset({MaskMode.NONE}),
)


class Echo:
    """Serves what ``CAPABILITY`` says and nothing else."""

    api_version = API_VERSION
    name = "echo"
    paths = (Path("loop", CAPABILITY),)
    rules: tuple[Rule, ...] = ()

    def __init__(self, rank: int = LAST) -> None:
        self.rank = rank

    def unavailable(self, target: DeviceTarget) -> Reason | None:
        """Needs nothing but torch."""
        return None

    def prepare(self, target: DeviceTarget, problem: AttentionProblem, path: str) -> Reason | None:
        """Has nothing to build."""
        return None

    def plan(self, query: Query, path: str, batch: HostBatch) -> PlanResult:
        """Needs no more than the problem; the core brings the index arrays."""
        return PlanResult(launch=query.problem)

    @torch.no_grad()
    def run(self, launch: object, image: DeviceImage, io: RunIO) -> None:
        """Attend, one request after another."""
        assert isinstance(launch, AttentionProblem)
        start = image["kv_indptr"].tolist()
        for n, kv_len in enumerate(image["kv_len"].tolist()):
            attend(launch, n, image["kv_indices"][start[n] : start[n + 1]].long(), kv_len, io)


def attend(p: AttentionProblem, n: int, pages: torch.Tensor, kv_len: int, io: RunIO) -> None:
    """Write row ``n`` of out and lse."""
    assert isinstance(p.kv, PagedKV)
    heads = torch.arange(p.num_qo_heads, device=io.q.device) // p.gqa_group_size
    k, v = (t[pages].flatten(0, 1)[:kv_len, heads] for t in (io.k, io.v))
    logits = torch.einsum("hd,khd->hk", io.q[n] * io.q_scale, k) * p.sm_scale * io.k_scale
    lse = logits.logsumexp(1) if kv_len else logits.new_full((p.num_qo_heads,), -torch.inf)
    weights = torch.exp(logits - lse[:, None])  # no key: no columns, so no NaN from -inf
    io.out[n] = torch.einsum("hk,khd->hd", weights, v) * io.v_scale
    if io.lse is not None:
        io.lse[n] = lse / math.log(2)


@hookimpl
def attn_backends(api_version: int, config: Mapping[str, Mapping[str, object]]) -> Sequence[Backend]:
    """Create the backend. Option ``rank`` (int) says where ``auto`` tries it; lower is earlier.

    Raises:
        TypeError: ``rank`` is not an int.
    """
    rank = config.get("echo", {}).get("rank", LAST)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"echo: rank: needs an int, got {rank!r} [echo.rank]")
    return (Echo(rank),)
