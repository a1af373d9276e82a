"""A small tokenizer with special tokens for turns, and conversations, for tests of chats."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from megaprec.text.training import train_hugging_face

Row = dict[str, Any]

# As published templates are: the first marks the answers, the second trims, the third drops what a
# later turn leaves out.
MARKED = """\
{{- bos_token }}
{%- for message in messages %}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}
{% generation %}
{{- message.content }}<|im_end|>
{% endgeneration %}
{%- else %}
{{- message.content | trim }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
UNMARKED = MARKED.replace("{% generation %}\n", "").replace("{% endgeneration %}\n", "")
FORGETFUL = """\
{%- for message in messages %}
{%- if message.role == 'user' or loop.last %}<|im_start|>{{ message.content }}<|im_end|>{% endif %}
{%- endfor %}
"""
# In the forms of published families, as short as they can be. Answers of earlier turns lose their
# reasoning in the first two, and the prompt of the second begins the reasoning of an answer.
PUBLISHED = {
    "thinks": """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > ns.last %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "begins to think": """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|im_start|>' + message.content }}{% endif %}
{%- if message.role == 'assistant' %}
{%- set answer = message.content.split('</think>')[-1] + '<|im_end|>' %}
{{- '<|im_start|>' }}{{ answer }}{# end #}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|><think>\\n' }}{% endif %}
""",
    "trims, and asks for the day": """\
{{- bos_token }}
{%- if not date_string is defined %}
{%- if strftime_now is defined %}{% set date_string = '' %}{% else %}{% set date_string = '' %}{% endif %}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + date_string + '\\n\\n' + message.content | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}
""",
    "joins the system's text to the first question": """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set first = messages[0]['content'] + '\n\n' %}{% set messages = messages[1:] %}
{%- else %}{% set first = '' %}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<|im_start|>' + role + '\n' + (first if loop.first else '') }}
{{- message['content'] | trim }}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}
""",
    "gathers what the system says first": """\
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(system='', is_first=true, called=false, has_output=false, is_tool=false) %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}
{%- set ns.system = ns.system + ('' if ns.is_first else '\n\n') + message['content'] %}
{%- set ns.is_first = false %}
{%- endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- set ns.is_tool = false %}{{ '<|im_start|>U' + message['content'] }}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- set ns.is_tool = false %}
{%- for call in message['tool_calls'] %}
{%- set function = call['function'] %}
{%- if not ns.called %}{{ '<|im_start|>A(calls)' }}{% set ns.called = true %}{% endif %}
{{- '(call)' + call['type'] + function['name'] + function['arguments'] + '(/call)' }}
{%- endfor %}
{{- '(/calls)<|im_end|>' }}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{{- '(/outputs)' if ns.is_tool else '<|im_start|>A' }}{{ message['content'] + '<|im_end|>' }}
{%- set ns.is_tool = false %}
{%- endif %}
{%- if message['role'] == 'tool' %}
{{- '' if ns.has_output else '(outputs)' }}{{ '(output)' + message['content'] }}
{%- set ns.is_tool = true %}{% set ns.has_output = true %}
{%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{ '(/outputs)' }}{% endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<|im_start|>A' }}{% endif %}
""",
    "asks for the answer within the question": """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{{- '<|im_start|>U' + message['content'] + '<|im_start|>A' }}
{%- endif %}
{%- if message['role'] == 'assistant' %}
{%- set answer = message['content'].split('</think>')[-1] %}{{ answer + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
""",
    "takes turns": """\
{{- bos_token }}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}
{%- endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<|im_start|>' + role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}
""",
}
TOOLS = (
    """\
{%- if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>{% endif %}
"""
    + MARKED
)


def make_tokenizer(folder: Path, template: str | None) -> Path:
    """Write a tokenizer with its settings, as transformers does; return its tokenizer.json."""
    texts = ["the fox counts stars é 😀\n" * 40, "questions, answers and words\n" * 40]
    plain = train_hugging_face(texts, folder / "plain.json", 290, True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(plain),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer" / "tokenizer.json"


def turns(*contents: str, system: str = "") -> list[Row]:
    """Messages of user and assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
    ]
    return [{"role": "system", "content": system}, *messages] if system else messages


CONVERSATIONS = [
    turns("how many stars?", "seven é 😀"),
    turns(" spaces ", "\n\n lines \n", "again", "", "and\nagain", "the fox 😀", system="be brief"),
    turns("a question alone"),
    turns("x", "y", "without an answer"),
    turns("数字", "١٢٣ \u200d🦊", "q" * 300, "words " * 200),
]


def write_rows(file: Path, rows: Sequence[Row]) -> Path:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
