"""The reader of code objects: what a compiler wrote, and files that are damaged in every way."""

from __future__ import annotations

import contextlib
import shutil
import struct
import subprocess

import pytest

from attn_hip.codeobject import Resources, read, resources

ONE = Resources(
    vgpr=94, agpr=0, sgpr=36, lds=34816, scratch=0,
    vgpr_spills=1, sgpr_spills=300, kernarg=320, threads=70000,
)  # fmt: skip
KEYS = {
    ".vgpr_count": 94, ".sgpr_count": 36, ".group_segment_fixed_size": 34816,
    ".private_segment_fixed_size": 0, ".vgpr_spill_count": 1, ".sgpr_spill_count": 300,
    ".kernarg_segment_size": 320, ".max_flat_workgroup_size": 70000, ".agpr_count": 0,
}  # fmt: skip


def pack(value: object) -> bytes:
    """MessagePack in the shortest form."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int() if -32 <= value < 0:
            return struct.pack("b", value)
        case int() if value < 0x80:
            return bytes([value]) if value >= 0 else b"\xd3" + struct.pack(">q", value)
        case int():
            width = next(n for n in range(4) if value < 1 << (8 << n))
            return bytes([0xCC + width]) + value.to_bytes(1 << width, "big")
        case str():
            data = value.encode()
            head = bytes([0xA0 | len(data)]) if len(data) < 32 else b"\xd9" + bytes([len(data)])
            return head + data
        case list():
            head = bytes([0x90 | len(value)]) if len(value) < 16 else b"\xdc" + struct.pack(">H", len(value))
            return head + b"".join(map(pack, value))
        case dict():
            pairs = b"".join(pack(k) + pack(v) for k, v in value.items())
            head = bytes([0x80 | len(value)]) if len(value) < 16 else b"\xde" + struct.pack(">H", len(value))
            return head + pairs
    raise TypeError(value)


def elf(
    metadata: bytes, *, machine: int = 224, vendor: bytes = b"AMDGPU\0", kind: int = 32, cut: int = 0
) -> bytes:
    note = struct.pack("<III", len(vendor), len(metadata), kind) + vendor.ljust(8, b"\0") + metadata
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<H", head, 18, machine)
    struct.pack_into("<Q", head, 32, 64)
    struct.pack_into("<HH", head, 54, 56, 2)
    segments = b"".join(
        struct.pack("<IIQQQQQQ", what, 4, 64 + 112, 0, 0, len(note), len(note), 4) for what in (1, 4)
    )
    whole = bytes(head) + segments + note
    return whole[: len(whole) - cut]


def about(**changed: object) -> dict[str, object]:
    kernel = {
        ".name": "attend",
        **KEYS,
        ".args": [{".size": 8, ".offset": 0, ".flag": True, ".none": None}],
        **changed,
    }
    return {
        "amdhsa.version": [1, -2, -400],
        "amdhsa.target": "amdgcn-amd-amdhsa--gfx942:sramecc+",
        "amdhsa.kernels": [kernel],
    }


def test_every_number_arrives_under_its_name() -> None:
    found = read(elf(pack(about())))
    assert found.arch == "gfx942"
    assert found.kernels == {"attend": ONE}
    assert resources(elf(pack(about()))) == {"attend": ONE}


def test_all_kernels_are_read_and_accumulators_may_be_missing() -> None:
    whole = about()
    first = whole["amdhsa.kernels"][0]
    second = {k: v for k, v in first.items() if k != ".agpr_count"} | {".name": "merge", ".vgpr_count": 7}
    whole["amdhsa.kernels"] = [first, second, *({**second, ".name": f"k{n}"} for n in range(20))]
    found = resources(elf(pack(whole)))
    assert len(found) == 22
    assert (found["merge"].vgpr, found["merge"].agpr) == (7, 0)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x7fELF\x02\x01", id="header-cut"),
        pytest.param(b"MZ" + bytes(100), id="no-elf"),
        pytest.param(elf(pack(about()), machine=62), id="x86"),
        pytest.param(elf(pack(about()), vendor=b"NVIDIA\0"), id="other-vendor"),
        pytest.param(elf(pack(about()), kind=1), id="other-note"),
        pytest.param(elf(pack(about()), cut=1), id="file-cut"),
        pytest.param(elf(pack(about())[:-3]), id="metadata-cut"),
        pytest.param(elf(pack(["amdhsa.kernels"])), id="no-map"),
        pytest.param(elf(pack({"amdhsa.target": "a--gfx942"})), id="no-kernels"),
        pytest.param(elf(pack({"amdhsa.kernels": [1]})), id="kernel-no-map"),
        pytest.param(elf(pack(about()).replace(b"amdgcn-amd-amdhsa--", b"amdgcn-amd-amdhsa++")), id="target"),
        pytest.param(elf(pack(about(**{".name": 3}))), id="name-no-text"),
        pytest.param(elf(pack(about(**{".vgpr_count": -1}))), id="negative"),
        pytest.param(elf(pack(about(**{".vgpr_count": True}))), id="bool"),
        pytest.param(elf(pack(about(**{".vgpr_count": None}))), id="none"),
        pytest.param(elf(b"\xc1"), id="tag-not-used"),
        pytest.param(elf(b"\xa4\xff\xff\xff\xff"), id="not-utf8"),
        pytest.param(elf(b"\x81\x80\x01"), id="map-as-key"),
        pytest.param(elf(b"\x91" * 4000 + b"\x01"), id="deep"),
        pytest.param(elf(b"\xdf\xff\xff\xff\xff"), id="huge-map"),
    ],
)
def test_malformed_files_are_refused_in_words(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^code object: needs .* \[fa2\.code-object\]$"):
        read(data)


def test_no_byte_of_a_file_can_crash_the_reader() -> None:
    whole = elf(pack(about()))
    for at in range(len(whole)):
        for value in (0x00, 0x7F, 0xDF, 0xFF):
            changed = whole[:at] + bytes([value]) + whole[at + 1 :]
            with contextlib.suppress(ValueError):  # anything else gets out
                assert read(changed).kernels is not None


@pytest.mark.skipif(shutil.which("clang-19") is None, reason="needs clang-19")
def test_a_compilers_file_is_read(tmp_path) -> None:
    source = tmp_path / "k.cpp"
    source.write_text(
        "#define A(x) __attribute__((x))\n"
        'extern "C" A(global) A(amdgpu_flat_work_group_size(128, 128)) void k(int* p) {\n'
        "  A(shared) static int t[32]; t[__builtin_amdgcn_workitem_id_x() & 31] = *p;\n"
        "  __builtin_amdgcn_s_barrier();\n"
        "  p[1] = t[__builtin_amdgcn_workitem_id_x() & 7]; }\n"
    )
    made = tmp_path / "k.co"
    subprocess.run(
        [
            "clang-19", "-x", "hip", "--offload-arch=gfx942", "--cuda-device-only", "--no-gpu-bundle-output",
            "-nogpulib", "-nogpuinc", "-O1", "-o", str(made), str(source),
        ],
        check=True,
    )  # fmt: skip
    found = read(made.read_bytes())
    assert found.arch == "gfx942"
    kernel = found.kernels["k"]
    wanted = (128, 128, 0, 0)
    assert (kernel.lds, kernel.threads, kernel.scratch, kernel.vgpr_spills) == wanted
    assert 0 < kernel.vgpr <= 16
    assert kernel.kernarg > 0
