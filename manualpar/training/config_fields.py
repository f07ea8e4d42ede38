"""The fields of configs: their types, limits, defaults and meanings, which `--help` shows.

`FIELDS` lists the fields of every config, and `MODEL_FIELDS` the fields that a model adds. The
fields of registered strategies come on top, see `manualpar.training.config.fields_of`. The meaning
of a field that sets an argument elsewhere is the first sentence about this argument in its own
docstring.
"""

from collections.abc import Mapping

from manualpar.core.mesh.compiler_options import OVERLAPS
from manualpar.core.model.options import PROGRAM_OPTIONS, first_sentences
from manualpar.data.document_files import BAD_ROWS
from manualpar.data.packing import LONG_EXAMPLES
from manualpar.data.sources import TEXT_SOURCES, load_dataset
from manualpar.layers.attention.context import CONTEXT_ATTENTIONS, Context
from manualpar.layers.model_fields import LARGEST_FLOAT, MOST_WRITTEN_OUT, config_fields
from manualpar.layers.pipeline.stages import KEEPS, SCHEDULES, Pipeline
from manualpar.models.classifier import Classifier
from manualpar.models.generation.drawing import Drawing
from manualpar.models.layer_config import SPLIT_OVERLAPS
from manualpar.models.transformer import DTYPES, Transformer
from manualpar.strategies import BUILT_IN, Field
from manualpar.strategies.registry import fields_of_options, with_meanings
from manualpar.training.monitoring.trackers import TRACKERS

ON_NONFINITE = ("ignore", "stop", "skip", "rollback")
LONGEST_SECONDS = 1e6  # Every clock and timer accepts this duration.
_IF_IT_HAS = "The argument {} of an optimizer that has it, unless optimizer.arguments has it."


def _meaning(documented: object, name: str) -> str:
    """Returns the first sentence about an argument or attribute in its docstring."""
    return first_sentences(documented).get(name, "")


# What `manualpar.training.optimizer` reads.
OPTIMIZER_FIELDS: Mapping[str, Field] = {
    "optimizer.name": Field(
        str,
        default="adamw",
        expected="the name of an optimizer",
        meaning="An optimizer of optax or optax.contrib, such as lion, muon or sgd.",
    ),
    "optimizer.arguments": Field(
        dict,
        default={},
        expected="a dict such as {'nesterov': True}",
        meaning="Arguments of the optimizer that have no field; optax has the list.",
    ),
    "optimizer.learning_rate": Field(
        float, 0, below=LARGEST_FLOAT, meaning="The learning rate at the end of the warm-up."
    ),
    "optimizer.warmup_steps": Field(
        int,
        0,
        below=2**31,
        meaning="The steps in which the learning rate rises, at most as many as the run has.",
    ),
    "optimizer.weight_decay": Field(
        float,
        0,
        below=LARGEST_FLOAT,
        meaning="The argument weight_decay; must be 0 if the optimizer has none.",
    ),
    "optimizer.decay_mask": Field(
        tuple,
        holds_names=True,
        default=(),
        expected="a tuple of globs such as ('*kernel', '!*embedding*')",
        meaning="The parameters to decay, by globs on their paths; ! spares parameters. By default "
        "all but biases, scales and arrays of fewer than two dims.",
    ),
    "optimizer.matrices": Field(
        tuple,
        holds_names=True,
        default=(),
        expected="a tuple of globs such as ('*kernel', '!head/*')",
        meaning="The parameters that muon treats as matrices, by globs on their paths; ! leaves "
        "parameters to Adam. By default the kernels of layers, but no embedding, head or router.",
    ),
    "optimizer.b1": Field(float, 0, below=1, meaning=_IF_IT_HAS.format("b1")),
    "optimizer.b2": Field(float, 0, below=1, meaning=_IF_IT_HAS.format("b2")),
    "optimizer.clip_norm": Field(
        float, 0, below=LARGEST_FLOAT, meaning="The largest norm of the gradient; 0 for no limit."
    ),
    "optimizer.qk_clip": Field(
        float,
        0,
        below=LARGEST_FLOAT,
        default=0.0,
        meaning="The largest attention score, such as 100, that changes no kernel of queries and "
        "keys after an update (QK-clip); 0 for no bound.",
    ),
    "schedule.name": Field(
        str,
        default="cosine_decay_schedule",
        expected="the name of a schedule",
        meaning="A schedule of optax for the steps after the warm-up, such as constant_schedule.",
    ),
    "schedule.arguments": Field(
        dict,
        default={},
        expected="a dict such as {'alpha': 0.1}",
        meaning="Arguments of the schedule. Its length is by default the rest of the run.",
    ),
}

FIELDS: Mapping[str, Field] = {
    "seed": Field(
        int,
        0,
        below=2**32,
        meaning="The seed of initial weights, of dropout and of the order of the examples.",
    ),
    "profile": Field(
        str, meaning="The first and the last step to profile, such as 10:13; '' for no profile."
    ),
    "model.name": Field(
        str,
        expected="'classifier', 'transformer' or module:function",
        meaning="The kind of model, which decides the fields that a config has, or the function "
        "that makes a model, loss and data of your own.",
    ),
    "model.lora": Field(
        tuple,
        holds_names=True,
        default=(),
        expected="a tuple of globs such as ('*/attention/*:8',)",
        meaning="Globs of the parameters that get LoRA adapters, each with a rank; only adapters "
        "are trained.",
    ),
    "model.lora_alpha": Field(
        float,
        0,
        below=LARGEST_FLOAT,
        default=16.0,
        meaning="The product of an adapter's matrices is multiplied by this number over the rank.",
    ),
    "model.lora_rank_stabilized": Field(
        bool,
        default=False,
        meaning="Whether lora_alpha is divided by the square root of the rank (rsLoRA).",
    ),
    "model.lora_dropout": Field(
        float,
        0,
        below=1,
        default=0.0,
        meaning="The share of a layer's input that its adapter does not get in training.",
    ),
    "model.lora_magnitudes": Field(
        bool,
        default=False,
        meaning="Whether adapters also train the lengths of the columns of kernels (DoRA).",
    ),
    "model.lora_save": Field(
        tuple,
        holds_names=True,
        default=(),
        expected="a tuple of globs such as ('head', 'final_norm/*')",
        meaning="Globs of the parameters that are trained as a whole and saved with the adapters "
        "(modules_to_save of the library peft).",
    ),
    "model.add_tokens": Field(
        bool,
        default=False,
        meaning="Whether tokens that the tokenizer has beyond the vocabulary of model.from_hf get "
        "rows in the embedding and the head: the mean of the other rows.",
    ),
    "model.adapter": Field(
        str,
        default="",
        meaning="A directory of the library peft with the LoRA adapters to begin with; it sets the "
        "fields model.lora*. '' for none.",
    ),
    "model.nf4": Field(
        tuple,
        holds_names=True,
        default=(),
        expected="a tuple of globs such as ('*kernel:64',)",
        meaning="As int8, in NF4, which takes half the bytes.",
    ),
    "model.int8": Field(
        tuple,
        holds_names=True,
        default=(),
        expected="a tuple of globs such as ('*kernel:64',)",
        meaning="Globs of the frozen parameters that are stored in int8, each with a block length.",
    ),
    "data.batch_size": Field(
        int, 1, below=2**31, meaning="The number of examples in a step, on all devices together."
    ),
    # Each prefetched batch takes a thread.
    "data.prefetch": Field(int, 1, below=2**10, meaning="The number of batches to read ahead."),
    **OPTIMIZER_FIELDS,
    "optimizer.ema_decay": Field(
        float,
        0,
        below=1,
        default=0.0,
        meaning="The decay of the average of the parameters with which a run evaluates; 0 for no "
        "average.",
    ),
    # One of `strategy_kinds()`, see `fields_of`.
    "parallel.strategy": Field(
        str,
        meaning="How parameters, gradients and the optimizer's state are spread over the devices.",
    ),
    "parallel.mesh": Field(
        dict,
        expected="a dict of axis sizes such as {'data': -1}",
        meaning="The axes of the mesh with their sizes; -1 for all other devices.",
    ),
    "parallel.mesh_order": Field(
        tuple,
        holds_names=True,
        expected="a tuple of axes such as ('data', 'model')",
        meaning="The axes of the mesh, slowest links first; () for the order from replica to "
        "model.",
    ),
    "parallel.overlap": Field(
        str,
        choices=OVERLAPS,
        meaning="Whether compiler options that overlap communication with computation are chosen "
        "by chip and mesh (auto), or the compiler keeps its own (none).",
    ),
    "training.num_steps": Field(
        int, 1, below=2**31, meaning="The number of training steps of the run."
    ),
    "training.eval_every_steps": Field(
        int, 0, meaning="The number of steps between two evaluations; 0 for none."
    ),
    "training.eval_batches": Field(
        int, 0, meaning="The number of batches of an evaluation; 0 for all."
    ),
    "training.log_every_steps": Field(
        int, 1, meaning="The number of steps between two lines of training metrics."
    ),
    "training.on_nonfinite": Field(
        str,
        choices=ON_NONFINITE,
        meaning="The reaction to a loss or gradient that is not finite: none (ignore), the run "
        "ends (stop), no update (skip), or back to the last checkpoint (rollback).",
    ),
    "training.trackers": Field(
        tuple,
        choices=tuple(TRACKERS),
        holds_names=True,
        default=(),
        meaning="The services that get the metrics of the run.",
    ),
    "training.project": Field(
        str, default="manualpar", meaning="The name of the project in these services."
    ),
    "checkpoint.every_steps": Field(
        int, 0, meaning="The number of steps between two checkpoints; 0 for no checkpoints."
    ),
    "checkpoint.keep": Field(int, 1, meaning="The number of newest checkpoints to keep."),
    "checkpoint.keep_every_steps": Field(
        int, 0, meaning="Also keeps the checkpoints of multiples of this step; 0 for none."
    ),
    "checkpoint.best_metric": Field(
        str,
        meaning="Also keeps the checkpoint that is best by this metric of the evaluation, such as "
        "loss; '' for none.",
    ),
    "checkpoint.on_corruption": Field(
        str,
        choices=("stop", "previous"),
        meaning="If the newest checkpoint is damaged, the run stops, or resumes from the previous "
        "one.",
    ),
    "watch.lost_seconds": Field(
        float,
        1,
        below=LONGEST_SECONDS,
        meaning="The seconds of silence after which a process counts as lost.",
    ),
    "watch.stall_seconds": Field(
        float,
        0,
        below=LONGEST_SECONDS,
        meaning="The seconds without progress after which a run prints all stacks; 0 for never.",
    ),
    "debug.check_replicas_every": Field(
        int,
        0,
        meaning="The number of steps between two comparisons of replicated arrays, which are slow; "
        "0 for none.",
    ),
    "debug.draw_sharding": Field(
        str,
        meaning="The parameter whose sharding a run draws, such as input_dense/kernel, or all; '' "
        "for none.",
    ),
    **{
        PROGRAM_OPTIONS[name].field: field
        for name, field in fields_of_options(PROGRAM_OPTIONS).items()
    },
    **{f"parallel.{name}": field for kind in BUILT_IN for name, field in kind.fields.items()},
}
MODEL_FIELDS: Mapping[str, Mapping[str, Field]] = {
    "classifier": {
        "data.source": Field(
            str, choices=("digits", "synthetic"), meaning=_meaning(load_dataset, "source")
        ),
        **{
            f"model.{name}": field
            for name, field in with_meanings(
                {
                    "hidden_size": Field(int, 1),
                    "num_classes": Field(int, 1, below=2**31),
                    "dropout_rate": Field(float, 0, below=1),
                    "num_layers": Field(int, 1),
                    "dtype": Field(str, choices=DTYPES),
                },
                first_sentences(Classifier),
            ).items()
        },
    },
    "transformer": {
        **{
            f"data.{name}": field
            for name, field in with_meanings(
                {
                    "source": Field(str, choices=(*TEXT_SOURCES, "mixture", "preferences")),
                    "path": Field(str),
                    "sequence_length": Field(int, 1, below=2**31),
                    "tokenizer": Field(str),
                    "field": Field(str, default="text"),
                    "held_out": Field(float, 0, below=0.5, default=0.02),
                    "cache": Field(str, default=""),
                    "mixture": Field(
                        tuple,
                        holds_names=True,
                        default=(),
                        expected="a tuple of entries such as ('0.7 jsonl ~/web', '0.3 text ~/b')",
                    ),
                    "template": Field(str, default=""),
                    "long_examples": Field(str, choices=LONG_EXAMPLES, default="error"),
                    "parse_special": Field(bool, default=False),
                    "bad_rows": Field(str, choices=BAD_ROWS, default="error"),
                },
                first_sentences(load_dataset),
            ).items()
        },
        "model.from_hf": Field(
            str,
            default="",
            meaning="The directory of the Hugging Face model to begin with; its config.json sets "
            "the fields of the model.",
        ),
        "model.vocab_size": Field(
            int,
            0,
            below=2**31,
            default=0,
            meaning="The number of tokens in the vocabulary; 0 for the tokenizer's.",
        ),
        **{f"model.{name}": field for name, field in config_fields(Transformer)},
        "training.label_smoothing": Field(
            float, 0, below=1, meaning=_meaning(Transformer, "label_smoothing")
        ),
        "training.preference_beta": Field(
            float,
            0,
            below=LARGEST_FLOAT,
            default=0.1,
            meaning="How strongly the model is bound to the reference, above 0, for the source "
            "preferences.",
        ),
        "training.z_loss": Field(
            float, 0, below=LARGEST_FLOAT, meaning=_meaning(Transformer, "z_loss")
        ),
        "parallel.sequence": Field(
            bool,
            meaning="Whether activations between layers are split over the axis model too, along "
            "their positions.",
        ),
        "parallel.layer_overlap": Field(
            str,
            choices=SPLIT_OVERLAPS,
            meaning="How layers that are split over the axis model compute while they send: ring "
            "sends around a ring, which needs parallel.sequence; dual_batch runs two halves of a "
            "device's batch side by side, which needs an even number of sequences of a minibatch "
            "on each device.",
        ),
        "parallel.context_attention": Field(
            str, choices=CONTEXT_ATTENTIONS, meaning=_meaning(Context, "how")
        ),
        "parallel.pipeline": Field(str, choices=SCHEDULES, meaning=_meaning(Pipeline, "schedule")),
        "parallel.pipeline_chunks": Field(
            int, 1, below=MOST_WRITTEN_OUT + 1, meaning=_meaning(Pipeline, "chunks")
        ),
        "parallel.pipeline_keep": Field(str, choices=KEEPS, meaning=_meaning(Pipeline, "keep")),
        "sample.num_tokens": Field(
            int,
            0,
            below=10**6,  # Each token takes one forward pass of the model.
            meaning="The number of tokens of the text that is generated at the end; 0 for no text.",
        ),
        "sample.prompt": Field(str, meaning="The beginning of the generated text."),
        "sample.temperature": Field(
            float, 0, below=LARGEST_FLOAT, meaning=_meaning(Drawing, "temperature")
        ),
    },
}
# Fields whose value is a dict. Any other dict is a group of fields.
DICT_FIELDS = frozenset(name for name, field in FIELDS.items() if field.kind is dict)
