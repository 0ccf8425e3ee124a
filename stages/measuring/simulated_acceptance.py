"""Acceptance that an engine simulates: each cycle yields a given number of tokens, whatever was drafted.

It tells what a cycle costs without a trained draft. Answers have no meaning then, and neither has a tau.

- SGLang: an environment variable. All requests of a batch accept the same number in a cycle, one of the two integers around the
  given one; every token is id 100, and tokens never end an answer with `ignore_eos` (0.5.17 and 0.5.23,
  speculative/spec_utils.py: generate_simulated_accept_index).
- llama.cpp: a flag, by which each draft is accepted at random, with chances that give the length (server-context.cpp).
- vLLM: two keys of --speculative-config (config/speculative.py: synthetic_acceptance_length).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

SGLANG_VARIABLE = "SGLANG_SIMULATE_ACC_LEN"
SGLANG_METHOD = "SGLANG_SIMULATE_ACC_METHOD"
VLLM_METHOD_KEY, VLLM_LENGTH_KEY = "rejection_sample_method", "synthetic_acceptance_length"
VLLM_CONFIG_FLAG = "--speculative-config"
LLAMA_CPP_FLAG = "--spec-synth-len"
# As JSON, also escaped, or as a dotted flag; elsewhere the word is a folder's name.
VLLM_SIMULATES = re.compile(VLLM_METHOD_KEY + r"""["'\\\s:=]+synthetic""")
MIN_JUDGED_CYCLES = 50  # fewer say little
MAX_DEVIATION = 0.2  # of the accept length from the one that was asked


@dataclass(frozen=True)
class SimulatedAcceptance:
    """`length` tokens a cycle on average, the bonus token included."""

    length: float

    def build_environment(self, engine: str) -> dict[str, str]:
        """Return the variables that a server is started with."""
        if engine == "sglang":
            return {SGLANG_VARIABLE: f"{self.length:g}", SGLANG_METHOD: "match-expected"}
        return {}

    def build_flags(self, engine: str, flags: list[str]) -> list[str]:
        """Return a server's flags of speculation with those of simulation."""
        if engine == "llama.cpp":
            return [*flags, LLAMA_CPP_FLAG, f"{self.length:g}"]
        if engine != "vllm":
            return flags
        index = flags.index(VLLM_CONFIG_FLAG) + 1
        config = json.loads(flags[index]) | {VLLM_METHOD_KEY: "synthetic", VLLM_LENGTH_KEY: self.length}
        return [*flags[:index], json.dumps(config), *flags[index + 1 :]]


def check_real(environment: Mapping[str, str], command: list[str]) -> None:
    """Raise ValueError if a server that is started with this environment and command would simulate acceptance."""
    found = [name for name in (SGLANG_VARIABLE, SGLANG_METHOD) if environment.get(name)]
    found += [word for word in command if word.startswith("--spec-synth-")]
    if VLLM_SIMULATES.search(" ".join(command).replace("-", "_")):
        found.append("synthetic in the server's command")
    if found:
        raise ValueError(
            f"the server would simulate acceptance ({', '.join(found)}), expected a real one: its tau would be made up. "
            "Unset it; to measure what cycles cost, use serving_costs"
        )


def check_simulated(server_name: str, length: float, cycles: int, accepted: int, num_answers: int) -> None:
    """Raise ValueError if a server's cycles did not yield `length` tokens on average: it simulates nothing, or another length.

    The last cycle of each answer may be cut, to one token at least.
    """
    if cycles < MIN_JUDGED_CYCLES:
        return
    found = 1 + accepted / cycles
    uncut = found + num_answers * (math.ceil(length) - 1) / cycles
    if found > length * (1 + MAX_DEVIATION) or uncut < length * (1 - MAX_DEVIATION):
        raise ValueError(
            f"{server_name}: {found:.2f} tokens in each of {cycles} cycles, expected {length:g} (serving_costs.accept_length): "
            "the engine's version ignores the setting (docs/cost.md), or it is of base_urls: leave it out there"
        )
