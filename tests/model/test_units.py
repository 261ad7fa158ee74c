"""What a person writes becomes SI, and SI becomes what a person reads."""

from __future__ import annotations

import pytest

from redline.model.errors import SpecError
from redline.model.units import (
    THIN_SPACE,
    format_bytes,
    format_ratio,
    format_seconds,
    format_share,
    parse_bytes,
    parse_seconds,
    significant,
)


def spaced(text: str) -> str:
    """Thin spaces part thousands; tests are read with ordinary ones."""
    return text.replace(THIN_SPACE, " ")


class TestReading:
    @pytest.mark.parametrize(
        ("text", "count"),
        [
            ("1000000", 10**6),
            ("0", 0),
            ("14GB", 14 * 10**9),
            ("14 GB", 14 * 10**9),
            ("16GiB", 16 * 2**30),
            ("1.5kib", 1536),
            (".5 MiB", 2**19),
            ("2e3 kB", 2 * 10**6),
            (" 7 tb ", 7 * 10**12),
            ("0.1B", 0),
        ],
    )
    def test_sizes_know_ten_from_two(self, text: str, count: int) -> None:
        found = parse_bytes(text)
        assert found == count
        assert isinstance(found, int)

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [("3", 3.0), ("20ms", 0.02), ("10m", 600.0), ("2 min", 120.0), ("1.5h", 5400.0), ("5us", 5e-6), ("5µs", 5e-6)],
    )
    def test_times_are_seconds_unless_they_say_otherwise(self, text: str, seconds: float) -> None:
        assert parse_seconds(text) == pytest.approx(seconds)

    @pytest.mark.parametrize("text", ["", "GB", "14 apples", "-3GB", "1 2", "3s", "1e999", "nan", "0x10", "5."])
    def test_what_is_no_size_is_refused_with_an_example(self, text: str) -> None:
        with pytest.raises(SpecError, match="expected a size such as 16GiB or 14GB, got") as error:
            parse_bytes(text)
        assert repr(text) in str(error.value)

    @pytest.mark.parametrize("text", ["", "ms", "soon", "-3s", "3GB", "1e999s", "1:30"])
    def test_what_is_no_time_is_refused_with_an_example(self, text: str) -> None:
        with pytest.raises(SpecError, match="expected a time such as 20ms, 3s or 10m, got"):
            parse_seconds(text)


class TestSignificantDigits:
    @pytest.mark.parametrize(
        ("value", "digits", "text"),
        [
            (0, 3, "0"),
            (1.23456, 3, "1.23"),
            (0.00123456, 3, "0.00123"),
            (12.3456, 3, "12.3"),
            (123.456, 3, "123"),
            # Before the point nothing is hidden: a count stays a count.
            (12345.6, 3, "12 346"),
            (1234567, 2, "1 234 567"),
            (-0.5, 2, "-0.50"),
            (5, 1, "5"),
            # Rounding up to the next power of ten is no reason for a digit more.
            (9.996, 3, "10.0"),
            (99.96, 3, "100"),
            (0.09996, 3, "0.100"),
            (999.6, 3, "1 000"),
            (float("inf"), 3, "inf"),
            (float("nan"), 3, "nan"),
        ],
    )
    def test_are_as_many_as_asked_for(self, value: float, digits: int, text: str) -> None:
        assert spaced(significant(value, digits)) == text


class TestWriting:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (None, "n/a"),
            (12.345, "12.3 s"),
            (1.0, "1.00 s"),
            (0.0123, "12.3 ms"),
            (0.001, "1.00 ms"),
            (4.2e-6, "4.20 µs"),
            (4.2e-9, "0.00420 µs"),
            (0.0, "0 µs"),
            (-0.02, "-20.0 ms"),
            (7200.0, "7 200 s"),
        ],
    )
    def test_times(self, seconds: float | None, text: str) -> None:
        assert spaced(format_seconds(seconds)) == text

    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (None, "n/a"),
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536 * 2**10, "1.50 MiB"),
            (80 * 2**30, "80.0 GiB"),
            (2**41, "2 048 GiB"),
        ],
    )
    def test_sizes(self, count: float | None, text: str) -> None:
        assert spaced(format_bytes(count)) == text

    @pytest.mark.parametrize(
        ("share", "text"),
        [(None, "n/a"), (0.0, "0 %"), (0.0012, "0.12 %"), (0.061, "6.1 %"), (0.5, "50 %"), (1.234, "123 %")],
    )
    def test_shares(self, share: float | None, text: str) -> None:
        assert spaced(format_share(share)) == text

    def test_what_is_written_is_read_back(self) -> None:
        assert parse_bytes(format_bytes(3 * 2**30)) == 3 * 2**30
        assert parse_seconds(format_seconds(0.0125)) == pytest.approx(0.0125)
        assert parse_seconds(format_seconds(4.2e-6)) == pytest.approx(4.2e-6)


@pytest.mark.parametrize(
    ("ratio", "told"), [(0.82, "0.82×"), (2.0, "2.00×"), (0.00371, "0.0037×"), (0.0, "0.00×"), (0.099, "0.10×")]
)
def test_a_small_ratio_is_no_zero(ratio: float, told: str) -> None:
    assert format_ratio(ratio) == told
