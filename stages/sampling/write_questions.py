"""Let the target write the user's turn, for those who have no questions.   aerie write-questions FILE --rows 2000

    python -m stages.sampling.write_questions FILE ROWS TEMPERATURE TOP_P MAX_NEW_TOKENS SEED [SYSTEM_PROMPT ...]

Given its chat template up to the user's turn, a target goes on with a question (Magpie, https://arxiv.org/abs/2406.08464); system
prompts steer the topics a little. The file is raw data like any other: `fix_data.raw`, alone or in a folder with others. A
question is kept where the target itself ended the turn, and none like it was written before. `prepare_prompts` writes them
too, where a workload's prompts are `written`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from stages.params import schema
from stages.target import chat_template, generation, loading, manifest
from stages.target.prompt_encoder import PromptEncoder
from stages.telemetry.run_stage import run_stage

MARK = "MARKOFAUSERSTURN"  # in the place of the user's turn
LIKE_WORDS = 8  # questions that begin with the same so many words are alike
SYSTEM_PROMPTS = (  # the template's own first
    "",
    "You answer everyday questions of many different people.",
    "You are a mathematics tutor. People bring you problems to solve.",
    "You are an expert programmer who helps with code.",
    "You help people to write, shorten and correct texts.",
    "You explain science, history and technology.",
)


def main(
    file: str, rows: str, temperature: str, top_p: str, max_new_tokens: str, seed: str, *system_prompts: str
) -> None:
    """Write up to `rows` questions, JSONL with a key prompt; each batch is in the file when it is made."""
    path = Path(file)
    if path.exists():
        raise ValueError(f"{path} exists, and may hold questions that you want to keep; name another file")
    params = schema.load_params()
    sampling, size = (float(temperature), float(top_p)), params.sample_target.batch_size or 64
    batches = write_batches(params, int(rows), size, int(max_new_tokens), sampling, int(seed), system_prompts)
    counts, questions = Counter[str](), list[str]()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as out, tqdm(total=int(rows), unit="question", mininterval=2) as bar:
        for batch in batches:
            counts.update(outcome for _, outcome in batch)
            kept = [text for text, outcome in batch if outcome == "kept"]
            out.writelines(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in kept)
            out.flush()
            questions += kept
            bar.update(len(batch))
    print(describe_questions(questions, counts) + f" -> {path}; set fix_data.raw to it, or to its folder")


def write_batches(
    params: schema.Params,
    rows: int,
    size: int,
    max_new_tokens: int = 96,
    sampling: tuple[float, float] = (1.0, 0.95),  # temperature, top_p
    seed: int = 0,
    system_prompts: Sequence[str] = (),  # none: six general ones
) -> Iterator[list[tuple[str, str]]]:
    """Load the target, and return batches of `size` of the `rows` questions that it writes, each with what it is judged."""
    target = manifest.read_manifest()
    t, folder = params.target, manifest.resolve_weights_folder(target)
    encoder = PromptEncoder.load(target, folder, t.trust_remote_code, params.sample_target.thinking)
    openings = [_render_opening(encoder.tokenizer, system) for system in system_prompts or SYSTEM_PROMPTS]
    model = loading.load_target(str(folder), t.dtype, t.device, t.trust_remote_code)
    seen = set[str]()

    def write_batch(first: int) -> list[tuple[str, str]]:
        batch = [openings[number % len(openings)] for number in range(first, min(first + size, rows))]
        ends = sorted({*target.eos_token_ids, *(end for _, end in batch if end is not None)})
        answers = generation.generate_answers(
            model, [ids for ids, _ in batch], max_new_tokens, *sampling, ends, encoder.pad_token, seed + first
        )
        texts = [(encoder.tokenizer.decode(ids, skip_special_tokens=True).strip(), reason) for ids, reason in answers]
        return [(text, judge_question(text, reason, seen)) for text, reason in texts]

    return map(write_batch, range(0, rows, size))


def _render_opening(tokenizer: Any, system: str) -> tuple[list[int], int | None]:
    """Return the ids of the template up to the user's turn, and the special token that ends that turn, if one does.

    Raises:
        ValueError: where the template refuses a system prompt, or does not show the user's text as it is.
    """
    messages = [{"role": "system", "content": system}] if system else []
    ids = chat_template.encode_prompt(tokenizer, [*messages, {"role": "user", "content": MARK}])
    text = tokenizer.decode(ids, skip_special_tokens=False)
    opening, found, rest = text.partition(MARK)
    if not found:
        raise ValueError("the target's chat template does not show a user's turn as it is; bring questions of your own")
    after = tokenizer.encode(rest, add_special_tokens=False)
    is_special = bool(after) and after[0] in tokenizer.all_special_ids
    return tokenizer.encode(opening, add_special_tokens=False), after[0] if is_special else None


def judge_question(text: str, reason: str, seen: set[str]) -> str:
    """Return "kept", or why a question is dropped; `seen` gets what kept ones are known by."""
    if reason != "stop":
        return "not ended"
    words = re.findall(r"\w+", text.lower())
    if not words:
        return "empty"
    marks = {"begins " + " ".join(words[:LIKE_WORDS]), "words " + " ".join(sorted(set(words)))}
    if marks & seen:
        return "like another"
    seen |= marks
    return "kept"


def describe_questions(questions: list[str], counts: Counter[str]) -> str:
    """Return counts and length in a line."""
    dropped = ", ".join(f"{number} {why}" for why, number in counts.most_common() if why != "kept")
    told = f"{counts.total()} written, {counts['kept']} kept" + (f" ({dropped})" if dropped else "")
    if not questions:
        return told
    return f"{told}; {fmean(len(question.split()) for question in questions):.0f} words on average"


if __name__ == "__main__":
    run_stage(main)
