"""`attnres_aot.load` of a shared object: found like a bundle, the same surface, every launch through its launcher."""

from __future__ import annotations

import pytest
import torch

import attnres_aot
from attnres_aot.bundle.shared_object import read_library
from attnres_aot.errors import BundleError, OperandError, UsageError
from attnres_aot.launcher import libraries
from attnres_aot.runtime import api
from attnres_aot.runtime.shared import library as shared_library
from attnres_aot.runtime.shared.plan import LibraryPlan

HIDDEN = 1024
VARIANTS = (
    "nb2-delta", "nb2-delta-aux", "nb2-delta-stats", "nb2-delta-ring8", "nb2-delta-ring8-aux", "nb2-delta-ring8-stats",
)  # fmt: skip
PRODUCERS = ("statistics-nb2", "publish")


@pytest.fixture
def folder(stub, bundles):
    return bundles.write(VARIANTS, producers=PRODUCERS)


@pytest.fixture
def cubins(folder):
    return api.load(folder)


@pytest.fixture
def loaded(shared, link, folder):
    return api.load(link(folder))


def test_a_library_is_a_bundle_of_the_same_manifest_and_images(loaded, cubins):
    assert loaded.plans
    assert not cubins.plans
    assert loaded.bundle.manifest == cubins.bundle.manifest
    assert loaded.bundle.files == cubins.bundle.files
    assert loaded.statistics_rows(8, 1) == cubins.statistics_rows(8, 1)
    assert attnres_aot.preload(loaded) == attnres_aot.preload(cubins)


def test_a_library_in_a_folder_is_found(shared, link, folder):
    path = link(folder)
    assert api.load(path.parent).bundle.path == path
    assert not api.load(folder.parent).plans  # cubins stay the default where both are


def both(stub, cubins, loaded, launch):
    """Launches by both and compares what reached the driver."""
    before = stub.launch_count()
    for bundle in (cubins, loaded):
        launch(bundle)
    one, other = stub.launch(before), stub.launch(before + 1)
    assert stub.launch_count() == before + 2
    for field, _ in type(one)._fields_:
        left, right = getattr(one, field), getattr(other, field)
        if field == "parameters" and b"ring" in one.symbol:  # its fault tag names the object
            left, right = one.arguments(), other.arguments()
            assert left.pop("fault_tag") != right.pop("fault_tag")
        if field != "thread":
            assert left == right or list(left) == list(right), field


@pytest.mark.parametrize("checks", [True, False])
def test_everything_launches_as_from_cubins(stub, cubins, loaded, weights, key, operands, checks):
    given, stub.streams[0] = operands(rows=3), 0x4000
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    statistics = torch.zeros(64, HIDDEN), torch.zeros(64, 2)

    def make(bundle):
        prepared = attnres_aot.PreparedAttnRes(weights, key, (1e-5, 1e-6), bundle, checks=checks)
        return prepared.bind_ring(mailbox, spin_budget=9).bind_aux()

    made = {id(bundle): make(bundle) for bundle in (cubins, loaded)}
    calls = {
        "run": lambda prepared: prepared.run(*given.ordinary),
        "aux": lambda prepared: prepared.run(*given.ordinary, given.aux),
        "aux of a ring": lambda prepared: prepared.run_ring(*given.ring, given.aux),
        "operator": lambda prepared: prepared.launch(given.ordinary, None, ring=False),
    }
    for call in (*calls.values(), *calls.values()):
        both(stub, cubins, loaded, lambda bundle, call=call: call(made[id(bundle)]))
    for prepared in made.values():
        prepared.bind_statistics(*statistics, [3])
        assert isinstance(prepared.run(*given.ordinary), torch.Tensor)
    both(stub, cubins, loaded, lambda bundle: made[id(bundle)].run(*given.ordinary))
    both(stub, cubins, loaded, lambda b: attnres_aot.PreparedPublish(mailbox, 3, b, checks=checks).run(given.delta))
    both(
        stub, cubins, loaded,
        lambda b: attnres_aot.PreparedStatistics(*weights[:2], 1e-5, *statistics, nb=2, bundle=b).run(given.blocks),
    )  # fmt: skip
    assert isinstance(made[id(loaded)]._ordinary.plan, LibraryPlan)
    assert not isinstance(made[id(cubins)]._ordinary.plan, LibraryPlan)


def test_a_spin_budget_is_recorded_where_the_loader_looks(stub, loaded, weights, key, operands):
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    prepared = attnres_aot.PreparedAttnRes(weights, key, 1e-5, loaded, name="layer").bind_ring(mailbox, spin_budget=9)
    prepared.run_ring(*operands(rows=3).ring)
    arguments = stub.launch().arguments()
    import ctypes

    (ctypes.c_int32 * 4).from_address(arguments["fault"])[:] = [arguments["fault_tag"], 1, 2, 3]
    assert prepared.fault().launch.name == "layer"
    stub.fail("cuLaunchKernelEx", 719)
    with pytest.raises(attnres_aot.errors.DriverError, match=r"What failed: ring consumer nb2-delta-ring8 'layer'"):
        prepared.run_ring(*operands(rows=3).ring)


def test_compiled_consumers_come_from_it(stub, loaded, weights, operands):
    given = operands(rows=2)
    code = attnres_aot.compile_consumer(2, True, -1, False, 0, 0, "sm_90", bundle=loaded)
    code(given.delta, given.prefix, given.blocks, *weights, given.out, 1e-5, 1e-5, 0x123)
    assert (stub.launch().stream, stub.launch().arguments()["rows"]) == (0x123, 2)


def test_operands_are_refused_as_from_cubins(stub, cubins, loaded, weights, key, operands):
    given, texts = operands(rows=3), []
    for bundle in (cubins, loaded):
        prepared = attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle)
        prepared.run(*given.ordinary)
        for wrong in (
            (given.delta, given.prefix, given.blocks, given.prefix),
            (given.delta.float(), given.prefix, given.blocks, given.out),
            (given.delta[:2], given.prefix, given.blocks, given.out),
            (torch._neg_view(given.delta), given.prefix, given.blocks, given.out),
        ):
            with pytest.raises(OperandError) as caught:
                prepared.run(*wrong)
            texts.append(str(caught.value))
    assert texts[:4] == texts[4:]


def test_what_a_library_is_called_with_is_named_where_tvm_ffi_is_missing(stub, link, folder, monkeypatch):
    monkeypatch.setattr(shared_library, "_opened", {})
    shared_library._tvm_ffi.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "tvm_ffi", None)
    with pytest.raises(UsageError, match=r"pip install 'attnres-aot\[tvm-ffi\]'"):
        api.load(link(folder))
    shared_library._tvm_ffi.cache_clear()


def test_a_changed_library_is_refused(stub, link, folder, tmp_path):
    data = bytearray(link(folder).read_bytes())
    at = bytes(data).index(b"STUB 128")
    for name, change in (("image", at + 5), ("cut", None)):
        path = tmp_path / f"attnres_{name}.so"
        broken = bytearray(data)
        if change is None:
            broken = broken[: len(broken) // 2]
        else:
            broken[change] ^= 1
        path.write_bytes(broken)
        with pytest.raises(BundleError, match=r"changed after it was built|not a shared object"):
            read_library(path)
        with pytest.raises(BundleError, match=r"changed after it was built|not a shared object"):
            api.load(path)


def test_a_foreign_library_is_refused(stub, stub_library, tmp_path):
    with pytest.raises(BundleError, match=r"a shared object, but attnres-aot of this release did not build it"):
        read_library(stub_library)
    with pytest.raises(BundleError, match=r"there is|No such file"):
        read_library(tmp_path / "nothing.so")


def test_one_library_of_several_archs_picks_at_load(stub, bundles, link, shared, weights, key, operands):
    nine = bundles.write(VARIANTS, name="fat")
    ten = bundles.write(VARIANTS, name="fat", arch="sm_100")
    path = link(nine, ten, name="attnres_fat.so")
    assert [bundle.manifest.arch.proven for bundle in read_library(path)] == ["sm_90", "sm_100"]
    stub.machine(capability=(9, 0))
    assert api.load(path).bundle.manifest.arch.proven == "sm_90"
    assert libraries.file_name([(b.manifest, b.files) for b in read_library(path)], "aarch64") == (
        "attnres_fat_sm_90_sm_100.aarch64.so"
    )
    module = shared_library.open_library(path)
    assert module.description().splitlines()[0].startswith("fat for sm_90, ")
    assert module.load_table(0).description() == "fat for sm_90 on cuda:0"


def test_a_device_that_no_code_runs_on_is_refused(stub, bundles, link, shared):
    module = shared_library.open_library(link(bundles.write(VARIANTS, name="elsewhere")))
    stub.machine(capability=(8, 0))
    with pytest.raises(BundleError, match=r"no code of .* runs on cuda:0, compute capability 8\.0; it holds elsewhere"):
        module.load_table(0)
    stub.machine(devices=1)
    for device, text in ((1, r"there is no device 1: this process sees 1"), (-1, r"there is no device -1")):
        with pytest.raises(UsageError, match=text):
            module.load_table(device)
    with pytest.raises(UsageError, match=r"device is 'cuda'; a whole number is wanted"):
        module.load_table("cuda")


def test_images_are_proven_when_they_are_loaded(stub, bundles, link, shared, weights, key):
    folder = bundles.write(["nb2-delta"], name="threads", binary_threads=64)
    module = shared_library.open_library(link(folder))
    with pytest.raises(BundleError, match=r"runs with at most 64 threads per CTA, but the manifest says 128"):
        module.load_table(0).preload()
    params = attnres_aot.spec.params.CONSUMER_PARAMS[:-1]
    module = shared_library.open_library(link(bundles.write(["nb2-delta"], name="params", binary_params=params)))
    with pytest.raises(BundleError, match=r"the binary's parameters are, as \(offset, size\), \[\(0, 8\), "):
        module.load_table(0).preload()
    module = shared_library.open_library(link(bundles.write(["nb2-delta"], name="memory")))
    table = module.load_table(0)
    stub.fail("cuLibraryLoadData", 2)
    with pytest.raises(attnres_aot.errors.DriverError, match=r"OUT_OF_MEMORY; free device memory"):
        table.preload()
    stub.mend("cuLibraryLoadData")
    assert table.preload() == 1
