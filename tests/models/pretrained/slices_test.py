"""Slices of files, boxes of shards, and what lies otherwise in memory: all against whole arrays."""

import itertools
import math
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from manualpar.models.pretrained import slices
from manualpar.models.pretrained.slices import copy_turned, join_bounds, within
from manualpar.models.pretrained.tensor_files import (
    create_tensor_file,
    make_header,
    read_header,
    read_slice,
    write_slice,
)

SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)
DTYPES = st.sampled_from([np.float64, np.float32, np.float16, jnp.bfloat16])


@given(SHAPES, st.randoms(use_true_random=False), DTYPES, DTYPES, st.booleans())
def test_numbers_are_turned_and_cast_whatever_lies_where(shape, random, source, target, turn_out):
    order = random.sample(range(len(shape)), len(shape))
    value = np.arange(math.prod(shape), dtype=source).reshape(shape).transpose(order)
    out = np.full(shape if turn_out else value.shape, -1, target)
    out = out.transpose(order) if turn_out else out
    with mock.patch.object(slices, "BLOCK", (3, 2)):
        copy_turned(out, value)
    np.testing.assert_array_equal(out, value.astype(target))


GRIDS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=3)


@given(GRIDS, st.integers(1, 40), st.sets(st.integers(0, 26)))
def test_parts_that_fill_a_box_are_joined_up_to_a_size(grid, most, absent):
    """Of a grid of parts, each dim cut into so many pieces of some size; some are elsewhere."""
    dims = [[(i * size, i * size + size) for i in range(count)] for count, size in grid]
    parts = list(itertools.product(*dims))
    whole = [(0, count * size) for count, size in grid]
    expected, found = np.zeros([size for _, size in whole], int), []
    parts = [part for number, part in enumerate(parts) if number not in absent]
    for part in parts:
        expected[within(part, whole)] += 1
    for box, inside in join_bounds(parts, most):
        found += inside
        expected[within(box, whole)] -= 1
        assert len(inside) == 1 or expected[within(box, whole)].size <= most
    assert sorted(found) == sorted(parts)
    assert not expected.any()
    if not absent and expected.size <= most:  # Rows are whole.
        assert len(join_bounds(parts, most)) <= math.prod(count for count, _ in grid[:-1])


@given(st.dictionaries(st.sampled_from("abcdé"), st.tuples(SHAPES, DTYPES), min_size=1), st.data())
def test_slices_of_a_file_are_written_and_read_in_place(tmp_path_factory, tensors, data):
    """A file of slices, written in any order, is what safetensors reads."""
    path = tmp_path_factory.mktemp("bytes") / "model.safetensors"
    kinds = {name: (np.dtype(dtype), shape) for name, (shape, dtype) in tensors.items()}
    values = {
        name: np.arange(number, number + math.prod(shape)).reshape(shape).astype(dtype)
        for number, (name, (dtype, shape)) in enumerate(kinds.items())
    }
    create_tensor_file(path, kinds)
    places = make_header(kinds)[1]
    parts = []
    for name, (_, shape) in kinds.items():
        cuts = [sorted({0, size, data.draw(st.integers(0, size))}) for size in shape]
        pairs = [list(itertools.starmap(slice, itertools.pairwise(of_dim))) for of_dim in cuts]
        parts += [(name, index) for index in itertools.product(*pairs)]
    with path.open("r+b", buffering=0) as file:
        for name, index in data.draw(st.permutations(parts)):
            value = np.ascontiguousarray(values[name][index])
            write_slice(file.fileno(), places[name], index, value)
    found = load_file(path)
    assert found.keys() == values.keys()
    with path.open("rb") as file:
        assert read_header(file) == places
        for name, index in parts:
            value = read_slice(file.fileno(), places[name], index, kinds[name][0])
            np.testing.assert_array_equal(value, values[name][index])
    for name, x in values.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        assert found[name].tobytes() == x.tobytes()


def test_a_file_that_got_shorter_is_an_error(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((4, 4), np.float32)}, path)
    with path.open("r+b") as file:
        (place,) = read_header(file).values()
        file.truncate(place.start + 32)
        assert read_slice(file.fileno(), place, [slice(0, 2), slice(0, 4)], np.float32).size == 8
        with pytest.raises(OSError, match="ends before its tensors do"):
            read_slice(file.fileno(), place, [slice(0, 4), slice(2, 4)], np.float32)
