"""Sentences that may contain untrusted text."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.sandbox.frames import MAX_SENTENCE_CHARS, clean_sentence


@given(st.text(max_size=1000))
def test_a_sentence_is_printable_and_short_and_cleaned_once(text):
    clean = clean_sentence(text)
    assert clean.isascii() and clean.isprintable()
    assert len(clean) <= MAX_SENTENCE_CHARS + 3
    assert clean_sentence(clean)[:MAX_SENTENCE_CHARS] == clean[:MAX_SENTENCE_CHARS]
