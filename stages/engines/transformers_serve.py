"""`transformers serve`, for `sample_target`: it speculates with none of these drafts."""

import json
from typing import Any

from stages.engines.protocol import Body, SamplingLaunch, SamplingOptions, ServingEngine


class TransformersServe(ServingEngine):
    name = "transformers"
    serve_words = ("-m", "transformers.cli.transformers", "serve")
    own_paths = frozenset({"/load_model", "/v1/chat/completions"})  # it lists its cache, not what it serves
    install_hint = "pip install -c constraints.txt -e '.[serve]'"
    # It seeds torch when a request comes in, and generates in one thread: two at a time would share a seed, and be no faster.
    most_at_once = 1

    def list_start_flags(self, device: str) -> dict[str, Any]:
        return {"--device": device}

    def prepare_sampling(self, launch: SamplingLaunch) -> tuple[str, list[str]]:
        """It fills what a request leaves open from the target's generation_config.json."""
        return str(launch.link_target()), []

    def list_sampling_fields(self, options: SamplingOptions) -> Body:
        """It stays greedy at any temperature unless do_sample is set."""
        config = {
            "do_sample": options.temperature > 0, "top_k": 0, "repetition_penalty": 1.0,
            "eos_token_id": options.eos_token_ids, "pad_token_id": options.pad_token,
            "max_new_tokens": options.max_new_tokens,
        }  # fmt: skip
        return {"generation_config": json.dumps(config)}
