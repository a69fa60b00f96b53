import itertools

import pytest
import torch

from attn_core.quantization import packbits, segment_packbits

torch.set_num_threads(1)


def oracle(bits, bitorder):
    """Pack a list of 0/1 by the definition."""
    out = []
    for start in range(0, len(bits), 8):
        byte = 0
        for position, bit in enumerate(bits[start : start + 8]):
            byte |= int(bit) << (position if bitorder == "little" else 7 - position)
        out.append(byte)
    return out


def segments_oracle(bits, indptr, bitorder):
    packed, new_indptr = [], [0]
    for begin, end in itertools.pairwise(indptr):
        packed += oracle(bits[begin:end], bitorder)
        new_indptr.append(len(packed))
    return packed, new_indptr


def random_bits(n, seed=0):
    return torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.5


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 15, 16, 17, 99, 4096])
def test_packbits(n, bitorder, device):
    x = random_bits(n)
    got = packbits(x.to(device), bitorder)
    assert (got.dtype, got.device.type) == (torch.uint8, device)
    assert got.tolist() == oracle(x.tolist(), bitorder)


def test_default_order_is_big():
    x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    assert packbits(x).tolist() == [0b10110011, 0b10000000]
    assert packbits(x, "little").tolist() == [0b11001101, 0b00000001]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_any_nonzero_integer_is_one(dtype):
    x = torch.tensor([0, 1, 2, 0, 127, 0, 100, 64, 3], dtype=dtype)
    want = oracle((x != 0).tolist(), "big")
    assert packbits(x).tolist() == want
    assert segment_packbits(x, torch.tensor([0, 9]))[0].tolist() == want


def test_bool_with_other_bytes_than_0_and_1():
    x = torch.tensor([2, 0, 255, 128], dtype=torch.uint8).view(torch.bool)
    assert packbits(x, "little").tolist() == [0b1101]


def test_strided_input_and_input_is_kept():
    base = random_bits(60)
    before = base.clone()
    assert packbits(base[::3]).tolist() == oracle(base[::3].tolist(), "big")
    assert torch.equal(base, before)


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [0],
        [5],
        [16],
        [0, 0],
        [0, 3, 0, 0, 9, 0],
        [1] * 20,
        [8, 16, 8],
        [15, 45],
        [7, 1, 8, 9, 17, 2, 0, 63, 64, 65],
        list(range(40)),
    ],
)
def test_segment_packbits(lengths, index_dtype, bitorder, device):
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    x = random_bits(int(indptr[-1]))
    got, new_indptr = segment_packbits(x.to(device), indptr.to(index_dtype).to(device), bitorder)
    want, want_indptr = segments_oracle(x.tolist(), indptr.tolist(), bitorder)
    assert got.tolist() == want
    assert new_indptr.tolist() == want_indptr
    assert (got.dtype, new_indptr.dtype) == (torch.uint8, torch.int32)
    assert (got.device.type, new_indptr.device.type) == (device, device)


def test_every_bit_offset_and_length():
    for bitorder in ("big", "little"):
        for lead in range(17):
            for length in range(20):
                x = torch.ones(lead + length + 5, dtype=torch.bool)  # ones: a bit too many shows
                indptr = [0, lead, lead + length, lead + length + 5]
                got, _ = segment_packbits(x, torch.tensor(indptr), bitorder)
                assert got.tolist() == segments_oracle(x.tolist(), indptr, bitorder)[0]


def test_attention_mask_example():
    # Two requests, 3 x 5 and 4 x 9, whose packed masks and byte offsets were worked out independently.
    keep = (torch.rand(3 * 5 + 4 * 9, generator=torch.Generator().manual_seed(15)) > 0.4).tolist()
    for start, rows, cols in ((0, 3, 5), (15, 4, 9)):
        for row in range(rows):
            keep[start + row * cols] = True
    packed, byte_indptr = segment_packbits(torch.tensor(keep), torch.tensor([0, 15, 51]), "little")
    assert byte_indptr.tolist() == [0, 2, 7]
    assert packed[:2].tolist() == [245, 101]
    assert packed[2:].tolist() == [171, 171, 78, 46, 11]


def test_indptr_may_stay_on_the_host(device):
    x = random_bits(20).to(device)
    got, new_indptr = segment_packbits(x, torch.tensor([0, 3, 20]))
    want, _ = segment_packbits(x, torch.tensor([0, 3, 20], device=device))
    assert torch.equal(got, want)
    assert new_indptr.device.type == device


@pytest.mark.parametrize(
    ("indptr", "match"),
    [
        ([1, 10], r"^indptr: needs 0 at position 0, got 1 \["),
        ([0, 9, 7, 10], r"^indptr: needs at least 9 \(its predecessor\) at position 2, got 7 \["),
        ([0, 4], r"^indptr: needs the length of x, 10, at position 1, got 4 \["),
        ([0, 4, 11], r"^indptr: needs the length of x, 10, at position 2, got 11 \["),
        ([0], r"^indptr: needs the length of x, 10, at position 0, got 0 \["),
        ([[0, 10]], r"^indptr: needs 1 dimension"),
    ],
)
def test_bad_indptr(indptr, match, device):
    with pytest.raises(ValueError, match=match):
        segment_packbits(random_bits(10).to(device), torch.tensor(indptr, device=device))


def test_empty_indptr():
    with pytest.raises(ValueError, match=r"^indptr: needs 1 dimension and at least 1 entry"):
        segment_packbits(random_bits(0), torch.empty(0, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8])
def test_indptr_dtype(dtype):
    with pytest.raises(TypeError, match=f"^indptr: needs int32 or int64, got {dtype}"):
        segment_packbits(random_bits(1), torch.tensor([0, 1]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64])
def test_float_mask_is_refused(dtype):
    x = torch.ones(8, dtype=dtype)
    with pytest.raises(TypeError, match=f"^x: needs bool or an integer dtype, got {dtype}"):
        packbits(x)
    with pytest.raises(TypeError, match=r"^x: needs bool"):
        segment_packbits(x, torch.tensor([0, 8]))


@pytest.mark.parametrize("bitorder", ["Big", "lsb", "", None, 1])
def test_bad_bitorder(bitorder):
    with pytest.raises(ValueError, match=r"^bitorder: needs 'big' or 'little', got "):
        packbits(random_bits(8), bitorder)
    with pytest.raises(ValueError, match=r"^bitorder: needs 'big' or 'little', got "):
        segment_packbits(random_bits(8), torch.tensor([0, 8]), bitorder)


def test_bad_shape():
    with pytest.raises(ValueError, match=r"^x: needs 1 dimension, got shape \(2, 4\)"):
        packbits(random_bits(8).view(2, 4))
    with pytest.raises(ValueError, match=r"^x: needs 1 dimension"):
        packbits(torch.tensor(True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_capture():
    x, indptr = random_bits(20).cuda(), torch.tensor([0, 3, 20], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = packbits(x)
        with pytest.raises(ValueError, match=r"^segment_packbits: needs a call outside graph capture"):
            segment_packbits(x, indptr)
    x.copy_(random_bits(20, seed=1))
    graph.replay()
    assert packed.tolist() == oracle(random_bits(20, seed=1).tolist(), "big")
