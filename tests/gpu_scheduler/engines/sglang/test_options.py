from __future__ import annotations

import pytest

from gpu_scheduler.engines.sglang.errors import CommandError
from gpu_scheduler.engines.sglang.options import Options, one_line


def test_options_are_whole_numbers_by_name() -> None:
    options = Options.parse({"chunked_prefill_size": "64", "max_running_requests": "4"}, "cpu:0")
    assert (options.chunked_prefill_size, options.max_running_requests) == (64, 4)


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(CommandError, match="unknown engine option 'chunk'"):
        Options.parse({"chunk": "64"}, "cpu:0")


def test_a_value_that_is_no_number_is_refused_with_its_name() -> None:
    with pytest.raises(CommandError, match="reserve_low is a whole number, not 'two'"):
        Options.parse({"reserve_low": "two"}, "cpu:0")


def test_an_error_becomes_one_line() -> None:
    assert one_line(ValueError("a\n  b\n")) == "ValueError: a b"
    assert one_line(KeyError()) == "KeyError"
