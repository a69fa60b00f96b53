"""What does not fit is refused on one line, with exit code 2."""

import pytest

from attn_core import plugins

from .cli_kit import quick_backend, refused


@pytest.fixture
def quick(use):
    return use(quick_backend())


OPS = "decode, verify, prefill_paged, prefill_ragged, prefill_single, decode_single, append, chain_sampling"
BAD = [
    ("", f"--op: needs one of {OPS}, got nothing [cli.op]"),
    ("--op Decode", f"--op: needs one of {OPS}, got 'Decode' [cli.op]"),
    (
        "--op verify --q-len 4 --kv-len 2",
        "--q-len: needs at most --kv-len 2 for verify (append the drafts first), got 4 "
        "[core.kv-shorter-than-q]",
    ),
    ("--op verify --q-len 1", "--q-len: needs at least 2 for verify, got 1 [cli.q-len]"),
    ("--op decode --q-len 2", "--q-len: needs 1 for decode, got 2 [cli.q-len]"),
    ("--op decode_single --q-len 2", "--q-len: needs 1 for decode_single, got 2 [cli.q-len]"),
    ("--op decode --q-len 0", "--q-len: needs at least 1, got 0 [cli.q-len]"),
    ("--op decode --q-len four", "--q-len: needs a whole number, got 'four' [cli.q-len]"),
    ("--op decode --kv-len -1", "--kv-len: needs at least 0, got -1 [cli.kv-len]"),
    ("--op decode --kv-len 4294967296", "--kv-len: needs at most 2147483647, got 4294967296 [cli.kv-len]"),
    ("--op decode --batch 0", "--batch: needs at least 1, got 0 [cli.batch]"),
    ("--op decode --batch 1.5", "--batch: needs a whole number, got '1.5' [cli.batch]"),
    ("--op decode --page-size 0", "--page-size: needs at least 1, got 0 [cli.page-size]"),
    ("--op decode --heads 30/8", "--heads: needs a multiple of num_kv_heads 8, got 30 [core.heads]"),
    ("--op decode --heads 32/", "--heads: needs a whole number, got '' [cli.heads]"),
    ("--op decode --heads 8/0", "--heads: needs at least 1, got 0 [cli.heads]"),
    ("--op decode --head-dim 128/x", "--head-dim: needs a whole number, got 'x' [cli.head-dim]"),
    (
        "--op decode --dtype float12",
        "--dtype: needs the name of a torch dtype, got 'float12' [core.dtype]",
    ),
    ("--op decode --kv-dtype nn", "--kv-dtype: needs the name of a torch dtype, got 'nn' [core.dtype]"),
    ("--op decode --o-dtype x", "--o-dtype: needs the name of a torch dtype, got 'x' [core.dtype]"),
    ("--op decode --layout nhd", "--layout: needs one of NHD, HND, got 'nhd' [cli.layout]"),
    ("--op decode --mask causal", "--mask: needs none for decode, got 'causal' [cli.mask]"),
    ("--op verify --mask custom", "--mask: needs causal for verify, got 'custom' [cli.mask]"),
    (
        "--op prefill_paged --mask tree",
        "--mask: needs one of causal, none, custom for prefill_paged, got 'tree' [cli.mask]",
    ),
    (
        "--op decode --pos-encoding rope",
        "--pos-encoding: needs one of NONE, ROPE_LLAMA, ALIBI, got 'rope' [core.pos-encoding]",
    ),
    ("--op decode --soft-cap inf", "--soft-cap: needs a finite number, got 'inf' [cli.soft-cap]"),
    ("--op decode --soft-cap high", "--soft-cap: needs a finite number, got 'high' [cli.soft-cap]"),
    ("--op decode --soft-cap -1", "--soft-cap: needs 0 (off) or 1e-18 to 1e18, got -1.0 [core.soft-cap]"),
    ("--op decode --window -2", "--window: needs at least -1, got -2 [cli.window]"),
    (
        "--op decode --fixed-split-size 0",
        "--fixed-split-size: needs at least 1, got 0 [cli.fixed-split-size]",
    ),
    ("--op decode --arch mi300", "--arch: needs 'cpu', 'gfx...' or 'sm_...', got 'mi300' [core.arch-name]"),
    (
        "--op decode --arch gfx942:many",
        "--arch: needs a positive compute unit count after ':', got 'gfx942:many' [core.arch-name]",
    ),
    (
        "--op decode --backend fa9",
        "--backend: needs one of auto, quick, reference, got 'fa9' [core.backend-name]",
    ),
    ("--op decode --assume quick", "--assume: needs NAME=VERSION or NAME=none, got 'quick' [cli.assume]"),
    ("--op decode --assume =1", "--assume: needs NAME=VERSION or NAME=none, got '=1' [cli.assume]"),
    ("--op decode --assume a=1 --assume a=2", "--assume: needs one version of a, got two [cli.assume]"),
    ("--op decode --aiter 1 --assume aiter=1", "--assume: needs one version of aiter, got two [cli.assume]"),
    (
        "--op prefill_ragged --page-size 16",
        "--page-size: needs an op with a paged cache, got prefill_ragged [cli.option]",
    ),
    ("--op prefill_single --batch 2", "--batch: needs an op over a batch, got prefill_single [cli.option]"),
    (
        "--op append --graph",
        "--graph: needs an op whose wrapper can be captured, got append [cli.option]",
    ),
    (
        "--op decode_single --disable-split-kv",
        "--disable-split-kv: needs an op with a batch wrapper, got decode_single [cli.option]",
    ),
    *(
        (f"--op append {option}", f"{option.split()[0]}: needs an op that attends, got append [cli.option]")
        for option in (
            "--mask none",
            "--kv-len 8",
            "--window 8",
            "--soft-cap 1",
            "--needs-lse",
            "--tensor-cores",
            "--kv-dtype float16",
            "--o-dtype float16",
            "--pos-encoding NONE",
        )
    ),
]


@pytest.mark.parametrize(("args", "told"), BAD, ids=[args or "nothing" for args, _ in BAD])
def test_bad_input(quick, args, told):
    args = args if "--arch" in args else f"{args} --arch cpu"
    assert refused(*args.split()) == told
    assert refused(*args.split(), "--json") == told


def test_unreadable_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_CONFIG", str(tmp_path / "none.toml"))
    plugins.use(None)
    assert refused("--op", "decode").startswith("ATTN_CONFIG: needs a readable TOML file, got ")
