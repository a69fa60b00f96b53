"""What a captured graph has baked in, in one object compared in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from .errors import needs
from .problem import AttentionProblem
from .query import GraphLimits


@dataclass(frozen=True, slots=True)
class FrozenShape:
    """Facts a replay cannot change. A re-plan must equal this object: there is no field list to forget.

    Attributes:
        q_len_per_req: Query rows of every request in decode, None in prefill.
        problem: Heads, types, layout, mask mode, scales.
        limits: Capacities.
        candidate: ``backend/path`` that was captured.
        launch: The backend's launch, which depends on the capacities only.
        layout: Names and sizes, in 32-bit words, of the index arrays.
    """

    q_len_per_req: int | None
    problem: AttentionProblem
    limits: GraphLimits
    candidate: str
    launch: object
    layout: tuple[tuple[str, int], ...]

    def require(self, other: FrozenShape) -> None:
        """Check that a re-plan keeps every baked-in fact.

        Raises:
            ValueError: It does not; names each fact, its frozen value and the one asked for.
        """
        if self == other:
            return
        changes = list(_changes(self, other))
        # A launch or a layout differs because of another fact, where there is one to name.
        told = [c for c in changes if c[0] not in ("launch", "layout")]
        said = told or [(name, "the captured one", "another") for name, _, _ in changes]
        text = "; ".join(f"{name} is frozen at {was}, asked for {now}" for name, was, now in said)
        raise ValueError(
            f"plan: a CUDA-graph wrapper keeps the shape of its first plan: {text} [core.graph-frozen]. "
            "Use one wrapper per shape, or a DecodePlanPool"
        )


def _changes(a: object, b: object) -> Iterator[tuple[str, object, object]]:
    for f in fields(a):  # type: ignore[arg-type]
        was, now = getattr(a, f.name), getattr(b, f.name)
        if was == now or not f.compare:
            continue
        if f.name in ("problem", "limits"):
            yield from _changes(was, now)
        else:
            yield f.name, was, now


def check_capacity(
    limits: GraphLimits, *, batch_size: int, total_q: int, pages: int, max_kv_len: int
) -> None:
    """Check a batch against the buffers of a CUDA-graph wrapper.

    Raises:
        ValueError: The batch does not fit; nothing has changed.
    """
    if batch_size != limits.batch_size:
        want = f"the {limits.batch_size} requests its buffers were made for (the batch size should be fixed)"
        raise ValueError(needs("batch size of a CUDA-graph wrapper", want, batch_size, "core.graph-batch"))
    if total_q > limits.total_q:
        want = f"at most {limits.total_q}, frozen (they cannot exceed the number of rows of the first plan)"
        raise ValueError(needs("query rows of a CUDA-graph wrapper", want, total_q, "core.graph-rows"))
    if pages > limits.max_pages:
        want = f"at most {limits.max_pages} entries (what exceeds the allocated buffer size has no place)"
        raise ValueError(needs("kv_indices of a CUDA-graph wrapper", want, pages, "core.graph-pages"))
    if limits.max_kv_len is not None and max_kv_len > limits.max_kv_len:
        want = f"at most max_seq_len {limits.max_kv_len} tokens"
        raise ValueError(needs("kv length", want, max_kv_len, "core.graph-kv-len"))
