"""Trains a tokenizer and writes it."""

import tokenizers

TEXT = "def f(x):\n    return x + 1  # a comment\n" * 20


def write_tokenizer(path, special=("<|endoftext|>",), vocab_size=300) -> str:
    """Trains a small byte-level BPE tokenizer and writes it to `path`."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [TEXT],
        tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special),
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    return str(path)
