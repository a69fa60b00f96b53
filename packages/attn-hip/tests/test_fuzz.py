"""Random calls of the fa2 kernels. Longer: ``attn fuzz --backend fa2 --seconds 600``."""

import torch

from attn_core.prefill import BatchPrefillWithRaggedKVCacheWrapper
from attn_core.testing.fuzz import Tally, sessions
from attn_hip.backend import Fa2Backend

torch.set_num_threads(1)


def test_random_sessions():
    tally = Tally()
    found = list(sessions(Fa2Backend(), seed=11, count=80, tally=tally))
    assert not found, str(found[0])
    assert tally.sessions == 80
    assert len(tally.by_op) == 14


def test_strided_index_arrays_give_the_same_bits():
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 64, generator=make) for n, h in ((5, 2), (14, 1), (14, 1)))
    outs = []
    for strided in (False, True):
        arrays = [torch.tensor(values, dtype=torch.int32) for values in ([0, 2, 5], [0, 5, 14])]
        if strided:
            arrays = [torch.stack([t, t - 1], 1)[:, 0] for t in arrays]
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), backend="fa2")
        wrapper.plan(*arrays, 2, 1, 64, q_data_type=torch.float32)
        outs.append(wrapper.run(q, k, v))
    assert torch.equal(*outs)
