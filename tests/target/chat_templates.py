"""Chat templates of seven families, cut to what decides masks: headers, end tokens, what history leaves out.

All are reconstructions, not copies: without tools, for conversations of an optional system message and turns. Which
published templates they were found equal to, string for string, is in docs/sampling.md. What each keeps is said beside
it. Run a real tokenizer through `python -m stages.sample_target --preview 3` before you trust a new family.
"""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

# A default system message where the conversation has none.
QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
    "assistant.<|im_end|>\n{% endif %}" + CHATML + HEADER
)
# Thoughts are taken out of every answer before the last question, and an empty think block written into the last one
# where it has none; enable_thinking=false puts an empty block into the header. A tool's result is no question.
QWEN3 = """{%- set ns = namespace(last=messages|length - 1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) -%}
{%- set ns.last = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role != 'assistant' -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- else -%}
{%- set content = m.content -%}{%- set thoughts = '' -%}
{%- if m.reasoning_content is defined and m.reasoning_content is not none -%}{%- set thoughts = m.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last and (loop.last or thoughts) -%}
{{- '<|im_start|>assistant\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
{%- else -%}{{- '<|im_start|>assistant\\n' + content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""
# Trims every message.
TRIMMED = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
LLAMA_HEADER = "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
LLAMA3 = "{{ '<|begin_of_text|>' }}{% for m in messages %}" + TRIMMED + "{% endfor %}" + LLAMA_HEADER
# A system message always, with today's date.
LLAMA32 = (
    "{{ '<|begin_of_text|>' }}<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: {{ strftime_now('%d %b %Y') }}\n\n{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    "{% endif %}<|eot_id|>{% for m in messages %}{% if m.role != 'system' %}"
    + TRIMMED
    + "{% endif %}{% endfor %}"
    + LLAMA_HEADER
)
# No line breaks at all: a header and an end token touch the text. The header stands behind every question, asked for or
# not; of an answer in the history only what is between <answer> marks stays.
HUNYUAN = (
    "{{ '<｜hy_begin▁of▁sentence｜>' }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}<｜hy_place▁holder▁no▁3｜>"
    "{% elif m.role == 'user' %}<｜hy_User｜>{{ m.content }}<｜hy_Assistant｜>"
    "{% elif '<answer>' in m.content and not loop.last %}"
    "{{ m.content.split('<answer>')[-1].split('</answer>')[0].strip() }}<｜hy_place▁holder▁no▁2｜>"
    "{% else %}{{ m.content }}<｜hy_place▁holder▁no▁2｜>"
    "{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role != 'user' %}<｜hy_Assistant｜>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}"
)
# gpt-oss: the last answer ends in <|return|>, earlier ones in <|end|>; thoughts, under `thinking`, are a message of their
# own, in the last only.
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: {{ strftime_now('%Y-%m-%d') }}\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>{% for m in messages %}"
    "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'system' %}"
    "{% if m.content %}<|start|>developer<|message|># Instructions\n\n{{ m.content }}\n\n<|end|>{% endif %}"
    "{% elif loop.last and not add_generation_prompt %}"
    "{% if 'thinking' in m %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Content may be a list of parts; an image is one pad token between two marks (the processor expands it).
QWEN3_VL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}" + HEADER
)

LLAMA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
# name -> template, tokens of its own, those that end an answer
FAMILIES = {
    "qwen2.5": (QWEN25, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], ["<|im_end|>", "<|endoftext|>"]),
    "qwen3": (QWEN3, ["<|im_start|>", "<|im_end|>", "<think>", "</think>"], ["<|im_end|>"]),
    "llama3": (LLAMA3, LLAMA_TOKENS, ["<|eot_id|>", "<|eom_id|>"]),
    "llama3.2": (LLAMA32, LLAMA_TOKENS, ["<|eot_id|>", "<|eom_id|>"]),
    "hunyuan": (
        HUNYUAN,
        ["<｜hy_begin▁of▁sentence｜>", "<｜hy_User｜>", "<｜hy_Assistant｜>",
         "<｜hy_place▁holder▁no▁2｜>", "<｜hy_place▁holder▁no▁3｜>"],
        ["<｜hy_place▁holder▁no▁2｜>"],
    ),
    "harmony": (
        HARMONY,
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"],
        ["<|return|>", "<|call|>"],
    ),
    "qwen3-vl": (
        QWEN3_VL,
        ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"],
        ["<|im_end|>"],
    ),
}  # fmt: skip


def tokenizer(family: str, merges: bool = True) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """A byte-level BPE with the family's own tokens and template, and the ids that end an answer.

    A few merges join line breaks and letters over what a careless mask would take for a border.
    """
    template, special, ends = FAMILIES[family]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("t", "Ċ"), ("e", "r"), ("Ġ", "a"), ("Ċ", "Ġ")] if merges else []
    vocab = {text: i for i, text in enumerate([*letters, *(a + b for a, b in pairs)])}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    # Qwen's and Llama's own pattern, so that line breaks stick together as theirs do.
    pattern = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, additional_special_tokens=special, eos_token=ends[0])
    made.chat_template = template
    return made, made.convert_tokens_to_ids(ends)
