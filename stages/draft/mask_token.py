"""The mask token of a block draft, which stands in a block's rows for tokens yet unknown.

So it must never be one that the target writes or reads. Most targets have unused rows at the end of their embedding, padded to
a multiple (Qwen3: 151669 and up), and the first is taken. Without one the tokenizer's own mask token serves, or its pad token
unless that ends answers, or a special token that the chat template does not write: one reserved by its name, else the last. No
training row may hold it. A published draft has been trained with its mask token, and no other will do.
"""

import re
from collections.abc import Collection
from typing import Any

from stages.target import chat_template
from stages.target.manifest import TargetManifest

RESERVED = re.compile(r"reserved|unused|extra", re.IGNORECASE)


def choose_mask_token(requested: int | None, tokenizer: Any, target: TargetManifest, held: Collection[int] = ()) -> int:
    """Return the mask token: `requested`, or the first that may be one; `held` are the tokens of the training rows.

    Raises ValueError where `requested` is a token of text or of a row, or outside of the embedding, or where there is none.
    """
    used, num_rows = set(tokenizer.get_vocab().values()), target.vocab_size
    unused = next((i for i in range(num_rows) if i not in used), None)
    spare = [i for i in _list_spare_tokens(tokenizer, target) if i not in held]
    proposed = unused if unused is not None else next(iter(spare), None)
    if requested is not None and (requested >= num_rows or (requested in used and requested not in spare)):
        found = (
            "outside of the embedding"
            if requested >= num_rows
            else f"the token {tokenizer.convert_ids_to_tokens(requested)!r}"
        )
        in_rows = ", which training rows hold" if requested in held else ""
        advice = "add a row to the embedding" if proposed is None else f"write {proposed}, or null, which chooses it"
        raise ValueError(
            f"mask_token_id is {requested}, {found}{in_rows}; expected one of the {num_rows} rows of the target's embedding "
            f"that no text uses: {advice}"
        )
    if requested is not None:
        return requested
    if proposed is None:
        raise ValueError(
            "mask_token_id is null, which takes a row of the target's embedding that the tokenizer does not use, or a special "
            f"token that no text uses; it uses all {num_rows}, and each special token ends answers ({target.eos_token_ids}) or "
            "is in the chat template or a training row. Expected a token that no text uses: name one as pad_token in the "
            "tokenizer's tokenizer_config.json, or add a row to the embedding (resize_token_embeddings)"
        )
    return proposed


def describe_mask_token(mask_token_id: int, tokenizer: Any) -> str:
    """Return the token with its id, for messages."""
    is_used = mask_token_id in tokenizer.get_vocab().values()
    name = repr(tokenizer.convert_ids_to_tokens(mask_token_id)) if is_used else "a row that the tokenizer does not use"
    return f"{mask_token_id}, {name}"


def check_published_mask_token(mask_token_id: int, tokenizer: Any, target: TargetManifest) -> str | None:
    """Return a note where a published draft's mask token is one that the tokenizer adds to its vocabulary, else None.

    Such tokens (Qwen's <|fim_pad|>) are not written in plain text, but may be on purpose. Raises ValueError for a token outside
    of the target's embedding, one of ordinary text, and one that ends answers.
    """
    expected = f"expected one of the {target.vocab_size} rows of the target's embedding that no text uses"
    advice = "such a draft was trained for another target or tokenizer, or trained wrongly: choose another draft"
    if not 0 <= mask_token_id < target.vocab_size:
        raise ValueError(f"mask_token_id is {mask_token_id}, outside of the target's embedding; {expected}: {advice}")
    if mask_token_id in _list_spare_tokens(tokenizer, target) or mask_token_id not in tokenizer.get_vocab().values():
        return None
    token = tokenizer.convert_ids_to_tokens(mask_token_id)
    if mask_token_id in target.eos_token_ids:
        raise ValueError(
            f"mask_token_id is {mask_token_id}, {token!r}, which ends the target's answers; {expected}: {advice}"
        )
    if mask_token_id not in tokenizer.added_tokens_decoder:
        raise ValueError(
            f"mask_token_id is {mask_token_id}, the token {token!r} of ordinary text; {expected}: {advice}"
        )
    return f"mask_token_id is {mask_token_id}, the tokenizer's added token {token!r}: prompts should not contain it"


def _list_spare_tokens(tokenizer: Any, target: TargetManifest) -> list[int]:
    """Return the tokens that no text uses, the best first: the tokenizer's own mask and pad tokens, then special tokens.

    Tokens that end answers, lie outside of the embedding, or have a part in prompts are none.
    """
    found = dict.fromkeys([tokenizer.mask_token_id, tokenizer.pad_token_id])
    special = {token: str(text) for token, text in tokenizer.added_tokens_decoder.items() if text.special}
    if special:
        prompts = {tokenizer.bos_token_id, tokenizer.unk_token_id, target.image_token_id}
        prompts |= chat_template.list_rendered_tokens(tokenizer)
        ordered = sorted(special, key=lambda token: (not RESERVED.search(special[token]), -token))
        found |= dict.fromkeys(token for token in ordered if token not in prompts)
    return [i for i in found if i is not None and i < target.vocab_size and i not in target.eos_token_ids]
