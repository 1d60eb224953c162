"""Chat templates with tools in the shapes of published models, in a shorter form.

Each keeps what matters for conversations: how turns end, where answers of tools are written,
whether thoughts of earlier turns are dropped, and which orders of messages are refused.
"""

from functools import cache

from tests.data.chat_templates import _CHATML, _THINK, SMOLLM2, build_tokenizer

_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ '# Tools\n<tools>' }}{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}"
    "{{ '\n</tools>\nWrite <tool_call>{...}</tool_call><|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
)
_CALLS = (
    '{% for c in m.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + c.function.name + '
    "'\", \"arguments\": ' + c.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
)
_ANSWERS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
QWEN25 = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + m.content }}" + _CALLS + "{% elif m.role == 'tool' %}"
    + _ANSWERS + "{% endif %}{% endfor %}" + _PROMPT
)  # fmt: skip
# Thoughts before the last message of the user are dropped.
QWEN3 = (
    _TOOLS + "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% elif m.role == 'assistant' %}"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thoughts = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thoughts) %}"
    "{{ '<think>\n' + thoughts + '\n</think>\n\n' }}{% endif %}{{ answer }}" + _CALLS
    + "{% elif m.role == 'tool' %}" + _ANSWERS + "{% endif %}{% endfor %}" + _PROMPT
)  # fmt: skip
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "\' + c.name + \'", "parameters": \' + c.arguments | tojson + \'}<|eot_id|>\' }}'
    "{% else %}{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{% if loop.first and tools %}{{ tools | tojson + '\n\n' }}{% endif %}"
    "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}{{ '<|eot_id|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
)
MISTRAL_V7 = (
    "{{ bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}"
    "{% endif %}" + _MISTRAL + "{% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}"
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson '
    "+ ', \"id\": \"' + c.id + '\"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
    "{{ ']' + eos_token }}{% elif m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('id') }}"
    "{% endif %}{{ '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content "
    "+ '[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"
)
MISTRAL_V13 = (
    "{{ bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}"
    "{% endif %}" + _MISTRAL + "{% elif m.role == 'assistant' %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' "
    "+ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% endif %}{% endfor %}"
)
# Calls are only written where the content is null, and nothing begins a turn behind an answer.
R1 = (
    "{{ bos_token }}{% set ns = namespace(tool=false) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}{% set ns.tool = false %}"
    "{{ '<｜User｜>' + m.content }}{% elif m.role == 'assistant' and m.content is none %}"
    "{{ m.tool_calls }}{% elif m.role == 'assistant' %}"
    "{{ ('' if ns.tool else '<｜Assistant｜>') + m.content.split('</think>')[-1] "
    "+ '<｜end▁of▁sentence｜>' }}{% set ns.tool = false %}{% elif m.role == 'tool' %}"
    "{% set ns.tool = true %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and not ns.tool %}"
    "{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{% set head = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}{% else %}"
    "{% set head = '' %}{% set turns = messages %}"
    "{% endif %}{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' "
    "+ (head if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Tools are described if they come as `xml_tools`, which alone ends the system's turn; calls are not
# written, and tools answer as the user.
SMOLLM3 = (
    "{{ '<|im_start|>system\n## Metadata\n\nReasoning Mode: /think\n\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{% if xml_tools %}{{ '### Tools\n<tools>\n' }}{% for t in xml_tools %}{{ t | string + '\n' }}"
    "{% endfor %}{{ '</tools>\nWrite <tool_call>{...}</tool_call>\n\n<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + m.content.lstrip('\n') + '<|im_end|>\n' }}"
    "{% elif m.role != 'system' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}" + _PROMPT
)
# Thoughts beside a call are dropped once there is a final answer behind it.
GPT_OSS = (
    "{{ '<|start|>developer<|message|>' + (tools or []) | tojson + '<|end|>' }}"
    "{% set ns = namespace(final=-1) %}{% for m in messages %}{% if m.role == 'assistant' and "
    "not m.tool_calls %}{% set ns.final = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    "{% set said = m.thinking or m.content %}{% if said and loop.index0 > ns.final %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + said + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary<|message|>' "
    "+ c.arguments | tojson + '<|call|>' }}{% elif m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last "
    "else '<|end|>') }}{% elif m.role == 'tool' %}{{ '<|start|>functions.' + m.name + "
    "' to=assistant<|message|>' + m.content | tojson + '<|end|>' }}{% else %}"
    "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# A template that numbers the turns from the end.
NUMBERED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + loop.revindex | string + '\n' "
    "+ m.content + '<|im_end|>\n' }}{% endfor %}" + _PROMPT
)

_INST = (
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[TOOL_CONTENT]", "[ARGS]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
)  # fmt: skip
_QWEN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", *_THINK)
_R1 = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>")
_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")
# Calls whose arguments are neither JSON nor in tags: nothing can read them.
UNREAD = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<do>{{ c.function.name }} with "
    "{% for k, v in c.function.arguments.items() %}{{ v }},{% endfor %}</do>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = {
    "qwen2.5": (QWEN25, _CHATML, _QWEN[:2], "<|im_end|>"),
    "qwen3": (QWEN3, _CHATML, _QWEN, "<|im_end|>"),
    "llama-3": (LLAMA3, _LLAMA, (), "<|eot_id|>"),
    "mistral-v7": (MISTRAL_V7, _INST, (), "</s>"),
    "mistral-v13": (MISTRAL_V13, (*_INST, "[THINK]", "[/THINK]"), (), "</s>"),
    "r1-distill": (R1, _R1, _THINK, "<｜end▁of▁sentence｜>"),
    "gemma-3": (GEMMA3, ("<start_of_turn>", "<end_of_turn>"), (), "<end_of_turn>"),
    "smollm2": (SMOLLM2, _CHATML, (), "<|im_end|>"),
    "smollm3": (SMOLLM3, _CHATML, _THINK, "<|im_end|>"),
    "gpt-oss": (GPT_OSS, _HARMONY, (), "<|return|>"),
    "base": (None, ("<|endoftext|>",), (), "<|endoftext|>"),
    "numbered": (NUMBERED, _CHATML, (), "<|im_end|>"),
}


@cache
def tokenizer_of(shape):
    return build_tokenizer(*SHAPES[shape])
