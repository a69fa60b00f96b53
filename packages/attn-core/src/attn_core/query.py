"""The complete input of a routing decision."""

from __future__ import annotations

from dataclasses import dataclass

from .batch import BatchShape
from .problem import AttentionProblem
from .target import DeviceTarget


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Capacities that a captured wrapper was built for; a launch may depend on these only.

    Attributes:
        batch_size: Requests, exactly.
        total_q: Query rows, at most (exactly for decode).
        max_pages: Entries of the page index buffer (tokens for ragged keys), at most.
        max_kv_len: Longest sequence in tokens, or None for whatever ``max_pages`` allows.
    """

    batch_size: int
    total_q: int
    max_pages: int
    max_kv_len: int | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """Routing is a pure function of this value. Hashable, so decisions can be compared and kept.

    Attributes:
        target: Device to decide for.
        problem: What is asked, apart from the batch.
        batch: Integers of the batch.
        graph: Capacities when the call will be captured.
        workspace_bytes: Float workspace at hand, in bytes; None when as much as asked for will be found.
            A plan that splits keys only to go faster fits itself into it instead of failing.
    """

    target: DeviceTarget
    problem: AttentionProblem
    batch: BatchShape
    graph: GraphLimits | None = None
    workspace_bytes: int | None = None
