"""The mutator finds every collective and makes of each another program that can be read."""

import argparse
import ast
import builtins
from fnmatch import fnmatchcase

import pytest

from benchmarks.mutation_operators import EQUIVALENT, FAMILIES, KINDS, LEFT_ALONE, mutate
from benchmarks.mutation_sites import JAX, OWN, find_sites
from benchmarks.mutations import (
    FIRST,
    TESTS,
    Outcome,
    choose,
    hash_sources,
    load_outcomes,
    parse_shard,
    report,
    save_outcome,
    select_tests,
    write_section,
)
from tests.house.source_rules import COLLECTIVES
from tests.paths import ROOT

SITES = find_sites(ROOT)
MUTANTS = [mutant for site in SITES for mutant in mutate(site)]
SOURCES = {path: (ROOT / path).read_bytes() for path in {site.path for site in SITES}}


def references():
    """(file, line, name) of what is called, or handed to who calls it, and could communicate."""
    for path in sorted((ROOT / "manualpar").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("jax.lax", "lax"):
                if node.attr in COLLECTIVES | set(JAX):
                    yield str(path.relative_to(ROOT)), node.lineno, node.attr
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in OWN:
                yield str(path.relative_to(ROOT)), node.lineno, node.id


def test_no_collective_is_overlooked():
    found = {(site.path, site.line, site.callee) for site in SITES}
    missed = sorted(set(references()) - found)
    # Not called there but given rules; where they are called they are found.
    names = [(path, name) for path, _, name in missed]
    assert names == [
        ("manualpar/core/parameters/collectives.py", "_gather"),
        ("manualpar/core/parameters/collectives.py", "_gather_with_mean_grads"),
    ], missed


def test_every_kind_of_collective_is_there():
    assert {site.callee for site in SITES} >= {"psum", "pmean", "all_gather", "psum_scatter"}
    assert {site.callee for site in SITES} >= set(OWN)
    assert len({site.name for site in SITES}) == len(SITES)


def test_every_site_has_a_mutant_of_each_kind_that_applies():
    for site in SITES:
        kinds = [mutant.kind for mutant in mutate(site)]
        alone = [name for name in LEFT_ALONE if fnmatchcase(site.name, name)]
        if alone:
            assert kinds == []
            continue
        expected = set(FAMILIES[site.signature.family])
        if not site.axes:
            expected -= {"over-size", "drop-last-axis", "reverse-axes", "other-axes"}
        assert kinds == [kind for kind in KINDS if kind in expected], site.name
        assert "delete" in kinds


def test_a_mutant_is_another_program():
    """Only the call is replaced, as another test says, so it is enough to compare the calls."""
    for site in SITES:
        mutants = [mutant.replacement for mutant in mutate(site)]
        programs = [ast.dump(ast.parse(text, mode="eval")) for text in (site.call(), *mutants)]
        assert len(set(programs)) == len(programs), site.name
        assert all(text[0] + text[-1] == "()" for text in mutants), site.name


def test_mutants_name_nothing_that_their_module_does_not_know():
    for mutant in MUTANTS:
        known = SOURCES[mutant.site.path].decode()
        names = {n.id for n in ast.walk(ast.parse(mutant.replacement)) if isinstance(n, ast.Name)}
        local = {"_other", "leaf"}
        assert all(name in local or name in dir(builtins) or name in known for name in names)
        assert "jnp" not in names or "import jax.numpy as jnp" in known, mutant.name
        assert "jax" not in names or "import jax\n" in known, mutant.name


def test_only_the_call_is_replaced():
    for mutant in MUTANTS:
        source, site = SOURCES[mutant.site.path], mutant.site
        mutated = mutant.apply(source)
        assert source[: site.start].count(b"\n") + 1 == site.line
        assert mutated.startswith(source[: site.start])
        assert mutated.endswith(source[site.end :])
        call = ast.parse(source[site.start : site.end].decode(), mode="eval").body
        assert ast.dump(call) == ast.dump(ast.parse(site.call(), mode="eval").body)


def test_offsets_are_bytes_and_arguments_have_names(tmp_path):
    (tmp_path / "manualpar").mkdir()
    path = tmp_path / "manualpar" / "sample.py"
    source = (
        '"""Ψ."""\n\n\ndef f(Ψ, axes):\n    return Ψ, jax.lax.psum(\n        Ψ, axis_name=axes)\n'
    )
    path.write_text(source, encoding="utf-8")
    (site,) = find_sites(tmp_path)
    assert (site.name, site.line, site.x) == ("sample:f:psum", 5, "Ψ")
    assert site.arguments == {"x": "Ψ", "axis_name": "axes"}
    delete, *_, other = mutate(site)
    assert delete.apply(path.read_bytes()).decode().endswith("    return Ψ, (Ψ)\n")
    assert other.replacement.startswith("(jax.lax.psum(Ψ, (tuple(_other for _other in ")


def test_functions_that_are_arguments_and_dims_by_default_are_mutated(tmp_path):
    (tmp_path / "manualpar").mkdir()
    path = tmp_path / "manualpar" / "sample.py"
    path.write_text(
        "def f(xs, axes):\n    ys = map(cast_to_varying, xs, axes)\n"
        "    return ys, context.total(xs), jax.lax.all_gather(xs, axes)\n"
    )
    handed, total, gather = find_sites(tmp_path)
    (delete,) = mutate(handed)
    assert b"map((lambda x, *_: x), xs, axes)" in delete.apply(path.read_bytes())
    assert [m.replacement for m in mutate(total)] == ["(xs)", "(context.total(xs) * 2)"]
    texts = {m.kind: m.replacement for m in mutate(gather)}
    axes = "tuple(jax.tree.leaves(axes))"
    assert texts["delete"] == f"(jax.numpy.stack([xs] * jax.lax.axis_size({axes}), 0))"
    assert texts["next-dim"] == "(jax.lax.all_gather(xs, axes, axis=(0 + 1) % (xs).ndim))"


@pytest.mark.parametrize("pattern", [*EQUIVALENT, *FIRST])
def test_what_is_said_of_mutants_is_said_of_some(pattern):
    assert any(fnmatchcase(mutant.name, pattern) for mutant in MUTANTS)


@pytest.mark.parametrize("pattern", LEFT_ALONE)
def test_what_is_said_of_sites_is_said_of_some(pattern):
    assert any(fnmatchcase(site.name, pattern) for site in SITES)


def test_the_tests_exist():
    everything = select_tests(None)
    assert set(everything) > set(TESTS)
    for test in everything:
        path, _, function = test.partition("::")
        assert f"def {function}" in (ROOT / path).read_text(encoding="utf-8")
    for mutant in MUTANTS:
        assert len(set(select_tests(mutant))) == len(select_tests(mutant)) >= len(TESTS)


def test_the_report_counts():
    chosen = choose(MUTANTS, "scatter_mean:psum_scatter")
    assert len(chosen) == 8
    outcomes = {
        m.name: Outcome("tests/a_test.py::test_b", "ValueError", 1.0, "") for m in chosen[:3]
    }
    outcomes[chosen[3].name] = Outcome("", "", 1.0, "")
    text = report(SITES, outcomes, len(chosen), "the command")
    assert "**Killed 3 of 4 mutants: 75.0%.** Not run: 4 more." in text
    site = "`core.parameters.collectives:scatter_mean:psum_scatter`"
    row = f"| {site} | K | K | K | **S** | ? | ? | ? | ? |"
    assert row in text.splitlines()
    assert f"- `{chosen[3].name}`" in text.splitlines()
    assert "- tests/a_test.py: 3" in text.splitlines()
    assert "- ValueError: 3" in text.splitlines()


def test_the_report_takes_the_place_of_the_last_one(tmp_path):
    path = tmp_path / "README.md"
    write_section(path, "## Ours\n\nold\n")
    assert path.read_text() == "## Ours\n\nold\n"
    path.write_text("# All\n\n## Ours\n\nold\n\n## Others\n\ntext\n")
    write_section(path, "## Ours\n\nnew\n")
    assert path.read_text() == "# All\n\n## Ours\n\nnew\n\n## Others\n\ntext\n"
    path.write_text("# All\n")
    write_section(path, "## Ours\n\nnew\n")
    assert path.read_text() == "# All\n\n## Ours\n\nnew\n"


def test_outcomes_of_the_same_sources_are_gone_on_from(tmp_path):
    source, results = tmp_path / "manualpar" / "a.py", tmp_path / "outcomes.jsonl"
    source.parent.mkdir()
    source.write_text("1\n")
    before = hash_sources(tmp_path)
    assert load_outcomes(results, before) == {}
    save_outcome(results, before, "", Outcome("", "", 3.0, "passed"))
    save_outcome(results, before, "one", Outcome("tests/a_test.py::test_b", "ValueError", 1.0))
    assert load_outcomes(results, hash_sources(tmp_path)) == {
        "": Outcome("", "", 3.0),
        "one": Outcome("tests/a_test.py::test_b", "ValueError", 1.0),
    }
    source.write_text("2\n")
    assert load_outcomes(results, hash_sources(tmp_path)) == {}


def test_a_shard_is_one_of_several():
    assert parse_shard("2/4") == (2, 4)
    for text in ("0/4", "5/4", "2", "2/0", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected I/N"):
            parse_shard(text)
