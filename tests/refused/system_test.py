"""Mistakes in cluster settings and bucket paths, and files that somebody else may have written."""

import functools
import importlib.util
import socket
import warnings

import jax
import pytest

from manualpar.errors import MissingExtraError
from manualpar.system.cluster import initialize
from manualpar.system.cluster.environment import find_assignment
from manualpar.system.cluster.startup import listen
from manualpar.system.reports.pictures import new_figure
from manualpar.system.storage import as_path, untrusted
from manualpar.system.storage.untrusted import MAX_DEPTH, parse_object
from tests.refused.sentences import one_line
from tests.refused.table import check_refused, rows

OURS = {
    "MANUALPAR_COORDINATOR_ADDRESS": "a:1",
    "MANUALPAR_NUM_PROCESSES": "2",
    "MANUALPAR_PROCESS_ID": "1",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}


def assign(given, environment=None):
    find_assignment(*given, environment or {})


def assign_from(environment):
    assign((None, None, None), environment)


def start(environment, refuse, *, devices=None):
    """Initialises the cluster while jax's own start, or its list of devices, raises an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.distributed, "initialize", refuse)
        if devices:
            patch.setattr(jax, "devices", devices)
        initialize(environment=environment)


def find_nobody(*_, **__):
    """Acts as jax does in a pod without the package `kubernetes`: warns, and raises an error."""
    warnings.warn("Kubernetes environment detected, but ...", stacklevel=1)
    raise ValueError("coordinator_address should be defined.")


def find_no_address():
    raise RuntimeError("Unable to initialize backend 'cpu': Unable to find address for h; bin")


def without_extras(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        call()


def draw(path):
    with new_figure(path, (4, 3), title=""):
        pass


def listen_where_another_does(host):
    with socket.create_server((host, 0)) as server:
        listen(f"{host}:{server.getsockname()[1]}")


def parse_at_most_99_bytes(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(untrusted, "MAX_BYTES", 99)
        parse_object(text)


REFUSED = [
    *rows(
        "processes",
        assign,
        (("h:5", None, None), "coordinator_address given without num_processes and process_id"),
        (("h:5", 2, None), "given without process_id, expected all three or none"),
        ((None, 2, 0), "given without coordinator_address"),
        (("h", 2, 0), "coordinator_address='h', expected <host>:<port>"),
        (("h:5", 2, 2), "process_id=2 with num_processes=2, expected a number from 0"),
        (("auto", 2, None), "coordinator_address='auto' comes with num_processes=2"),
    ),
    *rows(
        "processes of an environment",
        assign_from,
        (
            {"MANUALPAR_NUM_PROCESSES": "2", "MANUALPAR_PROCESS_ID": "0"},
            "given without MANUALPAR_COORDINATOR_ADDRESS",
        ),
        (OURS | {"MANUALPAR_PROCESS_ID": "x"}, "='x', expected integers"),
        ({"JAX_COORDINATOR_ADDRESS": "h:5"}, "Set MANUALPAR_NUM_PROCESSES"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI 5 does not give"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2 says that MPICH or Intel MPI started several"),
    ),
    *rows(
        "a cluster that jax does not find",
        functools.partial(start, refuse=find_nobody),
        (
            POD,
            r"JOB_COMPLETION_INDEX=3 shows that this is one.* not find the others \(ValueError: "
            r"coordinator_address should be defined\.\).*MANUALPAR_COORDINATOR_ADDRESS, "
            "MANUALPAR_NUM_PROCESSES and MANUALPAR_PROCE",
        ),
    ),
    *rows(
        "a name that leads elsewhere",
        functools.partial(start, refuse=lambda *_, **__: None, devices=find_no_address),
        (
            {"MEGASCALE_NUM_SLICES": "2"},
            ConnectionError,
            r"this host does not have that address .* in /etc/hosts",
        ),
    ),
    *rows(
        "times",
        lambda options: initialize(environment={}, **options),
        *(
            ({field: seconds}, f"{field}=.*, expected a positive number of seconds")
            for field in ("timeout_seconds", "start_timeout_seconds")
            for seconds in (0, -1.0, float("nan"), float("inf"))
        ),
    ),
    *rows(
        "listen",
        listen,
        *(
            (
                address,
                ConnectionError,
                r"^(?=.*JAX_COORDINATOR_BIND_ADDRESS).*expected an address of this host",
            )
            for address in ("203.0.113.77:0", "no.such.host.invalid:1234")
        ),
    ),
    *rows(
        "listen",
        listen_where_another_does,
        ("127.0.0.1", ConnectionError, "another program uses that port"),
    ),
    *rows(
        "path",
        as_path,
        *(
            (text, r"^(?!.*(hush|AKIA)).*expected (s3|gs)://")
            for text in (
                "s3://AKIAUSER:hush@bucket/x",
                "s3://AKIAUSER:hu/sh@bucket/x",
                "gs://AKIAUSER@bucket/x",
                "s3://",
                "s3:///hush",
                "s3://../hush",
                "https://AKIAUSER:hush@bucket/x",
                "file:///hush",
            )
        ),
        *(
            (text, r"contains '..' or unprintable characters")
            for text in ("s3://bucket/a/../b", "s3://bucket/a\0b", "gs://bucket/a\nb")
        ),
    ),
    *rows(
        "an extra",
        without_extras,
        (
            lambda: draw("x.png"),
            MissingExtraError,
            r"^x.png needs matplotlib, .* 'manualpar\[plots\]'$",
        ),
        *(
            (as_path(path).read_bytes, ImportError, rf"{package}, .*'manualpar\[buckets\]'")
            for path, package in (("s3://bucket/x", "s3fs"), ("gs://bucket/x", "gcsfs"))
        ),
    ),
    *rows(
        "JSON",
        parse_object,
        ("", r"is not JSON \(Expecting value"),
        ("[" * 200_000, "is nested deeper than 64 levels"),
        ('{"a":' * 200_000, "is nested deeper than 64 levels"),
        ('{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", "is nested deeper than 64 levels"),
        ("[1]", r"is not a JSON object \(list\)"),
        ("null", r"is not a JSON object \(NoneType\)"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": -Infinity}', "-Infinity is no number"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON .*digits"),
        (b'{"a": "\xff\xfe"}', r"is not UTF-8 \(byte 7\)"),
        ('{"a": 1}'.encode("utf-16"), "is not UTF-8"),
        (b'{"a": 1', "is not JSON"),
    ),
    *rows(
        "JSON",
        parse_at_most_99_bytes,
        ('{"a": "' + "x" * 100 + '"}', one_line("has more than 99 bytes")),
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
