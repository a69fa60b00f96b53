"""Who takes the acceptance step: routing, refusals, what ``attn explain`` says."""

import json

import pytest
import torch
from typer.testing import CliRunner

from attn_core import plugins, sampling_route
from attn_core.backend import SamplingPath
from attn_core.cli import app
from attn_core.errors import NoRoute, Unsupported
from attn_core.reasons import Reason
from attn_core.sampling import chain_speculative_sampling
from attn_core.sampling_math import sample

from .fakes import ABSENT, BUILD, WRONG, FakeBackend
from .sampling_kit import random_case, run

FLOATS = frozenset({torch.float32, torch.bfloat16})
SEEDS = {"seed": 1, "offset": 2}


class Sampler(FakeBackend):
    """Samples as the reference does and remembers what it was asked."""

    def __init__(self, name="fake", *paths, unready=None, late=None, **kwargs):
        super().__init__(name, **kwargs)
        self.sampling = paths or (SamplingPath(name="only", archs=None, dtypes=FLOATS),)
        self.unready, self.late = unready, late
        self.sampled, self.asked_ready = [], 0

    def prepare_sampling(self, target, path):
        self.asked_ready += 1
        if isinstance(self.unready, Exception):
            raise self.unready
        return self.unready

    def sample(self, path, io):
        if self.late is not None:
            raise self.late
        self.sampled.append((path, io))
        sample(io)


def test_a_better_ranked_backend_takes_the_step_and_gives_the_same(use):
    case = random_case(7, 3, 40)
    want = run(case, **SEEDS)
    backend = use(Sampler())
    for _ in range(2):
        assert run(case, **SEEDS) == want
    assert [path for path, _ in backend.sampled] == ["only"] * 2
    assert run(case, **SEEDS, backend="reference") == want
    assert run(case, **SEEDS, backend="reference/torch") == want
    assert len(backend.sampled) == 2
    for _ in range(2):
        assert run(case, **SEEDS, backend="fake/only") == want
    assert backend.asked_ready == 2  # once for each name it was asked by, not once per call


def test_what_a_backend_is_given(use):
    backend = use(Sampler())
    draft, ids, target = random_case(4, 2, 12)
    draft = torch.cat([draft, draft], 2)[..., ::2]  # the vocabulary is not dense
    counter = torch.zeros(8, dtype=torch.int32)[::2]
    seed = torch.tensor(5).expand(4)
    chain_speculative_sampling(
        draft, ids.int(), target, counter, None, seed=seed, offset=torch.tensor([1], dtype=torch.uint64)
    )
    io = backend.sampled[0][1]
    assert io.draft_probs.stride(2) == io.target_probs.stride(2) == 1
    assert io.draft_token_ids.dtype is torch.int64
    assert io.draft_token_ids.is_contiguous()
    assert (io.seed.tolist(), io.seed.stride()) == ([5] * 4, (1,))
    assert (io.offset.dtype, io.offset.tolist()) == (torch.int64, [1])
    assert io.accepted is counter
    assert io.tokens.shape == (4, 3)


def test_nobody_is_asked_for_an_empty_batch(use):
    backend = use(Sampler())
    found = run((torch.empty(0, 2, 5), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 3, 5)), **SEEDS)
    assert found == ([], [], [])
    assert backend.sampled == []


REFUSALS = [
    ({"unavailable": Reason(ABSENT, "fake", "a library")}, "fake.absent", NoRoute),
    ({"unready": Reason(BUILD, "fake", "kernels")}, "fake.build", NoRoute),
    ({"unready": Unsupported(Reason(BUILD, "fake", "kernels"))}, "fake.build", Unsupported),
    ({"late": Unsupported(Reason(WRONG, "fake", 3))}, "fake.wrong", Unsupported),
]


@pytest.mark.parametrize(("made", "slug", "error"), REFUSALS, ids=lambda value: str(value)[:12])
def test_auto_goes_on_and_says_why_once(use, caplog, made, slug, error):
    case = random_case(3, 2, 9)
    want = run(case, **SEEDS)
    backend = use(Sampler(**made))
    for _ in range(3):
        assert run(case, **SEEDS) == want
    assert backend.sampled == []
    assert [slug in record.getMessage() for record in caplog.records] == [True]
    assert "using reference/torch" in caplog.text


@pytest.mark.parametrize(("made", "slug", "error"), REFUSALS, ids=lambda value: str(value)[:12])
def test_a_named_backend_raises_and_nothing_is_written(use, made, slug, error):
    use(Sampler(**made))
    counter = torch.full((3,), 5, dtype=torch.int32)
    with pytest.raises((NoRoute, Unsupported), match=slug.replace(".", r"\.")) as raised:
        chain_speculative_sampling(*random_case(3, 2, 9), counter, backend="fake", **SEEDS)
    assert raised.type is error
    assert counter.tolist() == [5, 5, 5]


def test_what_a_path_does_not_take_is_told(use):
    use(
        Sampler(
            "fake", SamplingPath(name="short", archs=frozenset({"cpu"}), dtypes=FLOATS, max_vocab_size=8)
        ),
    )
    draft, ids, target = random_case(3, 2, 9, dtype=torch.float16)
    with pytest.raises(NoRoute) as raised:
        chain_speculative_sampling(draft, ids, target.double(), backend="fake", **SEEDS)
    told = [reason for reason in raised.value.reasons if reason.candidate == "fake/short"]
    assert [(r.code.slug, r.limit, r.got) for r in told] == [
        ("core.probs-dtype", "bfloat16, float32", "float16"),
        ("core.probs-dtype", "bfloat16, float32", "float64"),
        ("core.vocab-size", 8, 9),
    ]


def test_what_a_path_takes_up_to_it_takes(use):
    backend = use(Sampler("fake", SamplingPath(name="s", archs=None, dtypes=FLOATS, max_vocab_size=9)))
    run(random_case(3, 2, 9), **SEEDS, backend="fake")
    assert len(backend.sampled) == 1


def test_one_type_for_both_is_refused_once_and_reasons_name_the_candidate(use):
    use(Sampler("fake", unavailable=Reason(ABSENT, "fake", "a library")), Sampler("other"))
    backends = plugins.registry().backends
    half = sampling_route.SamplingProblem(torch.float16, torch.float16, 9)
    target = plugins.DeviceTarget("cpu", "cpu", 1, 1)
    absent, other = sampling_route.screen(target, half, backends).found[:2]
    assert [(r.candidate, r.code.slug) for r in absent.refusals] == [("fake/only", "fake.absent")]
    assert [(r.candidate, r.code.slug) for r in other.refusals] == [("other/only", "core.probs-dtype")]


def test_who_was_not_asked_is_not_blamed(use):
    use(Sampler("fake", unavailable=Reason(ABSENT, "fake", "a library")), FakeBackend("without"))
    with pytest.raises(NoRoute) as raised:
        run(random_case(3, 2, 9), **SEEDS, backend="fake")
    assert [reason.candidate for reason in raised.value.reasons] == ["fake/only"]


def test_other_devices_paths_are_passed_over_quietly(use, caplog):
    backend = use(Sampler("fake", SamplingPath(name="far", archs=frozenset({"gfx942"}), dtypes=FLOATS)))
    run(random_case(3, 2, 9), **SEEDS)
    assert backend.sampled == []
    assert caplog.records == []


def test_a_backend_without_chain_sampling(use):
    use(FakeBackend("fake"))
    with pytest.raises(
        NoRoute, match=r"no candidate of 'fake' can serve chain_sampling:\n  fake: has no chain"
    ):
        run(random_case(3, 2, 9), backend="fake", **SEEDS)


@pytest.mark.parametrize("name", ["nobody", "reference/native", "", "AUTO"])
def test_an_unknown_name_is_refused_before_the_generator_moves(name):
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    with pytest.raises(NoRoute, match=r"backend: needs one of auto, reference, got .*\[core\.backend-name\]"):
        run(random_case(3, 2, 9), generator=generator, backend=name)
    assert torch.equal(generator.get_state(), before)


def test_a_bug_of_a_backend_is_no_refusal(use):
    use(Sampler(late=ZeroDivisionError("its own")))
    with pytest.raises(ZeroDivisionError):
        run(random_case(3, 2, 9), **SEEDS)


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ("torch", "a tuple of SamplingPath"),
        (("torch",), "a tuple of SamplingPath"),
        ((SamplingPath(name="a", archs=None, dtypes=FLOATS),) * 2, "names that differ"),
    ],
)
def test_a_malformed_declaration_makes_the_backend_unusable(sampling, said):
    backend = Sampler()
    backend.sampling = sampling
    assert said in plugins._fault(backend)


def test_a_path_without_a_function_makes_the_backend_unusable():
    backend = FakeBackend("fake")
    backend.sampling = (SamplingPath(name="a", archs=None, dtypes=FLOATS),)
    assert "prepare_sampling() and sample()" in plugins._fault(backend)


def test_a_screening_is_pure(use):
    backend = use(Sampler(unready=Reason(BUILD, "fake", "kernels")))
    known, problem = (
        plugins.registry().backends,
        sampling_route.SamplingProblem(torch.float32, torch.float32, 9),
    )
    target = plugins.DeviceTarget("cpu", "cpu", 1, 1)
    verdicts = sampling_route.explain(sampling_route.screen(target, problem, known))
    assert [(v.candidate, v.chosen) for v in verdicts] == [("fake/only", True), ("reference/torch", False)]
    assert backend.asked_ready == 0


def ask(*arguments):
    return CliRunner().invoke(app.app, ["explain", "--op", "chain_sampling", *arguments])


def test_explain_shows_and_exits(use):
    use(Sampler("fake", SamplingPath(name="far", archs=frozenset({"gfx942"}), dtypes=FLOATS)))
    here = ask("--arch", "cpu", "--vocab-size", "50")
    assert (here.exit_code, "reference/torch would serve chain_sampling on cpu" in here.output) == (0, True)
    there = ask("--arch", "gfx942", "--dtype", "bf16", "--json")
    found = json.loads(there.output)
    assert (there.exit_code, found["chosen"]) == (0, "fake/far")
    assert found["query"]["vocab_size"] == 128256
    assert found["query"]["draft_dtype"] == "bfloat16"
    none = ask("--arch", "cpu", "--backend", "fake")
    assert (none.exit_code, "Nothing of 'fake' can serve" in none.output) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--page-size", "16"], "--page-size: needs an op over a cache, got chain_sampling"),
        (["--graph"], "--graph: needs an op over a cache"),
        (["--vocab-size", "0"], "--vocab-size: needs at least 1, got 0"),
        (["--vocab-size", "x"], "--vocab-size: needs a whole number"),
        (["--dtype", "lots"], "--dtype: needs the name of a torch dtype"),
        (["--backend", "nobody"], "backend: needs one of"),
    ],
)
def test_explain_refuses_what_does_not_fit(arguments, said):
    result = ask(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_vocabulary_is_not_for_attention():
    result = CliRunner().invoke(app.app, ["explain", "--op", "decode", "--vocab-size", "9"])
    assert result.exit_code == 2
    assert "--vocab-size: needs chain_sampling, got decode" in result.stderr
