"""What is tried again, what is said about it, and what is not."""

import pytest

from manualpar.system.storage import BucketError, as_path
from manualpar.system.storage.bucket_path import WAITS, request

PATH = as_path("s3://bucket/key")


class AnswerError(OSError):
    """An error that holds a server's answer, as botocore's has it."""

    def __init__(self, status, code, text="hush in the answer"):
        super().__init__(text)
        self.response = {
            "Error": {"Code": code, "Message": text},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


class NoCredentialsError(Exception):
    """Of the same name as botocore's."""


def named(name, module):
    """An exception class of a name, in a package."""
    return type(name, (Exception,), {"__module__": module})


@pytest.fixture
def slept(monkeypatch):
    seconds = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


def failing(*errors):
    """An action that fails with each of the errors and then succeeds."""
    left = list(errors)

    def act():
        if left:
            raise left.pop(0)
        return "done"

    return act


@pytest.mark.parametrize(
    "error",
    [
        AnswerError(503, "SlowDown"),
        AnswerError(500, "InternalError"),
        AnswerError(409, "ConditionalRequestConflict"),
        AnswerError(429, "TooManyRequests"),
        ConnectionResetError(104, "reset"),
        TimeoutError(),
        named("ConnectionError", "botocore.exceptions")(),
        named("ClientError", "aiohttp.client_exceptions")(),
    ],
    ids=repr,
)
def test_what_may_pass_is_tried_again_and_told(error, slept, caplog):
    assert request(PATH, failing(error, error)) == "done"
    assert slept == list(WAITS[:2])
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert caplog.messages[0].startswith("s3://bucket/key: the server ")
    assert caplog.messages[0].endswith("; trying again in 0.5 s")
    assert "hush" not in caplog.text


def test_the_tries_have_an_end(slept):
    error = AnswerError(503, "SlowDown")
    with pytest.raises(BucketError) as raised:
        request(PATH, failing(*[error] * 99))
    assert str(raised.value) == (
        "s3://bucket/key: the server answered SlowDown, in each of 7 tries: check the network, and "
        "AWS_ENDPOINT_URL, which is for servers other than Amazon's"
    )
    assert slept == list(WAITS)
    assert raised.value.__suppress_context__


def test_a_cause_is_looked_at(slept):
    outer = OSError(5, "hush")
    outer.__cause__ = AnswerError(502, "BadGateway")
    assert request(PATH, failing(outer)) == "done"
    assert len(slept) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            AnswerError(404, "NoSuchBucket"),
            "there is no such bucket: check its name, and AWS_ENDPOINT",
        ),
        (
            AnswerError(403, "403"),
            r"access is refused \(403\): check AWS_ACCESS_KEY_ID and AWS_SECRET_",
        ),
        (PermissionError("hush"), "access is refused"),
        (NoCredentialsError("hush"), "there are no credentials in the environment: set AWS_ACC"),
        (AnswerError(400, "InvalidRequest"), r"the request failed \(InvalidRequest\)"),
        (AnswerError(400, "hush <xml>"), r"the request failed \(400\)|\(AnswerError\)"),
        (KeyError("hush"), r"the request failed \(KeyError\)"),
    ],
)
def test_what_stays_wrong_is_one_sentence_without_the_answer(error, said, slept):
    with pytest.raises(BucketError, match=said) as raised:
        request(PATH, failing(error))
    assert not slept
    assert "hush" not in str(raised.value)
    assert str(raised.value).startswith("s3://bucket/key: ")


def test_a_missing_object_and_one_in_the_way(slept):
    with pytest.raises(FileNotFoundError, match="s3://bucket/key does not exist"):
        request(PATH, failing(FileNotFoundError("hush")))
    with pytest.raises(FileExistsError, match="s3://bucket/key exists"):
        request(PATH, failing(FileExistsError("hush")))
    assert not slept


def test_a_server_of_google_is_told_by_its_own_names(slept):
    refused = named("HttpError", "gcsfs.retry")("hush")
    refused.code = 403
    with pytest.raises(BucketError, match="GOOGLE_APPLICATION_CREDENTIALS"):
        request(as_path("gs://bucket/key"), failing(refused))
    busy = named("HttpError", "gcsfs.retry")()
    busy.code = 503
    assert request(as_path("gs://bucket/key"), failing(busy)) == "done"
    assert len(slept) == 1
