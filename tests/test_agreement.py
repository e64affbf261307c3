"""The rule by which tokens agree, on made-up numbers."""

import pytest
import torch
from agreement import Reference, compare, logit_error

EXPECTED = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1], [2, 2, 2], [3, 3, 3]]
SURE, UNSURE = 1.0, 0.1


def reference(error: float = 0.05, unsure: tuple[tuple[int, int], ...] = ()) -> Reference:
    gaps = [[UNSURE if (row, step) in unsure else SURE for step in range(3)] for row in range(6)]
    return Reference(EXPECTED, gaps, error)


def with_row(index: int, row: list[int]) -> list[list[int]]:
    return [*EXPECTED[:index], row, *EXPECTED[index + 1 :]]


def test_equal_rows_agree():
    result = compare(reference(), EXPECTED)
    assert result.agrees
    assert result.num_equal == 6
    assert result.tie_share == 0


def test_rows_may_part_at_a_tie_and_the_rest_is_not_compared():
    result = compare(reference(unsure=((1, 1),)), with_row(1, [4, 0, 0]))
    assert result.agrees
    assert result.ties == [(1, 1, UNSURE)]
    assert "17%" in str(result)


def test_rows_may_not_part_where_the_reference_is_sure():
    result = compare(reference(unsure=((1, 1),)), with_row(1, [0, 5, 6]))
    assert not result.agrees
    assert result.mismatches == [(1, 0, SURE)]
    assert "row 1 differs at step 0" in str(result)


def test_equal_tokens_at_a_tie_are_compared_further():
    result = compare(reference(unsure=((1, 0),)), with_row(1, [4, 5, 0]))
    assert not result.agrees


def test_fp32_knows_no_ties():
    result = compare(reference(error=0.0, unsure=((1, 1),)), with_row(1, [4, 0, 0]))
    assert not result.agrees


@pytest.mark.parametrize(("gap", "agrees"), [(0.199, True), (0.2, False)])
def test_tie_is_a_gap_below_four_errors(gap, agrees):
    exact = Reference([[1]] * 6, [[gap]] * 6, 0.05)
    assert compare(exact, [[2]] + [[1]] * 5).agrees is agrees


def test_many_ties_say_nothing():
    tokens = with_row(1, [4, 0, 0])
    tokens[2] = [7, 0, 0]
    result = compare(reference(unsure=((1, 1), (2, 1))), tokens)
    assert not result.mismatches
    assert result.tie_share == pytest.approx(1 / 3)
    assert not result.agrees


@pytest.mark.parametrize("row", [[4, 5], [4, 5, 6, 7], []])
def test_another_length_is_a_mismatch(row):
    result = compare(reference(unsure=((1, 0), (1, 1), (1, 2))), with_row(1, row))
    assert not result.agrees


def test_rows_must_be_the_same():
    with pytest.raises(ValueError, match="5 rows given, the reference has 6"):
        compare(reference(), EXPECTED[1:])


def test_nothing_compared_is_no_agreement():
    assert not compare(Reference([], []), []).agrees


def test_logit_error_is_the_worst_step():
    exact = [torch.zeros(2, 4), torch.zeros(1, 4)]
    rounded = [torch.tensor([[0.0, 0, 0, 0], [2.0, 0, 0, 0]]), torch.full((1, 4), 0.5)]
    assert logit_error(exact, rounded) == pytest.approx(1.0)
