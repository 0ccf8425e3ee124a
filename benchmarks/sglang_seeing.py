"""Makes an unpacked SGLang 0.5.17 draft for a seeing target as its draft was taught: python sglang_seeing.py KIT/site

Four places, each found word for word: the draft gets the prompt's embeddings as the target read them (the target's first
layer adds its attention to that very tensor), moved on by one token; both recorded passes get the three-axis positions
that they were given, and zeros where a batch is filled up; in the draft's loop these move on with the others.
"""
import sys
from pathlib import Path

root = Path(sys.argv[1]) / "sglang/srt"
FILLED = "            buffers.positions.zero_()\n"
EDITS = {
    "managers/mm_utils.py": [(
        "            forward_batch.mm_input_embeds = input_embeds\n",
        "            forward_batch.mm_input_embeds = input_embeds.clone()\n",
    )],
    "models/llama_eagle3.py": [(
        "                assert embeds is not None\n",
        "                assert embeds is not None\n                embeds = torch.roll(embeds, -1, 0)\n",
    )],
    "speculative/eagle_draft_cuda_graph_runner.py": [(
        "        _grouped_foreach_copy_(copy_dsts, copy_srcs)\n",
        "        _grouped_foreach_copy_(copy_dsts, copy_srcs)\n        if forward_batch.mrope_positions is not None:\n"
        "            buffers.mrope_positions[:, :raw_num_token].copy_(forward_batch.mrope_positions)\n",
    ), (FILLED, FILLED + "            buffers.mrope_positions.zero_()\n")],
    "speculative/eagle_draft_extend_cuda_graph_runner.py": [(
        "        _grouped_foreach_copy_(copy_dsts, copy_srcs)\n",
        "        _grouped_foreach_copy_(copy_dsts, copy_srcs)\n        if forward_batch.mrope_positions is not None:\n"
        "            buffers.mrope_positions[:, :num_tokens].copy_(forward_batch.mrope_positions)\n",
    ), (FILLED, FILLED + "            buffers.mrope_positions.zero_()\n")],
    "speculative/eagle_worker_v2.py": [(
        "            # Set inputs\n            forward_batch.input_ids = input_ids\n",
        "            # Set inputs\n            forward_batch.input_ids = input_ids\n"
        "            if i > 0 and forward_batch.mrope_positions is not None:\n                forward_batch.mrope_positions.add_(1)\n",
    )],
}
for name, edits in EDITS.items():
    text = (root / name).read_text()
    for old, new in edits:
        assert text.count(old) == 1, (name, text.count(old))
        text = text.replace(old, new)
    (root / name).write_text(text)
    compile(text, name, "exec")
print("patched")
