"""Flat names of fields: configs use them, and models understand them for one more release."""

import dataclasses
import warnings

import pytest

from manualpar.models import (
    Attention,
    Context,
    Experts,
    Norm,
    Rotary,
    RotaryScaling,
    Split,
    Transformer,
)
from manualpar.models.flat_fields import (
    FLAT,
    GROUPS,
    flatten_fields,
    nest_fields,
    with_fields,
)
from manualpar.training.config_fields import MODEL_FIELDS

FIELDS = {
    "num_layers": 2,
    "attention": "xla",
    "attention_window": 3,
    "rope_base": 5000.0,
    "rope_scaling": "linear",
    "rope_factor": 4.0,
    "post_norms": True,
    "num_experts": 8,
    "experts_per_token": 3,
    "expert_axis": "expert",
    "split_axis": "model",
    "sequence_parallel": True,
    "overlap": "ring",
    "context_axis": "",
    "context_attention": "ulysses",
}
NESTED = {
    "num_layers": 2,
    "attention": Attention("xla", window=3),
    "rotary": Rotary(base=5000.0, scaling=RotaryScaling("linear", factor=4.0)),
    "norm": Norm(post=True),
    "experts": Experts(8, top_k=3, axis="expert"),
    "split": Split("model", sequence_parallel=True, overlap="ring"),
    "context": Context(None, "ulysses"),
}


def test_flat_names_become_groups_and_back():
    assert nest_fields(FIELDS) == NESTED
    assert nest_fields(NESTED) == NESTED
    flat = flatten_fields(Transformer(**NESTED))
    assert flat == {**flatten_fields(Transformer()), **FIELDS}
    assert Transformer(**nest_fields(flat)) == Transformer(**NESTED)


def test_every_field_of_a_group_has_a_flat_name_of_its_own():
    def leaves(group):
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            yield from leaves(value) if dataclasses.is_dataclass(value) else [field.name]

    assert len(FLAT) == sum(len(list(leaves(group))) for group in GROUPS.values())
    own = {field.name for field in dataclasses.fields(Transformer)} - GROUPS.keys()
    assert not own & FLAT.keys()
    model = Transformer()
    assert {name: getattr(model, name) for name in GROUPS} == GROUPS


def test_a_config_has_the_defaults_of_the_model():
    flat, fields = flatten_fields(Transformer()), MODEL_FIELDS["transformer"]
    given = {name.removeprefix("model."): field.default for name, field in fields.items()}
    given = {name: given[name] for name in flat if given.get(name) is not None}
    assert len(given) > 20
    assert given == {name: flat[name] for name in given} | {"vocab_size": 0}


def test_changing_a_field_keeps_the_others_of_its_group():
    model = Transformer(**NESTED)
    changed = with_fields(model, overlap="none", rope_factor=2.0, num_layers=3)
    assert changed.split == Split("model", sequence_parallel=True)
    assert changed.rotary == Rotary(base=5000.0, scaling=RotaryScaling("linear", factor=2.0))
    assert (changed.num_layers, changed.experts) == (3, model.experts)


def test_a_group_shows_what_differs_from_the_defaults():
    assert repr(Attention(window=3, qkv_bias=True)) == "Attention(window=3, qkv_bias=True)"
    assert repr(Rotary()) == "Rotary()"


def test_a_model_understands_flat_names_and_warns():
    with pytest.warns(
        DeprecationWarning,
        match=r"rope_scaling, .* became attention=Attention\(kind='xla', window=3\), ",
    ) as w:
        model = Transformer(**FIELDS)
    assert len(w) == 1
    assert w[0].filename == __file__
    assert model == Transformer(**NESTED)
    with pytest.warns(
        DeprecationWarning, match=r"num_experts became experts=Experts\(num_experts=4, top_k=3"
    ) as w:
        clone = model.clone(num_experts=4)
    assert clone.experts == Experts(4, top_k=3, axis="expert")
    assert w[0].filename == __file__
    for name in FLAT.keys() - GROUPS.keys():
        with pytest.warns(
            DeprecationWarning, match=rf"Transformer\.{name} became Transformer\.\w+\.\w+"
        ):
            assert getattr(model, name) == flatten_fields(model)[name]


def test_a_model_with_groups_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Transformer(**NESTED).clone(num_layers=3).attention.window == 3
