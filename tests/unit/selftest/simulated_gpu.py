"""A pytest plugin that runs tests/gpu on the CPU: streams, events, graphs and the loader's objects, simulated.

What the kernels compute comes from the simulations beside this module; a launch happens at once, unless its mailbox is
not full or an earlier launch of its stream waits, and is then tried again whenever a test waits. Torch's own operations
happen at once, whatever the stream. So this finds mistakes in the tests themselves, not races between streams.
"""

import contextlib
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnres_aot
from attnres_aot.bundle.manifest import dump_manifest
from attnres_aot.config.reader import load_config
from attnres_aot.selftest import reference, suite
from attnres_aot.spec.variants import Variant

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


class Stream:
    """Launches that wait, in order."""

    def __init__(self, device=None):
        self.waiting = []
        GPU.streams.append(self)

    def synchronize(self):
        GPU.settle(self, "a stream")

    def wait_stream(self, other):
        other.synchronize()


class Gpu:
    """Streams, the current one of each thread, and the graph that is being captured."""

    def __init__(self):
        self.streams, self.capturing, self.local = [], None, threading.local()

    def current(self):
        if not hasattr(self.local, "stream"):
            self.local.stream = Stream()
        return self.local.stream

    def launch(self, work, ready=lambda: True):
        """Does `work` once `ready`, after what waits in the current stream; or puts it into the graph."""
        if self.capturing is not None:
            self.capturing.append(lambda: self.launch(work, ready))
            return
        stream = self.current()
        stream.waiting.append((work, ready))
        self.advance(stream)

    def advance(self, stream):
        while stream.waiting and stream.waiting[0][1]():
            stream.waiting.pop(0)[0]()

    def settle(self, stream, what):
        self.advance(stream)
        if stream.waiting:
            raise suite.DeviceLostError(f"{what}: a launch waits for rows that do not come")

    def synchronize(self, device=None):
        for stream in self.streams:
            self.settle(stream, "the device")


GPU = Gpu()


class Event:
    """Has happened once nothing waits in its stream."""

    def __init__(self, *, enable_timing=False):
        self.stream = None

    def record(self, stream=None):
        self.stream = stream or GPU.current()

    def query(self):
        GPU.advance(self.stream)
        return not self.stream.waiting

    def synchronize(self):
        self.stream.synchronize()

    def elapsed_time(self, other):
        return 1.0


class Record(TorchDispatchMode):
    """Puts torch's operations into the graph that is being captured."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        GPU.capturing.append(lambda: func(*args, **given))
        return func(*args, **given)


class Graph:
    def __init__(self):
        self.operations = []

    def replay(self):
        for operation in self.operations:
            operation()


@contextlib.contextmanager
def capture(graph, stream=None):
    assert GPU.capturing is None, "one capture at a time"
    GPU.capturing = graph.operations
    try:
        with Record():
            yield
    finally:
        GPU.capturing = None


@contextlib.contextmanager
def on_stream(stream):
    before, GPU.local.stream = GPU.current(), stream
    try:
        yield
    finally:
        GPU.local.stream = before


class Consumer:
    """Stands in for PreparedAttnRes."""

    def __init__(self, weights, key, eps, bundle=None, *, pdl=False):
        self.weights, self.key, self.bundle = weights, key, bundle
        self.eps = eps if isinstance(eps, tuple) else (eps, eps)
        self.aux, self.mailbox, self.statistics = False, None, None

    def bind_aux(self):
        self.aux = True
        return self

    def bind_statistics(self, mixture, scal, rows):
        self.statistics = (mixture, scal, tuple(rows))
        return self

    def bind_ring(self, mailbox, spin_budget=0):
        self.mailbox = mailbox
        return self

    def run(self, delta, prefix, blocks, out, aux=None):
        return self._launch(delta, 0, prefix, blocks, out, aux)

    def run_ring(self, prefix, blocks, out, aux=None):
        return self._launch(self.mailbox, self.mailbox.shape[0], prefix, blocks, out, aux)

    def _launch(self, source, slots, prefix, blocks, out, aux):
        from simulated_consumer import SimulatedConsumer

        from attnres_aot.selftest.arena import DENSE
        from attnres_aot.selftest.cases import Case
        from attnres_aot.selftest.reference import Operands

        rows, (norm, query, out_norm) = out.shape[0], self.weights
        if rows == 0:
            return out
        mixture, scal, wanted = self.statistics or (None, None, ())
        stats = rows in wanted
        variant = Variant(key=self.key, slots=slots, aux=self.aux, stats=stats)
        self.bundle.record(variant)  # a bundle without it would refuse
        views = Operands(
            source=source, prefix=prefix, blocks=blocks, norm=norm, query=query, out_norm=out_norm, out=out, aux=aux,
            mixture=mixture if stats else None, scal=scal if stats else None,
        )  # fmt: skip
        case = Case(
            variant=variant, rows=rows, layout=DENSE, eps=self.eps[0], out_eps=self.eps[1], steep=False, start=0
        )

        def full():
            return not slots or not bool(reference.is_armed(source[:, :rows]).any())

        GPU.launch(lambda: SimulatedConsumer().launch(case, views), full)
        return out


class Statistics:
    """Stands in for PreparedStatistics."""

    def __init__(self, norm, query, eps, mixture, scal, *, nb, bundle=None, pdl=False):
        self.given, self.written = (nb, norm, query, eps), (mixture, scal)

    def run(self, blocks):
        def work():
            for to, values in zip(self.written, reference.statistics(blocks, *self.given), strict=True):
                to[: blocks.shape[0]].copy_(values)

        GPU.launch(work)


class Publish:
    """Stands in for PreparedPublish."""

    def __init__(self, mailbox, slot, bundle=None, *, pdl=False):
        self.place = (mailbox, slot)

    def run(self, rows):
        GPU.launch(lambda: reference.publish(*self.place, rows))


def new_mailbox(slots, capacity, hidden, device=None):
    mailbox = torch.empty(slots, capacity, hidden, dtype=torch.bfloat16)
    reference.arm(mailbox)
    return mailbox


def wait(device, what, seconds=0.0):
    GPU.settle(GPU.current(), what)


def opened():
    """Returns what the tests take for a loaded bundle of every Kimi K3 variant, with short rows."""
    from bench_bundle import manifest_of
    from simulated_producer import SimulatedProducer

    from attnres_aot.plan.plan import plan
    from attnres_aot.selftest.loaded import LoadedConsumer
    from attnres_aot.spec.arch import parse_arch

    made = plan(load_config(ROOT / "configs" / "kimi_k3_all.yaml"), parse_arch("sm_90"))
    names = {str(each.variant): None for each in made.variants}
    manifest = manifest_of(names, [str(each.producer) for each in made.producers], hidden=256)
    records = {record.name: record for record in manifest.variants}
    folder = Path(tempfile.mkdtemp(prefix="simulated-"))
    (folder / "manifest.json").write_bytes(dump_manifest(manifest))

    class Opened(LoadedConsumer):
        device, device_name = CPU, "simulated"
        bundle = SimpleNamespace(manifest=manifest, path=folder, manifest_sha256="0" * 64)

        def __init__(self):
            self.loaded = SimpleNamespace(
                preload=lambda: None, record=lambda variant: records[str(variant)], device=SimpleNamespace(device=CPU)
            )

        def produce(self, case, memory):
            GPU.launch(lambda: SimulatedProducer().produce(case, memory))

    return Opened()


def install():
    """Puts the simulation in the place of torch.cuda and the loader, before a test imports either."""
    torch.set_num_threads(1)
    suite.wait = wait
    from attnres_aot.selftest import loaded

    loaded.PreparedAttnRes = Consumer
    loaded.LoadedConsumer.open = lambda path, device=None: opened()
    for name, value in {
        "PreparedAttnRes": Consumer, "PreparedStatistics": Statistics, "PreparedPublish": Publish,
        "new_mailbox": new_mailbox,
    }.items():  # fmt: skip
        setattr(attnres_aot, name, value)
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "Stream": Stream,
        "Event": Event, "CUDAGraph": Graph, "graph": capture, "stream": on_stream, "synchronize": GPU.synchronize,
        "current_stream": lambda device=None: GPU.current(), "_sleep": lambda cycles: None,
        "device": lambda ordinal: contextlib.nullcontext(),
    }.items():  # fmt: skip
        setattr(torch.cuda, name, value)


install()
