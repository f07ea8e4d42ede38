"""A budget is kept by what it was written from; one byte more breaks it and names the module."""

import copy
import math
import re

import hypothesis
import pytest
from hypothesis import strategies as st

from manualpar.inspect.budgets import (
    Budget,
    budget_text,
    check_budget,
    matches,
    parse_budgets,
    parse_size,
    replace_budget,
)

UP, DOWN, HEAD = "layers_0/mlp/up", "layers_1/mlp/up", "head"


def _collective(module: str, sent: float, **fields) -> dict:
    return {
        "kind": "all_gather",
        "axes": "data",
        "purpose": "gather_params",
        "module": module,
        "times": 1,
        "bytes": sent,
        "shape": [4],
        "dtype": "float32",
        **fields,
    }


def _ledger(*collectives: dict, **fields) -> dict:
    """What `Ledger.to_json` returns, of these collectives."""
    counts = {}
    for found in collectives:
        counts[found["kind"]] = counts.get(found["kind"], 0) + found["times"]
    return {
        "mesh": {"data": 8},
        "bytes": {"total": sum(found["bytes"] for found in collectives)},
        "counts": counts,
        "collectives": list(collectives),
        "flops": {
            "total": 600,
            "by_phase": {},
            "by_module": {UP: 200, DOWN: 200, HEAD: 200},
            "by_dtype": {"float8": {UP: 200, DOWN: 200}, "bfloat16": {HEAD: 200}},
        },
        "memory": {"parameters": 700, "gathered": 300, "peak": 1000},
        "compiled": None,
        "changes": [],
        "notes": [],
        **fields,
    }


STEP = _ledger(
    _collective(UP, 100, times=2),
    _collective(DOWN, 100, times=2),
    _collective(HEAD, 50.5),
    _collective(UP, 40, purpose="scatter_gradients", kind="reduce_scatter"),
    _collective(DOWN, 40, purpose="scatter_gradients", kind="reduce_scatter"),
    _collective("", 7, purpose="sync_metrics", kind="all_reduce", axes="replica,data"),
)


def _budget(text: str) -> Budget:
    return parse_budgets(f"[lm]\n{text}", "budgets.toml")["lm"]


def _check(text: str, ledger: dict = STEP):
    return check_budget(_budget(text), ledger, "budgets.toml")


@pytest.mark.parametrize(
    ("key", "measured"),
    [
        ("bytes", 338),  # 337.5: a part of a byte counts as one.
        ("collectives", 8),
        ("flops", 600),
        ("peak_memory", 1000),
        ("purposes.gather_params.bytes", 251),
        ("purposes.gather_params.collectives", 5),
        ("purposes.regather_params.bytes", 0),
        ("axes.data.bytes", 331),
        ('axes."replica,data".bytes', 7),
        ("axes.data.collectives", 7),
        ('modules."layers_0/mlp/up".bytes', 140),
        ('modules."layers_1/mlp/up".collectives', 3),
        ("modules.head.flops", 200),
        ('modules."".bytes', 7),
        ("dtypes.float8.flops", 400),
        ("dtypes.float32.flops", 0),
    ],
)
def test_a_limit_holds_up_to_what_is_measured(key, measured):
    verdict = _check(f"{key} = {measured}")
    assert verdict == type(verdict)((), (), ())
    if measured:
        [sentence] = _check(f"{key} = {measured - 1}").broken
        assert sentence.startswith(f"lm: {key}")
        assert f" {measured:,}, expected at most {measured - 1:,}: 1 too many" in sentence


def test_a_product_that_falls_back_is_named():
    worse = {**STEP["flops"], "by_dtype": {"float8": {UP: 200}, "bfloat16": {HEAD: 200, DOWN: 200}}}
    [sentence] = _check("dtypes.bfloat16.flops = 200", {**STEP, "flops": worse}).broken
    assert "dtypes.bfloat16.flops is 400, expected at most 200: 200 too many" in sentence
    assert DOWN in sentence


def test_a_glob_limits_each_module_and_not_their_sum():
    assert not _check('modules."layers_*/mlp/up".bytes = 140').broken
    worse = _ledger(*STEP["collectives"], _collective(DOWN, 60))
    [sentence] = _check('modules."layers_*/mlp/up".bytes = 140', worse).broken
    assert sentence == (
        'lm: modules."layers_*/mlp/up".bytes: layers_1/mlp/up has 200, expected at most 140: 60 '
        "too many (+42.9%)."
    )


def test_stars_stop_at_slashes():
    assert matches("layers_*", "layers_12")
    assert not matches("layers_*", "layers_12/mlp")
    assert matches("layers_**", "layers_12/mlp")
    assert matches("**/up", "layers_0/mlp/up")
    assert matches("h?ad", "head")
    assert not matches("he.d", "head")
    assert not matches("head", "header")


def test_a_broken_total_names_the_modules_beyond_limits_of_their_own():
    text = f'bytes = 338\nmodules."layers_*/mlp/up".bytes = 140\nmodules.{HEAD}.bytes = 51'
    worse = _ledger(*STEP["collectives"], _collective(DOWN, 60), _collective("new", 30))
    total, module = _check(text, worse).broken
    assert total == (
        "lm: bytes is 428, expected at most 338: 90 too many (+26.6%); look at layers_1/mlp/up 200 "
        "(over its own limit), new 30 (without a limit of its own), (no module) 7 (without a limit "
        "of its own)."
    )
    assert f"{DOWN} has 200" in module


def test_without_limits_of_modules_the_largest_are_named():
    [sentence] = _check("purposes.scatter_gradients.bytes = 70").broken
    assert sentence.endswith("; most of it: layers_0/mlp/up 40, layers_1/mlp/up 40.")
    [sentence] = _check("peak_memory = 900").broken
    assert sentence.endswith("; most of it: parameters 700, gathered 300.")


def test_a_purpose_names_only_what_is_sent_for_it():
    text = f'purposes.scatter_gradients.bytes = 79\nmodules."{UP}".bytes = 100'
    sentence = _check(text).broken[0]
    assert "layers_0/mlp/up 40 (over its own limit)" in sentence
    assert "head" not in sentence


COMPILED = {
    "bytes": 900,
    "counts": {"all_gather": 4},
    "temporaries": 5000,
    "peak": 6000,
    "collectives": [{"times": 4, "bytes": 900, "module": HEAD, "purpose": "gather_params"}],
}


def test_what_is_compiled_is_checked_where_there_is_a_compiled_step():
    text = "temporaries = 4_999\ncompiled_bytes = 899\ncompiled_collectives = 3"
    verdict = _check(text)
    assert verdict.unchecked == ("temporaries", "compiled_bytes", "compiled_collectives")
    assert not verdict.broken
    verdict = _check(text, _ledger(compiled=COMPILED))
    keys = [sentence.split()[1] for sentence in verdict.broken]
    assert keys == list(_check(text).unchecked)
    assert verdict.broken[1].endswith("; most of it: head 900.")
    assert not verdict.unchecked


def test_memory_that_is_not_known_is_not_checked():
    assert _check("peak_memory = 0", _ledger(memory=None)).unchecked == ("peak_memory",)


def test_slack_is_pointed_out_beyond_a_quarter():
    assert not _check("flops = 750").slack
    [sentence] = _check("flops = 751").slack
    assert sentence == "lm: flops allows 751, measured 600"
    [sentence] = _check('modules."layers_*/mlp/up".bytes = 200').slack
    assert "measured 140 of layers_0/mlp/up" in sentence
    assert _check("purposes.regather_params.bytes = 1").slack


@pytest.mark.parametrize(
    ("text", "size"),
    [("1.5 MiB", 3 * 2**19), ("16GiB", 2**34), ("7 B", 7), ("1_000 KiB", 1_024_000), ("0 B", 0)],
)
def test_sizes_have_units(text, size):
    assert parse_size(text) == size
    assert _budget(f'bytes = "{text}"').most("bytes") == size


@pytest.mark.parametrize("text", ["1.5", "MiB", "1 MB", "-1 B", "1 mib", "", "1 MiB more"])
def test_what_is_no_size_is_none(text):
    assert parse_size(text) is None


names = st.sampled_from([UP, DOWN, HEAD, "", "layers_0", "layers_1", "embed"])
collectives = st.builds(
    _collective,
    module=names,
    sent=st.integers(0, 8000).map(lambda eighths: eighths / 8),
    times=st.integers(1, 9),
    purpose=st.sampled_from(["gather_params", "scatter_gradients", "other"]),
    axes=st.sampled_from(["data", "replica", "replica,data"]),
)


@hypothesis.given(st.lists(collectives, max_size=8), st.data())
def test_a_written_budget_is_kept_and_one_byte_more_breaks_it(found, data):
    step = _ledger(*found, mesh={"replica": 2, "data": 4})
    budget = parse_budgets(budget_text("lm", step), "written")["lm"]
    assert budget.devices == 8
    verdict = check_budget(budget, step, "written")
    assert not verdict.broken
    measured = [re.search(r", measured ([\d,]+)( of .*)?$", each)[1] for each in verdict.slack]
    assert not [number for number in measured if int(number.replace(",", "")) > 4]
    if found:
        more = copy.deepcopy(found)
        worse = data.draw(st.sampled_from(more))
        worse["bytes"] = math.floor(worse["bytes"]) + 2
        broken = check_budget(budget, _ledger(*more, mesh=step["mesh"]), "written").broken
        assert broken[0].startswith("lm: bytes is ")
        assert any(f" purposes.{worse['purpose']}" in sentence for sentence in broken)
        assert (worse["module"] or "(no module)") in " ".join(broken)


def test_layers_that_are_alike_share_a_line():
    text = budget_text("lm", STEP)
    assert '"layers_*/mlp/up" = {bytes = 140}' in text
    assert UP not in text
    other = budget_text("lm", _ledger(*STEP["collectives"], _collective(DOWN, 1)))
    assert f'"{UP}" = {{bytes = 140}}' in other
    assert f'"{DOWN}" = {{bytes = 141}}' in other


def test_a_line_for_layers_does_not_reach_others():
    step = _ledger(_collective("dense_0", 9), _collective("dense_1", 9), _collective("dense_b", 10))
    text = budget_text("lm", step)
    assert "dense_*" not in text
    assert not check_budget(parse_budgets(text, "written")["lm"], step, "written").broken


def test_what_varies_with_versions_is_given_room():
    text = budget_text("lm", _ledger(compiled=COMPILED))
    assert "temporaries = 6_144  # measured, plus 20%" in text  # 6,000 in whole KiB.
    assert "peak_memory = 1_000\n" in text


def test_limits_on_what_is_compiled_outlive_a_step_that_is_not():
    earlier = _budget('temporaries = 77\ncompiled_bytes = "1 KiB"')
    text = budget_text("lm", STEP, earlier)
    assert "temporaries = 77  # as in the earlier budget" in text
    assert "compiled_bytes = 1_024  # as in the earlier budget" in text
    assert "compiled_collectives" not in text
    text = budget_text("lm", _ledger(*STEP["collectives"], compiled=COMPILED), earlier)
    assert "compiled_bytes = 2_048  # measured, plus 20%" in text  # 1,080 in whole KiB.
    assert "compiled_collectives" not in text


def test_where_the_compiler_writes_the_collectives_they_are_limited_as_compiled():
    text = budget_text("lm", _ledger(compiled=COMPILED))
    assert "compiled_collectives = 5  # measured, plus 20%" in text
    assert "compiled_bytes" not in budget_text("lm", _ledger(STEP["collectives"][0]))


def test_a_budget_takes_the_place_of_the_one_there_was():
    file = (
        "# Ours.\n\n# The small one.\n[fsdp]\nbytes = 1  # measured\n\n[fsdp.purposes]\n"
        "gather_params = {bytes = 1}\n\n# Of all by hand.\n[fsdp_lm]\nbytes = 2\n"
    )
    new = budget_text("fsdp", STEP)
    changed = replace_budget(file, "fsdp", new)
    assert changed == (
        f"# Ours.\n\n# The small one.\n{new}\n# Of all by hand.\n[fsdp_lm]\nbytes = 2\n"
    )
    assert replace_budget(changed, "fsdp", new) == changed
    added = replace_budget(file, "zero", budget_text("zero", STEP))
    assert added == f"{file}\n{budget_text('zero', STEP)}"
    assert replace_budget("", "zero", budget_text("zero", STEP)) == budget_text("zero", STEP)
