"""Imports a Hugging Face model into a workdir, and exports the model of a workdir.

An imported model is a checkpoint at step 0. Its `config.json` and tokenizer are copied to the
folder `model` of the workdir, so that training does not need the original directory.
"""

import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from manualpar.commands.command_line import TRAINING, CommandLine, run_absl
from manualpar.commands.results import choose_devices, quiet_absl
from manualpar.data.packing import PackedSplit
from manualpar.data.preferences import PreferencePairs
from manualpar.data.tokenizer import TEMPLATES, path_of_tokenizer
from manualpar.errors import (
    USAGE_EXIT_CODE,
    UsageError,
    describe_mistake,
    print_error,
)
from manualpar.inspect.tables import describe_bytes
from manualpar.models.pretrained import (
    export_hf,
    export_peft,
    load,
    load_peft,
    read_architecture,
)
from manualpar.models.pretrained.export import (
    SHARD_BYTES,
    TOKENIZER_FILES,
    tokenizer_files,
)
from manualpar.models.pretrained.tensor_files import CONFIG_FILE, model_directory
from manualpar.system.cluster import FAILED_EXIT_CODE, Cluster, DisagreementError, initialize
from manualpar.system.cluster.agreement import failing_together
from manualpar.system.reports.flags import Flag, parse_flags
from manualpar.system.storage import AnyPath, BucketPath, user_path, writing
from manualpar.system.storage.durable_files import check_writable
from manualpar.system.storage.untrusted import parse_object, read_file, write_file
from manualpar.training.checkpoints import CheckpointError
from manualpar.training.checkpoints.folders import open_folder
from manualpar.training.config import check_config
from manualpar.training.exit_codes import exit_code
from manualpar.training.experiment import prepare
from manualpar.training.imported_model import MODEL_FOLDER, adds_tokens, fill_from_hf
from manualpar.training.load_run import prepare_saved, restore_saved, saved_config
from manualpar.training.monitoring.run_files import PLACED_FILES
from manualpar.training.workdir import FOLDER, check_folder, lock_workdir, open_checkpoints

IMPORT_USAGE = """Imports a Hugging Face model into a workdir, as a checkpoint to train from.

{program} DIR --workdir=<folder> [--config=fsdp_lm]
    [--model.adapter=<directory of peft>]
    [--<field>=<value> ...] [--mesh=<axis>=<size>,...] [--devices=<number>]

DIR contains config.json, tokenizer.json and .safetensors files. The config defines how the model
will be trained, and on which data. Each process reads only the slices for its devices.
"""
EXPORT_USAGE = """Exports the model of a workdir as .safetensors files with config and tokenizer.

{program} --workdir=<folder> --output=<directory>
    [--like=<directory it came from> | --family=llama]
    [--dtype=bfloat16] [--max-shard-bytes=<number>] [--devices=<number>]
    [--adapter]

If the model was imported, its config, its tokenizer and the dtypes of its tensors are kept. With
--adapter only the LoRA adapters are written, as the library peft reads them.
"""
WORKDIR = TRAINING.flags["workdir"]._replace(help="The folder to create, for the run; required.")
IMPORTING = TRAINING._replace(
    flags={**TRAINING.flags, "workdir": WORKDIR}, positional="config.model.from_hf"
)

EXPORT_FLAGS: Mapping[str, Flag] = {
    "workdir": Flag("The folder of the run.", Path, in_buckets=True, is_required=True),
    "output": Flag("The directory to create.", Path, in_buckets=True, is_required=True),
    "like": Flag("The directory to take config, tokenizer and dtypes from.", Path, in_buckets=True),
    "family": Flag("The model family, such as llama, if --like is not given.", default=""),
    "dtype": Flag(
        "The dtype of all tensors, such as bfloat16; by default the dtypes of the original.",
        default="",
    ),
    "max_shard_bytes": Flag("The size of the largest file, in bytes.", int, SHARD_BYTES),
    "adapter": Flag("Writes the adapters, for the library peft.", bool, False),
    "devices": TRAINING.flags["devices"]._replace(help="The number of CPU devices to simulate."),
}


def import_main(argv: Sequence[str]) -> NoReturn:
    """Runs the command line `argv` of an import and ends the process."""
    run_absl(import_command, argv, IMPORT_USAGE, "fsdp_lm", IMPORTING)


def import_command(command: CommandLine) -> int:
    """Makes a checkpoint of the model in `config.model.from_hf`; returns the exit code."""
    quiet_absl()
    config, flags = command.config, command.flags

    def start() -> Cluster:
        check_config(config)
        if flags.workdir is None:
            raise UsageError("--workdir is missing, expected the folder to create.")
        if isinstance(flags.workdir, Path):
            check_writable(flags.workdir, "--workdir")
        _check_new(flags.workdir)
        check_folder(config, flags.workdir)
        choose_devices(flags.devices, force=flags.force)
        return initialize(
            coordinator_address=flags.coordinator_address,
            num_processes=flags.num_processes,
            process_id=flags.process_id,
            timeout_seconds=config.watch.lost_seconds,
            start_timeout_seconds=flags.wait,
            workdir=flags.workdir,
        )

    return _answer(start, lambda say: _import(command, say))


def _import(command: CommandLine, say: Callable[[str], None]) -> None:
    workdir = command.flags.workdir
    with contextlib.ExitStack() as stack:
        with failing_together():
            if jax.process_index() == 0:
                try:
                    stack.enter_context(lock_workdir(workdir, report=say))
                except UsageError as error:
                    raise ValueError(str(error)) from None
                # Checks again, because another import may have finished before this one got the
                # lock.
                _check_new(workdir)
        _import_into(workdir, command, say)


def _import_into(workdir: AnyPath, command: CommandLine, say: Callable[[str], None]) -> None:
    started = time.perf_counter()
    model_folder = workdir / MODEL_FOLDER
    with failing_together():
        source = model_directory(command.config.model.from_hf)
        if jax.process_index() == 0:
            small = tokenizer_files(source, "config.model.from_hf", [CONFIG_FILE])
            contents = {name: read_file(path) for name, path in small.items()}
            model = read_architecture(source)
            changes: dict[str, Any] = {}
            if model.is_untied:
                changes["tie_word_embeddings"] = False
            if model.fields["vocab_size"] != (size := command.config.model.vocab_size):
                changes["vocab_size"] = size
            if changes:
                contents[CONFIG_FILE] = _changed(contents[CONFIG_FILE], changes)
            with writing("import_hf", model_folder):
                _write_small_files(contents, model_folder)
    config = command.config.copy_and_resolve_references().unlock()
    if config.data.tokenizer == config.model.from_hf:
        config.data.tokenizer = ""  # Uses the copy of the tokenizer in the folder `model`.
    config.model.from_hf = str(model_folder)
    experiment = prepare(fill_from_hf(config.lock()))
    with open_checkpoints(experiment.config, workdir) as checkpoints:
        tuned, adapter = experiment.config.model.lora, experiment.config.model.adapter
        loaded = load(
            experiment.program,
            source,
            config.seed,
            missing="init" if tuned else "error",
            add_tokens=adds_tokens(experiment.config),
        )
        if adapter:
            state = load_peft(experiment.program, loaded.state, adapter)
            loaded = loaded._replace(state=state)
        extra = {
            "position": 0,
            "config": experiment.config.to_dict(),
            "data": experiment.task.dataset.fingerprint,
            "recorder": {"totals": {}, "latest": {}, "skipped": 0},
            "files": dict.fromkeys(PLACED_FILES, 0),
        }
        checkpoints.save(experiment.program, loaded.state, step=0, extra=extra)
    say(
        f"read {describe_bytes(loaded.bytes_read)} of {loaded.tensors} tensors in "
        f"{loaded.seconds:.1f} s; saved after {time.perf_counter() - started:.1f} s; "
        f"at most {describe_bytes(peak_memory())} of memory in this process"
    )
    say(
        f"to train it: manualpar train {command.config_path} --model.from_hf={model_folder} "
        + (f"--model.adapter={adapter} " if adapter else "")
        + f"--workdir={workdir}"
    )


def _changed(config: bytes, changes: Mapping[str, Any]) -> bytes:
    """Returns a `config.json` of the imported model, which may differ from that in its files."""
    fields = parse_object(config)
    fields |= changes
    if isinstance(fields.get("text_config"), dict):
        fields["text_config"] |= changes
    return (json.dumps(fields, indent=2) + "\n").encode()


def export_main(argv: Sequence[str]) -> int:
    """Exports the model of a workdir as a Hugging Face directory; returns the exit code."""
    flags = parse_flags(argv, EXPORT_USAGE, EXPORT_FLAGS, renamed={"to": "output"})
    quiet_absl()

    def start() -> Cluster:
        if isinstance(flags.output, Path):
            check_writable(flags.output, "--output")
        saved_config(flags.workdir)
        choose_devices(flags.devices)
        return initialize()

    def work(say: Callable[[str], None]) -> None:
        started = time.perf_counter()
        config = saved_config(flags.workdir)
        like, source = flags.like, config.model.get("from_hf", "")
        if like is None and not flags.family and source:
            like = user_path(source) if (user_path(source) / CONFIG_FILE).exists() else None
        # The tokenizer of the run's data is that of the model, or another one.
        has_own = like is None or (not flags.like and config.data.tokenizer != source)
        experiment = prepare_saved(config)
        dataset: Any = experiment.task.dataset
        restored = restore_saved(experiment, flags.workdir, report=say)
        if flags.adapter:
            base = "" if like is None else str(like)
            folder = export_peft(experiment.program, restored.state, flags.output, base=base)
            say(f"wrote the adapters of step {restored.step} to {folder}")
            return
        target = export_hf(
            experiment.program,
            restored.state,
            flags.output,
            like=like,
            family=flags.family,
            dtype=flags.dtype,
            tokenizer=(path_of_tokenizer(dataset.tokenizer) or None) if has_own else None,
            template=config.data.template if _has_chats(dataset.train) else None,
            max_shard_bytes=flags.max_shard_bytes,
        )
        if isinstance(target, BucketPath):
            size = sum(target.files().values())
        else:
            size = sum(path.stat().st_size for path in target.iterdir())
        say(
            f"wrote step {restored.step}, {describe_bytes(size)}, to {target} in "
            f"{time.perf_counter() - started:.1f} s; at most {describe_bytes(peak_memory())} of "
            "memory in this process"
        )

    return _answer(start, work)


def _has_chats(split: Any) -> bool:
    kinds = PackedSplit, PreferencePairs
    return any(isinstance(part, kinds) for part in getattr(split, "parts", (split,)))


def peak_memory() -> int:
    """Returns the peak memory of this process, in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _answer(start: Callable[[], Cluster], work: Callable[[Callable[[str], None]], None]) -> int:
    """Runs `work` in the cluster that `start` returns; prints a user's mistake as one sentence.

    Returns the exit code.
    """
    try:
        with start() as cluster:
            try:
                work(print if cluster.is_main else lambda line: None)
            except (UsageError, ValueError, CheckpointError) as error:
                if cluster.is_main or isinstance(error, DisagreementError):
                    print_error(describe_mistake(error))
                return _code(error)
    except (UsageError, ValueError, OSError) as error:
        print_error(describe_mistake(error))
        return _code(error)
    return 0


def _code(error: Exception) -> int:
    """Returns the exit code for an error that is printed as one sentence."""
    code = exit_code(error)
    return USAGE_EXIT_CODE if code == FAILED_EXIT_CODE else code


def _check_new(workdir: AnyPath) -> None:
    if open_folder(workdir / FOLDER).steps():
        raise ValueError(f"--workdir={workdir} holds a run, expected a new folder.")


def _write_small_files(contents: Mapping[str, bytes], folder: AnyPath) -> None:
    """Writes a model's config and tokenizer files to a folder.

    Deletes the files that the folder has from a failed import of another model.
    """
    old = folder / TEMPLATES
    if isinstance(old, BucketPath):
        others = [f"{TEMPLATES}/{name}" for name in old.files()]
    else:
        others = [f"{TEMPLATES}/{file.name}" for file in old.glob("*.jinja")]
    for name in dict.fromkeys((*contents, *TOKENIZER_FILES, *others)):
        if name in contents:
            if isinstance(folder, Path):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_file(folder / name, contents[name])
        elif isinstance(folder, BucketPath):  # A failed import may have left such a file.
            (folder / name).delete()
        else:
            (folder / name).unlink(missing_ok=True)
