"""Fixtures that several files share."""

import pytest

from manualpar import make_mesh


@pytest.fixture
def mesh42(devices8):
    return make_mesh({"data": 4, "model": 2}, devices8)
