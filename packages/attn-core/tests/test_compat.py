"""The package under the name of ``flashinfer``, and what is said of names that are not here."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import attn_core
from attn_core import compat, compat_fork, decode, mla, page, plugins, prefill, sampling
from attn_core.checking import OTHER_NAMES
from attn_core.errors import Unsupported
from attn_core.not_here import NAMES, refusing
from attn_core.reasons import Reason
from attn_core.target import DeviceTarget

from .fakes import ABSENT, FakeBackend
from .kit import ints, queries, workspace

PROGRAM = """
import sys
from attn_core.compat import install

root = install()
assert install() is root

import flashinfer
import flashinfer_jit_cache
from importlib.util import find_spec
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache, xqa
from flashinfer.cascade import merge_state
from flashinfer.decode import fast_decode_plan, trtllm_batch_decode_with_kv_cache
from flashinfer.decode import _get_range_buf, get_seq_lens
from flashinfer.jit import JitSpec, build_jit_specs
from flashinfer.jit.attention.modules import gen_pod_module
from flashinfer.attention._core import BatchAttention
from flashinfer.cudnn.prefill import cudnn_batch_prefill_with_kv_cache
from flashinfer.cutile.cutile_common import is_cuda_tile_available
from flashinfer.gemm import SegmentGEMMWrapper
from flashinfer.jit.attention.variants import attention_sink_decl
from flashinfer.jit.core import check_cuda_arch, logger
from flashinfer.jit.utils import filename_safe_dtype_map
from flashinfer.norm import rmsnorm
from flashinfer.prefill import gen_batch_prefill_module
from flashinfer.quantization.fp4_quantization import nvfp4_quantize_paged_kv_cache
from flashinfer.rocm import decode as fork_decode, prefill as fork_prefill
from flashinfer.rocm.aiter_utils import is_aiter_supported
from flashinfer.decode_rocm import BatchDecodeWithPagedKVCacheWrapper as ForkDecode
from flashinfer.prefill_rocm import _aiter_ops_importable
from flashinfer.triton.cascade import merge_states, variable_length_merge_states
from flashinfer.page import append_paged_kv_cache
from flashinfer.rope import apply_rope
from flashinfer.sparse import BlockSparseAttentionWrapper
from flashinfer.utils import FP4Tensor, MaskMode, get_alibi_slopes, get_compute_capability, is_sm90a_supported
import attn_core

assert find_spec("flashinfer") and find_spec("flashinfer_jit_cache") and find_spec("flashinfer.decode")
assert flashinfer is root and flashinfer.__version__ == "0.6.18"
assert BatchDecodeWithPagedKVCacheWrapper is attn_core.BatchDecodeWithPagedKVCacheWrapper
assert flashinfer.decode.fast_decode_plan is fast_decode_plan is attn_core.fast_decode_plan
assert flashinfer.cascade.merge_state is merge_state is flashinfer.merge_state
assert flashinfer.sparse.BlockSparseAttentionWrapper is attn_core.BlockSparseAttentionWrapper
assert check_cuda_arch() is None and flashinfer.jit.has_prebuilt_ops is True
assert flashinfer.convert_bsr_mask_layout is flashinfer.sparse.convert_bsr_mask_layout
assert not hasattr(attn_core, "convert_bsr_mask_layout")
import torch
assert fork_decode.BatchDecodeWithPagedKVCacheWrapper is ForkDecode is BatchDecodeWithPagedKVCacheWrapper
assert fork_prefill.single_prefill_with_kv_cache is attn_core.single_prefill_with_kv_cache
assert _aiter_ops_importable() is bool(find_spec("aiter"))
fork_prefill._aiter_ops_importable.cache_clear()
from flashinfer.aiter_utils import HAS_AITER, is_aiter_available
from flashinfer.device_utils import IS_HIP
from flashinfer.rocm.device_utils import IS_CUDA
from flashinfer.hip_utils import FLASHINFER_SUPPORTED_ROCM_ARCHS, check_torch_rocm_compatibility
from flashinfer.rocm.hip_utils import get_available_gpu_count, get_supported_device_indices
assert check_torch_rocm_compatibility() is None and isinstance(FLASHINFER_SUPPORTED_ROCM_ARCHS, list)
assert get_available_gpu_count() == len(get_supported_device_indices()) == torch.cuda.device_count()
assert HAS_AITER is bool(find_spec("aiter")) and IS_HIP is bool(torch.version.hip)
assert IS_CUDA is bool(torch.version.cuda)
assert not is_aiter_available(torch.device("cpu"), "append_paged_kv_cache")
assert flashinfer.cascade._HIP_FUSED_CASCADE is False and not hasattr(flashinfer.decode, "_HIP_FUSED_CASCADE")
assert flashinfer.use_torch_custom_ops_enabled() is bool(find_spec("attn_compile"))
import torch
from flashinfer.utils import determine_mla_backend, get_device_name, get_indptr, version_at_least
assert determine_mla_backend(torch.device("cpu")) == "fa2" and get_device_name("cpu") == "cpu"
assert get_indptr(torch.tensor([3, 0, 4], dtype=torch.int32)).tolist() == [0, 3, 3, 7]
assert version_at_least("2.11.0+cu130", "2.9") and not version_at_least("2.9.1", "2.11")
import torch
assert BatchAttention is attn_core.BatchAttention and merge_states is attn_core.merge_states
assert not is_cuda_tile_available() and not is_aiter_supported(torch.device("cpu"))
assert isinstance(gen_batch_prefill_module("fa2"), JitSpec) and logger.name == "attn_core"
assert filename_safe_dtype_map[torch.bfloat16] == "bf16" and set(attention_sink_decl) == {"fa2", "fa3"}
assert flashinfer.utils.get_device_sm_count("cpu") == torch.get_num_threads()
assert flashinfer.utils.canonicalize_torch_dtype("float16") is torch.float16
assert flashinfer.utils.is_float8(torch.empty(0, dtype=torch.float8_e4m3fn))
with flashinfer.autotune(True):
    pass
for part in ("fused_moe", "comm", "autotuner", "nonsense"):  # found means installed, to programs that look
    assert find_spec("flashinfer." + part) is None
    try:
        __import__("flashinfer." + part)
    except ModuleNotFoundError as error:
        assert error.name == "flashinfer." + part
        assert f"flashinfer.{part}: needs a module of attention: attention, cascade, decode" in str(error)
        assert "core.not-here" in str(error)
    else:
        raise SystemExit(f"{part} was imported")
try:
    from flashinfer import comm
except ImportError as error:
    assert "comm" in str(error)
else:
    raise SystemExit("comm was imported")
from flashinfer.activation import gen_act_and_mul_module, get_act_and_mul_module
from flashinfer.attention._core import get_holistic_attention_module
from flashinfer.page import gen_page_module, get_page_module
from flashinfer.jit import gen_customize_single_decode_module
assert build_jit_specs([gen_act_and_mul_module("silu")]) is None and gen_page_module().name
assert flashinfer.quantization.packbits(torch.ones(9, dtype=torch.bool)).tolist() == [255, 128]
assert get_seq_lens is attn_core.get_seq_lens
assert _get_range_buf(3, "cpu").tolist() == [0, 1, 2]
assert build_jit_specs([gen_pod_module(1, x=2)]) is None and isinstance(gen_pod_module(), JitSpec)
assert get_compute_capability("cpu") == (0, 0) and not is_sm90a_supported("cpu")
assert MaskMode.CUSTOM.value == 2 and flashinfer.utils.next_positive_power_of_2(17) == 32
assert get_alibi_slopes(2).tolist() == [2**-4, 2**-8]
for call in (
    xqa, trtllm_batch_decode_with_kv_cache, apply_rope, flashinfer.softmax, FP4Tensor, rmsnorm,
    get_act_and_mul_module, get_holistic_attention_module, get_page_module,
    gen_customize_single_decode_module("mine").build_and_load, SegmentGEMMWrapper, SegmentGEMMWrapper.run,
    cudnn_batch_prefill_with_kv_cache,
    nvfp4_quantize_paged_kv_cache,
    variable_length_merge_states, flashinfer.activation.silu_and_mul, flashinfer.cutlass_fused_moe,
):
    try:
        call(1)
    except NotImplementedError as error:
        assert "core.not-here" in str(error)
    else:
        raise SystemExit(f"{call} did not refuse")
for module in (flashinfer, flashinfer.decode, flashinfer.utils, flashinfer.jit, flashinfer.rope):
    assert not hasattr(module, "nonsense")
import csv
try:
    install("csv")
except ImportError as error:
    assert "core.compat" in str(error)
else:
    raise SystemExit("an imported package was replaced")
"""


def test_a_program_finds_the_package_under_the_other_name():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", [decode, prefill, mla, page, sampling])
def test_a_name_that_is_not_here_can_be_imported_and_says_so(module):
    names = NAMES[module.__name__.rpartition(".")[2]]
    assert len(names) >= 2
    for name, instead in names.items():
        there = getattr(module, name)
        assert there.__name__ == name
        with pytest.raises(NotImplementedError) as told:
            there(torch.empty(1), out=None)
        assert str(told.value).startswith(f"{name}: needs {instead}")
    with pytest.raises(AttributeError, match="nonsense"):
        _ = module.nonsense


def test_the_package_itself_has_the_names_upstream_has_at_its_top():
    assert attn_core.top_k_sampling_from_probs.__name__ == "top_k_sampling_from_probs"
    with pytest.raises(AttributeError, match="fmha_varlen"):
        refusing("", "fmha_varlen")


def test_what_is_refused_is_not_there_and_what_is_there_is_not_refused():
    public = set(attn_core.__all__)
    assert not public & {name for names in NAMES.values() for name in names}


@pytest.fixture
def _names(monkeypatch):
    """A name to be found under that nobody else uses, and the names of backends as they were."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = dict(sys.modules)
    yield
    OTHER_NAMES.clear()
    for name in set(sys.modules) - set(before):
        if name.startswith("theirs"):
            del sys.modules[name]


@pytest.mark.usefixtures("_names")
def test_backends_of_upstream_stand_for_those_that_are_here(use):
    use(FakeBackend("fake"))
    compat.install("theirs", backends={"fa3": "fake", "cutlass": "reference", "hip": "fake", "auto": "fake"})
    cache = torch.randn(1, 2, 4, 1, 8, generator=torch.Generator().manual_seed(1))
    for named, served in (("fa3", "fake"), ("auto", "fake"), ("hip", "fake"), ("cutlass", "reference")):
        wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(workspace(), backend=named)
        wrapper.plan(ints(0, 1), ints(0), ints(3), 1, 1, 8, 4, q_data_type=torch.float32)
        assert wrapper.backend == served
    q = queries(1, 1, 8)
    calls = (
        lambda backend: attn_core.single_prefill_with_kv_cache(q, q, q, backend=backend),
        lambda backend: attn_core.append_paged_kv_cache(
            q, q, ints(0), ints(0), cache, ints(0), ints(0, 1), ints(1), backend=backend
        ),
        lambda backend: attn_core.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(
            workspace(), backend=backend
        ),
    )
    for call in calls:
        call("cutlass")
    for call in calls[:2]:
        with pytest.raises(ValueError, match=r"backend: needs one of auto, .*got 'fa2' \[core.backend-name"):
            call("fa2")
    with pytest.raises(TypeError, match=r"backend: needs a string, got list \[core.backend-name"):
        calls[1](["fa3"])
    compat.install("theirs")
    assert OTHER_NAMES
    compat.install("theirs", backends={})
    with pytest.raises(ValueError, match="got 'fa3'"):
        calls[0]("fa3")


@pytest.mark.usefixtures("_names")
@pytest.mark.parametrize(
    ("backends", "error", "told"),
    [
        (
            {"fa4": "auto"},
            ValueError,
            r"backends: needs names of upstream \(aiter, auto, .*got 'fa4' \[core.comp",
        ),
        (
            {"fa3": "fa9"},
            ValueError,
            r"backend: needs one of auto, reference, .*got 'fa9' \[core.backend-name",
        ),
        ({"fa3": None}, TypeError, r"backends: needs strings, got 'fa3': None \[core.compat\]"),
        ({3: "auto"}, TypeError, "backends: needs strings, got 3: 'auto'"),
        (["fa3"], TypeError, "backends: needs a mapping of names to names, got list"),
    ],
)
def test_backends_that_are_not_there_are_named_and_nothing_is_installed(backends, error, told):
    compat.install("theirs", backends={"xqa": "auto"})
    with pytest.raises(error, match=told):
        compat.install("theirs_too", backends=backends)
    assert "theirs_too" not in sys.modules
    assert OTHER_NAMES == {"xqa": "auto"}


@pytest.mark.usefixtures("_names")
def test_a_name_stands_for_what_it_says_and_no_further(use):
    """Wrappers made of others hand the caller's name on, once."""
    fake = use(FakeBackend("xqa"))
    compat.install("theirs", backends={"fa2": "xqa", "xqa": "reference"})
    pod = attn_core.PODWithPagedKVCacheWrapper(workspace(), backend="fa2")
    pod.plan(ints(0, 1), ints(0), ints(3), 1, 1, 8, 4, q_data_type=torch.float32)
    q, cache = queries(1, 1, 8), torch.ones(1, 2, 4, 1, 8)
    pod.run(q, q, q, q, cache)
    shared = attn_core.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(), backend="fa2")
    shared.begin_forward(ints(0, 1), ints(0), ints(3), 1, 1, 8, 4, data_type=torch.float32)
    shared.forward(q, q, q, cache)
    assert fake.count("run") == 4


def test_the_forks_questions_are_answered_for_the_device_asked_of(use):
    gone = Reason(ABSENT, "", "a device")
    use(FakeBackend("aiter"), FakeBackend("other"))
    assert compat_fork.is_aiter_supported(torch.device("cpu"))
    assert compat_fork.is_aiter_supported("cpu")
    assert compat_fork.capability_available("cpu", "batch_prefill", "other")
    assert compat_fork.capability_reason("cpu", "batch_prefill", "other") == ""
    use(FakeBackend("aiter", unavailable=gone), FakeBackend("other", unavailable=Unsupported(gone)))
    for name in ("aiter", "other"):
        assert compat_fork.capability_reason("cpu", "batch_decode", name) == str(gone)
    assert not compat_fork.is_aiter_supported("cpu")
    assert not compat_fork.capability_available("cpu", "batch_decode", "other")
    assert compat_fork.capability_reason("cpu", "", "fa0") == "fa0: no backend of that name is installed"
    assert compat_fork.capability_reason("cuda:99", "", "other") == "other: torch has no device cuda:99"
    assert compat_fork.device_arch("cpu") == "cpu"
    known = replace(
        plugins.registry(), targets=(DeviceTarget("hip", "g1", 4, 64), DeviceTarget("cpu", "cpu", 1, 1))
    )
    plugins.use(known)
    assert compat_fork.rocm_archs() == ["g1"]
    assert compat_fork.device_arch("cuda:99") is None
