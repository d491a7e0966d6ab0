"""Many items in few batches: equal lengths together, nothing padded, errors in their items' places."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def checked_sizes(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes, largest first.

    Raises:
        ValueError: 1 is not among them, or something below 1 is.
    """
    ordered = tuple(sorted(set(batch_sizes), reverse=True))
    if not ordered or ordered[-1] != 1:
        raise ValueError(f"batch sizes must be positive and hold 1, not {list(batch_sizes)}")
    return ordered


def attempt(prepare: Callable[..., Item], *args: Any) -> Item | Exception:
    """What `prepare` returns, or the ValueError or OverflowError that says what is wrong with the item."""
    try:
        return prepare(*args)
    except (ValueError, OverflowError) as error:
        return error


def in_groups(
    items: Sequence[Item | Exception],
    length: Callable[[Item], int],
    compute: Callable[[Sequence[Item]], Sequence[Result | Exception]],
    batch_sizes: Sequence[int],
) -> list[Result | Exception]:
    """Compute items of equal length together; exceptions among the items stay in their places."""
    places: dict[int, list[int]] = {}
    for place, item in enumerate(items):
        if not isinstance(item, Exception):
            places.setdefault(length(item), []).append(place)
    results: dict[int, Result | Exception] = {}
    for group in places.values():
        for batch in _batches(group, batch_sizes):
            results.update(zip(batch, compute([items[place] for place in batch]), strict=True))
    return [results.get(place, item) for place, item in enumerate(items)]


def _batches(group: Sequence[int], batch_sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    start = 0
    while start < len(group):
        size = next(size for size in batch_sizes if size <= len(group) - start)
        yield group[start : start + size]
        start += size
