"""FLOP of training a block draft, against those that torch counts while it trains, and against a count by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stages.families.block import objective as block_training
from stages.families.block.model import BlockDraft, BlockDraftConfig
from stages.families.block.objective import BlockTrainingObjective
from stages.params.families import BLOCKS
from stages.reproduce.block_flop import BlockCounts, count_block_flop
from stages.training.packed_rows import PackIndex

pytestmark = pytest.mark.usefixtures("one_thread")


SIZES = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}


def config(method: str, **sizes: int) -> BlockDraftConfig:
    shape = {
        "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 12, "vocab_size": 300, "block_size": 4,
    } | sizes  # fmt: skip
    return BlockDraftConfig(
        **shape, max_position_embeddings=4096, rms_norm_eps=1e-6, rope={"rope_theta": 1e4, "rope_type": "default"},
        method=method, mask_token_id=0, feature_layers=(1, 2, 3, 4, 5), confidence_head=method == "dspark",
        **(SIZES if method == "dflash2" else {}),
    )  # fmt: skip


@pytest.mark.parametrize(("method", "rank"), [("dflash", 0), ("dflash2", 0), ("dspark", 6)])
def test_the_count_is_what_torch_counts(method: str, rank: int) -> None:
    c = config(method, markov_rank=rank)
    draft, objective = BlockDraft(c), BlockTrainingObjective(c.num_drafts, 9, 1, BLOCKS[method].loss)
    draw = torch.Generator().manual_seed(0)
    rows = [
        SimpleNamespace(
            ids=torch.randint(300, (n,), generator=draw), features=torch.randn(n, 5 * 32, generator=draw),
            last=torch.randn(n, 32, generator=draw), mask=torch.arange(n) >= 5,
        )
        for n in (40, 25)
    ]  # fmt: skip
    pack = objective.build_pack(rows, PackIndex(0, 0, 0), pinned=False)
    embedding, head = torch.randn(2, 300, 32, generator=draw)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        counts = torch.tensor(pack.supervised_per_step)
        block_training.compute_loss(draft, pack, embedding, head, objective, counts).total_loss.backward()
    num_rows, drafts = 9 * 4, sum(pack.supervised_per_step)
    assert len(pack.anchors) == 9 and 0 < drafts < 9 * c.num_drafts
    work = BlockCounts(65, 9, drafts, num_rows * (65 + num_rows))  # a dense mask computes every pair
    found = count_block_flop(c, reads_target=method == "dspark").dot(work)
    # torch counts no product with a vector, which the confidence head is
    assert counter.get_total_flops() == pytest.approx(found, rel=0.002)


def test_qwen3_8b_by_hand() -> None:
    """Weights by the count of the published draft: 964.7M of layers, 83.9M of fc, of which k and v 41.9M."""
    sizes = {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 5, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }  # fmt: skip
    dflash = count_block_flop(config("dflash", **sizes, block_size=16), reads_target=False)
    dspark = count_block_flop(config("dspark", **sizes, block_size=7, markov_rank=256), reads_target=True)
    assert dflash.tokens == dspark.tokens == pytest.approx(4 * 83.886e6 + 6 * 41.943e6, rel=1e-4)
    assert dflash.blocks / 16 == dspark.blocks / 7 == pytest.approx(6 * 964.69e6, rel=1e-4)
    assert dflash.drafts == 4 * 151936 * 4096
    assert dspark.drafts == 6 * 151936 * 4096 + 6 * 151936 * 256 + 6 * (4096 + 256)
    assert dflash.pairs == 5 * 12 * 32 * 128
