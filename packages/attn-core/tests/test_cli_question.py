"""The question that ``attn explain`` builds: defaults, options, and the one the entry points ask."""

import json
import os

import pytest
import torch

from attn_core import (
    append_paged_kv_cache,
    route,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)
from attn_core.cli import app as cli_app
from attn_core.cli import explain as explaining
from attn_core.problem import Op

from .cli_kit import answer, explain, quick_backend
from .kit import decode_wrapper, paged_wrapper, pages, ragged_wrapper


@pytest.fixture
def quick(use):
    return use(quick_backend())


def test_every_op_has_a_question(quick):
    for op in Op:
        query = answer("--op", op.value, "--arch", "cpu")["query"]
        assert query["op"] == op.value
        assert (query["page_size"] == 16) == op.paged
        assert query["use_tensor_cores"] == (op.value.startswith("prefill") or op is Op.VERIFY)
        assert op.value in cli_app.explain.__annotations__["op"]


@pytest.mark.parametrize(
    ("op", "mask", "q_len", "batch"),
    [
        ("decode", "none", 1, 8),
        ("verify", "causal", 4, 8),
        ("prefill_paged", "causal", 512, 8),
        ("prefill_ragged", "causal", 512, 8),
        ("prefill_single", "causal", 512, 1),
        ("decode_single", "none", 1, 1),
    ],
)
def test_defaults(quick, op, mask, q_len, batch):
    query = answer("--op", op, "--arch", "cpu")["query"]
    pages = batch * 256 if query["page_size"] else 0
    assert query["mask"] == mask
    assert query["batch"] == {
        "batch_size": batch,
        "total_q": batch * q_len,
        "max_q_len": q_len,
        "uniform_q_len": q_len,
        "max_kv_len": 4096,
        "total_kv": batch * 4096,
        "total_pages": pages,
    }
    assert query["graph"] is None


BF16 = {"dtype": torch.bfloat16}


def _decode(rows, **options):
    paged = pages([32] * 2, page_size=16, heads=8, dim=128, **BF16)
    wrapper = decode_wrapper(**options)
    heads = (32, 8, 128, 16)
    wrapper.plan(*paged.table, *heads, q_data_type=torch.bfloat16, q_len_per_req=rows)


def _prefill_paged():
    paged = pages([32] * 2, page_size=16, heads=8, dim=128, **BF16)
    qo = torch.tensor([0, 3, 6], dtype=torch.int32)
    paged_wrapper().plan(qo, *paged.table, 32, 8, 128, 16, causal=True, q_data_type=torch.bfloat16)


def _prefill_ragged():
    indptrs = torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([0, 32, 64], dtype=torch.int32)
    ragged_wrapper().plan(*indptrs, 32, 8, 128, causal=True, q_data_type=torch.bfloat16)


def _prefill_single():
    q, kv = torch.zeros(3, 32, 128, **BF16), torch.zeros(32, 8, 128, **BF16)
    single_prefill_with_kv_cache(q, kv, kv, causal=True)


def _decode_single():
    single_decode_with_kv_cache(torch.zeros(32, 128, **BF16), *[torch.zeros(32, 8, 128, **BF16)] * 2)


def _append():
    paged = pages([32] * 2, page_size=16, heads=8, dim=128, **BF16)
    rows = torch.zeros(6, 8, 128, **BF16)
    where = (torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([29, 30, 31] * 2))
    where = tuple(w.to(torch.int32) for w in where)
    append_paged_kv_cache(rows, rows, *where, paged.cache, paged.indices, paged.indptr, paged.last)


@pytest.mark.parametrize(
    ("op", "args", "call"),
    [
        ("decode", [], lambda: _decode(1, use_tensor_cores=False)),
        ("decode", ["--tensor-cores"], lambda: _decode(1)),
        ("verify", ["--q-len", "3"], lambda: _decode(3)),
        ("prefill_paged", ["--q-len", "3"], _prefill_paged),
        ("prefill_ragged", ["--q-len", "3"], _prefill_ragged),
        ("prefill_single", ["--q-len", "3"], _prefill_single),
        ("decode_single", [], _decode_single),
        ("append", ["--q-len", "3"], _append),
    ],
)
def test_the_question_is_the_one_the_entry_point_asks(monkeypatch, op, args, call):
    """Problem and batch are compared as values with those of a real call."""
    asked = []

    chosen = route.choose

    def choose(screened, query, **rest):
        asked.append(query)
        return chosen(screened, query, **rest)

    monkeypatch.setattr(route, "choose", choose)
    call()
    args = [*args] if op.endswith("single") else [*args, "--batch", "2"]
    args = args if op == "append" else [*args, "--kv-len", "32"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = []
    judge = explaining._judge
    monkeypatch.setattr(explaining, "_judge", lambda query, *rest: seen.append(query) or judge(query, *rest))
    answer("--op", op, *args)
    (real,), (ours,) = asked, seen
    assert ours.problem == real.problem
    assert ours.batch == real.batch
    assert ours.target == real.target


def test_heads_and_head_dim_may_be_one_number(quick):
    query = answer("--op", "decode", "--arch", "cpu", "--heads", "16", "--head-dim", "64")["query"]
    assert (query["num_qo_heads"], query["num_kv_heads"]) == (16, 16)
    assert (query["head_dim_qk"], query["head_dim_vo"]) == (64, 64)


def test_graph_of_ragged_keys_counts_tokens(quick):
    query = answer("--op", "prefill_ragged", "--arch", "cpu", "--graph", "--kv-len", "100")["query"]
    assert query["graph"]["max_pages"] == 800


def test_every_option_arrives(quick):
    result = explain(
        "--op", "prefill_paged", "--arch", "cpu", "--batch", "2", "--q-len", "3", "--kv-len", "65",
        "--page-size", "32", "--heads", "12/4", "--head-dim", "192/128", "--dtype", "fp16", "--kv-dtype",
        "float8_e4m3fn", "--o-dtype", "fp32", "--layout", "HND", "--mask", "custom", "--pos-encoding",
        "ALIBI", "--soft-cap", "30.5", "--window", "100", "--fixed-split-size", "4",
        "--disable-split-kv", "--needs-lse", "--tensor-cores", "--graph", "--backend", "reference", "--json",
    )  # fmt: skip
    query = json.loads(result.stdout)["query"]  # whether anything serves all this at once is not asked
    assert query == {
        "op": "prefill_paged",
        "num_qo_heads": 12,
        "num_kv_heads": 4,
        "head_dim_qk": 192,
        "head_dim_vo": 128,
        "q_dtype": "float16",
        "kv_dtype": "float8_e4m3fn",
        "o_dtype": "float32",
        "mask": "custom",
        "pos_encoding": "ALIBI",
        "window_left": 100,
        "logits_soft_cap": 30.5,
        "sm_scale": pytest.approx(192**-0.5),
        "rope_scale": 1.0,
        "rope_theta": 10000.0,
        "needs_lse": True,
        "use_tensor_cores": True,
        "fixed_split_size": 4,
        "disable_split_kv": True,
        "latent": False,
        "kv_layout": "HND",
        "page_size": 32,
        "target": {
            "kind": "cpu",
            "arch": "cpu",
            "num_cus": os.cpu_count(),
            "wave_size": 1,
            "index": 0,
        },
        "batch": {
            "batch_size": 2,
            "total_q": 6,
            "max_q_len": 3,
            "uniform_q_len": 3,
            "max_kv_len": 65,
            "total_kv": 130,
            "total_pages": 6,
        },
        "graph": {"batch_size": 2, "total_q": 6, "max_pages": 6, "max_kv_len": 65},
        "backend": "reference",
        "assumed": {},
    }


def test_latent_attention_has_sizes_of_its_own(quick):
    query = answer("--op", "prefill_paged", "--latent", "--page-size", "1", "--arch", "cpu")["query"]
    sizes = [query[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")]
    assert (query["latent"], sizes) == (True, [16, 1, 576, 512])
    given = answer("--op", "prefill_paged", "--latent", "--heads", "128/1", "--arch", "cpu")["query"]
    assert given["num_qo_heads"] == 128
