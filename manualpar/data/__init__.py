"""Loads datasets, and puts their batches on the devices.

`load_dataset` returns a dataset with three splits. In a split each example has a number.
`train_batches` and `evaluation_batches` turn a split into batches on a mesh.
"""

from manualpar.data.batches import (
    Batches,
    abstract_batch,
    evaluation_batches,
    train_batch,
    train_batches,
)
from manualpar.data.dataset import (
    ArraySplit,
    ClassificationDataset,
    DamagedDataError,
    Dataset,
    LanguageDataset,
    Split,
    TokenSplit,
)
from manualpar.data.preferences import PreferencePairs, preference_examples
from manualpar.data.sources import SOURCES, load_dataset
from manualpar.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer
from manualpar.data.user_data import BatchStream, DataEndedError, ExampleSplit, as_dataset

__all__ = [
    "SOURCES",
    "ArraySplit",
    "BatchStream",
    "Batches",
    "ByteTokenizer",
    "ClassificationDataset",
    "DamagedDataError",
    "DataEndedError",
    "Dataset",
    "ExampleSplit",
    "FileTokenizer",
    "LanguageDataset",
    "PreferencePairs",
    "Split",
    "TokenSplit",
    "Tokenizer",
    "abstract_batch",
    "as_dataset",
    "evaluation_batches",
    "load_dataset",
    "load_tokenizer",
    "preference_examples",
    "train_batch",
    "train_batches",
]
