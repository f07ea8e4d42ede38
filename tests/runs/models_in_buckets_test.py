"""A model in a bucket comes into a workdir there, is trained and asked, and is exported there."""

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import pytest

from manualpar import make_mesh
from manualpar.commands import evaluate_command, generate_command
from manualpar.commands.command_line import parse_command_line
from manualpar.commands.import_export import export_main, import_command
from manualpar.commands.train_command import run_command
from manualpar.models.pretrained import export, export_hf, load_hf, read_architecture
from manualpar.system.storage import BucketError
from manualpar.system.storage import bucket_path as requests
from manualpar.system.storage import drafts as lease
from tests.models.pretrained.llama import (
    CONFIG,
    CONFIG_FILE,
    assert_same_files,
    during,
    llama,
    make_tokenizer,
    program_of,
    read,
    tensors_of,
    write,
)
from tests.system.storage.s3_server import Proxy, download, upload

server = pytest.mark.slow
FIELDS = {
    "data.sequence_length": 16,
    "sample.num_tokens": 0,
    "optimizer.warmup_steps": 0,
    "training.num_steps": 2,
    "training.eval_every_steps": 0,
    "checkpoint.every_steps": 2,
    "parallel.min_weight_size": 16,
}


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """The directory of a small Llama, and its tensors."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))
    directory = tmp_path / "theirs"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    make_tokenizer(directory / "tokenizer.json", 20)
    params = jax.jit(llama(directory).init)(jax.random.key(3), jnp.zeros((1, 8), jnp.int32))
    tensors = tensors_of(params["params"])
    write(directory, tensors)
    return directory, tensors


@pytest.mark.parametrize("flag", ["--workdir", "--hf", "--output"])
def test_a_password_in_a_path_is_not_repeated(flag, capsys):
    others = [f"{name}=x" for name in ("--workdir", "--prompts") if name != flag != "--hf"]
    with pytest.raises(SystemExit) as ended:
        generate_command.main(["generate", *others, f"{flag}=s3://AKIAUSER:hush@bucket/x"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"{flag}: a path on s3:// does not begin with the name of a bucket" in error
    assert "hush" not in error
    assert error.count("\n") == 1


@server
def test_a_model_is_imported_trained_asked_and_exported_there(
    theirs, bucket_folder, tmp_path, devices8, capsys
):
    del devices8
    directory, tensors = theirs
    there, work = bucket_folder / "theirs", bucket_folder / "run"
    upload(directory, there)
    (there / "pytorch_model.bin").write_bytes(b"is not copied")
    text = "w2 w3 w4 w5\n" * 3000
    (bucket_folder / "text.txt").write_bytes(text.encode())
    shutil.rmtree(directory)

    def command(source):
        flags = [f"--config.{name}={value}" for name, value in FIELDS.items()]
        flags += [f"--config.data.path={bucket_folder / 'text.txt'}", f"--workdir={work}"]
        argv = ["fsdp", f"--config.model.from_hf={source}", *flags]
        return parse_command_line(argv, default_config=CONFIG_FILE)

    assert import_command(command(there)) == 0
    assert not list(tmp_path.rglob("*.bin"))
    exported = bucket_folder / "same"
    assert export_main(["", f"--workdir={work}", f"--to={exported}"]) == 0
    assert_same_files(read(download(exported, tmp_path / "same")), tensors)
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert files == set(exported.names())
    there.delete_files()
    assert import_command(command(work / "model")) == 2
    assert run_command(command(work / "model")) == 0
    assert "going on from the checkpoint of step 0" in capsys.readouterr().out

    prompts, answers = bucket_folder / "prompts.jsonl", bucket_folder / "answers.jsonl"
    prompts.write_bytes(b'{"prompt": "w2 w3"}\n')
    files = [f"--prompts={prompts}", f"--output={answers}", "--max_tokens=3"]
    assert generate_command.main(["generate", f"--workdir={work}", *files]) == 0
    assert json.loads(answers.read_bytes())["prompt"] == "w2 w3"
    assert (
        evaluate_command.main(
            ["evaluate", f"--workdir={work}", f"--text={bucket_folder / 'text.txt'}"]
        )
        == 0
    )
    assert "perplexity: " in capsys.readouterr().out
    assert (
        generate_command.main(["generate", f"--hf={exported}", "--prompt=w2 w3", "--max_tokens=3"])
        == 0
    )
    # A model that has changed is copied anew.
    config = json.loads((exported / "config.json").read_bytes())
    (exported / "config.json").write_bytes(json.dumps(config | {"rope_theta": 7.0}).encode())
    assert read_architecture(exported).flat_fields["rope_base"] == 7.0


@server
def test_a_model_that_changes_while_it_is_loaded_is_never_half_of_each(
    theirs, bucket_folder, tmp_path, s3_port, use_s3, devices8
):
    del devices8
    directory, tensors = theirs
    program = program_of(llama(directory), make_mesh({"data": 8}))
    newer = [tmp_path / str(number) for number in range(1, 6)]
    for number, folder in enumerate(newer, 1):
        shutil.copytree(directory, folder)
        write(folder, {name: tensor + number for name, tensor in tensors.items()})
    upload(directory, bucket_folder)
    import botocore.session

    client = botocore.session.get_session().create_client("s3")  # Not by way of the proxy.
    changes = []

    def change(method, path, number):
        # The first half has been copied.
        if method == "GET" and "model-2.safetensors" in path and changes:
            for file in changes.pop(0).glob("*.safetensors"):
                key = str((bucket_folder / file.name).key)
                client.put_object(Bucket=bucket_folder.bucket, Key=key, Body=file.read_bytes())

    with Proxy(s3_port, change) as proxy:
        use_s3(port=proxy.port)
        changes[:] = newer[:1]
        state = load_hf(program, bucket_folder)
        chex.assert_trees_all_equal(state.params, load_hf(program, newer[0]).params)
        upload(newer.pop(), bucket_folder)
        changes[:] = newer
        with pytest.raises(BucketError, match=r"s3://bucket/.*model-\d.safetensors changed after"):
            load_hf(program, bucket_folder)
    use_s3()
    (bucket_folder / "model-1.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"s3:/bucket/.*/model-1.safetensors"):
        load_hf(program, bucket_folder)


@server
@pytest.mark.long
def test_an_export_that_is_cut_off_anywhere_is_no_model_and_goes_with_the_next(
    theirs, bucket_folder, tmp_path, s3_port, use_s3, monkeypatch, devices8
):
    del devices8
    directory, tensors = theirs
    program = program_of(llama(directory), make_mesh({"data": 8}))
    state = load_hf(program, directory)
    monkeypatch.setattr(requests, "WAITS", (0.01,))
    monkeypatch.setattr(lease, "_is_dead", lambda owner: True)  # As if this process were killed.
    options = {"like": directory, "max_shard_bytes": 4000}
    with Proxy(s3_port) as proxy:
        use_s3(port=proxy.port)
        export_hf(program, state, bucket_folder / "whole", **options)
    count = len(proxy.changes)
    assert count > 8
    target = bucket_folder / "out"
    for at in range(1, count + 1):
        with Proxy(s3_port, lambda *request, at=at: 403 if request[2] >= at else None) as proxy:
            use_s3(port=proxy.port)
            with pytest.raises(BucketError, match=r"access is refused \(403\)"):
                export_hf(program, state, target, **options)
        use_s3()
        assert not (target / "config.json").is_file() or at == count
    export_hf(program, state, target, **{**options, "max_shard_bytes": 2**20})
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert set(target.names()) == files
    assert_same_files(read(download(target, tmp_path / "out")), tensors)
    with pytest.raises(ValueError, match=r"s3://.*out is not empty, expected a new directory"):
        export_hf(program, state, target, **options)


@server
def test_of_two_exports_to_one_folder_one_is_whole_and_the_other_says_so(
    theirs, bucket_folder, tmp_path, monkeypatch, devices8
):
    del devices8
    directory, tensors = theirs
    program = program_of(llama(directory), make_mesh({"data": 8}))
    state = load_hf(program, directory)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.2)
    target = bucket_folder / "out"
    errors = during(monkeypatch, lambda: export_hf(program, state, target, max_shard_bytes=4000))
    export_hf(program, state, target, like=directory)
    assert "out is being written by another process: process " in str(errors.pop())
    assert_same_files(read(download(target, tmp_path / "out")), tensors)

    # The first was cut off for so long that the second takes over.
    monkeypatch.setattr(lease, "_is_dead", lambda owner: True)
    target = bucket_folder / "late"
    during(monkeypatch, lambda: export_hf(program, state, target, dtype="bfloat16"))
    with pytest.raises(BucketError, match=r"another export has written .*late in the meantime"):
        export_hf(program, state, target)
    found = read(download(target, tmp_path / "late"))
    assert_same_files(found, {name: x.astype(jnp.bfloat16) for name, x in tensors.items()})
    assert set(target.names()) == {"config.json", "model.safetensors"}
    # Of a server that locks nothing, a file that another one replaces is found at the end.
    target, finish = bucket_folder / "mixed", export._write_rest

    def replace(*args):
        (target / "model.safetensors").write_bytes(b"another one's")
        finish(*args)

    monkeypatch.setattr(export, "_write_rest", replace)
    with pytest.raises(BucketError, match=r"another export has written .*mixed in the meantime"):
        export_hf(program, state, target)
