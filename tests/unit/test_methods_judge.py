"""Judges of steps, against sums done by hand; `salvage` and `flawed` ask them."""

import pytest

from node.methods.step_judge import arithmetic


@pytest.mark.parametrize(
    ("text", "is_false"),
    [
        ("2+3=5", False),
        ("2+3=6", True),
        ("So 2 + 3 * 4 = 14, and 14 - 4 = 10.", False),
        ("So 2 + 3 * 4 = 20.", True),
        ("7 / 2 = 3.5", False),
        ("1/3 = 0.33", False),  # rounded to what is written
        ("1/3 = 0.34", True),
        ("3 + 4 = 7.4", True),
        ("7/0 = 7", True),
        ("$3 + $4 = $8", True),
        ("1,000 × 2 = 2,000", False),
        ("1,000 ÷ 2 = 400", True),
        ("2 - 5 + 4 = 1", False),
        # not judged
        ("(2 + 3) * 4 = 20", False),
        ("(1 + 2) + 3 = 6", False),
        ("x + 2 + 3 = 9", False),
        ("2 + 3 = 1 + 4", False),
        ("2 + 3 = 5x", False),
        ("2^3 + 1 = 9", False),
        ("3 = 4", False),
        ("2 + 3 = 512", True),
        ("+".join(["1"] * 12) + "=13", False),  # longer than it reads
        ("1+1=3" * 3, False),
        ("", False),
    ],
)
def test_one_step(text: str, is_false: bool) -> None:
    assert arithmetic([text]) == (0 if is_false else None)


def test_the_first_of_several() -> None:
    assert arithmetic(["1+1=2\n\n", "so\n\n", "2+2=5\n\n", "5+5=11"]) == 2
    assert arithmetic([]) is None


def test_a_hostile_text_is_read_in_bounded_time() -> None:
    for part in ("1+", "1,111", "9" * 15 + " + ", "$1 = "):
        assert arithmetic([part * (2**16 // len(part))]) is None
