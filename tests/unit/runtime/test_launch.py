"""What reaches the driver for a launch."""

from __future__ import annotations

import pytest

import attnres_aot


def test_ordinary_launch_passes_every_argument(stub, bundle, operands, weights, key):
    given = operands(rows=3)
    stub.streams[0] = 0x5000
    prepared = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle)
    assert prepared.run(*given.ordinary) is given.out
    launch = stub.launch()
    assert (list(launch.grid), list(launch.block), list(launch.cluster)) == ([3, 1, 1], [128, 1, 1], [1, 1, 1])
    assert (launch.stream, launch.pdl, launch.smem) == (0x5000, 0, 0)
    arguments = launch.arguments()
    assert arguments.pop("eps") == pytest.approx(1e-5)
    assert arguments.pop("out_eps") == pytest.approx(1e-6)
    assert arguments == {
        "source": given.delta.data_ptr(),
        "prefix": given.prefix.data_ptr(),
        "blocks": given.blocks.data_ptr(),
        "norm": weights[0].data_ptr(),
        "query": weights[1].data_ptr(),
        "out_norm": weights[2].data_ptr(),
        "out": given.out.data_ptr(),
        "aux": 0,
        "mixture": 0,
        "scal": 0,
        "fault": 0,
        "source_row_stride": 128,
        "source_slot_stride": 0,
        "prefix_row_stride": 128,
        "blocks_row_stride": 512,
        "blocks_block_stride": 128,
        "out_row_stride": 128,
        "aux_row_stride": 0,
        "write": -1,
        "rows": 3,
        "spin_budget": 0,
        "fault_tag": 0,
    }
