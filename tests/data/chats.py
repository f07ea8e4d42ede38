"""Chats, templates for them, and tokenizers that have these."""

import json

import tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
MARKED = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}"""
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "It is 2, \u00e9\u4e2d."},
    {"role": "user", "content": "Thanks\n"},
    {"role": "assistant", "content": "You are welcome"},
]
TEXT = " ".join(message["content"] for message in CHAT)


def write_chat_tokenizer(
    directory, template: object = CHATML, special: tuple[str, ...] = SPECIAL, **config
) -> str:
    """Writes a tokenizer as a model's directory has it."""
    directory.mkdir(exist_ok=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 3, "It is not so. " * 9], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    fields = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast", **config}
    if template:
        fields["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    return str(directory)
