"""The generator, seeds and offsets, torch generators, graph capture."""

import pytest
import torch

from attn_core import capture, sampling_math
from attn_core.philox import philox4x32, uniform53
from attn_core.sampling import chain_speculative_sampling

from .sampling_kit import needs_gpu, one_hot, random_case, run


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # The known answers published with the generator (Random123, philox4x32-10).
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words, device):
    packed = (key[1] << 32 | key[0]) - (2**64 if key[1] >> 31 else 0)
    got = philox4x32(
        tuple(torch.tensor([word], device=device) for word in counter), torch.tensor(packed, device=device)
    )
    assert tuple(int(word) for word in got) == words


def test_philox_broadcasts():
    row, column = torch.arange(3)[:, None], torch.arange(5)
    zero = torch.zeros(1, dtype=torch.int64)
    keys = torch.tensor([[1], [2], [-3]])
    got = philox4x32((column, zero, row, zero), keys)
    assert all(word.shape == (3, 5) for word in got)
    for r in range(3):
        for c in range(5):
            alone = philox4x32((column[c : c + 1], zero, row[r], zero), keys[r])
            assert [int(word[r, c]) for word in got] == [int(word) for word in alone]


def test_uniform_is_in_the_half_open_interval():
    top = torch.tensor([0xFFFFFFFF])
    assert float(uniform53(top, top)) == 1 - 2.0**-53
    assert float(uniform53(top * 0, top * 0)) == 0.0
    u = sampling_math.uniforms(torch.tensor([1]), torch.tensor([0]), 1000, 50)
    for values in u:
        assert abs(float(values.mean()) - 0.5) < 0.006  # 5 standard errors
        assert abs(float(values.var()) - 1 / 12) < 0.002
    together = torch.stack([values.flatten() for values in u])
    assert abs(float(together.corrcoef()[0, 1])) < 0.025


def coin(rows=1, device="cpu"):
    """Rows without a draft whose token is 0 or 1, evenly."""
    law = torch.tensor([0.5, 0.5], device=device).expand(rows, 1, 2)
    return torch.zeros(rows, 0, 2, device=device), torch.zeros(rows, 0, device=device).long(), law


def test_calls_differ_and_a_seed_repeats_them(device):
    case = coin(64, device)
    draws = [run(case)[0] for _ in range(10)]
    assert len({str(d) for d in draws}) == 10
    torch.manual_seed(0)
    first = [run(case)[0] for _ in range(2)]
    torch.manual_seed(0)
    assert [run(case)[0] for _ in range(2)] == first
    generator = torch.Generator(device=device).manual_seed(0)
    again = [run(case, generator=generator)[0] for _ in range(2)]
    assert again[0] != again[1]
    generator.manual_seed(0)
    assert [run(case, generator=generator)[0] for _ in range(2)] == again


@pytest.mark.parametrize(("rows", "n"), [(0, 0), (1, 0), (64, 5)])
def test_generator_advances_by_one_draw(rows, n, device):
    case = tuple(t.to(device) for t in random_case(rows, n, 4))
    generator, other = (torch.Generator(device=device).manual_seed(3) for _ in range(2))
    run(case, generator=generator)
    torch.empty(1, dtype=torch.int64, device=device).random_(generator=other)
    assert torch.equal(generator.get_state(), other.get_state())
    if device == "cuda":
        assert generator.get_offset() == 4


def test_a_seed_leaves_every_generator_alone(device):
    generator = torch.Generator(device=device)
    state, default = generator.get_state(), torch.get_rng_state()
    run(coin(3, device), generator=generator, seed=1, offset=0)
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.get_rng_state(), default)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**63, 2**64 - 1])
def test_int_and_tensor_seeds_agree(seed, device):
    case = coin(64, device)
    want = run(case, seed=seed, offset=7)
    for dtype in (torch.int64, torch.uint64):
        seeds = torch.tensor([seed % 2**64], dtype=torch.uint64, device=device).view(dtype)
        offsets = torch.tensor([7], dtype=dtype, device=device)
        assert run(case, seed=seeds, offset=offsets) == want
        assert run(case, seed=seeds[0], offset=offsets[0]) == want


def test_every_seed_and_offset_is_another_set_of_numbers():
    case = coin(64)
    pairs = [(0, 0), (0, 1), (0, 2**32), (1, 0), (2**32, 0), (1, 1), (2**63, 0), (0, 2**63)]
    draws = {str(run(case, seed=seed, offset=offset)[0]) for seed, offset in pairs}
    assert len(draws) == len(pairs)


def test_positions_have_numbers_of_their_own():
    law = torch.tensor([0.5, 0.5])
    outcome = []
    for pad_at in range(4):
        ids = torch.zeros(64, 3).long()
        ids[:, pad_at:] = -1
        draft = one_hot(0, 0, 0, vocab=2).expand(64, 3, 2)
        target = torch.cat((draft[:, :pad_at], law.expand(64, 4 - pad_at, 2)), 1)
        tokens, _, emitted = run((draft, ids, target), seed=1, offset=0)
        assert emitted == [pad_at] * 64
        outcome.append(str([row[pad_at] for row in tokens]))
    assert len(set(outcome)) == 4


def test_a_row_does_not_depend_on_the_others():
    draft, ids, target = random_case(6, 3, 17)
    whole = run((draft, ids, target), seed=1, offset=5)
    head = run((draft[:2], ids[:2], target[:2]), seed=1, offset=5)
    assert head == tuple(part[:2] for part in whole)
    shuffled = run((draft.roll(1, 0), ids, target), seed=1, offset=5)
    assert shuffled[0] != whole[0]


def test_seed_per_request_follows_the_request():
    draft, ids, target = random_case(6, 3, 17)
    seeds, offsets = torch.arange(6) * 1000 - 7, torch.tensor([3])
    whole = run((draft, ids, target), seed=seeds, offset=offsets)
    order = torch.tensor([4, 0, 5])
    part = run((draft[order], ids[order], target[order]), seed=seeds[order], offset=offsets)
    assert part == tuple([rows[i] for i in order] for rows in whole)
    alone = run((draft[2:3], ids[2:3], target[2:3]), seed=seeds[2:3], offset=offsets)
    assert alone == tuple(rows[2:3] for rows in whole)
    moved = run((draft, ids, target), seed=seeds, offset=torch.arange(6) + 3)
    assert moved[0][0] == whole[0][0]
    assert moved[0][1:] != whole[0][1:]


def test_one_seed_and_an_offset_per_request_keeps_rows_independent():
    assert len(set(map(str, run(coin(64), seed=torch.tensor([1]), offset=torch.zeros(64).long())[0]))) == 2


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"seed": 1}, ValueError, "^seed and offset: needs both or neither.*got int and NoneType"),
        ({"offset": 1}, ValueError, "^seed and offset: needs both or neither.*got NoneType and int"),
        (
            {"seed": torch.tensor([1]), "offset": 1},
            ValueError,
            "both tensors or both scalars, got a tensor and",
        ),
        (
            {"seed": 1, "offset": torch.tensor([1])},
            ValueError,
            "both tensors or both scalars, got int and a t",
        ),
        ({"seed": torch.tensor([1])}, ValueError, "^seed and offset: .*got a tensor and NoneType"),
        ({"seed": 1.0, "offset": 0}, TypeError, "^seed: needs an int or a tensor, got float"),
        ({"seed": 1, "offset": True}, TypeError, "^offset: needs an int or a tensor, got bool"),
        ({"seed": 2**64, "offset": 0}, ValueError, "^seed: needs 64 bits"),
        ({"seed": 0, "offset": -(2**63) - 1}, ValueError, "^offset: needs 64 bits"),
        (
            {"seed": torch.tensor([1]).int(), "offset": torch.tensor([1])},
            TypeError,
            "^seed: needs int64 or uint64",
        ),
        (
            {"seed": torch.tensor([1]), "offset": torch.tensor([1.0])},
            TypeError,
            "^offset: needs int64 or uint64",
        ),
        (
            {"seed": torch.tensor([1, 2]), "offset": torch.tensor([1])},
            ValueError,
            r"^seed: needs 1 or 3 entries",
        ),
        (
            {"seed": torch.tensor([1]), "offset": torch.ones(3, 1).long()},
            ValueError,
            "^offset: needs 1 or 3 entr",
        ),
        (
            {"seed": torch.empty(0).long(), "offset": torch.tensor([1])},
            ValueError,
            "^seed: needs 1 or 3 entries",
        ),
        (
            {"seed": torch.ones(1, device="meta").long(), "offset": torch.tensor([1])},
            ValueError,
            "^seed: needs the device of draft_probs, cpu, got meta",
        ),
    ],
)
def test_bad_seeds(kwargs, error, match):
    counter = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(error, match=match):
        chain_speculative_sampling(*random_case(3, 2, 4), counter, **kwargs)
    assert counter.sum() == 0


@pytest.mark.parametrize("kwargs", [{}, {"seed": 1, "offset": 0}, {"generator": torch.Generator()}])
def test_capture_without_device_seeds_is_refused(kwargs, monkeypatch):
    monkeypatch.setattr(capture, "capturing", lambda device: True)
    default = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"^seed and offset: needs device tensors during graph capture"):
        run(coin(), **kwargs)
    assert torch.equal(torch.get_rng_state(), default)
    run(coin(), seed=torch.tensor([1]), offset=torch.tensor([0]))


@needs_gpu
@pytest.mark.parametrize("vocab", [5, 997, 128_256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_and_cpu_agree_bit_for_bit(vocab, dtype):
    case = random_case(64, 4, vocab, dtype=dtype)
    want = run(case, seed=9, offset=1)
    gpu = tuple(t.cuda() for t in case)
    assert run(gpu, seed=9, offset=1) == want
    torch.use_deterministic_algorithms(True)
    try:
        assert run(gpu, seed=9, offset=1) == want
    finally:
        torch.use_deterministic_algorithms(False)


@needs_gpu
def test_cpu_generator_with_gpu_tensors():
    case = random_case(64, 2, 9)
    generator = torch.Generator().manual_seed(3)
    want = run(case, generator=generator)
    assert run(tuple(t.cuda() for t in case), generator=generator.manual_seed(3)) == want


@needs_gpu
def test_gpu_generator_with_cpu_tensors_is_refused():
    with pytest.raises(ValueError, match=r"^generator: needs a generator on the CPU or on cpu, got cuda"):
        run(coin(), generator=torch.Generator(device="cuda"))


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_device_read():
    case = tuple(t.cuda() for t in random_case(64, 2, 9))
    seeds = torch.tensor([1], device="cuda"), torch.tensor([0], device="cuda")
    run(case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        chain_speculative_sampling(*case)
        chain_speculative_sampling(*case, generator=torch.Generator())
        chain_speculative_sampling(*case, seed=1, offset=0)
        chain_speculative_sampling(*case, seed=seeds[0], offset=seeds[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_graph_replay_follows_seed_offset_and_inputs():
    case = tuple(t.cuda() for t in random_case(64, 3, 997))
    seed, offset = torch.tensor([1], device="cuda"), torch.tensor([0], device="cuda")
    accepted, emitted = (torch.zeros(64, dtype=torch.int32, device="cuda") for _ in range(2))
    chain_speculative_sampling(*case, seed=seed, offset=offset)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for kwargs in ({}, {"seed": 1, "offset": 0}):
            with pytest.raises(
                ValueError, match=r"^seed and offset: needs device tensors during graph capture"
            ):
                chain_speculative_sampling(*case, **kwargs)
        tokens, _, _ = chain_speculative_sampling(*case, accepted, emitted, seed=seed, offset=offset)
        offset.add_(1)
    seen, total = set(), 0
    for step in range(5):
        if step == 3:
            for old, new in zip(case, random_case(64, 3, 997, seed=step), strict=True):
                old.copy_(new)
        graph.replay()
        want = run(case, seed=1, offset=step)
        assert tokens.tolist() == want[0]
        total += sum(want[2])
        assert int(emitted.sum()) == total
        seen.add(str(want[0]))
    assert len(seen) == 5
