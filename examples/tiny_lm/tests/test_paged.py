import random

import pytest
import torch

from attn_core import append_paged_kv_cache
from attn_tiny_lm.model import ModelConfig
from attn_tiny_lm.paged import PagedCache

CONFIG = ModelConfig(num_layers=1, num_qo_heads=2, num_kv_heads=1, head_dim=2)


def write(step, values):
    """Store one number per new token as its key, and its negative as its value."""
    rows = torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
    cache = step.cache
    append_paged_kv_cache(
        rows.contiguous(),
        -rows,
        cache.batch_indices,
        step.positions,
        cache.pool[0],
        cache.kv_indices,
        cache.kv_indptr,
        cache.kv_last_page_len,
    )


def read(cache, request):
    """The numbers that count, through the request's pages."""
    slots = [
        cache.pool[0][page, :, slot, 0, 0].tolist()
        for page in cache.pages(request)
        for slot in range(cache.page_size)
    ]
    pairs = slots[: cache.length(request)]
    assert all(key == -value for key, value in pairs)
    return [key for key, _ in pairs]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_random_accept_counts_leave_exactly_the_kept_tokens(page_size, seed):
    rng = random.Random(seed)
    cache = PagedCache(CONFIG, num_pages=1000 // page_size, page_size=page_size, seed=seed)
    total, number = cache.free_pages, 0
    kept = {cache.add(): [] for _ in range(3)}
    for _ in range(25):
        active = rng.sample(sorted(kept), rng.randint(1, len(kept)))
        counts = [rng.randint(1, 9) for _ in active]
        before = {request: cache.length(request) for request in kept}
        step = cache.begin(active, counts)
        assert {request: cache.length(request) for request in kept} == before
        values = [[number := number + 1 for _ in range(count)] for count in counts]
        write(step, [value for row in values for value in row])
        for request, row in zip(active, values, strict=True):
            accepted = rng.randint(0, len(row))
            cache.keep(request, accepted)
            kept[request] += row[:accepted]
        held = [page for request in kept for page in cache.pages(request)]
        assert len(held) == len(set(held)) == total - cache.free_pages
        assert all(read(cache, request) == kept[request] for request in kept)
        if rng.random() < 0.15:
            gone = rng.choice(sorted(kept))
            cache.release(gone)
            del kept[gone]
            kept[cache.add()] = []
    for request in kept:
        cache.release(request)
    assert cache.free_pages == total


def test_the_page_table_counts_the_new_tokens_and_only_the_pages_they_need():
    cache = PagedCache(CONFIG, num_pages=20, page_size=4)
    one, two = cache.add(), cache.add()
    step = cache.begin([one, two], [9, 2])
    assert step.qo_indptr.tolist() == [0, 9, 11]
    assert step.kv_indptr.tolist() == [0, 3, 4]
    assert step.kv_last_page_len.tolist() == [1, 2]
    assert step.positions.tolist() == [*range(9), 0, 1]
    assert step.cache.batch_indices.tolist() == [0] * 9 + [1] * 2
    cache.keep(one, 3)  # six of nine are taken back: two pages stay reserved but are not in the table
    step = cache.begin([one], [1])
    assert len(cache.pages(one)) == 3
    assert step.kv_indices.tolist() == [cache.pages(one)[0]]
    assert (step.kv_last_page_len.tolist(), step.positions.tolist()) == ([4], [3])


def test_pages_come_in_shuffled_order_that_follows_the_seed():
    def pages(seed):
        cache = PagedCache(CONFIG, num_pages=30, page_size=1, seed=seed)
        request = cache.add()
        cache.begin([request], [30])
        return cache.pages(request)

    assert pages(0) == pages(0) != pages(1)
    assert sorted(pages(0)) == list(range(30)) != list(pages(0))


def test_a_full_pool_is_refused_and_nothing_changes():
    cache = PagedCache(CONFIG, num_pages=3, page_size=4)
    one, two = cache.add(), cache.add()
    cache.begin([one], [4])
    cache.keep(one, 4)
    state = cache.pages(one), cache.pages(two), cache.free_pages
    with pytest.raises(ValueError, match=r"pages: needs 3 free, got 2 \[tiny-lm.pages\]"):
        cache.begin([one, two], [5, 4])
    assert (cache.pages(one), cache.pages(two), cache.free_pages) == state


@pytest.mark.parametrize("count", [-1, 5])
def test_more_tokens_than_there_is_room_for_cannot_be_kept(count):
    cache = PagedCache(CONFIG, num_pages=3, page_size=4)
    request = cache.add()
    cache.begin([request], [4])
    with pytest.raises(ValueError, match=rf"count: needs 0 to 4, got {count} \[tiny-lm.keep\]"):
        cache.keep(request, count)
