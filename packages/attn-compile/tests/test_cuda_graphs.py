"""``mode="reduce-overhead"``: decode is captured, replays equal eager, the cache is never copied."""

from importlib.util import find_spec

import pytest
import torch

from attn_core import BatchDecodeWithPagedKVCacheWrapper, append_paged_kv_cache, plugins

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: captures CUDA graphs"),
    # torch's own: it captures an empty graph to set up the pool of its graph trees.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

PAGES, PAGE, HKV, HQ, DIM = 32, 8, 2, 4, 64


@pytest.fixture(
    params=[
        "reference",
        pytest.param(
            "fa2",
            marks=pytest.mark.skipif(find_spec("attn_hip") is None, reason="needs attn-hip, which has fa2"),
        ),
    ]
)
def backend(request):
    """A backend whose kernels are captured; the other tests of this package see none but their own."""
    before = plugins.use(plugins.discover(config={}))
    yield request.param
    plugins.use(before)


def device(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def wrapper(batch, backend):
    return BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(32 << 20, dtype=torch.uint8, device="cuda"),
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=device(*[0] * (batch + 1)),
        paged_kv_indices_buffer=device(*[0] * PAGES),
        paged_kv_last_page_len_buffer=device(*[0] * batch),
        backend=backend,
    )


class Layer(torch.nn.Module):
    """Append and attend; the cache is a module buffer, so a graph uses it where it is."""

    def __init__(self, wrapper, cache, backend):
        super().__init__()
        self.wrapper = wrapper
        self.backend = backend
        self.register_buffer("cache", cache)

    def forward(self, q, k, v, *at):
        batch, positions, indices, indptr, last = at
        append_paged_kv_cache(k, v, batch, positions, self.cache, indices, indptr, last, backend=self.backend)
        return self.wrapper.run(q[:, :HQ] * 2, self.cache) + 1


def tables(kv_lens, seed):
    kv = torch.tensor(kv_lens, dtype=torch.int32)
    pages = (kv + PAGE - 1) // PAGE
    indptr = torch.cat([torch.zeros(1), pages.cumsum(0)]).int()
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed)).int()
    return indptr, order, kv - (pages - 1) * PAGE


def plan(w, table):
    w.plan(*table, HQ, HKV, DIM, PAGE, q_data_type=torch.bfloat16)


def inputs(table, kv_lens):
    indptr, indices, last = (t.cuda() for t in table)
    n = len(kv_lens)
    # More heads than the layer takes: q is a slice.
    q = torch.randn(n, HQ + 2, DIM, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(n, HKV, DIM, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    return q, k, v, device(*range(n)), device(*(x - 1 for x in kv_lens)), indices, indptr, last


def steps(batch):
    """Growing lengths, a new page table each."""
    return [[5 + 3 * n + 7 * request for request in range(batch)] for n in range(6)]


@pytest.fixture
def strict_trees():
    import torch._inductor.config as config

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # torch then compares the pool's live blocks with what it knows of after every step.
    with config.patch({
        "triton.fast_path_cudagraph_asserts": True, "triton.slow_path_cudagraph_asserts": True,
        "fx_graph_cache": False,
    }):  # fmt: skip
        yield
    torch._dynamo.reset()


def recorded():
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_container(0).tree_manager
    return 0 if manager is None else sum(len(nodes) for nodes in manager.roots.values())


def test_decode_is_captured_and_replays_equal_eager(strict_trees, backend):
    torch.manual_seed(0)
    start = torch.randn(PAGES, 2, PAGE, HKV, DIM, dtype=torch.bfloat16, device="cuda")
    captured = {b: Layer(wrapper(b, backend), start.clone(), backend) for b in (2, 3)}
    eager = {b: Layer(wrapper(b, backend), start.clone(), backend) for b in (2, 3)}
    fast = {b: torch.compile(x, mode="reduce-overhead", fullgraph=True) for b, x in captured.items()}
    graphs = []
    with torch.no_grad():
        for batch in (2, 3, 2):  # new shapes in between, then the first ones again
            for seed, kv_lens in enumerate(steps(batch)):
                table = tables(kv_lens, seed)
                args = inputs(table, kv_lens)
                plan(eager[batch].wrapper, table)
                want = eager[batch](*args)
                plan(captured[batch].wrapper, table)
                assert captured[batch].wrapper.backend == backend
                torch.compiler.cudagraph_mark_step_begin()
                got = fast[batch](*args).clone()
                assert torch.equal(got, want)
                assert torch.equal(captured[batch].cache, eager[batch].cache)
            graphs.append(recorded())
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert graphs[0] >= 1
    assert graphs[1] > graphs[0]
    assert graphs[2] == graphs[1]


def test_a_replay_reads_the_plan_of_now_not_of_the_capture(strict_trees, backend):
    cache = torch.randn(PAGES, 2, PAGE, HKV, DIM, dtype=torch.bfloat16, device="cuda")
    layer = Layer(wrapper(2, backend), cache, backend)
    fast = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    seen = []
    with torch.no_grad():
        for seed in range(5):
            kv_lens = [9, 20]
            table = tables(kv_lens, seed)
            torch.manual_seed(1)
            args = inputs(table, kv_lens)
            plan(layer.wrapper, table)
            torch.compiler.cudagraph_mark_step_begin()
            seen.append(fast(*args).clone())
    assert recorded() >= 1
    assert not torch.equal(seen[3], seen[4])
