"""Check by its config alone whether a target can be used.   python -m stages.draft.supported_targets PARAMS SOURCE

prepare_target does so before anything else; `aerie run`, `aerie stale` and `aerie doctor` do by this command, where the config or
GGUF file is on this machine. Neither reads weights nor downloads anything. A module of its own, since no draft's weights depend
on it.
"""

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from stages.draft import rotary
from stages.params import checks, schema, target_files
from stages.params.section import PARAMS_FILE
from stages.runtime import guarded_files
from stages.target import (
    chat_template,
    config_facts,
    feature_layers,
    foreign_files,
    gguf_target,
    head_check,
    loading,
    manifest,
    quantisation,
    template_facts,
)
from stages.target.manifest import TargetManifest
from stages.telemetry.run_stage import run_stage


def check_target_config(params: schema.Params, config: PretrainedConfig) -> None:
    """Raise ValueError for a target that later stages can't compute, or that does not fit the parameters, by its config.

    That is: its attention, what its layers keep, its vocabulary, sizes and norms, the sliding window of a multimodal target,
    feature layers, RoPE, its class.
    """
    model = params.target.model
    loading.check_attention(config, model)
    quantisation.check_layout(model, config)
    if state := config_facts.describe_other_state(config):
        raise ValueError(
            f"{PARAMS_FILE}: target.model {model} is a {config.model_type}, which keeps state other than keys and values of its "
            f"own in {state}: rejected drafts can't be taken out of it. Take another target, as Llama, Qwen3 or Gemma 3"
        )
    params.init_draft.choose_vocab_size(config.get_text_config().vocab_size)
    try:
        shapes = config_facts.read_config_facts(config)
        # A file of the draft's config may give another RoPE.
        if params.init_draft.makes_fresh_draft and params.init_draft.draft_config_path is None:
            rotary.check_rope(shapes["rope"], shapes["head_dim"])
    except ValueError as error:
        raise ValueError(f"{PARAMS_FILE}: target.model {model}: {error}") from None
    if "mrope_section" in shapes["rope"] and (window := config_facts.read_sliding_window(config)) is not None:
        checks.check_sliding_window(params, window)
    layers = resolve_feature_layers(model, params.target.feature_layers, shapes["num_layers"])
    if params.init_draft.makes_fresh_draft:  # a published draft in init_draft.from has its own, known when it is read
        own_layers = feature_layers.default_eagle3_feature_layers(shapes["num_layers"])
        params.init_draft.choose_feature_layers(layers, own_layers)
    checks.check_segment_layers(params, layers)
    if (block := head_check.build_first_block(config)) is not None:
        loading.check_layers(block, model)


def check_chat_template(params: schema.Params, tokenizer: Any, target: TargetManifest) -> None:
    """Raise ValueError for a chat template that does not render a question, that needs a token which the target's embedding has
    not, or that does not read sample_target.thinking: sampling would fail on it, or ask another question, much later.
    """
    key = f"{PARAMS_FILE}: target.model {target.model}"
    question = [{"role": "user", "content": "Hello"}]
    try:
        ids = chat_template.encode_prompt(tokenizer, question)
    except chat_template.TemplateRefusalError as error:
        raise ValueError(f"{key}: a question can't be rendered: {error}") from None
    if hidden := template_facts.explain_hidden(tokenizer, question, None):
        raise ValueError(f"{key}: {hidden}")
    if unknown := chat_template.explain_unknown_token(tokenizer, ids, target.vocab_size):
        raise ValueError(f"{key}: its chat template: {unknown}")
    template_facts.check_thinking(tokenizer, params.sample_target.thinking)


def resolve_feature_layers(model: str, layers: list[int] | None, num_layers: int) -> list[int]:
    """Return the feature layers `layers`, or EAGLE-3's where that is None.

    Raises ValueError where they are not increasing, or the target `model` has fewer layers than these need.
    """
    least = feature_layers.NUM_EAGLE3_FEATURES
    if layers is None and num_layers < least:
        raise ValueError(
            f"{PARAMS_FILE}: target.model {model} has {num_layers} layers, expected {least} or more, since EAGLE-3 reads as many "
            "residual streams (target.feature_layers: null); take a target with more layers"
        )
    layers = layers or feature_layers.default_eagle3_feature_layers(num_layers)
    checks.check_target_layers(model, layers, num_layers)
    return layers


def describe_target(
    model: str, revision: str | None, config: PretrainedConfig, folder: Path, layers: list[int] | None
) -> TargetManifest:
    """Return the manifest from the small files of `folder`; feature layers `layers`, or EAGLE-3's where that is None.

    Raises ValueError as `resolve_feature_layers`.
    """
    shapes = config_facts.read_config_facts(config)
    return TargetManifest(
        model=model,
        revision=revision,
        modality="image" if hasattr(config, "vision_config") else "text",
        config_digest=manifest.digest_files(folder, "config.json", "preprocessor_config.json", "processor_config.json"),
        tokenizer_digest=manifest.digest_files(folder, "tokenizer*", "vocab*", "merges.txt", "chat_template*"),
        feature_layers=resolve_feature_layers(model, layers, shapes["num_layers"]),
        eos_token_ids=_read_eos_token_ids(config, folder),
        # Images need three-axis positions; a multimodal class of another kind is used for its text.
        image_token_id=getattr(config, "image_token_id", None) if "mrope_section" in shapes["rope"] else None,
        **shapes,
    )


def _read_eos_token_ids(config: PretrainedConfig, folder: Path) -> list[int]:
    """Return the end tokens of the configs; generation_config.json lists more than config.json (Llama-3: three)."""
    generation = folder / "generation_config.json"
    named = [(generation, guarded_files.read_json(generation, foreign_files.REMEDY))] if generation.exists() else []
    named += [(folder / "config.json", vars(part)) for part in (config, config.get_text_config())]
    found: dict[int, None] = {}
    for file, settings in named:
        ids = settings.get("eos_token_id")
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(token) is int for token in listed):
            raise ValueError(f"{file}: eos_token_id is {str(ids)[:60]!r}, expected an id or a list of ids; correct it")
        found.update(dict.fromkeys(listed))
    return list(found)


def main(file: str, source: str) -> None:
    """Check the target of the parameters in `file`, whose GGUF file or folder of config.json is `source`. A config that code of
    the target's own may read is left to prepare_target.
    """
    params, is_gguf = schema.load_params(Path(file)), source.endswith(target_files.GGUF_SUFFIX)
    if not is_gguf and params.target.trust_remote_code:
        return
    with foreign_files.refuse_unreadable(source, "a config by which transformers builds its class"):
        read = gguf_target.read_gguf_target
        check_target_config(params, read(Path(source)).model.config if is_gguf else foreign_files.read_config(source))


if __name__ == "__main__":
    run_stage(main)
