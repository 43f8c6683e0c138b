"""The exchange on a stream of its own: the layer waits where it uses results, and nowhere later."""

import pytest
from test_balance_slow import run


def test_late_results_are_waited_for():
    run("late_results", 2, 2, module="async_programs")


def test_what_is_read_at_once_is_waited_for_at_once():
    run("read_at_once", 2, 2, module="async_programs")


@pytest.mark.version_free
def test_a_forgotten_wait_is_noticed():
    run("forgotten_waits", 2, 2, module="async_programs")
