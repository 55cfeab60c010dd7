"""Building shared objects: compilers, bytes, proofs from the ELF file, and an aarch64 library under emulation."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from attnres_aot.bundle.shared_object import payload_of, read_payload
from attnres_aot.errors import BundleError, CompileError, UsageError
from attnres_aot.launcher import compilers
from attnres_aot.launcher.compile import TVM_FFI_FUNCTIONS, LauncherObjects
from attnres_aot.launcher.compilers import HOSTS, find_compiler, find_headers, parse_host, this_host
from attnres_aot.launcher.elf import facts_problems, read_facts

NAME = "attnres_test.so"
EXPORTS = (
    "__tvm_ffi_description", "__tvm_ffi_launch_problem", "__tvm_ffi_load_table", "__tvm_ffi_method",
    "__tvm_ffi_prepare_consumer", "__tvm_ffi_prepare_publish", "__tvm_ffi_prepare_statistics", "__tvm_ffi_ring_fault",
)  # fmt: skip

pytest.importorskip("tvm_ffi", reason="building a shared object needs its headers")


def compiler_for(host: str) -> compilers.Compiler:
    try:
        return find_compiler(HOSTS[host])
    except CompileError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=HOSTS)
def made(request):
    """(host, a library with a payload of some bytes, the launcher for more)."""
    with LauncherObjects(compiler_for(request.param)) as objects:
        yield request.param, objects.link(NAME, PAYLOAD), objects


@pytest.fixture(scope="module")
def own():
    """A library for x86_64 hosts."""
    with LauncherObjects(compiler_for("x86_64")) as objects:
        return objects.link(NAME, PAYLOAD)


PAYLOAD = b"ATTNRES\x01" + bytes(range(200))


def test_a_library_is_what_its_host_loads_anywhere(made):
    host, data, _ = made
    facts = read_facts(data)
    assert list(facts_problems(facts, host, NAME)) == []
    assert facts.exports == EXPORTS
    assert set(facts.undefined) <= set(TVM_FFI_FUNCTIONS)
    assert facts.needed[0] == "libtvm_ffi.so"
    assert facts.glibc <= (2, 17)
    assert payload_of(data, NAME) == PAYLOAD
    assert len(data) < 100_000


def test_equal_inputs_give_equal_bytes_in_any_folder(made):
    _, data, objects = made
    with LauncherObjects(objects._compiler) as again:
        assert again._folder.name != objects._folder.name
        assert again.link(NAME, PAYLOAD) == data


def test_no_path_of_the_build_is_in_it(made):
    _, data, objects = made
    for word in (objects._folder.name, str(Path(__file__).parents[2]), str(find_headers())):
        assert word.encode() not in data


def test_the_file_is_not_larger_than_what_it_embeds_by_much(made):
    _, small, objects = made
    payload = b"ATTNRES\x01" + bytes(1 << 20)
    assert len(objects.link(NAME, payload)) - len(payload) < 100_000
    assert len(small) < 100_000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"machine": "EM_ARM"}, "it is for EM_ARM, not for 'x86_64' hosts"),
        ({"soname": "other.so"}, "it calls itself 'other.so'"),
        ({"needed": ("libcudart.so.13", "libc.so.6")}, r"it needs libcudart.so.13; allowed are libc.so.6"),
        ({"search_paths": ("/usr/local/cuda",)}, "it looks for libraries in /usr/local/cuda"),
        ({"glibc": (2, 34)}, "it needs glibc 2.34; 2.28 is the newest allowed"),
        ({"exports": ("__tvm_ffi_run", "main")}, "it exports main"),
        ({"undefined": ("cudaLaunchKernel",)}, "it takes cudaLaunchKernel from other libraries"),
        ({"executable_stack": True}, "it asks for an executable stack"),
        ({"newer_cpu": True}, "it needs a newer CPU"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_library_must_not_be(own, change, says):
    (problem,) = facts_problems(dataclasses.replace(read_facts(own), **change), "x86_64", NAME)
    assert says in problem


def test_facts_are_read_from_the_file(tmp_path):
    """A library that a careless linker made: everything that is proven is seen."""
    source = tmp_path / "bad.c"
    source.write_text("#include <math.h>\nint strange(int n) { return (int)pow(n, n) + missing(); }\n")
    command = ["gcc", "-shared", "-fPIC", "-w", str(source), "-o", str(tmp_path / "bad.so"), "-Wl,-rpath,/opt/x", "-lm"]
    subprocess.run([*command, "-Wl,-z,execstack", "-Wl,--disable-new-dtags"], check=True)
    facts = read_facts((tmp_path / "bad.so").read_bytes())
    assert facts.search_paths == ("/opt/x",)
    assert facts.executable_stack
    assert "libm.so.6" in facts.needed
    assert "missing" in facts.undefined
    assert "strange" in facts.exports
    assert facts.glibc >= (2, 2)


@pytest.mark.parametrize("keep", [0, 10, 64, 5000])
def test_what_is_no_library_is_refused(own, keep):
    with pytest.raises(BundleError):
        read_facts(own[:keep])
    with pytest.raises(BundleError):
        payload_of(own[:keep], NAME)
    with pytest.raises(BundleError, match="changed after it was built"):
        read_payload(PAYLOAD + bytes(300), NAME)


def test_hosts_are_named_or_refused():
    assert parse_host("aarch64").name == "aarch64"
    with pytest.raises(
        UsageError, match=r"'aarch' is no host \(did you mean 'aarch64'\?\); choose from x86_64, aarch64"
    ):
        parse_host("aarch")


def test_without_a_compiler_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(compilers.shutil, "which", lambda name: None)
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    foreign = next(host for host in HOSTS if host != this_host())
    with pytest.raises(
        CompileError, match=rf"install Debian's g\+\+-{foreign.replace('_', '-')}-linux-gnu, or `pip inst"
    ):
        find_compiler(HOSTS[foreign])
    with pytest.raises(CompileError, match=r"install Debian's g\+\+, or `pip install ziglang`"):
        find_compiler(HOSTS[this_host()])
    with pytest.raises(CompileError, match=r"pip install 'attnres-aot\[tvm-ffi\]'"):
        find_headers()


def test_a_compiler_that_fails_is_quoted(tmp_path):
    broken = compilers.Compiler(host=HOSTS["x86_64"], command=("false",), version="1", is_zig=False)
    with pytest.raises(CompileError, match=r"false .* failed"), LauncherObjects(broken):
        pass
    missing = compilers.Compiler(host=HOSTS["x86_64"], command=("/nowhere/g++",), version="1", is_zig=False)
    with pytest.raises(CompileError, match=r"/nowhere/g\+\+ cannot be run"), LauncherObjects(missing):
        pass


def test_zig_makes_libraries_for_every_host(monkeypatch):
    pytest.importorskip("ziglang")
    monkeypatch.setattr(compilers.shutil, "which", lambda name: None)
    for host in HOSTS:
        compiler = find_compiler(HOSTS[host])
        assert compiler.is_zig
        with LauncherObjects(compiler) as objects:
            data = objects.link(NAME, PAYLOAD)
        assert list(facts_problems(read_facts(data), host, NAME)) == []
        assert payload_of(data, NAME) == PAYLOAD


PROGRAM = """
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef struct { int32_t type; uint32_t size; union { int64_t number; void* pointer; char text[8]; }; } Any;
static char said[4096];
void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* text) {
  snprintf(said, sizeof said, "%s: %s", kind, text);
}
int TVMFFIStringFromByteArray(const struct { const char* data; size_t size; }* bytes, Any* out) {
  snprintf(said, sizeof said, "%.*s", (int)bytes->size, bytes->data);
  out->type = 65;
  return 0;
}
#define OTHER(name) int name(void) { return 0; }
OTHERS
int main(int count, char** given) {
  void* library = dlopen(given[1], RTLD_NOW);
  if (!library) { printf("%s\\n", dlerror()); return 1; }
  int (*description)(void*, const Any*, int32_t, Any*) = dlsym(library, "__tvm_ffi_description");
  int (*load_table)(void*, const Any*, int32_t, Any*) = dlsym(library, "__tvm_ffi_load_table");
  Any result = {0};
  description(0, 0, 0, &result);
  printf("%s\\n", said);
  printf("%d\\n", load_table(0, 0, 0, &result));
  printf("%s\\n", said);
  return 0;
}
"""


@pytest.fixture(scope="module")
def emulator():
    found = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    compiler = shutil.which("aarch64-linux-gnu-gcc")
    if not found or not compiler:
        pytest.skip("needs Debian's qemu-user-static and g++-aarch64-linux-gnu")
    return found, compiler


def test_an_aarch64_library_is_loaded_under_emulation(emulator, tmp_path):
    """Loads it as a program there would, with a stand-in libtvm_ffi, and has it say that there is no driver."""
    qemu, gcc = emulator
    with LauncherObjects(compiler_for("aarch64")) as objects:
        (tmp_path / "attnres.so").write_bytes(objects.link(NAME, empty_payload()))
    defined = {"TVMFFIErrorSetRaisedFromCStr", "TVMFFIStringFromByteArray"}
    others = "\n".join(f"OTHER({name})" for name in TVM_FFI_FUNCTIONS if name not in defined)
    (tmp_path / "program.c").write_text(PROGRAM.replace("OTHERS", others))
    subprocess.run([gcc, "-w", "program.c", "-rdynamic", "-o", "program", "-ldl"], cwd=tmp_path, check=True)
    stand_in = "\n".join(f"extern int {name}(void);" for name in TVM_FFI_FUNCTIONS)
    (tmp_path / "empty.c").write_text(stand_in)
    command = [gcc, "-shared", "-fPIC", "empty.c", "-o", "libtvm_ffi.so", "-Wl,-soname,libtvm_ffi.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run(
        [qemu, "-L", "/usr/aarch64-linux-gnu", "-E", "LD_LIBRARY_PATH=.", "./program", "./attnres.so"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[:2] == ["tiny for sm_90, 0 images, 0 variants, 0 producers", "-1"], done.stdout + done.stderr
    assert lines[2].startswith("DriverError: no CUDA driver: libcuda.so.1 cannot be loaded (libcuda.so.1: cannot open")


def empty_payload() -> bytes:
    """The payload of one bundle that holds nothing."""
    from attnres_aot.bundle.shared_object import HEADER, MAGIC, MAX_BUNDLES, TABLE_RECORD

    texts, at = b"tiny\0sm_90\0\0", HEADER.size + TABLE_RECORD.size
    empty = (at + len(texts) - 1, 0)
    table = TABLE_RECORD.pack(1024, 9, 0, 0, 12000, at, 4, at + 5, 5, *empty * 4, *(at, 0) * 5)
    header = HEADER.pack(MAGIC, 1, 0, b"0" * 32, HEADER.size, *[0] * (MAX_BUNDLES - 1))
    return header + table + texts


def test_structures_are_those_of_tvm_ffi():
    """What the payload's records are in C++, they are in Python, byte for byte."""
    from attnres_aot.bundle.shared_object import HEADER, IMAGE_RECORD, TABLE_RECORD

    source = (Path(compilers.__file__).parent / "launcher.cpp").read_text()
    assert (HEADER.size, TABLE_RECORD.size, IMAGE_RECORD.size) == (112, 108, 52)
    assert "uint32_t tables[16];" in source
    assert struct.calcsize("P") == ctypes.sizeof(ctypes.c_void_p) == 8
    assert sys.byteorder == "little"
