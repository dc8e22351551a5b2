import pytest

from shoal.util.units import check_run


@pytest.mark.parametrize("text", ["", "-a", "A", "a_b", "a" * 65, "a\n", "../a", "a b"])
def test_names_of_runs_are_plain(text: str) -> None:
    with pytest.raises(ValueError, match="invalid run name"):
        check_run(text)


@pytest.mark.parametrize("text", ["a", "0", "a-0", "a" * 64])
def test_a_plain_name_is_given_back(text: str) -> None:
    assert check_run(text) == text
