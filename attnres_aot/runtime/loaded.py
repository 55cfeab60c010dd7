"""A bundle on a device: which image serves a variant, loading it on demand, and the statistics tables.

`load` returns one. Nothing is loaded into the driver until it is first launched or `preload` is called.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from attnres_aot.abi import KERNEL_PARAMS
from attnres_aot.bundle import Bundle
from attnres_aot.bundle.manifest_check import variant_of
from attnres_aot.errors import BundleError, UsageError
from attnres_aot.manifest import Choice, ProducerRecord, VariantRecord
from attnres_aot.runtime.library import LoadedKernel, load_kernel
from attnres_aot.runtime.miss import producer_miss, variant_miss
from attnres_aot.runtime.torch_device import TorchDevice
from attnres_aot.variants import ConsumerKey, Producer, Variant


class LoadedBundle:
    """A bundle whose manifest has been read and checked, for one device. Safe to use from several threads.

    `bundle` holds path and manifest, `device` the device.
    """

    __slots__ = ("_images", "_kernels", "_lock", "_producers", "_variants", "bundle", "device")

    def __init__(self, bundle: Bundle, device: TorchDevice) -> None:
        _check_parameters(bundle)
        self.bundle = bundle
        self.device = device
        self._variants = {record.name: record for record in bundle.manifest.variants}
        self._producers = {record.name: record for record in bundle.manifest.producers}
        self._images = {image.name: image for image in bundle.manifest.images}
        self._kernels: dict[str, LoadedKernel] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return (
            f"<bundle {manifest.name} for {manifest.arch.requested} at {self.bundle.path}, "
            f"{len(self._variants)} variants, on {self.device.device}>"
        )

    @property
    def hidden(self) -> int:
        """Row length H in elements."""
        return self.bundle.manifest.model.hidden

    def __contains__(self, variant: Variant) -> bool:
        return str(variant) in self._variants

    def holds_key(self, key: ConsumerKey) -> bool:
        """Tells whether the bundle holds any variant of a consumer."""
        return Variant(key=key) in self or any(variant_of(record).key == key for record in self._variants.values())

    def record(self, variant: Variant) -> VariantRecord:
        """Returns the manifest's record of a variant.

        Raises:
          VariantMissError: the bundle does not hold it.
        """
        found = self._variants.get(str(variant))
        if found is None:
            raise variant_miss(self.bundle, variant)
        return found

    def kernel(self, variant: Variant, rows: int) -> LoadedKernel:
        """Returns the kernel that serves `rows` rows of a variant, loading it if needed.

        Raises:
          VariantMissError: the bundle does not hold the variant.
          BundleError: the image is damaged.
          DriverError: the driver refused, or a graph is being captured and the image is not loaded.
        """
        return self.load_image(_chosen(self.record(variant).choices, rows))

    def producer_record(self, producer: Producer) -> ProducerRecord:
        """Returns the manifest's record of a producer.

        Raises:
          VariantMissError: the bundle does not hold it.
        """
        found = self._producers.get(str(producer))
        if found is None:
            raise producer_miss(self.bundle, producer)
        return found

    def producer_kernel(self, producer: Producer, rows: int) -> LoadedKernel:
        """Returns the kernel that serves `rows` rows of a producer, loading it if needed; raises as `kernel` does."""
        return self.load_image(_chosen(self.producer_record(producer).choices, rows))

    def load_image(self, name: str) -> LoadedKernel:
        """Loads one image, or returns it if it is loaded already."""
        found = self._kernels.get(name)
        if found is None:
            with self._lock:
                found = load_kernel(self.bundle, self._images[name], self.device)
                self._kernels[name] = found
        return found

    def preload(self, *, tp: int | None = None, dcp: int | None = None) -> int:
        """Loads every image that a deployment needs, so that no later launch loads anything.

        Args:
          tp: tensor-parallel size; None loads for every one in the bundle.
          dcp: decode-context-parallel size; None loads for every one in the bundle.

        Returns:
          How many images are loaded for it.

        Raises:
          UsageError: the bundle does not serve that deployment.
        """
        wanted = [
            (table.tp, table.dcp)
            for table in self.bundle.manifest.tables
            if tp in (None, table.tp) and dcp in (None, table.dcp)
        ]
        if not wanted and (tp, dcp) != (None, None):
            raise self._no_deployment(tp, dcp)
        names = dict.fromkeys(self._images if (tp, dcp) == (None, None) else self._images_for(wanted))
        for name in names:
            self.load_image(name)
        return len(names)

    def statistics_rows(self, tp: int, dcp: int) -> tuple[int, ...]:
        """Returns the row counts, ascending, at which a deployment uses precomputed statistics."""
        return _switched_on(self._table(tp, dcp)[0])

    def statistics_blocks(self, tp: int, dcp: int) -> tuple[int, ...]:
        """Returns the numbers of saved blocks, ascending, at which a deployment uses precomputed statistics."""
        return _switched_on(self._table(tp, dcp)[1])

    def _images_for(self, deployments: list[tuple[int, int]]) -> Iterator[str]:
        wanted = set(deployments)
        manifest = self.bundle.manifest
        records: tuple[VariantRecord | ProducerRecord, ...] = (*manifest.variants, *manifest.producers)
        for record in records:
            if not wanted.isdisjoint(record.deployments):
                yield from (choice.image for choice in record.choices)

    def _table(self, tp: int, dcp: int) -> tuple[str, str]:
        for table in self.bundle.manifest.tables:
            if (table.tp, table.dcp) == (tp, dcp):
                return table.attn_stats, table.attn_stats_blocks
        raise self._no_deployment(tp, dcp)

    def _no_deployment(self, tp: int | None, dcp: int | None) -> UsageError:
        manifest = self.bundle.manifest
        have = ", ".join(f"(tp {table.tp}, dcp {table.dcp})" for table in manifest.tables) or "none"
        asked = ", ".join(f"{name} {value}" for name, value in (("tp", tp), ("dcp", dcp)) if value is not None)
        return UsageError(
            f"the bundle at {self.bundle.path} serves no deployment with {asked}; it serves {have}. Add it under "
            f"'deployments' and build again: attnres-aot build --arch {manifest.arch.requested} "
            f"--config {manifest.name}.yaml"
        )


def _check_parameters(bundle: Bundle) -> None:
    """Refuses a bundle whose kernels take other arguments than those that this loader can give them."""
    for name, params in bundle.manifest.abis.items():
        known = {(param.name, param.kind) for param in KERNEL_PARAMS.get(name, ())}
        found = {(param.name, param.kind) for param in params}
        if found != known:
            unknown = ", ".join(sorted(f"{param} ({kind})" for param, kind in found - known)) or "none"
            missing = ", ".join(sorted(f"{param} ({kind})" for param, kind in known - found)) or "none"
            raise BundleError(
                f"{bundle.path}: parameter list {name!r} is not what this attnres-aot fills: unknown {unknown}; "
                f"missing {missing}; build the bundle again, or install the attnres-aot release that built it"
            )


def _chosen(choices: tuple[Choice, ...], rows: int) -> str:
    """Returns the name of the image for `rows` rows; a checked manifest's last choice takes any number."""
    return next(choice.image for choice in choices if choice.max_rows is None or rows <= choice.max_rows)


def _switched_on(table: str) -> tuple[int, ...]:
    from attnres_aot.tables import parse_table

    return tuple(number for first, last in parse_table(table).switched_on() for number in range(first, last + 1))
