"""sample() takes the acceptance step bit for bit as documented, and writes tokens and counters only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...backend import Backend, SamplingBackend, SamplingIO, SamplingPath
from ...sampling import chain_speculative_sampling
from ...sampling_math import sample
from ...sampling_route import paths_of
from ...target import DeviceTarget
from ..drive import only_sampling
from ..memory import same_bits
from .expect import expect

_BATCH = 9
_SHAPES = ((3, 997), (1, 64), (0, 33), (7, 5), (2, 1))
"""Drafts and vocabulary sizes: no multiple of any width, shorter than a wave, no draft, one token."""
_SPREAD = 3
_UNTOUCHED = 77


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One acceptance step: what it is made of."""

    draft: torch.dtype
    target: torch.dtype
    n: int
    vocab: int
    per_request: bool
    strided: bool

    def __str__(self) -> str:
        seeds = "a seed per request" if self.per_request else "one seed"
        gaps = ", rows apart" if self.strided else ""
        return f"{self.draft} and {self.target}, n {self.n}, vocab {self.vocab}, {seeds}{gaps}"


def samples_chains_bit_for_bit(backend: Backend, target: DeviceTarget) -> None:
    """Every sampling path gives the documented tokens and counts, directly and when called publicly."""
    for path in _paths(backend, target):
        assert isinstance(backend, SamplingBackend)
        unready = backend.prepare_sampling(target, path.name)
        expect(unready is None, f"prepare_sampling() refuses what {path.name} claims: {unready}")
        for case in _cases(path):
            _direct(backend, path, target.device, case)
            _public(backend, path, target.device, case)


def samples_the_same_in_any_batch(backend: Backend, target: DeviceTarget) -> None:
    """With a seed per request, a request alone gets what it gets in a batch."""
    for path in _paths(backend, target):
        assert isinstance(backend, SamplingBackend)
        expect(backend.prepare_sampling(target, path.name) is None, "prepare_sampling() refuses what it took")
        dtype = min(path.dtypes, key=str)
        vocab = min(129, path.max_vocab_size or 129)
        case = _Case(draft=dtype, target=dtype, n=3, vocab=vocab, per_request=True, strided=False)
        whole = _world(case, target.device)
        backend.sample(path.name, whole)
        for at in range(_BATCH):
            mine = [t[at : at + 1].contiguous() for t in _inputs(whole)]
            one = _io(mine, _outputs(1, case.n, whole.seed.device))
            backend.sample(path.name, one)
            text = f"{path.name}: request {at} gets other tokens alone than in a batch"
            expect(torch.equal(one.tokens[0], whole.tokens[at]), text)


def _paths(backend: Backend, target: DeviceTarget) -> Iterator[SamplingPath]:
    for path in paths_of(backend):
        expect(bool(path.dtypes), f"sampling path {path.name}: needs at least one type, got none")
        expect("/" not in path.name and bool(path.name), f"sampling path: needs no '/', got {path.name!r}")
        if path.archs is None or target.arch in path.archs:
            yield path


def _cases(path: SamplingPath) -> Iterator[_Case]:
    types = sorted(path.dtypes, key=str)
    pairs = [*zip(types, types, strict=True), *itertools.pairwise(types)]
    for (draft, target), (n, vocab), per_request in itertools.product(pairs, _SHAPES, (False, True)):
        if path.max_vocab_size is None or vocab <= path.max_vocab_size:
            yield _Case(
                draft=draft, target=target, n=n, vocab=vocab, per_request=per_request, strided=per_request
            )  # fmt: skip


def _world(case: _Case, device: torch.device) -> SamplingIO:
    """Laws that are alike, so that chains of every length are accepted, and rows that are no law."""
    make = torch.Generator().manual_seed(case.n * 1000 + case.vocab)
    draft = torch.randn(_BATCH, case.n, case.vocab, generator=make).softmax(-1)
    target = torch.randn(_BATCH, case.n + 1, case.vocab, generator=make).softmax(-1)
    target[:, : case.n] = 0.6 * draft + 0.4 * target[:, : case.n]
    ids = torch.randint(0, case.vocab, (_BATCH, case.n), generator=make)
    target[0, 0] = torch.nan
    target[1, -1] = 0
    target[2, 0, 0] = -0.25
    target[3, 0, -1] = torch.inf
    target[7] *= 1e-30  # far below what one scale for all rows would keep
    if case.n:
        draft[4, 0, 0] = torch.nan
        target[5, 0, ids[5, 0]] = 0  # a rejection
        target[6, 0] = draft[6, 0]  # equal rows always accept
        ids[8, 0] = -1
        ids[7, case.n - 1] = -1
    probs = [draft.to(case.draft), target.to(case.target)]
    if case.strided:
        probs = [torch.cat([t, t, t], 1)[::1, t.shape[1] : 2 * t.shape[1]] for t in probs]
    count = _BATCH if case.per_request else 1
    # High bits on purpose: a seed is a pattern of 64 bits, and so is an offset.
    seed = torch.randint(-(2**63), 2**63 - 1, (count,), generator=make)
    offset = torch.arange(count) + (1 << 40)
    outputs = _outputs(_BATCH, case.n, device, spread=_SPREAD if case.strided else 1)
    return _io([t.to(device) for t in (*probs, ids, seed, offset)], outputs)


_Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _io(inputs: list[torch.Tensor], outputs: _Outputs) -> SamplingIO:
    draft_probs, target_probs, ids, seed, offset = inputs
    return SamplingIO(draft_probs, target_probs, ids, seed, offset, *outputs)


def _inputs(io: SamplingIO) -> list[torch.Tensor]:
    return [io.draft_probs, io.target_probs, io.draft_token_ids, io.seed, io.offset]


def _outputs(rows: int, n: int, device: torch.device, spread: int = 1) -> _Outputs:
    tokens = torch.full((rows, n + 1), _UNTOUCHED, dtype=torch.int32, device=device)
    counters = torch.full((2, rows * spread), _UNTOUCHED, dtype=torch.int32, device=device)
    return tokens, counters[0, ::spread], counters[1, ::spread]


def _direct(backend: SamplingBackend, path: SamplingPath, device: torch.device, case: _Case) -> None:
    io, want = _world(case, device), _world(case, torch.device("cpu"))
    inputs = _inputs(io)
    before = [t.clone() for t in inputs]
    backend.sample(path.name, io)
    sample(want)
    for name in ("tokens", "accepted", "emitted"):
        found, right = getattr(io, name).cpu(), getattr(want, name)
        same = torch.equal(found, right)
        expect(same, f"{path.name}: {case}: {name} are {found.tolist()}, not {right.tolist()}")
    gaps = io.accepted._base if io.accepted._base is not None else io.accepted
    touched = int((gaps != _UNTOUCHED).sum()) - int((io.accepted != _UNTOUCHED).sum())
    touched -= int((io.emitted != _UNTOUCHED).sum())
    expect(touched == 0, f"{path.name}: {case}: sample() wrote between the counters")
    for was, now in zip(before, inputs, strict=True):
        expect(same_bits(was, now), f"{path.name}: {case}: sample() wrote to one of its inputs")


def _public(backend: SamplingBackend, path: SamplingPath, device: torch.device, case: _Case) -> None:
    io, want = _world(case, device), _world(case, torch.device("cpu"))
    sample(want)
    with only_sampling(backend, path):
        tokens, accepted, emitted = chain_speculative_sampling(
            io.draft_probs, io.draft_token_ids.int(), io.target_probs, io.accepted, None,
            seed=io.seed, offset=io.offset, backend=f"{backend.name}/{path.name}",
        )  # fmt: skip
    expect(accepted is io.accepted, "chain_speculative_sampling returned another counter than it was given")
    emitted += _UNTOUCHED
    for found, right in ((tokens, want.tokens), (accepted, want.accepted), (emitted, want.emitted)):
        text = f"{path.name}: {case}: the public function gives {found.tolist()}, not {right.tolist()}"
        expect(torch.equal(found.cpu(), right), text)
