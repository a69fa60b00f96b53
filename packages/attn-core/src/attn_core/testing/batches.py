"""Named batches: query rows and keys of each request, chosen where kernels go wrong."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Op


@dataclass(frozen=True, slots=True)
class Lengths:
    """One batch in tokens.

    Attributes:
        name: What the batch is about.
        q_len: Query rows of each request.
        kv_len: Keys of each request; 0 is a request without pages.
        q_len_per_req: Rows that a decode plan states, which a batch of no request still needs.
        shared: The first two requests share the pages that both fill.
    """

    name: str
    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    q_len_per_req: int = 1
    shared: bool = False


def _decode(page: int) -> list[Lengths]:
    kv = {
        "one": (33,),
        "uniform": (40, 40, 40),
        "mixed": (5, 130, 1, 17),
        "edges": (page, page + 1, 2 * page, max(1, page - 1)),
        "empty": (7, 0, 20),
        "long": (3, 517),
        "batch0": (),
    }
    found = [Lengths(name, (1,) * len(lens), lens) for name, lens in kv.items()]
    return [*found, Lengths("shared", (1, 1, 1), (2 * page + 3, 2 * page + 1, 9), shared=True)]


def _verify(page: int) -> list[Lengths]:
    kv = {
        "one": (4, (33,)),
        "uniform": (3, (40, 40, 40)),
        "mixed": (2, (5, 130, 2, 17)),
        "edges": (5, (page + 4, page + 5, 2 * page + 4, max(5, page - 1))),
        "tight": (8, (8, 9, 21)),  # nothing but drafts, and one token more
        "long": (4, (6, 517)),
        "batch0": (4, ()),
    }
    found = [Lengths(name, (n,) * len(lens), lens, n) for name, (n, lens) in kv.items()]
    return [*found, Lengths("shared", (2, 2, 2), (2 * page + 3, 2 * page + 2, 9), 2, shared=True)]


def _prefill(page: int) -> list[Lengths]:
    return [
        Lengths("one", (7,), (33,)),
        Lengths("uniform", (4, 4, 4), (40, 40, 40)),
        Lengths("mixed", (1, 9, 3), (5, 9, 130)),
        Lengths("edges", (1, 2, 3, 1), (page, page + 1, 2 * page, max(1, page - 1))),
        Lengths("empty", (3, 0, 2, 2), (7, 5, 0, 20)),
        Lengths("keyless", (6, 3, 2), (2, 0, 20)),  # under causal the first rows see nothing
        Lengths("tile", (70, 1), (131, 3)),
        Lengths("long", (2, 17), (517, 18)),
        Lengths("batch0", (), ()),
    ]


def _single_prefill() -> list[Lengths]:
    return [
        Lengths("one", (7,), (33,)),
        Lengths("square", (17,), (17,)),
        Lengths("tile", (70,), (131,)),
        Lengths("long", (2,), (517,)),
        Lengths("keyless", (6,), (2,)),
        Lengths("empty", (3,), (0,)),
    ]


def _single_decode() -> list[Lengths]:
    kv = {"one": 33, "first": 1, "long": 517, "empty": 0}
    return [Lengths(name, (1,), (n,)) for name, n in kv.items()]


def batches_of(op: Op, page_size: int | None) -> dict[str, Lengths]:
    """Return the batches an entry point is tested with; page borders follow ``page_size``."""
    page = page_size or 16
    found = {
        Op.DECODE: lambda: _decode(page),
        Op.VERIFY: lambda: _verify(page),
        Op.PREFILL_PAGED: lambda: [
            *_prefill(page),
            Lengths("shared", (2, 1, 4), (2 * page + 3, 2 * page + 1, 9), shared=True),
        ],
        Op.PREFILL_RAGGED: lambda: _prefill(page),
        Op.PREFILL_SINGLE: _single_prefill,
        Op.DECODE_SINGLE: _single_decode,
    }[op]()
    return {lengths.name: lengths for lengths in found}


_REPLAYS = {
    # Captured with the first, replayed with the others: longer, shorter, empty, and the first again.
    Op.DECODE: (((1,) * 4, (33, 5, 17, 1)), ((1,) * 4, (1, 64, 16, 40)), ((1,) * 4, (0, 9, 0, 97))),
    Op.VERIFY: (((3,) * 3, (33, 5, 17)), ((3,) * 3, (3, 64, 16)), ((3,) * 3, (4, 3, 97))),
    Op.PREFILL_PAGED: (
        ((4, 9, 5), (33, 9, 17)),
        ((1, 2, 3), (64, 2, 16)),
        ((0, 16, 2), (0, 20, 70)),
    ),
    Op.PREFILL_RAGGED: (
        ((4, 9, 5), (33, 60, 17)),
        ((1, 2, 3), (64, 2, 16)),
        ((0, 16, 2), (0, 20, 70)),
    ),
}
GRAPH_OPS = tuple(_REPLAYS)


def replays_of(op: Op) -> tuple[Lengths, ...]:
    """Return the batches that one captured wrapper of ``op`` goes through, in order."""
    found = [
        Lengths(f"replay{n}", q_len, kv_len, q_len[0] if op in (Op.DECODE, Op.VERIFY) else 1)
        for n, (q_len, kv_len) in enumerate(_REPLAYS[op])
    ]
    return (*found, found[0])
