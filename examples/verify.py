"""Verify draft tokens over a paged KV cache: plan once per step, run once per layer.

Three requests have 40, 17 and 64 tokens in the cache, the last four of which are one accepted token and
three drafts. One call attends all four rows of every request, each row to its own past only.
"""

import torch

from attn_core import BatchDecodeWithPagedKVCacheWrapper

PAGE_SIZE, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, DRAFTS = 16, 32, 8, 128, 3

device = "cuda" if torch.cuda.is_available() else "cpu"  # PyTorch for ROCm calls its devices "cuda" as well
kv_lens = torch.tensor([40, 17, 64], dtype=torch.int32)
pages = (kv_lens + PAGE_SIZE - 1) // PAGE_SIZE
kv_indptr = torch.cat((torch.zeros(1), pages.cumsum(0))).int()
kv_indices = torch.randperm(int(kv_indptr[-1])).int()  # the pages of a request may lie anywhere
kv_last_page_len = kv_lens - (pages - 1) * PAGE_SIZE

pool = torch.randn(len(kv_indices), 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=torch.float16, device=device)
q = torch.randn(len(kv_lens) * (DRAFTS + 1), NUM_QO_HEADS, HEAD_DIM, dtype=torch.float16, device=device)

workspace = torch.zeros(16 << 20, dtype=torch.uint8, device=device)
wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
wrapper.plan(
    kv_indptr,
    kv_indices,
    kv_last_page_len,
    NUM_QO_HEADS,
    NUM_KV_HEADS,
    HEAD_DIM,
    PAGE_SIZE,
    q_data_type=torch.float16,
    q_len_per_req=DRAFTS + 1,
)
out, lse = wrapper.run(q, pool, return_lse=True)

print("out", tuple(out.shape), "lse (base 2)", tuple(lse.shape))
print("served by", wrapper.route.candidate)
for reason in wrapper.route.refused:
    print("passed over", reason)
