from manualpar.errors import LISTED
from manualpar.system.cluster.facts import DisagreementError, describe_differences


def test_what_is_the_same_is_no_difference():
    assert describe_differences({0: {"a": "1"}, 1: {"a": "1"}}) == []


def test_every_difference_is_a_sentence_that_says_who_has_what():
    facts = {0: {"jax": "1.0", "seed": "42"}, 1: {"jax": "1.0", "seed": "3"}}
    assert describe_differences(facts) == ["seed is 42 in process 0 and 3 in process 1"]
    facts = {0: {"seed": "42"}, 1: {"seed": "3"}, 2: {"seed": "42"}, 3: {}}
    assert describe_differences(facts) == [
        "seed is 42 in processes 0, 2 and 3 in process 1 and absent in process 3"
    ]


def test_a_sentence_about_thousands_of_processes_is_short():
    facts = {process: {"host": f"n{process}", "seed": str(process % 2)} for process in range(4096)}
    hosts, seeds = describe_differences(facts)
    assert hosts.endswith("n7 in process 7 and 4088 other values")
    assert seeds.startswith("seed is 0 in processes 0, 2, 4, ")
    assert seeds.endswith(", 31 and 2,032 more")


def test_only_the_first_differences_are_told_and_long_values_are_cut():
    facts = {process: {str(i): str(process) * 1000 for i in range(20)} for process in range(2)}
    sentences = describe_differences(facts)
    assert len(sentences) == LISTED + 1
    assert sentences[-1] == f"and {20 - LISTED} more"
    assert len(sentences[0]) < 500
    assert str(DisagreementError(sentences)).count("\n") == len(sentences)
