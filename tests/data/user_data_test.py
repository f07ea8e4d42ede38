"""A user's data, in every form, is read once, in order, and from where a checkpoint says."""

import itertools
import json

import grain
import jax
import numpy as np
import pytest

from manualpar import Batch
from manualpar.data import (
    BatchStream,
    DataEndedError,
    ExampleSplit,
    abstract_batch,
    as_dataset,
    evaluation_batches,
    train_batches,
)

SIZE = 4


class Examples:
    """Examples by number, without any base class."""

    def __init__(self, number, make=lambda i: {"x": np.full(3, i, np.float64), "y": i}):
        self.number, self.make = number, make

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return self.make(index)


class Again:
    """Batches that can be read several times."""

    def __init__(self, number):
        self.number = number

    def __iter__(self):
        for i in range(self.number):
            yield {"x": np.arange(i * SIZE, (i + 1) * SIZE)}


def _grain(number, *, loader=False):
    source = grain.MapDataset.range(number * SIZE).shuffle(seed=1)
    if not loader:
        return source.batch(SIZE).map(lambda x: {"x": x})
    return grain.DataLoader(
        data_source=range(number * SIZE),
        sampler=grain.samplers.IndexSampler(
            number * SIZE, shard_options=grain.sharding.NoSharding(), num_epochs=None, seed=0
        ),
        operations=[grain.transforms.Batch(SIZE)],
    )


STREAMS = {
    "iterable": lambda: Again(3),
    "list": lambda: list(Again(3)),
    "grain map": lambda: _grain(3),
    "grain iter": lambda: _grain(3).to_iter_dataset(),
    "grain loader": lambda: _grain(3, loader=True),
}


def _numbers(batches, count):
    return [np.ravel(jax.tree.leaves(x)[0]).tolist() for x in itertools.islice(batches, count)]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_goes_on_at_its_state_and_at_a_number_in_every_epoch(name: str):
    stream = BatchStream(STREAMS[name](), "train")
    expected = _numbers(stream.read_from(0), 8)
    for number in (0, 1, 4, 7):
        first = BatchStream(STREAMS[name](), "train")
        assert _numbers(first.read_from(0), number) == expected[:number]
        state = json.loads(json.dumps(first.state()))
        resumed = BatchStream(STREAMS[name](), "train")
        assert resumed.first is not None  # The program's shapes are read from the first batch.
        resumed.restore(state)
        assert _numbers(resumed.read_from(number), 8 - number) == expected[number:]
        assert _numbers(resumed.read_from(number), 1) == expected[number : number + 1], "backwards"


def test_a_generator_ends_with_a_sentence_and_cannot_be_read_again():
    stream = as_dataset(iter(Again(2))).train
    assert _numbers(stream.read_from(0), 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(DataEndedError, match="'train' ended after 2 batches"):
        next(stream.read_from(2))
    with pytest.raises(ValueError, match="a generator, which cannot be read again from batch 1"):
        next(stream.read_from(1))


def test_examples_by_number_have_the_dtypes_of_jax():
    split = as_dataset(Examples(5)).train
    assert isinstance(split, ExampleSplit)
    example = split[3]
    assert {key: (x.dtype.name, x.shape) for key, x in example.items()} == {
        "x": ("float32", (3,)),
        "y": ("int32", ()),
    }
    batch = abstract_batch(split, SIZE)
    assert (batch["x"].shape, batch["y"].shape) == ((SIZE, 3), (SIZE,))


def test_training_and_evaluation_read_every_example():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    plain = as_dataset(Examples(10)).train
    batches = train_batches(plain, seed=0, batch_size=SIZE, sharding=sharding)
    read = [int(i) for x in itertools.islice(batches, 5) for i in x["y"]]
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10))
    smaller = {2: ([8, 9], 1), 4: ([8, 9, 8, 9], 2)}
    for multiple, (last, copies) in smaller.items():
        batches = evaluation_batches(plain, SIZE, sharding, multiple=multiple)
        assert [x["y"].tolist() for x in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], last]
        assert batches.copies == copies
    masked = as_dataset(Examples(10, lambda i: Batch(np.float32(i), i, np.float32(1)))).train
    masks = [x.mask.tolist() for x in evaluation_batches(masked, SIZE, sharding)]
    assert masks == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize("masked", [False, True])
def test_the_smaller_last_batch_of_a_stream_is_padded_or_has_copies(masked):
    def read():
        for start in (0, 4, 8):
            y = np.arange(start, min(start + SIZE, 11))
            yield Batch(y, y, np.ones(len(y), np.float32)) if masked else {"y": y}

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    split = as_dataset(lambda: read()).train
    batches = train_batches(split, seed=0, batch_size=SIZE, sharding=sharding, multiple=2)
    read_batches = [(next(batches), batches.copies) for _ in range(4)]
    assert [copies for _, copies in read_batches] == [1, 1, 1 if masked else 2, 1]
    last, again = read_batches[2][0], read_batches[3][0]
    if masked:
        assert (last.labels.tolist(), last.mask.tolist()) == ([8, 9, 10, 0], [1, 1, 1, 0])
    else:
        assert last["y"].tolist() == [8, 9, 10, 8, 9, 10]
        assert again["y"].tolist() == [0, 1, 2, 3]


def test_a_batch_may_have_scalars_and_a_pair_of_arrays():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    batch = [np.ones((SIZE, 2)), np.zeros(SIZE, np.int32), np.float32(0.5)]
    stream = as_dataset(lambda: [batch]).train
    placed = next(train_batches(stream, seed=0, batch_size=SIZE, sharding=sharding))
    assert [x.shape for x in placed] == [(SIZE, 2), (SIZE,), ()]
    assert [x.shape for x in abstract_batch(stream, SIZE)] == [(SIZE, 2), (SIZE,), ()]


X, Y = np.arange(24, dtype=np.float32).reshape(12, 2), np.arange(12, dtype=np.int32)


def _generator():
    yield {"x": X[:SIZE], "y": Y[:SIZE]}
    yield {"x": X[SIZE:8], "y": Y[SIZE:8]}


def _torch_loader():
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(torch.tensor(X).bfloat16(), torch.tensor(Y)), batch_size=SIZE)


# Data, whether it is examples by number, and what `reading` says of it.
FORMS = {
    "pair": (lambda: (X, Y), True, ""),
    "dict": (lambda: {"x": X, "y": Y}, True, ""),
    "dict of a split": (lambda: {"train": {"x": X, "y": Y.tolist()}}, True, ""),
    "batch of all": (lambda: Batch(X, Y), True, ""),
    "pair of trees": (lambda: ({"a": X, "b": X}, Y), True, ""),
    "list of examples": (
        lambda: [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)],
        True,
        "a list of 12 examples, the first is ['x'] float32[2], ['y'] int32[]; for batches",
    ),
    "list of lists": (lambda: [([1.0, 2.0, 3.0], [1, 0])] * 5, True, "a list of 5 examples"),
    "list of batches": (
        lambda: list(_generator()),
        False,
        "'train' is a list of 2 batches of 4 examples; for examples pass",
    ),
    "items that are batches": (
        lambda: Examples(3, lambda i: next(_generator())),
        True,
        "'train' has len() and [i], so it is read as 3 examples, the first is ['x'] float32[4, 2]",
    ),
    "generator function": (lambda: _generator, False, ""),
    "torch loader": (_torch_loader, False, ""),
}


@pytest.mark.parametrize("name", FORMS)
def test_data_is_read_as_its_owner_means_or_its_reading_is_said(name: str):
    make, is_examples, reading = FORMS[name]
    split = as_dataset(make()).train
    assert isinstance(split, ExampleSplit if is_examples else BatchStream)
    assert (reading in split.reading) if reading else not split.reading
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    batches = train_batches(split, seed=0, batch_size=SIZE, sharding=sharding)
    assert {len(x) for x in jax.tree.leaves(next(batches))} == {SIZE}
    if isinstance(split, BatchStream):
        assert _numbers(split.read_from(3), 1), "a function is called again for each epoch"


def test_a_fingerprint_follows_the_examples():
    same = as_dataset(Examples(5)).fingerprint
    assert same == as_dataset({"train": Examples(5)}).fingerprint
    other = Examples(5, lambda i: {"x": np.full(3, i + (i == 4)), "y": i})
    assert len({same, as_dataset(Examples(6)).fingerprint, as_dataset(other).fingerprint}) == 3


def _read(data, batch_size=SIZE):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    split = as_dataset(data).train
    batches = train_batches(split, seed=0, batch_size=batch_size, sharding=sharding)
    return list(itertools.islice(batches, 5))


REFUSED = [
    (lambda: as_dataset(3), TypeError, "'train' is a int, expected examples by number"),
    (lambda: as_dataset({"trian": Again(1)}), ValueError, "data has 'trian', expected the splits"),
    (lambda: as_dataset((X, Y[1:])), ValueError, r"arrays of 'train' have lengths \[11, 12\]"),
    (lambda: as_dataset([X, Y]), ValueError, r"a list of the arrays .*pass the tuple \(X, Y\)"),
    (
        lambda: as_dataset([{"x": X}, {"x": X[1:]}, {"x": X}]),
        ValueError,
        "item 1 has 11, exp",
    ),
    (lambda: as_dataset(lambda number: Again(number)), TypeError, "takes .number., expected one"),
    (lambda: as_dataset(lambda: 3), TypeError, "function of 'train' returned a int, expected"),
    (lambda: _read(lambda: iter([{"y": 3}])), ValueError, r"is \['y'\] int32\[\], expected arrays"),
    (lambda: as_dataset({"eval": Again(1)}), ValueError, "expected 'train' among them"),
    (lambda: as_dataset(Examples(0)), ValueError, "'train' has no examples"),
    (
        lambda: as_dataset({"train": Again(1), "validation": iter(Again(1))}),
        ValueError,
        "'eval' is an iterator, which can be read only once",
    ),
    (
        lambda: as_dataset(Examples(2, lambda i: {"text": "a"})),
        TypeError,
        r"train\[0\]\['text'\] is 'a', expected numbers",
    ),
    (
        lambda: _read(Examples(3, lambda i: np.zeros(i))),
        ValueError,
        r"is float32\[\d\], expected float32\[0\], as train\[0\] has; pad or crop it",
    ),
    (lambda: _read(Again(1), 5), ValueError, "a batch has 4 rows, expected the batch size 5"),
    (lambda: _read(lambda: [(np.ones(3), np.ones(4))]), ValueError, r"have \[3, 4\] rows"),
    (
        lambda: _read([{"x": np.ones(SIZE)}, {"x": np.ones(SIZE, np.int32)}]),
        ValueError,
        "batch 1 of 'train'",
    ),
    (lambda: _read([{"x": np.ones(SIZE)}, {"z": np.ones(SIZE)}]), ValueError, "as the first has"),
    (
        lambda: as_dataset((X, Y.astype(np.int64) + 2**40)),
        ValueError,
        r"train\[0\]\[1\] has the int64 1099511627776, expected integers that fit int32",
    ),
    (lambda: _read(lambda: [{"id": Y[:4].astype(np.uint64) - 1}]), ValueError, "has the uint64"),
    (lambda: _read([]), DataEndedError, "'train' ended before the first batch"),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_data_of_another_form_is_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()
