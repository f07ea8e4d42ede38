"""Loads datasets, and puts their batches on the devices.

`load_dataset` returns a dataset with three splits. In a split each example has a number.
`train_batches` and `evaluation_batches` turn a split into batches on a mesh.
"""

from manualpar.data.batches import (
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
from manualpar.data.sources import SOURCES, load_dataset
from manualpar.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "SOURCES",
    "ArraySplit",
    "ByteTokenizer",
    "ClassificationDataset",
    "DamagedDataError",
    "Dataset",
    "FileTokenizer",
    "LanguageDataset",
    "Split",
    "TokenSplit",
    "Tokenizer",
    "abstract_batch",
    "evaluation_batches",
    "load_dataset",
    "load_tokenizer",
    "train_batch",
    "train_batches",
]
