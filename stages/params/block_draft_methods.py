"""The methods of block drafts: what each is called in params.yaml, in config.json, in the flags of engines and in reports."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BlockDraftMethod:
    """One method of drafting a block in one forward."""

    name: str  # `method` of a segment of train_draft.checkpoints
    title: str  # as its authors write it
    architecture: str  # in config.json, by which SGLang and vLLM load the draft
    algorithm: str  # SGLang's --speculative-algorithm; in lower case vLLM's method
    first_slot: int  # slot of a block that predicts the first draft: 1 where slots predict their own position, else 0

    def count_drafts(self, block_size: int) -> int:
        """Return the drafts of a block of that many slots."""
        return block_size - self.first_slot


DFLASH = BlockDraftMethod("dflash", "DFlash", "DFlashDraftModel", "DFLASH", 1)
DFLASH2 = BlockDraftMethod("dflash2", "DFlash2", "DFlash2DraftModel", "DFLASH", 1)
DSPARK = BlockDraftMethod("dspark", "DSpark", "Qwen3DSparkModel", "DSPARK", 0)
BLOCK_METHODS = {method.name: method for method in (DFLASH, DFLASH2, DSPARK)}
ALGORITHMS = frozenset(method.algorithm for method in BLOCK_METHODS.values())


def find_block_method(config: dict[str, Any]) -> BlockDraftMethod | None:
    """Return the method of a draft by the architectures of its config.json; None where it is no block draft."""
    known = {method.architecture: method for method in BLOCK_METHODS.values()}
    return next((known[name] for name in config.get("architectures") or () if name in known), None)


def list_titles() -> str:
    """Return the titles of all methods, as words of a sentence."""
    *first, last = (method.title for method in BLOCK_METHODS.values())
    return f"{', '.join(first)} or {last}"


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
