"""Puts measured tables into the text of a configuration file: its `deployments` section is written anew. Pure.

Everything outside that section and the comment right above it stays as it is, byte for byte, so that no YAML library is
needed where tuning runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attnres_aot.errors import UsageError
from attnres_aot.tune.decide import Decision

_SECTION = re.compile(r"deployments\s*:")
_TOP_LEVEL = re.compile(r"[^\s#-]")


def replace_deployments(
    text: str, decisions: Mapping[tuple[int, int], Decision], comment: Sequence[str], where: str
) -> str:
    """Returns the configuration with other tables.

    Args:
      text: the configuration file.
      decisions: the tables, by (tp, dcp).
      comment: lines for the comment above the section, without `#`.
      where: names the file in errors.

    Raises:
      UsageError: the file has no `deployments` section at the start of a line.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if _SECTION.match(line)), None)
    if start is None:
        raise UsageError(f"{where}: no line starts with 'deployments:'; give a whole configuration file with --config")
    end = next((i for i in range(start + 1, len(lines)) if _TOP_LEVEL.match(lines[i])), len(lines))
    while end > start + 1 and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1  # blank lines and comments there belong to what follows
    while start > 0 and lines[start - 1].startswith("#"):
        start -= 1
    section = [f"# {line}".rstrip() for line in comment]
    section += ["deployments:", *(line for pair, found in sorted(decisions.items()) for line in _item(pair, found))]
    return "\n".join([*lines[:start], *section, *lines[end:]]) + "\n"


def _item(pair: tuple[int, int], decision: Decision) -> list[str]:
    return [
        f"  - tp: {pair[0]}",
        f"    dcp: {pair[1]}",
        f'    attn_stats: "{decision.attn_stats}" # rows',
        f'    attn_stats_blocks: "{decision.attn_stats_blocks}" # saved blocks',
    ]
