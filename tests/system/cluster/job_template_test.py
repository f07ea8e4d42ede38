"""The files that `manualpar launch --template` prints, with programs in place of the clusters'."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess

import pytest
import yaml

from manualpar.errors import UsageError
from manualpar.system.cluster import launch
from manualpar.system.cluster.job_template import COUNTS, FILES, HELP, render
from tests.paths import ROOT

SCHEMA = json.loads((ROOT / "tests" / "system" / "cluster" / "jobset.schema.json").read_text())
SCRIPTS = [name for name, path in FILES.items() if path.suffix != ".yaml"]
COMMAND = ["manualpar", "train", "fsdp", "--data.path='a b'", '--model.name="$x"']
# What each template has to say of itself.
TRIED = re.compile(r"^# Never run[.:]", re.MULTILINE)
TIMEOUT = 30

# Stand-ins for Slurm's programs. They write their arguments into the file `calls`.
FAKE_SRUN = """#!/bin/bash
echo "srun $* token=$MANUALPAR_TOKEN" >> calls
trap 'exit 75' USR1
trap 'exit 143' TERM
case $CODE in
wait) echo ready; while :; do sleep 0.02; done ;;
*) exit "$CODE" ;;
esac
"""
FAKE_SCONTROL = '#!/bin/bash\necho "scontrol $*" >> calls\n'
FAKE_SQUEUE = '#!/bin/bash\necho "squeue $*" >> calls\necho "$STATE"\n'


def start_job(folder, code, *, state="RUNNING", values=None, **variables):
    """Starts the Slurm script as Slurm does, in `folder`."""
    folder.mkdir(exist_ok=True)
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL), ("squeue", FAKE_SQUEUE)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "job.sbatch").write_text(render("slurm", COMMAND, values or {}))
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "CODE": str(code),
        "STATE": state,
        **variables,
    }
    return subprocess.Popen(
        ["bash", "job.sbatch"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )


def calls_of(folder):
    """The lines that the stand-ins wrote, and the token apart from them."""
    text = (folder / "calls").read_text()
    tokens = re.findall(r" token=([0-9a-f]{32})$", text, re.MULTILINE)
    return re.sub(r" token=.*", "", text).splitlines(), tokens


SRUN = f"srun --kill-on-bad-exit=0 --wait=120 {' '.join(COMMAND)} --workdir="


@pytest.mark.parametrize(
    ("code", "state", "restarts", "is_requeued"),
    [
        (0, "RUNNING", "0", False),
        (75, "RUNNING", "", True),
        (4, "RUNNING", "2", True),
        (75, "RUNNING", "3", False),
        (4, "RUNNING", "4", False),
        (138, "RUNNING", "0", True),
        (75, "COMPLETING", "0", False),
        (1, "RUNNING", "0", False),
        (2, "RUNNING", "0", False),
        (143, "RUNNING", "0", False),
    ],
)
def test_slurm_requeues_after_75_and_4_and_an_early_signal_until_the_bound(
    tmp_path, code, state, restarts, is_requeued
):
    more = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    job = start_job(tmp_path, code, state=state, values={"restarts": "3"}, **more)
    out, _ = job.communicate(timeout=TIMEOUT)
    calls, tokens = calls_of(tmp_path)
    assert job.returncode == code
    assert calls[0] == f"{SRUN}/shared/runs/train"
    assert ("scontrol requeue 7" in calls) == is_requeued
    assert f"srun ended with {code} after {restarts or 0} restarts" in out
    assert ("not requeued" in out) == (code in (4, 75, 138) and not is_requeued)
    assert len(tokens) == 1


def test_slurm_tells_the_run_to_save_and_waits_for_it(tmp_path):
    """SIGUSR1 is forwarded once. SIGTERM is not: Slurm sends it to the tasks itself."""
    job = start_job(tmp_path, "wait")
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.3)
    job.send_signal(signal.SIGUSR1)
    out, _ = job.communicate(timeout=TIMEOUT)
    assert out == "job 7: srun ended with 75 after 0 restarts\n"
    assert job.returncode == 75
    assert calls_of(tmp_path)[0][1:] == [
        "squeue --noheader --jobs=7 --format=%T",
        "scontrol requeue 7",
    ]


def test_tasks_of_an_array_have_workdirs_and_tokens_and_are_requeued_apart(tmp_path):
    found = []
    for task in ("0", "1"):
        own = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": task}
        start_job(tmp_path / task, 4, **own).communicate(timeout=TIMEOUT)
        calls, tokens = calls_of(tmp_path / task)
        assert calls == [
            f"{SRUN}/shared/runs/train/{task}",
            f"squeue --noheader --jobs=7_{task} --format=%T",
            f"scontrol requeue 7_{task}",
        ]
        found += tokens
    assert len(set(found)) == 2


def test_slurms_lines_come_before_the_first_command():
    """Slurm reads no line that begins with #SBATCH after a command."""
    lines = render("slurm", COMMAND, {"nodes": "4"}).splitlines()
    first = next(number for number, line in enumerate(lines) if line and line[0] != "#")
    head = [line for line in lines[:first] if line.startswith("#SBATCH ")]
    assert head == [line for line in lines if line.startswith("#SBATCH")]
    assert {
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --signal=B:USR1@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    } <= set(head)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_scripts(name, tmp_path):
    script = tmp_path / "script"
    script.write_text(render(name, ["manualpar", "train", "fsdp", "--data.path=it's"], {}))
    subprocess.run(["bash", "-n", script], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, "--shell=bash", script], check=True)


@pytest.mark.parametrize("name", FILES)
def test_each_says_what_was_never_run_and_fills_every_place(name):
    text = render(name, COMMAND, {})
    assert TRIED.search(text[: text.index("\n\n")] if name in SCRIPTS else text)
    assert "{{" not in text
    assert "/shared/runs/train" in text or "gs://BUCKET/runs/train" in text


def mistakes(value, schema, where="jobset"):
    """Yields the places where a value does not have the form that a JSON Schema demands."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        if all([*mistakes(value, choice)] for choice in schema["anyOf"]):
            yield f"{where}={value!r}"
        return
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kinds["number"] = (int, float)
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        yield f"{where}={value!r} is no {schema['type']}"
        return
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from mistakes(item, schema["items"], f"{where}[{number}]")
    if isinstance(value, dict):
        yield from (f"{where} has no {name}" for name in {*schema.get("required", ())} - {*value})
        others = schema.get("additionalProperties", False)
        for name, item in value.items():
            rule = schema.get("properties", {}).get(name, others)
            if rule is False:
                yield f"{where}.{name}"
            elif rule is not True:
                yield from mistakes(item, rule, f"{where}.{name}")


def test_the_jobset_has_only_fields_that_exist():
    jobset = yaml.safe_load(render("jobset", COMMAND, {"nodes": "4", "name": "lm"}))
    assert list(mistakes(jobset, SCHEMA)) == []
    policy = jobset["spec"]["failurePolicy"]
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (policy["maxRestarts"], job["parallelism"], job["completions"]) == (20, 4, 4)
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == ["tini", "--", *COMMAND, "--workdir=/shared/runs/train"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    # The first pod of the first job of `workers`, in the JobSet's own subdomain.
    assert variables["MANUALPAR_COORDINATOR_ADDRESS"] == "lm-workers-0-0.lm:1234"
    assert variables["MANUALPAR_NUM_PROCESSES"] == "4"
    # The schema finds what is wrong.
    policy["maxRestart"], policy["maxRestarts"] = 1, "20"
    del policy["rules"][0]["name"]
    assert len(list(mistakes(jobset, SCHEMA))) == 3


def test_skypilots_file_gives_every_node_its_number():
    task = yaml.safe_load(render("skypilot", COMMAND, {"nodes": "3"}))
    assert task["num_nodes"] == 3
    last = task["run"].splitlines()[-1]
    assert shlex.split(last) == ["exec", *COMMAND, "--workdir=gs://BUCKET/runs/train"]
    variables = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3",
        "SKYPILOT_NUM_NODES": "3",
        "SKYPILOT_NODE_RANK": "2",
    }
    show = task["run"].replace(last, "env")
    path = {"PATH": os.environ["PATH"]}
    out = subprocess.run(
        ["bash", "-c", show], env=path | variables, capture_output=True, text=True, check=True
    ).stdout
    ours = dict(line.split("=", 1) for line in out.splitlines() if line.startswith("MANUALPAR_"))
    assert ours == {
        "MANUALPAR_COORDINATOR_ADDRESS": "10.0.0.1:1234",
        "MANUALPAR_NUM_PROCESSES": "3",
        "MANUALPAR_PROCESS_ID": "2",
    }


@pytest.mark.parametrize(("codes", "last"), [("75 4 0", 0), ("4 2", 2), ("75 4 75 4", 4)])
def test_on_a_tpu_pod_the_command_is_started_again_until_the_bound(tmp_path, codes, last):
    """The stand-in for gcloud takes the codes of the command from the file `codes`."""
    (tmp_path / "gcloud").write_text(
        """#!/bin/bash
case "$*" in
*"manualpar train"*) ;;
*) exit 0 ;;
esac
echo "${@: -1}" >> calls
read -r code rest < codes
echo "$rest" > codes
exit "$code"
"""
    )
    (tmp_path / "git").write_text("#!/bin/bash\n")
    for program in ("gcloud", "git"):
        (tmp_path / program).chmod(0o755)
    (tmp_path / "codes").write_text(f"{codes}\n")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ZONE": "z"}
    script = render("gcloud-tpu", COMMAND, {"restarts": "3"})
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, timeout=TIMEOUT)
    assert done.returncode == last
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == len(codes.split())
    remote = calls[0].removeprefix("--command=").rpartition("; ")[2]
    more = ["--workdir=gs://BUCKET/runs/train", "--coordinator-address=auto"]
    assert shlex.split(remote) == [*COMMAND, *more]


def test_xpk_gets_the_command_as_one_argument(tmp_path):
    (tmp_path / "xpk").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "xpk").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CLUSTER": "c"}
    out = subprocess.run(
        ["bash", "-c", render("xpk", COMMAND, {"slices": "2"})],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert {"--cluster=c", "--num-slices=2", "--restart-on-exit-codes=4,75"} <= set(out)
    whole = out[-1].removeprefix("--command=")
    assert shlex.split(whole) == ["exec", *COMMAND, "--workdir=gs://BUCKET/runs/train"]


def test_the_command_line_prints_the_file(capsys):
    argv = ["launch", "--template=slurm", "--gpus-per-node=4", "--", "x", "--template=y"]
    assert launch.main(argv) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --gpus-per-node=4\n" in out
    assert "x --template=y --workdir=" in out
    assert launch.main(["launch", "--template", "jobset"]) == 0
    assert '"fsdp_lm"' in capsys.readouterr().out


def test_every_option_belongs_to_a_template():
    texts = "".join(path.read_text() for path in FILES.values())
    assert set(re.findall(r"\{\{(\w+)=", texts)) == {name.replace("-", "_") for name in HELP}
    assert set(COUNTS) <= set(HELP)


@pytest.mark.parametrize(
    ("template", "command", "values", "message"),
    [
        (
            "slurm",
            COMMAND,
            {"slices": "2"},
            "slurm has no --slices, expected one of --name, --nodes",
        ),
        *itertools.product(
            ["slurm"],
            [COMMAND],
            [{"nodes": "0"}, {"nodes": "two"}, {"gpus_per_node": "-1"}],
            ["expected a positive integer such as 2"],
        ),
        ("jobset", COMMAND, {"name": "A job"}, "expected at most 40 small letters"),
        ("slurm", COMMAND, {"workdir": "a b"}, "--workdir='a b': expected no spaces"),
        ("slurm", ["x", "--workdir=y"], {}, "the command has --workdir, expected it before the --"),
        ("slurm", ["x", "a\nb"], {}, "the command has a line break"),
    ],
)
def test_mistakes_are_refused(template, command, values, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        render(template, command, values)


def test_mistakes_on_the_command_line_are_a_sentence(capsys):
    assert launch.main(["launch", "--template=xpk", "--nodes=2"]) == 2
    assert capsys.readouterr().err.startswith("error: the template xpk has no --nodes, expected")
    with pytest.raises(SystemExit, match="2"):
        launch.main(["launch", "--template=slrum"])
    assert "--template=slrum: expected one of" in capsys.readouterr().err
