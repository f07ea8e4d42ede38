"""What tensorstore is told of a bucket, and of the environment nothing that is secret."""

import json

import pytest

from manualpar.system.storage import BucketError, as_path, key_value_store

NAMES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in (*NAMES, "AWS_ACCESS_KEY_ID", "STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
        monkeypatch.delenv(name, raising=False)


def test_amazon_by_default_and_another_server_by_the_environment(monkeypatch):
    folder = as_path("s3://bucket/run/1")
    amazon = {"driver": "s3", "bucket": "bucket", "path": "run/1/"}
    assert key_value_store(folder) == amazon
    assert key_value_store(as_path("s3://bucket"))["path"] == ""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one")
    other = {"endpoint": "http://one", "aws_region": "us-east-1"}
    assert key_value_store(folder) == amazon | other
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://two")
    monkeypatch.setenv("AWS_REGION", "eu")
    assert key_value_store(folder) == amazon | {"endpoint": "http://two", "aws_region": "eu"}


def test_no_secret_is_in_it(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hush")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    spec = key_value_store(as_path("s3://bucket/run"))
    assert spec["aws_credentials"] == {"type": "environment"}
    assert "hush" not in json.dumps(spec)


def test_arrays_go_to_the_server_of_the_other_files(monkeypatch):
    folder = as_path("gs://bucket/run")
    google = {"driver": "gcs", "bucket": "bucket", "path": "run/"}
    assert key_value_store(folder) == google
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://one")
    with pytest.raises(BucketError, match="set TENSORSTORE_GCS_HTTP_URL to the same server"):
        key_value_store(folder)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://one")
    assert key_value_store(folder) == google
