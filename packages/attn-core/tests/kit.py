"""What the tests of attn-core share: batches with known contents, an oracle, wrappers, snapshots."""

import math
from dataclasses import dataclass, field

import torch

from attn_core.backend import RunIO
from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper
from attn_core.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

torch.set_num_threads(1)

E4M3FN, E4M3FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
E5M2FNUZ = torch.float8_e5m2fnuz
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def ints(*values):
    """An int32 CPU tensor."""
    return torch.tensor(values, dtype=torch.int32)


def offsets(lengths):
    """The indptr of some lengths."""
    return ints(0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()) if lengths else ints(0)


def workspace(size=64, device="cpu"):
    return torch.empty(size, dtype=torch.uint8, device=device)


def bits(t):
    """The tensor as integers: -0.0 is not 0.0, and NaN is itself."""
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(views[t.element_size()])


def same_bits(a, b):
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


@dataclass
class Pages:
    """A paged cache in which every slot that belongs to no sequence holds ``poison``."""

    kv_lens: list
    page_size: int
    order: str
    indptr: torch.Tensor
    indices: torch.Tensor
    last: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: list = field(repr=False)
    values: list = field(repr=False)

    @property
    def cache(self):
        return self.k, self.v

    @property
    def table(self):
        """The three index arrays as plan() takes them."""
        return self.indptr, self.indices, self.last


def pages(
    kv_lens,
    *,
    page_size=4,
    heads=2,
    dim=8,
    dim_vo=None,
    dtype=torch.float32,
    order="NHD",
    seed=0,
    spare=2,
    poison=math.nan,
    scale=1.0,
    backwards=False,
):
    """Random keys and values, scattered over shuffled pages (reversed ones with ``backwards``)."""
    generator = torch.Generator().manual_seed(seed)
    dims = (dim, dim if dim_vo is None else dim_vo)
    held = [-(-n // page_size) for n in kv_lens]
    total = sum(held) + spare
    ids = torch.arange(total).flip(0) if backwards else torch.randperm(total, generator=generator)
    indptr, indices = offsets(held), ids[: sum(held)].to(torch.int32)
    caches, contents = [], []
    for d in dims:
        cache = torch.full((total, page_size, heads, d), poison, dtype=torch.float64).to(dtype)
        rows = [
            (torch.randn(n, heads, d, generator=generator, dtype=torch.float64) * scale).to(dtype)
            for n in kv_lens
        ]
        for request, row in enumerate(rows):
            for j in range(kv_lens[request]):
                cache[indices[indptr[request] + j // page_size], j % page_size] = row[j]
        caches.append(cache if order == "NHD" else cache.transpose(1, 2).contiguous())
        contents.append(rows)
    last = ints(*((n - 1) % page_size + 1 if n else 0 for n in kv_lens))
    return Pages(list(kv_lens), page_size, order, indptr, indices, last, *caches, *contents)


def queries(rows, heads, dim, dtype=torch.float32, seed=1, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, heads, dim, generator=generator, dtype=torch.float64) * scale).to(dtype)


def random_mask(q_lens, kv_lens, seed=2, keep=0.6):
    """A flat bool mask, and the same as one 2-D tensor per request."""
    generator = torch.Generator().manual_seed(seed)
    shaped = [torch.rand(m, n, generator=generator) < keep for m, n in zip(q_lens, kv_lens, strict=True)]
    flat = torch.cat([m.reshape(-1) for m in shaped]) if shaped else torch.zeros(0, dtype=torch.bool)
    return flat, shaped


def packed(shaped):
    """The bits of some 2-D masks: little-endian, each request on a byte border."""
    out = []
    for mask in shaped:
        flags = mask.reshape(-1).tolist()
        for at in range(0, len(flags), 8):
            out.append(sum(flag << n for n, flag in enumerate(flags[at : at + 8])))
    return torch.tensor(out, dtype=torch.uint8)


def slopes(heads):
    """ALiBi's slopes as its authors define them: exact for powers of two, interleaved otherwise."""
    near = 1
    while near * 2 <= heads:
        near *= 2
    exact = [2.0 ** (-8.0 * (i + 1) / near) for i in range(near)]
    return exact + [2.0 ** (-8.0 * (i + 1) / (2 * near)) for i in range(0, 2 * near, 2)][: heads - near]


def rotate(x, position, scale=1.0, theta=1e4):
    """ROPE_LLAMA of float64 vectors ``[..., dim]`` at one position: element t turns with t + dim / 2."""
    half = x.shape[-1] // 2
    angle = [position / scale / theta ** (2 * t / x.shape[-1]) for t in range(half)]
    c, s = (torch.tensor([f(a) for a in angle], dtype=torch.float64) for f in (math.cos, math.sin))
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * c - high * s, high * c + low * s], -1)


def oracle(
    q,
    keys,
    values,
    q_lens,
    *,
    causal=False,
    mask=None,
    sm_scale=None,
    window=-1,
    cap=0.0,
    encoding="NONE",
    rope_scale=1.0,
    rope_theta=1e4,
    q_scale=1.0,
    k_scale=1.0,
    v_scale=1.0,
):
    """Attention by its definition: float64, one row of one head at a time.

    Returns out ``[rows, heads, dim_vo]`` and lse ``[rows, heads]`` to base 2, both float64.
    """
    heads, dim = q.shape[1:]
    sm_scale = 1 / math.sqrt(dim) if sm_scale is None else sm_scale
    group, slope = heads // keys[0].shape[1], slopes(heads)
    out = torch.zeros(q.shape[0], heads, values[0].shape[2], dtype=torch.float64)
    lse = torch.full((q.shape[0], heads), -math.inf, dtype=torch.float64)
    row = 0
    for request, q_len in enumerate(q_lens):
        k, v = keys[request].double() * k_scale, values[request].double()
        kv_len = k.shape[0]
        if encoding == "ROPE_LLAMA" and kv_len:
            k = torch.stack([rotate(k[j], j, rope_scale, rope_theta) for j in range(kv_len)])
        for i in range(q_len):
            own = kv_len - q_len + i  # the row's own position in the sequence
            seen = [
                j
                for j in range(kv_len)
                if (mask is None or mask[request][i, j])
                and (not causal or mask is not None or j <= own)
                and (window < 0 or j >= own - window)
            ]
            for head in range(heads) if seen else ():
                x, key = q[row, head].double() * q_scale, k[seen, head // group]
                if encoding == "ROPE_LLAMA":
                    x = rotate(x, own, rope_scale, rope_theta)
                logits = key @ x * sm_scale
                if encoding == "ALIBI":
                    logits = logits + slope[head] * torch.tensor([float(j - i) for j in seen])
                if cap > 0:
                    logits = cap * torch.tanh(logits / cap)
                out[row, head] = torch.softmax(logits, 0) @ v[seen, head // group] * v_scale
                lse[row, head] = torch.logsumexp(logits, 0) / math.log(2)
            row += 1
    return out, lse


def close(got, want, tolerance):
    """Equal within a tolerance relative to max(1, |want|); infinities must agree."""
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


# ---- wrappers ----------------------------------------------------------------------------------------


def decode_wrapper(**options):
    options.setdefault("use_tensor_cores", True)
    ws = options.pop("ws") if "ws" in options else workspace()
    return BatchDecodeWithPagedKVCacheWrapper(ws, **options)


def decode_graph(batch, capacity, **options):
    """A graph-mode decode wrapper on CPU tensors whose buffers hold rubbish."""
    buffers = [torch.full((n,), -7, dtype=torch.int32) for n in (batch + 1, capacity, batch)]
    options.setdefault("use_tensor_cores", True)
    return CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers, **options)


def prefill_graph(batch, capacity, mask_bytes=0, **options):
    """A graph-mode paged prefill wrapper on CPU tensors whose buffers hold rubbish."""
    buffers = [torch.full((n,), -7, dtype=torch.int32) for n in (batch + 1, batch + 1, capacity, batch)]
    if mask_bytes:
        buffers.append(torch.full((mask_bytes,), 0xA5, dtype=torch.uint8))
        buffers.append(torch.full((batch + 1,), -7, dtype=torch.int32))
    return BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers, **options)


def ragged_graph(batch, **options):
    buffers = [torch.full((batch + 1,), -7, dtype=torch.int32) for _ in range(2)]
    return BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", True, *buffers, **options)


def paged_wrapper(order="NHD", **options):
    return BatchPrefillWithPagedKVCacheWrapper(workspace(), order, **options)


def ragged_wrapper(order="NHD", **options):
    return BatchPrefillWithRaggedKVCacheWrapper(workspace(), order, **options)


SIZES = (4, 2, 8, 4)  # query heads, key heads, head_dim and page_size of most tests


def planned(kv_lens=(9, 3, 12), q_len=1, **options):
    """A decode wrapper with a plan, its pages and a fitting q."""
    p, wrapper = pages(list(kv_lens)), decode_wrapper()
    wrapper.plan(*p.table, *SIZES, q_data_type=torch.float32, q_len_per_req=q_len, **options)
    return wrapper, p, queries(len(kv_lens) * q_len, 4, 8)


def run_prefill(p, q, q_lens, heads_kv, **options):
    """Plan and run paged prefill; returns out and lse."""
    wrapper = paged_wrapper(p.order)
    run = {
        name: options.pop(name) for name in ("q_scale", "k_scale", "v_scale", "out", "lse") if name in options
    }
    options.setdefault("kv_data_type", p.k.dtype)
    wrapper.plan(
        offsets(q_lens),
        *p.table,
        q.shape[1],
        heads_kv,
        q.shape[2],
        p.page_size,
        head_dim_vo=p.values[0].shape[2],
        q_data_type=q.dtype,
        **options,
    )
    return wrapper.run(q, p.cache, return_lse=True, **run)


# ---- snapshots ---------------------------------------------------------------------------------------


@dataclass
class Snapshot:
    """Everything of a wrapper that run() or a captured graph can see, by identity and by bytes."""

    state: object
    arena: object
    workspace: object
    memory: list

    @classmethod
    def of(cls, wrapper):
        seen = {}
        if wrapper._state is not None:
            seen.update(wrapper._state.image)
            seen["host"] = wrapper._state.host.block
        if wrapper._arena is not None:
            seen["arena"] = wrapper._arena.staged.block
        if wrapper._graph is not None:
            seen.update({f"bound {name}": t for name, t in wrapper._graph.bound.items()})
        memory = [(name, t, t.data_ptr(), t.clone()) for name, t in seen.items()]
        return cls(wrapper._state, wrapper._arena, wrapper._float_workspace_buffer, memory)

    def require(self, wrapper):
        """Assert that nothing has changed."""
        assert wrapper._state is self.state
        assert wrapper._arena is self.arena
        assert wrapper._float_workspace_buffer is self.workspace
        assert not wrapper._lock._is_owned()
        for name, tensor, address, was in self.memory:
            assert tensor.data_ptr() == address, name
            assert torch.equal(tensor, was), name


def replay(state, q, cache, out=None):
    """Run what a graph captured under ``state`` would run: its launch, its addresses, its shapes."""
    out = torch.empty(state.out_shape, dtype=state.o_dtype) if out is None else out
    lse = torch.empty(state.out_shape[:2], dtype=torch.float32)
    state.decision.backend.run(state.launch, state.image, RunIO(q, *cache, out, lse))
    return out, lse
