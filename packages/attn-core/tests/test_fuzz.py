"""Random sessions: sound backends pass them, unsound ones and bad refusals do not."""

import random

import pytest
import torch

from attn_core import arguments
from attn_core.errors import needs
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
