"""The forms of a paged cache."""

import pytest
import torch

from attn_core.cache_view import CacheView, unpack


def pool(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(*shape)


def same(a, b):
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def test_a_view_names_its_parts_without_copying():
    t = pool(3, 5, 2, 4, 2, 8)  # layers, pages, k and v, ...
    view = CacheView(t, (0, 1, 1, 0), (0, 1, 1, 1))
    assert same(view.k, t[1, :, 0])
    assert same(view.v, t[1, :, 1])
    whole = CacheView(t[1, :, 0], (), (0, 2))
    assert same(whole.k, t[1, :, 0])
    assert same(whole.v, t[1, 2, 0])


def test_split_and_layers():
    t = pool(3, 5, 2, 4, 2, 8)
    for layer in range(3):
        for view in (
            CacheView.split(t, 1, lead=(0, layer)),
            CacheView.split(t, 1)[layer],
            CacheView.split(t, 1)[layer - 3],
        ):
            assert same(view.k, t[layer, :, 0])
            assert same(view.v, t[layer, :, 1])
    front = pool(2, 5, 4, 2, 8)
    assert same(CacheView.split(front, 0).v, front[1])


def test_a_pool_of_one_page_is_split_before_it_is_given_a_layer():
    t = pool(3, 1, 2, 4, 2, 8)
    whole = CacheView.split(t, 1)
    assert same(whole[2].k, t[2, :, 0])
    assert same(whole[-1].v, t[2, :, 1])
    with pytest.raises(ValueError, match=r"CacheView.v_path: needs an index in 0..0 of dimension 1, got 1"):
        whole.v  # noqa: B018
    with pytest.raises(ValueError, match=r"CacheView.k_path: needs a dimension in 0..5, got 6"):
        CacheView.split(t, 6)


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        ((0,), (), "k_path: needs pairs of ints"),
        ((), (0, 1.0), "v_path: needs pairs of ints"),
        ((6, 0), (), r"k_path: needs a dimension in 0..5, got 6"),
        ((-1, 0), (), "k_path: needs a dimension"),
        ((), (0, 3), r"v_path: needs an index in 0..2 of dimension 0, got 3"),
        ((), (0, -1), "v_path: needs an index"),
        ((0, 1, 5, 0), (), r"k_path: needs a dimension in 0..4, got 5"),
    ],
)
def test_a_path_must_exist(k, v, message):
    with pytest.raises(ValueError, match=message):
        CacheView(pool(3, 5, 2, 4, 2, 8), k, v)


def test_storage_is_a_tensor_and_layers_have_an_end():
    with pytest.raises(TypeError, match=r"CacheView.storage: needs a tensor, got list"):
        CacheView([1], (), ())
    view = CacheView.split(pool(3, 5, 2, 4, 2, 8), 1)
    for layer in (3, -4):
        with pytest.raises(ValueError, match="index"):
            view[layer]


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_unpack(order):
    t = pool(5, 2, 4, 3, 8)
    for cache in ((t[:, 0], t[:, 1]), t, CacheView.split(t, 1)):
        k, v = unpack(cache, order)
        assert same(k, t[:, 0])
        assert same(v, t[:, 1])


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_pages_of_one_token_may_lack_their_dimension(order):
    t = pool(5, 2, 3, 8)
    shape = (5, 1, 3, 8) if order == "NHD" else (5, 3, 1, 8)
    for cache in ((t[:, 0], t[:, 1]), t, CacheView.split(t, 1)):
        k, v = unpack(cache, order)
        assert k.shape == v.shape == shape
        assert torch.equal(k.reshape(5, 3, 8), t[:, 0])
        assert torch.equal(v.reshape(5, 3, 8), t[:, 1])


@pytest.mark.parametrize(
    ("cache", "kind", "message"),
    [
        (None, TypeError, "got NoneType"),
        ([1, 2], TypeError, "got list"),
        ((1, 2), TypeError, "got tuple"),
        ((pool(2, 2, 2, 2),) * 3, TypeError, "got tuple"),
        (pool(5, 3, 4, 2, 8), ValueError, r"\[pages, 2, ...\]"),
        (pool(5, 2, 8), ValueError, r"\[pages, 2, ...\]"),
        (pool(1, 5, 2, 4, 2, 8), ValueError, r"\[pages, 2, ...\]"),
        ((pool(2, 2), pool(2, 2)), ValueError, "4 dimensions"),
        (CacheView(pool(2, 2), (), ()), ValueError, "4 dimensions"),
        ((pool(1, 2, 2, 2, 2), pool(1, 2, 2, 2)), ValueError, "4 dimensions"),
    ],
    ids=str,
)
def test_what_is_no_cache(cache, kind, message):
    with pytest.raises(kind, match=f"paged_kv_cache: needs .*{message}"):
        unpack(cache, "NHD")
