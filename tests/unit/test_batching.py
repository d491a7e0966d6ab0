"""Grouping, splitting and error handling of batches, tried on plain numbers."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backend_models.engine.batching import attempt, checked_sizes, in_groups


@given(
    items=st.lists(st.tuples(st.integers(1, 4), st.integers()) | st.just(None), max_size=40),
    sizes=st.sets(st.integers(2, 9)),
)
def test_every_item_gets_its_own_result_and_batches_are_of_one_length(
    items: list[tuple[int, int] | None], sizes: set[int]
) -> None:
    batches: list[Sequence[tuple[int, int]]] = []

    def compute(batch: Sequence[tuple[int, int]]) -> list[int]:
        batches.append(batch)
        return [number + 1 for _, number in batch]

    broken = ValueError("broken")
    ordered = checked_sizes([1, *sizes])
    results = in_groups([item or broken for item in items], lambda item: item[0], compute, ordered)
    assert results == [item[1] + 1 if item else broken for item in items]
    assert all(len({length for length, _ in batch}) == 1 for batch in batches)
    assert all(len(batch) in ordered for batch in batches)
    for length in {item[0] for item in items if item}:
        together = [len(batch) for batch in batches if batch[0][0] == length]
        # Largest first, and no more of a smaller size than a larger one would have replaced.
        assert together == sorted(together, reverse=True)
        assert together.count(1) < min(sizes, default=10**9)


def test_results_may_be_errors_of_single_items() -> None:
    broken = ArithmeticError()
    assert in_groups([1, 2, 3], lambda _: 0, lambda batch: [broken, *batch[1:]], (2, 1)) == [
        broken,
        2,
        broken,
    ]


@pytest.mark.parametrize("sizes", [[], [2, 4], [0, 1], [-1, 1]])
def test_sizes_must_reach_down_to_one(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="batch sizes"):
        checked_sizes(sizes)


def test_only_errors_of_the_item_are_kept() -> None:
    assert attempt(int, "7") == 7
    assert isinstance(attempt(int, "seven"), ValueError)
    assert isinstance(attempt(int.to_bytes, 300, 1, "little"), OverflowError)
    with pytest.raises(ZeroDivisionError):
        attempt(divmod, 1, 0)
