"""What a caller's type checker makes of the public functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CALLER = """
from typing import assert_type

import torch
from torch import Tensor

import attn_core

Pair = tuple[Tensor, Tensor]


def paged(
    wrapper: attn_core.BatchDecodeWithPagedKVCacheWrapper | attn_core.BatchPrefillWithPagedKVCacheWrapper
    | attn_core.BatchAttentionWithAttentionSinkWrapper,
    q: Tensor, kv: Tensor, sink: Tensor, some: bool,
) -> None:
    assert_type(wrapper.run(q, kv), Tensor)
    assert_type(wrapper.run(q, kv, sink, out=q, q_scale=2.0), Tensor)
    assert_type(wrapper.run(q, (kv, kv), lse=q, return_lse=False), Tensor)
    assert_type(wrapper.run(q, kv, out=q, return_lse=True), Pair)
    assert_type(wrapper.run(q, kv, return_lse=some), Tensor | Pair)
    wrapper.run(q, kv, otu=q)  # error: call-overload
    wrapper.run(q, kv, out=3)  # error: call-overload


def ragged(wrapper: attn_core.BatchPrefillWithRaggedKVCacheWrapper, q: Tensor, k: Tensor) -> None:
    assert_type(wrapper.run(q, k, k), Tensor)
    assert_type(wrapper.run(q, k, k, return_lse=True, o_scale=1.0), Pair)


def latent(wrapper: attn_core.BatchMLAPagedAttentionWrapper, q: Tensor, kv: Tensor, some: bool) -> None:
    assert_type(wrapper.run(q, q, kv, kv), Tensor)
    assert_type(wrapper.run(q, q, kv, kv, q, return_lse=True), Pair)
    assert_type(wrapper.run(q, q, kv, kv, None, None, some), Tensor | Pair)


def sparse(
    wrapper: attn_core.BlockSparseAttentionWrapper | attn_core.VariableBlockSparseAttentionWrapper,
    q: Tensor, k: Tensor,
) -> None:
    assert_type(wrapper.run(q, k, k), Tensor)
    assert_type(wrapper.run(q, k, k, return_lse=True), Pair)


def single(q: Tensor, k: Tensor, some: bool) -> None:
    assert_type(attn_core.single_decode_with_kv_cache(q, k, k), Tensor)
    assert_type(attn_core.single_decode_with_kv_cache(q, k, k, "HND", return_lse=True), Pair)
    assert_type(attn_core.single_prefill_with_kv_cache(q, k, k, causal=True), Tensor)
    assert_type(attn_core.single_prefill_with_kv_cache(q, k, k, return_lse=True), Pair)
    assert_type(attn_core.single_prefill_with_kv_cache(q, k, k, return_lse=some), Tensor | Pair)
    attn_core.single_prefill_with_kv_cache(q, k, k, return_lse=1)  # error: call-overload
"""


def test_return_lse_decides_the_type_of_the_result(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    caller = tmp_path / "caller.py"
    caller.write_text(CALLER, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--hide-error-context",
        str(caller),
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    wanted = [n for n, line in enumerate(CALLER.splitlines(), 1) if "# error: " in line]
    assert not found.stderr
    assert {int(line.split(":")[1]) for line in errors} == set(wanted), found.stdout
    assert all("[call-overload]" in line for line in errors), found.stdout
