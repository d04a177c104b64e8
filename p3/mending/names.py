"""Parameters' names compared between ranks.  Pure.

MXNet numbers layers as they are made, so a rank that makes one layer more calls the others
dense9 and dense10 where its peers call them dense8 and dense9.
"""

from __future__ import annotations

import re
from typing import List, Sequence, Tuple

from p3.errors import UsageError

_NUMBER = re.compile(r"([0-9]+)")


def natural(name: str) -> List[Tuple[int, str]]:
    """A sort key by which dense9 comes before dense10."""
    parts = _NUMBER.split(name)
    return [(int(part), "") if place % 2 else (0, part) for place, part in enumerate(parts)]


def align(names: Sequence[str], first: Sequence[str]) -> List[int]:
    """Positions in ``names`` of the parameters that rank 0 calls ``first``, in its order.

    Names in text order are Trainer's own sorting; then parameters are matched by the order in
    which their layers were made.  Otherwise the script has given an order, which counts.
    Raises ``UsageError`` if the two cannot be the same parameters.
    """
    _refuse_other_number(names, first)
    positions = list(range(len(names)))
    if list(names) == list(first) or not (_is_sorted(names) and _is_sorted(first)):
        return positions
    mine = sorted(positions, key=lambda place: natural(names[place]))
    theirs = sorted(positions, key=lambda place: natural(first[place]))
    ours_bare, theirs_bare = _bare([names[p] for p in mine]), _bare([first[p] for p in theirs])
    for place, other, one, another in zip(mine, theirs, ours_bare, theirs_bare):
        if one != another:
            raise UsageError(
                f"parameter {names[place]!r} seems to be what rank 0 calls {first[other]!r}:"
                " build the same layers in the same order on every rank, or give them names"
            )
        positions[other] = place
    return positions


def refuse_others(names: Sequence[str], first: Sequence[str]) -> None:
    """Raise ``UsageError`` unless ``names`` are those of ``first``, in any order."""
    _refuse_other_number(names, first)
    for one, another in zip(sorted(names), sorted(first)):
        if one != another:
            raise UsageError(
                f"parameter {min(set(names) - set(first))!r} of this rank is none of rank 0's,"
                f" which has {min(set(first) - set(names))!r}: build the same layers in the same"
                " order on every rank, or give them names"
            )


def _refuse_other_number(names: Sequence[str], first: Sequence[str]) -> None:
    if len(names) != len(first):
        more, fewer = (names, first) if len(names) > len(first) else (first, names)
        extra = [name for name in more if name not in fewer]
        raise UsageError(
            f"this rank trains {len(names)} parameters and rank 0 {len(first)}: only one of them"
            f" has {', '.join(map(repr, extra[:3]))}{', ...' if len(extra) > 3 else ''}"
        )


def _is_sorted(names: Sequence[str]) -> bool:
    return all(one <= other for one, other in zip(names, names[1:]))


def _bare(names: Sequence[str]) -> List[str]:
    """The names without numbers and without the prefix that all have."""
    texts = [_NUMBER.sub("#", name) for name in names]
    first, last = min(texts), max(texts)
    common = 0
    while common < len(first) and first[common] == last[common]:
        common += 1
    return [text[common:] for text in texts]
