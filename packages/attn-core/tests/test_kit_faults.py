"""The kit's own test: backends that compute one thing wrong, each to be caught by the check it names."""

import math
from dataclasses import replace

import pytest
import torch

from attn_core.problem import Op, PagedKV
from attn_core.testing import failures
from attn_core.testing.mini import CAPABILITY, Mini

ORACLE = "matches_the_oracle"
PREFILL = (replace(Mini.paths[0], capability=replace(CAPABILITY, ops=frozenset({Op.PREFILL_PAGED}))),)


class TopLeftCausal(Mini):
    caught_by = ORACLE

    def diagonal(self, q_len, kv_len):
        return 0


class InterleavedGroups(Mini):
    caught_by = ORACLE

    def kv_heads(self, p):
        return torch.arange(p.num_qo_heads) % p.num_kv_heads


class MissingScale(Mini):
    caught_by = ORACLE

    def scale(self, p, io):
        return io.k_scale


class DropsKScale(Mini):
    caught_by = ORACLE

    def scale(self, p, io):
        return p.sm_scale


class IgnoresScaleTensors(Mini):
    caught_by = ORACLE

    def scale(self, p, io):
        return p.sm_scale * (1.0 if isinstance(io.k_scale, torch.Tensor) else io.k_scale)


class NaturalLogLse(Mini):
    caught_by = ORACLE

    def lse(self, natural, kv_len):
        return natural


class LseWrongForEmptyRequestsOnly(Mini):
    caught_by = ORACLE

    def lse(self, natural, kv_len):
        return super().lse(natural, kv_len) if kv_len else torch.zeros_like(natural)


class FiniteLseOfEmptyRows(Mini):
    caught_by = ORACLE

    def lse(self, natural, kv_len):
        return super().lse(natural, kv_len).clamp(min=-5e4)


class IgnoresLastPageLen(Mini):
    caught_by = ORACLE

    def kv_len(self, p, n, image):
        size = p.page_size or 1
        return -(-super().kv_len(p, n, image) // size) * size


class PagesInAscendingOrder(Mini):
    caught_by = ORACLE

    def pages(self, ids):
        return ids.sort().values


class HalfUnwritten(Mini):
    caught_by = ORACLE

    def store(self, io, rows, out, lse):
        half = io.out.shape[-1] // 2
        io.out[rows, :, :half] = out[..., :half].to(io.out.dtype)
        if io.lse is not None:
            io.lse[rows] = lse.float()


class ReadsVWithKStrides(Mini):
    caught_by = ORACLE

    def caches(self, io):
        memory = io.v.as_strided((io.v.untyped_storage().nbytes() // io.v.itemsize,), (1,), 0)
        steps = [torch.arange(n) * s for n, s in zip(io.v.shape, io.k.stride(), strict=True)]
        at = sum(step.view(-1, *[1] * (io.v.ndim - 1 - axis)) for axis, step in enumerate(steps))
        at = (io.v.storage_offset() + at) % max(1, memory.numel())
        return io.k, memory.view(torch.uint8)[at].view(io.v.dtype) if io.v.itemsize == 1 else memory[at]


class ReadsQAsDense(Mini):
    caught_by = ORACLE

    def rows(self, io):
        return io.q.as_strided(io.q.shape, (io.q.shape[1] * io.q.shape[2], io.q.shape[2], 1))


class WritesOutAsDense(Mini):
    caught_by = ORACLE

    def store(self, io, rows, out, lse):
        _, heads, dim = io.out.shape
        dense = io.out.as_strided(io.out.shape, (heads * dim, dim, 1))
        dense[rows] = out.to(io.out.dtype)
        if io.lse is not None:
            io.lse[rows] = lse.float()


class WindowOffByOne(Mini):
    caught_by = ORACLE

    def window(self, p):
        return p.window_left - 1


class SoftCapAfterMask(Mini):
    caught_by = ORACLE

    def mask_logits(self, p, x, hidden):
        x = x.masked_fill(hidden, -math.inf)
        return p.logits_soft_cap * torch.tanh(x / p.logits_soft_cap) if p.logits_soft_cap else x


class BigEndianMask(Mini):
    caught_by = ORACLE
    paths = PREFILL

    def bit(self, bit):
        return 7 - super().bit(bit)


class MaskOffsetsInBits(Mini):
    caught_by = ORACLE
    paths = PREFILL

    def mask_start(self, n, image):
        return int(image["mask_indptr"][n]) * 8


class ReadsTheOtherFp8(Mini):
    caught_by = ORACLE

    def decode(self, t):
        return (t.view(torch.float8_e4m3fnuz) if t.dtype is torch.float8_e4m3fn else t).double()


class RopeCountsRowsFromZero(Mini):
    caught_by = ORACLE

    def q_start(self, q_len, kv_len):
        return 0


class FiniteInfinity(Mini):
    caught_by = "survives_extreme_logits"

    def mask_logits(self, p, x, hidden):
        return super().mask_logits(p, x, hidden & hidden.all(-1, keepdim=True)).masked_fill(hidden, -5e4)


class WeighsForeignTokensWithZero(Mini):
    """0 * NaN is NaN: a weight of nothing does not silence what it weighs."""

    caught_by = "never_reads_foreign_tokens"

    def keys(self, p, n, image, io):
        k, v = super().keys(p, n, image, io)
        if isinstance(p.kv, PagedKV):
            slot = io.v[0, 0] if p.kv.order == "NHD" else io.v[0, :, 0]
            v = v + 0 * self.decode(slot)
        return k, v


class BitsDependOnTheBatch(Mini):
    caught_by = "does_not_depend_on_the_batch"

    def run(self, launch, image, io):
        super().run(launch, image, io)
        io.out.mul_(1 + 2e-7 * (image["kv_len"].numel() > 1))


SAMPLE = "samples_chains_bit_for_bit"


class NumbersRowsWithSeedsOfTheirOwn(Mini):
    caught_by = "samples_the_same_in_any_batch"

    def sample(self, path, io):
        whole = replace(io, tokens=io.tokens.clone())
        super().sample(path, whole)
        io.tokens.copy_(whole.tokens if io.tokens.shape[0] > 1 else whole.tokens.flip(1))


class DropsTheHighWordOfTheOffset(Mini):
    caught_by = SAMPLE

    def counter(self, offset, row, position):
        return super().counter(offset & 0xFFFFFFFF, row, position)


class CountsPositionsFromZero(Mini):
    caught_by = SAMPLE

    def counter(self, offset, row, position):
        return super().counter(offset, row, position - 1)


class LeavesOutTheRow(Mini):
    caught_by = SAMPLE

    def counter(self, offset, row, position):
        return super().counter(offset, 0, position)


class OverwritesCounters(Mini):
    caught_by = SAMPLE

    def count(self, counter, r, n):
        counter[r] = n


class WritesCountersSideBySide(Mini):
    caught_by = SAMPLE

    def count(self, counter, r, n):
        flat = counter.as_strided((counter.numel(),), (1,))
        flat[r] += n


class StopsCountingAtARejection(Mini):
    caught_by = SAMPLE

    def accept(self, io, r):
        passed, prefix = super().accept(io, r)
        return passed[: prefix + 1], prefix


class AcceptsADraftTheTargetRulesOut(Mini):
    caught_by = SAMPLE

    def passes(self, u, q, p):
        return super().passes(u, q, p) or p == 0


class DrawsFromTheTargetAfterARejection(Mini):
    caught_by = SAMPLE

    def residual(self, target, draft):
        return target


class DrawsFromARowWithoutLaw(Mini):
    caught_by = SAMPLE

    def is_law(self, row):
        return True

    def integers(self, row):
        return super().integers([x if 0 <= x < math.inf else 0.5 for x in row])


class PadsWithZeros(Mini):
    caught_by = SAMPLE

    def pad(self):
        return 0


class SortsTheDraftIds(Mini):
    caught_by = SAMPLE

    def tokens(self, io, r, tokens):
        super().tokens(io, r, tokens)
        io.draft_token_ids[r] = io.draft_token_ids[r].sort().values


FAULTS = sorted(
    (c for c in Mini.__subclasses__() if c.__module__ == __name__), key=lambda fault: fault.__name__
)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(fault):
    caught = next(failures(fault(), check=fault.caught_by), None)
    assert caught is not None, f"{fault.__name__} survived {fault.caught_by}"
    assert isinstance(caught.error, AssertionError), f"{fault.__name__} crashed: {caught!r}"


def test_the_control_passes_every_check():
    assert [str(failure) for failure in failures(Mini(), every=8)] == []


def test_an_unknown_check_is_refused():
    with pytest.raises(LookupError, match=r"check: needs .*, got 'matches_nothing'"):
        next(failures(Mini(), check="matches_nothing"))
