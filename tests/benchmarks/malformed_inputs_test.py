"""A sample of what nobody can follow, each answered in one sentence that names the field."""

import jax
import pytest
from absl import flags

from benchmarks.malformed_cases import Case, field_cases
from benchmarks.malformed_files import make_cases
from benchmarks.malformed_inputs import Answer, count_compilations, run_as_main, shortcomings
from configs import fsdp
from manualpar.commands.command_line import parse_command_line
from manualpar.data import load_dataset
from manualpar.errors import UsageError
from manualpar.training.config import check_config
from manualpar.training.config_fields import FIELDS, MODEL_FIELDS


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return list(field_cases(tmp_path_factory.mktemp("inputs")))


def test_every_field_gets_values_that_it_cannot_have(cases):
    names = {case.name.split("=")[0] for case in cases}
    assert names == {*FIELDS, *MODEL_FIELDS["classifier"], *MODEL_FIELDS["transformer"]}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_value_that_a_field_cannot_have_is_one_sentence(cases, part):
    for case in cases[part::4]:
        if case.name.endswith("_factors=(3,)"):  # A model with such numbers refuses them.
            continue
        with pytest.raises((UsageError, ValueError)) as caught:
            check_config(_parse(case).config)
        assert case.names in str(caught.value), case.name
        assert "\n" not in str(caught.value), case.name


@pytest.fixture(scope="module")
def other_cases(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.malformed_models.MANY", 10)
        return list(make_cases(tmp_path_factory.mktemp("inputs")))


def test_there_are_hundreds_of_other_inputs(other_cases):
    assert len({(case.module, case.kind, case.name) for case in other_cases}) >= 300


def test_no_folder_of_tokens_that_a_run_could_train_on_counts_as_malformed(other_cases):
    folders = [case for case in other_cases if case.kind == "token folders"]
    assert len(folders) > 30
    assert [case.name for case in folders if _loads(_parse(case).config.data.path)] == []


def _loads(path):
    try:
        load_dataset("tokens", path=path, seed=0, sequence_length=128)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("module", ["experiments.fsdp", "manualpar.launch", "docs.run"])
def test_a_command_runs_as_on_a_command_line(module, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [module, "--nope=1"])
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    assert run_as_main(module) == 2
    assert capsys.readouterr().err.startswith("error: --nope is not a known flag")


def test_a_process_that_is_killed_has_counted_what_it_compiled(tmp_path, monkeypatch):
    counters = []
    name = "register_event_duration_secs_listener"
    monkeypatch.setattr(jax.monitoring, name, counters.append)
    count_compilations(tmp_path / "compiled")
    counters[0]("/jax/core/compile/backend_compile_duration", 0.1)
    counters[0]("/jax/core/compile/jaxpr_trace_duration", 0.1)
    assert len((tmp_path / "compiled").read_bytes()) == 1


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (Answer(2, "", "error: config.seed is -1\n", 0, 0), []),
        (Answer(1, "", "error: config.seed is -1\n", 0, 0), ["exit code 1"]),
        (Answer(2, "", "error: config.seed\nmore\n", 0, 0), ["2 lines"]),
        (Answer(6, "", "error: it is -1\n", 0, 0), ["'config.seed' is not named"]),
        (
            Answer(2, "", "error: config.seed is -1\n", 3, 2**31),
            ["3 programs compiled", "2048 MiB"],
        ),
    ],
)
def test_an_answer_that_falls_short_is_found_out(answer, found):
    assert shortcomings(Case("fields", "", "", (), "config.seed"), answer) == found


def _parse(case: Case):
    return parse_command_line(["fsdp", *case.arguments], default_config=fsdp.__file__)
