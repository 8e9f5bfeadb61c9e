from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backfill.blending.waiting import Waiting
from tests.blending.builders import as_bytes, num_shared, prompts, sorted_prompts


@given(st.lists(prompts, min_size=1, max_size=30), st.data())
def test_the_longest_shared_prefix_is_found_among_those_that_wait(
    token_ids: list[list[int]], data: st.DataObject
) -> None:
    sorted_ = sorted_prompts(token_ids)
    flags = data.draw(st.lists(st.booleans(), min_size=len(sorted_), max_size=len(sorted_)))
    waiting = Waiting(sorted_, np.array(flags))
    left = {index for index, waits in enumerate(flags) if waits}
    for index in data.draw(st.permutations(sorted(left))):
        waiting.remove(index)
        left.remove(index)
        assert waiting.count == len(left)
        assert set(np.flatnonzero(waiting.mask)) == left == {i for i in range(len(sorted_)) if i in waiting}
        for prompt in (sorted_[index], as_bytes(data.draw(prompts))):
            expected = max((num_shared(prompt, sorted_[other]) for other in left), default=0)
            assert waiting.longest_shared(prompt) == expected
