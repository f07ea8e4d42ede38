"""Short templates that write chats as widely used families do.

Each is written with marks. Without the marks it is the template of a model, which transformers
cannot make a mask for.
"""

import re

MARK = re.compile(r"\{%-? (end)?generation %\}")


def without_marks(template: str) -> str:
    return MARK.sub("", template)


# As Qwen 3: an earlier turn loses its reasoning, the last one gets an empty one; calls of tools.
QWEN = """{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}{% for tool in tools %}{{- '\\n' }}
{{- tool | tojson }}{% endfor %}{{- '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content if m.content is string else '' %}
{%- set reasoning = '' %}
{%- if m.reasoning_content is string %}{% set reasoning = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}{% generation %}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
# As Phi-3: the end of the text depends on what follows.
PHI = """{%- for m in messages %}{{- '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|end|>' }}{% endgeneration %}
{%- else %}{{- m.content + '<|end|>' }}{% endif %}
{%- if m.role != 'assistant' or not loop.last %}{{- '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}
{%- elif messages[-1].role == 'assistant' %}{% generation %}{{- '\\n' + eos_token }}
{%- endgeneration %}
{%- else %}{{- eos_token }}{% endif %}"""
# As DeepSeek R1: reasoning is left out, and the prompt of a turn begins it.
DEEPSEEK = """{{- bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}{{- m.content }}
{%- elif m.role == 'user' %}{{- '<\uff5cUser\uff5c>' + m.content }}
{%- elif m.role == 'assistant' %}{{- '<\uff5cAssistant\uff5c>' }}{% generation %}
{{- m.content.split('</think>')[-1] }}{{- '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
{%- endgeneration %}{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}"""
# As Nemotron 3: a turn begins otherwise than its prompt.
NEMOTRON = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}
{%- if loop.last and '<think>' in m.content %}{{- m.content | trim }}
{%- else %}{{- '<think></think>' + m.content.split('</think>')[-1] | trim }}{% endif %}
{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- else %}{{- m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
# As gpt-oss: a message may become two, and the last one has another end.
GPT_OSS = """{%- for m in messages %}{{- '<|start|>' + m.role }}
{%- if m.role == 'assistant' %}{% generation %}
{%- if m.thinking and loop.last %}{{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}{% endgeneration %}
{%- if m.thinking and loop.last %}{{- '<|start|>assistant' }}{% endif %}
{% generation %}{{- '<|channel|>final<|message|>' + m.content }}
{%- if loop.last %}{{- '<|return|>' }}{% else %}{{- '<|end|>' }}{% endif %}{% endgeneration %}
{%- else %}{{- '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
# As GLM-4.5: the next role's token ends a turn.
GLM = """{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|assistant|>' }}
{%- generation %}{{- '\\n<think></think>\\n' + m.content.split('</think>')[-1].strip() }}
{%- if not loop.last %}{{- '<|' + messages[loop.index0 + 1].role + '|>' }}{% endif %}
{%- endgeneration %}
{%- else %}
{%- if loop.first or messages[loop.index0 - 1].role != 'assistant' %}{{- '<|' + m.role + '|>' }}
{%- endif %}{{- '\\n' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The template, its special tokens, and the token that ends an answer.
FAMILIES = {
    "Qwen 3": (QWEN, CHATML_TOKENS, "<|im_end|>"),
    "Phi-3": (
        PHI,
        ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
        "<|endoftext|>",
    ),
    "DeepSeek R1": (
        DEEPSEEK,
        (
            "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
            "<\uff5cUser\uff5c>",
            "<\uff5cAssistant\uff5c>",
        ),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    "Nemotron 3": (NEMOTRON, CHATML_TOKENS, "<|im_end|>"),
    "gpt-oss": (
        GPT_OSS,
        ("<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|message|>"),
        "<|return|>",
    ),
    "GLM-4": (
        GLM,
        ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"),
        "<|endoftext|>",
    ),
}
