"""Measures what ``attn_hip.budget`` is about: resources of builds, and the instructions of loops."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attn_hip import budget, codeobject, variants
from attn_hip.budget import FILE, LOOP_COUNTS, waves_per_simd
from attn_hip.variants import Variant

from .attention import BF16, E5, E5_FNUZ, FN, FNUZ, Case, attend, inputs
from .device import CSRC, Device, made
from .isa import BYTES_PER_CLOCK, Counts

NEVER_SPLIT = {"disable_split_kv": True}
STEP = 64


@dataclass(frozen=True)
class Loop:
    """A problem whose length is varied to see what a step costs.

    Attributes:
        case: With some number of keys.
        few: Keys of the first run.
        many: Keys of the second.
        decode: Whether memory is the limit, and not the matrix units.
    """

    case: Case
    few: int
    many: int
    decode: bool

    @property
    def name(self) -> str:
        return self.case.name


def _decode(name: str, group: int, dim: int, **more: Any) -> Loop:
    case = Case(name, (1,), (1,), (group, 1), (dim, dim), options=NEVER_SPLIT, **more)
    return Loop(case, 512, 1024, True)


def _prefill(name: str, dim: int, **more: Any) -> Loop:
    # Rows stand behind all keys, so that no step is masked.
    case = Case(name, (64,), (1,), (1, 1), (dim, dim), page=0, options=NEVER_SPLIT, **more)
    return Loop(case, 256, 512, False)


LOOPS = (
    _decode("decode 64, group 4", 4, 64),
    _decode("decode 128, group 4", 4, 128),
    _decode("decode 128, group 8", 8, 128),
    _decode("decode 128, group 16", 16, 128),
    _decode("decode 128 e4m3fn, group 8", 8, 128, dtypes=(BF16, FN, BF16)),
    _decode("decode 128 e4m3fnuz, group 8", 8, 128, dtypes=(BF16, FNUZ, BF16)),
    _decode("decode 128 e5m2, group 8", 8, 128, dtypes=(BF16, E5, BF16)),
    _decode("decode 128 e5m2fnuz, group 8", 8, 128, dtypes=(BF16, E5_FNUZ, BF16)),
    _decode("decode 256, group 8", 8, 256),
    _prefill("prefill 64", 64),
    _prefill("prefill 128", 128),
    _prefill("prefill 128 e4m3fn", 128, dtypes=(BF16, FN, BF16)),
    _prefill("prefill 128 e4m3fnuz", 128, dtypes=(BF16, FNUZ, BF16)),
    _prefill("prefill 128 e5m2", 128, dtypes=(BF16, E5, BF16)),
    _prefill("prefill 128 e5m2fnuz", 128, dtypes=(BF16, E5_FNUZ, BF16)),
    _prefill("prefill 256", 256),
)


def all_variants(arch: str) -> tuple[Variant, ...]:
    return (*variants.attend_variants(arch), *variants.misc_variants(arch).values())


def resource_row(variant: Variant, arch: str, compiler: str, sources: Path = CSRC) -> dict[str, Any]:
    """Build a code object by the product's own command, or find it, and read it."""
    r = codeobject.resources(made(variant, arch, compiler, sources).code)[variant.entry]
    return {
        "variant": variant.name, "arch": arch, "compiler": compiler, "vgpr": r.vgpr, "agpr": r.agpr,
        "sgpr": r.sgpr, "lds": r.lds + variant.lds, "scratch": r.scratch, "vgpr_spills": r.vgpr_spills,
        "sgpr_spills": r.sgpr_spills,
        "waves": waves_per_simd(arch, r.vgpr, r.lds + variant.lds, variant.threads),
    }  # fmt: skip


def counted(device: Device, loop: Loop) -> Counts:
    """Return what the longer run executed more than the shorter one."""
    seen = []
    for keys in (loop.many, loop.few):
        case = replace(loop.case, kv_len=(keys,))
        device.launched.clear()
        device.profile = True
        try:
            attend(device, case, inputs(case))
        finally:
            device.profile = False
        assert len(device.launched) == 1
        seen.append(device.launched[0][1])
    return seen[0] - seen[1]


def key_bytes(loop: Loop) -> int:
    """Bytes of K and V between the two runs."""
    return (loop.many - loop.few) * sum(loop.case.dims) * loop.case.dtypes[1].itemsize


def loop_row(device: Device, loop: Loop) -> dict[str, Any]:
    more = counted(device, loop)
    steps = (loop.many - loop.few) / STEP
    rate = BYTES_PER_CLOCK[device.arch]
    return {
        "case": loop.name, "arch": device.arch, "compiler": device.compiler,
        **{kind: round(more.of(kind) / steps) for kind in LOOP_COUNTS},
        "matrix_over_vector": round(more.matrix_clocks / max(1, more.vector_clocks), 3),
        "issue_over_memory": round(more.issue_clocks * rate / key_bytes(loop), 3),
        "conflicts": round(more.conflicts(), 3),
        "wide_loads": round(more.matching(r"global_load_(lds_)?dwordx4") * 64 * 16 / key_bytes(loop), 3),
        "exp_per_score": round(
            more.matching("v_exp") * 64 / ((loop.many - loop.few) * (64 if not loop.decode else 16)), 3
        ),
    }  # fmt: skip


def write(resource_rows: list[dict[str, Any]], loop_rows: list[dict[str, Any]]) -> None:
    """Write the budget, a row a line."""
    parts = []
    for name, rows in (("resources", resource_rows), ("loops", loop_rows)):
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        parts.append(f'  "{name}": [\n{lines}\n  ]')
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    budget.load.cache_clear()
