"""Write docs/recipes.md: what recipes are, and what each takes.   python -m benchmarks.recipes_page

tests/reproduce/test_estimate.py compares the committed page with what this writes.
"""

from pathlib import Path

from pipeline import recipes
from stages.params import schema
from stages.params.recipe import RECIPES_FOLDER
from stages.params.units import format_bytes
from stages.reproduce import estimate
from stages.reproduce.target_size import format_count, read_target_size

PAGE = Path("docs/recipes.md")
HEAD = """# Recipes

This page is for reproducing a published experiment, starting a run of a known size, and estimating what it takes.

<!-- Written by: python -m benchmarks.recipes_page. Edit recipes/ or that file. -->

    aerie use RECIPE                    # params.yaml as committed, with its keys; --keep keeps local edits
    aerie estimate RECIPE               # time, disk and GPU-hours of each stage, and the arithmetic
    aerie fetch RECIPE                  # the files and prompt sets that it needs, from the places that it names (`files`)
    aerie reproduce RECIPE --dry-run    # what it needs of this machine, stages, sizes, disk, hours; changes and runs nothing, needs no GPU
    aerie reproduce RECIPE              # use it, bring the graph up to date, compare with what was published
    aerie reproduce RECIPE --compare    # only compare: a cell that does not exist is `not run`

A recipe is a file of `recipes/` with the keys of `params.yaml` that differ, each with the source of its value. In nested
sections (`server`) it sets single keys; mappings whose keys you name yourself (`workloads`, `checkpoints`, `sets`) it replaces.
So `use` and `reproduce` first copy `params.yaml` to `params.yaml.before-RECIPE`, which git ignores, or to `...-2` where that file
holds something else: no copy is ever overwritten. To return: `cp params.yaml.before-RECIPE params.yaml`. Drafts and cells of
checkpoints that a recipe leaves out are restored from DVC's cache.

The block `recipe` describes what is reproduced (`stages/params/recipe.py`):

| key | what |
|---|---|
| `status` | `ran on DATE, where the results are`, or `validated only`: the graph resolves, sizes are computed, nothing was run |
| `pins` | engines and packages, with the version to reproduce with |
| `substitutes` | what replaces a target, a draft or data that is not available; such numbers are never compared |
| `notes` | other differences |
| `where_installed` | by engine, keys for machines that have it |
| `train_rows`, `row_tokens` | for the estimate: training rows where `sample_target.train_rows` is null, mean tokens of a row |
| `tolerance` | for a metric, the relative difference that two correct runs may have |
| `beside` | rows of `published/`, the cells to compare them with, assumptions for unstated settings, and which of our measures has their definition |

`measures` names those of `MEASURES` in `stages/published/comparison.py`.

## The table

`results/reproduce/RECIPE.md` and `.csv`: published number, ours, ratio, tolerance, verdict. Numbers of the same target without a
cell are counted by reason at the end.

- **Tolerance**: half of the last decimal printed, half of our 95% interval (docs/metrics.md, "Intervals": of accept
  lengths and rates over prompts, of times over repeats; the table explains where one is missing), and the recipe's share of the
  published number. **within** and **outside**: the two differ by less or by more.
- **consistent**: the numbers can't be compared, the tables can. Of one metric and draft, over at least five trees, the rank correlation
  (Spearman's) of the published numbers and ours is 0.8 or more, and each difference of two trees that lies outside our intervals has the
  published sign. The row's note has both counts, also where they do not suffice.
- **within, if METRIC means ...**: the publication doesn't define the metric, and the recipe's `assumed_definitions` names the measure of ours
  that it is taken to be. Without one the number is not comparable.
- **not comparable**, with the reason and what would make it comparable: the metric's definition is not stated or is another; the temperature is not stated; the
  target, draft or data is a substitute, or the target has another name; the engine can't run it; and for all but accept lengths
  and rates, machine, engine or version differ or are not stated. The ratio is shown all the same.
- **not run**: the cell does not exist.
- Unstated settings for which the recipe makes an assumption (a tool's default) are named in each row they concern.

## What each takes

`aerie estimate RECIPE` prints this for each stage, with the arithmetic; `aerie estimate` for params.yaml as it is.

Sizes follow from recorded configs (`recipes/targets/`, each names its source; no target is downloaded). Parameters are counted on
the meta device. The draft's shape is inferred as `init_draft` does. **All hours below are arithmetic**, from rates measured on an H200:

| stage | rate | measured |
|---|---|---|
| `extract_hiddens` | 43.4% of 989 TFLOP/s, compiled 55.9%; at most 1.95 GB/s to the disk | [training](results/2026-11-21-h200-training.md) |
| `train_draft` | 57% of 989 TFLOP/s; online also the target's forward, as above | the same |
| `train_draft`, block drafts | DFlash 54.0%, DFlash2 46.6%, DSpark 46.1% of 989 TFLOP/s, every pack full and every block whole | [block drafts](results/2026-11-25-h200-two-gpus.md) |
| `benchmark` | weights and KV cache at 3.31 TB/s: 4.57 ms a step, 0.127 ms a layer, at Qwen3-8B's shape | [torch engine](results/2026-11-22-h200-one-engine.md) |
| `sample_target`, transformers | 0.70 ms a layer and step, whatever the batch: that of EAGLE's engine, which runs transformers' modules | [the table of one prompt](results/2026-11-22-h200-engine.md) |
| `sample_target`, servers; `benchmark_served` | weights and KV cache at 2.90 TB/s: 5.22 ms a step at that shape | [decoding](results/2026-11-20-h200-decoding.md) |

Several GPUs use 96% of their time, as two do in training; four use
[96.8% and 95.5%](results/2026-11-27-h200-four-gpus.md), more were not measured. `--gpu h100` scales
decoding to an H100's 3.35 TB/s. Answers count at their length limit, and speculative decoding as plain. Mixtures of experts
were not measured at size: a step is assumed to read the experts that all tokens in flight can meet. A stage without a time
takes seconds to minutes on the embedded target; at other sizes it was not measured.

"""  # noqa: E501


def render_page() -> str:
    """Return the page. Run it in the project's root, with params.yaml as committed."""
    head = ("recipe", "published", "status", "target", "KV a token", "draft", "disk", "download", "GPU-hours")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for path in sorted(RECIPES_FOLDER.glob("*.yaml")):
        recipe, _ = schema.read_recipe(path)
        assert recipe, path
        with recipes.merge_recipe(path.stem, anywhere=True) as (file, _):
            p = schema.load_params(file)
        target, result = read_target_size(p), estimate.estimate_run(p, recipe.train_rows, recipe.row_tokens)
        draft = sum(estimate.count_draft_parameters(estimate.init_draft.infer_config(p, target.manifest)).values())
        cells = (
            f"`{path.stem}`", ", ".join(dict.fromkeys(f"`{match.publication}`" for match in recipe.beside)) or "ours",
            recipe.status.partition(",")[0], format_count(target.parameters), f"{target.kv_bytes(p.target.dtype):,} B",
            format_count(draft), format_bytes(result.disk_bytes), format_bytes(result.download_bytes),
            f"{result.gpu_hours:.2g}" if result.gpu_hours else "none",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
