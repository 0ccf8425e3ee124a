"""Makes an unpacked SGLang 0.5.17 draft for a seeing target as its draft was taught.   python -m benchmarks.sglang_seeing SITE

Five places, each found word for word (docs/results/2026-11-22-h200-serving.md says what each does to tau):

    mm_utils                    the draft gets the prompt's embeddings as the target read them, not the tensor that the
                                target's first layer adds its attention to
    llama_eagle3                and it gets them moved on by one token, as it gets a text's
    both graph runners          a recorded pass gets the three-axis positions that it was given, and zeros where a batch is
                                filled up
    eagle_worker_v2             in the draft's loop these move on as the others do
"""

import argparse
from pathlib import Path

COPIED = "        _grouped_foreach_copy_(copy_dsts, copy_srcs)\n"
FILLED = "            buffers.positions.zero_()\n"
ZEROS = "            buffers.mrope_positions.zero_()\n"


def given(tokens: str) -> str:
    """A buffer's first so many positions are the batch's."""
    return (
        "        if forward_batch.mrope_positions is not None:\n"
        f"            buffers.mrope_positions[:, :{tokens}].copy_(forward_batch.mrope_positions)\n"
    )


CLONED = "            forward_batch.mm_input_embeds = input_embeds"
THERE = "                assert embeds is not None\n"
INPUTS = "            # Set inputs\n            forward_batch.input_ids = input_ids\n"
ON = (
    "            if i > 0 and forward_batch.mrope_positions is not None:\n"
    "                forward_batch.mrope_positions.add_(1)\n"
)
EDITS = [  # file, what stands there, what stands there then
    ("managers/mm_utils.py", CLONED + "\n", CLONED + ".clone()\n"),
    ("models/llama_eagle3.py", THERE, THERE + "                embeds = torch.roll(embeds, -1, 0)\n"),
    ("speculative/eagle_draft_cuda_graph_runner.py", COPIED, COPIED + given("raw_num_token")),
    ("speculative/eagle_draft_cuda_graph_runner.py", FILLED, FILLED + ZEROS),
    ("speculative/eagle_draft_extend_cuda_graph_runner.py", COPIED, COPIED + given("num_tokens")),
    ("speculative/eagle_draft_extend_cuda_graph_runner.py", FILLED, FILLED + ZEROS),
    ("speculative/eagle_worker_v2.py", INPUTS, INPUTS + ON),
]


def main() -> None:
    takes = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    takes.add_argument("site", type=Path, help="the folder that `sglang` lies in")
    root = takes.parse_args().site / "sglang/srt"
    for name, old, new in EDITS:
        text = (root / name).read_text()
        if text.count(old) != 1:
            raise SystemExit(
                f"{name} has {text.count(old)} times what is to be changed, expected once: not SGLang 0.5.17's"
            )
        text = text.replace(old, new)
        compile(text, name, "exec")
        (root / name).write_text(text)
    print(f"{len(EDITS)} places changed")


if __name__ == "__main__":
    main()
