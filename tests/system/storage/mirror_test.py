"""Results that are written on a disk and put into a folder of objects."""

import time

import pytest

from manualpar.system.storage import BucketError, BucketPath, mirror, mirrored


@pytest.fixture
def objects(monkeypatch):
    """Objects by key, which the methods of `BucketPath` that are used here find; and their puts."""
    there, puts = {}, []

    def write(self, data):
        if there.get("broken"):
            raise BucketError("the bucket is broken")
        there[self.key] = data
        puts.append(self.name)

    def files(self):
        below = f"{self.key}/"
        return {key[len(below) :]: len(data) for key, data in there.items() if key[:4] == below}

    monkeypatch.setattr(BucketPath, "write_bytes", write)
    monkeypatch.setattr(BucketPath, "read_bytes", lambda self: there[self.key])
    monkeypatch.setattr(BucketPath, "files", files)
    there["puts"] = puts
    return there


RUN = BucketPath("s3", "bucket", "run")


def use(check=lambda: None, **options):
    return mirrored(RUN, left_out=("checkpoints/", ".lock"), check=check, **options)


def test_a_local_folder_is_itself(tmp_path):
    with mirrored(tmp_path, left_out=(), check=lambda: None) as (folder, publish):
        assert folder == tmp_path
        publish()


def test_what_has_changed_is_put_whole_and_what_is_cut_off_elsewhere_first(objects):
    objects |= {"run/metrics.jsonl": b"1\n2\n", "run/.lock-1": b"", "run/checkpoints/1/x": b""}
    with use() as (folder, publish):
        assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
        publish()
        assert not objects["puts"], "nothing has changed"
        (folder / "config.json").write_text("{}")
        (folder / ".metrics.jsonl.draft").write_text("")
        (folder / "discarded.jsonl").write_text("2\n")
        (folder / "metrics.jsonl").write_text("1\n")
        publish()
        assert objects["puts"] == ["discarded.jsonl", "config.json", "metrics.jsonl"]
        assert objects["run/metrics.jsonl"] == b"1\n"
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("3\n")
        (folder / "profile" / "plugins").mkdir(parents=True)
        (folder / "profile" / "plugins" / "trace").write_text("t")
    assert objects["puts"][3:] == ["metrics.jsonl", "trace"]
    assert objects["run/metrics.jsonl"] == b"1\n3\n"
    assert objects["run/profile/plugins/trace"] == b"t"
    assert not folder.exists()


def test_a_draft_may_get_its_name_while_files_are_put(objects, monkeypatch):
    state = mirror._state

    def rename_drafts(path):
        for draft in path.parent.glob("*.draft"):
            draft.rename(draft.with_suffix(""))
        return state(path)

    monkeypatch.setattr(mirror, "_state", rename_drafts)
    with use() as (folder, publish):
        for name in ("a", "b.draft", "c.draft"):
            (folder / name).write_text("1")
        publish()
        publish()
    assert objects["puts"] == ["a", "b", "c"]


def test_files_are_put_now_and_then(objects, monkeypatch):
    monkeypatch.setattr(mirror, "PUT_SECONDS", 0.01)
    with use() as (folder, _):
        (folder / "metrics.jsonl").write_text("1\n")
        until = time.monotonic() + 10
        while "run/metrics.jsonl" not in objects:
            assert time.monotonic() < until
            time.sleep(0.01)
        objects["broken"] = True  # That is for `publish` to say.
        (folder / "metrics.jsonl").write_text("12\n")
        time.sleep(0.1)
        del objects["broken"]
    assert objects["run/metrics.jsonl"] == b"12\n"


def test_the_first_error_is_the_one_to_see(objects):
    with use() as (folder, publish):
        (folder / "config.json").write_text("{}")
        objects["broken"] = True
        with pytest.raises(BucketError, match="the bucket is broken"):
            publish()
        objects.pop("broken")
    objects["broken"] = True

    def fail():
        with use() as (folder, _):
            (folder / "x").write_text("")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        fail()
    assert raised.value.__notes__ == ["the bucket is broken"]
    with pytest.raises(BucketError), use() as (folder, _):
        (folder / "x").write_text("")


def test_who_has_lost_the_lock_puts_nothing(objects):
    def check():
        raise BucketError("another run has it")

    with pytest.raises(BucketError, match="another run has it"), use(check) as (folder, _):
        (folder / "x").write_text("")
    assert not objects["puts"]


def test_other_processes_write_nothing(objects):
    objects["run/metrics.jsonl"] = b"1\n"
    with use(is_main=False) as (folder, publish):
        assert not list(folder.iterdir())
        (folder / "x").write_text("")
        publish()
    assert not objects["puts"]
    assert "run/x" not in objects
