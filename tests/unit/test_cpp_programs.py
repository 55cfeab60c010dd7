"""The C++ programs are compiled as their first lines say, and say what is missing where there is no driver."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from attnres_aot.launcher.compile import LauncherObjects
from attnres_aot.launcher.compilers import HOSTS, find_compiler, find_headers, this_host

pytest.importorskip("tvm_ffi", reason="they are compiled with its headers")
ROOT = Path(__file__).parents[2]
PROGRAMS = ("examples/cpp/layer5.cpp", "scripts/shared_object_cost.cpp")


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request, tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = find_headers().parent
    out = tmp_path_factory.mktemp("program") / "program"
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", str(ROOT / request.param), f"-I{folder}/include"]
    link = [f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib", "-ltvm_ffi", "-ldl", "-lpthread", "-o", str(out)]
    subprocess.run([*command, "-isystem", f"{folder}/include", *link], check=True)
    return request.param, out


def test_a_program_without_a_driver_says_so(program, tmp_path):
    source, path = program
    with LauncherObjects(find_compiler(HOSTS[this_host()])) as objects:
        (tmp_path / "attnres.so").write_bytes(objects.link("attnres.so", b"ATTNRES\x01" + bytes(200)))
    rest = [] if "layer5" in source else ["image", "1", "1", "1", "1", "128"]
    done = subprocess.run([path, tmp_path / "attnres.so", *rest], capture_output=True, text=True, check=False)
    assert done.returncode == (2 if "layer5" in source else 1)
    assert "libcuda.so.1" in done.stdout + done.stderr
    assert subprocess.run([path], capture_output=True, check=False).returncode == 2


def test_cmake_builds_the_example(tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    folder = find_headers().parent
    source = ["cmake", "-S", str(ROOT / "examples" / "cpp"), "-B", str(tmp_path), f"-DTVM_FFI={folder}"]
    subprocess.run(source, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(tmp_path)], check=True, capture_output=True)
    assert (tmp_path / "layer5").is_file()
