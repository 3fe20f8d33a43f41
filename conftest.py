"""How pytest runs the series: nbval's rules, and an option for the launch test."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--launches", type=int, default=2, help="launches in a row in tests/test_soak.py (default 2)")
    parser.addoption("--kills", type=int, default=2, help="kills in tests/test_elastic.py (default 2)")


def is_notebook_cell(item):
    return hasattr(item, "cell") and hasattr(item, "test_outputs")  # nbval's, without importing it


def pytest_runtest_setup(item):
    """What is written to stderr differs from run to run: nbval compares everything else."""
    if is_notebook_cell(item) and "stderr" not in item.parent.skip_compare:
        item.parent.skip_compare = (*item.parent.skip_compare, "stderr")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A magic that does not exist is a `UsageError` on stderr and nothing else: fail it, tagged or not."""
    result = yield
    if is_notebook_cell(item):
        printed = "".join(o.text for o in item.test_outputs if o.output_type == "stream" and o.name == "stderr")
        if "UsageError" in printed:
            item.raise_cell_error("A magic does not exist or was used wrongly", printed)
    return result
