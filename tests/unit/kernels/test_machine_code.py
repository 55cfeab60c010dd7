"""The machine code of mailbox consumers: a warp that polled is brought together before it shuffles, on every arch."""

import base64
import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from attnres_aot.binary.cubin import read_cubin
from attnres_aot.binary.elf_image import open_elf
from attnres_aot.spec.arch import BUILDABLE
from attnres_aot.spec.variants import ConsumerSpec

NO_BLOCKS_READ = ConsumerSpec(hidden=7168, nb=None, has_delta=True, final=False, slots=8)
SPECS = [
    NO_BLOCKS_READ,
    replace(NO_BLOCKS_READ, nb=4, slots=1),
    replace(NO_BLOCKS_READ, nb=8),
    replace(NO_BLOCKS_READ, nb=1, slots=16),
]
ARCHES = [str(arch) for arch in BUILDABLE if not arch.suffix]
COMPILE = """
import base64, json, sys
from attnres_aot.kernels import compile as compiler
from attnres_aot.spec.arch import parse_arch
from attnres_aot.spec.variants import ConsumerSpec
arch, specs = json.load(sys.stdin)
compiler.prepare_environment(parse_arch(arch))
cubins = [compiler.compile_image(ConsumerSpec(**fields), parse_arch(arch)).cubin for fields in specs]
json.dump([base64.b64encode(cubin).decode() for cubin in cubins], sys.stdout)
"""
WARPSYNC, BRA, DIV, NOP = (0x348, 0x948), 0x947, 1 << 91, (0x918).to_bytes(16, "little")


def without_what_brings_warps_together(cubin: bytes) -> bytes:
    """The same code with every WARPSYNC and BRA.DIV made a NOP."""
    (code,) = (section.data for section in open_elf(cubin).sections if section.name.startswith(".text."))
    assert cubin.count(code) == 1
    words = [code[at : at + 16] for at in range(0, len(code), 16)]
    for place, word in enumerate(words):
        value = int.from_bytes(word, "little")
        if value & 0xFFF in WARPSYNC or (value & 0xFFF == BRA and value & DIV):
            words[place] = NOP
    return cubin.replace(code, b"".join(words))


@pytest.mark.parametrize("arch", ARCHES)
def test_no_shuffle_follows_polling_unguarded_and_if_one_did_it_would_be_seen(arch):
    asked = json.dumps([arch, [asdict(spec) for spec in SPECS]])
    done = subprocess.run([sys.executable, "-c", COMPILE], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for spec, text in zip(SPECS, json.loads(done.stdout), strict=True):
        cubin = base64.b64decode(text)
        (kernel,) = read_cubin(cubin).kernels
        assert kernel.split_shuffles == 0, str(spec)
        (kernel,) = read_cubin(without_what_brings_warps_together(cubin)).kernels
        assert kernel.split_shuffles > 0, str(spec)
