"""Makes the cubins in `cubins/` from the PTX below: python make_cubins.py PTXAS_12_9 PTXAS_13_0.

The two assemblers are those of CUDA 12.9 (PyPI: nvidia-cuda-nvcc-cu12==12.9.86) and CUDA 13.0; they write the target
down differently. A file is called KERNEL.ARCH.TOOLKIT.cubin.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

OUT = Path(__file__).parent / "cubins"
ARCHS = ("sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_103", "sm_103a", "sm_120", "sm_120a")

CONSUMER_PARAMS = [".u64"] * 11 + [".u32"] * 12 + [".f32"] * 2
STATISTICS_PARAMS = [".u64"] * 5 + [".u32"] * 3 + [".f32"]
PUBLISH_PARAMS = [".u64"] * 2 + [".u32"] * 2
FIXED_BLOCK = ".reqntid 128, 1, 1"


def entry(name: str, params: list[str], body: str, bounds: str = FIXED_BLOCK) -> str:
    listed = ", ".join(f".param {kind} p{index}" for index, kind in enumerate(params))
    return f".visible .entry {name}({listed})\n{bounds}\n{{\n{body}\n}}\n"


ADDRESS = ".reg .u64 a; .reg .u32 t; ld.param.u64 a, [p0]; mov.u32 t, %tid.x; mad.wide.u32 a, t, 4, a;"


def many_values(count: int) -> str:
    """Loads `count` values and stores them in reverse, so that all are live at the same time."""
    loads = "\n".join(f"ld.volatile.global.f32 f{index}, [a+{4 * index}];" for index in range(count))
    stores = "\n".join(f"st.volatile.global.f32 [a+{4 * index}], f{count - 1 - index};" for index in range(count))
    return f".reg .f32 f<{count}>; {ADDRESS}\n{loads}\n{stores}\nret;"


SHARED = (
    f".shared .align 16 .b8 buffer[40]; .reg .u32 s; {ADDRESS} griddepcontrol.launch_dependents; "
    "mov.u32 s, buffer; st.shared.u32 [s], t; bar.sync 0; griddepcontrol.wait; ld.shared.u32 t, [s+4]; "
    "st.global.u32 [a], t; ret;"
)
COPY = f"{ADDRESS} griddepcontrol.launch_dependents; griddepcontrol.wait; st.global.u32 [a], t; ret;"
DYNAMIC = (
    f".reg .u32 s; {ADDRESS} mov.u32 s, dynamic; st.shared.u32 [s], t; bar.sync 0; ld.shared.u32 t, [s+4]; "
    "st.global.u32 [a], t; ret;"
)
LOCAL = (
    f".local .align 16 .b8 buffer[512]; .reg .u64 b, c; {ADDRESS} mov.u64 b, buffer; mad.wide.u32 c, t, 4, b; "
    "st.local.u32 [c], t; ld.local.u32 t, [b+64]; st.global.u32 [a], t; ret;"
)
SPILL = many_values(120)

KERNELS = {
    "consumer": entry("consumer", CONSUMER_PARAMS, SHARED),
    "consumer64": entry("consumer64", CONSUMER_PARAMS, SHARED, ".reqntid 64, 1, 1"),
    "statistics": entry("statistics", STATISTICS_PARAMS, SHARED),
    "publish": entry("publish", PUBLISH_PARAMS, COPY),
    "wide": entry("wide", CONSUMER_PARAMS, many_values(24)),
    "spill": entry("spill", [".u64"], SPILL, f"{FIXED_BLOCK} .maxnreg 32"),
    "local": entry("local", [".u64"], LOCAL),
    "dynamic": ".extern .shared .align 16 .b8 dynamic[];\n" + entry("dynamic_kernel", [".u64"], DYNAMIC),
    "two": entry("one", [".u64"], "ret;") + entry("two", [".u64", ".u32"], "ret;"),
    "cluster": entry("cluster", [".u64"], "ret;", f"{FIXED_BLOCK} .explicitcluster .reqnctapercluster 7, 1, 1"),
    "bounded": entry("bounded", [".u64"], "ret;", ".maxntid 256, 1, 1"),
    "bare": entry("bare", [], "ret;", ".reqntid 32, 2, 1"),
    "none": ".visible .global .u32 word;\n",
}


BUNDLED = {"consumer", "consumer64", "statistics", "publish"}
"""Kernels that test bundles of every arch are made of."""


def make(ptxas: str, kernel: str, arch: str, toolkit: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(f".version 8.8\n.target {arch}\n.address_size 64\n{KERNELS[kernel]}")
        out = OUT / f"{kernel}.{arch}.{toolkit}.cubin"
        subprocess.run([ptxas, "-arch", arch, str(source), "-o", str(out)], check=True)


def main(old: str, new: str) -> None:
    OUT.mkdir(exist_ok=True)
    for arch in ARCHS:
        for kernel in BUNDLED:
            make(old, kernel, arch, "cu12")
    for arch in ("sm_90", "sm_90a", "sm_100a", "sm_100f"):
        make(new, "consumer", arch, "cu13")
    for kernel in KERNELS.keys() - BUNDLED:
        make(old, kernel, "sm_90", "cu12")
        make(old, kernel, "sm_100", "cu12")


if __name__ == "__main__":
    main(*sys.argv[1:])
