"""The mask token of a block draft, which stands in a block's rows for tokens yet unknown.

So it must never be one that the target writes or reads. Most targets have unused rows at the end of their embedding, padded to
a multiple (Qwen3: 151669 and up), and the first is taken. Without one the tokenizer's own mask token serves, or its pad token
unless that ends answers, or a special token that the chat template does not write: one reserved by its name, else the last. No
training row may hold it. A published draft has been trained with its mask token, and no other will do.
"""

import re
from collections.abc import Collection
from itertools import chain
from typing import Any

from stages.params import schema
from stages.target import chat_template, manifest
from stages.target.manifest import TargetManifest

RESERVED = re.compile(r"reserved|unused|extra", re.IGNORECASE)


def load_tokenizer(params: schema.Params, target: TargetManifest) -> Any:
    """Return the target's tokenizer."""
    folder = manifest.resolve_weights_folder(target)
    return chat_template.load_tokenizer(folder, params.target.trust_remote_code, target.chat_template)


def choose_mask_token(tokenizer: Any, target: TargetManifest, held: Collection[int] = ()) -> int:
    """Return the first token that may be one; `held` are the tokens of the training rows. Raises ValueError for none."""
    used = set(tokenizer.get_vocab().values())
    unused = (i for i in range(target.vocab_size) if i not in used)
    spare = (i for i in _list_spare_tokens(tokenizer, target) if i not in held)
    if (found := next(chain(unused, spare), None)) is None:
        raise ValueError(
            f"a block draft needs a mask token: the tokenizer uses all {target.vocab_size} rows of the target's embedding, and "
            f"each special token ends answers ({target.eos_token_ids}) or is in the chat template or a training row. Name one "
            "that no text uses as pad_token in its tokenizer_config.json, or add a row (resize_token_embeddings)"
        )
    return found


def describe_mask_token(names: list[str], others: bool, tokenizer: Any, target: TargetManifest) -> str:
    """Return the mask token of block drafts by these names, for messages; with `others` to train, that they have none.

    Raises ValueError where they have none and no other draft is trained.
    """
    try:
        found = choose_mask_token(tokenizer, target)
    except ValueError as error:
        if others:
            return f"warning: {', '.join(names)}: {error}; other drafts are trained"
        raise
    is_used = found in tokenizer.get_vocab().values()
    token = repr(tokenizer.convert_ids_to_tokens(found)) if is_used else "a row that the tokenizer does not use"
    return f"{', '.join(names)}: mask token {found}, {token}"


def check_published_mask_token(mask_token_id: int, tokenizer: Any, target: TargetManifest) -> str | None:
    """Return a note where a published draft's mask token is one that the tokenizer adds to its vocabulary, else None.

    Such tokens (Qwen's <|fim_pad|>) are not written in plain text, but may be on purpose. Raises ValueError for a token outside
    of the target's embedding, one of ordinary text, and one that ends answers.
    """
    token = tokenizer.convert_ids_to_tokens(mask_token_id) if 0 <= mask_token_id < target.vocab_size else None
    is_used = mask_token_id in tokenizer.get_vocab().values()
    if not 0 <= mask_token_id < target.vocab_size:
        found = "outside of the target's embedding"
    elif mask_token_id in _list_spare_tokens(tokenizer, target) or not is_used:
        return None
    elif mask_token_id in target.eos_token_ids:
        found = f"{token!r}, which ends the target's answers"
    elif mask_token_id not in tokenizer.added_tokens_decoder:
        found = f"the token {token!r} of ordinary text"
    else:
        return f"mask_token_id is {mask_token_id}, the tokenizer's added token {token!r}: prompts should not contain it"
    raise ValueError(
        f"mask_token_id is {mask_token_id}, {found}; expected one of the {target.vocab_size} rows of the target's embedding "
        "that no text uses: the draft was trained for another target or tokenizer; choose another"
    )


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
