"""docs/recipes.md: what recipes are, and what each would take.   python -m benchmarks.recipes_page

tests/reproduce/test_estimate.py compares the committed page with what this writes.
"""

from pathlib import Path

from pipeline import recipes
from stages.params import schema
from stages.params.recipe import RECIPES_FOLDER
from stages.reproduce import estimate

PAGE = Path("docs/recipes.md")
HEAD = """# Recipes

<!-- Written by: python -m benchmarks.recipes_page. Edit recipes/ or that file. -->

    python -m pipeline use RECIPE                    # its keys go into params.yaml; comments and other keys stay
    python -m pipeline reproduce RECIPE --dry-run    # stages, sizes, disk, hours; changes and runs nothing, needs no GPU
    python -m pipeline reproduce RECIPE              # use it, bring the graph up to date, lay results beside what was published
    python -m pipeline reproduce RECIPE --compare    # only the last: what isn't there is `not run`

A recipe is a file of `recipes/` with the keys of `params.yaml` that differ, each with where its value comes from. Of a section
within a section (`server`) single keys are set; what you name yourself (`workloads`, `checkpoints`, `sets`) is replaced. So
`use` and `reproduce` first copy `params.yaml` to `params.yaml.before-RECIPE`, which git ignores, or to `...-2` where a copy of
something else is there: no copy is ever overwritten. To return: `cp params.yaml.before-RECIPE params.yaml`. Drafts and cells of
checkpoints that a recipe left out come back from DVC's cache.

Its block `recipe` says what it reproduces (`stages/params/recipe.py`):

| key | what |
|---|---|
| `status` | `ran on DATE, where the results are`, or `validated only`: the graph resolves and sizes are known, nothing was run |
| `pins` | engines and packages, with the version to reproduce with |
| `substitutes` | what stands in for a target, a draft or data that isn't to be had; such numbers are never compared |
| `notes` | what differs otherwise |
| `train_rows`, `row_tokens` | for the estimate: training rows where `sample_target.train_rows` is null, mean tokens of a row |
| `tolerance` | of a metric, the share that two right runs may differ by |
| `beside` | rows of `published/`, our cells for them, what unstated settings are taken for, which measure is defined as theirs |

`measures` names those of `MEASURES` in `stages/literature/comparison.py`.

## The table

`results/reproduce/RECIPE.md` and `.csv`: published number, ours, ratio, tolerance, verdict. Numbers of the same target that no
cell of ours can have are counted by reason at the end, so that none is lost.

- **Tolerance**: half of the last decimal printed, half of our 95% interval (docs/metrics.md, "Intervals": accept
  lengths and rates over prompts, times over repeats; where there is none the table says why), and the recipe's share of their
  number. **within** and **outside** say whether the two differ by less or more.
- **not comparable**, always with the reason: the metric's definition isn't stated or is another; the temperature isn't; a target,
  a draft or data stands in, or the target has another name; the engine can't run it; and for all but accept lengths and rates
  another machine, engine or version, or one that nobody stated. The ratio is shown all the same.
- **not run**: the cell isn't there.
- Settings that nobody stated and the recipe takes for something (a tool's default) are named in each row they concern.

## What each takes

Sizes follow from recorded configs (`recipes/targets/`, each says from where; none was downloaded here), parameters are counted
on a model without memory, the draft's shape is inferred as `init_draft` does. Hours are an H200's: extraction at 43.4% of its
989 TFLOP/s, training at 57%, online 59.1% ([training](results/2026-11-21-h200-training.md)); the torch engine at 1.19 ms a layer
and token, since it waits for Python ([a small target](results/2026-11-21-h200-weather-tiny.md)); servers by the bytes of a step
at 2.99 TB/s ([decoding](results/2026-11-20-h200-decoding.md)). Answers count as long as they may get, and speculative decoding
as plain. `--dry-run` prints the arithmetic. Mixtures of experts were not measured: a served step is taken to read what as many
tokens as are under way may meet.

"""


def page() -> str:
    """Written from the project's root, from params.yaml as it is committed."""
    head = ("recipe", "published", "status", "target", "KV a token", "draft", "disk", "download", "GPU-hours")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for path in sorted(RECIPES_FOLDER.glob("*.yaml")):
        about, _ = schema.read_recipe(path)
        assert about, path
        with recipes.merge_recipe(path.stem) as (file, _):
            p = schema.load_params(file)
        shape, found = estimate.read_target_size(p), estimate.estimate_recipe(p, about)
        draft = sum(estimate.count_draft_parameters(estimate.init_draft.infer_config(p, shape.made)).values())
        cells = (
            f"`{path.stem}`", ", ".join(dict.fromkeys(f"`{match.publication}`" for match in about.beside)) or "ours",
            about.status.partition(",")[0], estimate.format_count(shape.parameters), f"{shape.kv_bytes(p.target.dtype):,} B",
            estimate.format_count(draft), f"{found.disk_bytes / 2**30:.1f} GiB", f"{found.download_bytes / 2**30:.1f} GiB",
            f"{found.gpu_hours:.2g}" if found.gpu_hours else "none",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
