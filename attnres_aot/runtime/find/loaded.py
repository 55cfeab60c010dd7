"""A bundle on a device: which images serve a variant, putting them on the device, and the statistics tables.

`load` returns one, with all files of the bundle in memory. Code reaches the device when a consumer or producer is made
or bound, or by `preload`; launches find it there and load nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from attnres_aot.bundle.manifest import Choice, ProducerRecord, VariantRecord
from attnres_aot.bundle.manifest_check import variant_of
from attnres_aot.bundle.reader import Bundle
from attnres_aot.config.advice import build_changed
from attnres_aot.errors import BundleError, DriverError, UsageError, clip
from attnres_aot.runtime.cuda.device import TorchDevice
from attnres_aot.runtime.cuda.fault import open_record
from attnres_aot.runtime.cuda.modules import LoadedKernel, load_kernel
from attnres_aot.runtime.find.miss import producer_miss, variant_miss
from attnres_aot.spec.params import KERNEL_PARAMS, Param
from attnres_aot.spec.variants import MAX_BLOCKS, PUBLISH, ConsumerKey, KeyLike, Producer, Variant, consumer_key

_SHOWN_PROBLEMS = 20


class LoadedBundle:
    """A bundle whose manifest has been read and checked, for one device. Safe to use from several threads.

    `bundle` holds path and manifest, `device` the device, `consumers` what `compile_consumer` has handed out, by
    variant and rows per mailbox slot.
    """

    plans = False
    """It makes the plans of launches itself, as `LibraryBundle` does."""
    __slots__ = ("_images", "_kernels", "_producers", "_ready", "_variants", "bundle", "consumers", "device")

    def __init__(self, bundle: Bundle, device: TorchDevice) -> None:
        _check_images(bundle)
        _check_parameters(bundle)
        self.bundle = bundle
        self.device = device
        self._variants = {record.name: record for record in bundle.manifest.variants}
        self._producers = {record.name: record for record in bundle.manifest.producers}
        self._images = {image.name: image for image in bundle.manifest.images}
        self._kernels: dict[str, LoadedKernel] = {}
        self.consumers: dict[tuple[Variant, int], Any] = {}
        self._ready: set[tuple[ConsumerKey, int, bool, bool]] = set()

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return (
            f"<bundle {manifest.name} for {manifest.arch.requested} at {self.bundle.path}, "
            f"{len(self._variants)} variants, on {self.device.device}>"
        )

    def __copy__(self) -> LoadedBundle:
        return self

    def __deepcopy__(self, memo: object) -> LoadedBundle:
        return self  # there is nothing in it to have twice

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            f"a loaded bundle cannot be pickled: it holds code of this process; send its path, {self.bundle.path}, and "
            "call attnres_aot.load(path) where it is to be used"
        )

    @property
    def hidden(self) -> int:
        """Row length H in elements."""
        return self.bundle.manifest.model.hidden

    def __contains__(self, variant: Variant) -> bool:
        return str(variant) in self._variants

    def holds_key(self, key: KeyLike) -> bool:
        """Tells whether the bundle holds any variant of a consumer."""
        wanted = consumer_key(key)
        return Variant(key=wanted) in self or any(variant_of(each).key == wanted for each in self._variants.values())

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
        """Returns the kernel that serves `rows` rows of a variant, loading it if needed; launches take `launchable`.

        Raises:
          VariantMissError: the bundle does not hold the variant.
          BundleError: the image is damaged.
          DriverError: the driver refused.
        """
        return self.load_image(_chosen(self.record(variant).choices, rows))

    def launchable(self, asked: Variant | Producer, rows: int) -> LoadedKernel:
        """Returns the kernel that serves `rows` rows. Loads nothing: making or binding has put it on the device.

        Raises:
          VariantMissError: the bundle does not hold the variant, or the producer.
          DriverError: it is not on the device.
        """
        held = self.record(asked) if isinstance(asked, Variant) else self.producer_record(asked)
        name = _chosen(held.choices, rows)
        found = self._kernels.get(name)
        if found is None:
            raise DriverError(
                f"image {name!r} of {self.bundle.path}, which {asked} needs, is not on {self.device.device}, and a "
                "launch loads nothing; make the object that launches it anew, or call attnres_aot.preload()"
            )
        return found

    def load_variants(
        self, key: ConsumerKey, *, slots: Iterable[int], aux: Iterable[bool], stats: Iterable[bool]
    ) -> None:
        """Puts on the device all code, for every row count, of those variants of a consumer that the bundle holds.

        With a mailbox also the code of the bundle's publisher: were it first loaded while a consumer waits for its
        rows, the load could wait for that consumer, and the rows would never come.

        Args:
          key: which consumer.
          slots: the sources, 0 or a number of mailbox slots.
          aux: with and without an aux copy.
          stats: with and without statistics.

        Raises:
          BundleError: an image is damaged.
          DriverError: the driver refused.
        """
        for asked in itertools.product((key,), slots, aux, stats):
            if asked not in self._ready:
                _, count, copied, precomputed = asked
                record = self._variants.get(str(Variant(key=key, slots=count, aux=copied, stats=precomputed)))
                publisher = self._producers.get(PUBLISH) if count else None
                for found in (record, publisher):
                    for choice in found.choices if found is not None else ():
                        self.load_image(choice.image)
                self._ready.add(asked)

    def producer_record(self, producer: Producer) -> ProducerRecord:
        """Returns the manifest's record of a producer.

        Raises:
          VariantMissError: the bundle does not hold it.
        """
        found = self._producers.get(str(producer))
        if found is None:
            raise producer_miss(self.bundle, producer)
        return found

    def load_producer(self, producer: Producer) -> None:
        """Puts on the device all code of a producer, for every row count; raises as `load_variants` does."""
        for choice in self.producer_record(producer).choices:
            self.load_image(choice.image)

    def load_image(self, name: str) -> LoadedKernel:
        """Puts one image on the device, or returns it if it is there already.

        Raises:
          BundleError: it is damaged, or not what the manifest says.
          DriverError: the driver refused, or this process was forked.
        """
        found = self._kernels.get(name)
        if found is None:
            found = self._kernels[name] = load_kernel(self.bundle, self._images[name], self.device)
        return found

    def preload(self, *, tp: int | None = None, dcp: int | None = None) -> int:
        """Puts on the device every image that a deployment needs, and what a mailbox's spin budget needs.

        Objects made later find it there. Making and binding them does the same for what they need.

        Args:
          tp: tensor-parallel size; None loads for every one in the bundle.
          dcp: decode-context-parallel size; None loads for every one in the bundle.

        Returns:
          How many images are loaded for it.

        Raises:
          UsageError: the bundle does not serve that deployment.
          BundleError: an image is damaged, or not what the manifest says.
          DriverError: the driver refused, or this process was forked.
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
        if self.bundle.manifest.mailbox.slots:
            open_record(self.device.ordinal)
        return len(names)

    def statistics_rows(self, tp: int, dcp: int, *, missing: str = "error") -> frozenset[int]:
        """Returns the row counts at which a deployment uses precomputed statistics.

        Args:
          tp: tensor-parallel size.
          dcp: decode-context-parallel size.
          missing: what a deployment that the bundle does not serve is: `"error"`, or `"empty"` for no row counts.

        Raises:
          UsageError: the bundle does not serve that deployment, or `missing` is something else.
        """
        return self._switched_on(self._table(tp, dcp, missing)[0], self.bundle.manifest.mailbox.capacity)

    def statistics_blocks(self, tp: int, dcp: int, *, missing: str = "error") -> frozenset[int]:
        """Returns the numbers of saved blocks at which a deployment uses precomputed statistics.

        Arguments and errors are those of `statistics_rows`.
        """
        return self._switched_on(self._table(tp, dcp, missing)[1], MAX_BLOCKS)

    def _switched_on(self, table: str, limit: int) -> frozenset[int]:
        """Returns the numbers that a table turns on; a table that names any beyond `limit` was not built."""
        from attnres_aot.spec.tables import scan_table

        parsed, problems = scan_table(table)
        spans = parsed.switched_on()
        if problems or any(not 1 <= first <= last <= limit for first, last in spans):
            raise BundleError(
                f"{self.bundle.path}: the statistics table {table!r:.80} does not turn on numbers from 1 to {limit}; "
                "the bundle is damaged: build or copy it again"
            )
        return frozenset(number for first, last in spans for number in range(first, last + 1))

    def _images_for(self, deployments: list[tuple[int, int]]) -> Iterator[str]:
        wanted = set(deployments)
        manifest = self.bundle.manifest
        records: tuple[VariantRecord | ProducerRecord, ...] = (*manifest.variants, *manifest.producers)
        for record in records:
            if not wanted.isdisjoint(record.deployments):
                yield from (choice.image for choice in record.choices)

    def _table(self, tp: int, dcp: int, missing: str) -> tuple[str, str]:
        if missing not in ("error", "empty"):
            raise UsageError(f"missing is {missing!r}; 'error' or 'empty' is wanted")
        for table in self.bundle.manifest.tables:
            if (table.tp, table.dcp) == (tp, dcp):
                return table.attn_stats, table.attn_stats_blocks
        if missing == "empty":
            return "", ""
        raise self._no_deployment(tp, dcp)

    def _no_deployment(self, tp: int | None, dcp: int | None) -> UsageError:
        manifest = self.bundle.manifest
        have = ", ".join(f"(tp {table.tp}, dcp {table.dcp})" for table in manifest.tables) or "none"
        asked = ", ".join(f"{name} {value}" for name, value in (("tp", tp), ("dcp", dcp)) if value is not None)
        return UsageError(
            f"the bundle at {self.bundle.path} serves no deployment with {asked}; it serves {have}\n"
            + "\n".join(
                [
                    "Next step: add it to the list 'deployments' of the configuration, and build again:",
                    *build_changed(manifest.arch.requested, manifest.name),
                ]
            )
        )


def _check_images(bundle: Bundle) -> None:
    """Refuses a bundle with damaged images now, and not when one is first needed."""
    if bundle.damage:
        raise BundleError("\n".join(itertools.islice(bundle.damage.values(), _SHOWN_PROBLEMS)))


def _check_parameters(bundle: Bundle) -> None:
    """Refuses a bundle whose kernels take other arguments, or in other places, than those that this loader fills."""
    for name, params in bundle.manifest.abis.items():
        known = KERNEL_PARAMS.get(name, ())
        if params != known:
            raise BundleError(
                f"{bundle.path}: parameter list {name!r:.80} is not what this attnres-aot fills: "
                f"{_difference(params, known)}; build it again, or install the attnres-aot release that built it"
            )


def _difference(found: tuple[Param, ...], known: tuple[Param, ...]) -> str:
    """Says how a parameter list differs from the one that this loader fills."""
    names = {f"{param.name} ({param.kind})" for param in found}
    wanted = {f"{param.name} ({param.kind})" for param in known}
    if names != wanted:
        unknown, missing = (", ".join(sorted(some)) or "none" for some in (names - wanted, wanted - names))
        return clip(f"unknown {unknown}; missing {missing}", 1000)
    at, here, there = next((i, a, b) for i, (a, b) in enumerate(zip(found, known, strict=True)) if a != b)
    return f"number {at} is {here.name!r} at offset {here.offset}, not {there.name!r} at offset {there.offset}"


def _chosen(choices: tuple[Choice, ...], rows: int) -> str:
    """Returns the name of the image for `rows` rows; a checked manifest's last choice takes any number."""
    return next(choice.image for choice in choices if choice.max_rows is None or rows <= choice.max_rows)
