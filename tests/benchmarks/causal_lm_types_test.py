"""The table of all causal language models of transformers, for the families that are read."""

import pytest

from benchmarks.causal_lm_types import causal_lm_types, judge_apart
from manualpar.models.pretrained.families import FAMILIES

pytest.importorskip("transformers", reason="pip install -e '.[interop]'")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_small_checkpoint_of_every_family_is_exact(name):
    if name not in causal_lm_types():
        pytest.skip("this version of transformers lacks the type")
    verdict, reason = judge_apart(name)
    assert verdict == "exact", reason


def test_a_type_without_a_family_is_refused_by_its_name():
    assert judge_apart("xglm") == ("refused", "no family")
    assert judge_apart("gemma4_text").reason.startswith("heads of two sizes")
