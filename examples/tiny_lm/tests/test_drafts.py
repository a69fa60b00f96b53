from hypothesis import given
from hypothesis import strategies as st

from attn_tiny_lm.data import SEPARATOR
from attn_tiny_lm.drafts import draft_row, lookup


def test_the_longest_match_wins_and_then_the_latest():
    assert bytes(lookup(b"key=1; other_key=2; x_key=3; other_key=", 3)) == b"2; "
    assert bytes(lookup(b"abc1-abc2+abc", 2)) == b"2+"


def test_a_match_near_the_end_repeats_itself():
    assert bytes(lookup(b"-abababab", 5)) == b"ababa"
    assert bytes(lookup(b"xxxx", 3)) == b"xxx"


def test_no_match_gives_separators():
    assert lookup(b"abcdefgh", 4) == []
    assert lookup(b"", 4) == []
    assert draft_row(b"abcdefgh", 4) == [SEPARATOR] * 4


@given(st.binary(max_size=60), st.integers(1, 9))
def test_a_row_has_the_asked_length_and_follows_an_earlier_place(history, count):
    row = draft_row(history, count)
    assert len(row) == count
    guess = lookup(history, count)
    if guess:
        continued = bytes(history) + bytes(guess)
        suffix = history[-3:]
        places = [i + 3 for i in range(len(history) - 3) if continued[i : i + 3] == suffix]
        assert any(continued[i : i + count] == bytes(guess) for i in places)
    else:
        assert history[-3:] not in history[:-1] or len(history) < 4
