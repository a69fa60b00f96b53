"""Chain sampling through the public function: on the CPU's kernel, and on a GPU that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_core import plugins, sampling, sampling_route
from attn_core.errors import NoRoute
from attn_core.sampling import chain_speculative_sampling
from attn_hip import backend as backend_module
from attn_hip import codes, gpu
from attn_hip.backend import Fa2Backend

from .mockhip import TARGETS, Mock

ARCHS = pytest.mark.parametrize("mock", ["gfx942", "gfx950"], indirect=True)
BATCH, DRAFTS, VOCAB = 4, 3, 333
SEEDS: dict[str, Any] = {"seed": torch.tensor([5]), "offset": torch.tensor([1 << 33])}


@pytest.fixture(autouse=True)
def fresh_fa2() -> Any:
    """An fa2 that has loaded nothing, beside the reference."""
    others = tuple(b for b in plugins.registry().backends if b.name == "reference")
    made = Fa2Backend()
    old = plugins.use(plugins.Registry((made, *others), (), (), {b.name: "test" for b in (made, *others)}))
    yield made
    plugins.use(old)


def laws(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(2)
    draft = torch.randn(BATCH, DRAFTS, VOCAB, generator=make).softmax(-1)
    target = torch.randn(BATCH, DRAFTS + 1, VOCAB, generator=make).softmax(-1)
    target[:, :DRAFTS] = 0.7 * draft + 0.3 * target[:, :DRAFTS]
    target[1, 0, 4] = torch.nan
    ids = torch.randint(0, VOCAB, (BATCH, DRAFTS), generator=make)
    ids[3, 1] = -1
    return draft.to(dtype), ids, target.to(dtype)


def lists(found: tuple[torch.Tensor, ...]) -> list[Any]:
    return [t.tolist() for t in found]


def on(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Say of the CPU's tensors that they lie on the device."""
    for module in (backend_module, sampling):
        monkeypatch.setattr(module, "target_of", lambda device: TARGETS[mock.arch])


def test_auto_takes_the_cpus_kernel(fresh_fa2: Fa2Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    real = fresh_fa2.sample
    monkeypatch.setattr(fresh_fa2, "sample", lambda path, io: (taken.append(path), real(path, io)))
    want = lists(chain_speculative_sampling(*laws(), backend="reference", **SEEDS))
    assert taken == []
    assert lists(chain_speculative_sampling(*laws(), **SEEDS)) == want
    assert taken == ["cpu"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_many_threads_and_many_requests(dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(3)
    draft = torch.rand(301, 2, 50, generator=make).to(dtype)
    target = torch.rand(301, 3, 50, generator=make).to(dtype)
    ids = torch.randint(0, 50, (301, 2), generator=make)
    torch.set_num_threads(2)
    try:
        found = lists(chain_speculative_sampling(draft, ids, target, backend="fa2", **SEEDS))
    finally:
        torch.set_num_threads(1)
    assert found == lists(chain_speculative_sampling(draft, ids, target, backend="reference", **SEEDS))


@ARCHS
@pytest.mark.parametrize("per_request", [False, True])
def test_a_launch_has_a_block_per_request(
    mock: Mock, monkeypatch: pytest.MonkeyPatch, per_request: bool
) -> None:
    draft, ids, target = laws()
    seeds = {k: v.repeat(BATCH) + torch.arange(BATCH) if per_request else v for k, v in SEEDS.items()}
    want = lists(chain_speculative_sampling(draft, ids, target, backend="reference", **seeds))
    on(mock, monkeypatch)
    tokens = torch.full((BATCH, DRAFTS + 1), 77, dtype=torch.int32)
    counters = torch.zeros(2, BATCH, dtype=torch.int32)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: tokens if a == tokens.shape else real(*a, **k))
    with mock.over([draft, ids, target, *seeds.values()], [tokens, *counters]):
        found = chain_speculative_sampling(draft, ids, target, *counters, backend="fa2", **seeds)
    assert mock.fault is None
    assert mock.launched == [("attn_chain_sample", BATCH)]
    assert found[0] is tokens
    assert lists(found) == want


def test_a_failing_launch_raises_the_runtimes_words(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    on(mock, monkeypatch)
    mock.fail(launch=719)
    with pytest.raises(RuntimeError, match=r"launch of chain_sample: .*\(719\) \[fa2\.launch\]"):
        chain_speculative_sampling(*laws(), backend="fa2", **SEEDS)


def test_a_failing_load_is_a_reason_and_auto_goes_on(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    want = lists(chain_speculative_sampling(*laws(), backend="reference", **SEEDS))
    on(mock, monkeypatch)
    mock.fail(load=2)
    assert lists(chain_speculative_sampling(*laws(), **SEEDS)) == want
    assert mock.launched == []
    with pytest.raises(NoRoute, match=r"fa2/tile: .*out of memory \(2\) \[fa2\.load\]"):
        chain_speculative_sampling(*laws(), backend="fa2", **SEEDS)


def test_nothing_is_loaded_during_capture(
    mock: Mock, monkeypatch: pytest.MonkeyPatch, fresh_fa2: Fa2Backend
) -> None:
    want = lists(chain_speculative_sampling(*laws(), backend="reference", **SEEDS))
    on(mock, monkeypatch)
    capturing = [True]
    monkeypatch.setattr(gpu, "_capturing", lambda: capturing[0])
    with pytest.raises(NoRoute, match=r"needs one call before graph capture, to load chain_sample") as raised:
        chain_speculative_sampling(*laws(), backend="fa2", **SEEDS)
    assert codes.CAPTURE in [reason.code for reason in raised.value.reasons]
    assert lists(chain_speculative_sampling(*laws(), **SEEDS)) == want
    assert mock.launched == []
    assert fresh_fa2._gpu._failed == {}
    capturing[0] = False
    assert fresh_fa2.prepare_sampling(TARGETS[mock.arch], "tile") is None
    capturing[0] = True
    assert fresh_fa2.prepare_sampling(TARGETS[mock.arch], "tile") is None


def test_a_device_elsewhere_can_be_asked_about(fresh_fa2: Fa2Backend) -> None:
    problem = sampling_route.SamplingProblem(torch.float32, torch.bfloat16, 1000)
    samplers = sampling_route.screen(TARGETS["gfx950"], problem, plugins.registry().backends)
    said = {verdict.candidate: verdict.chosen for verdict in sampling_route.explain(samplers)}
    assert said == {"fa2/tile": True, "fa2/cpu": False, "reference/torch": False}
