"""plan() is a function from sizes and host arrays to a launch. It changes nothing anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from ...backend import PlanResult
from ...batch import HostBatch, paged_batch
from ...problem import Op
from ...query import Query
from ..batches import Lengths
from ..cases import Case
from ..drive import io_of, plan_direct, prepare, run_direct
from ..memory import same_bits
from ..tables import host_batch, table_of
from ..watch import Watch, device_bytes
from ..world import World, world_of
from .expect import expect

_RESERVED = (
    "qo_indptr", "kv_indptr", "kv_len", "kv_indices", "kv_last_page_len", "custom_mask", "mask_indptr",
)  # fmt: skip


def plan_is_deterministic_and_comparable(case: Case) -> None:
    """Two plans of equal batches are equal; the launch is hashable and holds no tensor."""
    first, second = _plan(case), _plan(case)
    check_result(first)
    expect(_equal(first.launch, second.launch), "two plans of one batch give unequal launches")
    expect(hash(first.launch) == hash(second.launch), "equal launches hash differently")
    expect(first.workspace_bytes == second.workspace_bytes, "two plans ask for unequal workspaces")
    expect(list(first.image) == list(second.image), "two plans name their arrays differently")
    for name, array in first.image.items():
        expect(same_bits(array, second.image[name]), f"two plans give unequal arrays {name!r}")


def plan_leaves_the_batch_alone(case: Case) -> None:
    """The host arrays are inputs: bit for bit the same afterwards, and not held by the launch."""
    prepare(case)
    table = table_of(case.lengths, case.problem.page_size)
    batch = host_batch(case.problem, case.lengths, table)
    arrays = list(_arrays(batch))
    copies = [array.clone() for _, array in arrays]
    before = device_bytes(case.device)
    with Watch() as watch:
        result = case.backend.plan(_query(case, batch), case.path.name, batch)
    for (name, array), copy in zip(arrays, copies, strict=True):
        expect(same_bits(array, copy), f"plan() wrote to the batch's {name}")
    expect(watch.devices <= {"cpu"}, f"plan() made tensors on {sorted(watch.devices - {'cpu'})}")
    expect(device_bytes(case.device) == before, "plan() changed the memory allocated on the device")
    was = hash(result.launch)
    for _, array in arrays:
        array.fill_(3)
    expect(hash(result.launch) == was, "the launch changes with the caller's arrays")


def an_older_plan_runs_as_before(case: Case) -> None:
    """A plan is all in its launch and its arrays: newer ones and their runs change no bit of its answer."""
    world, other = world_of(case), other_world(case)
    older = plan_direct(case, world)
    first = run_direct(case, older, io_of(case, world, older.result.workspace_bytes))
    newer = plan_direct(case, other)
    run_direct(case, newer, io_of(case, other, newer.result.workspace_bytes))
    again = run_direct(case, older, io_of(case, world, older.result.workspace_bytes))
    for name, got, want in (("out", again.out, first.out), ("lse", again.lse, first.lse)):
        if got is not None and want is not None:
            expect(same_bits(got, want), f"a newer plan changed {name} of an older one")


def other_world(case: Case) -> World:
    """Return the same requests' lengths in another order; a single request without its last key."""
    lengths = case.lengths
    q_len, kv_len = lengths.q_len[::-1], lengths.kv_len[::-1]
    if len(q_len) == 1 and kv_len[0] > q_len[0]:
        kv_len = (kv_len[0] - 1,)
    return world_of(case, Lengths("other", q_len, kv_len, lengths.q_len_per_req))


def plan_needs_no_page_ids(case: Case) -> None:
    """Unless the path sets ``host_indices``, ``kv_indices`` may be on a device where nobody can read."""
    prepare(case)
    t = table_of(case.lengths, case.problem.page_size)
    decode = case.problem.op in (Op.DECODE, Op.VERIFY)
    batch = paged_batch(
        case.lengths.q_len_per_req if decode else t.qo_indptr, t.kv_indptr, t.kv_indices.to("meta"),
        t.kv_last_page_len, case.problem.page_size or 1, device=torch.device("meta"),
    )  # fmt: skip
    try:
        result = case.backend.plan(_query(case, batch), case.path.name, batch)
    except Exception as err:
        text = f"plan() needs the values of kv_indices, but its path has host_indices=False: {err}"
        raise AssertionError(text) from err
    check_result(result)


def check_result(result: PlanResult) -> None:
    """Check the form of what plan() returned."""
    expect(isinstance(result, PlanResult), f"plan() returned {type(result).__name__}, not a PlanResult")
    try:
        hash(result.launch)
    except TypeError as err:
        raise AssertionError(f"the launch is not hashable: {err}") from err
    held = next(_tensors(result.launch), None)
    expect(held is None, "the launch holds a tensor: arrays belong into PlanResult.image")
    size = result.workspace_bytes
    expect(isinstance(size, int) and size >= 0, f"workspace_bytes: needs 0 or more bytes, got {size!r}")
    for name, array in result.image.items():
        expect(name not in _RESERVED, f"image: {name!r} is the name of an array of the core")
        kind = f"{array.dtype} on {array.device}, {array.ndim}-D"
        fits = array.dtype is torch.int32 and array.device.type == "cpu" and array.ndim == 1
        expect(fits, f"image[{name!r}]: needs a 1-D int32 tensor on the CPU, got {kind}")


def _plan(case: Case) -> PlanResult:
    prepare(case)
    table = table_of(case.lengths, case.problem.page_size)
    batch = host_batch(case.problem, case.lengths, table)
    return case.backend.plan(_query(case, batch), case.path.name, batch)


def _query(case: Case, batch: HostBatch) -> Query:
    return Query(case.target, case.problem, batch.shape)


def _arrays(batch: HostBatch) -> Iterator[tuple[str, torch.Tensor]]:
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            yield field.name, value


def _equal(a: object, b: object) -> bool:
    same = a == b
    expect(isinstance(same, bool), f"launch == launch gives {type(same).__name__}, not a bool")
    return bool(same)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield tensors inside dataclasses, tuples and frozensets."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, tuple | frozenset | list):
        for item in value:
            yield from _tensors(item)
