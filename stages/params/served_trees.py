"""The trees that a serving engine runs with a draft: what params.yaml is checked by, and what a cell is refused by.

Stages depend on this module (stages/runtime/import_closure.py): it decides which cells are measured.
"""

from stages.params.block_draft_methods import BlockDraftMethod


def explain_unserved_tree(
    engine: str, num_steps: int, topk: int, num_draft_tokens: int, block: tuple[BlockDraftMethod, int] | None
) -> str | None:
    """Return why an engine can't run a tree; None if it can. `block` is a block draft's method and the drafts of its block."""
    if block:
        return _explain_unserved_block(num_steps, topk, *block)
    if engine == "vllm" and topk > 1:
        return f"vLLM drafts chains only, this tree has topk {topk}"
    if engine == "sglang" and num_draft_tokens < num_steps + 1:
        return (
            f"SGLang from 0.5.17 on needs num_draft_tokens of at least num_steps + 1 = {num_steps + 1}, found "
            f"{num_draft_tokens}: its scheduler ends at start"
        )
    return None


def _explain_unserved_block(num_steps: int, topk: int, method: BlockDraftMethod, num_drafts: int) -> str | None:
    """Return why no engine runs a tree with a block draft; None for the chain of the whole block."""
    if topk > 1:
        return f"engines verify chains only of {method.title} drafts, this tree has topk {topk}: the torch engine alone runs it"
    if num_steps != num_drafts:
        return (
            f"a block of this {method.title} draft has {num_drafts} drafts and this chain {num_steps}: told another width, an "
            f"engine runs another block than was trained and replayed; take t{num_drafts}_1_{num_drafts + 1}"
        )
    return None
