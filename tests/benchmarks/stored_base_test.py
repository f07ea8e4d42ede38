"""The table of stored bases has the sizes and errors that the pages name."""

import pytest

from benchmarks.stored_base import rows, ways


@pytest.mark.slow
def test_nf4_takes_half_the_bits_of_int8_and_has_its_published_error():
    own = {name: store for name, store in ways().items() if "bitsandbytes" not in name}
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows(own, 256)[2:]]
    found = {name: list(map(float, (*more, off[:-1]))) for name, *more, off in cells}
    int8, nf4 = (found[f"`quantized`, {code}, scales in bfloat16"] for code in ("int8", "NF4"))
    assert (int8[0], nf4[0]) == (8.25, 4.25)
    assert 0.072 < nf4[1] < 0.0735
    assert int8[1] < nf4[1] / 10
    assert found["bfloat16"][3] < int8[3] < nf4[3] < 10
