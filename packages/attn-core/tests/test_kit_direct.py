"""The kit's own test: plans that depend on later ones, runs that read values, direct runs without care."""

import pytest
import torch

from attn_core.checking import dense
from attn_core.reference import ReferenceBackend
from attn_core.testing import failures
from attn_core.testing.mini import Mini
from attn_core.testing.watch import HostReads

SAME, DECLINES = "a_direct_run_equals_a_checked_run", "a_direct_run_declines_what_is_wrong"
STAYS, OLDER = "a_direct_run_stays_with_its_plan", "an_older_plan_runs_as_before"


class Direct(Mini):
    """Root of this file's faults, so that they can be listed."""


class KeepsTheLastPlan(Direct):
    caught_by = OLDER

    def plan(self, query, path, batch):
        self.lens = batch.kv_len.tolist()
        return super().plan(query, path, batch)

    def kv_len(self, p, n, image):
        return min(super().kv_len(p, n, image), self.lens[n])


class ForgetsTheScales(Direct):
    caught_by = SAME

    def go(self, launch, image, io):
        io.v_scale = 1.0
        super().go(launch, image, io)


class TakesAWholeCacheForTwoKeys(Direct):
    caught_by = SAME

    def pair(self, cache):
        return cache if isinstance(cache, tuple) else (cache[:, 0], cache[:, 0])


class ComputesWhatItDeclines(Direct):
    caught_by = SAME

    def direct(self, launch, image, io, shapes):
        call = super().direct(launch, image, io, shapes)
        return lambda *given: call(*given) and False


class SaysNothing(Direct):
    caught_by = DECLINES

    def direct(self, launch, image, io, shapes):
        call = super().direct(launch, image, io, shapes)
        return lambda *given: call(*given) or None


class RunsTheLastPlan(Direct):
    caught_by = STAYS

    def direct(self, launch, image, io, shapes):
        self.mine = launch, image
        return super().direct(launch, image, io, shapes)

    def go(self, launch, image, io):
        super().go(*self.mine, io)


class KeepsItsArrays(Direct):
    caught_by = STAYS

    def __init__(self):
        self.kept = []

    def direct(self, launch, image, io, shapes):
        self.kept.append(image)
        return super().direct(launch, image, io, shapes)


class RaisesItsOwnErrors(Direct):
    caught_by = DECLINES

    def has_memory(self, t):
        return dense("q", t, "mini.layout") is t


class TakesNegatedViews(Direct):
    caught_by = DECLINES

    def has_memory(self, t):
        return t.untyped_storage().nbytes() >= t.nbytes


class TakesShrunkStorage(Direct):
    caught_by = DECLINES

    def has_memory(self, t):
        return not t.is_neg() and t.untyped_storage().nbytes() > 0

    def go(self, launch, image, io):
        pass


class TakesFewerPages(Direct):
    caught_by = DECLINES

    def enough(self, k, v, shapes):
        return True

    def go(self, launch, image, io):
        pass


class TakesAnLseOverOut(Direct):
    caught_by = DECLINES

    def apart(self, q, k, v, out, lse):
        return super().apart(q, k, v, out, None)


class TakesAnOutInTheCache(Direct):
    caught_by = DECLINES

    def apart(self, q, k, v, out, lse):
        return out.is_contiguous()


class TakesAnyScale(Direct):
    caught_by = DECLINES

    def is_scale(self, scale):
        return True

    def go(self, launch, image, io):
        pass


class TakesAScaleThatIsNotFinite(Direct):
    caught_by = DECLINES

    def is_scale(self, scale):
        return scale is None or type(scale) is float

    def go(self, launch, image, io):
        pass


class TakesAListForACache(Direct):
    caught_by = DECLINES

    def pair(self, cache):
        return super().pair(tuple(cache) if isinstance(cache, list) else cache)


FAULTS = sorted(Direct.__subclasses__(), key=lambda fault: fault.__name__)


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


def test_every_check_of_this_file_has_caught_a_fault():
    assert {fault.caught_by for fault in FAULTS} == {SAME, DECLINES, STAYS, OLDER}


def test_a_backend_without_direct_runs_passes():
    class Without(Mini):
        direct = None

    for check in (SAME, DECLINES, STAYS):
        assert list(failures(Without(), check=check)) == []


READS = {
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t[0].item() if t.numel() else None,
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "to device=": lambda t: t.to(device=torch.device("cpu")),
    "int": lambda t: int(t[0]) if t.numel() else None,
}


@pytest.mark.parametrize("how", READS)
def test_a_copy_of_the_metadata_is_seen_on_the_cpu_too(how):
    if how == "numpy":
        pytest.importorskip("numpy")
    """The reference claims every device: its run() may read no value."""

    class Reads(ReferenceBackend):
        def run(self, launch, image, io):
            READS[how](image["kv_len"])
            super().run(launch, image, io)

    caught = next(failures(Reads(), check="is_a_function_that_keeps_nothing", every=40), None)
    assert "run() would wait for a GPU" in str(caught)


def test_what_reads_no_value_is_not_noted():
    t = torch.arange(6.0)
    with HostReads() as reads:
        t.to(torch.float64).to(torch.empty(0, dtype=torch.float16)).to("meta")
        t.view(2, 3).sum().add_(1).to(dtype=torch.int32).contiguous()
    assert not reads.seen


@pytest.mark.parametrize(("row", "value"), [("out", 1e-30), ("lse", -1e30)])
def test_a_row_without_a_visible_key_is_exactly_zero(row, value):
    class Almost(Mini):
        def store(self, io, rows, out, lse):
            super().store(io, rows, out, lse)
            unseen = lse.isneginf()
            if row == "out":
                io.out[rows][unseen] = value
            elif io.lse is not None:
                io.lse[rows][unseen] = value

    caught = next(failures(Almost(), check="matches_the_oracle"), None)
    assert caught is not None
    want = "rows without a visible key are not 0, as 1e-30" if row == "out" else "infinities differ"
    assert want in str(caught)


@pytest.mark.parametrize("method", ["plan", "run", "prepare", "append", "sample", "direct"])
def test_an_error_names_the_method_it_came_out_of(method):
    def raising(self, *args, **kwargs):
        raise KeyError("order")

    raising.__code__ = raising.__code__.replace(co_name=method)
    broken = type("Broken", (Mini,), {method: raising})()
    checks = {"append": "appends_exact_bytes", "sample": "samples_chains_bit_for_bit", "direct": SAME}
    caught = next(failures(broken, check=checks.get(method, "matches_the_oracle")), None)
    assert caught is not None
    assert str(caught).endswith(f"KeyError: 'order' (raised in mini: {method}())")


def test_an_error_of_the_kit_names_no_method():
    class Wrong(Mini):
        def lse(self, natural, kv_len):
            return natural

    caught = next(failures(Wrong(), check="matches_the_oracle"), None)
    assert caught is not None
    assert "raised in" not in str(caught)
