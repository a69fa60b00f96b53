"""The tool that runs a directory of FlashInfer's tests, on one that is made here."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "upstream_tests.py"
HELPER = "def dim():\n    return 64\n"
WORKS = """
import subprocess
import sys

import pytest
import torch

import flashinfer
from tests.test_helpers.sizes import dim

WORDS = torch.cuda.is_available()


@pytest.mark.some_mark_of_theirs
@pytest.mark.parametrize("kv_len", [3, 5, 10**9])
@pytest.mark.parametrize("head_dim", [dim()])
def test_graph(kv_len, head_dim):
    assert WORDS and kv_len < 10**9
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda:0"), "NHD", use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.empty(2, dtype=torch.int32, device="cuda"),
        paged_kv_indices_buffer=torch.empty(1, dtype=torch.int32).to(0),
        paged_kv_last_page_len_buffer=torch.empty(1, dtype=torch.int32).cuda(),
    )
    cache = torch.randn(1, 2, 16, 1, head_dim, dtype=torch.float16, device=0)
    q = torch.randn(1, 1, head_dim, dtype=torch.float16, device="cuda")

    def plan(length):
        arrays = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0], [length]))
        wrapper.plan(*arrays, 1, 1, head_dim, 16)

    plan(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wrapper.run(q, cache)
    torch.testing.assert_close(out[0], cache[0, 1, 0])
    plan(kv_len)
    graph.replay()
    keys, values = cache[0, :, :kv_len]
    want = flashinfer.single_decode_with_kv_cache(q[0], keys, values)
    torch.testing.assert_close(out[0], want, rtol=1e-3, atol=1e-3)


def test_function_in_a_graph():
    v, s = torch.zeros(3, 1, 8, device="cuda"), torch.zeros(3, 1, device="cuda")
    mask = torch.tensor([True, False, True], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashinfer.merge_state_in_place(v, s, torch.ones_like(v), s.clone(), mask)
    v.zero_()
    s.zero_()
    mask.logical_not_()
    graph.replay()
    assert v[:, 0, 0].tolist() == [0.0, 0.5, 0.0]


def test_large_heads():
    if flashinfer.utils.get_compute_capability(torch.device("cuda"))[0] < 8:
        pytest.skip("another GPU")
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("another GPU")


def test_refused():
    flashinfer.norm.rmsnorm(torch.ones(1, 8, device="cuda"), torch.ones(8))


def test_program():
    program = "import torch, flashinfer.decode; torch.cuda.synchronize()"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_theirs_fails():
    assert flashinfer.decode is None


def test_skipped():
    pytest.skip("no device")
"""
NOT_HERE = "import flashinfer.comm\n\n\ndef test_comm():\n    assert flashinfer.comm\n"


def test_outcomes_are_counted_by_kind(tmp_path):
    tests = tmp_path / "theirs"
    (tests / "test_helpers").mkdir(parents=True)
    (tests / "test_helpers" / "sizes.py").write_text(HELPER)
    (tests / "attention").mkdir()
    (tests / "attention" / "test_works.py").write_text(WORKS)
    (tests / "attention" / "test_not_here.py").write_text(NOT_HERE)
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, TOOL, tests, "--cost", "1e6", "--json", out],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "| attention/test_works.py | 5 | 1 | 1 | 1 |" in done.stdout, done.stdout
    kinds = {told["test"].partition("::")[2]: told for told in json.loads(out.read_text())}
    assert kinds["test_refused"]["kind"] == "refused"
    assert "core.not-here" in kinds["test_refused"]["why"]
    assert kinds["test_theirs_fails"]["kind"] == "failed"
    assert "1000000000" not in "".join(kinds)
    assert (tests / "attention" / "test_works.py").read_text() == WORKS
