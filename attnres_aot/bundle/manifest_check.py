"""What a well-formed manifest must also be before a reader believes it.

`manifest.load_manifest` checks bytes and types. These checks need nothing but the manifest: names are safe and unique,
references resolve, numbers are sane, and what follows from a name (an image's shape, its file and symbol; which images
may serve a variant) is what the name says. They are quick, so the loader makes them at every load; what else the parts
of a manifest promise each other is in `audit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from attnres_aot.bundle.image_check import ImageFit, fit_of, image_problems, spec_of
from attnres_aot.bundle.limits import size_problems
from attnres_aot.bundle.manifest import Choice, LibraryRecord, Manifest, ProducerRecord, VariantRecord
from attnres_aot.bundle.names import is_digest, name_problem
from attnres_aot.errors import UsageError
from attnres_aot.spec.arch import parse_arch
from attnres_aot.spec.params import KIND_BYTES, Param
from attnres_aot.spec.toolkits import is_flavour_name, parse_cuda
from attnres_aot.spec.variants import (
    MAX_BLOCKS,
    MAX_SLOTS,
    ConsumerKey,
    Producer,
    Variant,
    parse_producer,
    variant_name,
)

MAX_PROBLEMS = 100
"""Most problems that are listed; a manifest may be wrong in more ways than anybody reads."""


def manifest_problems(manifest: Manifest) -> list[str]:
    """Lists what makes a well-typed manifest unusable, in manifest order, up to MAX_PROBLEMS; empty when it is fine."""
    return list(islice(size_problems(manifest), MAX_PROBLEMS)) or list(islice(_problems(manifest), MAX_PROBLEMS))


def _problems(manifest: Manifest) -> Iterator[str]:
    yield from _header_problems(manifest)
    yield from _toolkit_problems(manifest)
    for name, params in manifest.abis.items():
        yield from (f"abis.{name}: {problem}" for problem in _abi_problems(params))
    yield from _name_problems(manifest)
    fits: dict[str, ImageFit | None] = {}
    for image in manifest.images:
        spec = spec_of(image.name)
        fits[image.name] = None if spec is None else fit_of(spec)
        yield from (f"image {image.name!r:.80}: {problem}" for problem in image_problems(image, spec, manifest))
    for variant in manifest.variants:
        yield from (f"variant {variant.name!r:.80}: {problem}" for problem in _variant_problems(variant, fits))
    for producer in manifest.producers:
        yield from (f"producer {producer.name!r:.80}: {problem}" for problem in _producer_problems(producer, fits))
    for library in manifest.libraries:
        yield from (f"library {library.file!r:.80}: {problem}" for problem in _library_problems(library))


def _library_problems(library: LibraryRecord) -> Iterator[str]:
    if (problem := name_problem(library.file)) is not None:
        yield f"file {problem}"
    if not library.file.endswith(f".{library.host}.so"):
        yield f"its name does not end in the host and `.so`: {library.host!r:.40}"
    if library.size < 1:
        yield f"size is {library.size}; 1 or more is possible"
    for field, digest in (("sha256", library.sha256), ("build_key", library.build_key)):
        if not is_digest(digest):
            yield f"{field} {digest!r:.80} is not a lower-case sha256 digest"


def _name_problems(manifest: Manifest) -> Iterator[str]:
    for what, names in (
        ("image name", (image.name for image in manifest.images)),
        ("image file", (image.file for image in manifest.images)),
        ("library file", (library.file for library in manifest.libraries)),
        ("variant name", (variant.name for variant in manifest.variants)),
        ("producer name", (producer.name for producer in manifest.producers)),
        ("table", (f"tp {table.tp}, dcp {table.dcp}" for table in manifest.tables)),
    ):
        for name in _repeated(names):
            yield f"{what} {name!r:.200} occurs more than once"


def _header_problems(manifest: Manifest) -> Iterator[str]:
    arch = manifest.arch
    for field, name in (("requested", arch.requested), ("proven", arch.proven)):
        if (problem := _arch_problem(name)) is not None:
            yield f"arch.{field}: {problem}"
    if arch.requested != arch.proven:
        yield f"arch: {arch.requested!r:.40} was requested, but {arch.proven!r:.40} is proven"
    if (problem := name_problem(manifest.name)) is not None:
        yield f"name: {problem}"
    if not is_digest(manifest.sources_sha256):
        yield f"sources_sha256 {manifest.sources_sha256!r:.80} is not a lower-case sha256 digest"


def _toolkit_problems(manifest: Manifest) -> Iterator[str]:
    if not manifest.toolchain:
        yield "toolchain: empty; a bundle says what compiled it"
    if not is_flavour_name(manifest.flavour):
        yield f"flavour {manifest.flavour!r:.80} is not `cu` and a CUDA major version"
    if parse_cuda(manifest.oldest_driver) is None:
        yield f"oldest_driver {manifest.oldest_driver!r:.80} is not a CUDA version such as '12.8'"


def _arch_problem(name: str) -> str | None:
    try:
        parse_arch(name)
    except UsageError as error:
        return str(error)
    return None


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _abi_problems(params: tuple[Param, ...]) -> Iterator[str]:
    end = 0
    for param in params:
        if param.kind not in KIND_BYTES:
            yield f"{param.name!r}: kind {param.kind!r} is not one of {', '.join(KIND_BYTES)}"
        elif param.size != KIND_BYTES[param.kind]:
            yield f"{param.name!r}: a {param.kind} has {KIND_BYTES[param.kind]} bytes, not {param.size}"
        elif param.offset < end or param.offset % param.size:
            yield f"{param.name!r}: offset {param.offset} overlaps the parameter before it or is not aligned"
        end = max(end, param.offset + param.size)
    for name in _repeated(param.name for param in params):
        yield f"parameter {name!r} occurs more than once"


def _variant_problems(variant: VariantRecord, fits: Mapping[str, ImageFit | None]) -> Iterator[str]:
    name = variant_name(
        variant.nb, variant.has_delta, variant.write, variant.final, variant.slots, variant.aux, variant.stats
    )
    if name != variant.name:
        yield f"its fields describe {name!r}"
    if not 0 <= variant.nb <= MAX_BLOCKS:
        yield f"nb is {variant.nb}; 0 to {MAX_BLOCKS} is possible"
    if variant.write not in (None, variant.nb):
        yield f"write is {variant.write}; a block is only ever written at nb, which is {variant.nb}"
    if not 0 <= variant.slots <= MAX_SLOTS:
        yield f"slots is {variant.slots}; 0 to {MAX_SLOTS} is possible"
    if variant.nb == 0 and (variant.slots or variant.stats):
        yield "a consumer of no saved blocks has no mailbox and no statistics"
    fit = ("consumer", None if variant.stats else variant.nb, variant.has_delta, variant.final, variant.slots)
    yield from _choice_problems(variant.choices, fit, fits)


def _producer_problems(producer: ProducerRecord, fits: Mapping[str, ImageFit | None]) -> Iterator[str]:
    try:
        parse_producer(producer.name)
    except UsageError as error:
        yield str(error)
    if str(producer_of(producer)) != producer.name:
        yield f"its fields describe {str(producer_of(producer))!r:.80}"
    yield from _choice_problems(producer.choices, (producer.kernel, producer.nb, False, False, 0), fits)


def _choice_problems(
    choices: tuple[Choice, ...], wanted: ImageFit, fits: Mapping[str, ImageFit | None]
) -> Iterator[str]:
    for choice in choices:
        if choice.image not in fits:
            yield f"image {choice.image!r:.80} is not in the bundle"
        elif (fit := fits[choice.image]) is not None and fit != wanted:
            if fit[0] != wanted[0]:
                yield f"image {choice.image!r:.80} is of kernel {fit[0]!r}, not {wanted[0]!r:.40}"
            else:
                yield f"image {choice.image!r:.80} is code for something else"
    rows = [choice.max_rows for choice in choices]
    bounds = [0, *(bound for bound in rows if bound is not None)]
    if not rows or rows[-1] is not None or len(bounds) != len(rows) or bounds != sorted(set(bounds)):
        yield f"its row limits {rows} are not ascending with an open end"


def variant_of(record: VariantRecord) -> Variant:
    """Returns the variant that a record's fields describe."""
    key = ConsumerKey(nb=record.nb, has_delta=record.has_delta, write=record.write, final=record.final)
    return Variant(key=key, slots=record.slots, aux=record.aux, stats=record.stats)


def producer_of(record: ProducerRecord) -> Producer:
    """Returns the producer that a record's fields describe."""
    return Producer(kernel=record.kernel, nb=record.nb)
