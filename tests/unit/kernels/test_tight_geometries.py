"""Images that spilled with the shape of Kimi K3's, and some at the edge of what is accepted: all must be right.

`make sweep` compiles every image that there can be; these are the ones that showed what it is for.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TIGHT = {
    "sm_90": ["h2048-nb6-ring16", "h6144-nb6-ring16", "h7168-nb7-ring13", "h2304-nb16-delta-final-ring16"],
    "sm_100": ["h4096-nb6-ring15", "h4096-nb6-delta-ring14", "h4096-nb6-delta-ring15", "h7936-statistics-nb16"],
    "sm_120": ["h7168-nb5-delta-ring12", "h7168-nb6-ring13", "h256-nb8-delta-final-wide", "h8192-nb16-delta"],
}
PROGRAM = """
import json, sys
from attnres_aot.kernels import compile as compiler
from attnres_aot.spec.arch import parse_arch
from attnres_aot.binary.cubin import read_cubin
from attnres_aot.builder.budgets import budget_for
from attnres_aot.spec.variants import parse_image
arch, *names = sys.argv[1:]
arch = parse_arch(arch)
compiler.prepare_environment(arch)
found = {}
for name in names:
    spec = parse_image(name)
    (kernel,) = read_cubin(compiler.compile_image(spec, arch).cubin).kernels
    found[name] = {
        "local memory": kernel.stack_bytes + kernel.spill_bytes + kernel.local_instructions,
        "registers to spare": budget_for(compiler.launch_constants(spec)).registers - kernel.registers,
    }
json.dump(found, sys.stdout)
"""


@pytest.mark.parametrize("arch", TIGHT)
def test_images_near_the_limit_of_registers_do_not_spill(arch):
    command = [sys.executable, "-c", PROGRAM, arch, *TIGHT[arch]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == TIGHT[arch]
    assert {name: facts["local memory"] for name, facts in found.items()} == dict.fromkeys(TIGHT[arch], 0)
    assert all(facts["registers to spare"] >= 0 for facts in found.values()), found
