"""What our own images use, to the register and the instruction: a change that costs is to be noticed.

python tests/unit/kernels/test_golden.py     writes the numbers anew, from the checkout that it is in
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tests" / "data" / "golden_images.json"
ARCH = "sm_90"
NAMES = (
    "h7168-nb0",
    "h7168-nb0-wide",
    "h7168-nb1-delta",
    "h7168-nb4-delta-wide",
    "h7168-nb8-delta",
    "h7168-nb8-delta-final",
    "h7168-nb8-delta-wide",
    "h7168-nb1-delta-ring1",
    "h7168-nb5-delta-ring8",
    "h7168-nb8-delta-ring1",
    "h7168-nb8-delta-final-ring16",
    "h7168-stats-delta",
    "h7168-stats-delta-ring8",
    "h7168-statistics-nb8",
    "h7168-publish",
)
PROGRAM = """
import json, sys
from attnres_aot.kernels import compile as compiler
from attnres_aot.spec.arch import parse_arch
from attnres_aot.binary.cubin import read_cubin
from attnres_aot.spec.variants import parse_image
arch, *names = sys.argv[1:]
arch = parse_arch(arch)
compiler.prepare_environment(arch)
found = {}
for name in names:
    (kernel,) = read_cubin(compiler.compile_image(parse_image(name), arch).cubin).kernels
    found[name] = {
        "registers": kernel.registers,
        "smem_static_bytes": kernel.smem_static_bytes,
        "critical_instructions": kernel.critical_instructions,
    }
json.dump(found, sys.stdout)
"""


def measure() -> dict:
    command = [sys.executable, "-c", PROGRAM, ARCH, *NAMES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_images_use_what_they_did_when_they_were_last_looked_at():
    wanted, found = json.loads(FILE.read_text()), measure()
    changed = [f"{name}: {wanted.get(name)} -> {found[name]}" for name in NAMES if found[name] != wanted.get(name)]
    assert not changed, "\n".join([*changed, f"if that is meant, run: python {Path(__file__).relative_to(ROOT)}"])


if __name__ == "__main__":
    FILE.write_text(json.dumps(measure(), indent=1) + "\n")
