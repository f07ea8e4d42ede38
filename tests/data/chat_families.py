"""Short templates that write chats as widely used families do.

Each is written with marks where TRL's template for the family has them. Without the marks it is the
template of a model, which transformers cannot make a mask for.
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
{{- '<|im_end|>\\n' }}{% endgeneration %}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
# As Qwen 2.5: a system message by default; the line break before a turn is part of it.
QWEN_2 = """{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant' }}{% generation %}
{{- '\\n' + m.content + '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
# As Phi-3: a chat ends with another token.
PHI = """{%- for m in messages %}{{- '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|end|>\\n' }}{% endgeneration %}
{%- else %}{{- m.content + '<|end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}
{%- elif messages[-1].role == 'assistant' %}{% generation %}{{- eos_token }}{% endgeneration %}
{%- else %}{{- eos_token }}{% endif %}"""
# As DeepSeek R1: reasoning is left out, and the prompt of a turn begins it.
DEEPSEEK = """{{- bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}{{- m.content }}
{%- elif m.role == 'user' %}{{- '<\uff5cUser\uff5c>' + m.content }}
{%- elif m.role == 'assistant' %}{% generation %}{{- '<\uff5cAssistant\uff5c>' }}
{{- m.content.split('</think>')[-1] }}{{- '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
{%- endgeneration %}{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}"""
# As Nemotron 3: a turn begins otherwise than its prompt.
NEMOTRON = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}
{%- if loop.last and '<think>' in m.content %}{{- m.content | trim }}
{%- else %}{{- '<think></think>' + m.content.split('</think>')[-1] | trim }}{% endif %}
{{- '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
# As gpt-oss: a message may become two, and the last one has another end.
GPT_OSS = """{%- for m in messages %}
{%- if m.role == 'assistant' %}{% generation %}
{%- if m.thinking and loop.last %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{%- if loop.last %}{{- '<|return|>' }}{% else %}{{- '<|end|>' }}{% endif %}{% endgeneration %}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
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
# As Tiny Aya: the prompt of a turn begins the answer.
AYA = """{%- for m in messages %}{{- '<|START_OF_TURN_TOKEN|>' }}
{%- if m.role == 'assistant' %}{{- '<|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{% generation %}
{{- m.content + '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}{% endgeneration %}
{%- else %}{{- '<|USER_TOKEN|>' + m.content + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{% endif %}"""
# As Gemma 4: results of tools stand within a turn.
GEMMA = """{%- for t in tools or [] %}{{- t.function.name }}{% endfor %}{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|tool_response>' + m.content + '<tool_response|>' }}
{%- elif m.role == 'assistant' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|turn>model\\n' }}{% endif %}
{%- generation %}{% for call in m.tool_calls or [] %}{{- 'call:' + call.function.name }}{% endfor %}
{{- m.content or '' }}{% if not m.tool_calls %}{{- '<turn|>\\n' }}{% endif %}{% endgeneration %}
{%- else %}{{- '<|turn>' + m.role + '\\n' + m.content + '<turn|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}{% endif %}"""
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The template, its special tokens, and the token that ends an answer.
FAMILIES = {
    "Qwen 3": (QWEN, CHATML_TOKENS, "<|im_end|>"),
    "Qwen 2.5": (QWEN_2, CHATML_TOKENS, "<|im_end|>"),
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
    "Tiny Aya": (
        AYA,
        (
            "<|START_OF_TURN_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
        ),
        "<|END_OF_TURN_TOKEN|>",
    ),
    "Gemma 4": (
        GEMMA,
        ("<eos>", "<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>"),
        "<turn|>",
    ),
}
