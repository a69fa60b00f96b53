import pytest
import torch

from attn_core.page_indices import get_batch_indices_positions, get_seq_lens

torch.set_num_threads(1)

INDEX_DTYPES = [torch.int32, torch.int64]


def i32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def oracle(appended, seq_lens, nnz):
    batch, position = [], []
    for request, (count, length) in enumerate(zip(appended, seq_lens, strict=True)):
        batch += [request] * count
        position += range(length - count, length)
    tail = nnz - len(batch)
    return batch + [-1] * tail, position + [0] * tail


def indptr_of(counts, device="cpu"):
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device)


CASES = [
    ([1, 2, 3, 4], [5, 5, 5, 5]),
    ([45, 8, 25, 22], [45, 8, 25, 22]),
    ([0, 3, 0, 0, 2, 0], [7, 3, 0, 4, 9, 1]),
    ([0, 0], [4, 0]),
    ([6], [6]),
    ([], []),
]


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize(("appended", "seq_lens"), CASES)
def test_batch_indices_positions(appended, seq_lens, index_dtype, padding, device):
    nnz = sum(appended) + padding
    lens = torch.tensor(seq_lens, dtype=index_dtype, device=device)
    batch, position = get_batch_indices_positions(indptr_of(appended, device).to(index_dtype), lens, nnz)
    want_batch, want_position = oracle(appended, seq_lens, nnz)
    assert batch.tolist() == want_batch
    assert position.tolist() == want_position
    assert (batch.dtype, position.dtype) == (torch.int32, torch.int32)
    assert (batch.device.type, position.device.type) == (device, device)


def test_given_buffers_are_filled_and_returned(device):
    batch = torch.full((12,), 99, dtype=torch.int32, device=device)
    position = torch.full((12,), 99, dtype=torch.int32, device=device)
    got = get_batch_indices_positions(
        indptr_of([2, 0, 3], device), i32([2, 8, 9], device), 7, batch[:7], None
    )
    assert got[0].data_ptr() == batch.data_ptr()
    assert batch.tolist() == [0, 0, 2, 2, 2, -1, -1] + [99] * 5
    got = get_batch_indices_positions(
        indptr_of([2, 0, 3], device), i32([2, 8, 9], device), 7, positions=position[2:9]
    )
    assert position.tolist() == [99, 99, 0, 1, 6, 7, 8, 0, 0, 99, 99, 99]  # the padding's old 99 is gone


def test_longer_seq_lens_buffer_is_cut():
    batch, position = get_batch_indices_positions(indptr_of([1, 2]), i32([4, 6, -7, 0]), 3)
    assert (batch.tolist(), position.tolist()) == ([0, 1, 1], [3, 4, 5])


def test_strided_indptr():
    indptr = i32([0, 77, 1, 77, 3])[::2]
    batch, position = get_batch_indices_positions(indptr, i32([4, 6]), 3)
    assert (batch.tolist(), position.tolist()) == ([0, 1, 1], [3, 4, 5])


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (([1, 3], [5], 3), r"^append_indptr: needs 0 at position 0, got 1 \["),
        (([0, 5, 3], [5, 5], 5), r"^append_indptr: needs no decrease, got 3 at position 2 after 5 \["),
        (([0, 2, 5], [5, 5], 4), r"^nnz: needs at least append_indptr\[-1\], which is 5, got 4 \["),
        (([0, 2, 5], [5, 2], 5), r"^seq_lens: needs at least the 3 tokens that request 1 appends, got 2 \["),
        (([0, 2, 5], [5], 5), r"^seq_lens: needs at least 2 entries .*got 1 \["),
        (([0, 2], [2], -1), r"^nnz: needs 0 to 2147483647, got -1 \["),
    ],
)
def test_bad_values(args, match):
    indptr, lens, nnz = args
    batch = torch.full((max(nnz, 0),), 7, dtype=torch.int32)
    with pytest.raises(ValueError, match=match):
        get_batch_indices_positions(i32(indptr), i32(lens), nnz, batch)
    assert (batch == 7).all()


GOOD = {"append_indptr": i32([0, 2]), "seq_lens": i32([2]), "nnz": 2}


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"append_indptr": torch.tensor([0.0, 2.0])}, TypeError, "^append_indptr: needs int32 or int64"),
        ({"seq_lens": torch.tensor([2.0])}, TypeError, "^seq_lens: needs int32 or int64, got torch.float32"),
        ({"nnz": 2.0}, TypeError, "^nnz: needs an int, got float"),
        ({"nnz": True}, TypeError, "^nnz: needs an int, got bool"),
        ({"nnz": torch.tensor(2)}, TypeError, "^nnz: needs an int, got Tensor"),
        ({"append_indptr": i32([[0, 2]])}, ValueError, "^append_indptr: needs 1 dimension"),
        ({"append_indptr": i32([])}, ValueError, "^append_indptr: needs batch_size . 1 entries, got 0"),
        ({"seq_lens": i32([[2]])}, ValueError, "^seq_lens: needs 1 dimension"),
        (
            {"seq_lens": i32([2], "meta")},
            ValueError,
            "^seq_lens: needs the device of the indptr, cpu, got meta",
        ),
        ({"batch_indices": torch.empty(2, dtype=torch.int64)}, TypeError, "^batch_indices: needs int32"),
        ({"positions": torch.empty(2)}, TypeError, "^positions: needs int32, got torch.float32"),
        ({"positions": i32([0, 0, 0])}, ValueError, r"^positions: needs shape \(2,\), got \(3,\)"),
        ({"batch_indices": i32([[0, 0]])}, ValueError, r"^batch_indices: needs shape \(2,\)"),
        ({"batch_indices": i32([0, 0], "meta")}, ValueError, "^batch_indices: needs the device"),
    ],
)
def test_bad_input(changed, error, match):
    assert get_batch_indices_positions(**GOOD)[1].tolist() == [0, 1]
    with pytest.raises(error, match=match):
        get_batch_indices_positions(**(GOOD | changed))


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_seq_lens(index_dtype, device):
    indptr = torch.tensor([0, 3, 3, 4, 6], dtype=index_dtype, device=device)
    last = torch.tensor([5, 0, 16, 1], dtype=index_dtype, device=device)
    got = get_seq_lens(indptr, last, 16)
    assert got.tolist() == [37, 0, 16, 17]
    assert got.dtype == index_dtype


@pytest.mark.parametrize("last", [0, 1, 16, -3, 999])
def test_request_without_pages_has_no_tokens_whatever_its_last_page_len(last, device):
    got = get_seq_lens(i32([0, 3, 3, 4], device), i32([5, last, 16], device), 16)
    assert got.tolist() == [37, 0, 16]


def test_seq_lens_of_a_part_of_a_batch():
    # An indptr cut out of a longer one does not start at 0.
    assert get_seq_lens(i32([3, 3, 4]), i32([0, 16]), 16).tolist() == [0, 16]


def test_seq_lens_mixed_dtypes_and_page_size_1():
    assert get_seq_lens(i32([0, 2, 7]), torch.tensor([1, 1]), 1).tolist() == [2, 5]
    assert get_seq_lens(i32([0]), i32([]), 16).tolist() == []


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        (
            ([0, 3, 4], [17, 16], 16),
            ValueError,
            r"^kv_last_page_len: needs 1 to page_size \(16\), got 17 at pos",
        ),
        (([0, 3, 4], [5, 0], 16), ValueError, "^kv_last_page_len: .*got 0 at position 1"),
        (([0, 3, 4], [5, -1], 16), ValueError, "^kv_last_page_len: .*got -1 at position 1"),
        (([0, 4, 3], [5, 1], 16), ValueError, "^kv_indptr: needs no decrease, got 3 at position 2 after 4"),
        (([0, 3, 4], [5], 16), ValueError, "^kv_last_page_len: needs 2 entries .*got 1"),
        (([0, 3], [5], 0), ValueError, "^page_size: needs at least 1, got 0"),
        (([0, 3], [5], 16.0), TypeError, "^page_size: needs an int"),
        (([0.0, 3.0], [5], 16), TypeError, "^kv_indptr: needs int32 or int64"),
        (([0, 3], [5.0], 16), TypeError, "^kv_last_page_len: needs int32 or int64"),
    ],
)
def test_seq_lens_bad_input(args, error, match):
    indptr, last, page_size = args
    with pytest.raises(error, match=match):
        get_seq_lens(torch.tensor(indptr), torch.tensor(last), page_size)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_capture_follows_the_metadata():
    indptr, lens = indptr_of([2, 3], "cuda"), i32([2, 9], "cuda")
    pages, last = i32([0, 1, 2], "cuda"), i32([2, 9], "cuda")
    graph = torch.cuda.CUDAGraph()
    get_batch_indices_positions(indptr, lens, 8)
    with torch.cuda.graph(graph):
        batch, position = get_batch_indices_positions(indptr, get_seq_lens(pages, last, 16), 8)
    indptr.copy_(indptr_of([0, 4]))
    pages.copy_(i32([0, 0, 3]))
    graph.replay()
    assert batch.tolist() == [1, 1, 1, 1, -1, -1, -1, -1]
    assert position.tolist() == [37, 38, 39, 40, 0, 0, 0, 0]
