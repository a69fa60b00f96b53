"""What plan() and run() do besides their work: reads from the device, copies, allocations."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attn_core import decode_paged
from attn_core.backend import PlanResult
from attn_core.batch import with_host_indices

from .fakes import FakeBackend
from .kit import SIZES, decode_wrapper, offsets, paged_wrapper, pages, planned, workspace


class Ops(TorchDispatchMode):
    """Lists every operation that runs under it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func.overloadpacket.__name__, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    @property
    def names(self):
        return [name for name, _, _ in self.calls]


def on_meta(wrapper_type, **options):
    """A wrapper on the meta device: there any attempt to read a value raises."""
    return wrapper_type(workspace(device="meta"), **options)


class Reads(TorchDispatchMode):
    """Answers copies from the meta device with ``values``, which it has been told, and counts copies."""

    def __init__(self, *values):
        super().__init__()
        self.values, self.up, self.down = list(values), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and "device" in kwargs:
            here, there = args[0].device.type, torch.device(kwargs["device"]).type
            self.up += (here, there) == ("cpu", "meta")
            if (here, there) == ("meta", "cpu"):
                self.down += 1
                return self.values.pop(0).clone()
        return func(*args, **kwargs)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_host_metadata_is_planned_without_asking_the_device(place, q_len):
    """One upload, no read; the page ids may be on the device, and stay there."""
    p = pages([9, 4, 12])
    wrapper = on_meta(type(decode_wrapper()), use_tensor_cores=True)
    indices = p.indices.to(place)
    with Reads() as copies:
        wrapper.plan(p.indptr, indices, p.last, *SIZES, q_data_type="float32", q_len_per_req=q_len)
    assert (copies.up, copies.down) == (1, 0)
    assert all(t.device.type == "meta" for t in wrapper._state.image.values())
    cache = tuple(t.to("meta") for t in p.cache)
    out, lse = wrapper.run(torch.empty(3 * q_len, 4, 8, device="meta"), cache, return_lse=True)
    assert (out.device.type, tuple(out.shape), tuple(lse.shape)) == (
        "meta",
        (3 * q_len, 4, 8),
        (3 * q_len, 4),
    )


def test_device_metadata_is_fetched_in_one_copy():
    p = pages([9, 4, 12])
    wrapper = on_meta(type(decode_wrapper()), use_tensor_cores=True)
    known = torch.cat([t.long() for t in (p.indptr, p.last)])
    with Reads(known) as copies:
        wrapper.plan(*(t.to("meta") for t in p.table), *SIZES, q_data_type="float32")
    assert copies.down == 1
    assert wrapper._state.batch.kv_len.tolist() == [9, 4, 12]
    prefill = on_meta(type(paged_wrapper()))
    with Reads(torch.cat([p.indptr.long(), p.last.long(), offsets([1, 2, 3]).long()])) as copies:
        prefill.plan(offsets([1, 2, 3]).to("meta"), *(t.to("meta") for t in p.table), *SIZES)
    assert copies.down == 1
    assert prefill._state.query.batch.total_q == 6


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 3.0},
        {"pos_encoding_mode": "ROPE_LLAMA"},
        {"custom_mask": torch.ones(57, dtype=torch.bool), "window_left": 2},
    ],
    ids=lambda options: "-".join(options),
)
def test_prefill_asks_the_device_for_nothing(options):
    p = pages([9, 0, 13])
    wrapper = on_meta(type(paged_wrapper()))
    options = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with Reads() as copies:
        wrapper.plan(offsets([2, 5, 3]), *p.table, *SIZES, q_data_type="float32", **options)
        cache = tuple(t.to("meta") for t in p.cache)
        out, lse = wrapper.run(
            torch.empty(10, 4, 8, device="meta"), cache, return_lse=True, k_scale=torch.ones(1, device="meta")
        )
    assert copies.down == 0
    assert (tuple(out.shape), tuple(lse.shape)) == ((10, 4, 8), (10, 4))


def test_run_allocates_the_results_and_nothing_else(use):
    use(FakeBackend(run=None))
    wrapper, p, q = planned(q_len=2)
    out, lse = torch.empty(6, 4, 8), torch.empty(6, 4)
    with Ops() as ops:
        wrapper.run(q, p.cache, out=out, lse=lse, return_lse=True, q_scale=2.0, k_scale=3.0)
        wrapper.run(q, p.cache, out=out)
    assert ops.names == []
    with Ops() as ops:
        got = wrapper.run(q.permute(1, 0, 2).contiguous().permute(1, 0, 2), p.cache, return_lse=True)
    assert [name for name in ops.names if name.startswith("empty")] == ["empty_like", "empty"]
    assert set(ops.names) <= {"permute", "clone", "empty_like", "empty"}
    assert all(t.is_contiguous() for t in got)


def test_a_steady_plan_is_a_handful_of_operations(use):
    """A bound on host work, against creeping growth: torch operations of attn-core per decode step."""
    use(FakeBackend())
    wrapper, p, _ = planned()
    with Ops() as ops:
        wrapper.plan(*p.table, *SIZES, q_data_type=torch.float32)
    assert len(ops.names) <= 30, ops.names


@pytest.mark.parametrize("wanted", [True, False])
def test_page_ids_are_fetched_for_a_path_that_reads_them(use, monkeypatch, wanted):
    """Ids on the device look like these: there, and unread. Only a path that says so gets them read."""
    seen = []
    backend = use(FakeBackend(plan=lambda query, path, batch: seen.append(batch) or PlanResult(0)))
    backend.paths = tuple(replace(path, host_indices=wanted) for path in backend.paths)
    read = decode_paged.paged_batch
    monkeypatch.setattr(
        decode_paged,
        "paged_batch",
        lambda *args, **options: replace(read(*args, **options), max_page_id=None),
    )
    indptr, ids, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [4, 0, 7], [1, 2]))
    decode_wrapper().plan(indptr, ids, last, 4, 2, 8, 4, q_data_type=torch.float32)
    assert seen[0].max_page_id == (7 if wanted else None)
    assert seen[0].kv_indices.tolist() == [4, 0, 7]


def test_fetched_page_ids_are_checked():
    ids = torch.tensor([4, -3, 7], dtype=torch.int32)
    indptr, last = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    unread = replace(
        decode_paged.paged_batch(1, indptr, ids.abs(), last, 4), kv_indices=ids, max_page_id=None
    )
    with pytest.raises(ValueError, match=r"kv_indices\[1\]: needs a page id of 0 or more, got -3"):
        with_host_indices(unread)
    known = decode_paged.paged_batch(1, indptr, ids.abs(), last, 4)
    assert with_host_indices(known) is known
