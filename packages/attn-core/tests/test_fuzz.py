"""Random sessions: sound backends pass them, unsound ones and bad refusals do not."""

import random

import pytest
import torch

from attn_core import arguments, merge, sparse_variable
from attn_core.errors import needs
from attn_core.frozen import FrozenShape
from attn_core.pod import PODWithPagedKVCacheWrapper
from attn_core.reference import ReferenceBackend
from attn_core.testing import fuzz, misuse
from attn_core.testing.draw import draw
from attn_core.testing.kit import CPU
from attn_core.testing.mini import Mini

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("backend", "count"), [(ReferenceBackend(), 40), (Mini(), 40)], ids=["reference", "mini"]
)
def test_sound_backends_pass(backend, count):
    tally = fuzz.Tally()
    found = list(fuzz.sessions(backend, seed=7, count=count, tally=tally))
    assert not found, str(found[0])
    assert tally.sessions == count
    assert tally.right >= count
    assert tally.wrong >= count
    assert len(tally.by_op) >= 5


def test_a_number_and_a_seed_make_the_same_session_again():
    first, second = (str(fuzz.session_case(ReferenceBackend(), CPU, 3, 14)) for _ in range(2))
    assert first == second
    assert first != str(fuzz.session_case(ReferenceBackend(), CPU, 4, 14))


def test_a_wrong_number_is_found(monkeypatch):
    """A backend that drops the last key of requests with more than forty."""
    right, backend = Mini.hidden, Mini()

    def hidden(p, n, q_len, kv_len, image):
        found = right(backend, p, n, q_len, kv_len, image)
        if kv_len > 40:
            found[:, -1] = True
        return found

    monkeypatch.setattr(backend, "hidden", hidden)
    failure = next(fuzz.sessions(backend, seed=0, count=60))
    assert "differ" in str(failure.error)
    assert "session" in failure.case


def test_an_accepted_mistake_is_found(monkeypatch):
    monkeypatch.setattr(arguments, "split_size", lambda value: None)
    monkeypatch.setattr("attn_core.decode_paged.split_size", lambda value: None)
    monkeypatch.setattr("attn_core.prefill_paged.split_size", lambda value: None)
    monkeypatch.setattr("attn_core.prefill_ragged.split_size", lambda value: None)
    monkeypatch.setattr(misuse, "PLAN", {"split:float": misuse.PLAN["split:float"]})
    found = list(fuzz.sessions(ReferenceBackend(), seed=0, count=20))
    assert any("was accepted" in str(f.error) for f in found)


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: None, "was accepted"),
        (lambda: _raise(AttributeError("'list' object has no attribute 'numel'")), "AttributeError"),
        (lambda: _raise(ValueError("bad value")), "without a code"),
    ],
)
def test_what_is_not_a_refusal(call, said):
    with pytest.raises(AssertionError, match=said):
        fuzz.refused("a call", call)


def test_what_is_a_refusal():
    error = ValueError(needs("x", "1", 2, "core.some-code"))
    assert fuzz.refused("a call", lambda: _raise(error)) is error
    fuzz.refused("a call", lambda: fuzz.session_case(nonsense=1))


def test_every_mistake_can_be_made():
    """A misuse that never applies would test nothing."""
    backend, made = ReferenceBackend(), set()
    for number in range(90):
        case = draw(backend, CPU, random.Random(number), f"n{number}")
        if case.graph or case.problem.op in fuzz.SINGLES:
            continue
        world = fuzz.world_of(case)
        wrapper = fuzz.make_wrapper(case, torch.empty(1 << 20, dtype=torch.uint8))
        right, run = fuzz.plan_arguments(case, world, wrapper), fuzz.run_arguments(case, world, wrapper)
        made |= {name for name, change in misuse.PLAN.items() if change(case, right) is not None}
        made |= {name for name, change in misuse.RUN.items() if change(case, run) is not None}
    assert made == misuse.PLAN.keys() | misuse.RUN.keys()


@pytest.fixture
def others(monkeypatch):
    """Sessions about something else than one attention wrapper, of one kind."""

    def choose(*kinds):
        monkeypatch.setattr(fuzz, "_OTHERS", 1.0)
        monkeypatch.setattr(fuzz, "KINDS", kinds)

    return choose


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_sound_backends_pass_what_is_no_attention_wrapper(kind, others):
    others(kind)
    tally = fuzz.Tally()
    assert [str(f) for f in fuzz.sessions(ReferenceBackend(), seed=3, count=6, tally=tally)] == []
    assert tally.by_op == {kind: 6}
    assert tally.right >= 6
    assert tally.wrong >= 6 * 3


def test_what_a_backend_does_not_have_is_a_session_of_attention(others):
    others("chain_sampling")
    backend = Mini()
    backend.sampling = ()
    tally = fuzz.Tally()
    assert list(fuzz.sessions(backend, seed=3, count=3, tally=tally)) == []
    assert "chain_sampling" not in tally.by_op


class BadAppend(Mini):
    def append(self, path, problem, io):
        super().append(path, problem, io)
        io.v.view(-1)[0] = 3.0


class BadSampler(Mini):
    def pad(self):
        return 0


class BadLse(Mini):
    def lse(self, natural, kv_len):
        return super().lse(natural, kv_len) + 0.5 * (kv_len > 20)


class BadKeys(Mini):
    """Drops the last key of a request, or of a row of blocks."""

    def hidden(self, p, n, q_len, kv_len, image):
        found = super().hidden(p, n, q_len, kv_len, image)
        found[:, kv_len - 1 :] = True
        return found


COMPOSED = ("pod", "batch_pod", "block_sparse", "pool")


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("append", BadAppend()), ("chain_sampling", BadSampler()), ("cascade", BadLse()),
        *((kind, BadKeys()) for kind in COMPOSED),
    ],
    ids=["append", "chain_sampling", "cascade", *COMPOSED],
)  # fmt: skip
def test_a_wrong_result_is_found_in_sessions_of_every_kind(kind, backend, others):
    others(kind)
    failure = next(fuzz.sessions(backend, seed=1, count=30))
    assert f": {kind}" in failure.case
    assert isinstance(failure.error, AssertionError)


def _merge_that_writes(v, s, v_other, s_other, mask=None):
    v.fill_(7.0)
    _REAL(v, s, v_other, s_other, mask)


_REAL = merge.merge_state_in_place


def test_a_refused_call_that_wrote_is_found(others, monkeypatch):
    others("merge")
    monkeypatch.setattr(
        merge, "_check_other", lambda *_, **__: _raise(ValueError(needs("x", 1, 2, "core.x")))
    )
    monkeypatch.setattr(fuzz, "_right", lambda call, tally: None)
    monkeypatch.setattr(merge, "merge_state_in_place", _merge_that_writes)
    found = [str(f.error) for f in fuzz.sessions(ReferenceBackend(), seed=0, count=20)]
    assert any("wrote to what it was given" in error for error in found)


def test_an_accepted_mistake_of_a_function_is_found(others, monkeypatch):
    others("append")
    monkeypatch.setattr("attn_core.page.narrow", lambda name, index: index.to(torch.int32))
    monkeypatch.setattr("attn_core.page._check_values", lambda *_: None)
    found = [str(f.error) for f in fuzz.sessions(ReferenceBackend(), seed=0, count=40)]
    assert any("was accepted" in error for error in found)


def test_blocks_of_other_keys_are_found(others, monkeypatch):
    others("variable_sparse")
    right = sparse_variable._keys
    monkeypatch.setattr(sparse_variable, "_keys", lambda kept, columns: right(kept.flip(1), columns))
    found = [str(f.error) for f in fuzz.sessions(ReferenceBackend(), seed=0, count=10)]
    assert any("variable sparse: out" in error for error in found)


def test_what_a_run_of_pod_states_and_is_not_held_to_is_found(others, monkeypatch):
    others("pod")
    monkeypatch.setattr(PODWithPagedKVCacheWrapper, "_check_stated", lambda *_: None)
    found = [str(f.error) for f in fuzz.sessions(ReferenceBackend(), seed=0, count=30)]
    assert any("_d" in error and "was accepted" in error for error in found)


def test_a_graph_that_lets_its_shape_change_is_found(monkeypatch):
    monkeypatch.setattr(FrozenShape, "require", lambda self, other: None)
    monkeypatch.setattr(misuse, "PLAN", {})
    backend, found = ReferenceBackend(), []
    for number in range(60):
        case = fuzz.session_case(backend, CPU, 1, number)
        if case.graph:
            try:
                fuzz._graph_mistakes(case, random.Random(number), fuzz.Tally())
            except AssertionError as err:
                found.append(str(err))
    assert any("was accepted" in error for error in found)
