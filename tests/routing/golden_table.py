"""The table of all routing decisions, and the command that writes it again.

    python tests/routing/golden_table.py --write

One file per state of AITER. A row is an entry point, what is special about the problem, and the page sizes
that share a fate; a cell is one device. ``fa2/tile 1-16 {aiter.gather-short-query}`` reads: chosen for query
lengths 1 to 16 of those asked about, with these causes told as the fallback reason; entries are separated by
``;``. ``none`` is a refusal.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from attn_core.backend import Backend
from attn_core.errors import NoRoute
from attn_core.problem import AttentionProblem, MaskMode, Op, PagedKV, RaggedKV
from attn_core.query import Query
from attn_core.reasons import worth_telling
from attn_core.route import choose, screen

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from standin import TARGETS, backends, shape  # type: ignore[import-not-found]
else:
    from .standin import TARGETS, backends, shape

FOLDER = Path(__file__).parent / "golden"
STATES = {"none": "none", "too-old": "0.1.7.post2.dev18", "0.1.20": "0.1.20"}
PAGES = (1, 16, 64, 1024)
LENGTHS = (1, 4, 8, 9, 16, 17, 24, 256)
OF_OP = {
    Op.DECODE: (1,),
    Op.DECODE_SINGLE: (1,),
    Op.VERIFY: tuple(n for n in LENGTHS if n > 1),
    Op.APPEND: (1,),
}
LATENT = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512}
FP8_OF_ARCH = {"gfx942": torch.float8_e4m3fnuz}
HEAD = ("op", "special", "page_size", "gfx942", "gfx950", "cpu", "sm_90", "gfx90a")


def special(op: Op, arch: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is asked beside the plain problem, as changes to it."""
    fp8 = FP8_OF_ARCH.get(arch, torch.float8_e4m3fn)
    yield "", {}
    yield "fp8 kv", {"kv_dtype": fp8, **({"q_dtype": fp8, "o_dtype": fp8} if op is Op.APPEND else {})}
    yield "HND", {"order": "HND"}
    yield "head_dim 192/128", {"head_dim_qk": 192}
    if op is Op.APPEND:
        return
    yield "soft cap", {"logits_soft_cap": 30.0}
    yield "window", {"window_left": 127}
    yield "window 0", {"window_left": 0}
    yield "lse", {"needs_lse": True}
    if op in (Op.DECODE, Op.VERIFY, Op.DECODE_SINGLE):
        yield "tensor cores", {"use_tensor_cores": True}
        return
    if op is Op.PREFILL_PAGED:
        yield "latent", {"latent": True, **LATENT}
        yield "latent lse", {"latent": True, "needs_lse": True, **LATENT}
    yield "mask", {"mask": MaskMode.CUSTOM}
    yield "fp8 q and kv", {"q_dtype": fp8, "kv_dtype": fp8}


def make(op: Op, page: int | None, **changes: Any) -> AttentionProblem:
    """A problem of bf16, 32 query heads over 8, head_dim 128."""
    order = changes.pop("order", "NHD")
    kv = RaggedKV(order) if page is None else PagedKV(page, order)
    facts: dict[str, Any] = {
        "num_qo_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128, "head_dim_vo": 128,
        "q_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "o_dtype": torch.bfloat16,
        "mask": MaskMode.NONE if op in (Op.DECODE, Op.DECODE_SINGLE, Op.APPEND) else MaskMode.CAUSAL,
        "use_tensor_cores": op not in (Op.DECODE, Op.DECODE_SINGLE, Op.APPEND),
    }  # fmt: skip
    return AttentionProblem(op=op, kv=kv, **{**facts, **changes})


def decide(using: tuple[Backend, ...], arch: str, problem: AttentionProblem, lengths: tuple[int, ...]) -> str:
    """Return a cell: neighbouring query lengths with one decision and one set of causes share an entry."""
    target = TARGETS[arch]
    screened = screen(target, problem, using)
    said = []
    for length in lengths:
        try:
            found = choose(screened, Query(target, problem, shape(length, page=problem.page_size)))
            candidate, refused = found.candidate, found.refused
        except NoRoute as err:
            candidate, refused = "none", err.reasons
        told = dict.fromkeys(reason.code.slug for reason in worth_telling(refused, candidate))
        said.append((candidate, " ".join(told), length))
    entries = []
    for (candidate, causes), group in groupby(said, key=lambda entry: entry[:2]):
        of = [length for _, _, length in group]
        where = "" if len(of) == len(lengths) else f" {of[0]}" + (f"-{of[-1]}" if len(of) > 1 else "")
        entries.append(candidate + where + (f" {{{causes}}}" if causes else ""))
    return "; ".join(entries)


@cache
def table(state: str) -> str:
    """Return the CSV of one state of AITER."""
    using = backends(STATES[state])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEAD)
    for op in Op:
        pages = PAGES if op.paged else (None,)
        for at, (name, _) in enumerate(special(op, "")):
            cells: dict[int | None, tuple[str, ...]] = {}
            for page in pages:
                cells[page] = tuple(
                    decide(
                        using, arch, make(op, page, **list(special(op, arch))[at][1]), OF_OP.get(op, LENGTHS)
                    )
                    for arch in HEAD[3:]
                )
            for same, group in groupby(pages, key=lambda page: cells[page]):
                of = [str(page) for page in group if page is not None]
                writer.writerow((op.value, name or "plain", " ".join(of), *same))
    return out.getvalue()


def main() -> None:
    """Write the files, or with no argument say which differ."""
    FOLDER.mkdir(exist_ok=True)
    for state in STATES:
        file = FOLDER / f"{state}.csv"
        if "--write" in sys.argv:
            file.write_text(table(state), encoding="utf-8")
        same = file.exists() and file.read_text(encoding="utf-8") == table(state)
        print(f"{file.name}: {'as decided' if same else 'DIFFERS'}")


if __name__ == "__main__":
    main()
