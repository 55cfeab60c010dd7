"""Loading code into the driver: once, checked, never during a capture; and what is said when it cannot be."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass, field

import pytest
import torch

import attnres_aot
from attnres_aot.bundle.manifest import seal
from attnres_aot.errors import BundleError, DriverError, UsageError
from attnres_aot.runtime import api
from attnres_aot.runtime.cuda import device as torch_device
from attnres_aot.runtime.cuda import driver
from attnres_aot.spec.params import CONSUMER_PARAMS, lay_out

from .conftest import LOADING

OLD = 12020
HIDDEN = 1024


@pytest.fixture
def prepared(bundle, weights, key):
    return attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle)


def test_loading_a_bundle_opens_no_image_and_a_consumer_opens_its_own_once(stub, bundle, weights, key, operands):
    assert stub.calls("cuLibraryLoadData") == 0
    for _ in range(3):
        prepared = attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle)
        for rows in (1, 2, 3):
            prepared.run(*operands(rows=rows).ordinary)
    assert [stub.calls(name) for name in ("cuLibraryLoadData", "cuKernelGetFunction", "cuFuncLoad")] == [1, 1, 1]


def test_equal_images_of_two_bundles_are_loaded_once(stub, bundles, weights, key, operands):
    for name in ("one", "two"):
        loaded = api.load(bundles.write(["nb2-delta"], name=name))
        attnres_aot.PreparedAttnRes(weights, key, 1e-5, loaded).run(*operands().ordinary)
    assert stub.calls("cuLibraryLoadData") == 1


def test_preload_leaves_nothing_to_load(stub, bundle, prepared, operands):
    images = bundle.bundle.manifest.images
    assert attnres_aot.preload(bundle) == len(images) == stub.calls("cuLibraryLoadData")
    mailbox = attnres_aot.new_mailbox(8, 64, HIDDEN, "cpu")
    before = [stub.calls(name) for name in LOADING]
    with stub.capture():
        prepared.bind_ring(mailbox, spin_budget=9).bind_aux().run(*operands().ordinary)
    assert stub.launch_count() == 1
    assert [stub.calls(name) for name in LOADING] == before


def test_preload_of_a_deployment_loads_what_it_needs(stub, bundle):
    few = attnres_aot.preload(bundle, tp=16, dcp=16)
    assert 0 < few == stub.calls("cuLibraryLoadData") < len(bundle.bundle.manifest.images)
    with pytest.raises(
        UsageError, match=r"serves no deployment with tp 4; it serves \(tp 8, dcp 1\), \(tp 16, dcp 16\)"
    ):
        attnres_aot.preload(bundle, tp=4)


def test_binary_with_other_parameters_is_refused(stub, bundles, weights, key):
    other = lay_out([(param.name, param.kind) for param in reversed(CONSUMER_PARAMS)])
    loaded = api.load(bundles.write(["nb2-delta"], binary_params=other))
    for _ in range(2):  # also when the driver has read it
        with pytest.raises(BundleError, match=r"parameters are, as \(offset, size\).*the manifest promises"):
            attnres_aot.PreparedAttnRes(weights, key, 1e-5, loaded)
    assert stub.calls("cuKernelGetFunction") == 0


def test_binary_for_fewer_threads_is_refused(bundles, weights, key, stub):
    loaded = api.load(bundles.write(["nb2-delta"], binary_threads=64))
    with pytest.raises(BundleError, match=r"at most 64 threads per CTA, but the manifest says 128"):
        attnres_aot.PreparedAttnRes(weights, key, 1e-5, loaded)


def test_the_driver_may_tell_more_threads_than_the_binary_fixes(bundles, weights, key, operands, stub):
    """On an H200 it tells what the registers allow, e.g. 640 of a kernel that requires 128."""
    loaded = api.load(bundles.write(["nb2-delta"], binary_threads=640))
    attnres_aot.PreparedAttnRes(weights, key, 1e-5, loaded).run(*operands().ordinary)
    assert stub.launch_count() == 1


def test_unknown_parameter_list_is_refused_at_load(stub, bundles):
    params = lay_out([("novel", "i32"), *((p.name, p.kind) for p in CONSUMER_PARAMS[1:])])
    with pytest.raises(BundleError, match=r"unknown novel \(i32\); missing source \(pointer\)"):
        api.load(bundles.write(["nb2-delta"], params=params))


@pytest.mark.parametrize("order", ["names", "places"])
def test_parameters_in_another_order_are_refused_at_load(stub, bundles, order):
    """Names and kinds are those that the loader knows, but not where it puts them."""
    fields = [(param.name, param.kind) for param in CONSUMER_PARAMS]
    fields[0], fields[1] = fields[1], fields[0]
    params = lay_out(fields)
    if order == "places":
        last = dataclasses.replace(CONSUMER_PARAMS[-1], offset=CONSUMER_PARAMS[-1].offset + 4)
        params = (*CONSUMER_PARAMS[:-1], last)
    at, found = (
        ("0", "'prefix' at offset 0, not 'source'")
        if order == "names"
        else ("24", f"'out_eps' at offset {CONSUMER_PARAMS[-1].offset + 4}")
    )
    with pytest.raises(BundleError, match=rf"is not what this attnres-aot fills: number {at} is {found}"):
        api.load(bundles.write(["nb2-delta"], params=params))


CHANGES = {
    "rows": (lambda raw: raw["images"][0].update(rows_per_cluster=3), "rows_per_cluster is 3; every kernel handles 1"),
    "cluster": (lambda raw: raw["images"][0].update(cluster=2), "cluster is 2; its rows take clusters of 1"),
    "hidden": (lambda raw: raw["model"].update(hidden=2048), "rows of 1024 elements, the model has 2048"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_launch_fact_is_refused_at_load(stub, bundles, change):
    """Once because the file is not as it was written, and once, its digest made anew, because of what it says."""
    edit, message = CHANGES[change]
    path = bundles.write(["nb2-delta"]) / "manifest.json"
    raw = json.loads(path.read_bytes())
    edit(raw)
    path.write_text(json.dumps(raw, indent=1, sort_keys=True) + "\n")
    with pytest.raises(BundleError, match="changed after it was built: its digest is"):
        api.load(path.parent)
    path.write_bytes(seal(raw))
    with pytest.raises(BundleError, match=message):
        api.load(path.parent)


def test_code_of_another_image_is_refused(stub, bundles, weights, key, operands):
    """Two images exchange their files, digests included: what is found in a binary goes by the image's name."""
    path = bundles.write(["nb2-delta", "nb2"])
    raw = json.loads((path / "manifest.json").read_bytes())
    first, second = raw["images"]
    one, other = (path / image["file"] for image in raw["images"])
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    for field_name in ("sha256", "size"):
        first[field_name], second[field_name] = second[field_name], first[field_name]
    (path / "manifest.json").write_bytes(seal(raw))
    loaded = api.load(path)
    with pytest.raises(BundleError, match="no kernel 'attnres_h1024_nb2_delta_cutlass_0', so it is the code of someth"):
        attnres_aot.PreparedAttnRes(weights, key, 1e-5, loaded).run(*operands().ordinary)


def test_a_damaged_image_is_refused_at_load(stub, bundles):
    path = bundles.write(["nb2-delta", "nb2"])
    file = path / "h1024-nb2-delta.cubin"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(BundleError, match="is damaged; searched"):
        api.load(path)


def test_a_bundle_that_is_replaced_after_load_stays_what_it_was(stub, bundle, prepared, operands, monkeypatch):
    shutil.rmtree(bundle.bundle.path)
    prepared.run(*operands().ordinary)
    assert stub.launch_count() == 1
    assert attnres_aot.preload(bundle) == len(bundle.bundle.manifest.images)


@pytest.mark.parametrize("table", ["1-99999999:1", "0-3:1", "1-65:1", "later"])
def test_a_table_beyond_the_mailbox_is_refused(stub, bundles, table):
    def change(manifest):
        tables = (dataclasses.replace(manifest.tables[0], attn_stats=table), *manifest.tables[1:])
        return dataclasses.replace(manifest, tables=tables)

    loaded = bundles.load_changed(["nb2-delta"], change)
    with pytest.raises(BundleError, match=f"the statistics table '{table}' does not turn on numbers from 1 to 64"):
        loaded.statistics_rows(8, 1)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A driver function that fails, and what the error says."""

    function: str
    status: int
    text: str

    def __str__(self) -> str:
        return f"{self.function}-{self.status}"


REFUSALS = [
    Refusal(
        function="cuLibraryLoadData", status=209, text="load image .*NO_BINARY_FOR_GPU; the bundle's code does not"
    ),
    Refusal(function="cuLibraryLoadData", status=200, text="load image .*INVALID_IMAGE; .*attnres-aot verify"),
    Refusal(function="cuLibraryLoadData", status=2, text="OUT_OF_MEMORY; free device memory"),
    Refusal(function="cuLibraryLoadData", status=900, text="CAPTURE_UNSUPPORTED; .*make and bind .*before capturing"),
    Refusal(function="cuLibraryGetKernel", status=2, text="find kernel 'attnres_h1024_nb2_delta_cutlass_0'"),
    Refusal(function="cuKernelGetFunction", status=2, text="put image .* on cpu"),
    Refusal(function="cuKernelGetParamInfo", status=400, text="describe the parameters of image"),
    Refusal(function="cuKernelGetAttribute", status=400, text="tell the block size of image"),
    Refusal(function="cuFuncLoad", status=2, text="put image .*OUT_OF_MEMORY; free device memory"),
    Refusal(function="cuThreadExchangeStreamCaptureMode", status=1, text="change how this thread takes part in stream"),
    Refusal(function="cuDevicePrimaryCtxRetain", status=2, text="open device 0"),
    Refusal(function="cuCtxPushCurrent_v2", status=201, text="make device 0 current"),
]
"""Refusals to put code on the device."""
LAUNCH_REFUSALS = [
    Refusal(
        function="cuLaunchKernelEx", status=719, text="launch nb2-delta for 3 rows on cpu: CUDA_ERROR_LAUNCH_FAILED"
    ),
    Refusal(function="cuLaunchKernelEx", status=700, text="ILLEGAL_ADDRESS; an earlier kernel"),
    Refusal(function="cuLaunchKernelEx", status=12345, text="CUDA error 12345; run `attnres-aot doctor`"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_driver_refusal_to_load_names_error_image_and_remedy(stub, bundle, weights, key, operands, case):
    stub.fail(case.function, case.status)
    with pytest.raises(DriverError, match=f"the CUDA driver refused to .*{case.text}"):
        attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle)
    stub.mend(case.function)
    attnres_aot.PreparedAttnRes(weights, key, 1e-5, bundle).run(*operands(rows=3).ordinary)
    assert (stub.launch_count(), stub.lib.stub_capture_mode()) == (1, 0)


@pytest.mark.parametrize("case", LAUNCH_REFUSALS, ids=str)
def test_driver_refusal_names_error_variant_and_remedy(stub, prepared, operands, case):
    given = operands(rows=3)
    stub.fail(case.function, case.status)
    with pytest.raises(DriverError, match=f"the CUDA driver refused to .*{case.text}"):
        prepared.run(*given.ordinary)
    stub.mend(case.function)
    prepared.run(*given.ordinary)
    assert stub.launch_count() == 1


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine on which nothing can be launched, and the sentence that says so."""

    name: str
    text: str
    cuda: int = 13000
    fail: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


MACHINES = [
    Machine(name="stub", fail={"cuDriverGetVersion": 34}, text="is the CUDA toolkit's link-time stub; .*LD_LIBRARY"),
    Machine(name="silent-stub", cuda=0, text="is the CUDA toolkit's link-time stub; .*LD_LIBRARY"),
    Machine(name="old", cuda=OLD, text=r"driver is too old: it serves CUDA 12\.2, but launching needs 12\.4 or newer"),
    Machine(name="no-gpu", fail={"cuInit": 100}, text="refused to start: CUDA_ERROR_NO_DEVICE; no GPU is visible"),
    Machine(name="mismatch", fail={"cuInit": 803}, text="SYSTEM_DRIVER_MISMATCH; .*reboot"),
]


def needing(oldest_driver: str, flavour: str):
    return lambda manifest: dataclasses.replace(manifest, oldest_driver=oldest_driver, flavour=flavour)


@pytest.mark.parametrize("search", [False, True], ids=["named", "folder"])
def test_a_driver_that_is_too_old_for_the_code_is_told_at_load(stub, bundles, search):
    path = bundles.write(["nb2-delta"], change=needing("13.0", "cu13"))
    stub.machine(cuda=12080)
    with pytest.raises(BundleError) as caught:
        api.load(path.parent if search else path)
    text = str(caught.value)
    assert (
        "its code needs a driver for CUDA 13.0 (driver release 580.65.06) or later; this machine's serves CUDA 12.8"
        in text
    )
    assert "or build for older ones: `attnres-aot build --arch sm_90 --config FILE --flavour cu12` (FILE: the" in text
    assert stub.calls("cuLibraryLoadData") == 0


@pytest.mark.parametrize("cuda", [13000, 13010, 14000])
def test_a_driver_that_is_new_enough_is_not_in_the_way(stub, bundles, cuda):
    path = bundles.write(["nb2-delta"], change=needing("13.0", "cu13"))
    stub.machine(cuda=cuda)
    assert api.load(path).bundle.manifest.oldest_driver == "13.0"


def test_a_bundle_by_a_relative_path_outlives_a_change_of_the_working_folder(stub, bundles, tmp_path, monkeypatch):
    path = bundles.write(["nb2-delta"])
    monkeypatch.chdir(path.parent)
    for named in (path.name, f"./{path.name}", "."):
        loaded = api.load(named)
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert attnres_aot.preload(loaded) == 1
        assert loaded.bundle.path.is_absolute()
        monkeypatch.chdir(path.parent)


def test_a_bundle_by_a_relative_variable_outlives_a_change_of_the_working_folder(stub, bundles, tmp_path, monkeypatch):
    path = bundles.write(["nb2-delta"])
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("ATTNRES_AOT_BUNDLE", path.name)
    loaded = api.load()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert attnres_aot.preload(loaded) == 1


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_unusable_machine_is_one_clear_sentence_at_load(stub, bundles, machine):
    path = bundles.write(["nb2-delta"])
    stub.machine(cuda=machine.cuda)
    for function, status in machine.fail.items():
        stub.fail(function, status)
    with pytest.raises(DriverError, match=machine.text) as caught:
        api.load(path)
    assert "\n" not in str(caught.value)


def test_missing_driver_is_one_clear_sentence(stub, bundles, monkeypatch):
    monkeypatch.setattr(driver, "LIBRARY_NAME", "libcuda-that-is-not-there.so.1")
    with pytest.raises(DriverError, match=r"no CUDA driver: libcuda-that-is-not-there.so.1 cannot be loaded"):
        api.load(bundles.write(["nb2-delta"]))


def test_library_that_lacks_functions_is_refused(stub, bundles, monkeypatch):
    monkeypatch.setattr(driver, "FUNCTIONS", (*driver.FUNCTIONS, "cuSomethingNew"))
    with pytest.raises(DriverError, match=r"lacks cuSomethingNew, though it claims CUDA 13.0"):
        api.load(bundles.write(["nb2-delta"]))


def test_arch_that_does_not_run_here_is_refused(stub, bundles):
    stub.machine(capability=(8, 0))
    with pytest.raises(BundleError, match=r"built for sm_90"):
        api.load(bundles.write(["nb2-delta"]))


class TestPickingADevice:
    def test_torch_without_cuda_is_one_clear_sentence(self, stub, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", None)
        with pytest.raises(DriverError, match=r"this torch \(.*\) was built without CUDA"):
            torch_device.pick_device()

    def test_numbers_and_names_are_taken(self, stub, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        stub.machine(devices=2)
        found = [
            torch_device.pick_device(device).ordinal for device in (None, "cuda", "cuda:0", torch.device("cuda", 1))
        ]
        assert found == [1, 1, 0, 1]
        assert torch_device.pick_device("cuda:0").current is not None
        stub.machine(devices=1)
        assert torch_device.pick_device("cuda:0").current is None

    @pytest.mark.parametrize(
        ("device", "text"), [("cpu", "is a cpu device"), ("cuda:2", "there is no device 'cuda:2': this process sees 2")]
    )
    def test_other_devices_are_refused(self, stub, monkeypatch, device, text):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        stub.machine(devices=2)
        with pytest.raises(UsageError, match=text):
            torch_device.pick_device(device)


def test_load_without_a_path_finds_once(stub, bundles, monkeypatch):
    path = bundles.write(["nb2-delta"])
    monkeypatch.setenv("ATTNRES_AOT_BUNDLE", str(path))
    assert api.load() is api.load()
    assert api.load().bundle.path.resolve() == path.resolve()
    monkeypatch.setenv("ATTNRES_AOT_BUNDLE", str(bundles.write(["nb2"], name="other")))
    assert api.load().bundle.manifest.name == "other"


def test_weights_alone_find_the_bundle(stub, bundles, weights, key, operands, monkeypatch):
    monkeypatch.setenv("ATTNRES_AOT_BUNDLE", str(bundles.write(["nb2-delta"])))
    attnres_aot.PreparedAttnRes(weights, key, 1e-5).run(*operands().ordinary)
    assert stub.launch_count() == 1


def test_collector_is_left_as_it_was(stub, bundles):
    import gc

    path = bundles.write(["nb2-delta"])
    api.load(path)
    assert gc.isenabled()
    gc.disable()
    try:
        api.load(path)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_large_dynamic_shared_memory_is_asked_for(stub, bundles, weights, key, operands):
    def large(manifest):
        image = dataclasses.replace(manifest.images[0], smem_dynamic_bytes=48 << 10, smem_static_bytes=1)
        return dataclasses.replace(manifest, images=(image,))

    loaded = api.load(bundles.write(["nb2-delta"], change=large))
    attnres_aot.PreparedAttnRes(weights, key, 1e-5, loaded).run(*operands().ordinary)
    assert stub.calls("cuKernelSetAttribute") == 1
