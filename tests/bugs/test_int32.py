from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attn_core

from .support import D_TC, Asked, Case, D, P, Rule, attend, close, i32, rnd, same_bits, served

HEADS, DIM = 8, 64
TOKEN = HEADS * DIM
PAGES_1, PAGES_32 = 8_401_239, 262_600
ELEMENTS = max(PAGES_1 * TOKEN, PAGES_32 * 32 * TOKEN)


def resident() -> int:
    """Bytes of this process that are backed by memory."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


@pytest.fixture(scope="module")
def pool() -> torch.Tensor:
    """8.6 GB of bf16 that nobody has touched: the system commits a page when it is written."""
    try:
        memory = torch.empty(ELEMENTS, dtype=torch.bfloat16)
    except RuntimeError as err:
        pytest.skip(f"this machine does not lend 8.6 GB of addresses: {err}")
    return memory


def small_and_large(memory: torch.Tensor, page_size: int, pages: tuple[int, ...], seed: int):
    """The same tokens in the first pages of a small cache and in the given ones of the pool."""
    (tokens,) = rnd(seed, (len(pages), page_size, HEADS, DIM), dtype=torch.bfloat16)
    cache = memory[: memory.numel() // (page_size * TOKEN) * page_size * TOKEN]
    cache = cache.view(-1, page_size, HEADS, DIM)
    cache[list(pages)] = tokens
    return tokens, cache


def test_b74_page_ids_past_the_32_bit_element(backend, pool):
    """Past 8.4 million pages the output was all zeros, or the server aborted. https://github.com/ROCm/aiter/issues/2517"""
    before = resident()
    first = 8_400_000
    tokens, cache = small_and_large(pool[: PAGES_1 * TOKEN], 1, tuple(range(first, first + 512)), 0)
    (q,) = rnd(74, (512, HEADS, DIM), dtype=torch.bfloat16)
    tables = tuple(tuple(range(128 * n, 128 * n + 128)) for n in range(4))
    case = Case(q, tokens, tokens, tables, (1,) * 4, (128,) * 4)
    far = case.but(k=cache, v=cache, tables=tuple(tuple(first + p for p in table) for table in tables))
    rule = Rule(causal=True)
    got = attend(P, backend, far, Asked(rule))
    close(got, case.want(rule), torch.bfloat16)
    near = attend(P, backend, case, Asked(rule))
    assert all(same_bits(a, b) for a, b in zip(got, near, strict=True))
    assert resident() - before < 512 << 20


@pytest.mark.parametrize("way", [D, D_TC, P])
def test_b75_page_stride_times_page_id(backend, way, pool):
    """Page id times page stride wrapped at 32 bits: another page was read. https://github.com/flashinfer-ai/flashinfer/pull/3136"""
    before = resident()
    # each last id is on the far side of 2**31 or 2**32 elements, or bytes
    for pages in ((0, 131_072, 262_599), (131_071, 131_072), (262_143, 262_144), (65_535, 65_536)):
        tokens, cache = small_and_large(pool[: PAGES_32 * 32 * TOKEN], 32, pages, 75)
        (q,) = rnd(76, (1, HEADS, DIM), dtype=torch.bfloat16)
        case = Case(q, tokens, tokens, (tuple(range(len(pages))),), (29,))
        far = case.but(k=cache, v=cache, tables=(pages,))
        got = attend(way, backend, far)
        close(got, case.want(), torch.bfloat16)
        near = attend(way, backend, case)
        assert all(same_bits(a, b) for a, b in zip(got, near, strict=True)), pages
    assert resident() - before < 512 << 20


def test_b75_append_past_the_32_bit_element(backend, pool):
    """Page id times page stride wrapped at 32 bits: another page was read. https://github.com/flashinfer-ai/flashinfer/pull/3136"""
    before = resident()
    pages = (0, 131_072, 262_599)
    tokens, cache = small_and_large(pool[: PAGES_32 * 32 * TOKEN], 32, pages, 77)
    rows = rnd(78, (3, HEADS, DIM), dtype=torch.bfloat16)[0]
    with served(backend):
        attn_core.append_paged_kv_cache(
            rows, rows, i32(0, 0, 0), i32(5, 36, 68), (cache, cache), i32(*pages), i32(0, 3), i32(29),
            backend=backend,
        )  # fmt: skip
    for at, (page, slot) in enumerate(((0, 5), (1, 4), (2, 4))):
        tokens[page, slot] = rows[at]
    assert same_bits(cache[list(pages)], tokens)
    assert resident() - before < 512 << 20
