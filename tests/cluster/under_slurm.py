"""Scenarios of two hosts under Slurm: steps of `srun`, and the script of `manualpar launch`."""

import time

from tests.cluster.bench import LONG, MANUALPAR, SAVED, SHORT, SMALL, TRAIN, TRAINS, Seen
from tests.cluster.hosts import call


def found_without_a_flag(bench):
    job = bench.srun(*TRAIN, *SMALL, SHORT, f"--workdir={bench.workdir}")
    began = job.wait_for_imports()
    seconds, sentence = job.wait_for(r"mesh: ", since=began)
    assert job.code() == 0
    assert "(2 hosts; " in sentence
    return Seen(seconds, sentence, "0")


def doctor_finds_two_hosts_ready(bench):
    workdir = f"--workdir={bench.workdir}"
    job = bench.srun(*MANUALPAR, "doctor", "--cluster", workdir)
    began = job.wait_for_imports()
    seconds, sentence = job.wait_for(r"n2: ok", since=began)
    assert job.find(r"n1: ok")
    assert job.code() == 0
    return Seen(seconds, sentence, "0")


def scancel(bench):
    number, output = bench.submit("cancelled")
    output.wait_for(TRAINS)
    began = time.monotonic()
    call("scancel", number)
    seconds, sentence = output.wait_for("stopped after step .* is saved", since=began)
    output.wait_for(f"job {number}: srun ended with 75 after 0 restarts")
    output.wait_for(f"job {number}: not requeued, because it is ")
    return Seen(seconds, sentence, "75")


def limit(number, minutes):
    """Changes a job's time limit, as soon as Slurm permits it: not while the job is requeued."""
    until = time.monotonic() + 60
    while True:
        try:
            return call("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")
        except AssertionError:
            assert time.monotonic() < until
            time.sleep(0.2)


def time_limit_with_requeue(bench):
    submitted = time.monotonic()
    number, output = bench.submit("limited", "--time=60", "--signal=B:USR1@60")
    output.wait_for(TRAINS)
    # Slurm sends the signal in the next minute, however long the start took.
    limit(number, int((time.monotonic() - submitted) // 60) + 2)
    output.wait_for("SIGUSR1: stopping after this step")
    began = time.monotonic()
    seconds, sentence = output.wait_for("stopped after step .* is saved", since=began)
    output.wait_for(f"job {number}: srun ended with 75 after 0 restarts")
    limit(number, 60)
    output.wait_for("going on from the checkpoint of step")
    time.sleep(2.0)
    call("scancel", "--signal=USR1", number)
    output.wait_for(f"job {number}: srun ended with 75 after 1 restarts")
    output.wait_for("not requeued, because it has been restarted 1 times")
    return Seen(seconds, sentence, "75")


def a_task_that_never_comes(bench):
    late = 'if [ "$SLURM_PROCID" = 1 ]; then sleep 40; exit 0; fi; exec "$@"'
    flags = (*SMALL, LONG, "--wait=8", f"--workdir={bench.workdir}")
    job = bench.srun("bash", "-c", late, "bash", *TRAIN, *flags)
    began = job.wait_for_imports(1)
    seconds, sentence = job.wait_for("process 1 .*not connected|not connected.*1", since=began)
    job.wait_for("0: process 1 was lost: it has not connected to process 0 within 8 s")
    job.wait_for("task 0: Exited with exit code 4")
    return Seen(seconds, sentence, "4")


def a_second_job_in_the_workdir(bench):
    flags = (*TRAIN, *SMALL, LONG, f"--workdir={bench.workdir}")
    first = bench.srun(*flags)
    first.wait_for(TRAINS)
    second = bench.srun(*flags, name="second")
    began = second.wait_for_imports()
    seconds, sentence = second.wait_for("error: ", since=began)
    assert second.code() == 2
    assert first.popen.poll() is None, "the first run has ended"
    return Seen(seconds, sentence, "2")


def a_host_cut_off(bench):
    number, output = bench.submit("cut")
    output.wait_for(TRAINS)
    began = time.monotonic()
    bench.n2.plug("down")
    seconds, sentence = output.wait_for("process 1 on n2 .* was lost", since=began)
    output.wait_for("n1: task 0: Exited with exit code 4")
    # Then srun waits for Slurm, which requeues the job when it believes that the host has failed.
    output.wait_for("Node failure on n2")
    state, until = "", time.monotonic() + 60
    while state != "PENDING":
        assert time.monotonic() < until, f"the job is {state}"
        state = call("squeue", "--noheader", f"--jobs={number}", "--format=%T").strip()
        time.sleep(0.2)
    return Seen(seconds, sentence, "4")


def the_link_between_two_hosts_cut(bench):
    number, output = bench.submit("apart", wait=10)
    output.wait_for(SAVED)
    began = time.monotonic()
    bench.n2.drop("--source", bench.n1.address)
    seconds, sentence = output.wait_for("process 1 on n2 .* was lost", since=began)
    output.wait_for(f"job {number}: srun ended with 4 after 0 restarts")
    bench.n2.mend()
    output.wait_for("going on from the checkpoint of step")
    return Seen(seconds, sentence, "4")


def refused(bench, words, *, code=2, command=(*TRAIN, *SMALL, SHORT)):
    """Runs a command that ends with `code` before the first step, and a sentence with `words`."""
    job = bench.srun(*command, f"--workdir={bench.workdir}")
    began = job.wait_for_imports()
    seconds, sentence = job.wait_for(words, since=began)
    assert job.code() == code
    return Seen(seconds, sentence, str(code))


def firewall(bench):
    bench.n2.drop("--protocol", "tcp", "--source", bench.n1.address, "--syn")
    return refused(bench, "n1 cannot reach n2 at 10.77.0.2:")


def doctor_names_a_firewall(bench):
    bench.n2.drop("--protocol", "tcp", "--source", bench.n1.address, "--syn")
    doctor = *MANUALPAR, "doctor", "--cluster"
    return refused(bench, "n1: cannot reach n2 at 10.77.0.2:", code=7, command=doctor)


def unshared_workdir(bench):
    bench.workdir.mkdir()
    bench.n2.call("mount", "-t", "tmpfs", "tmpfs", str(bench.workdir))
    try:
        return refused(bench, "does not see in")
    finally:
        bench.n2.call("umount", str(bench.workdir))


def debians_hosts_file(bench):
    bench.n2.hosts.write_text(f"127.0.1.1 n2\n{bench.n2.hosts.read_text()}")
    return refused(bench, "resolves its own name to 127.0.1.1")


def a_signal_before_the_run_can_save(bench):
    number, output = bench.submit("early")
    until = time.monotonic() + 30
    while not call("squeue", "--noheader", "--steps", "--format=%i").strip():
        assert time.monotonic() < until, "the job does not start"
        time.sleep(0.1)
    time.sleep(1.0)
    began = time.monotonic()
    call("scancel", "--signal=USR1", number)
    seconds, sentence = output.wait_for(f"job {number}: srun ended with 138", since=began)
    output.wait_for("mesh: ")
    return Seen(seconds, sentence, "138")


UNDER_SLURM = (
    found_without_a_flag,
    doctor_finds_two_hosts_ready,
    scancel,
    time_limit_with_requeue,
    a_task_that_never_comes,
    a_second_job_in_the_workdir,
    a_host_cut_off,
    the_link_between_two_hosts_cut,
    firewall,
    doctor_names_a_firewall,
    unshared_workdir,
    debians_hosts_file,
    a_signal_before_the_run_can_save,
)
