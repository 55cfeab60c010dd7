"""How messages say which command builds a bundle of a configuration: the shipped ones, or somebody's own.

A bundle holds the name of its configuration but not the file, so a command for another one names it FILE, and says
where it comes from.
"""

from __future__ import annotations

from attnres_aot.spec.arch import BUILDABLE, choices


def build_command(arch: str, name: str | None = None, *, force: bool = False, flavour: str | None = None) -> str:
    """Says how to build a bundle of an unchanged configuration, to stand within a sentence.

    Args:
      arch: arch to build for; one that cannot be built for is answered with those that can.
      name: the configuration's name; None is the one that is built by default.
      force: replace what is there.
      flavour: the compiler's flavour to ask for; None leaves it out.
    """
    from attnres_aot.config.shipped import DEFAULT_NAME, names  # only errors need it

    if arch not in map(str, BUILDABLE):
        return f"a build for another arch ({arch} cannot be built for; choose from {choices()})"
    end = (f" --flavour {flavour}" if flavour else "") + (" --force" if force else "")
    if name in (None, DEFAULT_NAME):
        return f"`attnres-aot build --arch {arch}{end}`"
    origin = f", which `attnres-aot config {name}` prints" if name in names() else ""
    return f"`attnres-aot build --arch {arch} --config FILE{end}` (FILE: the configuration {name!r}{origin})"


def build_changed(arch: str, name: str) -> list[str]:
    """Returns the lines that say how to build a bundle again after a change of its configuration."""
    from attnres_aot.config.shipped import names

    lines = [f"  attnres-aot build --arch {arch} --config FILE"]
    if name in names():
        return [
            f"  attnres-aot config {name} > my_model.yaml",
            f"  attnres-aot build --arch {arch} --config my_model.yaml",
            "where the first is for the configuration as it ships: change my_model.yaml before the second",
        ]
    return [*lines, f"where FILE is the configuration {name!r}, which the bundle does not hold, after the change"]
