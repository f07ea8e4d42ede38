"""The task that `config.py` names: the model, the loss and the data of a config."""

from data import Spiral
from ml_collections import ConfigDict
from model import SPLIT, Model, loss_fn

from manualpar import tensor_parallel
from manualpar.data import as_dataset
from manualpar.training import Task


def make_task(config: ConfigDict) -> Task:
    """Makes the task; `config.model` and `config.data` have the fields that `config.py` adds."""
    model = Model(width=config.model.width, depth=config.model.depth)
    dataset = as_dataset(
        {
            "train": Spiral(config.data.num_examples, seed=config.seed),
            "eval": Spiral(1000, seed=config.seed + 1),
            "test": Spiral(1000, seed=config.seed + 2),
        }
    )
    return Task(dataset, tensor_parallel(model, SPLIT), loss_fn, headline="accuracy")
