"""Files whose tests take long go first, so that at the end of a run no worker waits for another."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`--dist loadfile` hands files out in the order of their first tests."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
