"""Find the known name that is closest to a misspelt name."""

from collections.abc import Iterable

__all__ = ["abbreviated", "distance", "nearest"]


def distance(a: str, b: str) -> int:
    """Edits between two words: insert, delete, replace, or swap two neighbours (optimal string alignment)."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[len(b)]


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """The names with the fewest edits to ``word``, sorted; none if even the nearest name needs too many edits.

    Case is ignored, and ``-`` equals ``_``. More edits than a third of the letters are too many, but one edit is always
    allowed, so that short names are found.
    """

    def plain(name: str) -> str:
        return name.lower().replace("-", "_")

    best, hits = max(1, len(word) // 3), []
    target = plain(word)
    for name in dict.fromkeys(names):
        # Words whose lengths differ by more than the edits allowed need not be compared.
        if abs(len(name) - len(word)) > best:
            continue
        edits = distance(target, plain(name))
        if edits < best:
            best, hits = edits, [name]
        elif edits == best:
            hits.append(name)
    return sorted(hits)


def abbreviated(word: str, names: Iterable[str]) -> list[str]:
    """The names that ``word`` abbreviates, sorted. Each part of ``word`` is the beginning of a part of the name, in the
    same order ("grad_accum_steps", "batch_size").

    Underscores and dashes divide a word into parts. A word of one part has to be the beginning of the name, and to have
    at least four letters.
    """
    parts = [part for part in word.lower().replace("-", "_").split("_") if part]
    if not parts or len(parts) == 1 and len(parts[0]) < 4:
        return []

    def shortens(name: str) -> bool:
        if len(parts) == 1:
            return name.startswith(parts[0])
        rest = iter(name.split("_"))
        return all(any(other.startswith(part) for other in rest) for part in parts)

    return sorted(name for name in dict.fromkeys(names) if shortens(name))
