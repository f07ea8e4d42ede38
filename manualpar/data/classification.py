"""The sources `digits` and `synthetic`: inputs and classes in memory."""

import numpy as np

from manualpar.data.dataset import ArraySplit, ClassificationDataset, make_fingerprint
from manualpar.extras import require

# The split is part of the data: it stays when the seed of a run changes.
DIGITS_SPLIT_SEED = 0
DIGITS_TEST_EXAMPLES = 360
DIGITS_EVAL_EXAMPLES = 144


def load_digits() -> ClassificationDataset:
    """The 1,797 handwritten digits in scikit-learn: 8x8 scans as vectors of 64 values in [0, 1].

    Of these 1,293 are for training, 144 for evaluation and 360 for the test. The split is always
    the same one, and in each part the ten digits have the share they have in the whole.
    """
    require("config.data.source='digits'", "sklearn")
    # scikit-learn takes a second to import.
    import sklearn.datasets
    from sklearn.model_selection import train_test_split

    images, digits = sklearn.datasets.load_digits(return_X_y=True)
    inputs, labels = (images / 16).astype(np.float32), digits.astype(np.int32)

    def split_off(examples: ArraySplit, num_examples: int) -> tuple[ArraySplit, ArraySplit]:
        rest, part = train_test_split(
            np.arange(len(examples)),
            test_size=num_examples,
            stratify=examples.labels,
            random_state=DIGITS_SPLIT_SEED,
        )
        return _take(examples, rest), _take(examples, part)

    rest, test = split_off(ArraySplit(inputs, labels), DIGITS_TEST_EXAMPLES)
    train, evaluation = split_off(rest, DIGITS_EVAL_EXAMPLES)
    return _dataset(train, evaluation, test)


def make_synthetic(seed: int) -> ClassificationDataset:
    """Normal noise of MNIST's shape in ten classes: 4,096 examples to train, 512 each for the rest.

    It can be learned: the label is the largest of ten random projections of the input, the same for
    all splits.

    Args:
      seed: What inputs and projections are drawn from.
    """
    rng = np.random.default_rng(seed)
    projections = rng.standard_normal((784, 10), dtype=np.float32)

    def draw(num_examples: int) -> ArraySplit:
        inputs = rng.standard_normal((num_examples, 784), dtype=np.float32)
        return ArraySplit(inputs, (inputs @ projections).argmax(axis=-1).astype(np.int32))

    return _dataset(draw(4096), draw(512), draw(512))


def _take(split: ArraySplit, indices: np.ndarray) -> ArraySplit:
    return ArraySplit(split.inputs[indices], split.labels[indices])


def _dataset(train: ArraySplit, evaluation: ArraySplit, test: ArraySplit) -> ClassificationDataset:
    """Ten classes."""
    arrays = [array for part in (train, evaluation, test) for array in (part.inputs, part.labels)]
    return ClassificationDataset(
        train=train,
        eval=evaluation,
        test=test,
        num_classes=10,
        fingerprint=make_fingerprint(*arrays),
    )
