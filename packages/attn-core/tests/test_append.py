"""Rows written into a paged cache: those slots, exactly, and no other byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core.backend import AppendIO
from attn_core.cache_view import CacheView
from attn_core.capability import Capability, Dims
from attn_core.errors import NoRoute, Unsupported
from attn_core.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from attn_core.problem import Op
from attn_core.reasons import Reason, Stage
from attn_core.rules import Rule

from .fakes import BUILD, WRONG, FakeBackend
from .kit import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, bits, ints, offsets, pages, same_bits


def rows(count, heads, dim, dtype, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, heads, dim, generator=generator).to(dtype)


def written(p, key, value, batch, position, skip=()):
    """The caches after the append, one slot at a time."""
    k, v = (t.clone() for t in p.cache)
    for n in range(len(batch)):
        if batch[n] < 0:
            continue
        page = int(p.indices[int(p.indptr[batch[n]]) + position[n] // p.page_size])
        slot = position[n] % p.page_size
        for cache, row in ((k, key[n]), (v, value[n])):
            (cache[page, slot] if p.order == "NHD" else cache[page, :, slot]).copy_(row)
    return k, v


def append(p, key, value, batch, position, cache=None, **options):
    append_paged_kv_cache(
        key,
        value,
        ints(*batch),
        ints(*position),
        p.cache if cache is None else cache,
        p.indices,
        p.indptr,
        p.last,
        p.order,
        **options,
    )


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ]
)
def test_slots_are_written_and_nothing_else(dtype, page_size, order):
    p = pages([9, 0, 4], page_size=page_size, order=order, dtype=dtype, dim_vo=5)
    batch, position = [0, 0, 2, -1, 0, 2], [0, 8, 3, 77, 4, 0]
    key, value = rows(6, 2, 8, dtype), rows(6, 2, 5, dtype)
    want = written(p, key, value, batch, position)
    append(p, key, value, batch, position)
    assert same_bits(p.k, want[0])
    assert same_bits(p.v, want[1])


@settings(max_examples=25, deadline=None, database=None)
@given(data=st.data())
def test_any_append(data):
    kv_lens = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    page_size = data.draw(st.integers(1, 5))
    p = pages(kv_lens, page_size=page_size, order=data.draw(st.sampled_from(["NHD", "HND"])))
    room = {b: int(p.indptr[b + 1] - p.indptr[b]) * page_size for b in range(len(kv_lens))}
    slots = [(b, at) for b, n in room.items() for at in range(n)]
    chosen = data.draw(
        st.lists(
            st.sampled_from([*slots, (-1, 0)]), max_size=9, unique_by=lambda s: s if s[0] >= 0 else object()
        )
    )
    batch, position = [b for b, _ in chosen], [at for _, at in chosen]
    key, value = (rows(len(chosen), 2, 8, torch.float32, seed) for seed in (1, 2))
    want = written(p, key, value, batch, position)
    append(p, key, value, batch, position)
    assert same_bits(p.k, want[0])
    assert same_bits(p.v, want[1])


def test_the_usual_way_from_lengths_to_slots():
    """Append 2, 0 and 3 tokens to requests that then hold 9, 4 and 5; the buffers are padded to 7 rows."""
    p, grown = pages([9, 4, 5]), [2, 0, 3]
    lens = get_seq_lens(p.indptr, p.last, p.page_size)
    batch, position = get_batch_indices_positions(offsets(grown), lens, 7)
    assert batch.tolist() == [0, 0, 2, 2, 2, -1, -1]
    key, value = rows(7, 2, 8, torch.float32), rows(7, 2, 8, torch.float32, 6)
    want = written(p, key, value, batch.tolist(), position.tolist())
    append_paged_kv_cache(key, value, batch, position, p.cache, p.indices, p.indptr, p.last)
    assert same_bits(p.k, want[0])
    assert same_bits(p.v, want[1])
    assert torch.equal(p.k[p.indices[2], 0], key[1])


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, E4M3FN])
def test_strides_of_rows_and_caches_are_free(order, dtype):
    p = pages([9, 4], order=order, dtype=dtype)
    key, value = rows(3, 2, 8, dtype), rows(3, 2, 8, dtype, 6)
    batch, position = [0, 1, 0], [8, 0, 3]
    want = written(p, key, value, batch, position)
    wide = torch.zeros(3, 2, 17, dtype=torch.float32).to(dtype)
    wide.view(torch.uint8 if dtype is E4M3FN else dtype)[..., 1:9] = key.view(
        torch.uint8 if dtype is E4M3FN else dtype
    )
    k = p.k.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    both = torch.stack(p.cache, 1)
    append(p, wide[..., 1:9], value.permute(2, 0, 1).contiguous().permute(1, 2, 0), batch, position, (k, p.v))
    assert same_bits(k, want[0])
    assert same_bits(p.v, want[1])
    for cache in (both, CacheView.split(both.clone(), 1)):
        append(p, key, value, batch, position, cache)
        got = (cache.k, cache.v) if isinstance(cache, CacheView) else cache.unbind(1)
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])


def test_int64_indices_and_empty_appends():
    p = pages([9, 4])
    key, value = rows(2, 2, 8, torch.float32), rows(2, 2, 8, torch.float32, 6)
    want = written(p, key, value, [0, 1], [8, 1])
    append_paged_kv_cache(
        key,
        value,
        torch.tensor([0, 1]),
        torch.tensor([8, 1]),
        p.cache,
        p.indices.long(),
        p.indptr.long(),
        p.last.long(),
    )
    assert same_bits(p.k, want[0])
    append(p, key[:0], value[:0], [], [])
    append(p, key, value, [-1, -1], [0, 0])
    assert same_bits(p.k, want[0])
    assert same_bits(p.v, want[1])


@pytest.mark.parametrize(
    "name", ["batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len"]
)
def test_an_index_beyond_int32_does_not_wrap_around(name):
    """2**40 is 0 in 32 bits: the row would land in another slot."""
    p = pages([9, 4])
    before = [t.clone() for t in p.cache]
    index = {
        "batch_indices": torch.tensor([0, 1]), "positions": torch.tensor([0, 1]),
        "kv_indices": p.indices.long(), "kv_indptr": p.indptr.long(), "kv_last_page_len": p.last.long(),
    }  # fmt: skip
    index[name] = index[name].clone()
    index[name][0] += 2**40
    key, value = (rows(2, 2, t.shape[-1], torch.float32) for t in p.cache)
    with pytest.raises(ValueError, match=rf"{name}\[0\]: needs a value that fits int32.*core\.index-range"):
        append_paged_kv_cache(key, value, paged_kv_cache=p.cache, **index)
    assert all(map(same_bits, p.cache, before))


def test_a_backend_is_looked_for_though_there_are_no_rows():
    p, none = pages([9, 4]), rows(0, 2, 8, torch.float32)
    with pytest.raises(NoRoute, match=r"backend: needs one of .*got 'nobody'"):
        append(p, none, none, [], [], backend="nobody")


def meta(t):
    return t.to("meta")


FAULTS = {  # what is given instead, and what the message must say
    "key rank": (lambda a: {"append_key": a["append_key"][0]}, "append_key: needs a 3-D tensor"),
    "key heads": (lambda a: {"append_key": a["append_key"][:, :1]}, r"append_key: needs .*\(2, 8\)"),
    "value dim": (lambda a: {"append_value": a["append_value"][..., :4]}, r"append_value: needs .*\(2, 8\)"),
    "key type": (lambda a: {"append_key": a["append_key"].half()}, "append_key: needs the cache's type"),
    "value device": (
        lambda a: {"append_value": meta(a["append_value"])},
        "append_value: needs a tensor on cpu",
    ),
    "fewer values": (lambda a: {"append_value": a["append_value"][:1]}, "append_value: needs 2 rows, got 1"),
    "no tensor": (lambda a: {"append_key": [1]}, "append_key: needs a 3-D tensor, got list"),
    "unlike caches": (
        lambda a: {"paged_kv_cache": (a["paged_kv_cache"][0], a["paged_kv_cache"][1][:, :2])},
        "alike in page",
    ),
    "mixed caches": (
        lambda a: {
            "paged_kv_cache": (a["paged_kv_cache"][0], a["paged_kv_cache"][1].double()),
            "append_value": a["append_value"].double(),
        },
        "alike in page, heads, type",
    ),
    "float index": (lambda a: {"positions": a["positions"].float()}, "positions: needs an int32 tensor"),
    "list index": (lambda a: {"kv_indices": [0]}, "kv_indices: needs an int32 tensor"),
    "2-D index": (lambda a: {"batch_indices": a["batch_indices"][None]}, "batch_indices: needs a 1-D tensor"),
    "index device": (lambda a: {"kv_indptr": meta(a["kv_indptr"])}, "kv_indptr: needs a tensor on cpu"),
    "few positions": (lambda a: {"positions": a["positions"][:1]}, "positions: needs 2 entries"),
    "indptr size": (lambda a: {"kv_indptr": a["kv_indptr"][:2]}, "kv_indptr: needs batch size"),
    "owner": (lambda a: {"batch_indices": ints(0, 2)}, r"batch_indices\[1\]: needs -1 to 1, got 2"),
    "negative owner": (
        lambda a: {"batch_indices": ints(-2, 0)},
        r"batch_indices\[0\]: needs -1 to 1, got -2",
    ),
    "position": (
        lambda a: {"positions": ints(12, 0)},
        r"positions\[0\]: needs 0 to 11, .*request 0.* got 12",
    ),
    "negative position": (lambda a: {"positions": ints(0, -1)}, r"positions\[1\]: needs 0 to 3, .*got -1"),
    "falling": (lambda a: {"kv_indptr": ints(0, 4, 3)}, "kv_indptr"),
    "few pages": (lambda a: {"kv_indices": a["kv_indices"][:2]}, "kv_indices: needs more than"),
    "page": (lambda a: {"kv_indices": a["kv_indices"] * 0 + 6}, "kv_indices: a page.*0 to 5.*got 6"),
    "negative page": (lambda a: {"kv_indices": a["kv_indices"] * 0 - 1}, "kv_indices: a page.*got -1"),
    "last page": (
        lambda a: {"kv_last_page_len": ints(1, 5)},
        r"kv_last_page_len\[1\]: needs 1 to page_size 4",
    ),
    "layout": (lambda a: {"kv_layout": "hnd"}, "kv_layout: needs 'NHD' or 'HND'"),
    "cache": (lambda a: {"paged_kv_cache": 3}, "paged_kv_cache: needs"),
    "backend": (lambda a: {"backend": "fa3"}, "backend: needs one of auto, reference"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_call_that_does_not_fit_writes_nothing(fault):
    p = pages([9, 4])
    arguments = {
        "append_key": rows(2, 2, 8, torch.float32),
        "append_value": rows(2, 2, 8, torch.float32),
        "batch_indices": ints(0, 1),
        "positions": ints(8, 1),
        "paged_kv_cache": p.cache,
        "kv_indices": p.indices,
        "kv_indptr": p.indptr,
        "kv_last_page_len": p.last,
    }
    before = [t.clone() for t in p.cache]
    instead, message = FAULTS[fault]
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        append_paged_kv_cache(**{**arguments, **instead(arguments)})
    assert "[core." in str(caught.value)
    assert all(same_bits(a, b) for a, b in zip(p.cache, before, strict=True))


# ---- routing of appends ------------------------------------------------------------------------------


class Appender(FakeBackend):
    """A fake that can append: it marks the cache, and keeps what it was given."""

    def append(self, path, problem, io):
        self._do("append", None, path, problem, io)
        self.last = io
        io.k.fill_(7)


def up_to_four(query):
    return (4, query.batch.total_q) if query.batch.total_q > 4 else None


KIND = Capability(archs=None, ops=frozenset({Op.APPEND}), head_dims=Dims(multiple_of=8))


def test_appends_are_routed_like_everything_else(use, caplog):
    fake = use(
        Appender(
            paths=[("p", KIND)], rules=[Rule(WRONG, frozenset({Op.APPEND}), frozenset({"p"}), up_to_four)]
        )
    )
    p = pages([9, 4])
    key = rows(2, 2, 8, torch.float32)
    append(p, key, key, [0, 1], [8, 1])
    assert (p.k == 7).all()
    assert isinstance(fake.last, AppendIO)
    assert fake.last.kv_indices.dtype is torch.int32
    small = pages([9, 4], dim=4)
    append(small, key[..., :4], key[..., :4], [0, 1], [8, 1])  # head_dim 4: not its kind
    assert torch.equal(small.k[small.indices[2], 0], key[0, :, :4])
    for count in (5, 6):
        many = rows(count, 2, 8, torch.float32)
        append(p, many, many, [0] * count, list(range(count)))
        assert torch.equal(p.k[p.indices[0]], many[:4])
    assert [r.getMessage() for r in caplog.records] == [
        "fake/p: takes head_dim multiple of 8 [core.head-dim]; using reference/torch",
        "fake/p: is wrong above 4 rows [fake.wrong]; using reference/torch",
    ]
    with pytest.raises(NoRoute, match=r"fake.wrong"):
        append(p, many, many, [0] * 6, list(range(6)), backend="fake")


def test_an_append_refused_late_goes_to_the_next_and_other_errors_are_raised(use):
    fake = use(Appender(paths=[("p", KIND)], append=Unsupported(Reason(BUILD, "", "more"))))
    p, key = pages([9, 4]), rows(1, 2, 8, torch.float32)
    append(p, key, key, [0], [0])
    assert torch.equal(p.k[p.indices[0], 0], key[0])
    with pytest.raises(Unsupported):
        append(p, key, key, [0], [0], backend="fake")
    fake.does["append"] = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        append(p, key, key, [0], [0])
    assert BUILD.stage is Stage.PREPARE


def test_bytes_of_neighbours_survive_an_8_bit_append():
    p = pages([5], page_size=4, dtype=E4M3FN)
    p.k.view(torch.uint8).copy_(
        torch.arange(p.k.numel(), dtype=torch.int64).remainder(251).view(p.k.shape).to(torch.uint8)
    )
    before = bits(p.k).clone()
    key = rows(1, 2, 8, E4M3FN)
    append(p, key, key, [0], [4])
    changed = (bits(p.k) != before).flatten(2).any(2).nonzero().tolist()
    assert changed == [[int(p.indices[1]), 0]]
