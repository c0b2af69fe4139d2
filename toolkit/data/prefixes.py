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
    """Divide samples into units of packing, each a sample and those after it that share its first tokens. Return how
    many tokens each sample shares with the one before it, 0 for the first of a unit, [samples]. `samples`: ascending;
    `capacity`: most tokens of a unit.

    Several samples of one row of the data, such as a conversation up to each of its answers, begin with the same
    tokens. Shared are those in front of the token that predicts a sample's first trained one: of [1, 2, 3, 4] and
    [1, 2, 3, 5], whose last tokens are trained, the second shares two, and computes 3 again, which predicts 5. So each
    trained token stands in its sample behind the one that predicts it, as losses expect.
    """
    shared, rows = np.zeros(len(samples), np.int64), cache.rows[cache.members[samples]]
    begins = np.flatnonzero(np.diff(rows, prepend=-1))  # of each row, in `samples`
    ends = np.append(begins, len(rows))[1:]
    has_several = ends - begins > 1  # the samples of other rows share nothing, and need not be read
    for begin, end in zip(begins[has_several].tolist(), ends[has_several].tolist(), strict=True):
        previous_ids, _ = cache[samples[begin]]
        unit_tokens = len(previous_ids)  # of the unit so far, shared ones counted once
        for index in range(begin + 1, end):
            ids, trained = cache[samples[index]]
            common = _common_prefix(previous_ids, ids, trained)
            num_added = len(ids) - common
            if common >= LEAST_SHARED and unit_tokens + num_added <= capacity:
                shared[index] = common
                unit_tokens += num_added
            else:  # it begins a unit
                unit_tokens = len(ids)
            previous_ids = ids
    return shared


def _common_prefix(before: NDArray[Any], ids: NDArray[Any], trained: NDArray[np.bool_]) -> int:
    """Return how many first tokens `ids` has in common with `before`, at most those in front of the token that
    predicts its first trained one. 0 if nothing is trained.
    """
    first_trained = int(trained.argmax())  # 0 if nothing is
    most = max(0, min(len(before), len(ids), first_trained - 1))
    is_equal = ids[:most] == before[:most]
    return most if is_equal.all() else int(is_equal.argmin())


def share_prompts(cache: store.TokenizedCache, plan: PackingPlan, cache_dir: Path) -> PackingPlan:
    """Return the plan of preference pairs with their prompts computed once: each rejected answer shares the tokens of
    its prompt with the chosen one before it. The plan is saved below `cache_dir`, or loaded from there.
    """
    members, offsets = plan.members, plan.offsets
    assert members is not None and offsets is not None
    members_hash = hashlib.sha256(members.tobytes()).hexdigest()
    key = [CODE_VERSION, cache.content, cache.split, "prompts", members_hash, list(plan.bounds)]

    def save_arrays(folder: Path) -> tuple[int, list[int]]:
        """Save the plan's arrays into `folder`; see `saved_plan`."""
        # Members are samples: chosen, rejected, chosen, …; of a pair the cache has samples i and i + 1. A pair may come
        # several times by its weight: each is read once, and `pair_of` says which of them a pair of the plan is.
        chosen, pair_of = np.unique(members[::2], return_inverse=True)
        prompt_tokens = []
        for sample in chosen.tolist():
            chosen_ids, _ = cache[sample]
            rejected_ids, rejected_trained = cache[sample + 1]
            prompt_tokens.append(_common_prefix(chosen_ids, rejected_ids, rejected_trained))
        shared = np.zeros(len(members), np.uint32)  # tokens of each member that the one before it has, too
        shared[1::2] = np.array(prompt_tokens, np.uint32)[pair_of]
        np.save(folder / "members.npy", members)
        np.save(folder / "offsets.npy", offsets)
        np.save(folder / "shared.npy", shared)
        return len(plan), list(plan.bounds)

    return saved_plan(cache_dir, key, save_arrays)


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
