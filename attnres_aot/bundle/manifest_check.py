"""What a well-formed manifest must also be: names that are safe and unique, references that resolve, sane numbers.

`manifest.load_manifest` checks types only. These checks need nothing but the manifest, so readers run them on every
bundle before they trust a file name or a launch fact in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from attnres_aot.abi import KIND_BYTES, Param
from attnres_aot.arch import parse_arch
from attnres_aot.errors import UsageError
from attnres_aot.manifest import MANIFEST_NAME, Choice, ImageRecord, Manifest, ProducerRecord, VariantRecord, to_json
from attnres_aot.variants import ConsumerKey, Producer, Variant, variant_name

MAX_NAME_CHARS = 128
"""Longest file, image or bundle name."""
MAX_IMAGE_BYTES = 64 << 20
"""Largest image file that a reader accepts."""
MAX_CLUSTER_CTAS = 16
"""Largest cluster that any GPU launches."""
MAX_BLOCK_THREADS = 1024
"""Largest CTA that any GPU launches."""

_HEX = frozenset("0123456789abcdef")
_DIGEST_CHARS = 64
_PUNCTUATION = "._+-"
_SAFE = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" + _PUNCTUATION)


def name_problem(name: str) -> str | None:
    """Says why `name` cannot name a file of a bundle, or None when it can.

    A good name is one path component of letters, digits and `._+-` that does not start with a dot, so it can neither
    leave the folder nor hide in it.
    """
    if len(name) > MAX_NAME_CHARS:
        return f"{name[:40]!r}... is {len(name)} characters long; at most {MAX_NAME_CHARS} are allowed"
    if not name or name[0] in _PUNCTUATION or not _SAFE.issuperset(name):
        return f"{name!r} is not a safe file name (letters, digits and ._+- only, no leading dot)"
    return None


def manifest_problems(manifest: Manifest) -> list[str]:
    """Lists everything that makes a well-typed manifest unusable, in manifest order; empty when it is fine."""
    problems = [*_arch_problems(manifest)]
    if (problem := name_problem(manifest.name)) is not None:
        problems.append(f"name: {problem}")
    for name, params in manifest.abis.items():
        problems.extend(f"abis.{name}: {problem}" for problem in _abi_problems(params))
    for what, names in (
        ("image name", (image.name for image in manifest.images)),
        ("image file", (image.file for image in manifest.images)),
        ("variant name", (variant.name for variant in manifest.variants)),
        ("producer name", (producer.name for producer in manifest.producers)),
        ("table", (f"tp {table.tp}, dcp {table.dcp}" for table in manifest.tables)),
    ):
        problems.extend(f"{what} {name!r} occurs more than once" for name in _repeated(names))
    for image in manifest.images:
        problems.extend(f"image {image.name!r:.80}: {problem}" for problem in _image_problems(image, manifest))
    kernels = {image.name: image.kernel for image in manifest.images}
    for variant in manifest.variants:
        problems.extend(f"variant {variant.name!r:.80}: {problem}" for problem in _variant_problems(variant, kernels))
    for producer in manifest.producers:
        problems.extend(
            f"producer {producer.name!r:.80}: {problem}" for problem in _producer_problems(producer, kernels)
        )
    return problems


def _arch_problems(manifest: Manifest) -> Iterator[str]:
    with_problem = ((field, _arch_problem(name)) for field, name in to_json(manifest.arch).items())
    yield from (f"arch.{field}: {problem}" for field, problem in with_problem if problem)


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


def _image_problems(image: ImageRecord, manifest: Manifest) -> Iterator[str]:
    for field, name in (("name", image.name), ("file", image.file)):
        if (problem := name_problem(name)) is not None:
            yield f"{field} {problem}"
    if image.file == MANIFEST_NAME:
        yield f"file {image.file!r} is the manifest's own name"
    for field, digest in (("sha256", image.sha256), ("build_key", image.build_key)):
        if len(digest) != _DIGEST_CHARS or not _HEX.issuperset(digest):
            yield f"{field} {digest!r:.80} is not a lower-case sha256 digest"
    if image.abi not in manifest.abis:
        yield f"abi {image.abi!r} is not one of {', '.join(manifest.abis) or 'none'}"
    for field, value, low, high in (
        ("size", image.size, 1, MAX_IMAGE_BYTES),
        ("cluster", image.cluster, 1, MAX_CLUSTER_CTAS),
        ("rows_per_cluster", image.rows_per_cluster, 1, 1 << 16),
        ("block_threads", image.block_threads, 1, MAX_BLOCK_THREADS),
        ("smem_static_bytes", image.smem_static_bytes, 0, 1 << 20),
        ("smem_dynamic_bytes", image.smem_dynamic_bytes, 0, 1 << 20),
        ("registers", image.registers, 0, 255),
        ("stack_bytes", image.stack_bytes, 0, 1 << 20),
        ("spill_bytes", image.spill_bytes, 0, 1 << 20),
        ("critical_instructions", image.critical_instructions, 0, MAX_IMAGE_BYTES),
    ):
        if not low <= value <= high:
            yield f"{field} is {value}; {low} to {high} is possible"


def _variant_problems(variant: VariantRecord, kernels: Mapping[str, str]) -> Iterator[str]:
    name = variant_name(
        variant.nb, variant.has_delta, variant.write, variant.final, variant.slots, variant.aux, variant.stats
    )
    if name != variant.name:
        yield f"its fields describe {name!r}"
    yield from _choice_problems(variant.choices, "consumer", kernels)


def _producer_problems(producer: ProducerRecord, kernels: Mapping[str, str]) -> Iterator[str]:
    if str(producer_of(producer)) != producer.name:
        yield f"its fields describe {str(producer_of(producer))!r}"
    yield from _choice_problems(producer.choices, producer.kernel, kernels)


def _choice_problems(choices: tuple[Choice, ...], kernel: str, kernels: Mapping[str, str]) -> Iterator[str]:
    if len(choices) == 1 and choices[0].max_rows is None and kernels.get(choices[0].image) == kernel:
        return  # as most are
    for choice in choices:
        if choice.image not in kernels:
            yield f"image {choice.image!r} is not in the bundle"
        elif kernels[choice.image] != kernel:
            yield f"image {choice.image!r} is of kernel {kernels[choice.image]!r}, not {kernel!r}"
    rows = [choice.max_rows for choice in choices]
    bounds = [bound for bound in rows if bound is not None]
    if not rows or rows[-1] is not None or len(bounds) != len(rows) - 1 or bounds != sorted(set(bounds)):
        yield f"its row limits {rows} are not ascending with an open end"


def variant_of(record: VariantRecord) -> Variant:
    """Returns the variant that a record's fields describe."""
    key = ConsumerKey(nb=record.nb, has_delta=record.has_delta, write=record.write, final=record.final)
    return Variant(key=key, slots=record.slots, aux=record.aux, stats=record.stats)


def producer_of(record: ProducerRecord) -> Producer:
    """Returns the producer that a record's fields describe."""
    return Producer(kernel=record.kernel, nb=record.nb)
