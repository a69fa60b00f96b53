"""Every encoding of fp8 on either processor: computed right, or refused by name, never read as the other."""

from __future__ import annotations

import pytest
import torch

from attn_core.problem import Op

from .golden_table import make
from .standin import route

OWN = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
ENCODINGS = tuple(OWN.values())
CACHES = (*ENCODINGS, torch.float8_e5m2, torch.float8_e5m2fnuz)


@pytest.mark.parametrize("arch", sorted(OWN))
@pytest.mark.parametrize("kv", CACHES, ids=str)
@pytest.mark.parametrize("q", [torch.float16, torch.bfloat16, *ENCODINGS], ids=str)
@pytest.mark.parametrize(("op", "page", "q_len"), [(Op.DECODE, 16, 1), (Op.PREFILL_PAGED, 16, 4),
                         (Op.PREFILL_PAGED, 16, 256), (Op.PREFILL_RAGGED, None, 256)])  # fmt: skip
def test_whoever_takes_a_cache_knows_its_encoding(
    op: Op, page: int | None, q_len: int, q: torch.dtype, kv: torch.dtype, arch: str
) -> None:
    half = q not in ENCODINGS
    problem = make(op, page, q_dtype=q, kv_dtype=kv, o_dtype=q if half else torch.bfloat16)
    try:
        candidate = route(problem, q_len, arch=arch).candidate
    except NotImplementedError as err:
        candidate, text = None, str(err)
        assert any(str(dtype).removeprefix("torch.") in text for dtype in (q, kv))
    if half:
        assert candidate == "fa2/tile"  # which reads all; see attn-hip's test_amd_fp8.py
    elif candidate is not None:
        assert (candidate, q, kv) == ("aiter/native", OWN[arch], OWN[arch])
    elif op is Op.PREFILL_PAGED and q is kv is OWN[arch]:
        pytest.fail("nobody takes what the processor is made for")
