"""Runs the Language Model Evaluation Harness on a model of this package.

See https://github.com/EleutherAI/lm-evaluation-harness (Gao et al.).

```python
model = lm_eval_model(Generator(program, tokenizer), state, max_length=2048)
lm_eval.simple_evaluate(model, tasks=["lambada_openai"])
```

Strings are encoded by the rules of the harness. Spaces at the end of a context are moved to the
completion. Context and completion are encoded as one string. If the context alone is encoded as `n`
tokens, the completion consists of all tokens after the first `n`.
"""

from collections.abc import Sequence
from typing import Any

from manualpar.core.state.train_state import TrainState
from manualpar.data.tokenizer import Tokenizer
from manualpar.errors import require
from manualpar.models.generation.generator import Generator
from manualpar.models.generation.scoring import score_completions, score_documents

# The options for drawing, and other options: the name in a request of the harness -> the name here.
DRAWING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
OTHERS = {"repetition_penalty": "repetition_penalty"}
MAX_TOKENS = 256  # The longest answer if a request does not limit it.
# The names under which a request may limit the length of an answer; the last name given counts.
LENGTHS = ("max_completion_tokens", "max_tokens", "max_new_tokens", "max_gen_toks")
IGNORED = frozenset({"until", "do_sample", *LENGTHS})


def lm_eval_model(generator: Generator, state: TrainState, *, max_length: int) -> Any:
    """Makes an `lm_eval.api.model.LM` from a `Generator` and a state.

    Args:
      generator: The model with its tokenizer.
      state: A state of the generator's program.
      max_length: The most tokens in the model's context.

    Returns:
      The model, for `lm_eval.simple_evaluate`.

    Raises:
      MissingExtraError: lm-eval is not installed.
      ValueError: The generator has no tokenizer.
    """
    require("lm_eval_model", "lm_eval")
    from lm_eval.api.model import LM

    if generator.tokenizer is None:
        raise ValueError("lm_eval_model: the generator has no tokenizer, expected one.")
    tokenizer: Tokenizer = generator.tokenizer

    def pair(context: str, completion: str) -> tuple[Sequence[int], Sequence[int]]:
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, completion = context[:-spaces], context[-spaces:] + completion
        whole, start = (tokenizer.encode(text).tolist() for text in (context + completion, context))
        return generator.encode(context), whole[len(start) :]

    class Model(LM):
        """The `Generator` and its state, with the interface of the harness."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            """Scores each completion, and returns whether greedy decoding would generate it."""
            pairs = [pair(*request.args) for request in requests]
            scores = score_completions(generator, state, pairs, max_length=max_length)
            return [(score.log_likelihood, score.is_greedy) for score in scores]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            """Returns the log-likelihood of each document."""
            documents = [tokenizer.encode(request.args[0]).tolist() for request in requests]
            scores = score_documents(
                generator,
                state,
                documents,
                first_token=tokenizer.bos_token,
                max_length=max_length,
            )
            return [score.log_likelihood for score in scores]

        def generate_until(self, requests: list[Any]) -> list[str]:
            """Generates an answer to each request, up to the first stop string."""
            texts = [""] * len(requests)
            groups: dict[str, list[int]] = {}
            for index, request in enumerate(requests):
                groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
            for group in groups.values():
                options = _options(requests[group[0]].args[1])
                room = max(max_length - options["max_tokens"], 1)
                prompts = [generator.encode(requests[index].args[0])[-room:] for index in group]
                answers = generator.generate(state, prompts, **options)
                for index, answer in zip(group, answers, strict=True):
                    texts[index] = answer.text
            return texts

    return Model()


def _options(asked: dict[str, Any]) -> dict[str, Any]:
    """Translates a request's generation arguments to options of `Generator.generate`."""
    known = {**DRAWING, **OTHERS}
    unknown = asked.keys() - IGNORED - known.keys()
    if unknown:
        raise ValueError(
            f"lm_eval_model: a task asks for generation with {sorted(unknown)}, expected "
            f"{sorted(IGNORED | known.keys())}."
        )
    until = asked.get("until") or []
    max_tokens = MAX_TOKENS
    for name in LENGTHS:
        max_tokens = asked.get(name, max_tokens)
    options: dict[str, Any] = {ours: asked[name] for name, ours in known.items() if name in asked}
    if not asked.get("do_sample", options.get("temperature", 0) > 0):
        # Not drawn, even if a temperature is given.
        options = {name: x for name, x in options.items() if name not in DRAWING.values()}
    stop = [until] if isinstance(until, str) else list(until)
    return {**options, "stop": stop, "max_tokens": max_tokens}
