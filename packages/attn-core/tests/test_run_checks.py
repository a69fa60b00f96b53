"""run() is held to the plan: every tensor is compared before anything starts."""

import math

import pytest
import torch

from attn_core.backend import TensorContract
from attn_core.cache_view import CacheView
from attn_core.capability import Capability
from attn_core.problem import Op

from .fakes import FakeBackend
from .kit import E4M3FN, SIZES, decode_wrapper, pages, planned, queries, same_bits

Q = (3, 4, 8)
BAD_RUNS = {  # what is given instead, and what the message must say
    "q dtype": (lambda q, p: {"q": q.half()}, "q: needs the planned q_data_type torch.float32"),
    "q heads": (lambda q, p: {"q": q[:, :2]}, r"q: needs shape \[rows, 4, 8\]"),
    "q dim": (lambda q, p: {"q": q[..., :4]}, r"q: needs shape \[rows, 4, 8\]"),
    "q rank": (lambda q, p: {"q": q.reshape(3, 32)}, r"q: needs shape"),
    "q device": (lambda q, p: {"q": q.to("meta")}, "q: needs a tensor on cpu"),
    "q type": (lambda q, p: {"q": q.tolist()}, "q: needs a tensor, got list"),
    "k dtype": (lambda q, p: {"paged_kv_cache": (p.k.half(), p.v)}, "k: needs the planned kv_data_type"),
    "v dtype": (lambda q, p: {"paged_kv_cache": (p.k, p.v.double())}, "v: needs the planned kv_data_type"),
    "k page": (lambda q, p: {"paged_kv_cache": (p.k[:, :3], p.v)}, r"k: needs shape \[pages, 4, 2, 8\]"),
    "v heads": (lambda q, p: {"paged_kv_cache": (p.k, p.v[:, :, :1])}, r"v: needs shape \[pages, 4, 2, 8\]"),
    "v device": (lambda q, p: {"paged_kv_cache": (p.k, p.v.to("meta"))}, "v: needs a tensor on cpu"),
    "few pages": (lambda q, p: {"paged_kv_cache": (p.k[:2], p.v)}, "k: needs more than [3-9] pages"),
    "cache rank": (lambda q, p: {"paged_kv_cache": torch.zeros(9, 3, 4, 2, 8)}, "paged_kv_cache"),
    "cache type": (lambda q, p: {"paged_kv_cache": [p.k, p.v]}, "paged_kv_cache: needs"),
    "out shape": (lambda q, p: {"out": torch.zeros(2, 4, 8)}, r"out: needs shape \(3, 4, 8\)"),
    "out dtype": (lambda q, p: {"out": torch.zeros(Q).half()}, "out: needs dtype torch.float32"),
    "out device": (lambda q, p: {"out": torch.zeros(Q, device="meta")}, "out: needs a tensor on cpu"),
    "out overlaps": (lambda q, p: {"out": torch.zeros(1, 4, 8).expand(Q)}, "out: needs distinct memory"),
    "out type": (lambda q, p: {"out": 3}, "out: needs a tensor"),
    "lse shape": (lambda q, p: {"lse": torch.zeros(3, 4, 1), "return_lse": True}, "lse: needs shape"),
    "lse dtype": (lambda q, p: {"lse": torch.zeros(3, 4).half(), "return_lse": True}, "lse: needs dtype"),
    "scale size": (lambda q, p: {"k_scale": torch.ones(2)}, "k_scale: needs one element"),
    "scale type": (lambda q, p: {"v_scale": "2"}, "v_scale: needs a number"),
    "scale bool": (lambda q, p: {"q_scale": True}, "q_scale: needs a number"),
    "scale nan": (lambda q, p: {"q_scale": math.nan}, "q_scale: needs a finite number, .* got nan"),
    "scale inf": (lambda q, p: {"k_scale": math.inf}, "k_scale: needs a finite number, .* got inf"),
    "scale of float64": (lambda q, p: {"v_scale": -1e39}, "v_scale: needs a finite number, .* got -1e"),
    "scale of an int": (lambda q, p: {"v_scale": 10**400}, "v_scale: needs a finite number"),
    "scale tensor": (lambda q, p: {"k_scale": torch.tensor(math.nan)}, "k_scale: needs a finite number"),
    "window": (lambda q, p: {"window_left": 3}, "window_left: needs the planned -1, got 3"),
}


@pytest.mark.parametrize("how", BAD_RUNS)
def test_run_checks_every_tensor_and_starts_nothing(how, use):
    fake = use(FakeBackend())
    wrapper, p, q = planned()
    instead, message = BAD_RUNS[how]
    out = torch.full(Q, math.nan)
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        wrapper.run(**{"q": q, "paged_kv_cache": p.cache, "out": out, **instead(q, p)})
    assert "[core." in str(caught.value)
    assert fake.count("run") == 0
    assert out.isnan().all()
    good = wrapper.run(q, p.cache)
    assert torch.equal(good, torch.ones(Q))


def test_bytes_of_one_8_bit_type_are_never_read_as_another():
    p = pages([9, 3, 12], dtype=E4M3FN)
    wrapper = decode_wrapper()
    wrapper.plan(*p.table, *SIZES, kv_data_type=E4M3FN)
    q = queries(3, 4, 8, torch.float16)
    wrapper.run(q, p.cache)
    for other in (torch.float8_e4m3fnuz, torch.float8_e5m2, torch.uint8, torch.int8):
        with pytest.raises(
            ValueError, match=f"k: needs the planned kv_data_type torch.float8_e4m3fn, got {other}"
        ):
            wrapper.run(q, (p.k.view(other), p.v.view(other)))


def test_a_path_states_what_strides_and_scales_it_can_read(use):
    strict = TensorContract(dense_head_dim=True, same_kv_strides=True, q="packed", scales=False)
    seen = []
    fake = use(FakeBackend(contract=strict, run=lambda launch, image, io: seen.append(io.q)), reference=False)
    wrapper, p, q = planned()
    wide = torch.zeros(*p.k.shape[:-1], 16)[..., ::2]
    with pytest.raises(ValueError, match="k: needs stride 1 over head_dim"):
        wrapper.run(q, (wide, p.v))
    with pytest.raises(ValueError, match="identical strides"):
        wrapper.run(q, (p.k, torch.zeros(p.k.shape[0], 5, 2, 8)[:, :4]))
    for scale in (2.0, torch.tensor(2.0)):
        with pytest.raises(NotImplementedError, match=r"k_scale: needs 1.0, got 2.0"):
            wrapper.run(q, p.cache, k_scale=scale)
    wrapper.run(q, p.cache, q_scale=1.0, k_scale=torch.ones(1), v_scale=None)
    spread = torch.cat([q, q], 2)[..., :8]  # heads are 16 apart
    wrapper.run(spread, p.cache)
    wrapper.run(torch.cat([q, q], 1)[:, :4], p.cache)  # rows apart, heads packed: taken as it is
    assert fake.count("run") == 3
    assert [t.stride() for t in seen[1:]] == [(32, 8, 1), (64, 8, 1)]
    assert torch.equal(seen[1], q)


def test_lse_needs_a_path_that_has_it(use):
    kind = Capability(archs=None, ops=frozenset(Op), lse=False)
    fake = use(FakeBackend(paths=[("p", kind)]))
    wrapper, p, q = planned()
    assert wrapper.backend == "fake"
    with pytest.raises(ValueError, match="return_lse: needs a plan with needs_lse=True"):
        wrapper.run(q, p.cache, return_lse=True)
    assert fake.count("run") == 0
    wrapper, p, q = planned(needs_lse=True)
    assert wrapper.backend == "reference"
    assert "core.lse" in wrapper.backend_fallback_reason


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_every_form_of_a_cache(order):
    p, q = pages([9, 3], order=order), queries(2, 4, 8)
    wrapper = decode_wrapper(kv_layout=order)
    wrapper.plan(*p.table, *SIZES, q_data_type="float32")
    want = wrapper.run(q, p.cache)
    both = torch.stack(p.cache, 1)
    pool = torch.stack([torch.full_like(both, math.nan), both])
    for cache in (
        both,
        CacheView.split(both, 1),
        CacheView.split(pool, 1, lead=(0, 1)),
        CacheView(pool, (0, 1, 1, 0), (0, 1, 1, 1)),
    ):
        assert same_bits(wrapper.run(q, cache), want)


def test_an_lse_that_is_handed_over_is_written_and_checked_whether_it_is_returned_or_not():
    """As upstream's kernels do; what upstream does not check is checked."""
    wrapper, p, q = planned()
    out, want = wrapper.run(q, p.cache, return_lse=True)
    lse = torch.full_like(want, torch.nan)
    got = wrapper.run(q, p.cache, lse=lse)
    assert isinstance(got, torch.Tensor)
    assert same_bits(got, out)
    assert same_bits(lse, want)
    for wrong in (lse[:, :1], lse.double()):
        with pytest.raises(ValueError, match=r"^lse: needs "):
            wrapper.run(q, p.cache, lse=wrong)
