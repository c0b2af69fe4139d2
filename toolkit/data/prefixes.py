"""Samples of a sequence that share what they begin with: found here, and computed once."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.config.schema import RunConfig
from toolkit.data import store
from toolkit.data.packing import CODE_VERSION, LEAST_SHARED, saved_plan
from toolkit.data.plans import PackingPlan
from toolkit.messages import tr


def shared_prefixes(cache: store.TokenizedCache, samples: NDArray[Any], capacity: int) -> NDArray[np.int64]:
    """Return how many of each sample's first tokens need not be computed again after the sample before it, 0 where a
    unit of packing begins, [samples]. `samples`: ascending; `capacity`: most tokens of a unit.

    Several samples of one row of the data, such as a conversation up to each of its answers, begin with the same
    tokens. Shared are those in front of the token that predicts a sample's first trained one: of [1, 2, 3, 4] and
    [1, 2, 3, 5], whose last tokens are trained, the second shares two, and computes 3 again, which predicts 5. So each
    trained token stands in its sample behind the one that predicts it, as losses expect. (Fewer than LEAST_SHARED
    tokens are not shared.)
    """
    shared, rows = np.zeros(len(samples), np.int64), cache.rows[cache.members[samples]]
    has_row_of_previous = np.flatnonzero(rows[1:] == rows[:-1]) + 1
    unit_tokens = 0  # of the unit so far, shared ones once
    ids, ids_index = np.empty(0, cache.dtype), -1  # of the sample that was read last, and its index in `samples`
    for index in has_row_of_previous.tolist():
        if ids_index == index - 1:
            previous_ids = ids
        else:  # the previous sample is the first of its row, and begins a unit
            previous_ids, _ = cache[samples[index - 1]]
            unit_tokens = len(previous_ids)
        ids, trained = cache[samples[index]]
        ids_index = index
        common = _common_prefix(previous_ids, ids, trained)
        num_added = len(ids) - common
        if common >= LEAST_SHARED and unit_tokens + num_added <= capacity:
            shared[index] = common
            unit_tokens += num_added
        else:  # it begins a unit
            unit_tokens = len(ids)
    return shared


def _common_prefix(before: NDArray[Any], ids: NDArray[Any], trained: NDArray[np.bool_]) -> int:
    """Return how many first tokens `ids` has in common with `before`, at most those in front of the token that
    predicts its first trained one, which is computed in each sample as its loss is. 0 if nothing is trained.
    """
    first_trained = int(trained.argmax())  # 0 if nothing is
    most = max(0, min(len(before), len(ids), first_trained - 1))
    is_equal = ids[:most] == before[:most]
    return most if is_equal.all() else int(is_equal.argmin())


def share_prompts(cache: store.TokenizedCache, plan: PackingPlan, cache_dir: Path) -> PackingPlan:
    """Return a plan of preference pairs in which the prompt that both answers share is computed once; saved, too."""
    members, offsets = plan.members, plan.offsets
    assert members is not None and offsets is not None
    members_hash = hashlib.sha256(members.tobytes()).hexdigest()
    key = [CODE_VERSION, cache.content, cache.split, "prompts", members_hash, list(plan.bounds)]

    def build(folder: Path) -> tuple[int, list[int]]:
        # Members are numbers of samples: preferred, rejected, preferred, …; in the cache a rejected one follows its
        # preferred one. Weights may take a pair several times: `pair_of` is the place in `preferred` of each pair.
        preferred, pair_of = np.unique(members[::2], return_inverse=True)
        prompt_tokens = []
        for sample in preferred.tolist():
            preferred_ids, _ = cache[sample]
            rejected_ids, rejected_trained = cache[sample + 1]
            prompt_tokens.append(_common_prefix(preferred_ids, rejected_ids, rejected_trained))
        # How many first tokens of a member are taken from the member before it: those of a rejected answer's prompt.
        shared = np.zeros(len(members), np.uint32)
        shared[1::2] = np.array(prompt_tokens, np.uint32)[pair_of]
        np.save(folder / "members.npy", members)
        np.save(folder / "offsets.npy", offsets)
        np.save(folder / "shared.npy", shared)
        return len(plan), list(plan.bounds)

    return saved_plan(cache_dir, key, build)


def sharing_line(cfg: RunConfig, cache: store.TokenizedCache, plan: PackingPlan) -> str:
    """Return a sentence on how many tokens of an epoch are saved by the prefixes that samples of a plan share."""
    computed = int(plan.lengths(cache).sum())
    values = {
        "computed": f"{computed:,}",
        "tokens": f"{computed + plan.num_shared:,}",
        "times": f"{1 + plan.num_shared / computed:.2f}",
    }
    if cfg.preference.is_paired:
        return tr(
            "The two answers of a pair share their prompt: {computed} tokens are computed instead of {tokens}, {times} "
            "times fewer (data.share_prefixes).",
            **values,
        )
    return tr(
        "Samples of one conversation share their common prefix: {computed} tokens are computed instead of {tokens}, "
        "{times} times fewer (data.share_prefixes).",
        **values,
    )
