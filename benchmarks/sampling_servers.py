"""Sample the embedded target through real servers on GPUs, and compare with the transformers backend.

    python3 -m benchmarks.sampling_servers FOLDER [--engine sglang] [--launch-args "..."] [--parts ...]

FOLDER becomes a copy of the project. The engine is that of serving-env, as for a user. What is compared, in results/ of FOLDER
and on the terminal:

- temperature 0 (the eval split): the share of answers that are the transformers backend's to the token, by dtype;
- temperature 0.7: a paired permutation test of the tokens' frequencies, training answers of both backends to the same prompts;
- tokens/s of the stage beside the engine's own benchmark client, on the same running server, with as many requests in flight;
- a server that is killed in the middle: every row once, and the same eval answers;
- two GPUs: a server on each (part two), and one server over both (part tp).
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil
from ruamel.yaml import YAML

from pipeline.recipes import use_recipe

ROOT = Path(__file__).parent.parent
COPIED = ("data", "dvc.yaml", "params.yaml", "pipeline", "published", "recipes", "stages", "templates", "draft_configs")
MAX_NEW_TOKENS, PERMUTATIONS = 200, 2000
_SGLANG = "--dataset-name random-ids --random-range-ratio 1.0 --output-file /tmp/client.jsonl --backend"
_VLLM = "--dataset-name random --ignore-eos --backend"
_VLLM_CHAT = "openai-chat --endpoint /v1/chat/completions"
_SEEDED = '--extra-request-body \'{"temperature": 0.7, "seed": 1}\''
_SEEDED_VLLM = "--temperature 0.7 --extra-body '{\"seed\": 1}'"
# Prompts and answers of the stage as ShareGPT, whose lengths the client takes over.
REQUESTS = Path("/tmp/client_requests.json")
_SHAREGPT = f"--dataset-name sharegpt --dataset-path {REQUESTS} --backend"
# The client's default endpoint; the one that the stage uses; that with the stage's sampling, temperature 0.7 and a seed; and that
# with the lengths of the stage's prompts and answers too, where the others have one length, its mean.
CLIENT_FLAGS = {
    "sglang": {
        "native, greedy": f"{_SGLANG} sglang",
        "chat, greedy": f"{_SGLANG} sglang-oai-chat",
        "chat, 0.7, seeded": f"{_SGLANG} sglang-oai-chat {_SEEDED}",
        "chat, 0.7, seeded, the stage's lengths": f"{_SHAREGPT} sglang-oai-chat --output-file /tmp/client.jsonl {_SEEDED}",
    },
    "vllm": {
        "native, greedy": f"{_VLLM} vllm --temperature 0",
        "chat, greedy": f"{_VLLM} {_VLLM_CHAT} --temperature 0",
        "chat, 0.7, seeded": f"{_VLLM} {_VLLM_CHAT} {_SEEDED_VLLM}",
        "chat, 0.7, seeded, the stage's lengths": f"{_SHAREGPT} {_VLLM_CHAT} --ignore-eos {_SEEDED_VLLM}",
    },
}


def main() -> None:
    told = parse_words()
    make_project(told.folder, told.given)
    os.chdir(told.folder)
    if told.recipe:
        use_recipe(told.recipe)
    if {"kill", "two", "tp"} & set(told.parts) and "compare" not in told.parts:
        raise SystemExit("parts kill, two and tp compare with the answers of part compare; add it")
    settings: dict[str, Any] = {"launch": told.engine, "launch_args": shlex.split(told.launch_args)}
    found: dict[str, Any] = {"engine": told.engine, "launch_args": told.launch_args}
    set_params(told, dtype=told.dtypes[0], backend="transformers", server={})
    if not Path("data/fixed").exists():  # of the project that was copied
        run_stage("fix_data")
    if not Path("artifacts/target").exists():
        found["prepare_target_s"] = run_stage("prepare_target")
    expected: dict[str, dict[str, pl.DataFrame]] = {}
    first: dict[str, pl.DataFrame] = {}
    for dtype in told.dtypes if "compare" in told.parts else ():
        set_params(told, dtype=dtype, backend="transformers", server={})
        found[f"{dtype}_transformers_s"] = run_stage("sample_target")
        expected[dtype] = read_answers()
        set_params(told, dtype=dtype, backend="server", server=settings)
        with one_gpu():
            found[f"{dtype}_server_s"] = run_stage("sample_target")
        first = read_answers()  # of the last dtype, for parts kill, two and tp
        found[dtype] = compare(expected[dtype], first)
        report(found)
    dtype = told.dtypes[-1]
    if "kill" in told.parts:
        set_params(told, dtype=dtype, backend="server", server=settings)
        with one_gpu():
            found["killed"] = count_after_kill(told.engine, first)
        report(found)
    if "speed" in told.parts:
        with one_gpu():
            measure_speed(told, settings, dtype, found)
    if "two" in told.parts:
        set_params(told, dtype=dtype, backend="server", server=settings)
        found["two_servers_s"] = run_stage("sample_target")
        logs = sorted(Path(".scratch").glob(f"{told.engine}_server_*.log"))
        found["two_servers"] = compare(first, read_answers()) | {"logs": len(logs)}
        report(found)
    if "tp" in told.parts:
        parallel = [*settings["launch_args"], "--tensor-parallel-size", "2"]
        set_params(told, dtype=dtype, backend="server", server=settings | {"launch_args": parallel})
        found["tensor_parallel_s"] = run_stage("sample_target")
        found["tensor_parallel"] = compare(first, read_answers())
        report(found)


def parse_words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", default="sglang")
    parser.add_argument("--launch-args", default="")
    parser.add_argument("--recipe", help="another embedded target, as weather-tiny-moe")
    parser.add_argument("--given", type=Path, help="a project whose data and target are taken, instead of made")
    parser.add_argument("--train-rows", type=int, help="default: all rows of the data, about 2,000")
    parser.add_argument("--seed", type=int, default=11, help="of sample_target")
    parser.add_argument("--rounds", type=int, default=3, help="of part speed")
    parser.add_argument("--clients", nargs="+", help="of CLIENT_FLAGS; default: all of the engine")
    parser.add_argument("--parts", nargs="*", default=["compare", "kill", "speed", "two"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], help="SGLang's norms take no float32")
    return parser.parse_args()


def make_project(folder: Path, given: Path | None) -> None:
    folder.mkdir(parents=True)
    given = given and given.resolve()
    for name in COPIED:
        source = ROOT / name
        shutil.copytree(source, folder / name) if source.is_dir() else shutil.copy(source, folder)
    for name in ("data/fixed", "data/targets", "artifacts"):
        if given and (given / name).exists():
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(given / name, folder / name)
    if (ROOT / "serving-env").exists():
        (folder / "serving-env").symlink_to(ROOT / "serving-env")


def set_params(told: argparse.Namespace, dtype: str, backend: str, server: dict[str, Any]) -> None:
    yaml, path = YAML(typ="safe"), Path("params.yaml")  # without comments: ruamel puts them inside lists that grow
    params = yaml.load(path)
    params["target"] |= {"device": "cuda", "dtype": dtype}
    section = params["sample_target"]
    section |= {
        "backend": backend,
        "train_rows": told.train_rows,
        "seed": told.seed,
        "eval_rows": None,
        "batch_size": 256,
    }
    section |= {"max_new_tokens": MAX_NEW_TOKENS}
    section["server"] |= {"launch": None, "launch_args": [], "base_urls": []} | server
    with path.open("w") as file:
        yaml.dump(params, file)


class one_gpu:
    """Only the first GPU is visible inside the block."""

    def __enter__(self) -> None:
        self.before = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = (self.before or "0").split(",")[0]

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.before


def run_stage(name: str, beside: Callable[[subprocess.Popen[bytes]], None] | None = None) -> float:
    """Run a stage and return its seconds, imports included; `beside` runs in a thread and gets the process."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", f"stages.{name}"], env={**os.environ, "PYTHONPATH": join_path()})
    if beside:
        threading.Thread(target=beside, args=(process,), daemon=True).start()
    if process.wait():
        for log in sorted(Path(".scratch").glob("*_server*.log")):
            print(log, "\n".join(log.read_text(errors="replace").splitlines()[-40:]), sep="\n", flush=True)
        raise SystemExit(f"stages.{name} ended with status {process.returncode}")
    return round(time.perf_counter() - begun, 2)


def join_path() -> str:
    return os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])


def read_answers() -> dict[str, pl.DataFrame]:
    return {
        split: pl.read_parquet(f"data/sampled/{split}/*.parquet").sort("id") for split in ("train", "eval", "eval_t")
    }


def compare(expected: dict[str, pl.DataFrame], found: dict[str, pl.DataFrame]) -> dict[str, Any]:
    """Return shares of equal eval answers, and the permutation test's p of each split above temperature 0."""
    result: dict[str, Any] = {}
    for split, table in expected.items():
        both = table.join(found[split], on="id", how="inner", suffix="_found")
        same = (both["answer_ids"] == both["answer_ids_found"]).mean()
        assert both["id"].is_unique().all() and found[split]["id"].is_unique().all()
        row = {"rows": len(table), "found": len(found[split]), "in_both": len(both), "identical": same}
        row["prompts_identical"] = (both["prompt_ids"] == both["prompt_ids_found"]).mean()
        row["tokens"] = [int(both[name].list.len().sum()) for name in ("answer_ids", "answer_ids_found")]
        if split != "eval":
            row["p"] = permute_pairs(both["answer_ids"].to_list(), both["answer_ids_found"].to_list())
        result[split] = row
    return result


def permute_pairs(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the p of: the two answers of a prompt are exchangeable. The statistic is the distance of token frequencies."""
    size = 1 + max(map(max, filter(None, [*ours, *theirs])))
    counts = [np.array([np.bincount(row, minlength=size) for row in side], float) for side in (ours, theirs)]
    difference = counts[0] - counts[1]
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(PERMUTATIONS, len(ours)))
    drawn = np.abs(signs @ difference).sum(1)
    return float((1 + (drawn >= np.abs(difference.sum(0)).sum()).sum()) / (1 + PERMUTATIONS))


def count_after_kill(engine: str, whole: dict[str, pl.DataFrame]) -> dict[str, Any]:
    """Kill the server with its children once a third of the training answers are there."""
    killed: list[int] = []

    def kill(stage: subprocess.Popen[bytes]) -> None:
        while stage.poll() is None and not killed:
            time.sleep(0.05)
            journals = Path(".scratch").glob("sample_target-*/train/**/*")
            if sum(file.stat().st_size for file in journals if file.is_file()) < 100_000:
                continue
            for child in psutil.Process(stage.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # also one that has just ended with its parent
                    words = " ".join(child.cmdline())
                    if any(word in words for word in ("launch_server", f"{engine}::", f"{engine} serve")):
                        child.kill()
                        killed.append(child.pid)

    seconds = run_stage("sample_target", kill)
    report = json.loads(Path("results/sample_report.json").read_text())
    kept = {key: report[key] for key in ("rows_in", "rows_out", "asked_again", "server_restarts")}
    return {"seconds": seconds, "killed": len(killed), **kept, **compare(whole, read_answers())}


def measure_speed(told: argparse.Namespace, settings: dict[str, Any], dtype: str, found: dict[str, Any]) -> None:
    """Add output tokens/s of the stage and of the engine's own client, in turns, on one running server."""
    from stages.serving.replicas import plan_replicas
    from stages.target import manifest

    folder = str(manifest.resolve_weights_folder(manifest.read_manifest()))
    target = folder, dtype, "cuda", False
    rows: dict[str, Any] = {"stage": [], "client": {}}
    found["speed"] = rows
    with plan_replicas(told.engine, *target, settings["launch_args"], 600.0, Path(".scratch"), None) as running:
        (url,) = running.base_urls
        set_params(told, dtype, "server", {"base_urls": [url], "model": folder})
        for _ in range(told.rounds):
            run_stage("sample_target")
            seconds = json.loads(Path("results/sample_report.json").read_text())["seconds"]
            tables = read_answers()
            tokens = sum(int(table["answer_ids"].list.len().sum()) for table in tables.values())
            rows["stage"].append([tokens, seconds, round(tokens / seconds)])  # the whole stage, three splits
            answers = pl.concat([table.select("prompt_ids", "answer_ids") for table in tables.values()])
            sizes = [round(answers[name].list.len().mean()) for name in ("prompt_ids", "answer_ids")]
            write_requests(answers, folder)
            for variant in told.clients or CLIENT_FLAGS[told.engine]:
                found_rate = run_client(told.engine, variant, url, folder, len(answers), *sizes)
                rows["client"].setdefault(variant, []).append(found_rate)
            report(found)


def write_requests(answers: pl.DataFrame, folder: str) -> None:
    """Write the answers as ShareGPT conversations for the engine's client, which tokenizes both turns again."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.batch_decode(answers[name].to_list(), skip_special_tokens=True) for name in answers.columns]
    turns = [
        [{"from": "human", "value": asked}, {"from": "gpt", "value": said}] for asked, said in zip(*texts, strict=True)
    ]
    REQUESTS.write_text(json.dumps([{"id": str(number), "conversations": pair} for number, pair in enumerate(turns)]))


def run_client(engine: str, variant: str, url: str, folder: str, count: int, prompt: int, answer: int) -> str:
    """Return the throughput that the engine's own client reads; ENGINE_CLIENT names another command for it."""
    words: dict[str, object] = {
        "--base-url": url, "--model": folder, "--num-prompts": count, "--random-input-len": prompt,
        "--random-output-len": answer, "--max-concurrency": 64, "--seed": 1,
    }  # fmt: skip
    own = {
        "sglang": "serving-env/sglang/bin/python -m sglang.benchmark.serving",
        "vllm": "serving-env/vllm/bin/vllm bench serve",
    }[engine]
    command = f"{os.environ.get('ENGINE_CLIENT', own)} {shlex.join(word for pair in words.items() for word in map(str, pair))}"
    done = subprocess.run(f"{command} {CLIENT_FLAGS[engine][variant]}", shell=True, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "throughput (" in line or "duration (" in line]
    return "; ".join(" ".join(line.split()) for line in lines) or (done.stderr or done.stdout)[-1500:]


def report(found: dict[str, Any]) -> None:
    """Write what was found so far, since the machine may be taken away."""
    text = json.dumps(found, indent=1)
    path = Path(os.environ.get("OUT", "results")) / "sampling_servers.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text, flush=True)


if __name__ == "__main__":
    main()
