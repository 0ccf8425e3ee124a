"""Acceptance that an engine simulates: each cycle yields a given number of tokens, whatever was drafted.

It tells what a cycle costs without a trained draft. Answers have no meaning then, and neither has a tau.

- SGLang: an environment variable. All requests of a batch accept the same number in a cycle, one of the two integers around the
  given one; every token is id 100, and tokens never end an answer with `ignore_eos` (0.5.17 and 0.5.23,
  speculative/spec_utils.py: generate_simulated_accept_index).
- vLLM from 0.30 on: two keys of --speculative-config (config/speculative.py: synthetic_acceptance_length).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from stages.serving import engine_versions

SGLANG_VARIABLE = "SGLANG_SIMULATE_ACC_LEN"
SGLANG_METHOD = "SGLANG_SIMULATE_ACC_METHOD"
SGLANG_TOKEN_ID = 100  # a target's vocabulary must have it
VLLM_METHOD_KEY, VLLM_LENGTH_KEY = "rejection_sample_method", "synthetic_acceptance_length"
VLLM_CONFIG_FLAG = "--speculative-config"
VLLM_SINCE = (0, 30)


@dataclass(frozen=True)
class SimulatedAcceptance:
    """`length` tokens a cycle on average, the bonus token included."""

    length: float

    def build_environment(self, engine: str) -> dict[str, str]:
        """Return the variables that a server is started with."""
        if engine == "sglang":
            return {SGLANG_VARIABLE: f"{self.length:g}", SGLANG_METHOD: "match-expected"}
        return {}

    def check_version(self, engine: str, version: str | None) -> None:
        """Raise ValueError for a vLLM that can't simulate; a version that can't be told may."""
        if engine == "vllm" and version and engine_versions.parse_release(version) < VLLM_SINCE:
            raise ValueError(
                f"vLLM {version} can't simulate acceptance, expected {'.'.join(map(str, VLLM_SINCE))} or later; install it (make "
                "serving-env ENGINE=vllm), or measure served cells, from which the report derives costs too"
            )

    def build_flags(self, engine: str, flags: list[str]) -> list[str]:
        """Return a server's flags of speculation with those of simulation."""
        if engine != "vllm":
            return flags
        at = flags.index(VLLM_CONFIG_FLAG) + 1
        config = json.loads(flags[at]) | {VLLM_METHOD_KEY: "synthetic", VLLM_LENGTH_KEY: self.length}
        return [*flags[:at], json.dumps(config), *flags[at + 1 :]]


def check_real(environment: Mapping[str, str], command: list[str]) -> None:
    """Raise ValueError if a server that is started with this environment and command would simulate acceptance."""
    found = [name for name in (SGLANG_VARIABLE, SGLANG_METHOD) if environment.get(name)]
    found += ["synthetic in the server's command"] if any("synthetic" in word for word in command) else []
    if found:
        raise ValueError(
            f"the server would simulate acceptance ({', '.join(found)}), expected a real one: its tau would be made up. "
            "Unset it; to measure what cycles cost, use serving_costs"
        )
